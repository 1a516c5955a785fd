"""Pages of a scheduler, and what a prefix cache has: whole blocks from the start, the oldest use evicted first."""

import os
from pathlib import Path

import pytest

from pdsim.core.clock import Clock
from pdsim.kv.pages import PagePool, StatePool
from pdsim.serving.block_manager import BlockManager, PrefixCache, QuarantineStall, hit_share
from pdsim.serving.settings import Workload
from pdsim.serving.workload import Request, load
from tests.kv.test_layout import HYBRID

TRACE = Path(os.environ.get("PDSIM_TRACES", "shared/data/traces")) / "conversation_trace.jsonl"


def prompt(*blocks: int, tokens: int | None = None) -> Request:
    return Request(0.0, 512 * len(blocks) if tokens is None else tokens, 1, None, blocks)


def test_a_prompt_matches_up_to_its_first_missing_block():
    cache = PrefixCache()
    cache.insert(prompt(1, 2, 3))
    assert cache.match(prompt(1, 2, 9, 3)) == 1024
    assert cache.match(prompt(2, 3)) == 1024
    assert cache.match(prompt(9, 1)) == 0
    assert cache.match(prompt(1, 2, 3, tokens=1100)) == 1100  # its last block is not full


def test_the_end_of_the_least_recently_used_prompt_goes_first():
    cache = PrefixCache(4)
    cache.insert(prompt(1, 2))
    cache.insert(prompt(3, 4))
    cache.insert(prompt(1, 5))  # 2 is the oldest use
    assert len(cache) == 4
    assert cache.match(prompt(1, 2)) == 512
    assert cache.match(prompt(3, 4)) == 1024
    cache.insert(prompt(6))
    assert cache.match(prompt(3, 4)) == 512


def test_a_prompt_longer_than_the_cache_leaves_its_beginning():
    cache = PrefixCache(2)
    cache.insert(prompt(1, 2, 3))
    assert cache.match(prompt(1, 2, 3)) == 1024
    with pytest.raises(ValueError, match="capacity must be >= 1 block or None, got 0"):
        PrefixCache(0)


def test_the_share_is_of_tokens_in_order_of_arrival():
    requests = [prompt(1, 2), prompt(1, 3), prompt(1, 2, tokens=700)]
    assert hit_share(requests) == pytest.approx((512 + 700) / (1024 + 1024 + 700))
    assert hit_share([Request(0.0, 100, 1)]) is None


@pytest.mark.skipif(not TRACE.is_file(), reason=f"no {TRACE}: set PDSIM_TRACES to the folder of Mooncake's traces")
def test_the_conversation_trace_repeats_37_4_percent_of_its_tokens():
    requests = load(Workload(trace=str(TRACE)), 0, 1 << 20)
    assert hit_share(requests) == pytest.approx(0.374, abs=0.0005)
    small = hit_share(requests, 1000)
    assert small is not None
    assert small < 0.374


def test_a_request_without_rows_of_state_gives_its_pages_back():
    blocks = BlockManager(PagePool(8), 4, StatePool(HYBRID.state, 4, slots=1, window_pages=6))
    for room, rows in ((1, True), (2, False)):
        given = blocks.allocate(room, 3)
        assert given is not None
        assert (blocks.allocate_state(room, 10, 10, given[0]) is not None) == rows
    assert blocks.report()["used_pages"] == 3
    blocks.release(1)
    assert blocks.report()["free_pages"] == 8


def test_a_blocked_queue_gives_up_all_at_once():
    clock, woken = Clock(), []
    blocked = QuarantineStall(clock, 2.0, lambda: woken.append(clock.now))
    assert [blocked.waiting, blocked.too_long()] == [False, False]
    clock.run(until=1.0)
    assert [blocked.waiting, blocked.too_long()] == [True, False]
    clock.run()
    assert [woken, blocked.too_long(), blocked.too_long(), blocked.waiting] == [[2.0], True, True, False]


def test_a_queue_that_moves_has_its_time_again():
    clock = Clock()
    blocked = QuarantineStall(clock, 2.0, lambda: None)
    blocked.too_long()
    clock.run(until=1.5)
    blocked.clear()
    assert not blocked.too_long()
    clock.run(until=2.5)
    assert not blocked.too_long()
