# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other, as typed messages with a schema version.

One byte of version, then MessagePack of an array ``[type, fields...]``; nothing is ever pickled.  Times are seconds
on the job's clock, pages are those of the receiver's or sender's instance, rooms are positive.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import Any

import msgspec

from pdsim.core.errors import MessageError
from pdsim.kv.layout import AUX_ROWS, KvLayout
from pdsim.kv.pages import Pages
from pdsim.kv.plan import Runs

__all__ = [
    "VERSION",
    "Abort",
    "Arrival",
    "Arrived",
    "Ask",
    "Busy",
    "Chunk",
    "Collected",
    "Destination",
    "Details",
    "Dropped",
    "Enroll",
    "Failed",
    "Fence",
    "Fenced",
    "Fetch",
    "Finished",
    "Forward",
    "Gone",
    "Grant",
    "KvMessage",
    "Lent",
    "Locate",
    "Located",
    "Meet",
    "MessageError",
    "Metadata",
    "Offload",
    "Ping",
    "Pong",
    "Preceded",
    "Prefilled",
    "PullRequest",
    "Quiet",
    "Ready",
    "Refused",
    "Register",
    "Released",
    "Renew",
    "Reserve",
    "Return",
    "Revoked",
    "Sent",
    "Settled",
    "Stop",
    "Streamed",
    "Submit",
    "Terms",
    "Took",
    "decode",
    "encode",
    "refusal",
]

VERSION = 10
"""Of the schema; to be raised with every change of a message's fields."""


class Refused(MessageError):
    """Another rank will have nothing to do with this one, and says why."""


