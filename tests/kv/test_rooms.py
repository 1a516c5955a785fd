"""The status of a room on one rank and of a group; limits that expire in time; memory that fades."""

from __future__ import annotations

from itertools import product

import pytest

from pdsim.core.clock import Clock
from pdsim.kv.rooms import Consensus, ExpiringMap, QuarantineStall, Status, Timers, advance


@pytest.mark.parametrize(("old", "new"), list(product(Status, Status)))
def test_no_status_goes_back(old: Status, new: Status):
    over = old in (Status.FAILED, Status.SUCCESS)
    assert advance(old, new) is (old if over else Status.FAILED if new is Status.FAILED else max(old, new))


def test_a_room_succeeds_when_every_rank_has_said_so_once():
    room = Consensus(3)
    assert [room.succeed(rank) for rank in (0, 2, 2, 0, 1)] == [False, False, False, False, True]
    assert [room.succeed(0), room.fail(), room.settle(0), room.status] == [False, False, False, Status.SUCCESS]


def test_one_failed_rank_fails_all_and_every_rank_settles():
    room = Consensus(2)
    assert [room.settle(0), room.succeed(0), room.fail(), room.fail()] == [False, False, True, False]
    assert [room.succeed(1), room.status] == [False, Status.FAILED]
    assert [room.settle(rank) for rank in (0, 0, 1, 1)] == [False, False, True, False]


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        Consensus(2).succeed(2)


def test_a_room_expires_exactly_at_its_limit():
    clock, done = Clock(), []
    timers = Timers(clock, 2.0, lambda room: done.append((clock.now, room)))
    timers.add(1)
    clock.call_at(0.5, timers.add, 2)
    clock.call_at(1.0, timers.drop, 1)
    clock.call_at(1.5, timers.add, 3)
    clock.run()
    assert (done, len(timers)) == ([(2.5, 2), (3.5, 3)], 0)


def test_without_a_limit_nothing_expires_or_is_kept():
    clock = Clock()
    timers = Timers(clock, 0.0, lambda room: None)
    timers.add(1)
    assert (len(timers), clock.peek()) == (0, float("inf"))


def test_what_fades_is_forgotten_and_does_not_pile_up():
    clock = Clock()
    fading: ExpiringMap[str] = ExpiringMap(clock, 1.0)
    for room in range(1000):
        clock.call_at(room * 0.1, lambda room: fading.set(room, "here"), room)
    clock.run(until=99.95)
    assert len(fading) <= 11
    assert [room in fading for room in (5, 995, 999)] == [False, True, True]
    assert [fading.get(999), fading.pop(999), fading.pop(999), fading.pop(5)] == ["here", "here", None, None]


def test_a_blocked_queue_gives_up_all_at_once():
    clock, woken = Clock(), []
    blocked = QuarantineStall(clock, 2.0, lambda: woken.append(clock.now))
    assert [blocked.waiting, blocked.too_long()] == [False, False]
    clock.run(until=1.0)
    assert [blocked.waiting, blocked.too_long()] == [True, False]
    clock.run()
    assert [woken, blocked.too_long(), blocked.too_long(), blocked.waiting] == [[2.0], True, True, False]


def test_a_queue_that_moves_has_its_time_again():
    clock = Clock()
    blocked = QuarantineStall(clock, 2.0, lambda: None)
    blocked.too_long()
    clock.run(until=1.5)
    blocked.clear()
    assert not blocked.too_long()
    clock.run(until=2.5)
    assert not blocked.too_long()
