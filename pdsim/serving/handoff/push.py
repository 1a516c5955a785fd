# SPDX-License-Identifier: Apache-2.0
"""Push: prefill writes each chunk into pages that decode has reserved, as soon as it is computed (SGLang).

=====================  =====================================================================================
`Submit`               router to both leaders; a room is known by its number, whichever side hears first
`Destination`          decode leader to prefill leader: here are the pages, and a row for metadata
`Arrival`              with each write, prefill rank to decode rank; `TransferDone` goes to the decode leader
`TransferDone`         prefill leader to router: all of it is written
`Abort`                decode leader to prefill leader: give it up
`RankQuiesced`         and back: nothing of it moves any more
=====================  =====================================================================================

Pages at decode that may still be written are never handed out again: a room that ends early is in quarantine until
`RankQuiesced` or, if its prefill instance is gone, until every decode rank has proof that nothing of it moves.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

from msgspec.structs import replace

from pdsim.core.clock import Clock, ExpiringMap, Timers
from pdsim.kv.messages import (
    OVER,
    ROUTER,
    Abort,
    Arrival,
    Chunk,
    Destination,
    Forward,
    RankQuiesced,
    RoomLocations,
    RoomQuery,
    StagingRelease,
    StagingReply,
    StagingRequest,
    Submit,
    TransferDone,
    index_of,
    instance_of,
    leader,
)
from pdsim.kv.pages import Pages, SlotPool
from pdsim.kv.push import KvSender
from pdsim.kv.receiver import KvReceiver, StagingReceiver
from pdsim.serving.decode import DecodeLeader, DecodeMover, DecodeRequest, DecodeScheduler
from pdsim.serving.prefill import PrefillLeader, PrefillMover, PrefillRequest, PrefillScheduler
from pdsim.serving.rank_process import EngineRank, PeerConnector, PeerFence

RETRY = 0.01
"""Seconds after which a room is asked for again that the service did not know.

Assumed: about an iteration of a decode scheduler, which is when SGLang's asks again.
"""

PATIENCE = 15.0
"""Seconds after which a room that nobody knows is given up; assumed: as long as SGLang's asks for a server."""


class PushPrefill(PrefillMover):
    """Writes what a prefill rank computes to the decode ranks that need it.

    It connects to those that name its own incarnation, once the router has sent a `ConnectPeer` for theirs.
    """

    def __init__(self, engine: EngineRank) -> None:
        job = engine.job
        self.kv = KvSender(engine.pool(), job.rank_map, engine.tell_leader, job.staging)
        super().__init__(engine, self.kv)
        self.peers = PeerConnector(engine, self.kv.peers)
        engine.handlers[StagingReply] = self.kv.grant

    def progressed(self) -> bool:
        return self.kv.progressed()

    def layers(self, message: Forward, begun: float, seconds: float) -> None:
        """Write each plane of *message* once its layer is computed, by a forward of *seconds* from *begun* on."""
        self.started(message)
        self.kv.send_layers(message.chunks, begun, seconds)

    def computed(self, chunks: Iterable[Chunk], last: bool) -> None:
        for chunk in chunks:
            if self.engine.job.layerwise:  # its planes have gone
                self.kv.computed(chunk)
            else:
                self.kv.send(chunk)
        if last:
            self.kv.poll()

    def posted(self) -> float:
        return self.kv.posted


