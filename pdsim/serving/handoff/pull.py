# SPDX-License-Identifier: Apache-2.0
"""Pull: prefill computes, answers and keeps the KV under a lease; decode reads it when it has been asked (vLLM).

=====================  =====================================================================================
`PrefillDone`          prefill leader to router: computed, here are the pages
`Submit`               router to decode leader, which allocates pages and has its ranks read (`ReadRequest`)
`Renew`                decode leader to prefill leader, every heartbeat: these rooms are still wanted
`ReadDone`             decode leader to prefill leader: nothing of the room is read any more
`Revoked`              prefill leader to decode leader: the lease is over, or the request; `ReadDone` follows
=====================  =====================================================================================

Pages that may still be read are never handed out again: a room that ends early is in quarantine until `ReadDone`
or, if the reader is gone, until every prefill rank has proof that nothing of it moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pdsim.kv.contents import Contents
from pdsim.kv.layout import KvLayout
from pdsim.kv.messages import (
    Abort,
    Arrival,
    Chunk,
    Destination,
    Forward,
    KvMessage,
    PrefillDone,
    ReadDone,
    ReadRequest,
    Ready,
    Renew,
    Revoked,
    Submit,
    TransferDone,
)
from pdsim.kv.pages import Pages, after
from pdsim.kv.pull import KvReader, KvSource, first
from pdsim.kv.rooms import OVER, ExpiringMap, Timers
from pdsim.serving.decode import DecodeScheduler
from pdsim.serving.decode_steps import DecodeRequest
from pdsim.serving.deployment import ROUTER, epoch_of, incarnation_name, index_of, instance_of, leader
from pdsim.serving.membership import FenceCount, PeerConnector, PeerFence, ReadyCount
from pdsim.serving.prefill import PrefillRequest, PrefillScheduler
from pdsim.serving.rank_process import EngineRank, Handler

__all__ = ["Pull"]


class Pull:
    """Decode hears of a request when prefill has answered; then it reads the KV.  No first-token metadata moves.

    *serial* says that the router asks one side after the other: it sends to decode what prefill has answered.
    """

    serial = True

    def prefill_mover(self, rank: EngineRank) -> PullPrefill:
        """Return what keeps the KV of a prefill rank."""
        return PullPrefill(rank)

    def prefill_leader(self, scheduler: PrefillScheduler) -> PullPrefillLeader:
        """Return what lends it, and takes it back."""
        mover = scheduler.engine.mover
        assert isinstance(mover, PullPrefill)
        return PullPrefillLeader(scheduler, mover)

    def decode_mover(self, rank: EngineRank) -> PullDecode:
        """Return what reads the KV for a decode rank."""
        return PullDecode(rank)

    def decode_leader(self, scheduler: DecodeScheduler) -> PullDecodeLeader:
        """Return what says when to read."""
        mover = scheduler.engine.mover
        assert isinstance(mover, PullDecode)
        return PullDecodeLeader(scheduler, mover)


class PullPrefill:
    """Keeps what a prefill rank computes, and makes its pool known to the decode ranks that read from it.

    It does so to a new incarnation of a decode instance only once it is proven that no earlier one reads here any
    more.  So a `Fence` about an incarnation is never held up by the reads of the next.
    """

    def __init__(self, engine: EngineRank) -> None:
        job, index = engine.job, engine.index
        self.engine = engine
        self.sender = KvSource(
            engine.rank,
            job.prefill_layout(index),
            job.prefill,
            index,
            engine.tell_leader,
            job.handoff,
            job.checked,
        )
        self.proof = PeerFence(engine, job.rank_map.readers(index), engine.tell_leader)

    @property
    def layout(self) -> KvLayout:
        """The pool of this rank."""
        return self.sender.layout

    @property
    def contents(self) -> Contents:
        """What the pool of this rank holds."""
        return self.sender.contents

    def __len__(self) -> int:
        """Return the number of rooms that are being computed."""
        return len(self.sender)

    def begin(self) -> None:
        """Do nothing: nobody writes here."""

    def report(self) -> dict[str, Any]:
        """Return that no metadata went another way: there is none."""
        return {"fallbacks": self.sender.fallbacks}

    def progressed(self) -> bool:
        """Return False: those who read know whether they do."""
        return False

    def connect_peer(self, peer: str) -> None:
        """Make this rank's pool known to *peer*, once no earlier incarnation of it reads here."""
        self.proof.introduce(peer, lambda: self.sender.register(self.engine.incarnation, peer))

    def drop(self, incarnation: str) -> None:
        """Do nothing: its ranks connect to this one."""

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """Take note of *chunks*, whose forward is asked for."""
        self.sender.expect(chunks)

    def started(self, message: Forward) -> None:
        """Count what is cached as computed."""
        for chunk in message.cached:
            self.sender.send(chunk)

    def computed(self, chunks: Iterable[Chunk], last: bool) -> None:  # noqa: ARG002 a protocol
        """Have *chunks*, whose forward has ended, be read with the rest of their rooms."""
        for chunk in chunks:
            self.sender.send(chunk)

    def posted(self) -> float:
        """Return 0: this side posts nothing."""
        return 0.0

    def abort(self, room: int) -> None:
        """Give *room* up, which is not lent yet."""
        self.sender.abort(room)


