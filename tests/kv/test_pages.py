"""Pages and slots have one owner at a time, come in runs as long as can be had, and keep prefixes."""

import random
from functools import partial

import pytest

from pdsim.kv.layout import StateShape, Tensor
from pdsim.kv.pages import ORDERS, PagePool, Pages, PrefixPagePool, SlotPool, StatePool, cut, page_pool, pair


def filled(pool: PagePool, *counts: int) -> PagePool:
    """Return *pool*, of which owners from 0 on have so many pages each."""
    for owner, count in enumerate(counts):
        pool.allocate(owner, count)
    return pool


@pytest.mark.parametrize(
    ("pages", "counts", "released", "wanted", "given"),
    [
        (20, (5, 1, 2, 1, 11), (0, 2), 2, ((6, 2),)),  # the smallest run that fits
        (9, (1,) * 9, (1, 4, 5, 8), 3, ((1, 1), (4, 2))),  # else the longest, in ascending order
        (6, (2, 2, 2), (0, 2, 1), 6, ((0, 6),)),  # neighbours that come back are one run again
    ],
)
def test_runs_are_as_long_as_can_be_had(pages, counts, released, wanted, given):
    pool = filled(PagePool(pages), *counts)
    for owner in released:
        pool.release(owner)
    assert pool.allocate(99, wanted) == given


@pytest.mark.parametrize(
    ("order", "given"),
    [
        ("queue", (3, 2, 1, 0, 5)),  # what was freed longest ago; of one owner its last page
        ("stack", (5, 4, 1, 0, 3)),  # what was freed last
    ],
)
def test_pages_are_given_out_in_the_order_of_releases(order, given):
    pool = filled(page_pool(order, 6), 2, 2, 2)
    for owner in (1, 0, 2):
        pool.release(owner)
    assert pool.allocate(9, 5) == tuple((page, 1) for page in given)
    assert pool.is_whole()


@pytest.mark.parametrize("block", [1, 2])
def test_a_queue_gives_pages_in_the_order_of_one_list(block):
    pool, draw, free = page_pool("queue", 40, block), random.Random(5), [*range(40)]
    for owner in range(200):
        count = block * draw.randrange(1, 5)
        if pool.allocate(owner, count) is not None:
            assert numbered(pool.owners[owner]) == [(page,) for page in free[:count]]
            del free[:count]
        if len(pool) > 4 or not free:
            gone = draw.choice([*pool.owners])
            pages = [page for (page,) in numbered(pool.owners[gone])]
            pool.release(gone)
            free += [page + n for page in pages[::block][::-1] for n in range(block)]
        assert pool.is_whole()


def test_what_a_queue_adds_to_an_owner_comes_last():
    pool = filled(page_pool("queue", 8), 2, 2)
    pool.extend(0, 2)
    assert (pool.owners[0], pool.count(0)) == (((0, 2), (4, 2)), 4)
    assert (pool.free, pool.used, pool.peak, len(pool)) == (2, 6, 6, 2)


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_refuses_the_same(order):
    pool = page_pool(order, 4)
    assert pool.allocate(1, 5) is None
    pool.allocate(1, 2)
    for wrong, error in (
        (lambda: pool.allocate(1, 1), ValueError),
        (lambda: pool.allocate(2, 0), ValueError),
        (lambda: pool.extend(2, 1), KeyError),
        (lambda: pool.release(2), KeyError),
    ):
        with pytest.raises(error):
            wrong()
    pool.release(1)
    assert (pool.free, pool.used) == (4, 0)


def test_pages_that_cannot_be_paired_or_reused_are_refused():
    with pytest.raises(ValueError, match="fewer pages"):
        pair(((0, 5),), ((0, 4),))
    with pytest.raises(ValueError, match="1 cached pages of 1: at least one must be computed"):
        served(4, [1]).reuse(2, 1, [1])


def numbered(runs):
    return [tuple(first + n for first in firsts) for *firsts, count in runs for n in range(count)]


