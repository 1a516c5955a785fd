# SPDX-License-Identifier: Apache-2.0
"""Does a staged path speed up NIXL between prefill and decode of unlike TP?  SGLang PR 22536.

Before, a rank writes each token and layer of the other side's heads as a descriptor of its own (sliced); after, it
gathers a chunk, writes it in one piece, and the other side scatters it (staged).  First handoffs by themselves; then
prompts that arrive at once at prefill of TP 4 and decode of DP4+TP4, with experts and modelled GPUs of DP4+TP4+EP4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from experiments.handoff import sides
from experiments.reports.claims import Claim, PromptBurstOptions, ReportRun, burst
from experiments.reports.figures import UNPREPARED
from pdsim.compute.roofline import kv_shape
from pdsim.config import Config
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress
from pdsim.core.units import NotNegativeInt, PositiveInt, Seconds
from pdsim.models.llm import Llm, Parallel, Side
from pdsim.results.record import Result
from pdsim.transfer.job import Target

HANDOFF = Claim("handoff", "a handoff between unlike TP takes less time when staged", "us")
DESCRIPTORS = Claim(
    "descriptors", "it takes a thousandth of the descriptors (PR 19890)", "descriptors", bound=1000.0
)
TTFT = Claim("ttft", "TP4 to DP4+TP4+EP4: the mean TTFT of prompts that arrive at once falls", "ms")
REQUESTS = Claim("throughput", "TP4 to DP4+TP4+EP4: more requests are done", "1/s", better="more")
CLAIMS = (HANDOFF, DESCRIPTORS, TTFT, REQUESTS)


def unlike(text: object) -> str:
    """Return *text*, as `sides`, if these differ; raise a `ValueError` otherwise."""
    if len(set(sides(text).split("to"))) == 1:
        raise ValueError(f"{text!r} has equal sides; write unlike ones such as 4to1")
    return str(text)


@dataclass(frozen=True, kw_only=True)
class NixlStagingOptions(PromptBurstOptions):
    """Which KV is transferred between sides that differ."""

    name: str = "seed_nixl_staging"
    tp: Annotated[
        tuple[Annotated[str, unlike], ...], "non-empty"
    ] = (  # what needs more GPUs than there are is left out
        *("1to2", "1to4", "1to8", "2to1", "2to4", "2to8"),
        *("4to1", "4to2", "4to8", "8to1", "8to2", "8to4"),
    )
    tokens: Annotated[tuple[PositiveInt, ...], "non-empty"] = (512, 8192)  # of a handoff
    prompts: tuple[PositiveInt, ...] = (1, 8, 64, 512)  # that arrive at once, as the report's benchmark counts them
    experts: Llm  # that prompts are served with at EP 4, on modelled GPUs
    descriptor: Seconds = UNPREPARED  # across nodes, as NIXL prepared none then; 0: as the backend
    depth: NotNegativeInt = 0  # descriptors outstanding to a peer across nodes, more wait; 0: no limit (UCX: 256)


def run(config: Config, target: Target, progress: ShowProgress) -> Result:
    """Run handoffs and serving in slices, then staged, and return the verdicts of `CLAIMS`.

    What needs more GPUs than there are is left out, and a note says so.  Raise a `ConfigError` if nothing is left.
    """
    options, gpus = NixlStagingOptions.of(config), config.hw.gpus * config.hw.nodes
    if config.target == "model" and (inter := config.backend.inter) is not None:
        descriptor, depth = max(options.descriptor, inter.descriptor), options.depth or inter.depth
        inter = replace(inter, descriptor=descriptor, depth=depth)
        config = replace(config, backend=replace(config.backend, inter=inter))
        target = target.using(config.backend)
    fits = {tp: not gpus or sum(map(int, tp.split("to"))) <= gpus for tp in (*options.tp, "4to4")}
    crossed = tuple(tp for tp in options.tp if options.placement == "sides" or fits[tp])
    served = options.prompts if fits["4to4"] else ()
    models = {"4toDP4": config.model}
    if gpus and config.target == "model":
        models["4toDP4EP4"] = options.experts
    if not crossed and not served:
        raise ConfigError(f"hw={config.hw.name} has too few GPUs for any of it; set experiment.placement=sides")
    trial = ReportRun(config, target, progress, 2 * bool(crossed) + 2 * len(served) * len(models))
    left = [tp for tp in options.tp if tp not in crossed] + ["4toDP4"] * (served != options.prompts)
    trial.notes += [f"hw={config.hw.name} has too few GPUs for {', '.join(left)}, left out"] if left else []
    if crossed:
        _handoffs(trial, replace(options, tp=crossed))
    for name, model in models.items():
        for count in served:
            _prompts(trial, options, name, model, count)
    return trial.result(CLAIMS)


def _handoffs(trial: ReportRun, options: NixlStagingOptions) -> None:
    sliced, staged = (trial.run(path, options.handoff(path)).rows("Handoffs") for path in ("sliced", "staged"))
    for before, after in zip(sliced, staged, strict=True):
        at = f"{before['way'].split()[0]} {before['tokens']} tokens"
        trial.add(HANDOFF, at, before["p50"], after["p50"])
        trial.add(DESCRIPTORS, at, before["descriptors"], after["descriptors"])


def _prompts(trial: ReportRun, options: NixlStagingOptions, name: str, model: Llm, count: int) -> None:
    kv = trial.config.kv
    most = count * (options.prompt_tokens + kv.page_size) * kv_shape(model).token_bytes(1)  # all in one group's ring
    own = replace(
        trial.config,
        model=model,
        parallel=Parallel(prefill=Side(tp=4), decode=Side(tp=4, dp=4, ep=4 if model.experts else 1)),
        workload=burst(count, options.prompt_tokens, options.output_tokens),
    )
    variants = [
        (
            f"{path} {name} {count} prompts",
            replace(own, kv=replace(kv, staging=staging, staging_ring=min(kv.staging_ring, most))),
        )
        for path, staging in (("sliced", False), ("staged", True))
    ]
    trial.serve((TTFT, REQUESTS), ("ttft_avg_s", "request_rate"), f"{name} {count} prompts", variants)
