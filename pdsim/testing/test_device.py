# SPDX-License-Identifier: Apache-2.0
"""A device's memory is zeroed, limited and accounted for; its work is done in turn."""

import pytest

from pdsim.testing import programs

pytestmark = pytest.mark.not_in_guest


def test_memory_is_zeroed_limited_and_given_back(job):
    """A refused allocation must not count as used, and memory that was freed can be allocated again."""
    found = job({"lonely": (programs.use_memory, {})}).ranks["lonely"].value
    assert found.pop("zeroed") in (True, None)
    assert found == {
        "used": 4096,
        "too much": "OutOfMemory",
        "used after": 4096,
        "free of nothing": True,
        "used in the end": 0,
    }


def test_a_buffer_ends_where_it_ends(job):
    """Reads and writes past either end are an `IndexError`.

    A device without contents has a `TypeError` for all of them.
    """
    found = job({"lonely": (programs.touch_outside, {})}).ranks["lonely"].value
    assert found in (["IndexError"] * 4, ["TypeError"] * 4)


def test_a_copy_within_the_device_moves_exactly_its_blocks(job):
    """The gather of 100 scattered blocks touches no byte between them."""
    found = job({"lonely": (programs.copy_within, {"region": 64 << 10})}).ranks["lonely"].value
    assert found in (0, None)


def test_computations_are_served_in_turn(job):
    """Three computations that are asked for at once end after one, two and three times their length."""
    ends = job({"lonely": (programs.compute_in_turn, {})}).ranks["lonely"].value
    assert ends == sorted(ends)
    assert all(end >= count - 1e-9 for count, end in enumerate(ends, start=1))
    assert ends == pytest.approx([1, 2, 3], rel=0.5)