class PullPrefillLeader:
    """Lets a request of *scheduler* run as soon as it has pages, and lends what it computed to decode.

    When all ranks have computed it, the router is answered, and the room's pages stay for `ServingEngine.lease`
    seconds since the answer or the last `Renew`; then the request fails.  The pages of a room that is revoked, by
    the router or by the end of its lease, are in quarantine until decode collects it or a fence proves that it reads
    nothing.
    """

    def __init__(self, scheduler: PrefillScheduler, mover: PullPrefill) -> None:
        engine = scheduler.engine
        self._scheduler = scheduler
        self._engine = engine
        self._lent: dict[int, PrefillRequest] = {}  # in order, those included that are revoked
        self._moved: list[ReadDone] = []  # what decode hears with the next look
        self._leases = Timers(engine.clock, scheduler.job.engine.lease, self._lease_ends)
        self._fences = FenceCount(engine, mover.proof, self._return)
        handlers: dict[type[KvMessage], Handler] = {
            ReadDone: self._collected,
            Renew: self._renew,
        }
        engine.handlers |= handlers

    @property
    def open_rooms(self) -> int:
        """0: it waits for nobody before a room runs."""
        return 0

    def connect_peer(self, peer: str) -> None:
        """Do nothing: decode says when it is connected."""

    def drop(self, incarnation: str) -> None:
        """Revoke what *incarnation* was to read, and wait for the proof that it reads nothing more."""
        rooms = [number for number, room in self._lent.items() if room.request.decode == incarnation]
        for number in rooms:
            self._end_lease(number)
        self._fences.begin(incarnation, rooms)
        self._scheduler.wake()

    def stop(self) -> None:
        """Wait for the proof about revoked rooms: a reader may end before it answers."""
        revoked = {number: room.request.decode for number, room in self._lent.items() if room.state == "revoked"}
        for incarnation in dict.fromkeys(revoked.values()):
            self._fences.begin(incarnation, [number for number, decode in revoked.items() if decode == incarnation])

    def accept(self, room: PrefillRequest) -> None:
        """Have *room* wait for its first forward."""
        room.noticed = max(self._scheduler.clock.now, room.ready)
        self._scheduler.queue(room)

    def has_slot(self) -> bool:
        """Return True: no metadata moves."""
        return True

    def start(self, room: PrefillRequest) -> bool:
        """Give *room* its pages, which are source and destination alike; return whether there were any.

        Nothing is written: decode reads them where they are.
        """
        given = self._scheduler.allocate(room, 0)
        if given is None:
            return False
        pages, state = given
        kept = Destination(self._engine.incarnation, room.request.room, room.request.input, pages, 0, state)
        room.start(self._scheduler.clock.now, kept, pages, state, 0)
        return True

    def look(self, _: Any = None) -> None:
        """Tell decode which rooms are all there since the last look, as vLLM's push does from NIXL's side.

        NIXL sends the notice that goes with a write when its sender looks whether that has ended, and vLLM looks
        once a step, when that is launched.
        """
        for message in self._moved:
            self._engine.send(leader(message.incarnation), message)
        self._moved.clear()

    def complete(self, room: PrefillRequest) -> None:
        """Lend *room*, which every rank has computed, once the host has answered for it.

        The router is told, and the lease begins, with the answer.
        """
        room.state = "lent"
        self._lent[room.request.room] = room
        clock, seconds = self._scheduler.clock, self._scheduler.host.answer()
        if seconds:
            clock.call_at(clock.now + seconds, self._answer, room)
        else:
            self._answer(room)

    def abort(self, sender: str, number: int, room: PrefillRequest | None) -> None:  # noqa: ARG002 a protocol
        """Revoke a room that is lent: its reader may have begun."""
        if number in self._lent:
            self._revoke(number)

    def failed(self, room: PrefillRequest) -> None:
        """Do nothing: it was not lent."""

    def settled(self, room: PrefillRequest) -> None:
        """Do nothing: decode has not heard of a room that was never lent."""

    def forget(self, room: PrefillRequest) -> None:
        """Do nothing: all that it has is pages."""

    # --- leases ---

    def _answer(self, room: PrefillRequest) -> None:
        number, destination = room.request.room, room.destination
        if self._lent.get(number) is not room or room.state == "revoked":
            return
        assert destination is not None
        self._leases.add(number)
        times = room.noticed, room.started, room.ended
        done = PrefillDone(number, self._engine.incarnation, destination.pages, destination.state, *times)
        self._engine.send(ROUTER, done)

    def _lease_ends(self, number: int) -> None:
        lease = self._scheduler.job.engine.lease
        reason = f"TransferTimeout: the lease of {lease:g} s ended without a heartbeat of the reader"
        self._engine.send(ROUTER, TransferDone(number, reason=reason))
        self._revoke(number)

    def _revoke(self, number: int) -> None:
        room = self._lent[number]
        if room.state != "revoked":
            self._end_lease(number)
            decode = room.request.decode
            self._engine.send(leader(decode), Revoked(decode, number, self._engine.incarnation))
            self._scheduler.wake()  # pages in quarantine may be in the way

    def _end_lease(self, number: int) -> None:
        self._lent[number].state = "revoked"
        self._scheduler.pages.quarantine(number)
        self._leases.drop(number)

    def _renew(self, _: str, message: Renew) -> None:
        if message.incarnation != self._engine.incarnation:
            self._engine.ignore()
            return
        for number in message.rooms:
            if number in self._lent and self._lent[number].state != "revoked":
                self._leases.drop(number)
                self._leases.add(number)

    def _collected(self, _: str, message: ReadDone) -> None:
        room = self._lent.get(message.room)
        if room is None or message.incarnation != self._engine.incarnation:
            self._engine.ignore()
            return
        if room.state != "revoked":
            self._engine.send(ROUTER, TransferDone(message.room, message.nbytes))
        if self._scheduler.job.engine.noticed == "prefill":
            self._moved.append(ReadDone(room.request.decode, message.room, message.nbytes))
            self._scheduler.wake()
        self._return(message.room)

    def _return(self, number: int) -> None:
        room = self._lent.pop(number, None)
        if room is not None:
            self._leases.drop(number)
            self._scheduler.forget(room)


