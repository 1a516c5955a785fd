# SPDX-License-Identifier: Apache-2.0
"""The decode side of a pulled handoff: pages, then one read of each prefill rank, looked at once a step."""

from __future__ import annotations

from typing import Any

from pdsim.kv.messages import (
    Abort,
    Arrival,
    Collected,
    Failed,
    Fetch,
    Lent,
    PullRequest,
    Ready,
    Renew,
    Revoked,
    Sent,
    Stop,
    Submit,
)
from pdsim.kv.pages import Pages, after
from pdsim.kv.reader import KvReader, first
from pdsim.kv.rooms import OVER, ExpiringMap
from pdsim.kv.status import Status
from pdsim.serving.decode.block_manager import DecodeRequest
from pdsim.serving.decode.decode_scheduler import DecodeScheduler
from pdsim.serving.decode.decode_worker import DecodeWorker
from pdsim.serving.deployment import ROUTER, Deployment, epoch_of, index_of, instance_of, leader, life_name
from pdsim.serving.membership import PeerConnector, ReadyCount
from pdsim.serving.rank_process import EngineProcess
from pdsim.transfer.job import Rank

__all__ = ["PullDecodeScheduler", "PullDecodeWorker"]


class PullDecodeWorker(DecodeWorker):
    """A rank that reads its part of each request's KV when its leader says so.

    It connects to those prefill ranks that mean its own life, of lives that the router has told it to meet.
    """

    def __init__(self, rank: Rank, job: Deployment, instance: str, index: int) -> None:
        super().__init__(rank, job, instance, index)
        self.introductions = PeerConnector(self, self.receiver, self._connected)
        self.handlers |= {Fetch: self._fetch}

    def make_receiver(self) -> Any:
        """Return a `KvReader`."""
        job = self.job
        layout = job.decode_layout(self.index)
        return KvReader(self.rank, layout, self.index, job.rank_map, self.read, self.quiet, job.handoff, job.checked)

    def ready(self, message: Ready) -> None:
        """Tell the leader that this rank is connected to all prefill ranks of a life that it reads from."""
        self.send(leader(self.instance), message)

    def read(self, message: Sent) -> None:
        """Tell the leader how the reads of a room ended here."""
        self.send(leader(self.instance), message)

    def peer_gone(self, life: str) -> None:
        """Forget the ranks of *life*."""
        self.introductions.disconnect_peer(life)

    def meet(self, peer: str) -> None:
        """Read from *peer* from now on, and from no earlier life of it."""
        for older in range(1, epoch_of(peer)):
            self.receiver.drop(life_name(instance_of(peer), older))
        self.introductions.connect_peer(peer)

    def working(self) -> bool:
        """Return whether a read goes on, or has succeeded since: over a slow link one takes long."""
        read = self.receiver.progressed()
        return super().working() or read

    def _connected(self, life: str) -> None:
        """Be ready once all ranks of *life* are connected that this one reads from."""
        if self.receiver.connected(life):
            self.ready(Ready(life, self.life))

    def _fetch(self, _: str, message: Fetch) -> None:
        """Begin the reads of a room, unless the leader asks for a life that is over."""
        if message.life == self.life:
            self.receiver.read(message)


