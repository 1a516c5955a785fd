"""One status for a room out of those of its ranks: any failure fails all, success needs all, and neither changes."""

import pytest

from pdsim.kv.rooms import Consensus, Status


def test_a_room_succeeds_when_every_rank_has_said_so_once():
    room = Consensus(3)
    assert [room.succeed(rank) for rank in (0, 2, 2, 0, 1)] == [False, False, False, False, True]
    assert room.status is Status.SUCCESS


def test_one_failed_rank_fails_all():
    room = Consensus(2)
    room.succeed(0)
    assert [room.fail(), room.succeed(1), room.status] == [True, False, Status.FAILED]


def test_what_is_final_stays_and_is_told_once():
    won, lost = Consensus(1), Consensus(1)
    assert [won.succeed(0), won.succeed(0), won.fail(), won.status] == [True, False, False, Status.SUCCESS]
    assert [lost.fail(), lost.fail(), lost.succeed(0), lost.status] == [True, False, False, Status.FAILED]


def test_a_failed_room_is_at_rest_when_every_rank_has_said_so_whatever_they_said_before():
    room = Consensus(2)
    room.succeed(0)
    room.fail()
    assert [room.settle(rank) for rank in (0, 0, 1, 1)] == [False, False, True, False]


def test_a_room_that_has_not_failed_has_nothing_to_settle():
    assert not Consensus(1).settle(0)


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        Consensus(2).succeed(2)
