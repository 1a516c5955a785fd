"""Decode asks which prefill group has a room: in batches, again for what is not known yet, and not for ever."""

from dataclasses import replace
from typing import Any

import pytest

from pdsim.core.clock import Clock
from pdsim.kv.messages import Submit
from pdsim.models.llm import Side
from pdsim.serving.handoff.push import PATIENCE, RETRY, RoomLookup
from tests.support.serving import GENERATED, GQA, POOL, configured, rows, serve


class Bench:
    """A room lookup whose questions are answered *after* some seconds from what *incarnations* says then."""

    def __init__(self, after: float = 0.25) -> None:
        self.clock = Clock()
        self.asked: list[tuple[float, tuple[int, ...]]] = []
        self.located: list[tuple[float, int, str]] = []
        self.lost: list[tuple[float, int]] = []
        self.known: dict[int, str] = {}
        self.after = after
        self.lookup = RoomLookup(
            self.clock,
            self.ask,
            lambda request: self.located.append((self.clock.now, request.room, request.prefill)),
            lambda request: self.lost.append((self.clock.now, request.room)),
        )

    def ask(self, rooms: tuple[int, ...]) -> None:
        self.asked.append((self.clock.now, rooms))
        self.clock.call_at(self.clock.now + self.after, self.answer, rooms)

    def answer(self, rooms: tuple[int, ...]) -> None:
        self.lookup.answer({room: self.known[room] for room in rooms if room in self.known})

    def add(self, at: float, room: int) -> None:
        self.clock.call_at(at, self.lookup.add, Submit(room, 10, 5, "", "decode0@1"))

    def take(self, at: float, room: int, incarnation: str) -> None:
        self.clock.call_at(at, lambda _: self.known.update({room: incarnation}), None)


def test_rooms_of_an_open_question_are_asked_together():
    bench = Bench()
    for room in (1, 2, 3):
        bench.take(0.0, room, f"prefill0d{room % 2}@1")
        bench.add(0.1 * room, room)
    bench.clock.run()
    assert bench.asked == [(0.1, (1,)), (0.35, (2, 3))]
    assert bench.located == [(0.35, 1, "prefill0d1@1"), (0.6, 2, "prefill0d0@1"), (0.6, 3, "prefill0d1@1")]
    assert len(bench.lookup) == 0


def test_an_unknown_room_holds_up_no_other():
    bench = Bench()
    bench.take(0.0, 2, "prefill0d0@1")
    bench.add(0.0, 1)
    bench.add(0.0, 2)
    bench.take(0.3, 1, "prefill0d1@1")
    bench.clock.run()
    assert bench.asked == [(0.0, (1,)), (0.25, (2,)), (0.5, (1,))]  # when the question before is answered
    assert bench.located == [(0.5, 2, "prefill0d0@1"), (0.75, 1, "prefill0d1@1")]


def test_a_room_that_stays_unknown_is_given_up():
    bench = Bench()
    bench.add(0.0, 1)
    bench.add(0.0, 2)
    bench.clock.call_at(0.1, bench.lookup.drop, 2)  # and is not asked for again
    bench.clock.run()
    ((at, room),) = bench.lost
    assert (room, bench.located) == (1, [])
    assert PATIENCE <= at < PATIENCE + RETRY + 0.25 + 1e-9
    assert len(bench.asked) == pytest.approx(PATIENCE / (RETRY + 0.25), abs=1)
    assert len(bench.lookup) == 0


def run(dp_rank: str, **changes: Any) -> Any:
    settings = {"options": {"dp_rank": dp_rank}, "kv": replace(POOL, pool=1 << 22), **changes}
    return serve(configured(Side(tp=4, dp=4), Side(tp=2, dp=2), GQA, **settings))


def test_requests_are_served_by_the_group_of_the_engines_choice():
    by_room, asked = run("room", memory="tracked"), run("query", memory="tracked")
    assert by_room.failures == asked.failures == []
    assert by_room.requests["prefill"] == [f"prefill0d{(number + 1) % 4}" for number in range(40)]
    assert asked.requests["prefill"] != by_room.requests["prefill"]
    assert asked.requests["nbytes"] == by_room.requests["nbytes"]
    leaders = [f"prefill0d{group}.0" for group in range(4)] + [f"decode0d{group}.0" for group in range(2)]
    assert [asked.outcome.ranks[name].value["open_rooms"] for name in leaders] == [0] * 6


def test_a_question_that_overtakes_what_prefill_says_costs_another_one():
    one = replace(GENERATED, count=1)
    (told,), (asked,) = (rows(run(dp_rank, workload=one)) for dp_rank in ("room", "query"))
    # both leaders hear of the request at one time; each question goes there and back, 20 us a way
    assert asked["ttft"] - told["ttft"] == pytest.approx(RETRY + 4 * 20e-6, abs=1e-6)
