"""What `tools.validation` writes into docs/validation.md."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.experiments.test_validate_ahead import predict
from tools import live_page, validation


def test_the_page_is_what_the_committed_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = Path(shutil.copy(validation.PAGE, tmp_path))
    monkeypatch.setattr(validation, "PAGE", page)
    validation.main([])
    assert page.read_text() == (validation.ROOT / "docs" / "validation.md").read_text()


def test_predictions_made_ahead_are_named_with_their_hash(tmp_path: Path):
    predict(tmp_path / "a")
    lines = list(validation.predictions([tmp_path / "a"]))
    sealed = validation.read(tmp_path / "a" / "expectations.json")
    assert lines[0] == "- `fast` on toy: calibration none, tiny,"
    assert lines[1].endswith(f"SHA-256 `{sealed['sha256'][:16]}`")


def test_predictions_made_ahead_are_printed_by_machine_and_class(tmp_path: Path):
    predict(tmp_path / "a")
    lines = list(validation.medians([tmp_path / "a"]))
    assert lines[0] == "### toy"
    assert "| class | median | points | `fast` |" in lines
    assert "| pair | µs | 4 | 10.89 |" in lines  # of 6.4096, 9.2288, 12.5536 and 27.6608 us


def test_an_engine_that_was_not_predicted_for_a_class_has_a_dash(tmp_path: Path):
    predict(tmp_path / "a")
    predict(tmp_path / "b", classes=("pair",))
    first, second = (validation.read(tmp_path / name / "expectations.json") for name in "ab")
    rows = validation._medians([first, {**second, "backend": "other"}]).rows
    assert {row[0] for row in rows if row[-1] == "-"} >= {"incast", "handoff, staged"}
    assert [row[-1] for row in rows if row[0] == "pair"] == [row[-2] for row in rows if row[0] == "pair"]


def test_a_gain_is_how_many_times_longer_what_is_before_a_change_takes(monkeypatch: pytest.MonkeyPatch):
    def times(sliced: float, staged: float) -> list[dict[str, object]]:
        found = {"1to2 sliced 512 tokens": sliced, "1to2 staged 512 tokens": staged, "2to2 whole 512 tokens": 1.0}
        found |= {"2to1 sliced 512 tokens": sliced, "2to1 staged 512 tokens": 2.0 * staged}
        return [{"label": label, "quantity": "time", "value": value} for label, value in found.items()]

    kept = {
        Path("a/expectations.json"): {"backend": "fast", "hw": "toy", "expected": times(6.0, 2.0)},
        Path("a/measurements.json"): {"measured": times(5.0, 2.0)},
    }
    monkeypatch.setattr(validation, "read", kept.__getitem__)
    row = "| sliced → staged | fast | toy | 2 | 1.5 to 3 | 1.25 to 2.5 |"
    assert list(validation.gains([Path("a")]))[6:-1] == [row]


def test_the_table_of_serving_engines_is_what_the_sealed_files_say():
    assert live_page.rewritten() == live_page.PAGE.read_text(encoding="utf-8")
    assert live_page.FIGURE.is_file()


def test_a_change_is_the_ratio_of_what_both_have():
    one = {"loads": {"a": {"metrics": {"x": 2.0, "y": None}}, "b": {"metrics": {"x": 1.0}}}}
    other = {"loads": {"a": {"metrics": {"x": 3.0, "y": 1.0}}, "c": {"metrics": {"x": 1.0}}}}
    assert live_page.changed(one, other) == {"a": {"x": 1.5}}
