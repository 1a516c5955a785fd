"""Prefixes in host memory, on SSDs and in a remote store: exact times, what is found where, and who shares it."""

from dataclasses import replace
from typing import Any

import pytest

from experiments.faults.scenario import attempt, draw
from experiments.serve import ServeOptions, job, specs
from experiments.serve.tables import cache_metrics
from pdsim.config import rules
from pdsim.core.clock import Clock
from pdsim.core.errors import ConfigError
from pdsim.hardware.machine import Nic, Storage
from pdsim.kv.pages import PrefixPagePool
from pdsim.kv.tiers import PageStore, Tiers
from pdsim.models.llm import Parallel, Side
from pdsim.serving.block_manager import BlockManager
from pdsim.serving.offload import TierScheduler
from pdsim.serving.settings import Cache
from pdsim.sim.network import Network
from pdsim.sim.topology import SideTraffic, Topology
from pdsim.transfer.job import Place
from tests.serving.test_cache import PCIE, PREFILL, SMALL, TOKEN, served
from tests.support.serving import configured

SSD = Storage(read=0.5e9, write=0.25e9, latency=1e-3, object=1e-5)
HW = replace(PCIE, host=replace(PCIE.host, ssd=SSD, store=replace(SSD, read=0.2e9)))
EVERY = [(5.0 * n, 512, 1, [block]) for n, block in enumerate([1, 2, 3, 4, 1])]
"""The GPU has forgotten the first prompt when it comes again; 448 tokens, seven pages, of it can be reused."""

HIT = 448
LATE = 1e-3 + 7 * 1e-5  # of a tier beyond the host, with seven objects; the GPU's PCIe takes the pages as they come
FORWARD = [(HIT, 64)]


def last(cache: Cache, prompts: Any = EVERY, **changes: Any) -> tuple[dict[str, Any], Any]:
    table, what, _ = served(prompts, cache, **({"kv": SMALL, "hw": HW} | changes))
    return table[-1], what


def before_decode(row: dict[str, Any]) -> float:
    return float(row["ttft"] - row["transfer"] - row["polling"] - row["queueing"] - row["handshake"])


@pytest.mark.parametrize(
    ("tier", "load"),
    [("host", HIT * TOKEN / 1e9), ("ssd", LATE + HIT * TOKEN / 0.5e9), ("remote", LATE + HIT * TOKEN / 0.2e9)],
)
def test_a_tier_is_read_in_its_exact_time(tier, load):
    row, what = last(replace(PREFILL, **{tier: 4096.0}))
    assert (row["cached_prefill"], row[f"cached_{tier}"]) == (HIT, HIT)
    assert row["load"] == pytest.approx(load, rel=1e-9)
    assert before_decode(row) == pytest.approx(load + what.prefill_time.prefill(FORWARD), rel=1e-6)


def test_a_summary_says_what_each_tier_gave():
    config = configured(cache=replace(PREFILL, host_ratio=2.0))
    what = job(config, config.experiment)
    assert what.cache.host == 2 * what.prefill_pages * what.page_size
    table = {"cached_prefill": [0, 30], "cached_host": [0, 20], "input": [60, 40]}
    found = {each.name: each.value for each in cache_metrics(table, what)}
    token = what.shape.token_bytes(what.prefill.tp) * what.prefill.tp
    assert found == {"prefix_hit_prefill": 0.3, "prefix_hit_host": 0.2, "tier_bytes_host": 20 * token}


def test_whole_objects_of_the_fastest_tier_are_read():
    row, _ = last(replace(PREFILL, ssd=4096.0, chunk=256))
    assert row["cached_ssd"] == 256
    assert row["load"] == pytest.approx(1e-3 + 1e-5 + 256 * TOKEN / 0.5e9, rel=1e-9)
    row, _ = last(replace(PREFILL, host=4096.0, ssd=4096.0, remote=4096.0))
    assert row["cached_host"] == HIT
    assert "cached_ssd" not in row
    row, _ = last(replace(PREFILL, host=64.0, ssd=4096.0, remote=4096.0))
    assert row["cached_ssd"] == HIT


def test_a_forward_that_overlaps_takes_no_longer_than_its_load():
    row, what = last(replace(PREFILL, host=4096.0, overlap=True))
    forward, load = what.prefill_time.prefill(FORWARD), HIT * TOKEN / 1e9
    assert before_decode(row) == pytest.approx(max(forward, load), rel=1e-6)
    slow, _ = last(replace(PREFILL, remote=4096.0, overlap=True))
    assert before_decode(slow) == pytest.approx(1e-3 + 7e-5 + HIT * TOKEN / 0.2e9, rel=1e-6)


