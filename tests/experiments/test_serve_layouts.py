"""`experiment=serve` over stages, context and data parallelism, with hybrid models: every byte compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdsim.core.errors import ConfigError
from pdsim.models.llm import Hybrid, Llm
from pdsim.models.parallel import Parallel, Side
from pdsim.serving.settings import Kv
from tests.experiments.test_serve import quarantined
from tests.support.configs import EIGHT, LLM
from tests.support.serving import GENERATED, GQA, MLA, POOL, configured, serve

SIXTEEN = replace(EIGHT, gpus=16)
SMALL = replace(GENERATED, count=8, input_mean=100)
STATE = Hybrid(
    pattern="mwa", window=40, conv_groups=(8, 8, 16), conv_width=3, ssm_heads=4, ssm_head_elements=32, index_bytes=12
)
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
def test_what_arrives_is_what_was_sent(model: str, sides: str):
    kv = replace(POOL, all_cp_ranks="cp" in sides)
    config = configured(*SIDES[sides], MODELS[model], workload=SMALL, memory="tracked", hw=SIXTEEN, kv=kv)
    result = serve(config)
    assert result.failures == []
    assert quarantined(result) == 0


def test_one_context_parallel_rank_writes_for_all_unless_told_otherwise():
    writers = []
    for every in (False, True):
        kv = replace(POOL, all_cp_ranks=every)
        result = serve(configured(Side(tp=1, cp=2), Side(tp=1), GQA, workload=SMALL, kv=kv))
        writers.append({record.source for record in result.transfers})
    assert writers == [{"prefill0.0"}, {"prefill0.0", "prefill0.1"}]


def test_a_request_is_served_by_the_data_parallel_rank_of_its_room():
    result = serve(configured(Side(tp=2, dp=2), Side(tp=4, dp=4), GQA, workload=SMALL))
    assert result.requests["prefill"][:4] == ["prefill0d1", "prefill0d0", "prefill0d1", "prefill0d0"]
    assert result.requests["decode"][:4] == ["decode0d1", "decode0d2", "decode0d3", "decode0d0"]


def test_a_request_moves_what_the_formulas_say():
    result = serve(configured(Side(tp=2), Side(tp=2), HYBRID, workload=SMALL))
    token = 2 * 2 * 8 * 16 * 2  # of both ranks, in the two layers with full attention
    for given, nbytes in zip(result.requests["input"], result.requests["nbytes"], strict=True):
        pages = -(-given // 16)
        window = pages - max(0, given - 40) // 16
        slots = 3 * (32 * 3 * 2 + 4 * 32 * 4)
        rows = 2 * 2 * 12 * 16 * pages  # both ranks have both layers' index
        assert nbytes == 16 * pages * token + 16 * window * token + slots + rows + 2 * 1600


def test_few_state_slots_let_few_requests_in_at_a_time():
    fast = replace(SMALL, rate=1e4)
    many, one = (
        serve(configured(model=HYBRID, workload=fast, kv=replace(POOL, state_slots=slots))) for slots in (8, 1)
    )
    assert many.failures == one.failures == []
    assert sum(one.requests["queueing"]) > sum(many.requests["queueing"])


@pytest.mark.parametrize(
    ("prefill", "decode", "model", "words"),
    [
        (Side(tp=1, pp=4), Side(tp=1), GQA, "pp=4 over 2 layers: every stage needs at least one; lower pp"),
        (Side(tp=8), Side(tp=1), HYBRID, r"mamba dimensions \(4,\) over tp=8: tp must divide each of them"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_before_anything_runs(
    prefill: Side, decode: Side, model: Llm, words: str
):
    with pytest.raises(ConfigError, match=words):
        serve(configured(prefill, decode, model, hw=SIXTEEN))


def test_a_window_larger_than_its_pool_is_refused_before_anything_runs():
    kv = Kv(page_size=16, pool=1 << 20, window_share=0.01)
    with pytest.raises(
        ConfigError, match=r"pages of sliding-window layers on the prefill side, whose ranks have \d"
    ):
        serve(configured(model=HYBRID, kv=kv))


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        ({}, {"cp": 2}, "decode.cp=2: decode ranks are not context-parallel"),
        ({"pp": 2}, {"pp": 4}, "decode.pp=4 and prefill.pp=2: decode has the stages of prefill or a single one"),
        ({"dp": 3}, {}, "parallel.dp must divide tp=4"),
    ],
)
def test_sides_that_the_protocol_does_not_know_are_refused(
    prefill: dict[str, int], decode: dict[str, int], words: str
):
    with pytest.raises(ValueError, match=words):
        Parallel(prefill=Side(tp=4, **prefill), decode=Side(tp=4, **decode))
