"""What the five seeds share: a change to a real system, run before and after, and whether its claim holds.

A seed reuses the other experiments: `Trial.run` runs one of them as one variant, `Trial.add` notes a value before and
after the change, and `Trial.result` prints what became of each `Claim`, beside the results that are committed in
``conf/experiment/<seed>.csv``.  ``python -m experiments._seeds FOLDER...`` prints runs as lines of such a file.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from pdsim.config import Config
from pdsim.results.record import Metric, Result, Table
from pdsim.serving.settings import Workload
from pdsim.transfer import Target, TransferRecord

__all__ = ["Claim", "Point", "Trial", "as_rows", "burst", "committed", "value"]

RANGES = {"model": "simulated", "real": "measured"}


@dataclass(frozen=True)
class Claim:
    """What is said of a change: *text*, of values in *unit*; points and committed results know it by its *name*.

    *bound* is the least effect that confirms it.  What is not said to be large must be over 5 %, for less than that is
    not told from nothing.  With *better* ``"same"`` the change must stay within the bound instead.
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

    def effect(self, point: Point) -> float | None:
        """Return how many times better the value after the change is; None unless both are there and not 0."""
        if not point.before or not point.after:
            return None
        return point.after / point.before if self.better == "more" else point.before / point.after

    def verdict(self, effects: Sequence[float]) -> str:
        """Return ``"holds"``, ``"does not hold"``, at how many points it does, or ``"-"`` without any."""
        confirmed = sum(effect >= self.bound for effect in effects)
        if self.better == "same":
            confirmed = sum(1 / self.bound <= effect <= self.bound for effect in effects)
        whole = {0: "does not hold", len(effects): "holds"}
        return whole.get(confirmed, f"holds at {confirmed} of {len(effects)}") if effects else "-"


@dataclass(frozen=True)
class Point:
    """The value of a claim before and after the change, in its unit, *at* one point; None where none was got."""

    claim: str
    machine: str  # hw and backend
    target: str  # "model" or "real"
    at: str  # such as "1to2 8192 tokens"
    before: float | None
    after: float | None


class Trial:
    """Runs the *variants* of a seed one after the other on *target* and keeps what they found."""

    def __init__(self, config: Config, target: Target, progress: Callable[[float, str], None], variants: int) -> None:
        self.config = config
        self.target = target
        self.points: list[Point] = []
        self.notes: list[str] = []
        self._progress = progress
        self._variants = variants
        self._results: dict[str, Result] = {}

    def run(
        self, label: str, experiment: str, config: Config | None = None, target: Target | None = None, **options: Any
    ) -> Result:
        """Run *experiment*, such as ``"handoff"``, with *options*, by default as the seed is configured.

        Raise what it raises.  Its failures become those of the seed, under *label*.
        """
        own = replace(config or self.config, experiment={"name": experiment, **options})
        measure = import_module(f"experiments.{experiment}").run
        done = len(self._results)
        result: Result = measure(
            own,
            target or self.target,
            lambda share, text: self._progress((done + share) / self._variants, f"{label} {text}"),
        )
        self._results[label] = result
        return result

    def add(self, claim: Claim, at: str, before: float | None, after: float | None, machine: str = "") -> None:
        """Keep the value of *claim* before and after the change, on the machine and backend of the configuration."""
        machine = machine or f"{self.config.hw.name} {self.config.backend.name}"
        self.points.append(Point(claim.name, machine, self.config.target, at, before, after))

    def result(self, claims: Sequence[Claim]) -> Result:
        """Return what became of *claims*, here and in what is committed of other machines and of the other target."""
        self._progress(1.0, "")
        here = {(point.machine, point.target) for point in self.points}
        others = committed(str(self.config.experiment["name"]))
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
    """Return the rows of the table *title* of *result*, by heading.  Raise a `KeyError` if there is no such table."""
    table = {table.title: table for table in result.tables}[title]
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def value(result: Result, name: str) -> float | None:
    """Return the metric *name* of the summary of *result*.  Raise a `KeyError` if there is none."""
    return {metric.name: metric.value for metric in result.summary}[name]


