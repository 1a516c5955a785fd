"""What is kept of rooms beside their state: limits that expire in time, and memory that fades."""

from pdsim.core.clock import Clock
from pdsim.kv.rooms import ExpiringMap, QuarantineStall, Timers


def test_a_room_expires_exactly_at_its_limit_and_others_later():
    clock, done = Clock(), []
    timers = Timers(clock, 2.0, lambda room: done.append((clock.now, room)))
    timers.add(1)
    clock.call_at(0.5, timers.add, 2)
    clock.call_at(1.0, timers.drop, 1)
    clock.call_at(1.5, timers.add, 3)
    clock.run()
    assert done == [(2.5, 2), (3.5, 3)]
    assert len(timers) == 0


def test_without_a_limit_nothing_expires_and_nothing_is_kept():
    clock = Clock()
    timers = Timers(clock, 0.0, lambda room: None)
    timers.add(1)
    assert (len(timers), clock.peek()) == (0, float("inf"))


def test_what_fades_is_forgotten_in_time_and_does_not_pile_up():
    clock = Clock()
    fading: ExpiringMap[str] = ExpiringMap(clock, 1.0)
    for room in range(1000):
        clock.call_at(room * 0.1, lambda room: fading.set(room, "here"), room)
    clock.run(until=99.95)
    assert len(fading) <= 11
    assert [room in fading for room in (5, 995, 999)] == [False, True, True]
    assert [fading.pop(999), fading.pop(999), fading.pop(5)] == ["here", None, None]


def test_a_blocked_queue_gives_up_after_its_time_all_of_it_and_not_one_after_the_other():
    clock, woken = Clock(), []
    blocked = QuarantineStall(clock, 2.0, lambda: woken.append(clock.now))
    assert not blocked.waiting
    assert not blocked.too_long()
    clock.run(until=1.0)
    assert blocked.waiting
    assert not blocked.too_long()
    clock.run()
    assert [woken, blocked.too_long(), blocked.too_long()] == [[2.0], True, True]
    assert not blocked.waiting


def test_a_queue_that_moves_has_its_time_again():
    clock = Clock()
    blocked = QuarantineStall(clock, 2.0, lambda: None)
    blocked.too_long()
    clock.run(until=1.5)
    blocked.clear()
    assert not blocked.too_long()
    clock.run(until=2.5)
    assert not blocked.too_long()
