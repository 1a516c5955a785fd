"""What the checkers know of ranks that are lost and come back: whose memory is whose, what may be left."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pdsim
from pdsim.kv.layout import REGION, KvLayout, KvShape
from pdsim.kv.pages import PagePool, SlotPool
from pdsim.serving.handoff.push import PushDecodeLeader
from pdsim.transfer import Batch, Region
from pdsim.verify.computed import ComputedChecker
from pdsim.verify.leaks import LeakChecker
from pdsim.verify.ownership import OwnershipChecker

PDSIM = Path(pdsim.__file__).parent
LAYOUT = KvLayout(KvShape(layers=1, heads=1, head_bytes=16), tp=1, page_size=4, pages=8, slots=2)


def member(name: str, **state: Any) -> Any:
    endpoint = SimpleNamespace(regions={}, moving={}, quarantined=0)
    device = SimpleNamespace(_buffers={}, memory=SimpleNamespace(_buffers={}))
    rank = SimpleNamespace(name=name, endpoint=endpoint, device=device)
    return SimpleNamespace(**{"rank": rank, "scheduler": None, "worker": None, "mover": None} | state)


def memory(owner: str, name: str = REGION) -> Region:
    return Region(owner, name, LAYOUT.size, 0, "gpu0")


def of_group(name: str, incarnation: str, leads: bool = False) -> Any:
    """Return a rank's program; one that *leads* gave page 0, and slot 1 as decode, to room 7."""
    scheduler = None
    if leads:
        handoff: Any = object.__new__(PushDecodeLeader)
        handoff.slots = SlotPool(2)
        scheduler = SimpleNamespace(pages=SimpleNamespace(pool=PagePool(8)), handoff=handoff, rooms={})
        scheduler.pages.pool.allocate(7, 1)
        handoff.slots.allocate(7)
    return member(name, incarnation=incarnation, mover=SimpleNamespace(layout=LAYOUT), scheduler=scheduler)


@pytest.fixture
def found():
    return []


@pytest.fixture
def owners(found):
    """Return the owners of a group whose leader was lost and has come back."""
    owners = OwnershipChecker(lambda *what: found.append(what), ComputedChecker(lambda *_: None))
    owners.joined(of_group("decode0.0", "decode0@1", leads=True))
    owners.joined(of_group("decode0.1", "decode0@1"))
    owners.joined(of_group("decode0.0", "", leads=True))
    return owners


@pytest.mark.parametrize(
    ("room", "offset", "what"),
    [
        (7, 0, []),  # what a leader owned at its end stays owned until its ranks have ended
        (8, 0, [("I3", "room 8 landed on kv row 0 of decode0.1, which is room 7's")]),
        (7, LAYOUT.item, [("I3", "room 7 landed on kv row 1 of decode0.1, which is nobody's")]),
        # a torn transfer may touch any of the ten buffers, from any byte on
        *((7, int(at) + 5, []) for at in LAYOUT.aux_offsets(0)),
        *(
            (7, int(at) + 5, [("I6", "room 7 landed on metadata slot 1 of decode0.1, which is not its own")])
            for at in LAYOUT.aux_offsets(1)
        ),
    ],
)
def test_what_lands_belongs_to_its_room(owners, found, room, offset, what):
    owners.landed(Batch(memory("prefill0.0"), memory("decode0.1"), [0], [offset], [16]), f"{room}/0/grouped")
    assert found == what


def test_a_rank_of_no_incarnation_is_not_written(owners, found):
    owners.joined(of_group("decode0.1", ""))
    owners.landed(Batch(memory("prefill0.0"), memory("decode0.1"), [0], [0], [16]), "7/0/grouped")
    assert found == [("I3", "room 7 landed on decode0.1, which is in no incarnation of its instance")]


def left(table: Any) -> list[str]:
    """Return what is said of a rank that had an empty table when requests began, and has *table* in the end."""
    texts: list[str] = []
    leftovers = LeakChecker(lambda _, text: texts.append(text))
    rank = member("prefill0.0", table=type(table)())
    for each in (rank, member("decode0.0"), member("decode0.1"), member("decode1.0")):
        leftovers.joined(each)
    leftovers.begin()
    rank.table = table
    leftovers.check("prefill0.0")
    return texts


@pytest.mark.parametrize(
    "table",
    [
        {"decode0@2": [1, 2], "decode1@1": [1]},
        {"decode0.0", "decode0.1"},
        {("prefill0", "decode0"), ("prefill0", "decode1")},
    ],
)
def test_a_table_of_peers_may_grow(table):
    assert left(table) == []


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ({"decode0@1", "decode0@2"}, "2 entries"),  # two incarnations of one instance
        ({"decode2@1"}, "1 entries"),  # nobody
        ({"decode0@1": [1, 2, 3]}, "1 entries"),  # more than it has ranks
        ([3.5], "1 entries"),
        ({("prefill0", "decode7")}, "1 entries"),
        ({7: "a room"}, "rooms [7]"),
    ],
)
def test_nothing_else_may_be_left(table, what):
    assert left(table) == [f"prefill0.0.table still has {what} when all is over"]
