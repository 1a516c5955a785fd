# SPDX-License-Identifier: Apache-2.0
"""A prefill rank at work: it computes what the scheduler says, and has the handoff's mover move what it computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from simpy.events import Event

from pdsim.core.clock import fire
from pdsim.core.errors import TransferError
from pdsim.kv.contents import Contents
from pdsim.kv.messages import Abort, Chunk, Forward, Offload
from pdsim.serving.deployment import instance_of
from pdsim.serving.rank_process import EngineRank, Mover
from pdsim.serving.scheduler_host import PostingHost
from pdsim.transfer import Program

__all__ = ["PrefillMover", "PrefillWorker"]


class PrefillMover(Mover, Protocol):
    """The half of a handoff on a prefill rank; forwards come from the rank's `PrefillWorker`."""

    @property
    def contents(self) -> Contents:
        """What the pool of this rank holds."""

    def expect(self, chunks: Iterable[Chunk]) -> None:
        """Take note of *chunks*, whose forward is asked for."""

    def started(self, message: Forward) -> None:
        """Move what can go while the forward runs, which has begun on the device."""

    def computed(self, chunks: Iterable[Chunk], last: bool) -> None:
        """Move *chunks*, whose forward has ended; *last*: there are no more of it."""

    def posted(self) -> float:
        """Return until when the scheduler's thread posts, on the clock; the past if it does not."""

    def abort(self, room: int) -> None:
        """Give *room* up: the leader hears a `RankQuiesced` once nothing of it moves here."""


