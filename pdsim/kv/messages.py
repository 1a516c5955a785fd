# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other, as typed messages with a schema version; how ranks are named; the status of a room.

One byte of version, then MessagePack of an array ``[type, fields...]``; nothing is ever pickled.  Times are seconds
on the job's clock, pages are those of the receiver's or sender's instance, rooms are positive.  *incarnation* is
that of the instance that a message is meant for: it may find the next one, which ignores it.
"""

from enum import IntEnum
from functools import lru_cache, reduce
from operator import or_
from typing import Any

import msgspec

from pdsim.core.errors import MessageError
from pdsim.kv.layout import AUX_ROWS, KvLayout
from pdsim.kv.pages import Pages, Runs

VERSION = 17
"""Of the schema; to be raised with every change of a message's fields."""


OVER = 600.0
"""Seconds for which a room that failed is remembered, so that no late message revives it: far longer than any
message or notification takes, and short enough to keep few of them."""


class Refused(MessageError):
    """Another rank refuses this one, and says why."""


class KvMessage(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages."""


# --- connecting ----------------------------------------------------------------------------------------------------


class KvSpec(msgspec.Struct, frozen=True, array_like=True):
    """What all ranks of a job must have alike."""

    page_size: int  # tokens
    kv_dtype: str  # of an element of KV, by name: two of one width are not the same numbers


class RegisterRank(KvMessage, frozen=True):
    """A rank to the bootstrap service, once after its start: here I am."""

    instance: str
    index: int  # of the rank in its group
    started: int  # nanoseconds on the job's clock at which this rank started
    spec: KvSpec


class ConnectPeer(KvMessage, frozen=True):
    """The bootstrap service to each rank of two instances, before their first room: connect to the other one."""

    incarnation: str
    peer: str  # the other's incarnation
    started: int  # of the receiver, as it registered: a rank that was started again since is not meant


class RegisterPool(KvMessage, frozen=True):
    """A rank to those that will read or write its pool: how to reach it and how it is laid out."""

    incarnation: str  # of the receiver
    address: bytes
    instance: str  # the incarnation of the sender
    index: int  # of the rank in its group
    layout: KvLayout
    metadata_rows: tuple[int, ...] = AUX_ROWS  # bytes of each row of first-token metadata


class Ping(KvMessage, frozen=True):
    """The router to every rank: answer `Pong`."""


class Pong(KvMessage, frozen=True):
    """Every rank to the router: still here; *busy* if work for requests goes on, or did since the last ping."""

    busy: bool


class Gone(KvMessage, frozen=True):
    """A rank to the router: this incarnation cannot be reached; the router to ranks: this instance is given up."""

    instance: str
    reason: str
    until: int = -1  # ranks of the instance end that were started by then


class Fence(KvMessage, frozen=True):
    """A leader to its ranks: say when it is proven that nothing of the lost instance *peer* moves here any more."""

    number: int  # never that of another incarnation of the leader
    peer: str  # the incarnation of an instance


class Fenced(KvMessage, frozen=True):
    """The answer to `Fence`, once it is proven."""

    number: int


class Stop(KvMessage, frozen=True):
    """The router to every rank: nothing more will come."""


class Leave(KvMessage, frozen=True):
    """The router to every rank of an instance without requests: it is no member any more, and ends."""


# --- a request -----------------------------------------------------------------------------------------------------


class RequestHints(msgspec.Struct, frozen=True, array_like=True):
    """What a scheduler may want to know of a request beside its length."""

    blocks: tuple[int, ...] = ()  # hashes of the prompt's blocks, each with all before it
    priority: int = 0  # the higher goes first


class PrefillDone(KvMessage, frozen=True):
    """A prefill leader to the router: the prompt is computed, and its KV stays here under a lease, to be pulled."""

    room: int
    instance: str  # the incarnation that has it
    pages: Pages
    state: tuple[Pages, ...]  # the rows of each component, in the order of `StateShape.components`
    noticed: float  # the prefill leader had the request
    started: float  # its first forward began
    ended: float  # its last forward ended


class Submit(KvMessage, frozen=True):
    """The router to one prefill and one decode leader: serve this request together."""

    room: int
    input: int  # tokens
    output: int  # tokens
    prefill: str  # incarnation; "" for a decode leader that has to ask (`RoomQuery`)
    decode: str  # incarnation
    hints: RequestHints | None = None
    source: PrefillDone | None = None  # where the KV is, for a decode leader that pulls it


class RoomQuery(KvMessage, frozen=True):
    """A decode leader to the bootstrap service: say which prefill instance has each of these rooms."""

    rooms: tuple[int, ...]
    instance: str  # the incarnation that asks


class RoomLocations(KvMessage, frozen=True):
    """Which incarnation has each room: a prefill leader to the bootstrap service, or its answer to `RoomQuery`."""

    instances: dict[int, str]
    incarnation: str = ""  # that asked


class Destination(KvMessage, frozen=True):
    """A decode leader to a prefill leader: write there; to its followers, where memory has contents: look there."""

    incarnation: str
    room: int
    input: int  # tokens
    pages: Pages
    slot: int
    state: tuple[Pages, ...] = ()  # the rows of each component, in the order of `StateShape.components`
    held: int = 0  # first pages, which *pages* and index rows leave out


class ReadRequest(KvMessage, frozen=True):
    """A decode leader to its followers: read your part of this room, from its pages at prefill into these."""

    incarnation: str
    room: int
    input: int  # tokens
    prefill: str  # the incarnation that has it
    source: Pages
    pages: Pages
    source_state: tuple[Pages, ...] = ()
    state: tuple[Pages, ...] = ()


class ReadDone(KvMessage, frozen=True):
    """Decode's leader to prefill's: nothing of this room is or will be read; prefill's echo if it notices."""

    incarnation: str
    room: int
    nbytes: int  # that were read; 0 if it was given up


class Renew(KvMessage, frozen=True):
    """A decode leader to a prefill leader, every few seconds: these rooms are still wanted."""

    incarnation: str
    rooms: tuple[int, ...]


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a request that one prefill forward covers, and the pages to write after it."""

    room: int
    decode: str  # incarnation
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

    incarnation: str
    seconds: float
    chunks: tuple[Chunk, ...]
    cached: tuple[Chunk, ...] = ()  # to write at once, which need no forward
    tokens: tuple[int, ...] = ()  # that travel to experts or, of each chunk, that context-parallel ranks gather


class Forwards(Forward, frozen=True):
    """As `Forward`, of one chunk, and of forwards that follow at once: each has as many of its pages."""

    more: tuple[float, ...] = ()  # seconds


class Offload(KvMessage, frozen=True):
    """A leader to its followers: move so many bytes of your pages to host memory, and so many *back*."""

    incarnation: str
    nbytes: int
    back: int


class TierMove(msgspec.Struct, frozen=True, array_like=True):
    """So many *nbytes*, in so many *objects*, of each rank, to a tier or from it."""

    tier: str  # of `pdsim.kv.tiers.TIERS`
    nbytes: int
    objects: int
    node: int = -1  # that has them; -1: the rank's own


class MovePrefixes(KvMessage, frozen=True):
    """A prefill leader to its followers: write pages of prefixes to tiers, and read others from them."""

    incarnation: str
    nbytes: int  # that leave the GPU's memory
    writes: tuple[TierMove, ...]  # from host memory on, when they are there
    reads: tuple[TierMove, ...]
    number: int = 0  # of those that write
    prefetch: bool = False  # read into host memory only
    blocking: bool = False  # the next forward waits for what leaves the GPU's memory


class PrefixesWritten(KvMessage, frozen=True):
    """A follower to its leader: all that `MovePrefixes` of that *number* has for *tier* is there."""

    incarnation: str
    number: int
    tier: str


class Arrival(KvMessage, frozen=True):
    """With each write of a chunk, or once after all of a room; *count*, with the last, is how many there were."""

    incarnation: str  # of the decode instance
    room: int
    writer: int  # index of the rank in its group
    count: int
    pages: int  # of the request, without those that were held: they decide how many ranks write
    noticed: float
    started: float
    ended: float  # when the forward of the last chunk ended
    chunk: int = -1  # whose slot of the staging ring was written; -1 if pages were
    rows: tuple[bytes, ...] = ()  # of first-token metadata, as a message instead of a write


class StagingRequest(KvMessage, frozen=True):
    """A prefill rank to a decode rank, before a forward: a slot of the staging ring for this chunk, please."""

    incarnation: str
    room: int
    writer: int
    chunk: int
    size: int  # bytes of its block
    pages: Pages  # of the decode rank, in the order of the block
    prefill: str  # incarnation that asks


class StagingReply(KvMessage, frozen=True):
    """A decode rank to a prefill rank: the answer to `StagingRequest`.  A negative *position* is a refusal."""

    room: int
    chunk: int
    position: int  # in the ring; its remainder by the ring's size is the offset


class StagingRelease(KvMessage, frozen=True):
    """A prefill rank to a decode rank: nothing of the failed room moves any more, all its slots are free."""

    room: int
    writer: int


class TransferDone(KvMessage, frozen=True):
    """A rank to its leader, or a leader to the router: the transfer of a room is over; with a *reason* it failed."""

    room: int
    nbytes: int = 0
    reason: str = ""
    lost: str = ""  # the instance that is gone, if that is why


class RankQuiesced(KvMessage, frozen=True):
    """A rank to its leader: nothing of the failed room moves here; a prefill leader to decode's: on no rank here."""

    room: int


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
    first: float | None = None  # the first token left decode's server, if later; *finished* is then the last one's
    asked: float | None = None  # decode heard of it, if only when prefill had answered


class Abort(KvMessage, frozen=True):
    """Give the room up: the router to leaders, one leader to the other, a leader to its followers."""

    room: int
    incarnation: str = ""  # of the other leader's instance: no other can speak for it
    prefill: str = ""  # incarnation that waits for a `ReadDone`


class Dropped(KvMessage, frozen=True):
    """A leader to the router: the room is given up here; *untouched* if none of its bytes can have moved."""

    room: int
    untouched: bool


KINDS: tuple[type[KvMessage], ...] = (*KvMessage.__subclasses__(), Forwards)
_Any: Any = reduce(or_, KINDS)
_PREFIX = bytes([VERSION])
_REFUSAL = b"\0"  # no version has this number
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Any).decode


