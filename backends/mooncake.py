"""Mooncake's TransferEngine, on host memory: ``mooncake_tcp`` over TCP and ``mooncake`` over RDMA.

What it does about the engine's ways:

- The protocol argument does not select the transport: ``MC_FORCE_TCP`` does, and without RDMA devices it falls back to
  TCP.  The engine's log is the only witness, so the log of its start is read.
- Batch calls busy-poll until they are done.  They run in a thread of each peer, in order, so that a peer that has
  stopped does not delay another; several threads on one peer only compete for the processor (`threads`, below).
- A batch that failed may have other blocks under way: the engine stops looking at the first bad one.  Such a transfer
  stays in quarantine.
- A batch id is a pointer that is freed with the answer: it is used once and never leaves the thread.
- The engine's own notifications are text (its binding decodes UTF-8), travel apart from the data and must be polled
  for.  Ours go over `backends.link` after the target has acknowledged the bytes, so they arrive once, in order, and
  wake the target.
- It listens on all interfaces, whatever it is told, and takes writes to registered memory from anyone: run it on a
  trusted network, or in a network namespace.
"""

from __future__ import annotations

import math
import queue
import re
import threading
import time
from collections.abc import Mapping
from functools import partial
from importlib.metadata import packages_distributions, version

from backends.endpoint import RealEndpoint
from backends.environment import captured_stderr, prepare
from backends.host import HostBuffer
from backends.state import Entry, Flight, PeerState
from pdsim.errors import BackendUnavailable, ConfigError, RegistrationError

__all__ = ["MooncakeEndpoint"]

_VARIANTS: Mapping[str, tuple[str, dict[str, str], str]] = {
    # protocol, environment, what the log says of each transport or device that is used
    "mooncake_tcp": ("tcp", {"MC_FORCE_TCP": "1"}, r"TcpTransport: (listen)"),
    "mooncake": ("rdma", {}, r"RDMA device: (\w+)"),
}

INSTALL = (
    "pip install 'pdsim[mooncake]' and, on Debian, "
    "apt-get install -y --no-install-recommends libibverbs1 libnuma1 libcurl4"
)
PATIENCE = 30.0
"""Seconds that the engine goes on waiting after our deadline, for the proof that lets a transfer settle."""


class MooncakeEndpoint(RealEndpoint):
    """An `Endpoint` on ``mooncake.engine.TransferEngine``.

    Options of the engine beside environment variables: ``threads``, how many batches to one peer are under way at once,
    and ``device``, the RDMA devices to use, with commas between them; those that the engine finds if it is empty.
    """

    kind = "mooncake"

    def _attach(self) -> str:
        if self.settings.name not in _VARIANTS:
            raise BackendUnavailable(
                f"backend {self.settings.name!r} moves GPU memory, which target=real does not do yet; "
                f"use backend=mooncake_tcp"
            )
        protocol, variant, witness = _VARIANTS[self.settings.name]
        options = dict(self.settings.options)
        self._threads = _positive_int(options.pop("threads", "1"), "threads")
        self._queues: dict[PeerState, queue.SimpleQueue[Flight | None]] = {}
        self._workers: list[threading.Thread] = []
        device = options.pop("device", "")
        patience = max(5, math.ceil(self.settings.timeout + PATIENCE))
        defaults = {
            "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",  # 0.3.13 refuses a batch of more than 1024 otherwise
            "MC_TRANSFER_TIMEOUT": str(patience),
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(patience),
            "MC_LOG_LEVEL": "INFO",
        }
        prepare(self.settings.name, {**variant, **options}, defaults)
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise BackendUnavailable(f"Mooncake cannot be imported ({error}): {INSTALL}") from error
        self._native = TransferEngine()
        with captured_stderr() as log:
            code = self._native.initialize(self.bind, "P2PHANDSHAKE", protocol, device)
        text = log()
        if code:
            raise BackendUnavailable(f"Mooncake did not start (code {code}): {text.strip()[-300:]}")
        found = sorted(set(re.findall(witness, text)))
        if not found:
            raise BackendUnavailable(f"Mooncake did not report a transport over {protocol}: {text.strip()[-300:]}")
        self._session = f"{self.bind}:{self._native.get_rpc_port()}"
        return " ".join(["mooncake", _version(), protocol, *(found if protocol == "rdma" else [])])

    def _drained(self) -> bool:
        """As for any engine over TCP; nobody can see what an RDMA device has yet to write."""
        return self.settings.name == "mooncake_tcp" and super()._drained()

    def _pin(self, buffer: HostBuffer) -> None:
        code = self._native.register_memory(buffer.address, buffer.size)
        if code:
            raise RegistrationError(f"Mooncake refused to register {buffer.size} bytes (code {code})")

    def _unpin(self, entry: Entry) -> None:
        code = self._native.unregister_memory(entry.buffer.address)
        if code:
            raise RegistrationError(f"Mooncake refused to unregister {entry.region.name!r} (code {code})")

    def _describe(self) -> bytes:
        return self._session.encode()

    def _meet(self, description: bytes) -> str:
        return description.decode()

    def _post(self, flight: Flight) -> None:
        batch = flight.batch
        near, far = (
            (batch.source_offset, batch.target_offset)
            if flight.operation == "write"
            else (batch.target_offset, batch.source_offset)
        )
        flight.handle = (
            (near + flight.local.region.address).tolist(),
            (far + flight.remote.address).tolist(),
            batch.size.tolist(),
        )
        flight.prepared = self.clock.now
        self._queue(flight.peer).put(flight)

    def _queue(self, peer: PeerState) -> queue.SimpleQueue[Flight | None]:
        if peer not in self._queues:
            work: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
            self._queues[peer] = work
            for number in range(self._threads):
                name = f"mooncake {peer.name} {number}"
                worker = threading.Thread(target=self._serve, args=(work,), name=name, daemon=True)
                self._workers.append(worker)
                worker.start()
        return self._queues[peer]

    def _serve(self, work: queue.SimpleQueue[Flight | None]) -> None:
        """Post batches and wait for them, one after the other; runs in a thread of its own."""
        while (flight := work.get()) is not None:
            posted = time.monotonic()
            if flight.triggered:  # failed while it waited: nothing has moved, and nothing will
                self.clock.call(partial(self._stopped, flight))
                continue
            name = "batch_transfer_async_" + flight.operation
            ticket = getattr(self._native, name)(flight.peer.handle, *flight.handle)
            posted = time.monotonic()
            code = self._native.get_batch_transfer_status([ticket]) if ticket else None
            self.clock.call(partial(self._returned, flight, code, posted, time.monotonic()))

    def _returned(self, flight: Flight, code: int | None, posted: float, ended: float) -> None:
        """Take the engine's answer, on the clock's thread; *code* is None if the batch was not even taken."""
        flight.handle = None
        flight.posted, at = posted - self.clock.origin, ended - self.clock.origin
        if code == 0:
            self._complete(flight, at)
        else:
            what = "did not take" if code is None else "failed"
            self._refused(flight, f"Mooncake {what} a {flight.operation} of {flight.batch.nbytes} bytes (code {code})")

    def _detach(self, idle: bool) -> None:
        for work in self._queues.values():
            for _ in range(self._threads):
                work.put(None)
        if idle:
            for worker in self._workers:
                worker.join()
            del self._native


def _positive_int(text: str, name: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"backend.options.{name} must be a whole number > 0, got {text!r}")
    return int(text)


def _version() -> str:
    """Return the version of whichever of its distributions is installed."""
    return version(packages_distributions()["mooncake"][0])
