"""Scheduling and router policies: those that come with pdsim, and one that a package of somebody else brings."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from experiments.serve import ServeOptions, job
from pdsim.core.errors import ConfigError
from pdsim.models.llm import Side
from pdsim.serving import rank_process
from pdsim.serving.policies import (
    FirstCome,
    LeastTokens,
    PairQuery,
    Prompt,
    RoutingQuery,
    handoff_of,
    route,
    router_policy,
    scheduler_of,
)
from pdsim.serving.settings import Cache, ServingEngine
from pdsim.serving.workload import Request
from tests.support.serving import EIGHT, GENERATED, configured, serve, simulate, values

TWO = Side(tp=1, instances=2)


@pytest.mark.parametrize("find", [scheduler_of, handoff_of])
def test_an_unknown_policy_is_refused_with_those_known(find):
    with pytest.raises(ConfigError, match=r"'nobodys'.*(fcfs|pull)"):
        find(ServingEngine(scheduler="nobodys", handoff="nobodys"))
    with pytest.raises(ConfigError, match="least_tokens"):
        router_policy("nobodys")


class Greedy(FirstCome):
    def prefill(self, queue: Sequence[Prompt], budget: int) -> tuple[int, int]:
        return 0, budget + 1


def test_a_policy_exceeding_the_step_ends_the_rank(monkeypatch):
    monkeypatch.setattr(rank_process, "scheduler_of", lambda engine: Greedy())
    ranks = simulate([Request(0.0, 600, 2)], options={"deadline": 0.5}, limit=5.0).outcome.ranks
    words = "engine.scheduler=fcfs gave 257 tokens of room 1, which has 600 left in a step of 256"
    assert words in ranks["prefill0.0"].error


class Elsewhere(LeastTokens):
    def choose(self, able: Sequence[str], load: Mapping[str, int]) -> str:
        return "prefill7"


def test_a_router_policy_must_name_an_instance_it_was_given():
    words = "experiment.router: Elsewhere chose 'prefill7'; return one of prefill0, prefill1"
    with pytest.raises(ConfigError, match=words):
        route(Elsewhere(), RoutingQuery(["prefill0", "prefill1"], {"prefill0": 0, "prefill1": 0}, 1, ()))


def test_random_policies_take_each_as_often_as_pairs_say():
    policy = router_policy("power_of_two")
    able = ["a", "b", "c", "d"]
    counts = Counter(policy.choose(able, {"a": 0, "b": 1, "c": 2, "d": 3}) for _ in range(6000))
    assert counts["d"] == 0
    for name, pairs in (("a", 3), ("b", 2), ("c", 1)):  # of six pairs
        assert abs(counts[name] - 1000 * pairs) < 150
    policy = router_policy("random")
    counts = Counter(policy.choose(["a", "b", "c"], {}) for _ in range(6000))
    assert all(abs(counts[name] - 2000) < 150 for name in "abc")


def asked(load: dict[str, int], blocks: tuple[int, ...], tokens: int = 1024) -> RoutingQuery:
    return RoutingQuery(list(load), load, tokens, blocks)


def test_cached_tokens_spare_the_queue_of_every_policy():
    policy = router_policy("cache_aware")
    assert route(policy, asked({"a": 0, "b": 0}, (1, 2))) == "a"
    assert route(policy, asked({"a": 1023, "b": 0}, (1, 2))) == "a"
    assert route(policy, asked({"a": 1025, "b": 0}, (1, 2))) == "b"
    assert route(policy, asked({"a": 600, "b": 0}, (1, 3))) == "b"  # 512 tokens are cached on both
    assert route(policy, asked({"a": 1, "b": 0}, ())) == "b"
    policy: Any = router_policy("first_token")
    assert policy.pair(paired({"p0": 0, "p1": 0}, {"d0": 0, "d1": 0}, (1, 2))) == ("p0", "d0")
    assert policy.pair(paired({"p0": 1023, "p1": 0}, {"d0": 0, "d1": 0}, (1, 2))) == ("p0", "d0")
    assert policy.pair(paired({"p0": 1025, "p1": 0}, {"d0": 0, "d1": 0}, (1, 2))) == ("p1", "d1")


def test_a_cache_aware_router_finds_what_turns_taken_miss():
    workload = replace(GENERATED, arrivals="sessions", users=3, think=0.5, turns=8, count=48, shared=0)
    hits = {}
    for name in ("cache_aware", "round_robin"):
        config = configured(Side(tp=1, instances=2), workload=workload, options={"router": name})
        config = replace(config, cache=Cache(prefill=True), model=replace(config.model, context=1 << 17))
        hits[name] = values(serve(replace(config, kv=replace(config.kv, pool=1 << 24))))["prefix_hit_prefill"]
    assert hits["cache_aware"] > 1.2 * hits["round_robin"]


def paired(prefill, decode, blocks=(), **known):
    # a token takes 1 ms at prefill, and its KV 1 ms on the way between neighbours, 3 between others
    rates = {"p0": {"d0": 1e6, "d1": 1e6 / 3}, "p1": {"d0": 1e6 / 3, "d1": 1e6}}
    ask = RoutingQuery(list(prefill), prefill, 1024, blocks)
    return PairQuery(ask, RoutingQuery(list(decode), decode, 1024, blocks, **known), rates, 1e-3, 1000)


@pytest.mark.parametrize(
    ("prefill", "decode", "under_way", "pair"),
    [
        ((0, 0), (0, 0), (0, 0), ("p0", "d0")),
        ((0, 0), (1, 0), (0, 0), ("p1", "d1")),  # decode's tokens decide between equals only
        ((0, 0), (0, 0), (0, 1), ("p0", "d0")),
        ((0, 0), (0, 0), (1, 0), ("p1", "d1")),
        ((2049, 0), (0, 0), (0, 2049), ("p1", "d0")),
        ((2047, 0), (0, 0), (0, 2049), ("p0", "d0")),  # queue and way are alike in seconds
    ],
)
def test_both_sides_are_chosen_by_queue_and_way(prefill, decode, under_way, pair):
    policy: Any = router_policy("first_token")
    sides = ("p0", "p1", prefill), ("d0", "d1", decode), ("d0", "d1", under_way)
    first, second, way = ({one: load[0], other: load[1]} for one, other, load in sides)
    assert policy.pair(paired(first, second, under_way=way)) == pair


def taken(arrivals: Sequence[float], **options: Any) -> list[str]:
    requests = [Request(arrival, 256, 400) for arrival in arrivals]
    run = simulate(requests, prefill=Side(tp=1), decode=Side(tp=1, instances=2), options=options)
    return [row["decode"] for row in run.rows]


def test_replicas_see_what_they_sent_and_what_is_exchanged():
    own = {"routers": 2, "routers_sync": 0.0}
    assert taken([0.0] * 4) == ["decode0", "decode1", "decode0", "decode1"]
    assert taken([0.0] * 4, **own) == ["decode0", "decode0", "decode1", "decode1"]
    late = [0.0, 0.3, 0.3]  # the third is of the first replica, which does not see the second
    assert taken(late, routers=2, routers_sync=0.2) == ["decode0", "decode1", "decode1"]
    assert taken(late, routers=2, routers_sync=100.0) == ["decode0", "decode0", "decode1"]


def test_sides_have_policies_of_their_own():
    def chosen(**options: Any) -> tuple[list[str], list[str]]:
        three = [Request(0.0, tokens, 4) for tokens in (900, 100, 100)]
        rows = simulate(three, options=options, prefill=TWO, decode=TWO).rows
        return [row["prefill"] for row in rows], [row["decode"] for row in rows]

    prefills = ["prefill0", "prefill1", "prefill1"]
    assert chosen(decode_router="round_robin") == (prefills, ["decode0", "decode1", "decode0"])
    assert chosen() == (prefills, ["decode0", "decode1", "decode1"])
    workload = replace(GENERATED, count=20)
    config = configured(TWO, TWO, workload=workload, options={"router": "first_token"})
    assert values(serve(config))["requests_ok"] == 20


def test_the_kv_goes_where_it_arrives_first():
    policy = router_policy("transfer_aware")
    ask = RoutingQuery(["near", "far"], {"near": 9, "far": 0}, 100, rates={"near": 4e11, "far": 5e10}, under_way={})
    assert route(policy, ask) == "near"
    assert route(policy, ask._replace(under_way={"near": 690})) == "near"
    assert route(policy, ask._replace(under_way={"near": 710})) == "far"
    assert route(policy, ask._replace(rates={})) == "far"  # a prefill instance: the least loaded


def test_instances_of_one_node_are_nearer():
    parallel = {"prefill": Side(tp=1, instances=2), "decode": Side(tp=1, instances=8)}
    config = configured(**parallel, hw=replace(EIGHT, nodes=2), options={"router": "transfer_aware"})
    rates = job(config, ServeOptions(router="transfer_aware")).rates
    assert set(rates) == {"prefill0", "prefill1"}
    assert set(rates["prefill0"].values()) == {EIGHT.host.tcp_rate}  # decode has the second node; there are no cards
    packed = configured(Side(tp=1), Side(tp=1), options={"router": "transfer_aware"})
    packed_rates = job(packed, ServeOptions(router="transfer_aware")).rates
    assert packed_rates == {"prefill0": {"decode0": EIGHT.interconnect.rate}}
    near = configured(Side(tp=1), Side(tp=1, instances=3), options={"router": "transfer_aware"})
    assert values(serve(near))["requests_ok"] == 40