class PullDecode:
    """Reads the KV of each request for a decode rank when its leader says so.

    It connects to those prefill ranks that name its own incarnation, once the router has sent a `ConnectPeer`.
    """

    def __init__(self, engine: EngineRank) -> None:
        job, index = engine.job, engine.index
        self.engine = engine
        self.receiver = KvReader(
            engine.rank,
            job.decode_layout(index),
            index,
            job.rank_map,
            engine.tell_leader,
            engine.tell_leader,
            job.handoff,
            job.checked,
        )
        self._connector = PeerConnector(engine, self.receiver, self._connected)
        engine.handlers[ReadRequest] = self._fetch

    @property
    def layout(self) -> KvLayout:
        """The pool of this rank."""
        return self.receiver.layout

    @property
    def ignored(self) -> int:
        """0: nothing arrives that this side has not asked for."""
        return self.receiver.ignored

    def __len__(self) -> int:
        """Return the number of rooms that are being read, or not forgotten after a failure."""
        return len(self.receiver)

    def begin(self) -> None:
        """Refuse those who write here: nobody should."""
        self.engine.listen(self.receiver.notice)

    def report(self) -> dict[str, Any]:
        """Return nothing: there is no staging."""
        return {}

    def progressed(self) -> bool:
        """Return whether a read goes on, or has succeeded since: over a slow link one takes long."""
        return self.receiver.progressed()

    def connect_peer(self, peer: str) -> None:
        """Read from *peer* from now on, and from no earlier incarnation of it."""
        for older in range(1, epoch_of(peer)):
            self.receiver.drop(incarnation_name(instance_of(peer), older))
        self._connector.connect_peer(peer)

    def drop(self, incarnation: str) -> None:
        """Forget the ranks of *incarnation*."""
        self._connector.disconnect_peer(incarnation)

    def forget(self, room: int) -> None:
        """Give *room* up."""
        self.receiver.forget(room)

    def _connected(self, incarnation: str) -> None:
        if self.receiver.connected(incarnation):
            self.engine.tell_leader(Ready(incarnation, self.engine.incarnation))

    def _fetch(self, _: str, message: ReadRequest) -> None:
        if message.incarnation == self.engine.incarnation:
            self.receiver.read(message)


