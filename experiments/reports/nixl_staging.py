# SPDX-License-Identifier: Apache-2.0
"""Does a staged path speed up NIXL between prefill and decode of unlike TP?  SGLang PR 22536.

Before, a rank writes what the other side keeps of each token and layer as a descriptor of its own
(sliced); after, it gathers a chunk, writes it in one piece, and the other side scatters it
(staged).  First handoffs by themselves, TP against TP; then prompts that arrive at once at prefill
of TP 4 and decode of DP4+TP4+EP4, where each group holds all heads; EP 4 where the model has
experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from experiments.reports import prompt_bursts as shared
from experiments.reports.claims import Claim, ReportRun, as_rows
from pdsim.compute.roofline import kv_shape
from pdsim.config import Config
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress
from pdsim.core.units import NotNegativeInt, PositiveInt, Seconds
from pdsim.models.parallel import Parallel, Side
from pdsim.results.record import Result
from pdsim.transfer.job import Target

__all__ = ["CLAIMS", "NixlStagingOptions", "run"]

HANDOFF = Claim("handoff", "a handoff between unlike TP takes less time when staged", "us")
DESCRIPTORS = Claim(
    "descriptors", "it takes a thousandth of the descriptors (PR 19890)", "descriptors", bound=1000.0
)
TTFT = Claim("ttft", "TP4 to DP4+TP4+EP4: the mean TTFT of prompts that arrive at once falls", "ms")
REQUESTS = Claim("throughput", "TP4 to DP4+TP4+EP4: more requests are done", "1/s", better="more")
CLAIMS = (HANDOFF, DESCRIPTORS, TTFT, REQUESTS)

DP = "4toDP4"
"""How points of TP4 to DP4+TP4+EP4 are named: four decode groups of attention TP 1."""


def _parallel(config: Config) -> Parallel:
    return Parallel(prefill=Side(tp=4), decode=Side(tp=4, dp=4, ep=4 if config.model.experts else 1))


@dataclass(frozen=True, kw_only=True)
class NixlStagingOptions(shared.PromptBurstOptions):
    """What is handed over; the rules for its keys are those of `experiments.handoff`, and sides must differ."""

    name: str = "seed_nixl_staging"
    tp: tuple[str, ...] = (  # what needs more GPUs than there are is left out
        "1to2",
        "1to4",
        "1to8",
        "2to1",
        "2to4",
        "2to8",
        "4to1",
        "4to2",
        "4to8",
        "8to1",
        "8to2",
        "8to4",
    )
    tokens: tuple[PositiveInt, ...] = (512, 8192)  # of a handoff
    prompts: tuple[PositiveInt, ...] = (1, 8, 64, 512)  # that arrive at once, as the report's benchmark counts them
    descriptor: Seconds = 1.05e-6  # across nodes: NIXL prepared none when the report was written; 0 is the backend's
    depth: NotNegativeInt = 0  # descriptors outstanding to a peer across nodes, more wait; 0: no limit (UCX: 256)

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in self.tp:
            if len(set(_sides(text))) == 1:
                raise ValueError(f"experiment.tp must be of pairs of unlike sides such as 4to1, got {text!r}")


def run(config: Config, target: Target, progress: ShowProgress) -> Result:
    """Hand over and serve in slices, then staged, and return what became of `CLAIMS`.

    What needs more GPUs than there are is left out, and a note says so.  Raise a `ConfigError` if nothing is left.
    """
    options = NixlStagingOptions.of(config)
    if config.target == "model" and (inter := config.backend.inter) is not None:
        inter = replace(
            inter, descriptor=max(options.descriptor, inter.descriptor), depth=options.depth or inter.depth
        )
        config = replace(config, backend=replace(config.backend, inter=inter))
        target = target.using(config.backend)
    crossed = tuple(tp for tp in options.tp if options.placement == "sides" or _fits(config, *_sides(tp)))
    served = options.prompts if _fits(config, 4, 4) else ()
    if not crossed and not served:
        raise ConfigError(f"hw={config.hw.name} has too few GPUs for any of it; set experiment.placement=sides")
    trial = ReportRun(config, target, progress, 2 * bool(crossed) + 2 * len(served))
    left = [tp for tp in options.tp if tp not in crossed] + [DP] * (len(served) < len(options.prompts))
    trial.notes += [f"hw={config.hw.name} has too few GPUs for {', '.join(left)}, left out"] if left else []
    if crossed:
        _handoffs(trial, replace(options, tp=crossed))
    for count in served:
        _prompts(trial, options, count)
    return trial.result(CLAIMS)


def _sides(tp: str) -> tuple[int, int]:
    prefill, decode = map(int, tp.split("to"))
    return prefill, decode


def _fits(config: Config, prefill: int, decode: int) -> bool:
    gpus = config.hw.gpus * config.hw.nodes
    return not gpus or prefill + decode <= gpus


def _handoffs(trial: ReportRun, options: NixlStagingOptions) -> None:
    sliced, staged = (as_rows(trial.run(path, options.handoff(path)), "Handoffs") for path in ("sliced", "staged"))
    for before, after in zip(sliced, staged, strict=True):
        at = f"{before['way'].split()[0]} {before['tokens']} tokens"
        trial.add(HANDOFF, at, before["p50"], after["p50"])
        trial.add(DESCRIPTORS, at, before["descriptors"], after["descriptors"])


def _prompts(trial: ReportRun, options: NixlStagingOptions, count: int) -> None:
    tokens = options.prompt_tokens + trial.config.kv.page_size
    most = count * tokens * kv_shape(trial.config.model).token_bytes(1)  # all of them in one group's ring
    kv = replace(trial.config.kv, staging_ring=min(trial.config.kv.staging_ring, most))
    own = replace(trial.config, parallel=_parallel(trial.config))
    variants = {
        name: replace(own, kv=replace(kv, staging=staging))
        for name, staging in (("sliced", False), ("staged", True))
    }
    shared.prompts(trial, options, (TTFT, REQUESTS), DP, count, variants)
