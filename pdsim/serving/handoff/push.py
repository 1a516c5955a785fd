# SPDX-License-Identifier: Apache-2.0
"""Push: prefill writes each chunk into pages that decode has reserved, as soon as it is computed (SGLang).

=====================  =====================================================================================
`Submit`               router to both leaders; rooms meet by their number, whichever side hears first
`Destination`          decode leader to prefill leader: here are the pages, and a row for metadata
`Arrival`              with each write, prefill rank to decode rank; `TransferDone` goes to the decode leader
`TransferDone`         prefill leader to router: all of it is written
`Abort`, `Released`    decode leader to prefill leader: give it up; and back: nothing of it moves any more
=====================  =====================================================================================

Pages at decode that may still be written are never handed out again: a room that ends early is in quarantine until
`Released` or, if its prefill instance is gone, until every decode rank has proof that nothing of it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from pdsim.core.clock import Clock
from pdsim.kv.contents import Contents
from pdsim.kv.layout import KvLayout
from pdsim.kv.messages import (
    Abort,
    Arrival,
    Chunk,
    Destination,
    Forward,
    KvMessage,
    Ready,
    Released,
    RoomQuery,
    RoomRegistered,
    RoomReply,
    StagingRelease,
    StagingReply,
    StagingRequest,
    Submit,
    TransferDone,
)
from pdsim.kv.pages import Pages, SlotPool
from pdsim.kv.push import KvSender
from pdsim.kv.receiver import KvReceiver
from pdsim.kv.rooms import OVER, ExpiringMap, Timers
from pdsim.serving.decode import DecodeScheduler
from pdsim.serving.decode_steps import DecodeRequest
from pdsim.serving.deployment import ROUTER, epoch_of, index_of, instance_of, leader
from pdsim.serving.membership import FenceCount, PeerConnector, PeerFence, ReadyCount
from pdsim.serving.prefill import PrefillRequest, PrefillScheduler
from pdsim.serving.rank_process import EngineRank, Handler

__all__ = ["PATIENCE", "RETRY", "Push", "RoomLookup"]

RETRY = 0.01
"""Seconds after which a room is asked for again that the service did not know.

Assumed: about an iteration of a decode scheduler, which is when SGLang's asks again.
"""

PATIENCE = 15.0
"""Seconds after which a room that nobody knows is given up; assumed: as long as SGLang's asks for a server."""


class RoomLookup:
    """Requests whose prefill instance is not known yet.

    *ask* is called with all rooms that have come since the last question, once that is answered; *located* with a
    request that names its instance, *lost* with one that the service has not known for `PATIENCE` seconds.

    One question is under way at a time; rooms that come meanwhile are in the next.  Used where ``query_dp`` leaves
    the choice of a prefill group to the engine.
    """

    def __init__(
        self,
        clock: Clock,
        ask: Callable[[tuple[int, ...]], None],
        located: Callable[[Submit], None],
        lost: Callable[[Submit], None],
    ) -> None:
        self._clock = clock
        self._ask = ask
        self._located = located
        self._lost = lost
        self._open: dict[int, Submit] = {}
        self._until: dict[int, float] = {}  # when to give up
        self._fresh: dict[int, None] = {}  # to be asked for, in order
        self._asked: tuple[int, ...] = ()  # the question that is not answered yet

    def __len__(self) -> int:
        """Return how many requests are open."""
        return len(self._open)

    def add(self, request: Submit) -> None:
        """Find out where *request* went; *located* or *lost* is called with it, unless it is dropped before."""
        self._open[request.room] = request
        self._until[request.room] = self._clock.now + PATIENCE
        self._again(request.room)

    def drop(self, room: int) -> bool:
        """Give *room* up; return whether it was open."""
        self._until.pop(room, None)
        self._fresh.pop(room, None)
        return self._open.pop(room, None) is not None

    def answer(self, incarnations: Mapping[int, str]) -> None:
        """Take note of where the rooms of the last question are.

        Those that are not in *incarnations* are not known yet: they are asked for again after `RETRY` seconds, and
        lost after `PATIENCE`.  The next question is asked at once, if rooms have come meanwhile.
        """
        asked, self._asked = self._asked, ()
        for room in asked:
            request = self._open.get(room)
            if request is None:
                continue
            if room in incarnations:
                self.drop(room)
                self._located(replace(request, prefill=incarnations[room]))
            elif self._clock.now >= self._until[room]:
                self.drop(room)
                self._lost(request)
            else:
                self._clock.call_at(self._clock.now + RETRY, self._again, room)
        self._next()

    def _again(self, room: int) -> None:
        if room in self._open:  # or it was dropped while its time to be asked for again came
            self._fresh[room] = None
            self._next()

    def _next(self) -> None:
        if self._fresh and not self._asked:
            self._asked = tuple(self._fresh)
            self._fresh.clear()
            self._ask(self._asked)


