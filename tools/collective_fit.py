# SPDX-License-Identifier: Apache-2.0
"""Fit collectives to measured all-gathers, and tell how far the fit is from those left out: `conf/collective`.

The time of an all-gather is fitted to every other size of the equal pieces of each run, from its smallest on, in
pools that were reserved; *after_pause* to every other padded batch there, *grown* to every other size, up to a MiB,
of equal pieces in pools that grew; a growth to every other of its sizes.  All else is left out.  A point counts with
its median. Plain memory goes through NCCL with either library, so both runs count.  Seconds and bytes; samples are
in ``data/collective``.  ``pdsim refit collectives`` prints all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from pdsim.core.repository import data
from pdsim.hardware.costs import Collective, CollectiveModel
from pdsim.results.record import Table
from tools import tables

__all__ = [
    "KINDS",
    "GatherSample",
    "between",
    "errors",
    "fit",
    "growth_errors",
    "growths",
    "host_times",
    "points",
    "seen",
]

KINDS = ("plain", "symmetric")
"""Kinds of memory, which `Collective` has a model of each for."""

FOLDER = data("collective")
FITTED = ("latency", "step", "rate", "own_rate")
SCALE = 0.1
"""The relative error from which on a point counts less: what jobs of equal calls differ by."""

SMALL = 1 << 20
"""Bytes of a piece up to which the host's part is what a gather takes."""


class GatherSample(NamedTuple):
    """The median of the equal calls of one job."""

    run: str
    library: str
    ranks: int
    size: int
    kind: str  # plain or symmetric
    batch: str
    grown: bool
    seconds: float

    @property
    def warm(self) -> bool:
        """Whether calls followed one another, in a pool that was reserved."""
        return not self.batch and not self.grown


def points() -> list[GatherSample]:
    """Return the points of both machines.

    A point is the median of the equal calls of one job: calls with the same library and the same label, which names
    ranks, bytes of a piece, pool and batch.  Reservations are left out; `growths` has them.
    """
    measured = []
    for run, rows in (("2xh200", _two()), ("4xh200", _four())):
        times: dict[tuple[str, str], list[float]] = {}
        for library, label, _, us in rows:
            if label != "reserve":
                times.setdefault((library, label), []).append(us * 1e-6)
        measured += [_point(run, library, label, seconds) for (library, label), seconds in times.items()]
    return measured


def _point(run: str, library: str, label: str, seconds: Sequence[float]) -> GatherSample:
    # The label is split at its blanks: ranks, "ranks", bytes, pool, then any of "batch", the batch itself, and
    # "grown".
    # as `experiments.allgather.gather_rows.GatherSample.label` says it
    ranks, _, size, pool, *more = label.split(" ")
    kind = "plain" if pool == "default" else "symmetric"
    batch = more[1] if "batch" in more else ""
    return GatherSample(run, library, int(ranks), int(size), kind, batch, "grown" in more, float(np.median(seconds)))


def _two() -> Iterator[tuple[str, str, int, float]]:
    # The file has a row for each rank.
    by_rank: dict[tuple[str, str], dict[str, list[tuple[int, float, float]]]] = {}
    for row in tables.rows(FOLDER / "interface-2xh200.parquet"):
        key = row["collective"], row["label"] or "reserve"
        each = int(row["bytes"]), float(row["submitted_us"]), float(row["seen_us"])
        by_rank.setdefault(key, {}).setdefault(row["rank"], []).append(each)
    for (library, label), ranks in by_rank.items():
        for calls in zip(*ranks.values(), strict=True):
            yield library, label, calls[0][0], max(call[2] for call in calls) - max(call[1] for call in calls)


def _four() -> Iterator[tuple[str, str, int, float]]:
    for row in tables.rows(FOLDER / "interface-4xh200.parquet"):
        yield row["collective"], row["label"], int(row["bytes"]), float(row["us"])


