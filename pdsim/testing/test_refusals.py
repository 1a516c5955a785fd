# SPDX-License-Identifier: Apache-2.0
"""Requests that break a rule are refused before anything moves; only registered memory takes part."""

import pytest

from pdsim.testing.programs import refusals

pytestmark = pytest.mark.core


def test_bad_batches_are_refused_and_nothing_is_written(pair):
    """Each batch breaks one rule of `pdsim.transfer.Batch` or of `Endpoint.write`.

    It is refused before it is posted, so the target stays as it was and hears of nothing.
    """
    writer, target = pair(refusals.write_nonsense, refusals.be_spared)
    result = dict(writer.value)
    unknown_local = result.pop("unknown local region")
    assert unknown_local in ("InvalidBatch", "RegistrationError")  # never registered is also not registered any more
    assert result == dict.fromkeys(result, "InvalidBatch")
    assert target.value["wrong"] in (0, None)
    assert target.value["notifications"] == 0


def test_names_and_buffers_are_registered_once(job):
    """A name, and a buffer, may be registered again once it was deregistered.

    A registered buffer cannot be freed.
    """
    outcome = job({"lonely": (refusals.register_oddly, {})})
    assert outcome.ranks["lonely"].value == {
        "name taken": "RegistrationError",
        "buffer taken": "RegistrationError",
        "freed while registered": "RegistrationError",
        "deregistered": "accepted",
        "deregistered again": "RegistrationError",
        "registered anew": "accepted",
        "used": 0,
    }


def test_a_withdrawn_region_cannot_be_written_from(pair):
    """The initiator's own region must be registered when a batch is posted."""
    writer, target = pair(refusals.withdraw_own_region, refusals.be_spared)
    assert writer.value == "RegistrationError"
    assert target.value["wrong"] in (0, None)
    assert target.value["notifications"] == 0


def test_a_region_that_the_peer_withdrew_cannot_be_written_to(pair):
    """The owner tells its peers, whose next write there fails; other regions of it stay usable."""
    writer, target = pair(refusals.write_to_withdrawn, refusals.withdraw)
    assert writer.value == ["ok", "TransferFailed", "ok"]
    assert target.value["wrong"] in (0, None)


def test_a_region_registered_later_needs_a_new_address(pair):
    """A `Peer` knows the regions of the address that it was made from, and no later ones."""
    writer, target = pair(refusals.write_to_latecomer, refusals.register_late)
    assert writer.value == {"before": ["memory"], "after": ["late", "memory"], "old": ["memory"]}
    assert target.value["wrong"] in (0, None)


def test_what_is_not_an_address_is_refused(job):
    """Bytes from elsewhere are a `TransferFailed`, never a crash and never a wait."""
    outcome = job({"lonely": (refusals.connect_to_garbage, {})})
    assert set(outcome.ranks["lonely"].value.values()) == {"TransferFailed"}
