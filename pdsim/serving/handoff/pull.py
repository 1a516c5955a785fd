# SPDX-License-Identifier: Apache-2.0
"""Pull: prefill computes, answers and keeps the KV under a lease; decode reads it when it has been asked (vLLM).

=====================  =====================================================================================
`PrefillDone`          prefill leader to router: computed, here are the pages
`Submit`               router to decode leader, which allocates pages and has its ranks read (`ReadRequest`)
`Renew`                decode leader to prefill leader, every heartbeat: these rooms are still wanted
`ReadDone`             decode leader to prefill leader: nothing of the room is read any more
`Abort`                prefill leader to decode leader: the lease is over, or the request; `ReadDone` follows
=====================  =====================================================================================

Pages that may still be read are never handed out again: a room that ends early is in quarantine until `ReadDone`
or, if the reader is gone, until every prefill rank has proof that nothing of it moves.
"""

from typing import Any, ClassVar

from pdsim.core.clock import ExpiringMap, Timers
from pdsim.kv.messages import (
    OVER,
    ROUTER,
    Abort,
    Arrival,
    Destination,
    PrefillDone,
    ReadDone,
    ReadRequest,
    Renew,
    Submit,
    TransferDone,
    index_of,
    leader,
)
from pdsim.kv.pages import Pages, after
from pdsim.kv.pull import KvReader, KvSource, first
from pdsim.serving.decode import DecodeLeader, DecodeMover, DecodeRequest, DecodeScheduler
from pdsim.serving.prefill import PrefillLeader, PrefillMover, PrefillRequest, PrefillScheduler
from pdsim.serving.rank_process import EngineRank, PeerConnector, PeerFence


class PullPrefill(PrefillMover):
    """Keeps what a prefill rank computes, and makes its pool known to the decode ranks that read from it.

    It does so to a new incarnation of a decode instance only once it is proven that no earlier one reads here any
    more.  So a `Fence` about an incarnation is never held up by the reads of the next.
    """

    def __init__(self, engine: EngineRank) -> None:
        source = KvSource(engine.pool(), engine.tell_leader)
        super().__init__(engine, source)
        self.peers = self.fence = PeerFence(engine, source.pool, engine.job.rank_map.readers(engine.index))


