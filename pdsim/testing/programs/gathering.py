# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks: what arrives, what is refused, and what a rank sees that is left alone."""

import os
import signal
from typing import Any

import numpy as np

from pdsim.kv.allgather import PaddedAllGather, zigzag
from pdsim.testing.programs.tools import KiB, Steps, filled, guard, outcome_of, pattern, refusal, wrong
from pdsim.transfer import Buffer, Program, Region
from pdsim.transfer.group import SYMMETRIC, Group
from pdsim.transfer.job import Rank


def gather_everything(rank: Rank, names: list[str], sizes: list[int], batches: list[list[int]]) -> Program:
    """Do all that a group is good for, in one job: real ranks load a large library first."""
    if rank.name not in names:
        yield rank.clock.timeout(0)
        return {}
    group = rank.group(names)
    return {
        "pieces": (yield from gather_pieces(rank, group, sizes, 100)),
        "alone": (yield from gather_pieces(rank, rank.group([rank.name]), [1000], 0)),
        "symmetric": (yield from gather_symmetric(rank, group, 64 * KiB)),
        "batches": (yield from gather_batches(rank, group, batches, 24)),
        "oddly": (yield from gather_oddly(rank, group, {name: 1024 - (name == names[-1]) for name in names})),
        "two": (yield from gather_in_another(rank, [names[-1], names[0]])),
        "strangers": ask_for_strangers(rank),
        "same": rank.group(names) is group,
        "used": rank.device.used - group.reserved,
    }


def _free(rank: Rank, *buffers: Buffer) -> None:
    for buffer in buffers:
        rank.device.free(buffer)


def _pieces(group: Group, size: int, seed: int, step: int = 1) -> Any:
    return np.concatenate([pattern(seed + step * index, size) for index in range(len(group.names))])


def gather_pieces(rank: Rank, group: Group, sizes: list[int], room: int) -> Steps:
    """Gather pieces of *sizes*, at once, into buffers with room for *room* bytes behind; count wrong bytes."""
    ranks, work, result = len(group.names), [], []
    for number, size in enumerate(sizes):
        source = filled(rank, size, 10 * group.index + number)
        target = filled(rank, ranks * size + room, None)
        event = group.all_gather(source, target, label=f"gather {number} of {ranks}")
        work.append((event, source, target, np.concatenate([_pieces(group, size, number, 10), guard(room)])))
    for event, source, target, expected in work:
        record = yield event
        kind = record.engine.rpartition(":")[2]
        result.append([wrong(rank, target, expected), record.nbytes, record.operation, kind])
        _free(rank, source, target)
    return result


def gather_symmetric(rank: Rank, group: Group, size: int) -> Steps:
    """Reserve a pool, gather in it, take more than it has, let it grow, gather again."""
    ranks = len(group.names)
    early = refusal(lambda: rank.device.allocate(size, SYMMETRIC))
    yield group.reserve((ranks + 1) * size)
    result = [(yield from _symmetric(rank, group, size, 1))]
    full = refusal(lambda: rank.device.allocate(2 * (ranks + 1) * size, SYMMETRIC))
    yield group.reserve(3 * (ranks + 1) * size)
    result.append((yield from _symmetric(rank, group, 3 * size, 2)))
    return {
        "refused": [early, full],
        "result": result,
        "growths": group.growths,
        "stalled": group.growth_seconds > 0,
        "reserved": group.reserved,
    }


def _symmetric(rank: Rank, group: Group, size: int, seed: int) -> Steps:
    # Return how many bytes are wrong, and the kind of memory that the record names.
    source = rank.device.allocate(size, SYMMETRIC)
    target = rank.device.allocate(size * len(group.names), SYMMETRIC)
    if rank.device.holds_bytes:
        source.write(0, pattern(seed + group.index, size).tobytes())
    record = yield group.all_gather(source, target)
    result = [wrong(rank, target, _pieces(group, size, seed)), record.engine.rpartition(":")[2]]
    _free(rank, source, target)
    return result


