# SPDX-License-Identifier: Apache-2.0
"""Memory that bytes may still move in is not handed out again until it is proven that nothing moves there."""

from pdsim.testing.programs import losing
from pdsim.testing.programs.tools import MiB

KILL = 2.0  # seconds after the start: long after all are connected


def test_a_transfer_past_its_deadline_settles_later(pair):
    """Until then its region cannot be deregistered, nor its buffer freed, and it counts as quarantined."""
    writer, _ = pair(losing.write_too_late, losing.be_target, size=64 * MiB)
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
    result = pair(losing.stop_peer, losing.be_stopped, failing=["target"], size=8 * MiB, resume=False)[0].value
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
    assert result["settled after resuming"]
    assert result["quarantined after resuming"] == 0


def test_after_the_proof_no_byte_of_a_killed_writer_arrives(pair, request):
    """`Endpoint.quiesced` must not succeed while the writer runs, nor where the engine says that it cannot."""
    _, target = pair(losing.write_until_killed, losing.outlive, kill={"writer": KILL}, size=8 * MiB)
    assert not target.value["early"], "proven of a writer that runs"
    assert target.value["proven"] == request.node.callspec.params["job"].proves_quiescence
    assert target.value["at"] >= KILL
    assert target.value["changed"] in (0, None)


def test_a_writer_that_closed_its_endpoint_in_order_is_quiesced_everywhere(pair):
    """A goodbye with nothing under way is proof on any engine."""
    _, target = pair(losing.write_and_close, losing.outlive, size=4096)
    assert (target.value["early"], target.value["proven"]) == (False, True)
    assert target.value["changed"] in (0, None)
