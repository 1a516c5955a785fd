"""The best points of a sweep, and what would help."""

import json
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest

import pdsim
from pdsim.cli.main import main
from pdsim.config import plain
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.core.progress import silent
from pdsim.results.compare import as_dict
from pdsim.results.kept import parse_slo
from pdsim.sweep.best import Ranked, chart, front, rank, table
from pdsim.sweep.pareto import content
from pdsim.sweep.what_if import WHAT_IFS, changed, exchanged, try_exchanges, try_what_ifs
from tests.sweep.conftest import InThisProcess


def ranked(point, speed, throughput, **choice):
    return Ranked(
        point=point, choice=choice, gpus=2, goodput=1.0, attainment=0.5, speed=speed, throughput=throughput,
        latencies={"ttft_p99": 1.5, "tpot_p99": None, "e2e_p99": 2.0}, evidence="assumed",
    )  # fmt: skip


def test_the_front_is_what_none_beats_and_is_drawn():
    points = [ranked("a", 10, 5), ranked("b", 20, 4), ranked("c", 15, 3), ranked("d", 5, 5), ranked("e", 1, 9)]
    assert [each.point for each in front([*points, ranked("f", None, 99)])] == ["b", "a", "e"]
    lines = chart([ranked("a", 20, 0), ranked("b", 20, 4), ranked("c", 10, 2)], width=21, height=5)
    assert [line[10:] for line in lines[1:6]] == [" " * 20 + "#", "", " " * 10 + ".", "", " " * 20 + "."]
    assert lines[1].startswith("       4 |")
    assert chart([ranked("a", 1, 1)]) == []


def test_the_table_has_ten_points_ranked_within_their_rates():
    best = table([ranked(f"p{n}", 1, 1, **{"workload.rate": n}) for n in range(12)], "best")
    assert list(best.columns)[:3] == ["rank", "good/s/GPU", "SLO"]
    assert len(best.rows) == 10
    assert best.rows[0] == [1, "0.5", "50.0 %", "0", 2, "p0", "1.5 s", "-", "2 s", "assumed"]
    points = [ranked(f"p{n}", 1, 1, **{"workload.rate": n % 2, "hw": n}) for n in range(4)]
    assert [row[1] for row in table(points, "best").rows] == ["1 of 2", "1 of 2", "2 of 2", "2 of 2"]


def test_a_comparison_counts_requests_under_another_slo(swept):
    folders = [swept / each.point for each in rank(swept)][:2]
    metrics = as_dict(folders, parse_slo("ttft=1us"))["metrics"]
    assert metrics["asked_slo_attainment"]["values"] == [0.0, 0.0]
    own = [rank(swept)[at].goodput for at in range(2)]
    assert as_dict(folders, parse_slo("ttft=5s,tpot=50ms"))["metrics"]["asked_goodput"]["values"] == own


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttf=2s", "'ttf' has no limit; there are ttft, tpot, e2e"),
        ("ttft=0.5", "ttft=0.5 has no unit; did you mean 0.5s or 0.5ms?"),
        ("ttft=fast", "ttft: 'fast' is not a time"),
        ("ttft=0s", "ttft must be > 0"),
    ],
)
def test_an_slo_that_cannot_be_meant_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_slo(text)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    output = tmp_path_factory.mktemp("swept")
    words = ("workload=poisson", "workload.count=100", "workload.rate=1,2", "hw=8xh20,8xh200", f"output={output}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdsim.cli.sweep.executor_of", lambda words, line: InThisProcess())
        assert main(["sweep", *words, "--quiet"]) == 0
    (folder,) = output.iterdir()
    return folder


def test_goodput_under_the_own_slo_is_the_runs(swept):
    points = rank(swept)
    assert len(points) == 4
    for each in points:
        metrics = json.loads((swept / each.point / "summary.json").read_text())["metrics"]
        assert each.goodput == pytest.approx(metrics["goodput"]["value"], rel=1e-12)
        assert each.attainment == metrics["slo_attainment"]["value"]
        assert each.latencies["ttft_p99"] == metrics["ttft_p99_s"]["value"]
        assert set(each.choice) == {"hw", "workload.rate"}
    assert [each.value for each in points] == sorted((each.value for each in points), reverse=True)
    assert content(swept).title == "Sweep of hw, workload.rate"