class Encoded(bytes):
    """The bytes of *message*, which a receiver in the same process takes as it is."""

    message: KvMessage


def encode(message: KvMessage) -> bytes:
    """Return the bytes of *message*."""
    encoded = Encoded(_PREFIX + _encode(message))
    encoded.message = message
    return encoded


def refusal(reason: str) -> bytes:
    """Return the bytes that refuse a rank, in a form that every version of the schema understands."""
    return _REFUSAL + reason.encode()


def decode(payload: bytes) -> KvMessage:
    """Return the message in *payload*.

    Raise a `Refused` if it is a `refusal`, else a `MessageError` that names what was got and expected; nothing else.
    """
    if isinstance(payload, Encoded):
        return payload.message
    if not payload or payload[0] != VERSION:
        if payload[:1] == _REFUSAL:
            raise Refused(payload[1:].decode(errors="replace"))
        got = f"schema version {payload[0]}" if payload else "an empty message"
        raise MessageError(f"{got} where version {VERSION} is spoken: run the same pdsim on every rank")
    try:
        read: KvMessage = _decode(payload[1:])
    except (msgspec.MsgspecError, ValueError) as error:  # msgspec leaves text that is not UTF-8 to the codec's error
        raise MessageError(f"not a message of schema version {VERSION}: {error}") from None
    return read