class PrefillWorker:
    """Computes on one prefill rank what the scheduler says, and has the mover move it.

    Its *mover* connects it to those decode ranks that name its own incarnation, once the router has sent a
    `ConnectPeer` for theirs.
    """

    def __init__(self, engine: EngineRank, mover: PrefillMover) -> None:
        job = engine.job
        self.engine = engine
        self.mover = mover
        self.posts = PostingHost(job.engine.prefill, job.engine.variation, job.seed, f"{engine.instance}.send")
        self.launching: Callable[[float], float] | None = None  # of the rank that schedules
        self.peers: set[str] = set()  # incarnations of decode instances
        self._passed = [0.0] * job.prefill.at(engine.index).pp  # when each earlier stage ends its last forward
        self._computing = 0  # forwards that have not ended; the device ends each
        self._computed_one = False  # whether one has since `working` was called
        self._unposted: deque[tuple[tuple[Chunk, ...], bool]] = deque()  # of forwards that have ended
        self._ahead: list[
            Forward | Abort
        ] = []  # of the scheduler: came before this rank was told of its own incarnation
        engine.handlers |= {
            Forward: self._forward,
            Offload: self._offload,
            Abort: self._abort,
        }

    def connect_peer(self, peer: str) -> None:
        """Have the mover get connected to *peer*, and forget an earlier incarnation of that instance.

        Then do what the scheduler has asked for before this rank knew its incarnation.
        """
        for incarnation in [
            incarnation for incarnation in self.peers if instance_of(incarnation) == instance_of(peer)
        ]:
            self.engine.peer_gone(incarnation)
        self.peers.add(peer)
        self.mover.connect_peer(peer)
        ahead, self._ahead = self._ahead, []
        for message in ahead:
            self.engine.handlers[type(message)]("", message)

    def drop(self, incarnation: str) -> None:
        """Forget *incarnation*, and its ranks."""
        self.peers.discard(incarnation)
        self.mover.drop(incarnation)

    def working(self) -> bool:
        """Return whether KV moves or a forward goes on, or has since: on a slow link or rank they take long."""
        written, computed, self._computed_one = self.mover.progressed(), self._computed_one, False
        return written or computed or self._computing > 0

    def offload(self, message: Offload) -> Event:
        """Move KV to host memory and back.  The event succeeds when what comes back is here."""
        traffic = self.engine.traffic
        if message.nbytes:
            traffic.offload(message.nbytes)
        return traffic.offload(message.back, back=True) if message.back else self.engine.clock.timeout(0)

    def compute(self, message: Forward) -> Event:
        """Occupy the device with a forward, then move its chunks.  The event succeeds when the forward ends.

        A pipeline stage begins when the stages before it have passed the forward on, as long each as *message* says.
        """
        self.mover.expect((*message.cached, *message.chunks))
        self._computing += 1
        clock = self.engine.clock
        begin = clock.now
        stage_seconds = message.seconds + self.engine.job.gather_seconds(sum(message.tokens))
        for stage, end in enumerate(self._passed):
            begin = self._passed[stage] = max(begin, end) + stage_seconds
        if begin > clock.now:
            forward = clock.event()
            clock.call_at(begin, lambda done: self.engine.guard(self._pass, message, done), forward)
        else:
            forward = self._begin_forward(message)
        assert forward.callbacks is not None
        forward.callbacks.append(lambda _: self.engine.guard(self._computed, message))
        return forward

    def _pass(self, message: Forward, done: Event) -> None:
        if not self.engine.has_ended:
            forward = self._begin_forward(message)
            assert forward.callbacks is not None
            forward.callbacks.append(lambda _: fire(done))

    def _begin_forward(self, message: Forward) -> Event:
        # What is cached can be moved at once, and with ``layerwise`` each plane is when its layer is computed: that
        # is begun at this instant, too.
        engine = self.engine
        forward = engine.rank.device.compute(message.seconds)
        if engine.gather is not None:
            forward, computed = engine.clock.event(), forward
            engine.clock.process(self._gathered(message, computed, forward))
        elif message.tokens:
            forward = self._routed(forward, message)
        if message.cached or engine.job.layerwise:  # a process calls this, and workers are woken by callbacks only
            engine.clock.call_at(engine.clock.now, lambda begun: engine.guard(self.mover.started, begun), message)
        return forward

    def _routed(self, forward: Event, message: Forward) -> Event:
        exchange, tokens = self.engine.job.prefill_time.exchange, sum(message.tokens)
        travelling = self.engine.traffic.exchange(tokens * exchange.network, tokens * exchange.port, message.seconds)
        return self.engine.clock.all_of([forward, *travelling])

    def _gathered(self, message: Forward, computed: Event, done: Event) -> Program:
        yield computed
        assert self.engine.gather is not None
        try:
            yield from self.engine.gather.run(message)
        except TransferError as error:
            self.engine.fail(error)
        else:
            fire(done)

    def _computed(self, message: Forward) -> None:
        self._computing -= 1
        self._computed_one = True
        clock = self.engine.clock
        late = 0.0 if self.launching is None else self.launching(message.seconds)
        turns = self.posts.turns(clock.now, late, len(message.chunks))
        if not turns:
            if not self._unposted:
                self.mover.computed(message.chunks, True)
                return
            turns = [clock.now]  # after a pause, posts whose turn has passed are still to come
        pieces = [message.chunks] if len(turns) == 1 else [(chunk,) for chunk in message.chunks]
        for number, (when, chunks) in enumerate(zip(turns, pieces, strict=True), 1):
            self._unposted.append((chunks, number == len(turns)))
            clock.call_at(when, self._post, None)

    def _post(self, _: None) -> None:
        chunks, last = self._unposted.popleft()
        if not self.engine.has_ended:
            self.engine.guard(self.mover.computed, chunks, last)

    def _forward(self, _: str, message: Forward) -> None:
        # One of another incarnation is ignored. Before this rank knows its own it is kept for up to a deadline.
        engine = self.engine
        if message.incarnation == engine.incarnation:  # or its leader is gone, and nobody would end what this begins
            self.compute(message)
        elif not engine.incarnation:  # where nobody reads from this rank, nobody has waited for it either
            if not self._ahead:  # an introduction comes within a deadline, or not at all
                engine.clock.call_at(engine.clock.now + engine.job.deadline, lambda _: self._ahead.clear(), None)
            self._ahead.append(message)
        else:
            engine.ignore()

    def _offload(self, _: str, message: Offload) -> None:
        if message.incarnation == self.engine.incarnation:
            self.offload(message)
        else:
            self.engine.ignore()

    def _abort(self, _: str, message: Abort) -> None:
        if self._ahead and not self.engine.incarnation:
            self._ahead.append(message)
        else:
            self.mover.abort(message.room)
