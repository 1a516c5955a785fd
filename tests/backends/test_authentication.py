"""What other processes of this machine can do to a rank: nothing, and the rank counts that they tried.

The attacker here is this process.
"""

import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from backends.base import zmq_channel
from backends.base.control import Control, fields
from backends.base.zmq_channel import Keys, ZmqChannel, job_keys
from backends.jobs import launcher
from backends.jobs.spawn import spawn
from pdsim.core.clock import WallClock
from pdsim.core.errors import PeerLost
from pdsim.kv.messages import Stop, TransferDone, encode
from tests.backends import programs
from tests.support.engines import spec

FORGED = [[encode(Stop())], [b"\xff\xfe", b"\x08"], [b"router", encode(TransferDone(1, 1)), b"group", b"more"]]


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


def attack(context, uri, frames, prepare=None, seconds=0.3):
    """Send *frames* to *uri* as a process outside the job can; *prepare* is called with the socket."""
    pushed = context.socket(zmq.PUSH)
    pushed.linger = 0
    if prepare is not None:
        prepare(pushed)
    pushed.connect(uri)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(zmq.Again):
            pushed.send_multipart(frames, zmq.NOBLOCK)
        time.sleep(0.02)
    pushed.close()


class Pair:
    """Two ranks' channels in this process, on one clock; *heard* is what b has received."""

    def __init__(self) -> None:
        self.keys = job_keys("ab")
        self.clock = WallClock()
        self.a, self.b = (ZmqChannel(self.clock, self.keys[name]) for name in "ab")
        for one in (self.a, self.b):
            one.open({"a": self.a.uri, "b": self.b.uri})
        self.heard: list[tuple[str, bytes]] = []

    def run(self, seconds: float = 0.3) -> list[tuple[str, bytes]]:
        self.clock.run(until=self.clock.now + seconds)
        return self.heard

    def connections(self) -> int:
        """Return how many connections there are to b's port."""
        port = int(self.b.uri.rpartition(":")[2])
        every = psutil.Process().net_connections()
        return sum(each.status == psutil.CONN_ESTABLISHED and port == each.laddr.port for each in every)

    def still_hears(self) -> bool:
        self.a.send("b", b"still here")
        return self.run() == [("a", b"still here")]


@pytest.fixture
def deaf():
    """A pair of which b's program reads nothing yet."""
    pair = Pair()
    yield pair
    pair.a.close()
    pair.b.close()


@pytest.fixture
def pair(deaf):
    deaf.b.subscribe(lambda message: deaf.heard.append(tuple(message)))
    return deaf


@pytest.mark.parametrize("frames", FORGED, ids=lambda frames: repr(frames)[:40])
def test_who_has_no_keys_is_not_heard_and_counted(pair, context, frames):
    attack(context, pair.b.uri, frames)
    assert pair.still_hears()
    assert pair.b.refused >= 1


def foreign(ours: dict[str, Keys]) -> Keys:
    """Return keys of another job, whose owner has got hold of the public key of rank b."""
    theirs = job_keys("ab")["a"]
    assert set(theirs.public.values()).isdisjoint(ours["a"].public.values())
    return Keys("a", theirs.secret, {**theirs.public, "b": ours["a"].public["b"]})


def test_keys_of_another_job_are_not_heard_and_counted(pair, context):
    attack(context, pair.b.uri, [encode(Stop())], lambda pushed: foreign(pair.keys).dial(pushed, "b"))
    assert pair.run() == []
    assert pair.b.refused >= 1


def test_a_rank_cannot_speak_for_another(pair, context):
    """The name of the sender is not in the message: its key is what names it."""
    attack(context, pair.b.uri, [b"said"], lambda pushed: pair.keys["a"].dial(pushed, "b"))
    assert set(pair.run()) == {("a", b"said")}


def test_a_refused_rank_is_ignored_until_it_restarts(pair):
    pair.a.send("b", b"first")
    pair.run()
    pair.b.refuse("a")
    pair.a.send("b", b"second")
    assert pair.run() == [("a", b"first")]
    assert pair.connections() == 0
    pair.b.open({"a": pair.a.uri})
    pair.a.open({"b": pair.b.uri})
    pair.a.send("b", b"third")
    assert pair.run() == [("a", b"first"), ("a", b"third")]
    assert pair.b.refused == 2


