# SPDX-License-Identifier: Apache-2.0
"""pdsim beside DynoSim, the disaggregated replay of NVIDIA's Dynamo: how fast both are, and what both answer.

    python -m venv dynosim && dynosim/bin/pip install --no-deps ai-dynamo==1.2.1 ai-dynamo-runtime==1.2.1
    dynosim/bin/pip install msgspec "pydantic<=2.13" pyyaml uvloop numpy
    python -m benchmarks.dynosim speed --python dynosim/bin/python --trace conversation_trace.jsonl
    python -m benchmarks.dynosim answers --python dynosim/bin/python --trace conversation_trace.jsonl --write

`speed` replays the first requests of the trace with both, in turns: seconds of the processor, start and files
included, and requests a second beyond the start, from two numbers of requests.  --compiled adds the Python of an
environment with the compiled pdsim.  With --oracle, --simgrid-lib and --simgrid-source it shares links as SimGrid
does, too, in the same run (README.md says what they are): the first --flows of each workload.
`answers` gives both the same requests and step times and prints TTFT and TPOT side by side: with
prompts cut to one chunk, as the trace has them, and as the trace has them where pdsim, too, takes no time for
attention to earlier chunks.  DynoSim is no dependency: it runs in an environment of its own.

What is given to DynoSim: the time of a prefill forward by its new tokens and that of a decode step by the tokens in
memory and the mean context, both from the compute model of the job; the pages of both pools; bytes of KV a token;
and as bandwidth of the handoff the mean of pdsim's own, for DynoSim has one rate and no contention.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import sharing
from benchmarks.serve import configuration
from benchmarks.sharing import SimGrid
from experiments import serve
from pdsim.compute.roofline import ForwardTime
from pdsim.core.repository import data
from pdsim.serving.deployment import Deployment
from pdsim.serving.load import scaled
from pdsim.serving.requests import RequestTable
from pdsim.serving.workload import draw
from pdsim.sim.model import Model

VERSION = "ai-dynamo 1.2.1"
BLOCK = 64
"""Tokens of a block of DynoSim's pools."""
BASE = ("hw=8xh20", "engine=generic")
"""Llama 3.1 70B, TP4 to TP4, schedulers without a host's costs: what DynoSim has."""
LOAD = 0.7
QUANTITIES = {"mean": "mean", "p50": "median", "p90": "p90", "p99": "p99"}


@dataclass(frozen=True)
class Answer:
    """What both say of one quantity of a case, in milliseconds."""

    case: str
    quantity: str
    pdsim: float
    dynosim: float

    @property
    def difference(self) -> float:
        """DynoSim's over pdsim's, less one."""
        return self.dynosim / self.pdsim - 1