# --- names of ranks ------------------------------------------------------------------------------------------------

ROUTER = "router"


@lru_cache(4096)
def rank_name(instance: str, index: int) -> str:
    """Return the name of the *index*-th rank: ``rank_name("prefill0", 1) == "prefill0.1"``."""
    return f"{instance}.{index}"


@lru_cache(4096)
def leader(name: str) -> str:
    """Return the rank that schedules for the instance, or the incarnation of one, called *name*."""
    return rank_name(instance_of(name), 0)


@lru_cache(4096)
def incarnation_name(instance: str, epoch: int) -> str:
    """Return the name of one incarnation of an instance: ``incarnation_name("prefill0", 2) == "prefill0@2"``."""
    return f"{instance}@{epoch}"


@lru_cache(4096)
def epoch_of(incarnation: str) -> int:
    """Return the epoch of *incarnation*: the inverse of `incarnation_name`."""
    return int(incarnation.partition("@")[2])


@lru_cache(4096)
def instance_of(name: str) -> str:
    """Return the instance that the rank or the incarnation called *name* belongs to.

    >>> instance_of("prefill0d1.3"), instance_of("decode2@4"), leader("decode2@4")
    ('prefill0d1', 'decode2', 'decode2.0')
    """
    return name.partition(".")[0].partition("@")[0]


