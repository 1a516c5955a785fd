"""The points of `experiment=transfer`: patterns with counts, one job, orders, schedules, files, shared GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.transfer import check, run
from experiments.transfer.rank_places import flows
from experiments.transfer.transfer_points import TransferPoint, shuffled
from pdsim.core.errors import ConfigError
from pdsim.core.progress import silent
from pdsim.results.record import Result
from pdsim.sim.model import Model
from pdsim.transfer.job import Outcome, RankSpec
from tests.experiments.test_transfer import EIGHT, ENGINE, configured, measure, rows, values


def pairs(pattern: str, ranks: int = 4, rotate: bool = False) -> list[tuple[int, int]]:
    return [(int(a.removeprefix("rank")), int(b.removeprefix("rank"))) for a, b in flows(pattern, ranks, rotate)]


def flow_rows(result: Result) -> list[dict[str, Any]]:
    (table,) = (table for table in result.tables if table.title.startswith("Flows"))
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


# --- patterns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("pair", [(0, 1)]),
        ("pairs", [(0, 1), (2, 3)]),
        ("pairs:3", [(0, 1), (2, 3), (4, 5)]),
        ("bidirectional", [(0, 1), (1, 0)]),
        ("incast", [(1, 0), (2, 0), (3, 0)]),
        ("incast:2", [(1, 0), (2, 0)]),
        ("fanout:2", [(0, 1), (0, 2)]),
        ("cross", [(0, 2), (0, 3), (1, 2), (1, 3)]),
        ("cross:1x2", [(0, 1), (0, 2)]),
        ("alltoall:2", [(0, 1), (1, 0)]),
    ],
)
def test_a_pattern_is_these_flows(pattern: str, expected: list[tuple[int, int]]):
    assert pairs(pattern) == expected


def test_rotated_sources_begin_with_different_sinks():
    assert pairs("cross:2", rotate=True) == [(0, 2), (0, 3), (1, 3), (1, 2)]


def test_patterns_of_different_counts_run_in_one_job():
    result = measure(patterns=("pair", "cross:2x2", "alltoall:3"), memory="tracked")
    assert [row["verified"] for row in rows(result)] == ["1/1", "4/4", "6/6"]


# --- one job -------------------------------------------------------------------------------------------------------


class Counting(Model):
    """A model that counts its jobs."""

    jobs = 0

    def run(self, ranks: Sequence[RankSpec], kill: Mapping[str, float] | None = None) -> Outcome:
        type(self).jobs += 1
        return super().run(ranks, kill)


def test_all_points_are_one_job():
    target = type("Target", (Counting,), {})(EIGHT, ENGINE)
    config = configured(patterns=("pair", "alltoall"), blocks=(1, 2), size=(4096, 1 << 20))
    assert len(rows(run(config, target, silent))) == 8
    assert target.jobs == 1


def test_a_point_takes_as_long_among_others_as_alone():
    alone = rows(measure(patterns=("alltoall",), size=(65536,)))[0]
    among = rows(measure(patterns=("pair", "alltoall"), size=(4096, 65536), order="shuffled"))[3]
    for name in ("lat avg us", "p50", "B/W GB/s"):
        assert among[name] == pytest.approx(alone[name], rel=1e-9)


def test_the_order_is_drawn_from_the_seed_and_the_rows_are_as_listed():
    points = [TransferPoint("pair", 1, size, 1) for size in range(1, 30)]
    assert shuffled(points, 1) == shuffled(points, 1) != shuffled(points, 2)
    assert sorted(shuffled(points, 1)) == points
    options = {"size": (4096, 8192, 16384, 32768), "blocks": (1, 2)}
    listed, mixed = measure(**options), measure(order="shuffled", **options)
    assert [row["block"] for row in rows(mixed)] == [row["block"] for row in rows(listed)]
    assert [r.submitted for r in mixed.transfers] != [r.submitted for r in listed.transfers]


def test_a_volume_lowers_the_repeats_of_large_points_only():
    result = measure(blocks=(1,), size=(1000, 100_000, 10_000_000), repeat=20, volume=1_000_000)
    assert [sum(r.nbytes == size for r in result.transfers) for size in (1000, 100_000, 10_000_000)] == [20, 10, 3]


# --- schedules -----------------------------------------------------------------------------------------------------


def total(schedule: str) -> float:
    (row,) = rows(measure(patterns=("cross:2",), schedule=(schedule,), blocks=(1,), size=(10_000_000,), repeat=4))
    return float(row["B/W GB/s"])


def test_one_sink_at_a_time_halves_the_rate_unless_the_sources_begin_apart():
    # two ports of 10 GB/s in all; serial sources that begin with one sink share its port, and leave the other idle
    assert total("free") == pytest.approx(20, rel=0.01)
    assert total("rounds") == pytest.approx(20, rel=0.02)
    assert total("serial") == pytest.approx(10, rel=0.01)
    assert total("serial-rotated") == pytest.approx(20, rel=0.01)


# --- flows ---------------------------------------------------------------------------------------------------------


def test_each_flow_has_its_time_and_its_rate():
    # the two share the port of their source
    found = flow_rows(measure(patterns=("fanout:2",), blocks=(1,), size=(10_000_000,), repeat=4))
    assert [(row["source"], row["sink"], row["transfers"]) for row in found] == [
        ("rank0", f"rank{i}", 4) for i in (1, 2)
    ]
    for row in found:
        assert row["B/W GB/s"] == pytest.approx(5, rel=0.01)
        assert row["lat p25 us"] <= row["p50"] <= row["p75"]
        assert row["p50"] == pytest.approx(2000, rel=0.01)
    assert len(measure().tables) == 2  # a pair has one flow, which the first table is about


# --- a file of points ----------------------------------------------------------------------------------------------


def test_points_come_from_a_file(tmp_path: Path):
    path = tmp_path / "points.csv"
    path.write_text(
        "# of a friend\nsize,pattern,blocks,concurrency,operation,note\n64KiB,pair,2,1,read,x\n4096,cross:2,1,2,,y\n"
    )
    result = measure(points=str(path), memory="tracked")
    assert [row["verified"] for row in rows(result)] == ["1/1", "8/8"]
    assert {record.operation for record in result.transfers if record.nbytes == 2 * 65536} == {"read"}
    assert {record.label for record in result.transfers} == {"pair 2x65536 c1 read", "cross:2 1x4096 c2"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pattern,blocks,size,concurrency\npair,0,4096,1\n", "row 1: experiment.blocks must be >= 1, got 0"),
        ("pattern,blocks,size\npair,1,4096\n", "row 1: .*concurrency"),
        ("pattern,blocks,size,concurrency\n", "has no points"),
    ],
)
def test_a_file_that_cannot_be_is_refused_with_its_row(tmp_path: Path, text: str, message: str):
    path = tmp_path / "points.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        measure(points=str(path))


def test_a_file_that_is_not_there_is_refused():
    (problem,) = check(configured(points="nowhere.csv"))
    assert problem.startswith("experiment.points=nowhere.csv: No such file")


# --- shared GPUs ---------------------------------------------------------------------------------------------------


def test_ranks_may_share_gpus():
    two = replace(EIGHT, gpus=2)
    result = measure(two, patterns=("cross:2",), placement=("0", "0", "1", "1"), blocks=(1,), size=(10_000_000,))
    assert values(result)["bw_gbs"] == pytest.approx(10, rel=0.01)  # one port in each direction, for all four flows


def test_more_ranks_than_gpus_are_told_how_to_share():
    (problem,) = check(configured(replace(EIGHT, gpus=2), patterns=("cross:2",)))
    assert problem.endswith("or let ranks share GPUs: experiment.placement=[0,1,0,1]")


@pytest.mark.parametrize(
    ("placement", "message"),
    [(("0", "1"), "lists 2 GPUs for 4 ranks"), (("0", "1", "2", "8"), "has 8 GPUs, numbered from 0, and no 8")],
)
def test_a_list_of_gpus_must_fit(placement: tuple[str, ...], message: str):
    (problem,) = check(configured(patterns=("cross:2",), placement=placement))
    assert message in problem
