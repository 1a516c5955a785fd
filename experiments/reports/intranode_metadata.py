# SPDX-License-Identifier: Apache-2.0
"""Does metadata on the GPU, over NVLink, speed up a handoff within a node?  SGLang PR 26707.

Before, rows of first-token metadata lie in host memory and go over TCP, beside KV that Mooncake copies over NVLink;
after, they lie on the GPU and go over NVLink in a batch of their own (`send_aux`).  KV goes the same way in both, so
short handoffs show most of the difference, and prompts how much of it a user sees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from experiments.handoff import sides
from experiments.reports.claims import Claim, PromptBurstOptions, ReportRun, burst
from pdsim.config import Config
from pdsim.core.progress import ShowProgress
from pdsim.core.units import NotNegativeInt, PositiveInt
from pdsim.models.llm import Parallel, Side
from pdsim.results.record import Result
from pdsim.transfer.job import Target

HANDOFF = Claim("handoff", "a handoff takes less time", "us")
TTFT = Claim("ttft", "the mean TTFT of prompts that arrive at once falls", "ms")
REQUESTS = Claim("throughput", "more requests are done", "1/s", better="more")
CLAIMS = (HANDOFF, TTFT, REQUESTS)

VARIANTS = {"tcp": ("control", "host"), "nvlink": ("write", "device")}
"""How metadata goes and where its rows lie, before and after: `pdsim.kv.policy.Policy`."""


@dataclass(frozen=True, kw_only=True)
class IntranodeMetadataOptions(PromptBurstOptions):
    """Which KV is transferred."""

    name: str = "seed_intranode_metadata"
    # ranks of prefill, ranks of decode
    tp: Annotated[tuple[Annotated[str, sides], ...], "non-empty"] = ("4to4",)
    tokens: Annotated[tuple[PositiveInt, ...], "non-empty"] = (128, 1024, 8192)  # of a handoff
    repeat: PositiveInt = 10  # measured handoffs of each shape
    warmup: NotNegativeInt = 2  # before them
    prompts: tuple[PositiveInt, ...] = (1, 8, 64)  # that arrive at once, served by instances of the first of `tp`


def run(config: Config, target: Target, progress: ShowProgress) -> Result:
    """Run handoffs and serving with metadata over TCP, then over NVLink, and return the verdicts of `CLAIMS`."""
    options = IntranodeMetadataOptions.of(config)
    served = options.prompts if options.placement == "packed" else ()
    trial = ReportRun(config, target, progress, 2 + 2 * len(served))
    if served != options.prompts:
        trial.notes.append("prompts are served by ranks with a GPU each, so here none are")
    variants = {
        name: replace(config, policy=replace(config.policy, metadata=way, metadata_memory=memory))
        for name, (way, memory) in VARIANTS.items()
    }
    handoffs = [trial.run(name, options.handoff(), own).rows("Handoffs") for name, own in variants.items()]
    for before, after in zip(*handoffs, strict=True):
        trial.add(HANDOFF, f"{before['way'].split()[0]} {before['tokens']} tokens", before["p50"], after["p50"])
    prefill, decode = (Side(tp=int(ranks)) for ranks in options.tp[0].split("to"))
    parallel = Parallel(prefill=prefill, decode=decode)
    for count in served:
        at, given = f"{options.tp[0]} {count} prompts", burst(count, options.prompt_tokens, options.output_tokens)
        pair = [
            (f"{name} {count} prompts", replace(own, parallel=parallel, workload=given))
            for name, own in variants.items()
        ]
        trial.serve((TTFT, REQUESTS), ("ttft_avg_s", "request_rate"), at, pair)
    return trial.result(CLAIMS)