class KvMessage(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages."""


# --- setting up ----------------------------------------------------------------------------------------------------


class Terms(msgspec.Struct, frozen=True, array_like=True):
    """What all ranks of a job must have alike."""

    page_size: int  # tokens
    kv_dtype: str  # of an element of KV, by name: two of one width are not the same numbers


class Enroll(KvMessage, frozen=True):
    """A rank to the bootstrap service, once in its life: here I am."""

    instance: str
    index: int  # of the rank in its group
    incarnation: int  # nanoseconds on the job's clock at which this life began
    terms: Terms


class Meet(KvMessage, frozen=True):
    """The bootstrap service to each rank of two instances that have formed: get connected."""

    life: str  # the receiver's own: its instance and that one's epoch
    peer: str  # the other's
    incarnation: int  # of the receiver, as it enrolled: a rank that was started again since is not meant


class Register(KvMessage, frozen=True):
    """A decode rank to the prefill ranks that will write to it: how to reach its pool and how that is laid out."""

    peer: str  # the life of the prefill instance that it is meant for
    address: bytes
    instance: str  # the life of the decode instance
    index: int  # of the rank in its group
    layout: KvLayout
    metadata_rows: tuple[int, ...] = AUX_ROWS  # bytes of each row of first-token metadata


class Ready(KvMessage, frozen=True):
    """A prefill rank to its leader, that one to the router: connected, requests may come for these two lives."""

    life: str
    peer: str


class Ping(KvMessage, frozen=True):
    """The router to every rank: answer `Pong`, or `Busy`."""


class Pong(KvMessage, frozen=True):
    """Every rank to the router: still here."""


class Busy(KvMessage, frozen=True):
    """A rank instead of `Pong`, in as many bytes: work for requests goes on, or has got on since the last ping."""


class Gone(KvMessage, frozen=True):
    """A prefill rank to the router: this life cannot be reached; the router to ranks: this instance is given up.

    Ranks of the instance itself end, up to incarnation *until*: one that was started meanwhile is not meant.
    """

    instance: str
    reason: str
    until: int = -1


class Fence(KvMessage, frozen=True):
    """A decode leader to its ranks: say when it is proven that nothing of this life moves here any more."""

    number: int  # never that of another life of the leader
    life: str  # of a prefill instance


class Fenced(KvMessage, frozen=True):
    """The answer to `Fence`, once it is proven."""

    number: int


class Stop(KvMessage, frozen=True):
    """The router to every rank: nothing more will come."""


# --- a request's way -----------------------------------------------------------------------------------------------


class Submit(KvMessage, frozen=True):
    """The router to one prefill and one decode leader: serve this request together."""

    room: int
    input: int  # tokens
    output: int  # tokens
    prefill: str  # instance; "" for a decode leader that has to ask (`Locate`)
    decode: str  # instance


class Details(KvMessage, frozen=True):
    """The router to a leader, before `Submit` or `PullRequest`, where it matters: more about a request."""

    room: int
    blocks: tuple[int, ...] = ()  # hashes of the prompt's blocks, each with all before it
    priority: int = 0  # the higher goes first


class Took(KvMessage, frozen=True):
    """A prefill leader to the bootstrap service: this room is this life's."""

    room: int
    life: str


class Locate(KvMessage, frozen=True):
    """A decode leader to the bootstrap service: say which prefill instance has each of these rooms."""

    rooms: tuple[int, ...]
    life: str  # the leader's own


class Located(KvMessage, frozen=True):
    """The answer to `Locate`: the life that has each of those rooms that are known."""

    lives: dict[int, str]
    to: str  # the life that asked: the next one waits for the answer to a question of its own


class Destination(KvMessage, frozen=True):
    """A decode leader to a prefill leader: write there; *pages* and index rows are those after the first *held*."""

    life: str  # of the prefill instance: this may find the next one
    room: int
    pages: Pages
    slot: int
    state: tuple[Pages, ...] = ()  # the rows of each component, in the order of `StateShape.components`
    held: int = 0


class Reserve(KvMessage, frozen=True):
    """A decode leader to its followers, where memory has contents: this room owns these pages of yours."""

    life: str  # of the instance: this may find the next one
    room: int
    input: int  # tokens
    pages: Pages  # without the first *held* ones, as of `Destination`
    slot: int
    state: tuple[Pages, ...] = ()
    held: int = 0


class Lent(KvMessage, frozen=True):
    """A prefill leader to the router: the prompt is computed, and its KV stays here under a lease, to be pulled."""

    room: int
    life: str  # of the prefill instance
    pages: Pages
    state: tuple[Pages, ...]  # the rows of each component, in the order of `StateShape.components`
    noticed: float  # the prefill leader had the request
    started: float  # its first forward began
    ended: float  # its last forward ended


class PullRequest(KvMessage, frozen=True):
    """The router to a decode leader: prefill has answered, fetch the KV and go on."""

    submit: Submit
    lent: Lent


class Fetch(KvMessage, frozen=True):
    """A decode leader to its followers: read your part of this room, from its pages at prefill into these."""

    life: str  # of the decode instance: this may find the next one
    room: int
    input: int  # tokens
    prefill: str  # the life that has it
    source: Pages
    pages: Pages
    source_state: tuple[Pages, ...] = ()
    state: tuple[Pages, ...] = ()


class Collected(KvMessage, frozen=True):
    """Decode's leader to prefill's: of this room nothing is or will be read; prefill's echo if it notices."""

    room: int
    life: str  # of the receiver's instance: this may find the next one
    nbytes: int  # that were read; 0 if it was given up


class Renew(KvMessage, frozen=True):
    """A decode leader to a prefill leader, every few seconds: these rooms are still wanted."""

    life: str  # of the prefill instance
    rooms: tuple[int, ...]


class Revoked(KvMessage, frozen=True):
    """A prefill leader to a decode leader: stop reading this room, and say `Collected` once nothing is read."""

    room: int
    life: str  # of the decode instance
    prefill: str  # the life that asks


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a request that one prefill forward covers, and the pages to write after it."""

    room: int
    decode: str  # instance
    index: int  # of the chunk in its request
    first_page: int  # of the runs, counted in the request
    tokens: int  # of the whole request
    runs: Runs
    last: bool
    slots: tuple[int, int]  # of first-token metadata, used with the last chunk
    noticed: float  # when the prefill leader had the `Destination`
    started: float  # when the request's first forward began
    state: tuple[Runs, ...] = ()  # of each component, with the last chunk
    held: int = 0  # pages of the request that the decode side has already


class Forward(KvMessage, frozen=True):
    """A prefill leader to its followers: compute for so long, then write these chunks."""

    life: str  # of the instance: this may find the next one
    seconds: float
    chunks: tuple[Chunk, ...]


class Preceded(Forward, frozen=True):
    """As `Forward`; write *cached* at once, which needs none, and wait for *tokens* on their way to experts."""

    cached: tuple[Chunk, ...]
    tokens: int = 0


class Offload(KvMessage, frozen=True):
    """A leader to its followers: move so many bytes of your pages to host memory, and so many *back*."""

    life: str  # of the instance
    nbytes: int
    back: int


class Arrival(KvMessage, frozen=True):
    """With each write of a chunk, or once after all of a room; *count*, with the last, is how many there were."""

    room: int
    writer: int  # index of the rank in its group
    count: int
    pages: int  # of the request, without those that were held: they decide how many ranks write
    noticed: float
    started: float
    ended: float  # when the forward of the last chunk ended
    chunk: int = -1  # whose slot of the staging ring was written; -1 if pages were
    to: str = ""  # the life of the decode instance: as a message it may find the next one


class Metadata(KvMessage, frozen=True):
    """A prefill rank to a decode rank, instead of a write: the rows of first-token metadata."""

    arrival: Arrival
    rows: tuple[bytes, ...]


class Ask(KvMessage, frozen=True):
    """A prefill rank to a decode rank, before a forward: a slot of the staging ring for this chunk, please."""

    room: int
    writer: int
    chunk: int
    size: int  # bytes of its block
    pages: Pages  # of the decode rank, in the order of the block
    to: str  # the life of the decode instance


class Grant(KvMessage, frozen=True):
    """A decode rank to a prefill rank: the answer to `Ask`.  With a negative *position* there is no slot."""

    room: int
    chunk: int
    position: int  # in the ring; its remainder by the ring's size is the offset


class Return(KvMessage, frozen=True):
    """A prefill rank to a decode rank: of the failed room nothing moves any more, here are all its slots back."""

    room: int
    writer: int


class Sent(KvMessage, frozen=True):
    """A prefill rank to its leader: my part of the room is over; with a *reason* it failed."""

    room: int
    nbytes: int
    reason: str = ""
    lost: str = ""  # the instance that is gone, if that is why


class Settled(KvMessage, frozen=True):
    """A prefill rank to its leader: of the failed room no byte of mine moves any more."""

    room: int


class Arrived(KvMessage, frozen=True):
    """A decode rank to its leader: my part of the room is here; with a *reason* it is not what was sent."""

    room: int
    reason: str = ""


class Quiet(KvMessage, frozen=True):
    """A decode rank to its leader: nothing of the forgotten room is being copied here any more."""

    room: int


class Prefilled(KvMessage, frozen=True):
    """A prefill leader to the router: the room's KV has been written."""

    room: int
    nbytes: int  # by all ranks


class Finished(KvMessage, frozen=True):
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


class Streamed(Finished, frozen=True):
    """As `Finished`, of an engine whose first token leaves later than its scheduler sees the KV."""

    first: float  # the first token leaves decode's server; *finished* is when the last one does
    asked: float | None = None  # decode's scheduler heard of the request, if that was after prefill had answered


class Failed(KvMessage, frozen=True):
    """A leader to the router: the room cannot be served."""

    room: int
    reason: str
    lost: str = ""  # the instance that is gone, if that is why


class Abort(KvMessage, frozen=True):
    """Give the room up: the router to leaders, a decode leader to a prefill leader, a leader to its followers."""

    room: int
    life: str = ""  # of the prefill instance that a decode leader means: no other can speak for it


class Dropped(KvMessage, frozen=True):
    """A leader to the router: the room is given up here; *untouched* if none of its bytes can have moved."""

    room: int
    untouched: bool


class Released(KvMessage, frozen=True):
    """A prefill leader to a decode leader: nothing of the aborted room is or will be written any more."""

    room: int


def _kinds(base: type[KvMessage]) -> Iterator[type[KvMessage]]:
    for kind in base.__subclasses__():
        yield from (kind, *_kinds(kind))


_Any: Any = reduce(or_, _kinds(KvMessage))
_PREFIX = bytes([VERSION])
_REFUSAL = b"\0"  # no version has this number
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Any).decode


def encode(message: KvMessage) -> bytes:
    """Return the bytes of *message*."""
    return _PREFIX + _encode(message)


def refusal(reason: str) -> bytes:
    """Return the bytes that refuse a rank, in a form that every version of the schema understands."""
    return _REFUSAL + reason.encode()


def decode(payload: bytes) -> KvMessage:
    """Return the message in *payload*.

    Raise a `Refused` if it is a `refusal`, else a `MessageError` that names what was got and expected; nothing else.
    """
    if not payload or payload[0] != VERSION:
        if payload[:1] == _REFUSAL:
            raise Refused(payload[1:].decode(errors="replace"))
        got = f"schema version {payload[0]}" if payload else "an empty message"
        raise MessageError(f"{got}, but this rank speaks version {VERSION}: run the same pdsim on every rank")
    try:
        return _decode(payload[1:])  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, ValueError) as error:  # msgspec leaves text that is not UTF-8 to the codec's error
        raise MessageError(f"not a message of schema version {VERSION}: {error}") from None
