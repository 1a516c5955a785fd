# SPDX-License-Identifier: Apache-2.0
"""Writes of a sequence follow one another; each is reported to its writer and notified to its peer."""

from itertools import pairwise

import pytest

from pdsim.testing import programs
from pdsim.testing.programs import KiB

pytestmark = pytest.mark.core

PARTS = {"count": 40, "size": 16 * KiB}


def test_every_batch_of_a_sequence_arrives_with_its_notification(job):
    """Bytes of all parts are there, and equal notifications count each of them, however many are delivered."""
    outcome = job(
        {
            "writer": (programs.write_in_sequence, {"to": "target", **PARTS}),
            "target": (programs.be_written_in_sequence, {"by": "writer", **PARTS}),
        }
    )
    written = {"written": [40, 40, 40], "nbytes": 40 * 16 * KiB, "failed": False}
    assert outcome.ranks["writer"].value == written
    assert outcome.ranks["target"].value["payloads"] == ["part"] * 40
    assert outcome.ranks["target"].value["surplus"] == 0
    assert outcome.ranks["target"].value["wrong"] in (0, None)


def test_the_writes_of_a_sequence_do_not_overlap(job):
    """The record of each says that it was posted when the one before was complete."""
    outcome = job(
        {
            "writer": (programs.write_in_sequence, {"to": "target", **PARTS}),
            "target": (programs.be_written_in_sequence, {"by": "writer", **PARTS}),
        }
    )
    records = list(outcome.ranks["writer"].transfers)
    assert [record.label for record in records] == ["parts"] * 40
    assert all(later.submitted >= earlier.completed for earlier, later in pairwise(records))


def test_the_write_under_way_is_the_last_of_a_stopped_sequence(job):
    """It succeeds with the number of writes that were made: one, of a sequence that is stopped at once."""
    outcome = job(
        {
            "writer": (programs.write_in_sequence, {"to": "target", **PARTS, "stop": True}),
            "target": (programs.be_written_in_sequence, {"by": "writer", "count": 1, "size": 40 * 16 * KiB}),
        }
    )
    assert outcome.ranks["writer"].value == {"written": [1, 1, 1], "nbytes": 16 * KiB, "failed": False}
    assert outcome.ranks["target"].value["payloads"] == ["part"]
    assert outcome.ranks["target"].value["surplus"] == 0
