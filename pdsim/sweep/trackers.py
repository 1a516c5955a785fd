# SPDX-License-Identifier: Apache-2.0
"""Trackers log each point of a sweep as it ends: ``pdsim sweep --track NAME``, a name of `plugins.TRACKERS`.

A tracker is a function that takes the name of the sweep and returns one that takes the row of a point, as
`pdsim.sweep.points.Point.row` makes it.  It is called again for points of an earlier call of the sweep, and knows
those that it has already.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from pdsim.core import plugins
from pdsim.core.errors import ConfigError

Track = Callable[[Mapping[str, Any]], None]


def mlflow(sweep: str) -> Track:
    """Return a function that logs a point as a run of MLflow's experiment *sweep*, at ``MLFLOW_TRACKING_URI``.

    Overrides are its parameters, metrics its metrics, the rest its tags. Raise a `ConfigError` without MLflow, and
    if its store cannot be used.
    """
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError:
        raise ConfigError(
            "--track mlflow needs MLflow; pip install mlflow, or mlflow-skinny with a server"
        ) from None
    try:
        client = MlflowClient()
        known = client.get_experiment_by_name(sweep)
        experiment = known.experiment_id if known else client.create_experiment(sweep)
        runs = client.search_runs([experiment], max_results=50_000) if known else []
        have = {run.info.run_name for run in runs if run.info.status == "FINISHED"}
    except MlflowException as error:
        raise ConfigError(
            f"--track mlflow: {' '.join(str(error).split())}; set MLFLOW_TRACKING_URI to a store or server"
        ) from error

    def track(row: Mapping[str, Any]) -> None:
        if row["point"] in have:
            return
        have.add(row["point"])
        run_tags = {f"pdsim.{key}": value for key, value in _tags(row).items()}
        run = client.create_run(experiment, run_name=row["point"], tags=run_tags).info.run_id
        for key, value in row["overrides"].items():
            client.log_param(run, key, value)
        for name, value in row["metrics"].items():
            if value is not None:
                client.log_metric(run, name, value)
        client.set_terminated(run)

    return track


def wandb(sweep: str) -> Track:
    """Return a function that logs a point as a run of Weights & Biases in the project *sweep*.

    Overrides and what describes the point are its configuration, metrics its summary.  A point that is logged again
    is the same run.  Raise a `ConfigError` without the package.
    """
    plugins.require("--track wandb", "wandb", "wandb")
    from wandb import Settings, init

    def track(row: Mapping[str, Any]) -> None:
        own = hashlib.sha256(f"{sweep}/{row['point']}".encode()).hexdigest()[:16]
        settings = Settings(silent=True, console="off", disable_git=True, x_disable_stats=True)
        config = {**row["overrides"], "pdsim": _tags(row)}
        with init(project=sweep, name=row["point"], id=own, resume="allow", config=config, settings=settings) as run:
            run.summary.update({name: value for name, value in row["metrics"].items() if value is not None})

    return track


def _tags(row: Mapping[str, Any]) -> dict[str, str]:
    names = ("status", "error", "hw", "backend", "target", "evidence", "folder")
    return {name: str(row[name]) for name in names if row.get(name)}