def write_trace(requests: RequestTable, path: Path) -> None:
    """Write *requests* to *path* as a Mooncake trace, times in whole milliseconds, no two blocks equal."""
    block = 0
    with path.open("w") as file:
        for request in requests:
            count = -(-request.input // 512)
            ids = list(range(block, block + count))
            block += count
            row = {"timestamp": round(request.arrival * 1e3), "input_length": request.input}
            file.write(json.dumps(row | {"output_length": request.output, "hash_ids": ids}) + "\n")


def write_times(job: Deployment, path: Path) -> None:
    """Write the step times of *job* to *path* as DynoSim reads them: milliseconds, on grids that it interpolates."""
    prompt = np.unique(np.geomspace(1, 2 * job.chunk, 60).astype(np.int64))
    batches, contexts = np.array([1, 2, 4, 8, 16, 32, 64, 128]), np.geomspace(64, 131072, 40)
    tokens = np.unique(np.geomspace(64, job.decode_pages * job.page_size, 60).astype(np.int64))
    time = job.decode_time

    def step(active: float, context: float) -> float:
        batch = max(1, round(active / context))
        return time.step(min(batch, int(batches[-1]))) + max(time.context * active, time.sequence * context)

    np.savez(
        path,
        prefill_isl=prompt.astype(float),
        prefill_ttft_ms=np.array([1e3 * job.prefill_time.prefill([(0, int(size))]) for size in prompt]),
        decode_active_kv_tokens=tokens.astype(float),
        decode_context_length=contexts,
        decode_itl=np.array(
            [[1e3 * step(float(active), float(context)) for context in contexts] for active in tokens]
        ),
    )


def replay(
    python: str, trace: Path, prefill: dict[str, Any], decode: dict[str, Any], scratch: Path
) -> dict[str, Any]:
    """Return DynoSim's report of *trace* on one worker of each side."""
    report = scratch / "dynosim.json"
    alike = {"block_size": BLOCK, "enable_prefix_caching": False}
    words = ["--trace-format", "mooncake", "--trace-block-size", "512", "--report-json", str(report)]
    words += ["--num-prefill-workers", "1", "--num-decode-workers", "1"]
    words += ["--prefill-engine-args", json.dumps({"worker_type": "prefill", **alike, **prefill})]
    words += ["--decode-engine-args", json.dumps({"worker_type": "decode", **alike, **decode})]
    subprocess.run(
        [python, "-m", "dynamo.replay", str(trace), *words],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=900,
    )
    report_: dict[str, Any] = json.loads(report.read_text())
    return report_


def answers(python: str, trace: Path, count: int, *, cut: bool = False, free: bool = False) -> list[Answer]:
    """Return what both say of the first *count* requests of *trace* at load `LOAD`; with *cut*, of one chunk each.

    With *free*, attention of a chunk to those before it takes pdsim no time, as it takes DynoSim none.
    """
    config = configuration([*BASE, f"workload.trace={trace}", f"workload.count={count}", "workload.jitter=auto"])
    job = serve.job(config, serve.ServeOptions.of(config))
    requests = draw(config.workload, config.seed, config.model.context).requests
    if cut:
        requests = requests.but(prompt=np.minimum(requests.input, job.chunk), ends=None, hash_ids=None)
    at_load = configuration([*BASE, f"workload.load={LOAD}"]).workload
    requests = scaled(at_load, job, requests, config.seed)
    case = f"prompts cut to {job.chunk} tokens" if cut else "prompts as they are"
    if free:
        case += ", earlier chunks free"
        assert isinstance(job.prefill_time, ForwardTime)
        job = replace(job, prefill_time=replace(job.prefill_time, prefix_flops=inf))
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        write_trace(requests, scratch / "trace.jsonl")
        write_times(job, scratch / "times.npz")
        own = configuration([*BASE, f"workload.trace={scratch / 'trace.jsonl'}", "cache=none"])
        given = draw(own.workload, own.seed, own.model.context).requests
        outcome = Model(own.hw, own.backend, seed=own.seed).run(serve.specs(own, job, given))
        served = serve.result(own, job, given, outcome)
        assert not served.failures, served.failures[:3]
        rate = sum(served.requests["nbytes"]) / sum(served.requests["transfer"]) / 1e9
        alike = {"planner_profile_data": str(scratch / "times.npz"), "kv_bytes_per_token": job.shape.token_bytes(1)}
        alike |= {"kv_transfer_bandwidth": rate, "max_num_batched_tokens": job.chunk}
        pages = job.page_size / BLOCK
        prefill = {**alike, "num_gpu_blocks": int(job.prefill_pages * pages), "max_num_seqs": job.prefill_batch}
        decode = {**alike, "num_gpu_blocks": int(job.decode_pages * pages), "max_num_seqs": job.decode_batch}
        theirs = replay(python, scratch / "trace.jsonl", prefill, decode, scratch)
    ours = {
        name: np.array([value for value in served.requests[name] if value is not None]) for name in ("ttft", "tpot")
    }
    rows = []
    for name, values in ours.items():
        for label, theirs_name in QUANTITIES.items():
            mine = float(np.mean(values)) if label == "mean" else float(np.percentile(values, float(label[1:])))
            rows.append(Answer(case, f"{name} {label}", 1e3 * mine, theirs[f"{theirs_name}_{name}_ms"]))
    return rows


def speed(dynosim: str, pdsims: Mapping[str, str], trace: Path, counts: Sequence[int], repeat: int) -> list[str]:
    """Return a line for each simulator: they replay the first requests of *trace* in turns, as many as *counts*.

    A line has the least processor seconds of each of the two *counts*, and the requests a second between them.
    *pdsims* are Pythons by name.
    """
    seconds: dict[tuple[str, int], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        rows = trace.read_text().splitlines(keepends=True)
        for count in counts:
            (scratch / f"{count}.jsonl").write_text("".join(rows[:count]))
        for _, count in product(range(repeat), counts):
            part = scratch / f"{count}.jsonl"
            commands: dict[str, Callable[[], object]] = {
                "DynoSim": partial(replay, dynosim, part, _ALIKE, _ALIKE, scratch)
            }
            commands |= {name: partial(_command, python, part, scratch) for name, python in pdsims.items()}
            for name, command in commands.items():
                before = _spent()
                command()
                seconds[name, count] = min(seconds.get((name, count), inf), _spent() - before)
    low, high = counts
    lines = [f"{'processor seconds':20}{low:>8}{high:>8}   requests/s between"]
    for name in ("DynoSim", *pdsims):
        first, last = seconds[name, low], seconds[name, high]
        lines.append(f"{name:20}{first:8.2f}{last:8.2f}   {(high - low) / max(last - first, 1e-9):.0f}")
    return lines


_ALIKE = {"kv_bytes_per_token": 327680, "kv_transfer_bandwidth": 50, "block_size": 512, "num_gpu_blocks": 2500}
"""Blocks as large as those of the trace: with smaller ones DynoSim is slower, seven times with `BLOCK` tokens."""


def _command(python: str, trace: Path, scratch: Path) -> None:
    words = ["run", "--quiet", "hw=8xh20", f"workload.trace={trace}", f"output={scratch / 'results'}"]
    subprocess.run([python, "-P", "-m", "pdsim", *words], check=True, timeout=900)


def _spent() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _about() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    load = f"load {os.getloadavg()[0]:.1f} at the start"
    python = f"Python {platform.python_version()}"
    return f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} x {model}, {python}, {VERSION}, {load}"


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "answers"))
    parser.add_argument("--python", required=True, help="the Python of the environment with DynoSim")
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake's conversation trace")
    parser.add_argument("--requests", type=int, help="500 of `answers`, 2000 of `speed`")
    parser.add_argument("--compiled", help="the Python of an environment with the compiled pdsim")
    parser.add_argument("--repeat", type=int, default=2, help="of `speed`")
    parser.add_argument("--oracle", type=Path, help="workloads of benchmarks.sharing, for `speed`")
    parser.add_argument("--flows", type=int, default=1000, help="at most so many of a workload of --oracle")
    parser.add_argument("--simgrid-lib", type=Path, help="directory of libsimgrid.so")
    parser.add_argument("--simgrid-source", type=Path, help="SimGrid 4.1's source")
    parser.add_argument("--write", action="store_true", help="keep the figures in data/benchmarks")
    options = parser.parse_args(argv)
    about, trace = _about(), options.trace.resolve()
    if options.what == "speed":
        count = options.requests or 2000
        pdsims = {"pdsim": sys.executable} | ({"pdsim, compiled": options.compiled} if options.compiled else {})
        lines = speed(options.python, pdsims, trace, (count // 4, count), options.repeat)
        if options.oracle and options.simgrid_lib and options.simgrid_source:
            with tempfile.TemporaryDirectory() as folder:
                simgrid = SimGrid(options.simgrid_lib.resolve(), options.simgrid_source.resolve(), Path(folder))
                workloads = [work.first(options.flows) for work in sharing.read_oracle(options.oracle)]
                compared = sharing.compare(workloads, simgrid, options.repeat, options.compiled)
                lines += ["", *sharing.table(list(compared)).splitlines()]
    else:
        cases: list[dict[str, bool]] = [{"cut": True}, {}, {"free": True}]
        rows = [row for case in cases for row in answers(options.python, trace, options.requests or 500, **case)]
        lines = ["case,quantity,pdsim_ms,dynosim_ms,difference"]
        lines += [f"{r.case},{r.quantity},{r.pdsim:.2f},{r.dynosim:.2f},{r.difference:+.1%}" for r in rows]
    text = "\n".join([f"# {about}", *lines]) + "\n"
    print(text, end="")
    if options.write:
        data("benchmarks", f"dynosim-{options.what}.{'md' if options.what == 'speed' else 'csv'}").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
