# SPDX-License-Identifier: Apache-2.0
"""NIXL over UCX.

``nixl_tcp`` goes over TCP, ``nixl_shm`` over shared memory and cross-memory attach, ``nixl`` between GPUs over
cuda_ipc and between hosts over RDMA verbs.

What it does about the engine's ways:

- Nothing moves unless somebody calls into UCX, at the target of a TCP write too.  NIXL's own progress thread would
  do so, and spin on a whole core for each endpoint; it is off unless an option asks for it.  Instead, an endpoint
  that starts to transfer tells its peer over `backends.base.control`, and the clock polls the engine of both while
  anything is under way; every `BEAT` they are polled in any case.
- Over shared memory UCX cannot report a dead peer (its error handling must be off).  `backends.base.control` does:
  the kernel closes the peer's connection.
- Over TCP a read is answered by the target in software, and UCX (1.23, and its main branch of today) takes a reply
  that it cannot send for fatal: "unexpected error: Endpoint timeout", or a segmentation fault among the replies that
  wait. So a reader that is killed in mid-read may end the rank that it reads from: in 5 of 120 runs of two
  endpoints, and in 0 of 60 with writes.  Nothing here can prevent it; the launcher reports it.
- It has no time-out, and releasing a handle does not stop its data.  A handle is released once, when its transfer
  has ended by the engine's own account, and never touched again.
- It writes into deregistered memory.  `backends.base.endpoint` keeps that memory until all peers have returned it.
- Its agent has no lock unless it is asked for one (`NIXL_THREAD_SYNC_STRICT`); neither vLLM nor SGLang ask.  Three
  threads of a process that post through one agent ended it by signal 11 at once, over TCP and shared memory; with
  the lock all bytes arrive, and a transfer over TCP (64 x 16 KiB, loopback) takes 0.9 to 1.1 times as long for twice
  the processor time.  So with ``backend.threads`` above 1 the agent has its lock, and so many threads make and start
  handles; the clock's thread asks for their state as ever.
- Notifications are the engine's own.  They carry the sender's agent name, which is the rank's and a token.
- Over shared memory a large write is copied by the kernel inside the posting call, which takes as long as the copy.
- What carries GPU memory UCX decides at the first transfer, and may decide for emulation over TCP.  Its log then has
  a table that says so; it goes to a file without a name, and is read until it has.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.base.control import PeerLine
from backends.base.device import RealBuffer
from backends.base.endpoint import RealEndpoint
from backends.base.posting_threads import PostingThreads
from backends.base.processes import captured_stderr, installed, prepare
from backends.base.transfers import Entry, PeerState, PostedTransfer
from backends.capabilities import declared
from backends.cuda.cuda_device import CudaDevice
from backends.engines.ucx import LO, NIXL, NO_IB, GpuTransports, Transports, between_hosts, has_rdma
from pdsim.core.errors import BackendUnavailable, ConfigError, PeerLost, RegistrationError, TransferFailed
from pdsim.transfer import Notification, Region

__all__ = ["NixlEndpoint"]

BEAT = 0.02
"""Seconds between two looks at an engine that has nothing to do, and for which a peer is polled after its last
use."""

_Int64s = npt.NDArray[np.int64]

_ACTIVE, _IDLE = b"active", b"idle"


class NixlEndpoint(RealEndpoint):
    """An `Endpoint` on ``nixl_cu13``'s agent with the UCX plugin, polled by the clock as a `Source`.

    Options beside environment variables: ``progress_thread``, "true" for NIXL's own thread, which
    spins on a core, and ``num_threads``, how many threads of the plugin post large batches; 0, and
    off, without them.

    Course of a transfer: `post` makes a handle and starts it; `poll` asks for its state, as does
    every beat; `_ended` releases the handle, once, and reports it.  One whose peer is lost is
    looked at with the beats only, for it may never end.  A peer is asked to poll while it is written
    to or read from, and until `BEAT` after the last use.

    Making the handle (descriptor lists and ``initialize_xfer``) is the ``prep`` of a record,
    starting it the ``post``: the same division as nixlbench's.
    """

    kind = "nixl"
    options = ("progress_thread", "num_threads")
    variants = (
        Transports(
            backend="nixl_tcp",
            memory=("host", "gpu"),
            environment={"UCX_TLS": "tcp,self"},
            defaults={**LO, **NO_IB},
            error_handling="peer",
            allowed=frozenset({"tcp", "self"}),
        ),
        Transports(
            backend="nixl_shm",
            device="shm",
            one_sided=True,
            proves_quiescence=False,  # nobody can see what lies in shared memory
            environment={"UCX_TLS": "posix,cma"},
            defaults=NO_IB,
            error_handling="none",
            allowed=frozenset({"posix", "cma"}),
        ),
        Transports(
            backend="nixl",
            device="gpu",
            memory=("gpu",),
            environment={"UCX_TLS": "cuda_ipc,cuda_copy,tcp,self"},
            defaults={**LO, **NO_IB},
            error_handling="peer",
            allowed=frozenset({"tcp", "self"}),
        ),
        Transports(
            backend="nixl",
            device="rdma",
            one_sided=True,
            proves_quiescence=False,
            guest="backends.emulation.guest.installed:NIXL",
            environment={"UCX_TLS": "rc_verbs,ud_verbs,self"},
            defaults={},
            error_handling="peer",
            allowed=frozenset({"rc_verbs", "ud_verbs", "self"}),
        ),
    )

    # --- set-up ----------------------------------------------------------------------------------------------------

    def start_engine(self) -> str:
        """Start the engine; see `RealEndpoint.start_engine`."""
        on_gpu = isinstance(self.device, CudaDevice)
        # host memory goes over RDMA where there is any, and GPU memory between GPUs
        ways = declared(self.variants, self.settings.name)
        way = next((way for way in ways if way.device == ("rdma" if has_rdma() and not on_gpu else "gpu")), ways[0])
        self._way, self._gpus_only = way, way.device == "gpu"
        variant, allowed = way.environment, way.allowed
        defaults = {**way.defaults, "UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": "stderr"}
        self._log: GpuTransports | None = None
        if on_gpu and self._gpus_only:
            self._log = GpuTransports()
            variant = {**variant, "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": self._log.path}
            del defaults["UCX_LOG_FILE"]
        elif on_gpu:  # staged through the host
            variant = {"UCX_TLS": variant["UCX_TLS"] + ",cuda_copy"}
            allowed = allowed | {"cuda_copy"}
        options = dict(self.settings.options)
        self._progress_thread = _on_off(options.pop("progress_thread", "false"), "progress_thread")
        self._workers = _count(options.pop("num_threads", "0"), "num_threads")
        prepare(self.settings.name, {**variant, **options}, defaults)
        self._posted: dict[PostedTransfer, None] = {}
        self._announced: dict[PeerState, float] = {}  # peers that poll for us, and when they were last needed
        self._inbound: set[PeerLine] = set()  # peers that we poll for
        self._stuck: dict[PostedTransfer, None] = {}  # posted to peers that are lost
        self._agent, log = self._start_agent(way.error_handling)
        transports = between_hosts(log)
        if self._gpus_only:
            transports = set()  # of GPU memory UCX says nothing yet
        elif not transports or not transports <= allowed:
            raise BackendUnavailable(
                f"UCX reports the transports {', '.join(sorted(transports)) or 'none'}; "
                f"backend {self.settings.name!r} means {', '.join(sorted(allowed))} only"
            )
        self._threads = PostingThreads("nixl", self.settings.threads, self.device.enter, self._serve)
        self.clock.watch(self)
        self.clock.call_at(self.clock.now + BEAT, self._beat, None)
        self._memory, self._number = (
            ("VRAM", self.device.gpu) if isinstance(self.device, CudaDevice) else ("DRAM", 0)
        )
        return _name(transports)

    def _start_agent(self, error_handling: str) -> tuple[Any, str]:
        # Raise `BackendUnavailable` if NIXL is not installed, or with its own words if it does not start.
        try:
            # NIXL documents its classes as those of this module, whose name is private
            api = importlib.import_module("nixl_cu13._api")
            self._errors = importlib.import_module("nixl_cu13._bindings")
        except ImportError as error:
            raise BackendUnavailable(f"NIXL cannot be imported ({error}): {NIXL.install}") from error
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to the standard output
        lock = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT if self.settings.threads > 1 else None
        config = api.nixl_agent_config(enable_prog_thread=self._progress_thread, backends=[], sync_mode=lock)
        settings = {"ucx_error_handling_mode": error_handling}
        if self._workers:
            settings["num_threads"] = str(self._workers)
        try:
            with captured_stderr() as log:
                agent = api.nixl_agent(f"{self.rank}/{self.control.card.token.hex()}", config)
                agent.create_backend("UCX", settings)
        except Exception as error:
            raise BackendUnavailable(f"backend {self.settings.name!r}: NIXL did not start: {error}") from error
        return agent, log()

    def stop_engine(self, idle: bool) -> None:
        """Stop the engine; see `RealEndpoint.stop_engine`."""
        self.clock.unwatch(self)
        self._threads.stop(wait=idle)
        if idle:
            for peer in self.peers.values():
                if not peer.line.lost:
                    self._agent.remove_remote_agent(peer.handle)
            del self._agent, self._threads

    def inbound_drained(self) -> bool:
        """Return whether it is proven that nothing of dead processes still comes in.

        As for any engine over TCP; GPUs' copies end with their process; nobody sees into shared memory or a card.
        """
        return self._way.proves_quiescence and super().inbound_drained()

    # --- memory and peers ------------------------------------------------------------------------------------------

    def pin(self, buffer: RealBuffer) -> Any:
        """Register memory with the engine; see `RealEndpoint.pin`."""
        if self._gpus_only and self._memory != "VRAM":
            raise RegistrationError(
                f"without RDMA devices backend 'nixl' moves GPU memory only and {self.rank} is on the host; place "
                f"it on a GPU, or use backend=nixl_tcp"
            )
        try:
            return self._agent.register_memory([(buffer.address, buffer.size, self._number, "")], self._memory)
        except Exception as error:
            raise RegistrationError(f"NIXL refused to register {buffer.size} bytes: {error}") from error

    def unpin(self, entry: Entry) -> None:
        """Undo `pin`; see `RealEndpoint.unpin`."""
        self._agent.deregister_memory(entry.handle)

    def engine_address(self) -> bytes:
        """Return what the engine of a peer needs; see `RealEndpoint.engine_address`."""
        return bytes(self._agent.get_agent_metadata())

    def connect_engine(self, description: bytes) -> str:
        """Return the engine's handle of a peer; see `RealEndpoint.connect_engine`."""
        try:
            name: bytes = self._agent.add_remote_agent(description)
        except Exception as error:
            raise TransferFailed(f"NIXL did not take the peer's metadata: {error}") from error
        return name.decode()

    # --- transfers -------------------------------------------------------------------------------------------------

    def post(self, transfer: PostedTransfer) -> None:
        """Post to the engine; see `RealEndpoint.post`."""
        peer = transfer.peer
        if peer not in self._announced:
            self.control.send(peer.line, _ACTIVE)
        self._announced[peer] = transfer.submitted
        if self.settings.threads > 1:
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
        near, far = batch.source_offset, batch.target_offset
        if transfer.operation == "read":
            near, far = far, near
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

        def answered(_: Any) -> str:
            if isinstance(answer, Exception):
                raise answer
            return answer

        if handle is not None:
            self._posted[transfer] = None
            state = self._ask(answered, transfer)
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
        """Do nothing: the engine has delivered the notification."""

    # --- Source ----------------------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Let the engine progress while there is anything to progress."""
        return self.busy() and self._progress(bool(self._inbound))

    def fileno(self) -> None:
        """Return None: the engine has no descriptor."""
        return

    def busy(self) -> bool:
        """Return whether transfers are under way, here or at a peer that writes to or reads from this endpoint."""
        return bool(self._posted or self._inbound)

    def _progress(self, listen: bool) -> bool:
        # Without a peer that writes or reads here there can be no notification, and asking for them
        # costs a call.
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
        # Transfers to lost peers, and peers that need not poll any more.
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
        self.clock.call_at(self.clock.now + BEAT, self._beat, None)

    # --- what peers say --------------------------------------------------------------------------------------------

    def handlers(self) -> dict[bytes, Any]:
        """Return handlers of notes; see `RealEndpoint.handlers`.

        Those of this engine say whether a peer writes or reads here, so that the clock polls the engine.
        """

        def on_active(line: PeerLine, _: list[bytes]) -> None:
            self._inbound.add(line)

        def on_idle(line: PeerLine, _: list[bytes]) -> None:
            self._inbound.discard(line)

        return {**super().handlers(), _ACTIVE: on_active, _IDLE: on_idle}

    def on_lost(self, line: PeerLine) -> None:
        """Act on the loss of a peer; see `RealEndpoint.on_lost`."""
        self._inbound.discard(line)
        super().on_lost(line)


