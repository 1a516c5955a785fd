# SPDX-License-Identifier: Apache-2.0
"""When nodes, GPUs, network cards and routers fail, drawn from a seed, and which ranks end by that and start again.

Failures of one kind are a Poisson process over the whole deployment: each takes any node, or any GPU, that has a
rank, or any card of such a node.  An engine ends as a whole, as those of vLLM and SGLang do, and all its ranks start
again after the repair.  By a card no rank ends: its transfers fail, or go on over another (`Engine.failover`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from pdsim.core.units import Seconds
from pdsim.kv.messages import instance_of
from pdsim.serving.requests import stream
from pdsim.transfer.job import RankSpec

__all__ = ["Failure", "FailureRate", "Failures", "drawn", "kills", "recoveries"]


@dataclass(frozen=True, kw_only=True)
class FailureRate:
    """How often something fails, and for how long."""

    every: Seconds = 0.0  # mean time between two such failures in the whole deployment, exponential; 0: never
    repair: Annotated[Seconds, "> 0"] = 600.0  # from a failure until what it ended runs again, weights loaded


@dataclass(frozen=True, kw_only=True)
class Failures:
    """What fails while requests are served."""

    node: FailureRate = field(default_factory=FailureRate)  # all engines with a rank on it
    gpu: FailureRate = field(default_factory=FailureRate)  # the engine with a rank on it
    router: FailureRate = field(default_factory=FailureRate)  # what is under way, and what arrives meanwhile
    nic: FailureRate = field(default_factory=FailureRate)  # transfers over it, until it is repaired


class Failure(NamedTuple):
    """What fails *at* a time and works again *until* the end of its repair, both in seconds from the start."""

    at: float
    until: float
    what: str  # "node 1", "GPU 3 of node 0", "NIC 3 of node 0" or "router"
    ranks: tuple[str, ...] = ()  # that end by it
    card: tuple[int, int] | None = None  # that fails: node and number

    @property
    def instances(self) -> tuple[str, ...]:
        """The instances that end by it."""
        return tuple(dict.fromkeys(map(instance_of, self.ranks)))


def drawn(
    failures: Failures,
    ranks: Sequence[RankSpec],
    engine: Callable[[str], str],
    seed: int,
    end: float,
    cards: Sequence[int] = (),
) -> list[Failure]:
    """Return the failures before *end*, in order, of *ranks*, which are those of instances.

    *engine* names the engine of a rank; each node has the *cards*.  Each kind has a stream of its own, so one
    changes nothing in another.
    """
    places: dict[str, dict[str, set[str]]] = {"node": {}, "gpu": {}, "router": {"router": set()}}
    nodes = dict.fromkeys(spec.place.node for spec in ranks)
    nics = {f"NIC {card} of node {node}": (node, card) for node in nodes for card in cards}
    places["nic"] = {name: set() for name in nics}
    for spec in ranks:
        where = {"node": f"node {spec.place.node}", "gpu": f"GPU {spec.place.gpu or 0} of node {spec.place.node}"}
        for kind, name in where.items():
            places[kind].setdefault(name, set()).add(engine(spec.name))
    outages = []
    for kind, names in places.items():
        rate, random = getattr(failures, kind), stream(seed, f"failures.{kind}")
        at = random.exponential(rate.every) if rate.every else end
        while at < end:
            what = list(names)[int(random.integers(len(names)))]
            lost = tuple(spec.name for spec in ranks if engine(spec.name) in names[what])
            outages.append(Failure(at, at + rate.repair, what, lost, nics.get(what)))
            at += random.exponential(rate.every)
    return sorted(outages)


def kills(failures: Sequence[Failure]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return when each rank ends by *failures* and when it starts again, as `pdsim.sim.model.Model.run` takes it.

    A rank that fails again within its repair starts after the last.
    """
    kill: dict[str, list[float]] = {}
    restart: dict[str, list[float]] = {}
    for failure in failures:
        for name in failure.ranks:
            ends = restart.setdefault(name, [])
            if ends and failure.at <= ends[-1]:
                ends[-1] = max(ends[-1], failure.until)
            else:
                kill.setdefault(name, []).append(failure.at)
                ends.append(failure.until)
    return kill, restart


def recoveries(
    failures: Sequence[Failure], changes: Sequence[tuple[float, str, str]], notice: float = 0.0, detours: int = 0
) -> list[tuple[float | None, float | None]]:
    """Return for each of *failures* the seconds until the router notices, and until all that it ended serves again.

    A card is noticed by the engine, after *notice* seconds.  Then transfers go on over others of its node, if fewer
    than *detours* of those have failed, or they succeed again when it is repaired.  *changes* are those of
    `pdsim.serving.membership.Membership`.  None is for what does not happen before the end.
    """
    times: list[tuple[float | None, float | None]] = []
    for failure in failures:
        if failure.card is not None:
            node = failure.card[0]
            down = {each.card for each in failures if each.at <= failure.at < each.until and each.card}
            others = sum(each[0] == node for each in down if each != failure.card)
            times.append((notice, notice if others < detours else failure.until - failure.at))
            continue
        if not failure.ranks:
            times.append((0.0, failure.until - failure.at))
            continue
        lost = [_first(changes, failure.at, instance, "lost") for instance in failure.instances]
        back = [_first(changes, failure.at, instance, "formed") for instance in failure.instances]
        times.append((_latest(lost, failure.at), _latest(back, failure.at)))
    return times


def _first(changes: Sequence[tuple[float, str, str]], after: float, instance: str, what: str) -> float | None:
    return next((at for at, name, how in changes if at >= after and name == instance and how == what), None)


def _latest(times: Sequence[float | None], start: float) -> float | None:
    known = [at for at in times if at is not None]
    return max(known) - start if len(known) == len(times) else None
