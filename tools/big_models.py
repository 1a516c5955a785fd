# SPDX-License-Identifier: Apache-2.0
"""Throughput of DeepSeek-V3 on nodes of 8 GPUs, published and modelled: ``python -m tools.big_models``.

Two deployments with experts over many nodes say how many tokens a second one of their nodes computes.  Each figure
is that of a saturated engine in closed form, as `experiment=serve` simulates it: full chunks, or a full batch.
Nothing is fitted to them, but that an exchange is not hidden unless ``compute.exchange_overlap`` says so, as
SGLang's two-batch overlap is off by default, was decided when both columns were known.  Kernels reach the shares of
the peaks that ``compute=roofline`` assumes; experts are loaded evenly.

- SGLang: lmsys.org/blog/2025-05-05-large-scale-ep, 12 nodes of 8 x H100; a batch of 256 a GPU is assumed, for which
  the published rate is a step of 92 ms (the report says about 100).
- DeepSeek: the open-source week's overview of its inference system, a day's mean over about 227 nodes of 8 x H800.
  A prompt of 4,000 tokens is assumed, of which 56.3 % are cached as published; 4,989 tokens of context are
  published.  608e9 tokens in and 168e9 out a day are the published rates on 95.5 and 131.4 nodes, together the
  226.75 that were in service in the mean: nodes released at night are in neither.  A load that followed the hours
  on as many nodes would be 82 %.

`CAUSES` says where the errors come from.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from pdsim.compute.forward import forward_time
from pdsim.compute.roofline import ForwardTime
from pdsim.config.compose import compose
from pdsim.core.files import data, write_table
from pdsim.models.llm import Side


class Case(NamedTuple):
    """A published throughput: *requests* a GPU, each with *context* tokens before the *new* ones of an iteration."""

    source: str
    side: str
    hw: tuple[str, ...]  # words of a command line
    ranks: int  # that the experts are spread over
    requests: int
    context: int
    new: int
    published: float  # tokens/s a node of 8 GPUs


H100 = ("hw=2x8xh100",)
H800 = ("hw=2x8xh800", "hw.nic.rate=43.5GB/s")  # with cards of 400 Gbps, as DeepSeek's nodes have

CASES = (
    Case("SGLang, 8 x H100", "prefill", H100, 32, 8, 0, 2048, 52_300),
    Case("SGLang, 8 x H100", "decode", H100, 72, 256, 2250, 1, 22_300),
    Case("DeepSeek, 8 x H800", "prefill", H800, 32, 8, 2250, 1750, 32_200),
    Case("DeepSeek, 8 x H800", "decode", H800, 144, 88, 4989, 1, 14_800),
)


CAUSES = {
    "DeepSeek, prefill": (
        "published is a day's mean of the nodes in service, without the 56.3 % of tokens that were cached; modelled "
        "is a saturated engine. The load of those nodes is not published."
    ),
    "decode": "batches are assumed: 256 requests a GPU (SGLang), and 88 (DeepSeek: its rate at 21 tokens/s a user).",
    "SGLang, prefill": "no host time between forwards, an even load of experts, and assumed shares of the peaks.",
}
"""Where errors come from, as docs/validation.md says."""


def rows() -> Iterator[tuple[str, str, float, float, float]]:
    """Yield source, side, and tokens/s a node: published, modelled, and modelled with all of the exchange hidden."""
    for case in CASES:
        plain, hidden = (round(_rate(case, hidden), -2) for hidden in (False, True))
        yield case.source, case.side, case.published, plain, hidden


def _rate(case: Case, hidden: bool) -> float:
    time = _time(case, hidden)
    if case.side == "prefill":
        seconds = time.prefill([(case.context, case.new)] * case.requests)
    else:
        seconds = time.step(case.requests) + time.context * case.requests * case.context
    return 8 * case.requests * case.new / seconds


def _time(case: Case, hidden: bool) -> ForwardTime:
    side = Side(tp=case.ranks, dp=case.ranks, ep=case.ranks)
    words = [f"parallel.{name}.{key}={case.ranks}" for name in ("prefill", "decode") for key in ("tp", "dp", "ep")]
    config = compose([*case.hw, "model=deepseek-v3", f"hw.nodes={case.ranks // 4}", *words])
    compute = replace(config.compute, exchange_overlap=hidden)
    return forward_time(config.model, config.hw, compute, side, direct=case.side == "decode")


def main() -> None:
    """Write ``data/reports/big_models.csv``, which docs/validation.md shows."""
    argparse.ArgumentParser(
        prog="python -m tools.big_models", description="Compute the table of big models."
    ).parse_args()
    columns = ("source", "side", "published", "modelled", "exchange hidden")
    write_table(data("reports", "big_models.csv"), columns, rows())


if __name__ == "__main__":
    main()