def test_a_stricter_slo_is_met_less_often(swept):
    loose, strict = rank(swept, parse_slo("ttft=1h")), rank(swept, parse_slo("ttft=1us"))
    assert {each.attainment for each in loose} == {1.0}
    assert {each.goodput for each in strict} == {0.0}


def test_the_command_prints_ranks_and_the_front(swept, pdsim_says):
    status, out, _ = pdsim_says("best", str(swept), "--slo", "ttft=10s,tpot=50ms")
    assert status == 0
    assert out.splitlines()[1] == f"best of 4 points in {swept}, ttft <= 10 s, tpot <= 50 ms"
    assert "# is the Pareto front" in out
    kept_up = "every point meets its SLO for 99 % of requests, so the order is mostly that of the offered rates"
    assert kept_up not in out
    assert kept_up in pdsim_says("best", str(swept), "--slo", "ttft=1h")[1]
    assert "no point meets its SLO for 99 % of requests: " in pdsim_says("best", str(swept), "--slo", "ttft=1us")[1]
    assert pdsim_says("best", str(swept.parent))[0] == pdsim_says("best", str(swept), "--slo")[0] == 2


WORDS = ("workload=poisson", "workload.count=12", "workload.rate=4")
BY_CAUSE = {each.cause: each for each in WHAT_IFS}


@pytest.fixture(scope="module")
def config():
    return compose(WORDS)


@pytest.mark.parametrize("cause", BY_CAUSE)
def test_each_relief_changes_something_of_the_default(config, cause):
    assert changed(config, BY_CAUSE[cause]) not in (None, config)


def test_a_relief_changes_what_it_names_only(config):
    easier = changed(config, BY_CAUSE["posting"])
    intra = config.backend.intra
    half = replace(intra, call=intra.call / 2, descriptor=intra.descriptor / 2)
    expected = {"call": half.call, "descriptor": half.descriptor, "rate": intra.rate, "latency": intra.latency}
    assert {name: getattr(easier.backend.intra, name) for name in expected} == expected
    assert (easier.hw, easier.workload, easier.compute) == (config.hw, config.workload, config.compute)
    assert changed(config, BY_CAUSE["compute"]).compute.scale == 0.5
    assert changed(config, BY_CAUSE["queue"]).workload.rate == 2.0
    assert changed(config, BY_CAUSE["admission"]).scheduler.decode_batch == 2 * config.scheduler.decode_batch


def test_every_key_of_a_relief_exists():
    """A relief of an engine and of collectives names the keys of both, so one of the two has to have each."""
    calibrated = ("hw=2x8xmi300x_cx7", "backend=mori", "calibration=cx7-write")
    chosen = (WORDS, ("hw=link",), ("experiment=allgather", "hw=4xh200"), ("hw=2x8xh20",), calibrated)
    keys = {key for words in chosen for key in _keys(plain(compose(words)), "")}
    costs = ("backend.intra", "backend.inter", "collective.plain", "collective.symmetric")
    keys |= {
        f"{other}{key.removeprefix(at)}" for at in costs for key in keys if key.startswith(at) for other in costs
    }
    assert [
        name for each in WHAT_IFS for name in each.factors if not any(fnmatchcase(key, name) for key in keys)
    ] == []


def _keys(value, at):
    if isinstance(value, list):
        return {key for item in value for key in _keys(item, at)} | {at}
    if isinstance(value, dict):
        return {key for name, item in value.items() for key in _keys(item, f"{at}.{name}".lstrip("."))}
    return {at}


def test_a_relief_is_simulated_as_a_run_of_those_numbers(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = try_what_ifs(config, ["compute"], silent)
    for words, name in (((*WORDS, "compute.scale=0.5"), "compute"), (WORDS, "")):
        e2e = pdsim.simulate(*words).requests["e2e"].to_pylist()
        assert found[name].e2e == pytest.approx(sum(e2e) / len(e2e), rel=1e-12)
    one = try_what_ifs(config, [], silent, request=3)[""]
    assert (one.requests, one.e2e) == (1, pytest.approx(e2e[3], rel=1e-12))


def test_an_exchange_makes_all_of_the_difference(config):
    other = compose((*WORDS, "backend=nixl"))
    assert list(exchanged(config, other)) == ["backend"]
    found = try_exchanges([config, other], silent)
    assert found["backend"] == found["B"] != found["A"]
    with pytest.raises(ConfigError, match="request 99 did not end"):
        try_what_ifs(config, [], silent, request=99)