class Push:
    """Both sides hear of a request at once; decode says where to write; first-token metadata goes with the KV."""

    serial = False

    def prefill_mover(self, rank: EngineRank) -> PushPrefill:
        """Return what writes the KV of a prefill rank."""
        return PushPrefill(rank)

    def prefill_leader(self, scheduler: PrefillScheduler) -> PushPrefillLeader:
        """Return what waits for pages at decode."""
        return PushPrefillLeader(scheduler)

    def decode_mover(self, rank: EngineRank) -> PushDecode:
        """Return what notices the KV that arrives at a decode rank."""
        return PushDecode(rank)

    def decode_leader(self, scheduler: DecodeScheduler) -> PushDecodeLeader:
        """Return what says where to write."""
        mover = scheduler.engine.mover
        assert isinstance(mover, PushDecode)
        return PushDecodeLeader(scheduler, mover)


class PushPrefill:
    """Writes what a prefill rank computes to the decode ranks that need it.

    It connects to those that name its own incarnation, once the router has sent a `ConnectPeer` for theirs.
    """

    def __init__(self, engine: EngineRank) -> None:
        job = engine.job
        self.engine = engine
        self.sender = KvSender(
            engine.rank,
            job.prefill_layout(engine.index),
            job.prefill,
            engine.index,
            engine.tell_leader,
            job.all_cp_ranks,
            job.handoff,
            job.staging,
            job.checked,
        )
        self._connector = PeerConnector(engine, self.sender.links, self._connected)
        engine.handlers[StagingReply] = self.sender.grant

    @property
    def layout(self) -> KvLayout:
        """The pool of this rank."""
        return self.sender.layout

    @property
    def contents(self) -> Contents:
        """What the pool of this rank holds."""
        return self.sender.contents

    def __len__(self) -> int:
        """Return the number of rooms that are not over on this rank."""
        return len(self.sender)

    def begin(self) -> None:
        """Do nothing: nobody writes here."""

    def report(self) -> dict[str, Any]:
        """Return why metadata did not go the way of the policy, and how often."""
        return {"fallbacks": self.sender.fallbacks}

    def progressed(self) -> bool:
        """Return whether a write is under way, or has succeeded since the last call."""
        return self.sender.progressed()

    def connect_peer(self, peer: str) -> None:
        """Connect to the ranks of *peer* that make themselves known."""
        self._connector.connect_peer(peer)

    def drop(self, incarnation: str) -> None:
        """Forget the ranks of *incarnation*."""
        self._connector.disconnect_peer(incarnation)

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """Take note of *chunks*, whose forward is asked for."""
        self.sender.expect(chunks)

    def started(self, message: Forward) -> None:
        """Write what is cached, and with ``layerwise`` each plane of the rest once its layer is computed."""
        for chunk in message.cached:
            self.sender.send(chunk)
        if self.engine.job.layerwise:
            for chunk in message.chunks:
                self.sender.send(chunk, message.seconds)

    def computed(self, chunks: Iterable[Chunk], last: bool) -> None:
        """Write *chunks*, whose forward has ended; with ``layerwise`` their planes have gone."""
        for chunk in chunks:
            if self.engine.job.layerwise:
                self.sender.computed(chunk)
            else:
                self.sender.send(chunk)
        if last:
            self.sender.poll()

    def posted(self) -> float:
        """Return until when the scheduler's thread posts."""
        return self.sender.posted

    def abort(self, room: int) -> None:
        """Give *room* up."""
        self.sender.abort(room)

    def _connected(self, incarnation: str) -> None:
        if self.sender.links.connected(incarnation, self.engine.job.decode):
            self.engine.tell_leader(Ready(self.engine.incarnation, incarnation))


