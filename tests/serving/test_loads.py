"""Each serving engine serves a load of like requests to its end, whatever the page size."""

from __future__ import annotations

import pytest

from experiments import serve
from pdsim.config.compose import compose
from pdsim.core.progress import silent
from pdsim.sim.model import Model

WORDS = (
    "hw=2xh200", "model=qwen3-8b", "parallel=tp1", "workload=poisson", "workload.rate=8", "workload.count=12",
    "workload.input_mean=2048", "workload.output_mean=64", "workload.input_cv=0", "workload.output_cv=0",
)  # fmt: skip
SYSTEMS = {
    "vllm": [
        *("engine=vllm", "backend=nixl_vllm", "compute=h200_fa3", "kv.page_size=16"),
        *("kv.pool=65017479168B", "scheduler.memory_fraction=0.6"),
    ],
    "sglang": [
        *("engine=sglang", "backend=mooncake_nvlink", "compute=h200_triton", "kv.page_size=1"),
        *("kv.pool=65722466304B", "scheduler.memory_fraction=0.6"),
    ],
}


@pytest.mark.parametrize("engine", SYSTEMS)
def test_all_requests_of_a_load_succeed(engine: str):
    config = compose([*WORDS, *SYSTEMS[engine]])
    result = serve.run(config, Model(config.hw, config.backend), silent)
    assert not result.failures
    assert set(result.requests["status"]) == {"success"} or set(result.requests["status"]) == {"ok"}
