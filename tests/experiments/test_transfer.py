"""`experiment=transfer` on the model: exact times, every pattern, verified bytes, lost ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from experiments.transfer import TransferOptions, check, run
from experiments.transfer.rank_places import flows
from pdsim.config import Config
from pdsim.core.errors import BackendUnavailable, ConfigError, TransferFailed
from pdsim.core.progress import silent
from pdsim.hardware.machine import Machine, Nic
from pdsim.results.record import Result
from pdsim.sim.model import Model
from pdsim.transfer.job import Outcome, RankSpec
from tests.support.configs import ENGINE, MACHINE, make_config

EIGHT = replace(MACHINE, gpus=8)
SMALL = {"patterns": ("pair",), "blocks": (4,), "size": (4096,), "repeat": 5, "warmup": 1}


def configured(hw: Machine = EIGHT, memory: str = "timing", **options: Any) -> Config:
    return make_config(Path("unused"), hw=hw, memory=memory, experiment=TransferOptions(**SMALL | options))


def measure(hw: Machine = EIGHT, memory: str = "timing", **options: Any) -> Result:
    config = configured(hw, memory, **options)
    return run(config, Model(hw, ENGINE, memory=memory), silent)


def rows(result: Result) -> list[dict[str, Any]]:
    table = result.tables[0]
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def values(result: Result) -> dict[str, Any]:
    return {metric.name: metric.value for metric in result.summary}


# --- times ---------------------------------------------------------------------------------------------------------


def test_one_transfer_takes_what_the_engine_and_the_port_take():
    found = values(measure(blocks=(4,), size=(250_000,), repeat=3))
    # 5 us a call, 1 us a descriptor, then 1 MB through a port of 10 GB/s
    assert round(found["post_avg_us"], 6) == 9.0
    assert round(found["tx_avg_us"], 6) == 100.0
    assert round(found["latency_avg_us"], 6) == 109.0
    assert round(found["bw_gbs"], 9) == round(1e6 / 109e-6 / 1e9, 9)


def test_avg_lat_is_per_block_as_in_nixlbench():
    found = values(measure(blocks=(4,), size=(250_000,), repeat=3))
    assert round(found["block_latency_us"], 6) == 109.0 / 4


def test_two_in_flight_hide_the_posting_of_one_behind_the_bytes_of_the_other():
    result = measure(blocks=(1,), size=(1_000_000,), concurrency=(1, 2), repeat=50)
    one, two = (row["B/W GB/s"] for row in rows(result))
    assert round(one, 9) == round(1e6 / 106e-6 / 1e9, 9)
    assert 9.9 < two <= 10.0


@pytest.mark.parametrize(("pattern", "ports"), [("pair", 1), ("bidirectional", 2), ("incast", 1), ("fanout", 1)])
def test_the_ports_bound_what_all_flows_move_together(pattern, ports):
    (row,) = rows(measure(patterns=(pattern,), blocks=(1,), size=(100_000_000,), repeat=4))
    assert 0.99 * ports * 10 < row["B/W GB/s"] <= ports * 10


def test_alltoall_fills_every_port():
    (row,) = rows(measure(patterns=("alltoall",), blocks=(1,), size=(100_000_000,), repeat=4))
    assert 0.99 * 4 * 10 < row["B/W GB/s"] <= 4 * 10


def test_equal_runs_give_equal_records():
    options = {"patterns": ("alltoall",), "concurrency": (3,), "layout": "scattered"}
    assert measure(**options).transfers == measure(**options).transfers


def test_spread_ranks_cross_the_network_and_packed_ones_do_not():
    hw = replace(EIGHT, nodes=2, nic=Nic(count=8, rate=1e9))
    engine = replace(ENGINE, inter=replace(ENGINE.intra, path="rdma"))
    found = {}
    for placement in ("packed", "spread"):
        config = replace(configured(hw, placement=(placement,), size=(1 << 20,)), backend=engine)
        found[placement] = values(run(config, Model(hw, engine), silent))["bw_gbs"]
    assert found["packed"] > 5 > 1 > found["spread"] > 0.9


# --- what is counted -----------------------------------------------------------------------------------------------


def test_every_flow_makes_its_repeats_and_the_warm_up_is_not_counted():
    result = measure(patterns=("alltoall",), ranks=3, concurrency=(2,), repeat=7, warmup=5)
    pairs = [(record.source, record.target) for record in result.transfers]
    assert {pair: pairs.count(pair) for pair in pairs} == dict.fromkeys(flows("alltoall", 3), 7)


def test_a_read_moves_the_bytes_of_a_pattern_in_the_same_direction():
    result = measure(patterns=("incast",), operation="read", memory="tracked")
    assert {(record.operation, record.source, record.target) for record in result.transfers} == {
        ("read", source, "rank0") for source in ("rank1", "rank2", "rank3")
    }
    assert rows(result)[0]["verified"] == "3/3"


def test_there_is_a_row_for_every_combination():
    result = measure(patterns=("pair", "incast"), blocks=(1, 2), size=(4096, 8192), concurrency=(1, 2))
    assert len(rows(result)) == values(result)["points"] == 16
    assert {row["status"] for row in rows(result)} == {"ok"}


def test_a_percentile_that_the_sample_cannot_have_is_left_out():
    (few,), (enough,) = rows(measure(repeat=99)), rows(measure(repeat=100))
    assert (few["p99"], enough["p99.9"]) == (None, None)
    assert enough["p99"] is not None


# --- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "scattered"])
@pytest.mark.parametrize("operation", ["write", "read"])
@pytest.mark.parametrize("pattern", ["pair", "pairs", "bidirectional", "incast", "fanout", "cross", "alltoall"])
def test_every_slot_arrives_as_it_was_sent(pattern, operation, layout):
    options = {"patterns": (pattern,), "concurrency": (2,), "operation": operation, "layout": layout}
    result = measure(memory="tracked", **options)
    slots = 2 * len(flows(pattern, 4))
    assert rows(result)[0]["verified"] == f"{slots}/{slots}"
    assert not result.failures


class Disturbed(Model):
    """A model whose receiving rank lets bytes change."""

    def run(self, ranks: Sequence[RankSpec], kill: Mapping[str, float] | None = None) -> Outcome:
        program = "tests.experiments.programs:write_a_byte_between_the_blocks"
        specs = [replace(spec, program=program) if spec.name == "rank1" else spec for spec in ranks]
        return super().run(specs, kill)


def test_bytes_that_nobody_sent_are_found():
    config = configured(memory="tracked", layout="scattered", concurrency=(2,))
    result = run(config, Disturbed(EIGHT, ENGINE, memory="tracked"), silent)
    (row,) = rows(result)
    assert (row["verified"], row["status"]) == ("0/2", "corrupt")
    assert result.failures == ["pair 4x4096 c2 scattered: 2 slots hold other bytes than were sent"]


@pytest.mark.parametrize(("schedule", "used"), [("free", 3), ("rounds", 4), ("serial", 4)])
def test_slots_that_no_transfer_used_are_not_checked(schedule, used):
    result = measure(memory="tracked", concurrency=(4,), repeat=3, warmup=0, schedule=(schedule,))
    (row,) = rows(result)
    assert (row["verified"], row["status"], result.failures) == (f"{used}/{used}", "ok", [])


def test_without_contents_nothing_is_verified_and_the_result_says_so():
    result = measure()
    assert rows(result)[0]["verified"] == "-"
    assert result.notes == [
        "no bytes were verified: the model keeps sizes only; set memory=tracked to check contents"
    ]


# --- loss ----------------------------------------------------------------------------------------------------------


class Losing(Model):
    """A model that kills a rank at given times of the jobs that it runs, one after the other."""

    victim = "rank1"
    at: tuple[float, ...] = (30e-3,)
    jobs = 0

    def run(self, ranks: Sequence[RankSpec], kill: Mapping[str, float] | None = None) -> Outcome:
        type(self).jobs += 1
        times = self.at[self.jobs - 1 : self.jobs]
        return super().run(ranks, {self.victim: times[0]} if times else None)


def losing(**how: Any) -> Model:
    return type("Target", (Losing,), how)(EIGHT, ENGINE, memory="tracked")


MANY = {"blocks": (1, 2, 4), "size": (100_000,), "repeat": 1000}
"""Points of 16, 27 and 49 ms."""


@pytest.mark.parametrize("victim", ["rank0", "rank1"])
def test_a_lost_rank_costs_its_own_row_only(victim):
    target = losing(victim=victim)
    result = run(configured(memory="tracked", **MANY), target, silent)
    assert [row["status"] for row in rows(result)] == ["ok", "PeerLost", "ok"]
    assert [row["verified"] for row in rows(result)] == ["1/1", "-", "1/1"]
    assert any(failure.startswith(f"{victim}: Killed") for failure in result.failures)
    assert "pair 2x100000 c1 was not completed" in result.failures
    assert values(result)["points_failed"] == 1
    assert target.jobs == 2


def test_after_a_second_loss_what_is_left_is_not_run():
    result = run(configured(memory="tracked", **MANY), losing(at=(0.01, 0.01)), silent)
    assert [row["status"] for row in rows(result)] == ["PeerLost", "PeerLost", "not run"]
    assert result.failures[-1].startswith("1 points were not run: a rank was lost in 2 jobs")


def test_what_had_succeeded_before_the_loss_is_kept():
    result = run(configured(memory="tracked", **MANY), losing(), silent)
    of_the_lost = [record for record in result.transfers if record.label == "pair 2x100000 c1"]
    assert {record.status for record in of_the_lost} == {"ok", "PeerLost"}
    assert rows(result)[1]["B/W GB/s"] > 0


class Failing(Model):
    """A model whose first job cannot be started."""

    jobs = 0

    def run(self, ranks: Sequence[RankSpec], kill: Mapping[str, float] | None = None) -> Outcome:
        type(self).jobs += 1
        if self.jobs == 1:
            raise TransferFailed("rank1 was not ready within 60 s")
        return super().run(ranks, kill)


def test_a_job_that_cannot_be_started_costs_a_row():
    target = type("Target", (Failing,), {})(EIGHT, ENGINE)
    result = run(configured(blocks=(1, 2, 4)), target, silent)
    assert [row["status"] for row in rows(result)] == ["TransferFailed", "ok", "ok"]
    assert result.failures[0] == "job: TransferFailed: rank1 was not ready within 60 s"


def test_an_engine_that_does_not_work_at_all_ends_the_run():
    class Unavailable(Model):
        def run(self, ranks: Sequence[RankSpec], kill: Mapping[str, float] | None = None) -> Outcome:
            raise BackendUnavailable("no such library")

    with pytest.raises(BackendUnavailable):
        run(configured(), Unavailable(EIGHT, ENGINE), silent)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patterns": ("ring",)}, "experiment.patterns must be one of pair, pairs, bidirectional, .*, got 'ring'"),
        ({"blocks": (0,)}, "experiment.blocks must be >= 1, got 0"),
        ({"size": ()}, "experiment.size must have one value or more, got none"),
        ({"ranks": 1}, "experiment.ranks must be >= 2, got 1"),
        ({"patterns": ("pair:2",)}, "'pair:2' has a count that it cannot have; write pair, or pairs:2"),
        ({"patterns": ("cross:2x",)}, "'cross:2x' has a count that it cannot have; write cross:2 or cross:2x3"),
        ({"schedule": ("late",)}, "experiment.schedule must be one of free, .*, got 'late'"),
        ({"order": "random"}, "experiment.order must be one of listed, shuffled, got 'random'"),
        ({"placement": ("0", "packed")}, "experiment.placement must be packed, spread or the number of a GPU"),
        ({"operation": "send"}, "experiment.operation must be one of write, read, got 'send'"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name_and_value(options, message):
    with pytest.raises(ValueError, match=message):
        TransferOptions(**options)


def test_more_ranks_than_gpus_are_refused():
    (problem,) = check(configured(patterns=("alltoall",), ranks=9))
    assert problem.startswith("experiment.ranks=9: 9 ranks take a GPU each and hw=toy has 8; set experiment.ranks=8")


def test_more_bytes_than_memory_are_refused_before_anything_runs():
    with pytest.raises(
        ConfigError, match=r"pair 2x1073741824 c1 needs 2147483648 bytes \(2 GiB\) on GPU 0 of node 0"
    ):
        measure(blocks=(2,), size=(1 << 30,))


def test_what_just_fits_runs():
    assert list(check(configured(blocks=(1,), size=(1 << 30,)))) == []
    assert list(check(configured(blocks=(1,), size=((1 << 30) + 1,)))) != []


def test_a_program_pauses_between_transfers_and_the_transfers_take_as_long():
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
