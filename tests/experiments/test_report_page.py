"""Figures of docs/reports.md show what `data/reports` keeps, and that is what the commands there simulate."""

import re
from pathlib import Path

import pytest

from experiments.reports.plot import FIGURES, figure
from experiments.reports.report_points import keep, loaded
from pdsim.core.repository import data

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reports"
BY = re.compile(rb"Matplotlib v[\d.]+")
SIMULATED = [
    (file.stem, command)
    for file in sorted(data("reports").glob("seed_*.csv"))
    for command in re.findall(
        r"^# [^:]+, model: .*; pdsim run (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE
    )
]


def lines(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if not line.startswith("#"))


def words(drawn: bytes) -> list[bytes]:
    return re.findall(rb"<text[^>]*>([^<]*)</text>", drawn)


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_what_data_keeps(name: str):
    shown, drawn = (FOLDER / f"{name}.svg").read_bytes(), figure(name)
    assert words(shown) == words(drawn), "run: python -m experiments.reports.plot"
    if BY.findall(shown) == BY.findall(drawn):  # another release may place them elsewhere
        assert shown == drawn, "run: python -m experiments.reports.plot"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("seed", "command"), SIMULATED)
def test_a_command_simulates_the_points_kept_of_it(seed: str, command: str, tmp_path: Path, pdsim_says):
    status, _, stderr = pdsim_says("run", *command.split(), f"output={tmp_path}")
    assert status == 0, stderr
    (folder,) = tmp_path.glob("seed_*")
    assert lines(keep([loaded(folder)])[seed]) == lines(data("reports", f"{seed}.csv").read_text(encoding="utf-8"))