@lru_cache(4096)
def index_of(rank: str) -> int:
    """Return the number of *rank* in its group: the inverse of `rank_name`."""
    return int(rank.partition(".")[2])


# --- the status of a room ------------------------------------------------------------------------------------------


class Status(IntEnum):
    """The states of a handoff, in order; the minimum over the ranks of a group is the status of the group.

    ::

        BOOTSTRAPPING -> WAITING -> TRANSFERRING -> SUCCESS
              |             |            |
              +-------------+------------+--------> FAILED

    SUCCESS and FAILED absorb (`advance`); invariant I1 of `docs/faults.md` checks that.
    """

    FAILED = 0
    BOOTSTRAPPING = 1  # the other side has not been heard of
    WAITING = 2  # for input: pages are known, no bytes have moved
    TRANSFERRING = 3
    SUCCESS = 4


def advance(old: Status, new: Status) -> Status:
    """Return the status after *old* when *new* is reported: FAILED and SUCCESS absorb, and nothing goes back.

    >>> advance(Status.TRANSFERRING, Status.WAITING).name, advance(Status.FAILED, Status.SUCCESS).name
    ('TRANSFERRING', 'FAILED')
    """
    if old is Status.FAILED or old is Status.SUCCESS:
        return old
    return new if new is Status.FAILED or new > old else old


class Consensus:
    """The status of one room in a group of *size* ranks, kept by its leader: the least that any of them has.

    `succeed` by each rank, or `fail` once and then `settle` by each rank.  SGLang takes that minimum by a collective
    before each step of the scheduler.  Raise a `ValueError` for a rank that the group does not have.
    """

    __slots__ = ("_reported", "_size", "status")

    def __init__(self, size: int) -> None:
        self._size = size
        self._reported: set[int] = set()
        self.status = Status.WAITING

    @property
    def over(self) -> bool:
        """Whether the status is final: it never changes any more."""
        return self.status is Status.FAILED or self.status is Status.SUCCESS

    def succeed(self, rank: int) -> bool:
        """Record that *rank* has done its part, however often it says so; return whether that ends the room."""
        if self.over or not self._is_last(rank):
            return False
        self.status = Status.SUCCESS
        return True

    def fail(self) -> bool:
        """Record that the room has failed on some rank; return whether that ends it, which it does once."""
        if self.over:
            return False
        self.status = Status.FAILED
        self._reported.clear()
        return True

    def settle(self, rank: int) -> bool:
        """Record that of the failed room nothing moves on *rank*; return whether that was the last to say so."""
        return self.status is Status.FAILED and rank not in self._reported and self._is_last(rank)

    def _is_last(self, rank: int) -> bool:
        if not 0 <= rank < self._size:
            raise ValueError(f"rank {rank} is not one of {self._size}")
        self._reported.add(rank)
        return len(self._reported) == self._size
