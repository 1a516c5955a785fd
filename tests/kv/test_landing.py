"""The decode side of staging: who is granted what and when, what is scattered, and when all is at rest."""

from __future__ import annotations

from typing import Any

import pytest

from pdsim.kv.layout import KvLayout, KvShape
from pdsim.kv.mapping import Grid, RankMap
from pdsim.kv.messages import Arrival, StagingRelease, StagingReply, StagingRequest, decode
from pdsim.kv.policy import Staging
from pdsim.kv.staging.staging_receiver import StagingReceiver
from pdsim.sim.memory import LAUNCH
from pdsim.sim.model import Model
from pdsim.transfer import Program
from pdsim.transfer.job import Place, Rank, RankSpec
from tests.support.configs import ENGINE, MACHINE

SHAPE = KvShape(layers=2, heads=2, head_bytes=1 << 16)
LAYOUT = KvLayout(SHAPE, tp=1, page_size=4, pages=8, slots=2)
PAGE = 4 * 4 * (1 << 16)
"""Bytes of a page of one head, in two layers' K and V."""
COPY = 2 * PAGE / MACHINE.gpu.memory_rate + LAUNCH
"""Seconds to scatter it: each byte is read and written."""
HERE = "tests.kv.test_landing"


def program(rank: Rank, *, script: list[list[Any]], ring: int, wait: float, scatter: str) -> Program:
    """Do what *script* says, at the times it says; return what was reported and when, and what is left."""
    reports: list[list[Any]] = []

    def report(*what: Any) -> None:
        reports.append([rank.clock.now, *what])

    pool = rank.endpoint.register(rank.device.allocate(LAYOUT.size), "kv")
    staging = Staging(ring=ring, buffer=1, wait=wait, scatter=scatter)
    ranks = RankMap(SHAPE, Grid(2), Grid(1))
    landing = StagingReceiver(rank, LAYOUT, 0, ranks, pool, staging, lambda message: report("quiet", message.room))
    for at, action, room, *rest in script:
        yield rank.clock.at(at)
        if action == "ask":
            chunk, size, *index = rest
            landing.ask("writer", StagingRequest("decode0@1", room, *(index or [0]), chunk, size, ((room, 1),)))
        elif action == "arrive":
            chunk, *index = rest
            arrival = Arrival("decode0@1", room, *(index or [0]), 0, 1, 0.0, 0.0, 0.0, chunk)
            landing.scatter(arrival, lambda done, reason: report("scattered", done.room, reason))
        elif action == "forget":
            landing.forget(room)
        elif action == "sever":
            landing.sever(*rest)
        else:
            landing.give_back(StagingRelease(room, 0))
    yield rank.clock.timeout(10.0)
    return {"reports": reports, "used": landing.ring.used, "left": len(landing), "refused": landing.refused}


def writer(rank: Rank, *, answers: int) -> Program:
    """Return the answers that come: room, chunk and position."""
    grants = []
    for _ in range(answers):
        message = yield rank.channel.receive()
        grant = decode(message.payload)
        assert isinstance(grant, StagingReply)
        grants.append([grant.room, grant.chunk, grant.position])
    return grants


def run(
    script: list[list[Any]], answers: int, ring: int = 2 * PAGE, wait: float = 1.0, scatter: str = "chunk"
) -> tuple[dict[str, Any], Any]:
    options = {"script": script, "ring": ring, "wait": wait, "scatter": scatter}
    ranks = [
        RankSpec("reader", f"{HERE}:program", Place(0, 0), options),
        RankSpec("writer", f"{HERE}:writer", Place(0, 1), {"answers": answers}),
    ]
    outcome = Model(MACHINE, ENGINE).run(ranks)
    assert not any(rank.error for rank in outcome.ranks.values())
    return outcome.ranks["reader"].value, outcome.ranks["writer"].value


def test_a_block_is_scattered_and_its_slot_freed():
    value, answers = run([[0.0, "ask", 1, 0, PAGE], [0.5, "arrive", 1, 0]], 1)
    assert answers == [[1, 0, 0]]
    assert value["reports"] == [[pytest.approx(0.5 + COPY, rel=1e-12), "scattered", 1, ""]]
    assert (value["used"], value["left"]) == (0, 0)


