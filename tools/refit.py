# SPDX-License-Identifier: Apache-2.0
"""`pdsim refit`: fit shipped numbers again, from the samples that they name, and print their errors.

The fits are those of `pdsim.calibration` and of `tools`; this composes the configurations that they start from,
and prints.  It is how a reader checks a number of ``conf/``: the sample files in ``data/`` are the
evidence, and the same code that made the number makes it again.

Tests call `published`, `bare` and the functions on handoffs to compare what comes out with what is
shipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pdsim.calibration import samples
from pdsim.calibration.calibrate import Fitted, fitted, table
from pdsim.config import Config
from pdsim.config.compose import compose
from pdsim.core import plugins
from pdsim.core.errors import ConfigError, instead
from pdsim.core.plugins import conf
from pdsim.core.repository import data
from pdsim.hardware.costs import Collective
from pdsim.results.record import Table
from pdsim.results.terminal import show_table
from pdsim.sim.memory import LAUNCH
from pdsim.sim.model import Model
from tools import collective_fit, handoff_fit, option_fit

__all__ = ["WHAT", "bare", "handoff_config", "published", "refit", "served", "with_idle_wake"]

_HANDOFF_HEADS = ("host", "engine", "what", "tokens", "fitted", "measured us", "modelled us", "error %")


def refit(words: Sequence[str]) -> int:
    """Fit again what the first of *words* names, one of `WHAT`, print the result and return the exit status.

    Without words it is ``published``; after that, names choose among the calibrations. Nothing is written: what a
    fit says is compared with the file by whoever reads the table. Samples are in ``data/``, so a checkout of the
    repository is needed.

    Raise a `ConfigError` for anything else, and for names after it that are no published calibration.
    """
    what, *names = words or ("published",)
    if what not in WHAT or (names and what != "published"):
        wrong = what if what not in WHAT else names[0]
        raise ConfigError(f"refit {wrong} is not known; {instead(wrong, WHAT)}")
    for one in WHAT[what](names):
        show_table(one)
    return 0


# --- calibrations from published numbers ---------------------------------------------------------------------------


def published(names: Sequence[str] = ()) -> list[Fitted]:
    """Return each published calibration of `conf`, or those called *names*, fitted again from its own samples.

    The engine and machine are the first that the file holds for; reads and writes are told apart by the file's name.
    Errors are those on rows that the fit has not seen. Raise a `ConfigError` for a name that is no such calibration.
    """
    from omegaconf import OmegaConf

    files: list[Any] = [OmegaConf.load(path) for path in sorted((conf() / "calibration").glob("*.yaml"))]
    known: dict[str, Any] = {file.name: file for file in files if file.get("kind") == "published"}
    for name in names:
        if name not in known:
            raise ConfigError(f"refit published {name}: not a published calibration; {instead(name, known)}")
    return [_again(known[name]) for name in names or known]


def bare() -> list[Fitted]:
    """Return the calibrations of bare libraries, fitted again from the pairs of the probe.

    A bare library is an engine without pdsim around it: the samples are pairs that were
    posted to it directly (`tools.probe`).  They bound how much of a transfer's time is
    pdsim's own.
    """
    from omegaconf import OmegaConf

    return [_again(OmegaConf.load(path)) for path in sorted((conf() / "calibration").glob("*_bare-*.yaml"))]


def _again(file: Any) -> Fitted:
    # The path is that of the first parameter with an interval (``backend.PATH.name``); a name with
    # "-read" is of reads.
    at = next(iter(file.intervals)).split(".")[1]
    operation = "read" if "-read" in file.name else "write"
    words = [f"hw={file.hw[0]}", f"backend={file.backend[0]}", f"experiment.operation={operation}"]
    config = compose([*words, "experiment=transfer", "calibration=none"])
    rows = samples.read(data("calibration", f"{file.name}.csv"))
    return fitted(rows, config.hw, config.backend, operation, at, file.name, "again")


def _published(names: Sequence[str]) -> list[Table]:
    return [table(published(names))]


def _bare(_: Sequence[str]) -> list[Table]:
    return [table(bare())]


# --- options -------------------------------------------------------------------------------------------------------


def _options(_: Sequence[str]) -> list[Table]:
    base = compose(
        ["hw=2xh200", "backend=nixl", "experiment=transfer", f"calibration={option_fit.BASE}"]
    ).backend.intra
    assert base is not None
    sets = option_fit.process_sets()
    values, ends = option_fit.fit(base, sets), option_fit.spans(base, sets)
    scale = {"latency": 1e6, "descriptor": 1e6, "rate": 1.0}
    numbers: list[list[Any]] = [
        [name, value * scale[name], *(end * scale[name] for end in ends[name])]
        for name, value in zip(option_fit.FREE, values, strict=True)
    ]
    rows: list[list[Any]] = []
    for variant in (*option_fit.VARIANTS, ""):
        mine = [one for one in sets if variant in ("", one.variant)]
        cells = [variant or "all", len(mine)]
        for held in (False, True):
            apart = np.concatenate([option_fit.errors(base, one, values, held=held) for one in mine])
            cells += [100 * np.median(abs(apart)), 100 * np.percentile(abs(apart), 95), 100 * apart.mean()]
        rows.append(cells)
    others = option_fit.spread(sets)
    rows.append(["each set by the mean of the others", len(sets), None, None, None])
    rows[-1] += [100 * np.median(others), 100 * np.percentile(others, 95), None]
    heads = (
        "variant",
        "sets",
        "fitted median %",
        "p95 %",
        "bias %",
        "held out median %",
        "held out p95 %",
        "held out bias %",
    )
    return [
        Table("Added by the progress thread", dict.fromkeys(("what", "us or share", "low", "high"), ""), numbers),
        Table("Errors", dict.fromkeys(heads, ""), rows),
    ]


# --- collectives ---------------------------------------------------------------------------------------------------


def _collectives(_: Sequence[str]) -> list[Table]:
    every, libraries = collective_fit.points(), _libraries()
    given = {
        (name, kind): getattr(library, kind) for name, library in libraries.items() for kind in collective_fit.KINDS
    }
    models, rows = dict(given), []
    after_pause, grown = collective_fit.host_times(every)
    for (name, kind), base in given.items():
        mine = [point for point in every if point.kind == kind and (kind == "plain" or point.library == name)]
        one = replace(collective_fit.fit(mine, base), after_pause=after_pause, grown=grown)
        models[name, kind] = one
        values = [getattr(one, key) * 1e6 for key in ("latency", "step", "after_pause", "grown")]
        rows.append([name, kind, *values, one.rate / 1e9, one.own_rate / 1e9])
    heads = ("library", "memory", "latency us", "step us", "after pause us", "grown us", "rate GB/s", "own GB/s")
    return [
        Table("Fitted", dict.fromkeys(heads, ""), rows),
        *(collective_fit.errors(every, each) for each in (models, given)),
        collective_fit.growth_errors(libraries),
        collective_fit.between(every),
    ]


def _libraries() -> dict[str, Collective]:
    fits = {}
    for name in ("nccl", "symm_mem"):
        library = compose(["experiment=allgather", "hw=4xh200", f"collective={name}"]).collective
        assert library is not None
        fits[name] = library
    return fits


# --- handoffs ------------------------------------------------------------------------------------------------------


def _handoffs(_: Sequence[str]) -> list[Table]:
    # The first table has a row for each key of ``conf/hw`` with its 95 % interval in microseconds; the second one
    # for each host, engine and phase, with the error of the model and whether the phase was fitted to that host.
    # ``hw.host.idle_wake`` is found by simulating ``serve`` with several values, which takes most of the time.
    configs = {name: handoff_config(name) for name in sorted({engine for _, engine, _ in handoff_fit.times()})}
    config = configs[handoff_fit.FITTED[0]]
    assert config.hw.gpu is not None
    rate, latency, every = config.hw.gpu.memory_rate, config.hw.host.tcp_latency, handoff_fit.samples()
    mine = [sample for sample in every if handoff_fit.is_fitted(sample.host, sample.engine)]
    copies, between = handoff_fit.fit_copies(handoff_fit.medians(mine), rate, LAUNCH)
    wake = handoff_fit.fit_wake(
        [seconds for (host, name, _), seconds in handoff_fit.waking().items() if handoff_fit.is_fitted(host, name)],
        latency,
    )
    woken = handoff_fit.copy_wakes(config.hw.interconnect.rate)
    copy_wake = float(np.median([each for host in handoff_fit.FITTED[1] for each in woken[host]]))
    measured = handoff_fit.times()
    ttft = [
        seconds
        for (host, name, what), seconds in measured.items()
        if what == "median ttft" and handoff_fit.is_fitted(host, name)
    ]
    idle_wake = handoff_fit.fit_idle_wake(
        lambda seconds: served(with_idle_wake(config, seconds))["median ttft"], ttft
    )
    values = [copies.call, copies.descriptor, copies.context_switch]
    keys = [f"hw.gpu.copies.{name}" for name in ("call", "descriptor", "context_switch")]
    spans = handoff_fit.bootstrap(mine, rate, LAUNCH)
    numbers: list[list[Any]] = [
        [key, value * 1e6, low * 1e6, high * 1e6]
        for key, value, (low, high) in zip(keys, values, spans, strict=True)
    ]
    numbers += [
        ["messages beside two scatters", between * 1e6, None, None],
        ["hw.host.wake", wake * 1e6, None, None],
        ["hw.gpu.idle_wake", copy_wake * 1e6, None, None],
        ["hw.host.idle_wake", idle_wake * 1e6, None, None],
    ]
    rows = [
        _row(*key, seconds, handoff_fit.modelled(copies, between, rate, LAUNCH, *key[2:]))
        for key, seconds in handoff_fit.medians(every).items()
    ]
    whole = handoff_fit.MESSAGES * latency + handoff_fit.WAKES * wake
    rows += [
        _row(host, name, "whole", tokens * handoff_fit.TOKEN, seconds, whole)
        for (host, name, tokens), seconds in handoff_fit.waking().items()
    ]
    engine = handoff_fit.FITTED[0]
    rows += [_row(host, engine, "copy wake", 0, float(np.median(times)), copy_wake) for host, times in woken.items()]
    said = {name: served(each) for name, each in configs.items()}
    rows += [
        _row(host, name, what.removeprefix("median "), 0, seconds, said[name][what])
        for (host, name, what), seconds in measured.items()
        if what.startswith("median ")
    ]
    heads = {"key": "", "us": "", "low us": "95 % interval", "high us": ""}
    return [Table("Fitted", heads, numbers), Table("Medians", dict.fromkeys(_HANDOFF_HEADS, ""), rows)]


def handoff_config(backend: str) -> Config:
    """Return the configuration beside which the hosts' times were fitted, over *backend*.

    Two H200, one request at a time, no prefix cache and no verification, so that a handoff is what
    it costs and nothing waits.  What `conf/hw/8xh200.yaml` says of copies and wake-ups holds for
    it.
    """
    words = ["model=llama-3.1-8b", "workload=smoke", "kv.checked=0", "kv.pool=16GiB", "experiment=serve"]
    return compose(["hw=2xh200", f"backend={backend}", "compute=roofline", "engine=generic", *words])


def served(config: Config) -> dict[str, float]:
    """Return the medians of `serve` on the model, in seconds, by label as ``pdsim validate`` has them.

    The keys are "median transfer", "median ttft" and "median e2e"; a latency that no request has is
    0.
    """
    run = plugins.resolve(plugins.EXPERIMENTS, "serve").run
    result = run(config, Model(config.hw, config.backend, seed=config.seed), lambda *_: None)
    metrics = {metric.name: metric.value for metric in result.summary}
    return {f"median {name}": float(metrics[f"{name}_p50_s"] or 0.0) for name in ("transfer", "ttft", "e2e")}


def with_idle_wake(config: Config, seconds: float) -> Config:
    """Return *config* with hosts whose programs take *seconds* more to wake after they were idle."""
    return replace(config, hw=replace(config.hw, host=replace(config.hw.host, idle_wake=seconds)))


def _row(host: str, engine: str, what: str, nbytes: int, real: float, model: float) -> list[object]:
    # It has both times in us, the error in %, and whether the model was fitted to this host.
    known = "in part" if what in ("transfer", "e2e") else "yes"
    fitted_to = known if handoff_fit.is_fitted(host, engine) else "no"
    tokens = nbytes // handoff_fit.TOKEN or None
    return [host, engine, what, tokens, fitted_to, real * 1e6, model * 1e6, 100 * (model / real - 1)]


WHAT: Mapping[str, Callable[[Sequence[str]], list[Table]]] = {
    "published": _published,
    "bare": _bare,
    "options": _options,
    "collectives": _collectives,
    "handoffs": _handoffs,
}
"""What can be fitted again: calibrations, costs of options, `conf/collective`, the hosts' part of handoffs."""
