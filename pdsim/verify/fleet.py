# SPDX-License-Identifier: Apache-2.0
"""Whether instances start, drain and rest as autoscaling may have it: a part of `pdsim.verify.invariants`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pdsim.kv.messages import instance_of
from pdsim.serving.router import Router

_ROUNDING = 1e-9
"""Seconds by which two sums of the same times may differ."""


class FleetChecker:
    """Calls *report* with an invariant (I8, I13 or I15) and a text for an instance that starts or rests wrongly."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._router: Any = None
        self._due: dict[str, float] = {}  # by instance that starts: when it serves, in seconds from the start

    def joined(self, member: Any) -> None:
        """Watch *member*, a rank's program."""
        if not isinstance(member, Router) or member.autoscaler is None:
            return
        self._router, fleet = member, member.autoscaler.fleet
        watched: Any = fleet
        watched.scale = partial(self._scales, fleet, fleet.scale)
        watched.serve = partial(self._serves, fleet, fleet.serve)
        watched.rest = partial(self._rests, fleet, fleet.rest)

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
