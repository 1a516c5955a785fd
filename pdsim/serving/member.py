"""What every rank of a serving job does: listen, answer the router's pings, and end when told to or left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from simpy.events import Event

from pdsim.errors import PeerLost
from pdsim.kv.messages import Message, MessageError, Ping, Pong, Stop, decode, encode
from pdsim.serving.job import ROUTER, Job
from pdsim.transfer import Program, Rank

__all__ = ["Handler", "Member"]

Handler = Callable[[str, Any], None]
"""Called with the rank that sent a message, and the message."""


class Member:
    """One rank of a job.  Subclasses register a handler for each type of message that they expect.

    A handler runs at the instant of the message and must not wait.  The rank ends with an error when a handler raises,
    and with `PeerLost` when nothing has been heard of the router for `Job.deadline` seconds.
    """

    def __init__(self, rank: Rank, job: Job) -> None:
        self.rank = rank
        self.job = job
        self.clock = rank.clock
        self.ended = Event(rank.clock)
        self.handlers: dict[type[Message], Handler] = {Ping: self._ping, Stop: self._stop}
        self._heard = rank.clock.now

    def run(self) -> Program:
        """Serve until the router says stop; return `report`."""
        self.clock.process(self._listen())
        self.clock.process(self.watch())
        yield self.ended
        return self.report()

    def report(self) -> Any:
        """Return the value of the rank's program, as plain data."""
        return None

    def send(self, receivers: str | Iterable[str], message: Message) -> None:
        """Send to one rank or to several, without waiting; to a rank that is gone it is lost."""
        payload = encode(message)
        for receiver in (receivers,) if isinstance(receivers, str) else receivers:
            self.rank.channel.send(receiver, payload)

    def fail(self, error: Exception) -> None:
        """End this rank with *error*."""
        if not self.ended.triggered:
            self.ended.fail(error)

    def watch(self) -> Program:
        """End this rank once the router has been silent for too long."""
        while not self.ended.triggered:
            yield self.clock.timeout(self.job.deadline / 2)
            if self.clock.now - self._heard > self.job.deadline:
                self.fail(PeerLost(f"nothing from {ROUTER} for {self.job.deadline} s"))

    def guard(self, action: Callable[..., None], *arguments: Any) -> None:
        """Call *action*; what it raises ends this rank."""
        try:
            action(*arguments)
        except Exception as error:
            self.fail(error)

    def _listen(self) -> Program:
        receive = self.rank.channel.receive
        try:
            while not self.ended.triggered:
                sender, payload = yield receive()
                self._handle(sender, payload)
        except Exception as error:
            self.fail(error)

    def _handle(self, sender: str, payload: bytes) -> None:
        message = decode(payload)
        if sender == ROUTER:
            self._heard = self.clock.now
        handler = self.handlers.get(type(message))
        if handler is None:
            raise MessageError(f"{self.rank.name} got {type(message).__name__} from {sender}, which is not for it")
        handler(sender, message)

    def _ping(self, sender: str, _: Ping) -> None:
        self.send(sender, Pong())

    def _stop(self, _: str, __: Stop) -> None:
        if not self.ended.triggered:
            self.ended.succeed()