# --- fits ----------------------------------------------------------------------------------------------------------


def seen(every: Sequence[GatherSample]) -> set[GatherSample]:
    """Return those of *every* that are fitted to.

    Taken are every other size of each machine, from its smallest on, and every other batch in the order of its total
    bytes.  The points that remain are those that `errors` judges the fit by.
    """
    batches = sorted({point.batch for point in every} - {""}, key=lambda batch: sum(map(int, batch.split("+"))))[::2]
    equal = [point for point in every if not point.batch]
    sizes = {run: sorted({point.size for point in equal if point.run == run})[::2] for run in ("2xh200", "4xh200")}
    fitted = {point for point in equal if point.size in sizes[point.run]}
    return fitted | {point for point in every if point.batch in batches and not point.grown}


def fit(every: Sequence[GatherSample], base: CollectiveModel) -> CollectiveModel:
    """Return *base* with the numbers that fit those of *every* that are not left out.

    Fitted are `FITTED` as logarithms, to warm points alone; residuals are ``log(model / measured)``, and from
    `SCALE` on a point counts less (scipy's ``soft_l1``).  A parameter that is 0 in *base* starts at 1 us or 1e-6
    bytes/s.  All points of *every* should be of one library and kind of memory, as *base* is.  Needs scipy.
    """
    from scipy.optimize import least_squares

    kept = seen(every)
    warm = [point for point in every if point in kept and point.warm]
    start = np.log([getattr(base, name) or 1e-6 for name in FITTED])

    def model(logs: Any) -> CollectiveModel:
        return replace(base, **dict[str, Any](zip(FITTED, map(float, np.exp(logs)), strict=True)))

    def residuals(logs: Any) -> Any:
        one = model(logs)
        return [np.log(one.isolated_time(point.ranks, point.size) / point.seconds) for point in warm]

    return model(least_squares(residuals, start, loss="soft_l1", f_scale=SCALE).x)


def host_times(every: Sequence[GatherSample]) -> tuple[float, float]:
    """Return *after_pause* and *grown*, which are the hosts' and so the same for all libraries and kinds of memory.

    Both are seconds, and medians over what `seen` returns: of padded batches, and of gathers in pools that grew with
    pieces of up to `SMALL` bytes.
    """
    kept = seen(every)
    paused = [point.seconds for point in kept if point.batch]
    grown = [point.seconds for point in kept if point.grown and point.size <= SMALL]
    return float(np.median(paused)), float(np.median(grown))


def growths() -> Iterator[tuple[str, int, int, float, bool]]:
    """Yield library, ranks, bytes, seconds and whether it is left out, of every reservation but the first of a job.

    A reservation that took a second or more is the first of its job, which also makes the connections, and is left
    out. Every other size of each number of ranks counts as left out of the fit.
    """
    two = [(library, 2, size, us) for library, label, size, us in _two() if label == "reserve"]
    four = [
        (row["collective"], int(row["ranks"]), int(row["bytes"]), float(row["us"]))
        for row in tables.rows(FOLDER / "interface-4xh200.parquet")
        if row["label"] == "reserve"
    ]
    for rows in (two, four):
        grown = [row for row in rows if row[3] < 1e6]
        sizes = {ranks: sorted({row[2] for row in grown if row[1] == ranks})[::2] for ranks in (2, 4)}
        for library, ranks, size, us in grown:
            yield library, ranks, size, us * 1e-6, size not in sizes[ranks]


# --- tables --------------------------------------------------------------------------------------------------------


