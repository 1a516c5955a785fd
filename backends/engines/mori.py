# SPDX-License-Identifier: Apache-2.0
"""MORI-IO over RDMA, on host memory; on the GPU memory of AMD machines over RDMA and xGMI, which has not been run.

What it does about the engine's ways:

- Posting blocks while a send queue is full.  It happens in a thread of each peer, in order, so that a peer whose
  queue pairs have stalled does not delay another; the binding lets other threads run meanwhile.
- Making a session asks the peer's engine over TCP, and the binding lets no other thread run while it waits, for five
  seconds at most (``MORI_IO_CP_TIMEOUT_MS``).  So sessions are kept: one for each pair of regions of each peer.
- ``mori.io`` imports PyTorch, of which neither it nor pdsim's host-memory path needs anything.
- The engine's completion thread writes to the status of a transfer through a bare pointer, after a failure too.  A
  status is kept until its transfer is over, and that of a failed one for as long as the engine.
- A status fails at the first bad work request, while others of the same batch may be on their way through other
  queue pairs.  Such a transfer stays in quarantine.
- Neighbouring blocks are joined to messages of up to 4 GiB, and a message beyond what the port carries is refused
  unless the engine may cut it, so it may.
- The engine's own notifications are numbers that the receiver must know beforehand and ask for, and they may be
  miscounted when their ring wraps.  They are off; ours go over `backends.base.control` after the bytes are
  acknowledged.
- The network card writes whether or not the process that owns the memory runs: a write to a stopped peer completes.
- What a card has taken from a dead process nobody can see, so nothing is ever proven of it (`quiesced`).
- Its completion thread spins on a core from the first connection on, in both of its modes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec

from backends.base.device import RealBuffer
from backends.base.endpoint import RealEndpoint
from backends.base.processes import prepare
from backends.base.transfers import Entry, PeerState, PostedTransfer
from backends.capabilities import EngineLibrary, Variant
from backends.engines.rocm import missing
from pdsim.core.errors import BackendUnavailable, ConfigError, PeerLost, RegistrationError, TransferFailed

__all__ = ["MoriEndpoint"]

TRANSPORTS = {"rdma": ("RDMA",), "xgmi": ("XGMI",), "rdma+xgmi": ("RDMA", "XGMI")}
"""The option ``transport``, and the engine's backends.  With two, the engine takes xGMI wherever it reaches."""
QUEUE_PAIRS, WORKERS = 4, 4
"""Of a transfer, and the threads that post to them: SGLang's defaults.  ``MORI_IO_QP_PER_TRANSFER`` and
``MORI_IO_NUM_WORKER_THREADS`` replace them."""
CHUNK = 4 << 20
"""Bytes of a message: far above a page, and below what any port carries (soft-RoCE: 8 MiB)."""
BEAT = 0.02
"""Seconds between two looks at transfers to lost peers, and at the engine's list of failures."""


MORI = EngineLibrary(
    "from backends.engines.rocm import missing; (lacking := '; '.join(missing())) and exit(lacking); import mori.io",
    ("amd-mori", "amd-mori-nightly"),
    "pip install 'pdsim[mori]' on a machine with Python 3.12, glibc >= 2.38, ROCm 7 and an RDMA device",
)
_OVER_RDMA = Variant(
    backend="mori",
    requires=MORI,  # whose probe looks for the RDMA device, too
    one_sided=True,
    proves_quiescence=False,  # what lies in the queues of network cards nobody can see
    guest="backends.emulation.guest.mori.serving:RECIPE",
)


class _Pair(NamedTuple):
    """Two regions, by the engine's numbers of their memory."""

    peer: PeerState
    near: int
    far: int


class _Remote(NamedTuple):
    """The engine's side of a peer.

    *key* is what the engine knows it by, *memories* its descriptions of the memory of each region.
    """

    key: str
    memories: dict[str, Any]  # by region


