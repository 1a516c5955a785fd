"""Messages have a type, a schema and a version; anything else is refused with both values."""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdsim.core.errors import MessageError
from pdsim.kv import messages
from pdsim.kv.messages import (
    VERSION,
    Abort,
    Chunk,
    Destination,
    Forward,
    KvMessage,
    Ping,
    Submit,
    TransferDone,
    decode,
    encode,
)

CHUNK = Chunk(3, "decode0", 1, 4, 400, ((5, 6, 2),), True, (0, 1), 0.25, 0.5)
SOME = [
    Ping(),
    Submit(1, 100, 10, "prefill0", "decode1"),
    Destination("prefill0@1", 1, 10, ((0, 2), (7, 1)), 3),
    Forward("prefill0@1", 0.5, (CHUNK,)),
]


@pytest.mark.parametrize("message", SOME, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: KvMessage):
    assert decode(encode(message)) == message


def test_pages_come_back_as_tuples_so_that_they_can_be_looked_up():
    found = decode(encode(Forward("prefill0@1", 0.5, (CHUNK,))))
    assert isinstance(found, Forward)
    assert hash(found.chunks[0].runs) == hash(CHUNK.runs)


def test_another_version_is_refused_with_both():
    payload = bytes([VERSION + 1]) + encode(Ping())[1:]
    with pytest.raises(MessageError, match=f"schema version {VERSION + 1}, but this rank speaks version {VERSION}"):
        decode(payload)


def test_an_unknown_type_is_refused():
    payload = bytes([VERSION]) + msgspec.msgpack.encode(["Gossip", 1])
    with pytest.raises(MessageError, match="Gossip"):
        decode(payload)


def test_a_field_of_a_wrong_type_is_refused_with_both_types():
    payload = bytes([VERSION]) + msgspec.msgpack.encode(["Submit", "one", 100, 10, "prefill0", "decode1"])
    with pytest.raises(MessageError, match="Expected `int`, got `str`"):
        decode(payload)


@pytest.mark.parametrize("payload", [b"", bytes([VERSION]), bytes([VERSION]) + b"\xc1", b"\x80pickle"])
def test_bytes_that_are_no_message_are_refused(payload: bytes):
    with pytest.raises(MessageError):
        decode(payload)


@pytest.mark.parametrize("text", ["prefill0/decode_1.2@3", "a|b,c;d:e", "\\0\n\t", "\u00fc\u2014\U0001f680", ""])
def test_text_may_contain_whatever_others_use_as_a_separator(text: str):
    for message in (Submit(1, 100, 10, text, text), TransferDone(1, 0, text, text), Abort(1, text)):
        assert decode(encode(message)) == message


def test_no_message_has_other_fields_than_its_version_has():
    kinds = sorted(
        (kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)),
        key=lambda kind: kind.__name__,
    )
    text = ";".join(f"{kind.__name__}({','.join(kind.__struct_fields__)})" for kind in kinds)
    assert (VERSION, sha256(text.encode()).hexdigest()[:12]) == (
        11,
        "8f9c0af5fbbc",
    )  # a change of fields raises VERSION


# --- whatever anybody may send

SEEDS = [
    b"\x08\x93\xa1\x93",  # a type that is not text
    bytes([VERSION]) + b"\x96\xa6Submit\x01d\n\xa8pre\xe6ill0\xa7decode1",  # a field that is not
    bytes([VERSION]) + b"\x91" * 10_000,
    bytes([VERSION]) + b"\xdd\xff\xff\xff\xff",  # an array of four thousand million
    bytes([VERSION]) + b"\xc6\xff\xff\xff\xff",
]


@pytest.mark.parametrize("payload", SEEDS, ids=lambda payload: repr(payload[:12]))
def test_known_seeds_are_refused_and_nothing_else(payload: bytes):
    with pytest.raises(MessageError):
        decode(payload)


@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=64))
@example(b"\x93\xa1\x93")
def test_any_bytes_are_a_message_or_a_message_error(payload: bytes):
    for whole in (payload, bytes([VERSION]) + payload):
        with suppress(MessageError):
            decode(whole)


@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(SOME), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4))
def test_any_damaged_message_is_a_message_or_a_message_error(message: KvMessage, damage: list[tuple[int, int]]):
    payload = bytearray(encode(message))
    for at, value in damage:
        payload[1 + at % (len(payload) - 1)] = value
    with suppress(MessageError):
        decode(bytes(payload))
