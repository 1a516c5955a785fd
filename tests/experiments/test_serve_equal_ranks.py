"""`simulate.fold`: two columns of equal ranks leave what every rank leaves, bit for bit."""

from collections import Counter
from dataclasses import replace

import pytest

from experiments.serve import ServeOptions, equal_ranks, job, partial, run, specs
from pdsim.config import Config
from pdsim.config.compose import compose
from pdsim.results.record import Result
from pdsim.results.store import Journal, entries, summary
from pdsim.sim.faults import Faults, Slow
from pdsim.sim.model import Model

LONG = "workload=poisson workload.count=12 workload.rate=100 workload.input_mean=9000"
CROWDED = "workload.output_mean=4000 workload.count=200 workload.rate=20 kv.pool=20GiB"
EXPERTS = "parallel=tp8 parallel.prefill.tp=16 parallel.prefill.dp=4 parallel.prefill.ep=16 parallel.decode.dp=2"
WIDE = "parallel.prefill.tp=16 parallel.decode.tp=16 parallel.prefill.instances=2 parallel.decode.instances=2"
LAYOUTS = {
    "tp4": "hw=8xh20",
    "hosts that go idle": "hw=8xh200 workload.rate=1",
    "pulled": "hw=8xh200 engine=vllm",
    "pulled by queues": "hw=8x8xh200 engine=vllm backend=nixl parallel=tp8",
    "retracted": f"hw=8xh20 {CROWDED}",
    "users who leave": "hw=8xh20 workload.aborts=0.5 workload.patience=100ms",
    "plane by plane": "hw=8xh20 engine=generic backend.policy.call=plane",
    "layer by layer": "hw=8xh20 kv.layerwise=true",
    "tp8, two GPUs a card": "hw=2x8xh20 parallel=tp8",
    "tp8, two instances each": "hw=8x8xh200 parallel.prefill.instances=2 parallel.decode.instances=2",
    "tp8 to tp4, staged": "hw=8x8xh200 parallel.decode.tp=4 model=llama-3.1-8b kv.staging=true",
    "latent attention": "hw=8x8xh200 model=deepseek-v3 parallel=tp8",
    "mamba": "hw=2x8xmi300x model=qwen3-next-80b-a3b",
    "attention groups": "hw=2x8xh200 model=llama-3.1-8b parallel=tp8 parallel.prefill.dp=2 parallel.decode.dp=2",
}
EVERY = {
    "a cache on the host": "hw=8xh20 cache.prefill=true cache.host=100000",
    "tp2": "hw=8xh20 parallel=tp2 model=llama-3.1-8b",
    "tp4 to tp2": "hw=8xh20 parallel.decode.tp=2 model=llama-3.1-8b",
    "stages": "hw=2x8xh200 parallel=tp4 parallel.prefill.pp=2 model=llama-3.1-8b",
    "experts elsewhere": f"hw=8x8xh200 model=deepseek-v3 {EXPERTS}",
    "tcp over one host": "hw=2x8xh20 backend=mooncake_tcp",
    "retracted over a slow host": "hw=8xh20 hw.host.memory_rate=50GB/s",
    "instances on two nodes": f"hw=8x8xh200 {WIDE}",
}


def composed(overrides: str) -> Config:
    return compose([*LONG.split(), *overrides.split()])


def model(config: Config, **options: object) -> Model:
    return Model(config.hw, config.backend, seed=config.seed, collective=config.collective, **options)


def served(config: Config, **options: object) -> tuple[Result, int]:
    result = run(config, model(config, **options), lambda *_: None)
    assert result.outcome is not None
    return result, result.outcome.events


def both(config: Config) -> tuple[tuple[Result, int], tuple[Result, int]]:
    every = served(replace(config, simulate=replace(config.simulate, fold="off")))
    return every, served(config)


def values(result: Result) -> list[object]:
    return [rank.value for rank in result.outcome.ranks.values()]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_columns_leave_what_every_rank_leaves(layout: str):
    (every, many), (folded, few) = both(composed(LAYOUTS[layout]))
    assert repr(summary(every) | {"events": 0}) == repr(summary(folded) | {"events": 0})  # the order of links too
    assert every.requests == folded.requests
    assert list(every.transfers) == list(folded.transfers)
    assert values(every) == values(folded)
    assert few < 0.8 * many


def test_the_crowded_case_retracts():
    folded, _ = served(composed(LAYOUTS["retracted"]))
    assert folded.outcome.ranks["decode0.0"].value["preemptions"] > 0
    assert folded.outcome.links["node0/host/memory"] > 0


@pytest.mark.parametrize("layout", EVERY)
def test_ranks_that_differ_all_run(layout: str):
    config = composed(EVERY[layout])
    what = job(config, ServeOptions.of(config))
    assert equal_ranks.equal(model(config), what, specs(config, what, [])) is None


@pytest.mark.parametrize(
    "options",
    [{"memory": "tracked"}, {"samples": 10}, {"limit": 1e9}, {"faults": Faults(slow=[Slow("decode0.2", 0, 1, 2)])}],
    ids=str,
)
def test_what_looks_at_single_ranks_runs_all(options: dict[str, object]):
    config = composed("hw=8xh20")
    what = job(config, ServeOptions.of(config))
    ranks = specs(config, what, [])
    assert equal_ranks.equal(model(config), what, ranks) is not None
    assert equal_ranks.equal(model(config, **options), what, ranks) is None


def test_a_killed_run_has_the_transfers_of_all_ranks(tmp_path, monkeypatch):
    for name, value in (("sim.model.STRIDE", 100), ("transfer.log.KEPT", 1), ("serving.requests.JOURNAL_BLOCK", 1)):
        monkeypatch.setattr(f"pdsim.{name}", value)

    def killed(now: float, done: int, of: int) -> None:
        if done > of // 2:
            raise KeyboardInterrupt

    config, journal = composed("hw=8xh20"), Journal(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        served(config, journal=journal, progress=killed)
    left = partial(config, *(entries(tmp_path / name) for name in ("requests.journal", "transfers.journal")))
    counts = Counter((record.source, record.label) for record in left.transfers)
    second = {label: count for (source, label), count in counts.items() if source == "prefill0.1"}
    assert second == {label: count for (source, label), count in counts.items() if source == "prefill0.3"}
    assert second
