# SPDX-License-Identifier: Apache-2.0
"""What every rank of a serving job does: listen, answer the router's pings, and end when told to or left alone.

`RankProcess` is the base of the router and of `EngineRank`, the one class for every rank of an instance, prefill or
decode, that schedules or follows.  What such a rank does beside is in its parts::

    EngineRank
      .mover       PushPrefill | PushDecode | PullPrefill | PullDecode     moves the bytes of this rank
      .worker      PrefillWorker | DecodeWorker                            computes, or moves KV to host memory
      .scheduler   None | PrefillScheduler | DecodeScheduler               the first rank only: what runs, and when
                     .pages  .policy  .host  .handoff
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

from mypy_extensions import mypyc_attr
from simpy.events import Event

from pdsim.core.errors import MessageError, PeerLost
from pdsim.kv.layout import KvLayout
from pdsim.kv.messages import (
    ConnectPeer,
    Gone,
    KvMessage,
    KvSpec,
    Ping,
    Pong,
    Refused,
    RegisterRank,
    Stop,
    decode,
    encode,
    refusal,
)
from pdsim.serving.cp_gather import ForwardGather
from pdsim.serving.deployment import ROUTER, Deployment, instance_of, leader, rank_name
from pdsim.transfer import Message as Envelope
from pdsim.transfer import Notification, Program
from pdsim.transfer.job import Rank

__all__ = ["EngineRank", "Handler", "LinkTraffic", "Mover", "RankProcess"]

Handler = Callable[[str, Any], None]
"""Called with the rank that sent a message, and the message."""


@mypyc_attr(allow_interpreted_subclasses=True)
class RankProcess:
    """One rank of a job.  Subclasses register a handler for each type of message that they expect.

    A handler runs at the instant of the message and must not wait.  The rank ends with an error when a handler
    raises, when another rank refuses it, and with `PeerLost` when nothing has been heard of the router for
    `Deployment.deadline` seconds.  A message that cannot be read, or is not for this rank, ends the one that sent it
    and not this one: it is told why, and not heard any more.

    *ignored* counts messages that came too late to mean anything: those about rooms and incarnations that are over.

    Life: `run` subscribes to messages and starts `watch`, and ends when `ended` is triggered, by `end` or by `fail`;
    its value is `report`.  All handlers run on the clock, one at a time.
    """

    def __init__(self, rank: Rank, job: Deployment) -> None:
        self.rank = rank
        self.job = job
        self.clock = rank.clock
        self.ended = rank.clock.event()
        self.has_ended = False  # whether that is triggered: asked at each message
        self.ignored = 0
        self.handlers: dict[type[KvMessage], Handler] = {Ping: self._ping}
        self._heard = rank.clock.now
        self._payload: bytes | None = None
        self._message: Any = None  # the last one, decoded

    def run(self) -> Program:
        """Serve until the router says stop; return `report`."""
        self.rank.recorder.inspect(self)
        self.rank.channel.subscribe(self._on_message)
        self.clock.process(self.watch())
        yield self.ended
        return self.report()

    def report(self) -> Any:
        """Return the value of the rank's program, as plain data."""
        return None

    def send(self, receivers: str | Iterable[str], message: KvMessage) -> None:
        """Send to one rank or to several, without waiting; to a rank that is gone it is lost."""
        payload = encode(message)
        send = self.rank.channel.send
        if isinstance(receivers, str):
            send(receivers, payload)
            return
        for receiver in receivers:
            send(receiver, payload)

    def ignore(self, *_: Any) -> None:
        """Count a message that has come too late."""
        self.ignored += 1

    def end(self, *_: Any) -> None:
        """End this rank in order."""
        if not self.has_ended:
            self.has_ended = True
            self.ended.succeed()

    def fail(self, error: Exception) -> None:
        """End this rank with *error*."""
        if not self.has_ended:
            self.has_ended = True
            self.ended.fail(error)

    def refuse(self, sender: str, reason: str) -> None:
        """Tell *sender* why this rank will have nothing to do with it, and drop its connection.

        It ends by that; nothing that it sends later is heard.
        """
        self.rank.channel.send(sender, refusal(reason))
        self.rank.channel.refuse(sender)

    def watch(self) -> Program:
        """End this rank once the router has been silent for too long."""
        while not self.has_ended:
            yield self.clock.timeout(self.job.deadline / 2)
            if self.clock.now - self._heard > self.job.deadline:
                self.fail(PeerLost(f"nothing from {ROUTER} for {self.job.deadline} s"))

    def guard(self, action: Callable[..., None], *arguments: Any) -> None:
        """Call *action*; what it raises ends this rank."""
        try:
            action(*arguments)
        except Exception as error:
            self.fail(error)

    def _on_message(self, message: Envelope) -> None:
        if self.has_ended:
            return
        try:
            self._handle(*message)
        except Exception as error:
            self.fail(error)

    def _handle(self, sender: str, payload: bytes) -> None:
        # The sender of what cannot be read, or is not for this rank, is refused; a refusal of this rank ends it
        # with a `MessageError`.
        try:
            if payload is not self._payload:  # of several ranks at once it is one object
                self._message, self._payload = decode(payload), payload
            message = self._message
        except Refused as error:
            raise MessageError(f"refused by {sender}: {error}") from None
        except MessageError as error:
            self.refuse(sender, str(error))
            return
        if sender == ROUTER:
            self._heard = self.clock.now
        handler = self.handlers.get(type(message))
        if handler is None:
            self.refuse(sender, f"{type(message).__name__} is not for {self.rank.name}")
        else:
            handler(sender, message)

    def _ping(self, sender: str, _: Ping) -> None:
        self.send(sender, self.pong())

    def pong(self) -> KvMessage:
        """Return the answer to a ping: whether work goes on that may take longer than requests wait for progress."""
        return Pong(self.working())

    def working(self) -> bool:
        """Return whether work for requests that ends by itself is under way, or has ended since the last call.

        Asked at each ping: what is slow, but goes on, must not be taken for stalled.
        """
        return False


