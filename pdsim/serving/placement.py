# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a serving job run, and how many pages of KV they have."""

from __future__ import annotations

from pdsim.compute.roofline import weight_bytes
from pdsim.core.errors import ConfigError
from pdsim.core.units import format_size
from pdsim.hardware.machine import Machine
from pdsim.kv.layout import KvLayout, KvShape
from pdsim.models.llm import Llm
from pdsim.models.parallel import Parallel, Side
from pdsim.serving.settings import Kv, SchedulerLimits
from pdsim.transfer.job import Place

__all__ = ["pages", "places"]


def places(parallel: Parallel, machine: Machine) -> tuple[list[Place], list[Place]]:
    """Return the place of every prefill and every decode rank, instance by instance.

    Prefill ranks take the first GPUs.  Decode ranks take the next or, on several nodes, those from the next node on
    if that is far enough from the end.  Without GPUs all ranks are on the hosts, one node after the other.

    One place for each GPU of a side, ordered by instance and then by rank.  Raise a `ConfigError` if the machine has
    too few GPUs.
    """
    prefill, decode = parallel.prefill.gpus, parallel.decode.gpus
    if not machine.gpus:
        hosts = [Place(index % machine.nodes) for index in range(prefill + decode)]
        return hosts[:prefill], hosts[prefill:]
    total = machine.nodes * machine.gpus
    first = -(-prefill // machine.gpus) * machine.gpus  # the next node's first GPU
    if first + decode > total:
        first = prefill
    if first + decode > total:
        raise ConfigError(
            f"parallel needs {prefill} + {decode} GPUs, hw={machine.name} has {total}; lower tp or instances"
        )
    gpus = [Place(index // machine.gpus, index % machine.gpus) for index in range(total)]
    return gpus[:prefill], gpus[first : first + decode]


def pages(
    side: Side, model: Llm, shape: KvShape, machine: Machine, kv: Kv, scheduler: SchedulerLimits, ranks: int
) -> int:
    """Return how many pages a rank of *side* has: `kv.pool`, or what the weights leave of its memory.

    On a machine without GPUs, whose hosts hold no weights, that is an equal share of the memory for each of *ranks*.

    *state* of mamba layers is set aside first, for every slot.  Of pipeline stages the one that holds fewest pages
    decides. Raise a `ConfigError` if not a single page fits, with what would help.
    """
    if kv.pool:
        pool = float(kv.pool)
    elif machine.gpu is not None and machine.gpus:
        pool = machine.gpu.memory * scheduler.memory_fraction - weight_bytes(model, side)
    else:
        pool = machine.host.memory * scheduler.memory_fraction / -(-ranks // machine.nodes)
    state = kv.state_slots or scheduler.decode_batch
    stages = [
        KvLayout(shape, side.attention_tp, kv.page_size, 1, 1, side.pp, stage, 1, 1) for stage in range(side.pp)
    ]
    pages = [stage.row_bytes("kv") + stage.row_bytes("index") for stage in stages]
    sizes = [page + kv.window_share * stage.row_bytes("window") for page, stage in zip(pages, stages, strict=True)]
    # the stage that runs out first decides, for pages have the same numbers in all
    left, page = min(
        ((pool - state * stage.row_bytes("mamba"), size) for stage, size in zip(stages, sizes, strict=True) if size),
        key=lambda both: both[0] / both[1],
    )
    count = int(left // page)
    if count < 1:
        raise ConfigError(
            f"a page of kv.page_size={kv.page_size} tokens takes {format_size(page)} a rank, and "
            f"{format_size(left)} "
            f"are left for KV at tp={side.tp}; raise tp, kv.pool or scheduler.memory_fraction, or lower kv.page_size"
        )
    return count
