"""The staging ring and who is granted what and when, what is scattered, and when all is at rest."""

import random
from typing import Any

import pytest

from pdsim.core.errors import OutOfMemory
from pdsim.kv.contents import KvPool
from pdsim.kv.layout import Grid, KvLayout, KvShape, RankMap
from pdsim.kv.messages import Arrival, StagingRelease, StagingReply, StagingRequest, decode
from pdsim.kv.policy import Staging
from pdsim.kv.receiver import Ring, Slot, StagingReceiver
from pdsim.sim.memory import LAUNCH
from pdsim.sim.model import Model
from pdsim.transfer import Program
from pdsim.transfer.job import Place, Rank, RankSpec
from tests.support.configs import ENGINE, MACHINE


def ring(*sizes: int) -> Ring:
    """Return a ring of 100 bytes that slots of *sizes*, by number, were asked of."""
    made = Ring(100)
    for number, size in enumerate(sizes):
        made.request(number, size)
    return made


@pytest.mark.parametrize(
    ("sizes", "given"),
    [
        ([60, 70], [(1, Slot(100, 70))]),  # the round's last 40 bytes are left out
        ([100, 100], [(1, Slot(100, 100))]),
        ([40, 40, 40], [(2, Slot(100, 40))]),
        ([80, 90, 10], [(1, Slot(100, 90)), (2, Slot(190, 10))]),  # the small one fits, but does not overtake
    ],
)
def test_slots_go_round_in_the_order_of_the_line(sizes, given):
    one = ring(*sizes)
    assert list(one.advance()) == []
    one.release(0)
    assert list(one.advance()) == given


def test_a_key_has_one_fitting_slot_freed_once():
    one = ring(10)
    with pytest.raises(OutOfMemory, match=r"101 bytes exceeds the ring of 100; raise kv.staging_ring"):
        one.request(1, 101)
    with pytest.raises(ValueError, match="0 has a slot already"):
        one.request(0, 10)
    one.release(0)
    with pytest.raises(KeyError):
        one.release(0)
    assert len(one) == 0


def test_slots_are_disjoint_and_given_in_order():
    draw, one, high = random.Random(7), Ring(16), -1
    slots: dict[int, Slot] = {}
    line: list[int] = []
    for key in range(5000):
        given: list[tuple[int, Slot]] = []
        action = draw.choice(["request"] * (len(line) < 8) + ["release"] * bool(slots) + ["withdraw"] * bool(line))
        if action == "request":
            slot = one.request(key, draw.randint(1, 16))
            assert slot is None or not line
            line.append(key)
            given = [] if slot is None else [(key, slot)]
        elif action == "release":
            gone = draw.choice(sorted(slots))
            one.release(gone)
            del slots[gone]
            given = list(one.advance())
        else:
            gone = draw.choice(line)
            line.remove(gone)
            assert one.withdraw(gone)
            given = list(one.advance())
        for other, slot in given:
            assert (other, slot.position > high) == (line.pop(0), True)
            high, slots[other] = slot.position, slot
        taken = [slot.position % 16 + byte for slot in slots.values() for byte in range(slot.size)]
        assert len(set(taken)) == len(taken) == one.used
        assert max(taken, default=0) < 16
        assert len(one) == len(slots) + len(line)
        assert slots or not line


SHAPE = KvShape(layers=2, heads=2, head_bytes=1 << 16)
LAYOUT = KvLayout(SHAPE, tp=1, page_size=4, pages=8, slots=2)
PAGE = 4 * 4 * (1 << 16)
"""Bytes of a page of one head, in two layers' K and V."""
COPY = 2 * PAGE / MACHINE.gpu.memory_rate + LAUNCH
"""Seconds to scatter it: each byte is read and written."""
HERE = "tests.kv.test_receiver"
ASK, ARRIVE = [0.0, "ask", 1, 0, PAGE], [0.5, "arrive", 1, 0]
FREE = {"used": 0, "left": 0}


def program(rank: Rank, *, script: list[list[Any]], wait: float, scatter: str) -> Program:
    """Do what *script* says, at the times it says; return what was reported and when, and what is left."""
    reports: list[list[Any]] = []
    landing = StagingReceiver(
        KvPool(rank, LAYOUT, 0, 0),
        RankMap(SHAPE, Grid(2), Grid(1)),
        Staging(ring=2 * PAGE, buffer=1, wait=wait, scatter=scatter),
        lambda arrival, reason: reports.append([rank.clock.now, "scattered", arrival.room, reason]),
        lambda message: reports.append([rank.clock.now, "quiet", message.room]),
    )

    def arrive(room: int, chunk: int, index: int = 0) -> None:
        landing.scatter(Arrival("decode0@1", room, index, 0, 1, 0.0, 0.0, 0.0, chunk))

    def ask(room: int, chunk: int, size: int, index: int = 0) -> None:
        landing.ask("writer", StagingRequest("decode0@1", room, index, chunk, size, ((room, 1),), "prefill0@1"))

    actions = {"ask": ask, "arrive": arrive, "forget": landing.forget, "sever": landing.sever}
    actions["return"] = lambda room: landing.give_back(StagingRelease(room, 0))
    for at, action, *arguments in script:
        yield rank.clock.at(at)
        actions[action](*arguments)
    yield rank.clock.timeout(10.0)
    return {"reports": reports, "used": landing.ring.used, "left": len(landing), "refused": landing.refused}


