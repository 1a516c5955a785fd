# SPDX-License-Identifier: Apache-2.0
"""Who may say what, to whom and when: a part of `pdsim.verify.invariants`.

Who speaks about a room is of an incarnation that it was given to, and what is said has happened on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

from pdsim.kv.messages import (
    ROUTER,
    Abort,
    Arrival,
    ConnectPeer,
    Destination,
    Dropped,
    Fence,
    Finished,
    Gone,
    KvMessage,
    PrefillDone,
    RankQuiesced,
    ReadDone,
    ReadRequest,
    RegisterPool,
    RoomLocations,
    RoomQuery,
    StagingRelease,
    StagingReply,
    StagingRequest,
    Submit,
    TransferDone,
    instance_of,
    leader,
    rank_name,
)
from pdsim.kv.push import KvSender
from pdsim.serving.rank_process import Room
from pdsim.serving.router import Router
from pdsim.transfer import Transfer
from pdsim.verify.waits import GIVEN_UP

_OF_ROOMS = (
    *(Abort, Arrival, Destination, Finished, PrefillDone, RankQuiesced, ReadDone, ReadRequest),
    *(StagingRelease, StagingReply, StagingRequest, TransferDone),
)
"""Messages about a room: only the ranks that were given the room may send them."""

_ENDS = Abort, Finished, TransferDone
_SUCCEEDS = Finished, PrefillDone


class SpeechChecker:
    """Calls *report* with an invariant and a text for what must not be said, or is done without it.

    *reports* keeps how a room ended, by room and rank; *moved* the rooms that a transfer was posted for.
    """

    def __init__(
        self, report: Callable[[str, str], None], reports: Mapping[tuple[str, int], str], moved: Set[int]
    ) -> None:
        self._report = report
        self._reports = reports
        self._moved = moved
        self._members: dict[str, Any] = {}
        self._given: dict[int, set[str]] = {}  # by room: incarnations
        self._until: dict[str, int] = {}  # by instance: the start of its newest process that was told to end
        self._aborts = Counter[tuple[str, int]]()  # by rank and room: questions of the router without an answer
        self._quiet: dict[tuple[int, int], set[str]] = {}  # by program of a leader and room: ranks that said so
        self._told: set[int] = set()  # rooms that the router gives up, or hears to have ended
        self._failed: set[int] = set()  # since the last message
        self._fences: set[tuple[str, str, int]] = set()  # questions for a proof: sender, receiver and number
        self._refused: set[tuple[int, int, str]] = set()  # by program and room: decode ranks without a slot for it
        self._asking: set[int] = set()  # programs that have asked where rooms are, and have no answer
        self._looking: Any = None  # the sender whose scheduler looks which rooms are written
        self._aborted: set[tuple[int, int]] = set()  # by part and room: those that its leader has stopped

    def joined(self, member: Any) -> None:
        """Watch *member*, a rank's program."""
        self._members[member.rank.name] = member
        if isinstance(member, Router):
            return
        endpoint = member.rank.endpoint
        for name in ("write", "read"):
            setattr(endpoint, name, partial(self._posts, member, getattr(endpoint, name)))
        peers: Any = getattr(member.mover.peers, "_peers", None)
        part: Any = getattr(member.mover, "sender", None)
        if part is not None:
            part.abort = partial(self._stops, part, part.abort)
            part.report = partial(self._tells, member.rank.name, part, part.report)
            if isinstance(part, KvSender) and part._policy.notify == "poll":
                polling: Any = part
                polling._look = partial(self._looks, part, part._look)
        if hasattr(peers, "connect"):
            peers.connect = partial(self._connects, member, peers.connect)
        if StagingReply in member.handlers:
            member.handlers[StagingReply] = partial(self._granted, member, member.handlers[StagingReply])
        if RoomLocations in member.handlers:
            member.handlers[RoomLocations] = partial(self._located, member, member.handlers[RoomLocations])
        if member.scheduler is not None:
            member.handlers[RankQuiesced] = partial(self._quiesced, member, member.handlers[RankQuiesced])
            member.scheduler.forget = partial(self._forgets, member, member.scheduler.forget)

    def changes(self, room: Room, state: str) -> None:
        """Take note that *room* comes to another *state*; with the next message the router knows why it fails."""
        if state == "failed":
            self._failed.add(room.request.room)

    def said(self, sender: str, receiver: str, message: KvMessage) -> None:
        """Check that *sender* may send *message* to *receiver* now."""
        if isinstance(message, _OF_ROOMS):
            self._about(sender, receiver, message)
        elif isinstance(message, RoomQuery):
            self._asks(self._members[sender], message)
        elif isinstance(message, Submit):
            self._submits(receiver, message)
        elif isinstance(message, Gone) and sender == ROUTER:
            instance = instance_of(message.instance)
            if message.until < self._until.get(instance, -1) and receiver in self._members[ROUTER].job.ranks(
                instance
            ):
                self._report("I11", f"the message that ends {receiver} leaves out processes named before")
            self._until[instance] = max(message.until, self._until.get(instance, -1))
        elif isinstance(message, ConnectPeer) and message.started <= self._until.get(instance_of(receiver), -1):
            self._report("I11", f"{receiver} is in {message.incarnation}, and its process was told to end")
        elif isinstance(message, Fence) and (sender, receiver, message.number) in self._fences:
            self._report("I1", f"{sender} asks {receiver} twice under the number {message.number}")
        elif isinstance(message, Fence):
            self._fences.add((sender, receiver, message.number))
        elif isinstance(message, Dropped):
            self._aborts[sender, message.room] -= 1
            if self._aborts[sender, message.room] < 0:
                self._report("I11", f"{sender} answers of room {message.room}, and was not asked")
            if message.untouched and message.room in self._moved:
                self._report(
                    "I11", f"{sender} says that nothing of room {message.room} moved; a transfer was posted"
                )
        if isinstance(message, _ENDS) and (
            sender == ROUTER or isinstance(message, Finished) or getattr(message, "reason", False)
        ):
            self._told.add(message.room)
        if self._failed:
            unsaid = self._failed - self._told
            if unsaid and self._members[ROUTER].rank.endpoint.ended is None:
                what = f"room {min(unsaid)} has failed"
                self._report("I5", f"{what}, and the router neither hears why nor has asked for that")
            self._failed.clear()
        incarnation = getattr(message, "incarnation", "")
        if incarnation and instance_of(incarnation) != instance_of(receiver):
            self._report("I1", f"{sender} sends {type(message).__name__} for {incarnation} to {receiver}")

    def _about(self, sender: str, receiver: str, message: Any) -> None:
        given, what = self._given.get(message.room, set()), f"{type(message).__name__} of room {message.room}"
        if sender == ROUTER:
            self._aborts[receiver, message.room] += isinstance(message, Abort)
            return
        member, own = self._members[sender], self._members[leader(sender)].scheduler
        within = isinstance(message, RankQuiesced) and receiver == leader(sender)
        if within and own is not None and message.room not in own.rooms:
            return  # the answer to what a process before its leader's asked, which its leader ignores
        if member.incarnation not in given:
            self._report("I1", f"{sender} of {member.incarnation!r} sends {what}, which {sorted(given)} have")
        done = isinstance(message, _SUCCEEDS) or (
            isinstance(message, TransferDone) and not message.reason and receiver == ROUTER
        )
        ranks = (sender, *member.followers) if done else ()
        for rank in ranks:
            if self._reports.get((rank, message.room)) != "succeeded":
                self._report("I1", f"{sender} sends {what}, and {rank} has not all of it")
        room = own.rooms.get(message.room) if done and own is not None else None
        if room is not None and room.state in GIVEN_UP:
            self._report("I1", f"{sender} sends {what}, which is {room.state} there")
        if isinstance(message, StagingRequest) and (id(member), message.room, receiver) in self._refused:
            self._report("I4", f"{sender} sends {what} to {receiver}, which has refused it a slot")
        if isinstance(message, TransferDone) and message.lost:
            ranks = self._members[ROUTER].job.ranks(instance_of(message.lost))
            lives = [self._members[rank] for rank in ranks if rank in self._members]
            if lives and all(one.incarnation == message.lost and one.rank.endpoint.ended is None for one in lives):
                self._report("I5", f"{sender} says that {message.lost} is lost, and all of it lives")

    def _submits(self, receiver: str, message: Submit) -> None:
        self._given.setdefault(message.room, set()).update(
            name for name in (message.prefill, message.decode) if name
        )
        request = self._members[ROUTER]._rooms.get(message.room)
        if request is None or request.lost or request.status or request.finished is not None:
            self._report("I11", f"room {message.room} is sent to {receiver}, and is not open any more")
        elif request.prefilled or request.answered != (message.source is not None):
            self._report("I11", f"room {message.room} is sent to {receiver} as one that has been at prefill already")

    def _posts(self, member: Any, post: Callable[..., Transfer], *arguments: Any, **options: Any) -> Transfer:
        transfer = post(*arguments, **options)
        failed = transfer.triggered and not transfer.ok and not transfer.settled.triggered
        if failed and all(one.transfer is not transfer for one in member.rank.endpoint.moving.values()):
            self._report("I8", f"{transfer.label!r} of {member.rank.name} has failed, and never settles")
        return transfer

    def _connects(self, member: Any, connect: Callable[[RegisterPool], None], message: RegisterPool) -> None:
        if message.incarnation != member.incarnation:
            what = f"{member.rank.name} of {member.incarnation} connects to {message.instance}"
            self._report("I3", f"{what} by an address for {message.incarnation}")
        connect(message)
        name = rank_name(instance_of(message.instance), message.index)
        there: Any = self._members.get(name)
        connection = member.rank.endpoint._connections.get(name)
        current = there is not None and connection is not None and connection.remote is there.rank.endpoint
        fence = getattr(there.mover, "fence", None) if current else None
        if fence is not None and not connection.void and fence.is_quiesced(member.incarnation):
            self._report("I3", f"{member.rank.name} reaches {name}, which has proof that it is gone")
        if current and there.incarnation != message.instance:
            what = f"{name} of {there.incarnation!r} by an address of {message.instance}"
            self._report("I3", f"{member.rank.name} connects to {what}")

    def _stops(self, part: Any, abort: Callable[[int], None], room: int) -> None:
        self._aborted.add((id(part), room))
        abort(room)

    def _tells(self, rank: str, part: Any, report: Callable[[Any], None], message: Any) -> None:
        if isinstance(message, RankQuiesced) and (id(part), message.room) not in self._aborted:
            self._report("I3", f"{rank} says that room {message.room} is quiet, which its leader has not stopped")
        early = isinstance(part, KvSender) and part._policy.notify == "poll" and part._computing
        if early and isinstance(message, TransferDone) and not message.reason and part is not self._looking:
            self._report("I15", f"{rank} says that room {message.room} is written before its scheduler looks")
        report(message)

    def _granted(self, member: Any, grant: Callable[..., None], sender: str, message: StagingReply) -> None:
        if message.position < 0:
            self._refused.add((id(member), message.room, sender))
        grant(sender, message)

    def _located(self, member: Any, locate: Callable[..., None], sender: str, message: RoomLocations) -> None:
        if message.incarnation == member.incarnation:
            self._asking.discard(id(member))
        locate(sender, message)

    def _asks(self, member: Any, message: RoomQuery) -> None:
        if id(member) in self._asking:
            self._report("I1", f"{member.rank.name} asks where rooms are before it has its answer")
        self._asking.add(id(member))
        if over := {*message.rooms} - member.scheduler.handoff._lookup._open.keys():
            self._report("I1", f"{member.rank.name} asks where rooms {sorted(over)} are, which it does not wait for")

    def _looks(self, part: Any, look: Callable[[Any], None], what: Any) -> None:
        self._looking = part
        look(what)
        self._looking = None

    def _quiesced(self, member: Any, quiesced: Callable[..., None], sender: str, message: RankQuiesced) -> None:
        self._quiet.setdefault((id(member), message.room), set()).add(sender)
        quiesced(sender, message)

    def _forgets(self, member: Any, forget: Callable[[int], None], number: int) -> None:
        room = member.scheduler.rooms.get(number)
        if room is not None and room.failed:
            missing = {member.rank.name, *member.followers} - self._quiet.get((id(member), number), set())
            if missing:
                self._report(
                    "I3", f"{member.rank.name} frees room {number}, and {min(missing)} has not said it is quiet"
                )
        forget(number)
