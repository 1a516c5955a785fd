"""Which ranks `experiments.transfer` starts, where they run, and whether their memory is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pdsim.fabric.machine import Machine
from pdsim.transfer import Place
from pdsim.units import format_size

__all__ = ["PATTERNS", "Flow", "flows", "names", "place", "shortage"]

PATTERNS = ("pair", "bidirectional", "incast", "fanout", "alltoall")

Flow = tuple[str, str]  # the rank that the bytes come from, the rank that they go to


def flows(pattern: str, ranks: int) -> list[Flow]:
    """Return the flows of *pattern* over *ranks* ranks; the first two patterns take two whatever *ranks* is."""
    everyone = [f"rank{index}" for index in range(ranks)]
    first, second, others = everyone[0], everyone[1], everyone[1:]
    return {
        "pair": [(first, second)],
        "bidirectional": [(first, second), (second, first)],
        "incast": [(other, first) for other in others],
        "fanout": [(first, other) for other in others],
        "alltoall": [(one, other) for one in everyone for other in everyone if one != other],
    }[pattern]


def names(pairs: Sequence[Flow]) -> list[str]:
    """Return the ranks of *pairs* by number."""
    return sorted({name for pair in pairs for name in pair}, key=lambda name: int(name.removeprefix("rank")))


def place(hw: Machine, index: int, spread: bool) -> Place:
    """Return where rank *index* runs: a GPU of its own, or a host; node by node or, *spread*, one after the other."""
    if spread:
        return Place(index % hw.nodes, index // hw.nodes if hw.gpus else None)
    return Place(index // hw.gpus, index % hw.gpus) if hw.gpus else Place(0)


def shortage(hw: Machine, places: Mapping[str, Place], pairs: Sequence[Flow], area: int, here: bool) -> tuple[int, str]:
    """Return bytes and a line if *area* bytes at both ends of each of *pairs* do not fit; zero and nothing if they do.

    With *here* the ranks are processes of this machine, and what it has free counts too.
    """
    needs: dict[Place, int] = {}
    for name, where in places.items():
        needs[where] = needs.get(where, 0) + area * sum(name in pair for pair in pairs)
    where, need = max(needs.items(), key=lambda item: item[1])
    room, what = hw.host.memory, f"the host of node {where.node}"
    if where.gpu is not None and hw.gpu is not None:
        room, what = hw.gpu.memory, f"GPU {where.gpu} of node {where.node}"
    if here and (free := _free_memory()) is not None and free < room:
        room, what = free, "this machine (MemAvailable)"
    if need <= room:
        return 0, ""
    return need, f"{need} bytes ({format_size(need)}) on {what}, which has {room} ({format_size(room)})"


def _free_memory() -> int | None:
    """Return the bytes that can be allocated without swapping, or None where the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
