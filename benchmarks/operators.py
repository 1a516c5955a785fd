"""Compare modelled forwards with sums of published operators: ``python -m benchmarks.operators DIR``.

DIR is ``systems/data/GPU`` of a checkout of aiconfigurator, such as h200_sxm.  Prints decode steps and prefills of
three models by both, and the ratio.  Weights and KV are of the type that each row says; KV is bf16 in all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from pdsim.cli.run import compose
from pdsim.errors import ConfigError
from pdsim.results.record import Table
from pdsim.results.terminal import show_table
from pdsim.serving.compute.operators import Operators, read
from pdsim.serving.compute.roofline import forward_time
from pdsim.serving.compute.shapes import LayerShape

MODELS = {
    "llama-3.1-70b": (4, LayerShape(intermediate=28672)),
    "qwen3-235b-a22b": (8, LayerShape(intermediate=0, expert=1536)),
    "deepseek-v3": (8, LayerShape(intermediate=18432, dense=3, expert=2048, shared=2048, query_rank=1536)),
}
"""Tensor parallelism of each model, and widths from its config.json."""

WEIGHTS = {"llama-3.1-70b": 2, "qwen3-235b-a22b": 2, "deepseek-v3": 1}
"""Bytes of a weight, as the models are released."""

DECODE = [(1, 1024), (16, 1024), (64, 1024), (64, 4096), (128, 2048)]
PREFILL = [1024, 4096, 8192]


def rows(operators: Operators, hw: str) -> Iterator[list[Any]]:
    """Yield model, forward, milliseconds by the model and by the operators, and the ratio less 1 in per cent."""
    for name, (tp, shape) in MODELS.items():
        config = compose([f"hw={hw}", f"model={name}", "parallel=tp8"])
        model = replace(config.model, dtype_bytes=WEIGHTS[name], kv_dtype="")
        time = forward_time(model, config.hw, config.compute, tp)
        # KV of bf16 whatever the weights are, as in the tables
        wide = forward_time(replace(model, dtype_bytes=2), config.hw, config.compute, tp)
        for batch, context in DECODE:
            ours = time.step(batch) + wide.context * batch * context
            yield from _row(
                name, f"decode {batch} x {context}", ours, operators.step, (model, shape, batch, context, tp)
            )
        for tokens in PREFILL:
            yield from _row(
                name, f"prefill {tokens}", time.prefill([(0, tokens)]), operators.forward, (model, shape, tokens, tp)
            )


def _row(name: str, what: str, ours: float, theirs: Any, arguments: tuple[Any, ...]) -> Iterator[list[Any]]:
    try:
        other = theirs(*arguments)
    except ConfigError as error:
        print(f"{name}, {what}: {error}")
        return
    yield [name, what, ours * 1e3, other * 1e3, 100 * (ours / other - 1)]


def main(words: Sequence[str] | None = None) -> int:
    """Print the tables; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", default="sglang")
    parser.add_argument("--version", default="0.5.10")
    parser.add_argument("--hw", default="8x8xh200")
    asked = parser.parse_args(words)
    found = list(rows(read(asked.folder, asked.engine, asked.version), asked.hw))
    heads = {
        "model": "",
        "forward": "",
        "model ms": "",
        "operators ms": "published",
        "apart %": "ours over theirs, less 1",
    }
    show_table(Table("Forwards", heads, found))
    for name in MODELS:
        for kind in ("decode", "prefill"):
            of = [row[4] for row in found if row[0] == name and row[1].startswith(kind)]
            if of:
                within = sum(abs(one) <= 20 for one in of)
                print(f"{name}, {kind}: median {median(of):+.0f} %, {within} of {len(of)} within 20 %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
