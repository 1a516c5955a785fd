# SPDX-License-Identifier: Apache-2.0
"""What runs the points of a sweep: the protocol, and processes on this machine.

An executor is a frozen dataclass whose fields are the settings of its file in ``conf/executor``; packages register
theirs under the entry-point group ``pdsim.executors``.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from pdsim.core.units import NotNegativeInt
from pdsim.sweep.points import Point

Row = Mapping[str, Any]
Measure = Callable[[Point], Row]
"""`pdsim.sweep.driver.measure`, or what stands for it in a test; it is sent to other processes by its name."""

_ATTEMPTS = 2
"""How often a point is begun: a process that dies may have died of its neighbour, not of its point."""


class Executor(Protocol):
    """Runs the points of a sweep; keeps no state between calls of `run`."""

    def run(self, measure: Measure, points: Sequence[Point]) -> Generator[Row, None, None]:
        """Yield ``measure(point)`` of each of *points* as it ends, in any order.

        A point whose process died is a row with the status ``failed``.  To close the generator ends what is under
        way.
        """


@dataclass(frozen=True, kw_only=True)
class Local:
    """Processes on this machine, which stay warm from point to point."""

    workers: NotNegativeInt = 0  # 0: one for each core with target=model, one in all with target=real

    def run(self, measure: Measure, points: Sequence[Point]) -> Generator[Row, None, None]:
        """See `Executor`."""
        real = any(point.config is not None and point.config.target != "model" for point in points)
        most = self.workers or (1 if real else len(os.sched_getaffinity(0)))
        pool = _Pool(measure, min(most, len(points)))
        try:
            yield from pool.run(points)
        finally:
            pool.close()


@dataclass
class _Worker:
    """A process of the pool, our end of its pipe, and the point that it works on, None while it waits."""

    process: BaseProcess
    pipe: Connection
    point: Point | None = None


class _Pool:
    """Processes that are given one point at a time, and are replaced when they die; they end with `close`."""

    def __init__(self, measure: Measure, size: int) -> None:
        self._measure = measure
        # nothing of this process, its threads and locks, is in it
        self._spawn = multiprocessing.get_context("spawn")
        self._workers = [self._started() for _ in range(size)]

    def run(self, points: Sequence[Point]) -> Iterator[Row]:
        left = deque(points)
        begun: dict[str, int] = {}
        for worker in self._workers:
            self._give(worker, left, begun)
        while busy := {worker.pipe: worker for worker in self._workers if worker.point is not None}:
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]  # connections are all that is waited for
                point = worker.point
                assert point is not None
                try:
                    row = worker.pipe.recv()
                except (EOFError, OSError):
                    row = self._replace(worker, point, left, begun)
                worker.point = None
                self._give(worker, left, begun)
                if row is not None:
                    yield row

    def close(self) -> None:
        for worker in self._workers:
            if worker.point is not None:
                worker.process.terminate()
            worker.pipe.close()
        deadline = time.monotonic() + 5.0
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()

    def _started(self) -> _Worker:
        # The parent closes its copy of the process's end of the pipe, so that it sees an end of file when the
        # process dies.
        ours, theirs = self._spawn.Pipe()
        process = self._spawn.Process(target=_work, args=(theirs, self._measure, os.getpid()), daemon=False)
        with interrupts_blocked():
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def _give(self, worker: _Worker, left: deque[Point], begun: dict[str, int]) -> None:
        if not left:
            return
        worker.point = left.popleft()
        begun[worker.point.name] = begun.get(worker.point.name, 0) + 1
        with suppress(BrokenPipeError):  # it died while it waited; its end is seen when it is listened to
            worker.pipe.send(worker.point)

    def _replace(self, worker: _Worker, point: Point, left: deque[Point], begun: Mapping[str, int]) -> Row | None:
        worker.process.join()
        worker.pipe.close()
        code = worker.process.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        fresh = self._started()
        worker.process, worker.pipe = fresh.process, fresh.pipe
        if begun[point.name] < _ATTEMPTS:
            left.appendleft(point)
            return None
        return point.row("failed", f"its process {how}, {_ATTEMPTS} times")


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Start processes to which Ctrl-C does nothing: it reaches the whole group, and the parent decides."""
    resource_tracker.ensure_running()  # begun by the first start, it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a Python that begins prints a traceback
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Connection, measure: Measure, parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it dies with its parent
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with suppress(EOFError, ConnectionError):  # the parent has ended, or given up, as with a full disk
        while True:
            pipe.send(measure(pipe.recv()))
