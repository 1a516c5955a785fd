# SPDX-License-Identifier: Apache-2.0
"""What a serving run needs to know, as plain frozen data that a configuration fills in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import fsum
from typing import Annotated, Any

from pdsim.compute.forward import ForwardModel
from pdsim.core.units import (
    Count,
    Frequency,
    NotNegative,
    NotNegativeInt,
    Positive,
    PositiveInt,
    Rate,
    Seconds,
    Share,
    Size,
)

ELSEWHERE = {
    "isl": "input_mean", "osl": "output_mean", "qps": "rate", "request_rate": "rate", "num_prompts": "count",
    "concurrency": "users", "max_concurrency": "users", "block_size": "page_size", "tensor_parallel_size": "tp",
    "chunked_prefill_size": "chunk", "max_num_batched_tokens": "chunk", "max_num_seqs": "decode_batch",
    "batch_size": "decode_batch", "kv_cache_dtype": "kv_dtype", "dtype": "kv_dtype",
    "max_running_requests": "decode_batch", "gpu_memory_utilization": "memory_fraction",
    "mem_fraction_static": "memory_fraction", "max_model_len": "context",
}  # fmt: skip
"""What keys are called in servers and their load generators, and here."""
NO_KEYS = ("experiment", "policy", "calibration", "sources")
"""Fields whose own are no keys: those of experiments and policies are found otherwise, programs write the rest."""


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """One tenant of `Workload.tenants`: which requests it sends, and the SLO that these are to meet."""

    name: str  # as results call it
    rate: Annotated[Frequency, "> 0"]  # requests a second
    ttft: Annotated[Seconds, "> 0"]  # most time to the first token
    tpot: Annotated[Seconds, "> 0"]  # most time per token after the first
    input_mean: Annotated[Count, "> 0"] = 2048.0  # mean tokens of a prompt
    input_cv: NotNegative = 1.0  # coefficient of variation of those; 0: all alike
    output_mean: Annotated[Count, "> 0"] = 256.0  # mean tokens of an answer
    output_cv: NotNegative = 0.5  # coefficient of variation of those; 0: all alike
    priority: NotNegativeInt = 0  # the higher goes first where the scheduler looks; from 1 on it is never shed


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Which requests arrive when: `conf/workload`.

    With *trace*, a path: JSONL of Mooncake or Qwen-Bailian, CSV of Azure or BurstGPT, told apart by content.
    Otherwise *arrivals* says how *count* requests are generated at a mean *rate* a second, with log-normal lengths
    of the given mean and coefficient of variation. In this order: *jitter* spreads arrivals, *skip*, *seconds* and
    *count* choose a part, *speed* and *load* scale it.
    """

    trace: str | None = None  # a file of requests, in the format of Mooncake, Azure, Qwen-Bailian or BurstGPT
    # when requests come, without *trace*; embedded: those of the shipped one
    arrivals: Annotated[str, "one of embedded, poisson, gamma, bursty, diurnal, sessions"] = "embedded"
    count: PositiveInt | None = None  # at most so many requests; null is all of a trace
    skip: Seconds = 0.0  # leaves out arrivals of this long from the start, before any scaling
    seconds: Seconds = 0.0  # then keeps arrivals of this long, before any scaling; 0 is all
    rate: Annotated[Frequency, "> 0"] = 1.0  # mean requests a second, for generated arrivals
    speed: Positive = 1.0  # divides the arrival times of a trace: 2 doubles its rate
    jitter: Annotated[str, "one of none, auto"] = "none"  # "auto" spreads arrivals on a grid within its spacing
    load: NotNegative = 0.0  # scales arrivals to this load of the busier side, 1 is its capacity; 0 leaves them
    # how *load* scales: "time" stretches or shrinks the gaps, "thinning" drops requests at random
    scaling: Annotated[str, "one of time, thinning"] = "time"
    warmup: Seconds = 0.0  # requests that arrive this early count in no latency and not towards the SLO
    cooldown: Seconds = 0.0  # nor do those that arrive this shortly before the last
    cv: Positive = 2.0  # coefficient of variation of the gaps, for gamma
    ramp: Seconds = 0.0  # time in which the rate of generated arrivals grows from 0, or all users of sessions begin
    users: NotNegativeInt = 0  # users who start one session after the other; 0: sessions arrive at *rate* a second
    turns: PositiveInt = 4  # turns of a session, each after the answer to the one before
    think: Seconds = 0.0  # mean time from an answer to the next turn, exponential
    shared: NotNegativeInt = 0  # tokens that the prompts of all sessions begin with
    priority: Share = 0.0  # share of requests of priority 1, which are never shed; the others have 0
    burst: Annotated[float, "> 1"] = 4.0  # rate of a burst over the mean rate, for bursty
    burst_length: Annotated[Seconds, "> 0"] = 10.0  # mean length of a burst
    day: Annotated[Seconds, "> 0"] = 86400.0  # length of a day of diurnal arrivals, which begin at their lowest rate
    peak: Annotated[float, ">= 1"] = 4.0  # highest rate of a day over its lowest, for diurnal
    input_mean: Annotated[Count, "> 0"] = 2048.0  # mean tokens of a prompt
    input_cv: NotNegative = 1.0  # coefficient of variation of those; 0: all alike
    output_mean: Annotated[Count, "> 0"] = 256.0  # mean tokens of an answer
    output_cv: NotNegative = 0.5  # coefficient of variation of those; 0: all alike
    tenants: tuple[Tenant, ...] = ()  # who send requests at once, each at a rate and of lengths of its own
    aborts: Share = 0.0  # share of requests whose users leave, unless they have all their tokens before
    # mean time from its arrival after which such a user leaves, exponential
    patience: Annotated[Seconds, "> 0"] = 10.0


