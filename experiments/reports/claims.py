# SPDX-License-Identifier: Apache-2.0
"""What the five seeds share: a change to a real system, run before and after, and whether its claim holds.

A report reuses the other experiments: `ReportRun.run` runs one of them as one variant,
`ReportRun.add` notes a value before and after the change, and `ReportRun.result` prints what became
of each `Claim`, beside the results that are committed in ``data/reports/<seed>.csv``, into which
`experiments.reports.report_points` writes.

An *effect* is a factor, above 1 where the change helps, whatever the unit; so claims about times
and about rates are judged alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.reports.report_points import ReportPoint, committed
from pdsim.config import Config, ExperimentOptions
from pdsim.core import plugins
from pdsim.core.progress import ShowProgress, within
from pdsim.results.record import Metric, Result, Table
from pdsim.serving.settings import Workload
from pdsim.transfer import TransferRecord
from pdsim.transfer.job import Target

__all__ = ["Claim", "ReportRun", "as_rows", "burst", "effect_range", "value"]

TARGETS = ("model", "real")


@dataclass(frozen=True)
class Claim:
    """What is said of a change: *text*, of values in *unit*; points and committed results know it by its *name*.

    *bound* is the least effect that confirms it.  What is not said to be large must be over 5 %, for less than that
    is not told from nothing.  With *better* ``"same"`` the change must stay within the bound instead.
    """

    name: str
    text: str
    unit: str
    better: str = "less"  # of two values, or "more", or "same"
    bound: float = 1.05

    def __post_init__(self) -> None:
        if self.better not in ("less", "more", "same"):
            raise ValueError(f"claim {self.name}: better must be one of less, more, same, got {self.better!r}")
        if not self.bound > 1:
            raise ValueError(f"claim {self.name}: bound must be > 1, got {self.bound}")

    @property
    def needs(self) -> str:
        """What confirms it, such as ``"less ms, 1.05 times"``."""
        return f"{'no more or less' if self.better == 'same' else self.better} {self.unit}, {self.bound:g} times"

    def effect(self, point: ReportPoint) -> float | None:
        """Return how many times better the value after the change is; None unless both are there and not 0.

        Of values of which less is better, such as times, that is before over after.
        """
        if not point.before or not point.after:
            return None
        return point.after / point.before if self.better == "more" else point.before / point.after

    def verdict(self, effects: Sequence[float]) -> str:
        """Return ``"holds"``, ``"does not hold"``, at how many points it does, or ``"-"`` without any.

        >>> claim = Claim("ttft", "earlier first tokens", "s", bound=1.5)
        >>> claim.verdict([2.0, 1.6]), claim.verdict([2.0, 1.1]), claim.verdict([])
        ('holds', 'holds at 1 of 2', '-')
        """
        confirmed = sum(effect >= self.bound for effect in effects)
        if self.better == "same":
            confirmed = sum(1 / self.bound <= effect <= self.bound for effect in effects)
        whole = {0: "does not hold", len(effects): "holds"}
        return whole.get(confirmed, f"holds at {confirmed} of {len(effects)}") if effects else "-"


class ReportRun:
    """Runs the *variants* of a seed one after the other on *target* and keeps what they found.

    A seed calls `run` for each variant, `add` for each point that it compares, and returns `result`. Progress is
    reported over all variants, each the same share.
    """

    def __init__(self, config: Config, target: Target, progress: ShowProgress, variants: int) -> None:
        self.config = config
        self.target = target
        self.points: list[ReportPoint] = []
        self.notes: list[str] = []
        self._progress = progress
        self._variants = variants
        self._results: dict[str, Result] = {}

    def run(
        self, label: str, options: ExperimentOptions, config: Config | None = None, target: Target | None = None
    ) -> Result:
        """Run the experiment that *options* are of, by default on what the seed is configured for.

        Raise what it raises.  Its failures become those of the seed, under *label*.
        """
        own = replace(config or self.config, experiment=options)
        measure = plugins.resolve(plugins.EXPERIMENTS, options.name).run
        done = len(self._results)
        result: Result = measure(
            own,
            target or self.target,
            within(self._progress, done / self._variants, (done + 1) / self._variants, label),
        )
        self._results[label] = result
        return result

    def add(self, claim: Claim, at: str, before: float | None, after: float | None, machine: str = "") -> None:
        """Keep the value of *claim* before and after the change, on the machine and backend of the configuration."""
        machine = machine or f"{self.config.hw.name} {self.config.backend.name}"
        self.points.append(ReportPoint(claim.name, machine, self.config.target, at, before, after))

    def result(self, claims: Sequence[Claim]) -> Result:
        """Return what became of *claims*, here and in what is committed of other machines and of the other target.

        Points of this run replace those that are committed of the same machine and target. Failures and notes are
        those of all variants, and so are the transfers, with the label of their variant in front.
        """
        self._progress(1.0, "")
        here = {(point.machine, point.target) for point in self.points}
        others = committed(self.config.experiment.name)
        points = self.points + [point for point in others if (point.machine, point.target) not in here]
        labelled = self._results.items()
        return Result(
            summary=[metric for claim in claims for metric in _metrics(claim, self.points)],
            tables=[_claims(claims, points), _points(claims, points)],
            transfers=list(self._transfers()),
            failures=[f"{label}: {failure}" for label, result in labelled for failure in result.failures],
            notes=[*self.notes, *dict.fromkeys(note for _, result in labelled for note in result.notes)],
        )

    def _transfers(self) -> Iterator[TransferRecord]:
        for label, result in self._results.items():
            yield from (record._replace(label=f"{label} {record.label}") for record in result.transfers)


def as_rows(result: Result, title: str) -> list[dict[str, Any]]:
    """Return the rows of the table *title* of *result*, by heading.

    Raise a `KeyError` if there is no such table.
    """
    table = {table.title: table for table in result.tables}[title]
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def value(result: Result, name: str) -> float | None:
    """Return the metric *name* of the summary of *result*.  Raise a `KeyError` if there is none."""
    return {metric.name: metric.value for metric in result.summary}[name]


def burst(requests: int, tokens: int, output: int = 1) -> Workload:
    """Return *requests* of *tokens* tokens and *output* of output that arrive, in effect, at once.

    Arrivals are Poisson, all within a microsecond, and lengths have no spread: every request is the same.
    """
    rate = 1e6 * requests  # within a microsecond
    lengths: dict[str, Any] = {"input_mean": tokens, "input_cv": 0.0, "output_mean": output, "output_cv": 0.0}
    return Workload(arrivals="poisson", count=requests, rate=rate, **lengths)


def _effects(claim: Claim, points: Iterable[ReportPoint]) -> list[float]:
    effects = (claim.effect(point) for point in points if point.claim == claim.name)
    return [effect for effect in effects if effect is not None]


def _metrics(claim: Claim, points: Sequence[ReportPoint]) -> Iterator[Metric]:
    effects = _effects(claim, points)
    for name, value in (("least", min(effects, default=None)), ("most", max(effects, default=None))):
        yield Metric(f"{claim.name}_{name}", value, f"{name} effect of: {claim.text}", tabled=True)


def _claims(claims: Sequence[Claim], points: Sequence[ReportPoint]) -> Table:
    columns = {
        "claim": "about the change",
        "says": "",
        "needs": "improvement that the claim needs",
        "machine": "hw and backend",
        "simulated": "improvement factor, lowest to highest of all points",
        "measured": "the same on the real engine: by this run, or in data/reports",
        "verdict": "by the measured factors, else by the simulated ones",
    }
    rows = []
    for claim in claims:
        for machine in dict.fromkeys(point.machine for point in points if point.claim == claim.name):
            own = [point for point in points if point.machine == machine]
            modelled, real = (_effects(claim, (p for p in own if p.target == target)) for target in TARGETS)
            ranges = (effect_range(claim, own, target) for target in TARGETS)
            rows.append([claim.name, claim.text, claim.needs, machine, *ranges, claim.verdict(real or modelled)])
    return Table("Claims", columns, rows)


def effect_range(claim: Claim, points: Iterable[ReportPoint], target: str) -> str | None:
    """Return the least and the most effect of *claim* at *points* of *target*, as ``"1.2 to 3"``, if any."""
    effects = _effects(claim, (point for point in points if point.target == target))
    low, high = (f"{end(effects, default=0.0):.3g}" for end in (min, max))
    return (low if low == high else f"{low} to {high}") if effects else None


def _points(claims: Sequence[Claim], points: Sequence[ReportPoint]) -> Table:
    about = {claim.name: claim for claim in claims}
    columns = {
        "claim": "",
        "machine": "",
        "target": "",
        "at": "",
        "before": "value before the change",
        "after": "value after the change",
        "unit": "",
        "effect": "improvement factor",
        "runs": "number of runs; values are their medians",
        "low": "lowest factor of one run",
        "high": "highest factor of one run",
    }
    known = [(point, about[point.claim]) for point in points if point.claim in about]
    rows = [
        [p.claim, p.machine, p.target, p.at, p.before, p.after, claim.unit, claim.effect(p), p.runs, p.low, p.high]
        for p, claim in known
    ]
    return Table("Points", columns, rows)
