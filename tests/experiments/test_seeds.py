"""What the seeds share: effects and verdicts, variants of other experiments, and results that are committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import _seeds
from experiments._seeds import Claim, Point, Trial, as_rows
from pdsim.fabric.world import Model
from pdsim.results.record import Result
from tests.experiments.test_handoff import configured

LESS, MORE = Claim("fast", "it is faster", "us"), Claim("much", "it moves more", "GB/s", better="more", bound=2.0)
SAME = Claim("same", "nothing changes", "bytes", better="same")


@pytest.mark.parametrize(
    ("claim", "before", "after", "effect"),
    [(LESS, 3.0, 2.0, 1.5), (MORE, 2.0, 3.0, 1.5), (LESS, 3.0, None, None), (LESS, 0.0, 1.0, None)],
)
def test_an_effect_is_how_many_times_better_the_change_is(claim, before, after, effect):
    assert claim.effect(Point(claim.name, "toy", "model", "", before, after)) == effect


@pytest.mark.parametrize(
    ("claim", "effects", "verdict"),
    [
        (LESS, [1.05, 3.0], "holds"),
        (LESS, [1.04, 0.5], "does not hold"),
        (MORE, [1.9, 2.0, 4.0], "holds at 2 of 3"),
        (SAME, [0.96, 1.04], "holds"),
        (SAME, [0.9, 1.0, 1.1], "holds at 1 of 3"),
        (LESS, [], "-"),
    ],
)
def test_a_claim_holds_where_its_bound_is_reached(claim, effects, verdict):
    assert claim.verdict(effects) == verdict


def test_what_is_no_claim_is_refused():
    with pytest.raises(ValueError, match="claim x: better must be one of less, more, same, got 'fewer'"):
        Claim("x", "", "", better="fewer")
    with pytest.raises(ValueError, match=r"claim x: bound must be > 1, got 1"):
        Claim("x", "", "", bound=1.0)


def tried(**options) -> tuple[Trial, Result]:
    config = configured(tp=("1to1",), tokens=(64,))
    config = type(config)(**{**vars(config), "experiment": {"name": "seed_toy"}, **options})
    trial = Trial(config, Model(config.hw, config.backend, memory="tracked"), lambda share, text: None, 1)
    (row,) = as_rows(trial.run("whole", "handoff", tp=("1to1",), tokens=(64,), repeat=2), "Handoffs")
    trial.add(LESS, "1to1 64 tokens", 2 * row["p50"], row["p50"])
    return trial, trial.result([LESS, MORE])


def test_a_trial_tells_of_each_claim_and_keeps_the_transfers_of_its_variants():
    _, result = tried()
    (claim,), (point,) = as_rows(result, "Claims"), as_rows(result, "Points")
    assert (claim["machine"], claim["simulated"], claim["measured"], claim["verdict"]) == (
        "toy fast",
        "2",
        None,
        "holds",
    )
    assert (point["target"], point["effect"]) == ("model", 2.0)
    assert {metric.name: metric.value for metric in result.summary} == {
        "fast_least": 2.0, "fast_most": 2.0, "much_least": None, "much_most": None,
    }  # fmt: skip
    assert result.transfers
    assert all(record.label.startswith("whole ") for record in result.transfers)


def test_measured_results_that_are_committed_stand_beside_those_of_this_run(monkeypatch, tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    rows = "fast,toy fast,real,1to1 64 tokens,3.0,3.0\nfast,toy fast,model,old,9,1\nfast,other,real,x,,1.0\n"
    text = f"# measured on a toy\nclaim,machine,target,at,before,after\n{rows}"
    (tmp_path / "experiment" / "seed_toy.csv").write_text(text)
    monkeypatch.setattr(_seeds.resources, "files", lambda package: tmp_path)
    _, result = tried()
    toy, other = as_rows(result, "Claims")
    assert (toy["simulated"], toy["measured"], toy["verdict"]) == ("2", "1", "does not hold")
    assert (other["machine"], other["measured"], other["verdict"]) == ("other", None, "-")
    assert "old" not in {row["at"] for row in as_rows(result, "Points")}


def test_a_run_is_printed_as_lines_of_such_a_file_without_what_it_read_from_one():
    rows = [
        ["fast", "toy fast", "model", "a", 2.0, 1.0, "us", 2.0],
        ["fast", "toy fast", "real", "a", 3.0, 1.0, "us", 3.0],
    ]
    run = {"hw": "toy", "backend": "fast", "target": "real", "tables": [{"title": "Points", "rows": rows}]}
    assert list(_seeds._lines([run])) == [["fast", "toy fast", "real", "a", 3.0, 1.0]]
