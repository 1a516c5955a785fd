"""Experts on other ranks: what tokens send to them, by hand, beside DeepEP's table, and on the links of a model."""

import math
from dataclasses import replace
from typing import Any

import pytest

from pdsim.compute.forward import Compute, exchange, forward, forward_time, nodes_hit
from pdsim.compute.roofline import Exchange, weight_bytes
from pdsim.config.compose import compose
from pdsim.core.clock import Clock
from pdsim.core.errors import ConfigError
from pdsim.hardware.machine import Interconnect, Nic
from pdsim.models.llm import Parallel, Side
from pdsim.serving.settings import Cache, Kv, SchedulerLimits, Workload
from pdsim.sim.network import Network
from pdsim.sim.topology import RATES, SideTraffic
from tests.serving.test_compute import MACHINE, MODEL
from tests.support.configs import EIGHT, ENGINE
from tests.support.serving import GQA, configured, serve

MOE = replace(MODEL, active=2e9, parameters=1.1e10, experts=100, experts_per_token=10, dense_layers=2)
NODES = replace(MACHINE, nodes=4, gpus=5, nic=replace(MACHINE.nic, count=5, rate=1e10))
PLAIN = Compute(flops_share=0.5, memory_share=0.5, overhead=0.0, exchange_latency=1e-5)

WIDE = [f"parallel.{side}.{key}=128" for side in ("prefill", "decode") for key in ("tp", "dp", "ep")]
DEEPSEEK = compose(["hw=2x8xh800", "hw.nic.rate=43.5GB/s", "model=deepseek-v3", "hw.nodes=64", "kv.pool=1GB", *WIDE])

MEASURED = {16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}
"""Microseconds of dispatch and combine of 128 tokens a rank, by ranks: DeepEP, docs/legacy.md (H800, CX-7 400G)."""


def test_tokens_go_to_each_expert_or_once_to_a_node():
    width = 1000 * (2 + 2)  # dispatched and combined, two bytes an element
    direct = exchange(MOE, NODES, PLAIN, 20, 20, direct=True)
    assert (direct.network, direct.port) == pytest.approx((8 * 10 * 15 / 20 * width, 8 * 10 * 4 / 20 * width))
    by_node = exchange(MOE, NODES, PLAIN, 20, 20, direct=False)
    assert by_node.network == pytest.approx(8 * 4 * (1 - 0.75**10) * 3 / 4 * width)
    assert by_node.port == pytest.approx(8 * 20 * (1 - 0.95**10) * 4 / 5 * width)
    assert direct.seconds(100) == pytest.approx(100 * direct.network / 1e10 + 2 * 8 * 1e-5)
    assert direct.seconds(0) == direct.latency
    assert Exchange().seconds(100) == 0.0


def test_groups_share_tokens_and_limits_spare_nodes():
    alone, group = (exchange(MOE, NODES, PLAIN, 20, dp, direct=True) for dp in (20, 5))
    assert group.network == pytest.approx(alone.network / 4)
    assert nodes_hit(MOE, 4) == pytest.approx(4 * (1 - 0.75**10))
    limited = replace(MOE, expert_groups=8, groups_per_token=4)
    assert nodes_hit(limited, 4) == 4 * (1 - 0.5**2)
    assert nodes_hit(limited, 16) == 16 * 0.5 * (1 - 0.5**2.5)


@pytest.mark.parametrize("ranks", MEASURED)
def test_direct_exchanges_take_as_long_as_measured(ranks):
    """`Compute.exchange_latency` is the median of what 16 to 64 ranks leave: in-sample; 128 and 256 are held out."""
    model, layers = DEEPSEEK.model, 58
    found = exchange(model, DEEPSEEK.hw, DEEPSEEK.compute, ranks, ranks, direct=True).seconds(128) / layers
    assert found == pytest.approx(sum(MEASURED[ranks]) * 1e-6, rel=0.07)


def test_experts_are_divided_among_all_ranks():
    experts = 9e9 * 100 / 90
    assert weight_bytes(MOE, Side(tp=20, dp=20, ep=20)) == 2 * (experts / 20 + 1e9)
    assert weight_bytes(MOE, Side(tp=20, dp=5, ep=20)) == 2 * (experts / 20 + 1e9 / 4)
    assert weight_bytes(MOE, Side(tp=20, dp=5)) == 2 * 1.1e10 / 20


def test_a_forward_waits_for_its_tokens_or_hides_them():
    side = Side(tp=20, dp=20, ep=20)
    apart, hidden = (
        forward_time(MOE, NODES, replace(PLAIN, exchange_overlap=overlap), side) for overlap in (False, True)
    )
    tokens = 4000
    travelling = apart.exchange.seconds(tokens)
    computing = apart.prefill([(0, tokens)]) - travelling
    assert hidden.prefill([(0, tokens)]) == max(computing, travelling) == pytest.approx(travelling)
    # each half of a batch reads the weights: those of the group, and the experts that half of all tokens hit
    read = 2 * (apart.weight_bytes - apart.expert_bytes * 0.9 ** (2 * 20)) / apart.weight_rate
    assert hidden.step(4) == pytest.approx(max(read, hidden.exchange.seconds(4)))


