# SPDX-License-Identifier: Apache-2.0
"""A transfer's record says what it was, and its times are in order."""

import pytest

from pdsim.testing import programs
from pdsim.testing.programs import KiB

pytestmark = pytest.mark.core


def test_the_record_describes_the_transfer(job):
    """Bytes, descriptors, route and label are those of the call, and the five times ascend."""
    shape = {"count": 300, "size": 777, "region": 300 * KiB, "seed": 3}
    outcome = job(
        {
            "writer": (programs.write_blocks, {"to": "target", **shape}),
            "target": (programs.be_written, {"by": "writer", **shape}),
        }
    )
    found = outcome.ranks["writer"].value
    assert found.pop("nbytes") == found.pop("expected")
    assert found == {
        "operation": "write",
        "route": ["writer", "target"],
        "descriptors": 300,
        "ordered": True,
        "status": "ok",
        "label": "blocks",
        "quarantined": 0,
    }


def test_the_recorder_has_every_transfer_and_the_rank_names_its_engine(job):
    """The initiator records; the target, which has no part in it, does not."""
    payloads = [f"number {i}".encode().hex() for i in range(200)]
    outcome = job(
        {
            "writer": (programs.notify_in_turn, {"to": "target", "payloads": payloads}),
            "target": (programs.be_notified, {"by": "writer", "count": 200}),
        }
    )
    records = outcome.ranks["writer"].transfers
    assert len(records) == 200
    assert {record.engine for record in records} == {outcome.ranks["writer"].engine}
    assert not outcome.ranks["target"].transfers


def test_a_read_flows_from_the_peer(job):
    """Source and target of a record are where bytes come from and go to, whoever posts."""
    shape = {"count": 300, "size": 777, "region": 300 * KiB, "seed": 4}
    outcome = job(
        {
            "reader": (programs.read_blocks, {"of": "target", **shape}),
            "target": (programs.be_read, {"by": "reader", "region": 300 * KiB, "seed": 4}),
        }
    )
    assert outcome.ranks["reader"].value["operation"] == "read"
    assert outcome.ranks["reader"].value["route"] == ["target", "reader"]