class PullDecodeLeader:
    """Has the ranks read the KV of a request of *scheduler*, of which it hears when prefill has answered.

    Pages are this side's own to give back: once no rank's read of a failed room moves any more, nothing writes
    there.

    States of a room: `Submit` from the router (prefill has answered); pages, and a `ReadRequest` to all ranks;
    `TransferDone` from every rank; `ReadDone` to prefill, which may then reuse its pages.  Until then its
    lease is renewed by heartbeats.
    """

    def __init__(self, scheduler: DecodeScheduler, mover: PullDecode) -> None:
        engine = scheduler.engine
        self.readiness = ReadyCount(scheduler.job.decode.size)
        self._scheduler = scheduler
        self._mover = mover
        self._engine = engine
        self._sources: dict[int, PrefillDone] = {}  # of rooms that may still have to be read
        self._asked: dict[int, float] = {}  # when this scheduler heard of a room that has no pages yet
        self._nbytes: dict[int, int] = {}  # read, of each room that is being read
        self._unseen: dict[int, DecodeRequest] = {}  # that have been read, but this side does not know it yet
        self._over: ExpiringMap[None] = ExpiringMap(engine.clock, OVER)  # rooms that must not be read
        self._beats = False  # whether a heartbeat is due
        handlers: dict[type[KvMessage], Handler] = {
            Revoked: self._revoked,
            ReadDone: lambda _, message: self._take_up(
                message.room if message.incarnation == engine.incarnation else 0
            ),
            Ready: lambda sender, message: self._count_ready(index_of(sender), message),
            TransferDone: lambda sender, message: self._count_read(index_of(sender), message),
        }
        engine.handlers |= handlers

    @property
    def open_rooms(self) -> int:
        """How many rooms prefill still keeps for this side, wait for pages, or are being read."""
        return len(self._sources) + len(self._asked) + len(self._nbytes)

    def connect_peer(self, peer: str) -> None:
        """Forget what ranks of earlier incarnations, of either side, were ready for."""
        self.readiness.keep(self._engine.incarnation)
        for older in range(1, epoch_of(peer)):
            self._engine.peer_gone(incarnation_name(instance_of(peer), older))

    def drop(self, incarnation: str) -> None:
        """Fail the rooms that are read from *incarnation*; their pages come back when those reads have settled."""
        self.readiness.lose(incarnation)
        for room in [room for room in self._scheduler.rooms.values() if room.request.prefill == incarnation]:
            self._scheduler.fail(room)
        for number in [number for number, room in self._unseen.items() if room.request.prefill == incarnation]:
            self._take_up(number)

    def stop(self) -> None:
        """Do nothing: reads end by themselves."""

    def submitted(self, request: Submit) -> bool:
        """Keep what prefill has lent; a room that must not be read any more is given back at once."""
        assert request.source is not None
        if request.room in self._over:
            self._collect(request.source, 0)
            return False
        self._sources[request.room] = request.source
        self._beat()
        return True

    def accept(self, request: Submit) -> None:
        """Queue *request*, and remember since when it waits for pages."""
        self._asked[request.room] = self._scheduler.clock.now
        self._scheduler.queue(request)

    def has_slot(self) -> bool:
        """Return True: no metadata comes."""
        return True

    def start(self, room: DecodeRequest, pages: Pages, state: tuple[Pages, ...], held: int) -> None:
        """Have all ranks read what is not held of *room*."""
        request, engine = room.request, self._engine
        number, lent = request.room, self._sources[request.room]
        room.asked = self._asked.pop(number)
        room.stamps = Arrival(engine.incarnation, number, 0, 0, 0, lent.noticed, lent.started, lent.ended)
        self._nbytes[number] = 0
        source = after(lent.pages, held)
        into = first(pages, source)
        fetch = ReadRequest(
            engine.incarnation, number, request.input, request.prefill, source, into, lent.state, state
        )
        engine.send(engine.followers, fetch)
        self._mover.receiver.read(fetch)

    def posted(self) -> float:
        """Return when this rank has posted the reads that it has begun."""
        return self._mover.receiver.posted

    def notice(self, number: int) -> None:
        """Have the next look find a room that has been read, whether or not prefill has said so."""
        if number in self._unseen:
            self._take_up(number)

    def read(self, room: DecodeRequest) -> None:
        """Do nothing: no metadata comes."""

    def withdraw(self, number: int) -> bool:  # noqa: ARG002 a protocol
        """Return False: what has come is queued."""
        return False

    def unadmitted(self, number: int) -> None:
        """Take note that a room without pages here will not be read, and tell its prefill leader."""
        self._over.set(number, None)
        self._asked.pop(number, None)
        lent = self._sources.pop(number, None)
        if lent is not None:
            self._collect(lent, 0)

    def failed(self, room: DecodeRequest) -> None:
        """Have no rank read *room* any more; `RankQuiesced` from every rank ends it."""
        number = room.request.room
        self._engine.send(self._engine.followers, Abort(number))
        self._mover.forget(number)

    def forget(self, number: int) -> None:
        """Tell prefill that nothing of a room is read any more, which failed."""
        self._nbytes.pop(number, None)
        self.unadmitted(number)

    # --- what comes in ---

    def _revoked(self, _: str, message: Revoked) -> None:
        if message.incarnation != self._engine.incarnation:
            self._engine.ignore()
            return
        room = self._scheduler.rooms.get(message.room)
        if room is None:
            self._scheduler.withdraw(message.room)
            self.unadmitted(message.room)
            self._engine.send(leader(message.prefill), ReadDone(message.prefill, message.room, 0))
        elif room.waits or room.failed:
            self._scheduler.fail(room)

    def _count_ready(self, rank: int, message: Ready) -> None:
        engine = self._engine
        if self.readiness.lost(message.incarnation) or (engine.incarnation and message.peer != engine.incarnation):
            engine.ignore()
        elif self.readiness.count(rank, message):
            engine.send(ROUTER, message)

    def _count_read(self, rank: int, message: TransferDone) -> None:
        room = self._scheduler.rooms.get(message.room)
        if room is None or not room.waits:
            self._engine.ignore()
            return
        self._nbytes[message.room] += message.nbytes
        if message.reason:
            self._engine.send(ROUTER, TransferDone(message.room, reason=message.reason, lost=message.lost))
            self._scheduler.fail(room)
        elif room.arrive(rank, self._scheduler.clock.now):
            self._collect(self._sources.pop(message.room), self._nbytes.pop(message.room))
            self._unseen[message.room] = room
            if self._scheduler.job.engine.noticed == "decode":
                self._take_up(message.room)

    def _take_up(self, number: int) -> None:
        room = self._unseen.pop(number, None)
        if room is None:
            self._engine.ignore()
        else:
            self._scheduler.arrived(room)

    def _collect(self, lent: PrefillDone, nbytes: int) -> None:
        self._engine.send(leader(lent.instance), ReadDone(lent.instance, lent.room, nbytes))

    # --- leases ---

    def _beat(self) -> None:
        engine = self._scheduler.job.engine
        if engine.lease and not self._beats:
            self._beats = True
            self._engine.clock.call_at(self._engine.clock.now + engine.heartbeat, self._renew, None)

    def _renew(self, _: Any) -> None:
        # It comes again, a heartbeat later, while there are any.
        self._beats = False
        if not self._sources or self._engine.has_ended:
            return
        rooms: dict[str, list[int]] = {}
        for number, lent in self._sources.items():
            rooms.setdefault(lent.instance, []).append(number)
        for incarnation, numbers in rooms.items():
            self._engine.send(leader(incarnation), Renew(incarnation, tuple(numbers)))
        self._beat()
