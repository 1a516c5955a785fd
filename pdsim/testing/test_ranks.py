# SPDX-License-Identifier: Apache-2.0
"""Channels keep order, devices account for memory and work in turn, and closing releases all."""

from typing import Any

import pytest

from pdsim.testing.programs import living


def test_closing_twice_releases_everything(job):
    outcome = job({"a": (living.close_twice, {"peer": "b"}), "b": (living.close_twice, {"peer": "a"})})
    for name in "ab":
        assert outcome.ranks[name].value == {"used": 0, "after close": "RegistrationError"}


@pytest.mark.not_in_guest
def test_messages_of_each_sender_keep_their_order(job):
    """Order is promised from one sender to one receiver only, whatever comes from others in between."""
    talk = {"a": ["c", "d"], "b": ["d", "c"]}
    ranks: dict[str, Any] = {name: (living.send_numbers, {"to": to, "count": 500}) for name, to in talk.items()}
    ranks |= {name: (living.receive_numbers, {"senders": ["a", "b"], "count": 500}) for name in "cd"}
    outcome = job(ranks)
    for name in "cd":
        assert outcome.ranks[name].value == {"a": list(range(500)), "b": list(range(500))}


@pytest.mark.not_in_guest
def test_any_bytes_and_large_messages_pass(pair):
    """Empty messages, zero bytes and 16 MiB come back as they were sent."""
    writer, _ = pair(living.echo, living.send_back, size=16 << 20, count=6)
    assert writer.value == [True] * 6


@pytest.mark.not_in_guest
def test_an_unknown_rank_is_a_key_error(alone):
    assert alone(living.send_to_nobody) is True


@pytest.mark.not_in_guest
def test_memory_is_zeroed_limited_and_given_back(alone):
    """A refused allocation must not count as used, and memory that was freed can be allocated again."""
    assert alone(living.use_memory) == {
        "used": 4096,
        "zeroed": True,
        "too much": "OutOfMemory",
        "used after": 4096,
        "nothing": "refused",
        "used in the end": 0,
    }


@pytest.mark.not_in_guest
def test_a_buffer_ends_where_it_ends(alone):
    """Reads and writes past either end are an `IndexError`, or a `TypeError` on a device without contents."""
    assert alone(living.touch_outside) in (["IndexError"] * 4, ["TypeError"] * 4)


@pytest.mark.not_in_guest
def test_a_copy_within_the_device_moves_exactly_its_blocks(alone):
    assert alone(living.copy_within, region=64 << 10) == 0


@pytest.mark.not_in_guest
def test_computations_are_served_in_turn(alone):
    """Three computations that are asked for at once end after one, two and three times their length."""
    ends = alone(living.compute_in_turn)
    assert ends == sorted(ends)
    assert all(end >= count - 1e-9 for count, end in enumerate(ends, start=1))
    assert ends == pytest.approx([1, 2, 3], rel=0.5)
