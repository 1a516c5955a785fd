"""The all-gather of context-parallel prefill: exact times on the path of a request, and bytes that are compared."""

from dataclasses import replace
from typing import Any

import pytest

from experiments.serve import ServeOptions, job, specs
from pdsim.models.llm import Llm, Side
from pdsim.results.record import Result
from pdsim.serving.settings import Workload
from pdsim.serving.workload import Request
from pdsim.sim.model import Model
from pdsim.testing.cases import COLLECTIVE
from tests.support.serving import GQA, MLA, POOL, configured, serve

LIBRARY = replace(COLLECTIVE, pool=1 << 20)
SMALL = Workload(arrivals="poisson", count=6, rate=50.0, input_mean=100, output_mean=4)
MODELS = {"gqa": GQA, "mla": MLA, "index": replace(MLA, hybrid=replace(MLA.hybrid, index_bytes=12))}


def served(cp: int, model: Llm = GQA, tp: int = 1, **changes: Any) -> Result:
    settings = {"collective": LIBRARY, "workload": SMALL} | changes
    return serve(configured(Side(tp=tp, cp=cp), Side(tp=1), model, **settings))


def ttft(result: Result) -> float:
    assert result.failures == []
    return result.requests["ttft"][0]


def test_a_forward_lasts_longer_by_its_gathers():
    one = replace(SMALL, count=1, input_mean=64, input_cv=0)
    slow = replace(LIBRARY, plain=replace(LIBRARY.plain, rate=LIBRARY.plain.rate / 1000))
    fast, late = (served(2, workload=one, collective=library) for library in (LIBRARY, slow))
    # each of 2 ranks sends 32 tokens of K and V of every layer at the library's rate
    nbytes = 32 * 2 * GQA.layers * GQA.kv_heads * GQA.head_dim * 2
    assert ttft(late) - ttft(fast) == pytest.approx(999 * nbytes / COLLECTIVE.plain.rate, rel=1e-9)


def test_no_collective_means_no_gather():
    records = served(2, collective=None).transfers
    assert {record.operation for record in records} == {"write"}


@pytest.mark.parametrize("memory", ["plain", "symmetric", "both"])
@pytest.mark.parametrize("model", MODELS)
def test_gathered_bytes_reach_decode(model, memory):
    result = served(3, MODELS[model], memory="tracked", kv=replace(POOL, gather=memory, all_cp_ranks=True))
    assert result.failures == []
    kind = "plain" if memory == "plain" else "symmetric"
    gathers = [record for record in result.transfers if record.operation == "all_gather"]
    assert gathers
    assert {record.engine.split(":")[-1] for record in gathers} == {kind}


def test_a_gather_that_mixes_rows_up_is_noticed(monkeypatch):
    from pdsim.kv import allgather

    order = allgather.Split.order
    monkeypatch.setattr(allgather.Split, "order", lambda self: (order(self)[0][::-1], *order(self)[1:]))
    one = replace(SMALL, count=1, input_mean=64, input_cv=0)
    (failure,) = served(2, workload=one, memory="tracked").failures
    assert "token 0 byte 0: found room 1 plane 0 head 0 token 32" in failure


def test_plain_memory_is_used_where_symmetric_is_not():
    small = replace(COLLECTIVE, pool=64, grow=False)
    result = served(2, collective=small, kv=replace(POOL, gather="symmetric"))
    assert result.failures == []
    (note,) = [note for note in result.notes if "kv.gather" in note]
    assert note.startswith("kv.gather: plain memory instead of symmetric: OutOfMemory: the symmetric pool has 64 B")
    both = {"kv": replace(POOL, gather="both"), "collective": COLLECTIVE}
    config = configured(Side(tp=2, cp=2, dp=2), Side(tp=1), GQA, **both)
    gather = job(config, ServeOptions()).gather
    assert (gather.memory, gather.fallback) == ("plain", "parallel.prefill.dp=2 pads to unequal sums")


def test_the_pool_grows_where_a_forward_needs_more():
    small = replace(COLLECTIVE, pool=64)
    records = served(2, collective=small, kv=replace(POOL, gather="symmetric")).transfers
    first, *grown = [record.nbytes for record in records if record.operation == "reserve" and "0.1" in record.target]
    assert first == 64
    assert grown
    assert grown == sorted(grown)


def test_a_group_that_one_never_joins_is_not_fallen_back_from():
    config = configured(Side(tp=1, cp=2), Side(tp=1), GQA, kv=replace(POOL, gather="symmetric"), collective=LIBRARY)
    ranks = specs(config, job(config, ServeOptions()), [Request(0.0, 4, 2)])
    model = Model(config.hw, config.backend, limit=2 * LIBRARY.timeout, collective=LIBRARY)
    killed = {"prefill0.0": 0.001, "prefill0.1": 0.001}
    error = model.run(ranks, killed, {"prefill0.0": 0.002}).ranks["prefill0.0"].error
    late = (
        f"a collective of prefill0.0+prefill0.1 is not over after {LIBRARY.timeout:g} s; prefill0.1 had not called"
    )
    assert error == f"TransferTimeout: {late}"
