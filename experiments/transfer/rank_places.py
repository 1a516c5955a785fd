# SPDX-License-Identifier: Apache-2.0
"""Which ranks `experiments.transfer` starts, where they run, and whether their memory is there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pdsim.core.units import format_size
from pdsim.hardware.machine import Machine
from pdsim.transfer.job import Place

__all__ = ["PATTERNS", "Flow", "check_pattern", "flows", "names", "places", "shortage"]

PATTERNS = ("pair", "pairs", "bidirectional", "incast", "fanout", "cross", "alltoall")
"""``name`` or ``name:count``: *count* disjoint pairs, in one direction or both; *count* sources to one sink; one
source to *count* sinks; ``cross:2x3``, two sources each to three sinks; *count* ranks each to every other."""

Flow = tuple[str, str]  # the rank that the bytes come from, the rank that they go to


def check_pattern(pattern: str) -> None:
    """Raise a `ValueError` unless *pattern* is one of `PATTERNS`, with a count that it can have."""
    name, _, count = pattern.partition(":")
    if name not in PATTERNS:
        raise ValueError(f"experiment.patterns must be one of {', '.join(PATTERNS)}, got {pattern!r}")
    form = {"pair": r"", "cross": r"|[1-9]\d*(x[1-9]\d*)?", "alltoall": r"|[2-9]|[1-9]\d+"}.get(name, r"|[1-9]\d*")
    if not re.fullmatch(form, count) or pattern.endswith(":"):
        example = {"pair": "pair, or pairs:2", "cross": "cross:2 or cross:2x3"}.get(name, f"{name}:2")
        raise ValueError(f"experiment.patterns: {pattern!r} has a count that it cannot have; write {example}")


def flows(pattern: str, ranks: int, rotate: bool = False) -> list[Flow]:
    """Return the flows of *pattern*, which takes its count from *ranks* ranks if it has none of its own.

    The flows of a source are in the order in which it posts.  In a crossing that is the order of the sinks, so that
    all sources begin with the same one; with *rotate* source *i* begins with sink *i*, so that no two do.

    >>> flows("incast:2", ranks=4)
    [('rank1', 'rank0'), ('rank2', 'rank0')]
    >>> flows("cross:2x2", ranks=4, rotate=True)
    [('rank0', 'rank2'), ('rank0', 'rank3'), ('rank1', 'rank3'), ('rank1', 'rank2')]
    """
    name, _, text = pattern.partition(":")
    counts = [int(part) for part in text.split("x")] if text else []
    if name in ("pair", "pairs", "bidirectional"):
        count = counts[0] if counts else ranks // 2 if name == "pairs" else 1
        pairs = [(f"rank{2 * index}", f"rank{2 * index + 1}") for index in range(count)]
        return [
            flow for one, other in pairs for flow in [(one, other), (other, one)][: 1 + (name == "bidirectional")]
        ]
    if name == "alltoall":
        everyone = [f"rank{index}" for index in range(counts[0] if counts else ranks)]
        return _rotated(everyone, everyone, rotate)
    sources, sinks = {
        "incast": (counts[0] if counts else ranks - 1, 1),
        "fanout": (1, counts[0] if counts else ranks - 1),
        "cross": (counts[0], counts[-1]) if counts else (ranks // 2, ranks // 2),
    }[name]
    here = [f"rank{index}" for index in range(sources)]
    there = [f"rank{sources + index}" for index in range(sinks)]
    if name == "incast":  # all to the first, as everywhere
        here, there = [f"rank{1 + index}" for index in range(sources)], ["rank0"]
    return _rotated(here, there, rotate)


def _rotated(sources: Sequence[str], sinks: Sequence[str], rotate: bool) -> list[Flow]:
    flows: list[Flow] = []
    for index, source in enumerate(sources):
        first = index % len(sinks) if rotate else 0
        flows += [(source, sink) for sink in [*sinks[first:], *sinks[:first]] if sink != source]
    return flows


def names(pairs: Sequence[Flow]) -> list[str]:
    """Return the ranks of *pairs* by number."""
    return sorted({name for pair in pairs for name in pair}, key=lambda name: int(name.removeprefix("rank")))


def places(hw: Machine, ranks: Sequence[str], placement: Sequence[str]) -> dict[str, Place]:
    """Return where each of *ranks* runs: on the hosts, one node after the other, if there are no GPUs.

    Otherwise that is a GPU of its own, node by node (``packed``) or one node after the other (``spread``), or the
    one that *placement* lists for it, counted over all nodes.
    """
    chosen = {}
    for index, name in enumerate(ranks):
        if placement[0] == "spread" or not hw.gpus:
            chosen[name] = Place(index % hw.nodes, index // hw.nodes if hw.gpus else None)
        else:
            gpu = index if placement[0] == "packed" else int(placement[index])
            chosen[name] = Place(gpu // hw.gpus, gpu % hw.gpus)
    return chosen


def shortage(hw: Machine, where: Mapping[str, Place], needs: Mapping[str, int], here: bool) -> tuple[list[str], str]:
    """Return the ranks and a line if the bytes that each *needs* do not fit where it is, or nothing if they do.

    With *here* the ranks are processes of this machine, and what its host has free counts too.

    Ranks at one place share its memory.  Only the place that needs most is looked at.
    """
    totals: dict[Place, int] = {}
    for name, place in where.items():
        totals[place] = totals.get(place, 0) + needs[name]
    place, need = max(totals.items(), key=lambda item: item[1])
    room, what = hw.host.memory, f"the host of node {place.node}"
    if place.gpu is not None and hw.gpu is not None:
        room, what = hw.gpu.memory, f"GPU {place.gpu} of node {place.node}"
    elif here and (free := _free_memory()) is not None and free < room:
        room, what = free, "this machine (MemAvailable)"
    if need <= room:
        return [], ""
    line = f"{need} bytes ({format_size(need)}) on {what}, which has {room} ({format_size(room)})"
    return [name for name, other in where.items() if other == place], line


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
