# SPDX-License-Identifier: Apache-2.0
"""NIXL over UCX: ``nixl_tcp`` over TCP, ``nixl_shm`` over shared memory, ``nixl`` between GPUs and over RDMA verbs.

Nothing moves unless somebody calls into UCX, at the target of a TCP write too; NIXL's own progress thread would spin
on a core, so the clock polls instead, here and at the peer.  NIXL has no time-out, and releasing a handle does not
stop its data: a handle is released once, when its transfer has ended by the engine's own account.  Over TCP a reader
that is killed may end the rank that it reads from: UCX (1.23) takes a reply that it cannot send for fatal (5 of 120
runs, 0 of 60 with writes; `docs/engines.md`).
"""

import ctypes
import importlib
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.base.control import PeerLine
from backends.base.device import RealBuffer
from backends.base.endpoint import RealEndpoint
from backends.base.processes import captured_stderr, installed, prepare
from backends.base.transfers import Entry, PeerState, PostedTransfer, PostingThreads
from backends.base.zmq_channel import WIDEN
from backends.capabilities import EngineLibrary, Variant, declared
from backends.cuda.cuda_device import CudaDevice
from backends.diagnosis import rdma_devices
from pdsim.core.errors import BackendUnavailable, ConfigError, PeerLost, RegistrationError, TransferFailed
from pdsim.transfer import Notification, Region

BEAT = 0.02  # seconds between two looks at an idle engine, and for which a peer is polled after its last use

LO = {"UCX_NET_DEVICES": "lo"}  # or it also listens on the other interfaces, and advertises them
NO_IB = {"UCX_MODULES": "^ib"}  # its libnl and the system's in one process crash at exit
NIXL = EngineLibrary("import nixl_cu13", ("nixl-cu13",), "pip install --no-deps nixl-cu13==1.5.1")

_Int64s = npt.NDArray[np.int64]

_ACTIVE, _IDLE = b"active", b"idle"


@dataclass(frozen=True, kw_only=True)
class _Transports(Variant):
    """Settings that choose transports of UCX; if it reports others than those of ``UCX_TLS``, they are refused."""

    requires: EngineLibrary | None = NIXL
    posting_threads: bool = True
    environment: Mapping[str, str]  # variables that make the variant what it is; ``backend.options`` override them
    defaults: Mapping[str, str]  # of the environment, which may be set otherwise
    error_handling: str = "peer"  # of UCX, or "none" where a transport has none: then `control` tells of dead peers


