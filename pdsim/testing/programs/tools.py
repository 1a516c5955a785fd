# SPDX-License-Identifier: Apache-2.0
"""What the suite's programs share: mail by sender, connected pairs, the target of most tests, patterns, batches."""

import os
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from simpy.events import Event

from pdsim.core.errors import PdsimError, TransferError
from pdsim.transfer import Batch, Buffer, Notification, Peer, Program, Region
from pdsim.transfer.job import Rank

Steps = Generator[Any, Any, Any]
Bytes = npt.NDArray[np.uint8]
GUARD = 0xA5
KiB, MiB = 1 << 10, 1 << 20
PATIENCE = float(os.environ.get("PDSIM_PATIENCE", "1"))
"""By how much longer than on a machine with two idle cores to wait, for whatever a program waits for."""
MOMENT = 0.05 * PATIENCE
"""Seconds in which what should not arrive would."""


class Mail:
    """A rank's channel, read by sender: a fast peer's next message must not be taken for a slow one's first."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.kept: dict[str, deque[bytes]] = defaultdict(deque)

    def receive(self, sender: str) -> Steps:
        """Return the next message of *sender*, and keep those of others that come before it."""
        while not self.kept[sender]:
            name, payload = yield self.rank.channel.receive()
            self.kept[name].append(payload)
        return self.kept[sender].popleft()

    def connect(self, *names: str) -> Steps:
        """Exchange addresses with *names*, or with all; return their `Peer`s by name."""
        names = names or self.rank.peers
        for name in names:
            self.rank.channel.send(name, self.rank.endpoint.address())
        peers: dict[str, Peer] = {}
        for name in names:
            peers[name] = self.rank.endpoint.connect((yield from self.receive(name)))
        return peers

    def wait_for(self, *names: str) -> Steps:
        """Tell *names*, or all, that this rank is done, and wait until they are."""
        names = names or self.rank.peers
        for name in names:
            self.rank.channel.send(name, b"done")
        for name in names:
            yield from self.receive(name)


def pattern(seed: int, size: int, start: int = 0) -> Bytes:
    """Return *size* bytes from *start* on that differ from place to place, from seed to seed and from GUARD."""
    period = 65_521  # prime, so that no block, page or buffer is a multiple of it
    values = ((np.arange(period, dtype=np.uint64) * 2654435761 + seed * 97) >> 7) % 165
    return np.resize(values.astype(np.uint8), start + size)[start:]


def guard(size: int) -> Bytes:
    """Return *size* guard bytes."""
    return np.full(size, GUARD, np.uint8)


def begun(seed: int, size: int, region: int) -> Bytes:
    """Return *region* guard bytes, of which the first *size* are the pattern of *seed*."""
    return np.concatenate([pattern(seed, size), guard(region - size)])


def filled(rank: Rank, size: int, seed: int | None) -> Buffer:
    """Return a new buffer that holds the pattern of *seed*, or guard bytes."""
    buffer = rank.device.allocate(size)
    if rank.device.holds_bytes:
        buffer.write(0, (guard(size) if seed is None else pattern(seed, size)).tobytes())
    return buffer


def wrong(rank: Rank, buffer: Buffer, expected: Bytes) -> int:
    """Return how many bytes of *buffer* are not the expected ones; 0 on a device without contents."""
    if not rank.device.holds_bytes:
        return 0
    return int(np.count_nonzero(np.frombuffer(buffer.read(0, buffer.size), np.uint8) != expected))


def scattered(count: int, size: int, region: int, seed: int) -> tuple[Any, Any, Any]:
    """Return offsets and sizes of *count* blocks of 1 to *size* bytes at shuffled places of a region."""
    random = np.random.default_rng(seed)
    slot = region // count
    sizes = random.integers(max(1, size // 2), size + 1, count) if count > 1 else np.array([size])
    slack = slot - sizes
    source = random.permutation(count) * slot + random.integers(0, slack + 1)
    target = random.permutation(count) * slot + random.integers(0, slack + 1)
    return source, target, sizes


def moved(count: int, size: int, region: int, seed: int) -> Bytes:
    """Return what a region of guard bytes looks like after the blocks of `scattered` came from the pattern."""
    image, contents = guard(region), pattern(seed, region)
    for source, target, length in zip(*scattered(count, size, region, seed), strict=True):
        image[target : target + length] = contents[source : source + length]
    return image


def one(source: Region, target: Region, size: int, source_offset: int = 0, target_offset: int = 0) -> Batch:
    """Return a batch of a single descriptor."""
    return Batch(source, target, [source_offset], [target_offset], [size])


def outcome_of(event: Event) -> Steps:
    """Wait for *event*, a transfer or a call of a group, and return "ok" or the name of its error."""
    try:
        yield event
    except TransferError as error:
        return type(error).__name__
    return "ok"


def refusal(action: Callable[[], Any]) -> str:
    """Return "accepted", or the name of the error that *action* raises."""
    try:
        action()
    except PdsimError as error:
        return type(error).__name__
    return "accepted"


def initiator(rank: Rank, to: str, size: int, seed: int | None = 1) -> Steps:
    """Register *size* bytes and connect to *to*, which runs `target`; return mail, region, peer and its region."""
    mail = Mail(rank)
    mine = rank.endpoint.register(filled(rank, size, seed), "mine")
    peer = (yield from mail.connect(to))[to]
    return mail, mine, peer, peer.regions["memory"]


def target(rank: Rank, by: str, size: int, seed: int | None = None) -> Steps:
    """Register *size* bytes as "memory" and connect to *by*, which runs `initiator`; return mail and buffer."""
    mail, buffer = Mail(rank), filled(rank, size, seed)
    rank.endpoint.register(buffer, "memory")
    yield from mail.connect(by)
    return mail, buffer


def be_target(
    rank: Rank, by: str, region: int, fill: int | None = None, holds: Sequence[Any] = ("guard",), notes: int = 0
) -> Program:
    """Register *region* bytes, guard bytes or the pattern of *fill*, that *by* reads or writes.

    After *notes* notifications, and once *by* is done, they must be what *holds* names: a function of this module
    and its arguments.  Return who notified and what, how many bytes were wrong, and what was notified beyond.
    """
    mail, buffer = yield from target(rank, by, region, fill)
    kind, *arguments = holds
    expected = globals()[kind](*(arguments or (region,)))
    heard: list[list[str]] = []
    while len(heard) < notes:
        note: Notification = yield rank.endpoint.notifications.get()
        heard += [[note.sender, note.payload.hex()]] * note.times
    count = wrong(rank, buffer, expected) if notes else 0
    yield from mail.wait_for(by)
    yield rank.clock.timeout(MOMENT)
    return {
        "heard": heard,
        "wrong": count + wrong(rank, buffer, expected),
        "surplus": len(rank.endpoint.notifications),
    }
