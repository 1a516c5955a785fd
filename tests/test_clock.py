"""The two clocks, and what waits on them."""

import os
import threading
import time
from pathlib import Path

import pytest
from simpy import Interrupt
from simpy.core import EmptySchedule

from pdsim.core.clock import LAST, Alarm, Clock, ExpiringMap, Mailbox, Timers, WallClock, fire
from pdsim.core.errors import NeverPaused

PATIENCE = 10.0
"""Seconds that a busy machine may take for next to nothing."""


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def wall():
    clock = WallClock()
    yield clock
    clock.close()


@pytest.fixture
def log():
    return []


def ended(clock, log):
    clock.run()
    return log


def test_an_event_happens_exactly_at_its_time(clock):
    clock.run(until=0.2)
    assert clock.run(until=clock.at(0.9, "here")) == "here"
    assert clock.now == 0.9
    assert 0.2 + (0.9 - 0.2) != 0.9


def test_the_past_is_refused_and_now_comes_in_order(clock, log):
    clock.run(until=2.0)
    for call in (lambda: clock.at(1.0), lambda: clock.call_at(1.0, log.append, "virtual")):
        with pytest.raises(ValueError, match=r"at\(=1.0\) must not be before now\(=2.0\)"):
            call()
    for name in "abc":
        clock.call_at(2.0, log.append, name)
    assert ended(clock, log) == ["a", "b", "c"]


def test_an_alarm_may_be_armed_while_it_fires(clock, log):
    def wake(alarm):
        log.append(clock.now)
        if clock.now < 3.0:
            alarm.arm(clock.now + 1.0)

    alarm = Alarm(clock, wake)
    alarm.arm(1.0)
    assert alarm.armed
    with pytest.raises(RuntimeError, match="armed already"):
        alarm.arm(2.0)
    assert ended(clock, log) == [1.0, 2.0, 3.0]
    alarm.arm(4.5)
    assert ended(clock, log) == [1.0, 2.0, 3.0, 4.5]


def test_an_alarm_with_the_last_priority_ends_its_instant(clock, log):
    Alarm(clock, lambda _: log.append("alarm"), LAST).arm(1.0)

    def chain():
        yield clock.at(1.0)
        yield clock.timeout(0)
        log.append("process")

    clock.process(chain())
    assert ended(clock, log) == ["process", "alarm"]


def test_firing_runs_the_callbacks_at_once_and_costs_no_event(clock, log):
    event = clock.event()
    event.callbacks.append(lambda event: log.append(event.value))
    fire(event, "value")
    assert log == ["value"]
    assert event.processed
    assert clock.peek() == float("inf")
    with pytest.raises(RuntimeError, match="triggered already"):
        fire(event)


@pytest.mark.parametrize(("value", "ok"), [("value", True), (KeyError("value"), False)])
def test_firing_resumes_a_process_with_a_value_or_an_error(clock, log, value, ok):
    event = clock.event()

    def wait():
        try:
            log.append((yield event))
        except KeyError as error:
            log.append(error.args[0])

    clock.process(wait())
    clock.call_at(1.0, lambda _: fire(event, value, ok=ok), None)
    assert ended(clock, log) == ["value"]


@pytest.mark.parametrize("kind", ["clock", "wall"])
def test_only_a_modelled_rank_s_clock_may_be_paused(kind, request, log):
    clock = request.getfixturevalue(kind)
    event = clock.event()
    event.callbacks.append(log.append)
    clock.paused = True
    words = f"^Event deferred by {type(clock).__name__}, paused=True, halted=False: .*RankClock.pause$"
    with pytest.raises(NeverPaused, match=words):
        fire(event, "here")
    with pytest.raises(NeverPaused, match="call deferred by"):
        clock.defer(log.append, None)
    assert event.callbacks == [log.append]
    assert not log


def collect(clock, mailbox, log):
    while True:
        item = yield mailbox.get()
        log.append((clock.now, item))


def test_a_listener_hears_of_what_is_kept_and_what_comes(clock, log):
    mailbox = Mailbox(clock)
    mailbox.put("a")
    mailbox.listen(log.append)
    mailbox.put("b")
    assert ended(clock, log) == ["a", "b"]
    mailbox.deliver("c")
    assert log == ["a", "b", "c"]
    assert len(mailbox) == 0
    with pytest.raises(RuntimeError, match="has a listener already"):
        mailbox.listen(log.append)


@pytest.mark.parametrize("put", [Mailbox.put, Mailbox.deliver])
class TestMailbox:
    def test_keeps_the_order_and_serves_the_longest_waiting_first(self, clock, put):
        mailbox, one, other = Mailbox(clock), [], []
        put(mailbox, "a")
        put(mailbox, "b")
        clock.process(collect(clock, mailbox, one))
        clock.process(collect(clock, mailbox, other))
        for at, item in ((1.0, "c"), (2.0, "d"), (3.0, "e")):
            clock.call_at(at, lambda item: put(mailbox, item), item)
        clock.run()
        assert one == [(0.0, "a"), (1.0, "c"), (3.0, "e")]
        assert other == [(0.0, "b"), (2.0, "d")]

    def test_keeps_an_item_whose_waiter_was_interrupted(self, clock, log, put):
        mailbox = Mailbox(clock)

        def wait():
            try:
                yield mailbox.get()
            except Interrupt:
                log.append("interrupted")

        process = clock.process(wait())
        clock.call_at(1.0, lambda _: process.interrupt(), None)
        clock.call_at(2.0, lambda _: put(mailbox, "item"), None)
        assert ended(clock, log) == ["interrupted"]
        assert mailbox.drain() == ["item"]

    def test_loses_no_item_that_comes_with_the_deadline(self, clock, log, put):
        mailbox = Mailbox(clock)

        def wait():
            got = mailbox.get()
            found = yield got | clock.timeout(1.0)
            log.append(found.todict().get(got, "nothing"))

        clock.process(wait())
        clock.run(until=0.5)
        clock.call_at(1.0, lambda _: put(mailbox, "item"), None)
        clock.run()
        assert sorted([*log, *mailbox.drain()]) in (["item"], ["item", "nothing"])

    def test_forgets_waits_that_were_given_up(self, clock, put):
        mailbox = Mailbox(clock)

        def poll():
            for _ in range(100):
                yield mailbox.get() | clock.timeout(1.0)

        clock.process(poll())
        clock.run()
        assert len(mailbox._waiting) <= 2
        put(mailbox, "item")
        assert (len(mailbox), mailbox.drain(), len(mailbox)) == (1, ["item"], 0)


