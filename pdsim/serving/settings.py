# SPDX-License-Identifier: Apache-2.0
"""What a serving run needs to know, as plain frozen data that a configuration fills in; each class checks itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pdsim.core.units import Count, Rate, Seconds, Size, not_negative, one_of, positive
from pdsim.kv.pages import ORDERS

__all__ = ["Cache", "HostCosts", "Kv", "Live", "SchedulerLimits", "ServingEngine", "Slo", "Workload"]


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
    posting_holds: bool = False  # decode's next tokens wait until a read is posted (`Transfer.posted`)
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


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What counts as good: goodput is the rate of requests that meet both.

    A request without a second token has no TPOT and meets that limit.  Raise a `ValueError` unless both are
    positive.
    """

    ttft: Seconds = 5.0
    tpot: Seconds = 0.05

    def __post_init__(self) -> None:
        positive("slo", ttft=self.ttft, tpot=self.tpot)


@dataclass(frozen=True, kw_only=True)
class Live:
    """A real serving deployment and how the client speaks to it.

    Name the servers in one of three ways: *url* for any OpenAI-compatible deployment (a router, or colocated
    servers), *prefill* and *decode* for a disaggregated pair of vLLM or SGLang, or *launch* to start servers on
    this machine with dummy weights in the shape of ``model``.

    Of a pair the client is the proxy, too: a request goes to a prefill server first and then to a decode server,
    or to both at once, as the engine's own proxy does it.  Fields from *launch* on say how servers are started;
    they mean nothing for servers that run already.

    Raises:
        ValueError: an unknown choice, a number out of range, an address without http, token ids for a chat API, or a
            wrong number of bootstrap ports; the message names the key.
    """

    engine: str = ""  # "vllm" or "sglang"; "" is any server with OpenAI's API
    url: tuple[str, ...] = ()  # requests go to the one with the fewest tokens outstanding
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    bootstrap_port: tuple[int, ...] = (8998,)  # of each SGLang prefill server; one stands for all
    model: str = ""  # as the servers call it; "" asks them
    api: str = "completions"  # or "chat", for servers that have nothing else
    prompts: str = "ids"  # token ids, of exact length; or "text", whose length the server decides
    vocabulary: int = 32000  # token ids are drawn from its upper 15/16, away from special tokens
    ignore_eos: bool = True  # generate exactly as many tokens as the workload says
    request: Mapping[str, Any] = field(default_factory=dict)  # further fields of each request's JSON body
    key_variable: str = "OPENAI_API_KEY"  # the environment variable that has the API key; unset sends none
    connections: int = 1024  # at most, to all servers together
    timeout: Seconds = 600.0  # from sending a request to its last token
    connect_timeout: Seconds = 10.0
    warmup: int = 1  # times that the workload's shortest and longest prompts are sent before anything is measured
    sample_every: Seconds = 0.5  # how often the servers' metrics are read

    launch: bool = False
    layout: str = "pair"  # of launched servers: prefill and decode, or "colocated"
    connector: str = ""  # vLLM's KV connector or SGLang's transfer backend; "" takes what suits `backend`
    python: str = ""  # the interpreter that has the engine; "" is this one
    port: int = 30100  # of the first server; the others and their side channels follow
    ready: Seconds = 900.0  # until all servers answer
    prefix_cache: bool = False
    prefill_gpus: tuple[int, ...] = ()  # () takes the first GPUs for prefill and the next for decode
    decode_gpus: tuple[int, ...] = ()
    arguments: tuple[str, ...] = ()  # added to the command line of every server
    prefill_arguments: tuple[str, ...] = ()
    decode_arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)  # added to that of every server

    def __post_init__(self) -> None:
        one_of("live", ("", "vllm", "sglang"), engine=self.engine)
        one_of("live", ("completions", "chat"), api=self.api)
        one_of("live", ("ids", "text"), prompts=self.prompts)
        one_of("live", ("pair", "colocated"), layout=self.layout)
        positive(
            "live",
            vocabulary=self.vocabulary - 15,
            connections=self.connections,
            timeout=self.timeout,
            connect_timeout=self.connect_timeout,
            sample_every=self.sample_every,
            ready=self.ready,
        )
        not_negative("live", warmup=self.warmup)
        if not 1024 <= self.port <= 65000:
            raise ValueError(f"live.port must be >= 1024 and <= 65000, got {self.port}")
        for name in ("url", "prefill", "decode"):
            for address in getattr(self, name):
                if not address.startswith(("http://", "https://")):
                    raise ValueError(f"live.{name} must begin with http:// or https://, got {address!r}")
        if len(self.bootstrap_port) not in (1, max(1, len(self.prefill))):
            raise ValueError(
                f"live.bootstrap_port must be one port or one for each of {len(self.prefill)} prefill servers, "
                f"got {list(self.bootstrap_port)}"
            )
        if self.api == "chat" and self.prompts == "ids":
            raise ValueError("live.prompts must be text for live.api=chat, got 'ids'")
