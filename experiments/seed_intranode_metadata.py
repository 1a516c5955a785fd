"""Does metadata on the GPU, over NVLink, speed up a handoff within a node?  SGLang PR 26707.

Before, rows of first-token metadata lie in host memory and go over TCP, beside KV that Mooncake copies over NVLink;
after, they lie on the GPU and go with the last batch of KV.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from experiments._seeds import Claim, Trial, as_rows
from experiments.handoff import Options as Handoff
from pdsim.config import Config
from pdsim.results.record import Result
from pdsim.serving.settings import Parallel, Side, Workload
from pdsim.transfer import Target
from pdsim.units import Seconds

__all__ = ["CLAIMS", "VARIANTS", "Options", "run"]

HANDOFF = Claim("handoff", "a handoff takes less time", "us")
TTFT = Claim("ttft", "the mean TTFT of prompts that arrive at once falls", "ms")
REQUESTS = Claim("throughput", "more requests are done", "1/s", better="more")
CLAIMS = (HANDOFF, TTFT, REQUESTS)

VARIANTS = {"tcp": ("control", "host"), "nvlink": ("batch", "device")}
"""How metadata goes and where its rows lie, before and after: `pdsim.kv.policy.Policy`."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is handed over: `conf/experiment/seed_intranode_metadata.yaml`."""

    tp: tuple[str, ...] = ("4to4",)  # ranks of prefill, ranks of decode
    tokens: tuple[int, ...] = (128, 1024, 8192)
    placement: str = "packed"  # or "sides", as `experiments.handoff`
    repeat: int = 10  # measured handoffs of each shape
    warmup: int = 2  # before them
    prompts: tuple[int, ...] = (1, 8, 64)  # that arrive at once
    prompt_tokens: int = 1024
    output_tokens: int = 128
    deadline: Seconds = 60.0  # of silence, after which a rank counts as gone

    def __post_init__(self) -> None:
        Handoff(**self.handoff())  # whose rules these are
        if not self.tp:
            raise ValueError("experiment.tp must have a value, got none")
        for name, least in (
            ("prompts", min(self.prompts, default=1)),
            ("prompt_tokens", self.prompt_tokens),
            ("output_tokens", self.output_tokens),
        ):
            if least < 1:
                raise ValueError(f"experiment.{name} must be >= 1, got {least}")

    def handoff(self) -> dict[str, Any]:
        """Return the options of `experiments.handoff`; ranks that keep other heads take the path that is sliced."""
        names = ("tp", "tokens", "placement", "repeat", "warmup", "deadline")
        return {name: getattr(self, name) for name in names} | {"paths": ("sliced",)}


def run(config: Config, target: Target, progress: Callable[[float, str], None]) -> Result:
    """Hand over and serve with metadata over TCP, then over NVLink, and return what became of `CLAIMS`."""
    options = Options(**{key: value for key, value in config.experiment.items() if key != "name"})
    served = options.prompts if options.placement == "packed" else ()
    trial = Trial(config, target, progress, 2 + 2 * len(served))
    trial.notes += (
        ["prompts are served by ranks with a GPU each, so here none are"] if served != options.prompts else []
    )
    _handoffs(trial, options)
    for prompts in served:
        _prompts(trial, options, prompts)
    return trial.result(CLAIMS)


def _as(config: Config, variant: str) -> Config:
    """Return *config* with the metadata of *variant*."""
    way, memory = VARIANTS[variant]
    return replace(config, policy=replace(config.policy, metadata=way, metadata_memory=memory))


def _handoffs(trial: Trial, options: Options) -> None:
    """Compare handoffs by themselves."""
    tcp, nvlink = (
        as_rows(trial.run(variant, "handoff", _as(trial.config, variant), **options.handoff()), "Handoffs")
        for variant in VARIANTS
    )
    for before, after in zip(tcp, nvlink, strict=True):
        trial.add(HANDOFF, f"{before['way'].split()[0]} {before['tokens']} tokens", before["p50"], after["p50"])


def _prompts(trial: Trial, options: Options, prompts: int) -> None:
    """Compare how *prompts* that arrive at once are served."""
    prefill, decode = map(int, options.tp[0].split("to"))
    workload = Workload(
        arrivals="poisson",
        count=prompts,
        rate=1e9,  # all within a microsecond
        input_mean=options.prompt_tokens,
        input_cv=0.0,
        output_mean=options.output_tokens,
        output_cv=0.0,
    )
    own = replace(trial.config, parallel=Parallel(prefill=Side(tp=prefill), decode=Side(tp=decode)), workload=workload)
    found: list[dict[str, Any]] = []
    for variant in VARIANTS:
        result = trial.run(f"{variant} {prompts} prompts", "serve", _as(own, variant), deadline=options.deadline)
        found.append({metric.name: metric.value for metric in result.summary})
    at = f"{options.tp[0]} {prompts} prompts"
    ttft = [None if each["ttft_avg_s"] is None else 1e3 * each["ttft_avg_s"] for each in found]
    trial.add(TTFT, at, *ttft)
    trial.add(REQUESTS, at, *(each["request_rate"] for each in found))
