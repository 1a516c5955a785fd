# SPDX-License-Identifier: Apache-2.0
"""Requests that break a rule are refused before anything moves; only registered memory takes part."""

from pdsim.testing.programs import refusals
from pdsim.testing.programs.tools import be_target

SPARED = {"heard": [], "wrong": 0, "surplus": 0}


def test_bad_batches_are_refused_and_nothing_is_written(pair):
    """Each breaks one rule of `pdsim.transfer.Batch` or of `Endpoint.write`, and is refused before it is posted."""
    writer, target = pair(refusals.write_nonsense, be_target, region=refusals.SIZE)
    result = dict(writer.value)
    unknown_local = result.pop("unknown local region")
    assert unknown_local in ("InvalidBatch", "RegistrationError")  # never registered is also not registered any more
    assert result == dict.fromkeys(result, "InvalidBatch")
    assert target.value == SPARED


def test_names_and_buffers_are_registered_once(alone):
    assert alone(refusals.register_oddly) == {
        "name taken": "RegistrationError",
        "buffer taken": "RegistrationError",
        "freed while registered": "RegistrationError",
        "deregistered": "accepted",
        "deregistered again": "RegistrationError",
        "registered anew": "accepted",
        "used": 0,
    }


def test_a_withdrawn_region_cannot_be_written_from(pair):
    writer, target = pair(refusals.withdraw_own_region, be_target, region=refusals.SIZE)
    assert (writer.value, target.value) == ("RegistrationError", SPARED)


def test_a_region_that_the_peer_withdrew_cannot_be_written_to(pair):
    """The owner tells its peers, whose next write there fails; other regions of it stay usable."""
    writer, target = pair(refusals.write_to_withdrawn, refusals.withdraw)
    assert (writer.value, target.value) == (["ok", "TransferFailed", "ok"], 0)


def test_a_region_registered_later_needs_a_new_address(pair):
    writer, target = pair(refusals.write_to_latecomer, refusals.register_late)
    assert writer.value == {"before": ["memory"], "after": ["late", "memory"], "old": ["memory"]}
    assert target.value == 0


def test_what_is_not_an_address_is_refused(alone):
    """Bytes from elsewhere are a `TransferFailed`, never a crash and never a wait."""
    assert alone(refusals.connect_to_garbage) == ["TransferFailed"] * 4