def test_a_prefetch_is_waited_for_as_the_policy_says():
    rows = {}
    read = 1e-3 + 7e-5 + HIT * TOKEN / 0.5e9
    for policy in ("best_effort", "timeout", "wait_complete"):
        cache = replace(PREFILL, host=64.0, ssd=4096.0, prefetch=policy, prefetch_timeout=read / 2)
        rows[policy], _ = last(replace(cache, host=1024.0))
    assert [rows[policy]["cached_prefill"] for policy in rows] == [0, 0, HIT]  # a batch has come, or has not
    assert rows["wait_complete"]["cached_host"] == HIT
    assert [rows[policy].get("prefetch", 0.0) for policy in rows] == pytest.approx([0.0, read / 2, read], rel=1e-9)
    assert rows["wait_complete"]["load"] == pytest.approx(HIT * TOKEN / 1e9, rel=1e-9)


def test_a_prefetch_is_hidden_by_the_forwards_before_it():
    prompts = [*[(5.0 * n, 512, 1, [n]) for n in (1, 2, 3, 4, 5)], (30.0, 1024, 1, [8, 9]), (30.0, 512, 1, [1])]
    cache = replace(PREFILL, host=2048.0, ssd=8192.0, prefetch="best_effort")
    row, _ = last(cache, prompts, kv=replace(SMALL, pool=24 * 64 * TOKEN))
    assert (row["cached_prefill"], row["cached_host"]) == (HIT, HIT)
    assert row["load"] == pytest.approx(HIT * TOKEN / 1e9, rel=1e-9)
    assert not row.get("prefetch")


TWO = {"hw": HW, "kv": SMALL, "parallel": Parallel(prefill=Side(tp=1, instances=2), decode=Side(tp=1))}
TURNS = {"router": "round_robin"}


def test_two_readers_share_a_remote_store():
    prompts = [*[(5.0 * n, 512, 1, [n]) for n in (1, 1, 2, 2, 3, 3, 4, 4)], (50.0, 512, 1, [1]), (50.0, 512, 1, [1])]
    table, *_ = served(prompts, replace(PREFILL, remote=65536.0), options=TURNS, **TWO)
    assert [(row["prefill"], row["cached_remote"]) for row in table[-2:]] == [("prefill0", HIT), ("prefill1", HIT)]
    load = 1e-3 + 7e-5 + 2 * HIT * TOKEN / 0.2e9
    assert [row["load"] for row in table[-2:]] == pytest.approx([load] * 2, rel=1e-9)


@pytest.mark.parametrize(("shared", "found"), [(False, 0), (True, HIT)])
def test_only_a_shared_pool_has_what_others_computed(shared, found):
    cache = replace(PREFILL, host=4096.0, shared=shared)
    table, *_ = served([(0.0, 512, 1, [1]), (5.0, 512, 1, [1])], cache, options=TURNS, **TWO)
    assert [row["prefill"] for row in table] == ["prefill0", "prefill1"]
    assert table[1]["cached_prefill"] == found


@pytest.mark.parametrize(
    ("tier", "node", "gpu", "done"),
    [
        ("host", 0, True, 1.0),  # over PCIe
        ("host", 1, True, 2e-3 + 4.0),  # over the cards, 0.25 GB/s
        ("ssd", 0, False, 1e-3 + 1e-4 + 2.0),
        ("ssd", 1, False, 2e-3 + 1e-3 + 1e-4 + 4.0),
        ("remote", -1, True, 2e-3 + 1e-3 + 1e-4 + 5.0),
    ],
)
def test_bytes_of_a_tier_cross_its_links(tier, node, gpu, done):
    clock = Clock()
    network = Network(clock)
    nodes = replace(HW, nodes=2, nic=Nic(count=1, rate=0.25e9, latency=2e-3))
    topology = Topology(nodes, network)
    traffic = SideTraffic.at(topology.site(Place(node=0, gpu=0)), clock, network, topology)
    event = traffic.tier(tier, 10**9, 10, node, gpu=gpu)
    clock.run(until=event)
    assert clock.now == pytest.approx(done, rel=1e-12)


def test_pages_are_written_when_the_policy_says():
    def evicting(prompts: list[list[int]], write: str) -> int:
        timed = [(5.0 * n, 512, 1, p) for n, p in enumerate(prompts)]
        row, _ = last(replace(PREFILL, host=4096.0, write=write), timed)
        return int(row.get("cached_host", 0) or 0)

    once, twice = [[1], [2], [3], [4], [1]], [[1], [1], [2], [3], [4], [1]]
    assert [evicting(once, write) for write in ("through", "selective", "back")] == [HIT, 0, HIT]
    assert [evicting(twice, write) for write in ("through", "selective", "back")] == [HIT, HIT, HIT]
    assert evicting([[1], [2], [1]], "back") == 0  # the GPU has them still


