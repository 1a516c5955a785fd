# SPDX-License-Identifier: Apache-2.0
"""A group gathers equal pieces in the order of its ranks, on plain and symmetric memory, and notices who is gone."""

from typing import Any

import pytest

from pdsim.testing.programs.gathering import gather_everything, gather_late, gather_until_lost
from pdsim.testing.programs.tools import KiB, MiB

NAMES = ["rank0", "rank1", "rank2"]
SIZES = [1, 1000, 64 * KiB, 1 * MiB + 1]
BATCHES = [[9, 9], [1], [5, 0, 13], [64], [7, 300, 2, 41]]


def on_all(program: Any, ranks: list[str], **arguments: Any) -> dict[str, Any]:
    """Return a job in which all of *ranks* run *program* with the same arguments."""
    return dict.fromkeys(ranks, (program, arguments))


@pytest.fixture
def everything(gathering: Any) -> Any:
    """Run the one job that most tests look at: three ranks in a group, and a fourth in none."""
    return gathering(on_all(gather_everything, [*NAMES, "rank3"], names=NAMES, sizes=SIZES, batches=BATCHES))


@pytest.fixture
def members(everything: Any) -> list[dict[str, Any]]:
    """The value of each member of the group."""
    return [everything.ranks[name].value for name in NAMES]


def test_every_piece_arrives_at_its_place_and_nowhere_else(members):
    """The piece of rank *i* is the *i*-th of the target, and the bytes behind the last one stay as they were."""
    for result in members:
        assert result["pieces"] == [[0, 3 * size, "all_gather", "plain"] for size in SIZES]
        assert result["alone"][0][0] == 0  # a group of one is a copy, not an error


def test_every_gather_leaves_a_record_of_ordered_times(everything):
    """Each rank records each gather, with all ranks as its source and itself as its target."""
    for name in NAMES:
        records = [r for r in everything.ranks[name].transfers if r.label.endswith("of 3")]
        assert [record.label for record in records] == [f"gather {n} of 3" for n in range(len(SIZES))]
        for record in records:
            assert record.submitted <= record.prepared <= record.posted <= record.completed <= record.seen
            assert (record.source, record.target, record.descriptors) == ("rank0+rank1+rank2", name, 3)
            assert record.status == "ok"


def test_a_symmetric_pool_is_reserved_used_and_grown(members):
    """There is no symmetric memory before `reserve`; a later `reserve` is a growth, which stalls the ranks."""
    for result in members:
        assert result["symmetric"] == {
            "refused": ["OutOfMemory", "OutOfMemory"],
            "result": [[0, "symmetric"], [0, "symmetric"]],
            "growths": 1,
            "stalled": True,
            "reserved": 16 * 64 * KiB,
        }


def test_padded_pieces_of_any_batch_come_out_in_its_order(members):
    """`pdsim.kv.allgather` works on any group, ranks without a row included."""
    assert [result["batches"] for result in members] == [[0] * len(BATCHES)] * 3


def test_sizes_that_differ_are_refused_everywhere_and_nothing_moves(members):
    """One rank calls with another size: all of them must hear of it, and the next call must work."""
    for result in members:
        refused = dict.fromkeys(("differs", "nothing", "too much", "too small", "itself"), "InvalidBatch")
        assert result["oddly"] == refused | {"changed": 0, "alike": "ok"}


def test_a_rank_may_be_in_two_groups_or_in_none(everything, members):
    """Groups of the same job are independent of one another, and asking again for one gives the same object."""
    assert all(result["two"] == 0 and result["same"] for result in members)
    other = [r for r in everything.ranks["rank0"].transfers if r.source == "rank2+rank0"]
    assert [record.status for record in other] == ["ok"]
    assert (everything.ranks["rank3"].value, everything.ranks["rank3"].transfers) == ({}, [])


def test_a_group_names_ranks_that_there_are_once_and_its_caller(members):
    """Empty lists, strangers, duplicates and lists without the caller are refused."""
    assert all(result["strangers"] == [True] * 4 for result in members)


def test_what_was_taken_is_given_back_but_for_the_reserved_pool(members):
    """Buffers of a gather are held only until it is over."""
    assert members[0]["used"] == 0  # the model's ranks are on devices of their own, real ones in memory of their own


def test_a_rank_killed_among_gathers_is_lost_to_all_others(gathering):
    """The others fail with `PeerLost` in time, get their memory back, and fail at once when they call again."""
    arguments = {"names": NAMES, "victim": "rank1", "size": 1 * MiB}
    outcome = gathering(on_all(gather_until_lost, NAMES, **arguments), failing=["rank1"])
    for name in ("rank0", "rank2"):
        result = outcome.ranks[name].value
        assert result.pop("took") < 30, "later than half of its deadline"
        assert result == {"errors": ["PeerLost", "PeerLost"], "done": 5, "used": 0}
        assert outcome.ranks[name].transfers[-1].status == "PeerLost"


def test_a_rank_that_is_late_ends_the_wait_at_the_deadline(gathering):
    """A collective that cannot be completed ends the group on every rank."""
    arguments = {"names": NAMES, "late": "rank2", "wait": 3.0, "timeout": 1.0}
    outcome = gathering(on_all(gather_late, NAMES, **arguments))
    errors = {rank.value["error"] for rank in outcome.ranks.values()}
    assert {"TransferTimeout"} <= errors <= {"TransferTimeout", "PeerLost"}
    assert all(rank.value["took"] < 10 for rank in outcome.ranks.values())
