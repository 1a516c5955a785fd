# SPDX-License-Identifier: Apache-2.0
"""Fit collectives to measured all-gathers, and tell how far the fit is from those left out: `conf/collective`.

The time of an all-gather is fitted to every other size of the equal pieces of each run, from its smallest on, in
pools that were reserved; *after_pause* to every other padded batch there, *grown* to every other size, up to a MiB,
of equal pieces in pools that grew; a growth to every other of its sizes.  All else is left out.  A point counts with
its median. Plain memory goes through NCCL with either library, so both runs count.  Seconds and bytes; samples are
in ``data/collective``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from pdsim.calibration.robust import robust_fit
from pdsim.config.compose import compose
from pdsim.core.files import data
from pdsim.hardware.costs import Collective, CollectiveModel
from pdsim.results.record import Table
from tools.tables import rows as rows_of

KINDS = ("plain", "symmetric")
"""Kinds of memory, which `Collective` has a model of each for."""

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


def _calls() -> Iterator[tuple[str, str, str, int, int, float]]:
    # Run, library, label, ranks, bytes and seconds of each call; the first file has a row for each rank.
    by_rank: dict[tuple[str, str], dict[str, list[tuple[int, float, float]]]] = {}
    for row in rows_of(data("collective", "interface-2xh200.parquet")):
        each = int(row["bytes"]), float(row["submitted_us"]), float(row["seen_us"])
        key = row["collective"], row["label"] or "reserve"
        by_rank.setdefault(key, {}).setdefault(row["rank"], []).append(each)
    for (library, label), ranks in by_rank.items():
        for calls in zip(*ranks.values(), strict=True):
            us = max(call[2] for call in calls) - max(call[1] for call in calls)
            yield "2xh200", library, label, 2, calls[0][0], us * 1e-6
    for row in rows_of(data("collective", "interface-4xh200.parquet")):
        about = row["collective"], row["label"], int(row["ranks"]), int(row["bytes"])
        yield "4xh200", *about, float(row["us"]) * 1e-6


def points() -> list[GatherSample]:
    """Return the medians of the equal calls of each job: the same library, and label, which names all else."""
    times: dict[tuple[str, str, str], list[float]] = {}
    for run, library, label, _, _, seconds in _calls():
        if label != "reserve":
            times.setdefault((run, library, label), []).append(seconds)
    every = []
    for (run, library, label), seconds_of in times.items():
        # as `experiments.allgather.GatherPoint.label` says it
        ranks, _, size, pool, *more = label.split(" ")
        about = int(ranks), int(size), "plain" if pool == "default" else "symmetric"
        batch = more[1] if "batch" in more else ""
        every.append(GatherSample(run, library, *about, batch, "grown" in more, float(np.median(seconds_of))))
    return every


def seen(every: Sequence[GatherSample]) -> set[GatherSample]:
    """Return the samples of *every* that the fit uses.

    Taken are every other size of each machine, from its smallest on, and every other batch in the order of its total
    bytes.  The points that remain are those that `errors` judges the fit by.
    """
    batches = sorted({point.batch for point in every} - {""}, key=lambda batch: sum(map(int, batch.split("+"))))[::2]
    equal = [point for point in every if not point.batch]
    sizes = {run: sorted({point.size for point in equal if point.run == run})[::2] for run in ("2xh200", "4xh200")}
    kept = {point for point in equal if point.size in sizes[point.run]}
    return kept | {point for point in every if point.batch in batches and not point.grown}


def fit(every: Sequence[GatherSample], base: CollectiveModel) -> CollectiveModel:
    """Return *base* with `FITTED` as they fit those points of *every* that are warm and not left out.

    All points of *every* should be of one library and kind of memory, as *base* is.  Needs SciPy.
    """
    kept = seen(every)
    warm = [point for point in every if point in kept and point.warm]
    start = {name: getattr(base, name) or 1e-6 for name in FITTED}

    def predicted(values: dict[str, Any]) -> list[float]:
        model = replace(base, **values)
        return [model.isolated_time(point.ranks, point.size) for point in warm]

    values: dict[str, Any] = robust_fit(predicted, [point.seconds for point in warm], start, scale=SCALE).values
    return replace(base, **values)


def host_times(every: Sequence[GatherSample]) -> tuple[float, float]:
    """Return *after_pause* and *grown* in seconds, which are the hosts': the same for all libraries and memories."""
    kept = seen(every)
    paused = [point.seconds for point in kept if point.batch]
    grown = [point.seconds for point in kept if point.grown and point.size <= SMALL]
    return float(np.median(paused)), float(np.median(grown))


