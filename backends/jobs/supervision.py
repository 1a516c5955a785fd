# SPDX-License-Identifier: Apache-2.0
"""Messages between the supervisor and its workers: typed msgpack over a socket pair, never pickle.

The order is `Start`, `WorkerReady`, `Go`, `Alive` and `Moved` as often as need be, and `Done`, which
comes first from a worker that cannot start.
"""

import socket
import struct
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from backends.base.zmq_channel import Keys
from pdsim.core.errors import MessageError, PeerLost
from pdsim.hardware.costs import Collective, Engine
from pdsim.transfer.log import plain

_LENGTH = struct.Struct("<Q")  # ahead of each message
_LARGEST = 1 << 33  # bytes of a message: a rank's records of a hundred million transfers


class Start(msgspec.Struct, tag=True):
    """Supervisor to worker: what to become."""

    name: str
    keys: Keys
    program: str  # ``"module:function"``
    arguments: Mapping[str, Any]
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


class Done(msgspec.Struct, tag=True):
    """Worker to supervisor: how the program ended, or with which *error*, ``"Class: message"``, it did not start."""

    value: Any
    error: str
    engine: str = ""
    transfers: list[bytes] = []  # what `TransferLog.by_rank` reads
    pools: dict[str, float] = {}  # peak use of each, 0 to 1
    events: int = 0  # that the clock has processed
    refused: int = 0  # messages and connections


Message = Start | WorkerReady | Go | Moved | Alive | Done
_Kind = TypeVar("_Kind", Start, Go)
_decode = msgspec.msgpack.Decoder(Message).decode
_encode = msgspec.msgpack.Encoder(enc_hook=plain).encode


def check_plain(value: object) -> None:
    """Raise a `TypeError` unless *value* is plain data, which can cross a process boundary."""
    _encode(value)


class Line:
    """One end of the *connection* between supervisor and worker."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._pieces = bytearray()

    def send(self, message: Message, wait: bool = True) -> None:
        """Send *message*; a `TypeError` if it holds anything but plain data.

        Without *wait* it must be a few bytes, which the kernel takes whole or, with a `BlockingIOError`, not at all.
        """
        payload = _encode(message)
        whole = _LENGTH.pack(len(payload)) + payload
        if wait:
            self.connection.sendall(whole)
        else:
            self.connection.send(whole, socket.MSG_DONTWAIT)

    def receive(self, flags: int = 0) -> list[Message]:
        """Return the messages that are here, or that one read, with *flags*, completes.

        Raise `PeerLost` at the end of the connection.  After a `MessageError` nothing more can be read.
        """
        messages: list[Message] = list(iter(self._take, None))
        if not messages:
            self._read(flags)
            messages += iter(self._take, None)
        return messages

    def wait_for(self, kind: type[_Kind]) -> _Kind:
        """Wait for one message; `receive` returns what follows it.  Raise a `TypeError` unless it is a *kind*."""
        while (message := self._take()) is None:
            self._read()
        if not isinstance(message, kind):
            raise TypeError(f"expected {kind.__name__}, got {type(message).__name__}")
        return message

    def _read(self, flags: int = 0) -> None:
        piece = self.connection.recv(1 << 20, flags)
        if not piece:
            raise PeerLost("the other end of the connection is gone")
        self._pieces += piece

    def _take(self) -> Message | None:
        if len(self._pieces) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._pieces)
        if length > _LARGEST:
            raise MessageError(f"a message of {length} bytes, more than {_LARGEST}")
        end = _LENGTH.size + length
        if len(self._pieces) < end:
            return None
        try:
            message: Message = _decode(bytes(self._pieces[_LENGTH.size : end]))
        except (msgspec.MsgspecError, ValueError) as error:
            raise MessageError(f"not a message between supervisor and worker: {error}") from None
        del self._pieces[:end]
        return message
