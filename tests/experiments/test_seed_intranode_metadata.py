"""`experiment=seed_intranode_metadata`: metadata over NVLink is earlier on the model, by what TCP takes longer."""

from __future__ import annotations

import pytest

from pdsim.config import Config
from pdsim.config.compose import compose
from pdsim.results.record import Result
from tests.support.seeding import measure, points

SMALL = ("experiment.tokens=[128,8192]", "experiment.prompts=[8]", "experiment.prompt_tokens=256")


def seed(*words: str) -> Config:
    return compose(["experiment=seed_intranode_metadata", *SMALL, *words])


HERE = "8xh20 mooncake_nvlink"


@pytest.fixture(scope="module")
def four_and_four() -> Result:
    return measure(seed())


def test_it_compares_mooncake_over_nvlink_on_four_and_four_gpus():
    config = seed()
    assert (config.hw.name, config.backend.name) == ("8xh20", "mooncake_nvlink")
    assert config.experiment.tp == ("4to4",)


def test_a_handoff_saves_a_tcp_message_and_pays_a_batch(four_and_four):
    for row in points(four_and_four, "handoff", HERE):
        assert row["before"] - row["after"] == pytest.approx(50 - 11 - 10 * 2.2, abs=0.5)  # us


def test_the_saving_is_a_share_of_a_short_handoff(four_and_four):
    short, long = points(four_and_four, "handoff", HERE)
    assert 1.05 > short["effect"] > long["effect"] > 1.0
    assert all(1.0 <= row["effect"] < 1.05 for row in points(four_and_four, "ttft", HERE))


def test_before_sends_messages_and_after_a_batch(four_and_four):
    sent = {way: [r for r in four_and_four.transfers if r.label.startswith(f"{way} ")] for way in ("tcp", "nvlink")}
    rows, handoffs = 1600, 4 * (2 * (2 + 10) + 8)  # bytes of a request's rows to each of four decode ranks
    assert len(sent["nvlink"]) - len(sent["tcp"]) == handoffs
    assert sum(r.nbytes for r in sent["nvlink"]) - sum(r.nbytes for r in sent["tcp"]) == rows * handoffs


def test_first_tokens_are_right_either_way():
    small = ("hw=loopback", "backend=mooncake_tcp", "memory=tracked", "experiment.tp=[2to2,1to2]")
    result = measure(seed(*small, "experiment.tokens=[128]"))
    assert result.failures == []
    assert len(points(result, "handoff", "loopback mooncake_tcp")) == 2


def test_ranks_share_a_pair_of_gpus_if_they_are_told_to():
    result = measure(seed("hw=2xh200", "experiment.tp=[4to4]", "experiment.placement=sides"))
    assert len(points(result, "handoff", "2xh200 mooncake_nvlink")) == 2
    assert "prompts are served by ranks with a GPU each, so here none are" in result.notes