def gather_batches(rank: Rank, group: Group, batches: list[list[int]], row: int) -> Steps:
    """Gather every batch of sequences, split in a zigzag; return how many bytes are not those of its tokens."""
    result: list[Any] = []
    for batch in batches:
        split = zigzag(batch, len(group.names))
        gather = PaddedAllGather(rank, group, row, split.longest)
        yield from gather.open()
        tokens = pattern(len(result), split.total * row)
        mine, whole = rank.device.allocate(split.longest * row), rank.device.allocate(split.total * row)
        if rank.device.holds_bytes:
            rows = [tokens[first * row : (first + n) * row] for first, n in split.pieces[group.index]]
            mine.write(0, b"".join(piece.tobytes() for piece in rows))
        yield from gather.gather(split, mine, Region.local(rank.name, rank.device.name, whole))
        result.append(wrong(rank, whole, tokens))
        gather.close()
        _free(rank, mine, whole)
    return result


def gather_oddly(rank: Rank, group: Group, sizes: dict[str, int]) -> Steps:
    """Call with sizes that differ between ranks, then alike; and what no rank may ask for."""
    ranks, size = len(group.names), sizes[rank.name]
    source, target = filled(rank, 4096, 1), filled(rank, 4096 * ranks, None)
    small = filled(rank, 4096 * ranks - 1, None)
    differs = yield from outcome_of(group.all_gather(source, target, size))
    changed = wrong(rank, target, guard(target.size))
    alike = yield from outcome_of(group.all_gather(source, target, 1024))
    result = {
        "differs": differs,
        "changed": changed,
        "alike": alike,
        "nothing": refusal(lambda: group.all_gather(source, target, 0)),
        "too much": refusal(lambda: group.all_gather(source, target, 4097)),
        "too small": refusal(lambda: group.all_gather(source, small)),
        "itself": refusal(lambda: group.all_gather(source, source, 16)),
    }
    _free(rank, source, target, small)
    return result


def gather_until_lost(rank: Rank, names: list[str], victim: str, size: int) -> Program:
    """Gather until it fails; *victim* dies among it.  Return the error, how long it took, and what comes after."""
    group = rank.group(names)
    source, target = rank.device.allocate(size), rank.device.allocate(size * len(names))
    done, error, started = 0, "ok", 0.0
    while error == "ok":
        if rank.name == victim and done == 5:
            _die(rank)
        started = rank.clock.now
        error = yield from outcome_of(group.all_gather(source, target))
        done += error == "ok"
    took = rank.clock.now - started
    again = yield from outcome_of(group.all_gather(source, target))
    _free(rank, source, target)
    return {"errors": [error, again], "done": done, "took": took, "used": rank.device.used}


def _die(rank: Rank) -> None:
    if not rank.clock.virtual:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("killed, as was asked for")


def gather_late(rank: Rank, names: list[str], late: str, wait: float, timeout: float) -> Program:
    """Gather once together; then *late* calls only after *wait* seconds, when the others have given up."""
    group = rank.group(names)
    source, target = rank.device.allocate(4096), rank.device.allocate(4096 * len(group.names))
    yield group.all_gather(source, target)
    started = rank.clock.now
    if rank.name == late:
        yield rank.clock.timeout(wait)
    error = yield from outcome_of(group.all_gather(source, target, timeout=timeout))
    took = rank.clock.now - started
    if rank.name != late:  # stay, for the end of a rank is an answer too
        yield rank.clock.timeout(wait)
    return {"error": error, "took": took}


def gather_in_another(rank: Rank, names: list[str]) -> Steps:
    """Gather in a second group, if this rank is a member; return how many bytes are wrong."""
    if rank.name not in names:
        return 0
    source, target = filled(rank, 1000, names.index(rank.name)), filled(rank, 1000 * len(names), None)
    group = rank.group(names)
    yield group.all_gather(source, target)
    result = wrong(rank, target, _pieces(group, 1000, 0))
    _free(rank, source, target)
    return result


def ask_for_strangers(rank: Rank) -> list[bool]:
    """Return which lists of names are refused."""
    names: list[list[str]] = [[], ["nobody", rank.name], [rank.name, rank.name], list(rank.peers)]
    refused = []
    for wanted in names:
        try:
            rank.group(wanted)
        except ValueError:
            refused.append(True)
    return refused
