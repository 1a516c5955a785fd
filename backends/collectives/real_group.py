# SPDX-License-Identifier: Apache-2.0
"""Groups of real ranks: who is there, what they call, and in which order; the bytes are a library's.

Ranks of a group speak over their control channels: each says hello, with what proves its death; the first of the
names opens the library's store; before every call whose sizes are to be compared, and before every reservation, each
says what it is about to do.  A rank that asks for no group pays nothing for any of that.
"""

from __future__ import annotations

import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from simpy.events import Event

from backends.base.processes import is_dead, myself
from backends.base.zmq_channel import ZmqChannel
from backends.collectives.base import Library
from pdsim.core.clock import WallClock
from pdsim.core.errors import (
    InvalidBatch,
    MessageError,
    OutOfMemory,
    PeerLost,
    RegistrationError,
    TransferError,
    TransferFailed,
    TransferTimeout,
)
from pdsim.core.units import format_size
from pdsim.hardware.costs import Collective
from pdsim.transfer import Buffer, Recorder, TransferRecord
from pdsim.transfer.group import SYMMETRIC, check_gather, repeated

__all__ = ["RealGroup", "RealGroups"]

WATCH = 0.1
"""Seconds between two looks at whether the members are alive, while something is under way."""

_TOPIC = b"group"


class _Hello(msgspec.Struct, tag="Hello"):
    """A rank is in the group."""

    group: list[str]  # the names of all members, which tell groups apart
    identity: str  # of the rank's process (`backends.base.processes`)
    port: int  # on which the first rank's store listens; 0 from the others


class _Intent(msgspec.Struct, tag="Intent"):
    """What a rank is about to do, or, with *done*, has done."""

    group: list[str]
    number: int  # of the call in the group
    kind: str
    size: int
    refusal: str = ""  # ``"OutOfMemory: ..."``, if this rank cannot do it
    done: bool = False


class _Bye(msgspec.Struct, tag="Bye"):
    """A rank has left the group, in order or because something failed there."""

    group: list[str]
    calls: int  # that were over when it left: those after them can never be
    why: str  # in a few words, for the errors of the others


_Note = _Hello | _Intent | _Bye
_decode = msgspec.msgpack.Decoder(_Note).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(eq=False)
class _Call:
    """One collective of this rank, from the call until it is over; times are seconds on the rank's clock."""

    number: int  # in its group, from 0; the same on all ranks, which call in the same order
    size: int  # bytes of each rank's piece, or of the reservation
    event: Event  # what the caller waits for; its value is a `TransferRecord`
    submitted: float
    timeout: float
    label: str = ""
    buffers: tuple[Any, Any] | None = None  # source and target, held until it is over; None: it reserves
    times: int = 1
    announced: bool = False  # whether the others were told what this rank is about to do
    prepared: float = 0.0  # when its turn came and all ranks agreed
    posted: float = 0.0  # when the library had it
    started: bool = False  # whether the library has it
    work: Any = None  # the library's handle while it goes on
    add: Callable[[], None] | None = None  # the reserved memory to the pool, once all have theirs

    @property
    def kind(self) -> str:
        if self.buffers is None:
            return "reserve"
        return "symmetric" if self.buffers[1].pool == SYMMETRIC else "plain"

    def intent(self, group: tuple[str, ...], refusal: str, done: bool = False) -> _Intent:
        return _Intent(list(group), self.number, self.kind, self.size * self.times, refusal, done)