def tables() -> list[Table]:
    """Return the fitted numbers, and the errors of the fit, of `conf/collective` and of growths."""
    every, libraries = points(), {}
    for name in ("nccl", "symm_mem"):
        library = compose(["experiment=allgather", "hw=4xh200", f"collective={name}"]).collective
        assert library is not None
        libraries[name] = library
    given = {(name, kind): getattr(library, kind) for name, library in libraries.items() for kind in KINDS}
    fitted, rows = {}, []
    after_pause, grown = host_times(every)
    for (name, kind), base in given.items():
        mine = [point for point in every if point.kind == kind and (kind == "plain" or point.library == name)]
        one = replace(fit(mine, base), after_pause=after_pause, grown=grown)
        fitted[name, kind] = one
        values = [getattr(one, key) * 1e6 for key in ("latency", "step", "after_pause", "grown")]
        rows.append([name, kind, *values, one.rate / 1e9, one.own_rate / 1e9])
    heads = ("library", "memory", "latency us", "step us", "after pause us", "grown us", "rate GB/s", "own GB/s")
    judged = [errors(every, models) for models in (fitted, given)]
    return [Table("Fitted", dict.fromkeys(heads, ""), rows), *judged, growth_errors(libraries)]


def errors(every: Sequence[GatherSample], models: Mapping[tuple[str, str], CollectiveModel]) -> Table:
    """Return the error of *models*, by library and kind of memory, on samples that were held out.

    One row for each library, class of points and number of ranks; errors in per cent of the measured time.
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

    def error(library: str, point: GatherSample) -> float:
        model = models[library, point.kind]
        modelled = model.isolated_time(point.ranks, point.size, paused=bool(point.batch), grown=point.grown)
        return modelled / point.seconds - 1.0

    for library in ("nccl", "symm_mem"):
        mine = [point for point in every if point.library == library and point not in kept]
        for name, belongs in classes.items():
            for ranks in ((2, 4), (2,), (4,)):
                apart = [error(library, point) for point in mine if belongs(point) and point.ranks in ranks]
                where = [library, name, " and ".join(map(str, ranks)), len(apart)]
                rows.append([*where, *_summary(apart), float(np.median(apart)) * 100])
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


def _summary(apart: Sequence[float]) -> list[float]:
    return [float(value) * 100 for value in np.percentile(np.abs(apart), (50.0, 95.0))]


def growth_errors(libraries: Mapping[str, Collective]) -> Table:
    """Return the error at growths that were left out, and the latency that fits those that were not.

    A growth takes ``ranks * grow_latency + bytes / grow_rate``.  *fitted ms* is the median of *grow_latency* over
    the growths that were not left out.  A reservation of a second or more is the first of its job, which also makes
    the connections, and does not count.
    """
    growths = [each for each in _calls() if each[2] == "reserve" and each[5] < 1.0]
    rows = []
    for name, library in libraries.items():
        latencies: list[float] = []
        away: dict[int, list[float]] = {}
        for ranks, run in ((2, "2xh200"), (2, "4xh200"), (4, "4xh200")):
            kept = sorted({each[4] for each in growths if (each[0], each[3]) == (run, ranks)})[::2]
            for _, _, _, _, size, seconds in (g for g in growths if (g[0], g[1], g[3]) == (run, name, ranks)):
                if size in kept:
                    latencies.append((seconds - size / library.grow_rate) / ranks)
                else:
                    model = ranks * library.grow_latency + size / library.grow_rate
                    away.setdefault(ranks, []).append(model / seconds - 1.0)
        fitted = float(np.median(latencies)) * 1e3
        rows += [[name, ranks, fitted, len(apart), *_summary(apart)] for ranks, apart in away.items()]
    columns = dict.fromkeys(("library", "ranks", "fitted ms", "points", "median %", "p95 %"), "")
    columns |= {"fitted ms": "each rank", "points": "left out"}
    return Table("Growths that no fit has seen", columns, rows)
