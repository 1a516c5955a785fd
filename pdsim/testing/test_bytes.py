# SPDX-License-Identifier: Apache-2.0
"""Bytes arrive intact, and only where they were sent."""

import pytest

from pdsim.testing import programs
from pdsim.testing.programs import KiB, MiB

pytestmark = pytest.mark.core

SHAPES = [
    pytest.param({"count": 1, "size": 1, "region": 4096}, id="one byte"),
    pytest.param({"count": 1, "size": 4 * KiB, "region": 64 * KiB}, id="one page"),
    pytest.param({"count": 300, "size": 777, "region": 300 * KiB}, id="odd blocks"),
    pytest.param({"count": 10_000, "size": 100, "region": 2 * MiB}, id="10000 blocks"),
    pytest.param({"count": 1, "size": 64 * MiB, "region": 64 * MiB + 4096}, id="64 MiB"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_write_changes_what_it_was_sent_to_and_nothing_else(job, shape):
    """Every byte of the target region is compared, guard bytes between the blocks included.

    Offsets that are mixed up, rounded sizes and a wrong order of descriptors show here.
    """
    shape = {**shape, "seed": 3}
    outcome = job(
        {
            "writer": (programs.write_blocks, {"to": "target", **shape}),
            "target": (programs.be_written, {"by": "writer", **shape}),
        }
    )
    assert outcome.ranks["target"].value["wrong"] in (0, None)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_read_fetches_what_was_asked_for_and_nothing_else(job, shape):
    """The same for reads, whose bytes flow the other way; the source must stay as it was."""
    shape = {**shape, "seed": 4}
    outcome = job(
        {
            "reader": (programs.read_blocks, {"of": "target", **shape}),
            "target": (programs.be_read, {"by": "reader", "region": shape["region"], "seed": 4}),
        }
    )
    assert outcome.ranks["reader"].value["wrong"] in (0, None)
    assert outcome.ranks["target"].value["wrong"] in (0, None), "a read changed its source"


def test_transfers_in_both_directions_may_overlap(job):
    """Two ranks write to each other at the same time, several transfers each."""
    common = {"count": 8, "size": 256 * KiB}
    outcome = job(
        {
            "a": (programs.cross_writes, {"peer": "b", "seed": 1, "other": 2, **common}),
            "b": (programs.cross_writes, {"peer": "a", "seed": 2, "other": 1, **common}),
        }
    )
    assert [outcome.ranks[name].value["wrong"] for name in "ab"] in ([0, 0], [None, None])
