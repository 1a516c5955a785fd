# SPDX-License-Identifier: Apache-2.0
"""A notification arrives exactly once, after its transfer's bytes, whatever is in it."""

import pytest

from pdsim.testing import programs
from pdsim.testing.programs import KiB

pytestmark = pytest.mark.core


def run(job, payloads):
    """Have one rank write once for each payload; return the payloads that arrived."""
    outcome = job(
        {
            "writer": (programs.notify_in_turn, {"to": "target", "payloads": [p.hex() for p in payloads]}),
            "target": (programs.be_notified, {"by": "writer", "count": len(payloads)}),
        }
    )
    found = outcome.ranks["target"].value
    assert found["surplus"] == 0
    return [bytes.fromhex(payload) for payload in found["payloads"]]


def test_those_of_transfers_in_turn_arrive_in_order(job):
    """Order is promised for transfers that are posted after each other's completion."""
    payloads = [f"number {i}".encode() for i in range(200)]
    assert run(job, payloads) == payloads


PAYLOADS = {
    "zero": b"\0",
    "zeros inside": b"\0a\0\0b\0",
    "underscores": b"a_b__c_",
    "every byte, 1280 of them": bytes(range(256)) * 5,
    "70000 bytes": b"\xff" * 70_000,
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_any_bytes_may_be_in_it(job, name):
    """Engines that carry notifications as text must escape them: zero bytes, separators and 70 kB pass."""
    found = run(job, list(PAYLOADS.values()))
    assert found[list(PAYLOADS).index(name)] == PAYLOADS[name]


def test_each_of_many_at_once_arrives_once_and_after_its_own_bytes(job):
    """When a notification is there, so are the bytes of its transfer: a receiver reads them without waiting."""
    shape = {"count": 32, "size": 64 * KiB}
    outcome = job(
        {
            "writer": (programs.notify_at_once, {"to": "target", **shape}),
            "target": (programs.be_notified, {"by": "writer", **shape}),
        }
    )
    found = outcome.ranks["target"].value
    assert sorted(int(bytes.fromhex(payload)) for payload in found["payloads"]) == list(range(32))
    assert found["surplus"] == 0
    assert found["early"] == 0


def test_a_write_without_one_sends_none(job):
    """An empty payload means no notification, not an empty one."""
    outcome = job(
        {
            "writer": (programs.write_silently, {"to": "target"}),
            "target": (programs.be_notified, {"by": "writer", "count": 0}),
        }
    )
    assert outcome.ranks["target"].value == {"payloads": [], "surplus": 0, "early": 0}


def test_it_names_its_sender(job):
    """The sender is the rank, by the name that the job has for it."""
    shape = {"count": 300, "size": 777, "region": 300 * KiB, "seed": 3}
    outcome = job(
        {
            "writer": (programs.write_blocks, {"to": "target", **shape}),
            "target": (programs.be_written, {"by": "writer", **shape}),
        }
    )
    assert outcome.ranks["target"].value["from"] == "writer"
    assert outcome.ranks["target"].value["payload"] == "written"
