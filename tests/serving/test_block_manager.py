"""Where ranks run, how many pages they get, and what a prefix cache has: whole blocks, the oldest evicted first."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.serve import ServeOptions, job, prefill_pool
from pdsim.compute.roofline import kv_shape
from pdsim.config.compose import compose
from pdsim.core.clock import Clock
from pdsim.core.errors import ConfigError
from pdsim.hardware.machine import Machine
from pdsim.kv.pages import PagePool, StatePool
from pdsim.models.llm import Parallel, Side
from pdsim.serving.block_manager import BlockManager, PrefixCache, QuarantineStall, hit_share
from pdsim.serving.deployment import pages_per_rank, places
from pdsim.serving.settings import Kv, SchedulerLimits, Workload
from pdsim.serving.workload import Request, load
from pdsim.transfer.job import Place
from tests.kv.test_layout import HYBRID
from tests.serving.test_compute import MACHINE, MODEL

TRACE = Path(os.environ.get("PDSIM_TRACES", "shared/data/traces")) / "conversation_trace.jsonl"


def prompt(*blocks: int, tokens: int | None = None) -> Request:
    return Request(0.0, 512 * len(blocks) if tokens is None else tokens, 1, None, blocks)


def test_prompts_match_from_the_start_up_to_a_miss():
    cache = PrefixCache()
    cache.insert(prompt(1, 2, 3))
    assert cache.match(prompt(1, 2, 9, 3)) == 1024
    assert cache.match(prompt(2, 3)) == 1024
    assert cache.match(prompt(9, 1)) == 0
    assert cache.match(prompt(1, 2, 3, tokens=1100)) == 1100  # its last block is not full
    cache = PrefixCache(2)
    cache.insert(prompt(1, 2, 3))
    assert cache.match(prompt(1, 2, 3)) == 1024
    with pytest.raises(ValueError, match="capacity must be >= 1 block or None, got 0"):
        PrefixCache(0)


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


def test_the_share_is_of_tokens_in_order_of_arrival():
    requests = [prompt(1, 2), prompt(1, 3), prompt(1, 2, tokens=700)]
    assert hit_share(requests) == pytest.approx((512 + 700) / (1024 + 1024 + 700))
    assert hit_share([Request(0.0, 100, 1)]) is None


@pytest.mark.skipif(not TRACE.is_file(), reason=f"no {TRACE}: set PDSIM_TRACES to the folder of Mooncake's traces")
def test_the_conversation_trace_repeats_37_4_percent_of_its_tokens():
    requests = load(Workload(trace=str(TRACE)), 0, 1 << 20)
    assert hit_share(requests) == pytest.approx(0.374, abs=0.0005)
    small = hit_share(requests, 1000)
    assert small < 0.374


def test_a_request_without_rows_of_state_gives_its_pages_back():
    blocks = BlockManager(PagePool(8), 4, StatePool(HYBRID.state, 4, slots=1, window_pages=6))
    for room, rows in ((1, True), (2, False)):
        given = blocks.allocate(room, 3)
        assert (blocks.allocate_state(room, 10, 10, given[0]) is not None) == rows
    assert blocks.report()["used_pages"] == 3
    blocks.release(1)
    assert blocks.report()["free_pages"] == 8


def test_a_blocked_queue_gives_up_all_unless_it_moves():
    clock, woken = Clock(), []
    blocked = QuarantineStall(clock, 2.0, lambda: woken.append(clock.now))
    assert [blocked.waiting, blocked.too_long()] == [False, False]
    clock.run(until=1.0)
    assert [blocked.waiting, blocked.too_long()] == [True, False]
    clock.run()
    assert [woken, blocked.too_long(), blocked.too_long(), blocked.waiting] == [[2.0], True, True, False]
    clock = Clock()
    blocked = QuarantineStall(clock, 2.0, lambda: None)
    blocked.too_long()
    clock.run(until=1.5)
    blocked.clear()
    assert not blocked.too_long()
    clock.run(until=2.5)
    assert not blocked.too_long()


TWO_NODES = replace(MACHINE, nodes=2)
HOSTS = replace(MACHINE, gpus=0, gpu=None)


def parallel(prefill: int, decode: int) -> Parallel:
    return Parallel(prefill=Side(tp=prefill), decode=Side(tp=decode))


@pytest.mark.parametrize(
    ("machine", "sizes", "prefill", "decode"),
    [
        (MACHINE, (2, 1), [Place(0, 0), Place(0, 1)], [Place(0, 2)]),
        (TWO_NODES, (1, 2), [Place(0, 0)], [Place(1, 0), Place(1, 1)]),
        (TWO_NODES, (4, 12), [Place(0, n) for n in range(4)], [Place(n // 8, n % 8) for n in range(4, 16)]),
        (HOSTS, (1, 2), [Place(0)], [Place(0), Place(0)]),
    ],
)
def test_decode_is_on_the_next_node_if_it_fits_there(machine, sizes, prefill, decode):
    assert places(parallel(*sizes), machine) == (prefill, decode)


def test_prefill_computes_on_gpus_of_another_kind():
    own = compose(["hw=2x8xh200", "model=llama-3.1-70b", "parallel=tp4"])
    mixed = compose(["hw=2x8xh200", "hw.prefill=8xb200", "model=llama-3.1-70b", "parallel=tp4"])
    machine, compute = prefill_pool(mixed)
    assert (machine.gpu.name, compute.measured_gpu, machine.nic) == ("B200", "B200", mixed.hw.nic)
    assert prefill_pool(own) == (own.hw, own.compute)
    one, other = (job(config, ServeOptions()) for config in (own, mixed))
    pieces = [(0, 2048)]
    assert 0.3 < other.prefill_seconds(pieces) / one.prefill_seconds(pieces) < 0.8
    assert other.decode_time == one.decode_time
    assert {place.node for place in places(mixed.parallel, mixed.hw)[1]} == {1}
    with pytest.raises(ConfigError, match=r"hw.prefill=8xb20 does not exist; did you mean hw.prefill=8xb200\?"):
        compose(["hw=2x8xh200", "hw.prefill=8xb20"])
    with pytest.raises(ConfigError, match=r"hw.prefill=8xb200 needs nodes of its own .* raise hw.nodes"):
        places(mixed.parallel, replace(mixed.hw, nodes=1))
    with pytest.raises(ConfigError, match="target=model, GPUs and a disaggregated deployment; leave hw"):
        compose(["hw=2x8xh200", "hw.prefill=8xb200", "experiment.deployment=colocated"])


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(ConfigError, match=r"4 \+ 8 GPUs, hw=round numbers has 8"):
        places(parallel(4, 8), MACHINE)


def count(machine: Machine, kv: Kv, tp: int = 1, ranks: int = 2) -> int:
    half = SchedulerLimits(memory_fraction=0.5)
    return pages_per_rank(Side(tp=tp), MODEL, kv_shape(MODEL), machine, kv, half, ranks)


def test_the_pool_is_what_weights_leave_or_is_asked_for():
    page = 64 * 2 * 10 * 4 * 100 * 2
    assert count(MACHINE, Kv()) == (5 * 10**10 - 2 * 10**10) // page
    assert count(MACHINE, Kv(pool=3 * page + 1)) == 3
    assert count(HOSTS, Kv(), ranks=4) == 5 * 10**11 // 4 // page  # hosts hold no weights and share their memory
    context = SchedulerLimits(memory_fraction=0.5, context=10**10)
    assert pages_per_rank(Side(tp=1), MODEL, kv_shape(MODEL), MACHINE, Kv(), context, 2) == 2 * 10**10 // page
    with pytest.raises(ConfigError, match=r"a page of kv.page_size=64 tokens takes .* raise tp, kv.pool"):
        count(MACHINE, Kv(pool=1000))
