# SPDX-License-Identifier: Apache-2.0
"""Only registered memory takes part in transfers."""

import pytest

from pdsim.testing import programs

pytestmark = pytest.mark.core


def test_names_and_buffers_are_registered_once(job):
    """A name, and a buffer, may be registered again once it was deregistered.

    A registered buffer cannot be freed.
    """
    outcome = job({"lonely": (programs.register_oddly, {})})
    assert outcome.ranks["lonely"].value == {
        "name taken": "RegistrationError",
        "buffer taken": "RegistrationError",
        "freed while registered": "RegistrationError",
        "deregistered": "accepted",
        "deregistered again": "RegistrationError",
        "registered anew": "accepted",
        "used": 0,
    }


def test_a_withdrawn_region_cannot_be_written_from(job):
    """The initiator's own region must be registered when a batch is posted."""
    outcome = job(
        {
            "writer": (programs.withdraw_own_region, {"to": "target"}),
            "target": (programs.be_spared, {"by": "writer"}),
        }
    )
    assert outcome.ranks["writer"].value == "RegistrationError"
    assert outcome.ranks["target"].value["wrong"] in (0, None)
    assert outcome.ranks["target"].value["notifications"] == 0


def test_a_region_that_the_peer_withdrew_cannot_be_written_to(job):
    """The owner tells its peers, whose next write there fails; other regions of it stay usable."""
    outcome = job(
        {
            "writer": (programs.write_to_withdrawn, {"to": "target"}),
            "target": (programs.withdraw, {"by": "writer"}),
        }
    )
    assert outcome.ranks["writer"].value == ["ok", "TransferFailed", "ok"]
    assert outcome.ranks["target"].value["wrong"] in (0, None)


def test_a_region_registered_later_needs_a_new_address(job):
    """A `Peer` knows the regions of the address that it was made from, and no later ones."""
    outcome = job(
        {
            "writer": (programs.write_to_latecomer, {"to": "target"}),
            "target": (programs.register_late, {"by": "writer"}),
        }
    )
    assert outcome.ranks["writer"].value == {"before": ["early"], "after": ["early", "late"], "old": ["early"]}
    assert outcome.ranks["target"].value["wrong"] in (0, None)