class PullPrefillLeader(PrefillLeader):
    """Lets a request run as soon as it has pages, and keeps what it computed for decode to read.

    When all ranks have computed it, the router is answered, and the room's pages stay for `ServingEngine.lease`
    seconds since the answer or the last `Renew`; then the request fails.  The pages of a room that is revoked, by
    the router or by the end of its lease, are in quarantine until decode has read it or a fence proves that it reads
    nothing.
    """

    def __init__(self, scheduler: PrefillScheduler, mover: PullPrefill) -> None:
        super().__init__(scheduler)
        engine = scheduler.engine
        self._kept: dict[int, PrefillRequest] = {}  # in order, those included that are revoked
        self._moved: list[ReadDone] = []  # what decode hears with the next look
        self._answering = 0  # rooms whose answers the host prepares
        self._leases = Timers(engine.clock, scheduler.job.engine.lease, self._lease_ends)
        self._fence = mover.fence
        self._fence.free = self._return
        # whether a rank looks at which pages a chunk has: there are hundreds
        self._names_pages = bool(engine.followers) or engine.rank.device.holds_bytes
        engine.works.append(lambda: self._answering > 0)
        engine.handlers |= {ReadDone: self._read_done, Renew: engine.current(self._renew)}

    def drop(self, incarnation: str) -> None:
        rooms = [number for number, room in self._kept.items() if room.request.decode == incarnation]
        for number in rooms:
            self._end_lease(number)
        self._fence.begin(incarnation, rooms)
        self._scheduler.wake()

    def stop(self) -> None:
        # The reader of a revoked room may end before it answers.
        revoked = {number: room.request.decode for number, room in self._kept.items() if room.state == "revoked"}
        for incarnation in dict.fromkeys(revoked.values()):
            self._fence.begin(incarnation, [number for number, decode in revoked.items() if decode == incarnation])

    def accept(self, room: PrefillRequest) -> None:
        room.noticed = max(self._scheduler.clock.now, room.ready)
        self._scheduler.queue(room)

    def start(self, room: PrefillRequest) -> bool:
        # Its pages are source and destination alike: decode reads them where they are.
        given = self._scheduler.allocate(room, 0)
        if given is None:
            return False
        pages, state = given
        kept = Destination(self._engine.incarnation, room.request.room, room.request.input, pages, 0, state)
        room.start(self._scheduler.clock.now, kept, pages if self._names_pages else (), state, 0)
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
        # The router is told, and the lease begins, once the host has answered.
        room.state = "kept"
        self._kept[room.request.room] = room
        self._answering += 1
        clock, seconds = self._scheduler.clock, self._scheduler.host.answer()
        if seconds:
            clock.call_at(clock.now + seconds, self._answer, room)
        else:
            self._answer(room)

    def abort(self, sender: str, number: int, room: PrefillRequest | None) -> None:
        if number in self._kept:
            self._revoke(number)

    def _answer(self, room: PrefillRequest) -> None:
        self._answering -= 1
        number, destination = room.request.room, room.destination
        if self._kept.get(number) is not room or room.state == "revoked":
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
        room = self._kept[number]
        if room.state != "revoked":
            self._end_lease(number)
            decode = room.request.decode
            self._engine.send(leader(decode), Abort(number, decode, self._engine.incarnation))
            self._scheduler.wake()  # pages in quarantine may be in the way

    def _end_lease(self, number: int) -> None:
        self._kept[number].state = "revoked"
        self._scheduler.pages.quarantined.add(number)
        self._leases.drop(number)

    def _renew(self, _: str, message: Renew) -> None:
        for number in message.rooms:
            if number in self._kept and self._kept[number].state != "revoked":
                self._leases.drop(number)
                self._leases.add(number)

    def _read_done(self, _: str, message: ReadDone) -> None:
        room = self._kept.get(message.room)
        if room is None or message.incarnation != self._engine.incarnation:
            self._engine.ignore()
            return
        if room.state != "revoked":
            self._engine.send(ROUTER, TransferDone(message.room, message.nbytes))
        if self._scheduler.job.engine.noticed == "prefill":
            self._moved.append(ReadDone(room.request.decode, message.room, message.nbytes))
        self._return(message.room)

    def _return(self, number: int) -> None:
        room = self._kept.pop(number, None)
        if room is not None:
            self._leases.drop(number)
            self._scheduler.forget(number)


class PullDecode(DecodeMover):
    """Reads the KV of each request for a decode rank when its leader says so.

    It connects to those prefill ranks that name its own incarnation, once the router has sent a `ConnectPeer`.
    """

    def __init__(self, engine: EngineRank) -> None:
        self.kv = KvReader(engine.pool(), engine.job.rank_map, engine.tell_leader, engine.tell_leader)
        super().__init__(engine, self.kv)
        self.peers = PeerConnector(engine, self.kv.peers)
        engine.handlers[ReadRequest] = engine.current(lambda _, message: self.kv.read(message))

    def progressed(self) -> bool:
        return self.kv.progressed()