@dataclass(frozen=True, kw_only=True)
class Kv:
    """The KV cache and how it is transferred."""

    page_size: PositiveInt = 64  # tokens; auto: what the release of the engine starts with, as for all such keys
    # of decode, where it differs: one divides the other, KV moves in pages of the smaller; 0 is the same
    decode_page_size: NotNegativeInt = 0
    # requests, from the first, whose contents are compared where memory has any; null: all
    checked: NotNegativeInt | None = None
    pool: Size = 0  # bytes of KV and state a GPU; 0 is what the weights leave, times `scheduler.memory_fraction`
    all_cp_ranks: bool = False  # each context-parallel rank writes its share of the pages, instead of rank 0 all
    # requests of a group that have mamba state at a time; 0 is `scheduler.decode_batch`
    state_slots: NotNegativeInt = 0
    window_share: Positive = 0.8  # pages of sliding-window layers for each page of full attention (SGLang's default)
    layerwise: bool = False  # prefill pushes each layer of a chunk when it is computed, instead of all at the end
    # memory that context-parallel prefill ranks gather in; symmetric: of the output; both: of the input, too
    gather: Annotated[str, "one of plain, symmetric, both"] = "plain"
    staging: bool = False  # between ranks that keep different heads, gather, write in one piece, and scatter
    staging_ring: Annotated[Size, "> 0"] = 4 << 30  # bytes on each decode rank (SGLang's default)
    staging_buffer: Size = 0  # bytes for each queue of a prefill rank; 0 is one prefill chunk's, as in SGLang 0.5.23
    staging_wait: Annotated[Seconds, "> 0"] = 5.0  # for room in the ring, after which a chunk goes in slices
    # when all writers' blocks of a "chunk" are there (SGLang), or each "writer"'s by itself
    staging_scatter: Annotated[str, "one of chunk, writer"] = "chunk"


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The prefix cache of the instances: `conf/cache`.  Without values there is none.

    Prompts are alike where `hash_ids` of their trace are; the tokens that decode generates are not cached, for a
    trace has no hashes of them.  Cached pages are in the pool of KV, and make room for requests.
    """

    prefill: bool = False  # prefill computes only what its instance has not
    decode: bool = False  # prefill sends, or decode pulls, only the pages that the decode instance has not
    # of what was used least recently: a page (vLLM), or a "radix" node (SGLang)
    eviction: Annotated[str, "one of block, radix"] = "block"
    # a page can be used once its forward has ended; "scheduled": from its beginning on
    found: Annotated[str, "one of computed, scheduled"] = "computed"
    early: bool = False  # prefill sends cached pages when it begins the rest, instead of with its first chunk
    limit: Count = 0  # most tokens of an instance's cached pages without a user; 0 is all of the pool
    # tiers below GPU memory (`pdsim.kv.tiers`): tokens of each prefill instance in host memory
    host: Count = 0
    ssd: Count = 0  # on an SSD of its node
    remote: Count = 0  # of all instances, in a remote store (Mooncake Store, 3FS), through the network cards
    host_ratio: NotNegative = 0.0  # without *host*: that as so many times the pool of KV (--hicache-ratio of SGLang)
    shared: bool = False  # host memory and SSDs are one pool of all instances; cards reach those of other nodes
    chunk: PositiveInt = 1  # tokens of an object, which is found whole or not: LMCache has 256; at least a page
    # when pages are written to the tiers, as SGLang's --hicache-write-policy: once computed, found again, or evicted
    write: Annotated[str, "one of through, selective, back"] = "through"
    # what "ssd" and "remote" have comes to host memory while the request waits (--hicache-storage-prefetch-policy):
    # it waits for all of it, for `prefetch_timeout`, or not; with "none" it comes with what host memory has
    prefetch: Annotated[str, "one of none, best_effort, timeout, wait_complete"] = "none"
    prefetch_timeout: Seconds = 1.0  # of prefetch=timeout
    overlap: bool = False  # a forward computes while its pages come, layer by layer (SGLang); else it waits for them

    @property
    def tiered(self) -> bool:
        """Whether what prefill caches has a tier below GPU memory."""
        return self.prefill and self.host + self.host_ratio + self.ssd + self.remote > 0


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """The knobs of every prefill and decode engine; what they mean is up to `engine.scheduler`.

    The defaults here are those of engine=generic; other engines have their own (`pdsim.config.presets`).
    """

    chunk: PositiveInt = 8192  # tokens of one prefill iteration, over all its requests
    prefill_batch: PositiveInt = 32  # requests in one prefill iteration
    decode_batch: PositiveInt = 256  # requests in one decode iteration
    memory_fraction: Annotated[float, "> 0 and <= 1"] = 0.88  # of a GPU's memory, for weights and KV
    context: Size = 0  # bytes of that which neither have: CUDA's context, libraries, activations

    def room(self, memory: float, weights: float) -> float:
        """Return the bytes that *weights* leave for KV of a GPU of *memory*, at least 0."""
        return max(0.0, memory * self.memory_fraction - self.context - weights)


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """What the host of one side of a serving engine adds to the device's work: mean seconds."""

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