class PushPrefillLeader:
    """Lets a request of *scheduler* start when decode has pages for it; it is over when all of it is written.

    A `Destination` may come before its `Submit`.  For one that comes after a room failed, the room is remembered for
    `OVER` seconds.
    """

    def __init__(self, scheduler: PrefillScheduler) -> None:
        engine = scheduler.engine
        self.slots = SlotPool(scheduler.job.slots)
        self.readiness = ReadyCount(scheduler.job.prefill.size)
        self._scheduler = scheduler
        self._engine = engine
        self._destinations: ExpiringMap[Destination] = ExpiringMap(engine.clock, OVER)  # before their `Submit`
        self._over: ExpiringMap[None] = ExpiringMap(engine.clock, OVER)  # rooms that failed
        self._timers = Timers(engine.clock, scheduler.job.bootstrap_timeout, self._expire)
        handlers: dict[type[KvMessage], Handler] = {
            Ready: lambda sender, message: self._count_ready(index_of(sender), message),
            Destination: self._destination,
        }
        engine.handlers |= handlers

    @property
    def open_rooms(self) -> int:
        """How many rooms wait for pages at decode, and not for ever."""
        return len(self._timers)

    def connect_peer(self, peer: str) -> None:  # noqa: ARG002 a protocol
        """Forget what ranks of an earlier incarnation of this instance were ready for."""
        self.readiness.keep(self._engine.incarnation)

    def drop(self, incarnation: str) -> None:
        """Forget which ranks were connected to *incarnation*."""
        self.readiness.lose(incarnation)

    def stop(self) -> None:
        """Do nothing: what moves ends by itself."""

    def look(self, _: Any = None) -> None:
        """Do nothing: writes carry their own notice."""

    def accept(self, room: PrefillRequest) -> None:
        """Have *room* wait for its pages on the other side, unless they are known."""
        number = room.request.room
        if self._scheduler.job.query_dp:
            self._engine.send(ROUTER, RoomRegistered(number, self._engine.incarnation))
        self._timers.add(number)
        destination = self._destinations.pop(number)
        if destination is not None:
            self._destination("", destination)

    def has_slot(self) -> bool:
        """Return whether there is a row for the metadata of one more room."""
        return self.slots.free > 0

    def start(self, room: PrefillRequest) -> bool:
        """Give *room* its pages and its row of first-token metadata; return whether there were any.

        Pages are for the whole prompt, after those that decode holds.
        """
        number, destination = room.request.room, room.destination
        assert destination is not None
        if not self.slots.free:
            return False
        given = self._scheduler.allocate(room, destination.held)
        if given is None:
            return False
        slot = self.slots.allocate(number)
        assert slot is not None
        room.start(self._scheduler.clock.now, destination, *given, slot)
        return True

    def complete(self, room: PrefillRequest) -> None:
        """Free what *room* has here, all of which every rank has written, and tell the router how many bytes."""
        self._scheduler.forget(room)
        self._engine.send(ROUTER, TransferDone(room.request.room, room.nbytes))

    def abort(self, sender: str, number: int, room: PrefillRequest | None) -> None:
        """Remember that the room is over; decode is told at once that nothing moves of one that is not there."""
        if sender != ROUTER and room is None:
            self._engine.send(sender, Released(number))
        self._over.set(number, None)
        self._destinations.pop(number)

    def failed(self, room: PrefillRequest) -> None:
        """Wait for its pages no longer."""
        self._timers.drop(room.request.room)

    def settled(self, room: PrefillRequest) -> None:
        """Tell decode that nothing of *room*, which failed, moves any more: its pages there are free."""
        self._engine.send(leader(room.request.decode), Released(room.request.room))

    def forget(self, room: PrefillRequest) -> None:
        """Give back the row of metadata, and remember *room* if it failed, lest a late `Destination` revives it."""
        number = room.request.room
        if room.failed:
            self._over.set(number, None)
        if room.has_pages:
            self.slots.release(number)

    def _destination(self, _: str, message: Destination) -> None:
        # One that comes before its `Submit` is kept; one for a room that is over, or has pages already, is ignored.
        room = self._scheduler.rooms.get(message.room)
        late = message.room in self._over or (room is not None and room.state != "waiting")
        if late or message.incarnation != self._engine.incarnation:
            self._engine.ignore()
            return
        if room is None:
            self._destinations.set(message.room, message)
            return
        self._timers.drop(message.room)
        if message.held * self._scheduler.job.page_size >= room.request.input:
            reason = f"MessageError: {message.held} pages held of {room.request.input} tokens; hold less than all"
            self._scheduler.fail(room, reason)
            return
        room.destination = message
        room.noticed = self._scheduler.clock.now
        self._scheduler.queue(room)

    def _expire(self, number: int) -> None:
        reason = f"TransferTimeout: no pages at decode within {self._scheduler.job.bootstrap_timeout:g} s"
        self._scheduler.fail(self._scheduler.rooms[number], reason)

    def _count_ready(self, rank: int, message: Ready) -> None:
        # A rank may be connected to that instance before this one is: neither incarnation may be over.
        engine = self._engine
        if self._is_over(message.peer) or (engine.incarnation and message.incarnation != engine.incarnation):
            engine.ignore()
        elif self.readiness.count(rank, message):
            engine.send(ROUTER, message)

    def _is_over(self, incarnation: str) -> bool:
        if self.readiness.lost(incarnation):
            return True
        later = (other for other in self._scheduler.worker.peers if instance_of(other) == instance_of(incarnation))
        return any(epoch_of(other) > epoch_of(incarnation) for other in later)


