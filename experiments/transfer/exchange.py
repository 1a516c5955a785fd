# SPDX-License-Identifier: Apache-2.0
"""The rank program of `experiments.transfer`: ranks keep transfers in flight to each other, and check the bytes.

Written against the waist only.  Between points ranks meet at a `Barrier`, so that a point begins with all of them
ready and nothing of the one before under way.
"""

import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from experiments.transfer.points import TransferPoint, region_bytes
from pdsim.core.clock import Clock
from pdsim.core.errors import PeerLost, TransferError
from pdsim.core.units import Seconds
from pdsim.transfer import Batch, Buffer, Message, Peer, Program, Region, Transfer
from pdsim.transfer.job import Rank

Ints = npt.NDArray[np.int64]
Post = Callable[..., Transfer]
Waves = Sequence[Sequence[Post]]  # of a loop: what is posted together, one wave after the other
Pause = Callable[[], Seconds]
_Loop = Generator[Any, Any, TransferError | None]

WARMUP = "warmup"
"""The label of transfers that are not measured."""


def exchange(
    rank: Rank,
    *,
    points: Sequence[Sequence[Any]],
    ranks: int,
    warmup: int,
    verify: bool,
    seed: int,
    timeout: float,
    pause: Seconds = 0.0,
    skew: Seconds = 0.0,
) -> Program:
    """Run *points* one after the other and return ``{"points": [{"slots": n, "verified": k}, ...], "error": ""}``.

    Points are fields of `TransferPoint`, among *ranks* ranks where a pattern has no count of its own.  In each, the
    initiator of every flow (the source, or the sink if it reads) keeps ``concurrency`` transfers in flight until
    ``repeat`` are done, after *warmup* that are labelled `WARMUP`: a process that has slept needs several until it
    is as fast as it can be.  Between two of them a loop waits for *pause*, by half of it more or less, drawn from
    *seed*: what a real program's one thread takes, so the pauses of a rank follow each other.  A rank begins a point
    by up to *skew* later than told, drawn in the same way.

    All ranks begin each point together, those without a flow in it too, over one region that is registered once.
    *n* counts the slots of all ranks in which bytes arrived, *k* those with the bytes sent, None if unchecked.

    An error ends the list before the point that met it, and is returned: `PeerLost` if a rank is not heard of for
    *timeout* seconds, and the error of a transfer that fails.
    """
    tasks = [TransferPoint(*point) for point in points]
    barrier = Barrier(rank, timeout)
    rank.clock.process(barrier.tick())
    buffer = rank.device.allocate(region_bytes(rank.name, tasks, ranks))
    region = rank.endpoint.register(buffer, "blocks")
    done: list[dict[str, Any]] = []
    pauses = _pauses(rank.clock, pause, seed, rank.name) if pause else None
    late = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *f"skew {rank.name}".encode()])))
    if rank.name == min(rank.name, *rank.peers):  # one is enough
        rank.counts(lambda: len(done), len(tasks))
    try:
        addresses = yield from barrier.wait("address", rank.endpoint.address())
        peers = {name: rank.endpoint.connect(address) for name, address in addresses.items()}
        for number, task in enumerate(tasks):
            plan = _Plan(task, ranks, seed, rank.name)
            check = verify and rank.device.holds_bytes
            loops = plan.loops(rank, region, peers)
            if check:
                plan.fill(buffer)
            rank.clock.settle()
            yield from barrier.start(f"{number} begins")
            if skew:
                yield rank.clock.timeout(skew * late.random())
            flows = [_flow(rank.clock, task, waves, warmup, timeout, pauses) for waves in loops]
            if error := (yield from _all(rank.clock, flows)):  # when all that were started have ended
                raise error
            yield from barrier.wait(f"{number} has ended")
            slots, checked, right = plan.received(buffer, warmup, check)
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


def _flow(
    clock: Clock, task: TransferPoint, loops: Sequence[Waves], warmup: int, timeout: float, pause: Pause | None
) -> _Loop:
    for label, count in ((WARMUP, warmup), (task.label, task.repeat)):
        # the slots of a flow share its budget: a slow transfer does not hold up the others
        budget = iter(range(count if task.schedule.startswith("free") else -(-count // task.concurrency)))
        start = {"timeout": timeout, "label": label}
        if error := (yield from _all(clock, [_loop(clock, waves, budget, start, pause) for waves in loops])):
            return error
    return None


def _all(clock: Clock, loops: Sequence[_Loop]) -> _Loop:
    first: TransferError | None = None
    for process in [clock.process(loop) for loop in loops]:
        error = yield process
        first = first or error
    return first


def _loop(clock: Clock, waves: Waves, budget: Iterator[int], start: Mapping[str, Any], pause: Pause | None) -> _Loop:
    try:
        for _ in budget:
            clock.settle()
            for wave in waves:
                for transfer in [post(**start) for post in wave]:  # noqa: UP028 a list cannot be sent values
                    yield transfer
                if pause is not None:
                    yield clock.timeout(pause())
    except TransferError as error:
        return error
    return None


def _pauses(clock: Clock, mean: Seconds, seed: int, rank: str) -> Pause:
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *f"pause {rank}".encode()])))
    drawn = (mean * (0.5 + share) for _ in repeat(None) for share in random.random(64).tolist())
    free: Seconds = 0.0

    def following() -> Seconds:
        nonlocal free
        free = max(clock.now, free) + next(drawn)
        return float(free - clock.now)

    return following


