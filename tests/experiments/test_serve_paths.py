"""The paths of `experiment=serve`: which way KV goes, in how many descriptors, intact, every slot given back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdsim.config import Config
from pdsim.core.errors import ConfigError
from pdsim.kv.policy import Policy
from pdsim.models.llm import Llm
from pdsim.models.parallel import Side
from pdsim.results.record import Result
from pdsim.serving.settings import Kv
from tests.experiments.test_serve import quarantined
from tests.support.configs import ENGINE
from tests.support.serving import GENERATED, GQA, MLA, configured, rows, serve, values

FEW = replace(GENERATED, count=12, input_mean=100)
STAGED = Kv(page_size=16, pool=1 << 20, staging=True, staging_ring=1 << 20)
QUEUES = Policy(queues=4, staging=True)
HETEROGENEOUS = [(2, 1), (1, 2), (4, 2), (2, 4), (4, 1), (1, 4)]


def staged(prefill: int = 2, decode: int = 1, model: Llm = GQA, **changes: Any) -> Config:
    values = {"workload": FEW, "memory": "tracked", "kv": STAGED, "policy": QUEUES}
    return configured(Side(tp=prefill), Side(tp=decode), model, **(values | changes))


def held(result: Result) -> int:
    """Return the bytes that staging rings held at the end."""
    assert result.outcome is not None
    found = [rank.value for rank in result.outcome.ranks.values() if rank.value]
    return sum(value.get("staging_held", 0) for value in found)


def paths(result: Result) -> set[str | None]:
    return set(result.requests["path"])


# --- staged --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefill", "decode"), HETEROGENEOUS)
def test_staged_chunks_arrive_as_they_were_sent_in_one_descriptor_each(prefill: int, decode: int):
    result = serve(staged(prefill, decode))
    assert result.failures == []
    assert paths(result) == {"staged"}
    blocks = [record for record in result.transfers if record.label.endswith("/staged")]
    assert {record.descriptors for record in blocks} == {1}
    tokens = sum(-(-row["input"] // 16) * 16 for row in rows(result))
    assert sum(record.nbytes for record in blocks) == tokens * 2 * 2 * 8 * 16 * 2  # each head of each layer once
    assert (held(result), quarantined(result)) == (0, 0)


@pytest.mark.parametrize("tp", [1, 2])
def test_equal_sizes_are_never_staged(tp: int):
    assert paths(serve(staged(tp, tp))) == {"grouped"}


@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2)])
def test_latent_caches_are_never_staged(prefill: int, decode: int):
    result = serve(staged(prefill, decode, MLA))
    assert (result.failures, paths(result)) == ([], {"grouped"})


def test_staging_is_faster_where_descriptors_are_what_costs():
    sliced = serve(staged(kv=replace(STAGED, staging=False)))
    assert paths(sliced) == {"sliced"}
    mean = {name: sum(result.requests["transfer"]) for name, result in (("s", sliced), ("b", serve(staged())))}
    assert mean["b"] < mean["s"] / 5


# --- rings that barely fit, or do not ------------------------------------------------------------------------------

CHUNK = 17 * 16 * 2 * 2 * 4 * 16 * 2
"""Most bytes of a prefill chunk that one of two prefill ranks writes: 16 pages and one that the chunk before left,
two layers, K and V, 4 heads."""
LONG = replace(GENERATED, rate=5000.0, count=20, input_mean=400)
LARGE = replace(STAGED, pool=1 << 24)


@pytest.mark.parametrize("ring", [CHUNK, CHUNK + 1, 2 * CHUNK - 1])
def test_a_ring_that_holds_one_chunk_serves_all(ring: int):
    result = serve(staged(kv=replace(LARGE, staging_ring=ring, staging_wait=1000.0), workload=LONG))
    assert (result.failures, paths(result), held(result)) == ([], {"staged"}, 0)


def test_what_exceeds_the_buffer_goes_in_slices_at_once():
    result = serve(staged(kv=replace(STAGED, staging_buffer=4096)))
    assert (result.failures, paths(result)) == ([], {"sliced"})


def test_a_ring_that_holds_no_chunk_is_refused_before_the_run():
    with pytest.raises(ConfigError, match=r"kv\.staging_ring=4 KiB holds no chunk of .*; raise kv\.staging_ring"):
        serve(staged(kv=replace(STAGED, staging_ring=4096)))


def test_a_ring_that_stays_full_too_long_means_slices_for_the_rest_of_the_room():
    result = serve(staged(kv=replace(LARGE, staging_ring=CHUNK, staging_wait=1e-9), workload=LONG))
    assert (result.failures, held(result)) == ([], 0)
    assert "sliced+staged" in paths(result)
    assert any("went in slices because the staging ring had no free slot" in note for note in result.notes)


# --- policies ------------------------------------------------------------------------------------------------------

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
def test_every_policy_hands_over_what_was_sent(prefill: int, decode: int, policy: Policy):
    result = serve(staged(prefill, decode, kv=replace(STAGED, staging=False), policy=policy))
    assert result.failures == []
    assert paths(result) == {"grouped" if prefill == decode else "sliced"}
    assert quarantined(result) == 0


@pytest.mark.parametrize(
    ("policy", "descriptors"),
    [
        (Policy(), [4, 10]),  # two layers, K and V, one run; then ten rows of metadata
        (Policy(grouping="pages"), [4 * 7, 10]),
        (Policy(metadata="batch"), [4 + 10]),
        (Policy(metadata="control"), [4]),
    ],
)
def test_descriptors_are_those_of_the_grouping(policy: Policy, descriptors: list[int]):
    one = replace(GENERATED, count=1, input_mean=100, input_cv=0)
    result = serve(staged(1, 1, workload=one, kv=replace(STAGED, staging=False), policy=policy))
    assert [record.descriptors for record in result.transfers] == descriptors


def test_a_plane_at_a_time_is_a_write_each():
    one = replace(GENERATED, count=1, input_mean=100, input_cv=0)
    config = staged(1, 1, workload=one, kv=replace(STAGED, staging=False), policy=POLICIES["mori"])
    assert [record.descriptors for record in serve(config).transfers] == [1, 1, 1, 1]


def test_bytes_and_descriptors_of_each_path_are_in_the_summary():
    found = values(serve(staged()))
    chunks = [record for record in serve(staged()).transfers if record.label.endswith("/staged")]
    assert found["staged_descriptors"] == len(chunks)
    assert found["staged_bytes"] == sum(record.nbytes for record in chunks)
    assert found["metadata_bytes"] == 12 * 1600


# --- metadata that cannot go its way -------------------------------------------------------------------------------


@pytest.mark.parametrize("fallback", ["", "control"])
def test_metadata_that_the_engine_does_not_take_fails_or_falls_back(fallback: str):
    narrow = replace(ENGINE, intra=replace(ENGINE.intra, depth=5, full="refuse"))  # a run of KV is four descriptors
    one = replace(GENERATED, count=1, input_mean=100, input_cv=0)
    policy = replace(POLICIES["mooncake"], metadata_fallback=fallback)
    result = serve(staged(1, 1, workload=one, backend=narrow, kv=replace(STAGED, staging=False), policy=policy))
    if not fallback:
        assert ["SendQueueFull" in failure for failure in result.failures] == [True]
        return
    assert result.failures == []
    assert [record.descriptors for record in result.transfers if record.status == "ok"] == [4]
    assert "metadata over the control channel, 1 times: SendQueueFull over the data path" in result.notes


# --- queues --------------------------------------------------------------------------------------------------------


def posted(queues: int, shard: str = "room") -> list[float]:
    """Return when each of two rooms was handed to the engine, from the first; it takes 14 ms to post one."""
    two = replace(GENERATED, count=2, rate=1e6, input_mean=100, input_cv=0)
    slow = replace(ENGINE, intra=replace(ENGINE.intra, call=0.0, descriptor=1e-3))
    policy = Policy(queues=queues, shard=shard, metadata="batch")
    result = serve(staged(1, 1, workload=two, backend=slow, kv=replace(STAGED, staging=False), policy=policy))
    first, *others = [record.submitted for record in result.transfers]
    return [other - first for other in others]


def test_a_room_waits_for_the_write_before_it_in_its_queue():
    (behind,) = posted(queues=1)
    assert behind == pytest.approx(14e-3 + (1600 + 7 * 16 * 1024) / 10e9, rel=1e-9)


def test_a_room_in_another_queue_does_not_wait():
    (beside,) = posted(queues=2)
    assert beside < 2.1e-3  # the forward in between
    (inline,) = posted(queues=0)
    assert inline == pytest.approx(14e-3 + beside, rel=1e-3)  # the forward begins when the first is posted


def test_rooms_to_one_peer_share_a_queue_where_sessions_do():
    assert posted(queues=2, shard="session") == posted(queues=1)


# --- who posts -----------------------------------------------------------------------------------------------------


def slow_posts(policy: Policy) -> list[dict[str, Any]]:
    """Return two requests that come at once, a forward each, where a call of the engine takes 20 ms."""
    two = replace(GENERATED, count=2, rate=1e9, input_mean=256, input_cv=0, output_mean=1, output_cv=0)
    slow = replace(ENGINE, intra=replace(ENGINE.intra, call=20e-3, descriptor=0.0))
    changes: dict[str, Any] = {"backend": slow, "kv": replace(STAGED, staging=False), "memory": "timing"}
    return rows(serve(staged(1, 1, workload=two, policy=policy, **changes)))


def test_the_scheduler_begins_no_forward_while_it_posts_inline():
    first, second = slow_posts(Policy(notify="poll"))
    # KV, then metadata: 20 ms each, before the next forward
    assert second["started_at"] - first["prefilled_at"] == pytest.approx(40e-3, abs=1e-9)


def test_a_thread_posts_beside_the_next_forward():
    first, second = slow_posts(Policy(queues=1))
    assert second["started_at"] == pytest.approx(first["prefilled_at"], abs=1e-9)


def test_a_queue_begins_a_write_when_its_thread_has_the_lock():
    soon, late = (slow_posts(Policy(queues=1, metadata="batch", handover=seconds)) for seconds in (0.0, 5e-3))
    assert late[0]["transfer"] - soon[0]["transfer"] == pytest.approx(5e-3, abs=1e-9)
