# SPDX-License-Identifier: Apache-2.0
"""MORI-IO over RDMA, on host memory; on the GPU memory of AMD machines over RDMA and xGMI, which has not been run.

A network card writes whether or not the process that owns the memory runs, and what it has taken from a dead process
nobody can see: nothing is ever proven of it.  The engine's own notifications may be miscounted when their ring
wraps, so they are off and ours go over `backends.base.control` after the bytes are acknowledged.  Its completion
thread spins on a core from the first connection on.
"""

import ctypes
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from backends.base.control import PeerLine
from backends.base.device import RealBuffer
from backends.base.endpoint import RealEndpoint
from backends.base.processes import prepare
from backends.base.transfers import Entry, PeerState, PostedTransfer, PostingThreads
from backends.capabilities import EngineLibrary, Variant
from backends.diagnosis import rdma_devices
from pdsim.core.errors import BackendUnavailable, ConfigError, PeerLost, RegistrationError, TransferFailed

TRANSPORTS = {"rdma": ("RDMA",), "xgmi": ("XGMI",), "rdma+xgmi": ("RDMA", "XGMI")}  # xGMI wherever it reaches
QUEUE_PAIRS, WORKERS = 4, 4
"""Of a transfer, and the threads that post to them: SGLang's defaults.  ``MORI_IO_QP_PER_TRANSFER`` and
``MORI_IO_NUM_WORKER_THREADS`` replace them."""
CHUNK = 4 << 20
"""Bytes of a message: far above a page, and below what any port carries (soft-RoCE: 8 MiB).  Neighbouring blocks are
joined to messages of up to 4 GiB, and one beyond what the port carries is refused unless the engine may cut it."""
BEAT = 0.02  # seconds between two looks at transfers to lost peers, and at the engine's list of failures

MORI = EngineLibrary(
    "from backends.engines.mori import missing; (lacking := '; '.join(missing())) and exit(lacking); import mori.io",
    ("amd-mori", "amd-mori-nightly"),
    "pip install 'pdsim[mori]' on a machine with Python 3.12, glibc >= 2.38, ROCm 7 and an RDMA device",
)
_OVER_RDMA = Variant(
    backend="mori",
    requires=MORI,  # whose probe looks for the RDMA device, too
    one_sided=True,
    posting_threads=True,
    proves_quiescence=False,  # what lies in the queues of network cards nobody can see
    guest="backends.emulation.guest.mori:RECIPE",
)


class _Pair(NamedTuple):
    peer: PeerState
    near: int  # the engine's numbers of the two regions' memory
    far: int


class _Remote(NamedTuple):
    key: str  # of the peer's engine
    memories: dict[str, Any]  # the engine's descriptions of its regions' memory


