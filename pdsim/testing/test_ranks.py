# SPDX-License-Identifier: Apache-2.0
"""Channels keep order, devices account for memory and work in turn, and closing releases all."""

import pytest

from pdsim.testing.programs import living


@pytest.mark.core
def test_closing_twice_releases_everything(job):
    """After `close` no buffer counts as registered, and nothing can be registered any more."""
    outcome = job({"a": (living.close_twice, {"peer": "b"}), "b": (living.close_twice, {"peer": "a"})})
    for name in "ab":
        assert outcome.ranks[name].value == {"used": 0, "after close": "RegistrationError"}


@pytest.mark.not_in_guest
def test_messages_of_each_sender_keep_their_order(job):
    """Order is promised from one sender to one receiver only, whatever comes from others in between."""
    outcome = job(
        {
            "a": (living.send_numbers, {"to": ["c", "d"], "count": 500}),
            "b": (living.send_numbers, {"to": ["d", "c"], "count": 500}),
            "c": (living.receive_numbers, {"senders": ["a", "b"], "count": 500}),
            "d": (living.receive_numbers, {"senders": ["a", "b"], "count": 500}),
        }
    )
    for name in "cd":
        assert outcome.ranks[name].value == {"a": list(range(500)), "b": list(range(500))}


@pytest.mark.not_in_guest
def test_any_bytes_and_large_messages_pass(job):
    """Empty messages, zero bytes and 16 MiB come back as they were sent."""
    outcome = job({"a": (living.echo, {"to": "b", "size": 16 << 20}), "b": (living.send_back, {"count": 6})})
    assert outcome.ranks["a"].value == [True] * 6


def alone(job, program, **arguments):
    """Return what *program* says, run by the only rank of a job."""
    return job({"lonely": (program, arguments)}).ranks["lonely"].value


@pytest.mark.not_in_guest
def test_an_unknown_rank_is_a_key_error(job):
    """A typing mistake in a rank's name must not be a message that is lost."""
    assert alone(job, living.send_to_nobody) is True


@pytest.mark.not_in_guest
def test_memory_is_zeroed_limited_and_given_back(job):
    """A refused allocation must not count as used, and memory that was freed can be allocated again."""
    result = dict(alone(job, living.use_memory))
    assert result.pop("zeroed") in (True, None)
    assert result == {
        "used": 4096,
        "too much": "OutOfMemory",
        "used after": 4096,
        "nothing": "refused",
        "used in the end": 0,
    }


@pytest.mark.not_in_guest
def test_a_buffer_ends_where_it_ends(job):
    """Reads and writes past either end are an `IndexError`.

    A device without contents has a `TypeError` for all of them.
    """
    assert alone(job, living.touch_outside) in (["IndexError"] * 4, ["TypeError"] * 4)


@pytest.mark.not_in_guest
def test_a_copy_within_the_device_moves_exactly_its_blocks(job):
    """The gather of 100 scattered blocks touches no byte between them."""
    assert alone(job, living.copy_within, region=64 << 10) in (0, None)


@pytest.mark.not_in_guest
def test_computations_are_served_in_turn(job):
    """Three computations that are asked for at once end after one, two and three times their length."""
    ends = alone(job, living.compute_in_turn)
    assert ends == sorted(ends)
    assert all(end >= count - 1e-9 for count, end in enumerate(ends, start=1))
    assert ends == pytest.approx([1, 2, 3], rel=0.5)
