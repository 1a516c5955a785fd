# SPDX-License-Identifier: Apache-2.0
"""Several peers at once, and connecting again."""

import pytest

from pdsim.testing import programs
from pdsim.testing.programs import KiB

pytestmark = pytest.mark.core


def test_one_rank_writes_to_several_at_once(job):
    """Transfers to different peers are independent of each other."""
    leaves = {f"leaf{i}": (programs.be_one_of_many, {"index": i, "size": 64 * KiB, "of": 3}) for i in range(3)}
    outcome = job({"hub": (programs.write_to_many, {"size": 64 * KiB}), **leaves})
    for name in leaves:
        assert outcome.ranks[name].value["payload"] == name
        assert outcome.ranks[name].value["wrong"] in (0, None)


def test_several_ranks_write_to_one_at_once(job):
    """A target takes writes of many into different parts of one region."""
    size = 64 * KiB
    leaves = {f"leaf{i}": (programs.write_to_hub, {"size": size, "seed": i, "offset": i * size}) for i in range(3)}
    outcome = job({"hub": (programs.be_hub, {"size": size}), **leaves})
    assert outcome.ranks["hub"].value["notified"] == [[name, name] for name in leaves]
    assert outcome.ranks["hub"].value["wrong"] in (0, None)


def test_connecting_again_gives_the_same_peer_and_both_work(job):
    """`connect` may be called again at any time, as for an address with newer regions."""
    outcome = job(
        {
            "writer": (programs.reconnect, {"to": "target", "times": 3}),
            "target": (programs.be_reconnected, {"by": "writer", "times": 3}),
        }
    )
    assert outcome.ranks["writer"].value == 1
    assert outcome.ranks["target"].value["surplus"] == 0
    assert outcome.ranks["target"].value["wrong"] in (0, None)


def test_what_is_not_an_address_is_refused(job):
    """Bytes from elsewhere are a `TransferFailed`, never a crash and never a wait."""
    outcome = job({"lonely": (programs.connect_to_garbage, {})})
    assert set(outcome.ranks["lonely"].value.values()) == {"TransferFailed"}
