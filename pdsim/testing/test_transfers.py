# SPDX-License-Identifier: Apache-2.0
"""Bytes arrive intact, and only where they were sent; the record of a transfer says what it was."""

from itertools import pairwise

import pytest

from pdsim.testing.programs import living, moving
from pdsim.testing.programs.tools import KiB, MiB

pytestmark = pytest.mark.core

ODD = {"count": 300, "size": 777, "region": 300 * KiB}
PARTS = {"count": 40, "size": 16 * KiB}
SHAPES = [
    pytest.param({"count": 1, "size": 1, "region": 4096}, id="one byte"),
    pytest.param({"count": 1, "size": 4 * KiB, "region": 64 * KiB}, id="one page"),
    pytest.param(ODD, id="odd blocks"),
    pytest.param({"count": 10_000, "size": 100, "region": 2 * MiB}, id="10000 blocks"),
    pytest.param({"count": 1, "size": 64 * MiB, "region": 64 * MiB + 4096}, id="64 MiB"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_write_changes_what_it_was_sent_to_and_nothing_else(pair, shape):
    """Every byte of the target region is compared, guard bytes between the blocks included.

    Offsets that are mixed up, rounded sizes and a wrong order of descriptors show here.
    """
    _, target = pair(moving.write_blocks, moving.be_written, **shape, seed=3)
    assert target.value["wrong"] in (0, None)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_read_fetches_what_was_asked_for_and_nothing_else(pair, shape):
    """The same for reads, whose bytes flow the other way; the source must stay as it was."""
    reader, target = pair(moving.read_blocks, moving.be_read, **shape, seed=4)
    assert reader.value["wrong"] in (0, None)
    assert target.value["wrong"] in (0, None), "a read changed its source"


def test_transfers_in_both_directions_may_overlap(job):
    """Two ranks write to each other at the same time, several transfers each."""
    common = {"count": 8, "size": 256 * KiB}
    outcome = job(
        {
            "a": (moving.cross_writes, {"peer": "b", "seed": 1, "other": 2, **common}),
            "b": (moving.cross_writes, {"peer": "a", "seed": 2, "other": 1, **common}),
        }
    )
    assert [outcome.ranks[name].value["wrong"] for name in "ab"] in ([0, 0], [None, None])


# --- records -------------------------------------------------------------------------------------------------------


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


def test_the_recorder_has_every_transfer_and_the_rank_names_its_engine(pair):
    """The initiator records; the target, which has no part in it, does not."""
    writer, target = pair(moving.write_in_sequence, moving.be_written_in_sequence, **PARTS)
    assert len(writer.transfers) == PARTS["count"]
    assert {record.engine for record in writer.transfers} == {writer.engine}
    assert not target.transfers


def test_a_read_flows_from_the_peer(pair):
    """Source and target of a record are where bytes come from and go to, whoever posts."""
    reader, _ = pair(moving.read_blocks, moving.be_read, **ODD, seed=4)
    assert reader.value["operation"] == "read"
    assert reader.value["route"] == ["target", "writer"]


# --- sequences -----------------------------------------------------------------------------------------------------


def test_every_batch_of_a_sequence_arrives_with_its_notification(pair):
    """Bytes of all parts are there, and equal notifications count each of them, however many are delivered."""
    writer, target = pair(moving.write_in_sequence, moving.be_written_in_sequence, **PARTS)
    assert writer.value == {"written": [40, 40, 40], "nbytes": 40 * 16 * KiB, "failed": False}
    assert target.value["payloads"] == ["part"] * 40
    assert target.value["surplus"] == 0
    assert target.value["wrong"] in (0, None)


def test_the_writes_of_a_sequence_do_not_overlap(pair):
    """The record of each says that it was posted when the one before was complete."""
    writer, _ = pair(moving.write_in_sequence, moving.be_written_in_sequence, **PARTS)
    records = list(writer.transfers)
    assert [record.label for record in records] == ["parts"] * 40
    assert all(later.submitted >= earlier.completed for earlier, later in pairwise(records))


def test_the_write_under_way_is_the_last_of_a_stopped_sequence(pair):
    """It succeeds with the number of writes that were made: one, of a sequence that is stopped at once."""
    writer, target = pair(moving.write_in_sequence, moving.be_written_in_sequence, **PARTS, stop=True)
    assert writer.value == {"written": [1, 1, 1], "nbytes": 16 * KiB, "failed": False}
    assert target.value["payloads"] == ["part"]
    assert target.value["surplus"] == 0


# --- several peers -------------------------------------------------------------------------------------------------


def test_one_rank_writes_to_several_at_once(job):
    """Transfers to different peers are independent of each other."""
    size = 64 * KiB
    leaves = {
        f"leaf{i}": (moving.be_one_of_many, {"by": "hub", "index": i, "size": size, "of": 3}) for i in range(3)
    }
    outcome = job({"hub": (moving.write_to_many, {"size": size}), **leaves})
    for name in leaves:
        assert outcome.ranks[name].value["payload"] == name
        assert outcome.ranks[name].value["wrong"] in (0, None)


def test_several_ranks_write_to_one_at_once(job):
    """A target takes writes of many into different parts of one region."""
    size = 64 * KiB
    common = {"to": "hub", "size": size}
    leaves = {f"leaf{i}": (moving.write_to_hub, {**common, "seed": i, "offset": i * size}) for i in range(3)}
    outcome = job({"hub": (moving.be_hub, {"size": size}), **leaves})
    assert outcome.ranks["hub"].value["notified"] == [[name, name] for name in leaves]
    assert outcome.ranks["hub"].value["wrong"] in (0, None)


def test_connecting_again_gives_the_same_peer_and_both_work(pair):
    """`connect` may be called again at any time, as for an address with newer regions."""
    writer, target = pair(living.reconnect, living.be_reconnected, times=3)
    assert writer.value == 1
    assert target.value["surplus"] == 0
    assert target.value["wrong"] in (0, None)
