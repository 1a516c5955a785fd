# SPDX-License-Identifier: Apache-2.0
"""Messages of a scenario that come late: after others of their sender or of other ranks, or after a restart.

The transport promises an order only within a socket.  So between two ranks what is behind a late message is late,
too, and all that third ranks say meanwhile overtakes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from pdsim.kv.messages import instance_of
from pdsim.serving.deployment import Deployment
from pdsim.sim.faults import Lag, Stale
from pdsim.verify.reached import MESSAGES

DEADLINE = 2.0
"""Seconds of silence after which a rank counts as gone."""

_OF_PULL = {"PrefillDone", "ReadDone", "ReadRequest", "Renew"}
_OF_PUSH = {"Arrival", "Destination"}
_OF_RINGS = {"StagingRelease", "StagingReply", "StagingRequest"}
_OF_TIERS = {"MovePrefixes", "PrefixesWritten"}
_OF_QUESTIONS = {"RoomLocations", "RoomQuery"}
_NEVER = {"Ping", "Pong", "Stop", "Forwards"}  # at any time, at the end, and not beside checkers
_BETWEEN_RANKS = {"Arrival", "Destination", "Forward", "MovePrefixes", "PrefixesWritten", "RankQuiesced", "ReadDone"}
_BETWEEN_RANKS |= {"ReadRequest", "RegisterPool", "Renew", *_OF_RINGS}
"""Which the router neither sends nor gets: what is behind them may be late for as long as it likes."""

_OFTEN = {"Abort": 2, "Arrival": 10, "ConnectPeer": 3, "Destination": 2, "RegisterPool": 6, "RoomQuery": 12}
_OFTEN |= {"StagingRequest": 4, "Submit": 2}
"""By how much more likely these are than others."""


def possible(job: Deployment) -> set[str]:
    """Return the kinds of messages that ranks of *job* may send."""
    pulls, policy = job.engine.handoff == "pull", job.handoff
    never = _NEVER | (_OF_PUSH if pulls else _OF_PULL)
    if "control" not in (policy.metadata, policy.metadata_fallback) and policy.notify != "message":
        never |= {"Arrival"}  # with a write
    never |= set() if job.staging else _OF_RINGS
    never |= set() if job.cache.tiered else _OF_TIERS
    never |= set() if job.query_dp else _OF_QUESTIONS
    return {*MESSAGES} - never


def lag(name: str, mean: float, sender: str = "", receiver: str = "") -> Lag:
    """Return that messages called *name* are late: their tag is in their bytes, after its length (msgpack)."""
    return Lag(bytes([0xA0 + len(name)]) + name.encode(), mean, sender, receiver)


def lagging(random: np.random.Generator, mean: float, stages: bool) -> tuple[Lag, ...]:
    """Return that three kinds of messages are late, with *stages* two of staging."""
    # ranks always say in time that they live
    names = random.permutation([name for name in MESSAGES if name not in ("Ping", "Pong")]).tolist()
    names.sort(key=lambda name: not (stages and name.startswith("Staging")))  # which occur nowhere else
    return tuple(lag(name, mean) for name in (names[1:4] if stages else names[:3]))


def overtaken(
    random: np.random.Generator, job: Deployment, ranks: Sequence[str], never: Collection[str]
) -> tuple[Lag, ...]:
    """Return that two to four kinds of messages of *job* but *never* are late, most of them at one of *ranks*.

    Between ranks that is for up to a third of a second, in the mean: others have noticed by then that one has ended.
    """
    names = sorted(possible(job) - {*never})
    turns = dict(zip(names, random.random(len(names)).tolist(), strict=True))
    names.sort(key=lambda name: -(turns[name] ** (1 / _OFTEN.get(name, 1))))
    lags = []
    for name in names[: 2 + int(3 * random.random())]:
        way, which, long = random.random(3).tolist()
        mean, rank = 10.0 ** (-3.5 + 3 * long), ranks[int(which * len(ranks))]
        if name == "RegisterPool" and random.random() < 0.7:  # as late as the first forwards end
            mean = 10.0 ** (-3.0 + long)
        mean = mean if name in _BETWEEN_RANKS else min(mean, DEADLINE / 20)
        lags.append(lag(name, mean, *((rank, "") if way < 0.35 else ("", rank) if way < 0.7 else ("", ""))))
    return tuple(lags)


def unanswered(random: np.random.Generator, job: Deployment) -> tuple[Lag, ...]:
    """Return that one side of *job* hears late of what the other has ended, and so may ask when that is over."""
    names = ("PrefillDone",) if job.engine.handoff == "pull" else ("TransferDone", "Arrival")
    mean = 10.0 ** float(random.uniform(-3.0, -1.0))
    return tuple(lag(name, mean) for name in names)


def stale(
    random: np.random.Generator,
    job: Deployment,
    ranks: Sequence[str],
    kill: dict[str, float],
    restart: dict[str, float],
    arrivals: Sequence[float],
) -> Iterator[Stale]:
    """Yield what each rank said last that starts again, or was told: it arrives when its next process runs.

    If nothing else does, one is killed and starts again: before it is heard of, or after one of the *arrivals*, half
    of the time the first.
    """
    name = ranks[int(random.integers(len(ranks)))]
    early, when, again = random.random(3).tolist()
    if not kill.keys() & restart.keys():
        first = arrivals[int(random.random() * len(arrivals)) if early < 0.35 else 0]
        kill[name] = 10.0 ** (-5.0 + 2 * when) + (first if early < 0.7 else 0.0)
        began = kill[name] + 10.0 ** (-2.0 + 2 * again)
        others = [other for other in ranks if instance_of(other) == instance_of(name)]
        # its leader hears a follower's words if all start at once
        restart |= dict.fromkeys(others, began + 1.5 * DEADLINE * (again < 0.5)) | {name: began}
    for rank in ranks:
        before, after = (10.0 ** random.uniform((-4.0, -5.5), (-2.0, 0.0))).tolist()
        ways, proven = random.random(2).tolist()
        if rank in kill and kill[rank] < restart.get(rank, 0.0):
            # a third is late when it is proven that nothing of the earlier process moves
            comes = restart[rank] + (0.1 + 0.5 * after if proven < 1 / 3 else after)
            for received in directions(job, ways):
                yield Stale(rank, max(0.0, kill[rank] - before), kill[rank], comes, received)


def directions(job: Deployment, chance: float) -> tuple[bool, ...]:
    """Return whether what a rank sends is late (False), what it is sent (True), or both.

    Who waits for the router no longer than a short `Deployment.deadline` ends if that is late.
    """
    return ((False,), (True,), (False, True))[int(3 * chance)] if job.deadline == DEADLINE else (False,)
