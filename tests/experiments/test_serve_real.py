"""`experiment=serve` on the real engines: hybrid models between unlike ranks, every byte compared on arrival."""

from dataclasses import replace

import pytest

from experiments.serve import run
from pdsim.config import Config
from pdsim.core.progress import silent
from pdsim.kv.policy import Policy
from pdsim.models.llm import Side
from pdsim.results.record import Result
from pdsim.serving.settings import SchedulerLimits, ServingEngine
from tests.experiments.test_serve_paths import HYBRID, HYBRID_MLA
from tests.support.configs import EIGHT, ENGINE
from tests.support.engines import COLLECTIVE, MARKED, make_target
from tests.support.serving import GQA, MLA, POOL, on_loopback, serve

ENGINES = MOONCAKE, NIXL = MARKED[:2]
ALL_CP = replace(POOL, all_cp_ranks=True)


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
@pytest.mark.parametrize("handoff", ["push", "pull"])
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(("prefill", "decode"), [(16, 64), (64, 16)])
def test_sides_with_pages_of_their_own_hand_over_all(name, prefill, decode, handoff):
    own = ServingEngine(name="own", handoff=handoff, recompute=int(handoff == "pull"), prepare=1e-5)
    kv = replace(POOL, page_size=prefill, decode_page_size=decode)
    config = on_loopback(name, Side(tp=2), Side(tp=1), GQA, engine=own, kv=kv)
    result, model_run = served(name, config), modelled(config)
    assert result.requests["nbytes"] == model_run.requests["nbytes"]
    assert {record.operation for record in result.transfers} == {"write" if handoff == "push" else "read"}


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
    assert result.outcome is not None
    ends = [rank.value for rank in result.outcome.ranks.values() if isinstance(rank.value, dict)]
    assert sum(value.get("staging_held", 0) for value in ends) == 0


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(*NIXL.values, Policy(queues=4, metadata="write"), marks=NIXL.marks, id="nixl, written"),
        pytest.param(
            *MOONCAKE.values,
            Policy(queues=8, shard="room", call="plane", notify="message", pool="nvlink"),
            marks=MOONCAKE.marks,
            id="mooncake, sent from the host",
        ),
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
