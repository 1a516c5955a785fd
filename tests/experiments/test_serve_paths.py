"""Which way the KV of `experiment=serve` goes, between unlike sides, in how many descriptors, and intact."""

from dataclasses import replace
from typing import Any

import pytest

from pdsim.config import Config
from pdsim.kv.policy import Policy
from pdsim.models.llm import Hybrid, Llm, Side
from pdsim.results.record import Result
from pdsim.serving.settings import Kv
from tests.support.configs import EIGHT, ENGINE, LLM
from tests.support.serving import GENERATED, GQA, MLA, POOL, configured, quarantined, rows, serve, values

SMALL = replace(GENERATED, count=8, input_mean=100)
MAMBA = {"conv_groups": (8, 8, 16), "conv_width": 3, "ssm_heads": 4, "ssm_head_elements": 32}
STATE = Hybrid(pattern="mwa", window=40, index_bytes=12, **MAMBA)
HYBRID = replace(GQA, layers=7, hybrid=STATE)
HYBRID_MLA = replace(MLA, layers=5, hybrid=replace(STATE, pattern="am"))
MODELS = {"gqa": GQA, "two heads": LLM, "mla": MLA, "hybrid": HYBRID, "hybrid mla": HYBRID_MLA}
SIDES = {
    "pp 2 to 1": (Side(tp=2, pp=2), Side(tp=1)),
    "pp 2 to 2": (Side(tp=1, pp=2), Side(tp=2, pp=2)),
    "cp 3 to 1": (Side(tp=1, cp=3), Side(tp=2)),
    "pp 2, cp 2": (Side(tp=2, pp=2, cp=2), Side(tp=2, pp=2)),
    "dp 2 to 2": (Side(tp=4, dp=2), Side(tp=2, dp=2)),
    "dp 2 to 1": (Side(tp=2, dp=2), Side(tp=4)),
    "tp 4 to 1": (Side(tp=4), Side(tp=1)),
    "tp 1 to 4": (Side(tp=1), Side(tp=4, instances=2)),
    "tp 4 to 2": (Side(tp=4), Side(tp=2)),
    "tp 2 to 4": (Side(tp=2), Side(tp=4)),
}


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("model", MODELS)
def test_what_arrives_is_what_was_sent(model, sides):
    kv = replace(POOL, all_cp_ranks="cp" in sides)
    hw = replace(EIGHT, gpus=16)
    result = serve(configured(*SIDES[sides], MODELS[model], workload=SMALL, memory="tracked", hw=hw, kv=kv))
    assert result.failures == []
    assert quarantined(result) == 0


def test_one_context_parallel_rank_writes_for_all_unless_told_otherwise():
    writers = []
    for every in (False, True):
        kv = replace(POOL, all_cp_ranks=every)
        result = serve(configured(Side(tp=1, cp=2), Side(tp=1), GQA, workload=SMALL, kv=kv))
        writers.append({record.source for record in result.transfers})
    assert writers == [{"prefill0.0"}, {"prefill0.0", "prefill0.1"}]