class NixlEndpoint(RealEndpoint):
    """An `Endpoint` on ``nixl_cu13``'s agent with the UCX plugin, polled by the clock as a `Source`.

    Options beside environment variables: ``progress_thread``, "true" for NIXL's own thread, which spins on a core,
    and ``num_threads``, how many threads of the plugin post large batches; 0, and off, without them.

    `post` makes a handle (descriptor lists and ``initialize_xfer``, the ``prep`` of a record) and starts it (its
    ``post``): the division of nixlbench.  `poll` asks for its state; `_ended` releases the handle and reports it.
    One whose peer is lost is looked at with the beats only, for it may never end.  A peer is asked to poll while it
    is written to or read from, and until `BEAT` after the last use.

    With ``backend.threads`` above 1 so many threads make and start handles, and the agent has its lock: without it
    three threads on one agent end the process by signal 11.  It costs twice the processor time.
    """

    kind = "nixl"
    options = ("progress_thread", "num_threads")
    variants = (
        _Transports(
            backend="nixl_tcp", memory=("host", "gpu"), environment={"UCX_TLS": "tcp,self"}, defaults={**LO, **NO_IB}
        ),
        _Transports(
            backend="nixl_shm",
            device="shm",
            one_sided=True,
            proves_quiescence=False,  # nobody can see what lies in shared memory
            environment={"UCX_TLS": "posix,cma"},
            defaults=NO_IB,
            error_handling="none",
        ),
        _Transports(
            backend="nixl",
            device="gpu",
            memory=("gpu",),
            environment={"UCX_TLS": "cuda_ipc,cuda_copy,tcp,self"},
            defaults={**LO, **NO_IB},
        ),
        _Transports(
            backend="nixl",
            device="rdma",
            one_sided=True,
            proves_quiescence=False,
            guest="backends.emulation.guest.engines:NIXL",
            environment={"UCX_TLS": "rc_verbs,ud_verbs,self"},
            defaults={},
        ),
    )

    # --- set-up ----------------------------------------------------------------------------------------------------

    def start_engine(self) -> str:
        on_gpu = isinstance(self.device, CudaDevice)
        ways = declared(self.variants, self.settings.name)
        wanted = "rdma" if rdma_devices() and not on_gpu else "gpu"  # of `nixl`
        way = next((way for way in ways if way.device == wanted), ways[0])
        self._gpus_only, self.proves_quiescence = way.device == "gpu", way.proves_quiescence
        variant = way.environment
        defaults = {**way.defaults, "UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": "stderr"}
        self._log: _GpuLog | None = None
        if on_gpu and self._gpus_only:
            self._log = _GpuLog()
            variant = {**variant, "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": self._log.path}
            del defaults["UCX_LOG_FILE"]
        elif on_gpu:  # staged through the host
            variant = {"UCX_TLS": variant["UCX_TLS"] + ",cuda_copy"}
        allowed = set(variant["UCX_TLS"].split(","))
        options = dict(self.settings.options)
        progress, workers = options.pop("progress_thread", "false"), options.pop("num_threads", "0")
        if progress not in ("true", "false"):
            raise ConfigError(f"backend.options.progress_thread must be true or false, got {progress!r}")
        if not workers.isdecimal():
            raise ConfigError(f"backend.options.num_threads must be a whole number, 0 for none, got {workers!r}")
        prepare(self.settings.name, {**variant, **options}, defaults)
        self._posted: dict[PostedTransfer, None] = {}
        self._announced: dict[PeerState, float] = {}  # peers that poll for us, and when they were last needed
        self._inbound: set[PeerLine] = set()  # peers that we poll for, as they write to or read from here
        self._stuck: dict[PostedTransfer, None] = {}  # posted to peers that are lost
        self._leaving: list[PeerState] = []  # lost peers that the agent still knows
        self.handlers[_ACTIVE] = lambda line, _: self._inbound.add(line)
        self.handlers[_IDLE] = lambda line, _: self._inbound.discard(line)
        settings = {"ucx_error_handling_mode": way.error_handling}
        if int(workers):
            settings["num_threads"] = workers
        self._agent, log = self._start_agent(settings, progress == "true")
        transports = _between_hosts(log)
        if self._gpus_only:
            transports = set()  # of GPU memory UCX says nothing yet
        elif not transports or not transports <= allowed:
            raise BackendUnavailable(
                f"UCX uses the transports {', '.join(sorted(transports)) or 'none'}, and "
                f"backend={self.settings.name} only {', '.join(sorted(allowed))}; choose another backend"
            )
        self._threads = PostingThreads(self.posting or 0, 0, self.device.enter, self._serve)
        self.clock.watch(self)
        self.clock.call_at(self.clock.now + BEAT, self._beat, None)
        return _name(transports)

    def _start_agent(self, settings: dict[str, str], progress_thread: bool) -> tuple[Any, str]:
        try:
            # NIXL documents its classes as those of this module, whose name is private
            api = importlib.import_module("nixl_cu13._api")
            self._errors = importlib.import_module("nixl_cu13._bindings")
        except ImportError as error:
            raise BackendUnavailable(f"NIXL cannot be imported ({error}): {NIXL.install}") from error
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to the standard output
        lock = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT if self.posting else None
        config = api.nixl_agent_config(enable_prog_thread=progress_thread, backends=[], sync_mode=lock)
        try:
            with captured_stderr() as log:
                agent = api.nixl_agent(f"{self.rank}/{self.control.card.token.hex()}", config)
                agent.create_backend("UCX", settings)
        except Exception as error:
            raise BackendUnavailable(
                f"backend {self.settings.name!r}: NIXL did not start: {error}; unless UCX names another cause, no "
                f"port is free: {WIDEN}"
            ) from error
        return agent, log()

    def stop_engine(self, idle: bool) -> None:
        self.clock.unwatch(self)
        self._threads.stop(wait=idle)
        if idle:
            for peer in self.known.by_token.values():
                if not peer.line.lost:
                    self._agent.remove_remote_agent(peer.handle)
            del self._agent, self._threads

    # --- memory and peers ------------------------------------------------------------------------------------------

    def pin(self, buffer: RealBuffer) -> Any:
        memory, number = _place(self.device.name)
        if self._gpus_only and memory != "VRAM":
            raise RegistrationError(
                f"without RDMA devices backend 'nixl' moves GPU memory only and {self.rank} is on the host; place "
                f"it on a GPU, or use backend=nixl_tcp"
            )
        try:
            return self._agent.register_memory([(buffer.address, buffer.size, number, "")], memory)
        except Exception as error:
            raise RegistrationError(f"NIXL refused to register {buffer.size} bytes: {error}") from error

    def unpin(self, entry: Entry) -> None:
        self._agent.deregister_memory(entry.handle)

    def engine_address(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def connect_engine(self, description: bytes) -> str:
        try:
            name: bytes = self._agent.add_remote_agent(description)
        except Exception as error:
            raise TransferFailed(f"NIXL did not take the peer's metadata: {error}") from error
        return name.decode()

    def on_lost(self, line: PeerLine) -> None:
        self._inbound.discard(line)
        super().on_lost(line)
        if (peer := self.known.by_token.get(line.card.token)) is not None:
            self._leaving.append(peer)

    # --- transfers -------------------------------------------------------------------------------------------------

    def post(self, transfer: PostedTransfer) -> None:
        peer = transfer.peer
        if peer not in self._announced:
            self.control.send(peer.line, _ACTIVE)
        self._announced[peer] = transfer.submitted
        if self.posting:
            self._threads.put(transfer)
            return
        transfer.handle = self._make(transfer)
        transfer.prepared = transfer.posted = self.clock.now
        self._posted[transfer] = None
        state = self._ask(self._agent.transfer, transfer)
        transfer.posted = self.clock.now
        if state != "PROC":
            self._ended(transfer, state)

    def _make(self, transfer: PostedTransfer) -> Any:
        batch = transfer.batch
        near, far = transfer.sides()
        try:
            return self._agent.initialize_xfer(
                transfer.operation.upper(),
                _descriptors(self._agent, near, batch.size, transfer.local.region),
                _descriptors(self._agent, far, batch.size, transfer.remote),
                transfer.peer.handle,
                transfer.notify,
            )
        except Exception as error:
            raise TransferFailed(
                f"NIXL did not take a {transfer.operation} of {batch.nbytes} bytes: {error}"
            ) from error

    def _serve(self, transfer: PostedTransfer) -> None:
        # On a posting thread.  Without a handle nothing of the transfer has moved, nor will.
        handle, prepared = None, self.clock.now
        try:
            if transfer.triggered:
                raise TransferFailed("it failed before it was posted")
            handle = self._make(transfer)
            prepared = self.clock.now
            answer: str | Exception = self._agent.transfer(handle)
        except Exception as error:
            answer = error
        self.clock.call(partial(self._served, transfer, handle, prepared, self.clock.now, answer))

    def _served(
        self, transfer: PostedTransfer, handle: Any, prepared: float, posted: float, answer: str | Exception
    ) -> None:
        transfer.handle, transfer.prepared, transfer.posted = handle, prepared, posted
        if handle is not None:
            self._posted[transfer] = None
            state = self._ask(lambda _: _raised(answer), transfer)
            if state != "PROC" and not self.closed:
                self._ended(transfer, state)
        elif transfer.triggered:
            self.quiesce(transfer)
        else:
            error = answer if isinstance(answer, TransferFailed) else TransferFailed(f"NIXL: {answer}")
            self.fail(transfer, error, moving=False)

    def _ended(self, transfer: PostedTransfer, state: str) -> None:
        del self._posted[transfer]
        self._announced[transfer.peer] = self.clock.now
        self._agent.release_xfer_handle(transfer.handle)
        transfer.handle = None
        if self._log is not None and (transports := self._log.read()):
            self.engine = _name(transports)
            self._log = None
        if state == "DONE":
            self.complete(transfer)
        else:
            self.engine_failed(
                transfer, f"NIXL failed a {transfer.operation} of {transfer.batch.nbytes} bytes ({state})"
            )

    def notify(self, transfer: PostedTransfer) -> None:
        """Do nothing: the engine has delivered it, under the agent's name: the rank and its token."""

    # --- Source ----------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        return self.busy() and self._progress(bool(self._inbound))

    def busy(self) -> bool:
        return bool(self._posted or self._inbound)

    def _progress(self, listen: bool) -> bool:
        # Without a peer that writes or reads here there can be no notification, and asking for them costs a call.
        progressed = False
        for transfer in tuple(self._posted):
            state = self._ask(self._agent.check_xfer_state, transfer)
            if state != "PROC":
                self._ended(transfer, state)
                progressed = True
            elif transfer.peer.line.lost:  # it may never end: only the beat looks at it from now on
                del self._posted[transfer]
                self._stuck[transfer] = None
        for agent, payloads in self._agent.get_new_notifs().items() if listen else ():
            for payload in payloads:
                self.notifications.put(Notification(agent.rpartition("/")[0], bytes(payload)))
                progressed = True
        return progressed

    def _ask(self, question: Callable[[Any], str], transfer: PostedTransfer) -> str:
        # A peer that UCX has lost fails the transfer at once, with bytes that may still move.
        try:
            return question(transfer.handle)
        except self._errors.nixlRemoteDisconnectError as error:
            self.fail(transfer, PeerLost(f"{transfer.peer.name} is gone: {error}"), moving=True)
            return "ERR"
        except Exception as error:
            return f"ERR {error}"

    def _beat(self, _: None) -> None:
        # Transfers to lost peers, peers that need not poll any more, and lost ones that nothing is under way with.
        if self.closed:
            return
        self._posted.update(self._stuck)
        self._stuck.clear()
        self._progress(listen=True)
        moving = {transfer.peer for transfer in self._posted}
        for peer, used in tuple(self._announced.items()):
            if peer not in moving and self.clock.now - used > BEAT:
                del self._announced[peer]
                self.control.send(peer.line, _IDLE)
        for peer in tuple(self._leaving):
            if not peer.moving.total():
                self._leaving.remove(peer)
                self._agent.remove_remote_agent(peer.handle)  # 0.1 ms, even if the peer has stopped
        self.clock.call_at(self.clock.now + BEAT, self._beat, None)


def _raised(answer: str | Exception) -> str:
    if isinstance(answer, Exception):
        raise answer
    return answer


@cache
def _place(device: str) -> tuple[str, int]:
    kind, _, number = device.partition(":")
    return "VRAM" if kind == "cuda" else "DRAM", int(number or 0)


def _descriptors(agent: Any, offset: _Int64s, size: _Int64s, region: Region) -> Any:
    memory, number = _place(region.device)
    if len(size) == 1:  # arrays would take longer than all else here
        return agent.get_xfer_descs([(region.address + offset.item(), size.item(), number)], memory)
    rows = np.empty((len(size), 3), np.uint64)
    rows[:, 0] = offset + region.address
    rows[:, 1] = size
    rows[:, 2] = number
    return agent.get_xfer_descs(rows, memory)


def _name(transports: set[str]) -> str:
    return f"nixl {installed('nixl-cu13')} ucx {'+'.join(sorted(transports))}".rstrip()


# --- the log of UCX ------------------------------------------------------------------------------------------------


class _GpuLog:
    """The log of UCX, a file without a name at *path*: what carries GPU memory it decides at the first transfer."""

    def __init__(self) -> None:
        self.path = f"/proc/self/fd/{os.memfd_create('ucx')}"  # which stays open, for UCX writes on
        self._read = 0  # bytes

    def read(self) -> set[str]:
        """Return the transports between GPUs, or none before UCX has named them or if nothing is new."""
        ctypes.CDLL(None).fflush(None)  # or the last lines would still be in UCX's buffer
        size = os.stat(self.path).st_size  # noqa: PTH116 no path of a file
        if size == self._read:
            return set()
        self._read = size
        return _between_gpus(Path(self.path).read_text(errors="replace"))


def _between_gpus(log: str) -> set[str]:
    # Tables have the title ``remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda/dev[3]`` and rows like
    # ``| 0..inf | zero-copy | cuda_ipc/cuda |``.
    transports: set[str] = set()
    within = False
    for line in log.splitlines():
        if " by ucp_" in line:
            within = "remote memory" in line and line.count("cuda/") == 2
        elif within and (row := re.search(r"\| +\d+(?:\.\.\w+)? +\|[^|]+\| +(\w+)/", line)):
            transports.add(row[1])
    return transports


def _between_hosts(log: str) -> set[str]:
    # A connection is a line like ``cfg#0 rma(posix/memory) am(...)``.
    return set(re.findall(r"(\w+)/", " ".join(re.findall(r"cfg#\d+ (.*)", log))))
