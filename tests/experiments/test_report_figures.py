"""What reports say in figures, simulated: the data and the page have what the commands simulate."""

import json
import re
from pathlib import Path

import pytest

from experiments.reports.figures import FIGURES, kept, run, simulated
from experiments.reports.plot import FIGURES as DRAWN
from experiments.reports.plot import figure
from experiments.reports.report_points import keep, loaded
from pdsim.core.files import data
from pdsim.core.progress import silent
from pdsim.sim.model import Model
from tests.support.composed import composed

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reports"
BY = re.compile(rb"Matplotlib v[\d.]+")
COMMAND = re.compile(r"^# [^:]+, model: .*; pdsim run (.*)$", re.MULTILINE)
SIMULATED = [
    (file.stem, command)
    for file in sorted(data("reports").glob("seed_*.csv"))
    for command in COMMAND.findall(file.read_text(encoding="utf-8"))
]


def test_the_data_has_every_figure():
    assert [row[:3] for row in kept()] == [(f.report, f.says, round(f.reported, 2)) for f in FIGURES]
    config = composed("experiment=report_figures", "+experiment.only=[9149]")
    result = run(config, Model(config.hw, config.backend), silent)
    assert [metric.value for metric in result.summary] == [1, 0, 1]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "report",
    ["9149", *(pytest.param(each, marks=pytest.mark.slow) for each in ("7236", "22536", "26406", "37766", "6860"))],
)
def test_the_data_has_a_figure_as_the_model_has_it(report):
    config = composed("experiment=report_figures", f"+experiment.only=[{report}]")
    assert list(simulated(config, silent)) == [row for row in kept() if row.report == f"#{report}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_of_the_page_shows_the_data(name):
    shown, drawn = (FOLDER / f"{name}.svg").read_bytes(), figure(name)
    words = [re.findall(rb"<text[^>]*>([^<]*)</text>", image) for image in (shown, drawn)]
    assert words[0] == words[1], "run: python -m experiments.reports.plot"
    if BY.findall(shown) == BY.findall(drawn):  # another release may place them elsewhere
        assert shown == drawn, "run: python -m experiments.reports.plot"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_page_has_ttft_by_the_rate_of_gathers(tmp_path, pdsim_says):
    text = FOLDER.with_suffix(".md").read_text(encoding="utf-8")
    ttft: dict[str, dict[int, list[str]]] = {}
    for command, memory in re.findall(r"^python -m pdsim (sweep .* kv\.gather=(\w+) .*)$", text, re.MULTILINE):
        status, stdout, stderr = pdsim_says(*command.split(), "--json", f"output={tmp_path / memory}")
        assert status == 0, stderr
        for row in json.loads(stdout)["rows"]:
            ttft.setdefault(memory, {}).setdefault(row["parallel.prefill.cp"], []).append(f"{row['ttft_p50_s']:.4g}")
    shown = re.findall(r"^\| ([248]) \| ([\d. |]+) \|$", text, re.MULTILINE)
    assert {int(cp): cells.split(" | ") for cp, cells in shown} == {
        cp: [*plain, ttft["symmetric"][cp][-1]] for cp, plain in ttft["plain"].items()
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("seed", "command"), SIMULATED)
def test_a_command_simulates_the_points_kept_of_it(seed, command, tmp_path, pdsim_says):
    def lines(text: str) -> list[str]:
        return sorted(line for line in text.splitlines() if not line.startswith("#"))

    status, _, stderr = pdsim_says("run", *command.split(), f"output={tmp_path}")
    assert status == 0, stderr
    (folder,) = tmp_path.glob("seed_*")
    assert lines(keep([loaded(folder)])[seed]) == lines(data("reports", f"{seed}.csv").read_text(encoding="utf-8"))
