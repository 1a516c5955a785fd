# SPDX-License-Identifier: Apache-2.0
"""Control messages over pyzmq: the wall clock's `Channel`.

Each rank binds one PULL socket and connects a PUSH socket to every rank that it sends to: sending may swallow the
edge of a ZeroMQ descriptor that tells of receiving.  Every connection is CURVE: encrypted, and accepted only from a
rank of the same job.  The connection, not the message, says who the sender is.  Keys reach a rank on the socket pair
that its process inherits, and end with the job.  Engines keep ports of their own, which this does not protect.
"""

import errno
import os
import socket as sockets
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import zmq
from simpy.events import Event
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from pdsim.core.clock import Mailbox, WallClock
from pdsim.core.errors import BackendUnavailable, MessageError, TransferFailed
from pdsim.transfer import Message, Program

LINGER_MS = 2000
"""Milliseconds for which `close` goes on sending what is queued; a live receiver takes it in microseconds."""

LARGEST = 64 << 20  # bytes of a message: a forward over a million tokens in pages of one has 20 MB
QUEUE = 100_000  # messages that wait at either end of a connection; a receiver that is further behind counts as gone
FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""Events of a socket's monitor that say that a handshake has failed."""

WIDEN = "end what holds them, or widen net.ipv4.ip_local_port_range"
_BEGUN = zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECTED
_BEGINNING_MS = 1000  # in which libzmq's thread begins to connect, or cannot: microseconds, if it gets a processor
_ZAP = "inproc://zeromq.zap.01"  # where a context asks who may connect: RFC 27
_VERSION = b"1.0"


class Keys(msgspec.Struct, frozen=True):
    """The keys (Z85) of the rank called *name*: its *secret* one, and the *public* keys of all ranks."""

    name: str
    secret: str
    public: dict[str, str]

    def __repr__(self) -> str:
        return f"Keys(name={self.name!r}, {len(self.public)} ranks)"

    def dial(self, socket: Any, rank: str) -> None:
        """Have *socket* connect as this rank to *rank*, and to nobody else; before it connects.

        Raise a `TransferFailed` if that is not a rank of this job.
        """
        if rank not in self.public:
            raise TransferFailed(f"{rank!r} is not a rank of this job; there are {', '.join(self.public)}")
        socket.curve_serverkey = self.public[rank].encode()
        socket.curve_publickey = self.public[self.name].encode()
        socket.curve_secretkey = self.secret.encode()


def job_keys(names: Iterable[str]) -> dict[str, Keys]:
    """Return new keys for ranks called *names*.  Raise `BackendUnavailable` if libzmq was built without CURVE."""
    if not zmq.has("curve"):
        raise BackendUnavailable(
            "libzmq has no CURVE, so ranks cannot authenticate each other; pip install pyzmq anew"
        )
    pairs = {name: tuple(key.decode() for key in zmq.curve_keypair()) for name in names}
    public = {name: pair[0] for name, pair in pairs.items()}
    return {name: Keys(name, pair[1], public) for name, pair in pairs.items()}


