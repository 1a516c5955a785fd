# SPDX-License-Identifier: Apache-2.0
"""What every rank of a serving job does: listen, answer the router's pings, and end when told to or left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pdsim.core.errors import PeerLost
from pdsim.core.native_class import mypyc_attr
from pdsim.kv.messages import (
    Busy,
    Enroll,
    Gone,
    KvMessage,
    Meet,
    MessageError,
    Ping,
    Pong,
    Refused,
    Stop,
    Terms,
    decode,
    encode,
    refusal,
)
from pdsim.serving.deployment import ROUTER, Deployment, instance_of, leader
from pdsim.transfer import Message as Envelope
from pdsim.transfer import Program
from pdsim.transfer.job import Rank

__all__ = ["EngineProcess", "Handler", "RankProcess"]

Handler = Callable[[str, Any], None]
"""Called with the rank that sent a message, and the message."""


@mypyc_attr(allow_interpreted_subclasses=True)
class RankProcess:
    """One rank of a job.  Subclasses register a handler for each type of message that they expect.

    A handler runs at the instant of the message and must not wait.  The rank ends with an error when a handler
    raises, when another rank refuses it, and with `PeerLost` when nothing has been heard of the router for
    `Deployment.deadline` seconds.  A message that cannot be read, or is not for this rank, ends the one that sent it
    and not this one: it is told why, and not heard any more.

    *ignored* counts messages that came too late to mean anything: those about rooms and lives that are over.

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
        """Decode a message and call its handler.

        The sender of what cannot be read, or is not for this rank, is refused; a refusal of this rank ends it
        with a `MessageError`.
        """
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
        return Busy() if self.working() else Pong()

    def working(self) -> bool:
        """Return whether work for requests that ends by itself is under way, or has ended since the last call.

        Asked at each ping: what is slow, but goes on, must not be taken for stalled.
        """
        return False


@mypyc_attr(allow_interpreted_subclasses=True)
class EngineProcess(RankProcess):
    """A rank of an instance, the *index*-th: enrols with the router, and ends with its instance.

    *life* is the name of the instance's life that this rank is part of, once the router has said so.

    Life: enrols when it runs, learns its life with the first `Meet`, serves, and ends after `Stop`, or with
    `PeerLost` when its instance is given up.  *incarnation* tells two processes of the same rank apart: nanoseconds
    on the clock when it was made.
    """

    def __init__(self, rank: Rank, job: Deployment, instance: str, index: int) -> None:
        super().__init__(rank, job)
        self.instance = instance
        self.index = index
        self.life = ""
        self.incarnation = int(rank.clock.now * 1e9)
        self.handlers |= {Gone: self._gone, Meet: self._meet, Stop: self._stop}

    def run(self) -> Program:
        """As `RankProcess.run`, after enrolling."""
        terms = Terms(self.job.page_size, self.job.kv_dtype)
        self.send(ROUTER, Enroll(self.instance, self.index, self.incarnation, terms))
        return (yield from super().run())

    def meet(self, peer: str) -> None:
        """Get connected to *peer*, a life of an instance of the other side."""

    def peer_gone(self, life: str) -> None:
        """See to it that nothing waits for *life*, an instance of the other side that is given up."""

    def stop(self, sender: str, message: Stop) -> None:  # noqa: ARG002 a handler
        """End when the leader has; or, without a word from it, after `Deployment.deadline` seconds."""
        if sender == ROUTER:
            self.clock.call_at(self.clock.now + self.job.deadline, self.end, None)
        else:
            self.end()

    def _meet(self, _: str, message: Meet) -> None:
        if message.incarnation == self.incarnation:
            self.life = message.life
            self.meet(message.peer)
        else:  # meant for an earlier life of this rank, whose instance is over
            self.ignore()

    def _stop(self, sender: str, message: Stop) -> None:
        if sender in (ROUTER, leader(self.instance)):
            self.stop(sender, message)
        else:
            self.refuse(sender, f"Stop of {self.rank.name} is for {ROUTER} and {leader(self.instance)} to send")

    def _gone(self, _: str, message: Gone) -> None:
        """Act on an instance that is given up: the other side's is forgotten, and one's own ends this rank.

        A rank that was started after the loss is not meant.
        """
        if instance_of(message.instance) != self.instance:
            if self.life:
                self.peer_gone(message.instance)
            else:  # meant for an earlier life of this rank: this one has met nobody
                self.ignore()
        elif self.incarnation <= message.until:
            self.fail(PeerLost(f"{self.instance} is given up ({message.reason}), and {self.rank.name} with it"))
        else:
            self.ignore()
