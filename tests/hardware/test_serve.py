"""KV handed over between GPUs: unlike ranks, every path and way of metadata, each byte compared on arrival."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from backends.diagnosis import gpu_count
from backends.jobs.launcher import Processes
from experiments.serve import run
from pdsim.core.progress import silent
from pdsim.kv.policy import Policy
from pdsim.models.llm import Side
from pdsim.results.record import Result
from pdsim.serving.settings import Kv
from pdsim.transfer.job import Outcome, Place, RankSpec, Target
from tests.support.serving import on_loopback

ENGINES = ("mooncake_nvlink", "nixl", "nvlink", "nvlink_kernel")
QUEUED = Policy(queues=2, pool="intra_node_nvlink", staging=True)
BY_CONTROL = replace(QUEUED, metadata="control", metadata_memory="host")


class OnGpus:
    """Puts prefill ranks on GPU 0 and decode ranks on the last; the router stays on the host."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.places = {"prefill": Place(gpu=0), "decode": Place(gpu=gpu_count() - 1)}

    def run(self, ranks: Sequence[RankSpec], kill: Mapping[str, float] | None = None) -> Outcome:
        sides = [rank.name.partition(".")[0].rstrip("0123456789") for rank in ranks]
        placed = [
            replace(rank, place=self.places.get(side, Place())) for rank, side in zip(ranks, sides, strict=True)
        ]
        return self.target.run(placed, kill or {})


def serve(name: str, prefill: int, decode: int, staging: bool, policy: Policy = QUEUED) -> Result:
    """Serve a few requests; several ranks of a side share its GPU."""
    kv = Kv(page_size=16, pool=1 << 20, staging=staging, staging_ring=1 << 18, staging_wait=25.0)
    config = on_loopback(name, Side(tp=prefill), Side(tp=decode), policy=policy, kv=kv)
    result = run(config, OnGpus(Processes(config.backend, deadline=90)), silent)
    assert result.failures == []
    assert set(result.requests["status"]) == {"ok"}
    return result


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("path", ["sliced", "staged"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_heads_kept_differently_arrive_as_they_were_sent(name, path, prefill, decode):
    result = serve(name, prefill, decode, staging=path == "staged")
    assert set(result.requests["path"]) == {path}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("policy", [QUEUED, BY_CONTROL], ids=["on the GPU over NVLink", "in host memory over TCP"])
def test_metadata_arrives_either_way(name, policy):
    assert set(serve(name, 1, 1, staging=False, policy=policy).requests["path"]) == {"grouped"}


@pytest.mark.skipif(gpu_count() != 1, reason="needs a machine with one GPU")
@pytest.mark.parametrize("backend", ["nvlink", "mooncake_nvlink", "nixl"])
@pytest.mark.parametrize("tp", [1, 2])
def test_all_ranks_share_one_gpu(backend, tp, tmp_path, pdsim_prints):
    words = (
        f"backend={backend} hw.gpus={2 * tp} parallel=tp{tp} launch.share_gpus=true kv.pool=1GiB output={tmp_path}"
    )
    common = "run target=real hw=8xh100 model=qwen3-8b workload=smoke workload.count=4 compute.scale=0.1"
    assert "ranks share 1 GPU (launch.share_gpus=true)" in pdsim_prints(*common.split(), *words.split())
