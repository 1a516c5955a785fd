# SPDX-License-Identifier: Apache-2.0
"""What the five seeds share: a change to a real system, run before and after, and whether its claim holds.

A seed runs other experiments as variants (`ReportRun.run`), notes values before and after (`ReportRun.add`), and
returns the verdicts beside those of the points in ``data/reports/<seed>.csv``.  An *effect* is a factor, above 1
where the change helps, in any unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Annotated, Any

from experiments import handoff, serve
from experiments.reports.report_points import ReportPoint, committed
from pdsim.config import Config, ExperimentOptions
from pdsim.core import plugins
from pdsim.core.progress import ShowProgress, within
from pdsim.core.units import NotNegativeInt, PositiveInt, Seconds
from pdsim.results.record import Metric, Result, Table
from pdsim.serving.settings import Workload
from pdsim.transfer.job import Target

TARGETS = ("model", "real")


@dataclass(frozen=True)
class Claim:
    """A statement about a change: *text*, of values in *unit*; points refer to it by *name*.

    *bound* is the least effect that confirms it; the default, 5 %, is what noise does not reach.  With *better*
    ``"same"`` the change must stay within the bound instead.
    """

    name: str
    text: str
    unit: str
    better: str = "less"  # of two values, or "more", or "same"
    bound: float = 1.05

    def effect(self, point: ReportPoint) -> float | None:
        """Return the improvement factor of the change; None unless both values are known and not 0."""
        if not point.before or not point.after:
            return None
        return point.after / point.before if self.better == "more" else point.before / point.after

    def effects(self, points: Iterable[ReportPoint], target: str = "") -> list[float]:
        """Return the effects at those of *points* that are of this claim and, if given, of *target*."""
        own = (self.effect(p) for p in points if p.claim == self.name and target in ("", p.target))
        return [effect for effect in own if effect is not None]

    def verdict(self, effects: Sequence[float]) -> str:
        """Return ``"holds"``, ``"does not hold"``, at how many points it holds, or ``"-"`` without points.

        >>> claim = Claim("ttft", "earlier first tokens", "s", bound=1.5)
        >>> claim.verdict([1.5, 1.6]), claim.verdict([2.0, 1.4]), claim.verdict([1.4]), claim.verdict([])
        ('holds', 'holds at 1 of 2', 'does not hold', '-')
        >>> Claim("bytes", "nothing changes", "bytes", better="same").verdict([0.9, 0.96, 1.04, 1.1])
        'holds at 2 of 4'
        """
        most = self.bound if self.better == "same" else float("inf")
        least = 1 / self.bound if self.better == "same" else self.bound
        confirmed = sum(least <= effect <= most for effect in effects)
        whole = {0: "does not hold", len(effects): "holds"}
        return whole.get(confirmed, f"holds at {confirmed} of {len(effects)}") if effects else "-"


class ReportRun:
    """Runs the *variants* of a seed one after the other on *target* and keeps their points."""

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
        """Run the experiment that *options* are of, by default as the seed is configured; its failures are kept."""
        own = replace(config or self.config, experiment=options)
        measure = plugins.resolve(plugins.EXPERIMENTS, options.name).run
        done = len(self._results)
        shown = within(self._progress, done / self._variants, (done + 1) / self._variants, label)
        result: Result = measure(own, target or self.target, shown)
        self._results[label] = result
        return result

    def handoffs(
        self, label: str, options: handoff.HandoffOptions, config: Config | None = None, target: Target | None = None
    ) -> dict[tuple[str, int], dict[str, Any]]:
        """Run the handoffs as `run` does, and return the rows by way and tokens."""
        rows = self.run(label, options, config, target).rows("Handoffs")
        return {(row["way"], row["tokens"]): row for row in rows}

    def add(self, claim: Claim, at: str, before: float | None, after: float | None, *, machine: str = "") -> None:
        """Keep the value of *claim* before and after the change, on the machine and backend of the configuration."""
        machine = machine or f"{self.config.hw.name} {self.config.backend.name}"
        self.points.append(ReportPoint(claim.name, machine, self.config.target, at, before, after))

    def serve(
        self, claims: Sequence[Claim], metrics: Sequence[str], at: str, variants: Sequence[tuple[str, Config]]
    ) -> list[Result]:
        """Serve by both *variants*, each with its label, and add *claims* of the *metrics* in the same order."""
        options = serve.ServeOptions(deadline=self.config.experiment.silence or 60.0)
        results = [self.run(label, options, own) for label, own in variants]
        for claim, metric in zip(claims, metrics, strict=True):
            scale = 1e3 if claim.unit == "ms" else 1.0
            seconds = [result.values[metric] for result in results]
            self.add(claim, at, *(None if one is None else scale * one for one in seconds))
        return results

    def result(self, claims: Sequence[Claim]) -> Result:
        """Return the verdicts of *claims*, here and at the committed points of other machines and targets."""
        self._progress(1.0, "")
        here = {(point.machine, point.target) for point in self.points}
        others = committed(self.config.experiment.name)
        points = self.points + [point for point in others if (point.machine, point.target) not in here]
        summary = [
            Metric(
                f"{claim.name}_{name}",
                end(claim.effects(self.points), default=None),
                f"{name} effect of: {claim.text}",
                tabled=True,
            )
            for claim in claims
            for name, end in (("least", min), ("most", max))
        ]
        results = self._results.items()
        return Result(
            summary=summary,
            tables=[_claims(claims, points), _points(claims, points)],
            transfers=[
                record._replace(label=f"{label} {record.label}")
                for label, result in results
                for record in result.transfers
            ],
            failures=[f"{label}: {failure}" for label, result in results for failure in result.failures],
            notes=[*self.notes, *dict.fromkeys(note for _, result in results for note in result.notes)],
        )


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
        better = "no more or less" if claim.better == "same" else claim.better
        said = [claim.name, claim.text, f"{better} {claim.unit}, {claim.bound:g} times"]
        for machine in dict.fromkeys(point.machine for point in points if point.claim == claim.name):
            own = [point for point in points if point.machine == machine]
            verdict = claim.verdict(claim.effects(own, "real") or claim.effects(own, "model"))
            rows.append([*said, machine, *(effect_range(claim, own, target) for target in TARGETS), verdict])
    return Table("Claims", columns, rows)


def effect_range(claim: Claim, points: Iterable[ReportPoint], target: str) -> str | None:
    """Return the least and the most effect of *claim* at *points* of *target*, as ``"1.2 to 3"``, if any."""
    if not (effects := claim.effects(points, target)):
        return None
    low, high = f"{min(effects):.3g}", f"{max(effects):.3g}"
    return low if low == high else f"{low} to {high}"


def _points(claims: Sequence[Claim], points: Sequence[ReportPoint]) -> Table:
    about = {claim.name: claim for claim in claims}
    columns = dict.fromkeys(("claim", "machine", "target", "at"), "") | {
        "before": "value before the change",
        "after": "value after the change",
        "unit": "",
        "effect": "improvement factor",
        "runs": "number of runs; values are their medians",
        "low": "lowest factor of one run",
        "high": "highest factor of one run",
    }
    rows = []
    for point in (point for point in points if point.claim in about):
        cells, claim = astuple(point), about[point.claim]
        rows.append([*cells[:6], claim.unit, claim.effect(point), *cells[6:]])
    return Table("Points", columns, rows)


def burst(requests: int, tokens: int, output: int = 1) -> Workload:
    """Return *requests* of *tokens* tokens and *output* of output that arrive within a microsecond."""
    lengths: dict[str, Any] = {"input_mean": tokens, "input_cv": 0.0, "output_mean": output, "output_cv": 0.0}
    return Workload(arrivals="poisson", count=requests, rate=1e6 * requests, **lengths)


@dataclass(frozen=True, kw_only=True)
class PromptBurstOptions(ExperimentOptions):
    """Handoffs by themselves, then prompts that arrive at once; a seed says how much of it."""

    tp: Annotated[tuple[Annotated[str, handoff.sides], ...], "non-empty"]  # ranks of prefill, ranks of decode
    tokens: Annotated[tuple[PositiveInt, ...], "non-empty"]  # of a handoff
    # a GPU for each rank; or "sides": prefill shares the first half of them, decode the rest
    placement: Annotated[str, "one of packed, sides"] = "packed"
    repeat: PositiveInt = 3  # measured handoffs of each shape
    warmup: NotNegativeInt = 1  # before them
    prompts: tuple[PositiveInt, ...] = ()  # that arrive at once; () is none
    prompt_tokens: PositiveInt = 1024  # assumed: the reports name no load
    output_tokens: PositiveInt = 128  # assumed likewise
    deadline: Annotated[Seconds, "> 0"] = 60.0  # assumed: of silence, after which a rank counts as gone

    def handoff(self, path: str = "sliced") -> handoff.HandoffOptions:
        """Return the options of `experiments.handoff`; *path* is for ranks that keep other heads."""
        shared = ("tp", "tokens", "placement", "repeat", "warmup", "deadline")
        return handoff.HandoffOptions(paths=(path,), **{name: getattr(self, name) for name in shared})
