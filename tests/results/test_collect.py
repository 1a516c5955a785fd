"""A sweep ends in one file and one table: one row a point, the failed and the killed ones included."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pyarrow.parquet as pq
import pytest

from pdsim.errors import ConfigError, PeerLost
from pdsim.results.record import Metric
from pdsim.results.store import INCOMPLETE, Run, refuse
from pdsim.sweep.collect import collect, table
from tests.results.conftest import MACHINE, make_config, make_result


def point(output, rate, seed=0, **changes):
    """Run one point of a sweep to its end."""
    metrics = [Metric("bw_gbs", float(rate), "bytes over time")]
    run = Run(make_config(output, seed=seed), overrides=(f"workload.rate={rate}", "hw=toy", f"seed={seed}"))
    return run.finish(make_result(summary=metrics, **changes))


def rows(folder):
    return pq.read_table(collect(folder)).to_pylist()


def test_a_row_has_the_overrides_the_seed_and_the_metrics_of_its_point(tmp_path):
    folder = point(tmp_path, 2.5, seed=7)
    (row,) = rows(tmp_path)
    assert row == {
        "folder": folder.name,
        "status": "ok",
        "error": "",
        "experiment": "transfer",
        "hw": "toy",
        "backend": "fast",
        "target": "model",
        "seed": 7,
        "evidence": "assumed",
        "workload.rate": 2.5,
        "bw_gbs": 2.5,
    }


def test_points_of_other_processes_are_found(tmp_path):
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        list(pool.map(point, [tmp_path] * 4, range(4)))
    assert sorted(row["workload.rate"] for row in rows(tmp_path)) == [0, 1, 2, 3]


def test_a_point_that_raised_is_a_row_with_its_error(tmp_path):
    point(tmp_path, 1)
    with pytest.raises(PeerLost), Run(make_config(tmp_path), overrides=("workload.rate=2",)):
        raise PeerLost("rank1 is gone")
    found = {row["workload.rate"]: (row["status"], row["error"], row["bw_gbs"]) for row in rows(tmp_path)}
    assert found == {1: ("ok", "", 1.0), 2: ("failed", "PeerLost: rank1 is gone", None)}


def test_a_point_with_failures_is_partial_and_keeps_its_numbers(tmp_path):
    point(tmp_path, 1, failures=["rank1: PeerLost: gone"])
    (row,) = rows(tmp_path)
    assert (row["status"], row["error"], row["bw_gbs"]) == ("partial", "rank1: PeerLost: gone", 1.0)


def test_a_point_that_was_refused_is_a_row(tmp_path):
    refuse(tmp_path, ConfigError("hw.gpus=0"), command=["pdsim"], overrides=["hw.gpus=0"])
    (row,) = rows(tmp_path)
    assert (row["status"], row["error"], row["hw.gpus"]) == ("failed", "ConfigError: hw.gpus=0", 0)


def test_a_point_that_was_killed_is_a_row(tmp_path):
    Run(make_config(tmp_path), overrides=("workload.rate=2",))
    (tmp_path / f"in-its-first-millisecond{INCOMPLETE}").mkdir()
    assert [row["status"] for row in rows(tmp_path)] == ["killed", "killed"]


def test_collecting_again_gives_the_same_and_takes_in_what_is_new(tmp_path):
    point(tmp_path, 1)
    first = collect(tmp_path).read_bytes()
    assert collect(tmp_path).read_bytes() == first
    point(tmp_path, 2)
    assert len(rows(tmp_path)) == 2
    assert not list(tmp_path.glob("*.part"))


def test_values_of_several_kinds_become_text(tmp_path):
    point(tmp_path, 1)
    Run(make_config(tmp_path), overrides=("workload.rate=fast",))
    assert {row["workload.rate"] for row in rows(tmp_path)} == {"1", "fast"}


def test_metrics_keep_their_definitions(tmp_path):
    point(tmp_path, 1)
    field = pq.read_schema(collect(tmp_path)).field("bw_gbs")
    assert field.metadata[b"definition"] == b"bytes over time"


def test_the_table_leaves_out_what_all_points_share(tmp_path):
    for rate in (1, 2):
        point(tmp_path, rate)
    found = table(collect(tmp_path))
    assert list(found.columns) == ["folder", "status", "evidence", "workload.rate", "bw_gbs"]
    assert [row[1:] for row in found.rows] == [("ok", "assumed", 1, 1.0), ("ok", "assumed", 2, 2.0)]


def test_the_table_has_no_numbers_without_evidence(tmp_path):
    point(tmp_path, 1)
    Run(make_config(tmp_path, hw=replace(MACHINE, sources={}))).finish(make_result())
    found = table(collect(tmp_path))
    shown = list(found.columns)
    by_evidence = {row[shown.index("evidence")]: row[shown.index("bw_gbs")] for row in found.rows}
    assert by_evidence == {"assumed": 1.0, "none": None}


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run\.json below it"):
        collect(tmp_path)
