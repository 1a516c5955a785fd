"""What a serving run needs to know, as plain frozen data that a configuration fills in; each class checks itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdsim.units import Rate, Seconds, Size

__all__ = ["Compute", "Kv", "Llm", "Parallel", "Scheduler", "Side", "Slo", "Workload"]


def _positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{owner}.{name} must be > 0, got {value}")


def _not_negative(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{owner}.{name} must be >= 0, got {value}")


def _one_of(owner: str, allowed: tuple[str, ...], **values: str) -> None:
    for name, value in values.items():
        if value not in allowed:
            raise ValueError(f"{owner}.{name} must be one of {', '.join(allowed)}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Llm:
    """The shape of a language model: `conf/model`."""

    name: str
    parameters: float  # in all
    active: float  # used for one token; equal to *parameters* unless a mixture of experts
    layers: int
    hidden: int
    heads: int
    kv_heads: int  # before replication over tensor-parallel ranks
    head_dim: int
    attention: str = "gqa"  # "gqa" keeps K and V per head, "mla" one latent row per token and layer
    latent_dim: int = 0  # elements of that row
    dtype_bytes: int = 2  # of a KV element and of a weight
    context: int = 131072  # longest input + output, tokens
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("model", ("gqa", "mla"), attention=self.attention)
        _positive(
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
            _positive("model", latent_dim=self.latent_dim)


@dataclass(frozen=True, kw_only=True)
class Side:
    """The prefill or the decode side: *instances* engines of *tp* tensor-parallel ranks, one GPU each."""

    tp: int
    instances: int = 1

    def __post_init__(self) -> None:
        _positive("parallel", tp=self.tp, instances=self.instances)

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.tp * self.instances


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How the GPUs are divided: prefill instances take the first, decode instances the next."""

    prefill: Side
    decode: Side


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Which requests arrive when: `conf/workload`.

    With *trace*, a path: Mooncake JSONL or Azure CSV, told apart by content.  Otherwise *arrivals* says how *count*
    requests are generated at a mean *rate* a second, with log-normal lengths of the given mean and coefficient of
    variation; ``"embedded"`` replays the small trace shipped with pdsim.
    """

    trace: str | None = None
    arrivals: str = "embedded"  # "embedded", "poisson", "gamma" or "bursty"
    count: int | None = None  # at most so many requests; None is all of a trace
    rate: float = 1.0  # requests a second, for generated arrivals
    speed: float = 1.0  # a trace's arrival times are divided by this
    cv: float = 2.0  # of the gaps, for gamma
    burst: float = 4.0  # rate of a burst over the mean rate, for bursty
    burst_length: Seconds = 10.0  # mean length of a burst
    input_mean: float = 2048.0  # tokens
    input_cv: float = 1.0
    output_mean: float = 256.0
    output_cv: float = 0.5

    def __post_init__(self) -> None:
        _one_of("workload", ("embedded", "poisson", "gamma", "bursty"), arrivals=self.arrivals)
        _positive(
            "workload",
            rate=self.rate,
            speed=self.speed,
            cv=self.cv,
            burst_length=self.burst_length,
            input_mean=self.input_mean,
            output_mean=self.output_mean,
        )
        _not_negative("workload", input_cv=self.input_cv, output_cv=self.output_cv)
        if self.count is not None:
            _positive("workload", count=self.count)
        if not self.burst > 1:
            raise ValueError(f"workload.burst must be > 1, got {self.burst}")


@dataclass(frozen=True, kw_only=True)
class Kv:
    """The KV cache and how it is handed over."""

    page_size: int = 64  # tokens
    pool: Size = 0  # bytes of KV a GPU; 0 is what the weights leave, times *Scheduler.memory_fraction*

    def __post_init__(self) -> None:
        _positive("kv", page_size=self.page_size)
        _not_negative("kv", pool=self.pool)


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """The knobs of the prefill and decode engines."""

    chunk: int = 8192  # tokens of one prefill iteration, over all its requests
    prefill_batch: int = 32  # requests in one prefill iteration
    decode_batch: int = 256  # requests in one decode iteration
    memory_fraction: float = 0.88  # of a GPU's memory, for weights and KV

    def __post_init__(self) -> None:
        _positive("scheduler", chunk=self.chunk, prefill_batch=self.prefill_batch, decode_batch=self.decode_batch)
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"scheduler.memory_fraction must be > 0 and <= 1, got {self.memory_fraction}")


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How long a forward takes: a roofline with an achieved share of the peak and a constant per iteration."""

    flops_share: float = 0.55
    memory_share: float = 0.8
    allreduce_rate: Rate = 0.0  # bytes/s of a tensor-parallel all-reduce; 0 takes the interconnect's rate
    allreduce_latency: Seconds = 12e-6
    overhead: Seconds = 2e-3  # of an iteration, scheduler and kernel launches
    scale: float = 1.0  # a loopback run emulates compute at this fraction of its length

    def __post_init__(self) -> None:
        _positive("compute", flops_share=self.flops_share, memory_share=self.memory_share)
        _not_negative(
            "compute",
            allreduce_rate=self.allreduce_rate,
            allreduce_latency=self.allreduce_latency,
            overhead=self.overhead,
            scale=self.scale,
        )


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What counts as good: goodput is the rate of requests that meet both."""

    ttft: Seconds = 5.0
    tpot: Seconds = 0.05

    def __post_init__(self) -> None:
        _positive("slo", ttft=self.ttft, tpot=self.tpot)
