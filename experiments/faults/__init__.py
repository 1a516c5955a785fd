# SPDX-License-Identifier: Apache-2.0
"""The trial of the KV protocol: seeded scenarios of faults on small modelled machines, with every invariant checked.

Each scenario draws its machine, model, parallelism, pools and faults from its seed, serves some requests with
tracked memory contents, and is watched by `pdsim.verify.invariants`.  That the checkers find anything is shown by
``tests/mutants``, which breaks the protocol on purpose.
"""

from __future__ import annotations

import hashlib
import os
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from experiments.faults.scenario import KINDS, Tried, attempt, draw
from experiments.jobs import Parts
from pdsim.config import Config, ExperimentOptions
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress
from pdsim.core.units import NotNegativeInt, PositiveInt, Share
from pdsim.results.record import Metric, Result, Table
from pdsim.transfer.job import Target
from pdsim.verify.invariants import Violation
from pdsim.verify.reached import DIAGRAMS, MESSAGES

APART = 1_000_000
"""Scenarios from those of one seed of a run to those of the next."""


@dataclass(frozen=True, kw_only=True)
class FaultsOptions(ExperimentOptions):
    """The seeds to run: *scenarios* from *first* on, shifted by `APART` for each `Config.seed`, or the one *seed*.

    The same seed, number of requests, intensity and kinds are the same scenario, on any machine and with any number
    of processes. A scenario with fewer *requests* has the first ones, and suffers the same.
    """

    name: str = "faults"
    scenarios: PositiveInt = 200  # each drawn by a seed of its own
    requests: PositiveInt = 50  # of each scenario
    first: NotNegativeInt = 0  # seed; the others follow
    seed: NotNegativeInt | None = None  # replay this scenario only
    intensity: Share = 0.4  # probability of each kind of fault in a scenario
    # kinds that do not happen, of `experiments.faults.scenario.KINDS`
    without: tuple[Annotated[str, f"one of {', '.join(KINDS)}"], ...] = ()
    always: tuple[Annotated[str, f"one of {', '.join(KINDS)}"], ...] = ()  # kinds that happen in each scenario
    workers: NotNegativeInt = 0  # processes; 0 is one for each core
    parts: str = ""  # file that keeps finished scenarios: those that it has are not run again


def run(config: Config, target: Target, progress: ShowProgress) -> Result:  # noqa: ARG001
    """Run the scenarios and return the violations.

    Each invariant that was violated has a row and a failure, with the smallest scenario that still shows it and the
    command that replays that; making one smaller runs it again, some twenty times.  Raise a `ConfigError` on real
    engines, and for a file of other code or options.
    """
    if config.target != "model":
        raise ConfigError(f"target={config.target}: faults are drawn on the model only; use target=model")
    options = FaultsOptions.of(config)
    first = config.seed * APART + options.first
    seeds = [options.seed] if options.seed is not None else range(first, first + options.scenarios)
    kinds = frozenset(options.without), frozenset(options.always)
    trials = [FaultTrial(seed, options.requests, options.intensity, *kinds) for seed in seeds]
    alike = {
        "requests": options.requests,
        "intensity": options.intensity,
        "without": sorted(options.without),
        "always": sorted(options.always),
    }
    parts = campaign_parts(Path(options.parts), alike) if options.parts else None
    tried = [parts.kept[seed] for seed in seeds if seed in parts.kept] if parts else []
    known, bad = {each.seed for each in tried}, _bad(tried)
    left, started = [trial for trial in trials if trial.seed not in known], time.monotonic()
    for done in tries(left, options.workers or os.cpu_count() or 1):
        tried.append(done)
        if parts:
            parts.add(done)
        bad += bool(done.violations)
        progress(len(tried) / len(trials), f"{len(tried)} scenarios, {bad} with violations")
    notes = []
    if parts:
        all_bad = _bad(parts.kept.values())
        kept = f"{options.parts} keeps {len(parts.kept)} scenarios, {all_bad} with violations"
        notes = [f"{len(known)} scenarios were run before; {kept}"]
    return _result(trials, sorted(tried), len(left), time.monotonic() - started, notes)


def _result(
    trials: Sequence[FaultTrial], tried: Sequence[Tried], ran: int, seconds: float, more: Sequence[str]
) -> Result:
    by_seed = {trial.seed: trial for trial in trials}
    violated: dict[str, list[Tried]] = {}
    statuses: Counter[str] = Counter()
    for each in tried:
        statuses.update({status or "(none)": count for status, count in each.statuses.items()})
        for invariant in dict.fromkeys(violation.invariant for violation in each.violations):
            violated.setdefault(invariant, []).append(each)
    rows, failures = [], []
    for invariant, those in sorted(violated.items()):
        smallest, violation = shrunk(by_seed[those[0].seed], invariant)
        rows.append([invariant, len(those), violation.what, smallest.command()])
        failures.append(f"{violation} [{those[0].text}]; replay: {smallest.command()}")
    ends = Table(
        "How requests ended",
        {"status": "ok, or the class of the failure; each was reached by a fault", "requests": "number of requests"},
        [list(item) for item in statuses.most_common()],
    )
    columns = {
        "invariant": "rule of docs/faults.md",
        "scenarios": "scenarios that violate it",
        "what": "first violation of the smallest such scenario",
        "replay": "command that replays it",
    }
    metrics = [
        Metric("scenarios", len(tried), "scenarios that were run to their end"),
        Metric("requests", sum(trial.requests for trial in trials), "requests served in them"),
        Metric("violating", _bad(tried), "scenarios in which an invariant did not hold"),
        Metric("events", sum(each.events for each in tried), "SimPy events of all scenarios"),
        Metric("scenarios_per_s", ran / seconds, "scenarios run now / wall seconds, processes in parallel"),
    ]
    notes = ["hw, backend, model and parallel are not used: every scenario draws its own", *more]
    tables = [ends, *([Table("Violations", columns, rows)] if rows else []), reached(tried)]
    return Result(metrics, tables, failures=failures, notes=notes)


