"""The two clocks, and what waits on them."""

import os
import threading
import time
from pathlib import Path

import pytest
from simpy import Interrupt
from simpy.core import EmptySchedule

from pdsim.core.clock import LAST, Alarm, Clock, Mailbox, WallClock, fire
from pdsim.core.errors import NeverPaused


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


class TestAbsoluteTimes:
    def test_an_event_happens_at_its_time_and_not_a_rounding_off(self, clock):
        clock.run(until=0.2)
        clock.run(until=clock.at(0.9))
        assert clock.now == 0.9
        assert 0.2 + (0.9 - 0.2) != 0.9

    def test_an_event_carries_its_value(self, clock):
        assert clock.run(until=clock.at(1.0, "here")) == "here"

    def test_equal_times_keep_the_order_of_scheduling(self, clock, log):
        for name in "abc":
            clock.call_at(1.0, log.append, name)
        clock.run()
        assert log == ["a", "b", "c"]

    def test_the_past_is_refused(self, clock):
        clock.run(until=2.0)
        with pytest.raises(ValueError, match=r"at\(=1.0\) must not be before now\(=2.0\)"):
            clock.at(1.0)

    def test_a_past_call_is_refused_or_made_at_once(self, clock, wall, log):
        clock.run(until=2.0)
        with pytest.raises(ValueError, match=r"at\(=1.0\) must not be before now\(=2.0\)"):
            clock.call_at(1.0, log.append, "virtual")
        wall.call_at(-1.0, log.append, "real")
        wall.run(until=wall.timeout(0.001))
        assert log == ["real"]

    def test_now_is_not_the_past(self, clock, log):
        clock.run(until=2.0)
        clock.call_at(2.0, log.append, "now")
        clock.run()
        assert log == ["now"]


class TestAlarm:
    def test_fires_at_its_time_and_again(self, clock, log):
        alarm = Alarm(clock, lambda _: log.append(clock.now))
        alarm.arm(1.0)
        clock.run()
        alarm.arm(2.5)
        clock.run()
        assert log == [1.0, 2.5]

    def test_may_be_armed_while_it_fires(self, clock, log):
        def wake(alarm):
            log.append(clock.now)
            if clock.now < 3.0:
                alarm.arm(clock.now + 1.0)

        Alarm(clock, wake).arm(1.0)
        clock.run()
        assert log == [1.0, 2.0, 3.0]

    def test_must_not_be_armed_twice(self, clock):
        alarm = Alarm(clock, lambda _: None)
        assert not alarm.armed
        alarm.arm(1.0)
        assert alarm.armed
        with pytest.raises(RuntimeError, match="armed already"):
            alarm.arm(2.0)

    def test_with_the_last_priority_comes_after_all_else_of_its_instant(self, clock, log):
        Alarm(clock, lambda _: log.append("alarm"), LAST).arm(1.0)

        def chain():
            yield clock.at(1.0)
            yield clock.timeout(0)
            log.append("process")

        clock.process(chain())
        clock.run()
        assert log == ["process", "alarm"]


class TestFire:
    def test_runs_the_callbacks_at_once_and_costs_no_event(self, clock, log):
        event = clock.event()
        event.callbacks.append(lambda event: log.append(event.value))
        fire(event, "value")
        assert log == ["value"]
        assert event.processed
        assert clock.peek() == float("inf")

    def test_resumes_a_process(self, clock, log):
        event = clock.event()

        def wait():
            log.append((yield event))

        clock.process(wait())
        clock.call_at(1.0, lambda _: fire(event, "value"), None)
        clock.run()
        assert log == ["value"]

    def test_throws_the_exception_of_a_failure(self, clock, log):
        event = clock.event()

        def wait():
            try:
                yield event
            except KeyError as error:
                log.append(error.args)

        clock.process(wait())
        clock.call_at(1.0, lambda _: fire(event, KeyError("k"), ok=False), None)
        clock.run()
        assert log == [("k",)]

    def test_is_once_only(self, clock):
        event = clock.event()
        fire(event)
        with pytest.raises(RuntimeError, match="triggered already"):
            fire(event)


def collect(clock, mailbox, log):
    while True:
        item = yield mailbox.get()
        log.append((clock.now, item))


