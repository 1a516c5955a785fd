"""`experiment=transfer` on the model: exact times, every pattern, verified bytes, lost ranks, files of points."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from experiments.transfer import TransferOptions, check, run
from experiments.transfer.points import TransferPoint, flows, pattern, shuffled
from pdsim.config import Config
from pdsim.core.errors import BackendUnavailable, ConfigError, TransferFailed
from pdsim.core.progress import silent
from pdsim.hardware.machine import Machine, Nic
from pdsim.results.record import Result
from pdsim.sim.model import Model
from pdsim.transfer.job import Outcome, RankSpec
from tests.support.configs import EIGHT, ENGINE, make_config

TWO = replace(EIGHT, gpus=2)
POINTS = "Bandwidth and latency of each point"
SMALL = {"patterns": ("pair",), "blocks": (4,), "size": (4096,), "repeat": 5, "warmup": 1}


def configured(hw: Machine = EIGHT, memory: str = "timing", **options: Any) -> Config:
    return make_config(Path("unused"), hw=hw, memory=memory, experiment=TransferOptions(**SMALL | options))


def measure(hw: Machine = EIGHT, memory: str = "timing", **options: Any) -> Result:
    return run(configured(hw, memory, **options), Model(hw, ENGINE, memory=memory), silent)


def test_one_transfer_takes_what_engine_and_port_take():
    found = measure(blocks=(4,), size=(250_000,), repeat=3).values
    # 5 us a call, 1 us a descriptor, then 1 MB through a port of 10 GB/s; Avg Lat is of a block, as in nixlbench
    expected = {"post_avg_us": 9.0, "tx_avg_us": 100.0, "latency_avg_us": 109.0, "block_latency_us": 109.0 / 4}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    assert found["bw_gbs"] == pytest.approx(1e6 / 109e-6 / 1e9, rel=1e-9)


@pytest.mark.parametrize(
    ("pattern", "ports"),
    [("pair", 1), ("bidirectional", 2), ("incast", 1), ("fanout", 1), ("ring", 4), ("alltoall", 4), ("tp:2x2", 2)],
)
def test_ports_bound_what_all_flows_move_together(pattern, ports):
    (row,) = measure(patterns=(pattern,), blocks=(1,), size=(100_000_000,), repeat=4).rows(POINTS)
    assert 0.99 * ports * 10 < row["B/W GB/s"] <= ports * 10


def test_spread_ranks_cross_the_network_and_packed_ones_do_not():
    hw = replace(EIGHT, nodes=2, nic=Nic(count=8, rate=1e9))
    engine = replace(ENGINE, inter=replace(ENGINE.intra, path="rdma"))
    found = {}
    for placement in ("packed", "spread"):
        config = replace(configured(hw, placement=(placement,), size=(1 << 20,)), backend=engine)
        found[placement] = run(config, Model(hw, engine), silent).values["bw_gbs"]
    assert found["packed"] > 5 > 1 > found["spread"] > 0.9


def test_one_sink_at_a_time_halves_the_rate_in_step():
    # two ports of 10 GB/s in all; serial sources that begin with one sink share its port, and leave the other idle
    how = {"patterns": ("cross:2",), "blocks": (1,), "size": (10_000_000,), "repeat": 4}
    found = measure(**how, schedule=("free", "rounds", "serial", "serial-rotated")).rows(POINTS)
    assert [row["B/W GB/s"] for row in found] == pytest.approx([20, 20, 10, 20], rel=0.02)


def test_each_flow_has_its_time_and_its_rate():
    result = measure(patterns=("fanout:2",), blocks=(1,), size=(10_000_000,), repeat=4)
    found = result.rows("Flows of each point")
    assert [(row["source"], row["sink"], row["transfers"]) for row in found] == [
        ("rank0", f"rank{sink}", 4) for sink in (1, 2)
    ]
    for row in found:  # the two share the port of their source
        assert row["B/W GB/s"] == pytest.approx(5, rel=0.01)
        assert row["lat p25 us"] <= row["p50"] <= row["p75"]
        assert row["p50"] == pytest.approx(2000, rel=0.01)


def test_sources_that_begin_apart_do_not_go_in_step():
    """Two sources each to the same two sinks: together, both are at one sink; apart, they take turns."""
    names = {"patterns": ("cross:2x2",), "blocks": (1,), "size": (1 << 20,), "schedule": ("serial",), "repeat": 20}
    together, apart = (measure(**names, skew=skew).values["bw_max_gbs"] for skew in (0.0, 230e-6))
    again = measure(**names, skew=230e-6).values["bw_max_gbs"]
    assert apart == again > 1.1 * together


def test_a_program_pauses_between_transfers_that_take_as_long():
    def records(pause: float, seed: int = 0) -> list[Any]:
        config = replace(configured(repeat=50, pause=pause), seed=seed)
        return list(run(config, Model(EIGHT, ENGINE), silent).transfers)

    straight, paused = records(0.0), records(16e-6)
    gaps = [after.submitted - before.seen for before, after in pairwise(paused)]
    assert all(8e-6 <= gap <= 24e-6 for gap in gaps)
    assert len({round(gap, 12) for gap in gaps}) == len(gaps) == 49
    times = [[round(record.seen - record.submitted, 12) for record in each] for each in (straight, paused)]
    assert times[0] == times[1]
    assert records(16e-6) == paused != records(16e-6, seed=1)


@pytest.mark.parametrize(
    ("pattern", "rotate", "expected"),
    [
        ("pair", False, "01"),
        ("pairs", False, "01 23"),
        ("pairs:3", False, "01 23 45"),
        ("bidirectional", False, "01 10"),
        ("incast", False, "10 20 30"),
        ("incast:2", False, "10 20"),
        ("fanout:2", False, "01 02"),
        ("cross", False, "02 03 12 13"),
        ("cross:1x2", False, "01 02"),
        ("cross:2", True, "02 03 13 12"),  # sources begin with different sinks
        ("alltoall:2", False, "01 10"),
        ("ring", False, "01 12 23 30"),
        ("ring:2", False, "01 10"),
        ("tp:2x4", False, "02 03 14 15"),
        ("tp:4x2", False, "04 14 25 35"),
    ],
)
def test_a_pattern_is_these_flows(pattern, rotate, expected):
    pairs = [(source.removeprefix("rank"), sink.removeprefix("rank")) for source, sink in flows(pattern, 4, rotate)]
    assert " ".join(map("".join, pairs)) == expected


@pytest.mark.parametrize(
    ("name", "ours"),
    [("pairwise", "pairs"), ("manytoone:3", "incast:3"), ("onetomany", "fanout"), ("tp:2x4", "tp:2x4")],
)
def test_schemes_of_nixlbench_are_patterns(name, ours):
    assert pattern(name) == ours


@pytest.mark.parametrize("wrong", ["tp", "tp:2x3", "ring:1", "manytoone:"])
def test_a_count_that_a_pattern_cannot_have_is_refused(wrong):
    with pytest.raises(ValueError, match="has a count that it cannot have; write "):
        pattern(wrong)


def test_the_order_is_drawn_and_rows_are_as_listed():
    points = [TransferPoint("pair", 1, size, 1) for size in range(1, 30)]
    assert shuffled(points, 1) == shuffled(points, 1) != shuffled(points, 2)
    assert sorted(shuffled(points, 1)) == points
    options = {"size": (4096, 8192, 16384, 32768), "blocks": (1, 2)}
    listed, mixed = measure(**options), measure(order="shuffled", **options)
    assert [row["block"] for row in mixed.rows(POINTS)] == [row["block"] for row in listed.rows(POINTS)]
    assert [r.submitted for r in mixed.transfers] != [r.submitted for r in listed.transfers]


def test_a_volume_lowers_the_repeats_of_large_points_only():
    result = measure(blocks=(1,), size=(1000, 100_000, 10_000_000), repeat=20, volume=1_000_000)
    assert [sum(r.nbytes == size for r in result.transfers) for size in (1000, 100_000, 10_000_000)] == [20, 10, 3]


def test_points_come_from_a_file(tmp_path):
    path = tmp_path / "points.csv"
    head = "# of a friend\nsize,pattern,blocks,concurrency,operation,note\n"
    path.write_text(f"{head}64KiB,pair,2,1,read,x\n4096,cross:2,1,2,,y\n")
    result = measure(points=str(path), memory="tracked")
    assert [row["verified"] for row in result.rows(POINTS)] == ["1/1", "8/8"]
    assert {record.operation for record in result.transfers if record.nbytes == 2 * 65536} == {"read"}
    assert {record.label for record in result.transfers} == {"pair 2x65536 c1 read", "cross:2 1x4096 c2"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pattern,blocks,size,concurrency\npair,0,4096,1\n", "row 1: blocks must be > 0, got '0'"),
        ("pattern,blocks,size\npair,1,4096\n", "row 1: .*concurrency"),
        ("pattern,blocks,size,concurrency\n", "has no points"),
        (None, r"experiment\.points=.*points\.csv: No such file"),
    ],
)
def test_a_file_of_points_that_cannot_be_is_refused(tmp_path, text, message):
    path = tmp_path / "points.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        measure(points=str(path))


@pytest.mark.parametrize("layout", ["contiguous", "scattered"])
@pytest.mark.parametrize("operation", ["write", "read"])
def test_every_slot_arrives_as_it_was_sent(operation, layout):
    patterns = ("pair", "pairs", "bidirectional", "incast", "fanout", "cross:2x2", "ring", "alltoall:3", "tp:1x3")
    options = {"patterns": patterns, "concurrency": (2,), "operation": operation, "layout": layout}
    result = measure(memory="tracked", **options)
    slots = [2 * len(flows(pattern, 4)) for pattern in patterns]
    assert [(row["verified"], row["status"]) for row in result.rows(POINTS)] == [(f"{n}/{n}", "ok") for n in slots]
    assert (result.values["points"], result.failures) == (len(patterns), [])
    incast = {(r.operation, r.source, r.target) for r in result.transfers if r.label.startswith("incast ")}
    assert incast == {(operation, f"rank{source}", "rank0") for source in (1, 2, 3)}


def test_bytes_that_nobody_sent_are_found():
    def other_bytes(_: int, specs: list[RankSpec]) -> list[RankSpec]:
        seeds = {"rank0": 1, "rank1": 0}
        return [replace(spec, arguments=spec.arguments | {"seed": seeds[spec.name]}) for spec in specs]

    result = run(configured(memory="tracked", concurrency=(2,)), target(change=other_bytes), silent)
    (row,) = result.rows(POINTS)
    assert (row["verified"], row["status"]) == ("0/2", "corrupt")
    assert result.failures == ["pair 4x4096 c2: 2 slots hold other bytes than were sent"]


@pytest.mark.parametrize(("schedule", "used"), [("free", 3), ("rounds", 4), ("serial", 4)])
def test_slots_that_no_transfer_used_are_not_checked(schedule, used):
    result = measure(memory="tracked", concurrency=(4,), repeat=3, warmup=0, schedule=(schedule,))
    (row,) = result.rows(POINTS)
    assert (row["verified"], row["status"], result.failures) == (f"{used}/{used}", "ok", [])


class Jobs(Model):
    """A model that counts its jobs, changes them, and kills *victim* at the times *at*, one of each job."""

    def __init__(self, change: Callable[..., list[RankSpec]], victim: str, at: Sequence[float]) -> None:
        super().__init__(EIGHT, ENGINE, memory="tracked")
        self.jobs, self.change, self.victim, self.at = 0, change, victim, list(at)

    def run(self, ranks: Sequence[RankSpec], kill: Mapping[str, float] | None = None) -> Outcome:
        self.jobs += 1
        times = self.at[self.jobs - 1 : self.jobs]
        return super().run(self.change(self.jobs, list(ranks)), {self.victim: times[0]} if times else None)


def target(*at, victim="rank1", change=lambda _, specs: specs):
    return Jobs(change, victim, at)


MANY = {"memory": "tracked", "blocks": (1, 2, 4), "size": (100_000,), "repeat": 1000}  # of 16, 27 and 49 ms


@pytest.mark.parametrize("victim", ["rank0", "rank1"])
def test_a_lost_rank_costs_its_own_row_only(victim):
    losing = target(30e-3, victim=victim)
    result = run(configured(**MANY), losing, silent)
    found = result.rows(POINTS)
    assert [(row["verified"], row["status"]) for row in found] == [("1/1", "ok"), ("-", "PeerLost"), ("1/1", "ok")]
    assert any(failure.startswith(f"{victim}: Killed") for failure in result.failures)
    assert "pair 2x100000 c1 was not completed" in result.failures
    assert (result.values["points_failed"], losing.jobs) == (1, 2)
    if victim == "rank1":  # what had succeeded before the loss is kept
        of_the_lost = {record.status for record in result.transfers if record.label == "pair 2x100000 c1"}
        assert of_the_lost == {"ok", "PeerLost"}
        assert found[1]["B/W GB/s"] > 0


@pytest.mark.parametrize(
    ("error", "at", "statuses", "failure"),
    [
        (None, (0.01, 0.01), ["PeerLost", "PeerLost", "not run"], "1 points were not run: a rank was lost"),
        (TransferFailed, (), ["TransferFailed", "ok", "ok"], "job: TransferFailed: rank1 was not ready"),
        (BackendUnavailable, (), [], ""),  # of the first job: the engine does not work here at all
    ],
)
def test_a_job_that_fails_costs_its_points(error, at, statuses, failure):
    def failing(job: int, specs: list[RankSpec]) -> list[RankSpec]:
        if job == 1 and error:
            raise error("rank1 was not ready")
        return specs

    target = Jobs(failing, "rank1", at)
    if not statuses:
        with pytest.raises(error):
            run(configured(), target, silent)
        return
    result = run(configured(**MANY), target, silent)
    assert [row["status"] for row in result.rows(POINTS)] == statuses
    assert any(each.startswith(failure) for each in result.failures)


@pytest.mark.parametrize(
    ("hw", "options", "message"),
    [
        (EIGHT, {"patterns": ("alltoall",), "ranks": 9}, "experiment.ranks=9: 9 ranks take a GPU each and hw=toy"),
        (TWO, {"placement": ("0", "packed")}, "must be packed, spread or the number of a GPU for each rank"),
        (TWO, {"patterns": ("cross:2",)}, "or let ranks share GPUs: experiment.placement=[0,1,0,1]"),
        (EIGHT, {"patterns": ("cross:2",), "placement": ("0", "1")}, "lists 2 GPUs for 4 ranks"),
        (EIGHT, {"patterns": ("cross:2",), "placement": ("0", "1", "2", "8")}, "has 8 GPUs, numbered from 0"),
        (EIGHT, {"blocks": (2,), "size": (1 << 30,)}, "pair 2x1073741824 c1 needs 2147483648 bytes (2 GiB) on GPU"),
        (EIGHT, {"blocks": (1,), "size": ((1 << 30) + 1,)}, "needs 1073741825 bytes"),
    ],
)
def test_ranks_and_bytes_that_the_machine_lacks_are_refused(hw, options, message):
    (problem,) = check(configured(hw, **options))
    assert message in problem


def test_what_just_fits_and_ranks_that_share_gpus_run():
    assert list(check(configured(blocks=(1,), size=(1 << 30,)))) == []
    how = {"patterns": ("cross:2",), "placement": ("0", "0", "1", "1"), "blocks": (1,), "size": (10_000_000,)}
    assert measure(TWO, **how).values["bw_gbs"] == pytest.approx(10, rel=0.01)  # a port in each direction for all
