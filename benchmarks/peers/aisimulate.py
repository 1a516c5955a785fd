# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's AISimulate beside pdsim, each with its defaults, on the same requests.

    python -m benchmarks.peers.aisimulate COMMAND rows FILE... [--gpus h200] [--users 4,64]
    python -m benchmarks.peers.aisimulate COMMAND trace FILE [--count N] [--compiled [WHEEL]] [--keep TABLE]

COMMAND is ``aisimulate`` of ``pip install --pre --only-binary=:all: aisimulate``, in an environment of its own.
*rows* predicts measured servers (`experiments.scorecard`) and prints the mean errors of both; GPUs that
AISimulate has no tables of are left out.  *trace* prints the CPU seconds of each command for a trace in Mooncake's
format on four prefill and four decode GPUs, Qwen3-8B on vLLM, without a prefix cache: AISimulate's, pdsim's, and
with --compiled that of the compiled wheel, built first unless there is one (`benchmarks.compiled`).
docs/performance.md shows data/benchmarks/peers.csv: leave the table there, then run ``python -m tools.reference``.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.compiled import CHECK, called, environment, wheel
from experiments.scorecard import METRICS, TAILS, Server, closed_loop, medians, predicted, servers
from pdsim.core.errors import ConfigError

GPUS = ("h200", "b200", "h100", "b300", "gb200", "gb300")
MODELS = {"fp8": "deepseek-ai/DeepSeek-R1", "fp4": "nvidia/DeepSeek-V3.1-NVFP4"}
"""DeepSeek-R1, and the model of its shape in NVFP4 that AISimulate knows."""
BLOCK = 512  # tokens of a block of a trace
CONTEXT = 40_960  # of Qwen3-8B
SEED = 0
ROUNDS = 10


def worker(tp: int, ep: int, dp: int, replicas: int, **scheduler: int) -> dict[str, Any]:
    """Return the configuration of *replicas* workers of *tp* GPUs, in *dp* attention and *ep* expert groups."""
    return {
        "parallelism": {
            "replicas": replicas, "tensor": tp // dp, "attention_data": dp, "moe_tensor": tp // ep, "moe_expert": ep,
        },
        "kv_cache": {"prefix_caching": False},
        "scheduler": scheduler,
    }  # fmt: skip


def engine(server: Server) -> dict[str, Any]:
    """Return the engine of *server*, with the chunk that its launch script has."""
    words = dict(word.split("=", 1) for word in server.words())
    chunk = {"max_batched_tokens": int(words["scheduler.chunk"])} if "scheduler.chunk" in words else {}
    sides = [
        worker(tp, ep, tp if attention == "True" else 1, max(1, replicas), **chunk)
        for tp, ep, attention, replicas in (server.prefill, server.decode)
    ]
    apart = server.disagg == "True"
    return {
        "mode": "disaggregated" if apart else "aggregated",
        "model": MODELS[server.precision],
        "hardware": server.hardware if server.hardware.startswith("gb") else f"{server.hardware}_sxm",
        "backend": "sglang",
        "workers": {"prefill": sides[0], "decode": sides[1]} if apart else {"aggregated": sides[0]},
    }


