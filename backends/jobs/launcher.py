# SPDX-License-Identifier: Apache-2.0
"""Runs a job on a real engine: one process per rank, watched by a supervisor with deadlines.

Nothing outlives `Processes.run`: not after success or failure, not after Ctrl-C or SIGTERM (the children are killed
on the way out), not after SIGKILL (the kernel kills them).  There are no files and no ports to clean up: a rank is
spoken to over a socket pair (`backends.jobs.supervision`), and its output goes to a file that has no name.
"""

from __future__ import annotations

import copy
import os
import resource
import selectors
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from backends.base.zmq_channel import Keys, job_keys
from backends.emulation.link.emulated_link import DEVICE, EmulatedLink, Lateness, entered, joined
from backends.jobs.affinity import shares
from backends.jobs.spawn import Spawn, spawn
from backends.jobs.supervision import Alive, Done, Go, Line, Message, Moved, Start, WorkerReady
from pdsim.core import errors
from pdsim.core.errors import BackendUnavailable, MessageError, PdsimError, PeerLost, TransferError, TransferTimeout
from pdsim.core.units import positive
from pdsim.hardware.costs import Collective, Engine
from pdsim.hardware.machine import NetworkLink
from pdsim.transfer.job import Outcome, RankResult, RankSpec, ranks_named
from pdsim.transfer.log import TransferLog

SILENCE = 300.0  # seconds after which a rank that says nothing is ended, where nothing else is asked for
CLOSING = 10.0  # seconds more that a rank may take, after its program, to close what it has open
FILES = 256  # a rank takes about 45 beside one peer, and some engines abort where they get none
TAIL = 2000  # characters of a rank's output that go into the error of a rank that died


