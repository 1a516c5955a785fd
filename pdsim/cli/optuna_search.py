# SPDX-License-Identifier: Apache-2.0
"""`pdsim sweep --search optuna`: Optuna chooses the points, instead of every combination being run.

A search is a sweep whose points are asked for in batches.  Optuna's sampler is seeded and told the batches in order,
so the same command asks for the same points: those whose rows are kept are told without being run, and the search
goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdsim.core.errors import ConfigError, instead
from pdsim.core.progress import ShowProgress
from pdsim.core.units import is_number
from pdsim.sweep import driver
from pdsim.sweep.executors import Executor
from pdsim.sweep.points import Axis, Point

__all__ = ["BATCH", "OptunaSearch", "search"]

BATCH = 4
"""Points that are asked for before the first of them is told: they run side by side, on any machine the same."""

_GPU = "goodput per GPU"


@dataclass(frozen=True, kw_only=True)
class OptunaSearch:
    """What is searched: *trials* points, for the highest or, *minimized*, the lowest *metric*."""

    trials: int = 50
    metric: str = _GPU  # of `summary.json`, or goodput divided by the number of GPUs
    minimized: bool = False

    def of(self, row: Mapping[str, Any]) -> float | None:
        """Return the metric of the *row* of a point; None if it could not be run or has none.

        Raise a `ConfigError` if no run has such a metric.
        """
        metrics = row.get("metrics") or {}
        if row["status"] not in ("ok", "partial") or not metrics:
            return None
        if self.metric == _GPU:
            goodput = metrics.get("goodput")
            return None if goodput is None or not row.get("gpus") else goodput / row["gpus"]
        if self.metric not in metrics:
            raise ConfigError(f"no metric {self.metric!r}; {instead(self.metric, sorted(metrics))}")
        value = metrics[self.metric]
        return None if value is None or not math.isfinite(value) else float(value)


def search(
    what: OptunaSearch,
    folder: Path,
    axes: Sequence[Axis],
    intervals: Mapping[str, tuple[float, float]],
    compose: Callable[[Mapping[str, str]], Point],
    executor: Executor,
    progress: ShowProgress,
) -> list[dict[str, Any]]:
    """Run the points that Optuna asks for, keep them in *folder*, and return their rows, each once.

    *axes* have lists of values, *intervals* a least and a highest one; *compose* makes a point of a choice of
    values. Raise a `ConfigError` if Optuna is not installed, if no point could be run, or if there is no such
    metric.
    """
    try:
        import optuna
    except ImportError:
        raise ConfigError("--search optuna needs Optuna; pip install 'pdsim[optuna]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=0, constant_liar=True)
    study = optuna.create_study(direction="minimize" if what.minimized else "maximize", sampler=sampler)
    points: dict[str, Point] = {}
    rows: dict[str, dict[str, Any]] = {}
    for done in range(0, what.trials, BATCH):

        def show(_share: float, text: str = "", _until: float | None = None, /, done: int = done) -> None:
            progress(done / what.trials, f"{done} of {what.trials} trials; {text.rpartition('; ')[2]}")

        trials = [study.ask() for _ in range(min(BATCH, what.trials - done))]
        batch = [compose(_choice(trial, axes, intervals)) for trial in trials]
        points |= {point.name: point for point in batch}
        if able := any(point.config is not None for point in points.values()):
            rows = {row["point"]: row for row in driver.sweep(folder, list(points.values()), executor, show)}
        for trial, point in zip(trials, batch, strict=True):
            value = what.of(rows[point.name]) if able else None
            study.tell(trial, value, state=optuna.trial.TrialState.FAIL if value is None else None)
    if not rows:
        raise ConfigError(f"none of {what.trials} points can be run: {next(iter(points.values())).refusal}")
    return list(rows.values())


def _choice(trial: Any, axes: Sequence[Axis], intervals: Mapping[str, tuple[float, float]]) -> dict[str, str]:
    choice: dict[str, str] = {}
    for axis in axes:
        name, steps = ",".join(axis.keys), range(len(axis.values))
        ordered = len(axis.keys) == 1 and all(is_number(value) for (value,) in axis.values)
        step = trial.suggest_int(name, 0, steps[-1]) if ordered else trial.suggest_categorical(name, list(steps))
        choice |= dict(zip(axis.keys, axis.values[step], strict=True))
    return choice | {key: repr(trial.suggest_float(key, low, high)) for key, (low, high) in intervals.items()}
