# SPDX-License-Identifier: Apache-2.0
"""One rank's process: it waits for orders on a pipe, meets the others, transfers in turns, and answers."""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.probe.board import Board, Processors
from benchmarks.probe.cores import spin
from benchmarks.probe.drivers import LIBRARIES, Memory
from benchmarks.probe.plan import PLACES, Variant

SLOTS = 4
"""Parts of each half of the memory: what flows that run together read from, and write to."""


@dataclass(frozen=True)
class Flow:
    """One transfer of a point: *count* pieces of *size* bytes between *slot* here and the same of *peer*."""

    peer: str
    operation: str
    count: int
    size: int
    slot: int
    thread: int  # which of the rank's posting threads, from 0 on


@dataclass(frozen=True)
class Times:
    """When a flow began, was prepared, posted and done: nanoseconds after the instant of the start."""

    begun: int
    prepared: int
    posted: int
    done: int


def main(pipe: Connection, name: str, variant: Variant, gpu: int | None, half: int, page: Path) -> None:
    """Serve orders until told to end.  An error is an answer too."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    try:
        rank = _Rank(name, variant, gpu, half, page)
        pipe.send(("ok", rank.driver.describe()))
        while True:
            while not pipe.poll(0 if gpu is None else 1e-3):
                rank.driver.progress()
            order, *arguments = pipe.recv()
            if order == "end":
                break
            pipe.send(("ok", getattr(rank, order)(*arguments)))
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
    os._exit(0)  # NIXL's libraries and the system's in one process may crash at exit


class _Rank:
    """What orders act on."""

    def __init__(self, name: str, variant: Variant, gpu: int | None, half: int, page: Path) -> None:
        self.name, self.variant, self.half = name, variant, half
        self.board = Board(page, name, list(PLACES))
        self.memory = Memory(2 * half, gpu)
        before = _threads()
        self.driver = LIBRARIES[variant.library](f"{name}-{os.getpid()}", variant, self.memory)
        own = _threads() - before
        self.peers: dict[str, Any] = {}
        self.orders: list[queue.SimpleQueue[Any]] = []
        self.processors = Processors(list(PLACES).index(name), len(PLACES))
        self.processors.take()
        if variant.beside:
            self.processors.bind(own, variant.beside)
        if variant.busy and self.processors.enough:
            self.stranger = spin((self.processors.all[0] + variant.busy) % (os.cpu_count() or 1))
        gc.disable()  # its pauses are Python's own

    def meet(self, descriptions: dict[str, Any]) -> None:
        """Take note of all others."""
        self.peers = {name: self.driver.meet(told) for name, told in descriptions.items() if name != self.name}

    def fill(self, source: int, target: int) -> None:
        """Set the half that is sent and the half that is received to a value each."""
        self.memory.fill(0, self.half, source)
        self.memory.fill(self.half, self.half, target)

    def peek(self, offset: int) -> int:
        """Return a byte of the half that is received."""
        return self.memory.peek(self.half + offset)

    def host(self) -> tuple[float, float]:
        """Return nanoseconds of one turn of a Python loop and of one launch on the GPU (0 on the host)."""
        begin, total = time.perf_counter_ns(), 0
        for index in range(200_000):
            total += index & 3
        turn = (time.perf_counter_ns() - begin) / 200_000
        return turn, 0.0 if self.memory.gpu is None else self.memory.launch_ns(time.perf_counter_ns)

    def go(self, number: int, turns: int, crew: list[str], flows: list[Flow]) -> list[list[Times]]:
        """Transfer *flows* once a turn, all of *crew* starting together; turns count from *number* on."""
        threads = 1 + max(flow.thread for flow in flows)
        parts = [[flow for flow in flows if flow.thread == index] for index in range(threads)]
        offsets = [[self._offsets(flow) for flow in part] for part in parts]
        while threads > 1 and len(self.orders) < threads:
            self.orders.append(queue.SimpleQueue())
            arguments = (self.orders[-1], Processors(list(PLACES).index(self.name), len(PLACES)))
            threading.Thread(target=self._serve, args=arguments, daemon=True).start()
        self.processors.settle()
        found = []
        for turn in range(number, number + turns):
            start = self.board.meet(turn, crew, self._meanwhile)
            _wait(start)
            found.append(self._turn(start, flows, parts, offsets))
        return found

    def _meanwhile(self) -> None:
        self.driver.progress()  # a target of NIXL's must call it, or what is sent to it never ends
        if self.memory.gpu is None:  # a dry run's ranks share processors
            os.sched_yield()

    def _turn(self, start: int, flows: list[Flow], parts: list[list[Flow]], offsets: list[Any]) -> list[Times]:
        if len(parts) == 1:
            return self._together(start, flows, offsets[0])
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for index, part in enumerate(parts):
            self.orders[index].put((start, part, offsets[index], index, answers))
        found = dict(answers.get() for _ in parts)
        if errors := [str(answer) for answer in found.values() if isinstance(answer, Exception)]:
            raise RuntimeError(errors[0])
        turns = [iter(found[index]) for index in range(len(parts))]
        return [next(turns[flow.thread]) for flow in flows]

    def _serve(self, orders: queue.SimpleQueue[Any], processors: Processors) -> None:
        self.memory.select()
        if processors.enough:  # not those of the thread that started it
            os.sched_setaffinity(0, processors.all)
        while True:
            start, part, offsets, index, answers = orders.get()
            try:
                answers.put((index, self._together(start, part, offsets)))
            except Exception as error:
                answers.put((index, error))

    def _together(self, start: int, flows: list[Flow], offsets: list[tuple[Any, Any]]) -> list[Times]:
        """Post *flows* one after the other, then wait for all."""
        clock = time.monotonic_ns
        posted: list[tuple[int, int, int, Any]] = []
        for flow, (near, far) in zip(flows, offsets, strict=True):
            begun = clock()
            prepared = self.driver.prepare(self.peers[flow.peer], flow.operation, near, far, flow.size)
            ready = clock()
            handle = self.driver.post(prepared)
            posted.append((begun, ready, clock(), handle))
        ended: dict[int, int] = {}
        while len(ended) < len(posted):
            for index, (*_, handle) in enumerate(posted):
                if index not in ended and self.driver.done(handle):
                    ended[index] = clock()
        for *_, handle in posted:
            self.driver.release(handle)
        return [
            Times(begun - start, ready - start, at - start, ended[index] - start)
            for index, (begun, ready, at, _) in enumerate(posted)
        ]

    def _offsets(self, flow: Flow) -> tuple[Any, Any]:
        """Return the offsets here and there: one side in order, the other in reverse, so that none can be merged."""
        import numpy as np

        first = flow.slot * (self.half // SLOTS)
        send = np.uint64(first) + np.arange(flow.count, dtype=np.uint64) * np.uint64(flow.size)
        receive = send[::-1] + np.uint64(self.half)
        return (send, receive) if flow.operation == "write" else (receive, send)


def _threads() -> set[int]:
    """Return the threads of this process as the kernel numbers them."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def _wait(start: int) -> None:
    while time.monotonic_ns() < start:
        pass
