# SPDX-License-Identifier: Apache-2.0
"""Messages between the supervisor and its workers: typed msgpack over a socket pair, never pickle.

Each message has a length of eight bytes ahead.  The order is ``Start``, ``WorkerReady`` or ``WorkerFailed``, ``Go``,
then ``Alive`` and ``Moved`` as often as need be, and ``Done``.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from backends.base.zmq_channel import Keys
from pdsim.core.errors import MessageError, PeerLost
from pdsim.hardware.costs import Collective, Engine
from pdsim.transfer import TransferRecord
from pdsim.transfer.log import plain

__all__ = [
    "Alive",
    "Decoder",
    "Done",
    "Go",
    "Moved",
    "Start",
    "WorkerFailed",
    "WorkerReady",
    "check_plain",
    "receive",
    "send",
]

_LENGTH = struct.Struct("<Q")
_LARGEST = 1 << 33
"""Bytes of a message: a rank's records of twenty million transfers."""


class Start(msgspec.Struct, tag=True):
    """Supervisor to worker: what to become."""

    name: str
    keys: Keys
    program: str  # ``"module:function"``
    arguments: Mapping[str, Any]
    peers: list[str]
    engine: Engine
    posting: int | None  # as `RankSpec` has it
    collective: Collective | None
    bind: str  # the address to listen on
    capacity: int  # bytes of memory
    gpu: int | None  # its number
    device: str  # of its network, where that is not the machine's
    processors: list[int]  # that it stays on; none: it may roam


class WorkerReady(msgspec.Struct, tag=True):
    """Worker to supervisor: the engine works, the program is there, the channel listens at *uri*."""

    uri: str


class Go(msgspec.Struct, tag=True):
    """Supervisor to worker: run.  *origin* is the job's zero on the system's monotonic clock."""

    origin: float
    uris: dict[str, str]  # of all other ranks; empty for one that is being started again
    alive: float  # seconds between two `Alive`
    restarts: bool = False  # whether `Moved` may follow


class Moved(msgspec.Struct, tag=True):
    """Supervisor to worker: rank *name* was started again, and is at *uri* now."""

    name: str
    uri: str


class Alive(msgspec.Struct, tag=True):
    """Worker to supervisor: the clock of this rank still goes; *done* of *of* pieces of work, if it counts."""

    done: int = 0
    of: int = 0


class WorkerFailed(msgspec.Struct, tag=True):
    """Worker to supervisor: not able to start."""

    kind: str  # name of the exception's class
    message: str


class Done(msgspec.Struct, tag=True):
    """Worker to supervisor: how the program ended."""

    value: Any
    error: str
    engine: str
    transfers: list[TransferRecord]
    pools: dict[str, float]  # peak use of each, 0 to 1
    events: int  # that the clock has processed
    refused: int  # messages and connections


Message = Start | WorkerReady | Go | Moved | Alive | WorkerFailed | Done
_Kind = TypeVar("_Kind", Start, Go)
_decode = msgspec.msgpack.Decoder(Message).decode
_encode = msgspec.msgpack.Encoder(enc_hook=plain).encode


def check_plain(value: object) -> None:
    """Raise a `TypeError` unless *value* is plain data, which can cross a process boundary."""
    _encode(value)


def send(connection: socket.socket, message: Message, wait: bool = True) -> None:
    """Send *message*; a `TypeError` if it holds anything but plain data.

    Without *wait* it must be a few bytes, which the kernel takes whole or, with a `BlockingIOError`, not at all.
    """
    payload = _encode(message)
    whole = _LENGTH.pack(len(payload)) + payload
    if wait:
        connection.sendall(whole)
    else:
        connection.send(whole, socket.MSG_DONTWAIT)


class Decoder:
    """Puts messages together from the pieces that a socket delivers; one for each connection."""

    def __init__(self) -> None:
        self._pieces = bytearray()

    @property
    def missing(self) -> int:
        """Bytes until the next message is complete, or its length is known; at least 1."""
        if len(self._pieces) < _LENGTH.size:
            return _LENGTH.size - len(self._pieces)
        (length,) = _LENGTH.unpack_from(self._pieces)
        return max(1, _LENGTH.size + int(length) - len(self._pieces))

    def feed(self, piece: bytes) -> list[Message]:
        """Return the messages that are complete now.  After a `MessageError` nothing more can be read."""
        self._pieces += piece
        messages: list[Message] = []
        while len(self._pieces) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pieces)
            if length > _LARGEST:
                raise MessageError(f"a message of {length} bytes, more than {_LARGEST}")
            end = _LENGTH.size + length
            if len(self._pieces) < end:
                break
            try:
                messages.append(_decode(memoryview(self._pieces)[_LENGTH.size : end].tobytes()))
            except (msgspec.MsgspecError, ValueError) as error:
                raise MessageError(f"not a message between supervisor and worker: {error}") from None
            del self._pieces[:end]
        return messages


def receive(connection: socket.socket, kind: type[_Kind]) -> _Kind:
    """Wait for one message, which must be a *kind*, and leave what follows it on *connection*.

    Raise `PeerLost` if the other side has gone, a `MessageError` if there is no message in what came, and a
    `TypeError` for another kind of message.
    """
    decoder = Decoder()
    while True:
        piece = connection.recv(min(decoder.missing, 1 << 16))
        if not piece:
            raise PeerLost("the supervisor is gone")
        for message in decoder.feed(piece):
            if not isinstance(message, kind):
                raise TypeError(f"expected {kind.__name__}, got {type(message).__name__}")
            return message
