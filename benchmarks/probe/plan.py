# SPDX-License-Identifier: Apache-2.0
"""Which points the probe measures, and on which settings of which library: plain data, drawn by a seed.

Four ranks: *a0* and *a1* on the first GPU, *b0* and *b1* on the second, each a process.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

SEED = 20261124
PLACES = {"a0": 0, "a1": 0, "b0": 1, "b1": 1}
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DESCRIPTORS = 8192  # most of a transfer
PAIRS = 44  # (count, size) drawn at random, besides the corners

PATTERNS: dict[str, tuple[tuple[str, str], ...]] = {
    "one": (("a0", "b0"),),
    "both": (("a0", "b0"), ("b0", "a0")),
    "four": (("a0", "b0"),) * 4,
    "beside": (("a0", "b0"), ("a1", "b1")),
    "exchange": (("a0", "b0"), ("b1", "a1")),
    "fan-out": (("a0", "b0"), ("a0", "b1")),
    "incast": (("a0", "b0"), ("a1", "b0")),
    "all-to-all": (("a0", "b0"), ("a0", "b1"), ("a1", "b0"), ("a1", "b1")),
    "ring": (("a0", "b0"), ("b0", "a1"), ("a1", "b1"), ("b1", "a0")),
}
"""Flows (initiator, target) that start together."""

GATHERS = tuple(64 * KIB << step for step in range(12))  # bytes of each rank, 64 KiB to 128 MiB


@dataclass(frozen=True)
class Scale:
    """How large a run is: a machine with GPUs, or a dry run on a host."""

    largest: int  # bytes of one descriptor
    total: int  # bytes of one transfer
    blocks: tuple[tuple[int, int], ...]  # (count, size) of a contention pattern's transfers
    pairs: int
    rounds: int  # in each of which all points are measured, in another order: a busy neighbour lasts longer than one
    repeat: int  # of each round
    warmup: int


GPU = Scale(
    256 * MIB,
    512 * MIB,
    ((512, 16 * KIB), (128, 256 * KIB), (16, 4 * MIB), (1, 256 * MIB)),
    pairs=PAIRS,
    rounds=3,
    repeat=3,
    warmup=1,
)
BINDING = replace(GPU, rounds=2)
"""How large a run of `BOUND` is."""

HOST = Scale(
    4 * MIB,
    4 * MIB,
    ((64, 4 * KIB), (16, 64 * KIB), (4, 512 * KIB), (1, 4 * MIB)),
    pairs=4,
    rounds=2,
    repeat=1,
    warmup=1,
)


@dataclass(frozen=True)
class Variant:
    """One library as one kind of user runs it."""

    library: str  # "mooncake" or "nixl"
    name: str
    threads: int = 1  # that post; 0: one for each flow
    blocking: bool = False  # Mooncake: `batch_transfer_sync_*` instead of post and wait
    progress: bool = False  # NIXL: its progress thread
    workers: int = 0  # NIXL: `num_threads`
    beside: int = 0  # NIXL: its progress thread is bound so many processors after the posting thread's; 0: it roams
    busy: int = 0  # a stranger keeps the processor busy that is so many after the posting thread's; 0: there is none
    pairs: bool = True
    patterns: tuple[str, ...] = tuple(PATTERNS)


VARIANTS = (
    Variant("mooncake", "async"),
    Variant("mooncake", "sync", threads=0, blocking=True),
    Variant("nixl", "off"),
    Variant("nixl", "on4", progress=True, workers=4),
    Variant("nixl", "on0", progress=True, patterns=("one", "four")),
    Variant("nixl", "on8", progress=True, workers=8, patterns=("one", "four")),
    Variant("mooncake", "async2", threads=2, pairs=False, patterns=("four", "fan-out", "all-to-all")),
    Variant("mooncake", "async3", threads=3, pairs=False, patterns=("four", "fan-out", "all-to-all")),
)


BOUND = tuple(
    Variant("nixl", f"on0+{step}" + f" busy {busy}" * bool(busy), progress=True, beside=step, busy=busy, patterns=())
    for step, busy in ((1, 0), (2, 0), (4, 0), (12, 0), (4, 1), (4, 5))
)
"""The progress thread on the next processor, which may be the other thread of the same core, or further away, and a
stranger on the processor beside the posting thread's, or beside the progress thread's.

Foreseen: only a shared core matters. On one core the two take 7.5 to 10 us a descriptor, on two 5 to 6.5,
however far apart; a stranger on the core of either costs 1.4 to 1.7 times as long. Where the thread roams,
points with a thread that runs on the other half of the core of the initiator's posting or progress thread are
that much slower than the others, and those are within 15 % of each other; so the more ranks post, the more
often is the last a slow one.
"""


@dataclass(frozen=True)
class Point:
    """Transfers of *count* descriptors of *size* bytes each, one for each flow of *pattern*."""

    pattern: str
    operation: str  # "write" or "read"
    count: int
    size: int


def in_rounds(variant: Variant, scale: Scale) -> Iterator[tuple[int, str, Point]]:
    """Yield (round, section, point) in the order in which *variant* is measured."""
    listed = list(points(variant, scale))
    pairs = len(listed) - len(variant.patterns) * len(scale.blocks)
    every = [("pair" if index < pairs else "contention", point) for index, point in enumerate(listed)]
    for number in range(scale.rounds):
        random.Random(f"{SEED} round {number} {variant.library} {variant.name}").shuffle(every)
        for section, point in every:
            yield number, section, point


def points(variant: Variant, scale: Scale) -> Iterator[Point]:
    """Yield the points of *variant*, pairs first."""
    if variant.pairs:
        drawn = [Point("one", op, *pair) for pair in pairs(scale) for op in ("write", "read")]
        random.Random(f"{SEED} order {variant.library} {variant.name}").shuffle(drawn)
        yield from drawn
    for pattern in variant.patterns:
        for count, size in scale.blocks:
            yield Point(pattern, "write", count, size)


def pairs(scale: Scale) -> list[tuple[int, int]]:
    """Return (count, size): the corners, and others at random, uniform in their logarithms below the total."""
    draw = random.Random(f"{SEED} pairs")
    most = min(DESCRIPTORS, scale.total // (4 * KIB))
    found = [(1, 4 * KIB), (most, 4 * KIB), (1, scale.largest), (scale.total // scale.largest, scale.largest)]
    while len(found) < scale.pairs + 4:
        count = round(math.exp(draw.uniform(0.0, math.log(most))))
        size = 4 * KIB * round(math.exp(draw.uniform(0.0, math.log(scale.largest / (4 * KIB)))))
        if count * size <= scale.total:
            found.append((count, size))
    return list(dict.fromkeys(found))


def fingerprint(scale: Scale) -> str:
    """Return a hash of all points of all variants."""
    plain = [(asdict(variant), [asdict(point) for point in points(variant, scale)]) for variant in VARIANTS]
    return hashlib.sha256(json.dumps([plain, GATHERS]).encode()).hexdigest()[:16]