class Busy:
    """A source without a descriptor that always waits for something; its *last* look triggers an event."""

    def __init__(self, last=-1, event=None):
        self.left, self.event = last, event

    def poll(self):
        self.left -= 1
        if self.left == 0:
            self.event.succeed()
        return self.left == 0

    def fileno(self):
        return None

    def busy(self):
        return True


class Pipe:
    """A source: every byte in the pipe triggers the next of its events."""

    def __init__(self):
        self.read, self.write = os.pipe()
        os.set_blocking(self.read, False)
        self.events = []

    def poll(self):
        try:
            count = len(os.read(self.read, 100))
        except BlockingIOError:
            return False
        for _ in range(count):
            self.events.pop(0).succeed()
        return True

    def fileno(self):
        return self.read

    def busy(self):
        return False


@pytest.fixture
def pipe(wall):
    pipe = Pipe()
    wall.watch(pipe)
    yield pipe
    os.close(pipe.read)
    os.close(pipe.write)


def took(wall, event):
    start = time.monotonic()
    wall.run(until=event)
    return time.monotonic() - start


class TestWallClock:
    def test_waits_for_real_time_without_spinning(self, wall):
        spent = time.process_time()
        assert took(wall, wall.timeout(0.3)) >= 0.3
        assert time.process_time() - spent < 0.1

    def test_counts_from_its_origin_and_gives_descriptors_back(self):
        before = len(list(Path("/proc/self/fd").iterdir()))
        clock = WallClock(origin=time.monotonic() - 100.0)
        assert 100.0 <= clock.now < 100.0 + PATIENCE
        assert len(list(Path("/proc/self/fd").iterdir())) == before + 2
        clock.close()
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    def test_keeps_the_order_of_events_the_past_first(self, wall, log):
        wall.run(until=wall.timeout(0.01))
        for at, name in ((0.04, "c"), (0.03, "a"), (0.03, "b"), (0.0, "late")):
            wall.call_at(at, log.append, name)
        assert ended(wall, log) == ["late", "a", "b", "c"]

    def test_ends_when_nothing_can_happen_any_more(self, wall, pipe):
        wall.unwatch(pipe)
        wall.unwatch(pipe)
        with pytest.raises(EmptySchedule):
            wall.step()

    @pytest.mark.parametrize("waker", ["source", "thread"])
    def test_wakes_for_a_source_and_for_another_thread(self, wall, pipe, waker):
        event = wall.event()
        pipe.events.append(event)
        wall.timeout(10 * PATIENCE)  # until then it would sleep by itself
        call = (os.write, (pipe.write, b"x")) if waker == "source" else (wall.call, (event.succeed,))
        threading.Timer(0.02, *call).start()
        assert 0.01 <= took(wall, event) < PATIENCE

    def test_hears_a_descriptor_while_it_spins(self, pipe, wall):
        pipe.events.append(wall.event())
        wall.spin = 10 * PATIENCE
        wall.watch(Busy())
        os.write(pipe.write, b"x")
        assert took(wall, pipe.events[0]) < PATIENCE

    def test_makes_idle_calls_as_often_as_asked(self, wall, log):
        def idle():
            log.append(wall.now)
            return [0.0, 0.0, 0.01, 10.0][len(log) - 1]

        wall.idle = idle
        wall.run(until=wall.timeout(0.1))
        assert len(log) == 4
        assert log[3] - log[2] >= 0.01

    def test_settles_by_making_idle_calls_until_none_is_due(self, wall, log):
        waits = iter([0.0, 0.0, 10.0])
        wall.idle = lambda: log.append("idle") or next(waits)
        wall.settle()
        wall.settle()
        assert log == ["idle"] * 3

    def test_is_not_idle_in_short_waits_or_beside_busy_sources(self, wall, log):
        wall.idle = lambda: log.append("idle") or 1.0
        wall.run(until=wall.timeout(0.5e-3))
        wall.watch(Busy())
        wall.run(until=wall.timeout(0.01))
        assert log == []


def test_a_room_expires_exactly_at_its_limit_if_any():
    clock, done = Clock(), []
    timers = Timers(clock, 2.0, lambda room: done.append((clock.now, room)))
    timers.add(1)
    clock.call_at(0.5, timers.add, 2)
    clock.call_at(1.0, timers.drop, 1)
    clock.call_at(1.5, timers.add, 3)
    clock.run()
    assert (done, len(timers)) == ([(2.5, 2), (3.5, 3)], 0)
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
