# SPDX-License-Identifier: Apache-2.0
"""Memory that bytes may still move in is not handed out again until it is proven that nothing moves there.

A deadline ends the wait, not the transfer: its memory stays in quarantine.  Where the writer is gone, the proof is
the endpoint's own.
"""

from pdsim.testing.programs import losing
from pdsim.testing.programs.tools import MiB

KILL = 2.0  # seconds after the start: long after all are connected


def test_a_transfer_past_its_deadline_settles_later(pair):
    """The wait ends with `TransferTimeout`; the transfer goes on.

    Until it settles its region cannot be deregistered, nor its buffer freed, and it counts as quarantined.
    """
    writer, _ = pair(losing.write_too_late, losing.be_target, size=64 * MiB)
    result = writer.value
    assert result["error"] == "TransferTimeout"
    assert result["quarantined"] == (0 if result["settled"] else 1)
    assert result["deregister"] == ("accepted" if result["settled"] else "RegistrationError")
    assert result["free"] == "RegistrationError"
    assert result["after"] == [0, "accepted"]
    assert [record.status for record in writer.transfers] == ["TransferTimeout"]


def stop(job, resume, **options):
    """Return what a rank says that writes to one whose process it has stopped."""
    return (
        job(
            {
                "writer": (losing.stop_peer, {"to": "target", "size": 8 * MiB, "resume": resume}),
                "target": (losing.be_stopped, {"by": "writer", "size": 8 * MiB}),
            },
            **options,
        )
        .ranks["writer"]
        .value
    )


def test_memory_of_a_write_to_a_stopped_peer_stays_quarantined(real):
    """A process that is stopped proves nothing: the write may go on when it does, so the memory stays in quarantine.

    An engine that is one-sided completes the write without the other process.
    """
    case, job = real
    result = stop(job, resume=False, failing=["target"])
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
    """Quarantine ends once the engine says that the write is over."""
    result = stop(real[1], resume=True)
    assert result["settled after resuming"]
    assert result["quarantined after resuming"] == 0


def test_after_the_proof_no_byte_of_a_killed_writer_arrives(pair, request):
    """`Endpoint.quiesced` must not succeed while the writer runs, and nothing may change after it has.

    An engine that cannot prove it says so (`Variant.proves_quiescence`); then it must not claim it either.
    """
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
