# SPDX-License-Identifier: Apache-2.0
"""Whether the router serves by its own accounts, and tells who must know: a part of `pdsim.verify.invariants`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from pdsim.kv.messages import (
    ROUTER,
    Abort,
    ConnectPeer,
    Gone,
    KvMessage,
    Stop,
    TransferDone,
    instance_of,
)
from pdsim.serving.router import RoutedRequest, Router

_ROUNDING = 1e-9
"""Seconds by which two sums of the same times may differ."""


class RoutingChecker:
    """Calls *report* with an invariant (I1, I5, I11, I12 or I14) and a text for what the router does wrongly."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self._router: Any = None
        self._done = 0, 0  # requests that have all their tokens, and how many those were
        self._speaker = "", 0  # whose word about a failed room is heard now
        self._introduced: set[tuple[str, str, str]] = set()  # rank, its incarnation, and the peer to connect
        self._members: dict[str, Any] = {}
        self._looked = 0.0  # when the router looked last who is silent
        self._living: set[str] = set()  # ranks, when the router stopped
        self._stopped: set[str] = set()

    def joined(self, member: Any) -> None:
        """Watch *member*, a rank's program."""
        self._members[member.rank.name] = member
        watched: Any = member
        watched.refuse = partial(self._refuses, member, member.refuse)
        if not isinstance(member, Router):
            return
        router: Any = member
        self._looked = member.clock.now
        watched = member.membership
        watched.lose_silent = partial(self._looks, watched, watched.lose_silent)
        self._router, handlers = router, router.handlers
        router._send_out = partial(self._sends, router._send_out)
        router._close = partial(self._closes, router._close)
        handlers[TransferDone] = partial(self._hears, handlers[TransferDone])
        handlers[Gone] = partial(self._loses, handlers[Gone])

    def said(self, sender: str, receiver: str, message: KvMessage) -> None:
        """Check that the router says *message* once, in time, and after what must be known before."""
        if sender != ROUTER:
            return
        if isinstance(message, Abort):
            if self._speaker == (receiver, message.room):
                self._report("I1", f"{receiver} reports room {message.room} as failed and gets an Abort of it")
        elif isinstance(message, ConnectPeer):
            key = receiver, message.incarnation, message.peer
            if key in self._introduced:
                self._report("I1", f"{receiver} of {message.incarnation} gets ConnectPeer twice for {message.peer}")
            self._introduced.add(key)
        elif isinstance(message, Stop):
            self._living = self._living or {name for name in self._members if self._lives(name)}
            self._stopped.add(receiver)

    def finish(self) -> None:
        """Check that every rank that lived then was told to stop, if any was."""
        if missing := self._living - self._stopped - {ROUTER}:
            self._report("I5", f"the router stops, and has not told {sorted(missing)}")

    def _lives(self, rank: str) -> bool:
        member = self._members[rank]
        return member.rank.endpoint.ended is None and not member.has_ended

    def _looks(self, membership: Any, look: Callable[[], None]) -> None:
        now, deadline, before = self._router.clock.now, self._router.job.deadline, self._looked
        self._looked = now
        if now - before > deadline / 3 + _ROUNDING:
            self._report(
                "I12", f"the router asks who lives after {now - before:g} s, its deadline is {deadline:g} s"
            )
        look()
        for rank, at in membership.last_heard.items():
            if now - at > deadline + _ROUNDING:
                self._report("I12", f"{rank} has been silent for {now - at:g} s, and is not lost")

    def _sends(self, send_out: Callable[..., None], request: RoutedRequest, prefill: str, decode: str) -> None:
        router, job = self._router, self._router.job
        waiting = router.registry.prefills.load[instance_of(prefill)]
        if job.shed and waiting >= job.shed and not request.priority and request.number < len(router.log):
            self._report("I11", f"request {request.number} is sent out, and {waiting} tokens are at {prefill}")
        send_out(request, prefill, decode)
        done, tokens = self._done
        expected = request.output if job.output_known else tokens // done if done else 0
        if request.expected != expected:
            self._report("I14", f"{request.expected} tokens of room {request.room} are expected, not {expected}")

    def _closes(self, close: Callable[..., None], request: RoutedRequest, status: str) -> None:
        registry, shed = self._router.registry, self._router.job.shed
        if side := re.search(r"no (\w+) instance is left", status):
            loads = registry.prefills.load if side[1] == "prefill" else registry.decodes.load
            if serving := loads.keys() - registry.resting:
                self._report("I11", f"request {request.number} has no {side[1]}, and {sorted(serving)} serve")
        if refused := re.search(r"Shed: (\d+) tokens outstanding at (\w+)", status):
            waiting = registry.prefills.load.get(refused[2])
            if int(refused[1]) != waiting or waiting < shed:
                self._report("I11", f"request {request.number} is refused by {status}, there are {waiting}")
        close(request, status)
        if request.status == "ok":
            self._done = self._done[0] + 1, self._done[1] + request.output

    def _hears(self, hear: Callable[..., None], sender: str, message: TransferDone) -> None:
        request = self._router._rooms.get(message.room)
        if message.reason and request is not None and (not request.lost or sender == request.asked):
            self._speaker = sender, message.room  # while another is asked, a second loss may end the room
        hear(sender, message)
        self._speaker = "", 0
        self._gone(sender, message.lost)

    def _loses(self, lose: Callable[..., None], sender: str, message: Gone) -> None:
        lose(sender, message)
        self._gone(sender, message.instance)

    def _gone(self, sender: str, incarnation: str) -> None:
        if incarnation and self._router.registry.alive(incarnation):
            self._report("I5", f"{sender} says that {incarnation} is lost, and the router keeps it")

    def _refuses(self, member: Any, refuse: Callable[[str, str], None], sender: str, reason: str) -> None:
        refuse(sender, reason)
        instance, registry, channel = instance_of(sender), self._router.registry, member.rank.channel
        if channel._ranks[sender] not in channel.dropped:
            self._report("I1", f"{member.rank.name} refuses {sender}, and goes on to hear it")
        if member is self._router and instance in registry._instances and registry.formed(instance):
            self._report("I5", f"the router refuses {sender}, and keeps {instance}")
