"""A group gathers equal pieces in the order of its ranks, on plain and symmetric memory, and notices who is gone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance import programs
from tests.conformance.programs import KiB, MiB

NAMES = ("rank0", "rank1", "rank2")


def on_all(program: Any, names: tuple[str, ...] = NAMES, **arguments: Any) -> dict[str, Any]:
    return dict.fromkeys(names, (program, arguments))


def values(outcome: Any) -> list[Any]:
    return [rank.value for rank in outcome.ranks.values() if not rank.error]


def test_every_piece_arrives_at_its_place_and_nowhere_else(gathering):
    sizes = [1, 1000, 64 * KiB, 1 * MiB + 1]
    outcome = gathering(on_all(programs.gather_pieces, sizes=sizes, room=100))
    for found in values(outcome):
        for size, (count, nbytes, operation, kind) in zip(sizes, found, strict=True):
            assert count in (0, None)
            assert (nbytes, operation, kind) == (3 * size, "all_gather", "plain")


def test_every_gather_leaves_a_record_of_ordered_times(gathering):
    outcome = gathering(on_all(programs.gather_pieces, sizes=[1, 1000, 64 * KiB, 1 * MiB + 1], room=100))
    for rank in outcome.ranks.values():
        assert [record.label for record in rank.transfers] == [f"gather {n}" for n in range(4)]
        for record in rank.transfers:
            assert record.status == "ok"
            assert record.submitted <= record.prepared <= record.posted <= record.completed <= record.seen
            assert (record.source, record.target, record.descriptors) == ("rank0+rank1+rank2", rank.name, 3)


def test_a_rank_alone_gathers_its_own_piece(gathering):
    (found,) = values(gathering(on_all(programs.gather_pieces, ("lonely",), sizes=[1000], room=0)))
    assert found[0][0] in (0, None)


def test_a_symmetric_pool_is_reserved_used_and_grown(gathering):
    for found in values(gathering(on_all(programs.gather_symmetric, size=64 * KiB))):
        assert (found["early"], found["full"]) == ("OutOfMemory", "OutOfMemory")
        assert [kind for _, kind in found["found"]] == ["symmetric", "symmetric"]
        assert all(count in (0, None) for count, _ in found["found"])
        assert (found["growths"], found["stalled"]) == (1, True)
        assert found["reserved"] == 16 * 64 * KiB


def test_padded_pieces_of_any_batch_come_out_in_its_order(gathering):
    batches = [[9, 9], [1], [5, 0, 13], [64], [7, 300, 2, 41]]
    for found in values(gathering(on_all(programs.gather_batches, batches=batches, row=24))):
        assert all(count in (0, None) for count in found)
        assert len(found) == len(batches)


def test_sizes_that_differ_are_refused_everywhere_and_nothing_moves(gathering):
    sizes = {"rank0": 1024, "rank1": 1024, "rank2": 1023}
    for found in values(gathering(on_all(programs.gather_oddly, sizes=sizes))):
        assert found.pop("differs") == "InvalidBatch"
        assert found.pop("spared")
        assert found.pop("alike") == "ok"
        assert set(found.values()) == {"InvalidBatch"}


def test_a_rank_killed_among_gathers_is_lost_to_all_others(gathering):
    outcome = gathering(on_all(programs.gather_until_lost, size=1 * MiB), kill={"rank1": 2.5})
    assert len(values(outcome)) == 2
    for found in values(outcome):
        assert (found["error"], found["again"]) == ("PeerLost", "PeerLost")
        assert found["done"] > 0
        assert found["took"] < 15, "later than its deadline"
        assert found["used"] == 0


def test_a_rank_that_is_late_ends_the_wait_at_the_deadline(gathering):
    outcome = gathering(on_all(programs.gather_late, late="rank2", wait=3.0, timeout=1.0))
    errors = {name: rank.value["error"] for name, rank in outcome.ranks.items()}
    assert "TransferTimeout" in errors.values()
    assert set(errors.values()) <= {"TransferTimeout", "PeerLost"}
    assert all(rank.value["took"] < 6 for rank in outcome.ranks.values())


def test_a_rank_may_be_in_two_groups_or_in_none(gathering):
    groups = [["rank0", "rank1"], ["rank2", "rank0"]]
    names = (*NAMES, "rank3")
    found = values(gathering(on_all(programs.gather_in_two_groups, names, groups=groups)))
    first, second, third, none = found
    assert set(first) == {"rank0+rank1", "rank2+rank0", "again"}
    assert (set(second), set(third), none) == ({"rank0+rank1", "again"}, {"rank2+rank0", "again"}, {})
    assert all(value in (0, None, True) for one in found for value in one.values())


@pytest.mark.parametrize("names", [("rank0", "rank1")])
def test_a_group_names_ranks_that_there_are_once_and_its_caller(gathering, names):
    for found in values(gathering(on_all(programs.ask_for_strangers, names))):
        assert found == [True] * 4
