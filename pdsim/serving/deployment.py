# SPDX-License-Identifier: Apache-2.0
"""The serving job as every rank gets it: plain data that crosses process boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import fsum
from typing import Any

import msgspec

from pdsim.compute.forward import ForwardModel, OperatorForward
from pdsim.compute.roofline import ForwardTime, weight_bytes
from pdsim.core.errors import ConfigError
from pdsim.core.units import format_size
from pdsim.hardware.costs import CollectiveModel
from pdsim.hardware.machine import Machine
from pdsim.kv.contents import EVERY
from pdsim.kv.layout import Grid, KvLayout, KvShape, RankMap
from pdsim.kv.messages import rank_name
from pdsim.kv.pages import StatePool
from pdsim.kv.policy import Policy, Staging
from pdsim.models.llm import Llm, Parallel, Side
from pdsim.serving.autoscale import Autoscale
from pdsim.serving.settings import Cache, Kv, SchedulerLimits, ServingEngine
from pdsim.transfer.job import Place


@dataclass(frozen=True, kw_only=True)
class CpGather:
    """How the context-parallel ranks of prefill gather KV: ``kv.gather`` and ``collective``."""

    memory: str  # one of `pdsim.kv.allgather.MEMORIES`
    pool: int  # bytes of symmetric memory that are reserved at the start
    cost: CollectiveModel  # of one of several gathers in a row
    fallback: str = ""  # why memory is plain, where other was asked for


@dataclass(frozen=True)
class GatheredTensors:
    """Tensors of KV that are gathered alike: *count* of them, of *row* bytes a token."""

    row: int
    count: int


def gathered_tensors(layout: KvLayout) -> list[GatheredTensors]:
    """Return what ranks with pools of *layout* gather in a forward, keys and values first."""
    tables = [table for table in layout.tables if table.tensor is None and table.planes]
    return [GatheredTensors(table.item // table.tokens, len(table.planes)) for table in tables]


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The instances, their memory, their schedulers' limits, and how long a forward takes on either side.

    With data-parallel attention each attention group is an instance by itself: ``prefill0d1`` is group 1 of engine
    0. Made by `experiments.serve` from a configuration, sent to every rank as `plain` data, and made again there.
    Times are seconds, sizes bytes.
    """

    prefill: Grid  # of one group
    prefill_instances: int  # engines
    decode: Grid
    decode_instances: int
    prefill_dp: int = 1  # groups of an engine
    decode_dp: int = 1
    all_cp_ranks: bool = False
    gather: CpGather | None = None  # of context-parallel ranks
    state_slots: int = 0  # of mamba layers, on each rank
    window_share: float = 0.0  # pages of sliding-window layers for each page
    shape: KvShape
    page_size: int  # that KV is handed over in
    prefill_block: int = 1  # such pages that prefill gives out together: its own page
    decode_block: int = 1
    prefill_pages: int
    decode_pages: int
    slots: int  # rows of first-token metadata on each rank
    chunk: int
    prefill_batch: int
    decode_batch: int
    prefill_time: ForwardModel
    decode_time: ForwardModel
    policy: str  # of the router
    decode_policy: str = ""  # of decode instances; "": as *policy*
    routers: int = 1  # replicas of the router, which take requests in turn; each has policies of its own
    routers_sync: float = 0.0  # seconds between their exchanges of loads; 0: each knows what it sent itself
    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # that it knows: bytes/s to each decode
    output_known: bool = True  # whether the router knows how many tokens a request will generate
    shed: int = 0  # tokens outstanding at prefill from which on requests of priority 0 are refused; 0: never
    handoff: Policy = field(default_factory=Policy)
    staging: Staging | None = None
    deadline: float  # seconds of silence after which a rank counts as gone
    checked: int = EVERY  # the last room whose contents are written and compared, where memory has any
    kv_dtype: str = "bf16"  # of an element of KV
    retries: int = 0  # restarts of a request that loses its instance before a byte has moved
    asks: int = 0  # how often a user sends a request again that failed
    asks_after: float = 0.0  # seconds from the failure until then
    bootstrap_timeout: float = 0.0  # seconds that a room may wait at prefill for its pages at decode; 0 is for ever
    query_dp: bool = False  # decode asks the bootstrap service which group of an engine has a room
    waiting_timeout: float = 0.0  # seconds from then until all of it has arrived; 0 is for ever
    engine: ServingEngine = field(default_factory=ServingEngine)
    layerwise: bool = False  # prefill pushes each layer when it is computed
    cache: Cache = field(default_factory=Cache)
    autoscale: Autoscale = field(default_factory=Autoscale)
    seed: int = 0  # of what varies on hosts
    colocated: bool = False  # both sides are the same engines, and no KV moves

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Deployment:
        """Return the job that `plain` made *plain* of; ranks in one process share it, and what it has looked up."""
        return _unpack(msgspec.msgpack.encode(plain))

    def plain(self) -> dict[str, Any]:
        """Return the job as dictionaries and numbers."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values

    @cached_property
    def prefills(self) -> tuple[str, ...]:
        """The prefill instances."""
        return tuple(_groups("prefill", self.prefill_instances, self.prefill_dp))

    @cached_property
    def decodes(self) -> tuple[str, ...]:
        """The decode instances."""
        return tuple(_groups("decode", self.decode_instances, self.decode_dp))

    def check(self) -> None:
        """Raise a `ValueError` if the model cannot be divided over these ranks, or its KV not moved between them."""
        self.rank_map.writers(0)
        for layout in (self.prefill_layout(), self.decode_layout()):
            layout.aux_offsets(0)  # looks at every head and dimension

    @property
    def hashed(self) -> bool:
        """Whether anybody looks at which blocks prompts share."""
        return (
            self.cache.prefill
            or self.cache.decode
            or bool({self.policy, self.decode_policy} & {"cache_aware", "first_token"})
        )

    @property
    def rank_map(self) -> RankMap:
        """Who writes what to whom."""
        return RankMap(self.shape, self.prefill, self.decode, self.all_cp_ranks)

    def grid(self, instance: str) -> Grid:
        """Return the ranks of *instance*."""
        return self.prefill if instance.startswith("prefill") else self.decode

    def layers(self, instance: str) -> int:
        """Return how many layers a rank of *instance* has: of its largest stage, if there are several."""
        return -(-self.shape.layers // self.grid(instance).pp)

    def ranks(self, instance: str) -> Iterator[str]:
        """Yield the ranks of *instance*, its leader first."""
        for index in range(self.grid(instance).size):
            yield rank_name(instance, index)

    def prefill_layout(self, index: int = 0) -> KvLayout:
        """Return the pool of a prefill rank."""
        return self._layout(self.prefill, index, self.prefill_pages)

    def decode_layout(self, index: int = 0) -> KvLayout:
        """Return the pool of a decode rank."""
        return self._layout(self.decode, index, self.decode_pages)

    def window_pages(self, pages: int) -> int:
        """Return how many pages the sliding-window layers of a rank with so many *pages* have."""
        return max(1, int(pages * self.window_share))

    def window_need(self, tokens: int) -> int:
        """Return the most pages that the window of a request of *tokens* touches."""
        return min(self.page_count(tokens), self.page_count(self.shape.state.window) + 1)

    def state_pool(self, layout: KvLayout) -> StatePool:
        """Return the state rows of a group with pools of *layout*, none of them taken."""
        return StatePool(self.shape.state, self.page_size, layout.state_slots, layout.window_pages)

    def _layout(self, grid: Grid, index: int, pages: int) -> KvLayout:
        state = self.shape.state
        return KvLayout(
            self.shape,
            grid.tp,
            self.page_size,
            pages,
            self.slots,
            grid.pp,
            grid.at(index).pp,
            self.state_slots if state.mamba else 0,
            self.window_pages(pages) if state.window else 0,
            by_heads=self.engine.page_order == "heads",
        )

    def longest(self, given: int, wanted: int) -> float:
        """Return the seconds that a request of *given* and *wanted* tokens can take that is first in every queue."""
        chunks = [(done, min(self.chunk, given - done)) for done in range(0, given, self.chunk)]
        tokens = self.decode_pages * self.page_size
        step = self.engine.decode_step(self.decode_time, self.decode_batch) + self.decode_time.context * tokens
        passing = self.prefill.pp * fsum(self.prefill_seconds([chunk]) for chunk in chunks)
        return passing + wanted * step

    def prefill_seconds(self, pieces: Sequence[tuple[int, int]]) -> float:
        """Return the seconds of a forward over *pieces* and of its gathers, with nothing in their way."""
        return self.prefill_time.prefill(pieces) + self.gather_seconds(sum(new for _, new in pieces))

    def drafted_again(self, tokens: int) -> float:
        """Return the seconds in which decode computes the drafter's KV of a prompt of *tokens*; 0 if it comes."""
        engine = self.engine
        if engine.draft_kv == "transferred" or not engine.draft_layers:
            return 0.0
        return self.decode_time.prefill([(0, tokens)]) * engine.draft_layers / self.shape.layers

    def gather_seconds(self, tokens: int) -> float:
        """Return how long context-parallel ranks gather the KV of *tokens* with nothing in their way."""
        if self.gather is None or not tokens:
            return 0.0
        cp, cost = self.prefill.cp, self.gather.cost
        rows = -(-tokens // cp)
        return fsum(each.count * cost.isolated_time(cp, rows * each.row) for each in self._gathered)

    @cached_property
    def _gathered(self) -> list[GatheredTensors]:
        return gathered_tensors(self.prefill_layout())

    def page_count(self, tokens: int) -> int:
        """Return how many pages hold *tokens* tokens."""
        return -(-tokens // self.page_size)


def places(parallel: Parallel, machine: Machine) -> tuple[list[Place], list[Place]]:
    """Return the place of every prefill and every decode rank, instance by instance.

    Prefill ranks take the first GPUs.  Decode ranks take the next or, on several nodes, those from the next node on
    if that is far enough from the end, as it must be with `Machine.prefill`.  Without GPUs all ranks are on the
    hosts, one node after the other.
    Raise a `ConfigError` if the machine has too few GPUs.
    """
    prefill, decode = parallel.prefill.gpus, parallel.decode.gpus
    total, first = machine.nodes * machine.gpus, prefill
    if machine.gpus and prefill + decode > total:
        alone = ", or set experiment.deployment=colocated" if prefill <= total else ""
        raise ConfigError(
            f"parallel needs {prefill} + {decode} GPUs, hw={machine.name} has {total}; lower tp or instances{alone}"
        )
    if machine.gpus and (node := -(-prefill // machine.gpus) * machine.gpus) + decode <= total:
        first = node  # the next node's first GPU
    elif machine.prefill:
        raise ConfigError(
            f"hw.prefill={machine.prefill} needs nodes of its own for the {prefill} GPUs of prefill, and "
            f"hw={machine.name} has too few for {decode} of decode beside them; raise hw.nodes"
        )
    ranks = _places(machine, first + decode)
    return ranks[:prefill], ranks[first:]


def _places(machine: Machine, count: int) -> list[Place]:
    if not machine.gpus:
        return [Place(index % machine.nodes) for index in range(count)]
    return [Place(index // machine.gpus, index % machine.gpus) for index in range(count)]


def colocated_places(parallel: Parallel, machine: Machine) -> list[Place]:
    """Return the place of every rank of colocated engines, engine by engine.

    Engines are like those of prefill, as many as the GPUs of both sides hold, or the machine's if it has fewer.
    Raise a `ConfigError` if it holds none.
    """
    side = parallel.prefill
    wanted = side.gpus + parallel.decode.gpus
    total = machine.nodes * machine.gpus or wanted
    each = side.gpus // side.instances
    count = min(wanted, total) // each
    if not count:
        raise ConfigError(
            f"parallel.prefill.tp={side.tp} needs {each} GPUs, hw={machine.name} has {total}; lower tp"
        )
    return _places(machine, count * each)


def pages_per_rank(
    side: Side, model: Llm, shape: KvShape, machine: Machine, kv: Kv, scheduler: SchedulerLimits, ranks: int
) -> int:
    """Return how many pages a rank of *side* has: `kv.pool`, or what the weights leave of its memory.

    On a machine without GPUs, whose hosts hold no weights, that is an equal share of the memory for each of *ranks*.
    State of mamba layers is set aside first, for every slot.  Raise a `ConfigError` if not a single page fits.
    """
    if kv.pool:
        pool = float(kv.pool)
    elif machine.gpu is not None and machine.gpus:
        pool = scheduler.room(machine.gpu.memory, weight_bytes(model, side))
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


def staging_problems(
    machine: Machine, model: Llm, parallel: Parallel, kv: Kv, scheduler: SchedulerLimits, queues: int
) -> Iterator[str]:
    """Yield a line for each side whose GPUs have no room for staging beside weights and KV."""
    gpu, prefill, decode = machine.gpu, parallel.prefill, parallel.decode
    if gpu is None or not machine.gpus or prefill.attention_tp == decode.attention_tp:
        return
    for name, side, key, size, count in (
        ("prefill", prefill, "staging_buffer", kv.staging_buffer, queues),
        ("decode", decode, "staging_ring", kv.staging_ring, 1),
    ):
        weights = weight_bytes(model, side)
        pool = kv.pool or scheduler.room(gpu.memory, weights)
        if weights + pool + count * size > gpu.memory:
            yield (
                f"kv.{key}={format_size(size)}{f' for each of {count} queues' if count > 1 else ''} does not fit "
                f"beside {format_size(weights)} of weights and {format_size(pool)} of KV into the "
                f"{format_size(gpu.memory)} of each GPU of {name}; lower it, scheduler.memory_fraction or kv.pool"
            )


def _groups(side: str, engines: int, dp: int) -> Iterator[str]:
    for engine in range(engines):
        yield from [f"{side}{engine}"] if dp == 1 else [f"{side}{engine}d{group}" for group in range(dp)]


@lru_cache(4)
def _unpack(packed: bytes) -> Deployment:
    return msgspec.convert(msgspec.msgpack.decode(packed), Deployment, dec_hook=_forward)


def _forward(_: type, plain: Any) -> ForwardModel:
    if "kernels" in plain:
        return msgspec.convert(plain, OperatorForward)
    return msgspec.convert(plain, ForwardTime)
