# SPDX-License-Identifier: Apache-2.0
"""The prefill engine: continuous batching with chunked prefill, and the handoff of each chunk as it is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace
from simpy.events import Event

from pdsim.core.errors import ConfigError, PdsimError
from pdsim.core.native_class import mypyc_attr
from pdsim.kv.messages import (
    Chunk,
    Forward,
    Offload,
    Preceded,
)
from pdsim.kv.pages import Pages, after
from pdsim.kv.plan import cut, pair
from pdsim.kv.prefix_pages import PrefixPagePool
from pdsim.kv.rooms import QuarantineStall, out_of_memory
from pdsim.serving.deployment import Deployment
from pdsim.serving.prefill.prefill_block_manager import PrefillBlockManager
from pdsim.serving.prefill.prefill_request import PrefillRequest
from pdsim.serving.seams import handoff_of, scheduler_of
from pdsim.transfer import Program
from pdsim.transfer.job import Rank

__all__ = ["PrefillRequest", "PrefillScheduler", "program"]


def program(rank: Rank, *, instance: str, index: int, job: Mapping[str, Any]) -> Program:
    """Run one rank of a prefill instance until the router stops it."""
    deployment = Deployment.from_plain(job)
    return (yield from handoff_of(deployment.engine).prefill(rank, deployment, instance, index).run())


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefillScheduler(PrefillBlockManager):
    """The rank that also schedules.

    A request waits for its `Destination` without being in the way of others, then in order of those; each
    iteration takes up to `chunk` tokens, at most one request of which is left incomplete and goes first in the
    next.  A request has pages for its whole input from its first forward until all ranks have written it.

    Life of an iteration: `next_forward` chooses its pieces, and gives pages to the requests that begin; the
    followers are sent it and every rank computes it; its chunks are written (`PrefillWorker`) while the next is
    computed.  Without work the scheduler sleeps until `_wake`.
    """

    def __init__(self, rank: Rank, job: Deployment, instance: str, index: int) -> None:
        super().__init__(rank, job, instance, index)
        self.policy = scheduler_of(job.engine)
        self._offloading = 0, 0  # pages to host memory, and back, before the next forward
        self._queue: deque[PrefillRequest] = deque()
        self._idle: Event | None = None
        self._next: Forward | None = None
        self._launched = 0.0  # with ``ahead``, on the clock: when the last launch ends, and the forward that runs
        self._ends = 0.0
        self._blocked = QuarantineStall(rank.clock, job.deadline, self._wake)

    def run(self) -> Program:
        """As `PrefillWorker.run`, and schedule."""
        self.clock.process(self._schedule())
        return (yield from super().run())

    def working(self) -> bool:
        """As `PrefillWorker.working`; pages in quarantine that its queue waits for come back, or it gives up."""
        return super().working() or self._blocked.waiting

    def enqueue(self, room: PrefillRequest) -> None:
        """Have *room* wait for its first forward, from when the host has made it known to the scheduler."""
        if room.ready > self.clock.now:
            self.clock.call_at(room.ready, self._enqueue, room)
        else:
            self._enqueue(room)

    def _enqueue(self, room: PrefillRequest) -> None:
        """Queue *room* now, unless it has failed while its host was at it."""
        if not room.failed:
            self._queue.append(room)
            self._wake()

    def _wake(self) -> None:
        """Let an idle scheduler look; one that is computing looks at the end of its iteration."""
        if self._idle is not None and not self._idle.triggered:
            self._idle.succeed()

    def _schedule(self) -> Program:
        """Run one iteration after the other; wait for news if there is none to run.

        With ``ahead`` the next one is chosen when the host has launched this one, and is launched while the GPU
        computes: what comes later has to wait for the one after, and where nothing waits then the next is chosen at
        this one's end.
        """
        while not self.has_ended:
            try:
                forward, self._next = self._still_wanted(self._next) or self.next_forward(), None
            except PdsimError as error:
                self.fail(error)
                return
            if forward is None:
                self.look()
                self._idle = self.clock.event()
                yield self._idle
                continue
            if any(self._offloading):
                yield self._offloaded()
            self.send(self.followers, forward)
            computed = self.compute(forward)
            if self.job.engine.noticed == "prefill":
                self.clock.call_at(self.clock.now + self.host.costs.launch, self.look, None)
            if self.job.engine.ahead:
                self._ends = self.clock.now + forward.seconds
                if self._launched < self._ends:
                    yield self.clock.timeout(max(0.0, self._launched - self.clock.now))
                    try:
                        self._next = self.next_forward(ahead=True)
                    except PdsimError as error:
                        self.fail(error)
                        return
            if not computed.processed:
                yield computed
            if self.job.cache.prefill and self.job.cache.found == "computed":
                for chunk in forward.chunks:
                    self._cache(chunk.room)
                if any(self._offloading):
                    self._offloaded()  # nobody waits for what goes to host memory

    def look(self, _: Any = None) -> None:
        """Do what this side does when it has launched a forward, and when there is none: nothing if it pushes."""

    def _offloaded(self) -> Event:
        """Move pages to host memory, which nobody waits for, and back; the event succeeds when those are here."""
        out, back = self._offloading
        self._offloading = 0, 0
        page = self.sender.layout.row_bytes("kv") + self.sender.layout.row_bytes("index")
        message = Offload(self.life, out * page, back * page)
        self.send(self.followers, message)
        return self.offload(message)

    def _still_wanted(self, forward: Forward | None) -> Forward | None:
        """Return *forward*, which was chosen ahead, without what has been given up since: it takes as long.

        No rank had heard of it, so none waits for it before the pages of a failed room are free.
        """
        if forward is None:
            return None
        if all(chunk.room in self._rooms and not self._rooms[chunk.room].failed for chunk in forward.chunks):
            return forward
        wanted = {number for number, room in self._rooms.items() if not room.failed}
        kept = replace(forward, chunks=tuple(chunk for chunk in forward.chunks if chunk.room in wanted))
        if isinstance(kept, Preceded):
            kept = replace(kept, cached=tuple(chunk for chunk in kept.cached if chunk.room in wanted))
        return kept

    def next_forward(self, ahead: bool = False) -> Forward | None:
        """Return the next iteration, or None if there is nothing that can run now.

        One that is chosen *ahead* runs when the forward of now has ended.

        An iteration takes requests in the order of the policy.  One without pages ends it if others have some, which
        will come back; if all others are in quarantine, it waits for `Deployment.deadline` seconds and then fails.
        Raise a `ConfigError` if the policy gives more tokens than there are.
        """
        budget, held_up = self.job.chunk, 0.0
        pieces: list[tuple[int, int]] = []
        chunks: list[Chunk] = []
        cached: list[Chunk] = []  # need no forward
        partial: list[PrefillRequest] = []  # have a piece in this step, and more to come
        while self._queue and budget and len(chunks) < self.job.prefill_batch:
            if self._queue[0].failed:
                self._queue.popleft()
                continue
            chosen = self.policy.prefill(self._queue, budget)
            if chosen is None:
                break
            room, tokens = self._queue[chosen[0]], chosen[1]
            if room.failed:
                del self._queue[chosen[0]]
                continue
            if room.source_slot < 0 and not self._begin(room):
                if any(self.gives_back(other) for other in self._rooms.values()):
                    self._blocked.clear()
                    break  # until one of them gives its pages back
                if not self._blocked.too_long():
                    break
                self._fail(
                    room, out_of_memory(self.pages, self.job.page_count(room.request.input), self.slots.free > 0)
                )
                continue
            tokens = min(tokens, max(1, room.request.input - room.done))  # what is cached it did not know
            if not 0 < tokens <= min(budget, room.request.input - room.done):
                raise ConfigError(
                    f"engine.scheduler={self.job.engine.scheduler} gave {tokens} tokens of room "
                    f"{room.request.room}, which has {room.request.input - room.done} left "
                    f"in a step of {budget}; give 1 to the lesser"
                )
            if not room.begun:
                room.begun = True
                held_up += self.host.admit(room.request.input)
            pieces.append((room.done, tokens))
            if self.job.cache.early and room.done // self.job.page_size > room.sent:
                cached.append(self._chunk(room, 0))
            chunks.append(self._chunk(room, tokens))
            budget -= tokens
            del self._queue[chosen[0]]
            if room.done < room.request.input:
                partial.append(room)
        self._queue.extendleft(reversed(partial))
        if not chunks:
            return None
        seconds = self._after_launch(self.iteration_seconds(pieces), held_up, ahead)
        if cached or self.job.prefill_time.exchange:
            travel = [new for _, new in pieces if self.job.prefill_time.exchange]
            return Preceded(self.life, seconds, tuple(chunks), tuple(cached), sum(travel))
        return Forward(self.life, seconds, tuple(chunks))

    def gives_back(self, room: PrefillRequest) -> bool:
        """Return whether *room* has pages that it gives back when it is done: in quarantine they may stay."""
        return room.source_slot >= 0 and not room.failed

    def _after_launch(self, forward: float, held_up: float, ahead: bool) -> float:
        """Return how long an iteration takes, its launch and *held_up*, the host's part before it, included.

        Posts of KV that go on beside a launch make it longer.  One that is launched *ahead* costs time only if its
        launch ends later than the *forward* could.
        """
        costs, posting = self.host.costs, self.posts.due(self.clock.now)
        beside = costs.posted_beside + costs.posted_more * (posting - 1) if posting else 0.0
        if not self.job.engine.ahead:
            return forward + held_up + beside
        self._launched = self.clock.now + held_up + self.host.launch() + beside
        if not ahead:
            return max(forward + held_up + beside, self._launched - self.clock.now)
        return max(forward, self._launched - self._ends)

    def launching(self, forward: float) -> float:
        """Return for how long the end of a *forward* is not seen to, as the host launches the next one.

        With an overlap loop it begins to if a request waits when it has launched this one, and looks at results
        after. So where forwards are bound by their launch a result is late by another launch.
        """
        if self.job.engine.ahead:
            if self._next is None and self._launched >= self.clock.now:  # a forward that its launch bounds
                self._next = self.next_forward(ahead=True)
            return max(0.0, self._launched - self.clock.now)
        if not self.job.engine.overlap or not self._queue:
            return 0.0
        return max(0.0, 2 * self.host.costs.launch - forward)

    def iteration_seconds(self, pieces: list[tuple[int, int]]) -> float:
        """Return how long an iteration over *pieces* takes, the host's share included."""
        forward, step = max(self.job.prefill_time.prefill(pieces), self.host.costs.launch), self.host.step()
        return max(forward, step) if self.job.engine.overlap else forward + step

    def _begin(self, room: PrefillRequest) -> bool:
        """Give *room* its pages and its slot of first-token metadata; return whether there were any.

        Pages are for the whole prompt, after those that decode holds; runs pair them with decode's, so that what
        is contiguous on both sides is one descriptor.
        """
        request, destination = room.request, room.destination
        assert destination is not None
        if not self.slots.free:
            return False
        found = self._allocate(room, destination.held)
        if found is None:
            return False
        rest, state = found
        slot = self.slots.allocate(request.room)
        assert slot is not None
        self._blocked.clear()
        room.sent = destination.held
        room.source_slot = slot
        room.runs = pair(rest, destination.pages)
        room.state = tuple(map(pair, state, destination.state))
        room.started = self.clock.now
        return True

    def _allocate(self, room: PrefillRequest, held: int) -> tuple[Pages, tuple[Pages, ...]] | None:
        """Return the pages of *room* after the first *held*, and its rows of state; None if there are too few.

        Those that are cached need no forward, except that of the last token.
        """
        request, count = room.request, self.job.page_count(room.request.input)
        if isinstance(self.pages, PrefixPagePool):
            known = (request.input - 1) // self.job.page_size
            reused = self.pages.reuse(request.room, count, room.keys[:known])
            if reused is None:
                return None
            pages: Pages | None = reused[0]
            room.done = self.hits[request.room] = reused[1] * self.job.page_size
            if self.pages.loaded:
                self.host_hits[request.room] = self.pages.loaded * self.job.page_size
                self._offloading = self._offloading[0], self._offloading[1] + self.pages.loaded
        else:
            pages = self.pages.allocate(request.room, count)
        if pages is None:
            return None
        rest = after(pages, held)
        state = self.state.allocate(request.room, request.input, request.input, rest)
        if state is None:
            self.pages.release(request.room)
            return None
        return rest, state

    def _chunk(self, room: PrefillRequest, tokens: int) -> Chunk:
        """Return the next *tokens* of *room*, and what is cached; an incomplete page goes with the next chunk."""
        request, destination = room.request, room.destination
        assert destination is not None
        held, first = destination.held, room.sent
        room.done += tokens
        last = room.done == request.input
        end = max(held, self.job.page_count(room.done) if last else room.done // self.job.page_size)
        room.sent = end
        if self.job.cache.found == "scheduled":
            self._cache(request.room)
        chunk = Chunk(
            request.room,
            request.decode,
            room.chunks,
            first,
            request.input,
            cut(room.runs, first - held, end - first),
            last,
            (room.source_slot, destination.slot),
            room.noticed,
            room.started,
            room.state if last else (),
            held,
        )
        room.chunks += 1
        return chunk

    def _cache(self, number: int) -> None:
        """Make the pages of a room that a forward has covered known to the prefix cache."""
        room = self._rooms.get(number)
        if isinstance(self.pages, PrefixPagePool) and room is not None and room.source_slot >= 0:
            new = self.pages.commit(number, room.keys[: room.done // self.job.page_size])
            self._offloading = self._offloading[0] + new, self._offloading[1]
