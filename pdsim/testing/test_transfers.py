# SPDX-License-Identifier: Apache-2.0
"""Bytes arrive intact, and only where they were sent, and each notification once, after its transfer's bytes."""

from itertools import pairwise
from typing import Any

import pytest

from pdsim.testing.programs import living, moving
from pdsim.testing.programs.tools import KiB, MiB, be_target

ODD = {"count": 300, "size": 777, "region": 300 * KiB}
SHAPES = {
    "one byte": {"count": 1, "size": 1, "region": 4096},
    "odd blocks": ODD,
    "10000 blocks": {"count": 10_000, "size": 100, "region": 2 * MiB},
    "64 MiB": {"count": 1, "size": 64 * MiB, "region": 64 * MiB + 4096},
}
INTACT = {"wrong": 0, "surplus": 0}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_write_changes_what_it_was_sent_to_and_nothing_else(pair, shape):
    """Every byte of the target region is compared, guard bytes between the blocks included."""
    holds = ["moved", *shape.values(), 3]
    writer, target = pair(moving.write_blocks, be_target, **shape, seed=3, holds=holds, notes=1)
    assert target.value == {"heard": [["writer", b"written".hex()]], **INTACT}
    assert writer.value == {
        "operation": "write",
        "route": ["writer", "target"],
        "missing": 0,
        "descriptors": shape["count"],
        "ordered": True,
        "status": "ok",
        "label": "blocks",
        "quarantined": 0,
    }


@pytest.mark.parametrize("shape", [*SHAPES.values()][1:], ids=[*SHAPES][1:])
def test_a_read_fetches_what_was_asked_for_and_nothing_else(pair, shape):
    """Source and target of its record are where bytes come from and go to, whoever posts."""
    holds = ["pattern", 4, shape["region"]]
    reader, target = pair(moving.read_blocks, be_target, **shape, seed=4, fill=4, holds=holds)
    assert reader.value == {"operation": "read", "route": ["target", "writer"], "wrong": 0}
    assert target.value == {"heard": [], **INTACT}, "a read changed its source"


def test_transfers_in_both_directions_may_overlap(job):
    common = {"count": 8, "size": 256 * KiB}
    outcome = job(
        {
            "a": (moving.cross_writes, {"peer": "b", "seed": 1, "other": 2, **common}),
            "b": (moving.cross_writes, {"peer": "a", "seed": 2, "other": 1, **common}),
        }
    )
    assert [outcome.ranks[name].value for name in "ab"] == [0, 0]


@pytest.mark.parametrize(("stop", "times"), [(False, 40), (True, 1)])
def test_a_sequence_writes_every_batch_in_turn_until_it_is_stopped(pair, stop, times):
    """Equal notifications count each of them; none is posted before the last is complete, as the records say."""
    size, region = 16 * KiB, 40 * 16 * KiB
    target = {"region": region, "holds": ["begun", 2, times * size, region], "notes": times}
    writer, target = pair(moving.write_in_sequence, be_target, count=40, size=size, stop=stop, **target)
    assert writer.value == {"written": [times] * 3, "nbytes": times * size, "failed": False}
    assert target.value == {"heard": [["writer", b"part".hex()]] * times, **INTACT}
    records = sorted(writer.transfers, key=lambda record: record.submitted)
    assert [(record.label, record.engine) for record in records] == [("parts", writer.engine)] * times
    assert all(later.submitted >= earlier.completed for earlier, later in pairwise(records))
    assert not target.transfers


def test_one_rank_writes_to_several_at_once(job):
    size = 64 * KiB
    ranks: dict[str, Any] = {"hub": (moving.write_to_many, {"size": size})}
    for i in range(3):
        holds = ["pattern", 5, size, i * size]
        ranks[f"leaf{i}"] = be_target, {"by": "hub", "region": size, "holds": holds, "notes": 1}
    outcome = job(ranks)
    for i in range(3):
        assert outcome.ranks[f"leaf{i}"].value == {"heard": [["hub", f"leaf{i}".encode().hex()]], **INTACT}


def test_several_ranks_write_to_one_at_once(job):
    size = 64 * KiB
    common = {"to": "hub", "size": size}
    leaves = {f"leaf{i}": (moving.write_to_hub, {**common, "seed": i, "offset": i * size}) for i in range(3)}
    outcome = job({"hub": (moving.be_hub, {"size": size}), **leaves})
    assert outcome.ranks["hub"].value == {"heard": [[name, name] for name in leaves], "wrong": 0}


def test_connecting_again_gives_the_same_peer_and_both_work(pair):
    holds = ["pattern", 1, 64 * 3]
    writer, target = pair(living.reconnect, be_target, times=3, region=64 * 3, holds=holds, notes=3)
    assert writer.value == 1
    assert target.value == {"heard": [["writer", b"again".hex()]] * 3, **INTACT}


PAYLOADS = {
    "200 in turn": [f"number {i}".encode() for i in range(200)],
    # engines that carry notifications as text must escape them
    "any bytes": [b"\0", b"\0a\0\0b\0", b"a_b__c_", bytes(range(256)) * 5, b"\xff" * 70_000],
    "none": [b""],
}


@pytest.mark.parametrize("payloads", PAYLOADS.values(), ids=PAYLOADS)
def test_those_of_transfers_in_turn_arrive_in_order(pair, payloads):
    """Order is promised for transfers posted after each other's completion; an empty payload is none."""
    sent = [payload.hex() for payload in payloads]
    heard = [["writer", payload] for payload in sent if payload]
    holds = ["pattern", 1, 64]
    _, target = pair(moving.notify_in_turn, be_target, payloads=sent, region=64, holds=holds, notes=len(heard))
    assert target.value == {"heard": heard, **INTACT}


def test_each_of_many_arrives_once_and_after_its_bytes(pair):
    _, target = pair(moving.notify_at_once, moving.be_notified, count=32, size=64 * KiB)
    assert target.value == {"numbers": list(range(32)), "surplus": 0, "early": 0}
