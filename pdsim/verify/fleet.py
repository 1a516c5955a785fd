# SPDX-License-Identifier: Apache-2.0
"""Whether instances start, drain and rest as autoscaling may have it: a part of `pdsim.verify.invariants`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from typing import Any

from pdsim.kv.messages import instance_of
from pdsim.serving.router import Router

_ROUNDING = 1e-9
"""Seconds by which two sums of the same times may differ."""


_STEP = 1e-6
"""Seconds by which a decision may be late: the clock's steps, added up."""


class FleetChecker:
    """Calls *report* with an invariant (I13, I14 or I15) and a text for what starts, rests or counts wrongly."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._router: Any = None
        self._loads: dict[str, float] = {}  # by instance, since the last decision: those of all looks
        self._looked = 0
        self._decided = -inf  # when
        self._due: dict[str, float] = {}  # by instance that starts: when it serves, in seconds from the start

    def joined(self, member: Any) -> None:
        """Watch *member*, a rank's program."""
        if not isinstance(member, Router) or member.autoscaler is None:
            return
        self._router, fleet = member, member.autoscaler.fleet
        scaler: Any = member.autoscaler
        scaler._look = partial(self._looks, scaler._look)
        scaler._policy = partial(self._decides, fleet, scaler._policy)
        watched: Any = fleet
        watched.scale = partial(self._scales, fleet, fleet.scale)
        watched.serve = partial(self._serves, fleet, fleet.serve)
        watched.rest = partial(self._rests, fleet, fleet.rest)

    def _looks(self, look: Callable[[], None]) -> None:
        registry, job, rooms = self._router.registry, self._router.job, self._router._rooms.values()
        loads = {name: tokens / (job.decode_pages * job.page_size) for name, tokens in registry.decodes.load.items()}
        for name in registry.prefills.load:
            waiting = sum(instance_of(each.prefill) == name for each in rooms if not each.prefilled)
            loads[name] = max(0, waiting - 1)  # one is computed
        self._loads = {name: self._loads.get(name, 0.0) + load for name, load in loads.items()}  # of those that live
        self._looked += 1
        look()

    def _decides(self, fleet: Any, policy: Callable[..., Any], view: Any, **options: Any) -> Any:
        registry, seconds = self._router.registry, view.time - self._decided
        for side, names, seen in zip((registry.prefills, registry.decodes), fleet.sides, view[1:3], strict=True):
            serving = [name for name in names if name in side.load.keys() - fleet.resting]
            own = [self._loads.get(name, 0.0) / max(1, self._looked) for name in serving]
            differ = (abs(one - other) > _ROUNDING for one, other in zip(own, seen, strict=False))
            if len(own) != len(seen) or any(differ):
                self._report("I14", f"loads of {serving} count as {seen}, and are {own}")
        if abs(seconds - self._router.job.autoscale.every) > _STEP and seconds < inf:
            self._report("I15", f"autoscaling decides after {seconds:g} s")
        self._loads, self._looked, self._decided = {}, 0, view.time
        return policy(view, **options)

    def _scales(
        self,
        fleet: Any,
        scale: Callable[..., list[str]],
        wanted: tuple[int, int],
        least: int,
        load: Mapping[str, float],
        now: float,
        how: str = "starting",
    ) -> list[str]:
        job, before = self._router.job, {*fleet.draining}
        begun = scale(wanted, least, load, now, how)
        seconds = job.autoscale.switch if how == "switching" else job.autoscale.start
        self._due |= dict.fromkeys(begun, now + seconds)
        sizes = job.prefill.size, job.decode.size
        on = [sum(self._is_on(fleet, name) for name in names) for names in fleet.sides]
        if begun and 0 < job.autoscale.gpus < on[0] * sizes[0] + on[1] * sizes[1]:
            self._report("I15", f"{begun} start, and {on} instances of {sizes} GPUs run, of {job.autoscale.gpus}")
        for names, number in zip(fleet.sides, wanted, strict=True):
            serving = [name for name in names if name in load and name not in fleet.resting]
            drained = [name for name in names if name in {*fleet.draining} - before]
            if any(load[one] > load[other] for one in drained for other in serving):
                self._report("I13", f"{drained} drain, and {serving} are less busy: {load}")
            if before & {*fleet.draining} & {*names} & load.keys() and {*begun} & {*names}:
                self._report("I13", f"{begun} start, and {fleet.draining} still drain")
            running, number = len(serving) + sum(name in fleet.starting for name in names), max(number, least)
            if (running > number and len(serving) > least) or (
                drained and (running < number or len(serving) < least)
            ):
                self._report("I13", f"{serving} of {names} serve, {running} run, {number} should, at least {least}")
        return begun

    def _is_on(self, fleet: Any, name: str) -> bool:
        return name not in fleet.resting or name in fleet.draining or name in fleet.starting

    def _serves(self, fleet: Any, serve: Callable[[str, float], None], name: str, now: float) -> None:
        due = self._due.pop(name, now)
        if abs(now - due) > _ROUNDING:
            self._report("I15", f"{name} serves at {now:g} s, and should at {due:g} s")
        serve(name, now)
        if name in fleet.resting or name in fleet.starting or name in fleet.draining:
            self._report("I13", f"{name} serves, and gets no requests")

    def _rests(self, fleet: Any, rest: Callable[..., bool], busy: Callable[[str], bool], now: float) -> bool:
        before = {*fleet.draining}
        rested = rest(busy, now)
        for name in before - {*fleet.draining}:
            for number, request in self._router._rooms.items():
                if name == instance_of(request.decode) or (
                    name == instance_of(request.prefill) and not request.prefilled
                ):
                    self._report("I13", f"{name} is off, and has room {number}")
        return rested
