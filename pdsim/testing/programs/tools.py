# SPDX-License-Identifier: Apache-2.0
"""Tools of the suite's programs: mail by sender, connected pairs, patterns, batches."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import numpy.typing as npt
from simpy.events import Event

from pdsim.core.errors import PdsimError, TransferError
from pdsim.transfer import Batch, Buffer, Peer, Region
from pdsim.transfer.job import Rank

Steps = Generator[Any, Any, Any]
GUARD = 0xA5
KiB, MiB = 1 << 10, 1 << 20
PATIENCE = float(os.environ.get("PDSIM_PATIENCE", "1"))
"""By how much longer than on a machine with two idle cores to wait, for whatever a program waits for."""


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


def pattern(seed: int, size: int) -> npt.NDArray[np.uint8]:
    """Return *size* bytes that differ from place to place, from seed to seed and from GUARD."""
    period = 65_521  # prime, so that no block, page or buffer is a multiple of it
    values = ((np.arange(period, dtype=np.uint64) * 2654435761 + seed * 97) >> 7) % 165
    return np.resize(values.astype(np.uint8), size)


def filled(rank: Rank, size: int, seed: int | None) -> Buffer:
    """Return a new buffer that holds the pattern of *seed*, or guard bytes."""
    buffer = rank.device.allocate(size)
    if rank.device.holds_bytes:
        contents = np.full(size, GUARD, np.uint8) if seed is None else pattern(seed, size)
        buffer.write(0, contents.tobytes())
    return buffer


def wrong(rank: Rank, buffer: Buffer, expected: npt.NDArray[np.uint8]) -> int | None:
    """Return how many bytes of *buffer* are not the expected ones."""
    if not rank.device.holds_bytes:
        return None
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


def moved(count: int, size: int, region: int, seed: int) -> npt.NDArray[np.uint8]:
    """Return what a region of guard bytes looks like after the blocks of `scattered` came from the pattern."""
    image, contents = np.full(region, GUARD, np.uint8), pattern(seed, region)
    for source, target, length in zip(*scattered(count, size, region, seed), strict=True):
        image[target : target + length] = contents[source : source + length]
    return image


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


def one(source: Region, target: Region, size: int, source_offset: int = 0, target_offset: int = 0) -> Batch:
    """Return a batch of a single descriptor."""
    return Batch(source, target, [source_offset], [target_offset], [size])