class Authenticator:
    """Answers, on a thread of its own, which keys may connect to *socket*, before it is bound; ends with *context*.

    *refused* counts handshakes that failed there.
    """

    def __init__(self, context: Any, socket: Any, keys: Keys) -> None:
        self._names = {z85.decode(key): name for name, key in keys.public.items()}
        self._asked, self._failures = context.socket(zmq.REP), context.socket(zmq.PAIR)
        self._asked.linger = self._failures.linger = 0
        self._asked.bind(_ZAP)
        self._failures.rcvhwm = 0  # or a full queue would stop the thread that all connections share
        socket.monitor("inproc://failures", FAILURES)
        self._failures.connect("inproc://failures")
        self.refused = 0
        threading.Thread(target=self._serve, name="authenticator", daemon=True).start()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._asked, zmq.POLLIN)
        poller.register(self._failures, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    frames = socket.recv_multipart()
                    if socket is self._failures:
                        self.refused += 1
                        continue
                    name = self._names.get(frames[-1], "")
                    said = [b"200", b""] if name else [b"400", b"not a rank of this job"]
                    socket.send_multipart([_VERSION, frames[1], *said, name.encode(), b""])
        except zmq.ContextTerminated:
            self._asked.close()
            self._failures.close()


class Inbox:
    """A bound PULL socket as a `Source`: calls *deliver* with the sender, proven by its key, and the frames.

    A `MessageError` of *deliver*, and `drop`, drop the sender's connection.  While *full* is true nothing is taken,
    and *paused* says that something may wait; who makes room calls `poll`.
    """

    def __init__(
        self,
        context: Any,
        bind: str,
        deliver: Callable[[str, list[bytes]], None],
        keys: Keys,
        full: Callable[[], bool] = lambda: False,
    ) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.rcvhwm = QUEUE
        self._socket.maxmsgsize = LARGEST
        self._socket.linger = 0
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.secret.encode()
        self._socket.zap_domain = b"pdsim"  # without a domain libzmq asks nobody
        self._authenticator = Authenticator(context, self._socket, keys)
        try:
            self._port = self._socket.bind_to_random_port(f"tcp://{bind}")
        except zmq.ZMQError as error:
            raise BackendUnavailable(f"no port is free at {bind}: {error.strerror}; {WIDEN}") from None
        self.uri = f"tcp://{bind}:{self._port}"
        self._fd = int(self._socket.FD)
        self._deliver, self._full = deliver, full
        self._dropped: set[str] = set()
        self._refused = 0
        self.paused = False

    @property
    def refused(self) -> int:
        return self._refused + self._authenticator.refused

    def poll(self) -> bool:
        """Deliver everything that has arrived, unless *full*; return whether there was anything."""
        progressed = self.paused = False
        while not self._socket.closed and self._socket.get(zmq.EVENTS) & zmq.POLLIN:
            if self._full():
                self.paused = True
                break
            self._take(self._socket.recv_multipart(copy=False))
            progressed = True
        return progressed

    def fileno(self) -> int:
        return self._fd

    def busy(self) -> bool:
        return False

    def drop(self, sender: str) -> None:
        """Refuse what *sender* has sent; hear no more of it until it is `welcome`."""
        self._refused += 1
        self._dropped.add(sender)

    def welcome(self, sender: str) -> None:
        self._dropped.discard(sender)

    def close(self) -> None:
        self._socket.close()

    def _take(self, frames: list[Any]) -> None:
        sender: str = frames[0].get("User-Id")  # what the authenticator answered: no part of the message forges it
        try:
            if sender not in self._dropped:
                self._deliver(sender, [frame.bytes for frame in frames])
                return
        except MessageError:
            pass
        self.drop(sender)
        with suppress(OSError), sockets.socket(fileno=os.dup(frames[0].get(zmq.SRCFD))) as connection:
            if connection.getsockname()[1] == self._port:
                connection.shutdown(sockets.SHUT_RDWR)


def dial(context: Any, uri: str, keys: Keys, rank: str, prepare: Callable[[Any], None] = lambda _: None) -> Any:
    """Return a PUSH socket that is being connected to *rank* at *uri*; *prepare* is called with it before.

    It never reconnects, for another process may have the port by now.  Send with NOBLOCK; `zmq.Again` means that the
    connection is lost, or that *rank* has left `QUEUE` messages unread.  Raise a `TransferFailed` if *rank* is none
    of this job.
    """
    socket = context.socket(zmq.PUSH)
    socket.sndhwm = QUEUE
    socket.linger = LINGER_MS
    socket.reconnect_ivl = -1
    try:
        keys.dial(socket, rank)
    except BaseException:
        socket.close()
        raise
    prepare(socket)
    socket.connect(uri)
    return socket


def refusal(uri: str) -> str:
    """Return why *uri* cannot be connected to, which just failed."""
    host, _, port = uri.removeprefix("tcp://").rpartition(":")
    with sockets.socket() as probe:
        probe.setblocking(False)
        none = probe.connect_ex((host, int(port))) == errno.EADDRNOTAVAIL
    return f"no port is free to connect from; {WIDEN}" if none else "refused the connection"


class ZmqChannel:
    """Ordered messages between ranks; see `pdsim.transfer.Channel`.  Used on the clock's thread only.

    Messages with a topic do not reach the program: endpoints and groups use them.
    """

    def __init__(self, clock: WallClock, keys: Keys, bind: str = "127.0.0.1") -> None:
        self._keys = keys
        self._clock = clock
        self._context = zmq.Context()
        self._received = Mailbox(clock)
        self._inbox = Inbox(self._context, bind, self._deliver, keys, lambda: len(self._received) >= QUEUE)
        self._uris: dict[str, str] = {}
        self._sockets: dict[str, Any] = {}  # None: of a rank that is gone
        self._listeners: dict[bytes, Callable[[Message], None]] = {}
        self._unheard: dict[bytes, list[Message]] = {}
        self.uri = self._inbox.uri
        clock.watch(self._inbox)

    @property
    def refused(self) -> int:
        return self._inbox.refused

    def open(self, uris: Mapping[str, str]) -> None:
        """Learn where other ranks are: name to URI, which is empty while a rank is being started again.

        They are new processes: what was not sent yet to the old ones is lost, and they are heard though those were
        dropped.
        """
        for name in uris:
            socket = self._sockets.pop(name, None)
            if socket is not None:
                socket.close(linger=0)
            self._inbox.welcome(name)
        self._uris.update(uris)

    def send(self, receiver: str, payload: bytes, *topic: bytes) -> None:
        """Send to *receiver*'s program or, with a *topic*, past it to who listens to that."""
        if len(payload) > LARGEST:
            raise MessageError(
                f"a message of {len(payload)} bytes to {receiver}; the channel takes {LARGEST} at most"
            )
        if receiver not in self._sockets:
            if receiver not in self._uris:
                raise KeyError(f"no rank {receiver!r}; there are {', '.join(sorted(self._uris)) or 'no others'}")
            if not self._uris[receiver]:
                return  # it is gone, and the next incarnation not there yet
            self._sockets[receiver] = self._dial(receiver)
        socket = self._sockets[receiver]
        if socket is None:
            return
        try:
            socket.send_multipart([payload, *topic], zmq.NOBLOCK)
        except zmq.Again:  # it is gone, or counts as gone: no later message may overtake this one
            socket.close(linger=0)
            self._sockets[receiver] = None

    def _dial(self, receiver: str) -> Any:
        # libzmq says to its monitor alone that it has no port to connect from, and messages would wait for ever.
        monitors: list[Any] = []
        uri = self._uris[receiver]
        socket = dial(
            self._context,
            uri,
            self._keys,
            receiver,
            lambda socket: monitors.append(socket.get_monitor_socket(_BEGUN | zmq.EVENT_CLOSED)),
        )
        with monitors[0] as monitor:
            failed = monitor.poll(_BEGINNING_MS) and recv_monitor_message(monitor)["event"] == zmq.EVENT_CLOSED
            socket.disable_monitor()
        if failed and (problem := refusal(uri)).startswith("no port"):
            socket.close(linger=0)
            raise BackendUnavailable(f"{receiver} at {uri}: {problem}")
        return socket

    def listen(self, topic: bytes, deliver: Callable[[Message], None]) -> None:
        """Call *deliver* with every message of *topic*, those that came before included.

        A `MessageError` of *deliver* drops the sender's connection.
        """
        self._listeners[topic] = deliver
        for message in self._unheard.pop(topic, ()):
            try:
                deliver(message)
            except MessageError:
                self.refuse(message.sender)

    def receive(self) -> Event:
        if self._inbox.paused and len(self._received) <= QUEUE // 2:
            self._inbox.poll()
        return self._received.get()

    def refuse(self, sender: str) -> None:
        self._inbox.drop(sender)

    def subscribe(self, handler: Callable[[Message], None]) -> None:
        """Call *handler* with every `Message` from now on, one in each turn, which keeps their number bounded."""

        def hand_on() -> Program:
            while True:
                handler((yield self.receive()))

        self._clock.process(hand_on())

    def close(self) -> None:
        """Close the sockets, once what was sent has been handed to the system or 2 s have passed."""
        if self._context.closed:
            return
        self._clock.unwatch(self._inbox)
        self._inbox.close()
        for socket in self._sockets.values():
            if socket is not None:
                socket.close()
        self._context.term()

    def _deliver(self, sender: str, frames: list[bytes]) -> None:
        payload, *topics = frames
        message = Message(sender, payload)
        if not topics:
            self._received.put(message)
            return
        if len(topics) > 1:
            raise MessageError(f"{len(frames)} frames of {sender}, need a payload and at most a topic")
        listener = self._listeners.get(topics[0])
        if listener is not None:
            listener(message)
        elif sum(map(len, self._unheard.values())) < QUEUE:
            self._unheard.setdefault(topics[0], []).append(message)
        else:
            raise MessageError(f"{QUEUE} messages of topics that nobody listens to")
