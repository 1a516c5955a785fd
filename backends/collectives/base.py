# SPDX-License-Identifier: Apache-2.0
"""What groups of real ranks are made of: the libraries that move their bytes, and what ranks say to each other.

A library (`Library`) knows how to gather; `backends.collectives.real_group.RealGroup` decides when,
and what becomes of calls that cannot be.  Messages between ranks are msgpack of `Hello`, `Intent`
and `Bye`, under the topic `TOPIC` of the control channel.
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from simpy.events import Event

from pdsim.core.clock import WallClock
from pdsim.core.errors import (
    InvalidBatch,
    MessageError,
    OutOfMemory,
    RegistrationError,
    TransferError,
    TransferFailed,
)
from pdsim.transfer import TransferRecord
from pdsim.transfer.group import SYMMETRIC

__all__ = [
    "TOPIC",
    "Bye",
    "GatherCall",
    "Hello",
    "Intent",
    "Library",
    "Settings",
    "background",
    "decode",
    "disagreement",
    "encode",
]

TOPIC = b"group"


class Settings(msgspec.Struct, frozen=True):
    """What a rank needs to know of `pdsim.hardware.costs.Collective`.

    Attributes:
        name: Of the collective in the configuration.
        implementation: The entry point of its `Library`.
        grow: Whether the symmetric pool may grow after the first reservation.
        check: Whether ranks compare kind and size of each call before it starts, at the cost of a
            message round.
        timeout: Seconds that a call may take if it does not say so itself.
        timing: "caller", from the call to its end as this rank sees it, or "device", as long as the
            device says.
    """

    name: str
    implementation: str
    grow: bool
    check: bool
    timeout: float
    timing: str = "caller"


class Library(ABC):
    """What moves the bytes of one group.  Raises `TransferError`s.

    Made for a group; `connect` once, on a thread of its own; `reserve` and `start` one at a time, in the
    same order on all ranks; `poll` on the clock's thread until the work is over; `abort` at the end, or when
    something failed.
    """

    engine: str  # as it reports itself
    memory: str  # that it gathers: "host" or "gpu"
    times_device: bool = False  # whether `start` can be told to time the device alone
    timing: str = "caller"  # of `pdsim.hardware.costs.Collective`; "device" only where it *times_device*

    def __init__(self, device: Any, timeout: float) -> None:
        """Gather memory of *device*; nothing takes more than *timeout* seconds."""
        self._device = device
        self._timeout = timeout

    @classmethod
    def missing(cls) -> str:
        """Return what it needs and this machine lacks, and what would help, in a few words; or nothing."""
        return ""

    @abstractmethod
    def connect(self, index: int, count: int, host: str, port: int, listener: socket.socket | None) -> None:
        """Meet the other ranks at a store, which the first opens on *listener*.

        On a thread of its own; may block.
        """

    @abstractmethod
    def start(self, source: Any, target: Any, size: int, symmetric: bool, places: Sequence[tuple[int, int]]) -> Any:
        """Begin to gather and return the work.

        *source* and *target* are buffers of the device, *size* bytes of each rank, once for each of *places*, where
        the piece begins in *source* and where all begin in *target*.  On the clock's thread, so it must not block.
        """

    @abstractmethod
    def poll(self, work: Any) -> float | None:
        """Return None while *work* goes on, then the seconds that it took on the device, 0 if nobody knows.

        Raise a `TransferError` if the work has failed; the group is broken then, and `abort`
        follows.
        """

    @abstractmethod
    def reserve(self, size: int) -> Callable[[], None]:
        """Allocate and register *size* bytes together with the other ranks; on a thread of its own, and may block.

        Return what adds them to the device's pool, to be called on the clock's thread.
        """

    @abstractmethod
    def abort(self) -> None:
        """Have nothing move any more.  Called on a thread of its own, and may block.

        When it returns the buffers of the call are released; when it raises they stay held until
        the process ends.
        """


class Hello(msgspec.Struct, tag=True):
    """A rank is in the group: what proves its death, and, from the first, where the store is.

    Attributes:
        group: The names of all members, which tell groups apart.
        identity: Of the rank's process (`backends.base.processes`).
        port: On which the first rank's store listens; 0 from the others.
    """

    group: list[str]
    identity: str
    port: int


class Intent(msgspec.Struct, tag=True):
    """What a rank is about to do, or, with *done*, has done.

    *number* counts the calls of the group, *kind* is that of `GatherCall.kind`, and *refusal* names an error class
    and a message, ``"OutOfMemory: ..."``, if this rank cannot do it.
    """

    group: list[str]
    number: int
    kind: str
    size: int
    refusal: str = ""
    done: bool = False


class Bye(msgspec.Struct, tag=True):
    """A rank has left the group, in order or because something failed there.

    Attributes:
        group: The names of all members.
        calls: That were over when it left: those after them can never be.
        why: In a few words, for the errors of the others.
    """

    group: list[str]
    calls: int  # that were over when it left
    why: str


_decode = msgspec.msgpack.Decoder(Hello | Intent | Bye).decode
encode = msgspec.msgpack.Encoder().encode


def decode(payload: bytes) -> Hello | Intent | Bye:
    """Return the message in *payload*.  Raise a `MessageError` if there is none."""
    try:
        message: Hello | Intent | Bye = _decode(payload)
    except (msgspec.MsgspecError, ValueError) as error:
        raise MessageError(f"not a message of a group: {error}") from None
    return message


@dataclass(eq=False)
class GatherCall:
    """One collective of this rank, from the call until it is over.

    Times are seconds on the rank's clock.

    Attributes:
        number: Of the call in its group, from 0; the same on all ranks, which call in the same
            order.
        size: Bytes of each rank's piece, or of the reservation.
        event: What the caller waits for; its value is a `TransferRecord`.
        submitted: When it was called.
        timeout: Seconds that it may take.
        label: Of the record.
        buffers: Source and target, held until the call is over; None: it reserves.
        announced: Whether the others were told what this rank is about to do.
        prepared: When its turn came and all ranks agreed.
        posted: When the library had it.
        started: Whether the library has it.
        work: The library's handle while it goes on.
        add: Adds reserved memory to the pool, once all ranks have theirs.
    """

    number: int
    size: int
    event: Event
    submitted: float
    timeout: float
    label: str = ""
    buffers: tuple[Any, Any] | None = None  # source and target; None: it reserves
    announced: bool = False
    prepared: float = 0.0
    posted: float = 0.0
    started: bool = False
    work: Any = None
    add: Callable[[], None] | None = None  # the reserved memory to the pool, once all have theirs
    times: int = 1

    @property
    def kind(self) -> str:
        """``"plain"``, ``"symmetric"`` or ``"reserve"``."""
        if self.buffers is None:
            return "reserve"
        return "symmetric" if self.buffers[1].pool == SYMMETRIC else "plain"

    def record(
        self, engine: str, names: Sequence[str], rank: str, status: str, completed: float, seen: float
    ) -> TransferRecord:
        """Return the record of this call, which ended with *status* on *rank*, in the group of *names*.

        Its bytes are those of all ranks, or of this one for a reservation; its descriptors are the ranks.
        *completed* is when the library was done, *seen* when this rank noticed.
        """
        ranks, title = len(names), "+".join(names)
        nbytes = self.size * self.times * (1 if self.buffers is None else ranks)
        operation = "reserve" if self.buffers is None else "all_gather"
        times = self.submitted, self.prepared, self.posted, completed, seen
        return TransferRecord(
            f"{engine}:{self.kind}", operation, title, rank, nbytes, ranks, *times, status, self.label
        )


Then = Callable[[Any, BaseException | None], None]


def disagreement(said: Mapping[str, Intent]) -> TransferError | None:
    """Return what keeps ranks that have *said* this from doing it together.

    The first refusal counts, as the error that it names; then calls of different kinds or sizes are an
    `InvalidBatch`. None if all agree.
    """
    for intent in said.values():
        if intent.refusal:
            kind, _, text = intent.refusal.partition(": ")
            return _ERRORS.get(kind, TransferFailed)(text)
    if len({(intent.kind, intent.size) for intent in said.values()}) == 1:
        return None
    all_said = ", ".join(f"{name} {intent.kind} of {intent.size} bytes" for name, intent in sorted(said.items()))
    return InvalidBatch(f"the ranks of a group must call alike, got {all_said}; pad to the longest")


_ERRORS: dict[str, type[TransferError]] = {"OutOfMemory": OutOfMemory, "RegistrationError": RegistrationError}


def background(clock: WallClock, function: Callable[[], Any], then: Then) -> None:
    """Run *function* on a thread of its own, and ``then(result, error)`` on the clock's.

    One of the two is None.  The thread is a daemon: a library that never returns does not keep the
    process.
    """

    def work() -> None:
        result, error = None, None
        try:
            result = function()
        except BaseException as exception:
            error = exception
        clock.call(lambda: then(result, error))

    threading.Thread(target=work, daemon=True).start()
