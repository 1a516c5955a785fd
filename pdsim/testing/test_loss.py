# SPDX-License-Identifier: Apache-2.0
"""A peer that is gone is reported as `PeerLost`, within the deadline and without harm to the others."""

import pytest

from pdsim.testing.programs import losing
from pdsim.testing.programs.tools import MiB

KILL = 2.0  # seconds after the start: long after all are connected


@pytest.mark.parametrize("operation", ["write", "read"])
def test_a_peer_killed_in_mid_transfer_is_lost(job, operation):
    """The survivor's transfer fails with `PeerLost` within its deadline, for writes and for reads."""
    size = 8 * MiB
    outcome = job(
        {
            "survivor": (losing.move_until_lost, {"to": "victim", "size": size, "operation": operation}),
            "victim": (losing.be_lost, {"by": "survivor", "size": size}),
        },
        kill={"victim": KILL},
    )
    result = outcome.ranks["survivor"].value
    assert result["error"] == "PeerLost"
    assert result["done"] > 0
    assert result["took"] < 20, "later than its deadline"
    assert result["at"] >= KILL
    assert outcome.ranks["survivor"].transfers[-1].status == "PeerLost"


def test_a_peer_killed_before_is_lost_to_transfers_and_connections(job):
    """A transfer to a peer that is gone already fails, as does connecting to its old address.

    The job reports a killed rank as such, without a value.
    """
    outcome = job(
        {
            "survivor": (losing.write_after_loss, {"to": "victim", "wait": KILL + 0.5}),
            "victim": (losing.be_lost, {"by": "survivor", "size": 4096}),
        },
        kill={"victim": KILL},
    )
    result = outcome.ranks["survivor"].value
    assert result["errors"] == ["PeerLost", "PeerLost"]
    assert result["connect"] == "PeerLost"
    assert result["took"] < 20
    assert "killed" in outcome.ranks["victim"].error
    assert outcome.ranks["victim"].value is None


def test_the_others_go_on(job):
    """The loss of one peer must not disturb transfers to another."""
    outcome = job(
        {
            "writer": (losing.lose_one_of_two, {"wait": KILL + 0.5}),
            "victim": (losing.be_lost, {"by": "writer", "size": 4096}),
            "other": (losing.be_other, {"by": "writer"}),
        },
        kill={"victim": KILL},
    )
    assert outcome.ranks["writer"].value == {"victim": "PeerLost", "other": "ok"}
    assert outcome.ranks["other"].value == ["1", "2"]


def test_a_rank_that_raises_ends_with_its_error(job):
    """An exception of a program is its rank's error, by name and message."""
    outcome = job({"bad": (losing.fail, {"after": 0.01})}, failing=["bad"])
    assert outcome.ranks["bad"].error.startswith("ValueError: this rank fails on purpose")