def test_a_request_moves_what_the_formulas_say():
    result = serve(configured(Side(tp=2), Side(tp=2), HYBRID, workload=SMALL))
    token = 2 * 2 * 8 * 16 * 2  # of both ranks, in the two layers with full attention
    for given, nbytes in zip(result.requests["input"], result.requests["nbytes"], strict=True):
        pages = -(-given // 16)
        window = pages - max(0, given - 40) // 16
        slots = 3 * (32 * 3 * 2 + 4 * 32 * 4)
        index = 2 * 2 * 12 * 16 * pages  # both ranks have both layers' index
        assert nbytes == 16 * pages * token + 16 * window * token + slots + index + 2 * 1600


def test_few_state_slots_let_few_requests_in_at_a_time():
    fast = replace(SMALL, rate=1e4)
    many, one = (
        serve(configured(model=HYBRID, workload=fast, kv=replace(POOL, state_slots=slots))) for slots in (8, 1)
    )
    assert many.failures == one.failures == []
    assert sum(one.requests["queueing"]) > sum(many.requests["queueing"])


FEW = replace(GENERATED, count=12, input_mean=100)
ONE = replace(GENERATED, count=1, input_mean=100, input_cv=0)
STAGED = Kv(page_size=16, pool=1 << 20, staging=True, staging_ring=1 << 20)
SLICED = replace(STAGED, staging=False)
LARGE = replace(STAGED, pool=1 << 24)
LONG = replace(GENERATED, rate=5000.0, count=20, input_mean=400)
CHUNK = 17 * 16 * 2 * 2 * 4 * 16 * 2
"""Most bytes of a prefill chunk that one of two prefill ranks writes: 16 pages and one that the chunk before left,
two layers, K and V, 4 heads."""


def staged(prefill: int = 2, decode: int = 1, model: Llm = GQA, **changes: Any) -> Config:
    settings = {"workload": FEW, "memory": "tracked", "kv": STAGED, "policy": Policy(queues=4, staging=True)}
    return configured(Side(tp=prefill), Side(tp=decode), model, **(settings | changes))


def went(config: Config) -> tuple[Result, set[str | None]]:
    """Return what *config* gives, and the paths; all of it arrives intact, and nothing stays in a staging ring."""
    result = serve(config)
    ends = [rank.value for rank in result.outcome.ranks.values() if rank.value]
    assert (result.failures, sum(value.get("staging_held", 0) for value in ends)) == ([], 0)
    assert quarantined(result) == 0
    return result, set(result.requests["path"])


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (4, 2), (2, 4), (4, 1), (1, 4)])
def test_staged_chunks_arrive_in_one_descriptor_each(prefill, decode):
    result, paths = went(staged(prefill, decode))
    assert paths == {"staged"}
    blocks = [record for record in result.transfers if record.label.endswith("/staged")]
    assert {record.descriptors for record in blocks} == {1}
    tokens = sum(-(-row["input"] // 16) * 16 for row in rows(result))
    assert sum(record.nbytes for record in blocks) == tokens * 2 * 2 * 8 * 16 * 2  # each head of each layer once
    found = values(result)
    assert (found["staged_descriptors"], found["metadata_bytes"]) == (len(blocks), 12 * 1600 * max(1, decode))
    assert found["staged_bytes"] == sum(record.nbytes for record in blocks)


@pytest.mark.parametrize(("prefill", "decode", "model"), [(1, 1, GQA), (2, 2, GQA), (2, 1, MLA), (1, 2, MLA)])
def test_equal_sizes_and_latent_caches_are_never_staged(prefill, decode, model):
    assert went(staged(prefill, decode, model))[1] == {"grouped"}


@pytest.mark.parametrize("ring", [CHUNK, CHUNK + 1, 2 * CHUNK - 1])
def test_a_ring_that_holds_one_chunk_serves_all(ring):
    assert went(staged(kv=replace(LARGE, staging_ring=ring, staging_wait=1000.0), workload=LONG))[1] == {"staged"}


@pytest.mark.parametrize(
    ("kv", "path"),
    [
        (replace(LARGE, staging_buffer=4096), "sliced"),  # what exceeds the buffer
        (replace(LARGE, staging_ring=CHUNK, staging_wait=1e-9), "sliced+staged"),  # while the ring is full
    ],
)
def test_what_has_no_staging_slot_goes_in_slices(kv, path):
    result, paths = went(staged(kv=kv, workload=LONG))
    assert path in paths
    assert path == "sliced" or any("went in slices because the staging ring had no" in note for note in result.notes)


POLICIES = {
    "mooncake": Policy(queues=4, metadata="write"),
    "nvlink pool": Policy(queues=4, pool="nvlink"),
    "within a node": Policy(queues=4, pool="intra_node_nvlink"),
    "nixl": Policy(queues=4, shard="room", grouping="pages", metadata="write"),
    "mori": Policy(queues=8, shard="room", call="plane", notify="message", metadata="control"),
    "mori inline": Policy(call="plane", notify="poll", metadata="control"),
    "control, on the device": Policy(metadata="control"),
    "control, on the host": Policy(metadata="control", metadata_memory="host"),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2)])
def test_every_policy_hands_over_what_was_sent(prefill, decode, policy):
    path = "grouped" if prefill == decode else "sliced"
    assert went(staged(prefill, decode, kv=SLICED, policy=policy))[1] == {path}


@pytest.mark.parametrize(
    ("policy", "descriptors"),
    [
        (Policy(), [4, 10]),  # two layers, K and V, one run; then ten rows of metadata
        (Policy(grouping="pages"), [4 * 7, 10]),
        (Policy(metadata="batch"), [4 + 10]),
        (Policy(metadata="control"), [4]),
        (POLICIES["mori"], [1, 1, 1, 1]),  # a plane a write
    ],
)
def test_descriptors_are_those_of_the_grouping(policy, descriptors):
    result = serve(staged(1, 1, workload=ONE, kv=SLICED, policy=policy))
    assert [record.descriptors for record in result.transfers] == descriptors