class _Plan:
    """The place and the contents of the blocks of every flow in the buffer of each rank, as *rank* sees it.

    Each flow has *concurrency* slots at either end, which follow one another in the rank's buffer in the order of
    the flows. A slot has one place for each block; with scattered blocks two, and every other place stays zero.
    """

    def __init__(self, task: TransferPoint, ranks: int, seed: int, rank: str) -> None:
        self.task, self.flows, self.size, self.rank = task, task.flows(ranks), task.size, rank
        self._point, self._seed = zlib.crc32(task.label.encode()), seed
        self._free, blocks, scattered = task.schedule.startswith("free"), task.blocks, task.layout == "scattered"
        self._places = blocks * (2 if scattered else 1)  # block-sized places of a slot
        order = np.random.Generator(np.random.PCG64([seed, 0]))
        every: Ints = np.arange(blocks, dtype=np.int64)
        self._from = order.permutation(self._places)[:blocks].astype(np.int64) if scattered else every
        self._to = order.permutation(self._places)[:blocks].astype(np.int64) if scattered else every

    def loops(self, rank: Rank, region: Region, peers: Mapping[str, Peer]) -> list[list[Waves]]:
        """Return the loops that run side by side, for each flow or, in waves, for all of them."""
        reads = self.task.operation == "read"
        start = rank.endpoint.read if reads else rank.endpoint.write
        posts: list[list[Post]] = []
        for index, flow in enumerate(self.flows):
            if flow[reads] == self.rank:
                peer = peers[flow[not reads]]
                ends = (peer.regions["blocks"], region) if reads else (region, peer.regions["blocks"])
                slots = range(self.task.concurrency)
                posts.append([partial(start, peer, self._batch(index, slot, *ends)) for slot in slots])
        if self._free:
            return [[[[post]] for post in slots] for slots in posts]
        every = [post for slots in posts for post in slots]
        return [[[[post] for post in every] if self.task.schedule.startswith("serial") else [every]]]

    def _batch(self, index: int, slot: int, source: Region, target: Region) -> Batch:
        source_offset = self._at(index, slot, self.flows[index][0]) + self._from * self.size
        target_offset = self._at(index, slot, self.flows[index][1]) + self._to * self.size
        return Batch(source, target, source_offset, target_offset, np.full(len(self._from), self.size))

    def fill(self, buffer: Buffer) -> None:
        """Write what the slots send, and zeros where scattered blocks leave places."""
        for index, (source, sink) in enumerate(self.flows):
            for slot in range(self.task.concurrency):
                if source == self.rank:
                    buffer.write(self._at(index, slot), self._content(index, slot).tobytes())
                elif sink == self.rank and self.task.layout == "scattered":  # otherwise every byte is written
                    buffer.write(self._at(index, slot), bytes(self._places * self.size))

    def received(self, buffer: Buffer, warmup: int, check: bool) -> tuple[int, int, int]:
        """Return the number of slots that were written, of those that were checked, and of those that are right."""
        used = self.task.concurrency
        if self._free:  # a flow of fewer transfers than slots leaves the last slots unused
            used = min(used, max(warmup, self.task.repeat))
        slots = [
            (index, slot) for index, flow in enumerate(self.flows) if flow[1] == self.rank for slot in range(used)
        ]
        return len(slots), len(slots) * check, sum(self._is_right(*each, buffer) for each in slots) if check else 0

    def _is_right(self, index: int, slot: int, buffer: Buffer) -> bool:
        expected = np.zeros((self._places, self.size), dtype=np.uint8)
        expected[self._to] = self._content(index, slot)[self._from]
        content = buffer.read(self._at(index, slot), self._places * self.size)
        return zlib.crc32(content) == zlib.crc32(expected.tobytes())

    def _at(self, index: int, slot: int, rank: str = "") -> int:
        before = sum((rank or self.rank) in flow for flow in self.flows[:index])
        return (before * self.task.concurrency + slot) * self._places * self.size

    def _content(self, index: int, slot: int) -> npt.NDArray[np.uint8]:
        generator = np.random.Generator(np.random.PCG64([self._seed, index, slot, self._point]))
        return generator.integers(0, 256, (self._places, self.size), dtype=np.uint8)


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
        """Tell the others, now and then, that this rank lives."""
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
        """Wait as `wait` does, and then for one instant that all ranks agree on, on the job's shared clock.

        The last arrival is heard at a different time by each rank, and short transfers would be over at one before
        another begins.
        """
        now = self._rank.clock.now
        others = yield from self.wait(stage, repr(now).encode())
        at = max(now, *map(float, others.values())) + _SLACK
        yield self._rank.clock.timeout(max(0.0, at - self._rank.clock.now))

    def give_up(self, error: TransferError) -> None:
        """Tell the others that this rank ends with *error*."""
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