def burst(requests: int, tokens: int) -> Workload:
    """Return *requests* of *tokens* tokens and one of output that arrive, in effect, at once."""
    rate = 1e6 * requests  # within a microsecond
    lengths = {"input_mean": tokens, "input_cv": 0.0, "output_mean": 1.0, "output_cv": 0.0}
    return Workload(arrivals="poisson", count=requests, rate=rate, **lengths)


def committed(seed: str) -> list[Point]:
    """Return the points of ``conf/experiment/<seed>.csv``, none if there is no such file."""
    file = resources.files("conf") / "experiment" / f"{seed}.csv"
    if not file.is_file():
        return []
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [
        Point(**row | {name: float(row[name]) if row[name] else None for name in ("before", "after")})
        for row in csv.DictReader(lines)
    ]


def _effects(claim: Claim, points: Iterable[Point]) -> list[float]:
    found = (claim.effect(point) for point in points if point.claim == claim.name)
    return [effect for effect in found if effect is not None]


def _metrics(claim: Claim, points: Sequence[Point]) -> Iterator[Metric]:
    effects = _effects(claim, points)
    for name, value in (("least", min(effects, default=None)), ("most", max(effects, default=None))):
        yield Metric(f"{claim.name}_{name}", value, f"{name} effect of: {claim.text}", tabled=True)


def _claims(claims: Sequence[Claim], points: Sequence[Point]) -> Table:
    columns = {
        "claim": "about the change",
        "says": "",
        "needs": "by how much the value must be better after the change",
        "machine": "hw and backend",
        "simulated": "least and most effect of all points, as often better as that",
        "measured": "likewise, on the real engine: by this run, or committed in conf/experiment",
        "verdict": "of what was measured, else of what was simulated",
    }
    rows = []
    for claim in claims:
        for machine in dict.fromkeys(point.machine for point in points if point.claim == claim.name):
            found = {
                target: _effects(claim, (p for p in points if (p.machine, p.target) == (machine, target)))
                for target in RANGES
            }
            verdict = claim.verdict(found["real"] or found["model"])
            rows.append([claim.name, claim.text, claim.needs, machine, *map(_range, found.values()), verdict])
    return Table("Claims", columns, rows)


def _range(effects: Sequence[float]) -> str | None:
    low, high = (f"{end(effects, default=0.0):.3g}" for end in (min, max))
    return (low if low == high else f"{low} to {high}") if effects else None


def _points(claims: Sequence[Claim], points: Sequence[Point]) -> Table:
    about = {claim.name: claim for claim in claims}
    columns = {field.name: "" for field in fields(Point)} | {
        "before": "the change, in unit",
        "after": "it",
        "unit": "",
        "effect": "how many times better after the change",
    }
    known = [point for point in points if point.claim in about]
    rows = [[*astuple(point), about[point.claim].unit, about[point.claim].effect(point)] for point in known]
    return Table("Points", columns, rows)


def _lines(summaries: Iterable[Mapping[str, Any]]) -> Iterator[list[Any]]:
    """Yield the points of complete runs that the runs themselves got, and not from what was committed."""
    for run in summaries:
        (table,) = (table for table in run["tables"] if table["title"] == "Points")
        own = [(f"{run['hw']} {engine}", run["target"]) for engine in (run["backend"], run.get("collective"))]
        yield from (row[: len(fields(Point))] for row in table["rows"] if (row[1], row[2]) in own)


def _run(folder: Path) -> dict[str, Any]:
    """Return the run in *folder*, and what it gathered with."""
    from omegaconf import OmegaConf

    from pdsim.results.store import load

    return load(folder) | {"collective": OmegaConf.select(OmegaConf.load(folder / "config.yaml"), "collective.name")}


if __name__ == "__main__":
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([field.name for field in fields(Point)])
    writer.writerows(_lines(_run(Path(folder)) for folder in sys.argv[1:]))
