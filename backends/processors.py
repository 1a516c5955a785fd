"""Which processors each rank of a job stays on."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pdsim.transfer import RankSpec

__all__ = ["LEAST", "shares"]

LEAST = 4
"""Processors of a rank: for its program, its engine's threads and its driver's.  With fewer, ranks may roam."""


def shares(ranks: Sequence[RankSpec]) -> dict[str, list[int]]:
    """Return the processors of each of *ranks* if one drives a GPU and there are enough, or nothing: they may roam.

    A rank that drives a GPU spins while it waits, and two that meet on the threads of one core slow each other down
    until the scheduler parts them.  Neighbouring numbers are threads of one core, or neighbours in one memory: so
    shares are runs of them.
    """
    here = sorted(os.sched_getaffinity(0))
    each = len(here) // max(1, len(ranks))
    if each < LEAST or all(spec.place.gpu is None for spec in ranks):
        return {}
    return {spec.name: here[index * each : (index + 1) * each] for index, spec in enumerate(ranks)}
