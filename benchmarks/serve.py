"""How fast the model serves: requests simulated per second of one core, and SimPy events per request.

    python benchmarks/serve.py [--trace conversation_trace.jsonl] [--requests 3000]

A node of eight H20, Llama 3.1 70B, four GPUs for prefill and four for decode, as `pdsim run hw=8xh20`.  Without a
trace the requests are generated: Poisson, means of 12,000 and 340 tokens, as in Mooncake's conversation trace.  Two
loads are tried: one that the machine can serve, and one far beyond.

Events per request do not depend on the machine that this runs on, so they are asserted; seconds are only stated.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore

from experiments.serve import run
from pdsim.cli import typed
from pdsim.config import Config
from pdsim.fabric.job import Model
from pdsim.results.record import Result

MOST_EVENTS = {"light": 64.0, "heavy": 63.0}
"""Of a request.  In the trace a request has 2.5 chunks, each written by four ranks."""


def configuration(overrides: Sequence[str]) -> Config:
    """Return what `pdsim run` with *overrides*, by default on 8xh20, would run."""
    from omegaconf import OmegaConf

    ConfigStore.instance().store(name="_defaults", node=typed.defaults())
    with initialize_config_module("conf", version_base="1.3"):
        composed = compose("config", overrides=list(overrides))
    values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, Mapping)
    return typed.load({str(key): value for key, value in values.items() if key != "hydra"})


def measure(config: Config) -> tuple[Result, float]:
    """Return the result and the processor seconds that it took."""
    started = time.process_time()
    result = run(config, Model(config.hw, config.backend, seed=config.seed), lambda *_: None)
    return result, time.process_time() - started


def loads(trace: str | None, requests: int | None) -> dict[str, list[str]]:
    """Return the overrides of each load."""
    count = [f"workload.count={requests}"] if requests else []
    if trace:
        return {
            "light": [f"workload.trace={trace}", "workload.speed=0.03", *count],
            "heavy": [f"workload.trace={trace}", *count],
        }
    generated = ["workload=poisson", "workload.input_mean=12000", "workload.output_mean=340", *count]
    return {"light": [*generated, "workload.rate=0.1"], "heavy": [*generated, "workload.rate=1000"]}


def main() -> None:
    """Measure both loads, print a line each, and fail if one needs more events than `MOST_EVENTS`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="a trace to serve instead of generated requests")
    parser.add_argument("--requests", type=int, default=None, help="at most so many; 3000 if they are generated")
    arguments = parser.parse_args()
    requests = arguments.requests or (None if arguments.trace else 3000)
    print(
        f"{'load':8}{'requests':>9}{'transfers':>10}{'CPU s':>8}"
        f"{'requests/s':>12}{'ms/request':>12}{'events/request':>16}"
    )
    for load, overrides in loads(arguments.trace, requests).items():
        result, seconds = measure(configuration(overrides))
        count = len(result.requests["id"])
        assert result.outcome is not None
        found: dict[str, Any] = {"events": result.outcome.events / count, "seconds": seconds / count}
        print(
            f"{load:8}{count:9}{len(result.transfers):10}{seconds:8.2f}{count / seconds:12.0f}"
            f"{found['seconds'] * 1e3:12.3f}{found['events']:16.2f}"
        )
        assert not result.failures, result.failures[:3]
        assert found["events"] <= MOST_EVENTS[load], (
            f"{found['events']:.1f} events a request, at most {MOST_EVENTS[load]}"
        )


if __name__ == "__main__":
    main()
