# SPDX-License-Identifier: Apache-2.0
"""``launch.share_gpus=true``: ranks on fewer GPUs than the configuration has."""

from dataclasses import replace

import pytest

import backends.diagnosis
from backends.jobs.launcher import Processes
from pdsim.config import Launch, rules
from pdsim.config.compose import CONTEXT, _on_shared_gpus, compose
from pdsim.results import evidence
from pdsim.transfer.job import Place, RankSpec
from tests.support.engines import engine

SHARED = Launch(share_gpus=True)


@pytest.fixture
def one_gpu(monkeypatch):
    """Make this machine one with a single GPU of 80 GiB."""
    monkeypatch.setattr(backends.diagnosis, "_nvidia", lambda: [(80 << 30, "NVIDIA H100")])


def real(*words, launch=SHARED):
    return replace(compose(["backend=nvlink", "model=qwen3-8b", *words]), target="real", launch=launch)


@pytest.mark.parametrize(
    ("words", "launch", "said"),
    [
        ("hw=2xh200", SHARED, ""),
        ("hw=2xh200", Launch(), "needs 2 nvidia GPUs, but this machine has 1; use launch.share_gpus=true"),
        ("hw=1xh200 experiment.deployment=colocated", SHARED, "hw.gpus=1 above the NVIDIA GPUs"),
        ("hw=loopback backend=nixl_tcp", SHARED, "hw=loopback has others, or none"),
        ("hw=4xh200 parallel=tp1 parallel.prefill.cp=2", SHARED, "collective=nccl takes a GPU for each rank"),
        ("hw=2xh200 experiment=allgather experiment.ranks=2", SHARED, "collective=nccl takes a GPU for each rank"),
    ],
)
def test_ranks_share_gpus_when_asked(one_gpu, words, launch, said):
    lines = list(rules._gpus(real(*words.split(), launch=launch)))
    assert [line for line in lines if said not in line] == []
    assert len(lines) == bool(said)


@pytest.mark.parametrize(("hw", "ranks"), [("2xh200", 2), ("4xh200", 4)])
def test_each_rank_has_its_share_of_the_memory(one_gpu, hw, ranks):
    shared = _on_shared_gpus(real(f"hw={hw}"))
    assert shared.hw.gpu.memory == (80 << 30) // ranks - CONTEXT
    assert _on_shared_gpus(shared) == shared  # so that a kept run is repeated as it was
    assert "between ranks that share a GPU" in evidence.gather(shared, serving=False)["transfers"]


def test_the_gpus_of_places_are_dealt_out():
    target, host = Processes(engine("nixl_tcp"), gpus=2), RankSpec("router", "a:b", Place())
    specs = [RankSpec(f"rank{gpu}", "a:b", Place(0, gpu)) for gpu in range(4)]
    gpus = [target._describe(spec, None, None, []).gpu for spec in (*specs, host)]
    assert gpus == [0, 1, 0, 1, None]
    assert any("ranks share 2 GPUs" in note for note in target.notes)