class LinkTraffic(Protocol):
    """What else than KV the model puts on the links of one GPU: `pdsim.sim.topology.SideTraffic`."""

    def offload(self, size: int, back: bool = False, rate: float = math.inf) -> Event:
        """Move *size* bytes to host memory, or *back*, at *rate* bytes/s at most; the event is the end of it."""

    def exchange(self, network: float, port: float, seconds: float) -> list[Event]:
        """Move the tokens of a forward of so many *seconds* to their experts and back."""


class Mover(Protocol):
    """Moves the bytes of one rank; it registers the messages that it takes with its `EngineRank`."""

    @property
    def layout(self) -> KvLayout:
        """The pool of this rank."""

    def __len__(self) -> int:
        """Return the number of rooms that are not over on this rank."""

    def begin(self) -> None:
        """Begin to listen: the rank has begun to run."""

    def connect_peer(self, peer: str) -> None:
        """Get connected to *peer*, an incarnation of an instance of the other side."""

    def drop(self, incarnation: str) -> None:
        """Forget *incarnation*, of the other side, which is given up."""

    def progressed(self) -> bool:
        """Return whether bytes move, or have arrived since the last call: a slow link is no stalled one."""

    def report(self) -> dict[str, Any]:
        """Return what it has counted."""


class Worker(Protocol):
    """What an `EngineRank` asks of the part that works with its mover: `PrefillWorker` or `DecodeWorker`."""

    def connect_peer(self, peer: str) -> None:
        """Have the mover get connected to *peer*, an incarnation of an instance of the other side."""

    def drop(self, incarnation: str) -> None:
        """Forget *incarnation*, of the other side, which is given up."""

    def working(self) -> bool:
        """As `RankProcess.working`."""


class Leader(Protocol):
    """What the first rank of an instance asks of its scheduler."""

    def begin(self) -> None:
        """Begin to schedule: the rank has begun to run."""

    def connect_peer(self, peer: str) -> None:
        """Expect requests for *peer*, an incarnation of an instance of the other side."""

    def drop(self, incarnation: str) -> None:
        """End what waits for *incarnation*, of the other side, which is given up."""

    def stop(self) -> None:
        """Take no more requests; `end_if_drained` follows."""

    def end_if_drained(self) -> None:
        """End the rank if the job is over and no room is left."""

    def working(self) -> bool:
        """As `RankProcess.working`."""

    def report(self) -> dict[str, Any]:
        """Return the account of pages, rooms and messages."""


