# SPDX-License-Identifier: Apache-2.0
"""The rank program of `experiments.transfer`.

Ranks keep transfers in flight to each other, and check the bytes.  Written against the waist only.
What is measured is in the records of the endpoints; this module knows no statistics.

Between points ranks meet over their channels, so that a point begins with all of them ready and
nothing of the one before under way; the warm-up is part of the point, without a pause before what
is measured.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from experiments.barrier import Barrier
from pdsim.core.clock import Clock
from pdsim.core.errors import TransferError
from pdsim.core.units import Seconds
from pdsim.transfer import Batch, Buffer, Peer, Program, Region, Transfer
from pdsim.transfer.job import Rank

__all__ = ["SCHEDULES", "Task", "area_bytes", "exchange", "region_bytes"]

Ints = npt.NDArray[np.int64]
Flow = Sequence[str]  # the rank that the bytes come from, the rank that they go to
Post = Callable[..., Transfer]
_Waves = Sequence[Sequence[Post]]  # what is posted together, one after the other
_Loop = Generator[Any, Any, TransferError | None]

WARMUP = "warmup"
"""The label of transfers that are not measured."""

SCHEDULES = ("free", "rounds", "serial")
"""How an initiator with several flows goes on: each flow for itself; all together, waiting for the last of them;
or one transfer at a time, flow by flow."""


class Task(TypedDict):
    """One point, as plain data, which any rank can be sent.

    Made by `experiments.transfer.transfer_points.TransferPoint.task`; the same for all ranks.
    """

    label: str  # of its measured transfers
    flows: Sequence[Flow]
    blocks: int
    size: int  # bytes of a block
    concurrency: int
    repeat: int
    read: bool  # the sink posts, not the source
    scattered: bool
    schedule: str  # of `SCHEDULES`


def area_bytes(blocks: int, size: int, concurrency: int, scattered: bool) -> int:
    """Return the bytes that one flow takes on either side: a slot for each transfer in flight."""
    return concurrency * blocks * size * (2 if scattered else 1)


def region_bytes(rank: str, tasks: Sequence[Task]) -> int:
    """Return the bytes that *rank* registers: enough for whichever of *tasks* takes most of it."""
    return max(1, *(_area(task) * sum(rank in flow for flow in task["flows"]) for task in tasks))


def _area(task: Task) -> int:
    return area_bytes(task["blocks"], task["size"], task["concurrency"], task["scattered"])


def exchange(
    rank: Rank,
    *,
    points: Sequence[Task],
    warmup: int,
    verify: bool,
    seed: int,
    timeout: float,
    pause: Seconds = 0.0,
) -> Program:
    """Run *points* one after the other and return ``{"points": [{"slots": n, "verified": k}, ...], "error": ""}``.

    In each, the initiator of every flow (the source, or the sink if it reads) keeps ``concurrency`` transfers in
    flight until ``repeat`` are done, after *warmup* that are labelled `WARMUP` and without a pause between the two:
    a process that has slept needs several transfers until it is as fast as it can be.  Between two of them a loop
    waits for *pause*, by half of it more or less, drawn from *seed*: what a real program's one thread takes, so the
    pauses of a rank follow each other.

    All ranks begin each point together, those without a flow in it too, over one region that is registered once.
    *n* counts the slots of all ranks in which bytes arrived, *k* those with the bytes sent; it is None if nothing
    was checked.

    An error ends the list before the point that met it, and is returned, so that what was before it is kept:
    `PeerLost` if a rank is not heard of for *timeout* seconds, and whatever a transfer fails with.
    """
    barrier = Barrier(rank, timeout)
    rank.clock.process(barrier.tick())
    buffer = rank.device.allocate(region_bytes(rank.name, points))
    region = rank.endpoint.register(buffer, "blocks")
    done: list[dict[str, Any]] = []
    pauses = _Pauses(rank.clock, pause, seed, rank.name) if pause else None
    if rank.name == min(rank.name, *rank.peers):  # one is enough
        rank.counts(lambda: len(done), len(points))
    try:
        addresses = yield from barrier.wait("address", rank.endpoint.address())
        peers = {name: rank.endpoint.connect(address) for name, address in addresses.items()}
        for number, task in enumerate(points):
            check = verify and rank.device.holds_bytes
            work = _TransferLoop(rank, task, buffer, region, peers, seed, check, timeout, pauses)
            work.fill()
            rank.clock.settle()
            yield from barrier.start(f"{number} begins")
            yield from work.transfer(warmup)
            yield from barrier.wait(f"{number} has ended")
            mine = work.found(warmup)
            others = yield from barrier.wait(f"{number} is checked", b"%d %d %d" % mine)
            done.append(_total([mine, *(tuple(map(int, totals.split())) for totals in others.values())]))
    except TransferError as error:
        barrier.give_up(error)
        return {"points": done, "error": f"{type(error).__name__}: {error}"}
    rank.endpoint.deregister(region)
    rank.device.free(buffer)
    return {"points": done, "error": ""}


def _total(totals: Sequence[Sequence[int]]) -> dict[str, Any]:
    slots, checked, verified = (sum(counts) for counts in zip(*totals, strict=True))
    return {"slots": slots, "verified": verified if checked else None}


class _TransferLoop:
    """What one rank does in one point.

    Life: made for a point; `fill`; `transfer`, when all ranks are ready; `found`, when all have ended.
    """

    def __init__(
        self,
        rank: Rank,
        task: Task,
        buffer: Buffer,
        region: Region,
        peers: Mapping[str, Peer],
        seed: int,
        check: bool,
        timeout: float,
        pauses: _Pauses | None,
    ) -> None:
        self._rank, self._task, self._buffer = rank, task, buffer
        self._pauses = pauses
        self._plan = _Plan(task, seed)
        self._check = check
        self._timeout = timeout
        initiator = 1 if task["read"] else 0
        mine = [index for index, flow in enumerate(task["flows"]) if flow[initiator] == rank.name]
        self._posts = [self._slots(index, region, peers) for index in mine]

    def _slots(self, index: int, region: Region, peers: Mapping[str, Peer]) -> list[Post]:
        task, rank = self._task, self._rank
        source, sink = task["flows"][index]
        peer = peers[source if task["read"] else sink]
        there = peer.regions["blocks"]
        ends = (there, region) if task["read"] else (region, there)
        start = rank.endpoint.read if task["read"] else rank.endpoint.write
        return [partial(start, peer, self._plan.batch(index, slot, *ends)) for slot in range(task["concurrency"])]

    def fill(self) -> None:
        if self._check:
            self._plan.fill(self._rank.name, self._buffer)

    def found(self, warmup: int) -> tuple[int, int, int]:
        # *warmup* is that of `transfer`: a flow of fewer transfers than slots leaves the last slots unused.
        flows = enumerate(self._task["flows"])
        received = [index for index, flow in flows if flow[1] == self._rank.name]
        used = self._task["concurrency"]
        if self._task["schedule"] == "free":
            used = min(used, max(warmup, self._task["repeat"]))
        slots = len(received) * used
        if not self._check:
            return slots, 0, 0
        return slots, slots, sum(self._plan.verified(index, used, self._buffer) for index in received)

    def transfer(self, warmup: int) -> Generator[Any, Any, None]:
        # Raise the first error when all that were started have ended.
        clock = self._rank.clock
        if error := (yield from _all(clock, [self._flow(loops, warmup) for loops in self._loops()])):
            raise error

    def _loops(self) -> list[list[_Waves]]:
        if self._task["schedule"] == "free":
            return [[[[post]] for post in slots] for slots in self._posts]
        every = [post for slots in self._posts for post in slots]
        return [[[[post] for post in every] if self._task["schedule"] == "serial" else [every]]]

    def _flow(self, loops: Sequence[_Waves], warmup: int) -> _Loop:
        start = {"timeout": self._timeout}
        for label, count in ((WARMUP, warmup), (self._task["label"], self._task["repeat"])):
            # the slots of a flow share its budget: a slow transfer does not hold up the others
            budget = iter(
                range(count if self._task["schedule"] == "free" else -(-count // self._task["concurrency"]))
            )
            clock = self._rank.clock
            after = self._pauses
            running = [_loop(clock, waves, budget, start | {"label": label}, after) for waves in loops]
            if error := (yield from _all(clock, running)):
                return error
        return None


def _all(clock: Clock, loops: Sequence[_Loop]) -> _Loop:
    first: TransferError | None = None
    for process in [clock.process(loop) for loop in loops]:
        error = yield process
        first = first or error
    return first


class _Pauses:
    """What a rank's program does between two transfers: one thread's work, so one pause comes after the other."""

    def __init__(self, clock: Clock, mean: Seconds, seed: int, rank: str) -> None:
        self._clock = clock
        random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *f"pause {rank}".encode()])))
        self._drawn = (mean * (0.5 + share) for _ in repeat(None) for share in random.random(64).tolist())
        self._free = 0.0

    def next(self) -> Seconds:
        now = self._clock.now
        self._free = max(now, self._free) + next(self._drawn)
        return self._free - now


def _loop(
    clock: Clock,
    waves: _Waves,
    budget: Iterator[int],
    start: Mapping[str, Any],
    pauses: _Pauses | None,
) -> _Loop:
    # After each wave comes one of *pauses*.
    try:
        for _ in budget:
            clock.settle()
            for wave in waves:
                for transfer in [post(**start) for post in wave]:  # noqa: UP028 a list cannot be sent values
                    yield transfer
                if pauses is not None:
                    yield clock.timeout(pauses.next())
    except TransferError as error:
        return error
    return None


class _Plan:
    """Where the blocks of every flow lie in each rank's one buffer, and what they hold.

    Each flow has *concurrency* slots at either end, which follow one another in the rank's buffer in the order of
    the flows. A slot has one place for each block, or two if they are scattered, of which half stay zero.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self.flows = task["flows"]
        self._point = zlib.crc32(task["label"].encode())
        self.size = task["size"]
        self.concurrency = task["concurrency"]
        self._seed = seed
        blocks, self._scattered = task["blocks"], task["scattered"]
        self._places = blocks * (2 if self._scattered else 1)  # block-sized places of a slot
        order = np.random.Generator(np.random.PCG64([seed, 0]))
        every: Ints = np.arange(blocks, dtype=np.int64)
        self._from = order.permutation(self._places)[:blocks].astype(np.int64) if self._scattered else every
        self._to = order.permutation(self._places)[:blocks].astype(np.int64) if self._scattered else every

    def batch(self, index: int, slot: int, source: Region, target: Region) -> Batch:
        source_offset = self._at(index, slot, self.flows[index][0]) + self._from * self.size
        target_offset = self._at(index, slot, self.flows[index][1]) + self._to * self.size
        return Batch(source, target, source_offset, target_offset, np.full(len(self._from), self.size))

    def fill(self, rank: str, buffer: Buffer) -> None:
        for index, (source, sink) in enumerate(self.flows):
            for slot in range(self.concurrency):
                if source == rank:
                    buffer.write(self._at(index, slot, rank), self._content(index, slot).tobytes())
                elif sink == rank and self._scattered:  # otherwise every byte is written
                    buffer.write(self._at(index, slot, rank), bytes(self._places * self.size))

    def verified(self, index: int, slots: int, buffer: Buffer) -> int:
        sink = self.flows[index][1]
        good = 0
        for slot in range(slots):
            expected = np.zeros((self._places, self.size), dtype=np.uint8)
            expected[self._to] = self._content(index, slot)[self._from]
            content = buffer.read(self._at(index, slot, sink), self._places * self.size)
            good += zlib.crc32(content) == zlib.crc32(expected.tobytes())
        return good

    def _at(self, index: int, slot: int, rank: str) -> int:
        before = sum(rank in flow for flow in self.flows[:index])
        return (before * self.concurrency + slot) * self._places * self.size

    def _content(self, index: int, slot: int) -> npt.NDArray[np.uint8]:
        generator = np.random.Generator(np.random.PCG64([self._seed, index, slot, self._point]))
        return generator.integers(0, 256, (self._places, self.size), dtype=np.uint8)
