# SPDX-License-Identifier: Apache-2.0
"""What two seeds share: handoffs by themselves, then prompts that arrive at once, before and after a change.

`experiments.reports.nixl_staging` and `experiments.reports.intranode_metadata` extend its options
and call `prompts`; each decides what before and after are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from experiments import handoff, serve
from experiments.reports.claims import Claim, ReportRun, burst, value
from pdsim.config import Config, ExperimentOptions
from pdsim.core.units import NotNegativeInt, PositiveInt, Seconds

__all__ = ["PromptBurstOptions", "prompts"]


@dataclass(frozen=True, kw_only=True)
class PromptBurstOptions(ExperimentOptions):
    """What is handed over and served; a seed says how much of it."""

    tp: tuple[str, ...]  # ranks of prefill, ranks of decode
    tokens: tuple[PositiveInt, ...]  # of a handoff
    # a GPU for each rank; or "sides": prefill shares the first half of them, decode the rest
    placement: Annotated[str, "one of packed, sides"] = "packed"
    repeat: PositiveInt = 3  # measured handoffs of each shape
    warmup: NotNegativeInt = 1  # before them
    prompts: tuple[PositiveInt, ...] = ()  # that arrive at once; () is none
    prompt_tokens: PositiveInt = 1024  # assumed: the reports name no load
    output_tokens: PositiveInt = 128  # assumed likewise
    deadline: Annotated[Seconds, "> 0"] = 60.0  # assumed: of silence, after which a rank counts as gone

    def __post_init__(self) -> None:
        self.handoff()  # whose rules these are
        if not self.tp:
            raise ValueError("experiment.tp must have a value, got none")

    def handoff(self, path: str = "sliced") -> handoff.HandoffOptions:
        """Return the options of `experiments.handoff`; *path* is for ranks that keep other heads."""
        return handoff.HandoffOptions(
            tp=self.tp,
            tokens=self.tokens,
            placement=self.placement,
            repeat=self.repeat,
            warmup=self.warmup,
            deadline=self.deadline,
            paths=(path,),
        )


def prompts(
    trial: ReportRun,
    options: PromptBurstOptions,
    claims: tuple[Claim, Claim],
    tp: str,
    count: int,
    variants: Mapping[str, Config],
) -> None:
    """Serve *count* prompts that arrive at once by both *variants*, and add what became of *claims*.

    Those are of the mean TTFT in ms and of requests a second; *tp* is how the points are named.  Raise what
    `experiments.serve` raises.
    """
    workload = burst(count, options.prompt_tokens, options.output_tokens)
    bursts = [
        trial.run(
            f"{name} {count} prompts", serve.ServeOptions(deadline=options.deadline), replace(own, workload=workload)
        )
        for name, own in variants.items()
    ]
    at, (ttft, requests) = f"{tp} {count} prompts", claims
    times = [value(result, "ttft_avg_s") for result in bursts]
    milliseconds: list[Any] = [None if seconds is None else 1e3 * seconds for seconds in times]
    rates: list[Any] = [value(result, "request_rate") for result in bursts]
    trial.add(ttft, at, *milliseconds)
    trial.add(requests, at, *rates)
