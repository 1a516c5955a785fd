# SPDX-License-Identifier: Apache-2.0
"""What a serving run needs to know, as plain frozen data that a configuration fills in; each class checks itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pdsim.guards import not_negative, one_of, positive
from pdsim.kv.pages import ORDERS
from pdsim.serving.compute.kernels import Kernels
from pdsim.units import Count, Rate, Seconds, Size

__all__ = [
    "DTYPES",
    "Cache",
    "Compute",
    "HostCosts",
    "Hybrid",
    "Kv",
    "Llm",
    "Parallel",
    "SchedulerLimits",
    "ServingEngine",
    "Side",
    "Workload",
]


DTYPES = {"bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp32": 4}
"""Bytes of an element by the name of its type; of those of one size, the first is the one usually meant."""


@dataclass(frozen=True, kw_only=True)
class Hybrid:
    """What a model keeps beside full attention's keys and values; without values, nothing.

    *pattern* names the kind of each layer, repeated as often as it takes: ``a`` full attention, ``w`` attention over
    the last *window* tokens, ``m`` a mamba (linear attention, state space) layer.

    Raise a `ValueError` for a pattern of other letters or without full attention, and for numbers that a kind of
    layer in the pattern needs and that are not positive.
    """

    pattern: str = "a"
    window: int = 0  # tokens
    # channels of a mamba layer's convolution, of each part that is sharded by itself
    conv_groups: tuple[int, ...] = ()
    conv_width: int = 0  # past inputs that it keeps of each channel: the kernel less one
    ssm_heads: int = 0  # of a mamba layer's recurrent state
    ssm_head_elements: int = 0  # of the state in one head
    ssm_dtype_bytes: int = 4
    index_bytes: int = 0  # of a token's row in the index of sparse attention, in one layer

    def __post_init__(self) -> None:
        not_negative("model.hybrid", window=self.window, index_bytes=self.index_bytes)
        if "a" not in self.pattern or set(self.pattern) - set("awm"):
            raise ValueError(f"model.hybrid.pattern must be of a, w and m with at least one a, got {self.pattern!r}")
        if "w" in self.pattern:
            positive("model.hybrid", window=self.window)
        if "m" in self.pattern:
            positive(
                "model.hybrid",
                conv_groups=min(self.conv_groups, default=0),
                conv_width=self.conv_width,
                ssm_heads=self.ssm_heads,
                ssm_head_elements=self.ssm_head_elements,
                ssm_dtype_bytes=self.ssm_dtype_bytes,
            )


@dataclass(frozen=True, kw_only=True)
class Llm:
    """The shape of a language model: `conf/model`.

    Raise a `ValueError` for sizes that are not positive, an unknown kind of attention, or a type of KV whose
    elements have another size.  Numbers of models are in `conf/model`, from their ``config.json``.
    """

    name: str
    parameters: Count  # in all
    active: Count  # used for one token; equal to *parameters* unless a mixture of experts
    layers: int
    hidden: int
    heads: int
    kv_heads: int  # before replication over tensor-parallel ranks
    head_dim: int
    attention: str = "gqa"  # "gqa" keeps K and V per head, "mla" one latent row per token and layer
    latent_dim: int = 0  # elements of that row
    dtype_bytes: int = 2  # of a KV element and of a weight
    kv_dtype: str = ""  # of a KV element: one of `DTYPES`; "" is the first of *dtype_bytes* bytes
    rope_dim: int = 0  # of mla: dimensions of the latent row, and of a head's query and key, that carry positions
    # routed experts of a layer; 0: dense, or unknown, and each token reads *active* parameters more
    experts: int = 0
    experts_per_token: int = 0  # of them, that a token is routed to
    # of a layer's experts, of which a token's are in the best *groups_per_token*; 0: no groups
    expert_groups: int = 0
    groups_per_token: int = 0
    dense_layers: int = 0  # without experts, of a mixture of experts
    context: int = 131072  # longest input + output, tokens
    hybrid: Hybrid = field(default_factory=Hybrid)
    hf_config: Mapping[str, Any] = field(
        default_factory=dict
    )  # what config.json says besides, for servers of target=live
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("model", ("gqa", "mla"), attention=self.attention)
        positive(
            "model",
            parameters=self.parameters,
            active=self.active,
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype_bytes=self.dtype_bytes,
            context=self.context,
        )
        if self.attention == "mla":
            positive("model", latent_dim=self.latent_dim)
        not_negative("model", rope_dim=self.rope_dim, experts_per_token=self.experts_per_token)
        not_negative("model", expert_groups=self.expert_groups, dense_layers=self.dense_layers)
        if self.expert_groups and not 0 < self.groups_per_token <= self.expert_groups:
            raise ValueError(
                f"model.groups_per_token must be >= 1 and <= expert_groups={self.expert_groups}, "
                f"got {self.groups_per_token}"
            )
        if self.dense_layers >= self.layers:
            raise ValueError(f"model.dense_layers must be < layers={self.layers}, got {self.dense_layers}")
        if self.experts and not 0 < self.experts_per_token < self.experts:
            raise ValueError(
                f"model.experts_per_token must be >= 1 and < experts={self.experts}, got {self.experts_per_token}"
            )
        fitting = [name for name, size in DTYPES.items() if size == self.dtype_bytes]
        if self.kv_dtype and self.kv_dtype not in fitting:
            raise ValueError(
                f"model.kv_dtype must be one of {', '.join(fitting) or 'none'} for model.dtype_bytes="
                f"{self.dtype_bytes}, got {self.kv_dtype!r}"
            )

    @property
    def element(self) -> str:
        """The type of a KV element."""
        return self.kv_dtype or next((name for name, size in DTYPES.items() if size == self.dtype_bytes), "other")


@dataclass(frozen=True, kw_only=True)
class Side:
    """The prefill or the decode side: *instances* engines of ``tp * pp * cp`` ranks, one GPU each.

    *tp* is the tensor parallelism of the whole engine.  With data-parallel attention, *dp* > 1, its ranks form *dp*
    attention groups of ``tp // dp`` ranks a stage, each with requests, pages and a scheduler of its own, as in
    SGLang: dp=4 with tp=4 is four groups of attention tp 1.

    With expert parallelism, *ep* equal to *tp*, each rank has whole experts and tokens travel to them
    (`pdsim.serving.compute.experts`); with 1, the experts are divided as other weights are.
    """

    tp: int
    instances: int = 1
    pp: int = 1  # pipeline stages
    cp: int = 1  # context-parallel ranks
    dp: int = 1  # attention groups
    ep: int = 1  # ranks that the experts are spread over

    def __post_init__(self) -> None:
        positive("parallel", tp=self.tp, instances=self.instances, pp=self.pp, cp=self.cp, dp=self.dp)
        if self.tp % self.dp:
            raise ValueError(
                f"parallel.dp must divide tp={self.tp}, whose ranks it divides among groups, got {self.dp}"
            )
        if self.ep not in (1, self.tp):
            raise ValueError(
                f"parallel.ep must be 1 or tp={self.tp}, over all of whose ranks experts go, got {self.ep}"
            )
        if self.ep > 1 and self.pp * self.cp > 1:
            raise ValueError(f"parallel.ep={self.ep} has no stages or context-parallel ranks; leave pp and cp at 1")

    @property
    def attention_tp(self) -> int:
        """Tensor-parallel ranks of an attention group."""
        return self.tp // self.dp

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.tp * self.pp * self.cp * self.instances


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How the GPUs are divided: prefill instances take the first, decode instances the next.

    Raise a `ValueError` for context-parallel decode ranks, and for decode stages that are not those of prefill.
    """

    prefill: Side
    decode: Side

    def __post_init__(self) -> None:
        prefill, decode = self.prefill, self.decode
        if decode.cp != 1:
            raise ValueError(f"decode.cp={decode.cp}: decode ranks are not context-parallel; leave decode.cp at 1")
        if decode.pp not in (1, prefill.pp):
            raise ValueError(
                f"decode.pp={decode.pp} and prefill.pp={prefill.pp}: decode has the stages of prefill or a single "
                f"one; use decode.pp=1 or decode.pp={prefill.pp}"
            )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Which requests arrive when: `conf/workload`.

    With *trace*, a path: Mooncake JSONL or Azure CSV, told apart by content.  Otherwise *arrivals* says how *count*
    requests are generated at a mean *rate* a second, with log-normal lengths of the given mean and coefficient of
    variation; ``"embedded"`` replays the small trace shipped with pdsim, and ``"sessions"`` are users in a closed
    loop.

    In this order: *jitter* spreads arrivals, *skip*, *seconds* and *count* choose a part, *speed* and *load* scale
    it.

    Raise a `ValueError` for an unknown choice and for numbers out of range.  Shares are 0 to 1, means are in tokens.
    """

    trace: str | None = None
    arrivals: str = "embedded"  # "embedded", "poisson", "gamma", "bursty" or "sessions"
    count: int | None = None  # at most so many requests; None is all of a trace
    skip: Seconds = 0.0  # of arrivals that are left out, before any scaling
    seconds: Seconds = 0.0  # of arrivals that are kept after those, before any scaling; 0 is all
    rate: float = 1.0  # requests a second, for generated arrivals
    speed: float = 1.0  # a trace's arrival times are divided by this
    jitter: str = "none"  # "auto" spreads arrivals that lie on a grid within its spacing
    load: float = 0.0  # the offered load of the busier side, which arrivals are scaled to; 0 leaves them as they are
    scaling: str = "time"  # how: "time" stretches or shrinks the gaps, "thinning" drops requests at random
    warmup: Seconds = 0.0  # requests that arrive within it count in no latency and not towards the SLO
    cooldown: Seconds = 0.0  # nor do those that arrive within it before the last
    cv: float = 2.0  # of the gaps, for gamma
    ramp: Seconds = 0.0  # within which the rate grows from 0, for generated arrivals, or all users of sessions begin
    users: int = 0  # of sessions, one after the other each; 0: sessions arrive at *rate* a second
    turns: int = 4  # of a session, each after the answer to the one before
    think: Seconds = 0.0  # mean time from an answer to the next turn, exponential
    shared: int = 0  # tokens that the prompts of all sessions begin with
    priority: float = 0.0  # share of requests of priority 1, which are never shed; the others have 0
    burst: float = 4.0  # rate of a burst over the mean rate, for bursty
    burst_length: Seconds = 10.0  # mean length of a burst
    input_mean: float = 2048.0  # tokens
    input_cv: float = 1.0
    output_mean: float = 256.0
    output_cv: float = 0.5
    aborts: float = 0.0  # share of requests whose users leave, unless they have all their tokens before
    patience: Seconds = 10.0  # mean time from its arrival after which such a user leaves, exponential

    def __post_init__(self) -> None:
        one_of("workload", ("embedded", "poisson", "gamma", "bursty", "sessions"), arrivals=self.arrivals)
        one_of("workload", ("none", "auto"), jitter=self.jitter)
        one_of("workload", ("time", "thinning"), scaling=self.scaling)
        positive(
            "workload",
            rate=self.rate,
            speed=self.speed,
            cv=self.cv,
            burst_length=self.burst_length,
            input_mean=self.input_mean,
            output_mean=self.output_mean,
            patience=self.patience,
        )
        not_negative(
            "workload",
            input_cv=self.input_cv,
            output_cv=self.output_cv,
            skip=self.skip,
            seconds=self.seconds,
            load=self.load,
            warmup=self.warmup,
            cooldown=self.cooldown,
            ramp=self.ramp,
            users=self.users,
            think=self.think,
            shared=self.shared,
        )
        positive("workload", turns=self.turns)
        if self.arrivals == "sessions" and self.trace is None and (self.skip or self.seconds or self.load):
            raise ValueError(
                "workload.arrivals=sessions has no skip, seconds or load: users come after their answers"
            )
        if not 0 <= self.priority <= 1:
            raise ValueError(f"workload.priority must be >= 0 and <= 1, got {self.priority}")
        if self.count is not None:
            positive("workload", count=self.count)
        if not 0 <= self.aborts <= 1:
            raise ValueError(f"workload.aborts must be >= 0 and <= 1, got {self.aborts}")
        if not self.burst > 1:
            raise ValueError(f"workload.burst must be > 1, got {self.burst}")


@dataclass(frozen=True, kw_only=True)
class Kv:
    """The KV cache and how it is handed over.

    Raise a `ValueError` for sizes and times that are not positive, or below zero where 0 has a meaning.
    """

    page_size: int = 64  # tokens
    # requests, from the first, whose contents are compared where memory has any; None: all
    checked: int | None = None
    pool: Size = 0  # bytes of KV and state a GPU; 0 is what the weights leave, times `scheduler.memory_fraction`
    all_cp_ranks: bool = False  # each context-parallel rank writes its share of the pages, instead of rank 0 all
    state_slots: int = 0  # requests of a group that have mamba state at a time; 0 is `scheduler.decode_batch`
    window_share: float = 0.8  # pages of sliding-window layers for each page of full attention (SGLang's default)
    layerwise: bool = False  # prefill pushes each layer of a chunk when it is computed, instead of all at the end
    staging: bool = False  # between ranks that keep different heads, gather, write in one piece, and scatter
    staging_ring: Size = 4 << 30  # bytes on each decode rank (SGLang's default)
    staging_buffer: Size = 0  # bytes for each queue of a prefill rank; 0 is one prefill chunk's, as in SGLang 0.5.23
    staging_wait: Seconds = 5.0  # for room in the ring, after which a chunk goes in slices

    def __post_init__(self) -> None:
        positive("kv", page_size=self.page_size, window_share=self.window_share)
        positive("kv", staging_ring=self.staging_ring, staging_wait=self.staging_wait)
        not_negative(
            "kv",
            checked=self.checked or 0,
            pool=self.pool,
            state_slots=self.state_slots,
            staging_buffer=self.staging_buffer,
        )


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The prefix cache of the instances: `conf/cache`.  Without values there is none.

    Prompts are alike where `hash_ids` of their trace are; the tokens that decode generates are not cached, for a
    trace has no hashes of them.  Cached pages are in the pool of KV, and make room for requests.
    """

    prefill: bool = False  # prefill computes only what its instance has not
    decode: bool = False  # prefill sends, or decode pulls, only the pages that the decode instance has not
    eviction: str = "block"  # of what was used least recently: a page (vLLM), or a "radix" node (SGLang)
    found: str = "computed"  # a page can be used once its forward has ended; "scheduled": from its beginning on
    early: bool = False  # prefill sends cached pages when it begins the rest, instead of with its first chunk
    host: Count = 0  # tokens of each prefill instance in host memory, which come back over PCIe when they are found
    limit: Count = 0  # most tokens of an instance's cached pages without a user; 0 is all of the pool

    def __post_init__(self) -> None:
        one_of("cache", ("block", "radix"), eviction=self.eviction)
        one_of("cache", ("computed", "scheduled"), found=self.found)
        not_negative("cache", limit=self.limit, host=self.host)
        if self.host and not self.prefill:
            raise ValueError(f"cache.host={self.host:g} keeps what prefill caches; set cache.prefill=true")


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """The knobs of the prefill and decode engines.

    The same limits hold for every instance of a side; what they mean is up to `engine.scheduler`.
    """

    chunk: int = 8192  # tokens of one prefill iteration, over all its requests
    prefill_batch: int = 32  # requests in one prefill iteration
    decode_batch: int = 256  # requests in one decode iteration
    memory_fraction: float = 0.88  # of a GPU's memory, for weights and KV

    def __post_init__(self) -> None:
        positive("scheduler", chunk=self.chunk, prefill_batch=self.prefill_batch, decode_batch=self.decode_batch)
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"scheduler.memory_fraction must be > 0 and <= 1, got {self.memory_fraction}")


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How long a forward takes: a roofline with an achieved share of the peak and a constant per iteration.

    Shares are of the hardware's own peak and rate (`pdsim.hardware.Gpu`), so that a profile of one GPU can be used
    for another, as *assumed*.  Raise a `ValueError` for shares outside 0 to 1 and a *blend* outside 1 to 64.
    """

    flops_share: float = 0.55  # of the peak, that linear layers reach
    attention_share: float = 0.0  # of the peak, that attention reaches; 0 is as *flops_share*
    prefix_share: float = 0.0  # the same of attention to tokens of earlier chunks; 0 is as *attention_share*
    attention_padded: bool = False  # of a batch, every sequence is computed up to the rows of the longest
    memory_share: float = 0.8  # of the memory's rate, at which keys and values are read
    sequence_share: float = 0.0  # of that rate, which one sequence of a decode batch reaches at most; 0 is no limit
    weight_share: float = 0.0  # the same of weights; 0 is as *memory_share*
    blend: float = 0.0  # the norm of the two roofs, 1 adds them; 0: the higher one counts alone
    allreduce_rate: Rate = 0.0  # bytes/s of a tensor-parallel all-reduce; 0 takes the interconnect's rate
    allreduce_latency: Seconds = 12e-6
    exchange_share: float = 1.0  # of a card's rate, that tokens on their way to experts reach
    # of a dispatch, and of a combine (DeepEP's table, tests/serving/test_experts.py)
    exchange_latency: Seconds = 23e-6
    exchange_overlap: bool = False  # the halves of a batch take turns: one computes while the other's tokens travel
    overhead: Seconds = 2e-3  # of an iteration, scheduler and kernel launches
    scale: float = 1.0  # a loopback run emulates compute at this fraction of its length
    source: str = ""  # of the shares: "measured: …"; without one they are assumed
    measured_of: tuple[str, ...] = ()  # the models (`conf/model`) that it holds for; of others it is assumed
    kernels: Kernels | None = None  # times of operators, from pdsim profile, in place of the shares

    def __post_init__(self) -> None:
        for name in ("flops_share", "memory_share", "exchange_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"compute.{name} must be > 0 and <= 1, a share of the peak, got {getattr(self, name)}"
                )
        for name in ("attention_share", "prefix_share", "sequence_share", "weight_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"compute.{name} must be >= 0 and <= 1, got {getattr(self, name)}")
        if self.blend and not 1.0 <= self.blend <= 64.0:
            raise ValueError(f"compute.blend must be 0 or from 1 to 64, got {self.blend}")
        not_negative(
            "compute",
            allreduce_rate=self.allreduce_rate,
            allreduce_latency=self.allreduce_latency,
            exchange_latency=self.exchange_latency,
            overhead=self.overhead,
            scale=self.scale,
        )


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """What the host of one side of a serving engine adds to the device's work: mean seconds.

    Prefill and decode have costs of their own.  Raise a `ValueError` for negative times.
    """

    arrive: Seconds = 0.0  # from a request's arrival at the server to its scheduler's queue: HTTP, processes, copies
    arrive_token: Seconds = 0.0  # of that, each token of its prompt
    admit: Seconds = 0.0  # that a request holds the loop up when its step is prepared (decode: KV is here)
    admit_token: Seconds = 0.0  # of that, each token of its prompt
    step: Seconds = 0.0  # of an iteration; with *overlap* only what exceeds the forward
    launch: Seconds = 0.0  # the least that each layer of a forward takes which is launched kernel by kernel
    idle: Seconds = 0.0  # of decode: an iteration with nothing to run, after which it looks again; 0 looks at once
    answer: Seconds = 0.0  # from the end of a step to its token, or the answer, leaving the server
    answer_token: Seconds = 0.0  # of a first token's answer, each token of its prompt: later ones do not wait for it
    send: Seconds = 0.0  # of prefill that pushes: from the end of a forward to the post of its KV
    send_next: Seconds = 0.0  # and to that of each further request of it, which one thread posts in turn
    posted_beside: Seconds = 0.0  # that a forward begins later if a post is due while it is launched
    posted_more: Seconds = 0.0  # and for each further post

    def __post_init__(self) -> None:
        not_negative("engine", **asdict(self))


@dataclass(frozen=True, kw_only=True)
class ServingEngine:
    """How a serving engine schedules, admits and hands KV over: `conf/engine`.

    Without values it is the generic engine: prefill pushes each chunk, decode reserves pages for all of the output,
    and the host costs nothing beyond `Compute.overhead`.

    Raise a `ValueError` for an unknown choice, negative times, and a heartbeat that is not shorter than the lease.
    """

    name: str = "generic"
    scheduler: str = "fcfs"  # what runs in the next step: a class of the entry-point group pdsim.schedulers
    scheduler_options: Mapping[str, Any] = field(default_factory=dict)  # of that class
    handoff: str = "push"  # who moves the KV: a class of the entry-point group pdsim.handoffs
    recompute: int = 0  # last tokens of the prompt that decode computes again, before its first token
    memory: str = "reserve"  # decode pages: "reserve" for all of the output, or "grow" with the tokens
    reserved_tokens: int = 0  # with grow: kept free for each admitted request (SGLang's num_reserved_decode_tokens)
    preemption: str = "recompute"  # of a request without pages: "recompute" its KV, or "retract" it to host memory
    retract_rate: Rate = 20e9  # bytes/s to host memory and back; all ranks of an instance at once
    step_tokens: int = 0  # of a step, prefill and decode together; 0 is `scheduler.chunk`
    overlap: bool = False  # the host prepares the next step while one runs, and counts only where it takes longer
    ahead: bool = False  # a prefill step is chosen when the one before it has been launched, from what waits then
    pipeline: int = 0  # steps that pass, while some run, from the look that finds KV to the one that uses it
    posting_holds: bool = False  # decode's next tokens wait until a read is posted (`Transfer.posting`)
    noticed: str = "decode"  # who sees, once a step, that pulled KV is all there: "decode", or "prefill"
    pages: str = "best_fit"  # which free pages a request gets: see `pdsim.kv.pages.page_pool`
    page_order: str = "tokens"  # in a page: "tokens" with their heads, or "heads" with their tokens
    packed: bool = False  # K and V of a head lie side by side, so that a page of a layer is one descriptor
    proxy: Seconds = 0.0  # that the router takes for each message which sends a request on
    lease: Seconds = 0.0  # that prefill keeps pulled pages without a heartbeat; 0 is for ever
    heartbeat: Seconds = 5.0  # between two of the reader's renewals of the lease
    variation: float = 0.0  # coefficient of variation of each host cost, gamma-distributed
    busy: float = 1.0  # times as long prefill's host costs are when another request came less than 0.25 s before
    prefill: HostCosts = field(default_factory=HostCosts)
    decode: HostCosts = field(default_factory=HostCosts)
    measured_on: tuple[str, ...] = ()  # the machines (`conf/hw`) that its *measured* numbers hold for
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("engine", ("reserve", "grow"), memory=self.memory)
        one_of("engine", ("recompute", "retract"), preemption=self.preemption)
        one_of("engine", ORDERS, pages=self.pages)
        one_of("engine", ("decode", "prefill"), noticed=self.noticed)
        one_of("engine", ("tokens", "heads"), page_order=self.page_order)
        if self.recompute not in (0, 1):
            raise ValueError(f"engine.recompute must be 0 or 1, the last token of the prompt, got {self.recompute}")
        positive("engine", retract_rate=self.retract_rate, heartbeat=self.heartbeat, busy=self.busy)
        not_negative("engine", reserved_tokens=self.reserved_tokens, step_tokens=self.step_tokens)
        not_negative("engine", pipeline=self.pipeline, proxy=self.proxy, lease=self.lease, variation=self.variation)
        if self.lease and not self.heartbeat < self.lease:
            raise ValueError(f"engine.heartbeat={self.heartbeat} must be < lease={self.lease}, which it renews")