class TestListener:
    def test_hears_of_an_item_at_once(self, clock, log):
        mailbox = Mailbox(clock)
        mailbox.listen(log.append)
        mailbox.deliver("a")
        assert log == ["a"]
        mailbox.put("b")
        assert log == ["a"]
        clock.run()
        assert log == ["a", "b"]
        assert len(mailbox) == 0

    def test_gets_what_came_before_it(self, clock, log):
        mailbox = Mailbox(clock)
        mailbox.put("a")
        mailbox.listen(log.append)
        mailbox.put("b")
        clock.run()
        assert log == ["a", "b"]

    def test_has_no_rival(self, clock, log):
        mailbox = Mailbox(clock)
        mailbox.listen(log.append)
        with pytest.raises(RuntimeError, match="has a listener already"):
            mailbox.listen(log.append)


@pytest.mark.parametrize("put", [Mailbox.put, Mailbox.deliver])
class TestMailbox:
    def test_keeps_the_order(self, clock, log, put):
        mailbox = Mailbox(clock)
        for item in "ab":
            put(mailbox, item)
        clock.process(collect(clock, mailbox, log))
        clock.call_at(1.0, lambda item: put(mailbox, item), "c")
        clock.run()
        assert log == [(0.0, "a"), (0.0, "b"), (1.0, "c")]

    def test_serves_the_longest_waiting_first(self, clock, put):
        mailbox, one, other = Mailbox(clock), [], []
        clock.process(collect(clock, mailbox, one))
        clock.process(collect(clock, mailbox, other))
        for at, item in ((1.0, "a"), (2.0, "b"), (3.0, "c")):
            clock.call_at(at, lambda item: put(mailbox, item), item)
        clock.run()
        assert (one, other) == ([(1.0, "a"), (3.0, "c")], [(2.0, "b")])

    def test_an_item_whose_waiter_was_interrupted_waits_for_the_next(self, clock, log, put):
        mailbox = Mailbox(clock)

        def wait():
            try:
                yield mailbox.get()
            except Interrupt:
                log.append("interrupted")

        process = clock.process(wait())
        clock.call_at(1.0, lambda _: process.interrupt(), None)
        clock.call_at(2.0, lambda _: put(mailbox, "item"), None)
        clock.run()
        assert log == ["interrupted"]
        assert mailbox.drain() == ["item"]

    def test_an_item_that_comes_with_the_deadline_is_not_lost(self, clock, log, put):
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

    def test_waits_that_were_given_up_are_forgotten(self, clock, put):
        mailbox = Mailbox(clock)

        def poll():
            for _ in range(100):
                yield mailbox.get() | clock.timeout(1.0)

        clock.process(poll())
        clock.run()
        assert len(mailbox._waiting) <= 2
        put(mailbox, "item")
        assert len(mailbox) == 1


class TestMailboxCosts:
    def test_an_item_that_is_waited_for_costs_an_event_or_none(self, clock, log):
        for put, events in ((Mailbox.put, 1), (Mailbox.deliver, 0)):
            mailbox = Mailbox(clock)
            clock.process(collect(clock, mailbox, log))
            clock.run()
            before = clock.scheduled()
            put(mailbox, "item")
            clock.run()
            assert clock.scheduled() - before == events

    def test_drain_takes_all_that_is_there(self, clock):
        mailbox = Mailbox(clock)
        mailbox.put(1)
        mailbox.put(2)
        assert len(mailbox) == 2
        assert mailbox.drain() == [1, 2]
        assert len(mailbox) == 0


class Busy:
    """A source without a descriptor that always waits for something."""

    def poll(self):
        return False

    def fileno(self):
        return None

    def busy(self):
        return True


class Pipe:
    """A source: every byte in the pipe triggers the next of its events."""

    def __init__(self, clock):
        self.clock = clock
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

    def close(self):
        os.close(self.read)
        os.close(self.write)


@pytest.fixture
def pipe(wall):
    pipe = Pipe(wall)
    wall.watch(pipe)
    yield pipe
    pipe.close()


def descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


PATIENCE = 10.0
"""Seconds that a busy machine may take for next to nothing."""