@dataclass(frozen=True, kw_only=True)
class ServingEngine:
    """How a serving engine schedules, admits and hands KV over: `conf/engine`.

    Without values it is the generic engine: prefill pushes each chunk, decode reserves pages for all of the output,
    and the host costs nothing beyond `Compute.overhead`.
    """

    name: str = "generic"  # as a choice of ``engine``
    version: Annotated[str, str] = ""  # the release, such as 0.26; "" is the one that the costs were measured with
    scheduler: str = "fcfs"  # what runs in the next step: a class of the entry-point group pdsim.schedulers
    scheduler_options: Mapping[str, Any] = field(default_factory=dict)  # of that class
    handoff: str = "push"  # who moves the KV: a class of the entry-point group pdsim.handoffs
    # last tokens of the prompt that decode computes again, before its first token
    recompute: Annotated[int, ">= 0 and <= 1"] = 0
    # decode pages: "reserve" for all of the output, or "grow" with the tokens
    memory: Annotated[str, "one of reserve, grow"] = "reserve"
    reserved_tokens: NotNegativeInt = 0  # with grow: free for each admitted request (num_reserved_decode_tokens)
    # of a request without pages: "recompute" its KV, or "retract" it to host memory
    preemption: Annotated[str, "one of recompute, retract"] = "recompute"
    retract_rate: Annotated[Rate, "> 0"] = 20e9  # bytes/s to host memory and back; all ranks of an instance at once
    step_tokens: NotNegativeInt = 0  # of a step, prefill and decode together; 0 is `scheduler.chunk`
    overlap: bool = False  # the host prepares the next step while one runs, and counts only where it takes longer
    ahead: bool = False  # a prefill step is chosen when the one before it has been launched, from what waits then
    # of colocated engines: a step has pieces of prompts and tokens of the batch; false: prompts go first, alone
    mixed: bool = True
    # of colocated engines: decode steps between two looks for requests (--scheduler-recv-interval)
    look: PositiveInt = 1
    # of colocated engines: for which the first launch that goes on with a prompt compiles its attention (FlashInfer)
    compiling: Seconds = 0.0
    pipeline: NotNegativeInt = 0  # steps, while some run, from the look that finds KV to the one that uses it
    posting_holds: bool = False  # decode's next tokens wait until a read is posted (`Transfer.posted`)
    # tokens of a step wait until the next is launched: where the scheduler's thread launches, or that of an engine
    # with one GPU; colocated engines with *overlap*
    launching_holds: Annotated[str, "one of never, alone, always"] = "never"
    # who sees, once a step, that pulled KV is all there
    noticed: Annotated[str, "one of decode, prefill"] = "decode"
    # which free pages a request gets: see `pdsim.kv.pages.page_pool`
    pages: Annotated[str, "one of best_fit, queue, stack"] = "best_fit"
    # in a page: "tokens" with their heads, or "heads" with their tokens
    page_order: Annotated[str, "one of tokens, heads"] = "tokens"
    packed: bool = False  # K and V of a head lie side by side, so that a page of a layer is one descriptor
    proxy: Seconds = 0.0  # that the router takes for each message which sends a request on
    lease: Seconds = 0.0  # that prefill keeps pulled pages without a heartbeat; 0 is for ever
    heartbeat: Annotated[Seconds, "> 0"] = 5.0  # between two of the reader's renewals of the lease
    # times as long as the host of its costs this one takes for each of them, and to launch kernels
    host_factor: Annotated[float, ">= 0.1 and <= 10"] = 1.0
    variation: NotNegative = 0.0  # coefficient of variation of each host cost, gamma-distributed
    busy: Positive = 1.0  # times as long prefill's host costs are when another request came less than 0.25 s before
    # at first contact of two ranks, for each page and plane of the other's pool: NIXL's list of descriptors; 0 of
    # strided descriptors, or of servers that have met
    prepare: Seconds = 0.0
    draft: NotNegativeInt = 0  # tokens that speculative decoding proposes a step, all verified in one forward
    acceptance: Share = 0.0  # chance that a proposed token is accepted if those before it were
    draft_share: NotNegative = 0.0  # time of proposing one token, of that of a decode step without context
    draft_layers: NotNegativeInt = 0  # attention layers that the drafter keeps KV of
    # that KV comes with the handoff, or decode computes it before the first token
    draft_kv: Annotated[str, "one of transferred, recomputed"] = "transferred"
    prefill: HostCosts = field(default_factory=HostCosts)
    decode: HostCosts = field(default_factory=HostCosts)
    measured_on: tuple[str, ...] = ()  # the machines (`conf/hw`) that its *measured* numbers hold for
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def tokens_a_step(self) -> float:
        """Mean tokens of a request's decode step: those of its drafts that are accepted, and one more.

        >>> ServingEngine().tokens_a_step, ServingEngine(draft=3, acceptance=0.5).tokens_a_step
        (1, 1.875)
        """
        return fsum(self.acceptance**number for number in range(self.draft + 1)) if self.draft else 1

    def on_host(self) -> ServingEngine:
        """Return the engine with the costs of its host, `host_factor` times as long, and a factor of 1."""
        slow = {
            side: replace(costs, **{name: value * self.host_factor for name, value in asdict(costs).items()})
            for side, costs in (("prefill", self.prefill), ("decode", self.decode))
        }
        return replace(self, **slow, proxy=self.proxy * self.host_factor, host_factor=1.0)  # type: ignore[arg-type]

    def decode_step(self, time: ForwardModel, batch: int) -> float:
        """Return the seconds of a decode step of *batch* requests without their context, drafts included."""
        if not self.draft:
            return time.step(batch)
        return time.step(batch * (1 + self.draft)) + self.draft * self.draft_share * time.step(batch)


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What counts as good: goodput is the rate of requests that meet both; one of one token meets *tpot*."""

    ttft: Annotated[Seconds, "> 0"] = 5.0  # most time to the first token
    tpot: Annotated[Seconds, "> 0"] = 0.05  # most time per token after the first


@dataclass(frozen=True, kw_only=True)
class Live:
    """A real serving deployment and how the client speaks to it.

    Name the servers in one of three ways: *url* for any OpenAI-compatible deployment (a router, or colocated
    servers), *prefill* and *decode* for a disaggregated pair of vLLM or SGLang, where the client is the proxy too,
    or *launch* to start servers on this machine with dummy weights in the shape of ``model``, as the fields from
    there on say.
    """

    engine: Annotated[str, "one of '', vllm, sglang"] = ""  # "vllm" or "sglang"; "" is any server with OpenAI's API
    url: tuple[str, ...] = ()  # requests go to the one with the fewest tokens outstanding
    prefill: tuple[str, ...] = ()  # URLs of prefill servers
    decode: tuple[str, ...] = ()  # URLs of decode servers
    bootstrap_port: tuple[int, ...] = (8998,)  # of each SGLang prefill server; one stands for all
    model: str = ""  # as the servers call it; "" asks them
    api: Annotated[str, "one of completions, chat"] = "completions"  # or "chat", for servers that have nothing else
    # token ids, of exact length; or "text", whose length the server decides
    prompts: Annotated[str, "one of ids, text"] = "ids"
    vocabulary: Annotated[int, "> 15"] = 32000  # token ids are drawn from its upper 15/16, away from special tokens
    ignore_eos: bool = True  # generate exactly as many tokens as the workload says
    request: Mapping[str, Any] = field(default_factory=dict)  # further fields of each request's JSON body
    key_variable: str = "OPENAI_API_KEY"  # the environment variable that has the API key; unset sends none
    connections: PositiveInt = 1024  # at most, to all servers together
    timeout: Annotated[Seconds, "> 0"] = 600.0  # from sending a request to its last token
    connect_timeout: Annotated[Seconds, "> 0"] = 10.0  # until a server has accepted a connection
    warmup: NotNegativeInt = 1  # times that the shortest and longest prompts are sent before anything is measured
    sample_every: Annotated[Seconds, "> 0"] = 0.5  # how often the servers' metrics are read

    launch: bool = False  # start the servers on this machine, and end them
    # of launched servers: prefill and decode, or "colocated"
    layout: Annotated[str, "one of pair, colocated"] = "pair"
    connector: str = ""  # vLLM's KV connector or SGLang's transfer backend; "" takes what suits `backend`
    python: str = ""  # the interpreter that has the engine; "" is this one
    # of the first server; the others and their side channels follow
    port: Annotated[int, ">= 1024 and <= 65000"] = 30100
    ready: Annotated[Seconds, "> 0"] = 900.0  # until all servers answer
    prefix_cache: bool = False  # launched servers cache prefixes, on prefill of a pair
    prefill_gpus: tuple[int, ...] = ()  # () takes the first GPUs for prefill and the next for decode
    decode_gpus: tuple[int, ...] = ()  # the same of decode
    arguments: tuple[str, ...] = ()  # added to the command line of every server
    prefill_arguments: tuple[str, ...] = ()  # of prefill servers alone, after those
    decode_arguments: tuple[str, ...] = ()  # of decode servers alone, after those
    environment: Mapping[str, str] = field(default_factory=dict)  # added to that of every server
