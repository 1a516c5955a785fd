# SPDX-License-Identifier: Apache-2.0
"""Bytes arrive intact, and only where they were sent; the record of a transfer says what it was."""

from itertools import pairwise

import pytest

from pdsim.testing.programs import living, moving
from pdsim.testing.programs.tools import KiB, MiB

pytestmark = pytest.mark.core

ODD = {"count": 300, "size": 777, "region": 300 * KiB}
PARTS = {"count": 40, "size": 16 * KiB}
SHAPES = {
    "one byte": {"count": 1, "size": 1, "region": 4096},
    "one page": {"count": 1, "size": 4 * KiB, "region": 64 * KiB},
    "odd blocks": ODD,
    "10000 blocks": {"count": 10_000, "size": 100, "region": 2 * MiB},
    "64 MiB": {"count": 1, "size": 64 * MiB, "region": 64 * MiB + 4096},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_write_changes_what_it_was_sent_to_and_nothing_else(pair, shape):
    """Every byte of the target region is compared, guard bytes between the blocks included."""
    _, target = pair(moving.write_blocks, moving.be_written, **shape, seed=3)
    assert target.value["wrong"] in (0, None)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_read_fetches_what_was_asked_for_and_nothing_else(pair, shape):
    """Source and target of its record are where bytes come from and go to, whoever posts."""
    reader, target = pair(moving.read_blocks, moving.be_read, **shape, seed=4)
    assert (reader.value["operation"], reader.value["route"]) == ("read", ["target", "writer"])
    assert reader.value["wrong"] in (0, None)
    assert target.value["wrong"] in (0, None), "a read changed its source"


def test_transfers_in_both_directions_may_overlap(job):
    common = {"count": 8, "size": 256 * KiB}
    outcome = job(
        {
            "a": (moving.cross_writes, {"peer": "b", "seed": 1, "other": 2, **common}),
            "b": (moving.cross_writes, {"peer": "a", "seed": 2, "other": 1, **common}),
        }
    )
    assert [outcome.ranks[name].value["wrong"] for name in "ab"] in ([0, 0], [None, None])


def test_the_record_describes_the_transfer(pair):
    """Bytes, descriptors, route and label are those of the call, and the five times ascend."""
    writer, _ = pair(moving.write_blocks, moving.be_written, **ODD, seed=3)
    result = dict(writer.value)
    assert result.pop("nbytes") == result.pop("expected")
    assert result == {
        "operation": "write",
        "route": ["writer", "target"],
        "descriptors": 300,
        "ordered": True,
        "status": "ok",
        "label": "blocks",
        "quarantined": 0,
    }


def test_a_sequence_writes_every_batch_in_turn(pair):
    """Equal notifications count each of them; none is posted before the last is complete, as the records say."""
    writer, target = pair(moving.write_in_sequence, moving.be_written_in_sequence, **PARTS)
    assert writer.value == {"written": [40, 40, 40], "nbytes": 40 * 16 * KiB, "failed": False}
    assert target.value["wrong"] in (0, None)
    assert (target.value["payloads"], target.value["surplus"]) == (["part"] * 40, 0)
    records = list(writer.transfers)
    assert [(record.label, record.engine) for record in records] == [("parts", writer.engine)] * 40
    assert all(later.submitted >= earlier.completed for earlier, later in pairwise(records))
    assert not target.transfers


def test_the_write_under_way_is_the_last_of_a_stopped_sequence(pair):
    writer, target = pair(moving.write_in_sequence, moving.be_written_in_sequence, **PARTS, stop=True)
    assert writer.value == {"written": [1, 1, 1], "nbytes": 16 * KiB, "failed": False}
    assert (target.value["payloads"], target.value["surplus"]) == (["part"], 0)


def test_one_rank_writes_to_several_at_once(job):
    size = 64 * KiB
    leaves = {
        f"leaf{i}": (moving.be_one_of_many, {"by": "hub", "index": i, "size": size, "of": 3}) for i in range(3)
    }
    outcome = job({"hub": (moving.write_to_many, {"size": size}), **leaves})
    for name in leaves:
        assert outcome.ranks[name].value["payload"] == name
        assert outcome.ranks[name].value["wrong"] in (0, None)


def test_several_ranks_write_to_one_at_once(job):
    size = 64 * KiB
    common = {"to": "hub", "size": size}
    leaves = {f"leaf{i}": (moving.write_to_hub, {**common, "seed": i, "offset": i * size}) for i in range(3)}
    outcome = job({"hub": (moving.be_hub, {"size": size}), **leaves})
    assert outcome.ranks["hub"].value["notified"] == [[name, name] for name in leaves]
    assert outcome.ranks["hub"].value["wrong"] in (0, None)


def test_connecting_again_gives_the_same_peer_and_both_work(pair):
    writer, target = pair(living.reconnect, living.be_reconnected, times=3)
    assert writer.value == 1
    assert target.value in ({"wrong": 0, "surplus": 0}, {"wrong": None, "surplus": 0})