class PullDecodeLeader(DecodeLeader):
    """Has the ranks read the KV of a request once prefill has answered.

    States of a room: `Submit` from the router (prefill has answered); pages, and a `ReadRequest` to all ranks;
    `TransferDone` from every rank; `ReadDone` to prefill, which may then reuse its pages.  Until then its lease is
    renewed by heartbeats.  Pages here are this side's own to give back: once no rank's read of a failed room moves
    any more, nothing writes there.
    """

    def __init__(self, scheduler: DecodeScheduler, mover: PullDecode) -> None:
        super().__init__(scheduler)
        engine = scheduler.engine
        self._reader = mover.kv
        self._sources: dict[int, PrefillDone] = {}  # of rooms that may still have to be read
        self._asked: dict[int, float] = {}  # when this scheduler heard of a room that has no pages yet
        self._counts = scheduler.job.decode.counts
        self._nbytes: dict[int, int] = {}  # read, of each room that is being read
        self._unseen: dict[int, DecodeRequest] = {}  # that have been read, but this side does not know it yet
        self._over: ExpiringMap[None] = ExpiringMap(engine.clock, OVER)  # rooms that must not be read
        self._beats = False  # whether a heartbeat is due
        engine.handlers |= {
            Abort: engine.introduced(self._abort),
            ReadDone: engine.current(lambda _, message: self._noticed(message.room)),
            TransferDone: self._count_read,
        }

    @property
    def open_rooms(self) -> int:
        return len(self._sources) + len(self._asked) + len(self._nbytes)

    def drop(self, incarnation: str) -> None:
        # Pages of failed rooms come back when the reads into them are quiesced.
        for room in [room for room in self._scheduler.rooms.values() if room.request.prefill == incarnation]:
            self._scheduler.fail(room)
        for number in [number for number, room in self._unseen.items() if room.request.prefill == incarnation]:
            self._noticed(number)

    def submitted(self, request: Submit) -> bool:
        assert request.source is not None
        if request.room in self._over:
            self._give_back(request.source, 0)
            return False
        self._sources[request.room] = request.source
        self._beat()
        return True

    def accept(self, request: Submit) -> None:
        self._asked[request.room] = self._scheduler.clock.now
        self._scheduler.queue(request)

    def start(self, room: DecodeRequest, pages: Pages, state: tuple[Pages, ...], held: int) -> None:
        request, engine = room.request, self._engine
        number, done = request.room, self._sources[request.room]
        room.asked = self._asked.pop(number)
        room.stamps = Arrival(engine.incarnation, number, 0, 0, 0, done.noticed, done.started, done.ended)
        self._nbytes[number] = 0
        source = after(done.pages, held)
        into = first(pages, source)
        components = self._scheduler.job.shape.state.components
        rows = tuple(  # index rows lie in pages: of those that are held none is read
            after(own, held) if name == "index" else own for name, own in zip(components, done.state, strict=True)
        )
        read = ReadRequest(engine.incarnation, number, request.input, request.prefill, source, into, rows, state)
        engine.send(engine.followers, read)
        self._reader.read(read)

    def posted(self) -> float:
        return self._reader.posted

    def notice(self, number: int) -> None:
        if number in self._unseen:
            self._noticed(number)

    def unadmitted(self, number: int) -> None:
        self._over.set(number, None)
        self._asked.pop(number, None)
        done = self._sources.pop(number, None)
        if done is not None:
            self._give_back(done, 0)

    def failed(self, room: DecodeRequest) -> None:
        number = room.request.room
        self._engine.send(self._engine.followers, Abort(number))
        self._reader.forget(number)

    def forget(self, number: int) -> None:
        self._nbytes.pop(number, None)
        self.unadmitted(number)

    def _abort(self, sender: str, message: Abort) -> None:
        if sender == ROUTER:
            self._scheduler.abort(sender, message)
            return
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

    def _count_read(self, sender: str, message: TransferDone) -> None:
        room = self._scheduler.rooms.get(message.room)
        if room is None or not room.waits:
            self._engine.ignore()
            return
        self._nbytes[message.room] += message.nbytes * self._counts[index_of(sender)]
        if message.reason:
            self._engine.send(ROUTER, TransferDone(message.room, reason=message.reason, lost=message.lost))
            self._scheduler.fail(room)
        elif room.arrive(index_of(sender), self._scheduler.clock.now):
            self._give_back(self._sources.pop(message.room), self._nbytes.pop(message.room))
            self._unseen[message.room] = room
            if self._scheduler.job.engine.noticed == "decode":
                self._noticed(message.room)

    def _noticed(self, number: int) -> None:
        room = self._unseen.pop(number, None)
        if room is None:
            self._engine.ignore()
        else:
            self._scheduler.arrived(room)

    def _give_back(self, done: PrefillDone, nbytes: int) -> None:
        self._engine.send(leader(done.instance), ReadDone(done.instance, done.room, nbytes))

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
        for number, done in self._sources.items():
            rooms.setdefault(done.instance, []).append(number)
        for incarnation, numbers in rooms.items():
            self._engine.send(leader(incarnation), Renew(incarnation, tuple(numbers)))
        self._beat()


class Pull:
    """Decode hears of a request when prefill has answered; then it reads the KV.  No first-token metadata moves."""

    serial = True
    prefill_mover: ClassVar = PullPrefill
    prefill_leader: ClassVar = PullPrefillLeader
    decode_mover: ClassVar = PullDecode
    decode_leader: ClassVar = PullDecodeLeader