@pytest.mark.parametrize("fallback", ["", "control"])
def test_metadata_that_the_engine_refuses_fails_or_falls_back(fallback):
    narrow = replace(ENGINE, intra=replace(ENGINE.intra, depth=5, full="refuse"))  # a run of KV is four descriptors
    policy = replace(POLICIES["mooncake"], metadata_fallback=fallback)
    apart = replace(ONE, count=2, rate=1.0)
    result = serve(staged(1, 1, workload=apart, backend=narrow, kv=SLICED, policy=policy))
    if not fallback:
        assert ["SendQueueFull" in failure for failure in result.failures] == [True, True]
        return
    assert result.failures == []
    assert [record.descriptors for record in result.transfers if record.status == "ok"] == [4, 4]
    assert "metadata over the control channel, 2 times: SendQueueFull over the data path" in result.notes


def posted(queues: int, shard: str = "room") -> float:
    """Return by how much the second of two rooms is handed to the engine later; it takes 14 ms to post one."""
    slow = replace(ENGINE, intra=replace(ENGINE.intra, call=0.0, descriptor=1e-3))
    policy = Policy(queues=queues, shard=shard, metadata="batch")
    two = replace(ONE, count=2, rate=1e6)
    first, second = serve(staged(1, 1, workload=two, backend=slow, kv=SLICED, policy=policy)).transfers
    return second.submitted - first.submitted


def test_a_room_waits_for_the_writes_of_its_own_queue():
    assert posted(queues=1) == pytest.approx(14e-3 + (1600 + 7 * 16 * 1024) / 10e9, rel=1e-9)
    beside = posted(queues=2)
    assert beside < 2.1e-3  # the forward in between
    assert posted(queues=0) == pytest.approx(14e-3 + beside, rel=1e-3)  # inline: the forward begins after it
    assert posted(queues=2, shard="session") == posted(queues=1)  # rooms to one peer share a queue


def slow_posts(policy: Policy) -> list[dict[str, Any]]:
    """Return two requests that come at once, a forward each, where a call of the engine takes 20 ms."""
    two = replace(ONE, count=2, rate=1e9, input_mean=256, output_mean=1, output_cv=0)
    slow = replace(ENGINE, intra=replace(ENGINE.intra, call=20e-3, descriptor=0.0))
    return rows(serve(staged(1, 1, workload=two, policy=policy, backend=slow, kv=SLICED, memory="timing")))


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [(Policy(notify="poll"), 40e-3), (Policy(queues=1), 0.0)],  # KV, then metadata: 20 ms each; or a thread's
)
def test_a_scheduler_begins_no_forward_while_it_posts_inline(policy, seconds):
    first, second = slow_posts(policy)
    assert second["started_at"] - first["prefilled_at"] == pytest.approx(seconds, abs=1e-9)


def test_each_write_of_a_queue_waits_for_the_lock():
    soon, late = (
        slow_posts(Policy(queues=1, call="plane", metadata="control", handover=seconds))[0]["transfer"]
        for seconds in (0.0, 5e-3)
    )
    assert late - soon == pytest.approx((2 * GQA.layers + 1) * 5e-3, abs=1e-9)  # K and V of each layer, metadata


@pytest.mark.parametrize(
    ("policy", "held"),
    [
        ({"metadata_stall": 7e-3}, 7e-3),
        ({"metadata_stall": 7e-3, "metadata": "control"}, 0.0),
        ({"notice": 1e-3, "metadata": "batch"}, 1e-3),
        ({"notice": 1e-3, "notify": "message"}, 0.0),
    ],
)
def test_what_arrives_holds_the_steps_of_decode(policy, held):
    one = replace(GENERATED, count=1, input_mean=256, input_cv=0, output_mean=4, output_cv=0)
    ways = {name: policy[name] for name in ("metadata", "notify") if name in policy}
    common: dict[str, Any] = {"workload": one, "kv": replace(STAGED, staging=False), "memory": "timing"}
    (free,), (late,) = (rows(serve(staged(1, 1, policy=Policy(**own), **common))) for own in (ways, policy))
    assert late["e2e"] - free["e2e"] == pytest.approx(held, abs=1e-9)
    assert late["transfer"] == free["transfer"]
