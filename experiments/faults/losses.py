# SPDX-License-Identifier: Apache-2.0
"""When ranks of a scenario are lost, stand still and start again, instances drain, users leave and links are cut.

A loss at any time meets the few microseconds between two steps of the protocol once in thousands of scenarios.  So
`at_moments` rehearses a scenario up to the message that its seed names, and lets something go wrong just after that,
or a user leave just before; both runs are the same until then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from experiments.faults.causes import Scenario
from experiments.faults.late import DEADLINE, directions, lag, lagging, possible
from experiments.faults.settings import LONGEST
from pdsim.core.errors import MessageError
from pdsim.hardware.costs import Engine
from pdsim.hardware.machine import Machine
from pdsim.kv.messages import ROUTER, ReadDone, RoomQuery, StagingRequest, Submit, decode, instance_of
from pdsim.serving.deployment import Deployment
from pdsim.serving.workload import Request
from pdsim.sim.faults import CardOutage, Faults, Observer, Pause, Silence, Slow, Squeeze, Stale
from pdsim.sim.model import Model
from pdsim.transfer.job import RankSpec
from pdsim.verify.computed import ComputedChecker
from pdsim.verify.reached import MESSAGES

Draw = Callable[[str], np.random.Generator]
"""Gives the stream of random numbers of a name."""


def faults_of(random: Draw, kinds: Sequence[str], ranks: Sequence[str], span: float, deadline: float) -> Faults:
    """Return what goes wrong in *span* seconds; *deadline* is how long others wait for a silent one of *ranks*.

    All numbers are drawn for any *kinds*, so that a kind which is left out changes none of the others.
    """
    plan = random("plan")
    share, delay, late, lateness = plan.random(4).tolist()
    late_rings = bool({"rings", "stages"} & {*kinds})
    rank, gpu = ranks[int(plan.integers(len(ranks)))], int(plan.integers(len(ranks)))
    (begin, long, factor), (start, length, way) = plan.random((2, 3)).tolist()
    slow = Slow(rank, begin * span, (begin + long) * span, 1.0 + 50.0 * factor)
    link = f"node0/gpu{gpu}/nvlink.{'out' if way < 0.5 else 'in'}"
    squeeze = Squeeze(link, start * span, (start + length) * span, 0.0 if way % 0.5 < 0.25 else 0.01)

    def absence(kind: str) -> tuple[str, float, float]:
        # Between half a deadline, in which nothing is lost, and two, from the first half: most requests come then.
        own = random(kind)
        name, start = ranks[int(own.integers(len(ranks)))], float(own.uniform(0.0, span / 2))
        return name, start, start + deadline * float(own.uniform(0.5, 2.0))

    return Faults(
        delayed=share if "delays" in kinds else 0.0,
        delay=10.0 ** (-4 + 2.5 * delay) if "delays" in kinds else 0.0,
        lagging=lagging(random("lags"), 10.0 ** float(random("lags.mean").uniform(-3.5, -1.0)), "stages" in kinds)
        if "lags" in kinds
        else (),
        late=0.1 * late if "late" in kinds else 0.05 if late_rings else 0.0,
        lateness=0.5 * lateness if "late" in kinds or late_rings else 0.0,
        unnoticed=float(random("notices").random()) if "notices" in kinds else 0.0,
        notice=min(10.0 ** float(random("notices.mean").uniform(-5.0, -1.0)), deadline / 20)  # all long before
        if "notices" in kinds
        else 0.0,
        stray="stray" in kinds,
        torn="torn" in kinds,
        shuffle="shuffle" in kinds,
        slow=(slow,) if "slow" in kinds else (),
        squeezes=(squeeze,) if "squeezes" in kinds else (),
        broken=0.1 * float(random("broken").random()) if "broken" in kinds else 0.0,
        silences=(Silence(*absence("silences")),) if "silences" in kinds else (),
        pauses=(Pause(*absence("pauses")),) if "pauses" in kinds else (),
    )


def router_outages(random: np.random.Generator, span: float) -> list[tuple[float, float]]:
    """Return when the router fails and works again: half of the time, for a moment or as long as requests come."""
    chance, begin, long = random.random(3).tolist()
    start = begin * span / 2
    return [(start, start + 10.0 ** (-3.0 + 2.5 * long))] if chance < 0.5 else []


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
    random: Draw, job: Deployment, span: float, busy: float, disturbed: Collection[str]
) -> dict[str, tuple[float, float, str, float]]:
    """Return, of one to all instances that no loss of *disturbed* ranks ends, when each begins to drain.

    Half of the time that is while requests come, for *busy* seconds, and half of the time the same instant.  And for
    how long it may, and whether it joins again, goes, or joins and is lost so many seconds later.
    """
    own, lost = random("changes"), {instance_of(name) for name in disturbed}
    able = [name for name in (*job.prefills, *job.decodes) if name not in lost]
    many = int(own.integers(1, max(1, len(able)) + 1))
    chosen = [able[number] for number in sorted(own.permutation(len(able))[:many].tolist())]
    times = own.uniform(0.0, busy if random("changes.busy").random() < 0.5 else span, len(chosen)).tolist()
    times = times[:1] * len(chosen) if own.random() < 0.5 else times
    seconds = (DEADLINE * 10 ** own.uniform(-3.0, 0.0, len(chosen))).tolist()
    fates = own.choice(["joins", "goes", "is lost"], len(chosen), p=[0.5, 0.25, 0.25]).tolist()
    later = own.uniform(0.0, DEADLINE, len(chosen)).tolist()
    return dict(zip(chosen, zip(times, seconds, fates, later, strict=True), strict=True))


def deserted(
    random: np.random.Generator,
    job: Deployment,
    leaving: Mapping[str, tuple[float, float, str, float]],
    kill: dict[str, float],
    restart: dict[str, float],
) -> None:
    """Add to *kill* and *restart* that an instance that is *leaving* loses all others of its side.

    That is noticed soon after it has begun to drain: when their ranks start again.
    """
    lost = {instance_of(name) for name in kill}
    for side in (job.prefills, job.decodes):
        drained = [name for name in side if name in leaving]
        chance, when, again = random.random(3).tolist()
        others = {*side} - {*drained}
        if len(drained) == 1 and others and not others & lost and chance < 0.6:
            at = leaving[drained[0]][0]
            for name in sorted(others):
                first, *rest = job.ranks(name)
                kill[first] = max(0.0, at - 10.0 ** (-3.0 + 2.0 * when))
                restart |= dict.fromkeys(rest, at + 1.5 * DEADLINE) | {first: at + 10.0 ** (-4.0 + 2.5 * again)}


def given_up(
    random: np.random.Generator, requests: list[Request], cancels: dict[int, float], busy: float
) -> tuple[list[Request], dict[int, float]]:
    """Return those of *requests* that come in a part of *busy* seconds, and *cancels* with all users leaving then.

    So what is under way at that instant is pending when the ranks stop.
    """
    share, later = random.random(2).tolist()
    first = requests[0].arrival
    last = max(first, share * busy)
    left = [request for request in requests if request.after < 0 and request.arrival <= last]
    at = last + 10.0 ** (-3.5 + 2.5 * later)
    earlier = {number: cancels[number] for number in cancels if number < len(left)}
    return left, {number: at - each.arrival for number, each in enumerate(left)} | earlier


def cut_for_long(
    random: np.random.Generator, job: Deployment, faults: Faults, engine: Engine, busy: float, blocks: int
) -> tuple[Faults, Engine]:
    """Return *faults* with a link of a rank that is cut for longer than the router waits for anything.

    And *engine*, which waits for a transfer for longer still.  Requests come for *busy* seconds, with prompts of up
    to so many *blocks* of tokens.
    """
    which, start, length = random.random(3).tolist()
    patience = 4 / 3 * job.deadline + 2 * job.longest(*(blocks * most for most in LONGEST))
    writers = len(job.prefills) * job.prefill.size
    gpu = int(which * (writers + len(job.decodes) * job.decode.size))
    link = f"node0/gpu{gpu}/nvlink.{'out' if gpu < writers else 'in'}"
    squeeze = Squeeze(link, start * busy, start * busy + patience * (1.5 + length), 0.0)
    return replace(faults, squeezes=(squeeze,)), replace(engine, timeout=4 * patience)


def slow_loads(random: np.random.Generator, job: Deployment, busy: float) -> Squeeze:
    """Return that a rank of prefill reads from its tiers for longer than its leader, over forwards of that."""
    instance, which, start, factor = random.random(4).tolist()
    size = job.prefill.size
    gpu = size * int(instance * len(job.prefills)) + (1 + int(which * (size - 1)) if size > 1 else 0)
    begins = 0.5 * start * busy
    return Squeeze(f"node0/gpu{gpu}/pcie.in", begins, begins + busy + 0.5, 10.0 ** (-3.0 + 2.0 * factor))


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


def card_outages(random: np.random.Generator, machine: Machine, span: float) -> list[CardOutage]:
    """Return when network cards of *machine* fail, one to three times, for a moment or longer than transfers may."""
    cards = []
    for _ in range(1 + int(3 * random.random())):
        node, card = int(random.integers(machine.nodes)), int(random.integers(machine.nic.count))
        start, seconds = float(random.uniform(0.0, span / 2)), 10.0 ** float(random.uniform(-3.0, 0.0))
        cards.append(CardOutage(node, card, start, start + seconds))
    return cards


# --- after a message ---------------------------------------------------------------------------------------------

_OFTEN = {"Arrival": 2, "Destination": 2, "PrefillDone": 3, "ReadDone": 9, "ReadRequest": 3, "RegisterPool": 3}
_OFTEN |= {
    "RoomQuery": 6,
    "TransferDone": 2,
    "MovePrefixes": 4,
    "PrefixesWritten": 2,
    "StagingReply": 2,
    "StagingRequest": 6,
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
    kinds = sorted(possible(scenario.job), key=lambda kind: (-(turns[kind] ** (1 / _OFTEN.get(kind, 1))), kind))
    number = 1 + int(10.0 ** random.uniform(0.0, np.log10(_MOST)))
    chances = random.random((2, 12)).tolist()
    lags, seconds = random.random(2).tolist()
    words = random.integers(1 << 20, size=len(chances)).tolist()
    # what is behind a late message waits, too, and whoever hears nothing for a deadline ends
    never = scenario.faults.lagging or scenario.job.deadline < DEADLINE
    if lags < 0.45 and not never and kinds[0] != "ReadDone":
        # the message itself is late, or may be, or the word of who comes back; an address meets early ones
        names = kinds[:1] if lags < 0.3 else ["RegisterRank"]
        names = [*names, "ConnectPeer"] if names == ["RegisterPool"] else names
        mean = min(10.0 ** (-3.0 + 2.5 * seconds), DEADLINE / 8)
        late = tuple(lag(name, mean) for name in names)
        scenario = replace(scenario, faults=replace(scenario.faults, lagging=late))
    rehearsal = _Rehearsal(kinds[:4], number)
    model = Model(
        scenario.machine, scenario.engine, memory="tracked", seed=scenario.seed, faults=scenario.faults,
        limit=scenario.faults.until, observer=rehearsal, collective=scenario.collective, outages=scenario.cards,
    )  # fmt: skip
    with suppress(_Enough):
        model.run(scenario.specs, scenario.kill, scenario.restart)
    moment = next((heard[-1] for heard in rehearsal.heard.values() if heard), None)
    if moment is None:
        return scenario
    asked = isinstance(decode(moment.payload), RoomQuery)  # whose answer comes soon
    asks_for_slot = isinstance(decode(moment.payload), StagingRequest)
    lost, at, cancels, faults = {*others}, moment.at, dict(scenario.cancels), scenario.faults
    kill, restart, misspeaks = dict(scenario.kill), dict(scenario.restart), dict(scenario.misspeaks)
    spoken = dict[str, int]()
    for turn, (what, who, which, after, again, rest, held, before, later, long, more, twice) in enumerate(chances):
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
                misspeaks |= {rank: (at + 1e-5 * turn, to[int(later * len(to))]) for turn, rank in enumerate(speaks)}
                spoken |= dict.fromkeys(speaks, words[turn])
                began = max(began, at + 0.1)
            else:
                kill[name] = at
                if twice < 0.25 and len(ranks) > 1:  # another one of its next incarnation is lost, too
                    began, then = at + 0.12 + 0.1 * again, 0.0
                    kill[next(rank for rank in ranks if rank != name)] = began + 10.0 ** (-2.0 + 1.5 * later)
            if what >= 0.43 and held < (0.8 if asks_for_slot else 0.5):
                # a question for a slot comes when it is proven that nothing of its writer moves
                least = 0.15 if asks_for_slot else 0.0
                first, comes = max(0.0, at - 10.0 ** (-4.5 + 2.5 * before)), began + least + 10.0 ** (-5.0 * later)
                ways = (False,) if least else directions(scenario.job, 2 * held)
                stale = tuple(Stale(name, first, at, comes, received) for received in ways)
                faults = replace(faults, stale=(*faults.stale, *stale))
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
    if who < 0.6 and isinstance(decode(moment.payload), StagingRequest):
        of = [moment.sender]
    return of[int(which * len(of))]


def _is_answered(moment: _Heard) -> bool:
    # Whether decode waits for prefill's word, if prefill looks what has been read.
    return isinstance(decode(moment.payload), ReadDone)
