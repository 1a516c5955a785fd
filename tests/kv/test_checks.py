"""What the checkers know of ranks that are lost and come back: whose memory is whose, what may be left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pdsim
from experiments.faults.scenario import KINDS, Scenario, draw
from pdsim.kv.layout import REGION, KvLayout, KvShape
from pdsim.kv.pages import PagePool, SlotPool
from pdsim.kv.push import KvSender
from pdsim.serving.handoff.push import PushDecodeLeader
from pdsim.serving.prefill import PrefillWorker
from pdsim.sim.model import Model
from pdsim.transfer import Batch, Region
from pdsim.verify import leaks
from pdsim.verify.computed import ComputedChecker
from pdsim.verify.invariants import InvariantChecker
from pdsim.verify.laws import LawChecker
from pdsim.verify.leaks import LeakChecker
from pdsim.verify.ownership import OwnershipChecker

PDSIM = Path(pdsim.__file__).parent
LAYOUT = KvLayout(KvShape(layers=1, heads=1, head_bytes=16), tp=1, page_size=4, pages=8, slots=2)


def member(name: str, **state: Any) -> Any:
    rank = SimpleNamespace(name=name, endpoint=SimpleNamespace(regions={}))
    return SimpleNamespace(**{"rank": rank, "scheduler": None, "worker": None} | state)


def ownership(found: list[tuple[str, str]]) -> OwnershipChecker:
    """Return a checker that tells *found*."""

    def tell(invariant: str, text: str) -> None:
        found.append((invariant, text))

    return OwnershipChecker(tell, ComputedChecker(lambda *_: None))


# --- whose memory is whose -----------------------------------------------------------------------------------------


def scheduling() -> Any:
    pages, handoff = SimpleNamespace(pool=PagePool(8)), object.__new__(PushDecodeLeader)
    handoff.slots = SlotPool(2)
    return SimpleNamespace(pages=pages, handoff=handoff, rooms={})


def leader(incarnation: str) -> Any:
    return member("decode0.0", incarnation=incarnation, mover=SimpleNamespace(layout=LAYOUT), scheduler=scheduling())


def follower(incarnation: str) -> Any:
    return member("decode0.1", incarnation=incarnation, mover=SimpleNamespace(layout=LAYOUT))


def landed(owners: OwnershipChecker, room: int, offset: int) -> None:
    source = Region("prefill0.0", REGION, LAYOUT.size, 0, "gpu0")
    target = Region("decode0.1", REGION, LAYOUT.size, 0, "gpu1")
    owners.landed(Batch(source, target, [0], [offset], [16]), f"{room}/0/grouped")


@pytest.fixture
def found() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def owners(found: list[tuple[str, str]]) -> OwnershipChecker:
    """Return the owners of a group whose leader, in its first incarnation, gave page 0 and slot 1 to room 7."""
    owners = ownership(found)
    first = leader("decode0@1")
    first.scheduler.pages.pool.allocate(7, 1)
    first.scheduler.handoff.slots.allocate(7)
    for rank in (first, follower("decode0@1"), leader("")):
        owners.joined(rank)
    return owners


def test_what_a_leader_owned_at_its_end_stays_owned_until_its_ranks_have_ended(
    owners: OwnershipChecker, found: list[Any]
):
    landed(owners, 7, 0)
    assert found == []
    landed(owners, 8, 0)
    assert found == [("I3", "room 8 landed on kv row 0 of decode0.1, which is room 7's")]


def test_what_it_did_not_own_is_nobodys(owners: OwnershipChecker, found: list[Any]):
    landed(owners, 7, LAYOUT.item)
    assert found == [("I3", "room 7 landed on kv row 1 of decode0.1, which is nobody's")]


def test_a_rank_of_a_new_incarnation_is_not_written_before_it_has_met_anyone(
    owners: OwnershipChecker, found: list[Any]
):
    owners.joined(follower(""))
    landed(owners, 7, 0)
    assert found == [("I3", "room 7 landed on decode0.1, which is in no incarnation of its instance")]


@pytest.mark.parametrize("buffer", range(10))
def test_any_piece_of_a_metadata_row_says_whose_slot_it_is_in(
    owners: OwnershipChecker, found: list[Any], buffer: int
):
    # a torn transfer may touch any of the ten buffers, from any byte on
    landed(owners, 7, int(LAYOUT.aux_offsets(0)[buffer]) + 5)
    assert found == []
    landed(owners, 7, int(LAYOUT.aux_offsets(1)[buffer]) + 5)
    assert found == [("I6", "room 7 landed on metadata slot 1 of decode0.1, which is not its own")]


def test_a_gather_reads_pages_of_the_room_that_it_is_for(found: list[Any]):
    owners = ownership(found)
    sender: Any = object.__new__(KvSender)  # of which only this is asked
    sender.layout, sender._gather = LAYOUT, lambda state, batch: None
    mover = SimpleNamespace(layout=LAYOUT, sender=sender)
    worker = object.__new__(PrefillWorker)
    prefill = member("prefill0.0", incarnation="prefill0@1", mover=mover, worker=worker, scheduler=scheduling())
    prefill.scheduler.pages.pool.allocate(7, 1)
    owners.joined(prefill)
    pool, block = (
        Region("prefill0.0", REGION, LAYOUT.size, 0, "gpu0"),
        Region("prefill0.0", "gather1", 64, 0, "gpu0"),
    )
    for page in (0, 1):
        batch = Batch(pool, block, [page * LAYOUT.item], [0], [16])
        sender._gather(SimpleNamespace(room=7), batch)
        owners.copied(batch)
    assert found == [("I3", "room 7 gathered from kv row 1 of prefill0.0, which is nobody's")]


# --- what may be left ----------------------------------------------------------------------------------------------


def left(table: Any, lost: bool = True) -> list[str]:
    """Return what is said of a rank that had an empty table when requests began, and has *table* in the end."""
    texts: list[str] = []
    leftovers = LeakChecker(lambda _, text: texts.append(text))
    rank = member("prefill0.0", table=type(table)())
    for each in (rank, member("decode0.0"), member("decode0.1"), member("decode1.0")):
        leftovers.joined(each)
    leftovers.begin()
    if lost:
        leftovers.lost()
    rank.table = table
    leftovers.check("prefill0.0")
    return texts


PEERS: list[Any] = [
    {"decode0@2": [1, 2], "decode1@1": [1]},
    {"decode0.0", "decode0.1"},
    {("prefill0", "decode0"), ("prefill0", "decode1")},
]


@pytest.mark.parametrize("table", PEERS)
def test_a_table_of_peers_may_have_grown_once_one_was_lost_and_not_before(table: Any):
    assert left(table) == []
    assert left(table, lost=False) == [f"prefill0.0.table still has {len(table)} entries when all is over"]


@pytest.mark.parametrize(
    "table",
    [{"decode0@1", "decode0@2"}, {"decode2@1"}, {"decode0@1": [1, 2, 3]}, [3.5], {("prefill0", "decode7")}],
    ids=["two incarnations of one instance", "nobody", "more than it has ranks", "no names", "a pair with nobody"],
)
def test_what_is_no_table_of_peers_may_not(table: Any):
    assert left(table) == [f"prefill0.0.table still has {len(table)} entries when all is over"]


def test_nothing_of_a_room_may_be_left_whoever_was_lost():
    assert left({7: "a room"}) == ["prefill0.0.table still has rooms [7] when all is over"]


def test_what_a_rank_had_when_requests_began_it_may_keep():
    leftovers = LeakChecker(lambda _, text: pytest.fail(text))
    leftovers.joined(member("prefill0.0", sizes=[1, 2, 3], times=np.zeros(3)))
    leftovers.begin()
    leftovers.check("prefill0.0")


# --- what is watched -----------------------------------------------------------------------------------------------


def replaced(scenario: Scenario) -> set[str]:
    """Return the methods that the checkers replace on the objects of ranks in a run of *scenario*."""
    checker = InvariantChecker(lambda *_: False)
    model = Model(scenario.machine, scenario.engine, memory="tracked", seed=1, limit=100.0, observer=checker)
    model.run(scenario.specs)
    laws = LawChecker()
    parts: list[Any] = []
    for rank in checker._members.values():
        laws.joined(rank)
        if rank.rank.name != "router":
            scheduler = rank.scheduler
            parts += [rank.worker, rank.mover, scheduler, *vars(rank.mover).values()]
            parts += [] if scheduler is None else vars(scheduler).values()
    names = {(type(part), name) for part in parts for name in getattr(part, "__dict__", {})}
    return {f"{kind.__name__}.{name}" for kind, name in names if callable(getattr(kind, name, None))}


BOTH = {
    "DecodeScheduler.poll",
    "Preemption.preempt",
    "PrefillScheduler.iteration_seconds",
    "PrefillScheduler.next_forward",
    "PrefillWorker.compute",
    "RunningBatch.join",
}
PUSH = BOTH | {"KvReceiver.forget", "KvReceiver.reserve", "KvSender._gather", "KvSender.send"}
PULL = BOTH - {"DecodeScheduler.poll"} | {"KvReader.forget", "KvReader.read", "KvSource.send"}


@pytest.mark.parametrize(("kind", "methods"), [("delays", PUSH), ("pulls", PULL)])
def test_checkers_replace_each_method_that_they_watch(kind: str, methods: set[str]):
    assert replaced(draw(0, 2, 1.0, frozenset(KINDS) - {kind})) == methods


def test_attributes_that_are_not_counted_exist():
    source = "".join(path.read_text() for room in ("kv", "serving") for path in (PDSIM / room).rglob("*.py"))
    names = leaks._NOT_STATE | leaks._POOLS | leaks._NUMBERED
    assert [name for name in sorted(names) if f"self.{name}" not in source and f"\n    {name}: " not in source] == []
