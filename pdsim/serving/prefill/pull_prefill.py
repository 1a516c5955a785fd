# SPDX-License-Identifier: Apache-2.0
"""The prefill side of a pulled handoff: what is computed stays until its reader says that it has it.

A lease guards against readers that never come: its end, or the router, revokes a room, and then only the reader
or the proof that it is gone can free the pages.
"""

from __future__ import annotations

from typing import Any

from pdsim.kv.lending import KvLender
from pdsim.kv.messages import (
    Abort,
    Collected,
    Destination,
    Dropped,
    Failed,
    Fenced,
    Lent,
    Prefilled,
    Renew,
    Revoked,
    Stop,
)
from pdsim.kv.pages import Pages
from pdsim.kv.plan import pair
from pdsim.kv.rooms import Timers
from pdsim.serving.deployment import ROUTER, Deployment, index_of, leader
from pdsim.serving.membership import FenceCount, PeerFence
from pdsim.serving.prefill.prefill_scheduler import PrefillRequest, PrefillScheduler
from pdsim.serving.prefill.prefill_worker import PrefillWorker
from pdsim.transfer.job import Rank

__all__ = ["PullPrefillScheduler", "PullPrefillWorker"]


class PullPrefillWorker(PrefillWorker):
    """A rank that computes what its leader says and makes its pool known to the decode ranks that read from it.

    It does so to a new life of a decode instance only once it is proven that no earlier one reads here any more.  So
    a `Fence` about a life is never held up by the reads of the next.
    """

    def __init__(self, rank: Rank, job: Deployment, instance: str, index: int) -> None:
        super().__init__(rank, job, instance, index)
        self.proof = PeerFence(self, job.rank_map.readers(index), self.fenced)

    def make_sender(self) -> Any:
        """Return a `KvLender`."""
        job = self.job
        return KvLender(
            self.rank,
            job.prefill_layout(self.index),
            job.prefill,
            self.index,
            self.conclude,
            job.handoff,
            job.checked,
        )

    def part_with(self, life: str) -> None:
        """Do nothing: its ranks connect to this one."""

    def fenced(self, message: Fenced) -> None:
        """Tell the leader that nothing is read here any more by a decode instance that is gone."""
        self.send(leader(self.instance), message)

    def introduce(self, peer: str) -> None:
        """Make this rank's pool known to *peer*, once no earlier life of it reads here."""
        self.proof.introduce(peer, lambda: self.sender.register(self.life, peer))


