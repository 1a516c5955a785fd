# SPDX-License-Identifier: Apache-2.0
"""The part of a router that knows instances: where ranks enrol, rooms are looked up, and silence is noticed.

SGLang runs it beside its router, as the bootstrap server; here both are one rank.  What a loss means for requests
is the router's (`pdsim.serving.router`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from pdsim.core.native_class import mypyc_attr
from pdsim.kv.bootstrap import RoomDirectory
from pdsim.kv.messages import Enroll, Gone, KvMessage, Locate, Located, MessageError, Ping, Pong, Ready
from pdsim.serving.deployment import Deployment, instance_of
from pdsim.serving.instances import InstanceRegistry, own_place
from pdsim.serving.rank_process import Handler, RankProcess
from pdsim.transfer import Program
from pdsim.transfer.job import Rank

__all__ = ["BootstrapServer"]


@mypyc_attr(allow_interpreted_subclasses=True)
class BootstrapServer(RankProcess, ABC):
    """Keeps the registry of instances, and pings every rank three times in `Deployment.deadline` seconds.

    An instance with a rank that has been silent for all of them, that a peer's engine reports lost, or that enrols
    again, is lost: its other ranks are told to end, and those of the other side to forget it.

    A subclass says what depends on it: `begin` is called when an instance is connected or lost, `give_up` when one
    is lost, `look` after each round of pings.
    """

    def __init__(self, rank: Rank, job: Deployment) -> None:
        super().__init__(rank, job)
        self.registry = InstanceRegistry(job)
        self.directory = RoomDirectory(rank.clock)
        self.instances = (*job.prefills, *job.decodes)
        self.last_heard = {name: self.clock.now for instance in self.instances for name in job.ranks(instance)}
        handlers: dict[type[KvMessage], Handler] = {
            Enroll: self._enroll,
            Ready: self._ready,
            Pong: lambda _, __: None,
            Locate: self._locate,
            Gone: lambda _, message: self.lose_life(message.instance, message.reason),
        }
        self.handlers |= handlers

    @abstractmethod
    def begin(self) -> None:
        """Let requests come, if all instances are connected or lost by now.

        Called again and again; it acts once.
        """

    @abstractmethod
    def give_up(self, life: str, reason: str, formed: bool) -> None:
        """End what needs *life*, which is lost; nothing does unless it was *formed*.

        Called before the other side's ranks hear of the loss: they are asked about rooms that they forget then.
        """

    @abstractmethod
    def look(self, asked: float) -> None:
        """See to what only time can tell; called a while after each round of pings, which *asked* at that time."""

    def watch(self) -> Program:
        """Ping every rank three times a deadline, and give up instances that do not answer."""
        while not self.has_ended:
            asked = self.clock.now
            self.send(self.last_heard, Ping())
            yield self.clock.timeout(self.job.deadline / 3)
            silent = [name for name, at in self.last_heard.items() if self.clock.now - at > self.job.deadline]
            for instance in dict.fromkeys(map(instance_of, silent)):
                self.guard(self._lose, instance, f"PeerLost: nothing from {instance} for {self.job.deadline} s")
            self.look(asked)

    def _owed(self, asked: float) -> bool:
        """Return whether a rank has not been heard since *asked*: it will be, or is lost, within a deadline."""
        return any(at <= asked for at in self.last_heard.values())

    def refuse(self, sender: str, reason: str) -> None:
        """As `RankProcess.refuse`; an instance with a rank that is refused is lost."""
        super().refuse(sender, reason)
        if (instance := instance_of(sender)) in self.instances:
            self._lose(instance, f"MessageError: {reason}")

    def lose_life(self, life: str, reason: str) -> None:
        """Give *life* up, unless it is over: its instance may have been started again since."""
        if self.registry.alive(life):
            self._lose(instance_of(life), reason)
        else:
            self.ignore()

    def _handle(self, sender: str, payload: bytes) -> None:
        if sender in self.last_heard:
            self.last_heard[sender] = self.clock.now
        super()._handle(sender, payload)

    def _enroll(self, sender: str, message: Enroll) -> None:
        """Give a rank its place, and have the ranks of each pair that this forms meet.

        A rank that has a place already was started again: its instance is lost first, with all its other ranks.
        One that cannot serve with the others is refused.
        """
        message = own_place(sender, message)
        try:
            self.registry.bootstrap.check(message)
        except MessageError as error:
            self.refuse(sender, str(error))
            return
        if self.registry.bootstrap.replaces(message):
            self._lose(message.instance, f"PeerLost: {sender} was started again")
        self.last_heard[sender] = self.clock.now
        for name, meet in self.registry.enroll(message):
            self.send(name, meet)

    def _ready(self, _: str, message: Ready) -> None:
        if self.registry.link(message.life, message.peer):
            self.begin()
        else:
            self.ignore()

    def _locate(self, sender: str, message: Locate) -> None:
        self.send(sender, Located(self.directory.locate(message.rooms), message.life))

    def _lose(self, instance: str, reason: str) -> None:
        """Give *instance* up: its ranks end, `give_up` is called, and the other side's ranks forget it."""
        life, formed = self.registry.life(instance), instance in self.registry.side(instance).load
        until = self.registry.lose(instance)
        for name in self.job.ranks(instance):
            self.last_heard.pop(name, None)
        self.send(self.job.ranks(instance), Gone(life, reason, until))
        self.give_up(
            life, reason, formed
        )  # before the others hear of it: they are asked about rooms that they forget
        if formed:
            for other in (self.registry.prefills if instance in self.job.decodes else self.registry.decodes).load:
                self.send(self.job.ranks(other), Gone(life, reason))
        self.begin()
