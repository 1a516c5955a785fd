"""What ranks tell each other, as typed messages with a schema version.

One byte of version, then MessagePack of an array ``[type, fields...]``.  Nothing here is ever pickled.  Times are
seconds on the job's clock, pages are those of the receiver's or sender's instance, rooms are positive.
"""

from __future__ import annotations

import msgspec

from pdsim.errors import PdsimError
from pdsim.kv.layout import KvLayout
from pdsim.kv.pages import Pages
from pdsim.kv.plan import Runs

__all__ = [
    "VERSION",
    "Abort",
    "Arrival",
    "Arrived",
    "Chunk",
    "Destination",
    "Failed",
    "Finished",
    "Forward",
    "Gone",
    "Message",
    "MessageError",
    "Ping",
    "Pong",
    "Prefilled",
    "Ready",
    "Register",
    "Released",
    "Reserve",
    "Sent",
    "Settled",
    "Stop",
    "Submit",
    "decode",
    "encode",
]

VERSION = 2
"""Of the schema; to be raised with every change of a message's fields."""


class MessageError(PdsimError):
    """Bytes that are not a message of this schema: another version, an unknown type, a wrong field."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages."""


# --- setting up -----------------------------------------------------------------------------------------------------


class Register(Message, frozen=True):
    """A decode rank to the prefill ranks that will write to it: how to reach its pool and how that is laid out."""

    address: bytes
    instance: str
    index: int  # of the rank in its group
    layout: KvLayout


class Ready(Message, frozen=True):
    """A rank to its leader, a leader to the router: connected, requests may come."""


class Ping(Message, frozen=True):
    """The router to every rank: answer `Pong`."""


class Pong(Message, frozen=True):
    """Every rank to the router: still here."""


class Gone(Message, frozen=True):
    """A prefill rank to the router: this instance cannot be reached; the router to prefill ranks: do not wait."""

    instance: str
    reason: str


class Stop(Message, frozen=True):
    """The router to every rank: nothing more will come."""


# --- a request's way ------------------------------------------------------------------------------------------------


class Submit(Message, frozen=True):
    """The router to one prefill and one decode leader: serve this request together."""

    room: int
    input: int  # tokens
    output: int  # tokens
    prefill: str  # instance
    decode: str  # instance


class Destination(Message, frozen=True):
    """A decode leader to a prefill leader: pages are reserved, here is where to write."""

    room: int
    pages: Pages
    slot: int
    state: tuple[Pages, ...] = ()  # the rows of each component, in the order of `StateShape.components`


class Reserve(Message, frozen=True):
    """A decode leader to its followers, where memory has contents: this room owns these pages of yours."""

    room: int
    input: int  # tokens
    pages: Pages
    slot: int
    state: tuple[Pages, ...] = ()


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a request that one prefill forward covers, and the pages to write after it."""

    room: int
    decode: str  # instance
    index: int  # of the chunk in its request
    first_page: int  # of the request
    tokens: int  # of the whole request
    runs: Runs
    last: bool
    slots: tuple[int, int]  # of first-token metadata, used with the last chunk
    noticed: float  # when the prefill leader had the `Destination`
    started: float  # when the request's first forward began
    state: tuple[Runs, ...] = ()  # of each component, with the last chunk


class Forward(Message, frozen=True):
    """A prefill leader to its followers: compute for so long, then write these chunks."""

    seconds: float
    chunks: tuple[Chunk, ...]


class Arrival(Message, frozen=True):
    """Attached to each write of a chunk.  *count*, in the last one only, is how many writes there were in all."""

    room: int
    writer: int  # index of the rank in its group
    count: int
    pages: int  # of the whole request: they decide how many ranks write
    noticed: float
    started: float
    ended: float  # when the forward of the last chunk ended


class Sent(Message, frozen=True):
    """A prefill rank to its leader: my part of the room is over; with a *reason* it failed."""

    room: int
    nbytes: int
    reason: str = ""
    lost: str = ""  # the instance that is gone, if that is why


class Settled(Message, frozen=True):
    """A prefill rank to its leader: of the failed room no byte of mine moves any more."""

    room: int


class Arrived(Message, frozen=True):
    """A decode rank to its leader: my part of the room is here; with a *reason* it is not what was sent."""

    room: int
    reason: str = ""


class Prefilled(Message, frozen=True):
    """A prefill leader to the router: the room's KV has been written."""

    room: int
    nbytes: int  # by all ranks


class Finished(Message, frozen=True):
    """A decode leader to the router: all tokens are out, and when what happened."""

    room: int
    reserved: float  # decode pages allocated, `Destination` sent
    noticed: float  # the prefill leader had the `Destination`
    started: float  # first prefill forward began
    prefilled: float  # last prefill forward ended
    arrived: float  # KV and metadata complete on all decode ranks
    polled: float  # the decode scheduler saw that: the first token is out
    joined: float  # entered the running batch
    finished: float  # last token out


class Failed(Message, frozen=True):
    """A leader to the router: the room cannot be served."""

    room: int
    reason: str
    lost: str = ""  # the instance that is gone, if that is why


class Abort(Message, frozen=True):
    """Give the room up: the router to leaders, a prefill leader to its followers."""

    room: int


class Released(Message, frozen=True):
    """A prefill leader to a decode leader: nothing of the aborted room is or will be written any more."""

    room: int


_Any = (
    Register
    | Ready
    | Ping
    | Pong
    | Gone
    | Stop
    | Submit
    | Destination
    | Reserve
    | Forward
    | Arrival
    | Sent
    | Settled
    | Arrived
    | Prefilled
    | Finished
    | Failed
    | Abort
    | Released
)
_PREFIX = bytes([VERSION])
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Any).decode


def encode(message: Message) -> bytes:
    """Return the bytes of *message*."""
    return _PREFIX + _encode(message)


def decode(payload: bytes) -> Message:
    """Return the message in *payload*.  Raise a `MessageError` that names what was got and what was expected."""
    if payload[:1] != _PREFIX:
        got = f"schema version {payload[0]}" if payload else "an empty message"
        raise MessageError(f"{got}, but this rank speaks version {VERSION}: run the same pdsim on every rank")
    try:
        message: Message = _decode(memoryview(payload)[1:])
    except msgspec.MsgspecError as error:
        raise MessageError(f"not a message of schema version {VERSION}: {error}") from None
    return message