class RealGroups:
    """All groups of a rank, each made when its rank asks for it, with a library that *make* returns.

    Messages for a group that this rank has not asked for yet are kept until it does.
    """

    def __init__(
        self,
        rank: str,
        clock: WallClock,
        device: Any,
        channel: ZmqChannel,
        recorder: Recorder,
        bind: str,
        settings: Collective,
        make: Callable[[Collective, Any], Library],
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
            self.channel.listen(_TOPIC, self._deliver)
        group = self._groups.get(names)
        if group is None:
            library = self._make(self.settings, self.device)
            group = self._groups[names] = RealGroup(self, names, library)
            for sender, message in self._early.pop(names, ()):
                group.hear(sender, message)
        return group

    def close(self) -> None:
        for group in self._groups.values():
            group.close()

    def _deliver(self, message: Any) -> None:
        try:
            body: _Note = _decode(message.payload)
        except (msgspec.MsgspecError, ValueError) as error:
            raise MessageError(f"not a message of a group: {error}") from None
        names = tuple(body.group)
        if message.sender not in names:
            raise MessageError(f"{message.sender} is not in the group of {', '.join(names)}")
        if names in self._groups:
            self._groups[names].hear(message.sender, body)
        else:
            self._early[names].append((message.sender, body))


class RealGroup:
    """One rank's membership; a source of the wall clock while a call is under way.

    Course of a call: `_add` queues it, `_advance` begins the first of the queue once the library is connected and,
    where sizes are compared, all ranks have announced the same; `poll` or `_add_reserved` notices its end; `_finish`
    ends it and begins the next.  Whatever goes wrong leads to `_break`, after which every call fails.
    """

    def __init__(self, groups: RealGroups, names: tuple[str, ...], library: Library) -> None:
        self.names = names  # of all members, in the order of their pieces
        self.index = names.index(groups.rank)
        self.growths = 0  # of the symmetric pool, after the first reservation
        self.growth_seconds = 0.0  # what that took, from the calls to their ends
        self._groups = groups
        self._clock = groups.clock
        self._device = groups.device
        self._settings = groups.settings
        self._library = library
        self._title = "+".join(names)
        self._others = [name for name in names if name != groups.rank]
        self._hello: dict[str, _Hello] = {}  # of the others, by name
        self._gone: dict[str, _Bye] = {}  # of the others that have left in order
        # by number of a call what each rank, this one included, is about to do; and of a reservation, has done
        self._intents: dict[int, dict[str, _Intent]] = defaultdict(dict)
        self._done: dict[int, dict[str, _Intent]] = defaultdict(dict)
        self._calls: deque[_Call] = deque()  # that are not over
        self._number = 0
        self._over = 0
        self._connected = self._connecting = False
        self._lost = ""  # why the group is no more
        self._watching = False
        self._listener = socket.create_server((groups.bind, 0)) if self.index == 0 else None
        self._port = self._listener.getsockname()[1] if self._listener else 0
        self._tell(_Hello(list(names), myself(), self._port))
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
        """Start to gather; the contract and errors of `pdsim.transfer.group.Group.all_gather`.

        With ``collective.timing=device`` the record lasts as long as the device says, and ends when it is seen.
        """
        size = source.size if size is None else size
        check_gather(len(self.names), source, target, size, times)
        if target.pool == SYMMETRIC and self._device.symmetric.owner is not self:
            raise RegistrationError(f"symmetric memory here was reserved by another group than {self._title}")
        return self._add(size, timeout, label, (source, target), times)

    def reserve(self, size: int, *, timeout: float | None = None) -> Event:
        """Start to grow the pool; the contract and errors of `pdsim.transfer.group.Group.reserve`."""
        if size <= 0:
            raise ValueError(f"size={size} must be > 0")
        return self._add(size, timeout, "", None)

    def close(self) -> None:
        """Leave the group: what this rank still waits for fails, and the others are told."""
        self._break("closed", TransferFailed(f"{self._groups.rank} left the group during the call"))

    # --- calls -----------------------------------------------------------------------------------------------------

    def _add(
        self, size: int, timeout: float | None, label: str, buffers: tuple[Any, Any] | None, times: int = 1
    ) -> Event:
        timeout = times * self._settings.timeout if timeout is None else timeout
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be > 0")
        event = self._clock.event()
        event.defused = True
        call = _Call(self._number, size, event, self._clock.now, timeout, label, buffers, times)
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
                self._announce(call.intent(self.names, self._refusal(call)))
            said = self._intents[call.number]
            if len(said) < len(self.names):
                return
            if error := _disagreement(said):
                self._finish(call, error)
                return
        self._begin(call)

    def _refusal(self, call: _Call) -> str:
        # Only a reservation can be refused: all ranks hear of it before any of them reserves.
        device, pool, rank = self._device, self._device.symmetric, self._groups.rank
        if call.kind != "reserve":
            return ""
        if pool.owner not in (None, self):
            return f"RegistrationError: the symmetric pool of {rank} belongs to another group"
        if pool.reserved and not self._settings.grow:
            return (
                f"OutOfMemory: the symmetric pool has {format_size(pool.reserved)} and may not grow by "
                f"{format_size(call.size)} (collective.grow=false); reserve more at the start with collective.pool"
            )
        room = device.capacity - device.used
        if call.size > room:
            return (
                f"OutOfMemory: {format_size(call.size)} do not fit on {device.name} of {rank}, "
                f"which has {format_size(room)} left"
            )
        return ""

    def _begin(self, call: _Call) -> None:
        call.started = True
        call.prepared = self._clock.now
        if call.buffers is None:
            self._device.account(call.size, SYMMETRIC)
            _background(
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
        return None

    def busy(self) -> bool:
        return bool(self._calls) and self._calls[0].work is not None

    def _finish(self, call: _Call, error: TransferError | None, took: float = 0.0) -> None:
        # *took* is 0 where nobody knows.  Buffers are released before the caller hears of the end.
        assert self._calls[0] is call
        self._calls.popleft()
        call.work = None  # it may keep the memory of the buffers
        self._over += 1
        self._clock.unwatch(self)
        self._intents.pop(call.number, None)
        self._done.pop(call.number, None)
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

    # --- the symmetric pool ----------------------------------------------------------------------------------------

    def _reserved(self, call: _Call, add: Callable[[], None] | None, error: BaseException | None) -> None:
        if not self._calls or self._calls[0] is not call:
            return
        refusal = f"{type(error).__name__}: {error}" if error is not None else ""
        if refusal:
            self._device.account(-call.size, SYMMETRIC)
        call.add = add
        self._announce(call.intent(self.names, refusal, done=True))
        self._add_reserved(call)

    def _add_reserved(self, call: _Call) -> None:
        # The memory goes into the pool once all ranks have theirs.
        said = self._done[call.number]
        if len(said) < len(self.names):
            return
        if error := _disagreement(said):
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

    # --- the others ------------------------------------------------------------------------------------------------

    def _tell(self, note: _Note) -> None:
        for name in self._others:
            self._groups.channel.tell(name, _TOPIC, _encode(note))

    def _announce(self, intent: _Intent) -> None:
        (self._done if intent.done else self._intents)[intent.number][self._groups.rank] = intent
        self._tell(intent)

    def hear(self, sender: str, note: _Note) -> None:
        """Take a message of another member: its hello, its intent, that it has reserved, or that it leaves."""
        if self._lost:
            return
        if isinstance(note, _Hello):
            self._hello[sender] = note
            self._connect()
        elif isinstance(note, _Bye):
            self._gone[sender] = note
            self._leave_if_alone()
        elif note.done:
            self._done[note.number][sender] = note
            if self._calls and self._calls[0].number == note.number:
                self._add_reserved(self._calls[0])
        else:
            self._intents[note.number][sender] = note
            self._advance()

    def _leave_if_alone(self) -> None:
        # A rank that says goodbye has taken part in as many calls as it says, so only later ones suffer.
        call = self._calls[0] if self._calls else None
        for name, bye in self._gone.items():
            if call is not None and call.number >= bye.calls:
                self._break(f"{name} has left the group {self._title}: {bye.why}", None)
                return

    def _connect(self) -> None:
        if self._connecting or self._lost or len(self._hello) < len(self._others):
            return
        self._connecting = True
        port = self._port or self._hello[self.names[0]].port
        where = self.index, len(self.names), self._groups.bind, port, self._listener
        _background(self._clock, lambda: self._library.connect(*where), self._connect_done)

    def _connect_done(self, _: Any, error: BaseException | None) -> None:
        if self._lost:
            return
        if error is not None:
            failure = (
                error if isinstance(error, TransferError) else TransferFailed(f"{type(error).__name__}: {error}")
            )
            self._break(f"no group {self._title}: {failure}", failure)
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
        for name, hello in self._hello.items():
            if name not in self._gone and is_dead(hello.identity):
                self._break(f"{name} of the group {self._title} is gone", None)
                return
        self._watch()

    # --- ends ------------------------------------------------------------------------------------------------------

    def _expire(self, call: _Call) -> None:
        if call.event.triggered or self._lost:
            return
        late = [name for name in self._others if name not in self._hello]
        if not late and call.announced:
            late = [name for name in self._others if name not in self._intents[call.number]]
        waiting = f"; {', '.join(late)} had not called" if late else ""
        error = TransferTimeout(f"a collective of {self._title} is not over after {call.timeout:g} s{waiting}")
        self._fail(call, error)
        self._break(f"{self._groups.rank} has given up: {error}", None)

    def _break(self, why: str, error: TransferError | None) -> None:
        if self._lost:
            return
        self._lost = why
        self._clock.unwatch(self)
        self._tell(_Bye(list(self.names), self._over, why[:200]))
        calls, self._calls = list(self._calls), deque()
        if not self._connecting:
            self._end(calls, error, stopped=True)
            return
        _background(
            self._clock, self._library.abort, lambda _, failed: self._end(calls, error, stopped=failed is None)
        )

    def _end(self, calls: list[_Call], error: TransferError | None, *, stopped: bool) -> None:
        # Their buffers are released only if the library is proven to have *stopped*: else it may still write to
        # them, and they stay held.
        for call in calls:
            if stopped:
                call.work = None
                for buffer in call.buffers or ():
                    self._device.release(buffer)
            self._fail(call, error or PeerLost(self._lost))

    def _fail(self, call: _Call, error: TransferError) -> None:
        if call.event.triggered:
            return
        now = self._clock.now
        self._record(call, type(error).__name__, now, now)
        call.event.fail(error)

    def _record(self, call: _Call, status: str, completed: float, seen: float) -> TransferRecord:
        # Its bytes are those of all ranks, or of this one for a reservation; its descriptors are the ranks.
        ranks, gathers = len(self.names), call.buffers is not None
        record = TransferRecord(
            f"{self._library.engine}:{call.kind}",
            "all_gather" if gathers else "reserve",
            self._title,
            self._groups.rank,
            call.size * call.times * (ranks if gathers else 1),
            ranks,
            call.submitted,
            call.prepared,
            call.posted,
            completed,
            seen,
            status,
            call.label,
        )
        self._groups.recorder.transfer(record)
        return record


def _disagreement(said: Mapping[str, _Intent]) -> TransferError | None:
    # The first refusal counts, as the error that it names; then calls of different kinds or sizes.
    for intent in said.values():
        if intent.refusal:
            kind, _, text = intent.refusal.partition(": ")
            kinds = {"OutOfMemory": OutOfMemory, "RegistrationError": RegistrationError}
            return kinds.get(kind, TransferFailed)(text)
    if len({(intent.kind, intent.size) for intent in said.values()}) == 1:
        return None
    all_said = ", ".join(f"{name} {intent.kind} of {intent.size} bytes" for name, intent in sorted(said.items()))
    return InvalidBatch(f"the ranks of a group must call alike, got {all_said}; pad to the longest")


def _background(
    clock: WallClock, function: Callable[[], Any], then: Callable[[Any, BaseException | None], None]
) -> None:
    """Run *function* on a new daemon thread, then ``then(result, error)`` on the clock's; one of the two is None."""

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as exception:
            error = exception
        clock.call(lambda: then(result, error))

    threading.Thread(target=work, daemon=True).start()
