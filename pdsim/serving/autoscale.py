# SPDX-License-Identifier: Apache-2.0
"""How many instances of each side serve, decided while requests arrive, and what that takes in GPU-hours.

A policy is a function, registered in the entry-point group ``pdsim.autoscalers`` and chosen by
``autoscale.policy``.  It gets a `FleetView`, and `autoscale.options` as keywords.  It returns how many prefill and
how many decode instances to run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import Annotated, Any, NamedTuple, cast

from pdsim.core import plugins
from pdsim.core.units import NotNegativeInt, PositiveInt, Seconds


@dataclass(frozen=True, kw_only=True)
class Autoscale:
    """How many instances serve while requests arrive; at most those of ``parallel``, which all do at first."""

    # a function of the entry-point group pdsim.autoscalers; none: all instances, always
    policy: str = "none"
    options: Mapping[str, Any] = field(default_factory=dict)  # of that function
    every: Annotated[Seconds, "> 0"] = 180.0  # between two decisions (Dynamo's default)
    # between two looks, whose mean a decision is based on (Dynamo's default)
    sample: Annotated[Seconds, "> 0"] = 10.0
    start: Seconds = 120.0  # assumed: from the decision until an instance serves: weights, graphs, warm-up
    least: PositiveInt = 1  # instances of each side
    # that run at most, of both sides, those that drain or start too (Dynamo's max_gpu_budget); an instance may then
    # start on GPUs that one of the other side has left, a role switch; 0: all
    gpus: NotNegativeInt = 0
    # assumed: in place of start for such an instance, whose weights are loaded: new graphs, registration
    switch: Seconds = 30.0


class FleetView(NamedTuple):
    """What a policy knows: loads are means since the last decision, one for each instance that serves."""

    time: float  # seconds from the start of the workload
    prefill: Sequence[float]  # requests that wait at each, without the one that is computed
    decode: Sequence[float]  # tokens of its requests, outputs included, over those that its pages hold
    starting: tuple[int, int] = (0, 0)  # instances of prefill and of decode that do not serve yet


Policy = Callable[..., tuple[int, int]]


def policy_of(name: str) -> Policy:
    """Return the policy called *name*.  Raise a `ConfigError` if there is none."""
    return cast("Policy", plugins.resolve(plugins.AUTOSCALERS, name))


def within(wanted: tuple[int, int], least: int, each: tuple[int, int], gpus: int) -> tuple[int, int]:
    """Return how many instances to run of those *wanted*, so that all of *each* so many GPUs take at most *gpus*.

    Both sides lose in proportion, as in Dynamo's planner, but keep *least*; 0 GPUs are no limit.

    >>> within((4, 4), 1, (2, 2), 8), within((1, 7), 1, (2, 2), 8), within((1, 2), 1, (2, 2), 8)
    ((2, 2), (1, 3), (1, 2))
    """
    prefill, decode = (max(number, least) for number in wanted)
    if gpus and (total := prefill * each[0] + decode * each[1]) > gpus:
        prefill = min(max(least, round(prefill * gpus / total)), (gpus - least * each[1]) // each[0])
        decode = min(decode, (gpus - prefill * each[0]) // each[1])
    return prefill, decode


def schedule(view: FleetView, *, steps: Sequence[Sequence[float]], day: float = 86400.0) -> tuple[int, int]:
    """Run what the last of *steps* says: seconds from the start of a *day*, prefill and decode instances."""
    past = [step for step in steps if step[0] <= view.time % day] or [steps[-1]]
    return int(past[-1][1]), int(past[-1][2])


def thresholds(
    view: FleetView, *, queue_up: float = 5.0, queue_down: float = 0.2, kv_up: float = 0.9, kv_down: float = 0.5
) -> tuple[int, int]:
    """Run one instance more above a mean load, one fewer below another, none while one starts.

    Defaults are those of the load-based planner of NVIDIA Dynamo 0.8; its forecast of the queue is left out.
    """

    def step(loads: Sequence[float], starting: int, up: float, down: float) -> int:
        mean = fsum(loads) / len(loads) if loads else 0.0
        return len(loads) + starting + (0 if starting else (mean > up) - (mean < down))

    return (
        step(view.prefill, view.starting[0], queue_up, queue_down),
        step(view.decode, view.starting[1], kv_up, kv_down),
    )


def saturation(
    view: FleetView, *, queue: float = 5.0, queue_spare: float = 3.0, kv: float = 0.8, kv_spare: float = 0.1
) -> tuple[int, int]:
    """Run one instance more if the mean spare load is too little, one fewer if it would suffice for the others.

    Spare is what instances below the limits *queue* and *kv* lack to them.  Rule and defaults are those of llm-d's
    Workload Variant Autoscaler; it takes maxima of a minute where `FleetView` has means.
    """

    def step(loads: Sequence[float], starting: int, limit: float, spare: float) -> int:
        able = [load for load in loads if load < limit]
        if starting or not loads:
            return len(loads) + starting
        if not able or limit - fsum(able) / len(able) < spare:
            return len(loads) + 1
        return len(loads) - (len(able) > 1 and limit - fsum(able) / (len(able) - 1) >= spare)

    return (
        step(view.prefill, view.starting[0], queue, queue_spare),
        step(view.decode, view.starting[1], kv, kv_spare),
    )
