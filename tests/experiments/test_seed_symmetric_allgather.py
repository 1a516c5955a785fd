"""`experiment=seed_symmetric_allgather`: symmetric memory is faster on the model, and a pool that grows is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.reports.symmetric_allgather import SymmetricAllgatherOptions
from pdsim.config import Config
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.results.record import Result
from tests.support.seeding import measure, points

SMALL = ("experiment.size=[64KiB,32MiB]", "experiment.batches=[[9,9],[4096,77,1000]]", "experiment.repeat=3")


def seed(*words: str) -> Config:
    return compose(["experiment=seed_symmetric_allgather", *SMALL, *words])


HERE = "8xh20 nccl"


@pytest.fixture(scope="module")
def eight() -> Result:
    return measure(seed())


def test_it_is_about_nccl_on_a_node_of_eight_h20():
    config = seed()
    assert (config.hw.name, config.collective.name if config.collective else "") == ("8xh20", "nccl")


def test_equal_pieces_are_gathered_faster_on_every_number_of_ranks(eight):
    found = points(eight, "equal", HERE)
    assert [row["at"] for row in found] == [f"{n} x {size}" for n in (2, 4, 8) for size in ("64 KiB", "32 MiB")]
    assert all(row["effect"] > 1.0 for row in found)
    assert found[0]["effect"] > 1.05


def test_sequences_of_unequal_lengths_are_no_slower(eight):
    found = points(eight, "padded", HERE)
    assert [row["at"] for row in found][:2] == ["2 ranks, batch 9+9", "2 ranks, batch 4096+77+1000"]
    assert all(row["effect"] >= 1.0 for row in found)


def test_a_pool_that_grows_loses_more_than_symmetric_memory_wins(eight):
    assert all(row["effect"] > 1.05 for row in points(eight, "reserved", HERE))
    assert all(row["effect"] < 1.0 for row in points(eight, "grown", HERE))
    assert any(note.startswith("a growth is made up for after ") for note in eight.notes)


@pytest.mark.slow
def test_every_token_is_right_in_either_memory():
    result = measure(seed("hw=loopback", "memory=tracked", "experiment.ranks=[2,4]", "experiment.size=[64KiB]"))
    assert result.failures == []
    assert points(result, "padded", "loopback gloo")


def test_more_ranks_than_gpus_are_left_out_and_named():
    result = measure(seed("hw=4xh200", "experiment.ranks=[2,4,8]", "experiment.size=[64KiB]"))
    assert "hw=4xh200 has too few GPUs for 8 ranks, left out" in result.notes
    with pytest.raises(ConfigError, match=r"experiment.ranks=\[8\]: hw=4xh200 has 4 GPUs; take fewer ranks"):
        measure(seed("hw=4xh200", "experiment.ranks=[8]"))


def test_without_collectives_the_error_says_what_to_choose():
    with pytest.raises(ConfigError, match="needs collectives; set collective=nccl, or gloo on hosts"):
        measure(replace(seed(), collective=None))


def test_options_are_held_to_the_rules_of_the_all_gather():
    with pytest.raises(ValueError, match=r"experiment\.repeat must be >= 1, got 0"):
        SymmetricAllgatherOptions(repeat=0)
