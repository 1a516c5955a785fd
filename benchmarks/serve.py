# SPDX-License-Identifier: Apache-2.0
"""How fast the model serves: requests simulated per second of one core, and events per request.

    python -m benchmarks.serve [--trace conversation_trace.jsonl] [--requests 2000] [--case NAME ...] [--command]
    python -m benchmarks.serve --start 64 128 256

A line for each of `CASES`.  Without a trace the requests are generated: Poisson, means of 12,000 and 340 tokens, as
in Mooncake's conversation trace; `light` and `main` take the trace if there is one.  With --command, the whole
command too: start, simulation and files.  Seconds are of the processor, user and system together, which other jobs
on the machine disturb less than the wall clock.

With --start, jobs of 100 requests on so many nodes of 8 GPUs, half of them prefill instances: what starting costs.

Events per request do not depend on the machine, so they are asserted; seconds are only stated.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.serve import run
from pdsim.config import Config
from pdsim.config.compose import compose
from pdsim.results.record import Result
from pdsim.sim.model import Model

EIGHT = "parallel.decode.tp=1 parallel.decode.instances=8"
LENGTHS = "workload=poisson workload.input_mean=12000 workload.output_mean=340"


@dataclass(frozen=True)
class Case:
    """A job: the overrides of `pdsim run`, its arrivals, and the events that a request may cost."""

    overrides: str
    rate: float  # requests a second, where they are generated
    most: float  # events of a request
    speed: float = 0.0  # of a trace; 0: not for a trace


CASES = {
    "main": Case("hw=8xh20", 1000.0, 39.0, speed=1.0),
    "light": Case("hw=8xh20", 0.1, 41.0, speed=0.03),  # about 0.7 of what its prefill can do
    "layers": Case("hw=8xh20 kv.layerwise=true", 1000.0, 65.0),  # a write for each plane
    "tp8": Case("hw=2x8xh20 parallel=tp8", 1000.0, 94.0),
    "like": Case("hw=8xh20 model=llama-3.1-8b", 1000.0, 39.0),
    "tp4-tp2": Case("hw=8xh20 model=llama-3.1-8b parallel.decode.tp=2", 1000.0, 84.0),
    "tp2-tp4": Case("hw=8xh20 model=llama-3.1-8b parallel.prefill.tp=2", 1000.0, 82.0),
    "tp4-tp2-staged": Case("hw=8xh20 model=llama-3.1-8b parallel.decode.tp=2 kv.staging=true", 1000.0, 175.0),
    "tp2-tp4-staged": Case("hw=8xh20 model=llama-3.1-8b parallel.prefill.tp=2 kv.staging=true", 1000.0, 160.0),
    "8x8": Case("hw=8x8xh200", 1000.0, 52.0),  # four instances of TP8 on either side
    "vllm": Case("hw=8xh20 engine=vllm", 1000.0, 35.0),
    "layers-32k": Case("hw=8xh20 kv.layerwise=true workload.input_mean=32000", 1000.0, 105.0),
    "mori": Case("hw=2x8xmi300x backend=mori parallel=tp8", 1000.0, 115.0),
    "crossing": Case(f"hw=2x8xh20 model=llama-3.1-8b parallel=tp8 {EIGHT}", 1000.0, 115.0),  # at decode's cards
    "chunks": Case("hw=8xh20 scheduler.chunk=1024 workload.input_mean=100000", 1000.0, 75.0),
    "chunks-asleep": Case("hw=8xh200 scheduler.chunk=1024 workload.input_mean=100000", 1000.0, 85.0),  # hosts sleep
}
"""`main` and `light` are Llama 3.1 70B on four GPUs for prefill and four for decode; a prompt has 2 to 3 chunks."""


def measure(config: Config) -> tuple[Result, float]:
    """Return the result and the processor seconds that it took."""
    started = time.process_time()
    result = run(config, Model(config.hw, config.backend, seed=config.seed), lambda *_: None)
    return result, time.process_time() - started


def command(overrides: Sequence[str]) -> float:
    """Return the processor seconds of the whole command, which keeps its results in a folder that is thrown away."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    with tempfile.TemporaryDirectory() as scratch:
        started = spent()
        subprocess.run(
            [sys.executable, "-m", "pdsim", "run", "--quiet", f"output={scratch}", *overrides],
            check=True,
            timeout=900,
        )
        return spent() - started


def start(nodes: int) -> list[str]:
    """Return the overrides of a job of 100 requests on *nodes* nodes, each an instance of 8 ranks."""
    sides = [f"parallel.{side}.instances={nodes // 2}" for side in ("prefill", "decode")]
    load = [*LENGTHS.split(), "workload.rate=1000", "workload.count=100"]
    return ["hw=8x8xh200", f"hw.nodes={nodes}", "parallel=tp8", *sides, *load]


def overrides_of(case: Case, trace: str | None, requests: int | None) -> list[str]:
    """Return the overrides of *case*, with the requests of *trace* if it is for one, at most so many *requests*."""
    count = [f"workload.count={requests}"] if requests else []
    if trace and case.speed:
        return [*case.overrides.split(), f"workload.trace={trace}", f"workload.speed={case.speed}", *count]
    return [
        *LENGTHS.split(),
        *case.overrides.split(),
        f"workload.rate={case.rate}",
        *(count or ["workload.count=2000"]),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the cases, print a line each, and return 1 if one needs more events than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="a trace to serve instead of generated requests")
    parser.add_argument("--requests", type=int, help="at most so many; 2000 if they are generated")
    parser.add_argument("--case", action="append", choices=CASES, help="this case only; repeatable")
    parser.add_argument("--command", action="store_true", help="measure the whole command too")
    parser.add_argument("--start", type=int, nargs="+", help="jobs on so many nodes instead")
    options = parser.parse_args(argv)
    if options.start:
        print(f"{'nodes':>6}{'CPU s':>8}{'events':>10}")
        for nodes in options.start:
            result, seconds = measure(compose(start(nodes)))
            assert result.outcome is not None
            assert not result.failures, result.failures[:3]
            print(f"{nodes:6}{seconds:8.2f}{result.outcome.events:10}", flush=True)
        return 0
    print(f"{'case':16}{'requests':>9}{'transfers':>10}{'CPU s':>8}{'requests/s':>12}{'events':>8}", end="")
    print(f"{'command CPU s':>15}{'requests/s':>12}" if options.command else "")
    bad = 0
    for name in options.case or CASES:
        overrides = overrides_of(CASES[name], options.trace, options.requests)
        result, seconds = measure(compose(overrides))
        assert result.outcome is not None
        assert not result.failures, result.failures[:3]
        count = len(result.requests["id"])
        events = result.outcome.events / count
        line = f"{name:16}{count:9}{len(result.transfers):10}{seconds:8.2f}{count / seconds:12.0f}{events:8.1f}"
        if options.command:
            whole = command(overrides)
            line += f"{whole:15.2f}{count / whole:12.0f}"
        too_many = events > CASES[name].most
        bad += too_many
        print(line + (f"  more than {CASES[name].most} events" if too_many else ""), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