@dataclass
class Processes:
    """A `Target` on this machine: every rank is a process, on the GPU of it that its `Place` names, or on the host.

    One object may run several jobs.  With *gpus*, the GPUs of places are dealt to so many of this machine in turn.
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
    gpus: int = 0  # that ranks share; 0: the GPU of each place is there
    silence: float = SILENCE  # seconds after which a rank is killed whose clock does not go
    # called now and then with the seconds since the start and what a rank has counted
    progress: Callable[[float, int, int], None] = lambda *_: None
    lateness: list[Lateness] = field(default_factory=list)  # of the packet forwarder, in each job so far
    most_ranks: int = field(default=0, init=False)  # of the jobs so far

    def __post_init__(self) -> None:
        positive("Processes", deadline=self.deadline, startup=self.startup, silence=self.silence)
        positive("Processes", device_capacity=self.device_capacity, gpu_capacity=self.gpu_capacity)

    @property
    def notes(self) -> list[str]:
        """Notes for readers of the results of the jobs so far."""
        ranks, cores = self.most_ranks, len(os.sched_getaffinity(0))
        crowded = (
            f"warning: {ranks} processes share {cores} cores, and each spins while it waits, so times include waits "
            "for a core; use a machine with more cores, or fewer ranks (pdsim list parallel)"
        )
        shared = (
            f"warning: ranks share {self.gpus} GPU{'s' if self.gpus > 1 else ''} (launch.share_gpus=true): bytes "
            "within one cross no link, and its processes take turns, so times are not those of a GPU each"
        )
        said = [*([crowded] if ranks > cores else []), *([shared] if self.gpus else [])]
        return [*said, *(late.complaint for late in self.lateness if late.complaint)]

    def run(
        self,
        ranks: Sequence[RankSpec],
        kill: Mapping[str, float] | None = None,
        restart: Mapping[str, float] | None = None,
        pause: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    ) -> Outcome:
        """Run *ranks* until all have ended; *kill* ends some by SIGKILL, name to seconds after the start.

        *restart* likewise starts a rank again, once it was killed, or has ended by an error or before then, as a new
        process that the others hear of.  Its result is that of its last incarnation; transfers of one that was
        killed are lost with it. *pause* stops ranks by SIGSTOP, each from one time to another, when SIGCONT lets it
        go on.

        Raise `BackendUnavailable` or a `ConfigError` if the machine, the engine or the configuration keeps a rank
        from starting or connecting, and another `TransferError` if something else does.
        """
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY and files < FILES:
            problem = f"a process may open {files} files here, and a rank needs {FILES}: ulimit -n {FILES}"
            raise BackendUnavailable(problem)
        names = [spec.name for spec in ranks]
        ranks_named(names, kill=kill or {}, restart=restart or {}, pause=dict.fromkeys(pause or {}, 0.0))
        self.most_ranks = max(self.most_ranks, len(ranks))
        processors, keys = shares(ranks), job_keys(names)
        network = nullcontext() if self.link is None else joined(self.link, self.nodes)
        with _stoppable(), network as link, _ProcessJob(self) as job:
            for spec in ranks:
                start = self._describe(spec, keys[spec.name], link, processors.get(spec.name, []))
                job.start(
                    start, self.spawn if link is None else _within(link.namespace(spec.place.node), self.spawn)
                )
            job.until_ready(time.monotonic() + self.startup)
            origin = job.go(bool(restart))
            if link is not None:
                link.go(origin)
            job.until_done(dict(kill or {}), dict(restart or {}), _signals(pause or {}))
            if link is not None:
                self.lateness.append(link.lateness())
            return job.outcome()

    def using(self, engine: Engine) -> Processes:
        other = copy.copy(self)
        other.engine = engine
        return other

    def _describe(self, spec: RankSpec, keys: Keys, link: EmulatedLink | None, processors: list[int]) -> Start:
        gpu, threads = spec.place.gpu, self.engine.threads
        gpu = gpu % self.gpus if gpu is not None and self.gpus else gpu
        return Start(
            name=spec.name,
            keys=keys,
            program=spec.program,
            arguments=spec.arguments,
            engine=self.engine,
            # on GPUs engines were measured posting from the clock's thread
            posting=threads if threads > 1 else spec.posting if gpu is None else None,
            bind=self.bind if link is None else link.address(spec.place.node),
            device="" if link is None else DEVICE,
            capacity=self.device_capacity if gpu is None else self.gpu_capacity,
            gpu=gpu,
            collective=self.collective,
            processors=processors,
        )


def _within(namespace: int, start: Spawn) -> Spawn:
    def within(connection: int, output: IO[bytes]) -> Any:
        with entered(namespace):
            return start(connection, output)

    return within


def _signals(pause: Mapping[str, Sequence[tuple[float, float]]]) -> list[tuple[float, str, int]]:
    spans = [(name, *span) for name, times in pause.items() for span in times]
    stops = [(start, name, signal.SIGSTOP.value) for name, start, _ in spans]
    return sorted([*stops, *((end, name, signal.SIGCONT.value) for name, _, end in spans)])


class _Child:
    """One rank's process, which is started and sent its `Start` when this is made; `stop` leaves nothing behind."""

    def __init__(self, start: Start, spawn: Spawn, startup: float) -> None:
        self.name = start.name
        self.start, self.spawn = start, spawn  # for a restart
        self.uri = ""  # of its channel, once it is ready
        self.done: Done | None = None  # once the program has ended
        self.error = ""  # why it was killed by the supervisor, or did not start
        self.ended = False  # whether its socket is closed
        self.seconds = 0.0  # from the job's start to its end
        self.heard = time.monotonic()  # when something came from it last
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 closed by `stop`
        own, other = socket.socketpair()
        self.line = Line(own)
        with other:
            self._process = spawn(other.fileno(), self._output)
        own.settimeout(startup)
        self.send(start)

    def send(self, message: Message) -> None:
        with suppress(OSError):  # it has ended, or is stopped and takes nothing
            self.line.send(message)

    def receive(self) -> list[Message]:
        """Return the messages that have arrived; note the end of the process when its socket closes."""
        try:
            messages = self.line.receive()
        except (ConnectionError, PeerLost):
            self.ended = True
            return []
        except MessageError as error:
            self.end(f"MessageError: {error}")
            return []
        self.heard = time.monotonic()
        return messages

    def end(self, error: str) -> None:
        """Kill the process because of *error*, unless it has ended."""
        if not self.ended:
            self.error = error
            self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def stop(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()
        self.line.connection.close()
        self._output.close()

    def tail(self) -> str:
        """Return the end of what the process printed, on lines of its own."""
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - TAIL))
        text = self._output.read().decode(errors="replace").strip()
        return f"\n{text}" if text else ""

    def result(self) -> RankResult:
        """Return how the rank ended; a death and an error that is not pdsim's carry the end of what it printed."""
        code = self._process.wait()
        died = f"killed by signal {-code}" if code < 0 else f"exit code {code}" if code else ""
        if self.done is None:
            return RankResult(self.name, error=self.error or f"{died or 'ended without a result'}{self.tail()}")
        done, error = self.done, self.done.error
        if error and error.partition(":")[0] not in errors.__all__:
            error += self.tail()
        elif not error and died:
            error = f"{self.error or died} after its program had ended{self.tail()}"
        transfers = TransferLog.by_rank(done.transfers).get(self.name, TransferLog())
        return RankResult(self.name, done.value, error, done.engine, transfers, done.refused)


