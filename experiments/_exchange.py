"""The rank program of `experiments.transfer`: ranks that keep transfers in flight to each other, and check the bytes.

Written against the waist only.  What is measured is in the records of the endpoints; this module knows no statistics.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pdsim.errors import PeerLost, TransferError
from pdsim.transfer import Batch, Buffer, Message, Peer, Program, Rank, Region, Transfer

__all__ = ["area_bytes", "exchange"]

Ints = npt.NDArray[np.int64]
Flow = Sequence[str]  # the rank that the bytes come from, the rank that they go to


def area_bytes(blocks: int, size: int, concurrency: int, scattered: bool) -> int:
    """Return the bytes that one flow takes on either side: a slot for each transfer in flight."""
    return concurrency * blocks * size * (2 if scattered else 1)


def exchange(
    rank: Rank,
    *,
    flows: Sequence[Flow],
    blocks: int,
    size: int,
    concurrency: int,
    repeat: int,
    warmup: int,
    read: bool,
    scattered: bool,
    verify: bool,
    seed: int,
    timeout: float,
    label: str,
) -> Program:
    """Run one point and return ``{"slots": n, "verified": k}``, for the slots that this rank received bytes in.

    Of each of *flows*, the initiator (the source, or with *read* the sink) keeps *concurrency* transfers of *blocks*
    times *size* bytes in flight until *repeat* are done, after *warmup* that are labelled ``"warmup"``.  All ranks
    begin together.  *verified* is None if nothing was checked.  Raise `PeerLost` if a rank is not heard of for
    *timeout* seconds, and whatever a transfer fails with.
    """
    party = _Party(rank, timeout)
    rank.clock.process(party.tick())
    area = area_bytes(blocks, size, concurrency, scattered)
    mine = [index for index, flow in enumerate(flows) if rank.name in flow]
    buffer = rank.device.allocate(max(1, area * len(mine)))
    region = rank.endpoint.register(buffer, "blocks")
    plan = _Plan(flows, blocks, size, concurrency, scattered, seed)
    check = verify and rank.device.holds_bytes
    try:
        addresses = yield from party.meet("address", rank.endpoint.address())
        peers = {name: rank.endpoint.connect(address) for name, address in addresses.items()}
        posts = [
            _posts(rank, plan, index, region, peers, read) for index in mine if _initiates(rank, flows[index], read)
        ]
        for round_, count in (("warmup", warmup), (label, repeat)):
            if check:
                plan.fill(rank.name, buffer, round_)
            yield from party.meet(f"start {round_}")
            yield from _transfer(rank, posts, count, timeout, round_)
            yield from party.meet(f"end {round_}")
    except TransferError as error:
        party.give_up(error)
        raise
    received = [index for index in mine if flows[index][1] == rank.name]
    verified = sum(plan.verified(index, buffer, label) for index in received) if check else None
    rank.endpoint.deregister(region)
    rank.device.free(buffer)
    return {"slots": len(received) * concurrency, "verified": verified}


def _initiates(rank: Rank, flow: Flow, read: bool) -> bool:
    return rank.name == flow[1 if read else 0]


def _posts(
    rank: Rank, plan: _Plan, index: int, region: Region, peers: dict[str, Peer], read: bool
) -> list[Callable[..., Transfer]]:
    """Return for each slot of flow *index* the call that starts its transfer."""
    source, sink = plan.flows[index]
    peer = peers[source if read else sink]
    there = peer.regions["blocks"]
    ends = (there, region) if read else (region, there)
    start = rank.endpoint.read if read else rank.endpoint.write
    return [partial(start, peer, plan.batch(index, slot, *ends)) for slot in range(plan.concurrency)]


def _transfer(
    rank: Rank, posts: Sequence[Sequence[Callable[..., Transfer]]], count: int, timeout: float, label: str
) -> Generator[Any, Any, None]:
    """Make *count* transfers of every flow, one at a time in each slot.  Raise the first error when all have ended."""
    running = []
    for slots in posts:
        budget = iter(range(count))  # shared by the slots: a slow transfer does not hold up the others
        running += [rank.clock.process(_slot(post, budget, timeout, label)) for post in slots]
    errors = []
    for process in running:
        error = yield process
        errors += [error] if error else []
    if errors:
        raise errors[0]


def _slot(post: Callable[..., Transfer], budget: Any, timeout: float, label: str) -> Generator[Any, Any, Any]:
    try:
        for _ in budget:
            yield post(timeout=timeout, label=label)
    except TransferError as error:
        return error
    return None


class _Plan:
    """Where the blocks of every flow lie in each rank's one buffer, and what they hold."""

    def __init__(
        self, flows: Sequence[Flow], blocks: int, size: int, concurrency: int, scattered: bool, seed: int
    ) -> None:
        self.flows = flows
        self.size = size
        self.concurrency = concurrency
        self._seed = seed
        self._places = blocks * (2 if scattered else 1)  # block-sized places of a slot
        order = np.random.Generator(np.random.PCG64([seed, 0]))
        every: Ints = np.arange(blocks, dtype=np.int64)
        self._from = order.permutation(self._places)[:blocks].astype(np.int64) if scattered else every
        self._to = order.permutation(self._places)[:blocks].astype(np.int64) if scattered else every

    def batch(self, index: int, slot: int, source: Region, target: Region) -> Batch:
        """Return the descriptors of a transfer of flow *index*."""
        source_offset = self._at(index, slot, self.flows[index][0]) + self._from * self.size
        target_offset = self._at(index, slot, self.flows[index][1]) + self._to * self.size
        return Batch(source, target, source_offset, target_offset, np.full(len(self._from), self.size))

    def fill(self, rank: str, buffer: Buffer, round_: str) -> None:
        """Give every slot that *rank* sends from the bytes of this round."""
        for index, flow in enumerate(self.flows):
            if flow[0] == rank:
                for slot in range(self.concurrency):
                    buffer.write(self._at(index, slot, rank), self._content(index, slot, round_).tobytes())

    def verified(self, index: int, buffer: Buffer, round_: str) -> int:
        """Return how many slots of flow *index* have the checksum of what was sent, and zeros between the blocks."""
        sink = self.flows[index][1]
        good = 0
        for slot in range(self.concurrency):
            expected = np.zeros((self._places, self.size), dtype=np.uint8)
            expected[self._to] = self._content(index, slot, round_)[self._from]
            found = buffer.read(self._at(index, slot, sink), self._places * self.size)
            good += zlib.crc32(found) == zlib.crc32(expected.tobytes())
        return good

    def _at(self, index: int, slot: int, rank: str) -> int:
        """Return where *slot* of flow *index* begins in the buffer of *rank*, which holds its flows in order."""
        before = sum(rank in flow for flow in self.flows[:index])
        return (before * self.concurrency + slot) * self._places * self.size

    def _content(self, index: int, slot: int, round_: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of all places of a slot, shape (places, size): both sides can compute them."""
        generator = np.random.Generator(np.random.PCG64([self._seed, index, slot, zlib.crc32(round_.encode())]))
        return generator.integers(0, 256, (self._places, self.size), dtype=np.uint8)


class _Party:
    """All ranks of a job: they meet at stages, and none waits for ever for one that is gone.

    A message is ``stage, NUL, payload``.  Ranks say that they live every quarter of *timeout*.
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

    def meet(self, stage: str, payload: bytes = b"") -> Generator[Any, Any, dict[str, bytes]]:
        """Wait until all ranks are at *stage* and return what each of the others brought."""
        self._tell(stage, payload)
        arrived = self._arrived.setdefault(stage, {})
        self._heard = dict.fromkeys(self._rank.peers, self._rank.clock.now)  # nobody listened during the transfers
        while missing := [name for name in self._rank.peers if name not in arrived]:
            received = self._rank.channel.receive()
            yield received | self._rank.clock.timeout(self._timeout / 4)
            if received.processed:  # only triggered: its message goes to who asks next
                self._take(cast("Message", received.value))
            silent = [name for name in missing if self._rank.clock.now - self._heard[name] > self._timeout]
            if silent:
                raise PeerLost(f"{silent[0]} was not heard of for {self._timeout:g} s, at {stage!r}")
        return arrived

    def give_up(self, error: TransferError) -> None:
        """Tell the others that this rank ends with *error*, so that they need not find out."""
        self._tell("lost", f"{type(error).__name__}: {error}".encode())

    def _tell(self, stage: str, payload: bytes = b"") -> None:
        for name in self._rank.peers:
            self._rank.channel.send(name, stage.encode() + b"\0" + payload)

    def _take(self, message: Message) -> None:
        sender = message.sender
        stage, _, payload = message.payload.partition(b"\0")
        self._heard[sender] = self._rank.clock.now
        if stage == b"lost":
            raise PeerLost(f"{sender} gave up: {payload.decode()}")
        self._arrived.setdefault(stage.decode(), {})[sender] = payload
