"""What the seeds share: effects and verdicts, variants of other experiments, and the points in data/reports."""

from dataclasses import dataclass, replace

import pytest

from experiments import handoff
from experiments.reports import report_points
from experiments.reports.claims import Claim, ReportRun
from experiments.reports.report_points import ReportPoint
from pdsim.config import ExperimentOptions
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
def toy_file(monkeypatch, tmp_path):
    """The file of a seed's points, in place of the committed ones."""
    (tmp_path / "reports").mkdir()
    monkeypatch.setattr(report_points, "data", lambda *parts: tmp_path.joinpath(*parts))
    return tmp_path / "reports" / "seed_toy.csv"


def test_claims_stand_beside_what_was_measured_and_kept(toy_file):
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
