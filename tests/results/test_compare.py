"""Runs side by side, and what a run spends its time on."""

import json
import re
from dataclasses import replace

import pytest

import pdsim
from experiments import serve
from pdsim.core.errors import ConfigError
from pdsim.results.compare import as_dict, tables
from pdsim.results.explain import accounts, causes, difference
from pdsim.results.record import Metric
from pdsim.results.store import Run
from tests.support.configs import ENGINE, MACHINE, make_config, make_result, record


def kept(output, *metrics, **changes):
    return Run(make_config(output, **changes)).finish(make_result(summary=metrics))


def rate(value, name="bw_gbs"):
    return Metric(name, value, "bytes over time")


def test_differences_are_named_and_unproven_numbers_withheld(tmp_path):
    faster = replace(MACHINE, nic=replace(MACHINE.nic, count=4, rate=1e9))
    a, b = kept(tmp_path, rate(1.0)), kept(tmp_path / "there", rate(1.0), seed=3, hw=faster)
    assert as_dict([a, b])["differences"] == {"hw.nic.count": [0, 4], "hw.nic.rate": [0.0, 1e9], "seed": [0, 3]}
    unproven = {"hw": replace(MACHINE, sources={}), "backend": replace(ENGINE, sources={})}
    both = as_dict([kept(tmp_path, rate(1.0)), kept(tmp_path, rate(2.0), **unproven)])
    assert both["metrics"]["bw_gbs"]["values"] == [1.0, None]
    assert both["differences"]["evidence"] == ["assumed", "none"]


@pytest.mark.parametrize(
    ("values", "multiples"),
    [((4.0, 2.0, 10.0), [0.5, 2.5]), ((0, 2.0), [None]), ((None, 2.0), [None]), ((2.0, None), [None])],
)
def test_each_metric_is_also_a_multiple_of_the_first_runs(tmp_path, values, multiples):
    runs = [kept(tmp_path, rate(value)) for value in values]
    about = {"values": list(values), "definition": "bytes over time", "multiples": multiples}
    assert as_dict(runs)["metrics"]["bw_gbs"] == about


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
    assert tables([a, a])[1].rows == [["nothing", "-", "-"]]
    rows = [["ttft_p50_s", "2.5 ms", "5 ms", 2.0], ["kv_bytes", "64 KiB", "0 B", 0.0]]
    assert metrics.rows == [[*row, "bytes over time"] for row in rows]


def kept_of(folder, *records):
    return Run(make_config(folder)).finish(make_result(transfers=records))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of two runs that served: of NVLink, and of NIXL with another layout."""
    words = {"workload": "poisson", "workload.count": 8, "workload.rate": 2}
    words["output"] = str(tmp_path_factory.mktemp("runs"))
    other = {"backend": "nixl", "parallel.decode.tp": 2}
    return [pdsim.simulate(**(words | more)).folder for more in ({}, other)]


def test_stages_of_transfers_are_their_means(tmp_path):
    stages = {"prep": pytest.approx(1e-6), "post": pytest.approx(2e-6), "tx": pytest.approx(10e-6)}
    size = {"nbytes": 65536, "batch_size": 16, "poll": pytest.approx(4e-6)}
    folder = kept_of(tmp_path, record(), record(start=1.0), record(status="PeerLost"))
    assert causes(folder) == {"transfer": stages, "size": size}
    with pytest.raises(ConfigError, match="kept no requests and no transfers that ended"):
        causes(kept_of(tmp_path, record(status="PeerLost")))


def test_accounts_add_up_to_the_time_of_the_requests(runs):
    e2e = pdsim.load(runs[0]).requests["e2e"].to_pylist()
    assert sum(accounts(runs[0]).values()) == pytest.approx(sum(e2e) / len(e2e), rel=1e-9)
    assert sum(accounts(runs[0], 5).values()) == pytest.approx(e2e[5], rel=1e-9)
    with pytest.raises(ConfigError, match="has no request 8 that ended; there are 0 to 7"):
        accounts(runs[0], 8)


def test_the_difference_of_two_runs_is_a_sentence_with_numbers(runs):
    (requests, transfers), _ = difference(runs)
    pattern = r"nixl serves a request [\d.,]+ times slower \(.+ in the mean\), [\d.]+ % of it by transfer \(.+\)"
    assert re.fullmatch(pattern, requests)
    pattern = r"nixl is [\d.,]+ times slower in a transfer \(.+\): [\d.,]+ times the descriptors \(.+\) at .+ each"
    assert re.fullmatch(pattern, transfers)
    same, _ = difference([runs[0], runs[0]])
    assert [line.partition(" the same time")[0] for line in same] == ["B serves a request in", "B takes"]


def test_no_part_of_an_equal_time_is_shown(runs, monkeypatch):
    means = {folder: causes(folder) for folder in runs[:1]}
    means[runs[1]] = {
        part: {**values, "polling": values.get("polling", 0.0) + 1e-9} for part, values in means[runs[0]].items()
    }
    monkeypatch.setattr("pdsim.results.explain.causes", means.get)
    _, (requests, _) = difference(runs)
    assert {row[4] for row in requests.rows} == {"-"}


def test_parts_are_of_what_changed_in_the_direction_of_the_whole(runs, monkeypatch):
    means = dict(zip(runs, map(causes, runs), strict=True))
    first = dict.fromkeys(means[runs[0]]["request"], 1.0)
    means[runs[0]]["request"] = first
    means[runs[1]]["request"] = {**first, "compute": 4.0, "transfer": 2.0, "queueing": 0.0}
    monkeypatch.setattr("pdsim.results.explain.causes", means.get)
    (sentence, _), (requests, _) = difference(runs)
    assert {row[0]: row[4] for row in requests.rows if row[4] != "-"} == {"compute": "75.0 %", "transfer": "25.0 %"}
    assert "75.0 % of it by compute" in sentence


def test_explain_names_what_helps_and_what_differs(runs, pdsim_says):
    first, second = map(str, runs)
    status, out, _ = pdsim_says("explain", first)
    assert (status, out.splitlines()[0].partition(": ")[0]) == (0, "mean of requests")
    assert out.splitlines()[1].startswith("what helps most: forwards take half as long (compute): ")
    assert re.search(r"^compute .*-\d\d\.\d %.* forwards take half as long$", out, re.MULTILINE)
    assert pdsim_says("explain", first, "--request", "3", "--fast")[1].startswith("request 3: ")
    out = pdsim_says("explain", first, second)[1]
    assert "A with backend of B" in out
    assert "A with parallel of B" in out
    assert json.loads(pdsim_says("explain", first, second, "--fast", "--json")[1])["folders"] == [first, second]
    assert pdsim_says("explain", first, "--request", "many")[0] == 2
    assert pdsim_says("explain", first, second, "--request", "1")[0] == 2
