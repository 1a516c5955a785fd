# SPDX-License-Identifier: Apache-2.0
"""A peer that is gone is `PeerLost`, without harm to others; memory in which bytes may move is not reused."""

import pytest

from pdsim.testing.programs import losing
from pdsim.testing.programs.tools import MiB, be_target

KILL = 1.0  # seconds after the start: long after all are connected


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
    survivor, victim = pair(losing.write_after_loss, losing.be_lost, kill={"target": KILL}, wait=KILL + 0.5)
    assert survivor.value["errors"] == ["PeerLost"] * 3
    assert survivor.value["took"] < 20
    assert "killed" in victim.error
    assert victim.value is None


def test_the_loss_of_one_peer_leaves_transfers_to_others_alone(job):
    ranks = {
        "writer": (losing.lose_one_of_two, {"wait": KILL + 0.5}),
        "victim": (losing.be_lost, {"by": "writer"}),
        "other": (be_target, {"by": "writer", "region": 4096, "holds": ["pattern", 1, 4096], "notes": 2}),
    }
    outcome = job(ranks, kill={"victim": KILL})
    assert outcome.ranks["writer"].value == {"victim": "PeerLost", "other": "ok"}
    heard = [["writer", turn.hex()] for turn in (b"1", b"2")]
    assert outcome.ranks["other"].value == {"heard": heard, "wrong": 0, "surplus": 0}


def test_a_rank_that_raises_ends_with_its_error(job):
    outcome = job({"bad": (losing.fail, {"after": 0.01})}, failing=["bad"])
    assert outcome.ranks["bad"].error.startswith("ValueError: this rank fails on purpose")


def test_a_transfer_past_its_deadline_settles_later(pair):
    """Until then its region cannot be deregistered, nor its buffer freed, and it counts as quarantined."""
    writer, _ = pair(losing.write_too_late, be_target, region=64 * MiB, holds=["pattern", 1, 64 * MiB])
    settled = writer.value["settled"]
    assert writer.value == {
        "error": "TransferTimeout",
        "settled": settled,
        "quarantined": 0 if settled else 1,
        "deregister": "accepted" if settled else "RegistrationError",
        "free": "RegistrationError",
        "after": [0, "accepted"],
    }
    assert [record.status for record in writer.transfers] == ["TransferTimeout"]


def test_memory_of_a_write_to_a_stopped_peer_stays_quarantined(real):
    """A stopped process proves nothing; an engine that is one-sided completes the write without it."""
    case, pair = real
    size = MiB // 16 if case.one_sided else 8 * MiB  # more than sockets keep
    result = pair(losing.stop_peer, losing.be_stopped, failing=["target"], size=size, resume=False)[0].value
    if case.one_sided:  # a call of the writer's own copies, or its GPU
        assert (result["error"], result["settled"], result["quarantined"]) == ("ok", True, 0)
        return
    assert result == {
        "error": "TransferTimeout",
        "in time": True,
        "settled": False,
        "quarantined": 1,
        "deregister": "RegistrationError",
        "free": "RegistrationError",
        "kept": True,
    }


def test_a_stopped_peer_that_goes_on_lets_the_memory_settle(real):
    result = real[1](losing.stop_peer, losing.be_stopped, size=8 * MiB, resume=True)[0].value
    assert result["after resuming"] == [True, 0]


def test_after_the_proof_no_byte_of_a_killed_writer_arrives(pair, request):
    """`Endpoint.quiesced` must not succeed while the writer runs, nor where the engine says that it cannot."""
    _, target = pair(losing.write_until_killed, losing.outlive, kill={"writer": KILL}, size=8 * MiB)
    at, proves = target.value.pop("at"), request.node.callspec.params["job"].proves_quiescence
    assert target.value == {"early": False, "proven": proves, "changed": 0}
    assert at >= KILL


def test_a_writer_that_closed_its_endpoint_in_order_is_quiesced_everywhere(pair):
    """A goodbye with nothing under way is proof on any engine."""
    _, target = pair(losing.write_and_close, losing.outlive, size=4096)
    del target.value["at"]
    assert target.value == {"early": False, "proven": True, "changed": 0}


def test_an_address_from_before_the_proof_lets_nobody_connect(pair):
    """Whoever was given up before it connected may go on afterwards, when its memory is another's."""
    writer, target = pair(losing.connect_twice, losing.void_address, size=4096)
    assert (writer.value, target.value) == (["TransferFailed", "ok"], [0, 4096])
