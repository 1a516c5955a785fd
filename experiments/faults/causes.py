# SPDX-License-Identifier: Apache-2.0
"""Which failures of a scenario its faults explain.

A fault explains a failure if it reached the request's own instances in its lifetime.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import inf, isclose
from typing import Any, NamedTuple

from pdsim.hardware.costs import Collective, Engine
from pdsim.hardware.machine import Machine
from pdsim.kv.messages import ROUTER, instance_of
from pdsim.serving.deployment import Deployment
from pdsim.serving.workload import Request
from pdsim.sim.endpoint import DETECTION
from pdsim.sim.faults import CardOutage, Faults, Pause, Silence
from pdsim.transfer.job import Outcome, RankSpec

RECONNECTED = 2.0
"""Seconds from the start of the last rank of an instance until its peers must be connected to it: they wait for the
proof that nothing of the incarnation before moves (0.1 s on the model), and for messages that are held up."""

BACKLOG = 1.0
"""Seconds after the end of a slow time, or of a squeeze, in which what has piled up meanwhile may still time out."""

GRACE = 0.5
"""Seconds by which a slow message may delay the notice of a loss."""

_SOON = 0.05
"""Seconds in which decode goes on with what is written, if nothing is slow and no message late."""

_INSTANCE = re.compile(r"\b(?:prefill|decode)\d+(?:d\d+)?\b")


@dataclass(frozen=True)
class Scenario:
    """A deployment, its requests and its faults."""

    seed: int
    job: Deployment
    specs: list[RankSpec]
    requests: list[Request]
    cancels: Mapping[int, float]
    faults: Faults
    kill: Mapping[str, float]
    restart: Mapping[str, float]
    limit: float
    machine: Machine
    engine: Engine
    collective: Collective | None  # with which context-parallel ranks gather
    text: str  # one line
    misspeaks: Mapping[str, tuple[float, str]] = field(default_factory=dict)  # ranks, when, and who cannot read it
    cards: Sequence[CardOutage] = ()  # network cards that fail
    outages: Sequence[tuple[float, float]] = ()  # when the router fails, and when it works again
    hurried: bool = False  # whether ranks stop with the last request, also if messages and transfers are pending
    plain: bool = False  # whether nothing goes wrong, and it is run twice (`experiments.faults.shortcuts`)


class Span(NamedTuple):
    """Seconds after the start of the job in which something is out of order."""

    start: float
    end: float

    def reaches(self, start: float, end: float) -> bool:
        """Return whether it overlaps the time from *start* to *end*."""
        return self.start <= end and start <= self.end


class History(NamedTuple):
    """The router's record of a request that its user sent: when and how it ended, and where it was sent."""

    ended: float
    tries: list[tuple[float, int, str, str]]  # when, in which room, to which two instances
    number: int  # of the request
    status: str

    @property
    def began(self) -> float:
        """When it was first sent."""
        return self.tries[0][0] if self.tries else self.ended

    @property
    def instances(self) -> set[str]:
        """The instances that it was sent to."""
        return {instance for *_, prefill, decode in self.tries for instance in (prefill, decode)}


class Record(NamedTuple):
    """What the router has kept: its *value*, and what became of all requests; *last* is where each ended."""

    value: Mapping[str, Any]  # nothing if it was lost
    histories: list[History]
    last: list[int]


def outages(
    kill: Mapping[str, float],
    restart: Mapping[str, float],
    dead: Iterable[str],
    absences: Collection[Silence | Pause] = (),
) -> dict[str, Span]:
    """Return the spans in which each instance that lost a rank cannot serve; *dead* ranks ended by an error.

    An outage ends when its peers must be connected to the instance again, infinite if it is not started again as a
    whole.  A rank that is silent or paused may be given up, and its instance with it; one that is not, or is started
    again meanwhile, can be connected from the end of its absence.
    """
    gone = {instance_of(name) for name in dead}
    starts: dict[str, list[float]] = {}
    ends: dict[str, list[float]] = {}
    for name, start in (*kill.items(), *((each.rank, each.start) for each in absences)):
        starts.setdefault(instance_of(name), []).append(start)
    for name, end in (*restart.items(), *((each.rank, each.end) for each in absences)):
        ends.setdefault(instance_of(name), []).append(end)
    return {
        name: Span(min(own), inf if name in gone else max(ends.get(name, [inf])) + RECONNECTED)
        for name, own in starts.items()
    }


