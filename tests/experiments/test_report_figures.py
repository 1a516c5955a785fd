"""What reports say in figures, simulated: what is kept is what the model says, and verdicts follow from factors."""

from __future__ import annotations

import pytest

from experiments.reports.figures import CLOSE, FIGURES, kept, run, simulated, verdict
from pdsim.kv.policy import Policy
from pdsim.sim.model import Model
from tests.support.composed import composed
from tests.support.serving import LLM, ONE, configured, serve


@pytest.mark.parametrize(
    ("reported", "found", "interval", "said"),
    [
        (2.0, 2.0 * CLOSE, (2.5, 2.5), "reached"),
        (2.0, 2.0 / CLOSE, (1.6, 1.6), "reached"),
        (2.0, 3.0, (2.0, 3.0), "within what is open"),
        (2.0, 3.0, (2.1, 9.0), "not reached"),
        (9.0, 1.06, (1.0, 8.9), "not reached"),
        (1.0, 1.04, (1.04, 1.04), "reached"),
    ],
)
def test_a_verdict_follows_from_factors(reported: float, found: float, interval: tuple[float, float], said: str):
    assert verdict(reported, found, *interval) == said


def test_all_figures_of_six_reports_are_kept_with_their_errors():
    rows = list(kept())
    assert [(row.report, row.figure, row.assumed, row.open) for row in rows] == [
        (f.report, f.says, f.assumed, f.open) for f in FIGURES
    ]
    assert len({row.report for row in rows}) == 6
    for row, figure in zip(rows, FIGURES, strict=True):
        assert row.reported == round(figure.reported, 2)
        assert row.error == pytest.approx(row.simulated / row.reported - 1, abs=0.006)
        assert row.lowest <= row.simulated <= row.highest
        assert row.verdict == verdict(row.reported, row.simulated, row.lowest, row.highest)


def test_what_is_kept_is_what_the_model_says():
    config = composed("experiment=report_figures", "+experiment.only=[9149]")
    assert list(simulated(config, lambda *_: None)) == [row for row in kept() if row.report == "#9149"]
    result = run(config, Model(config.hw, config.backend), lambda *_: None)
    assert [metric.value for metric in result.summary] == [1, 0, 1]


@pytest.mark.parametrize("queues", [0, 1])
def test_a_call_for_each_descriptor_is_a_write_of_one(queues: int):
    policy = {"call": "descriptor", "grouping": "pages", "queues": queues}
    whole, single = (
        serve(configured(ONE, ONE, LLM, policy=own)) for own in (Policy(grouping="pages"), Policy(**policy))
    )
    assert {r.descriptors for r in single.transfers if not r.label.endswith("metadata")} == {1}
    assert sum(r.nbytes for r in single.transfers) == sum(r.nbytes for r in whole.transfers)
    assert len(single.transfers) > 4 * len(whole.transfers)