class MoriEndpoint(RealEndpoint):
    """An `Endpoint` on ``mori.io.IOEngine``, whose statuses the clock polls as a `Source`.

    Options of the engine beside environment variables: ``transport``, one of `TRANSPORTS`.

    `post` queues a transfer for the thread of its peer, since posting blocks while a send queue is full; *posting*
    says otherwise.  To make a session of two regions the engine asks the peer's over TCP and holds Python's lock
    meanwhile, for five seconds at most (``MORI_IO_CP_TIMEOUT_MS``), so it is kept.  The status of a transfer that
    failed is kept, too: the engine may still write to it.
    """

    kind = "mori"
    proves_quiescence = False
    options = ("transport",)
    variants = (_OVER_RDMA, replace(_OVER_RDMA, backend="mori_inline", same_as="mori"))

    def start_engine(self) -> str:
        options = dict(self.settings.options)
        transport = options.pop("transport", "rdma")
        if transport not in TRANSPORTS:
            raise ConfigError(f"backend.options.transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
        # alone, RDMA without a device would be replaced by xGMI without a word
        prepare(self.settings.name, {"MORI_DISABLE_AUTO_XGMI": "1", **options}, {"MORI_IO_LOG_LEVEL": "error"})
        self._threads = PostingThreads(self.posting or 0, 1, self.device.enter, self._serve)
        self._sessions: dict[_Pair, Any] = {}
        self._posted: dict[PostedTransfer, None] = {}  # to be polled
        self._stuck: dict[PostedTransfer, None] = {}  # posted to peers that are lost: polled with the beat
        self._failed: list[Any] = []  # statuses that the engine may still write to
        self._engine = self._start_engine(TRANSPORTS[transport])
        self.clock.watch(self)
        self.clock.call_at(self.clock.now + BEAT, self._beat, None)
        return f"mori {self._version} {transport}"

    def _start_engine(self, backends: tuple[str, ...]) -> Any:
        try:
            from mori import __version__, io

            self._io, self._version = io, __version__
            engine = io.IOEngine(f"{self.rank}/{self.control.card.token.hex()}", io.IOEngineConfig(self.bind, 0))
            for name in backends:
                engine.create_backend(getattr(io.BackendType, name), _settings_of(io, name))
        except (ImportError, OSError, RuntimeError) as error:
            absent = "; ".join(missing("RDMA" in backends)) or "nothing that pdsim knows of is missing"
            raise BackendUnavailable(f"MORI does not work here ({error}): {absent}; {MORI.install}") from error
        return engine

    def stop_engine(self, idle: bool) -> None:
        self.clock.unwatch(self)
        self._threads.stop(wait=idle)
        if idle:
            self._sessions.clear()
            del self._engine

    def pin(self, buffer: RealBuffer) -> Any:
        kinds, gpu = self._io.MemoryLocationType, getattr(self.device, "gpu", None)
        place = (-1, kinds.CPU) if gpu is None else (gpu, kinds.GPU)
        try:
            return self._engine.register_memory(buffer.address, buffer.size, *place)
        except RuntimeError as error:
            raise RegistrationError(f"MORI refused to register {buffer.size} bytes: {error}") from error

    def unpin(self, entry: Entry) -> None:
        self._drop(lambda pair: pair.near == entry.handle.id)
        self._engine.deregister_memory(entry.handle)

    def forget_region(self, peer: PeerState, region: str) -> None:
        memory = peer.handle.memories.get(region)
        if memory is not None and region in peer.withdrawn:
            self._drop(lambda pair: pair.peer is peer and pair.far == memory.id)

    def engine_address(self) -> bytes:
        memories = {entry.region.name: entry.handle.pack() for entry in self.entries.values()}
        return msgspec.msgpack.encode((self._engine.get_engine_desc().pack(), memories))

    def connect_engine(self, description: bytes) -> _Remote:
        try:
            engine, memories = msgspec.msgpack.decode(description, type=tuple[bytes, dict[str, bytes]])
            desc = self._io.EngineDesc.unpack(engine)
            remote = _Remote(desc.key, {name: self._io.MemoryDesc.unpack(memories[name]) for name in memories})
            self._engine.register_remote_engine(desc)
        except (msgspec.MsgspecError, ValueError, RuntimeError) as error:
            raise TransferFailed(f"MORI did not take the peer's description: {error}") from error
        known = {memory.id for memory in remote.memories.values()}
        self._drop(lambda pair: pair.peer.handle.key == remote.key and pair.far not in known)
        return remote

    def on_lost(self, line: PeerLine) -> None:
        super().on_lost(line)
        if (peer := self.known.by_token.get(line.card.token)) is not None:
            self._threads.leave(peer)

    def _drop(self, stale: Callable[[_Pair], bool]) -> None:
        for pair in filter(stale, tuple(self._sessions)):
            self._sessions.pop(pair, None)

    def post(self, transfer: PostedTransfer) -> None:
        peer, memory = transfer.peer, transfer.peer.handle.memories.get(transfer.remote.name)
        if memory is None or (memory.data, memory.size) != (transfer.remote.address, transfer.remote.size):
            raise TransferFailed(f"{peer.name} registered {transfer.remote.name!r} anew; use its newer address")
        near, far = transfer.sides()
        transfer.handle = (memory, near.tolist(), far.tolist(), transfer.batch.size.tolist())
        transfer.prepared = self.clock.now
        if self.posting == 0:
            self._serve(transfer)
        else:
            self._threads.put(transfer)

    def _serve(self, transfer: PostedTransfer) -> None:
        if transfer.triggered:  # failed while it waited: nothing has moved, and nothing will
            self.clock.call(partial(self.quiesce, transfer))
            return
        memory, *blocks = transfer.handle
        pair = _Pair(transfer.peer, transfer.local.handle.id, memory.id)
        session, problem = self._sessions.get(pair), "none of the engine's backends reaches from here to there"
        if session is None:
            try:
                session = self._engine.create_session(transfer.local.handle, memory)
            except RuntimeError as error:
                problem = str(error)
            if session is None:
                self.clock.call(partial(self._unreached, transfer, problem))
                return
            self._sessions[pair] = session
        post = getattr(session, "batch_" + transfer.operation)
        transfer.handle = post(*blocks, self._engine.allocate_transfer_uid())
        transfer.posted = self.clock.now
        self.clock.call(partial(self._taken, transfer))

    def _taken(self, transfer: PostedTransfer) -> None:
        self._posted[transfer] = None
        self._look_at(transfer)

    def _unreached(self, transfer: PostedTransfer, reason: str) -> None:
        transfer.handle = None
        self.engine_failed(transfer, f"MORI made no session for a {transfer.operation}: {reason}", moving=False)

    def poll(self) -> bool:
        progressed = False
        for transfer in tuple(self._posted):
            progressed |= self._look_at(transfer)
        return progressed

    def busy(self) -> bool:
        return bool(self._posted)

    def _look_at(self, transfer: PostedTransfer) -> bool:
        status = transfer.handle
        if status.InProgress():
            if transfer.peer.line.lost:  # it may never end: only the beat looks at it from now on
                del self._posted[transfer]
                self._stuck[transfer] = None
            return False
        del self._posted[transfer]
        transfer.handle = None
        if status.Succeeded():
            self.complete(transfer)
        else:  # at the first bad work request, while others of the batch may be on their way
            self._failed.append(status)
            code, what = status.Code(), f"MORI failed a {transfer.operation} of {transfer.batch.nbytes} bytes"
            posted = code != self._io.StatusCode.ERR_INVALID_ARGS  # which it says before it posts anything
            self.engine_failed(transfer, f"{what} ({code.name}: {status.Message()})", moving=posted)
        return True

    def _beat(self, _: None) -> None:
        if self.closed:
            return
        self._posted.update(self._stuck)
        self._stuck.clear()
        self.poll()
        while (failure := self._engine.pop_peer_failure()) is not None:
            if failure.reason == self._io.PeerFailureReason.PEER_UNREACHABLE:
                for transfer in tuple(self._posted):  # its card has not answered for as long as ours has tried
                    if transfer.peer.handle.key == failure.remote_engine_key:
                        text = f"{transfer.peer.name} cannot be reached: {failure.detail}"
                        self.fail(transfer, PeerLost(text), moving=True)
        self.clock.call_at(self.clock.now + BEAT, self._beat, None)


def _settings_of(io: Any, backend: str) -> Any:
    if backend == "XGMI":
        return io.XgmiBackendConfig()
    return io.RdmaBackendConfig(
        qp_per_transfer=QUEUE_PAIRS,
        num_worker_threads=WORKERS,
        enable_notification=False,
        enable_transfer_chunking=True,
        chunk_bytes=CHUNK,
    )


GLIBC = (2, 38)
ROCM = Path("/opt/rocm/lib")  # where the wheel's libraries look, beside the linker's own places


def missing(rdma: bool = True) -> Iterator[str]:
    """Yield what MORI lacks here, in words; *rdma* says whether it is to use an RDMA device.

    Looking loads libraries into the process, so those who go on to do something else look from one of its own.
    """
    if importlib.util.find_spec("mori") is None:
        here = platform.python_version()
        yield f"no package amd-mori (it has wheels for Python 3.10 and 3.12 on manylinux_2_39; this is {here})"
    elif importlib.util.find_spec("torch") is None:
        yield "no torch, which mori.io imports"
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "no glibc").partition(" ")
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < GLIBC:
        yield f"glibc is {version}, not >= {'.'.join(map(str, GLIBC))}"
    if not hasattr(_load("libstdc++.so.6"), "_ZSt21ios_base_library_initv"):  # the one symbol of that version
        yield "libstdc++ has no GLIBCXX_3.4.32"
    rocm_smi = os.environ.get("MORI_ROCM_SMI_PATH") or "librocm_smi64.so.1"
    for library in ("libamdhip64.so.7", "libhsa-runtime64.so.1", rocm_smi):
        if _load(library) is None:
            yield f"no {library} of ROCm 7"
    if rdma and not rdma_devices():
        yield "no RDMA device in /sys/class/infiniband"


def _load(library: str) -> ctypes.CDLL | None:
    for place in (library, ROCM / library):
        try:
            return ctypes.CDLL(str(place))
        except OSError:
            continue
    return None
