# SPDX-License-Identifier: Apache-2.0
"""A notification arrives exactly once, after its transfer's bytes, whatever is in it."""

import pytest

from pdsim.testing.programs import moving
from pdsim.testing.programs.tools import KiB

pytestmark = pytest.mark.core

PAYLOADS = {
    "200 in turn": [f"number {i}".encode() for i in range(200)],
    # engines that carry notifications as text must escape them
    "any bytes": [b"\0", b"\0a\0\0b\0", b"a_b__c_", bytes(range(256)) * 5, b"\xff" * 70_000],
    "none": [b""],
}


@pytest.mark.parametrize("payloads", PAYLOADS.values(), ids=PAYLOADS)
def test_those_of_transfers_in_turn_arrive_in_order(pair, payloads):
    """Order is promised for transfers posted after each other's completion; an empty payload is none."""
    sent, expected = [payload.hex() for payload in payloads], [payload.hex() for payload in payloads if payload]
    _, target = pair(moving.notify_in_turn, moving.be_notified, payloads=sent, count=len(expected))
    assert target.value == {"payloads": expected, "surplus": 0, "early": 0}


def test_each_of_many_arrives_once_and_after_its_bytes(pair):
    _, target = pair(moving.notify_at_once, moving.be_notified, count=32, size=64 * KiB)
    result = target.value
    assert sorted(int(bytes.fromhex(payload)) for payload in result["payloads"]) == list(range(32))
    assert (result["surplus"], result["early"]) == (0, 0)


def test_it_names_its_sender(pair):
    _, target = pair(moving.write_blocks, moving.be_written, count=300, size=777, region=300 * KiB, seed=3)
    assert (target.value["from"], target.value["payload"]) == ("writer", "written")
