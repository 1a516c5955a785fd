# SPDX-License-Identifier: Apache-2.0
"""The result of an experiment, its statistics, and the environment of a run or a measurement.

Percentiles are numpy's default, linear interpolation between order statistics (type 7 of Hyndman and Fan, "Sample
Quantiles in Statistical Packages", 1996).  Latencies of neighbours are correlated, so intervals are by batch means
(Law, "Simulation Modeling and Analysis", 5th ed., section 9.5.3): a run is cut into a few long batches whose values
are nearly independent.  The trend test is Mann's and Kendall's (Mann, "Nonparametric tests against trend",
Econometrica 13, 1945) with the normal approximation.
"""

import math
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pdsim.transfer import TransferRecord
from pdsim.transfer.job import Outcome
from pdsim.version import __version__


@dataclass(frozen=True)
class Metric:
    """One number of the summary.  *name* ends in its unit where it has one, as in ``ttft_p50_s``."""

    name: str
    value: float | int | None  # None where nothing could be measured
    definition: str  # one sentence, printed beside the number
    tabled: bool = False  # one of the tables has it too, so that people need not read it twice


@dataclass(frozen=True)
class Table:
    """A table for people: *columns* maps a heading to its definition, *rows* hold what is printed."""

    title: str
    columns: Mapping[str, str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    summary: Sequence[Metric]
    tables: Sequence[Table] = ()
    requests: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # columns of equal length, one row a request
    transfers: Sequence[TransferRecord] = ()
    failures: Sequence[str] = ()  # one line each: a rank that ended with an error, a request that failed
    notes: Sequence[str] = ()  # what a reader must know, such as an offered load above capacity
    outcome: Outcome | None = None
    offered_load: Mapping[str, Any] | None = None  # of a serving run: prefill, decode, rate, at_most
    served: bool = False  # simulations within it served requests and kept none: evidence has their sources
    start: float = 0.0  # seconds on the clock of *transfers* at which the times of *requests* begin

    @property
    def values(self) -> dict[str, float | int | None]:
        """The values of the summary by the name of the metric."""
        return {metric.name: metric.value for metric in self.summary}

    def rows(self, title: str) -> list[dict[str, Any]]:
        """Return the rows of the table *title* by heading, none without such a table."""
        tables = (table for table in self.tables if table.title == title)
        return [dict(zip(table.columns, row, strict=True)) for table in tables for row in table.rows]


PERCENTILES = (50.0, 90.0, 99.0, 99.9)

Floats = npt.NDArray[np.float64]
Values = Sequence[float] | Floats
Item = TypeVar("Item")


@cache
def needed(q: float) -> int:
    """Return how many samples percentile *q*, from 0 to below 100, needs: with fewer it would be the maximum."""
    if not 0 <= q < 100:
        raise ValueError(f"q(={q}) must be >= 0 and < 100")
    return 1 if q <= 50 else math.ceil(100 / (100 - Fraction(str(q))))


def percentile(values: Values, q: float) -> float | None:
    """Return percentile *q* of *values*, or None if there are fewer than `needed`."""
    if len(values) < needed(q):
        return None
    return float(_percentiles(np.asarray(values, dtype=np.float64), q))


def _percentiles(rows: Floats, q: float) -> Any:
    # Of the last axis, to the bit what np.percentile gives, which imports numpy.ma: 20 ms.
    ordered = np.sort(rows)
    last = ordered.shape[-1] - 1
    low, share = divmod(last * (q / 100), 1.0)
    below, above = ordered[..., int(low)], ordered[..., min(int(low) + 1, last)]
    apart = above - below
    return above - apart * (1.0 - share) if share >= 0.5 else below + apart * share


def mean(values: Values) -> float | None:
    """Return the arithmetic mean of *values*, or None if there are none."""
    return float(np.mean(np.asarray(values, dtype=np.float64))) if len(values) else None


def pareto(items: Iterable[Item], costs: Callable[[Item], tuple[float, ...]]) -> list[Item]:
    """Return those of *items* that no other equals or beats in all *costs* at once, the lowest first.

    >>> pareto([(3, 1), (1, 3), (2, 3), (2, 2)], lambda item: item)
    [(1, 3), (2, 2), (3, 1)]
    """
    front: list[tuple[tuple[float, ...], Item]] = []
    for item in sorted(items, key=costs):
        own = costs(item)
        if not any(all(a <= b for a, b in zip(other, own, strict=True)) for other, _ in front):
            front.append((own, item))
    return [item for _, item in front]


def distribution(
    name: str,
    unit: str,
    values: Values,
    definition: str,
    percentiles: Sequence[float] = PERCENTILES,
    *,
    tabled: bool = False,
) -> tuple[Metric, ...]:
    """Return the mean and the *percentiles* of *values* as metrics ``<name>_avg_<unit>``, ``<name>_p99_<unit>``, ...

    *definition* is that of one value.
    """
    metrics = [Metric(f"{name}_avg_{unit}", mean(values), f"mean of: {definition}", tabled)]
    for q in percentiles:
        least = f"; needs {needed(q)} samples, has {len(values)}" if len(values) < needed(q) else ""
        rule = f"p{q:g} of: {definition}{least}"
        metrics.append(Metric(f"{name}_{label(q)}_{unit}", percentile(values, q), rule, tabled))
    return tuple(metrics)


def label(q: float) -> str:
    """Return the name of percentile *q*: ``"p99"``, ``"p99_9"``."""
    return f"p{q:g}".replace(".", "_")


BATCHES = {20: 2.093024, 10: 2.262157, 5: 2.776445}
"""Numbers of batches, and the 97.5 % point of Student's t with one degree of freedom fewer."""

_SMALLEST = 10  # values in a batch, at least
_TREND_BATCHES = 10
_SIGNIFICANT = 2.576  # standard deviations: 1 % of stationary runs are beyond by chance


def half_width(values: Floats, q: float | None) -> float | None:
    """Return half the 95 % interval of percentile *q* of *values*, in order, or of their mean; None for too few."""
    least = max(_SMALLEST, 1 if q is None else needed(q))
    half = None
    for batches, quantile in BATCHES.items():
        if len(values) < batches * least:
            continue
        size = len(values) // batches
        parts = np.reshape(np.asarray(values[: batches * size], np.float64), (batches, size))
        of_batches = np.array([mean(part) for part in parts]) if q is None else _percentiles(parts, q)
        half = quantile * float(np.std(of_batches, ddof=1)) / math.sqrt(batches)
        if _correlation(of_batches) <= 1.645 / math.sqrt(batches):
            break
    return half


def intervals(name: str, unit: str, values: Floats, percentiles: Sequence[float]) -> list[Metric]:
    """Return `half_width` of the mean and of *percentiles*, beside the metrics of `distribution`."""
    rule = "half the 95 % interval of the {}, by batch means; needs 5 batches of 10 requests or more"
    asked: list[tuple[str, float | None]] = [("avg", None), *((label(q), q) for q in percentiles)]
    return [
        Metric(f"{name}_{what}_half_{unit}", half_width(values, q), rule.format(what), tabled=True)
        for what, q in asked
    ]


def _correlation(values: Floats) -> float:
    centred = values - values.mean()
    square = float(np.dot(centred, centred))
    return float(np.dot(centred[:-1], centred[1:])) / square if square else 0.0


def trend(values: Floats) -> float | None:
    """Return by how much *values* grow from first to last tenth: 0.0 if they do not; None for fewer than 100."""
    if len(values) < _TREND_BATCHES * _SMALLEST:
        return None
    means = np.array([part.mean() for part in np.array_split(values, _TREND_BATCHES)])
    ranks = sum(float(np.sum(np.sign(means[index + 1 :] - value))) for index, value in enumerate(means))
    n = _TREND_BATCHES
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return float(means[-1] - means[0]) if (ranks - 1) / deviation > _SIGNIFICANT else 0.0


_PACKAGES = (
    "hydra-core", "msgspec", "numpy", "pyarrow", "pyzmq", "simpy", "torch", "amd-mori",
    "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda",
    "nixl", "nixl-cu12", "nixl-cu13",
)  # fmt: skip


@cache
def environment() -> dict[str, Any]:
    """Return the environment of a run, without the time: ``pdsim``, ``packages``, ``git`` and ``host``."""
    host = {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
    }
    return {"pdsim": __version__, "packages": _packages(), "git": _git(), "host": host}


def commit() -> str:
    """Return the commit that pdsim's files are of, such as ``"1a2b3c and changes"``, or ``"unknown"``."""
    git = environment()["git"] or {"commit": "unknown", "dirty": False}
    return str(git["commit"]) + (" and changes" if git["dirty"] else "")


def _packages() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _git() -> dict[str, Any] | None:
    here = Path(__file__).resolve().parents[1]
    if _ask(here, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    state = (_ask(here, "status", "--porcelain=v2", "--branch", "--untracked-files=no") or "").splitlines()
    commit = next((line.split()[2] for line in state if line.startswith("# branch.oid ")), None)
    return {"commit": commit, "dirty": any(not line.startswith("#") for line in state)}


def _ask(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(("git", "-C", str(folder), *arguments), capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def here() -> dict[str, str]:
    """Return the comments at the top of a file of samples: date, measured (the commit), host, versions and gpus.

    Takes as long as nvidia-smi does, at most 30 s.
    """
    where = environment()
    host = where["host"]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "measured": commit(),
        "host": f"{host['cpu']}, {host['cores']} cores, {host['kernel']}",
        "versions": ", ".join(f"{name} {version}" for name, version in where["packages"].items()),
        **_gpus(),
    }


def _gpus() -> dict[str, str]:
    if shutil.which("nvidia-smi") is None:
        return {}
    ask = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=30)
    lines = [line for line in done.stdout.split("\n") if line]
    return {"gpus": f"{len(lines)} x {'; '.join(sorted(set(lines)))}"} if lines else {}