def writer(rank: Rank, *, answers: int) -> Program:
    """Return the answers that come: room, chunk and position."""
    grants = []
    for _ in range(answers):
        grant = decode((yield rank.channel.receive()).payload)
        assert isinstance(grant, StagingReply)
        grants.append([grant.room, grant.chunk, grant.position])
    return grants


def run(*script: list[Any], wait: float = 1.0, scatter: str = "chunk") -> tuple[list[Any], list[Any], Any]:
    """Return what was reported, the answers, and what is left."""
    answers = sum(step[1] == "ask" for step in script)
    ranks = [
        RankSpec("reader", f"{HERE}:program", Place(0, 0), {"script": script, "wait": wait, "scatter": scatter}),
        RankSpec("writer", f"{HERE}:writer", Place(0, 1), {"answers": answers}),
    ]
    outcome = Model(MACHINE, ENGINE).run(ranks)
    assert not any(rank.error for rank in outcome.ranks.values())
    value = outcome.ranks["reader"].value
    left = {name: value[name] for name in ("used", "left", "refused") if name != "refused" or value[name]}
    return value["reports"], outcome.ranks["writer"].value, left


def test_a_block_is_scattered_and_its_slot_freed():
    reports, answers, left = run(ASK, ARRIVE)
    assert reports == [[pytest.approx(0.5 + COPY, rel=1e-12), "scattered", 1, ""]]
    assert (answers, left) == ([[1, 0, 0]], FREE)


@pytest.mark.parametrize(("scatter", "first"), [("chunk", 0.7), ("writer", 0.5)])
def test_a_chunk_is_scattered_when_all_its_writers_arrived(scatter, first):
    reports, _, left = run(ASK, [*ASK, 1], ARRIVE, [0.7, "arrive", 1, 0, 1], scatter=scatter)
    assert reports[0][0] == pytest.approx(first + COPY, rel=1e-3)
    assert [line[1:] for line in reports] == [["scattered", 1, ""]] * 2
    assert left == FREE


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        # after the scatter of the one before
        ([[0.0, "ask", 1, 0, 2 * PAGE], [0.0, "ask", 2, 0, 2 * PAGE], ARRIVE], [[1, 0, 0], [2, 0, 2 * PAGE]]),
        # when that is returned
        ([[*ASK[:4], 2 * PAGE], [0.0, "ask", 2, 0, PAGE], [0.1, "return", 1]], [[1, 0, 0], [2, 0, 2 * PAGE]]),
        # when the one before has waited too long
        ([ASK, [0.1, "ask", 2, 0, 2 * PAGE], [0.2, "ask", 3, 0, PAGE]], [[1, 0, 0], [2, 0, -1], [3, 0, PAGE]]),
        # never, for it exceeds the ring
        ([[0.0, "ask", 1, 0, 2 * PAGE + 1]], [[1, 0, -1]]),
    ],
)
def test_who_waits_is_answered(script, wanted):
    _, answers, left = run(*script)
    assert answers == wanted
    assert left.get("refused", 0) == sum(position < 0 for *_, position in wanted)


def test_a_forgotten_room_is_not_scattered():
    script = [ASK, [0.1, "forget", 1]]
    reports, _, left = run(*script)
    assert (reports, left) == ([[0.1, "quiet", 1]], {"used": PAGE, "left": 1})
    for end in ("arrive", 1, 0), ("return", 1):
        assert run(*script, [0.3, *end]) == (reports, [[1, 0, 0]], FREE)


def test_a_block_that_waits_goes_with_its_room():
    script = [ASK, [*ASK, 1], [0.5, "arrive", 1, 0, 1], [0.6, "return", 1]]  # its writer returns nothing
    assert run(*script)[2] == {"used": PAGE, "left": 1}
    reports, _, left = run(*script, [0.7, "forget", 1])
    assert (reports, left) == ([[0.7, "quiet", 1]], FREE)


def test_a_room_is_quiet_only_when_its_scatter_has_ended():
    half = 0.5 + COPY / 2
    reports, _, left = run(ASK, ARRIVE, [half, "forget", 1], [half, "return", 1])
    assert (reports, left) == ([[pytest.approx(0.5 + COPY, rel=1e-12), "quiet", 1]], FREE)


@pytest.mark.parametrize(
    ("script", "left"),
    [
        ([[0.0, "forget", 1], [0.1, *ASK[1:]], [0.2, "return", 1]], FREE),  # asked after it was forgotten
        ([ASK, [0.1, "return", 1], [0.2, "arrive", 1, 0]], FREE),  # arrived after it was returned
        ([ASK, [0.1, "sever", "writer"]], FREE),
        ([ASK, [0.1, "sever", "another"]], {"used": PAGE, "left": 1}),
    ],
)
def test_slots_go_back_to_the_ring_unscattered(script, left):
    reports, _, kept = run(*script)
    assert [line for line in reports if line[1] == "scattered"] == []
    assert kept == left