class PushDecode:
    """Notices the KV that arrives at a decode rank, and proves when nothing more can.

    It makes its pool known to a new incarnation of a prefill instance only once it is proven that nothing of an
    earlier one moves here any more.  So what writes here is always of one incarnation.
    """

    def __init__(self, engine: EngineRank) -> None:
        job = engine.job
        self.engine = engine
        self.receiver = KvReceiver(
            engine.rank,
            job.decode_layout(engine.index),
            engine.index,
            job.rank_map,
            lambda message, _: engine.tell_leader(message),
            engine.tell_leader,
            job.handoff,
            job.staging,
            job.checked,
        )
        self.proof = PeerFence(engine, self.receiver.writers, engine.tell_leader, self.receiver.sever)
        handlers: dict[type[KvMessage], Handler] = {
            Destination: self._reserve,
            Arrival: self._arrive,
        }
        landing = self.receiver.landing
        if landing is not None:
            handlers |= {StagingRequest: self._ask, StagingRelease: lambda _, message: landing.give_back(message)}
        engine.handlers |= handlers

    @property
    def layout(self) -> KvLayout:
        """The pool of this rank."""
        return self.receiver.layout

    @property
    def ignored(self) -> int:
        """Arrivals and questions that came too late."""
        return self.receiver.ignored

    def __len__(self) -> int:
        """Return the number of rooms that are not complete on this rank."""
        return len(self.receiver)

    def begin(self) -> None:
        """Listen to what arrives."""
        self.engine.listen(self.receiver.notice)

    def report(self) -> dict[str, Any]:
        """Return, of a staging ring, most bytes in slots, bytes held to the end, and how often there was no slot."""
        landing = self.receiver.landing
        if landing is None:
            return {}
        ring = landing.ring
        return {"staging_peak": ring.peak, "staging_held": ring.used, "staging_refused": landing.refused}

    def progressed(self) -> bool:
        """Return False: those who write know whether they do."""
        return False

    def connect_peer(self, peer: str) -> None:
        """Make this rank's pool known to *peer*, once nothing of an earlier incarnation of it moves here."""
        self.proof.introduce(peer, lambda: self.receiver.register(self.engine.incarnation, peer))

    def drop(self, incarnation: str) -> None:
        """Do nothing: the leader asks for the proof about *incarnation*."""

    def forget(self, room: int) -> None:
        """Give *room* up, of which nothing is written any more."""
        self.receiver.forget(room)

    def _reserve(self, _: str, message: Destination) -> None:
        if message.incarnation == self.engine.incarnation:
            self.receiver.reserve(message)

    def _arrive(self, _: str, message: Arrival) -> None:
        if (
            message.incarnation == self.engine.incarnation
        ):  # or it was on the way to an incarnation that is over: nobody ends its rooms here
            self.receiver.arrive(message)

    def _ask(self, sender: str, message: StagingRequest) -> None:
        if message.incarnation == self.engine.incarnation:
            self.receiver.ask(sender, message)