class _ProcessJob:
    """All children of one run; its end kills them, and then waits for them.

    The steps are `start` for each rank, `until_ready`, `go`, `until_done` and `outcome`.
    """

    def __init__(self, target: Processes) -> None:
        self._target = target
        self._children: dict[str, _Child] = {}
        self._origin = 0.0  # of the job's time, on the monotonic clock
        self._restarts = False
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _ProcessJob:
        return self

    def __exit__(self, *exc: object) -> None:
        for child in self._children.values():
            child.signal(signal.SIGKILL)
        for child in self._children.values():
            child.stop()
        self._selector.close()

    def start(self, start: Start, spawn: Spawn) -> None:
        child = self._children[start.name] = _Child(start, spawn, self._target.startup)
        self._selector.register(child.line.connection, selectors.EVENT_READ, child)

    def until_ready(self, deadline: float) -> None:
        while late := [child.name for child in self._children.values() if not child.uri]:
            for child, message in self._messages(deadline - time.monotonic()):
                if isinstance(message, WorkerReady):
                    child.uri = message.uri
                elif isinstance(message, Done):
                    raise _rebuilt(child, message.error)
            for child in self._children.values():
                if child.ended:
                    raise TransferError(f"rank {child.name!r} did not start: {child.result().error}")
            if time.monotonic() >= deadline:
                raise TransferTimeout(
                    f"not ready after {self._target.startup:g} s: {', '.join(late)}; run fewer ranks at a time"
                )

    def go(self, restarts: bool) -> float:
        self._origin, self._restarts = time.monotonic(), restarts
        for child in self._children.values():
            child.heard = self._origin
            self._release(child)
        return self._origin

    def _release(self, child: _Child) -> None:
        others = {other.name: other.uri for other in self._children.values() if other is not child}
        child.send(Go(self._origin, others, self._target.silence / 4, self._restarts))

    def until_done(
        self, kill: dict[str, float], restart: dict[str, float], signals: list[tuple[float, str, int]]
    ) -> None:
        deadline, silence = self._target.deadline, self._target.silence
        left = set[str]()  # ranks that ended in order before they were to start again
        while not all(child.ended for child in self._children.values()):
            now = time.monotonic() - self._origin
            for name, child in tuple(self._children.items()):
                if kill.get(name, now + 1) <= now:
                    del kill[name]
                    child.end(f"killed by signal {signal.SIGKILL:d}, as was asked for")
                failed = child.ended and (child.done is None or child.done.error or name in left)
                if child.ended and restart.get(name, now) > now:
                    left.add(name)
                if now >= deadline:
                    child.end(f"TransferTimeout: not done after {deadline:g} s, and killed{child.tail()}")
                elif restart.get(name, now + 1) <= now and failed:
                    del restart[name]
                    self.start(child.start, child.spawn)
                    child.stop()
            while signals and signals[0][0] <= now:
                _, name, number = signals.pop(0)
                self._children[name].signal(number)
            if self._silent():
                self._take(0.0)  # what has been said meanwhile: this process may have been stopped itself
            for child, limit in self._silent():  # the others find it gone
                said = f"silent for {limit:g} s (its process is stopped or hangs), and killed{child.tail()}"
                child.end(f"PeerLost: {said}")
            moments = [*kill.values(), *restart.values(), *(at for at, *_ in signals[:1])]
            wake = min([deadline, *(at for at in moments if at > now)]) if now < deadline else now + 1.0
            self._take(max(min(wake - now, silence / 4), 1e-3))

    def _silent(self) -> list[tuple[_Child, float]]:
        silent, now = [], time.monotonic()
        for child in self._children.values():
            limit = self._target.silence
            if not child.uri:
                limit = max(limit, self._target.startup)
            elif child.done is not None:
                limit += CLOSING
            if now - child.heard > limit and not child.ended and not child.error:
                silent.append((child, limit))
        return silent

    def _take(self, timeout: float) -> None:
        for child, message in self._messages(timeout):
            now = time.monotonic() - self._origin
            if isinstance(message, Done):
                child.done, child.seconds = message, now
                if message.error.startswith(f"{BackendUnavailable.__name__}: "):  # and others would wait for it
                    raise _rebuilt(child, message.error)
            elif isinstance(message, WorkerReady):  # of one that was started again
                child.uri = message.uri
                for other in self._children.values():
                    if other is not child and other.uri and not other.ended:
                        other.send(Moved(child.name, child.uri))
                self._release(child)
            elif isinstance(message, Alive) and message.of:
                self._target.progress(now, message.done, message.of)
        for child in self._children.values():
            if child.ended and not child.seconds:
                child.seconds = time.monotonic() - self._origin

    def outcome(self) -> Outcome:
        children = self._children.values()
        done = [child.done for child in children if child.done is not None]
        return Outcome(
            {child.name: child.result() for child in children},
            max((child.seconds for child in children), default=0.0),
            pools={name: peak for message in done for name, peak in message.pools.items()},
            events=sum(message.events for message in done),
        )

    def _messages(self, timeout: float) -> Iterator[tuple[_Child, Message]]:
        for key, _ in self._selector.select(max(0.0, timeout)):
            child: _Child = key.data
            for message in child.receive():
                yield child, message
            if child.ended:
                self._selector.unregister(child.line.connection)


def _rebuilt(child: _Child, error: str) -> PdsimError:
    name, _, text = error.partition(": ")
    kind = getattr(errors, name, None)
    if name in errors.__all__ and isinstance(kind, type) and issubclass(kind, PdsimError):
        return kind(text)
    return TransferError(f"rank {child.name!r} did not start: {error}{child.tail()}")


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
