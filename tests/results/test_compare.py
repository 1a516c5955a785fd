"""Runs side by side: what differs between them, and each metric as a multiple of the first run's."""

from dataclasses import replace

import pytest

from experiments import serve
from pdsim.core.errors import ConfigError
from pdsim.results.compare import as_dict, tables
from pdsim.results.record import Metric
from pdsim.results.store import Run
from tests.support.configs import ENGINE, MACHINE, make_config, make_result


def kept(output, *metrics, **changes):
    return Run(make_config(output, **changes)).finish(make_result(summary=metrics))


def rate(value, name="bw_gbs"):
    return Metric(name, value, "bytes over time")


def test_only_what_differs_is_said_of_the_configurations(tmp_path):
    faster = replace(MACHINE, nic=replace(MACHINE.nic, count=4, rate=1e9))
    a, b = kept(tmp_path, rate(1.0)), kept(tmp_path / "there", rate(1.0), seed=3, hw=faster)
    assert as_dict([a, b])["differences"] == {"hw.nic.count": [0, 4], "hw.nic.rate": [0.0, 1e9], "seed": [0, 3]}


@pytest.mark.parametrize(
    ("values", "multiples"),
    [((4.0, 2.0, 10.0), [0.5, 2.5]), ((0, 2.0), [None]), ((None, 2.0), [None]), ((2.0, None), [None])],
)
def test_each_metric_is_also_a_multiple_of_the_first_runs(tmp_path, values, multiples):
    runs = [kept(tmp_path, rate(value)) for value in values]
    about = {"values": list(values), "definition": "bytes over time", "multiples": multiples}
    assert as_dict(runs)["metrics"]["bw_gbs"] == about


def test_of_a_run_without_evidence_no_number_is_given(tmp_path):
    unproven = {"hw": replace(MACHINE, sources={}), "backend": replace(ENGINE, sources={})}
    both = as_dict([kept(tmp_path, rate(1.0)), kept(tmp_path, rate(2.0), **unproven)])
    assert both["metrics"]["bw_gbs"]["values"] == [1.0, None]
    assert both["differences"]["evidence"] == ["assumed", "none"]


def test_what_cannot_be_compared_is_refused(tmp_path):
    a = kept(tmp_path, rate(1.0))
    other = kept(tmp_path, rate(1.0), experiment=serve.ServeOptions())
    for folders, why in (
        ([a], "compare takes 2 to 26 folders of runs, got 1"),
        ([a, other], "transfer and serve are different experiments; compare runs of one"),
        ([a, Run(make_config(tmp_path)).folder], "a complete run is needed"),
        ([a, tmp_path / "absent"], "absent is not a folder; name the folder of a run"),
    ):
        with pytest.raises(ConfigError, match=why):
            tables(folders)


def test_people_see_units_and_nothing_that_cannot_matter(tmp_path):
    faster = replace(MACHINE, nic=replace(MACHINE.nic, count=4, rate=5e10, latency=2e-6))
    a = kept(tmp_path, rate(0.0025, "ttft_p50_s"), rate(None, "ttft_p99_s"), rate(65536, "kv_bytes"))
    b = kept(tmp_path / "there", rate(0.005, "ttft_p50_s"), rate(None, "ttft_p99_s"), rate(0, "kv_bytes"), hw=faster)
    runs, differences, metrics = tables([a, b])
    assert [row[0] for row in runs.rows] == ["A", "B"]
    assert runs.rows[0][1].startswith("transfer tiny on toy: embedded trace, 1 x TP1 -> 1 x TP1, generic, fast ")
    shown = {row[0]: row[1:] for row in differences.rows}
    assert (shown["hw.nic.rate"], shown["hw.nic.latency"]) == (["0 B/s", "50 GB/s"], ["0 ns", "2 us"])
    assert list(metrics.columns) == ["metric", "A", "B", "B/A", "definition"]
    assert metrics.rows == [
        ["ttft_p50_s", "2.5 ms", "5 ms", 2.0, "bytes over time"],
        ["kv_bytes", "64 KiB", "0 B", 0.0, "bytes over time"],
    ]
