"""`pdsim sweep`: one table and one file; the same command goes on, whatever ended the one before."""

import json
import random
import signal
import time

import pyarrow.parquet as pq
import pytest

from pdsim.cli.sweep import OptunaSearch
from pdsim.core.errors import ConfigError
from tests.test_cli import QUICK, answer, started

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def only(folder):
    (sweep,) = folder.glob("results/sweep-*")
    return sweep


def test_a_sweep_ends_in_one_table_and_file(pdsim_says, tmp_path):
    status, out, _ = pdsim_says("sweep", *QUICK, "hw=8xh20,8xmi300x", "backend=mooncake_nvlink,mooncake")
    folder = only(tmp_path)
    points = pq.read_table(folder / "points.parquet").to_pylist()
    assert status == 0
    assert [(row["hw"] or "8xmi300x", row["status"]) for row in points] == [
        ("8xh20", "ok"), ("8xh20", "ok"), ("8xmi300x", "infeasible"), ("8xmi300x", "ok"),
    ]  # fmt: skip
    assert "4 points in" in out
    assert "backend=mooncake_nvlink runs on nvidia machines, hw=8xmi300x is amd" in points[2]["error"]
    assert pdsim_says("show", str(folder.relative_to(tmp_path)))[1] == out
    assert f"{folder} is a sweep; name two of its points" in pdsim_says("compare", str(folder), str(folder))[2]
    assert (folder / points[0]["folder"] / "summary.json").is_file()


def test_run_with_m_is_the_same(pdsim_says, tmp_path, in_this_process):
    pdsim_says("sweep", *QUICK, "seed=1,2", "output=a")
    pdsim_says("run", "-m", *QUICK, "seed=1,2", "output=b")
    (a,), (b,) = tmp_path.glob("a/*"), tmp_path.glob("b/*")
    assert a.name == b.name
    first, second = (pq.read_table(each / "points.parquet").drop_columns("output") for each in (a, b))
    assert first.equals(second)


def test_the_same_command_does_nothing_again(pdsim_says, tmp_path, in_this_process):
    words = ("sweep", *QUICK, "seed=1,2,3", "--json")
    first = json.loads(pdsim_says(*words)[1])
    before = {path: path.stat().st_mtime_ns for path in only(tmp_path).glob("*/run.json")}
    assert len(before) == 3
    assert json.loads(pdsim_says(*words)[1]) == first
    assert {path: path.stat().st_mtime_ns for path in only(tmp_path).glob("*/run.json")} == before


def test_sweeps_of_no_or_one_point_say_so(pdsim_says, tmp_path):
    status, out, err = pdsim_says("sweep", "backend=mori", "seed=1,2")
    assert (status, out) == (2, "")
    assert "backend=mori runs on amd machines" in err
    assert list(tmp_path.iterdir()) == []
    status, out, err = pdsim_says("sweep", *QUICK, "seed=1")
    assert (status, "1 point in" in out) == (0, True)
    assert "one point only: no key has several values; write KEY=A,B, as workload.rate=1,2\n" in err


def rows_of(process, folder, count):
    """Wait until the sweep in *folder* has appended *count* rows, or has ended."""
    deadline = time.monotonic() + 60
    while process.poll() is None:
        ledgers = list(folder.glob("results/sweep-*/points.jsonl"))
        if ledgers and ledgers[0].read_bytes().count(b"\n") >= count:
            return
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.slow
def test_ctrl_c_loses_only_points_in_progress(tmp_path):
    words = ("sweep", *QUICK, "seed=range(300)", "executor.workers=1")
    process = started(*words, cwd=tmp_path)
    rows_of(process, tmp_path, 4)
    status, _, err = answer(*words, cwd=tmp_path)
    assert status == 2
    assert "this sweep is being run already; wait for it, or change output" in err
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    folder = only(tmp_path)
    assert (process.returncode, out) == (130, "")
    said = f"pdsim: interrupted; finished points are in {folder.relative_to(tmp_path)}; repeat the command to resume"
    assert err.splitlines()[-1] == said
    rows = pq.read_table(folder / "points.parquet").to_pylist()
    assert 3 <= len(rows) < 300
    assert {row["status"] for row in rows} == {"ok"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_thrice_and_resumed_it_has_the_same_table(tmp_path):
    count = 60
    words = ("sweep", *QUICK, "hw=8xh20,8xmi300x", "backend=mooncake_nvlink", f"seed=range({count})", "--quiet")
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    whole.mkdir()
    chance = random.Random(7)
    for least in sorted(chance.sample(range(count + 5, 2 * count - 5), 3)):  # the infeasible ones are appended first
        process = started(*words, cwd=killed)
        rows_of(process, killed, least)
        assert process.poll() is None
        process.kill()
        process.wait()
    assert answer(*words, cwd=killed)[0] == 0
    assert answer(*words, cwd=whole)[0] == 0
    lines = [json.loads(line) for line in (only(killed) / "points.jsonl").read_text().splitlines()]
    names = [line["point"] for line in lines if "point" in line]
    assert len(names) == len(set(names)) == 2 * count
    tables = [pq.read_table(only(folder) / "points.parquet") for folder in (killed, whole)]
    assert tables[0].equals(tables[1])
    assert tables[0]["status"].to_pylist() == ["ok"] * count + ["infeasible"] * count
    assert not list(only(killed).glob("*.incomplete"))


# --- searched by Optuna

SPACE = ("host_factor=interval(0.5,2)", "hw=8xh20,8xh200", "--search", "optuna", "--maximize", "bw_max_gbs")


@pytest.mark.slow
def test_a_search_is_seeded_goes_on_and_gets_better(pdsim_says, tmp_path, in_this_process):
    pytest.importorskip("optuna", reason="needs optuna")

    def searched(trials, folder):
        words = ("--trials", str(trials), f"output={folder}", "--json")
        status, out, _ = pdsim_says("sweep", *QUICK, *SPACE, *words)
        assert status == 0
        return [{key: row[key] for key in ("point", "host_factor", "bw_max_gbs")} for row in json.loads(out)["rows"]]

    first = searched(8, "a")
    assert len(first) == 8
    assert searched(8, "b") == first
    more = searched(24, "a")
    assert more[:8] == first
    rate = [row["bw_max_gbs"] for row in more]
    assert sum(rate[16:]) / len(rate[16:]) > sum(rate[:8]) / 8
    assert all(0.5 <= row["host_factor"] <= 2.0 for row in more)


def test_an_unknown_metric_is_refused_with_the_nearest():
    row = {"status": "ok", "metrics": {"goodput": 2.0, "ttft_p50_s": 0.5}, "gpus": 4}
    assert OptunaSearch().of(row) == 0.5
    assert OptunaSearch(metric="ttft_p50_s", minimized=True).of(row) == 0.5
    assert OptunaSearch().of(row | {"status": "infeasible", "metrics": {}}) is None
    with pytest.raises(ConfigError, match=r"no metric 'ttft_p5_s'; did you mean ttft_p50_s\?"):
        OptunaSearch(metric="ttft_p5_s").of(row)
