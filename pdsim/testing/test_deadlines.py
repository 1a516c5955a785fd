# SPDX-License-Identifier: Apache-2.0
"""A deadline ends the wait, not the transfer: the memory stays in quarantine until nothing moves any more."""

from pdsim.testing import programs
from pdsim.testing.programs import MiB


def test_a_transfer_past_its_deadline_settles_later(job):
    """The wait ends with `TransferTimeout`; the transfer goes on.

    Until it settles its region cannot be deregistered, nor its buffer freed, and it counts as quarantined.
    """
    outcome = job(
        {
            "writer": (programs.be_late, {"to": "target", "size": 64 * MiB}),
            "target": (programs.be_target, {"by": "writer", "size": 64 * MiB}),
        }
    )
    found = outcome.ranks["writer"].value
    assert found["error"] == "TransferTimeout"
    assert found["quarantined"] == (0 if found["settled"] else 1)
    assert found["deregister"] == ("accepted" if found["settled"] else "RegistrationError")
    assert found["free"] == "RegistrationError"
    assert found["after"] == [0, "accepted"]
    assert [record.status for record in outcome.ranks["writer"].transfers] == ["TransferTimeout"]


def test_the_memory_of_a_write_to_a_stopped_peer_is_never_handed_out(real):
    """A process that is stopped proves nothing: the write may go on when it does, so the memory stays in quarantine.

    An engine that is one-sided completes the write without the other process.
    """
    case, job = real
    outcome = job(
        {
            "writer": (programs.stop_peer, {"to": "stopped", "size": 8 * MiB, "resume": False}),
            "stopped": (programs.be_stopped, {"by": "writer", "size": 8 * MiB}),
        },
        failing=["stopped"],
    )
    found = outcome.ranks["writer"].value
    if case.one_sided:  # a call of the writer's own copies, or its GPU
        assert (found["error"], found["settled"], found["quarantined"]) == ("ok", True, 0)
        return
    assert found == {
        "error": "TransferTimeout",
        "in time": True,
        "settled": False,
        "quarantined": 1,
        "deregister": "RegistrationError",
        "free": "RegistrationError",
        "kept": True,
    }


def test_a_stopped_peer_that_goes_on_lets_the_memory_settle(real):
    """Quarantine ends once the engine says that the write is over."""
    _, job = real
    outcome = job(
        {
            "writer": (programs.stop_peer, {"to": "stopped", "size": 8 * MiB, "resume": True}),
            "stopped": (programs.be_stopped, {"by": "writer", "size": 8 * MiB}),
        }
    )
    found = outcome.ranks["writer"].value
    assert found["settled after resuming"]
    assert found["quarantined after resuming"] == 0
