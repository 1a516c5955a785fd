# SPDX-License-Identifier: Apache-2.0
"""Two published tables of KV transfers over Mooncake and RDMA, beside what the shipped configurations say.

    python -m tools.kv_tables

Both are 2 x 8 GPUs at TP8, one request at a time, 128 to 32,768 tokens.  Nothing is fitted to either: they are a
test set, and the parameters are those of `conf/hw` and `conf/backend/mooncake.yaml` with the sources that stand
there.  Of SGLang on H20 with Qwen3-235B, the phase *transfer* of each request is compared, from the post on, as
SGLang counts: ``completion_time - prefill_transfer_queue_entry_time``, and `process_batch_result_disagg_prefill`
takes the latter after ``send_kv_chunk``.  What its host takes from the end of the forward until then
(`engine.prefill.send`) is not in it; what the error were with it is printed too.  vLLM
on H800 with Qwen3-8B logs the engine's call alone (``_send_blocks``), so that of the slowest rank is compared; the
pages are those that the table's sizes show, one more than the prompt has (a chat template).

The bytes are the model's; what the sources call MB and GB is decimal in the first and binary in the second.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

import experiments.serve
from pdsim.config import Config
from pdsim.config.compose import compose
from pdsim.core.files import data
from pdsim.core.progress import silent
from pdsim.results.record import Result
from pdsim.sim.model import Model
from tools.tables import rows

TABLES = data("kv_tables")
H20: tuple[str, tuple[str, ...]] = (
    "sglang_mooncake_h20_qwen3_235b_tp8.csv",
    ("hw=2x8xh20", "model=qwen3-235b-a22b"),
)
H800: tuple[str, tuple[str, ...]] = ("vllm_mooncake_h800_qwen3_8b_tp8.csv", ("hw=2x8xh800", "model=qwen3-8b"))
COMMON = ("backend=mooncake", "parallel=tp8", "scheduler.chunk=65536", "experiment=serve")
PAGE = 16  # tokens of a vLLM block
APART = 30_000  # milliseconds between two requests

Floats = npt.NDArray[np.float64]


def table(name: str) -> tuple[list[int], Floats]:
    """Return the tokens of each row of a table, and the seconds of its transfer."""
    every = rows(TABLES / name)
    return [int(row["tokens"]) for row in every], np.array([float(row["transfer_ms"]) * 1e-3 for row in every])


def configuration(words: Sequence[str], tokens: Sequence[int], folder: Path) -> Config:
    """Return the configuration that serves one request of each of *tokens*, far apart."""
    trace = folder / "trace.jsonl"
    lines = [
        f'{{"timestamp": {index * APART}, "input_length": {length}, "output_length": 2}}'
        for index, length in enumerate(tokens)
    ]
    trace.write_text("\n".join(lines) + "\n")
    return compose([*words, *COMMON, f"workload.trace={trace}"])


def served(config: Config) -> Result:
    """Return the run of *config*."""
    return experiments.serve.run(config, Model(config.hw, config.backend), silent)


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


def show(name: str, tokens: Sequence[int], published: Floats, modelled: Floats) -> None:
    """Print the rows of a table beside what is modelled."""
    print(f"\n{name}\n{'tokens':>8} {'published ms':>13} {'modelled ms':>12} {'error %':>8}")
    errors = 100.0 * (modelled / published - 1.0)
    for row in zip(tokens, published * 1e3, modelled * 1e3, errors, strict=True):
        print("{:>8} {:>13.2f} {:>12.2f} {:>+8.1f}".format(*row))
    print(f"mean absolute error {np.abs(errors).mean():.1f} %, largest {np.abs(errors).max():.1f} %")


def main() -> None:
    """Print both tables beside the model."""
    print(
        "nothing is fitted to these tables; sources: conf/hw/8xh20.yaml, 2x8xh800.yaml, conf/backend/mooncake.yaml"
    )
    with TemporaryDirectory() as folder:
        name, words = H20
        tokens, seconds = table(name)
        config = configuration(words, tokens, Path(folder))
        times = phases(served(config))
        show(name, tokens, seconds, times)
        send = config.engine.prefill.send
        late = 100.0 * np.abs((times + send) / seconds - 1.0)
        earlier = f"counted from the end of the forward, {send * 1e3:.1f} ms earlier"
        print(f"{earlier}: mean absolute error {late.mean():.0f} %")
        name, words = H800
        tokens, seconds = table(name)
        longer = [count + PAGE for count in tokens]
        show(name, tokens, seconds, calls(served(configuration(words, longer, Path(folder)))))


if __name__ == "__main__":
    main()
