# SPDX-License-Identifier: Apache-2.0
"""Groups of real ranks: who is there, what they call, and in which order; the bytes are a library's.

Ranks of a group speak over their control channels: each says hello, with what proves its death
(`backends.base.processes`); the first of the names opens the library's store; before every call whose sizes
are to be compared, and before every reservation, each says what it is about to do.  A rank that asks for no group
pays nothing for any of that.

A call is given to the library when all before it are over.  A library that is told to `abort` moves nothing any more
when that returns; until then the buffers of the call are held.
"""

from __future__ import annotations

import socket
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from simpy.events import Event

from backends.base.processes import myself
from backends.base.zmq_channel import ZmqChannel
from backends.collectives.base import (
    TOPIC,
    Bye,
    GatherCall,
    Hello,
    Intent,
    Library,
    Settings,
    background,
    decode,
    disagreement,
)
from backends.collectives.members import Members
from pdsim.core.clock import WallClock
from pdsim.core.errors import (
    MessageError,
    PeerLost,
    RegistrationError,
    TransferError,
    TransferFailed,
    TransferTimeout,
)
from pdsim.core.units import format_size
from pdsim.transfer import Buffer, Recorder, TransferRecord
from pdsim.transfer.group import SYMMETRIC, check_gather, repeated

__all__ = ["RealGroup", "RealGroups"]

WATCH = 0.1
"""Seconds between two looks at whether the members are alive, while something is under way."""


class RealGroups:
    """All groups of a rank.

    A group is made when its rank asks for it, with a library that *make* returns. Messages for a group that this
    rank has not asked for yet are kept until it does.
    """

    def __init__(
        self,
        rank: str,
        clock: WallClock,
        device: Any,
        channel: ZmqChannel,
        recorder: Recorder,
        bind: str,
        settings: Settings,
        make: Callable[[Settings, Any], Library],
    ) -> None:
        self.rank = rank
        self.clock = clock
        self.device = device
        self.channel = channel
        self.recorder = recorder
        self.bind = bind
        self.settings = settings
        self._make = make
        self._groups: dict[tuple[str, ...], RealGroup] = {}
        self._early: dict[tuple[str, ...], list[tuple[str, Any]]] = defaultdict(list)

    def __call__(self, names: tuple[str, ...]) -> RealGroup:
        """Return the group of *names*, in the order of their pieces; the same names give the same group."""
        if not self._groups:
            self.channel.listen(TOPIC, self._deliver)
        group = self._groups.get(names)
        if group is None:
            library = self._make(self.settings, self.device)
            group = self._groups[names] = RealGroup(self, names, library)
            for sender, message in self._early.pop(names, ()):
                group.hear(sender, message)
        return group

    def close(self) -> None:
        """Leave all groups."""
        for group in self._groups.values():
            group.close()

    def refusal(self, call: GatherCall, group: RealGroup) -> str:
        """Return why this rank cannot do *call* of *group*, as the class of an error and its message; or nothing.

        Only a reservation can be refused: the symmetric pool is of one group, grows only with ``collective.grow``,
        and has to fit into the device's memory.  All ranks hear of a refusal before any of them reserves.
        """
        if call.kind != "reserve":
            return ""
        device = self.device
        pool = device.symmetric
        if pool.owner not in (None, group):
            return f"RegistrationError: the symmetric pool of {self.rank} belongs to another group"
        if pool.reserved and not self.settings.grow:
            return (
                f"OutOfMemory: the symmetric pool has {format_size(pool.reserved)} and may not grow by "
                f"{format_size(call.size)} (collective.grow=false); reserve more at the start with collective.pool"
            )
        room = device.capacity - device.used
        if call.size > room:
            return (
                f"OutOfMemory: {format_size(call.size)} do not fit on {device.name} of {self.rank}, "
                f"which has {format_size(room)} left"
            )
        return ""

    def _deliver(self, message: Any) -> None:
        body = decode(message.payload)
        names = tuple(body.group)
        if message.sender not in names:
            raise MessageError(f"{message.sender} is not in the group of {', '.join(names)}")
        if names in self._groups:
            self._groups[names].hear(message.sender, body)
        else:
            self._early[names].append((message.sender, body))


