# SPDX-License-Identifier: Apache-2.0
"""The rank program of `experiments.transfer`: ranks keep transfers in flight to each other, and check the bytes.

Written against the waist only.  Between points ranks meet at a `Barrier`, so that a point begins with all of them
ready and nothing of the one before under way.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, TypedDict, cast

import numpy as np
import numpy.typing as npt

from pdsim.core.clock import Clock
from pdsim.core.errors import PeerLost, TransferError
from pdsim.core.units import Seconds
from pdsim.transfer import Batch, Buffer, Message, Peer, Program, Region, Transfer
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
    """One point, the same for all ranks: `experiments.transfer.points.TransferPoint` as plain data."""

    label: str  # of its measured transfers
    flows: Sequence[Flow]
    blocks: int
    size: int  # bytes of a block
    concurrency: int
    repeat: int
    read: bool  # the sink posts, not the source
    scattered: bool
    schedule: str  # of `SCHEDULES`


def area_bytes(task: Task) -> int:
    """Return the bytes that one flow takes on either side: a slot for each transfer in flight."""
    return task["concurrency"] * task["blocks"] * task["size"] * (2 if task["scattered"] else 1)


def region_bytes(rank: str, tasks: Sequence[Task]) -> int:
    """Return the bytes that *rank* registers: enough for whichever of *tasks* takes most of it."""
    return max(1, *(area_bytes(task) * sum(rank in flow for flow in task["flows"]) for task in tasks))


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
            plan = _Plan(task, seed)
            check = verify and rank.device.holds_bytes
            posts = _posts(rank, task, plan, region, peers)
            if check:
                plan.fill(rank.name, buffer)
            rank.clock.settle()
            yield from barrier.start(f"{number} begins")
            loops = [_flow(rank.clock, task, waves, warmup, timeout, pauses) for waves in _waves(task, posts)]
            if error := (yield from _all(rank.clock, loops)):  # when all that were started have ended
                raise error
            yield from barrier.wait(f"{number} has ended")
            slots, checked, right = plan.received(rank.name, buffer, warmup, check)
            others = yield from barrier.wait(f"{number} is checked", b"%d %d %d" % (slots, checked, right))
            every = [(slots, checked, right), *(tuple(map(int, text.split())) for text in others.values())]
            slots, checked, right = (sum(counts) for counts in zip(*every, strict=True))
            done.append({"slots": slots, "verified": right if checked else None})
    except TransferError as error:
        barrier.give_up(error)
        return {"points": done, "error": f"{type(error).__name__}: {error}"}
    rank.endpoint.deregister(region)
    rank.device.free(buffer)
    return {"points": done, "error": ""}


def _posts(rank: Rank, task: Task, plan: _Plan, region: Region, peers: Mapping[str, Peer]) -> list[list[Post]]:
    # For each flow that *rank* initiates, what posts a transfer of each of its slots.
    reads = task["read"]
    start = rank.endpoint.read if reads else rank.endpoint.write
    posts: list[list[Post]] = []
    for index, flow in enumerate(task["flows"]):
        if flow[reads] == rank.name:
            peer = peers[flow[not reads]]
            there = peer.regions["blocks"]
            ends = (there, region) if reads else (region, there)
            slots = range(task["concurrency"])
            posts.append([partial(start, peer, plan.batch(index, slot, *ends)) for slot in slots])
    return posts


def _waves(task: Task, posts: Sequence[Sequence[Post]]) -> list[list[_Waves]]:
    if task["schedule"] == "free":
        return [[[[post]] for post in slots] for slots in posts]
    every = [post for slots in posts for post in slots]
    return [[[[post] for post in every] if task["schedule"] == "serial" else [every]]]


def _flow(
    clock: Clock, task: Task, loops: Sequence[_Waves], warmup: int, timeout: float, pauses: _Pauses | None
) -> _Loop:
    for label, count in ((WARMUP, warmup), (task["label"], task["repeat"])):
        # the slots of a flow share its budget: a slow transfer does not hold up the others
        budget = iter(range(count if task["schedule"] == "free" else -(-count // task["concurrency"])))
        start = {"timeout": timeout, "label": label}
        if error := (yield from _all(clock, [_loop(clock, waves, budget, start, pauses) for waves in loops])):
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
    clock: Clock, waves: _Waves, budget: Iterator[int], start: Mapping[str, Any], pauses: _Pauses | None
) -> _Loop:
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
        self.task, self.flows, self.size = task, task["flows"], task["size"]
        self._point, self._seed = zlib.crc32(task["label"].encode()), seed
        blocks, scattered = task["blocks"], task["scattered"]
        self._places = blocks * (2 if scattered else 1)  # block-sized places of a slot
        order = np.random.Generator(np.random.PCG64([seed, 0]))
        every: Ints = np.arange(blocks, dtype=np.int64)
        self._from = order.permutation(self._places)[:blocks].astype(np.int64) if scattered else every
        self._to = order.permutation(self._places)[:blocks].astype(np.int64) if scattered else every

    def batch(self, index: int, slot: int, source: Region, target: Region) -> Batch:
        source_offset = self._at(index, slot, self.flows[index][0]) + self._from * self.size
        target_offset = self._at(index, slot, self.flows[index][1]) + self._to * self.size
        return Batch(source, target, source_offset, target_offset, np.full(len(self._from), self.size))

    def fill(self, rank: str, buffer: Buffer) -> None:
        for index, (source, sink) in enumerate(self.flows):
            for slot in range(self.task["concurrency"]):
                if source == rank:
                    buffer.write(self._at(index, slot, rank), self._content(index, slot).tobytes())
                elif sink == rank and self.task["scattered"]:  # otherwise every byte is written
                    buffer.write(self._at(index, slot, rank), bytes(self._places * self.size))

    def received(self, rank: str, buffer: Buffer, warmup: int, check: bool) -> tuple[int, int, int]:
        # How many slots of *rank* transfers arrived in, were checked, and are right.
        flows = [index for index, flow in enumerate(self.flows) if flow[1] == rank]
        used = self.task["concurrency"]
        if self.task["schedule"] == "free":  # a flow of fewer transfers than slots leaves the last slots unused
            used = min(used, max(warmup, self.task["repeat"]))
        slots = [(index, slot) for index in flows for slot in range(used)]
        if not check:
            return len(slots), 0, 0
        return len(slots), len(slots), sum(self._is_right(*each, buffer) for each in slots)

    def _is_right(self, index: int, slot: int, buffer: Buffer) -> bool:
        expected = np.zeros((self._places, self.size), dtype=np.uint8)
        expected[self._to] = self._content(index, slot)[self._from]
        content = buffer.read(self._at(index, slot, self.flows[index][1]), self._places * self.size)
        return zlib.crc32(content) == zlib.crc32(expected.tobytes())

    def _at(self, index: int, slot: int, rank: str) -> int:
        before = sum(rank in flow for flow in self.flows[:index])
        return (before * self.task["concurrency"] + slot) * self._places * self.size

    def _content(self, index: int, slot: int) -> npt.NDArray[np.uint8]:
        generator = np.random.Generator(np.random.PCG64([self._seed, index, slot, self._point]))
        return generator.integers(0, 256, (self._places, self.size), dtype=np.uint8)


# --- barrier -------------------------------------------------------------------------------------------------------

_SLACK = 2e-3
"""Seconds from the last arrival to a common start: more than a message between processes of one machine takes."""


class Barrier:
    """A barrier with stages for all ranks of a job, which fails once one of them is gone.

    A message is ``stage, NUL, payload``.  Ranks send a sign of life every quarter of *timeout*: `tick` runs as a
    process of its own.  All ranks `wait` for and `start` the same stages in the same order, each once.
    """

    def __init__(self, rank: Rank, timeout: float) -> None:
        self._rank = rank
        self._timeout = timeout
        self._arrived: dict[str, dict[str, bytes]] = {}
        self._heard: dict[str, float] = {}

    def tick(self) -> Generator[Any, Any, None]:
        """Tell the others for ever that this rank lives."""
        while True:
            yield self._rank.clock.timeout(self._timeout / 4)
            self._tell("alive")

    def wait(self, stage: str, payload: bytes = b"") -> Generator[Any, Any, dict[str, bytes]]:
        """Wait until all ranks are at *stage* and return what each of the others brought.

        Raise `PeerLost` if a rank has given up, or was not heard of for *timeout* seconds.
        """
        self._tell(stage, payload)
        arrived = self._arrived.setdefault(stage, {})
        clock, peers = self._rank.clock, self._rank.peers
        self._heard = dict.fromkeys(peers, clock.now)  # nobody listened during the transfers
        while missing := [name for name in peers if name not in arrived]:
            received = self._rank.channel.receive()
            yield received | clock.timeout(self._timeout / 4)
            if received.processed:  # only triggered: its message goes to who asks next
                self._take(cast("Message", received.value))
            if silent := [name for name in missing if clock.now - self._heard[name] > self._timeout]:
                raise PeerLost(f"{silent[0]} was not heard of for {self._timeout:g} s, at {stage!r}")
        return arrived

    def start(self, stage: str) -> Generator[Any, Any, None]:
        """Wait as `wait` does, and then for one instant that all ranks agree on: they share the clock of the job.

        What tells a rank that all have arrived comes at a different time to each, and short transfers would be over
        at one before another begins.
        """
        now = self._rank.clock.now
        others = yield from self.wait(stage, repr(now).encode())
        at = max(now, *map(float, others.values())) + _SLACK
        yield self._rank.clock.timeout(max(0.0, at - self._rank.clock.now))

    def give_up(self, error: TransferError) -> None:
        """Tell the others that this rank ends with *error*, so that they need not find out."""
        self._tell("lost", f"{type(error).__name__}: {error}".encode())

    def _tell(self, stage: str, payload: bytes = b"") -> None:
        for name in self._rank.peers:
            self._rank.channel.send(name, stage.encode() + b"\0" + payload)

    def _take(self, message: Message) -> None:
        stage, _, payload = message.payload.partition(b"\0")
        self._heard[message.sender] = self._rank.clock.now
        if stage == b"lost":
            raise PeerLost(f"{message.sender} gave up: {payload.decode()}")
        self._arrived.setdefault(stage.decode(), {})[message.sender] = payload