def test_pairs_and_parts_are_those_of_single_pages():
    draw = random.Random(7)
    for _ in range(500):
        source, target = (tuple((draw.randrange(99), draw.choice((1, 1, 2, 5))) for _ in range(6)) for _ in range(2))
        pages = list(zip(*map(numbered, (source, target)), strict=False))
        source = source if len(pages) == len(numbered(source)) else ()
        runs, pages = pair(source, target), pages if source else []
        assert numbered(runs) == [(one, other) for (one,), (other,) in pages]
        first = draw.randrange(1 + len(pages))
        count = draw.randrange(1 + len(pages) - first)
        assert numbered(cut(runs, first, count)) == numbered(runs)[first : first + count]
        assert all(count > 0 for *_, count in cut(runs, first, count))


def test_slots_have_one_owner():
    slots = SlotPool(2)
    assert [slots.allocate(7), slots.allocate(8), slots.allocate(9)] == [0, 1, None]
    slots.release(7)
    assert slots.allocate(9) == 0
    with pytest.raises(KeyError):
        slots.release(7)
    with pytest.raises(ValueError, match="owner 9 has slot 0 already"):
        slots.allocate(9)


PAGES: Pages = ((4, 3),)
STATE = StateShape("mwa", 8, (Tensor((4, 8), 6), Tensor((4,), 20)), 12)


def state(window_pages: int = 6, slots: int = 2) -> StatePool:
    return StatePool(STATE, 4, slots, window_pages)


def test_state_takes_a_slot_and_pages_of_its_window():
    assert state().allocate(1, 10, 10, PAGES) == (((0, 1),), ((0, 3),), PAGES)
    assert [state().need(tokens, tokens) for tokens in (3, 8, 9, 16, 17)] == [1, 2, 3, 2, 3]
    assert [state().need(3, reach) for reach in (4, 8, 100)] == [1, 2, 3]


@pytest.mark.parametrize(("short", "count"), [({"slots": 1}, 1), ({"window_pages": 5}, 1), ({}, 2)])
def test_a_request_gets_all_its_state_or_none(short, count):
    pool = state(**short)
    got = [pool.allocate(owner, 10, 10, PAGES) for owner in (1, 2)]
    assert sum(rows is not None for rows in got) == len(pool) == count
    pool.release(1)
    assert pool.allocate(3, 10, 10, PAGES) is not None


def test_a_model_without_state_has_no_rows():
    pool = StatePool(StateShape(), 4, 0, 0)
    assert (pool.allocate(1, 10, 10, PAGES), len(pool)) == ((), 0)
    pool.release(1)


def serve(pool: PrefixPagePool, owner: int, keys: list[int], count: int | None = None) -> int:
    """Give *owner* its pages, compute them, and return how many were cached."""
    reused = pool.reuse(owner, count or len(keys) + 1, keys)
    pool.commit(owner, keys)
    return reused[1]


def served(pages: int, *prompts: list[int], **options) -> PrefixPagePool:
    pool = PrefixPagePool(pages, **options)
    for owner, keys in enumerate(prompts):
        serve(pool, owner, keys)
        pool.release(owner)
    return pool


def test_cached_prompts_are_reused_to_a_miss_and_evicted_backwards():
    pool = served(10, [1, 2, 3])
    assert (pool.free, pool.cached, pool.match([1, 2, 9, 3])) == (10, 3, 2)
    assert pool.reuse(2, 4, [1, 2, 9]) == (((0, 2), (3, 2)), 2)  # page 2 stays cached
    pool = served(6, [1, 2], [1, 3], [5])  # 2 is the oldest use
    assert pool.allocate(9, 3) is not None  # of the other two pages, and one of a cached
    assert [pool.match([1, 2]), pool.match([1, 3]), pool.match([5]), pool.evicted] == [1, 2, 1, 1]
    pool = served(9, [1, 2, 3, 4], limit=2)
    assert (pool.cached, pool.match([1, 2, 3])) == (2, 2)


