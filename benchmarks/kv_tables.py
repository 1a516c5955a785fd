"""Two published tables of KV transfers over Mooncake and RDMA: parameters fitted on one, the other predicted.

    python -m benchmarks.kv_tables

Both are 2 x 8 GPUs at TP8, one request at a time, 128 to 32,768 tokens.  What `conf/` does not know of Mooncake on
ConnectX-7 over RoCE is what a descriptor costs to post and which share of a card's line rate it reaches.  These two
are fitted to the table of SGLang on H20 and Qwen3-235B, through the simulator: the same experiment, and the phase
*transfer* of each request.  Then vLLM on H800 and Qwen3-8B is predicted, of which nothing was fitted.  There the
connector logs the engine's call alone (``_send_blocks``), so that of the slowest rank is compared; the pages are those
that the table's sizes show, one more than the prompt has (a chat template).

Its source's MB and GB are MiB and GiB; the bytes here are the model's.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

import experiments.serve
from pdsim.cli.run import compose
from pdsim.config import Config
from pdsim.fabric.job import Model
from pdsim.repository import data
from pdsim.results.record import Result

TABLES = data("kv_tables")
FITTED = (
    "sglang_mooncake_h20_qwen3_235b_tp8.csv",
    ("hw=2x8xh20", "model=qwen3-235b-a22b"),
    50e9,  # bytes/s of a card's line: 400 Gbps
)
PREDICTED = ("vllm_mooncake_h800_qwen3_8b_tp8.csv", ("hw=2x8xh800", "model=qwen3-8b"), 25e9)  # 200 Gbps
COMMON = ("backend=mooncake", "parallel=tp8", "scheduler.chunk=65536", "experiment=serve")
PAGE = 16  # tokens of a vLLM block
APART = 30_000  # milliseconds between two requests

Floats = npt.NDArray[np.float64]


def table(name: str) -> tuple[list[int], Floats]:
    """Return the tokens of each row of a table, and the seconds of its transfer."""
    lines = (TABLES / name).read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    return [int(row["tokens"]) for row in rows], np.array([float(row["transfer_ms"]) * 1e-3 for row in rows])


def configuration(words: Sequence[str], tokens: Sequence[int], folder: Path) -> Config:
    """Return the configuration that serves one request of each of *tokens*, far apart."""
    trace = folder / "trace.jsonl"
    lines = [
        f'{{"timestamp": {index * APART}, "input_length": {length}, "output_length": 2}}'
        for index, length in enumerate(tokens)
    ]
    trace.write_text("\n".join(lines) + "\n")
    return compose([*words, *COMMON, f"workload.trace={trace}"])


def served(config: Config, descriptor: float, rate: float) -> Result:
    """Return the run with *descriptor* seconds to post one, not overlapped, and cards of *rate* bytes/s."""
    assert config.backend.inter is not None
    inter = replace(config.backend.inter, descriptor=descriptor, overlap=False)
    backend = replace(config.backend, inter=inter)
    hw = replace(config.hw, nic=replace(config.hw.nic, rate=rate))
    config = replace(config, backend=backend, hw=hw)
    return experiments.serve.run(config, Model(hw, backend), lambda _share, _text: None)


def phases(result: Result) -> Floats:
    """Return the phase *transfer* of each request, in seconds, in order."""
    return np.array(result.requests["transfer"], dtype=np.float64)


def calls(result: Result) -> Floats:
    """Return how long the slowest rank's write of KV took for each request, in seconds, in order."""
    slowest: dict[int, float] = {}
    for record in result.transfers:
        room, _, what = record.label.split("/")
        if what != "metadata":
            slowest[int(room)] = max(slowest.get(int(room), 0.0), record.seen - record.submitted)
    return np.array([slowest[room] for room in sorted(slowest)])


def fit(config: Config, seconds: Floats, line: float) -> tuple[float, float]:
    """Return the seconds to post a descriptor, and the share of *line*, that come closest to *seconds*."""
    from scipy.optimize import least_squares

    def residuals(logs: Floats) -> Floats:
        each, share = np.exp(logs)
        found: Floats = np.log(phases(served(config, float(each), float(share * line))) / seconds)
        return found

    found = least_squares(residuals, np.log([1e-6, 0.9]), loss="soft_l1", f_scale=0.05, diff_step=1e-3)
    each, share = np.exp(found.x)
    return float(each), float(share)


def show(name: str, tokens: Sequence[int], published: Floats, modelled: Floats) -> None:
    """Print the rows of a table beside what is modelled."""
    print(f"\n{name}\n{'tokens':>8} {'published ms':>13} {'modelled ms':>12} {'error %':>8}")
    errors = 100.0 * (modelled / published - 1.0)
    for row in zip(tokens, published * 1e3, modelled * 1e3, errors, strict=True):
        print("{:>8} {:>13.2f} {:>12.2f} {:>+8.1f}".format(*row))
    beyond = [str(count) for count, error in zip(tokens, errors, strict=True) if abs(error) > 15.0]
    print(f"mean absolute error {np.abs(errors).mean():.1f} %; beyond 15 %: {', '.join(beyond) or 'none'}")


def main() -> None:
    """Fit on the one, predict the other, print both."""
    with TemporaryDirectory() as folder:
        name, words, line = FITTED
        tokens, seconds = table(name)
        config = configuration(words, tokens, Path(folder))
        each, share = fit(config, seconds, line)
        print(f"fitted: {each * 1e6:.3g} us to post a descriptor, {share:.1%} of a card's line rate")
        show(f"{name}, fitted", tokens, seconds, phases(served(config, each, share * line)))
        name, words, line = PREDICTED
        tokens, seconds = table(name)
        config = configuration(words, [count + PAGE for count in tokens], Path(folder))
        show(f"{name}, predicted", tokens, seconds, calls(served(config, each, share * line)))


if __name__ == "__main__":
    main()
