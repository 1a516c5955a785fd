"""Does a staged path speed up NIXL between prefill and decode of unlike TP?  SGLang PR 22536.

Before, a rank writes what the other side keeps of each token and layer as a descriptor of its own (sliced); after, it
gathers a chunk, writes it in one piece, and the other side scatters it (staged).  First handoffs by themselves, TP
against TP; then prompts that arrive at once at prefill of TP 4 and decode of DP4+TP4(+EP4), of which each group holds
all heads.  Expert parallelism moves no KV: `pdsim.serving` does not model it, and nothing here depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from experiments._seeds import Claim, Trial, as_rows
from pdsim.config import Config
from pdsim.errors import ConfigError
from pdsim.results.record import Result
from pdsim.serving.compute import kv_shape
from pdsim.serving.settings import Parallel, Side, Workload
from pdsim.transfer import Target
from pdsim.units import Seconds

__all__ = ["CLAIMS", "Options", "run"]

HANDOFF = Claim("handoff", "a handoff between unlike TP takes less time when staged", "us")
DESCRIPTORS = Claim("descriptors", "it takes a thousandth of the descriptors (PR 19890)", "descriptors", bound=1000.0)
TTFT = Claim("ttft", "TP4 to DP4+TP4+EP4: the mean TTFT of prompts that arrive at once falls", "ms")
REQUESTS = Claim("throughput", "TP4 to DP4+TP4+EP4: more requests are done", "1/s", better="more")
CLAIMS = (HANDOFF, DESCRIPTORS, TTFT, REQUESTS)

PARALLEL = Parallel(prefill=Side(tp=4), decode=Side(tp=4, dp=4))
DP = "4toDP4"
"""TP4 to DP4+TP4+EP4: four decode groups of attention TP 1, and how points are named that."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is handed over: `conf/experiment/seed_nixl_staging.yaml`."""

    tp: tuple[str, ...] = ("1to2", "2to1", "2to4", "4to2", "4to1")  # ranks of prefill, ranks of decode
    tokens: tuple[int, ...] = (512, 8192)
    placement: str = "packed"  # or "sides", as `experiments.handoff`
    repeat: int = 3  # measured handoffs of each shape
    warmup: int = 1  # before them
    prompts: tuple[int, ...] = (1, 8, 64, 512)  # that arrive at once
    prompt_tokens: int = 1024
    output_tokens: int = 128
    deadline: Seconds = 60.0  # of silence, after which a rank counts as gone

    def __post_init__(self) -> None:
        for text in self.tp:
            sides = text.split("to")
            if [part.isdecimal() and int(part) > 0 for part in sides] != [True, True] or int(sides[0]) == int(sides[1]):
                raise ValueError(f"experiment.tp must be of pairs of unlike sides such as 4to1, got {text!r}")
        if self.placement not in ("packed", "sides"):
            raise ValueError(f"experiment.placement must be one of packed, sides, got {self.placement!r}")
        for name, values in (("tokens", self.tokens), ("prompts", self.prompts)):
            if min(values, default=1) < 1:
                raise ValueError(f"experiment.{name} must be >= 1, got {min(values)}")
        for name in ("repeat", "prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"experiment.{name} must be >= 1, got {getattr(self, name)}")
        if not self.tokens:
            raise ValueError("experiment.tokens must have a value, got none")
        if self.warmup < 0:
            raise ValueError(f"experiment.warmup must be >= 0, got {self.warmup}")
        if not self.deadline > 0:
            raise ValueError(f"experiment.deadline must be > 0, got {self.deadline}")


def run(config: Config, target: Target, progress: Callable[[float, str], None]) -> Result:
    """Hand over and serve in slices, then staged, and return what became of `CLAIMS`.

    What needs more GPUs than there are is left out, and a note says so.  Raise a `ConfigError` if nothing is left.
    """
    options = Options(**{key: value for key, value in config.experiment.items() if key != "name"})
    crossed = tuple(tp for tp in options.tp if options.placement == "sides" or _fits(config, *_sides(tp)))
    served = options.prompts if _fits(config, PARALLEL.prefill.gpus, PARALLEL.decode.gpus) else ()
    if not crossed and not served:
        raise ConfigError(f"hw={config.hw.name} has too few GPUs for any of it; set experiment.placement=sides")
    trial = Trial(config, target, progress, 2 * bool(crossed) + 2 * len(served))
    left = [tp for tp in options.tp if tp not in crossed] + [DP] * (len(served) < len(options.prompts))
    trial.notes += [f"hw={config.hw.name} has too few GPUs for {', '.join(left)}, left out"] if left else []
    if crossed:
        _handoffs(trial, options, crossed)
    for prompts in served:
        _prompts(trial, options, prompts)
    return trial.result(CLAIMS)


def _sides(tp: str) -> tuple[int, int]:
    prefill, decode = map(int, tp.split("to"))
    return prefill, decode


def _fits(config: Config, prefill: int, decode: int) -> bool:
    gpus = config.hw.gpus * config.hw.nodes
    return not gpus or prefill + decode <= gpus


def _handoffs(trial: Trial, options: Options, crossed: tuple[str, ...]) -> None:
    """Compare handoffs by themselves."""
    names = ("tokens", "placement", "repeat", "warmup", "deadline")
    shared: dict[str, Any] = {name: getattr(options, name) for name in names} | {"tp": crossed}
    sliced, staged = (
        as_rows(trial.run(path, "handoff", paths=(path,), **shared), "Handoffs") for path in ("sliced", "staged")
    )
    for before, after in zip(sliced, staged, strict=True):
        at = f"{before['way'].split()[0]} {before['tokens']} tokens"
        trial.add(HANDOFF, at, before["p50"], after["p50"])
        trial.add(DESCRIPTORS, at, before["descriptors"], after["descriptors"])


def _prompts(trial: Trial, options: Options, prompts: int) -> None:
    """Compare how *prompts* that arrive at once are served by TP4 and DP4+TP4+EP4."""
    workload = Workload(
        arrivals="poisson",
        count=prompts,
        rate=1e9,  # all within a microsecond
        input_mean=options.prompt_tokens,
        input_cv=0.0,
        output_mean=options.output_tokens,
        output_cv=0.0,
    )
    tokens = options.prompt_tokens + trial.config.kv.page_size
    most = prompts * tokens * kv_shape(trial.config.model).token_bytes(1)  # all of them in one group's ring
    found = []
    for label, staging in (("sliced", False), ("staged", True)):
        kv = replace(trial.config.kv, staging=staging, staging_ring=min(trial.config.kv.staging_ring, most))
        own = replace(trial.config, parallel=PARALLEL, workload=workload, kv=kv)
        result = trial.run(f"{label} {prompts} prompts", "serve", own, deadline=options.deadline)
        found.append({metric.name: metric.value for metric in result.summary})
    at = f"{DP} {prompts} prompts"
    for claim, values in zip((TTFT, REQUESTS), _of(found), strict=True):
        trial.add(claim, at, *values)


def _of(found: list[dict[str, Any]]) -> Iterator[list[float | None]]:
    """Yield mean TTFT in ms and requests a second of both variants."""
    yield [None if each["ttft_avg_s"] is None else 1e3 * each["ttft_avg_s"] for each in found]
    yield [each["request_rate"] for each in found]