def test_pages_in_use_are_shared_and_not_evicted():
    pool = PrefixPagePool(5)
    serve(pool, 1, [1, 2])
    assert serve(pool, 2, [1, 2]) == 2
    assert (pool.free, pool.in_use([1, 2])) == (1, 2)  # three for the first, one more for the second
    assert pool.reuse(3, 2, [8]) is None
    pool.release(1)
    assert (pool.free, pool.in_use([1, 2])) == (2, 2)
    pool.release(2)
    assert (pool.free, pool.used) == (5, 0)


@pytest.mark.parametrize(("eviction", "left"), [("block", 3), ("radix", 0)])
def test_a_radix_node_goes_whole_a_block_alone(eviction, left):
    pool = served(5, [1, 2, 3, 4], eviction=eviction)
    assert pool.allocate(9, 2) is not None
    assert pool.match([1, 2, 3, 4]) == left


def test_radix_evicts_no_page_in_use_before_one_computed_elsewhere():
    pool = PrefixPagePool(12, eviction="radix")
    pool.reuse(1, 4, [])
    pool.reuse(2, 6, [])
    pool.commit(1, [1, 2, 3, 4])
    pool.commit(2, [1, 2, 3, 4])
    pool.commit(2, [1, 2, 3, 4, 5])
    pool.release(1)
    pool.reuse(3, 6, [])  # 1 to 4 are evicted
    pool.commit(3, [1, 2, 3, 4, 5, 6])  # of one node, but for 5
    pool.release(3)
    assert pool.reuse(4, 6, [1, 2, 3, 4, 5]) is not None
    assert pool.reuse(5, 1, []) is not None  # 6 goes, 1 to 4 have a user
    assert pool.match([1, 2, 3, 4, 5, 6]) == 5


def test_a_radix_node_parts_where_prompts_do():
    pool = served(7, [1, 2, 3, 4], [1, 2, 9], eviction="radix")  # 1 and 2 are a node now, 3 and 4 another
    assert pool.allocate(3, 3) is not None
    assert [pool.match([1, 2, 3]), pool.match([1, 2, 9])] == [2, 3]


def test_an_equal_page_computed_twice_is_given_back():
    pool = PrefixPagePool(8)
    serve(pool, 0, [1, 2], 3)
    assert pool.reuse(1, 3, [])[1] == 0
    pool.commit(1, [1, 2])
    pool.release(1)
    assert (pool.cached, pool.free) == (2, 5)


def test_a_growing_request_evicts_and_keeps_its_order():
    pool = PrefixPagePool(4)
    serve(pool, 1, [1, 2], 2)
    pool.release(1)
    assert pool.reuse(2, 2, [])[0] == ((2, 2),)
    pool.extend(2, 2)
    assert (pool.owners[2], pool.free) == (((2, 2), (0, 2)), 0)


POOLS = {order: partial(page_pool, order) for order in ORDERS}
POOLS |= {eviction: partial(PrefixPagePool, eviction=eviction) for eviction in ("block", "radix")}


@pytest.mark.parametrize("make", POOLS.values(), ids=POOLS)
def test_no_page_is_ever_lost_or_given_twice(make):
    draw, pool, live = random.Random(7), make(pages=40), set()
    for owner in range(3000):
        shared = draw.randrange(6)
        keys = [*range(shared), *(1000 + 100 * (owner % 9) + 10 * shared + n for n in range(3))]
        if live and draw.random() < 0.5:
            gone = draw.choice(sorted(live))
            live.remove(gone)
            pool.release(gone)
        count, prefixes = len(keys) + 1 + draw.randrange(3), isinstance(pool, PrefixPagePool)
        enough = prefixes or count <= pool.free
        if (pool.reuse(owner, count, keys) if prefixes else pool.allocate(owner, count)) is None:
            assert prefixes or not enough
            continue
        assert enough
        live.add(owner)
        if prefixes and draw.random() < 0.8:
            pool.commit(owner, keys[: draw.randrange(len(keys) + 1)])
        if pool.free and draw.random() < 0.3:
            pool.extend(owner, 1)
        mine = [page for first, size in pool.owners[owner] for page in range(first, first + size)]
        assert len(set(mine)) == len(mine) == pool.count(owner)
        assert pool.is_whole()
    for owner in live:
        pool.release(owner)
    assert pool.free == 40