def reached(tried: Iterable[Tried]) -> Table:
    """Return how often each transition and message was reached in *tried*, the rarest first."""
    names = [f"{part} {step}" for part, steps in DIAGRAMS.items() for step in steps.split()]
    times, scenarios, kinds = Counter[str](), Counter[str](), {name: Counter[str]() for name in (*names, *MESSAGES)}
    all_kinds, every = Counter[str](), list(tried)
    for each in every:
        said = each.text.split(", ")
        own = [kind for kind in KINDS if kind in said]  # in one order: of equals the first is named
        all_kinds.update(own)
        times.update(each.reached)
        for name in kinds.keys() & each.reached.keys():
            scenarios[name] += 1
            kinds[name].update(own)
    rows = []
    for name in sorted(kinds, key=lambda name: (times[name], name)):
        shares = {kind: count / all_kinds[kind] for kind, count in kinds[name].items()}
        most = max(shares, key=lambda kind: (shares[kind], kinds[name][kind], kind), default="")
        rows.append([name, times[name], scenarios[name], f"{most} {shares[most]:.0%}" if most else ""])
    columns = {
        "what": "transition of a room, or message",
        "times": "how often in all scenarios",
        "scenarios": "in which it was reached",
        "kind": "of circumstances with which most often, and in which share of its scenarios",
    }
    return Table("What was reached, the rarest first", columns, rows)


def _bad(tried: Iterable[Tried]) -> int:
    return sum(bool(each.violations) for each in tried)


CRASH = "crash"
"""Stands for an invariant where a scenario did not run to its end."""

_BATCH = 5
"""Scenarios that a process is given at a time."""

_ROOT = Path(__file__).resolve().parents[2]
_CODE = (
    *("pdsim/core", "pdsim/hardware", "pdsim/transfer", "pdsim/sim", "pdsim/kv", "pdsim/serving", "pdsim/verify"),
    "experiments/faults",
)
"""Folders of the sources that decide what becomes of a scenario."""


class FaultTrial(NamedTuple):
    """The seed of a scenario, and the part of it to run (`experiments.faults.scenario.draw`)."""

    seed: int
    requests: int = 50
    intensity: float = 0.4
    without: frozenset[str] = frozenset()
    always: frozenset[str] = frozenset()

    def run(self) -> Tried:
        """Run it; an exception of the model itself, rather than of one of its ranks, is a violation too: `CRASH`."""
        try:
            return attempt(draw(self.seed, self.requests, self.intensity, self.without, self.always))
        except Exception as error:  # a campaign goes on
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error}, in {where.name}, line {where.lineno}"
            return Tried(self.seed, [Violation(CRASH, 0.0, what)], {}, 0, "")

    def command(self) -> str:
        """Return the command that replays it."""
        named = {"without": self.without, "always": self.always - self.without}
        kinds = "".join(f" 'experiment.{key}=[{','.join(sorted(of))}]'" for key, of in named.items() if of)
        return (
            f"python -m pdsim run experiment=faults experiment.seed={self.seed} experiment.requests={self.requests} "
            f"experiment.intensity={self.intensity:g}{kinds}"
        )


def tries(trials: Sequence[FaultTrial], workers: int) -> Iterator[Tried]:
    """Run *trials* on *workers* processes and yield the outcome of each.

    If whoever iterates stops, by Ctrl-C too, the processes are ended at once.
    """
    if workers == 1 or len(trials) <= _BATCH:
        yield from map(FaultTrial.run, trials)
        return
    pool = ProcessPoolExecutor(workers)
    try:
        yield from pool.map(FaultTrial.run, trials, chunksize=_BATCH)
    except BaseException:  # whoever stops asking, by a signal too, does not wait for what is under way
        pool.shutdown(wait=False, cancel_futures=True)  # its thread may not even have been started
        for process in active_children():
            process.kill()  # it would take a SIGTERM for an error of its scenario; it holds nothing
        raise
    pool.shutdown()


def shrunk(trial: FaultTrial, invariant: str) -> tuple[FaultTrial, Violation]:
    """Return the smallest scenario like *trial* that still violates *invariant*, and the violation.

    Kinds of faults are left out one by one, then requests by halves, quarters and so on, as long as the invariant
    stays violated.  Raise a `ValueError` if *trial* does not violate it.
    """
    violation = _violation(trial, invariant)
    if violation is None:
        raise ValueError(f"{trial} does not violate {invariant}")
    for kind in KINDS:
        smaller = trial._replace(without=trial.without | {kind})
        if still := _violation(smaller, invariant):
            trial, violation = smaller, still
    step = trial.requests // 2
    while step:
        still = _violation(smaller := trial._replace(requests=trial.requests - step), invariant)
        if still:
            trial, violation = smaller, still
        if not still or step >= trial.requests:
            step //= 2
    return trial, violation


def _violation(trial: FaultTrial, invariant: str) -> Violation | None:
    return next((each for each in trial.run().violations if each.invariant == invariant), None)


def code() -> str:
    """Return the SHA-256, in hexadecimal, of the sources in `_CODE`."""
    digest = hashlib.sha256()
    for path in sorted(path for room in _CODE for path in (_ROOT / room).rglob("*.py")):
        digest.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def campaign_parts(path: Path, options: Mapping[str, Any]) -> Parts[Tried]:
    """Return the scenarios in *path* that this code ran with *options*, by seed."""
    return Parts(path, {"faults": 1, "code": code(), **options}, Tried, "scenarios")
