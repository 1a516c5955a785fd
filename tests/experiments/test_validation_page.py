"""What `tools.validation` says of docs/validation.md and its data."""

from pathlib import Path

import pytest

from tests.experiments.test_validate import predict
from tools import live_data, validation


def test_the_campaigns_are_what_the_committed_files_say():
    assert validation.campaigns() == validation.CAMPAIGNS.read_text(encoding="utf-8")


def test_predictions_made_ahead_are_printed_by_machine_and_class(tmp_path: Path):
    predict(tmp_path / "a")
    lines = list(validation.medians([tmp_path / "a"]))
    assert lines[0] == "### toy"
    assert "| class | median | points | `fast` |" in lines
    assert "| pair | µs | 4 | 10.89 |" in lines  # of 6.4096, 9.2288, 12.5536 and 27.6608 us


def test_errors_of_a_load_are_of_the_metrics_that_both_have():
    made = {"a": {"ttft_p50_s": 2.2, "e2e_p50_s": None}, "b": {"ttft_p50_s": 1.0}}
    seen = {"a": {"ttft_p50_s": 2.0, "e2e_p50_s": 1.0}, "c": {"ttft_p50_s": 1.0}}
    loads = ({name: {"metrics": of} for name, of in each.items()} for each in (made, seen))
    by_metric = live_data.errors({"loads": next(loads)}, next(loads))
    assert by_metric == {"ttft_p50_s": [("a", pytest.approx(0.1))]}
    assert live_data.means([by_metric]) == {"ttft_p50_s": pytest.approx(10.0)}
    for error, counted in ((0.09, (1, 0, 0)), (0.19, (0, 1, 0)), (0.21, (0, 0, 1))):  # of a bound of 10 %
        assert live_data.counts({"ttft_p50_s": [("a", -error)]}, {"ttft_p50_s": 0.1}) == counted