def test_exchanges_share_links_and_drop_what_is_left():
    clock = Clock()
    network = Network(clock)
    link = network.link("nic", 1.5e6)
    traffic = SideTraffic(clock, network, exchange=((link,), ()))
    ends: list[float] = []

    def go(competing: float) -> None:
        for event in traffic.exchange(2.0**20, 1e9, 1.0):
            event.callbacks.append(lambda _: ends.append(clock.now))
        if competing:
            network.start(network.path([link]), competing, lambda _: None)

    go(0.0)
    clock.run()
    assert ends == [1.0]
    go(2.0**21)
    clock.run()
    assert ends[1] - 1.0 == pytest.approx(2.0**20 / 0.75e6)
    rate = 2.0 ** (math.ceil(RATES * math.log2(1e6)) / RATES)
    assert 1e6 <= rate < 1.091e6
    clock = Clock()
    network = Network(clock)
    link = network.link("nic", 2.0**20)
    traffic = SideTraffic(clock, network, exchange=((link,), ()))
    traffic.exchange(2.0**20, 0.0, 1.0)
    clock.call_at(0.5, lambda _: traffic.exchange(2.0**19, 0.0, 1.0), None)
    clock.run()
    assert link.carried == 2.0**20
    assert clock.now == 1.5


def spread(**changes: Any) -> Any:
    """Return a configuration of two engines of four nodes with two GPUs each, whose experts lie on all of them."""
    machine = replace(EIGHT, nodes=8, gpus=2, nic=Nic(count=2, rate=1e9))
    backend = replace(ENGINE, inter=replace(ENGINE.intra, path="rdma"))
    side = Side(tp=8, dp=8, ep=8)
    model = replace(GQA, parameters=4e6, active=1e6, experts=64, experts_per_token=8)
    values = {"hw": machine, "backend": backend, "kv": Kv(page_size=16, pool=1 << 22)}
    values |= {"scheduler": SchedulerLimits(chunk=256, decode_batch=8)}
    work = Workload(arrivals="poisson", count=40, rate=1000.0, input_mean=256, output_mean=8)
    return configured(side, side, model, **(values | {"workload": work} | changes))


def test_experts_on_other_nodes_put_tokens_on_the_links():
    config = spread()
    result = serve(config)
    values = {metric.name: metric.value for metric in result.summary}
    assert values["requests_ok"] == 40
    outcome = result.outcome
    tokens = sum(result.requests["input"])
    each = exchange(config.model, config.hw, config.compute, 8, 8, direct=False).network
    carried = [
        load * config.hw.nic.rate * outcome.seconds for name, load in outcome.links.items() if name.endswith("/rx")
    ]
    # only the tokens of prefill come in on its nodes, the first four; KV leaves them
    assert sum(carried[:8]) == pytest.approx(tokens * each, rel=1e-6)


def test_a_rank_ends_an_exchange_before_the_next():
    config = spread()
    side = Side(tp=8, dp=4, ep=8)  # a follower in each group, which hears of a forward before the last has ended
    slow = replace(config.hw, nic=Nic(count=2, rate=1e7))
    result = serve(replace(config, hw=slow, parallel=Parallel(prefill=side, decode=side)))
    assert {metric.name: metric.value for metric in result.summary}["requests_ok"] == 40


@pytest.mark.parametrize(
    ("model", "machine", "ranks", "reason"),
    [
        (MODEL, NODES, 20, "parallel.decode.ep=20 spreads experts, and model=m has none"),
        (MOE, NODES, 200, "parallel.decode.ep=200 is more than the 100 experts"),
        (MOE, MACHINE, 16, "parallel.decode.ep=16 needs 2 nodes, and hw=round numbers has no cards"),
        (MOE, replace(MACHINE, interconnect=Interconnect(kind="mesh", rate=1e11)), 8, "interconnect.kind=mesh"),
    ],
)
def test_experts_that_cannot_be_reached_are_refused(model, machine, ranks, reason):
    with pytest.raises(ConfigError, match=reason):
        exchange(model, machine, PLAIN, ranks, ranks, direct=True)


def test_followers_send_cached_pages_early():
    own = {"cache": Cache(prefill=True, early=True), "kv": Kv(page_size=16, pool=1 << 22, checked=0)}
    config = configured(Side(tp=2), Side(tp=2), GQA, **own)
    trace = replace(config.workload, arrivals="sessions", users=2, turns=3, shared=1024, count=6)
    result = serve(replace(config, workload=trace))
    assert {metric.name: metric.value for metric in result.summary}["requests_failed"] == 0


def test_by_tables_attention_groups_gather_tokens_or_send_them():
    config = compose(["hw=2x8xh200", "model=deepseek-v3", "parallel=tp8", "compute=h200_sglang_table"])

    def step(by="", **sizes):
        compute = replace(config.compute, exchange_by=by)
        return forward(config.model, config.hw, compute, Side(tp=8, **sizes), direct=True)

    def longer(tokens):
        """Return how much longer the busiest rank with whole experts takes than one with a piece of each."""
        return 58 * (step(ep=8).experts(tokens, 0, 2048 // 8) - step().experts(tokens, 0, 2048 // 8))

    assert longer(16) > 0
    assert step(ep=8).step(16) - step().step(16) == pytest.approx(longer(16))
    sent, gathered, pieces = step("deepep", dp=8, ep=8), step(dp=8, ep=8), step(dp=8)
    assert gathered.step(16) - pieces.step(16) == pytest.approx(longer(8 * 16))
    # of the layers with experts, to which three are sent nothing
    gather = 2 * 14e-6 + sent._allreduce(8 * 16, 8) - sent._allreduce(1, 8)
    more = sent.exchange.seconds(16) - 58 * gather - 3 * (gather - sent._allreduce(8 * 16, 8))
    assert sent.step(16) - gathered.step(16) == pytest.approx(more)
    twice = 2 * 61 * sent._allreduce(8 * 4096, 8) - 3 * sent._allreduce(8 * 4096, 8)
    longer_prompts = gathered._linear(4096, 1, False) - sent._linear(4096, 1, False)
    assert longer_prompts == pytest.approx(twice - sent.exchange.seconds(4096))
