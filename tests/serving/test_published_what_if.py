"""What-ifs beside public figures: vLLM 50913 (8 x L20, Qwen3-32B in FP8, 3P1D with TP 2, 1.15 requests/s)."""

import pytest

from pdsim.config.compose import compose
from pdsim.run import simulated
from tests.support.serving import rows

SETTING = (
    "engine=vllm hw=8xl40s model=qwen3-32b model.dtype_bytes=1 backend=nixl_vllm parallel=tp2 "
    "parallel.prefill.instances=3 parallel.decode.instances=1 workload=poisson workload.rate=1.15 "
    "workload.count=300 workload.input_mean=4900 workload.input_cv=0"
)


def handover(*words: str) -> tuple[float, float]:
    """Return the mean ms from prefill's end to the first token, and of the transfer in it."""
    requests = rows(simulated(compose([*SETTING.split(), *words])))
    spans = [(row["arrival"] + row["ttft"] - row["prefilled_at"], row["transfer"]) for row in requests]
    first, transfer = (1e3 * sum(each) / len(requests) for each in zip(*spans, strict=True))
    return first, transfer


@pytest.mark.slow
def test_larger_blocks_and_a_seeded_token_shorten_the_handover():
    pages = ("kv.page_size=16",), ("kv.page_size=64",), ("kv.page_size=64", "engine.recompute=0")
    small, large, seeded = (handover(*words) for words in pages)
    assert small == pytest.approx((291, 114), abs=0.5)  # published: 263, 105
    assert large == pytest.approx((209, 39), abs=0.5)  # published: 197, 47
    assert large[0] - seeded[0] == pytest.approx(126, abs=0.5)  # published: 58
