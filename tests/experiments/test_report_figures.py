"""What reports say in figures, simulated: what is kept, drawn and said is what the commands simulate."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.reports.figures import CLOSE, FIGURES, kept, run, simulated, verdict
from experiments.reports.plot import FIGURES as DRAWN
from experiments.reports.plot import figure
from experiments.reports.report_points import keep, loaded
from pdsim.core.repository import data
from pdsim.kv.policy import Policy
from pdsim.sim.model import Model
from tests.support.composed import composed
from tests.support.serving import LLM, ONE, configured, serve

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reports"
BY = re.compile(rb"Matplotlib v[\d.]+")
COMMAND = re.compile(r"^# [^:]+, model: .*; pdsim run (.*)$", re.MULTILINE)
SIMULATED = [
    (file.stem, command)
    for file in sorted(data("reports").glob("seed_*.csv"))
    for command in COMMAND.findall(file.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(
    ("reported", "simulated", "interval", "said"),
    [
        (2.0, 2.0 * CLOSE, (2.5, 2.5), "reached"),
        (2.0, 2.0 / CLOSE, (1.6, 1.6), "reached"),
        (2.0, 3.0, (2.0, 3.0), "within what is open"),
        (2.0, 3.0, (2.1, 9.0), "not reached"),
        (9.0, 1.06, (1.0, 8.9), "not reached"),
        (1.0, 1.04, (1.04, 1.04), "reached"),
    ],
)
def test_a_verdict_follows_from_factors(reported: float, simulated: float, interval: tuple[float, float], said: str):
    assert verdict(reported, simulated, *interval) == said


def test_all_figures_of_six_reports_are_kept_with_their_errors():
    rows = list(kept())
    assert [(row.report, row.figure, row.assumed, row.open) for row in rows] == [
        (f.report, f.says, f.assumed, f.open) for f in FIGURES
    ]
    assert len({row.report for row in rows}) == 6
    for row, one in zip(rows, FIGURES, strict=True):
        assert row.reported == round(one.reported, 2)
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
    policies = Policy(grouping="pages"), Policy(call="descriptor", grouping="pages", queues=queues)
    whole, single = (serve(configured(ONE, ONE, LLM, policy=own)) for own in policies)
    assert {r.descriptors for r in single.transfers if not r.label.endswith("metadata")} == {1}
    assert sum(r.nbytes for r in single.transfers) == sum(r.nbytes for r in whole.transfers)
    assert len(single.transfers) > 4 * len(whole.transfers)


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_of_the_page_shows_what_data_keeps(name: str):
    shown, drawn = (FOLDER / f"{name}.svg").read_bytes(), figure(name)
    words = [re.findall(rb"<text[^>]*>([^<]*)</text>", image) for image in (shown, drawn)]
    assert words[0] == words[1], "run: python -m experiments.reports.plot"
    if BY.findall(shown) == BY.findall(drawn):  # another release may place them elsewhere
        assert shown == drawn, "run: python -m experiments.reports.plot"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("seed", "command"), SIMULATED)
def test_a_command_simulates_the_points_kept_of_it(seed: str, command: str, tmp_path: Path, pdsim_says):
    def lines(text: str) -> list[str]:
        return sorted(line for line in text.splitlines() if not line.startswith("#"))

    status, _, stderr = pdsim_says("run", *command.split(), f"output={tmp_path}")
    assert status == 0, stderr
    (folder,) = tmp_path.glob("seed_*")
    assert lines(keep([loaded(folder)])[seed]) == lines(data("reports", f"{seed}.csv").read_text(encoding="utf-8"))