class PushPrefillLeader(PrefillLeader):
    """Lets a request start when decode has pages for it; it is over when all of it is written.

    A `Destination` may come before its `Submit`.  For one that comes after a room failed, the room is remembered for
    `OVER` seconds.
    """

    def __init__(self, scheduler: PrefillScheduler, _: PrefillMover) -> None:
        super().__init__(scheduler)
        engine = scheduler.engine
        self.slots = SlotPool(scheduler.job.slots)
        self._destinations: ExpiringMap[Destination] = ExpiringMap(engine.clock, OVER)  # before their `Submit`
        self._over: ExpiringMap[None] = ExpiringMap(engine.clock, OVER)  # rooms that failed
        self._timers = Timers(engine.clock, scheduler.job.bootstrap_timeout, self._expire)
        engine.handlers[Destination] = engine.current(self._destination)

    @property
    def open_rooms(self) -> int:
        return len(self._timers)

    def accept(self, room: PrefillRequest) -> None:
        number = room.request.room
        if self._scheduler.job.query_dp:
            self._engine.send(ROUTER, RoomLocations({number: self._engine.incarnation}))
        self._timers.add(number)
        destination = self._destinations.pop(number)
        if destination is not None:
            self._destination("", destination)

    def has_slot(self) -> bool:
        return self.slots.free > 0

    def start(self, room: PrefillRequest) -> bool:
        destination = room.destination
        assert destination is not None
        if not self.slots.free:
            return False
        given = self._scheduler.allocate(room, destination.held)
        if given is None:
            return False
        slot = self.slots.allocate(room.request.room)
        assert slot is not None
        room.start(self._scheduler.clock.now, destination, *given, slot)
        return True

    def complete(self, room: PrefillRequest) -> None:
        self._scheduler.forget(room.request.room)
        self._engine.send(ROUTER, TransferDone(room.request.room, room.nbytes))

    def abort(self, sender: str, number: int, room: PrefillRequest | None) -> None:
        # Decode hears at once that nothing moves of a room that is not there.
        if sender != ROUTER and room is None:
            self._engine.send(sender, RankQuiesced(number))
        self._over.set(number, None)
        self._destinations.pop(number)

    def forget(self, room: PrefillRequest) -> None:
        number = room.request.room
        self._timers.drop(number)
        if room.has_pages:
            self.slots.release(number)
        if room.failed:  # its pages at decode are free, and a late `Destination` must not revive it
            self._over.set(number, None)
            self._engine.send(leader(room.request.decode), RankQuiesced(number))

    def _destination(self, _: str, message: Destination) -> None:
        # One that comes before its `Submit` is kept; one for a room that is over, or has pages already, is ignored.
        room = self._scheduler.rooms.get(message.room)
        if message.room in self._over or (room is not None and room.state != "waiting"):
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


class PushDecode(DecodeMover):
    """Notices the KV that arrives at a decode rank, and proves when nothing more can.

    It makes its pool known to a new incarnation of a prefill instance only once it is proven that nothing of an
    earlier one moves here any more.  So what writes here is always of one incarnation.
    """

    def __init__(self, engine: EngineRank) -> None:
        job = engine.job
        self.kv = KvReceiver(
            engine.pool(),
            job.rank_map,
            lambda message, _: engine.tell_leader(message),
            engine.tell_leader,
            job.staging,
        )
        super().__init__(engine, self.kv)
        self.peers = self.fence = PeerFence(engine, self.kv.pool, self.kv.writers, self.kv.sever)
        engine.handlers |= {Destination: engine.current(self._reserve), Arrival: self._arrive}
        staging = self.kv.landing
        if staging is not None:
            engine.handlers |= {
                StagingRequest: engine.current(partial(self._ask, staging)),
                StagingRelease: lambda _, message: staging.give_back(message),
            }

    def report(self) -> dict[str, Any]:
        """Return, of a staging ring, most bytes in slots, bytes held to the end, and how often there was no slot."""
        staging = self.kv.landing
        if staging is None:
            return {}
        ring = staging.ring
        return {"staging_peak": ring.peak, "staging_held": ring.used, "staging_refused": staging.refused}

    def _reserve(self, _: str, message: Destination) -> None:
        self.kv.reserve(message)

    def _ask(self, staging: StagingReceiver, sender: str, message: StagingRequest) -> None:
        # Nobody would give back the slot of a writer that is proven dead.
        if self.fence.is_quiesced(message.prefill):
            self.engine.ignore()
        else:
            staging.ask(sender, message)

    def _arrive(self, _: str, message: Arrival) -> None:
        # One on the way to an incarnation that is over is left out: nobody would end its rooms here.
        if message.incarnation == self.engine.incarnation:
            self.kv.arrive(message)


