"""`simulate.fold`: serving with one follower for all leaves what serving with every rank leaves, bit for bit."""

from __future__ import annotations

import pytest

from benchmarks.serve import configuration
from experiments.serve import run, specs
from pdsim.cli.overrides import ready
from pdsim.config import Config
from pdsim.results.record import Result
from pdsim.results.store import summary
from pdsim.sim.model import Model

LONG = "workload=poisson workload.count=12 workload.rate=100 workload.input_mean=9000"
LAYOUTS = {
    "tp4": "hw=8xh20",
    "tp4, generic": "hw=8xh20 engine=generic",
    "tp4, pages that grow": "hw=8xh20 kv.pool=3GiB",
    "tp4, hosts that go cold": "hw=8xh200 workload.rate=1",
    "tp4, pulled": "hw=8xh200 engine=vllm",
    "tp4, users who leave": "hw=8xh20 workload.aborts=0.5 workload.patience=100ms",
    "tp4, plane by plane": "hw=8xh20 engine=generic backend.policy.call=plane",
    "tp8, two GPUs a card": "hw=2x8xh20 parallel=tp8",
    "tp8, two instances each": "hw=8x8xh200 parallel.prefill.instances=2 parallel.decode.instances=2",
    "tp8, latent attention": "hw=8x8xh200 model=deepseek-v3 parallel=tp8",
    "tp4, mamba": "hw=2x8xmi300x model=qwen3-next-80b-a3b",
}
EVERY = {
    "tp4, with a cache on the host": "hw=8xh20 cache.prefill=true cache.host=100000",
    "tp2": "hw=8xh20 parallel=tp2 model=llama-3.1-8b",
    "tp4 to tp2": "hw=8xh20 parallel.decode.tp=2 model=llama-3.1-8b",
    "pp2": "hw=8xh200 parallel=tp2 parallel.prefill.pp=2 model=llama-3.1-8b",
    "dp2": "hw=8xh200 parallel=tp4 parallel.prefill.dp=2 parallel.decode.dp=2 model=llama-3.1-8b",
    "tcp, over one host": "hw=2x8xh20 backend=mooncake_tcp",
}


def served(config: Config, fold: bool) -> tuple[Result, int]:
    model = Model(config.hw, config.backend, seed=config.seed, collective=config.collective, fold=fold)
    result = run(config, model, lambda *_: None)
    assert result.outcome is not None
    return result, result.outcome.events


def compare(overrides: str) -> tuple[int, int]:
    """Return the events without and with folding, after a comparison of everything else."""
    config = configuration(ready([*LONG.split(), *overrides.split()]))
    (every, many), (folded, few) = served(config, False), served(config, True)
    before, after = summary(every) | {"events": 0}, summary(folded) | {"events": 0}
    assert repr(before) == repr(after)  # the order of links and pools too
    assert every.requests == folded.requests
    assert list(every.transfers) == list(folded.transfers)
    assert [rank.value for rank in every.outcome.ranks.values()] == [r.value for r in folded.outcome.ranks.values()]
    return many, few


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_followers_are_simulated_once(layout: str):
    many, few = compare(LAYOUTS[layout])
    assert few < 0.8 * many


@pytest.mark.parametrize("layout", EVERY)
def test_unequal_ranks_are_all_simulated(layout: str):
    many, few = compare(EVERY[layout])
    assert few == many


def test_the_leader_stands_for_nobody():
    config = configuration(["hw=8xh20"])
    from experiments.serve import ServeOptions, job

    ranks = specs(config, job(config, ServeOptions()), [])
    assert {spec.name: spec.like for spec in ranks if spec.like} == {
        "prefill0.2": "prefill0.1",
        "prefill0.3": "prefill0.1",
        "decode0.2": "decode0.1",
        "decode0.3": "decode0.1",
    }