class EngineRank(RankProcess):
    """A rank of an instance, the *index*-th: enrols with the router, and ends with its instance.

    *mover*, *worker* and *scheduler* are its parts.  They are given this rank, register in `handlers` the messages
    that they take, and are set before it runs.  *incarnation* is that of its instance, once
    the router has said so.

    Enrols when it runs, learns its incarnation with the first `ConnectPeer`, serves, and ends after `Stop`, or with
    `PeerLost` when its instance is given up.  *started* tells two processes of the same rank apart: nanoseconds
    on the clock when it was made.
    """

    mover: Mover
    worker: Worker

    def __init__(self, rank: Rank, job: Deployment, instance: str, index: int) -> None:
        super().__init__(rank, job)
        self.instance = instance
        self.index = index
        self.incarnation = ""
        self.started = int(rank.clock.now * 1e9)
        self.scheduler: Leader | None = None
        self.gather: ForwardGather | None = None  # of a context-parallel rank
        self.followers = [] if index else [rank_name(instance, n) for n in range(1, job.grid(instance).size)]
        self._leader = leader(instance)
        self.handlers |= {Gone: self._gone, ConnectPeer: self._connect_peer, Stop: self._stop}

    @property
    def traffic(self) -> LinkTraffic:
        """What else than KV this rank puts on the links of its GPU; of the model only (`experiments.serve`)."""
        return cast("LinkTraffic", self.rank.device.traffic)  # type: ignore[attr-defined]

    def run(self) -> Program:
        """As `RankProcess.run`, after enrolling."""
        self.mover.begin()
        if self.scheduler is not None:
            self.scheduler.begin()
        if self.gather is not None:
            yield from self.gather.open()
        spec = KvSpec(self.job.page_size, self.job.kv_dtype)
        self.send(ROUTER, RegisterRank(self.instance, self.index, self.started, spec))
        return (yield from super().run())

    def report(self) -> dict[str, Any]:
        """Return what the mover counted and, of the first rank, the account of its scheduler."""
        moved = self.mover.report()
        if self.gather is not None and self.gather.fallback:
            moved |= {"gather_fallback": self.gather.fallback}
        return moved if self.scheduler is None else moved | self.scheduler.report()

    def working(self) -> bool:
        """Return whether bytes move, a forward goes on, or pages in quarantine are waited for; or did so since."""
        worked = self.worker.working()
        return (self.scheduler is not None and self.scheduler.working()) or worked

    def tell_leader(self, message: KvMessage) -> None:
        """Have the first rank of this instance take *message*: by a call, where that is this rank."""
        if self.index:
            self.send(self._leader, message)
        else:
            self.handlers[type(message)](self.rank.name, message)

    def listen(self, notice: Callable[[Notification], None]) -> None:
        """Call *notice* with each notification of a write; who wrote what is not understood is refused."""

        def hear(notification: Notification) -> None:
            if self.has_ended:
                return
            try:
                notice(notification)
            except MessageError as error:
                self.refuse(notification.sender, str(error))
            except Exception as error:
                self.fail(error)

        self.rank.endpoint.notifications.listen(hear)

    def peer_gone(self, incarnation: str) -> None:
        """See to it that nothing waits for *incarnation*, of an instance of the other side, which is given up."""
        self.worker.drop(incarnation)
        if self.scheduler is not None:
            self.scheduler.drop(incarnation)

    def end(self, *_: Any) -> None:
        """End this rank in order, and those that follow it."""
        self.send(self.followers, Stop())
        super().end()

    def _connect_peer(self, _: str, message: ConnectPeer) -> None:
        if message.started == self.started:
            self.incarnation = message.incarnation
            if self.scheduler is not None:
                self.scheduler.connect_peer(message.peer)
            self.worker.connect_peer(message.peer)
        else:  # meant for an earlier incarnation of this rank, whose instance is over
            self.ignore()

    def _stop(self, sender: str, _: Stop) -> None:
        # The leader ends once no room is left; those that failed have as long for the proof that nothing moves.
        if sender not in (ROUTER, self._leader):
            self.refuse(sender, f"Stop of {self.rank.name} is for {ROUTER} and {self._leader} to send")
            return
        if self.scheduler is not None:
            self.scheduler.stop()
        if sender == ROUTER:
            self.clock.call_at(self.clock.now + self.job.deadline, self.end, None)
        else:
            self.end()
        if self.scheduler is not None:
            self.scheduler.end_if_drained()

    def _gone(self, _: str, message: Gone) -> None:
        # A rank that was started after the loss is not meant.
        if instance_of(message.instance) != self.instance:
            if self.incarnation:
                self.peer_gone(message.instance)
            else:  # meant for an earlier incarnation of this rank: this one is connected to nobody
                self.ignore()
        elif self.started <= message.until:
            self.fail(PeerLost(f"{self.instance} is given up ({message.reason}), and {self.rank.name} with it"))
        else:
            self.ignore()
