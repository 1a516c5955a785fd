# SPDX-License-Identifier: Apache-2.0
"""What each rank of `experiments.allgather` does: all points of one job, one after the other.

All ranks run the same points in the same order, so no further agreement is needed.  Times are in the records; what a
rank returns is about contents and growths only.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdsim.kv.allgather import PaddedAllGather, allocate, pools, zigzag
from pdsim.transfer import Buffer, Program, Region
from pdsim.transfer.group import Group
from pdsim.transfer.job import Rank


def measure(
    rank: Rank,
    names: Sequence[str],
    points: Sequence[dict[str, Any]],
    pool: int,
    row: int,
    repeat: int,
    warmup: int,
    verify: bool,
) -> Program:
    """Measure *points*; with *pool* > 0, first reserve a symmetric pool of *pool* bytes.

    Return, for each point, how many pieces or rows were checked and right, and how often and how long the pool grew.
    """
    group = rank.group(names)
    if pool:
        yield group.reserve(pool)
    measured: list[dict[str, Any]] = []
    if group.index == 0:  # one is enough
        rank.counts(lambda: len(measured), len(points))
    for point in points:
        before = group.growths, group.growth_seconds
        labels = ["warmup"] * warmup + [point["label"]] * repeat
        steps = _padded if point["batch"] else _equal
        checked, right = yield from steps(rank, group, point, row, labels, verify and rank.device.holds_bytes)
        growths, seconds = group.growths - before[0], group.growth_seconds - before[1]
        measured.append({"checked": checked, "right": right, "growths": growths, "growth_seconds": seconds})
    return {"points": measured, "reserved": group.reserved}


def _equal(rank: Rank, group: Group, point: dict[str, Any], _: int, labels: Sequence[str], verify: bool) -> Program:
    # Return how many pieces were checked, and how many of them were right.
    size, ranks = point["size"], len(group.names)
    given, got = pools(point["pool"])
    source = yield from allocate(rank, group, size, given)
    target = yield from allocate(rank, group, size * ranks, got)
    if verify:
        source.write(0, _pattern(group.index, size).tobytes())
    for label in labels:
        rank.clock.settle()
        yield group.all_gather(source, target, label=label)
    right = sum(_holds(target, index * size, index, size) for index in range(ranks)) if verify else 0
    rank.device.free(source)
    rank.device.free(target)
    return ranks * verify, right


def _padded(
    rank: Rank, group: Group, point: dict[str, Any], row: int, labels: Sequence[str], verify: bool
) -> Program:
    # Return how many tokens were checked, and how many of them were right.
    split = zigzag(point["batch"], len(group.names))
    gather = PaddedAllGather(rank, group, row, split.longest, point["pool"])
    yield from gather.open()
    mine, whole = (rank.device.allocate(rows * row) for rows in (split.longest, split.total))
    own = [first + at for first, count in split.pieces[group.index] for at in range(count)]
    if verify and own:
        mine.write(0, b"".join(_pattern(token, row).tobytes() for token in own))
    target = Region.local(rank.name, rank.device.name, whole)
    for label in labels:
        rank.clock.settle()
        yield from gather.gather(split, mine, target, label)
    right = sum(_holds(whole, at * row, at, row) for at in range(split.total)) if verify else 0
    gather.close()
    for buffer in (mine, whole):
        rank.device.free(buffer)
    return split.total * verify, right


def _pattern(seed: int, size: int) -> npt.NDArray[np.uint8]:
    # Bytes that differ from seed to seed and from place to place, with a period that is prime.
    period = min(size, 65_521)
    values = (np.arange(period, dtype=np.uint64) * 2654435761 + (seed + 1) * 40503) >> np.uint64(7)
    return np.resize(values.astype(np.uint8), size)


def _holds(buffer: Buffer, offset: int, seed: int, size: int) -> bool:
    # At either end of a piece, 1 MiB each.
    expected, window = _pattern(seed, size), min(size, 1 << 20)
    ends = (0, size - window)
    return all(buffer.read(offset + at, window) == expected[at : at + window].tobytes() for at in ends)
