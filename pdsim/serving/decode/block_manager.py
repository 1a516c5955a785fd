# SPDX-License-Identifier: Apache-2.0
"""A decode leader's rooms: who has pages, who is complete, and when the pages of those that failed come back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pdsim.core.native_class import mypyc_attr
from pdsim.kv.consensus import Consensus
from pdsim.kv.messages import (
    Abort,
    Arrival,
    Arrived,
    Details,
    Failed,
    Fenced,
    KvMessage,
    Quiet,
    Released,
    Stop,
    Submit,
)
from pdsim.kv.pages import Pages, SlotPool, after
from pdsim.kv.prefix_pages import PrefixPagePool
from pdsim.kv.rooms import OVER, ExpiringMap, Timers
from pdsim.kv.status import Status
from pdsim.serving.decode.decode_worker import DecodeWorker
from pdsim.serving.deployment import ROUTER, Deployment, index_of, leader, rank_name
from pdsim.serving.membership import FenceCount
from pdsim.serving.prefix_cache import page_keys, page_pool
from pdsim.serving.rank_process import Handler
from pdsim.transfer.job import Rank

__all__ = ["BlockManager", "DecodeRequest"]


class DecodeRequest:
    """A request that has pages at the decode leader.

    Life: made when it gets pages (*reserved*); *arrived* when all ranks have all of it; *polled* when the scheduler
    notices that; *joined* when it enters the batch; removed when it has all its tokens, or when a failed one is
    quiet on every rank. Times are seconds on the clock.
    """

    def __init__(self, request: Submit, reserved: float, consensus: Consensus) -> None:
        self.request = request
        self.reserved = reserved
        self.consensus = consensus
        self.reason = ""  # why what arrived cannot be used
        self.stamps: Arrival | None = None
        self.arrived = 0.0
        self.polled = 0.0
        self.joined = 0.0
        self.lag = 0  # of a noticed one: steps before the next that it can be in
        self.left = False  # nobody wants its tokens any more
        self.released = False  # nothing of it is written any more
        self.quiet = 0  # ranks that have forgotten it
        self.asked: float | None = None  # when this scheduler heard of it, if that was after prefill had answered
        self.first = 0.0  # its first token leaves the server
        self.has_pages = True
        self.context = 0  # of a preempted one: tokens that its next step reads
        self.steps = 0  # of a preempted one: that it still takes
        self.recomputed = 0  # of *context*, tokens whose KV is here again

    @property
    def failed(self) -> bool:
        """Whether its pages are in quarantine, until it is proven that nothing of it moves."""
        return self.consensus.status is Status.FAILED


@mypyc_attr(allow_interpreted_subclasses=True)
class BlockManager(DecodeWorker, ABC):
    """The rank that hands out pages of its group, and sees to it that they come back.

    The pages of a room that fails before it is complete are in quarantine until its prefill leader says that nothing
    of it moves or, if that instance is gone, until every rank here has proof of it.

    Invariant: a page is free, cached, or of a room in ``_rooms``; a room that failed before it was complete stays
    there, with its pages, until `quiet` has come from every rank.  The first rank of a group is the only one that
    allocates.
    """

    def __init__(self, rank: Rank, job: Deployment, instance: str, index: int) -> None:
        super().__init__(rank, job, instance, index)
        self.followers = [rank_name(instance, other) for other in range(1, job.decode.size)]
        self.pages = pages = page_pool(
            job.decode_pages, job.cache, job.cache.decode, job.page_size, order=job.engine.pages
        )
        rank.gauge("pages", instance, lambda: pages.used / pages.pages)
        self.hits: dict[int, int] = {}  # by room: tokens that were cached
        self._details: ExpiringMap[Details] = ExpiringMap(rank.clock, OVER)
        self.keys: dict[int, list[int]] = {}  # of the prompt's pages, of each room with pages
        self.slots = SlotPool(job.slots)
        self.state = job.state_pool(self.receiver.layout)
        self._rooms: dict[int, DecodeRequest] = {}
        self.complete: list[DecodeRequest] = []  # arrived, not noticed
        self._fences = FenceCount(self.incarnation, job.decode.size)
        self._timers = Timers(rank.clock, job.waiting_timeout, self._expire)
        self._stopping = False
        self.quarantined = 0  # rooms that failed and still have pages
        handlers: dict[type[KvMessage], Handler] = {
            Details: lambda _, message: self._details.set(message.room, message),
            Arrived: lambda sender, message: self._count(index_of(sender), message, None),
            Released: self._released,
            Quiet: lambda _, message: self.quiet(message),
            Fenced: lambda sender, message: self._fenced(index_of(sender), message),
        }
        self.handlers |= handlers

    def report(self) -> dict[str, Any]:
        """Return the account of pages, and how many messages came too late.

        Pages in use, in quarantine and free add up to ``pages``; ``open_rooms`` counts what is not over on this
        side.
        """
        failed = [number for number, room in self._rooms.items() if room.failed]
        held = sum(count for number in failed for _, count in self.pages.owned(number))
        found: dict[str, Any] = super().report() | {
            "pages": self.pages.pages,
            "peak_pages": self.pages.peak,
            "free_pages": self.pages.free,
            "used_pages": self.pages.used - held,
            "quarantined_pages": held,
            "open_rooms": len(self._rooms) + len(self.receiver) + len(self._timers),
            "ignored": self.ignored + self.receiver.ignored,
        }
        return found | ({"hits": self.hits} if self.job.cache.decode else {})

    def arrived(self, message: Arrived, arrival: Arrival) -> None:
        """Count this rank's part of a room."""
        self._count(self.index, message, arrival)

    def quiet(self, message: Quiet) -> None:
        """Count a rank that has forgotten a room; with the last, give its pages back."""
        room = self._rooms.get(message.room)
        if room is None:
            self.ignore()
            return
        room.quiet += 1
        if room.quiet == self.job.decode.size:
            self._drop(message.room)
            self._wake()

    def fenced(self, message: Fenced) -> None:
        """Count this rank's proof."""
        self._fenced(self.index, message)

    def peer_gone(self, life: str) -> None:
        """Fail the rooms that *life* was to write, and wait for the proof that it writes no more.

        The router has asked for most of them already.  It is told of those of which all was written, as far as it
        knows, and whose arrival not every rank here has reported yet.
        """
        rooms = [number for number, room in self._rooms.items() if room.request.prefill == life]
        rooms = [number for number in rooms if self._rooms[number].consensus.status is not Status.SUCCESS]
        for number in rooms:
            if self.quarantine(self._rooms[number]):
                self.send(
                    ROUTER, Failed(number, f"PeerLost: {life} is gone before all of its KV was known to be here")
                )
            self._timers.drop(number)
        self._begin_fence(life, rooms)

    def stop(self, sender: str, message: Stop) -> None:
        """End once no room is left; those that failed have `Deployment.deadline` seconds for the proof."""
        self._stopping = True
        lives = dict.fromkeys(room.request.prefill for room in self._rooms.values() if room.failed)
        for life in lives:  # its leader may end before it answers
            self._begin_fence(life, [n for n, room in self._rooms.items() if room.request.prefill == life])
        super().stop(sender, message)
        self._end_if_drained()

    def end(self, *_: Any) -> None:
        """As `RankProcess.end`, and the followers too."""
        self.send(self.followers, Stop())
        super().end()

    @abstractmethod
    def _wake(self) -> None:
        """Have what has changed seen to, soon."""

    def _end_if_drained(self) -> None:
        """End if the job is over and no room is left."""
        if self._stopping and not self._rooms:
            self.end()

    def _count(self, rank: int, message: Arrived, arrival: Arrival | None) -> None:
        """Count the part of *rank*; with the last one the room is complete, and the scheduler is woken.

        *arrival*, of this rank itself, has the times of prefill; a reason says why the bytes cannot be used, and
        makes the request fail when it is polled.
        """
        room = self._rooms.get(message.room)
        if room is None or room.consensus.over:
            self.ignore()
            return
        room.reason = room.reason or message.reason
        room.stamps = arrival or room.stamps
        if room.consensus.succeed(rank):
            room.arrived = self.clock.now
            self._timers.drop(message.room)
            self.complete.append(room)
            self._wake()

    def _expire(self, number: int) -> None:
        """Fail a room that has waited too long."""
        reason = f"TransferTimeout: not all of it has arrived within {self.job.waiting_timeout:g} s"
        self.send(ROUTER, Failed(number, reason))
        self._fail(self._rooms[number])

    def _fail(self, room: DecodeRequest) -> None:
        """Fail *room* and have its prefill leader give it up.

        Its pages stay in quarantine until that has answered (`Released`), or is proven to be gone.  A room that
        is over already, one way or the other, stays as it is.
        """
        if self.quarantine(room):
            number = room.request.room
            self._timers.drop(number)
            self.send(leader(room.request.prefill), Abort(number, room.request.prefill))
            self._wake()  # if all that is left is in quarantine, the next in the queue must not wait for ever

    def quarantine(self, room: DecodeRequest) -> bool:
        """Fail *room*, whose pages are in quarantine until it is proven that nothing of it moves.

        Return whether that ends it: not one that is over already.
        """
        ended = room.consensus.fail()
        self.quarantined += ended
        return ended

    def _released(self, _: str, message: Released) -> None:
        """Give up a room of which prefill says that nothing moves any more, unless all of it has arrived."""
        room = self._rooms.get(message.room)
        if room is None or room.consensus.status is Status.SUCCESS:
            self.ignore()
            return
        self.quarantine(room)
        self._release(message.room)

    def _release(self, number: int) -> None:
        """Have a failed room forgotten, of which nothing is written any more; `quiet` follows."""
        room = self._rooms.get(number)
        if room is not None and room.failed and not room.released:
            room.released = True
            self._timers.drop(number)
            self.send(self.followers, Abort(number))
            self.receiver.forget(number)

    def _drop(self, number: int) -> None:
        """Give the pages of a room back that never became complete."""
        self.quarantined -= self._rooms.pop(number).failed
        self.keys.pop(number, None)
        self.pages.release(number)
        self.slots.release(number)
        self.state.release(number)
        self._end_if_drained()

    def _begin_fence(self, life: str, rooms: list[int]) -> None:
        """Have *rooms* released once every rank has proof that nothing of *life* moves here."""
        fence = self._fences.begin(life, rooms)
        self.send(self.followers, fence)
        self.proof.prove(fence)
        self._wake()

    def _fenced(self, rank: int, message: Fenced) -> None:
        """Count the proof of *rank*; with that of the last, release the rooms that waited for it."""
        rooms = self._fences.count(rank, message)
        if rooms is None:
            self.ignore()
            return
        for number in rooms:
            self._release(number)

    def held(self, request: Submit) -> int:
        """Return how many pages of *request*'s input are here already, less than all: those that are cached."""
        return self.pages.match(self.known(request)) if isinstance(self.pages, PrefixPagePool) else 0

    def known(self, request: Submit) -> list[int]:
        """Return the hashes of *request*'s full pages, that of its last token left out."""
        keys = self.keys.get(request.room)
        if keys is None:
            details = self._details.pop(request.room)
            blocks = details.blocks if details is not None else ()
            keys = self.keys[request.room] = page_keys(blocks, request.input, self.job.page_size)
        return keys[: (request.input - 1) // self.job.page_size]

    def _allocate(self, request: Submit, held: int) -> tuple[Pages, tuple[Pages, ...]] | None:
        """Return the pages and the rows of state that *request* gets; None if there are too few.

        They are for its input and, unless `ServingEngine.memory` has them grow, all of its output.  There are no
        pages for the first *held*.
        """
        tokens = request.input + (request.output if self.job.engine.memory == "reserve" else 0)
        pages: Pages | None
        if isinstance(self.pages, PrefixPagePool):
            found = self.pages.reuse(request.room, self.job.page_count(tokens), self.known(request))
            pages = None if found is None else after(found[0], held)
        else:
            pages = self.pages.allocate(request.room, self.job.page_count(tokens) - held)
        if pages is None:
            return None
        state = self.state.allocate(request.room, request.input, request.input + request.output, pages)
        if state is None:
            self.pages.release(request.room)
            return None
        return pages, state

    def shared(self, request: Submit) -> int:
        """Return how many tokens of *request* lie in pages of others, so that it needs none for them."""
        if not isinstance(self.pages, PrefixPagePool):
            return 0
        keys = self.known(request)
        return self.pages.in_use(keys[: self.pages.match(keys)]) * self.job.page_size

    def cache(self, room: DecodeRequest) -> None:
        """Make the prompt of *room*, which is here, known to the prefix cache."""
        number = room.request.room
        if isinstance(self.pages, PrefixPagePool):
            self.pages.commit(number, self.keys[number])

    def _free(self, number: int) -> None:
        """Give the pages of a room back that is complete, and so at rest; a preempted one has none.

        With a prefix cache they keep what they hold until somebody needs them.
        """
        room = self._rooms.pop(number)
        self.keys.pop(number, None)
        if room.has_pages:
            self.pages.release(number)
        self.state.release(number)
        self._end_if_drained()
