"""The decode ring: slots never overlap, nothing is lost, and everybody in line is served or can leave."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdsim.core.errors import OutOfMemory
from pdsim.kv.staging.ring import Ring, Slot


def test_an_empty_ring_takes_what_does_not_fit_behind_its_head():
    ring: Ring[str] = Ring(100)
    assert ring.request("a", 60) == Slot(0, 60)
    ring.release("a")
    assert ring.request("b", 70) == Slot(100, 70)  # the round's last 40 bytes are left out, and cost nothing
    assert ring.used == 70


def test_a_slot_of_the_whole_ring_follows_another():
    ring: Ring[str] = Ring(100)
    assert ring.request("a", 100) == Slot(0, 100)
    assert ring.request("b", 100) is None
    ring.release("a")
    assert list(ring.advance()) == [("b", Slot(100, 100))]


def test_slots_go_round():
    ring: Ring[int] = Ring(100)
    assert [ring.request(key, 40) for key in range(3)] == [Slot(0, 40), Slot(40, 40), None]
    ring.release(0)
    assert list(ring.advance()) == [(2, Slot(100, 40))]


def test_nobody_overtakes_in_line():
    ring: Ring[str] = Ring(100)
    ring.request("a", 80)
    assert ring.request("large", 90) is None
    assert ring.request("small", 10) is None  # would fit now, but then the large one might wait for ever
    ring.release("a")
    assert list(ring.advance()) == [("large", Slot(100, 90)), ("small", Slot(190, 10))]


def test_who_leaves_the_line_lets_the_next_go():
    ring: Ring[str] = Ring(100)
    ring.request("a", 80)
    ring.request("large", 90)
    ring.request("small", 10)
    assert ring.withdraw("large")
    assert not ring.withdraw("large")
    assert list(ring.advance()) == [("small", Slot(80, 10))]


def test_a_slot_in_quarantine_costs_its_own_bytes_only():
    ring: Ring[object] = Ring(100)
    ring.request("first", 10)
    ring.request("stuck", 20)
    ring.release("first")
    for turn in range(50):
        assert ring.request(turn, 40) is not None
        ring.release(turn)
    assert ring["stuck"] == Slot(10, 20)
    assert ring.used == 20


def test_what_never_fits_is_refused_at_once():
    ring: Ring[str] = Ring(100)
    with pytest.raises(OutOfMemory, match=r"101 bytes exceeds the ring of 100; raise kv.staging_ring"):
        ring.request("a", 101)
    assert len(ring) == 0


def test_a_key_has_one_slot_and_is_freed_once():
    ring: Ring[str] = Ring(100)
    ring.request("a", 10)
    with pytest.raises(ValueError, match="a has a slot already"):
        ring.request("a", 10)
    ring.release("a")
    with pytest.raises(KeyError):
        ring.release("a")


class Rings(RuleBasedStateMachine):
    """A ring that barely fits what it is asked for, beside what it should hold."""

    SIZE = 16

    def __init__(self) -> None:
        super().__init__()
        self.ring: Ring[int] = Ring(self.SIZE)
        self.asked = 0
        self.slots: dict[int, Slot] = {}
        self.line: list[int] = []
        self.high = -1

    def give(self, key: int, slot: Slot) -> None:
        assert slot.position > self.high or self.high < 0
        self.high = slot.position
        self.slots[key] = slot

    def advance(self) -> None:
        for key, slot in self.ring.advance():
            assert key == self.line.pop(0)
            self.give(key, slot)

    @rule(size=st.integers(1, SIZE))
    def request(self, size: int) -> None:
        self.asked += 1
        slot = self.ring.request(self.asked, size)
        if slot is None:
            self.line.append(self.asked)
        else:
            assert not self.line
            assert slot.size == size
            self.give(self.asked, slot)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.slots)))
        self.ring.release(key)
        del self.slots[key]
        self.advance()

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.line))
        assert self.ring.withdraw(key)
        self.line.remove(key)
        self.advance()

    @invariant()
    def slots_are_disjoint_and_inside(self) -> None:
        taken = [False] * self.SIZE
        for slot in self.slots.values():
            offset = slot.position % self.SIZE
            assert offset + slot.size <= self.SIZE
            assert not any(taken[offset : offset + slot.size])
            taken[offset : offset + slot.size] = [True] * slot.size
        assert self.ring.used == sum(taken)

    @invariant()
    def accounts_are_exact(self) -> None:
        assert len(self.ring) == len(self.slots) + len(self.line)

    @invariant()
    def an_empty_ring_lets_nobody_wait(self) -> None:
        assert self.slots or not self.line


TestRings = Rings.TestCase
TestRings.settings = settings(max_examples=60, stateful_step_count=40)