class RealGroup:
    """One rank's membership; a source of the wall clock while a call is under way.

    Life of a call: `_add` queues it, `_advance` begins the first of the queue once the library is
    connected and, where sizes are compared, all ranks have announced the same; `poll` or `_settle`
    finds its end; `_finish` ends it and begins the next.  Whatever goes wrong leads to `_break`,
    after which every call fails.

    With ``collective.timing=device`` the record of a gather lasts as long as the device says, and
    ends when it is seen.

    Attributes:
        names: All members, in the order of their pieces.
        index: This rank's place among them.
        growths: How often the symmetric pool has grown after the first reservation.
        growth_seconds: What that took, from the calls to their ends.
    """

    def __init__(self, groups: RealGroups, names: tuple[str, ...], library: Library) -> None:
        self.names = names
        self.index = names.index(groups.rank)
        self.growths = 0
        self.growth_seconds = 0.0
        self._groups = groups
        self._clock = groups.clock
        self._device = groups.device
        self._settings = groups.settings
        self._library = library
        self._members = Members(names, groups.rank, groups.channel)
        self._calls: deque[GatherCall] = deque()  # that are not over
        self._number = 0
        self._over = 0
        self._connected = self._connecting = False
        self._lost = ""  # why the group is no more
        self._watching = False
        self._listener = socket.create_server((groups.bind, 0)) if self.index == 0 else None
        self._port = self._listener.getsockname()[1] if self._listener else 0
        self._members.tell(Hello(list(names), myself(), self._port))
        self._connect()

    @property
    def reserved(self) -> int:
        """Bytes of this rank's symmetric pool."""
        return int(self._device.symmetric.reserved)

    def all_gather(
        self,
        source: Buffer,
        target: Buffer,
        size: int | None = None,
        *,
        times: int = 1,
        timeout: float | None = None,
        label: str = "",
    ) -> Event:
        """Start to gather; the contract and errors of `pdsim.transfer.group.Group.all_gather`."""
        size = source.size if size is None else size
        check_gather(len(self.names), source, target, size, times)
        if target.pool == SYMMETRIC and self._device.symmetric.owner is not self:
            raise RegistrationError(
                f"symmetric memory here was reserved by another group than {self._members.title}"
            )
        return self._add(size, timeout, label, (source, target), times)

    def reserve(self, size: int, *, timeout: float | None = None) -> Event:
        """Start to grow the pool; the contract and errors of `pdsim.transfer.group.Group.reserve`."""
        if size <= 0:
            raise ValueError(f"size={size} must be > 0")
        return self._add(size, timeout, "", None)

    def close(self) -> None:
        """Leave the group: what this rank still waits for fails, and the others are told."""
        self._break("closed", TransferFailed(f"{self._groups.rank} left the group during the call"))

    # --- calls ---

    def _add(
        self, size: int, timeout: float | None, label: str, buffers: tuple[Any, Any] | None, times: int = 1
    ) -> Event:
        # *buffers* is None for a reservation.  On a broken group the event fails at once.
        timeout = times * self._settings.timeout if timeout is None else timeout
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be > 0")
        event = self._clock.event()
        event.defused = True
        call = GatherCall(self._number, size, event, self._clock.now, timeout, label, buffers, times=times)
        call.prepared = call.posted = call.submitted
        self._number += 1
        if self._lost:
            self._fail(call, PeerLost(self._lost))
            return event
        for buffer in buffers or ():
            self._device.hold(buffer)
        self._calls.append(call)
        self._clock.call_at(call.submitted + timeout, self._expire, call)
        self._watch()
        self._advance()
        return event

    def _advance(self) -> None:
        if not self._calls or self._calls[0].started or not self._connected:
            return
        call = self._calls[0]
        if self._settings.check or call.kind == "reserve":
            if not call.announced:
                call.announced = True
                refusal = self._groups.refusal(call, self)
                intent = Intent(list(self.names), call.number, call.kind, call.size * call.times, refusal)
                self._members.tell_intent(intent)
            said = self._members.intents[call.number]
            if len(said) < len(self.names):
                return
            if error := disagreement(said):
                self._finish(call, error)
                return
        self._begin(call)

    def _begin(self, call: GatherCall) -> None:
        call.started = True
        call.prepared = self._clock.now
        if call.buffers is None:
            self._device.account(call.size, SYMMETRIC)
            background(
                self._clock, lambda: self._library.reserve(call.size), lambda *how: self._reserved(call, *how)
            )
            call.posted = self._clock.now
            return
        try:
            places = repeated(len(self.names), *call.buffers, call.size, call.times)
            call.work = self._library.start(*call.buffers, call.size, call.kind == SYMMETRIC, places)
        except TransferError as error:
            self._break(str(error), error)
            return
        call.posted = self._clock.now
        self._clock.watch(self)

    def poll(self) -> bool:
        """Look whether the call under way is over."""
        call = self._calls[0] if self._calls else None
        if call is None or call.work is None:
            self._clock.unwatch(self)
            return False
        try:
            took = self._library.poll(call.work)
        except TransferError as error:
            call.work = None
            self._break(str(error), error.with_traceback(None))
            return True
        if took is None:
            return False
        self._finish(call, None, took)
        return True

    def fileno(self) -> int | None:
        """Return None: only polling can tell."""
        return None

    def busy(self) -> bool:
        """Return whether a call is under way."""
        return bool(self._calls) and self._calls[0].work is not None

    def _finish(self, call: GatherCall, error: TransferError | None, took: float = 0.0) -> None:
        # *took* is 0 where nobody knows.  Buffers are released before the caller hears of the end.
        assert self._calls[0] is call
        self._calls.popleft()
        call.work = None  # it may keep the memory of the buffers
        self._over += 1
        self._clock.unwatch(self)
        self._members.forget(call)
        for buffer in call.buffers or ():
            self._device.release(buffer)
        if error is not None:
            self._fail(call, error)
        elif not call.event.triggered:
            now = self._clock.now
            if self._library.timing == "device" and call.buffers is not None:
                call.submitted = call.prepared = call.posted = now - took
            completed = min(now, max(call.posted, call.prepared + took)) if took else now
            call.event.succeed(self._record(call, "ok", completed, now))
        self._leave_if_alone()
        self._advance()

    # --- the symmetric pool ---

    def _reserved(self, call: GatherCall, add: Callable[[], None] | None, error: BaseException | None) -> None:
        # *add* brings the memory into the pool; it is called once all ranks have theirs (`_settle`).
        if not self._calls or self._calls[0] is not call:
            return
        refusal = f"{type(error).__name__}: {error}" if error is not None else ""
        if refusal:
            self._device.account(-call.size, SYMMETRIC)
        call.add = add
        done = Intent(list(self.names), call.number, call.kind, call.size * call.times, refusal, done=True)
        self._members.tell_intent(done)
        self._settle(call)

    def _settle(self, call: GatherCall) -> None:
        said = self._members.done[call.number]
        if len(said) < len(self.names):
            return
        if error := disagreement(said):
            self._finish(call, error)
            return
        assert call.add is not None
        pool = self._device.symmetric
        if pool.reserved:
            self.growths += 1
            self.growth_seconds += self._clock.now - call.submitted
        pool.owner = self
        call.add()
        self._finish(call, None)

    # --- the others ---

    def hear(self, sender: str, message: Any) -> None:
        """Take a message of another member: its hello, its intent, that it has reserved, or that it leaves."""
        if self._lost:
            return
        if isinstance(message, Hello):
            self._members.hello[sender] = message
            self._connect()
        elif isinstance(message, Bye):
            self._members.gone[sender] = message
            self._leave_if_alone()
        elif message.done:
            self._members.done[message.number][sender] = message
            if self._calls and self._calls[0].number == message.number:
                self._settle(self._calls[0])
        else:
            self._members.intents[message.number][sender] = message
            self._advance()

    def _leave_if_alone(self) -> None:
        if why := self._members.missing_from(self._calls[0] if self._calls else None):
            self._break(why, None)

    def _connect(self) -> None:
        if self._connecting or self._lost or not self._members.complete:
            return
        self._connecting = True
        port = self._port or self._members.hello[self.names[0]].port
        where = self.index, len(self.names), self._groups.bind, port, self._listener
        background(self._clock, lambda: self._library.connect(*where), self._connect_done)

    def _connect_done(self, _: Any, error: BaseException | None) -> None:
        if self._lost:
            return
        if error is not None:
            failure = (
                error if isinstance(error, TransferError) else TransferFailed(f"{type(error).__name__}: {error}")
            )
            self._break(f"no group {self._members.title}: {failure}", failure)
            return
        self._connected = True
        self._advance()

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._clock.call_at(self._clock.now + WATCH, self._look, None)

    def _look(self, _: Any) -> None:
        self._watching = False
        if self._lost or not self._calls:
            return
        if name := self._members.dead():
            self._break(f"{name} of the group {self._members.title} is gone", None)
            return
        self._watch()

    # --- ends ---

    def _expire(self, call: GatherCall) -> None:
        if call.event.triggered or self._lost:
            return
        late = self._members.late_for(call)
        waiting = f"; {', '.join(late)} had not called" if late else ""
        error = TransferTimeout(
            f"a collective of {self._members.title} is not over after {call.timeout:g} s{waiting}"
        )
        self._fail(call, error)
        self._break(f"{self._groups.rank} has given up: {error}", None)

    def _break(self, why: str, error: TransferError | None) -> None:
        if self._lost:
            return
        self._lost = why
        self._clock.unwatch(self)
        self._members.tell(Bye(list(self.names), self._over, why[:200]))
        calls, self._calls = list(self._calls), deque()
        if not self._connecting:
            self._end(calls, error, stopped=True)
            return
        background(
            self._clock, self._library.abort, lambda _, failed: self._end(calls, error, stopped=failed is None)
        )

    def _end(self, calls: list[GatherCall], error: TransferError | None, *, stopped: bool) -> None:
        # Their buffers are released only if the library is proven to have *stopped*: else it may still write to
        # them, and they stay held.
        for call in calls:
            if stopped:
                call.work = None
                for buffer in call.buffers or ():
                    self._device.release(buffer)
            self._fail(call, error or PeerLost(self._lost))

    def _fail(self, call: GatherCall, error: TransferError) -> None:
        if call.event.triggered:
            return
        now = self._clock.now
        self._record(call, type(error).__name__, now, now)
        call.event.fail(error)

    def _record(self, call: GatherCall, status: str, completed: float, seen: float) -> TransferRecord:
        record = call.record(self._library.engine, self.names, self._groups.rank, status, completed, seen)
        self._groups.recorder.transfer(record)
        return record
