"""What `tools.validation` writes into docs/validation.md and beside the data."""

from pathlib import Path

import pytest

from tests.experiments.test_validate_ahead import predict
from tools import live_data, validation


def test_the_pages_are_what_the_committed_files_say():
    for path, block, lines in validation.blocks():
        assert validation.rewritten(path, block, lines) == path.read_text(encoding="utf-8"), block
    assert validation.campaigns() == validation.CAMPAIGNS.read_text(encoding="utf-8")


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
        labels = {"1to2 sliced 512 tokens": sliced, "1to2 staged 512 tokens": staged, "2to2 whole 512 tokens": 1.0}
        labels |= {"2to1 sliced 512 tokens": sliced, "2to1 staged 512 tokens": 2.0 * staged}
        return [{"label": label, "quantity": "time", "value": value} for label, value in labels.items()]

    kept = {
        Path("a/expectations.json"): {"backend": "fast", "hw": "toy", "expected": times(6.0, 2.0)},
        Path("a/measurements.json"): {"measured": times(5.0, 2.0)},
    }
    monkeypatch.setattr(validation, "read", kept.__getitem__)
    assert "| sliced → staged | fast | toy | 2 | 1.5 to 3 | 1.25 to 2.5 |" in list(validation.gains([Path("a")]))


def test_errors_of_a_load_are_of_the_metrics_that_both_have():
    made = {
        "loads": {"a": {"metrics": {"ttft_p50_s": 2.2, "e2e_p50_s": None}}, "b": {"metrics": {"ttft_p50_s": 1.0}}}
    }
    seen = {"a": {"metrics": {"ttft_p50_s": 2.0, "e2e_p50_s": 1.0}}, "c": {"metrics": {"ttft_p50_s": 1.0}}}
    by_metric = live_data.errors(made, seen)
    assert by_metric == {"ttft_p50_s": [("a", pytest.approx(0.1))]}
    assert live_data.means([by_metric]) == {"ttft_p50_s": pytest.approx(10.0)}
    for error, counted in ((0.09, (1, 0, 0)), (0.19, (0, 1, 0)), (0.21, (0, 0, 1))):  # of a bound of 10 %
        assert live_data.counts({"ttft_p50_s": [("a", -error)]}, {"ttft_p50_s": 0.1}) == counted
