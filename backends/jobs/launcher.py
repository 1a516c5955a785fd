# SPDX-License-Identifier: Apache-2.0
"""Runs a job on a real engine: one process per rank, watched by a supervisor with deadlines.

Nothing outlives `Processes.run`: not after success or failure, not after Ctrl-C or SIGTERM (the children are killed
on the way out), not after SIGKILL (the kernel kills them).  There are no files and no ports to clean up: a rank is
spoken to over a socket pair (`backends.jobs.supervision`), and its output goes to a file that has no name.
"""

from __future__ import annotations

import copy
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from backends.base.zmq_channel import Keys, job_keys
from backends.emulation.link import namespaces
from backends.emulation.link.emulated_link import EmulatedLink, Lateness, joined
from backends.jobs import supervision
from backends.jobs.affinity import shares
from backends.jobs.child_process import ChildProcess, Spawn, spawn
from pdsim.core import errors
from pdsim.core.errors import PdsimError, TransferError, TransferTimeout
from pdsim.core.units import positive
from pdsim.hardware.costs import Collective, Engine
from pdsim.hardware.machine import NetworkLink
from pdsim.transfer.job import Outcome, RankSpec, ranks_named

__all__ = ["SILENCE", "Processes"]

SILENCE = 300.0
"""Seconds after which a rank that says nothing is ended, where nothing else is asked for."""

CLOSING = 10.0
"""Seconds more that a rank may take, after its program, to close what it has open."""


@dataclass
class Processes:
    """A `Target` on this machine: every rank is a process, on the GPU of it that its `Place` names, or on the host.

    One object may run several jobs.  Ranks that share a GPU share what it really has.
    """

    engine: Engine
    deadline: float = 3600.0  # seconds after which ranks that still run are killed
    bind: str = "127.0.0.1"  # the address that ranks listen on
    device_capacity: int = 4 << 30  # bytes that each rank on the host may allocate
    startup: float = 60.0  # seconds for all ranks to get ready
    spawn: Spawn = spawn  # starts a rank's process
    gpu_capacity: int = 4 << 30  # bytes that each rank on a GPU may allocate
    collective: Collective | None = None  # what groups of ranks gather with
    link: NetworkLink | None = None  # joins the nodes, which then are network namespaces of this machine
    nodes: int = 1
    silence: float = SILENCE  # seconds after which a rank is killed whose clock does not go
    # called now and then with the seconds since the start and what a rank has counted
    progress: Callable[[float, int, int], None] = lambda *_: None
    lateness: list[Lateness] = field(default_factory=list)  # of the packet forwarder, in each job so far

    def __post_init__(self) -> None:
        positive("Processes", deadline=self.deadline, startup=self.startup, silence=self.silence)
        positive("Processes", device_capacity=self.device_capacity, gpu_capacity=self.gpu_capacity)

    @property
    def notes(self) -> list[str]:
        """Notes for readers of the results of the jobs so far."""
        return [late.complaint for late in self.lateness if late.complaint]

    def run(
        self,
        ranks: Sequence[RankSpec],
        kill: Mapping[str, float] | None = None,
        restart: Mapping[str, float] | None = None,
        pause: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    ) -> Outcome:
        """Run *ranks* until all have ended; *kill* ends some by SIGKILL, name to seconds after the start.

        *restart* likewise starts a rank again, once it has been killed or ended by an error, as a new process that
        the others hear of.  Its result is that of its last incarnation; transfers of one that was killed are
        lost with it. *pause* stops ranks by SIGSTOP, each from one time to another, when SIGCONT lets it go on.

        Raise `BackendUnavailable` or a `ConfigError` if the engine or the configuration keeps a rank from starting,
        and another `TransferError` if something else does.
        """
        names = [spec.name for spec in ranks]
        ranks_named(names, kill=kill or {}, restart=restart or {}, pause=dict.fromkeys(pause or {}, 0.0))
        processors, keys = shares(ranks), job_keys(names)
        with _stoppable(), self._network() as network, _ProcessJob(self.startup, self.silence, self.progress) as job:
            for spec in ranks:
                start = self._describe(spec, keys[spec.name], network, processors.get(spec.name, []))
                job.start(start, self._spawn(spec, network))
            job.until_ready(time.monotonic() + self.startup)
            origin = job.go(bool(restart))
            if network is not None:
                network.go(origin)
            job.until_done(self.deadline, dict(kill or {}), dict(restart or {}), _signals(pause or {}))
            if network is not None:
                self.lateness.append(network.lateness())
            return job.outcome()

    def _network(self) -> AbstractContextManager[EmulatedLink | None]:
        return nullcontext() if self.link is None else joined(self.link, self.nodes)

    def _spawn(self, spec: RankSpec, network: EmulatedLink | None) -> Spawn:
        if network is None:
            return self.spawn

        def within(connection: int, output: IO[bytes]) -> Any:
            with namespaces.entered(network.namespace(spec.place.node)):
                return self.spawn(connection, output)

        return within

    def using(self, engine: Engine) -> Processes:
        """Return the same machine with another *engine*."""
        other = copy.copy(self)
        other.engine = engine
        return other

    def _posting(self, spec: RankSpec) -> int | None:
        # On GPUs engines were measured posting from the clock's thread.
        if self.engine.threads > 1:
            return self.engine.threads
        return spec.posting if spec.place.gpu is None else None

    def _describe(
        self, spec: RankSpec, keys: Keys, network: EmulatedLink | None, processors: list[int]
    ) -> supervision.Start:
        return supervision.Start(
            name=spec.name,
            keys=keys,
            program=spec.program,
            arguments=spec.arguments,
            peers=[name for name in keys.public if name != spec.name],
            engine=self.engine,
            posting=self._posting(spec),
            bind=self.bind if network is None else network.address(spec.place.node),
            device="" if network is None else namespaces.DEVICE,
            capacity=self.device_capacity if spec.place.gpu is None else self.gpu_capacity,
            gpu=spec.place.gpu,
            collective=self.collective,
            processors=processors,
        )


