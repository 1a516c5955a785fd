"""What the seeds share: effects and verdicts, variants of other experiments, and the points in data/reports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from experiments import handoff
from experiments.reports import report_points
from experiments.reports.claims import Claim, ReportRun
from experiments.reports.report_points import ReportPoint, committed, keep
from pdsim.config import ExperimentOptions
from pdsim.core.errors import ConfigError
from pdsim.core.progress import silent
from pdsim.sim.model import Model
from tests.experiments.test_handoff import configured

LESS, MORE = Claim("fast", "it is faster", "us"), Claim("much", "it moves more", "GB/s", better="more", bound=2.0)
SAME = Claim("same", "nothing changes", "bytes", better="same")


@pytest.mark.parametrize(
    ("claim", "before", "after", "effect"),
    [(LESS, 3.0, 2.0, 1.5), (MORE, 2.0, 3.0, 1.5), (LESS, 3.0, None, None), (LESS, 0.0, 1.0, None)],
)
def test_an_effect_is_how_many_times_better_the_change_is(claim, before, after, effect):
    assert claim.effect(ReportPoint(claim.name, "toy", "model", "", before, after)) == effect


@dataclass(frozen=True, kw_only=True)
class Toy(ExperimentOptions):
    """The options of a seed that is none of the five."""

    name: str = "seed_toy"


@pytest.fixture
def toy_file(monkeypatch, tmp_path: Path) -> Path:
    """The file of a seed's points, in place of the committed ones."""
    (tmp_path / "reports").mkdir()
    monkeypatch.setattr(report_points, "data", lambda *parts: tmp_path.joinpath(*parts))
    return tmp_path / "reports" / "seed_toy.csv"


def test_claims_stand_beside_what_was_measured_and_kept(toy_file: Path):
    rows = "fast,toy fast,real,1to1 64 tokens,3.0,3.0\nfast,toy fast,model,old,9,1\nfast,other,real,x,,1.0\n"
    toy_file.write_text(f"# measured on a toy\nclaim,machine,target,at,before,after\n{rows}")
    config = replace(configured(tp=("1to1",), tokens=(64,)), experiment=Toy())
    trial = ReportRun(config, Model(config.hw, config.backend, memory="tracked"), silent, 1)
    (row,) = trial.run("whole", handoff.HandoffOptions(tp=("1to1",), tokens=(64,), repeat=2)).rows("Handoffs")
    trial.add(LESS, "1to1 64 tokens", 2 * row["p50"], row["p50"])
    result = trial.result([LESS, MORE])
    names = ("machine", "simulated", "measured", "verdict")
    assert [tuple(map(each.get, names)) for each in result.rows("Claims")] == [
        ("toy fast", "2", "1", "does not hold"), ("other", None, None, "-"),
    ]  # fmt: skip
    assert "old" not in {each["at"] for each in result.rows("Points")}
    spans = {"fast_least": 2.0, "fast_most": 2.0, "much_least": None, "much_most": None}
    assert result.values == spans
    assert {record.label.partition(" ")[0] for record in result.transfers} == {"whole"}


HEADINGS = ["claim", "machine", "target", "at", "before", "after", "unit", "effect", "runs", "low", "high"]
READ = ["fast", "other box", "model", "a", 2.0, 1.0, "us", 2.0, None, None, None]  # by the run, from such a file


def ran(before: float, after: float, at: str = "a", **about: Any) -> dict[str, Any]:
    """Return a run of a seed as it is loaded."""
    own = ["fast", "toy fast", "real", at, before, after, "us", before / after, None, None, None]
    return {
        "experiment": "seed_toy",
        "hw": "toy",
        "backend": "fast",
        "target": "real",
        "folder": f"results/{before}",
        "git": {"commit": "abcdefg1234"},
        "engine": ["fast 1.0"],
        "host": {"cpu": "a processor", "cores": 2},
        "started": "2026-11-21T20:00",
        "overrides": ["experiment=seed_toy", "seed=3", "output=x", "target=real"],
        "failures": [],
        "tables": [{"title": "Points", "columns": HEADINGS, "rows": [own, READ]}],
        **about,
    }


def test_runs_of_one_machine_are_kept_as_medians_and_ranges(toy_file: Path):
    toy_file.write_text(keep([ran(3.0, 1.0), ran(5.0, 2.0), ran(9.0, 1.5)])["seed_toy"])
    assert committed("seed_toy") == [ReportPoint("fast", "toy fast", "real", "a", 5.0, 1.5, 3, 2.5, 6.0)]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([ran(3.0, 1.0), ran(4.0, 1.0, at="b")], "4.0 has other points than results/3.0; keep them one by one"),
        ([ran(3.0, 1.0, failures=["rank0: gone"])], "results/3.0 failed: rank0: gone; take a run without failures"),
        ([ran(3.0, 1.0, tables=[], experiment="serve")], "is a run of serve, which is not a seed: it has no points"),
    ],
)
def test_what_cannot_be_kept_is_refused(runs, message, toy_file: Path):
    with pytest.raises(ConfigError, match=message):
        keep(runs)
