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
from backends.collectives.base import library
from pdsim.core import errors
from pdsim.core.clock import WallClock
from pdsim.core.errors import (
    InvalidBatch,
    MessageError,
    PeerLost,
    RegistrationError,
    TransferError,
    TransferFailed,
    TransferTimeout,
)
from pdsim.core.units import format_size
from pdsim.hardware.costs import Collective
from pdsim.transfer import Buffer, TransferRecord
from pdsim.transfer.group import SYMMETRIC, check_gather, repeated
from pdsim.transfer.job import Rank

WATCH = 0.1  # seconds between two looks at whether the members are alive, while something is under way

_TOPIC = b"group"


class _Hello(msgspec.Struct, tag="Hello"):
    """A rank is in the group."""

    group: list[str]  # the names of all members, which tell groups apart
    identity: str  # of the rank's process (`backends.base.processes`)
    port: int  # on which the first rank's store listens; 0 from the others


class _Intent(msgspec.Struct, tag="Intent"):
    """The call that a rank is about to make or, with *done*, has made."""

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
    label: str
    buffers: tuple[Any, Any] | None  # source and target, held until it is over; None: it reserves
    times: int
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


class RealGroups:
    """All groups of *rank*, each made when its program asks for it; earlier messages are kept until then."""

    def __init__(self, rank: Rank, bind: str, settings: Collective) -> None:
        self.rank, self.bind, self.settings = rank, bind, settings
        self.channel: Any = rank.channel
        self._groups: dict[tuple[str, ...], RealGroup] = {}
        self._early: dict[tuple[str, ...], list[tuple[str, Any]]] = defaultdict(list)

    def __call__(self, names: tuple[str, ...]) -> RealGroup:
        """Return the group of *names*, in the order of their pieces; the same names give the same group."""
        if not self._groups:
            self.channel.listen(_TOPIC, self._deliver)
        if names not in self._groups:
            group = self._groups[names] = RealGroup(self, names)
            for sender, message in self._early.pop(names, ()):
                group.hear(sender, message)
        return self._groups[names]

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

    def __init__(self, groups: RealGroups, names: tuple[str, ...]) -> None:
        self.names = names  # of all members, in the order of their pieces
        self.growths = 0  # of the symmetric pool, after the first reservation
        self.growth_seconds = 0.0  # what that took, from the calls to their ends
        self._groups, self._settings = groups, groups.settings
        self._rank = groups.rank.name
        self._clock: Any = groups.rank.clock
        self._device: Any = groups.rank.device
        self._library = library(groups.settings, self._device)
        self.index = names.index(self._rank)
        self._title = "+".join(names)
        self._others = [name for name in names if name != self._rank]
        self._hello: dict[str, _Hello] = {}  # of the others, by name
        self._gone: dict[str, _Bye] = {}  # of the others that have left in order
        # by the number of a call, and whether it is done: what each rank, this one included, has announced
        self._said: dict[tuple[int, bool], dict[str, _Intent]] = defaultdict(dict)
        self._calls: deque[_Call] = deque()  # that are not over
        self._number = self._over = 0  # calls made, calls over
        self._connected = self._connecting = False
        self._lost = ""  # why the group is no more
        self._watching = False
        self._listener = socket.create_server((groups.bind, 0)) if self.index == 0 else None
        self._port = self._listener.getsockname()[1] if self._listener else 0
        self._tell(_Hello(list(names), myself(), self._port))
        self._connect()

    @property
    def reserved(self) -> int:
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
        if size <= 0:
            raise ValueError(f"size={size} must be > 0")
        return self._add(size, timeout, "", None, 1)

    def close(self) -> None:
        self._break("closed", TransferFailed(f"{self._rank} left the group during the call"))

    # --- calls -----------------------------------------------------------------------------------------------------

    def _add(
        self, size: int, timeout: float | None, label: str, buffers: tuple[Any, Any] | None, times: int
    ) -> Event:
        timeout = times * self._settings.timeout if timeout is None else timeout
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be > 0")
        event, now = self._clock.event(), self._clock.now
        event.defused = True
        call = _Call(self._number, size, event, now, timeout, label, buffers, times, prepared=now, posted=now)
        self._number += 1
        if self._lost:
            self._fail(call, PeerLost(self._lost))
            return call.event
        for buffer in buffers or ():
            self._device.hold(buffer)
        self._calls.append(call)
        self._clock.call_at(now + timeout, self._expire, call)
        self._watch()
        self._advance()
        return call.event

    def _advance(self) -> None:
        call = self._calls[0] if self._calls else None
        if call is None or call.started or not self._connected:
            return
        if self._settings.check or call.kind == "reserve":
            if self._rank not in self._said[call.number, False]:
                self._announce(call, self._refusal(call), done=False)
            said = self._said[call.number, False]
            if len(said) < len(self.names):
                return
            if error := _disagreement(said):
                self._finish(call, error)
                return
        call.started, call.prepared = True, self._clock.now
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

    def fileno(self) -> None:
        return

    def busy(self) -> bool:
        return bool(self._calls) and self._calls[0].work is not None

    def _finish(self, call: _Call, error: TransferError | None, took: float = 0.0) -> None:
        # *took* is 0 where nobody knows.  Buffers are released before the caller hears of the end.
        self._calls.popleft()
        self._over += 1
        self._clock.unwatch(self)
        for done in (False, True):
            self._said.pop((call.number, done), None)
        self._release(call)
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

    def _release(self, call: _Call) -> None:
        call.work = None  # it may keep the memory of the buffers
        for buffer in call.buffers or ():
            self._device.release(buffer)

    # --- the symmetric pool ----------------------------------------------------------------------------------------

    def _refusal(self, call: _Call) -> str:
        # Only a reservation can be refused: all ranks hear of it before any of them reserves.
        device, pool = self._device, self._device.symmetric
        if call.kind != "reserve":
            return ""
        if pool.owner not in (None, self):
            return f"RegistrationError: the symmetric pool of {self._rank} belongs to another group"
        if pool.reserved and not self._settings.grow:
            return (
                f"OutOfMemory: the symmetric pool has {format_size(pool.reserved)} and may not grow by "
                f"{format_size(call.size)} (collective.grow=false); reserve more at the start with collective.pool"
            )
        room = device.capacity - device.used
        if call.size > room:
            return (
                f"OutOfMemory: {format_size(call.size)} do not fit on {device.name} of {self._rank}, "
                f"which has {format_size(room)} left"
            )
        return ""

    def _reserved(self, call: _Call, add: Callable[[], None] | None, error: BaseException | None) -> None:
        if not self._calls or self._calls[0] is not call:
            return
        if error is not None:
            self._device.account(-call.size, SYMMETRIC)
        call.add = add
        self._announce(call, f"{type(error).__name__}: {error}" if error is not None else "", done=True)
        self._add_reserved(call)

    def _add_reserved(self, call: _Call) -> None:
        # The memory goes into the pool once all ranks have theirs.
        said = self._said[call.number, True]
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
            self._groups.channel.send(name, _encode(note), _TOPIC)

    def _announce(self, call: _Call, refusal: str, done: bool) -> None:
        intent = _Intent(list(self.names), call.number, call.kind, call.size * call.times, refusal, done)
        self._said[call.number, done][self._rank] = intent
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
        else:
            self._said[note.number, note.done][sender] = note
            if not note.done:
                self._advance()
            elif self._calls and self._calls[0].number == note.number:
                self._add_reserved(self._calls[0])

    def _leave_if_alone(self) -> None:
        # A rank that says goodbye has taken part in as many calls as it says, so only later ones suffer.
        for name, bye in self._gone.items():
            if self._calls and self._calls[0].number >= bye.calls:
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
        if not late and self._rank in (said := self._said[call.number, False]):
            late = [name for name in self._others if name not in said]
        waiting = f"; {', '.join(late)} had not called" if late else ""
        error = TransferTimeout(f"a collective of {self._title} is not over after {call.timeout:g} s{waiting}")
        self._fail(call, error)
        self._break(f"{self._rank} has given up: {error}", None)

    def _break(self, why: str, error: TransferError | None) -> None:
        if self._lost:
            return
        self._lost = why
        self._clock.unwatch(self)
        self._tell(_Bye(list(self.names), self._over, why[:200]))
        calls, self._calls = list(self._calls), deque()

        def end(_: Any, failed: BaseException | None) -> None:
            # Buffers are released only if the library is proven to have stopped: else it may still write to them.
            for call in calls:
                if failed is None:
                    self._release(call)
                self._fail(call, error or PeerLost(why))

        if self._connecting:
            _background(self._clock, self._library.abort, end)
        else:
            end(None, None)

    def _fail(self, call: _Call, error: TransferError) -> None:
        if not call.event.triggered:
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
            self._rank,
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
        self._groups.rank.recorder.transfer(record)
        return record


def _disagreement(said: Mapping[str, _Intent]) -> TransferError | None:
    # The first refusal counts, as the error that it names; then calls of different kinds or sizes.
    for intent in said.values():
        if intent.refusal:
            kind, _, text = intent.refusal.partition(": ")
            known = kind in ("OutOfMemory", "RegistrationError")
            refused: TransferError = getattr(errors, kind if known else "TransferFailed")(text)
            return refused
    if len({(intent.kind, intent.size) for intent in said.values()}) == 1:
        return None
    every = ", ".join(f"{name} {intent.kind} of {intent.size} bytes" for name, intent in sorted(said.items()))
    return InvalidBatch(f"the ranks of a group must call alike, got {every}; pad to the longest")


def _background(
    clock: WallClock, function: Callable[[], Any], then: Callable[[Any, BaseException | None], None]
) -> None:
    # *function* on a new daemon thread, then ``then(result, error)`` on the clock's; one of the two is None

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as exception:
            error = exception
        clock.call(lambda: then(result, error))

    threading.Thread(target=work, daemon=True).start()
