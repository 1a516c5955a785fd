"""Ranks that drive GPUs keep out of each other's way."""

import os

import pytest

from backends.processors import shares
from pdsim.transfer import Place, RankSpec


def ranks(*gpus):
    return [RankSpec(f"rank{index}", "a:b", Place(gpu=gpu)) for index, gpu in enumerate(gpus)]


@pytest.fixture
def sixteen(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(100, 116)))


def test_each_rank_has_a_run_of_processors_of_its_own(sixteen):
    assert shares(ranks(0, 1, None)) == {
        "rank0": [100, 101, 102, 103, 104],
        "rank1": [105, 106, 107, 108, 109],
        "rank2": [110, 111, 112, 113, 114],
    }


def test_ranks_on_hosts_alone_may_roam(sixteen):
    assert shares(ranks(None, None)) == {}


def test_ranks_for_whom_there_are_too_few_may_roam(sixteen):
    assert shares(ranks(0, 1, 2, 3, 0)) == {}