class Causes:
    """Decides whether a failure in *scenario* has a cause; without one it is a violation.

    A failure is explained if a fault of a kind that can cause it reached the request's own instances while it was
    there, as the router's rows say.  That does not prove that it was this fault.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._kill = dict(scenario.kill) | {name: at for name, (at, _) in scenario.misspeaks.items()}
        self._instances = (*scenario.job.prefills, *scenario.job.decodes)
        self._models = [each for each in (scenario.engine.intra, scenario.engine.inter) if each is not None]
        self._disturbed = _disturbances(scenario)
        self._outages: dict[str, Span] = {}
        self._left: dict[str, Span] = {}  # instances, from when they left until they must be connected again
        self._histories: list[History] = []  # in the order of requests, of each as often as its user sent it
        self._last: list[int] = []  # by request: the place of the last of its own
        self._nbytes: list[int] = []
        self._value: Mapping[str, Any] = {}  # of the router
        self._held: Set[int] = frozenset()
        self._broken: Set[int] = frozenset()
        self._generated: Set[int] = frozenset()

    def rank(self, name: str, error: str, at: float, born: float = 0.0) -> bool:
        """Return whether rank *name* may end with *error* then: killed, or its instance lost a rank since *born*."""
        kind, kill = error.partition(":")[0], self._kill
        if kind == "Killed":
            return name in self._scenario.kill
        if kind == "MessageError":
            return "refused by" in error and name in self._scenario.misspeaks and at > kill[name]
        losses = [(rank, when, when) for rank, when in kill.items()]
        losses += [(each.rank, each.start, each.end) for each in self._scenario.faults.absences]
        # the silence of a rank that was killed before, and what one said, may be noticed after
        late = GRACE * ("nothing from" in error or "(MessageError" in error)
        since = born - late - 1.5 * self._scenario.job.deadline * ("nothing from" in error)
        if "has left the group" in error:  # which ranks join when they start, and *born* is after their first gather
            again = self._scenario.restart.get(name, 0.0)
            since = again if again <= born else 0.0
        lost = any(
            start <= at and end >= since for other, start, end in losses if instance_of(other) == instance_of(name)
        )
        if f"nothing from {ROUTER}" in error:  # a rank of an instance that was given up ends at that message
            lost = any(each.rank == name for each in self._scenario.faults.absences)
        if kind == "TransferTimeout":
            return self._waits_alone(name, error, at)
        return kind == "PeerLost" and (
            lost or self._alone(name, error, at) or self._joined_the_lost(error, at, born)
        )

    def _waits_alone(self, name: str, error: str, at: float) -> bool:
        # A rank that gathers does so as soon as it is started again, with peers that may have ended since then.
        began, collective = self._scenario.restart.get(name), self._scenario.collective
        if began is None or collective is None or "had not called" not in error:
            return False
        return isclose(at, began + collective.timeout)

    def _joined_the_lost(self, error: str, at: float, born: float) -> bool:
        # A rank that ended unheard is missed when its next process registers.  Until then those of its instance that
        # were started again a moment before serve beside the one that has ended, if its old messages come so late.
        again = re.search(r"\(PeerLost: (\w+\.\d+) was started again\)", error)
        return again is not None and born - GRACE <= self._scenario.restart.get(again[1], inf) <= at

    def _alone(self, name: str, error: str, at: float) -> bool:
        lost = self._kill.get(ROUTER)
        if lost is None or f"nothing from {ROUTER}" not in error:
            return False
        deadline = self._scenario.job.deadline
        again = self._scenario.restart.items()  # ranks that gather wait for each other before they listen
        born = [at for other, at in again if instance_of(other) == instance_of(name)]
        heard = [lost, *born, *(each.end for each in self._scenario.faults.absences)]
        return lost <= at <= max(heard) + 1.5 * deadline + GRACE

    def know(
        self, outcome: Outcome, held: Set[int], broken: Set[int] = frozenset(), generated: Set[int] = frozenset()
    ) -> list[str]:
        """Return the statuses of the requests of *outcome*, none if the router was lost.

        *held* are the rooms with a transfer whose completion was held up, *broken* those with one that the engine
        reported as failed, *generated* those whose output had reached the router before they closed.
        """
        value = outcome.ranks[ROUTER].value
        self._broken, self._generated = broken, generated
        if value is None:
            return [] if ROUTER in self._kill else [""] * len(self._scenario.requests)
        dead = [name for name, rank in outcome.ranks.items() if rank.error]
        self._value = value
        self._outages = outages(self._kill, self._scenario.restart, dead, self._scenario.faults.absences)
        again = self._scenario.restart
        self._left = {
            name: Span(at, max(again.get(rank, inf) for rank in self._scenario.job.ranks(name)) + RECONNECTED)
            for at, name, what in value["changes"]
            if what == "left"
        }
        statuses = [row[3] for row in value["rows"]]
        for number, (sent, last) in enumerate(zip(value["histories"], statuses, strict=True)):
            ends = [*(status for _, status, _ in sent[:-1]), last]
            for (ended, _, rows), status in zip(sent, ends, strict=True):
                self._histories.append(History(ended, [tuple(row) for row in rows], number, status))
            self._last.append(len(self._histories) - 1)
        self._nbytes = [row[2] for row in value["rows"]]
        self._held = held
        return statuses

    @property
    def record(self) -> Record:
        """What the router has kept."""
        return Record(self._value, self._histories, self._last)

    def last(self, number: int, status: str) -> bool:
        """Return whether the request of that *number* may have ended with *status*."""
        return self._explained(self._last[number], status)

    def unexplained(self) -> Iterator[str]:
        """Yield each request that failed without a cause before its user sent it again."""
        for place, past in enumerate(self._histories):
            if place not in self._last and not self._explained(place, past.status):
                yield f"request {past.number} ended without a cause, and was sent again: {past.status}"

    def _explained(self, place: int, status: str) -> bool:
        """Return whether what has that *place* in the histories may have ended with *status*.

        - ``Aborted``: its user leaves.
        - ``Shed``: the router refuses requests without a priority.
        - ``PeerLost``: the instance that it names was lost, or a side had none left.
        - ``RouterLost``: the router has failed for a while.
        - ``MessageError``: a rank of its instances said what the router cannot read.
        - ``TransferTimeout``: a transfer of it was held up, something of its instances was slow, or the limit that
          *status* names has passed.
        - ``TransferFailed``: the engine reported a transfer of it as failed, or a card had failed.
        - ``SendQueueFull``: the engine refuses when its queue is full.
        - ``OutOfMemory``: another request left pages in quarantine at one of its instances.

        Anything else is never explained, and nothing is if all its output was there.
        """
        kind, past = status.partition(":")[0], self._histories[place]
        if past.tries and past.tries[-1][1] in self._generated:
            return False
        if kind == "Aborted":
            return past.number in self._scenario.cancels
        if kind == "Shed":
            return self._scenario.job.shed > 0 and not self._scenario.requests[past.number].priority
        if kind == "PeerLost":
            return self._lost(status, past)
        if kind == "RouterLost":
            return any(start <= past.ended <= end for start, end in self._scenario.outages)
        if kind == "MessageError":
            speakers = {instance_of(name) for name in self._scenario.misspeaks}
            return any(self._is_out(name, past.began, past.ended) for name in speakers & past.instances)
        if kind == "TransferTimeout":
            return self._slowed(past) or self._limited(status, past)
        if kind == "TransferFailed":
            # layer by layer, the writes of several rooms are one sequence
            beside = self._sharing(past) if self._scenario.job.layerwise else [past]
            cards = (Span(each.start, each.end + DETECTION) for each in self._scenario.cards)
            return any(room in self._broken for each in beside for _, room, *_ in each.tries) or any(
                each.reaches(past.began, past.ended) for each in cards
            )
        if kind == "SendQueueFull":
            return any(model.full == "refuse" and model.depth for model in self._models)
        return kind == "OutOfMemory" and self._short(place, past)

    def _limited(self, status: str, past: History) -> bool:
        # The scenario limits the time of a room as *status* says, and the request has taken so long.
        job = self._scenario.job
        for limit, words in ((job.bootstrap_timeout, "no pages at decode"), (job.waiting_timeout, "not all of it")):
            if limit and words in status:
                return past.ended - past.tries[-1][0] >= limit
        began, _, *last = past.tries[-1]
        if "the lease of" not in status or past.ended - began < job.engine.lease:
            return False
        if any(self._is_out(instance, began, past.ended) for instance in last):
            return True  # nobody reads, or renews
        held = self._scenario.faults.lag
        tries = sum(at <= past.ended for each in self._histories for at, *_ in each.tries)
        return self._waits_at_the_router(tries) or held > job.engine.lease / 100

    def _waits_at_the_router(self, tries: int) -> bool:
        # It sends each try on twice, to prefill and with its answer to decode, one after the other. Decode's first
        # heartbeat comes up to `ServingEngine.heartbeat` seconds after.
        engine = self._scenario.job.engine
        return 2 * tries * engine.proxy * (1.0 + engine.variation) > engine.lease - engine.heartbeat

    def unrecovered(self, outcome: Outcome) -> Iterator[str]:
        """Yield each pair that lives at the end and has not served its probe, and who never stops draining."""
        value = outcome.ranks[ROUTER].value
        dead = {instance_of(name) for name, rank in outcome.ranks.items() if rank.error}
        dead |= {name for name, span in self._left.items() if span.end == inf}
        limits = {name: seconds for name, _, seconds in self._scenario.specs[0].arguments["drains"]}
        began: dict[str, float] = {}
        for at, instance, what in value["changes"] if value else ():
            since = began.pop(instance, at)
            if what == "draining":
                began[instance] = at
            elif what == "left" and at - since > limits[instance] + 1e-9:
                yield f"{instance} leaves after {at - since:g} s, and may drain for {limits[instance]:g}"
        for instance in began:
            yield f"{instance} has drained for longer than it may, and serves nobody"
        probes = value["probes"] if value else ()
        late = self._waits_at_the_router(len(probes))  # for a lease
        for prefill, decode, status in probes:
            if status != "ok" and not {prefill, decode} & dead and not (late and "the lease of" in status):
                yield f"{prefill} and {decode} live, and a request that they were given ended so: {status}"

    def sent_wrongly(self, moved: Set[int] = frozenset()) -> Iterator[str]:
        """Yield each request sent out too often, in one room twice, without a loss, or anew when it had *moved*."""
        job, rooms = self._scenario.job, Counter(room for past in self._histories for _, room, *_ in past.tries)
        for number, last in enumerate(self._last):
            sent = self._histories[self._last[number - 1] + 1 if number else 0 : last + 1]
            *earlier, final = (past.status.startswith(("ok", "Aborted", "Shed")) for past in sent)
            if any(earlier):
                yield f"request {number} was sent again, though it ended so: {[past.status for past in sent]}"
            if not (len(sent) <= job.asks + 1 if final else len(sent) == job.asks + 1):
                yield f"request {number} failed {len(sent)} times, and may be sent again {job.asks} times"
            for past, following in pairwise(sent):
                if following.tries and following.tries[0][0] < past.ended + job.asks_after:
                    yield f"request {number} failed at {past.ended:g} s and is sent again at {following.began:g} s"
        for past, (start, end) in product(self._histories, self._scenario.outages):
            if any(start <= at < end for at, *_ in past.tries) or past.began < start < past.ended:
                yield f"request {past.number} is served while the router is out, from {start:g} to {end:g} s"
        for past in self._histories:
            number, own = past.number, [room for _, room, *_ in past.tries]
            if any(rooms[room] > 1 for room in own) or len(own) > job.retries + 1:
                yield f"request {number} was sent out in rooms {own}, with {job.retries} retries"
            for (at, room, *pair), (again, *_) in pairwise(past.tries):
                if not any(self._is_out(instance, at, again) for instance in pair):
                    yield f"request {number} was sent out anew, and neither of {pair} was lost in room {room}"
                if room in moved:
                    yield f"request {number} was sent out anew, though a transfer of room {room} was posted"

    def stuck(self, written: Mapping[int, float], went_on: Mapping[int, float]) -> Iterator[str]:
        """Yield each room that waits on at decode though all of it is *written*.

        *went_on* is when decode went on; it hears of a write at once, unless something holds that up.
        """
        faults = self._scenario.faults
        staged = self._scenario.job.staging is not None  # and scattered, by slow devices
        limit = (1.0 if staged else _SOON) + 20 * max(faults.lag, faults.notice)
        for past in self._histories:
            for _, room, *pair in past.tries:
                if room not in written or room in self._held:
                    continue
                lost = [self._outages[each].start for each in pair if each in self._outages]
                start, end = written[room], min([went_on.get(room, past.ended), *lost])
                spans = [span for name in pair for span in self._disturbed.get(name, ())]
                if end - start > limit and not any(span.reaches(start - BACKLOG, end) for span in spans):
                    yield f"all of room {room} is written, and decode goes on after {end - start:g} s"

    def miscounted(self, nbytes: Mapping[int, int], given_up: Set[int] = frozenset()) -> Iterator[str]:
        """Yield each request that was served with another number of bytes than its room moved, by *nbytes*.

        The account of a request may be lost with its prefill instance, or where prefill has *given up* a room that
        decode serves, and a killed rank keeps none.  A router that fails before the account comes knows of 0 bytes.
        """
        gone, failed = self._outages.keys() | self._left.keys(), {start for start, _ in self._scenario.outages}
        for number, (place, told) in enumerate(zip(self._last, self._nbytes, strict=True)):
            past = self._histories[place]
            status = past.status
            _, room, *last = past.tries[-1] if past.tries else (0.0, -1)
            moved, lost = nbytes.get(room, 0), bool(gone & {*last}) or room in given_up
            early = told == 0 and past.ended in failed
            if status == "ok" and not early and (moved > told > 0 if lost else moved != told):
                yield f"request {number} is served with {told} bytes, its room moved {moved}"

    def _lost(self, status: str, past: History) -> bool:
        if re.search(r"no \w+ instance is left", status):
            out = {name for name in self._instances if self._is_out(name, past.ended, past.ended)}
            left = {name for name, span in self._left.items() if span.reaches(past.ended, past.ended)}
            sides = self._scenario.job.prefills, self._scenario.job.decodes
            rests = self._scenario.job.autoscale.policy != "none"  # those that are not out may, by load
            return any(out & {*side} and (rests or out | left >= {*side}) for side in sides)
        named = _INSTANCE.search(status)
        return named is not None and named[0] in past.instances and self._is_out(named[0], past.began, past.ended)

    def _is_out(self, instance: str, start: float, end: float) -> bool:
        return instance in self._outages and self._outages[instance].reaches(start, end)

    def _slowed(self, past: History) -> bool:
        # A transfer of it was held up, or one before it in the queue of the engine, or a rank or link was slow.
        sharing = self._sharing(past)
        # layer by layer, the writes of several rooms are one sequence
        waits = self._scenario.job.layerwise or any(model.full == "wait" and model.depth for model in self._models)
        queued = sharing if waits else ()
        if any(room in self._held for other in (past, *queued) for _, room, *_ in other.tries):
            return True
        before = sharing if any(model.in_order for model in self._models) else ()
        reached = past.instances.union(*(other.instances for other in before if other.ended >= past.began))
        spans = [span for name in reached for span in self._disturbed.get(name, ())]
        return any(span.reaches(past.began - BACKLOG, past.ended) for span in spans)

    def _sharing(self, past: History) -> list[History]:
        beside = [other for other in self._histories if other.began <= past.ended]
        return [other for other in beside if other.instances & past.instances]

    def _short(self, place: int, past: History) -> bool:
        for other, each in enumerate(self._histories):
            shares = other != place and each.instances & past.instances and each.began <= past.ended
            if shares and (len(each.tries) > 1 or self._quarantined(each, each.status, past.ended)):
                return True
        return False

    def _quarantined(self, past: History, status: str, until: float) -> bool:
        # One that has been pulled, too: prefill revokes it if it is not told so before the lease ends.
        if status == "ok" and self._scenario.job.engine.handoff != "pull":
            return False
        if status != "ok" and (not status.startswith("Aborted") or self._slowed(past)):
            return True
        return any(self._is_out(instance, past.began, until) for instance in past.instances)  # it never answers


def _disturbances(scenario: Scenario) -> dict[str, list[Span]]:
    # When a rank or a link of each instance is slow, silent or paused.
    faults = scenario.faults
    places = {f"node{spec.place.node}/gpu{spec.place.gpu}": spec.name for spec in scenario.specs}
    squeezed = ((places.get(each.link.rpartition("/")[0]), each) for each in faults.squeezes)
    spans: dict[str, list[Span]] = {}
    for rank, each in (*((each.rank, each) for each in (*faults.slow, *faults.absences)), *squeezed):
        if rank is not None:
            spans.setdefault(instance_of(rank), []).append(Span(each.start, each.end))
    for spec, card in product(scenario.specs, scenario.cards):
        if spec.place.node == card.node:
            spans.setdefault(instance_of(spec.name), []).append(Span(card.start, card.end))
    return spans