@pytest.mark.parametrize(("scatter", "first"), [("chunk", 0.7), ("writer", 0.5)])
def test_a_chunk_is_scattered_when_all_its_writers_are_there(scatter: str, first: float):
    script = [[0.0, "ask", 1, 0, PAGE, 0], [0.0, "ask", 1, 0, PAGE, 1]]
    script += [[0.5, "arrive", 1, 0, 0], [0.7, "arrive", 1, 0, 1]]
    value, _ = run(script, 2, scatter=scatter)
    assert value["reports"][0][0] == pytest.approx(first + COPY, rel=1e-3)
    assert [line[1:] for line in value["reports"]] == [["scattered", 1, ""]] * 2
    assert (value["used"], value["left"]) == (0, 0)


def test_who_waits_is_granted_when_the_scatter_before_has_ended():
    script = [[0.0, "ask", 1, 0, 2 * PAGE], [0.0, "ask", 2, 0, 2 * PAGE], [0.5, "arrive", 1, 0]]
    _, answers = run(script, 2)
    assert answers == [[1, 0, 0], [2, 0, 2 * PAGE]]


def test_who_waits_too_long_is_refused_and_the_next_goes_on():
    script = [[0.0, "ask", 1, 0, PAGE], [0.1, "ask", 2, 0, 2 * PAGE], [0.2, "ask", 3, 0, PAGE]]
    value, answers = run(script, 3)
    assert answers == [[1, 0, 0], [2, 0, -1], [3, 0, PAGE]]
    assert value["refused"] == 1


def test_what_exceeds_the_ring_is_refused_at_once():
    value, answers = run([[0.0, "ask", 1, 0, 2 * PAGE + 1]], 1, wait=1000.0)
    assert answers == [[1, 0, -1]]
    assert value["left"] == 0


def test_chunks_may_arrive_in_any_order():
    script = [[0.0, "ask", 1, 0, PAGE], [0.0, "ask", 1, 1, PAGE], [0.5, "arrive", 1, 1], [0.6, "arrive", 1, 0]]
    value, _ = run(script, 2)
    assert [line[1:] for line in value["reports"]] == [["scattered", 1, ""]] * 2
    assert (value["used"], value["left"]) == (0, 0)


def test_a_forgotten_room_keeps_its_slot_and_is_not_scattered():
    script = [[0.0, "ask", 1, 0, PAGE], [0.1, "forget", 1], [0.2, "arrive", 1, 0]]
    value, _ = run(script, 1)
    assert value["reports"] == [[0.1, "quiet", 1]]
    assert (value["used"], value["left"]) == (PAGE, 1)
    value, _ = run([*script, [0.3, "return", 1]], 1)
    assert (value["used"], value["left"]) == (0, 0)


def test_a_room_is_quiet_only_when_its_scatter_has_ended():
    half = 0.5 + COPY / 2
    script = [[0.0, "ask", 1, 0, PAGE], [0.5, "arrive", 1, 0], [half, "forget", 1], [half, "return", 1]]
    value, _ = run(script, 1)
    assert value["reports"] == [[pytest.approx(0.5 + COPY, rel=1e-12), "quiet", 1]]
    assert (value["used"], value["left"]) == (0, 0)


def test_a_question_that_comes_after_its_room_was_forgotten_leaks_nothing():
    value, _ = run([[0.0, "forget", 1], [0.1, "ask", 1, 0, PAGE], [0.2, "return", 1]], 1)
    assert (value["used"], value["left"]) == (0, 0)


def test_what_is_returned_lets_the_next_go():
    script = [[0.0, "ask", 1, 0, 2 * PAGE], [0.0, "ask", 2, 0, PAGE], [0.1, "return", 1]]
    _, answers = run(script, 2)
    assert answers == [[1, 0, 0], [2, 0, 2 * PAGE]]


def test_a_late_arrival_in_a_returned_slot_is_ignored():
    script = [[0.0, "ask", 1, 0, PAGE], [0.1, "return", 1], [0.2, "arrive", 1, 0]]
    value, _ = run(script, 1)
    assert value["reports"] == []


def test_a_quiesced_rank_loses_its_slots_a_namesake_does_not():
    kept, _ = run([[0.0, "ask", 1, 0, PAGE], [0.1, "sever", 0, "another"]], 1)
    assert (kept["used"], kept["left"]) == (PAGE, 1)
    freed, _ = run([[0.0, "ask", 1, 0, PAGE], [0.1, "sever", 0, "writer"]], 1)
    assert (freed["used"], freed["left"]) == (0, 0)
