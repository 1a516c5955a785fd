"""Messages have a type, a schema and a version, or are refused; the status of a room, on a rank and of a group."""

from hashlib import sha256
from itertools import product

import msgspec
import pytest

from pdsim.core.errors import MessageError
from pdsim.kv import messages
from pdsim.kv.messages import (
    VERSION,
    Abort,
    Chunk,
    Consensus,
    Destination,
    Forward,
    Forwards,
    Ping,
    Status,
    Submit,
    TransferDone,
    advance,
    decode,
    encode,
)

CHUNK = Chunk(3, "decode0", 1, 4, 400, ((5, 6, 2),), True, (0, 1), 0.25, 0.5)
ODD = ["prefill0/decode_1.2@3", "a|b,c;d:e", "\\0\n\t", "\u00fc\u2014\U0001f680", ""]
SOME = [
    Ping(),
    Destination("prefill0@1", 1, 10, ((0, 2), (7, 1)), 3),
    Forward("prefill0@1", 0.5, (CHUNK,)),
    Forwards("prefill0@1", 0.5, (CHUNK,), more=(0.25, 0.5)),
    *(Submit(1, 100, 10, text, text) for text in ODD),
    *(kind for text in ODD for kind in (TransferDone(1, 0, text, text), Abort(1, text))),
]
PREFIX = bytes([VERSION])


@pytest.mark.parametrize("message", SOME, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire_with_tuples(message):
    assert decode(bytes(encode(message))) == message
    if isinstance(message, Forward):
        assert hash(decode(bytes(encode(message))).chunks[0].runs) == hash(CHUNK.runs)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (bytes([VERSION + 1]) + encode(Ping())[1:], f"schema version {VERSION + 1} where version {VERSION} is"),
        (PREFIX + msgspec.msgpack.encode(["Gossip", 1]), "Gossip"),
        (PREFIX + msgspec.msgpack.encode(["Submit", "one", 100, 10, "p", "d"]), "Expected `int`, got `str`"),
        *((payload, "") for payload in (b"", PREFIX, PREFIX + b"\xc1", b"\x80pickle")),
        (b"\x08\x93\xa1\x93", ""),  # a type that is not text
        (PREFIX + b"\x96\xa6Submit\x01d\n\xa8pre\xe6ill0\xa7decode1", ""),  # a field that is not
        (PREFIX + b"\x91" * 10_000, ""),
        (PREFIX + b"\xdd\xff\xff\xff\xff", ""),  # an array of four thousand million
        (PREFIX + b"\xc6\xff\xff\xff\xff", ""),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_what_is_no_message_of_this_version_is_refused(payload, words):
    with pytest.raises(MessageError, match=words or None):
        decode(payload)


def test_a_change_of_fields_raises_the_version():
    kinds = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    fields = sorted(f"{kind.__name__}({','.join(kind.__struct_fields__)})" for kind in kinds)
    assert (VERSION, sha256(";".join(fields).encode()).hexdigest()[:12]) == (17, "770547253dfb")


@pytest.mark.parametrize(("old", "new"), list(product(Status, Status)))
def test_no_status_goes_back(old, new):
    over = old in (Status.FAILED, Status.SUCCESS)
    assert advance(old, new) is (old if over else Status.FAILED if new is Status.FAILED else max(old, new))


def test_a_room_ends_once_by_all_ranks_or_one_failure():
    room = Consensus(3)
    assert [room.succeed(rank) for rank in (0, 2, 2, 0, 1)] == [False, False, False, False, True]
    assert [room.succeed(0), room.fail(), room.settle(0), room.status] == [False, False, False, Status.SUCCESS]
    room = Consensus(2)
    assert [room.settle(0), room.succeed(0), room.fail(), room.fail()] == [False, False, True, False]
    assert [room.succeed(1), room.status] == [False, Status.FAILED]
    assert [room.settle(rank) for rank in (0, 0, 1, 1)] == [False, False, True, False]
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        Consensus(2).succeed(2)
