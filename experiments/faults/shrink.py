# SPDX-License-Identifier: Apache-2.0
"""Take away from a scenario that fails what it does not need to fail.

Kinds of faults first, then requests from the end.  Since each part of a scenario is drawn from a
stream of its own, what is left stays what it was; a scenario is tried again for each step.
"""

from __future__ import annotations

import traceback
from typing import NamedTuple

from experiments.faults.kinds import KINDS
from experiments.faults.scenario import Tried, attempt, draw
from pdsim.verify.invariants import Violation

__all__ = ["CRASH", "FaultTrial", "shrunk"]

CRASH = "crash"
"""Stands for an invariant where a scenario did not run to its end."""


class FaultTrial(NamedTuple):
    """Which scenario, and how much of it; with `command` anybody can try it again.

    Attributes:
        seed: Of the scenario.
        requests: How many.
        intensity: How probable each kind of fault is, as `experiments.faults.scenario.draw` takes
            it.
        without: Kinds of faults that are left out.
    """

    seed: int
    requests: int = 50
    intensity: float = 0.4
    without: frozenset[str] = frozenset()

    def run(self) -> Tried:
        """Run it.

        An exception of the model itself, rather than of one of its ranks, is a violation too:
        `CRASH`.
        """
        try:
            return attempt(draw(self.seed, self.requests, self.intensity, self.without))
        except Exception as error:  # a campaign goes on
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error}, in {where.name}, line {where.lineno}"
            return Tried(self.seed, [Violation(CRASH, 0.0, what)], {}, 0, "")

    def command(self) -> str:
        """Return what replays it."""
        left_out = f" 'experiment.without=[{','.join(sorted(self.without))}]'" if self.without else ""
        return (
            f"python -m pdsim run experiment=faults experiment.seed={self.seed} experiment.requests={self.requests} "
            f"experiment.intensity={self.intensity:g}{left_out}"
        )


def shrunk(trial: FaultTrial, invariant: str) -> tuple[FaultTrial, Violation]:
    """Return the smallest scenario like *trial* that still violates *invariant*, and the violation.

    Kinds of faults are left out one by one, then requests by halves, quarters and so on, as long as
    the invariant stays violated.  Raise a `ValueError` if *trial* does not violate it.
    """
    violation = _violation(trial, invariant)
    if violation is None:
        raise ValueError(f"{trial} does not violate {invariant}")
    for kind in KINDS:
        trial, violation = _smaller(trial, trial._replace(without=trial.without | {kind}), invariant, violation)
    step = trial.requests // 2
    while step:
        before = trial
        trial, violation = _smaller(trial, trial._replace(requests=trial.requests - step), invariant, violation)
        if trial is before or step >= trial.requests:
            step //= 2
    return trial, violation


def _smaller(
    trial: FaultTrial, other: FaultTrial, invariant: str, smallest: Violation
) -> tuple[FaultTrial, Violation]:
    violation = _violation(other, invariant) if other.requests > 0 else None
    return (trial, smallest) if violation is None else (other, violation)


def _violation(trial: FaultTrial, invariant: str) -> Violation | None:
    return next((each for each in trial.run().violations if each.invariant == invariant), None)