@cache
def _place(device: str) -> tuple[str, int]:
    kind, _, number = device.partition(":")
    return "VRAM" if kind == "cuda" else "DRAM", int(number or 0)


def _descriptors(agent: Any, offset: _Int64s, size: _Int64s, region: Region) -> Any:
    memory, number = _place(region.device)
    if len(size) == 1:  # arrays would take longer than all else here
        return agent.get_xfer_descs([(region.address + offset.item(), size.item(), number)], memory)
    return agent.get_xfer_descs(_rows(offset, region.address, size, number), memory)


def _rows(offset: _Int64s, address: int, size: _Int64s, device: int) -> npt.NDArray[np.uint64]:
    rows = np.zeros((len(size), 3), np.uint64)
    rows[:, 0] = offset + address
    rows[:, 1] = size
    rows[:, 2] = device
    return rows


def _on_off(value: str, name: str) -> bool:
    if value not in ("true", "false"):
        raise ConfigError(f"backend.options.{name} must be true or false, got {value!r}")
    return value == "true"


def _count(value: str, name: str) -> int:
    if not value.isdecimal():
        raise ConfigError(f"backend.options.{name} must be a whole number, 0 for none, got {value!r}")
    return int(value)


def _name(transports: set[str]) -> str:
    return f"nixl {installed('nixl-cu13')} ucx {'+'.join(sorted(transports))}".rstrip()