def simulate(command: str, engine: dict[str, Any], requests: Iterable[tuple[float, int, int]], load: Any) -> Any:
    """Return AISimulate's report of *requests*, each with its arrival in seconds and its input and output tokens."""
    with tempfile.TemporaryDirectory() as name:
        folder, block = Path(name), 0
        with (folder / "trace.jsonl").open("w") as file:
            for at, given, wanted in requests:
                first, block = block, block - int(-given // BLOCK)
                row = {"timestamp": round(1e3 * at), "input_length": given, "output_length": wanted}
                file.write(json.dumps(row | {"hash_ids": list(range(first, block))}) + "\n")
        source = {"type": "trace", "paths": [str(folder / "trace.jsonl")], "format": "mooncake", "block_size": BLOCK}
        config = {"traffic": {"source": source, "load": load}, "engine": engine}
        (folder / "config.yaml").write_text(json.dumps(config))  # which is YAML
        words = [command, "predict", "-c", str(folder / "config.yaml"), "--output-dir", str(folder / "out")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            raise ConfigError(f"{command}: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}")
        return json.loads((folder / "out" / "prediction.json").read_text())


def of_peer(command: str, server: Server, users: int) -> dict[str, float]:
    """Return what AISimulate says of *server*, as `experiments.scorecard.predicted` does."""
    requests = closed_loop(server, users, ROUNDS, SEED)
    rows = zip([0.0] * len(requests), requests.input.tolist(), requests.output.tolist(), strict=True)
    report = simulate(command, engine(server), rows, {"type": "concurrency", "concurrency": users})
    made = {"output": report["output_throughput_tok_s"] / server.decode_gpus}
    for name in ("tpot", "ttft"):
        made[name] = report[f"median_{name}_ms"] / 1e3
        made |= {f"{name} {tail}": report[f"{tail}_{name}_ms"] / 1e3 for tail in ("p90", "p99")}
    return made


def of_rows(command: str, files: Sequence[str], gpus: Sequence[str], users: Sequence[int]) -> None:
    """Print the errors of both for each server in the rows of *files*, then their means."""
    errors: dict[tuple[str, str], dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for (server, number), measured in servers(files, gpus)[0].items():
        if server.hardware not in GPUS or (users and number not in users):
            continue
        try:
            both = {"pdsim": predicted(server, number, ROUNDS, SEED), "aisimulate": of_peer(command, server, number)}
        except ConfigError as error:
            print(f"left out: {server.hardware} {server.layout} {number}: {error}", file=sys.stderr)
            continue
        kind, real = "disaggregated" if server.disagg == "True" else "colocated", medians(measured)
        cells = []
        for tool, made in both.items():
            for name in real:
                errors[kind, server.hardware][tool, name].append(made[name] / real[name] - 1.0)
                cells.append(f"{tool} {name} {100 * errors[kind, server.hardware][tool, name][-1]:.1f} %")
        print(server.hardware, server.precision, kind, server.layout, server.isl, server.osl, number, flush=True)
        print("   ", ", ".join(cells), flush=True)
    names = [*METRICS, *TAILS]
    print("\nmean absolute errors, %:", *names)
    for (kind, gpu), own in sorted(errors.items()):
        for tool in ("pdsim", "aisimulate"):
            cells = [f"{100 * mean(map(abs, own[tool, name])):.0f}" if own[tool, name] else "-" for name in names]
            print(kind, gpu, tool, len(own[tool, "output"]), *cells)


def of_trace(command: str, path: str, count: int, compiled: Path | None, keep: Path | None) -> None:
    """Print CPU seconds and medians for the first *count* requests of *path* that fit, and leave them in *keep*."""
    lines = Path(path).read_text().splitlines()[:count]
    rows = [row for row in map(json.loads, lines) if row["input_length"] + row["output_length"] <= CONTEXT]
    requests = [(row["timestamp"] / 1e3, row["input_length"], row["output_length"]) for row in rows]
    own = {
        "mode": "disaggregated", "model": "Qwen/Qwen3-8B", "hardware": "h200_sxm", "backend": "vllm",
        "workers": {"prefill": worker(1, 1, 1, 4), "decode": worker(1, 1, 1, 4)},
    }  # fmt: skip
    table = [("simulator", "cpu_s", "requests", "ttft_p50_ms", "tpot_p50_ms")]

    def tell(name: str, ended: int, ttft: float, tpot: float) -> None:
        table.append((name, f"{_children() - before:.1f}", str(ended), f"{ttft:.0f}", f"{tpot:.2f}"))
        print(*table[-1], sep=", ", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        pythons = {"pdsim": sys.executable}
        if compiled is not None:
            built = compiled if compiled.is_file() else wheel(Path(folder))
            pythons["pdsim compiled"] = str(environment(Path(folder, "environment"), built))
            if not called(pythons["pdsim compiled"], "-c", CHECK):
                raise ConfigError(f"{built} is not compiled; leave it out, and it is built")
        print(*table[0], sep=", ")
        before = _children()
        report = simulate(command, own, requests, {"type": "trace_timestamps"})
        tell("AISimulate", report["completed_requests"], report["median_ttft_ms"], report["median_tpot_ms"])
        trace = Path(folder) / "trace.jsonl"
        trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
        words = ["engine=vllm", "hw=8xh200", "model=qwen3-8b", "parallel=tp1", "parallel.prefill.instances=4",
                 "parallel.decode.instances=4", f"workload.trace={trace}", f"output={folder}", "--json"]  # fmt: skip
        for name, python in pythons.items():
            before = _children()
            done = subprocess.run([python, "-P", "-m", "pdsim", "run", *words], capture_output=True, text=True)
            if done.returncode:
                raise ConfigError(f"{python} -m pdsim run: {done.stderr.strip()}")
            made = {metric: each["value"] for metric, each in json.loads(done.stdout)["metrics"].items()}
            tell(name, made["requests_ok"], 1e3 * made["ttft_p50_s"], 1e3 * made["tpot_p50_s"])
    if keep is not None:
        keep.write_text("".join(",".join(row) + "\n" for row in table))


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(words: Sequence[str] | None = None) -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command")
    parser.add_argument("what", choices=("rows", "trace"))
    parser.add_argument("files", nargs="+")
    parser.add_argument("--gpus", default="", help="of the rows only these, such as h200,b200")
    parser.add_argument("--users", default="", help="of the rows only those of so many users, such as 4,64")
    parser.add_argument("--count", type=int, default=12_031, help="of the trace so many requests")
    parser.add_argument("--compiled", nargs="?", type=Path, const=Path(), help="pdsim of the trace, too; a wheel")
    parser.add_argument("--keep", type=Path, help="the CSV that the figures of the trace are left in")
    asked = parser.parse_args(words)
    if asked.what == "trace":
        of_trace(asked.command, asked.files[0], asked.count, asked.compiled, asked.keep)
        return
    gpus = [name for name in asked.gpus.split(",") if name]
    of_rows(asked.command, asked.files, gpus, [int(name) for name in asked.users.split(",") if name])


if __name__ == "__main__":
    main()