def test_a_page_stays_until_it_is_written_or_here():
    pool = PrefixPagePool(4, tiers=Tiers({"host": PageStore(8)}))
    pool.reuse(1, 2, [])
    pool.commit(1, [7, 8])
    pool.store(1, [7, 8])
    pool.release(1)
    assert (pool.outgoing, pool.free) == ([(7, 0), (8, 1)], 2)
    assert pool.reuse(2, 3, []) is None
    pool.written([7, 8])
    assert pool.free == 4
    assert pool.is_whole()
    tiers = Tiers({"host": PageStore(8), "ssd": PageStore(8)})
    tiers.put("host", [7, 8])
    pool = PrefixPagePool(4, tiers=tiers)
    assert pool.reuse(1, 3, [7, 8]) == (((0, 3),), 2)
    pool.store(1, [7, 8])
    pool.release(1)
    assert (pool.outgoing, pool.free) == ([], 2)  # nor is it written to the SSD before
    pool.written([7, 8])
    assert pool.free == 4
    assert pool.is_whole()


def test_what_host_memory_evicts_meanwhile_is_not_written_there():
    tiers = Tiers({"host": PageStore(1), "ssd": PageStore(8)})
    tiers.put("host", [7])
    pages = BlockManager(PrefixPagePool(4, tiers=tiers), 16)
    new = tiers.missing("host", [7])  # of what goes to the SSD
    tiers.put("host", [8])
    pages.written([7], new)
    assert (tiers.has("host", 7), tiers.has("host", 8)) == (False, True)


def test_a_limit_holds_for_pages_that_tiers_have_taken():
    pool = PrefixPagePool(6, limit=2, tiers=Tiers({"host": PageStore(8)}))
    pool.reuse(1, 5, [])
    pool.commit(1, [1, 2, 3, 4])
    pool.store(1, [1, 2, 3, 4])
    pool.release(1)
    pool.written([1, 2, 3, 4])
    assert (pool.cached, pool.match([1, 2, 3, 4]), pool.free) == (2, 2, 6)


def test_a_page_that_is_not_computed_yet_is_not_written():
    pool = PrefixPagePool(6, tiers=Tiers({"host": PageStore(8)}), write="selective")
    pool.reuse(1, 3, [])
    pool.commit(1, [7, 8])  # when it is scheduled
    assert (pool.reuse(2, 3, [7, 8]), pool.outgoing) == ((((0, 2), (3, 1)), 2), [])
    pool.store(1, [7, 8])
    pool.release(2)
    assert (pool.reuse(3, 3, [7, 8]), pool.outgoing) == ((((0, 2), (3, 1)), 2), [(7, 0), (8, 1)])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cache": Cache(ssd=100.0)}, r"cache\.ssd=100 keeps what prefill caches; set cache\.prefill=true"),
        ({"cache": replace(PREFILL, ssd=9.0, prefetch="timeout")}, r"reads into host memory; set cache\.host"),
        ({"cache": replace(PREFILL, host=9.0, chunk=100)}, r"whole pages of kv\.page_size=64"),
        ({"cache": replace(PREFILL, host=9.0, overlap=True, early=True)}, r"cache\.early=true sends them before"),
        ({"cache": replace(PREFILL, host=1e12)}, r"are more than the hosts' memory, .*; set at most"),
    ],
)
def test_tiers_that_cannot_be_are_refused(changes, says):
    config = configured(kv=SMALL, **changes)
    with pytest.raises((ConfigError, ValueError), match=says):
        (rules.check(config), specs(config, job(config, ServeOptions()), []))


def first_rank_only(self: TierScheduler, number: int, tier: str) -> None:
    if (number, tier) in self._under_way:
        self._under_way.pop((number, tier))[1]()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "count"),
    [*((seed, 30) for seed in (8, 10, 13, 21, 35, 41, 1706, 2597)), (6015218, 50)],
)
def test_what_tiers_return_is_what_was_written(seed, count):
    """On memory with contents, under faults."""
    scenario = draw(seed, count, 0.4)
    assert scenario.job.cache.tiered
    assert not attempt(scenario).violations


@pytest.mark.slow
def test_pages_that_a_tier_has_too_early_are_noticed(monkeypatch):
    monkeypatch.setattr(TierScheduler, "_wrote", first_rank_only)
    assert "I10" in {violation.invariant for violation in attempt(draw(1706, 30, 0.4)).violations}