def _signals(pause: Mapping[str, Sequence[tuple[float, float]]]) -> list[tuple[float, str, int]]:
    spans = [(name, *span) for name, times in pause.items() for span in times]
    stops = [(start, name, signal.SIGSTOP.value) for name, start, _ in spans]
    return sorted([*stops, *((end, name, signal.SIGCONT.value) for name, _, end in spans)])


class _ProcessJob:
    """All children of one run; its end kills them, and then waits for them.

    The steps are `start` for each rank, `until_ready`, `go`, `until_done` and `outcome`.
    """

    def __init__(self, startup: float, silence: float, progress: Callable[[float, int, int], None]) -> None:
        self._startup = startup
        self._silence = silence
        self._progress = progress
        self._children: list[ChildProcess] = []
        self._origin = 0.0  # of the job's time, on the monotonic clock
        self._restarts = False
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _ProcessJob:
        return self

    def __exit__(self, *exc: object) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            child.stop()
        self._selector.close()

    def start(self, start: supervision.Start, spawn: Spawn) -> None:
        child = ChildProcess(start, spawn, self._startup)
        self._children.append(child)
        self._selector.register(child.connection, selectors.EVENT_READ, child)

    def until_ready(self, deadline: float) -> None:
        while not all(child.uri for child in self._children):
            for child, message in self._messages(deadline - time.monotonic()):
                if isinstance(message, supervision.WorkerReady):
                    child.uri = message.uri
                elif isinstance(message, supervision.WorkerFailed):
                    raise _rebuilt(child, message)
            for child in self._children:
                if child.ended:
                    raise TransferError(f"rank {child.name!r} did not start: {child.result().error}")
            if time.monotonic() >= deadline:
                late = ", ".join(child.name for child in self._children if not child.uri)
                said = f"not ready after {self._startup:g} s: {late}; give Processes a longer startup"
                raise TransferTimeout(said)

    def go(self, restarts: bool) -> float:
        self._origin = time.monotonic()
        self._restarts = restarts
        for child in self._children:
            child.heard = self._origin
            self._release(child)
        return self._origin

    def _release(self, child: ChildProcess) -> None:
        others = {other.name: other.uri for other in self._children if other.name != child.name}
        with suppress(OSError):  # it has just ended
            go = supervision.Go(self._origin, others, self._silence / 4, self._restarts)
            supervision.send(child.connection, go)

    def _again(self, old: ChildProcess) -> None:
        # The old process is stopped, and its messages are forgotten; the new one has a place in the list of children
        # at once.
        child = ChildProcess(old.start, old.spawn, self._startup)
        self._children[self._children.index(old)] = child
        self._selector.register(child.connection, selectors.EVENT_READ, child)
        old.stop()

    def _rejoin(self, child: ChildProcess, uri: str) -> None:
        child.uri = uri
        for other in self._children:
            if other is not child and other.uri and not other.ended:
                with suppress(OSError):  # it ends just now
                    supervision.send(other.connection, supervision.Moved(child.name, uri))
        self._release(child)

    def until_done(
        self,
        deadline: float,
        kill: dict[str, float],
        restart: dict[str, float],
        signals: list[tuple[float, str, int]],
    ) -> None:
        # One that has been silent for too long is killed, and the others find it gone.
        while not all(child.ended for child in self._children):
            now = time.monotonic() - self._origin
            for child in tuple(self._children):
                if kill.get(child.name, now + 1) <= now:
                    del kill[child.name]
                    child.end(f"killed by signal {signal.SIGKILL:d}, as was asked for")
                if now >= deadline:
                    child.end(f"TransferTimeout: not done after {deadline:g} s, and killed{child.tail()}")
                elif restart.get(child.name, now + 1) <= now and child.broken:
                    del restart[child.name]
                    self._again(child)
            while signals and signals[0][0] <= now:
                _, name, number = signals.pop(0)
                next(child for child in self._children if child.name == name).signal(number)
            self._end_silent()
            moments = [*kill.values(), *restart.values(), *(at for at, *_ in signals[:1])]
            wake = min([deadline, *(at for at in moments if at > now)]) if now < deadline else now + 1.0
            self._take(max(min(wake - now, self._silence / 4), 1e-3))

    def _end_silent(self) -> None:
        if self._silent():
            self._take(0.0)  # what has been said meanwhile: this process may have been stopped itself
        for child, limit in self._silent():
            said = child.tail()
            child.end(f"PeerLost: silent for {limit:g} s (its process is stopped or hangs), and killed{said}")

    def _silent(self) -> list[tuple[ChildProcess, float]]:
        silent, now = [], time.monotonic()
        for child in self._children:
            limit = self._silence
            if not child.uri:
                limit = max(limit, self._startup)
            elif child.done is not None:
                limit += CLOSING
            if now - child.heard > limit and not child.ended and not child.error:
                silent.append((child, limit))
        return silent

    def _take(self, timeout: float) -> None:
        for child, message in self._messages(timeout):
            if isinstance(message, supervision.Done):
                child.done = message
                child.seconds = time.monotonic() - self._origin
            elif isinstance(message, supervision.WorkerReady):
                self._rejoin(child, message.uri)
            elif isinstance(message, supervision.WorkerFailed):
                child.error = f"{message.kind}: {message.message}"
            elif isinstance(message, supervision.Alive) and message.of:
                self._progress(time.monotonic() - self._origin, message.done, message.of)
        for child in self._children:
            if child.ended and child.done is None and not child.seconds:
                child.seconds = time.monotonic() - self._origin

    def outcome(self) -> Outcome:
        results = {child.name: child.result() for child in self._children}
        done = [child.done for child in self._children if child.done is not None]
        pools = {name: peak for message in done for name, peak in message.pools.items()}
        seconds = max((child.seconds for child in self._children), default=0.0)
        return Outcome(results, seconds, pools=pools, events=sum(message.events for message in done))

    def _messages(self, timeout: float) -> Iterator[tuple[ChildProcess, supervision.Message]]:
        for key, _ in self._selector.select(max(0.0, timeout)):
            child: ChildProcess = key.data
            for message in child.receive():
                yield child, message
            if child.ended:
                self._selector.unregister(child.connection)


def _rebuilt(child: ChildProcess, message: supervision.WorkerFailed) -> PdsimError:
    kind = getattr(errors, message.kind, None)
    if message.kind in errors.__all__ and isinstance(kind, type) and issubclass(kind, PdsimError):
        return kind(message.message)
    return TransferError(f"rank {child.name!r} did not start: {message.kind}: {message.message}{child.tail()}")


@contextmanager
def _stoppable() -> Iterator[None]:
    # Only the main thread can: on another one this does nothing.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