def errors(every: Sequence[GatherSample], models: Mapping[tuple[str, str], CollectiveModel]) -> Table:
    """Return the error of *models*, by library and kind of memory, at what was left out.

    One row for each library, class of points and number of ranks; errors in per cent of the measured time.  *models*
    needs a model for each pair of ``nccl`` or ``symm_mem`` and one of `KINDS`.
    """
    kept, rows = seen(every), []
    classes: dict[str, Callable[[GatherSample], bool]] = {
        "equal plain": lambda point: point.kind == "plain" and point.warm,
        "equal symmetric": lambda point: point.kind == "symmetric" and point.warm,
        "padded": lambda point: bool(point.batch) and not point.grown,
        "grown, equal": lambda point: point.grown and not point.batch,
        "grown, padded": lambda point: point.grown and bool(point.batch),
        "all": lambda point: point.size > 0,
    }
    for library in ("nccl", "symm_mem"):
        mine = [point for point in every if point.library == library and point not in kept]
        for name, belongs in classes.items():
            for ranks in ((2, 4), (2,), (4,)):
                left = [point for point in mine if belongs(point) and point.ranks in ranks]
                apart = [_error(models[library, point.kind], point) for point in left]
                size = np.abs(apart) * 100
                median, p95 = float(np.median(size)), float(np.percentile(size, 95.0))
                rows.append(
                    [
                        library,
                        name,
                        " and ".join(map(str, ranks)),
                        len(left),
                        median,
                        p95,
                        float(np.median(apart)) * 100,
                    ]
                )
    columns = {
        "library": "",
        "class": "",
        "ranks": "",
        "points": "left out of the fit",
        "median %": "of the absolute error",
        "p95 %": "95th percentile of that",
        "bias %": "median signed error, model minus measured",
    }
    return Table("All-gathers that no fit has seen", columns, rows)


def _error(model: CollectiveModel, point: GatherSample) -> float:
    return (
        model.isolated_time(point.ranks, point.size, paused=bool(point.batch), grown=point.grown) / point.seconds
        - 1.0
    )


def between(every: Sequence[GatherSample]) -> Table:
    """Return what jobs differ by that ran the same calls of the same code: plain memory, with either library.

    The fifth column is the median distance of the jobs from their geometric mean: no model of one number a point can
    be closer than that.
    """
    jobs: dict[tuple[int, int, str], list[float]] = {}
    for point in every:
        if point.kind == "plain":
            jobs.setdefault((point.ranks, point.size, point.batch), []).append(point.seconds)
    rows = []
    for (ranks, size, batch), times in sorted(jobs.items()):
        best = float(np.exp(np.mean(np.log(times))))
        best_error = float(np.median(np.abs(best / np.array(times) - 1.0))) * 100
        rows.append([ranks, size, batch or "-", " ".join(f"{one * 1e6:.0f}" for one in times), best_error])
    columns = {"ranks": "", "bytes": "", "batch": "", "us": "median of each job", "%": "error of their mean"}
    return Table("The same calls in several jobs", columns, rows)


def growth_errors(libraries: Mapping[str, Collective]) -> Table:
    """Return the error at growths that were left out, and the latency that fits those that were not.

    The model of a growth is ``ranks * grow_latency + bytes / grow_rate``.  *fitted ms* is what *grow_latency* would
    be if it were the median over the growths that were not left out; it is compared with the configuration by eye.
    """
    rows = []
    for name, library in libraries.items():
        mine = [growth for growth in growths() if growth[0] == name]
        each = [(growth[3] - growth[2] / library.grow_rate) / growth[1] for growth in mine if not growth[4]]
        for ranks in (2, 4):
            left = [growth for growth in mine if growth[4] and growth[1] == ranks]
            model = [ranks * library.grow_latency + growth[2] / library.grow_rate for growth in left]
            apart = np.abs(np.array(model) / np.array([growth[3] for growth in left]) - 1.0) * 100
            median, p95 = float(np.median(apart)), float(np.percentile(apart, 95.0))
            rows.append([name, ranks, float(np.median(each)) * 1e3, len(left), median, p95])
    columns = {
        "library": "",
        "ranks": "",
        "fitted ms": "each rank",
        "points": "left out",
        "median %": "",
        "p95 %": "",
    }
    return Table("Growths that no fit has seen", columns, rows)
