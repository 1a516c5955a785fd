# SPDX-License-Identifier: Apache-2.0
"""A peer that is gone is reported as `PeerLost`, within the deadline and without harm to the others."""

import pytest

from pdsim.testing.programs import losing
from pdsim.testing.programs.tools import MiB

KILL = 2.0  # seconds after the start: long after all are connected


@pytest.mark.parametrize("operation", ["write", "read"])
def test_a_peer_killed_in_mid_transfer_is_lost(pair, operation):
    kill = {"target": KILL}
    survivor, _ = pair(losing.move_until_lost, losing.be_lost, kill=kill, size=8 * MiB, operation=operation)
    result = survivor.value
    assert result["error"] == survivor.transfers[-1].status == "PeerLost"
    assert result["done"] > 0
    assert result["took"] < 20, "later than its deadline"
    assert result["at"] >= KILL


def test_a_peer_killed_before_is_lost_to_transfers_and_connections(pair):
    """So it is for a new connection to its old address, and the job has no value of it."""
    kill = {"target": KILL}
    survivor, victim = pair(losing.write_after_loss, losing.be_lost, kill=kill, size=4096, wait=KILL + 0.5)
    result = survivor.value
    assert (result["errors"], result["connect"]) == (["PeerLost", "PeerLost"], "PeerLost")
    assert result["took"] < 20
    assert "killed" in victim.error
    assert victim.value is None


def test_the_loss_of_one_peer_leaves_transfers_to_others_alone(job):
    ranks = {
        "writer": (losing.lose_one_of_two, {"wait": KILL + 0.5}),
        "victim": (losing.be_lost, {"by": "writer", "size": 4096}),
        "other": (losing.be_other, {"by": "writer"}),
    }
    outcome = job(ranks, kill={"victim": KILL})
    assert outcome.ranks["writer"].value == {"victim": "PeerLost", "other": "ok"}
    assert outcome.ranks["other"].value == ["1", "2"]


def test_a_rank_that_raises_ends_with_its_error(job):
    outcome = job({"bad": (losing.fail, {"after": 0.01})}, failing=["bad"])
    assert outcome.ranks["bad"].error.startswith("ValueError: this rank fails on purpose")
