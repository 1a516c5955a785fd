"""Messages between supervisor and workers arrive whole, whatever their size and however they are cut."""

import socket
import threading

import pytest

from backends.jobs import supervision
from pdsim.core.errors import MessageError
from pdsim.transfer import TransferRecord

RECORD = TransferRecord("engine", "write", "a", "b", 1 << 40, 3, 0.1, 0.2, 0.3, 0.4, 0.5, "ok", "chunk 0")


def encoded(message, monkeypatch=None):
    class Sink:
        data = b""

        def sendall(self, data):
            self.data += data

    sink = Sink()
    supervision.send(sink, message)
    return sink.data


def test_a_hundred_thousand_records_cross():
    done = supervision.Done({"x": 1}, "", "engine", [RECORD] * 100_000, {}, 5, 0)
    (found,) = supervision.Decoder().feed(encoded(done))
    assert found == done
    assert found.transfers[0] == RECORD
    assert isinstance(found.transfers[0], TransferRecord)


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


def test_a_message_of_many_pieces_is_received_whole():
    here, there = socket.socketpair()
    with here, there:
        go = supervision.Go(0.0, {f"rank{number}": "tcp://" for number in range(20_000)}, 1.0, True)
        sender = threading.Thread(target=supervision.send, args=(here, go))
        sender.start()
        assert supervision.receive(there, supervision.Go) == go
        sender.join()