def test_frames_that_are_too_many_are_refused(pair):
    pair.a.send("b", b"payload", b"topic", b"more")
    pair.a.send("b", b"never heard")
    assert pair.run() == []
    assert pair.b.refused >= 1


def test_a_message_too_large_for_the_receiver_ends_the_connection(monkeypatch, request):
    monkeypatch.setattr(zmq_channel, "LARGEST", 10)
    pair = request.getfixturevalue("pair")
    monkeypatch.setattr(zmq_channel, "LARGEST", 1000)
    pair.a.send("b", b"x" * 11)
    assert (pair.run(), pair.connections()) == ([], 0)


def test_a_receiver_that_does_not_read_counts_as_gone(monkeypatch, request):
    monkeypatch.setattr(zmq_channel, "QUEUE", 10)
    pair = request.getfixturevalue("pair")
    pair.a.send("b", b"connected")
    assert pair.run() == [("a", b"connected")]
    for _ in range(20_000):  # the kernel's buffers take some
        pair.a.send("b", b"x" * 1000)
    assert pair.a._sockets["b"] is None
    assert len(pair.run()) < 20_000  # what was sent is whole and in order; what was not is lost with the connection


def test_more_than_a_program_reads_waits_and_nothing_is_lost(monkeypatch, request):
    monkeypatch.setattr(zmq_channel, "QUEUE", 10)
    pair = request.getfixturevalue("deaf")

    def write() -> Any:  # slowly, or a busy machine would not send one before the next ten
        for number in range(100):
            pair.a.send("b", b"%d" % number)
            yield pair.clock.timeout(2e-3)

    pair.clock.run(pair.clock.process(write()))
    pair.run(0.1)  # meanwhile the socket fills, not the mailbox
    assert len(pair.b._received) == 10

    def read() -> Any:
        for number in range(30):
            assert (yield pair.b.receive()).payload == b"%d" % number

    pair.clock.run(pair.clock.process(read()))


def test_keys_are_not_shown():
    keys = job_keys("a")["a"]
    assert keys.secret not in repr(keys) + str(keys)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(keys), type=Keys) == keys


def test_no_key_is_in_a_command_line_or_an_environment(processes, monkeypatch):
    made: dict[str, Keys] = {}
    monkeypatch.setattr(launcher, "job_keys", lambda names: made.update(job_keys(names)) or made)
    shown = replace(processes, spawn=spawn).run([spec("a", programs.identify)]).ranks["a"].value[3]
    assert "backends.jobs.worker" in shown
    assert made["a"].secret not in shown


@pytest.mark.parametrize(
    "note", [[b"one"], [b"odd"], [b"number", b"x"], [b"number"], [b"hello", b"\xc1"], [b"hello"]]
)
def test_what_is_no_note_loses_the_line_and_nothing_else(note):
    clock, keys, lost = WallClock(), job_keys("ab"), []
    read: Any = {b"number": lambda _, body: fields(body, int)}
    a, b = (Control(clock, keys[name], "127.0.0.1", read, lost.append) for name in "ab")
    line = a.reach(b.card, 5.0)
    clock.run(until=clock.now + 0.1)
    assert [other.name for other in b.lines] == ["a"]
    kind, *body = note
    if kind == b"one":
        line.socket.send_multipart([kind])
    else:
        a.send(line, kind, *body)
    clock.run(until=clock.now + 0.3)
    assert b.refused == 1
    assert [gone.name for gone in lost if gone in b.known("a")] == ["a"]
    a.close(clean=False)
    b.close(clean=False)


def test_an_endpoint_of_another_job_cannot_connect():
    clock, keys = WallClock(), job_keys("ab")
    a, b = (Control(clock, one, "127.0.0.1", {}, print) for one in (foreign(keys), keys["b"]))
    with pytest.raises(PeerLost, match="refused the connection"):
        a.reach(b.card, 5.0)
    a.close(clean=True)
    b.close(clean=True)


@pytest.mark.parametrize("frames", FORGED, ids=lambda frames: repr(frames)[:40])
def test_an_endpoint_does_not_hear_who_has_no_keys(context, frames):
    clock = WallClock()
    control = Control(clock, job_keys("ab")["b"], "127.0.0.1", {}, print)
    attack(context, control.card.uri, frames)
    clock.run(until=clock.now + 0.3)
    assert (list(control.lines), control.refused >= 1) == ([], True)
    control.close(clean=True)