class PushDecodeLeader:
    """Says where the KV of a request of *scheduler* goes; it is here when every rank says so.

    The pages of a room that fails before are in quarantine until its prefill leader says that nothing of it moves.
    If that instance is gone, every rank here must have proof of it.
    """

    def __init__(self, scheduler: DecodeScheduler, mover: PushDecode) -> None:
        engine = scheduler.engine
        self.slots = SlotPool(scheduler.job.slots)
        self._scheduler = scheduler
        self._mover = mover
        self._engine = engine
        self._fences = FenceCount(engine, mover.proof, self._release)
        self._lookup = RoomLookup(engine.clock, self._ask_where, scheduler.queue, self._unknown)
        mover.receiver.report = self._arrived_here
        handlers: dict[type[KvMessage], Handler] = {
            TransferDone: lambda sender, message: self._count(index_of(sender), message, None),
            Released: self._released,
            RoomReply: self._located,
        }
        engine.handlers |= handlers

    @property
    def open_rooms(self) -> int:
        """How many rooms have a prefill instance that is not known yet."""
        return len(self._lookup)

    def connect_peer(self, peer: str) -> None:
        """Do nothing: the router says when *peer* can be reached."""

    def drop(self, incarnation: str) -> None:
        """Fail the rooms that *incarnation* was to write, and wait for the proof that it writes no more.

        The router has asked for most of them already.  It is told of those of which all was written, as far as it
        knows, and whose arrival not every rank here has reported yet.
        """
        scheduler = self._scheduler
        rooms = [room for room in scheduler.rooms.values() if room.request.prefill == incarnation]
        rooms = [room for room in rooms if room.waits or room.failed]
        for room in rooms:
            number = room.request.room
            if scheduler.quarantine(room):
                reason = f"PeerLost: {incarnation} is gone before all of its KV was known to be here"
                self._engine.send(ROUTER, TransferDone(number, reason=reason))
            scheduler.timers.drop(number)
        self._fences.begin(incarnation, [room.request.room for room in rooms])
        scheduler.wake()

    def stop(self) -> None:
        """Ask for the proof about rooms that failed: their prefill leader may end before it answers."""
        rooms = self._scheduler.rooms
        for incarnation in dict.fromkeys(room.request.prefill for room in rooms.values() if room.failed):
            self._fences.begin(
                incarnation, [number for number, room in rooms.items() if room.request.prefill == incarnation]
            )
            self._scheduler.wake()

    def submitted(self, request: Submit) -> bool:  # noqa: ARG002 a protocol
        """Return True: its KV comes by itself."""
        return True

    def accept(self, request: Submit) -> None:
        """Queue *request*, once it is known which prefill instance it went to."""
        if request.prefill:
            self._scheduler.queue(request)
        else:
            self._lookup.add(request)

    def has_slot(self) -> bool:
        """Return whether there is a row for the metadata of one more room."""
        return self.slots.free > 0

    def start(self, room: DecodeRequest, pages: Pages, state: tuple[Pages, ...], held: int) -> None:
        """Tell prefill where to write *room*, and the ranks here where to look."""
        request, engine = room.request, self._engine
        slot = self.slots.allocate(request.room)
        assert slot is not None
        if engine.rank.device.holds_bytes:
            reserve = Destination(engine.incarnation, request.room, request.input, pages, slot, state, held)
            engine.send(engine.followers, reserve)
            self._mover.receiver.reserve(reserve)
        there = Destination(request.prefill, request.room, request.input, pages, slot, state, held)
        engine.send(leader(request.prefill), there)

    def posted(self) -> float:
        """Return 0: this side posts nothing."""
        return 0.0

    def notice(self, number: int) -> None:
        """Do nothing: what is here has been counted."""

    def read(self, room: DecodeRequest) -> None:
        """Give the row back that the metadata of *room* came in."""
        self.slots.release(room.request.room)

    def withdraw(self, number: int) -> bool:
        """Ask for a room no more; return whether it was asked for."""
        return self._lookup.drop(number)

    def unadmitted(self, number: int) -> None:
        """Do nothing: prefill has not heard of pages for it."""

    def failed(self, room: DecodeRequest) -> None:
        """Have prefill give *room* up; its answer, or the proof that it is gone, frees the pages."""
        incarnation = room.request.prefill
        self._engine.send(leader(incarnation), Abort(room.request.room, incarnation))

    def forget(self, number: int) -> None:
        """Give the row for its metadata back."""
        self.slots.release(number)

    # --- what comes in ---

    def _arrived_here(self, message: TransferDone, arrival: Arrival) -> None:
        self._count(self._engine.index, message, arrival)

    def _count(self, rank: int, message: TransferDone, arrival: Arrival | None) -> None:
        # A reason says why the bytes cannot be used, and makes the request fail when it is noticed.
        room = self._scheduler.rooms.get(message.room)
        if room is None or not room.waits:
            self._engine.ignore()
            return
        room.reason = room.reason or message.reason
        room.stamps = arrival or room.stamps
        if room.arrive(rank, self._scheduler.clock.now):
            self._scheduler.arrived(room)

    def _released(self, _: str, message: Released) -> None:
        room = self._scheduler.rooms.get(message.room)
        if room is None or not (room.waits or room.failed):
            self._engine.ignore()
            return
        self._scheduler.quarantine(room)
        self._release(message.room)

    def _release(self, number: int) -> None:
        room = self._scheduler.rooms.get(number)
        if room is not None and room.failed and not room.released:
            room.released = True
            self._scheduler.timers.drop(number)
            self._engine.send(self._engine.followers, Abort(number))
            self._mover.forget(number)

    def _ask_where(self, rooms: tuple[int, ...]) -> None:
        self._engine.send(ROUTER, RoomQuery(rooms, self._engine.incarnation))

    def _located(self, _: str, message: RoomReply) -> None:
        if message.incarnation == self._engine.incarnation:
            self._lookup.answer(message.instances)
        else:
            self._engine.ignore()

    def _unknown(self, request: Submit) -> None:
        reason = f"TransferTimeout: no prefill instance has said within {PATIENCE:g} s that it has it"
        self._engine.send(ROUTER, TransferDone(request.room, reason=reason))
