"""Queues with blocking workers: who waits for whom, in exact times."""

from __future__ import annotations

import pytest
from simpy.events import Event

from pdsim.core.clock import Clock
from pdsim.kv.push import Queues
from pdsim.transfer import Program

Item = tuple[str, float]  # name and length; a negative one fails


def run(count: int, work: list[tuple[float, int, str, float]]) -> list[tuple[float, str]]:
    """Put items, each at a time under a key with a name and a length; return when which ended."""
    clock, done = Clock(), []

    def job(item: Item, _: int) -> Program:
        name, seconds = item
        yield clock.timeout(abs(seconds))
        if seconds < 0:
            raise RuntimeError(name)
        done.append((clock.now, name))

    queues: Queues[Item] = Queues(clock, count, job, lambda _, error: done.append((clock.now, f"{error} failed")))
    for at, key, *item in work:
        clock.call_at(at, lambda arguments: queues.put(*arguments), (key, tuple(item)))
    clock.run()
    return done


def test_a_slow_job_holds_up_its_queue_and_no_other():
    work = [(0.0, 0, "slow", 4.0), (1.0, 4, "behind", 1.0), (1.0, 1, "beside", 1.0)]
    assert run(4, work) == [(2.0, "beside"), (4.0, "slow"), (5.0, "behind")]


def test_without_queues_work_is_done_by_who_puts_it():
    done: list[str] = []

    def work(item: str, _: int) -> None:
        if item == "bad":
            raise RuntimeError(item)
        done.append(item)

    queues: Queues[str] = Queues(Clock(), 0, work, lambda item, error: done.append(f"{item} failed: {error}"))
    for item in ("first", "bad", "second"):
        queues.put(0, item)
    assert done == ["first", "bad failed: bad", "second"]


def test_a_queue_is_first_come_first_served():
    work = [(0.0, 0, "a", 1.0), (0.5, 0, "b", 0.25), (0.5, 0, "c", 0.25)]
    assert run(1, work) == [(1.0, "a"), (1.25, "b"), (1.5, "c")]


def test_a_worker_outlives_a_job_that_raises():
    assert run(1, [(0.0, 0, "bad", -1.0), (2.0, 0, "good", 1.0)]) == [(1.0, "bad failed"), (3.0, "good")]


def test_a_worker_wakes_for_what_comes_after_a_pause():
    assert run(2, [(0.0, 0, "a", 1.0), (5.0, 0, "b", 1.0)]) == [(1.0, "a"), (6.0, "b")]


def test_work_may_return_an_event_or_nothing():
    clock, done = Clock(), []

    def work(item: float | None, _: int) -> Event | None:
        done.append((clock.now, item))
        return None if item is None else clock.timeout(item)

    queues: Queues[float | None] = Queues(clock, 1, work, lambda *_: None)
    clock.call_at(1.0, lambda items: [queues.put(0, item) for item in items], (2.0, None, 3.0, 1.0))
    clock.run()
    assert done == [(1.0, 2.0), (3.0, None), (3.0, 3.0), (6.0, 1.0)]


def test_a_worker_goes_on_after_an_event_that_fails():
    clock, done = Clock(), []

    def work(item: str, _: int) -> Event:
        done.append((clock.now, item))
        event = clock.event()
        event.defused = True
        clock.call_at(clock.now + 1.0, event.fail, RuntimeError(item))
        return event

    queues: Queues[str] = Queues(clock, 1, work, lambda *_: done.append((clock.now, "failed")))
    clock.call_at(1.0, lambda items: [queues.put(0, item) for item in items], "ab")
    clock.run()
    assert done == [(1.0, "a"), (2.0, "b")]


def test_a_program_is_told_of_the_event_that_failed():
    clock, done = Clock(), []

    def work(_: str, __: int) -> Program:
        event = clock.event()
        clock.call_at(clock.now + 1.0, event.fail, KeyError("gone"))
        try:
            yield event
        except KeyError as error:
            done.append((clock.now, error.args))
        value = yield clock.timeout(1.0, "value")
        done.append((clock.now, value))

    queues: Queues[str] = Queues(clock, 1, work, lambda *_: None)
    clock.call_at(0.0, lambda item: queues.put(0, item), "a")
    clock.run()
    assert done == [(1.0, ("gone",)), (2.0, "value")]


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="count must be >= 0, got -1"):
        Queues(Clock(), -1, lambda item, queue: iter(()), lambda item, error: None)
