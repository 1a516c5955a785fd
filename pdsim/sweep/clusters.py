# SPDX-License-Identifier: Apache-2.0
"""Points on other machines: tasks of Ray, and jobs of Slurm through submitit.

What a task or a job left in the folder of the sweep is not run again, so a lost one costs the point under way only.
The folder of the sweep is one that all machines see.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pdsim.core import plugins
from pdsim.core.errors import ConfigError
from pdsim.core.units import NotNegative, NotNegativeInt, PositiveInt, Seconds
from pdsim.sweep.executors import Measure, Row
from pdsim.sweep.points import Point

_ATTEMPTS = 3
"""How often a chunk is begun whose worker dies: each time one of its points at least is over."""


@dataclass(frozen=True, kw_only=True)
class Ray:
    """Tasks of Ray with a chunk of points each; a worker that dies loses the points of its chunk under way.

    Every machine of the cluster needs pdsim installed and sees the folder of the sweep.  A chunk has at most *chunk*
    points, and fewer where there would be less than two chunks for each task.  Ray is shut down at the end only if
    this sweep started it.
    """

    address: str = ""  # of a cluster; empty starts Ray on this machine
    workers: NotNegativeInt = 0  # most tasks at a time; 0 is one for each CPU of the cluster
    chunk: PositiveInt = 8  # points of a task, most
    cpus: NotNegative = 1.0  # of a task
    resources: Mapping[str, float] = field(default_factory=dict)  # others that a task needs, by name

    def run(self, measure: Measure, points: Sequence[Point]) -> Generator[Row, None, None]:
        """See `pdsim.sweep.executors.Executor`.  Raise a `ConfigError` if Ray is not installed."""
        plugins.require("executor=ray", "ray", "ray")
        import ray

        here = {} if self.address else {"num_cpus": self.workers or None, "include_dashboard": False}
        begun = not ray.is_initialized()
        if begun:
            ray.init(address=self.address or None, log_to_driver=False, logging_level="error", **here)
        try:
            yield from self._run(ray, measure, points)
        finally:
            if begun:
                ray.shutdown()

    def _run(self, ray: Any, measure: Measure, points: Sequence[Point]) -> Iterator[Row]:
        # A chunk whose worker died is begun again, up to `_ATTEMPTS` times: `measure` takes what its earlier points
        # left.
        task = ray.remote(num_cpus=self.cpus, resources=dict(self.resources), max_retries=0)(_chunk)
        most = self.workers or max(1, int(ray.cluster_resources().get("CPU", 1) / (self.cpus or 1)))
        size = max(1, min(self.chunk, len(points) // (2 * most)))
        waiting = iter([points[start : start + size] for start in range(0, len(points), size)])
        pending = {task.remote(measure, chunk): (chunk, 1) for chunk in islice(waiting, most)}
        while pending:
            (done,), _ = ray.wait(list(pending), num_returns=1)
            chunk, attempt = pending.pop(done)
            try:
                yield from ray.get(done)
            except ray.exceptions.RayError as error:
                why = f"its worker of Ray ended ({type(error).__name__}), {_ATTEMPTS} times"
                if attempt < _ATTEMPTS:
                    pending[task.remote(measure, chunk)] = (chunk, attempt + 1)
                    continue
                yield from (point.row("failed", why) for point in chunk)
            pending |= {task.remote(measure, each): (each, 1) for each in islice(waiting, 1)}


def _chunk(measure: Measure, points: Sequence[Point]) -> list[Row]:
    return [measure(point) for point in points]


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Jobs of Slurm, each with a share of the points; submitit keeps its files beside those of the sweep.

    The points are dealt out at the start, one share for each job.  A job that ends early leaves its points as
    failed, and the same command runs them again.  Jobs are cancelled when the sweep is interrupted.
    """

    # or "local": the same jobs as processes of this machine
    cluster: Annotated[str, "one of slurm, local"] = "slurm"
    workers: PositiveInt = 4  # most jobs at a time
    timeout: Annotated[Seconds, "> 0"] = 14400.0  # of a job
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of submitit's executor, such as slurm_partition

    def run(self, measure: Measure, points: Sequence[Point]) -> Generator[Row, None, None]:
        """See `pdsim.sweep.executors.Executor`.

        Raise a `ConfigError` if submitit is not installed or has no Slurm.
        """
        plugins.require("executor=slurm", "slurm", "submitit")
        import submitit

        folder = Path(points[0].config.output if points[0].config is not None else ".") / "jobs"
        try:
            executor = submitit.AutoExecutor(folder=folder, cluster=self.cluster)
        except RuntimeError as error:
            raise ConfigError(f"executor=slurm: {error}; or set executor.cluster=local") from error
        executor.update_parameters(timeout_min=max(1, int(self.timeout / 60)), **self.parameters)
        shares = [list(points[start :: self.workers]) for start in range(min(self.workers, len(points)))]
        jobs = {executor.submit(_chunk, measure, share): share for share in shares}
        try:
            while jobs:
                for job in [job for job in jobs if job.done()]:
                    yield from _rows(job, jobs.pop(job))
                time.sleep(0.2)
        finally:
            for job in jobs:
                with suppress(Exception):  # it may have ended meanwhile
                    job.cancel()


def _rows(job: Any, share: Sequence[Point]) -> list[Row]:
    error = job.exception()
    if error is None:
        rows: list[Row] = job.result()
        return rows
    last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    return [point.row("failed", f"its job {job.job_id} ended: {last[0]}") for point in share]
