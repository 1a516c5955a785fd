# SPDX-License-Identifier: Apache-2.0
"""When ranks of a scenario are lost, stand still and start again, and instances drain.

A loss at any time meets the few microseconds between two steps of the protocol once in thousands of scenarios.  So
`at_moments` rehearses a scenario up to the message that its seed names, and lets something go wrong just after that,
or a user leave just before; both runs are the same until then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from experiments.faults.causes import Scenario
from pdsim.core.errors import MessageError
from pdsim.kv.messages import ROUTER, ReadDone, RoomQuery, StagingRequest, Submit, decode, instance_of
from pdsim.serving.deployment import Deployment
from pdsim.sim.faults import Faults, Observer, Pause, Stale
from pdsim.sim.model import Model
from pdsim.transfer.job import RankSpec
from pdsim.verify.computed import ComputedChecker
from pdsim.verify.reached import MESSAGES

DEADLINE = 2.0
"""Seconds of silence after which a rank counts as gone."""

Draw = Callable[[str], np.random.Generator]
"""Gives the stream of random numbers of a name."""


def losses(
    random: Draw, kinds: Sequence[str], job: Deployment, ranks: Sequence[str], span: float, faults: Faults
) -> tuple[dict[str, float], dict[str, float]]:
    """Return when ranks are killed, and when they start again."""
    kill: dict[str, float] = {}
    restart: dict[str, float] = {}
    if "kills" in kinds:
        own = random("kills")
        victim = ranks[int(own.integers(len(ranks)))]
        kill[victim] = float(own.uniform(0.0, span))
    if "losses" in kinds:  # of several instances, half of the time at the same instant
        own, instances = random("losses"), (*job.prefills, *job.decodes)
        many = int(own.integers(2, len(instances) + 1))
        chosen = [instances[number] for number in sorted(own.permutation(len(instances))[:many].tolist())]
        times = own.uniform(0.0, span, many).tolist()
        if own.random() < 0.5:
            times = [times[0]] * many
        names = [list(job.ranks(instance)) for instance in chosen]
        losses = {each[own.integers(len(each))]: at for each, at in zip(names, times, strict=True)}
        lost = {instance_of(name) for name in kill}
        kill |= {name: at for name, at in losses.items() if instance_of(name) not in lost}
    if "restarts" in kinds:  # within a second of the end, and the others of the instance within a second after that
        own = random("restarts")
        for name, at in kill.items():
            again = at + 10.0 ** float(own.uniform(-2.0, 0.0))  # half of the time before its peers' engines notice
            later = again + 10.0 ** float(own.uniform(-2.0, 0.0))
            restart |= {other: again if other == name else later for other in job.ranks(instance_of(name))}
    if "together" in kinds:  # half of the time they start again at the same instant, else up to a few messages apart
        own = random("together")
        pair = (job.prefills[own.integers(len(job.prefills))], job.decodes[own.integers(len(job.decodes))])
        both = [name for instance in pair for name in job.ranks(instance)]
        at = float(own.uniform(0.0, span))
        again = at + float(own.uniform(0.01, 1.5 * DEADLINE))
        apart = 10.0 ** float(own.uniform(-5.5, -2.0)) * (own.random() < 0.5)
        kill |= dict.fromkeys(both, at)
        restart |= {name: again + apart * float(own.random()) for name in both}
    if "restarts" in kinds:
        for absence in faults.absences:
            restart = dict.fromkeys(job.ranks(instance_of(absence.rank)), absence.end + 2 * DEADLINE) | restart
    if "siblings" in kinds:  # from the same instant to a deadline apart
        own = random("siblings")
        first, apart = float(own.uniform(0.0, span)), 10.0 ** float(own.uniform(-4.0, 0.3))
        for sibling in job.prefills if own.random() < 0.5 else job.decodes:
            of_it, when = list(job.ranks(sibling)), first + apart * float(own.random())
            chosen_rank, again = (
                of_it[int(own.integers(len(of_it)))],
                when + float(own.uniform(0.01, 1.5 * DEADLINE)),
            )
            kill[chosen_rank] = when
            restart |= dict.fromkeys(of_it, again + 1.5 * DEADLINE) | {chosen_rank: again}
    if "router" in kinds:
        kill[ROUTER] = float(random("router").uniform(0.0, span))
    return kill, restart


def drains(
    random: Draw, job: Deployment, span: float, disturbed: Collection[str]
) -> dict[str, tuple[float, float, str, float]]:
    """Return, of one to all instances that no loss of *disturbed* ranks ends, when each begins to drain.

    Half of the time that is the same instant.  And for how long it may, and whether it joins again, goes, or joins
    and is lost so many seconds later.
    """
    own, lost = random("changes"), {instance_of(name) for name in disturbed}
    able = [name for name in (*job.prefills, *job.decodes) if name not in lost]
    many = int(own.integers(1, max(1, len(able)) + 1))
    chosen = [able[number] for number in sorted(own.permutation(len(able))[:many].tolist())]
    times = own.uniform(0.0, span, len(chosen)).tolist()
    times = times[:1] * len(chosen) if own.random() < 0.5 else times
    seconds = (DEADLINE * 10 ** own.uniform(-3.0, 0.0, len(chosen))).tolist()
    fates = own.choice(["joins", "goes", "is lost"], len(chosen), p=[0.5, 0.25, 0.25]).tolist()
    later = own.uniform(0.0, DEADLINE, len(chosen)).tolist()
    return dict(zip(chosen, zip(times, seconds, fates, later, strict=True), strict=True))


def halved(
    random: np.random.Generator,
    job: Deployment,
    span: float,
    faults: Faults,
    kill: dict[str, float],
    restart: dict[str, float],
) -> Faults:
    """Return *faults* with a pause of a rank beside one that is killed.

    What it had posted goes on, and it does not hear that its instance is over.
    """
    lost = {instance_of(name) for name in (*kill, *(each.rank for each in faults.absences))}
    able = [name for name in (*job.prefills, *job.decodes) if name not in lost and len([*job.ranks(name)]) > 1]
    if not able:
        return faults
    ranks = [*job.ranks(able[int(random.integers(len(able)))])]
    one, other = random.permutation(ranks).tolist()[:2]
    at, before, seconds = (float(random.uniform(*ends)) for ends in ((0.0, span / 2), (-4.0, -1.5), (0.1, 1.5)))
    pause = Pause(other, max(0.0, at - 10.0**before), at + DEADLINE * seconds)
    kill[one] = at
    restart |= dict.fromkeys(ranks, pause.end + 2 * DEADLINE)
    return replace(faults, pauses=(*faults.pauses, pause))


def stale(
    random: np.random.Generator,
    ranks: Sequence[str],
    kill: dict[str, float],
    restart: dict[str, float],
    first: float,
) -> Iterator[Stale]:
    """Yield what each rank said last that starts again: it arrives when its next process has just started, or later.

    If nothing else does, one is killed and starts again: before it is heard of, or when the *first* request comes.
    """
    name = ranks[int(random.integers(len(ranks)))]
    early, when, again = random.random(3).tolist()
    if not kill.keys() & restart.keys():
        kill[name] = 10.0 ** (-5.0 + 2 * when) + (first if early < 0.7 else 0.0)
        began = kill[name] + 10.0 ** (-2.0 + 2 * again)
        others = [other for other in ranks if instance_of(other) == instance_of(name)]
        # its leader hears a follower's words if all start at once
        restart |= dict.fromkeys(others, began + 1.5 * DEADLINE * (again < 0.5)) | {name: began}
    for rank in ranks:
        before, after = (10.0 ** random.uniform((-4.0, -5.5), (-2.0, 0.0))).tolist()
        if rank in kill and kill[rank] < restart.get(rank, 0.0):
            yield Stale(rank, max(0.0, kill[rank] - before), kill[rank], restart[rank] + after)


# --- after a message ---------------------------------------------------------------------------------------------

_OF_PULL = {"PrefillDone", "ReadDone", "ReadRequest", "Renew"}
_OF_PUSH = {"Arrival", "Destination"}
_OF_RINGS = {"StagingRelease", "StagingReply", "StagingRequest"}
_OF_TIERS = {"MovePrefixes", "PrefixesWritten"}
_OF_QUESTIONS = {"RoomLocations", "RoomQuery"}
_NEVER = {"Ping", "Pong", "Stop", "Forwards"}  # at any time, at the end, and not beside checkers

_OFTEN = {"Arrival": 2, "Destination": 2, "PrefillDone": 3, "ReadDone": 9, "ReadRequest": 3, "RegisterPool": 3}
_OFTEN |= {
    "RoomQuery": 6,
    "TransferDone": 2,
    "MovePrefixes": 4,
    "PrefixesWritten": 2,
    "StagingReply": 2,
    "StagingRequest": 4,
}
"""By how much more likely these are than others."""

_OF_RANKS = "silences", "stale", "pauses"
"""Faults of one rank, for a time."""

_MOST = 30
"""Messages of a kind that are counted."""


class _Heard(NamedTuple):
    at: float
    sender: str
    receiver: str
    payload: bytes


class _Enough(BaseException):
    """The rehearsal has got to the message."""


class _Rehearsal(Observer):
    """Keeps messages of each of *kinds*, at most *number*; ends the run when there are as many of the first."""

    def __init__(self, kinds: list[str], number: int) -> None:
        self.heard: dict[bytes, list[_Heard]] = {kind.encode(): [] for kind in kinds}
        self._first, self._number = kinds[0].encode(), number
        self._computed = ComputedChecker(lambda *_: None)  # without it what shared pages have is refused
        self.router: Any = None

    def joined(self, member: Any) -> None:
        """Take note of the router, which has the clock."""
        self._computed.joined(member)
        if member.rank.name == ROUTER:
            self.router = member

    def sent(self, sender: str, receiver: str, payload: bytes) -> None:
        """Keep a message."""
        kind = payload[3 : 3 + payload[2] - 0xA0]  # a text of msgpack
        if kind == b"Submit":
            self._computed.submitted(cast("Submit", decode(payload)))
        heard = self.heard.get(kind)
        if kind == b"ReadDone" and not (sender.startswith("decode") and cast("ReadDone", decode(payload)).nbytes):
            return  # to which nobody waits for an answer
        if heard is not None and len(heard) < self._number:
            heard.append(_Heard(self.router.clock.now, sender, receiver, payload))
            if kind == self._first and len(heard) == self._number:
                raise _Enough


def at_moments(scenario: Scenario, random: np.random.Generator, others: Collection[str]) -> Scenario:
    """Return *scenario* with what goes wrong after a message.

    Nothing more happens to *others*, instances that drain, or to those that are lost by then; those that would be
    later are lost now instead.
    """
    turns = dict(zip(MESSAGES, random.random(len(MESSAGES)).tolist(), strict=True))
    kinds = sorted(_possible(scenario), key=lambda kind: (-(turns[kind] ** (1 / _OFTEN.get(kind, 1))), kind))
    number = 1 + int(10.0 ** random.uniform(0.0, np.log10(_MOST)))
    chances = random.random((2, 12)).tolist()
    lags, lag = random.random(2).tolist()
    words = random.integers(1 << 20, size=len(chances)).tolist()
    # what is behind a late message waits, too, and whoever hears nothing for a deadline ends
    lagging = scenario.faults.lagging or scenario.job.deadline < DEADLINE
    if lags < 0.45 and not lagging and kinds[0] != "ReadDone":
        # the message itself is late, or may be, or the word of who comes back; an address meets early ones
        names = kinds[:1] if lags < 0.3 else ["RegisterRank"]
        names = [*names, "ConnectPeer"] if names == ["RegisterPool"] else names
        tags = tuple(bytes([0xA0 + len(name)]) + name.encode() for name in names)
        held = min(10.0 ** (-3.0 + 2.5 * lag), DEADLINE / 8)
        scenario = replace(scenario, faults=replace(scenario.faults, lagging=tags, lag=held))
    rehearsal = _Rehearsal(kinds[:4], number)
    model = Model(
        scenario.machine, scenario.engine, memory="tracked", seed=scenario.seed, faults=scenario.faults,
        limit=scenario.faults.until, observer=rehearsal, collective=scenario.collective,
    )  # fmt: skip
    with suppress(_Enough):
        model.run(scenario.specs, scenario.kill, scenario.restart)
    moment = next((heard[-1] for heard in rehearsal.heard.values() if heard), None)
    if moment is None:
        return scenario
    asked = isinstance(decode(moment.payload), RoomQuery)  # whose answer comes soon
    lost, at, cancels, faults = {*others}, moment.at, dict(scenario.cancels), scenario.faults
    kill, restart, misspeaks = dict(scenario.kill), dict(scenario.restart), dict(scenario.misspeaks)
    spoken = dict[str, int]()
    for turn, (what, who, which, after, again, rest, held, before, late, long, more, twice) in enumerate(chances):
        if turn and more < 0.6:
            break
        if not turn and _is_answered(moment):  # when it has come, and before it is
            at += 5.5e-5 + 10.0 ** (-6.0 + 2.5 * after)
        else:
            at += 10.0 ** (-6.0 + (2.0 if asked else 5.0) * after)
        leaves = at if who < 0.5 else 2 * moment.at - at  # just before the message, as often
        if what < (0.6 if asked else 0.2) and not turn and (left := _leaves(moment, rehearsal.router, leaves)):
            cancels |= left
            continue
        name = _victim(scenario, moment, who, which)
        ranks = [*scenario.job.ranks(instance_of(name))]
        since = [each.start for each in faults.absences if each.rank in ranks]
        if instance_of(name) in lost or min([*since, *(kill.get(rank, at) for rank in ranks)]) < at:
            continue
        lost.add(instance_of(name))
        kill = {rank: when for rank, when in kill.items() if rank not in ranks}
        kept: dict[str, Any] = {
            each: tuple(one for one in getattr(faults, each) if one.rank not in ranks) for each in _OF_RANKS
        }
        faults = replace(faults, **kept)
        if what < 0.35:
            pause = Pause(name, at, at + scenario.job.deadline * (0.1 + 1.9 * long))
            faults = replace(faults, pauses=(*faults.pauses, pause))
            began, then = pause.end + 2 * scenario.job.deadline, 0.0
        else:
            began = at + 10.0 ** (-3.5 + 3.5 * again)
            then = (0.0, 0.02, 1.5 * scenario.job.deadline)[int(3 * rest)]  # the others end when they hear of it
            if what < 0.43:
                to = (ROUTER, *(end for end in (moment.sender, moment.receiver) if end not in (ROUTER, *ranks)))
                speaks = ranks if held < 0.4 else [name]  # one after the other
                misspeaks |= {rank: (at + 1e-5 * turn, to[int(late * len(to))]) for turn, rank in enumerate(speaks)}
                spoken |= dict.fromkeys(speaks, words[turn])
                began = max(began, at + 0.1)
            else:
                kill[name] = at
                if twice < 0.25 and len(ranks) > 1:  # another one of its next incarnation is lost, too
                    began, then = at + 0.12 + 0.1 * again, 0.0
                    kill[next(rank for rank in ranks if rank != name)] = began + 10.0 ** (-2.0 + 1.5 * late)
            if what >= 0.43 and held < 0.5:
                # a question for a slot comes when it is proven that nothing of its writer moves
                least = 0.15 if isinstance(decode(moment.payload), StagingRequest) else 0.0
                first, comes = max(0.0, at - 10.0 ** (-4.5 + 2.5 * before)), began + least + 10.0 ** (-5.0 * late)
                stale = Stale(name, first, at, comes)
                faults = replace(faults, stale=(*faults.stale, stale))
        restart |= dict.fromkeys(ranks, began + then) | {name: began}
    specs = [
        _misspeaking(spec, *misspeaks[spec.name], spoken[spec.name]) if spec.name in misspeaks else spec
        for spec in scenario.specs
    ]
    return replace(
        scenario, kill=kill, restart=restart, faults=faults, cancels=cancels, misspeaks=misspeaks, specs=specs
    )


def _misspeaking(spec: RankSpec, at: float, to: str, word: int) -> RankSpec:
    arguments = dict(spec.arguments) | {"program": spec.program, "at": at, "to": to, "word": word}
    return replace(spec, program="experiments.faults.programs:misspeaking", arguments=arguments)


def _possible(scenario: Scenario) -> set[str]:
    job = scenario.job
    pulls = job.engine.handoff == "pull"
    never = _NEVER | (_OF_PUSH if pulls else _OF_PULL)
    never |= set() if job.staging else _OF_RINGS
    never |= set() if job.cache.tiered else _OF_TIERS
    never |= set() if job.query_dp else _OF_QUESTIONS
    return {*MESSAGES} - never


def _leaves(moment: _Heard, router: Any, at: float) -> dict[int, float]:
    # The users of the request that the message is about, and of the next ones.
    try:
        room = getattr(decode(moment.payload), "room", 0)
    except MessageError:
        room = 0
    first = (room - 1) % router.count if room else int(at * 1e6) % router.count
    arrivals = {number: router.start + router.arrivals.request(number).arrival for number in range(router.count)}
    come = [number for number in range(first, min(first + 4, router.count)) if arrivals[number] < at]
    return {number: at - arrivals[number] for number in come} if router.start else {}


def _victim(scenario: Scenario, moment: _Heard, who: float, which: float) -> str:
    # The sender, the receiver, another rank of their instances, or any.
    ends = [name for name in (moment.sender, moment.receiver) if name != ROUTER]
    own = [name for end in ends for name in scenario.job.ranks(instance_of(end))]
    every = [name for each in (*scenario.job.prefills, *scenario.job.decodes) for name in scenario.job.ranks(each)]
    of = ends if who < 0.65 else own if who < 0.85 else every
    if who < 0.5 and _is_answered(moment):
        of = [moment.receiver]
    return of[int(which * len(of))]


def _is_answered(moment: _Heard) -> bool:
    # Whether decode waits for prefill's word, if prefill looks what has been read.
    return isinstance(decode(moment.payload), ReadDone)
