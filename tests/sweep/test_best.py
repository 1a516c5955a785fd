"""`pdsim best`: points by goodput for each GPU under any SLO, read from the requests that they kept."""

import json

import pytest

from pdsim.cli.main import main
from pdsim.core.errors import ConfigError
from pdsim.sweep.best import Ranked, chart, front, parse_slo, rank, table
from pdsim.sweep.pareto import content


def ranked(point, speed, throughput, goodput=1.0, gpus=2, **choice):
    return Ranked(
        point=point, choice=choice, gpus=gpus, goodput=goodput, attainment=0.5, speed=speed, throughput=throughput,
        latencies={"ttft_p99": 1.5, "tpot_p99": None, "e2e_p99": 2.0}, evidence="assumed",
    )  # fmt: skip


def test_the_front_has_the_points_that_no_other_beats_in_both():
    points = [ranked("a", 10, 5), ranked("b", 20, 4), ranked("c", 15, 3), ranked("d", 5, 5), ranked("e", 1, 9)]
    assert [each.point for each in front([*points, ranked("f", None, 99)])] == ["b", "a", "e"]


def test_the_chart_draws_the_front_over_the_others():
    lines = chart([ranked("a", 20, 0), ranked("b", 20, 4), ranked("c", 10, 2)], width=21, height=5)
    assert [line[10:] for line in lines[1:6]] == [" " * 20 + "#", "", " " * 10 + ".", "", " " * 20 + "."]
    assert lines[1].startswith("       4 |")
    assert chart([ranked("a", 1, 1)]) == []


def test_the_table_has_ten_rows_with_what_was_swept_first():
    found = table([ranked(f"p{n}", 1, 1, **{"workload.rate": n}) for n in range(12)], "best")
    assert list(found.columns)[:3] == ["rank", "good/s/GPU", "SLO"]
    assert len(found.rows) == 10
    assert found.rows[0] == [1, "0.5", "50.0 %", "0", 2, "p0", "1.5 s", "-", "2 s", "assumed"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttf=2s", "'ttf' has no limit; there are ttft, tpot, e2e"),
        ("ttft=2", "ttft=2 has no unit; did you mean 2s or 2ms?"),
        ("ttft=0.5", "ttft=0.5 has no unit"),
        ("ttft=fast", "ttft: 'fast' is not a time"),
        ("ttft=0s", "ttft must be > 0"),
    ],
)
def test_an_slo_that_cannot_be_meant_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_slo(text)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Return the folder of a sweep over two machines and two loads."""
    output = tmp_path_factory.mktemp("swept")
    words = ("workload=poisson", "workload.count=100", "workload.rate=1,2", "hw=8xh20,8xh200", f"output={output}")
    assert main(["sweep", *words, "--quiet"]) == 0
    (folder,) = output.iterdir()
    return folder


def test_goodput_under_the_runs_own_slo_is_that_of_the_runs(swept):
    kept = {path.name: json.loads((path / "summary.json").read_text()) for path in swept.iterdir() if path.is_dir()}
    found = rank(swept)
    assert len(found) == 4
    for each in found:
        assert each.goodput == pytest.approx(kept[each.point]["metrics"]["goodput"]["value"], rel=1e-12)
        assert each.attainment == kept[each.point]["metrics"]["slo_attainment"]["value"]
        assert each.latencies["ttft_p99"] == kept[each.point]["metrics"]["ttft_p99_s"]["value"]
        assert set(each.choice) == {"hw", "workload.rate"}
    assert [each.value for each in found] == sorted((each.value for each in found), reverse=True)


def test_a_report_names_every_swept_key(swept):
    assert content(swept).title == "Sweep of hw, workload.rate"


def test_a_stricter_slo_is_met_less_often(swept):
    loose, strict = rank(swept, parse_slo("ttft=1h")), rank(swept, parse_slo("ttft=1us"))
    assert {each.attainment for each in loose} == {1.0}
    assert {each.goodput for each in strict} == {0.0}


def test_the_command_prints_ranks_and_the_front(swept, capsys):
    assert main(["best", str(swept), "--slo", "ttft=10s,tpot=50ms"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1] == f"best of 4 points in {swept}, ttft <= 10 s, tpot <= 50 ms"
    assert "# is the Pareto front" in out
    assert main(["best", str(swept.parent)]) == 2
    assert main(["best", str(swept), "--slo"]) == 2