class PullDecodeScheduler(PullDecodeWorker, DecodeScheduler):
    """The rank that also schedules: it hears of a request when prefill has answered, and has the ranks read it.

    Pages are this side's own to give back: once no rank's read of a failed room moves any more, nothing writes
    there.

    Life of a room: `PullRequest` from the router (prefill has answered); pages, and a `Fetch` to all ranks; `Sent`
    from every rank; `Collected` to prefill, which may then reuse its pages.  Until then its lease is renewed by
    heartbeats.
    """

    def __init__(self, rank: Rank, job: Deployment, instance: str, index: int) -> None:
        super().__init__(rank, job, instance, index)
        self._sources: dict[int, Lent] = {}  # of rooms that may still have to be read
        self._asked: dict[int, float] = {}  # when this scheduler heard of a room that has no pages yet
        self._nbytes: dict[int, int] = {}  # read, of each room that is being read
        self._unseen: dict[int, DecodeRequest] = {}  # that have been read, but this side does not know it yet
        self._over: ExpiringMap[None] = ExpiringMap(rank.clock, OVER)  # rooms that must not be read
        self.readiness = ReadyCount(job.decode.size)
        self._beats = False  # whether a heartbeat is due
        self.handlers |= {
            PullRequest: self._pull,
            Revoked: self._revoked,
            Collected: lambda _, message: self._take_up(message.room if message.life == self.life else 0),
            Ready: lambda sender, message: self._count_ready(index_of(sender), message),
            Sent: lambda sender, message: self._count_read(index_of(sender), message),
        }

    def report(self) -> dict[str, Any]:
        """As `DecodeScheduler.report`, with the rooms whose KV prefill still keeps for this side."""
        found = super().report()
        return found | {
            "open_rooms": found["open_rooms"] + len(self._sources) + len(self._asked) + len(self._nbytes)
        }

    def ready(self, message: Ready) -> None:
        """Count this rank."""
        self._count_ready(self.index, message)

    def read(self, message: Sent) -> None:
        """Count this rank's part of a room."""
        self._count_read(self.index, message)

    def has_slot(self) -> bool:
        """Return True: no metadata comes."""
        return True

    def posted(self) -> float:
        """Return when this rank has posted the reads that it has begun."""
        return float(self.receiver.posted)

    def release_slot(self, room: DecodeRequest) -> None:
        """Do nothing: there is none."""

    def meet(self, peer: str) -> None:
        """As a `PullDecodeWorker`, and forget what ranks of earlier lives, of either side, were ready for."""
        self.readiness.keep(self.life)
        for older in range(1, epoch_of(peer)):
            self.peer_gone(life_name(instance_of(peer), older))
        super().meet(peer)

    def peer_gone(self, life: str) -> None:
        """Fail the rooms that are read from *life*; their pages come back when those reads have settled."""
        PullDecodeWorker.peer_gone(self, life)
        self.readiness.lose(life)
        for room in [room for room in self._rooms.values() if room.request.prefill == life]:
            self._fail(room)
        for number in [number for number, room in self._unseen.items() if room.request.prefill == life]:
            self._take_up(number)

    def stop(self, sender: str, message: Stop) -> None:
        """End once no room is left; those that failed have `Deployment.deadline` seconds to settle."""
        self._stopping = True
        EngineProcess.stop(self, sender, message)
        self._end_if_drained()

    def start(self, request: Submit, pages: Pages, state: tuple[Pages, ...], held: int) -> None:
        """Have all ranks read what is not held of *request*."""
        number, lent = request.room, self._sources[request.room]
        room = self._rooms[number]
        room.asked = self._asked.pop(number)
        room.stamps = Arrival(number, 0, 0, 0, lent.noticed, lent.started, lent.ended)
        self._nbytes[number] = 0
        source = after(lent.pages, held)
        into = first(pages, source)
        fetch = Fetch(self.life, number, request.input, request.prefill, source, into, lent.state, state)
        self.send(self.followers, fetch)
        self.receiver.read(fetch)

    # --- what comes in ---

    def _pull(self, _: str, message: PullRequest) -> None:
        """Queue the request of *message*, whose KV prefill keeps.

        One that must not be read any more is given back at once.
        """
        request = message.submit
        if request.decode == self.life and request.room in self._over:
            self._collect(message.lent, 0)
        else:
            if request.decode == self.life:
                self._sources[request.room] = message.lent
                self._beat()
            self._submit("", request)

    def _enqueue(self, request: Submit) -> None:
        """Queue *request*, and remember since when it waits for pages."""
        self._asked[request.room] = self.clock.now
        super()._enqueue(request)

    def _abort(self, sender: str, message: Abort) -> None:
        """Give a room up.

        One without pages is given back to prefill now; the pages of others come back when their reads have
        settled.
        """
        if message.room in self._unseen:
            self._take_up(message.room)
        super()._abort(sender, message)
        if message.room not in self._rooms:
            self.unadmitted(message.room)

    def _revoked(self, _: str, message: Revoked) -> None:
        """Give a room up that prefill keeps no more; `Collected` follows once nothing of it is read."""
        if message.life != self.life:
            self.ignore()
            return
        room = self._rooms.get(message.room)
        if room is None:
            self._coming.pop(message.room, None)
            for request in [request for request in self._queue if request.room == message.room]:
                self._queue.remove(request)
            self.unadmitted(message.room)
            self.send(leader(message.prefill), Collected(message.room, message.prefill, 0))
        elif room.consensus.status is not Status.SUCCESS:
            self._fail(room)

    def unadmitted(self, number: int) -> None:
        """Take note that a room without pages here will not be read, and tell its prefill leader."""
        self._over.set(number, None)
        self._asked.pop(number, None)
        lent = self._sources.pop(number, None)
        if lent is not None:
            self._collect(lent, 0)

    def _count_ready(self, rank: int, message: Ready) -> None:
        """Tell the router once all ranks are connected to a prefill instance."""
        if self.readiness.lost(message.life) or (self.life and message.peer != self.life):
            self.ignore()
        elif self.readiness.count(rank, message):
            self.send(ROUTER, message)

    # --- what becomes of a room ---

    def _count_read(self, rank: int, message: Sent) -> None:
        """Count the reads of *rank*: the room is complete with the last, and fails with the first that failed."""
        room = self._rooms.get(message.room)
        if room is None or room.consensus.over:
            self.ignore()
            return
        self._nbytes[message.room] += message.nbytes
        if message.reason:
            self.send(ROUTER, Failed(message.room, message.reason, message.lost))
            self._fail(room)
        elif room.consensus.succeed(rank):
            room.arrived = self.clock.now
            self._collect(self._sources.pop(message.room), self._nbytes.pop(message.room))
            self._unseen[message.room] = room
            if self.job.engine.noticed == "decode":
                self._take_up(message.room)

    def _take_up(self, number: int) -> None:
        """Have the next look find a room that has been read; ignore one that waits for no word of prefill."""
        room = self._unseen.pop(number, None)
        if room is None:
            self.ignore()
            return
        self._timers.drop(number)
        self.complete.append(room)
        self._wake()

    def _expire(self, number: int) -> None:
        """As `BlockManager._expire`; a room that is here needs nobody's word for ever."""
        if number in self._unseen:
            self._take_up(number)
        else:
            super()._expire(number)

    def _fail(self, room: DecodeRequest) -> None:
        """Give *room* up; `quiet` from every rank ends it."""
        if self.quarantine(room):
            number = room.request.room
            self._timers.drop(number)
            self.send(self.followers, Abort(number))
            self.receiver.forget(number)
            self._wake()

    def _drop(self, number: int) -> None:
        """Give the pages of a failed room back, into which nothing is read any more."""
        self.quarantined -= self._rooms.pop(number).failed
        self.keys.pop(number, None)
        self.pages.release(number)
        self.state.release(number)
        self._nbytes.pop(number, None)
        self.unadmitted(number)
        self._end_if_drained()

    def _collect(self, lent: Lent, nbytes: int) -> None:
        """Tell prefill that nothing of a room is read any more, and how many bytes were."""
        self.send(leader(lent.life), Collected(lent.room, lent.life, nbytes))

    def _beat(self) -> None:
        """Renew the leases of all rooms every `ServingEngine.heartbeat` seconds, as long as there are any."""
        if self.job.engine.lease and not self._beats:
            self._beats = True
            self.clock.call_at(self.clock.now + self.job.engine.heartbeat, self._renew, None)

    def _renew(self, _: Any) -> None:
        """Send each prefill instance the rooms that are still to be read from it.

        It comes again, a heartbeat later, while there are any.
        """
        self._beats = False
        if not self._sources or self.has_ended:
            return
        rooms: dict[str, list[int]] = {}
        for number, lent in self._sources.items():
            rooms.setdefault(lent.life, []).append(number)
        for life, numbers in rooms.items():
            self.send(leader(life), Renew(life, tuple(numbers)))
        self._beat()
