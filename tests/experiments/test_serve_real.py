"""Experiments on the real engines: every byte compared on arrival, and a rank that is really killed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import transfer
from experiments.serve import run
from experiments.transfer import TransferOptions
from pdsim.config import Config
from pdsim.core.progress import silent
from pdsim.kv.policy import Policy
from pdsim.models.llm import Side
from pdsim.results.record import Result
from pdsim.serving.settings import SchedulerLimits, ServingEngine
from pdsim.transfer.job import Outcome, RankSpec
from tests.experiments.test_serve_paths import HYBRID, HYBRID_MLA
from tests.experiments.test_transfer import POINTS
from tests.support.configs import EIGHT, ENGINE, LOOPBACK, make_config
from tests.support.engines import COLLECTIVE, MARKED, engine, make_target
from tests.support.serving import GQA, MLA, POOL, on_loopback, serve

ENGINES = MOONCAKE, NIXL = MARKED[:2]
ALL_CP = replace(POOL, all_cp_ranks=True)
HOSTED = Policy(queues=8, shard="room", call="plane", notify="message", pool="nvlink")


def served(name: str, config: Config) -> Result:
    result = run(config, make_target(name), silent)
    assert result.failures == []
    assert set(result.requests["status"]) == {"ok"}
    return result


def modelled(config: Config) -> Result:
    return serve(replace(config, target="model", hw=EIGHT, backend=ENGINE))


@pytest.mark.parametrize(
    ("prefill", "decode", "model", "name"),
    [  # what the engines differ in is the conformance suite's
        pytest.param(*case, *each.values, marks=each.marks)
        for each, cases in (
            (MOONCAKE, [(Side(tp=2), Side(tp=1), HYBRID), (Side(tp=1, cp=2), Side(tp=1), HYBRID_MLA)]),
            (NIXL, [(Side(tp=1), Side(tp=2), HYBRID), (Side(tp=1, pp=2), Side(tp=1), HYBRID_MLA)]),
        )
        for case in cases
    ],
)
def test_kv_state_and_metadata_arrive_as_they_were_sent(prefill, decode, model, name):
    config = on_loopback(name, prefill, decode, model, kv=ALL_CP)
    result, model_run = served(name, config), modelled(config)
    moved = [sum(record.nbytes for record in each.transfers) for each in (result, model_run)]
    assert moved == [sum(model_run.requests["nbytes"])] * 2
    # whichever of the two sides reports first that a request is over
    assert result.requests["nbytes"] == model_run.requests["nbytes"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2)])
def test_what_is_read_is_what_was_computed(name, prefill, decode):
    pull = ServingEngine(name="pull", handoff="pull", recompute=1, memory="grow", lease=30.0, heartbeat=0.5)
    fast = SchedulerLimits(chunk=512, decode_batch=4)
    config = on_loopback(name, Side(tp=prefill), Side(tp=decode), HYBRID, engine=pull, scheduler=fast)
    result = served(name, config)
    assert {record.operation for record in result.transfers} == {"read"}
    assert result.requests["nbytes"] == modelled(config).requests["nbytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode", "path", "name"),
    [  # every pair of sizes both ways; each engine has most of them, for a job starts up to seven processes
        pytest.param(*case, *each.values, marks=each.marks)
        for each, more in (
            (MOONCAKE, [(1, 2, "sliced"), (2, 4, "sliced"), (4, 2, "staged")]),
            (NIXL, [(2, 1, "sliced"), (4, 2, "sliced"), (2, 4, "staged")]),
        )
        for case in ((2, 1, "staged"), (1, 2, "staged"), *more)
    ],
)
def test_unlike_ranks_hand_over_what_was_sent(prefill, decode, path, name):
    kv = replace(POOL, staging=path == "staged", staging_ring=1 << 18)
    config = on_loopback(name, Side(tp=prefill), Side(tp=decode), GQA, kv=kv, policy=Policy(queues=4, staging=True))
    result = served(name, config)
    assert set(result.requests["path"]) == {path}
    ends = [rank.value for rank in result.outcome.ranks.values() if isinstance(rank.value, dict)]
    assert sum(value.get("staging_held", 0) for value in ends) == 0


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(*NIXL.values, Policy(queues=4, metadata="write"), marks=NIXL.marks, id="nixl, written"),
        pytest.param(*MOONCAKE.values, HOSTED, marks=MOONCAKE.marks, id="mooncake, sent from the host"),
    ],
)
def test_metadata_arrives_both_ways(name, policy):
    assert set(served(name, on_loopback(name, policy=policy, model=MLA)).requests["path"]) == {"grouped"}


@pytest.mark.parametrize("gather", ["plain", "symmetric"])
def test_context_parallel_ranks_gather_through_gloo(gather):
    pytest.importorskip("torch")
    (name,) = NIXL.values
    library = replace(COLLECTIVE, name="gloo", implementation="gloo", pool=1 << 20)
    sides, kv = (Side(tp=1, cp=2), Side(tp=2)), replace(ALL_CP, gather=gather)
    config = on_loopback(name, *sides, HYBRID, deadline=60.0, collective=library, kv=kv)
    target = make_target(name)
    target.collective = library
    result = run(config, target, silent)
    assert result.failures == []
    engines = {record.engine for record in result.transfers if record.operation == "all_gather"}
    assert engines == {f"gloo:{gather}"}


def transferring(name: str, timeout: float = 30.0, **options: Any) -> Config:
    few = {"blocks": (4,), "size": (4096,), "repeat": 20, "warmup": 2, "ranks": 3}
    experiment = TransferOptions(**few | options)
    backend = replace(engine(name), timeout=timeout)
    return make_config(Path("unused"), target="real", hw=LOOPBACK, backend=backend, experiment=experiment)


@pytest.mark.parametrize(
    ("name", "operation", "layout"),
    [
        pytest.param(*each.values, *case, marks=each.marks)
        for each, case in zip(
            MARKED, [("write", "contiguous"), ("read", "scattered"), ("write", "scattered")], strict=True
        )
    ],
)
def test_every_slot_arrives_as_it_was_sent(name, operation, layout):
    options = {"patterns": ("alltoall",), "concurrency": (2,), "operation": operation, "layout": layout}
    result = transfer.run(transferring(name, **options), make_target(name), silent)
    assert [(row["verified"], row["status"]) for row in result.rows(POINTS)] == [("12/12", "ok")]
    assert len(result.transfers) == 6 * 20
    assert all(r.submitted <= r.prepared <= r.posted <= r.completed <= r.seen for r in result.transfers)
    assert {record.engine for record in result.transfers} == {rank.engine for rank in result.outcome.ranks.values()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("victim", ["rank0", "rank1"])
def test_a_killed_rank_ends_its_point_as_peer_lost(name, victim):
    real, kills = make_target(name), [{victim: 0.5}]

    class Killing:
        def run(self, ranks: Sequence[RankSpec], kill: Mapping[str, float] | None = None) -> Outcome:
            return real.run(ranks, kills.pop() if kills else {})

    many = {"patterns": ("pair",), "size": (1 << 20,), "repeat": 100_000}
    config = transferring(name, timeout=8.0, **many)  # rank1 waits so long for the killed rank0
    result = transfer.run(config, Killing(), silent)
    assert [row["status"] for row in result.rows(POINTS)] == ["PeerLost"]
    assert any(failure.startswith(f"{victim}: ") for failure in result.failures)
