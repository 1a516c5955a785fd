# SPDX-License-Identifier: Apache-2.0
"""Control messages keep their order from one rank to another, and their bytes."""

import pytest

from pdsim.testing import programs

pytestmark = pytest.mark.not_in_guest


def test_messages_of_each_sender_keep_their_order(job):
    """Order is promised from one sender to one receiver only, whatever comes from others in between."""
    outcome = job(
        {
            "a": (programs.send_numbers, {"to": ["c", "d"], "count": 500}),
            "b": (programs.send_numbers, {"to": ["d", "c"], "count": 500}),
            "c": (programs.receive_numbers, {"senders": ["a", "b"], "count": 500}),
            "d": (programs.receive_numbers, {"senders": ["a", "b"], "count": 500}),
        }
    )
    for name in "cd":
        assert outcome.ranks[name].value == {"a": list(range(500)), "b": list(range(500))}


def test_any_bytes_and_large_messages_pass(job):
    """Empty messages, zero bytes and 16 MiB come back as they were sent."""
    size = 16 << 20
    outcome = job({"a": (programs.echo, {"to": "b", "size": size}), "b": (programs.send_back, {"count": 6})})
    assert outcome.ranks["a"].value == [True] * 6


def test_an_unknown_rank_is_a_key_error(job):
    """A typing mistake in a rank's name must not be a message that is lost."""
    assert job({"lonely": (programs.send_to_nobody, {})}).ranks["lonely"].value is True
