# SPDX-License-Identifier: Apache-2.0
"""When memory may be handed out again whose writer is gone: the endpoint's own proof that nothing writes there."""

from pdsim.testing import programs
from pdsim.testing.programs import MiB

KILL = 2.0  # seconds after the start: long after all are connected


def test_after_the_proof_no_byte_of_a_killed_writer_arrives(job, request):
    """`Endpoint.quiesced` must not succeed while the writer lives, and nothing may change after it has.

    An engine that cannot prove it says so (`Variant.proves_quiescence`); then it must not claim it either.
    """
    size = 8 * MiB
    outcome = job(
        {
            "survivor": (programs.outlive, {"writer": "victim", "size": size, "within": 3.0}),
            "victim": (programs.write_until_killed, {"to": "survivor", "size": size, "count": 4}),
        },
        kill={"victim": KILL},
    )
    found = outcome.ranks["survivor"].value
    assert not found["early"], "proven of a writer that lives"
    assert found["proven"] == request.node.callspec.params["job"].proves_quiescence
    assert found["at"] >= KILL
    assert found["changed"] in (0, None)


def test_a_writer_that_closed_its_endpoint_in_order_is_quiesced_everywhere(job):
    """A goodbye with nothing under way is proof on any engine."""
    outcome = job(
        {
            "survivor": (programs.outlive, {"writer": "leaver", "size": 4096, "within": 3.0}),
            "leaver": (programs.write_and_close, {"to": "survivor", "size": 4096}),
        }
    )
    found = outcome.ranks["survivor"].value
    assert (found["early"], found["proven"]) == (False, True)
    assert found["changed"] in (0, None)
