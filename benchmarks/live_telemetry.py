# SPDX-License-Identifier: Apache-2.0
"""What NIXL told vLLM of its transfers under load, beside what the model says of them.

    python -m benchmarks.live_telemetry

Of each load of the fourth and fifth campaigns (`benchmarks.live_variants`): descriptors of a read, seconds to post
it, and seconds from then until decode looks, which is when NIXL takes the time, unless the read has ended within the
post, as without the progress thread: means of `vllm:nixl_*` at decode.  The model is told what was sealed before
those campaigns, and runs their requests in their order, as what a load leaves of the pages decides how many
descriptors the next one's reads have.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.live_campaign import GPUS
from benchmarks.live_validation import DATA, SYSTEMS, requests_of
from benchmarks.live_variants import PLANS, SEED, Variant
from experiments.serve import ServeOptions, job, result, specs
from experiments.validate_live.parts import APART, WARMUP, in_turn
from pdsim.config.compose import compose
from pdsim.results.record import Table
from pdsim.results.terminal import show_table
from pdsim.serving.workload import Request
from pdsim.sim.model import Model
from pdsim.validation.load_errors import SINGLE

CAMPAIGNS = {
    "fourth/vllm": "fifth",
    "fifth/vllm-chunk2k": "sixth",
    "fifth/vllm-page64": "seventh",
    "fifth/vllm-nothread": "seventh",
    "fifth/vllm26-pull": "seventh",
}
"""Folders of data/live whose decode servers read, and the plans that they were sealed by."""

KINDS = {"descriptors": "num_descriptors", "post": "post_time_seconds", "transfer": "xfer_time_seconds"}


def measured(folder: Path) -> dict[str, dict[str, float]]:
    """Return by load the means of `KINDS` that the servers of *folder* counted."""
    found = {}
    for load, summary in json.loads((folder / "summary.json").read_text()).items():
        for server in summary["reported"].values():
            counted = {kind: server["histograms"].get(f"vllm:nixl_{name}") for kind, name in KINDS.items()}
            if all(counted.values()):
                found[load] = {kind: float(one["mean"]) for kind, one in counted.items()}
    return found


def modelled(variant: Variant, folder: Path) -> dict[str, dict[str, float]]:
    """Return by load the same means of the reads of *variant* on the model, of the requests in *folder*."""
    system = [word for word in SYSTEMS[variant.engine] if not word.startswith("kv.pool=")]
    words = [*GPUS[1:], SEED, *system, f"kv.pool={variant.pool}B", *variant.words, *variant.model]
    config = compose([f"hw={variant.hw}", *(word for word in words if not word.startswith("live."))])
    parts: dict[str, list[Request]] = {}
    for row in requests_of(folder):
        own = parts.setdefault(row["load"], [])
        alone = row["load"].startswith((SINGLE, WARMUP))
        own.append(Request(len(own) * APART if alone else row["arrival"], row["input"], row["output"], None))
    loads = [name for name, own in parts.items() for _ in own]
    what, requests = job(config, ServeOptions()), in_turn(parts)
    model = Model(config.hw, config.backend, memory=config.memory, seed=config.seed)
    outcome = model.run(specs(config, what, requests))
    start = outcome.ranks["router"].value["start"]
    polled = result(config, what, requests, outcome).requests["polled_at"]
    reads: dict[str, list[tuple[float, float, float]]] = {}
    for rank in outcome.ranks.values():
        free = 0.0
        for record in sorted(rank.transfers, key=lambda one: one.submitted):
            begin = max(record.submitted, free)  # posts of a rank take turns
            free = record.posted
            number = int(record.label.partition("/")[0]) - 1
            read = float(record.descriptors), record.posted - begin, start + polled[number] - begin
            reads.setdefault(loads[number], []).append(read)
    return {load: dict(zip(KINDS, map(mean, zip(*own, strict=True)), strict=True)) for load, own in reads.items()}


def tables() -> Iterator[Table]:
    """Yield what was measured and modelled of each load, and the median error of each kind."""
    rows: list[list[Any]] = []
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for name, plan in CAMPAIGNS.items():
        folder = DATA / name
        found: Mapping[str, dict[str, float]] = measured(folder)
        made = modelled(PLANS[plan][folder.name], folder)
        for load, values in found.items():
            for kind, value in values.items():
                errors[kind].append(made[load][kind] / value - 1.0)
                scale = 1.0 if kind == "descriptors" else 1e3
                rows.append([name, load, kind, made[load][kind] * scale, value * scale, 100 * errors[kind][-1]])
    heads = ("campaign", "load", "what", "model", "measured", "error %")
    yield Table("Reads: descriptors, and milliseconds", dict.fromkeys(heads, ""), rows)
    shown = [
        [kind, len(own), 100 * median(map(abs, own)), sum(abs(one) <= 0.15 for one in own)]
        for kind, own in errors.items()
    ]
    totals = ("what", "loads", "median absolute %", "within 15 %")
    yield Table("Errors", dict.fromkeys(totals, ""), shown)


def main() -> int:
    """Print the tables."""
    for table in tables():
        show_table(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
