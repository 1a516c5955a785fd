"""Pages have one owner at a time, and come in runs as long as can be had."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdsim.kv.pages import ORDERS, FreeQueue, FreeStack, PagePool, SlotPool, page_pool


def test_pages_are_handed_out_from_the_lowest():
    pool = PagePool(10)
    assert [pool.allocate(1, 3), pool.allocate(2, 4)] == [((0, 3),), ((3, 4),)]
    assert (pool.free, pool.used) == (3, 7)


def test_the_smallest_run_that_fits_is_taken():
    pool = PagePool(20)
    for owner, count in enumerate((5, 1, 2, 1, 11)):
        pool.allocate(owner, count)
    for owner in (0, 2):
        pool.release(owner)
    assert pool.allocate(9, 2) == ((6, 2),)


def test_without_such_a_run_the_longest_are_joined_in_ascending_order():
    pool = PagePool(9)
    for owner in range(9):
        pool.allocate(owner, 1)
    for owner in (1, 4, 5, 8):
        pool.release(owner)
    assert pool.allocate(9, 3) == ((1, 1), (4, 2))


def test_neighbours_that_come_back_are_one_run_again():
    pool = PagePool(6)
    for owner in range(3):
        pool.allocate(owner, 2)
    for owner in (0, 2, 1):
        pool.release(owner)
    assert pool.allocate(9, 6) == ((0, 6),)


def test_slots_have_one_owner():
    slots = SlotPool(2)
    assert [slots.allocate(7), slots.allocate(8), slots.allocate(9)] == [0, 1, None]
    slots.release(7)
    assert slots.allocate(9) == 0
    with pytest.raises(KeyError, match="owner 7 has no slot to release"):
        slots.release(7)
    with pytest.raises(ValueError, match="owner 9 has slot 0 already"):
        slots.allocate(9)


class Pool(RuleBasedStateMachine):
    """Any history of allocations and releases."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(24)
        self.owned: dict[int, set[int]] = {}
        self.next = 0

    @rule(count=st.integers(1, 12))
    def allocate(self, count: int) -> None:
        free = self.pool.free
        runs = self.pool.allocate(self.next, count)
        assert (runs is None) == (count > free)
        if runs is not None:
            assert runs == tuple(sorted(runs))
            self.owned[self.next] = {page for start, size in runs for page in range(start, start + size)}
            assert len(self.owned[self.next]) == count
        self.next += 1

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.owned)))
        self.pool.release(owner)
        del self.owned[owner]

    @invariant()
    def every_page_has_one_owner_or_none(self) -> None:
        pages = [page for owned in self.owned.values() for page in owned]
        assert len(pages) == len(set(pages)) == self.pool.used
        assert set(pages) <= set(range(24))


Pool.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestAnyHistory = Pool.TestCase


# --- the free queue -----------------------------------------------------------------------------------------------


def test_a_queue_gives_out_what_was_freed_longest_ago():
    pool = FreeQueue(6)
    assert [pool.allocate(owner, 2) for owner in range(3)] == [((0, 2),), ((2, 2),), ((4, 2),)]
    for owner in (1, 0, 2):
        pool.release(owner)
    assert pool.allocate(9, 5) == ((3, 1), (2, 1), (1, 1), (0, 1), (5, 1))


def test_pages_of_a_queue_ascend_again_when_all_have_been_used_twice():
    pool = FreeQueue(4)
    for runs in (((0, 4),), ((3, 1), (2, 1), (1, 1), (0, 1)), ((0, 4),)):
        assert pool.allocate(1, 4) == runs
        pool.release(1)


def test_a_stack_gives_out_what_was_freed_last():
    pool = FreeStack(6)
    assert [pool.allocate(1, 2), pool.allocate(2, 2)] == [((0, 2),), ((2, 2),)]
    pool.release(1)
    pool.release(2)
    assert pool.allocate(3, 3) == ((3, 1), (2, 1), (1, 1))
    assert pool.is_whole()


def test_what_a_queue_adds_to_an_owner_comes_last():
    pool = FreeQueue(8)
    pool.allocate(1, 2)
    pool.allocate(2, 2)
    assert pool.extend(1, 2)
    assert (pool.owned(1), pool.count(1), pool.free, pool.used, pool.peak, len(pool)) == (
        ((0, 2), (4, 2)),
        4,
        2,
        6,
        6,
        2,
    )


@pytest.mark.parametrize("pool", [PagePool(4), FreeQueue(4), FreeStack(4)], ids=ORDERS)
def test_every_order_refuses_the_same(pool: PagePool | FreeQueue):
    assert pool.allocate(1, 5) is None
    pool.allocate(1, 2)
    assert not pool.extend(1, 3)
    for wrong, error in (
        (lambda: pool.allocate(1, 1), ValueError),
        (lambda: pool.allocate(2, 0), ValueError),
        (lambda: pool.extend(1, 0), ValueError),
        (lambda: pool.extend(2, 1), KeyError),
        (lambda: pool.release(2), KeyError),
    ):
        with pytest.raises(error):
            wrong()
    pool.release(1)
    assert (pool.free, pool.used) == (4, 0)


def test_an_unknown_order_is_refused_with_those_that_there_are():
    assert [type(page_pool(order, 4)) for order in ORDERS] == [PagePool, FreeQueue, FreeStack]
    with pytest.raises(ValueError, match="one of best_fit, queue, stack, got 'random'"):
        page_pool("random", 4)
