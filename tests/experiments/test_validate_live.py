"""Validation of serving: predicted with a hash, measured on a real server on the processor, compared."""

import json
from pathlib import Path

import pytest

from experiments.validate_live import REST, in_turn, single_requests
from pdsim.serving.workload import Request
from pdsim.validation.verdicts import (
    BOUNDS,
    SINGLE,
    Bound,
    Class,
    Compared,
    by_class,
    compare_files,
    failures,
    points,
    quantiles,
    tables,
)
from tests.backends.live.conftest import llama  # noqa: F401 a fixture

WORDS = [
    *("hw=loopback", "model=tiny", "engine=generic", "workload.count=12", "workload.rate=20"),
    *("workload.input_mean=60", "workload.output_mean=6", "experiment.lengths=[20]", "experiment.single_output=4"),
    *("experiment.singles=1", "experiment.loads=[0.5,1.0]"),
]


def test_quantiles_leave_out_what_too_few_requests_cannot_give():
    rows = [{"ttft": 0.01 * number, "tpot": None, "e2e": 1.0} for number in range(1, 12)]
    assert quantiles(rows) == pytest.approx({"ttft_p50": 0.06, "ttft_p90": 0.1, "e2e_p50": 1.0})


def compared(predicted: dict[str, dict[str, float]], *runs: dict[str, dict[str, float]]) -> list[Compared]:
    """Return what the files of one request a part say of the latencies *predicted*, and of those of each run."""
    seen = [
        {part: [{"status": "ok"} | of, {"status": "lost", "e2e": 9.0}] for part, of in run.items()} for run in runs
    ]
    made = {part: {f"{name}_p50": value for name, value in of.items()} for part, of in predicted.items()}
    return compare_files({"predicted": made}, {"runs": seen})


def judged(both: list[Compared], most: float) -> Class:
    (one,) = by_class(both, {name: Bound(mean=most, each=each) for name, each in BOUNDS.items()}, 0)
    return one


def test_an_error_is_within_its_bound_or_twice_the_floor():
    runs = [{"noisy": {"e2e": each}} for each in (1.0, 0.96, 1.04)]
    runs[0] |= {"near": {"e2e": 1.0}, "far": {"e2e": 1.0}}
    both = compared({"near": {"e2e": 1.04}, "far": {"e2e": 1.07}, "noisy": {"e2e": 1.07}}, *runs)
    near, _, noisy = both
    assert [one.within(BOUNDS["e2e_p50"]) for one in both] == [True, False, True]
    assert (near.spread, noisy.spread, noisy.error) == (None, pytest.approx(0.04), pytest.approx(0.07))
    wrong, met = judged(both, 0.05), judged([near, noisy], 0.05)  # means of 6 and of 5.5 %
    assert (wrong.within, met.within, judged(both, 0.061).beyond) == (2, 2, False)
    assert failures([wrong, met]) == ["e2e_p50: error beyond its bound, mean 6.0%; repeated jobs differ by 2.8%"]


def test_all_parts_are_points_with_the_median_of_their_runs():
    predicted = {"load-1": {"ttft": 1.2, "e2e": 2.0}, f"{SINGLE}128": {"ttft": 9.0}, "load-2": {}}
    both = compared(predicted, {"load-1": {"ttft": 1.0}, f"{SINGLE}128": {"ttft": 1.0}}, {"load-1": {"ttft": 1.1}})
    assert [(one.predicted.label, one.predicted.group, one.per_job) for one in both] == [
        ("load-1", "ttft_p50", (1.0, 1.1)),
        ("single-128", "ttft_p50", (1.0,)),
    ]
    assert both[0].error == pytest.approx(1.2 / 1.05 - 1)
    assert judged(both[:1], 1.0).mean == pytest.approx(1.2 / 1.05 - 1)
    ((load, *_, error, floor), _), (summary,) = points(both).rows, tables([judged(both[:1], 1.0)], [])
    assert (load, error, floor) == ("load-1", pytest.approx(14.29, rel=1e-3), pytest.approx(4.762, rel=1e-3))
    assert summary.rows[0][-3:] == ["10", "ok", 0]


def test_parts_follow_one_another_on_one_deployment():
    singles = single_requests([10, 99], 4, 2, context=50)
    assert list(singles) == ["warmup-10", "single-10"]
    requests = in_turn(singles | {"load-1": [Request(0.5, 7, 3)]})
    assert [one.arrival for one in requests] == [0.0, REST, REST + 5.0, 2 * REST + 5.5]


def folder_of(output: Path) -> Path:
    (found,) = output.iterdir()
    return found


def test_predictions_alone_need_no_server(tmp_path, pdsim_prints):
    assert "Predicted" in pdsim_prints(
        "validate", *WORDS, "experiment.predict=only", f"output={tmp_path}/made", "-v"
    )
    made = json.loads((folder_of(tmp_path / "made") / "expectations.json").read_text())
    assert set(made["predicted"]) == {"single-20", "load-0.5", "load-1"}
    assert len(made["requests"]["load-1"]) == 12
    assert made["requests"]["load-0.5"][-1][0] == pytest.approx(2 * made["requests"]["load-1"][-1][0])


def test_without_a_server_it_says_what_is_missing(tmp_path, pdsim_refuses):
    assert "set target=live, or experiment.stored=FOLDER" in pdsim_refuses("validate", *WORDS, f"output={tmp_path}")


@pytest.mark.slow
@pytest.mark.live
def test_a_server_is_predicted_measured_and_compared(llama, tmp_path, pdsim_prints, pdsim_refuses):  # noqa: F811
    live = ["target=live", f"live.url={llama.url}", "live.vocabulary=512", "live.warmup=0"]
    live.append("live.request={cache_prompt: false}")
    made = tmp_path / "made"
    pdsim_prints("validate", *WORDS, "experiment.predict=only", f"output={made}")
    expected = folder_of(made) / "expectations.json"

    # predicted elsewhere, measured here
    pdsim_prints("validate", *WORDS, *live, f"experiment.expected={expected}", f"output={tmp_path}/ran")
    ran = folder_of(tmp_path / "ran")
    measured = json.loads((ran / "measurements.json").read_text())
    assert measured["expectations"] == json.loads(expected.read_text())["sha256"]
    loads = {"load-0.5", "load-1"}
    assert [set(run) for run in measured["runs"]] == [{"warmup-20", "single-20"} | loads, loads]
    assert {row["status"] for run in measured["runs"] for rows in run.values() for row in rows} == {"ok"}

    # other requests than those that were predicted are refused
    other = [*WORDS, *live, f"experiment.expected={expected}", "seed=1", f"output={tmp_path}/other"]
    assert "predictions of other requests" in pdsim_refuses("validate", *other)

    # compared again
    again = ["hw=loopback", "model=tiny", f"experiment.stored={ran}", "experiment.loads=[1.0]"]
    summary = json.loads(pdsim_prints("validate", *again, f"output={tmp_path}/again", "--json"))["metrics"]
    assert summary["error_e2e_p50"]["value"] > 0
    (ran / "measurements.json").write_text((ran / "measurements.json").read_text().replace('"ok"', '"no"', 1))
    assert "was changed after it was written" in pdsim_refuses("validate", *again, f"output={tmp_path}/changed")
