# SPDX-License-Identifier: Apache-2.0
"""Compare modelled forwards with sums of published operators: ``python -m benchmarks.operators DIR``.

DIR is ``systems/data/GPU`` of a checkout of aiconfigurator, such as h200_sxm.  Prints decode steps and prefills of
three models by the tables, by the roofline of ``--hw``, and by the operators of `Compute.kernels`: those of
``--compute``, or by default those fitted to every second size of the tables.  Weights are of the type in which the
models are released, KV is bf16, and tokens are spread over experts evenly, as in the tables.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from pdsim.calibration import kernel_fit, published
from pdsim.cli.profile import errors
from pdsim.compute.forward import OperatorForward, forward_time, peaks
from pdsim.compute.kernels import Kernels
from pdsim.compute.operators import Operators, read
from pdsim.compute.roofline import kv_shape
from pdsim.compute.shapes import LayerShape
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.models.parallel import Side
from pdsim.results.record import Table
from pdsim.results.terminal import show_table

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


def rows(operators: Operators, hw: str, kernels: Kernels) -> Iterator[list[Any]]:
    """Yield model, forward, milliseconds by tables, roofline and *kernels*, and both ratios less 1 in per cent."""
    for name, (tp, shape) in MODELS.items():
        config = compose([f"hw={hw}", f"model={name}", "parallel=tp8"])
        widths = {key: value for key, value in config.model.hf_config.items() if key != "vocab_size"}
        # tables have no head
        model = replace(config.model, dtype_bytes=WEIGHTS[name], kv_dtype="", hf_config=widths)
        roof = forward_time(model, config.hw, config.compute, Side(tp=tp))
        # KV of bf16 whatever the weights are, as in the tables
        kv_bytes = kv_shape(replace(model, dtype_bytes=2)).token_bytes(tp)
        wide = forward_time(replace(model, dtype_bytes=2), config.hw, config.compute, Side(tp=tp))
        sums = OperatorForward(
            model=model, kernels=kernels, peaks=peaks(config.hw), tp=tp, kv_bytes=kv_bytes, even=True
        )
        for batch, context in DECODE:
            tokens = batch * context
            ours = (
                roof.step(batch) + wide.context * tokens,
                sums.step(batch) + max(sums.context_of(batch) * tokens, sums.sequence * context),
            )
            arguments = model, shape, batch, context, tp
            yield from _row(name, f"decode {batch} x {context}", ours, operators.step, arguments)
        for tokens in PREFILL:
            ours = roof.prefill([(0, tokens)]), sums.prefill([(0, tokens)])
            yield from _row(name, f"prefill {tokens}", ours, operators.forward, (model, shape, tokens, tp))


def _row(
    name: str, what: str, ours: tuple[float, float], theirs: Any, arguments: tuple[Any, ...]
) -> Iterator[list[Any]]:
    try:
        other = theirs(*arguments)
    except ConfigError as error:
        print(f"{name}, {what}: {error}")
        return
    yield [name, what, other * 1e3, *(value * 1e3 for value in ours), *(100 * (value / other - 1) for value in ours)]


def main(words: Sequence[str] | None = None) -> int:
    """Print the tables; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", default="sglang")
    parser.add_argument("--version", default="0.5.10")
    parser.add_argument("--hw", default="8x8xh200")
    parser.add_argument("--compute", default="")
    asked = parser.parse_args(words)
    operators = read(asked.folder, asked.engine, asked.version)
    machine = compose([f"hw={asked.hw}"]).hw
    if asked.compute:
        kernels = compose([f"hw={asked.hw}", f"compute={asked.compute}"]).compute.kernels
        if kernels is None:
            parser.error(f"compute={asked.compute} has no kernels; name one that pdsim profile wrote")
    else:
        fitted = kernel_fit.fit(list(published.rows(operators)), peaks(machine))
        kernels = fitted.kernels
        show_table(errors(fitted))
    found = list(rows(operators, asked.hw, kernels))
    heads = {"model": "", "forward": "", "tables ms": "published", "roofline ms": "", "operators ms": ""}
    heads |= {"roofline %": "over the tables, less 1", "operators %": "likewise"}
    show_table(Table("Forwards", heads, found))
    for name in MODELS:
        for kind in ("decode", "prefill"):
            for column, what in ((5, "roofline"), (6, "operators")):
                of = [row[column] for row in found if row[0] == name and row[1].startswith(kind)]
                within = sum(abs(one) <= 20 for one in of)
                print(f"{name}, {kind}, {what}: median {median(of):+.0f} %, {within} of {len(of)} within 20 %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
