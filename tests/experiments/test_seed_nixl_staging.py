"""`experiment=seed_nixl_staging`: staging helps on the model, where the report says so and where it does not."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.reports.claims import as_rows
from pdsim.config import Config
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.results.record import Result
from tests.support import seeding
from tests.support.seeding import measure

SMALL = ("experiment.tokens=[512]", "experiment.prompts=[8]", "experiment.prompt_tokens=256")


def seed(*words: str) -> Config:
    return compose(["experiment=seed_nixl_staging", *SMALL, *words])


def points(result: Result, claim: str, machine: str = "8xh20 nixl") -> dict[str, dict[str, Any]]:
    """Return the points of *claim* on *machine* by what they are at."""
    return {row["at"]: row for row in seeding.points(result, claim, machine)}


@pytest.fixture(scope="module")
def within_a_node() -> Result:
    return measure(seed("experiment.tp=[1to4,4to1,4to8]"))


def test_it_is_about_nixl_on_a_node_of_h20():
    config = seed()
    assert (config.hw.name, config.backend.name) == ("8xh20", "nixl")


def test_slices_cost_a_descriptor_a_token_and_plane(within_a_node):
    found = points(within_a_node, "descriptors")
    # llama-3.1-70b; a block, and beside it ten rows of metadata to each decode rank
    sliced, staged = 80 * 2 * 512, 1
    assert (found["4to1 512 tokens"]["before"], found["4to1 512 tokens"]["after"]) == (
        4 * sliced + 10,
        4 * staged + 10,
    )
    assert (found["1to4 512 tokens"]["before"], found["1to4 512 tokens"]["after"]) == (
        4 * sliced + 40,
        4 * staged + 40,
    )


def test_a_staged_handoff_is_faster_by_what_the_descriptors_cost(within_a_node):
    found = points(within_a_node, "handoff")
    for at, row in found.items():
        assert row["effect"] > 60, at
    assert found["4to1 512 tokens"]["before"] >= 5 * 80 * 2 * 512  # 5 us a descriptor, each rank for itself


def test_prompts_that_arrive_at_once_get_their_first_token_earlier(within_a_node):
    (ttft,), (rate,) = (points(within_a_node, claim).values() for claim in ("ttft", "throughput"))
    assert ttft["at"] == "4toDP4 8 prompts"
    assert ttft["effect"] > 1.05
    assert rate["effect"] > 1.05
    claims = [row for row in as_rows(within_a_node, "Claims") if row["machine"] == "8xh20 nixl"]
    assert [row["verdict"] for row in claims] == ["holds"] * 4


@pytest.mark.parametrize(("descriptor", "least", "most"), [("1.05us", 6.0, 65.0), ("0", 0.9, 10.0)])
def test_across_nodes_the_gain_is_that_of_descriptors_not_prepared(descriptor: str, least: float, most: float):
    result = measure(seed("hw=2x8xh20", "experiment.tp=[4to1,8to2]", f"experiment.descriptor={descriptor}"))
    effects = [row["effect"] for row in points(result, "handoff", "2x8xh20 nixl").values()]
    assert all(least < effect < most for effect in effects), effects


def test_every_byte_is_right_before_and_after():
    small = ("hw=loopback", "backend=nixl_tcp", "memory=tracked", "experiment.tp=[1to2,2to1,4to1]")
    result = measure(seed(*small))
    assert result.failures == []
    assert {row["claim"] for row in as_rows(result, "Claims")} == {"handoff", "descriptors", "ttft", "throughput"}


def test_variants_that_need_more_gpus_are_skipped_and_named(within_a_node):
    assert "hw=8xh20 has too few GPUs for 4to8, left out" in within_a_node.notes
    assert "4to8 512 tokens" not in points(within_a_node, "handoff")
    with pytest.raises(
        ConfigError, match=r"hw=2xh200 has too few GPUs for any of it; set experiment.placement=sides"
    ):
        measure(seed("hw=2xh200", "experiment.tp=[4to2]", "experiment.placement=packed"))


def test_ranks_share_a_pair_of_gpus_if_they_are_told_to():
    result = measure(seed("hw=2xh200", "experiment.tp=[4to2]", "experiment.placement=sides"))
    assert "4to2 512 tokens" in points(result, "handoff", "2xh200 nixl")
    assert "hw=2xh200 has too few GPUs for 4toDP4, left out" in result.notes
