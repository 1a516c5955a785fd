# SPDX-License-Identifier: Apache-2.0
"""The requests and faults of one job, drawn from its seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from pdsim.hardware.machine import LinkChange
from pdsim.serving.deployment import ROUTER, instance_of
from pdsim.serving.workload import Request

__all__ = ["DEADLINE", "KINDS", "TIMEOUT", "Plan", "draw"]

DEADLINE = 3.0
"""Seconds of silence after which a rank counts as gone."""

TIMEOUT = 4.0
"""Seconds that a transfer may take."""

KINDS = ("SIGKILL", "restart", "SIGSTOP", "SIGCONT", "link cut", "link stalled")
"""Kinds of faults."""

_FIRST, _LAST = 0.6, 4.5
"""Seconds after the start between which faults begin; requests arrive all the while."""

_SHAPES = ((1, 1), (2, 1), (1, 2), (2, 2), (2, 2))
"""Instances of prefill and of decode."""


@dataclass
class Plan:
    """One job: *prefill* and *decode* instances of one rank each, on *link* or on loopback, and its faults.

    Times are seconds after the start.  *pause* has the times of SIGSTOP and SIGCONT.
    """

    seed: int
    engine: str
    handoff: str
    link: bool
    prefill: int
    decode: int
    requests: list[Request]
    kill: dict[str, float] = field(default_factory=dict)
    restart: dict[str, float] = field(default_factory=dict)
    pause: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    changes: list[LinkChange] = field(default_factory=list)

    @property
    def ranks(self) -> list[str]:
        """The engines' ranks, without the router."""
        return [f"prefill{n}.0" for n in range(self.prefill)] + [f"decode{n}.0" for n in range(self.decode)]

    def injected(self, until: float = float("inf")) -> Counter[str]:
        """Count the faults of each of `KINDS` before the time *until*, at which the job may have ended."""
        moments = [("SIGKILL", at) for at in self.kill.values()] + [("restart", at) for at in self.restart.values()]
        for start, end in (span for times in self.pause.values() for span in times):
            moments += [("SIGSTOP", start), ("SIGCONT", end)]
        moments += [({"cut": "link cut", "stall": "link stalled"}[each.kind], each.start) for each in self.changes]
        return Counter(kind for kind, at in moments if at <= until)

    @property
    def expected(self) -> list[str]:
        """The instances that must serve at the end: those that live, or were started again after all else."""
        given_up = [name for name, times in self.pause.items() if max(b - a for a, b in times) >= DEADLINE]
        lost = {name for name in (*self.kill, *given_up) if name not in self.restart}
        return [instance_of(name) for name in self.ranks if name not in lost]

    @property
    def calm(self) -> float:
        """When the last fault is over."""
        ends = [*self.kill.values(), *self.restart.values(), *(change.end for change in self.changes)]
        return max([0.0, *ends, *(end for times in self.pause.values() for _, end in times)])


def draw(seed: int) -> Plan:
    """Return the job of *seed*."""
    chance = np.random.default_rng([18, seed])
    link = bool(chance.random() < 0.25)
    prefill, decode = (1, 1) if link else _SHAPES[chance.integers(len(_SHAPES))]
    plan = Plan(
        seed=seed,
        engine=("mooncake_tcp", "nixl_tcp")[seed % 2],
        handoff="pull" if chance.random() < 0.25 else "push",
        link=link,
        prefill=prefill,
        decode=decode,
        requests=_requests(chance, link),
    )
    if link:
        _disturb_link(plan, chance)
    _disturb_ranks(plan, chance)
    return plan


def _requests(chance: np.random.Generator, link: bool) -> list[Request]:
    low, high = (64, 256) if link else (64, 640)
    arrivals = np.arange(0.2, _LAST + 2.5, 0.2)
    return [Request(float(at), int(chance.integers(low, high)), int(chance.integers(1, 6))) for at in arrivals]


def _disturb_link(plan: Plan, chance: np.random.Generator) -> None:
    at = _FIRST
    for _ in range(int(chance.integers(1, 4))):
        at += float(chance.uniform(0.1, 1.2))
        length = float(chance.choice([chance.uniform(0.05, 0.6), chance.uniform(0.6, 2.0)]))
        plan.changes.append(LinkChange(kind=str(chance.choice(["cut", "stall"])), start=at, end=at + length))
        at += length


def _disturb_ranks(plan: Plan, chance: np.random.Generator) -> None:
    ranks = plan.ranks
    if chance.random() < 0.25:
        together = (
            ranks if chance.random() < 0.5 else [name for name in ranks if name[0] == chance.choice(["p", "d"])]
        )
        at, pause = float(chance.uniform(_FIRST, _LAST)), float(chance.uniform(0.2, 1.2))
        plan.kill |= dict.fromkeys(together, at)
        plan.restart |= dict.fromkeys(together, at + pause)
        ranks = [name for name in ranks if name not in together]
    for name in ranks:
        fate = chance.choice(["none", "kill", "restart", "stops", "long stop"], p=[0.1, 0.15, 0.3, 0.3, 0.15])
        _disturb(plan, name, str(fate), chance)
    fate = chance.random()
    if fate < 0.03:
        plan.kill[ROUTER] = float(chance.uniform(_FIRST, _LAST))
    elif fate < 0.15:
        at = float(chance.uniform(_FIRST, _LAST))
        plan.pause[ROUTER] = [(at, at + float(chance.uniform(0.05, 0.8)))]


def _disturb(plan: Plan, name: str, fate: str, chance: np.random.Generator) -> None:
    at = float(chance.uniform(_FIRST, _LAST))
    if fate in ("kill", "restart"):
        plan.kill[name] = at
    if fate == "restart":
        plan.restart[name] = at + float(chance.uniform(0.1, 1.5))
    if fate == "stops":
        middle = (_FIRST + _LAST) / 2
        starts = [float(chance.uniform(_FIRST, middle - 0.8)), float(chance.uniform(middle, _LAST))]
        plan.pause[name] = [(start, start + float(chance.uniform(0.02, 0.8))) for start in starts]
    if fate == "long stop":  # its peers give it up meanwhile
        end = at + DEADLINE * float(chance.uniform(1.2, 1.6))
        plan.pause[name] = [(at, end)]
        if chance.random() < 0.5:
            plan.restart[name] = end + 1.0
