"""`experiment=seed_mooncake_tcp`: the alias moves the same bytes as Mooncake over RDMA, and takes longer."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from experiments.reports.mooncake_tcp import run
from experiments.serve import ServeOptions, job
from pdsim.core.progress import silent
from pdsim.results.record import Result
from tests.support import seeding
from tests.support.composed import composed
from tests.support.engines import make_target

SMALL = {"tokens": (512,), "repeat": 2, "requests": 4}


@cache
def seeded(*words: str) -> Result:
    config = composed("experiment=seed_mooncake_tcp", *words)
    own = replace(config, experiment=replace(config.experiment, **SMALL))
    return seeding.measure(own)


def points(
    result: Result, claim: str, machine: str = "2x8xh20 mooncake", target: str = "model"
) -> list[dict[str, Any]]:
    return seeding.points(result, claim, machine, target)


def test_the_alias_moves_the_same_bytes_in_the_same_descriptors():
    result = seeded()
    for claim in ("bytes", "descriptors"):
        assert [row["effect"] for row in points(result, claim)] == [1.0, 1.0]
    assert {record.engine for record in result.transfers} == {"model:mooncake", "model:mooncake_tcp"}


def test_a_handoff_takes_longer_over_tcp():
    assert [row["at"] for row in points(seeded(), "handoff")] == ["1to1 512 tokens", "8to8 512 tokens"]
    assert min(row["effect"] for row in points(seeded(), "handoff")) > 4


@pytest.mark.parametrize("hw", ["loopback", "link"])
def test_without_rdma_there_is_no_before_and_all_handoffs_succeed(hw: str):
    result = seeded(f"hw={hw}")
    assert [(row["before"], row["after"]) for row in points(result, "serves", f"{hw} mooncake_tcp")] == [(2, 2)]
    (row,) = points(result, "handoff", f"{hw} mooncake_tcp")
    assert (row["before"], row["effect"]) == (None, None)
    assert result.failures == []


@pytest.mark.mooncake
def test_real_bytes_arrive_over_the_alias():
    config = composed("experiment=seed_mooncake_tcp", "hw=loopback")
    own = replace(config, target="real", experiment=replace(config.experiment, **SMALL | {"tokens": (64,)}))
    result = run(own, make_target("mooncake_tcp"), silent)
    (row,) = points(result, "serves", "loopback mooncake_tcp", "real")
    assert (row["before"], row["after"]) == (2, 2)  # contents compared
    assert result.failures == []


def test_the_alias_has_the_policy_of_mooncake():
    # staging, and pages that decode holds already: what the report's order of rules (alias first) is about
    rdma, tcp = (
        composed(f"hw=2x8x{gpu}", f"backend={name}") for gpu, name in (("h20", "mooncake"), ("h20", "mooncake_tcp"))
    )
    assert rdma.policy == tcp.policy
    jobs = [job(config, ServeOptions()) for config in (rdma, tcp)]
    assert jobs[0] == jobs[1]
