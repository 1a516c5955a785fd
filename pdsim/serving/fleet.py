# SPDX-License-Identifier: Apache-2.0
"""The instances that serve, start and drain while requests arrive, as a policy of `autoscale` decides."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdsim.kv.messages import instance_of
from pdsim.serving.autoscale import FleetView, policy_of, within
from pdsim.serving.membership import InstanceRegistry
from pdsim.serving.rank_process import RankProcess


class Fleet:
    """The instances of *sides* that serve, start, drain or are off.

    Life of an instance: serving ─► draining ─► off ─► starting ─► serving.  One that drains gets no more requests,
    finishes those that it has, and serves again at once if it is needed.  *resting* holds all that do not serve.
    Those that are not off have at most *gpus* GPUs, an instance *each* so many; without *each* there is no limit.
    """

    def __init__(
        self,
        sides: tuple[Sequence[str], Sequence[str]],
        resting: set[str],
        each: tuple[int, int] = (0, 0),
        gpus: int = 0,
    ) -> None:
        self.resting = resting
        self._each = each
        self._gpus = gpus
        self.draining: list[str] = []
        self.starting: list[str] = []
        self.changes: list[tuple[float, str, str]] = []  # seconds, instance, and what it is from then on
        self.sides = sides

    def scale(
        self, wanted: tuple[int, int], least: int, load: Mapping[str, float], now: float, how: str = "starting"
    ) -> list[str]:
        """Start and drain until *wanted* instances of each side run, at least *least*; return those that start.

        *load* has the instances that are there, and how busy each is: the least busy drains first, of equals
        the last, while *least* others serve.  What there are no GPUs for does not start.  *how* goes into `changes`.
        """
        begun = []
        for side, (names, number) in enumerate(zip(self.sides, wanted, strict=True)):
            number = max(number, least)
            serving = [name for name in names if name in load and name not in self.resting]
            off = [name for name in names if name in load and name in self.resting and name not in self.starting]
            off.sort(key=lambda name: name not in self.draining)
            running = len(serving) + sum(name in self.starting for name in names)
            for name in off[: max(0, number - running)]:
                if name in self.draining:
                    self.draining.remove(name)
                    self.serve(name, now)
                elif self._free() >= self._each[side]:
                    self.starting.append(name)
                    begun.append(name)
                    self.changes.append((now, name, how))
            serving.sort(key=lambda name: (load[name], -names.index(name)))
            spare = len(serving) - least  # those that start do not serve yet
            for name in serving[: max(0, min(running - number, spare))]:
                self.resting.add(name)
                self.draining.append(name)
                self.changes.append((now, name, "draining"))
        return begun

    def _free(self) -> int:
        # GPUs of instances that are off, of those that may run.
        off = self.resting.difference(self.draining, self.starting)
        on = [sum(name not in off for name in names) for names in self.sides]
        return self._gpus - on[0] * self._each[0] - on[1] * self._each[1]

    def serve(self, name: str, now: float) -> None:
        """Let *name*, which has started, serve."""
        if name in self.starting:
            self.starting.remove(name)
        self.resting.discard(name)
        self.changes.append((now, name, "serving"))

    def rest(self, busy: Callable[[str], bool], now: float) -> bool:
        """Take off what drains and is not *busy* any more; return whether there was any."""
        idle = [name for name in self.draining if not busy(name)]
        for name in idle:
            self.draining.remove(name)
            self.changes.append((now, name, "off"))
        return bool(idle)


class Autoscaler:
    """Has the policy of *process*, the router, decide, and starts and drains instances of *registry* as it says.

    *rooms* are the `pdsim.serving.router.RoutedRequest` under way.
    """

    def __init__(self, process: RankProcess, registry: InstanceRegistry, rooms: Mapping[int, Any]) -> None:
        job = process.job
        sides, each = (registry.prefills.names, registry.decodes.names), (job.prefill.size, job.decode.size)
        gpus = job.autoscale.gpus
        self.fleet = Fleet(sides, registry.resting, each if gpus else (0, 0), gpus)
        self._wanted = len(sides[0]), len(sides[1])  # instances, by the last decision
        self._process = process
        self._registry = registry
        self._rooms = rooms
        self._how = process.job.autoscale
        self._policy = policy_of(self._how.policy)
        self._start = 0.0
        self._sums: dict[str, float] = {}  # of the loads of each instance since the last decision
        self._looks = 0
        self._next = 0.0  # when the next decision is due

    def begin(self) -> None:
        """Decide for the first time, now, when requests begin to arrive."""
        self._start = self._process.clock.now
        self._decide()

    def rest(self) -> None:
        """Take off what drains and has no request any more: prefill has none whose KV is transferred.

        An instance of the other side may wait for its GPUs.
        """
        if self.fleet.draining:
            rooms = self._rooms.values()
            busy = {instance_of(each.decode) for each in rooms}
            busy |= {instance_of(each.prefill) for each in rooms if not each.prefilled}
            if self.fleet.rest(busy.__contains__, self._now()) and self._how.gpus:
                self._scale("switching", self._how.switch)

    def _now(self) -> float:
        return self._process.clock.now - self._start

    def _decide(self) -> None:
        fleet, load = self.fleet, {**self._registry.prefills.load, **self._registry.decodes.load}
        serving = [[name for name in names if name in load and name not in fleet.resting] for names in fleet.sides]
        means = [[self._sums.get(name, 0.0) / max(1, self._looks) for name in names] for names in serving]
        prefill, decode = (sum(name in fleet.starting for name in names) for names in fleet.sides)
        wanted = self._policy(FleetView(self._now(), means[0], means[1], (prefill, decode)), **self._how.options)
        each = self._process.job.prefill.size, self._process.job.decode.size
        self._wanted = within(wanted, self._how.least, each, self._how.gpus)
        self._scale("starting", self._how.start)
        self.rest()
        self._sums, self._looks, self._next = {}, 0, self._now() + self._how.every
        self._after(min(self._how.sample, self._how.every), self._look)

    def _scale(self, how: str, seconds: float) -> None:
        fleet, load = self.fleet, {**self._registry.prefills.load, **self._registry.decodes.load}
        for name in fleet.scale(self._wanted, self._how.least, load, self._now(), how):
            self._after(seconds, lambda name=name: fleet.serve(name, self._now()))  # type: ignore[misc]

    def _look(self) -> None:
        waiting = dict.fromkeys(self._registry.prefills.load, -1)
        for request in self._rooms.values():
            if not request.prefilled and (name := instance_of(request.prefill)) in waiting:
                waiting[name] += 1
        held = self._process.job.decode_pages * self._process.job.page_size
        loads: dict[str, float] = {name: max(0, count) for name, count in waiting.items()}
        loads |= {name: tokens / held for name, tokens in self._registry.decodes.load.items()}
        self._sums = {name: self._sums.get(name, 0.0) + load for name, load in loads.items()}
        self._looks += 1
        left = self._next - self._now()
        if left <= 1e-9:  # the clock's steps
            self._decide()
        else:
            self._after(min(self._how.sample, left), self._look)

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        def due(_: Any) -> None:
            if not self._process.has_ended:
                self._process.guard(call)

        self._process.clock.call_at(self._process.clock.now + seconds, due, None)


def running_seconds(
    changes: Sequence[tuple[float, str, str]], names: Sequence[str], end: float
) -> tuple[float, int, int]:
    """Return for how many seconds until *end* instances *names* ran, summed, and the fewest and the most that did.

    All run at first.  An instance runs from its start, before it serves, until it is off.
    """
    on, total, last = set(names), 0.0, 0.0
    counts = [len(on)]
    for at, name, what in changes:
        if name not in names or at > end:
            continue
        total += len(on) * (at - last)
        last = at
        if what == "off":
            on.discard(name)
        else:
            on.add(name)
        counts.append(len(on))
    return total + len(on) * (end - last), min(counts), max(counts)