class PushDecodeLeader(DecodeLeader):
    """Says where the KV of a request goes; it is here when every rank says so.

    The pages of a room that fails before are in quarantine until its prefill leader says that nothing of it moves.
    If that instance is gone, every rank here must have proof of it.
    """

    def __init__(self, scheduler: DecodeScheduler, mover: PushDecode) -> None:
        super().__init__(scheduler)
        engine = scheduler.engine
        self.slots = SlotPool(scheduler.job.slots)
        self._receiver = mover.kv
        self._fence = mover.fence
        self._fence.free = self._release
        self._lookup = RoomLookup(engine.clock, self._ask_where, scheduler.queue, self._unknown)
        self._receiver.report = lambda message, arrival: self._count(engine.index, message, arrival)
        engine.handlers |= {
            TransferDone: lambda sender, message: self._count(index_of(sender), message, None),
            RankQuiesced: self._quiesced,
            RoomLocations: engine.current(lambda _, message: self._lookup.answer(message.instances)),
        }

    @property
    def open_rooms(self) -> int:
        return len(self._lookup)

    def drop(self, incarnation: str) -> None:
        # The router has asked for most of these rooms already.  It is told of those of which all was written, as far
        # as it knows, and whose arrival not every rank here has reported yet.
        scheduler = self._scheduler
        rooms = [room for room in scheduler.rooms.values() if room.request.prefill == incarnation]
        rooms = [room for room in rooms if room.waits or room.failed]
        for room in rooms:
            number = room.request.room
            if scheduler.quarantine(room):
                reason = f"PeerLost: {incarnation} is gone before all of its KV was known to be here"
                self._engine.send(ROUTER, TransferDone(number, reason=reason))
            scheduler.timers.drop(number)
        self._fence.begin(incarnation, [room.request.room for room in rooms])
        scheduler.wake()

    def stop(self) -> None:
        # The prefill leader of rooms that failed may end before it answers.
        rooms = self._scheduler.rooms
        for incarnation in dict.fromkeys(room.request.prefill for room in rooms.values() if room.failed):
            self._fence.begin(
                incarnation, [number for number, room in rooms.items() if room.request.prefill == incarnation]
            )
            self._scheduler.wake()

    def accept(self, request: Submit) -> None:
        if request.prefill:
            self._scheduler.queue(request)
        else:
            self._lookup.add(request)

    def has_slot(self) -> bool:
        return self.slots.free > 0

    def start(self, room: DecodeRequest, pages: Pages, state: tuple[Pages, ...], held: int) -> None:
        request, engine = room.request, self._engine
        slot = self.slots.allocate(request.room)
        assert slot is not None
        there = Destination(request.prefill, request.room, request.input, pages, slot, state, held)
        if engine.rank.device.holds_bytes:
            reserve = replace(there, incarnation=engine.incarnation)
            engine.send(engine.followers, reserve)
            self._receiver.reserve(reserve)
        engine.send(leader(request.prefill), there)

    def posted(self) -> float:
        """Return until when notifications and metadata hold the scheduler: this side posts nothing."""
        return self._receiver.held

    def read(self, room: DecodeRequest) -> None:
        self.slots.release(room.request.room)

    def withdraw(self, number: int) -> bool:
        return self._lookup.drop(number)

    def failed(self, room: DecodeRequest) -> None:
        # The answer, or the proof that prefill is gone, frees the pages.
        incarnation = room.request.prefill
        self._engine.send(leader(incarnation), Abort(room.request.room, incarnation))

    def forget(self, number: int) -> None:
        self.slots.release(number)

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

    def _quiesced(self, sender: str, message: RankQuiesced) -> None:
        if instance_of(sender) == self._engine.instance:
            self._scheduler.quiesced(sender, message)
            return
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
            self._receiver.forget(number)

    def _ask_where(self, rooms: tuple[int, ...]) -> None:
        self._engine.send(ROUTER, RoomQuery(rooms, self._engine.incarnation))

    def _unknown(self, request: Submit) -> None:
        reason = f"TransferTimeout: no prefill instance has said within {PATIENCE:g} s that it has it"
        self._engine.send(ROUTER, TransferDone(request.room, reason=reason))


class RoomLookup:
    """Requests whose prefill instance is not known yet: where ``query_dp`` leaves the choice to the engine.

    *ask* is called with all rooms that have come since the last question, once that is answered; *located* with a
    request that names its instance, *lost* with one that the service has not known for `PATIENCE` seconds.
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
        self._open: dict[int, tuple[Submit, float]] = {}  # and when to give up
        self._fresh: dict[int, None] = {}  # to be asked for, in order
        self._asked: tuple[int, ...] = ()  # the question that is not answered yet

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request: Submit) -> None:
        """Ask where *request* went."""
        self._open[request.room] = request, self._clock.now + PATIENCE
        self._again(request.room)

    def drop(self, room: int) -> bool:
        """Give *room* up; return whether it was open."""
        self._fresh.pop(room, None)
        return self._open.pop(room, None) is not None

    def answer(self, incarnations: Mapping[int, str]) -> None:
        """Take note of where the rooms of the last question are; the others are asked for again after `RETRY`."""
        asked, self._asked = self._asked, ()
        for room in asked:
            if room not in self._open:
                continue
            request, until = self._open[room]
            if room in incarnations:
                self.drop(room)
                self._located(replace(request, prefill=incarnations[room]))
            elif self._clock.now >= until:
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
    prefill_mover: ClassVar = PushPrefill
    prefill_leader: ClassVar = PushPrefillLeader
    decode_mover: ClassVar = PushDecode
    decode_leader: ClassVar = PushDecodeLeader
