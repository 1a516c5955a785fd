# SPDX-License-Identifier: Apache-2.0
"""A decode rank: makes its pool known, notices what arrives in it, and proves when nothing more can."""

from __future__ import annotations

from typing import Any

from simpy.events import Event

from pdsim.core.native_class import mypyc_attr
from pdsim.kv.messages import (
    Abort,
    Arrival,
    Arrived,
    Ask,
    Fenced,
    MessageError,
    Metadata,
    Offload,
    Quiet,
    Reserve,
    Return,
)
from pdsim.kv.receiver import KvReceiver
from pdsim.serving.deployment import Deployment, leader
from pdsim.serving.membership import PeerFence
from pdsim.serving.rank_process import EngineProcess
from pdsim.transfer import Notification, Program
from pdsim.transfer.job import Rank

__all__ = ["DecodeWorker"]


@mypyc_attr(allow_interpreted_subclasses=True)
class DecodeWorker(EngineProcess):
    """A rank that receives its part of each request's KV and tells its leader.

    It makes its pool known to a new life of a prefill instance only once it is proven that nothing of an earlier one
    moves here any more.  So what writes here is always of one life.

    What it tells its leader (`arrived`, `quiet`, `fenced`) the leader's own class overrides to count itself.
    """

    def __init__(self, rank: Rank, job: Deployment, instance: str, index: int) -> None:
        super().__init__(rank, job, instance, index)
        self.receiver = self.make_receiver()
        self.proof = PeerFence(self, self.receiver.writers, self.fenced, lambda rank: self.receiver.sever(rank))
        self.handlers |= {
            Reserve: self._reserve,
            Abort: self._forget,
            Arrival: self._arrive,
            Metadata: self._store,
            Offload: self._offload,
        }
        if self.receiver.landing is not None:
            landing = self.receiver.landing
            self.handlers |= {Ask: self._ask, Return: lambda _, message: landing.give_back(message)}

    def make_receiver(self) -> Any:
        """Return what KV comes in by: a `KvReceiver`, or what stands in its place in another handoff."""
        job = self.job
        return KvReceiver(
            self.rank,
            job.decode_layout(self.index),
            self.instance,
            self.index,
            job.rank_map,
            self.arrived,
            self.quiet,
            job.handoff,
            job.staging,
            job.checked,
        )

    def run(self) -> Program:
        """As `EngineProcess.run`, with an eye on what arrives."""
        self.rank.endpoint.notifications.listen(self._on_notification)
        return (yield from super().run())

    def report(self) -> dict[str, int]:
        """Return, of a staging ring, most bytes in slots, bytes held to the end, and how often there was no slot."""
        landing = self.receiver.landing
        if landing is None:
            return {}
        ring = landing.ring
        return {"staging_peak": ring.peak, "staging_held": ring.used, "staging_refused": landing.refused}

    def arrived(self, message: Arrived, _: Arrival) -> None:
        """Tell the leader that a room is complete here."""
        self.send(leader(self.instance), message)

    def quiet(self, message: Quiet) -> None:
        """Tell the leader that nothing of a forgotten room is copied here any more."""
        self.send(leader(self.instance), message)

    def fenced(self, message: Fenced) -> None:
        """Tell the leader that nothing of a prefill instance that is gone moves here any more."""
        self.send(leader(self.instance), message)

    def _on_notification(self, notification: Notification) -> None:
        if self.has_ended:
            return
        try:
            self.receiver.notice(notification)
        except MessageError as error:
            self.refuse(notification.sender, str(error))
        except Exception as error:
            self.fail(error)

    def meet(self, peer: str) -> None:
        """Make this rank's pool known to *peer*, once nothing of an earlier life of it moves here."""
        self.proof.introduce(peer, lambda: self.receiver.register(self.life, peer))

    def _reserve(self, _: str, message: Reserve) -> None:
        if message.life == self.life:
            self.receiver.reserve(message)

    def _arrive(self, _: str, message: Arrival) -> None:
        if message.to == self.life:  # or it was on the way to a life that is over, whose rooms nobody ends here
            self.receiver.arrive(message)

    def _store(self, _: str, message: Metadata) -> None:
        if message.arrival.to == self.life:
            self.receiver.store(message)

    def _ask(self, sender: str, message: Ask) -> None:
        if message.to == self.life:
            self.receiver.ask(sender, message)

    def offload(self, nbytes: int, back: int) -> Event:
        """Move so much KV to host memory and then so much back, over the links that transfers use, too.

        Each way is at most at `ServingEngine.retract_rate`.  The event succeeds at the end of both.
        """
        return self.clock.process(self._offloading(nbytes, back))

    def _offloading(self, nbytes: int, back: int) -> Program:
        rate = self.job.engine.retract_rate
        traffic = getattr(self.rank.device, "traffic", None)  # a real device moves no bytes of its own accord
        for size, returns in ((nbytes, False), (back, True)):
            if size:
                yield traffic.offload(size, returns, rate) if traffic else self.clock.timeout(size / rate)

    def _offload(self, _: str, message: Offload) -> None:
        if message.life == self.life:
            self.offload(message.nbytes, message.back)
        else:
            self.ignore()

    def _forget(self, _: str, message: Abort) -> None:
        self.receiver.forget(message.room)
