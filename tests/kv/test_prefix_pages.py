"""A pool whose pages keep prefixes: shared by those that have them, evicted from the end of the oldest prompt."""

from __future__ import annotations

import random

import pytest

from pdsim.kv.prefix_pages import PrefixPagePool


def serve(pool: PrefixPagePool, owner: int, keys: list[int], count: int | None = None) -> int:
    """Give *owner* its pages, compute them, and return how many were cached."""
    reused = pool.reuse(owner, count or len(keys) + 1, keys)
    assert reused is not None
    pool.commit(owner, keys)
    return reused[1]


def test_a_released_prompt_is_found_up_to_the_first_missing_page():
    pool = PrefixPagePool(10)
    assert serve(pool, 1, [1, 2, 3]) == 0
    pages = pool.owned(1)
    pool.release(1)
    assert (pool.free, pool.cached) == (10, 3)
    assert pool.match([1, 2, 9, 3]) == 2
    again, found = pool.reuse(2, 4, [1, 2, 9])
    assert (again, found) == (((0, 2), (3, 2)), 2)  # page 2 stays cached
    assert pages == ((0, 4),)


def test_pages_in_use_are_shared_and_not_evicted():
    pool = PrefixPagePool(5)
    serve(pool, 1, [1, 2])
    assert serve(pool, 2, [1, 2]) == 2
    assert pool.free == 1  # three for the first, one more for the second
    assert pool.in_use([1, 2]) == 2
    assert pool.reuse(3, 2, [8]) is None
    pool.release(1)
    assert (pool.free, pool.in_use([1, 2])) == (2, 2)
    pool.release(2)
    assert (pool.free, pool.used) == (5, 0)


def test_the_end_of_the_oldest_prompt_is_evicted_first():
    pool = PrefixPagePool(6)
    for owner, keys in enumerate(([1, 2], [1, 3], [5])):  # 2 is the oldest use
        serve(pool, owner, keys)
        pool.release(owner)
    assert pool.cached == 4
    assert pool.allocate(9, 3) is not None  # of the other two pages, and one of a cached
    assert [pool.match([1, 2]), pool.match([1, 3]), pool.match([5])] == [1, 2, 1]
    assert pool.evicted == 1


def test_a_radix_node_goes_whole_and_parts_where_prompts_do():
    for eviction, left in (("block", 3), ("radix", 0)):
        pool = PrefixPagePool(5, eviction)
        serve(pool, 1, [1, 2, 3, 4])
        pool.release(1)
        assert pool.allocate(2, 2) is not None
        assert pool.match([1, 2, 3, 4]) == left
    pool = PrefixPagePool(7, "radix")
    serve(pool, 1, [1, 2, 3, 4])
    pool.release(1)
    serve(pool, 2, [1, 2, 9])  # 1 and 2 are a node now, 3 and 4 another
    pool.release(2)
    assert pool.allocate(3, 3) is not None
    assert [pool.match([1, 2, 3]), pool.match([1, 2, 9])] == [2, 3]


def test_an_equal_page_that_was_computed_twice_is_given_back():
    pool = PrefixPagePool(8)
    assert [serve(pool, owner, [1, 2], 3) if owner == 0 else pool.reuse(owner, 3, [])[1] for owner in (0, 1)] == [
        0,
        0,
    ]
    pool.commit(1, [1, 2])
    pool.release(1)
    assert (pool.cached, pool.free) == (2, 5)


def test_a_limit_holds_for_pages_without_users():
    pool = PrefixPagePool(9, limit=2)
    serve(pool, 1, [1, 2, 3, 4])
    assert pool.cached == 4
    pool.release(1)
    assert (pool.cached, pool.match([1, 2, 3])) == (2, 2)


def test_a_growing_request_evicts_and_keeps_the_order_of_its_pages():
    pool = PrefixPagePool(4)
    serve(pool, 1, [1, 2], 2)
    pool.release(1)
    assert pool.reuse(2, 2, [])[0] == ((2, 2),)
    assert pool.extend(2, 2)
    assert pool.owned(2) == ((2, 2), (0, 2))
    assert not pool.extend(2, 1)


def test_a_prompt_that_is_cached_whole_is_refused():
    pool = PrefixPagePool(4)
    serve(pool, 1, [1])
    with pytest.raises(ValueError, match="1 cached pages of 1: at least one must be computed"):
        pool.reuse(2, 1, [1])


@pytest.mark.parametrize("eviction", ["block", "radix"])
def test_no_page_is_ever_lost_or_given_twice(eviction: str):
    draw, pool, live = random.Random(7), PrefixPagePool(40, eviction), {}
    for owner in range(3000):
        shared = draw.randrange(6)
        keys = [*range(shared), *(1000 + 100 * (owner % 9) + 10 * shared + n for n in range(3))]
        if live and draw.random() < 0.5:
            pool.release(live.pop(draw.choice(list(live))))
        reused = pool.reuse(owner, len(keys) + 1 + draw.randrange(3), keys)
        if reused is None:
            continue
        live[owner] = owner
        if draw.random() < 0.8:
            pool.commit(owner, keys[: draw.randrange(len(keys) + 1)])
        if draw.random() < 0.3:
            pool.extend(owner, 1)
        mine = [p for first, count in pool.owned(owner) for p in range(first, first + count)]
        assert len(set(mine)) == len(mine)
        held = {p for one in live for first, count in pool.owned(one) for p in range(first, first + count)}
        assert pool.used == len(held)
    for owner in live:
        pool.release(owner)
    assert pool.free == 40