class TestWallClock:
    def test_waits_for_real_time(self, wall):
        start = time.monotonic()
        wall.run(until=wall.timeout(0.02))
        assert time.monotonic() - start >= 0.02

    def test_counts_from_its_origin(self):
        clock = WallClock(origin=time.monotonic() - 100.0)
        assert 100.0 <= clock.now < 100.0 + PATIENCE
        clock.close()

    def test_keeps_the_order_of_events(self, wall, log):
        for at, name in ((0.02, "c"), (0.01, "a"), (0.01, "b")):
            wall.call_at(at, log.append, name)
        wall.run()
        assert log == ["a", "b", "c"]

    def test_takes_what_lies_in_the_past_at_once(self, wall, log):
        wall.run(until=wall.timeout(0.01))
        wall.call_at(0.0, log.append, "late")
        wall.run()
        assert log == ["late"]

    def test_ends_when_nothing_can_happen_any_more(self, wall):
        with pytest.raises(EmptySchedule):
            wall.step()

    def test_wakes_for_a_source(self, wall, pipe):
        pipe.events.append(wall.event())
        wall.timeout(10 * PATIENCE)  # until then it would sleep by itself
        start = time.monotonic()
        threading.Timer(0.02, os.write, (pipe.write, b"x")).start()
        wall.run(until=pipe.events[0])
        assert 0.02 <= time.monotonic() - start < PATIENCE

    def test_wakes_for_a_call_from_another_thread(self, wall, pipe):
        event = wall.event()
        wall.timeout(10 * PATIENCE)
        start = time.monotonic()
        threading.Timer(0.02, wall.call, (event.succeed,)).start()
        wall.run(until=event)
        assert 0.02 <= time.monotonic() - start < PATIENCE

    def test_looks_often_at_a_busy_source_without_a_descriptor(self, wall):
        class Countdown:
            left = 20

            def poll(self):
                self.left -= 1
                if self.left == 0:
                    event.succeed()
                return self.left == 0

            def fileno(self):
                return None

            def busy(self):
                return True

        event, source = wall.event(), Countdown()
        wall.watch(source)
        wall.timeout(10 * PATIENCE)
        start = time.monotonic()
        wall.run(until=event)
        assert time.monotonic() - start < PATIENCE

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

        def idle():
            log.append("idle")
            return next(waits)

        wall.idle = idle
        wall.settle()
        wall.settle()
        assert log == ["idle"] * 3

    def test_is_not_idle_in_short_waits_or_beside_busy_sources(self, wall, log):
        wall.idle = lambda: log.append("idle") or 1.0
        wall.run(until=wall.timeout(0.5e-3))
        wall.watch(Busy())
        wall.run(until=wall.timeout(0.01))
        assert log == []

    def test_hears_a_descriptor_while_it_spins_for_a_source_without_one(self, pipe, wall):
        pipe.events.append(wall.event())
        wall.spin = 10 * PATIENCE
        wall.watch(Busy())
        start = time.monotonic()
        os.write(pipe.write, b"x")
        wall.run(until=pipe.events[0])
        assert time.monotonic() - start < PATIENCE

    def test_forgets_a_source(self, wall, pipe):
        wall.unwatch(pipe)
        wall.unwatch(pipe)
        with pytest.raises(EmptySchedule):
            wall.step()

    def test_does_not_spin_while_it_waits(self, wall):
        start = time.process_time()
        wall.run(until=wall.timeout(0.3))
        assert time.process_time() - start < 0.1

    def test_runs_a_program_of_the_virtual_clock(self, wall, clock, log):
        def program(clock, mailbox):
            yield clock.timeout(0.001)
            mailbox.put("a")
            log.append((yield mailbox.get()))

        for each in (clock, wall):
            each.run(until=each.process(program(each, Mailbox(each))))
        assert log == ["a", "a"]

    def test_gives_its_descriptors_back(self):
        before = descriptors()
        clock = WallClock()
        assert descriptors() == before + 2
        clock.close()
        assert descriptors() == before


class TestClocksWithoutPauses:
    """Only a modelled rank's clock is ever paused; others say so instead of losing what is due."""

    @pytest.mark.parametrize("kind", ["clock", "wall"])
    def test_an_event_fired_on_a_paused_clock_is_refused(self, kind, request, log):
        clock = request.getfixturevalue(kind)
        event = clock.event()
        event.callbacks.append(log.append)
        clock.paused = True
        with pytest.raises(NeverPaused) as refused:
            fire(event, "here")
        text = str(refused.value)
        assert text.startswith(f"Event deferred by {type(clock).__name__}, paused=True, halted=False: ")
        assert text.endswith("; set neither of them, and pause a modelled rank with RankClock.pause")
        assert "\n" not in text
        assert event.callbacks == [log.append]
        assert not log

    @pytest.mark.parametrize("kind", ["clock", "wall"])
    def test_a_call_is_refused_too(self, kind, request, log):
        clock = request.getfixturevalue(kind)
        with pytest.raises(NeverPaused, match="call deferred by"):
            clock.defer(log.append, None)
        assert not log
