"""Messages between supervisor and workers arrive whole, whatever their size and however they are cut."""

import socket

import pytest

from backends.jobs import supervision
from pdsim.core.errors import MessageError


def encoded(message):
    here, there = socket.socketpair()
    with here, there:
        supervision.send(here, message)
        return there.recv(1 << 16)


def test_pieces_are_put_together():
    messages = [supervision.WorkerReady(f"tcp://127.0.0.1:{port}") for port in range(5)]
    data = b"".join(encoded(message) for message in messages)
    decoder, found = supervision.Decoder(), []
    for index in range(len(data)):
        found += decoder.feed(data[index : index + 1])
    assert found == messages


@pytest.mark.parametrize("data", [b"\xff" * 8, b"\x03" + b"\0" * 7 + b"\x93\xa1\x93", b"\x01" + b"\0" * 7 + b"\xc1"])
def test_what_is_no_message_is_refused(data: bytes):
    with pytest.raises(MessageError):
        supervision.Decoder().feed(data)


def test_what_follows_a_message_stays_on_the_connection():
    """A rank that was told of a move with the word to go did not know where the other one was, for ever."""
    here, there = socket.socketpair()
    with here, there:
        go, moved = supervision.Go(0.0, {"a": ""}, 1.0, True), supervision.Moved("a", "tcp://127.0.0.1:1")
        here.sendall(encoded(go) + encoded(moved))
        assert supervision.receive(there, supervision.Go) == go
        assert supervision.Decoder().feed(there.recv(1 << 16)) == [moved]
