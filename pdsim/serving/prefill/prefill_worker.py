# SPDX-License-Identifier: Apache-2.0
"""A prefill rank: connects to the decode ranks that it is told to meet, computes, and writes what it computed."""

from __future__ import annotations

from collections import deque
from typing import Any

from simpy.events import Event

from pdsim.core.clock import fire
from pdsim.core.native_class import mypyc_attr
from pdsim.kv.messages import (
    Abort,
    Chunk,
    Forward,
    Grant,
    Meet,
    Offload,
    Preceded,
    Ready,
    Sent,
    Settled,
)
from pdsim.kv.sender import KvSender
from pdsim.serving.deployment import Deployment, instance_of, leader
from pdsim.serving.membership import PeerConnector
from pdsim.serving.rank_process import EngineProcess
from pdsim.serving.scheduler_host import PostingHost
from pdsim.transfer.job import Rank

__all__ = ["PrefillWorker"]


@mypyc_attr(allow_interpreted_subclasses=True)
class PrefillWorker(EngineProcess):
    """A rank that computes what its leader says, and writes what it computed.

    It connects to those decode ranks that mean its own life, of lives that the router has told it to meet.

    What it tells its leader (`ready`, `conclude`) the leader's own class overrides to count itself.
    """

    introductions: PeerConnector

    def __init__(self, rank: Rank, job: Deployment, instance: str, index: int) -> None:
        super().__init__(rank, job, instance, index)
        self.sender = self.make_sender()
        self.posts = PostingHost(
            job.engine.prefill, job.engine.variation, job.seed, f"{instance}.send"
        )  # ranks run in step
        self._passed = [0.0] * job.prefill.at(index).pp  # when each stage before this one ends its last forward
        self._computing = 0  # forwards that have not ended; the device ends each
        self._computed_one = False  # whether one has since `working` was called
        self._met: set[str] = set()  # lives of decode instances
        self._unposted: deque[tuple[tuple[Chunk, ...], bool]] = deque()  # of forwards that have ended
        self._ahead: list[Forward | Abort] = []  # of the leader: came before this rank was told of its own life
        self.handlers |= {
            Forward: self._forward,
            Preceded: self._forward,
            Offload: self._offload,
            Grant: lambda sender, message: self.sender.grant(sender, message),
            Abort: self._abort,
        }

    def make_sender(self) -> Any:
        """Return what hands KV over here: a `KvSender`, or what stands in its place in another handoff.

        A handoff in which this rank connects to those of the other side makes its `PeerConnector` here, too.
        """
        job = self.job
        sender = KvSender(
            self.rank,
            job.prefill_layout(self.index),
            job.prefill,
            self.index,
            self.conclude,
            job.all_cp_ranks,
            job.handoff,
            job.staging,
            job.checked,
        )
        self.introductions = PeerConnector(self, sender.links, self._found)
        return sender

    def report(self) -> dict[str, Any]:
        """Return why metadata did not go the way of the policy, and how often."""
        return {"fallbacks": self.sender.fallbacks}

    def working(self) -> bool:
        """Return whether a write or a forward goes on, or has ended since: on a slow link or rank they take long."""
        written, computed, self._computed_one = self.sender.progressed(), self._computed_one, False
        return written or computed or self._computing > 0

    def ready(self, message: Ready) -> None:
        """Tell the leader that this rank is connected to all ranks of a decode instance that it writes to."""
        self.send(leader(self.instance), message)

    def conclude(self, message: Sent | Settled) -> None:
        """Tell the leader how a room ended here."""
        self.send(leader(self.instance), message)

    def offload(self, message: Offload) -> Event:
        """Move KV to host memory and back.  The event succeeds when what comes back is here."""
        device: Any = self.rank.device  # of the model: `experiments.serve` refuses others
        if message.nbytes:
            device.traffic.offload(message.nbytes)
        found: Event = device.traffic.offload(message.back, back=True) if message.back else self.clock.timeout(0)
        return found

    def _offload(self, _: str, message: Offload) -> None:
        """Move KV as the leader asks, unless it is of a life that is over."""
        if message.life == self.life:
            self.offload(message)
        else:
            self.ignore()

    def compute(self, message: Forward) -> Event:
        """Occupy the device with a forward, then write its chunks.  The event succeeds when the forward ends.

        A pipeline stage begins when the stages before it have passed the forward on, as long each as *message* says.
        """
        cached = message.cached if type(message) is Preceded else ()
        self.sender.expect((*cached, *message.chunks))
        self._computing += 1
        begin = self.clock.now
        for stage, end in enumerate(self._passed):
            begin = self._passed[stage] = max(begin, end) + message.seconds
        if begin > self.clock.now:
            forward = self.clock.event()
            self.clock.call_at(begin, lambda done: self.guard(self._pass, message, done), forward)
        else:
            forward = self._begin_forward(message)
        assert forward.callbacks is not None
        forward.callbacks.append(lambda _: self.guard(self._computed, message))
        return forward

    def _pass(self, message: Forward, done: Event) -> None:
        """Begin a forward of a later pipeline stage, whose input has come; *done* fires at its end."""
        if not self.has_ended:
            forward = self._begin_forward(message)
            assert forward.callbacks is not None
            forward.callbacks.append(lambda _: fire(done))

    def _begin_forward(self, message: Forward) -> Event:
        """Occupy the device with a forward whose input is here.

        What is cached can be written at once, and with ``layerwise`` each plane is when its layer is computed:
        that is begun at this instant, too.
        """
        forward = self.rank.device.compute(message.seconds)
        if type(message) is Preceded and message.tokens:
            forward = self._routed(forward, message)
        assert forward.callbacks is not None
        cached = type(message) is Preceded and message.cached
        if cached or self.job.layerwise:  # a process calls this, and workers are woken by callbacks only
            self.clock.call_at(self.clock.now, lambda message: self.guard(self._write_early, message), message)
        return forward

    def _routed(self, forward: Event, message: Preceded) -> Event:
        """Put the tokens of *forward* on the links to their experts; the event succeeds when both are done."""
        device: Any = self.rank.device  # of the model: `experiments.serve` refuses others
        exchange, tokens = self.job.prefill_time.exchange, message.tokens
        travelling = device.traffic.exchange(tokens * exchange.network, tokens * exchange.port, message.seconds)
        return self.clock.all_of([forward, *travelling])

    def _computed(self, message: Forward) -> None:
        """Write the chunks of a forward that has ended, once the host has done what it does before."""
        self._computing -= 1
        self._computed_one = True
        turns = self.posts.turns(self.clock.now, self.launching(message.seconds), len(message.chunks))
        if not turns:
            if not self._unposted:
                self._write((message.chunks, True))
                return
            turns = [self.clock.now]  # after a pause, posts whose turn has passed are still to come
        pieces = [message.chunks] if len(turns) == 1 else [(chunk,) for chunk in message.chunks]
        for number, (when, chunks) in enumerate(zip(turns, pieces, strict=True), 1):
            self._unposted.append((chunks, number == len(turns)))
            self.clock.call_at(when, self._sending, None)

    def launching(self, forward: float) -> float:  # noqa: ARG002 for ranks that schedule
        """Return for how long the end of a *forward* is not seen to, in seconds, as the host is busy with the next.

        Not at all, on a rank that does not schedule.
        """
        return 0.0

    def _sending(self, _: None) -> None:
        """Write the chunks whose turn it is; posts of one instant keep their order."""
        what = self._unposted.popleft()
        if not self.has_ended:
            self.guard(self._write, what)

    def _write_early(self, message: Forward) -> None:
        """Write what is cached, and each plane of the rest once its layer is computed."""
        for chunk in message.cached if type(message) is Preceded else ():
            self.sender.send(chunk)
        if self.job.layerwise:
            for chunk in message.chunks:
                self.sender.send(chunk, message.seconds)

    def _write(self, what: tuple[tuple[Chunk, ...], bool]) -> None:
        """Hand chunks of a forward to the sender, the last of it or not.

        With `layerwise` their planes have gone, and it learns of the end only.
        """
        chunks, last = what
        for chunk in chunks:
            if self.job.layerwise:
                self.sender.computed(chunk)
            else:
                self.sender.send(chunk)
        if last:
            self.sender.poll()

    def peer_gone(self, life: str) -> None:
        """Forget *life*, and its ranks."""
        self._met.discard(life)
        self.part_with(life)

    def meet(self, peer: str) -> None:
        """Get connected to the ranks of *peer*, and forget an earlier life of that instance."""
        for life in [life for life in self._met if instance_of(life) == instance_of(peer)]:
            self.peer_gone(life)
        self._met.add(peer)
        self.introduce(peer)

    def part_with(self, life: str) -> None:
        """Forget the ranks of *life*."""
        self.introductions.disconnect_peer(life)

    def introduce(self, peer: str) -> None:
        """Connect to the ranks of *peer* that make themselves known."""
        self.introductions.connect_peer(peer)

    def _found(self, life: str) -> None:
        """Be ready once all ranks of *life* are connected that this one writes to."""
        if self.sender.links.connected(life, self.job.decode):
            self.ready(Ready(self.life, life))

    def _meet(self, sender: str, message: Meet) -> None:
        """As an `EngineProcess`, and do what the leader has asked for before this rank knew its life."""
        super()._meet(sender, message)
        if self.life:
            ahead, self._ahead = self._ahead, []
            for each in ahead:
                self.handlers[type(each)](leader(self.instance), each)

    def _forward(self, _: str, message: Forward) -> None:
        """Begin a forward that the leader asks for.

        One of another life is ignored. Before this rank knows its own life it is kept for up to a deadline.
        """
        if message.life == self.life:  # or its leader is gone, and nobody would end what this begins
            self.compute(message)
        elif not self.life:  # where nobody reads from this rank, nobody has waited for it either
            if not self._ahead:  # an introduction comes within a deadline, or not at all
                self.clock.call_at(self.clock.now + self.job.deadline, lambda _: self._ahead.clear(), None)
            self._ahead.append(message)
        else:
            self.ignore()

    def _abort(self, _: str, message: Abort) -> None:
        """Give a room up; before this rank knows its life, in the order of what else the leader has asked for."""
        if self._ahead and not self.life:
            self._ahead.append(message)
        else:
            self.sender.abort(message.room)
