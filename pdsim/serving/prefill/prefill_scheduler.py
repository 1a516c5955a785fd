"""The prefill engine: continuous batching with chunked prefill, and the handoff of each chunk as it is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from simpy.events import Event

from pdsim.errors import ConfigError, PdsimError
from pdsim.job import Rank
from pdsim.kv.consensus import Consensus
from pdsim.kv.messages import (
    Abort,
    Chunk,
    Destination,
    Details,
    Dropped,
    Failed,
    Forward,
    Offload,
    Preceded,
    Prefilled,
    Ready,
    Released,
    Sent,
    Settled,
    Stop,
    Submit,
    Took,
)
from pdsim.kv.pages import Pages, SlotPool, after
from pdsim.kv.plan import cut, pair
from pdsim.kv.prefix_pages import PrefixPagePool
from pdsim.kv.rooms import OVER, ExpiringMap, QuarantineStall, Timers
from pdsim.serving.deployment import ROUTER, Deployment, epoch_of, index_of, instance_of, leader, rank_name
from pdsim.serving.prefill.prefill_request import PrefillRequest
from pdsim.serving.prefill.prefill_worker import PrefillWorker
from pdsim.serving.prefix_cache import page_keys, page_pool
from pdsim.serving.scheduler_host import SchedulerHost
from pdsim.serving.seams import handoff_of, scheduler_of
from pdsim.transfer import Program

__all__ = ["PrefillRequest", "PrefillScheduler", "program"]


def program(rank: Rank, *, instance: str, index: int, job: Mapping[str, Any]) -> Program:
    """Run one rank of a prefill instance until the router stops it."""
    deployment = Deployment.from_plain(job)
    return (yield from handoff_of(deployment.engine).prefill(rank, deployment, instance, index).run())


class PrefillScheduler(PrefillWorker):
    """The rank that also schedules.

    A request waits for its `Destination` without being in the way of others, then in order of those; each iteration
    takes up to `chunk` tokens, at most one request of which is left incomplete and goes first in the next.  A
    request has pages for its whole input from its first forward until all ranks have written it.

    Invariant: pages are free, cached, or of rooms in ``_rooms``; a failed room keeps its own until `Settled` has come
    from every rank, because writes from them may still be under way.
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
        self._rooms: dict[int, PrefillRequest] = {}
        self._destinations: ExpiringMap[Destination] = ExpiringMap(rank.clock, OVER)  # before their `Submit`
        self._over: ExpiringMap[None] = ExpiringMap(rank.clock, OVER)  # rooms that failed
        self._details: ExpiringMap[Details] = ExpiringMap(rank.clock, OVER)
        self.hits: dict[int, int] = {}  # by room: tokens that were cached
        self.host_hits: dict[int, int] = {}  # of them, those that came back from host memory
        self._offloading = 0, 0  # pages to host memory, and back, before the next forward
        self._queue: deque[PrefillRequest] = deque()
        self._idle: Event | None = None
        self._ready: dict[tuple[str, str], set[int]] = {}  # by own and a decode instance's life: connected ranks
        self._last_lost: dict[str, int] = {}  # by decode instance: the last epoch that is known to be over
        self._timers = Timers(rank.clock, job.bootstrap_timeout, self._expire)
        self._blocked = QuarantineStall(rank.clock, job.deadline, self._wake)
        self._stopping = False
        self.policy = scheduler_of(job.engine)
        self.host = SchedulerHost(job.engine.prefill, job.engine.variation, job.seed, instance, job.layers(instance))
        self.handlers |= {
            Ready: lambda sender, message: self._count_ready(index_of(sender), message),
            Submit: self._submit,
            Details: lambda _, message: self._details.set(message.room, message),
            Destination: self._destination,
            Sent: lambda sender, message: self._conclude(index_of(sender), message),
            Settled: lambda sender, message: self._conclude(index_of(sender), message),
            Abort: self._abort,
        }

    def run(self) -> Program:
        """As `PrefillWorker.run`, and schedule."""
        self.clock.process(self._schedule())
        return (yield from super().run())

    def report(self) -> dict[str, Any]:
        """Return the account of pages (those in use and in quarantine and free are all), and of what came too late."""
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

    def working(self) -> bool:
        """As `PrefillWorker.working`; pages in quarantine that its queue waits for come back, or it gives up."""
        return super().working() or self._blocked.waiting

    def conclude(self, message: Sent | Settled) -> None:
        """Count this rank's part of a room as over."""
        self._conclude(self.index, message)

    def peer_gone(self, life: str) -> None:
        """As `PrefillWorker.peer_gone`, and give up the rooms that were to go to *life*."""
        super().peer_gone(life)
        self._last_lost[instance_of(life)] = max(epoch_of(life), self._last_lost.get(instance_of(life), 0))
        self._ready = {lives: ranks for lives, ranks in self._ready.items() if lives[1] != life}
        for room in [room for room in self._rooms.values() if room.request.decode == life]:
            self._give_up(room)

    def meet(self, peer: str) -> None:
        """As a `PrefillWorker`, and forget what ranks of an earlier life were ready for."""
        self._ready = {lives: ranks for lives, ranks in self._ready.items() if lives[0] == self.life}
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
        if self._stopping and not self._rooms:
            self.end()

    def _count_ready(self, rank: int, message: Ready) -> None:
        """Tell the router once all ranks are connected to a decode instance, whichever of them was told of it first."""
        if self._is_over(message.peer) or (self.life and message.life != self.life):
            self.ignore()
            return
        ranks = self._ready.setdefault((message.life, message.peer), set())
        ranks.add(rank)
        if len(ranks) == self.job.prefill.size:
            self.send(ROUTER, message)

    def _is_over(self, life: str) -> bool:
        """Return whether *life* was lost, or this rank has met a later one of the same instance."""
        if epoch_of(life) <= self._last_lost.get(instance_of(life), -1):
            return True
        later = (other for other in self._met if instance_of(other) == instance_of(life))
        return any(epoch_of(other) > epoch_of(life) for other in later)

    def _conclude(self, rank: int, message: Sent | Settled) -> None:
        """Count a rank's part of a room: written, failed, or settled after a failure."""
        room = self._rooms.get(message.room)
        if room is None:
            self.ignore()
        elif isinstance(message, Settled):
            if room.consensus.settle(rank):
                self._forget(room)
                self.send(leader(room.request.decode), Released(message.room))
        elif message.reason:
            self._fail(room, message.reason, message.lost)
        elif not room.failed:
            room.nbytes += message.nbytes
            if room.consensus.succeed(rank):
                self._forget(room)
                self.send(ROUTER, Prefilled(message.room, room.nbytes))

    # --- requests that come and go ---

    def _submit(self, _: str, request: Submit) -> None:
        if request.prefill != self.life:
            self.ignore()
            return
        room = PrefillRequest(request, Consensus(self.job.prefill.size))
        room.ready = self.clock.now + self.host.arrive(request.input)
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

    def enqueue(self, room: PrefillRequest) -> None:
        """Have *room* wait for its first forward, from when the host has made it known to the scheduler."""
        if room.ready > self.clock.now:
            self.clock.call_at(room.ready, self._enqueue, room)
        else:
            self._enqueue(room)

    def _enqueue(self, room: PrefillRequest) -> None:
        if not room.failed:
            self._queue.append(room)
            self._wake()

    def _abort(self, sender: str, message: Abort) -> None:
        """Give a room up: for the router, which is told whether it began; for its decode leader, if it means this life.

        What another life has written, only that life or the decode side itself can say.
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

    # --- the scheduler ---

    def _wake(self) -> None:
        if self._idle is not None and not self._idle.triggered:
            self._idle.succeed()

    def _schedule(self) -> Program:
        """Run one iteration after the other, chosen when it begins or one `ahead`; wait for news if there is none."""
        ahead: Forward | None = None
        while not self.ended.triggered:
            try:
                forward, ahead = ahead or self.next_forward(), None
                if forward is not None and self.job.engine.ahead:
                    ahead = self.next_forward()
            except PdsimError as error:
                self.fail(error)
                return
            if forward is None:
                self._idle = Event(self.clock)
                yield self._idle
                continue
            if any(self._offloading):
                yield self._offloaded()
            self.send(self.followers, forward)
            yield self.compute(forward)
            if self.job.cache.prefill and self.job.cache.found == "computed":
                for chunk in forward.chunks:
                    self._cache(chunk.room)
                if any(self._offloading):
                    self._offloaded()  # nobody waits for what goes to host memory

    def _offloaded(self) -> Event:
        """Move pages to host memory, which nobody waits for, and back; the event succeeds when those are here."""
        out, back = self._offloading
        self._offloading = 0, 0
        page = self.sender.layout.row_bytes("kv") + self.sender.layout.row_bytes("index")
        message = Offload(self.life, out * page, back * page)
        self.send(self.followers, message)
        return self.offload(message)

    def next_forward(self) -> Forward | None:
        """Return the next iteration, or None if there is nothing that can run now.

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
                if any(other.source_slot >= 0 and not other.failed for other in self._rooms.values()):
                    self._blocked.clear()
                    break  # until one of them gives its pages back
                if not self._blocked.too_long():
                    break
                self._fail(room, f"OutOfMemory: {self.pages.used} of {self.pages.pages} pages are in quarantine")
                continue
            tokens = min(tokens, max(1, room.request.input - room.done))  # what is cached it did not know
            if not 0 < tokens <= min(budget, room.request.input - room.done):
                raise ConfigError(
                    f"engine.scheduler={self.job.engine.scheduler} gave {tokens} tokens of room {room.request.room}, "
                    f"which has {room.request.input - room.done} left in a step of {budget}; give 1 to the lesser"
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
        seconds = self.iteration_seconds(pieces) + held_up
        if cached or self.job.prefill_time.exchange:
            travel = [new for _, new in pieces if self.job.prefill_time.exchange]
            return Preceded(self.life, seconds, tuple(chunks), tuple(cached), sum(travel))
        return Forward(self.life, seconds, tuple(chunks))

    def launching(self, forward: float) -> float:
        """Return for how long the end of a *forward* is not seen to, as the host launches the next one.

        With an overlap loop it begins to if a request waits when it has launched this one, and looks at results
        after. So where forwards are bound by their launch a result is late by another launch.
        """
        if not self.job.engine.overlap or not self._queue:
            return 0.0
        return max(0.0, 2 * self.host.costs.launch - forward)

    def iteration_seconds(self, pieces: list[tuple[int, int]]) -> float:
        """Return how long an iteration over *pieces* takes, the host's share included."""
        forward, step = max(self.job.prefill_time.prefill(pieces), self.host.costs.launch), self.host.step()
        return max(forward, step) if self.job.engine.overlap else forward + step

    def _begin(self, room: PrefillRequest) -> bool:
        """Give *room* its pages and its slot; return whether there were any."""
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
        room.sent, room.source_slot = destination.held, slot
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