class PullPrefillScheduler(PullPrefillWorker, PrefillScheduler):
    """The rank that also schedules: a request runs as soon as it has pages, whatever decode does.

    When all ranks have computed it, the router is answered, and the room's pages stay for `ServingEngine.lease`
    seconds since the answer or the last `Renew`; then the request fails.

    Life of a room: computed by all ranks; lent (the router hears of it, the lease begins); collected by decode,
    which frees its pages.  One that is revoked, by the router or by the end of its lease, is in quarantine until
    decode collects it or a fence proves that it reads nothing.
    """

    def __init__(self, rank: Rank, job: Deployment, instance: str, index: int) -> None:
        super().__init__(rank, job, instance, index)
        self._lent: dict[int, PrefillRequest] = {}
        self._moved: list[Collected] = []  # what decode hears with the next look
        self._revoked: set[int] = set()  # of them, those that must not be read any more
        self._leases = Timers(rank.clock, job.engine.lease, self._lease_ends)
        self._fences = FenceCount(self.incarnation, job.prefill.size)
        self.handlers |= {
            Collected: self._collected,
            Renew: self._renew,
            Fenced: lambda sender, message: self._fenced(index_of(sender), message),
        }

    def report(self) -> dict[str, Any]:
        """As `PrefillScheduler.report`; pages of rooms that were revoked are in quarantine."""
        found = super().report()
        held = sum(self.job.page_count(self._lent[number].request.input) for number in self._revoked)
        found["used_pages"] -= held
        found["quarantined_pages"] += held
        return found

    def accept(self, room: PrefillRequest) -> None:
        """Have *room* wait for its first forward."""
        room.noticed = max(self.clock.now, room.ready)
        self.enqueue(room)

    def gives_back(self, room: PrefillRequest) -> bool:
        """As `PrefillScheduler.gives_back`; of a room that was revoked the pages are in quarantine."""
        return super().gives_back(room) and room.request.room not in self._revoked

    def give_back(self, room: PrefillRequest) -> None:
        """Give the pages of *room* back; there is no row for metadata."""
        self.pages.release(room.request.room)
        self.state.release(room.request.room)

    def fenced(self, message: Fenced) -> None:
        """Count this rank's proof."""
        self._fenced(self.index, message)

    def peer_gone(self, life: str) -> None:
        """Give up what *life* has not begun to read, and wait for the proof that it reads nothing more."""
        super().peer_gone(life)
        rooms = [number for number, room in self._lent.items() if room.request.decode == life]
        for number in rooms:
            self._revoked.add(number)
            self._leases.drop(number)
        self._begin_fence(life, rooms)
        self._wake()

    def stop(self, sender: str, message: Stop) -> None:
        """As `PrefillScheduler.stop`; a reader may end before it answers, so its end is waited for, too."""
        lives = dict.fromkeys(self._lent[number].request.decode for number in self._revoked)
        for life in lives:
            self._begin_fence(life, [n for n in self._revoked if self._lent[n].request.decode == life])
        super().stop(sender, message)

    def _begin_fence(self, life: str, rooms: list[int]) -> None:
        """Have *rooms* given back once every rank has proof that *life* reads nothing here."""
        fence = self._fences.begin(life, rooms)
        self.send(self.followers, fence)
        self.proof.prove(fence)

    def _begin(self, room: PrefillRequest) -> bool:
        """Give *room* its pages, which are source and destination alike; return whether there were any.

        Nothing is written: decode reads them where they are.
        """
        found = self._allocate(room, 0)
        if found is None:
            return False
        pages, state = found
        self._blocked.clear()
        room.destination = Destination(self.life, room.request.room, pages, 0, state)
        room.source_slot = 0
        room.runs = pair(pages, pages)
        room.state = tuple(map(pair, state, state))
        room.started = self.clock.now
        return True

    def settled(self, room: PrefillRequest) -> None:
        """Do nothing: decode has not heard of a room that was never lent."""

    def complete(self, room: PrefillRequest) -> None:
        """Lend *room*, which every rank has computed, once the host has answered for it.

        It is in ``_lent`` from now on; the router is told, and the lease begins, with the answer.
        """
        self._lent[room.request.room] = room
        seconds = self.host.answer()
        if seconds:
            self.clock.call_at(self.clock.now + seconds, self._answer, room)
        else:
            self._answer(room)

    def _answer(self, room: PrefillRequest) -> None:
        """Tell the router that *room* may be read, and begin its lease, unless it was given up meanwhile."""
        number = room.request.room
        if self._lent.get(number) is not room or number in self._revoked:
            return
        assert room.destination is not None
        self._leases.add(number)
        where: tuple[Pages, tuple[Pages, ...]] = room.destination.pages, room.destination.state
        self.send(ROUTER, Lent(number, self.life, *where, room.noticed, room.started, room.ended))

    def _abort(self, sender: str, message: Abort) -> None:
        """Give a room up.

        One that is lent is revoked; the router may not start it anew, as its reader may have begun.  Others as in
        `PrefillScheduler`.
        """
        if message.room in self._lent:
            if sender == ROUTER:
                self.send(ROUTER, Dropped(message.room, False))
            self._revoke(message.room)
        else:
            super()._abort(sender, message)

    def _lease_ends(self, number: int) -> None:
        """Fail a room whose reader has not renewed the lease, and revoke it."""
        reason = f"TransferTimeout: the lease of {self.job.engine.lease:g} s ended without a heartbeat of the reader"
        self.send(ROUTER, Failed(number, reason))
        self._revoke(number)

    def _revoke(self, number: int) -> None:
        """Have a lent room read no more; its pages come back with `Collected`, or with the proof of a fence."""
        if number not in self._revoked:
            self._revoked.add(number)
            self._leases.drop(number)
            decode = self._lent[number].request.decode
            self.send(leader(decode), Revoked(number, decode, self.life))
            self._wake()  # pages in quarantine may be in the way

    def _renew(self, _: str, message: Renew) -> None:
        """Begin the leases of these rooms anew; one that was revoked stays so."""
        if message.life != self.life:
            self.ignore()
            return
        for number in message.rooms:
            if number in self._lent and number not in self._revoked:
                self._leases.drop(number)
                self._leases.add(number)

    def _collected(self, _: str, message: Collected) -> None:
        """Give the pages of a room back that its reader has, and tell the router how many bytes those were."""
        room = self._lent.get(message.room)
        if room is None or message.life != self.life:
            self.ignore()
            return
        if message.room not in self._revoked:
            self.send(ROUTER, Prefilled(message.room, message.nbytes))
        if self.job.engine.noticed == "prefill":
            self._moved.append(Collected(message.room, room.request.decode, message.nbytes))
            self._wake()
        self._return(room)

    def look(self, _: Any = None) -> None:
        """Tell decode which rooms are all there since the last look, as vLLM's push does from NIXL's side.

        NIXL sends the notice that goes with a write when its sender looks whether that has ended, and vLLM looks
        once a step, when that is launched.
        """
        for message in self._moved:
            self.send(leader(message.life), message)
        self._moved.clear()

    def _fenced(self, rank: int, message: Fenced) -> None:
        """Count the proof of *rank*; with that of the last, the rooms that waited for it are free."""
        rooms = self._fences.count(rank, message)
        if rooms is None:
            self.ignore()
            return
        for number in rooms:
            if number in self._lent:
                self._return(self._lent[number])

    def _return(self, room: PrefillRequest) -> None:
        """Give a lent room's pages back, which nobody reads any more."""
        number = room.request.room
        del self._lent[number]
        self._revoked.discard(number)
        self._leases.drop(number)
        self._forget(room)
