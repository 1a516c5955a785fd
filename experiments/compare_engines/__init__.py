# SPDX-License-Identifier: Apache-2.0
"""Serve one workload in every combination of transfer engine, serving engine, staging and way of metadata.

Machine, model, parallelism and requests are the same for all; beside them stands the same workload without
disaggregation.  Costs of the engines are those of ``conf/backend``; no calibration is laid over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Annotated, Any

from experiments.serve import ServeOptions
from experiments.serve import run as serve
from pdsim.config import Config, ExperimentOptions, costs_on
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress, within
from pdsim.hardware.costs import Engine
from pdsim.kv.policy import Policy
from pdsim.results.record import Metric, Result, Table
from pdsim.serving.settings import ServingEngine
from pdsim.transfer.job import Target

TARGETS = ("model",)

COLUMNS = {
    "ttft_p50_s": "",
    "ttft_p90_s": "",
    "tpot_p50_s": "",
    "transfer_p50_s": "from the end of the last prefill forward to all KV in place",
    "goodput": "requests that meet the SLO, 1/s",
    "request_rate": "1/s",
    "requests_ok": "that got all their tokens",
}


@dataclass(frozen=True, kw_only=True)
class TransferEngine(Engine):
    """A backend with its policy, as its file in `conf/backend` has both; a run has one policy beside its backend."""

    policy: Policy = field(default_factory=Policy)


@dataclass(frozen=True, kw_only=True)
class CompareEnginesOptions(ExperimentOptions):
    """What is compared: all combinations of the first four, each serving the same workload on the same machine."""

    name: str = "compare_engines"
    backends: Mapping[str, TransferEngine]  # by the names that the table has
    engines: Mapping[str, ServingEngine]  # likewise, serving engines
    staging: tuple[bool, ...] = (False, True)  # without, and with staging buffers between unlike ranks
    # as the backend's policy has it, in the last "batch", or over "control"
    metadata: tuple[Annotated[str, "one of policy, batch, write, control"], ...] = ("policy",)
    colocated: bool = True  # also without disaggregation
    router: str = "least_tokens"  # as in experiment=serve


Combination = tuple[str, str, bool, str]  # backend, engine, staging, metadata


def run(config: Config, target: Target, progress: ShowProgress) -> Result:
    """Serve the workload of *config* in all combinations and rank them by their median TTFT.

    Raise a `ConfigError` if there is none that can be run.
    """
    options = CompareEnginesOptions.of(config)
    every: list[Combination] = list(product(options.backends, options.engines, options.staging, options.metadata))
    if options.colocated:
        every += [("none: colocated", engine, False, "-") for engine in options.engines]
    rows: list[list[Any]] = []
    skipped: list[list[str]] = []
    notes: Sequence[str] = ()
    for number, one in enumerate(every):
        named = [*one[:2], "staged" if one[2] else "as it is", one[3]]
        shown = within(progress, number / len(every), (number + 1) / len(every), ", ".join(named))
        try:
            served = _served(config, target, options, one, shown)
        except (ConfigError, ValueError) as error:
            skipped.append([*named, str(error)])
            continue
        notes = notes or served.notes[:2]
        rows.append([*named, *map(served.values.get, COLUMNS)])
    if not rows:
        raise ConfigError(f"no combination of experiment.backends and engines can be run: {skipped[0][-1]}")
    rows.sort(key=lambda row: (row[4] is None, row[4], row[:4]))
    heads = {"transfer engine": "", "serving engine": "", "KV": "between ranks of unlike TP", "metadata": "its way"}
    best, last = rows[0], rows[-1]
    return Result(
        served=True,
        summary=[
            Metric("combinations", len(rows), "that were served"),
            Metric("combinations_skipped", len(skipped), "that cannot be"),
            Metric("ttft_p50_best_s", best[4], f"median TTFT of {', '.join(best[:4])}"),
            Metric("ttft_p50_worst_s", last[4], f"median TTFT of {', '.join(last[:4])}"),
        ],
        tables=[Table("Engines", heads | COLUMNS, rows), Table("Skipped", heads | {"because": ""}, skipped)],
        notes=[*notes, "costs of engines are those of conf/backend: no calibration is laid over them"],
    )


def _served(
    config: Config, target: Target, options: CompareEnginesOptions, one: Combination, progress: ShowProgress
) -> Result:
    # Raise a `ConfigError` or a `ValueError` if it cannot be, or means nothing.
    name, engine, staging, metadata = one[0], options.engines[one[1]], *one[2:]
    if name not in options.backends:
        colocated = ServeOptions(router=options.router, deployment="colocated")
        return serve(replace(config, engine=engine, experiment=colocated), target, progress)
    chosen = options.backends[name]
    if engine.handoff == "pull" and (staging or metadata != "policy"):
        raise ConfigError("pulled KV has no staging and moves no metadata; compare it as it is")
    sides = config.parallel.prefill.attention_tp, config.parallel.decode.attention_tp
    if staging and (sides[0] == sides[1] or config.model.attention == "mla"):
        raise ConfigError("all ranks keep the same heads, so nothing is staged; set another parallel.decode.tp")
    if staging and not chosen.policy.staging:
        raise ConfigError(f"{name} has no staged path; leave kv.staging at false")
    backend = costs_on(chosen, config.hw)
    own = replace(
        config,
        backend=backend,
        policy=chosen.policy if metadata == "policy" else replace(chosen.policy, metadata=metadata),
        engine=engine,
        kv=replace(config.kv, staging=staging),
        experiment=ServeOptions(router=options.router),
    )
    served = serve(own, target.using(backend), progress)
    failed = {status for status in served.requests["status"] if status != "ok"}
    if failed and "ok" not in served.requests["status"]:
        raise ConfigError(f"no request was served: {min(failed)}")
    return served
