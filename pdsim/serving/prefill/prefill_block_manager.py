# SPDX-License-Identifier: Apache-2.0
"""A prefill leader's rooms: who waits, who has pages, and when the pages of those that failed come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pdsim.core.native_class import mypyc_attr
from pdsim.kv.consensus import Consensus
from pdsim.kv.messages import (
    Abort,
    Destination,
    Details,
    Dropped,
    Failed,
    KvMessage,
    Prefilled,
    Ready,
    Released,
    Sent,
    Settled,
    Stop,
    Submit,
    Took,
)
from pdsim.kv.pages import SlotPool
from pdsim.kv.rooms import OVER, ExpiringMap, Timers
from pdsim.serving.deployment import ROUTER, Deployment, epoch_of, index_of, instance_of, leader, rank_name
from pdsim.serving.membership import ReadyCount
from pdsim.serving.prefill.prefill_request import PrefillRequest
from pdsim.serving.prefill.prefill_worker import PrefillWorker
from pdsim.serving.prefix_cache import page_keys, page_pool
from pdsim.serving.rank_process import Handler
from pdsim.serving.scheduler_host import SchedulerHost
from pdsim.transfer.job import Rank

__all__ = ["PrefillBlockManager"]


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefillBlockManager(PrefillWorker, ABC):
    """The rank that the router talks to: it owns the pages of its group, and the rooms that they are given to.

    A room comes with `Submit` and ends when every rank of the group has done its part.  A subclass decides when
    it is computed (`enqueue`), and what happens when all of it is done (`complete`) or when nothing of a failed
    one moves any more (`settled`).

    Invariant: pages are free, cached, or of rooms in ``_rooms``; a failed room keeps its own until `Settled` has
    come from every rank, because writes from them may still be under way.
    """

    def __init__(self, rank: Rank, job: Deployment, instance: str, index: int) -> None:
        super().__init__(rank, job, instance, index)
        self.followers = [rank_name(instance, other) for other in range(1, job.prefill.size)]
        self.pages = pages = page_pool(
            job.prefill_pages, job.cache, job.cache.prefill, job.page_size, host=True, order=job.engine.pages
        )
        rank.gauge("pages", instance, lambda: pages.used / pages.pages)
        self.slots = SlotPool(job.slots)
        self.state = job.state_pool(self.sender.layout)
        self.hits: dict[int, int] = {}  # by room: tokens that were cached
        self.host_hits: dict[int, int] = {}  # of them, those that came back from host memory
        self.readiness = ReadyCount(job.prefill.size)
        self.host = SchedulerHost(job.engine.prefill, job.engine.variation, job.seed, instance, job.layers(instance))
        self._rooms: dict[int, PrefillRequest] = {}
        self._destinations: ExpiringMap[Destination] = ExpiringMap(rank.clock, OVER)  # before their `Submit`
        self._over: ExpiringMap[None] = ExpiringMap(rank.clock, OVER)  # rooms that failed
        self._details: ExpiringMap[Details] = ExpiringMap(rank.clock, OVER)
        self._timers = Timers(rank.clock, job.bootstrap_timeout, self._expire)
        self._stopping = False
        handlers: dict[type[KvMessage], Handler] = {
            Ready: lambda sender, message: self._count_ready(index_of(sender), message),
            Submit: self._submit,
            Details: lambda _, message: self._details.set(message.room, message),
            Destination: self._destination,
            Sent: lambda sender, message: self._conclude(index_of(sender), message),
            Settled: lambda sender, message: self._conclude(index_of(sender), message),
            Abort: self._abort,
        }
        self.handlers |= handlers

    @abstractmethod
    def enqueue(self, room: PrefillRequest) -> None:
        """Have *room*, which has all that it needs but pages here, wait for its first forward."""

    @abstractmethod
    def _wake(self) -> None:
        """Have what has changed seen to, soon."""

    def report(self) -> dict[str, Any]:
        """Return the account of pages, and how many messages came too late.

        Pages in use, in quarantine and free add up to ``pages``; ``open_rooms`` counts what is not over on this
        side.
        """
        holding = [room for room in self._rooms.values() if room.failed and room.source_slot >= 0]
        held = sum(self.job.page_count(room.request.input) for room in holding)
        return (
            super().report()
            | {
                "pages": self.pages.pages,
                "peak_pages": self.pages.peak,
                "free_pages": self.pages.free,
                "used_pages": self.pages.used - held,
                "quarantined_pages": held,
                "open_rooms": len(self._rooms) + len(self.sender) + len(self._timers),
                "ignored": self.ignored,
            }
            | ({"hits": self.hits, "host_hits": self.host_hits} if self.job.cache.prefill else {})
        )

    def ready(self, message: Ready) -> None:
        """Count this rank."""
        self._count_ready(self.index, message)

    def conclude(self, message: Sent | Settled) -> None:
        """Count this rank's part of a room as over."""
        self._conclude(self.index, message)

    def peer_gone(self, life: str) -> None:
        """As `PrefillWorker.peer_gone`, and give up the rooms that were to go to *life*."""
        super().peer_gone(life)
        self.readiness.lose(life)
        for room in [room for room in self._rooms.values() if room.request.decode == life]:
            self._give_up(room)

    def meet(self, peer: str) -> None:
        """As a `PrefillWorker`, and forget what ranks of an earlier life were ready for."""
        self.readiness.keep(self.life)
        super().meet(peer)

    def stop(self, sender: str, message: Stop) -> None:
        """End once no room is left: those that failed have `Deployment.deadline` seconds to settle."""
        self._stopping = True
        super().stop(sender, message)
        self._end_if_drained()

    def end(self, *_: Any) -> None:
        """As `RankProcess.end`, and the followers too."""
        self.send(self.followers, Stop())
        super().end()

    def _end_if_drained(self) -> None:
        """End if the job is over and no room is left."""
        if self._stopping and not self._rooms:
            self.end()

    def _count_ready(self, rank: int, message: Ready) -> None:
        """Tell the router once all ranks are connected to a decode instance.

        A rank may be told to meet that instance before this one is: what counts is that neither life is over.
        """
        if self._is_over(message.peer) or (self.life and message.life != self.life):
            self.ignore()
        elif self.readiness.count(rank, message):
            self.send(ROUTER, message)

    def _is_over(self, life: str) -> bool:
        """Return whether *life* was lost, or this rank has met a later one of the same instance."""
        if self.readiness.lost(life):
            return True
        later = (other for other in self._met if instance_of(other) == instance_of(life))
        return any(epoch_of(other) > epoch_of(life) for other in later)

    def _conclude(self, rank: int, message: Sent | Settled) -> None:
        """Count a rank's part of a room: done, failed, or settled after a failure.

        The room is complete when all ranks have done theirs, and over when all have settled; the first failure fails
        it.  What is said of a room that is over already is ignored.
        """
        room = self._rooms.get(message.room)
        if room is None:
            self.ignore()
        elif not isinstance(message, Sent):
            if room.consensus.settle(rank):
                self._forget(room)
                self.settled(room)
        elif message.reason:
            self._fail(room, message.reason, message.lost)
        elif not room.failed:
            room.nbytes += message.nbytes
            if rank == self.index:
                room.ended = self.clock.now
            if room.consensus.succeed(rank):
                self.complete(room)

    def complete(self, room: PrefillRequest) -> None:
        """Free what *room* has here, all of which every rank has written, and tell the router.

        It is told the bytes that all ranks have written for it.
        """
        self._forget(room)
        self.send(ROUTER, Prefilled(room.request.room, room.nbytes))

    def settled(self, room: PrefillRequest) -> None:
        """Tell decode that nothing of *room*, which failed, moves any more: its pages there are free."""
        self.send(leader(room.request.decode), Released(room.request.room))

    def _submit(self, _: str, request: Submit) -> None:
        """Take a request for this life, with its `Details` if any have come; one for another life is ignored."""
        if request.prefill != self.life:
            self.ignore()
            return
        room = PrefillRequest(request, Consensus(self.job.prefill.size))
        self.host.pace = self.posts.take(self.clock.now, self.job.engine.busy)
        room.ready = self.clock.now + self.host.arrive(request.input, self.clock.now)
        details = self._details.pop(request.room)
        if details is not None:
            room.priority = details.priority
            room.keys = page_keys(details.blocks, request.input, self.job.page_size)
        self._rooms[request.room] = room
        if self.job.query_dp:
            self.send(ROUTER, Took(request.room, self.life))
        self.accept(room)

    def accept(self, room: PrefillRequest) -> None:
        """Have *room*, which has just come, wait for its pages on the other side, unless they are known."""
        request = room.request
        self._timers.add(request.room)
        destination = self._destinations.pop(request.room)
        if destination is not None:
            self._destination("", destination)

    def _destination(self, _: str, message: Destination) -> None:
        """Take note of the pages that decode has for a room, and have it wait for its first forward.

        One that comes before its `Submit` is kept; one for a room that is over, or has pages already, is ignored.
        """
        room = self._rooms.get(message.room)
        late = message.room in self._over or (room is not None and (room.failed or room.destination is not None))
        if late or message.life != self.life:
            self.ignore()
            return
        if room is None:
            self._destinations.set(message.room, message)
            return
        self._timers.drop(message.room)
        if message.held * self.job.page_size >= room.request.input:
            reason = f"MessageError: {message.held} pages held of {room.request.input} tokens; hold less than all"
            self._fail(room, reason)
            return
        room.destination = message
        room.noticed = self.clock.now
        self.enqueue(room)

    def _abort(self, sender: str, message: Abort) -> None:
        """Give a room up: for the router, or for its decode leader, if it means this life.

        The router is told whether the room began: one that has no pages yet has moved nothing, and may start anew
        elsewhere. What another life has written, only that life or the decode side itself can say.
        """
        if sender != ROUTER and message.life != self.life:
            self.ignore()
            return
        room = self._rooms.get(message.room)
        if sender == ROUTER:
            self.send(ROUTER, Dropped(message.room, room is not None and room.source_slot < 0))
        elif room is None:
            self.send(sender, Released(message.room))
        self._over.set(message.room, None)
        self._destinations.pop(message.room)
        if room is not None:
            self._give_up(room)

    def _expire(self, number: int) -> None:
        """Fail a room whose pages on the other side have not been heard of for too long."""
        reason = f"TransferTimeout: no pages at decode within {self.job.bootstrap_timeout:g} s"
        self._fail(self._rooms[number], reason)

    def _fail(self, room: PrefillRequest, reason: str, lost: str = "") -> None:
        """Fail *room* and tell the router, with the instance that is *lost* if that is why; only once."""
        if not room.failed:
            self.send(ROUTER, Failed(room.request.room, reason, lost))
            self._give_up(room)

    def _give_up(self, room: PrefillRequest) -> None:
        """Stop working on *room*; `Settled` from every rank ends it."""
        if room.consensus.fail():
            self._timers.drop(room.request.room)
            self.send(self.followers, Abort(room.request.room))
            self.sender.abort(room.request.room)
            self._wake()

    def _forget(self, room: PrefillRequest) -> None:
        """End *room*: nothing of it moves any more on any rank, so what it has here is free.

        A failed one is remembered for `OVER` seconds, lest a late `Destination` revives it.
        """
        number = room.request.room
        del self._rooms[number]
        if room.failed:
            self._over.set(number, None)
        if room.source_slot >= 0:
            self.give_back(room)
            self._wake()
        self._end_if_drained()

    def give_back(self, room: PrefillRequest) -> None:
        """Give back what *room* has on this side."""
        number = room.request.room
        self.pages.release(number)
        self.slots.release(number)
        self.state.release(number)
