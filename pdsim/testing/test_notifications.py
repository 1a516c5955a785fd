# SPDX-License-Identifier: Apache-2.0
"""A notification arrives exactly once, after its transfer's bytes, whatever is in it."""

import pytest

from pdsim.testing.programs import moving
from pdsim.testing.programs.tools import KiB

pytestmark = pytest.mark.core

ANY = [b"\0", b"\0a\0\0b\0", b"a_b__c_", bytes(range(256)) * 5, b"\xff" * 70_000]


@pytest.mark.parametrize(
    "payloads", [[f"number {i}".encode() for i in range(200)], ANY], ids=["200 in turn", "any bytes"]
)
def test_those_of_transfers_in_turn_arrive_in_order(job, payloads):
    """Order is promised for transfers that are posted after each other's completion.

    Engines that carry notifications as text must escape them: zero bytes, separators and 70 kB pass.
    """
    texts = [payload.hex() for payload in payloads]
    outcome = job(
        {
            "writer": (moving.notify_in_turn, {"to": "target", "payloads": texts}),
            "target": (moving.be_notified, {"by": "writer", "count": len(texts)}),
        }
    )
    assert outcome.ranks["target"].value == {"payloads": texts, "surplus": 0, "early": 0}


def test_each_of_many_arrives_once_and_after_its_bytes(pair):
    """When a notification is there, so are the bytes of its transfer: a receiver reads them without waiting."""
    _, target = pair(moving.notify_at_once, moving.be_notified, count=32, size=64 * KiB)
    result = target.value
    assert sorted(int(bytes.fromhex(payload)) for payload in result["payloads"]) == list(range(32))
    assert (result["surplus"], result["early"]) == (0, 0)


def test_a_write_without_one_sends_none(job):
    """An empty payload means no notification, not an empty one."""
    outcome = job(
        {
            "writer": (moving.notify_in_turn, {"to": "target", "payloads": [""]}),
            "target": (moving.be_notified, {"by": "writer", "count": 0}),
        }
    )
    assert outcome.ranks["target"].value == {"payloads": [], "surplus": 0, "early": 0}


def test_it_names_its_sender(pair):
    """The sender is the rank, by the name that the job has for it."""
    _, target = pair(moving.write_blocks, moving.be_written, count=300, size=777, region=300 * KiB, seed=3)
    assert (target.value["from"], target.value["payload"]) == ("writer", "written")