class MoriEndpoint(RealEndpoint):
    """An `Endpoint` on ``mori.io.IOEngine``, whose statuses the clock polls as a `Source`.

    Options of the engine beside environment variables: ``transport``, one of `TRANSPORTS`.

    Course of a transfer: `post` queues it for the thread of its peer, which makes the session of its
    two regions, if there is none, and posts; from then on `poll` asks its status.  The status of
    one that failed is kept, for the engine may still write to it.  Transfers to a peer that is lost
    are asked for with the beats only: they may never end.
    """

    kind = "mori"
    options = ("transport",)
    variants = (_OVER_RDMA, replace(_OVER_RDMA, backend="mori_inline", same_as="mori"))

    # --- set-up ----------------------------------------------------------------------------------------------------

    def start_engine(self) -> str:
        """Start the engine; see `RealEndpoint.start_engine`."""
        options = dict(self.settings.options)
        transport = options.pop("transport", "rdma")
        if transport not in TRANSPORTS:
            raise ConfigError(f"backend.options.transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")
        # alone, RDMA without a device would be replaced by xGMI without a word
        prepare(self.settings.name, {"MORI_DISABLE_AUTO_XGMI": "1", **options}, {"MORI_IO_LOG_LEVEL": "error"})
        self._queues: dict[PeerState, queue.SimpleQueue[PostedTransfer | None]] = {}
        self._workers: list[threading.Thread] = []
        self._sessions: dict[_Pair, Any] = {}
        self._posted: dict[PostedTransfer, None] = {}  # to be polled
        self._stuck: dict[PostedTransfer, None] = {}  # posted to peers that are lost: polled with the beat
        self._failed: list[Any] = []  # statuses that the engine may still write to
        self._engine = self._start_engine(TRANSPORTS[transport])
        self.clock.watch(self)
        self.clock.call_at(self.clock.now + BEAT, self._beat, None)
        return f"mori {self._version} {transport}"

    def _start_engine(self, backends: tuple[str, ...]) -> Any:
        # Raise `BackendUnavailable` with what the machine lacks if it does not start.
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
        """Stop the engine; see `RealEndpoint.stop_engine`."""
        self.clock.unwatch(self)
        for work in self._queues.values():
            work.put(None)
        if idle:
            for worker in self._workers:
                worker.join()
            self._sessions.clear()
            del self._engine

    def inbound_drained(self) -> bool:
        """Return False: what lies in the queues of network cards nobody can see, so nothing is ever proven."""
        return False

    # --- memory and peers ------------------------------------------------------------------------------------------

    def pin(self, buffer: RealBuffer) -> Any:
        """Register memory with the engine; see `RealEndpoint.pin`."""
        kinds, gpu = self._io.MemoryLocationType, getattr(self.device, "gpu", None)
        place = (-1, kinds.CPU) if gpu is None else (gpu, kinds.GPU)
        try:
            return self._engine.register_memory(buffer.address, buffer.size, *place)
        except RuntimeError as error:
            raise RegistrationError(f"MORI refused to register {buffer.size} bytes: {error}") from error

    def unpin(self, entry: Entry) -> None:
        """Undo `pin`; see `RealEndpoint.unpin`."""
        _drop(self._sessions, lambda pair: pair.near == entry.handle.id)
        self._engine.deregister_memory(entry.handle)

    def forget_region(self, peer: PeerState, region: str) -> None:
        """Release a region; see `RealEndpoint.forget_region`."""
        memory = peer.handle.memories.get(region)
        if memory is not None and region in peer.withdrawn:
            _drop(self._sessions, lambda pair: pair.peer is peer and pair.far == memory.id)

    def engine_address(self) -> bytes:
        """Return what the engine of a peer needs; see `RealEndpoint.engine_address`."""
        memories = {entry.region.name: entry.handle.pack() for entry in self.entries.values()}
        return msgspec.msgpack.encode((self._engine.get_engine_desc().pack(), memories))

    def connect_engine(self, description: bytes) -> _Remote:
        """Return the engine's handle of a peer; see `RealEndpoint.connect_engine`."""
        try:
            engine, memories = msgspec.msgpack.decode(description, type=tuple[bytes, dict[str, bytes]])
            desc = self._io.EngineDesc.unpack(engine)
            remote = _Remote(desc.key, {name: self._io.MemoryDesc.unpack(memories[name]) for name in memories})
            self._engine.register_remote_engine(desc)
        except (msgspec.MsgspecError, ValueError, RuntimeError) as error:
            raise TransferFailed(f"MORI did not take the peer's description: {error}") from error
        known = {memory.id for memory in remote.memories.values()}
        _drop(self._sessions, lambda pair: pair.peer.handle.key == remote.key and pair.far not in known)
        return remote

    # --- transfers -------------------------------------------------------------------------------------------------

    def post(self, transfer: PostedTransfer) -> None:
        """Post to the engine; see `RealEndpoint.post`."""
        batch, memory = transfer.batch, transfer.peer.handle.memories.get(transfer.remote.name)
        if memory is None or (memory.data, memory.size) != (transfer.remote.address, transfer.remote.size):
            raise TransferFailed(
                f"{transfer.peer.name} registered {transfer.remote.name!r} anew; use its newer address"
            )
        near, far = (
            (batch.source_offset, batch.target_offset)
            if transfer.operation == "write"
            else (batch.target_offset, batch.source_offset)
        )
        transfer.handle = (memory, near.tolist(), far.tolist(), batch.size.tolist())
        transfer.prepared = self.clock.now
        self._queue(transfer.peer).put(transfer)

    def _queue(self, peer: PeerState) -> queue.SimpleQueue[PostedTransfer | None]:
        if peer not in self._queues:
            work: queue.SimpleQueue[PostedTransfer | None] = queue.SimpleQueue()
            self._queues[peer] = work
            worker = threading.Thread(target=self._serve, args=(work,), name=f"mori {peer.name}", daemon=True)
            self._workers.append(worker)
            worker.start()
        return self._queues[peer]

    def _serve(self, work: queue.SimpleQueue[PostedTransfer | None]) -> None:
        while (transfer := work.get()) is not None:
            if transfer.triggered:  # failed while it waited: nothing has moved, and nothing will
                self.clock.call(partial(self.quiesce, transfer))
                continue
            memory, *blocks = transfer.handle
            try:
                session = self._session(transfer, memory)
            except RuntimeError as error:
                self.clock.call(partial(self._unreached, transfer, str(error)))
                continue
            post = getattr(session, "batch_" + transfer.operation)
            transfer.handle = post(*blocks, self._engine.allocate_transfer_uid())
            self.clock.call(partial(self._taken, transfer, time.monotonic()))

    def _session(self, transfer: PostedTransfer, memory: Any) -> Any:
        pair = _Pair(transfer.peer, transfer.local.handle.id, memory.id)
        if pair not in self._sessions:
            session = self._engine.create_session(transfer.local.handle, memory)
            if session is None:
                raise RuntimeError("none of the engine's backends reaches from here to there")
            self._sessions[pair] = session
        return self._sessions[pair]

    def _taken(self, transfer: PostedTransfer, posted: float) -> None:
        transfer.posted = posted - self.clock.origin
        self._posted[transfer] = None
        self._look_at(transfer)

    def _unreached(self, transfer: PostedTransfer, reason: str) -> None:
        transfer.handle = None
        self.engine_failed(transfer, f"MORI made no session for a {transfer.operation}: {reason}", moving=False)

    # --- Source ----------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Look at the statuses of what was posted."""
        progressed = False
        for transfer in tuple(self._posted):
            progressed |= self._look_at(transfer)
        return progressed

    def fileno(self) -> None:
        """Return None: the engine has no descriptor."""
        return

    def busy(self) -> bool:
        """Return whether transfers are under way that may end at any moment."""
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
        else:
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


def _drop(sessions: dict[_Pair, Any], stale: Callable[[_Pair], bool]) -> None:
    for pair in filter(stale, tuple(sessions)):
        sessions.pop(pair, None)
