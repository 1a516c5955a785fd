# SPDX-License-Identifier: Apache-2.0
"""Control messages over pyzmq: the wall clock's `Channel`.

Each rank binds one PULL socket and connects a PUSH socket to every rank that it sends to.  ZeroMQ's descriptor is
edge-triggered and sending on a socket may swallow the edge of receiving on it; sockets that only send and sockets
that only receive do not have that problem.

Only ranks of the job can connect (`backends.base.authentication`), and the connection, not the message, says who the
sender is.  Size and number of messages are limited, so that no sender can take all memory of another rank.
"""

from __future__ import annotations

import os
import socket as sockets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from simpy.events import Event

from backends.base.authentication import Doorkeeper, Keys, sender_of
from pdsim.core.clock import Mailbox, WallClock
from pdsim.core.errors import MessageError
from pdsim.transfer import Message, Program

__all__ = ["LARGEST", "QUEUE", "Inbox", "ZmqChannel", "dial"]

LINGER_MS = 2000
"""How long `close` may go on sending what was sent before it; a receiver that is alive takes it in microseconds."""

LARGEST = 64 << 20
"""Bytes of a message: a forward over a million tokens in pages of one has 20 MB."""

QUEUE = 100_000
"""Messages that wait at either end of a connection; a receiver that is further behind counts as gone."""


class Inbox:
    """A bound PULL socket as a `Source`: calls *deliver* with the sender and the frames of each message.

    A `MessageError` of *deliver*, and `drop`, drop the sender's connection.  While *full* is true nothing is taken,
    and *paused* says that something may wait; who makes room calls `poll`.

    Life: binds a free port when it is made (`uri` says which), is watched by a clock or polled by its owner, and
    ends with `close`.  A sender is who its key proves, so *deliver* need not look for a name in the frames.
    """

    def __init__(
        self,
        context: Any,
        bind: str,
        deliver: Callable[[str, list[bytes]], None],
        keys: Keys,
        full: Callable[[], bool] = lambda: False,
    ) -> None:
        import zmq

        self._pollin = zmq.POLLIN
        self._events = zmq.EVENTS
        self._source = zmq.SRCFD
        doorkeeper = self._doorkeeper = Doorkeeper(context, keys)
        self._socket = context.socket(zmq.PULL)
        self._socket.rcvhwm = QUEUE
        self._socket.maxmsgsize = LARGEST
        self._socket.linger = 0
        keys.listen(self._socket)
        doorkeeper.watch(self._socket)
        self._port = self._socket.bind_to_random_port(f"tcp://{bind}")
        self.uri = f"tcp://{bind}:{self._port}"
        self._fd = int(self._socket.FD)
        self._deliver = deliver
        self._full = full
        self._dropped: set[str] = set()
        self._refused = 0
        self.paused = False

    @property
    def refused(self) -> int:
        """Messages and connections that were refused."""
        return self._refused + self._doorkeeper.refused

    def poll(self) -> bool:
        """Deliver everything that has arrived.

        Return whether there was anything.  Stops early, and sets *paused*, while *full* returns true.
        """
        found = self.paused = False
        while not self._socket.closed and self._socket.get(self._events) & self._pollin:
            if self._full():
                self.paused = True
                break
            self._take(self._socket.recv_multipart(copy=False))
            found = True
        return found

    def fileno(self) -> int:
        """Return ZeroMQ's descriptor, which `poll` re-arms by draining the socket."""
        return self._fd

    def busy(self) -> bool:
        """Return False: the descriptor tells."""
        return False

    def drop(self, sender: str) -> None:
        """Refuse what *sender* has sent; hear no more of it until it is `welcome`."""
        self._refused += 1
        self._dropped.add(sender)

    def welcome(self, sender: str) -> None:
        """Hear *sender*, which was started again."""
        self._dropped.discard(sender)

    def close(self) -> None:
        """Close the socket and its port."""
        self._socket.close()

    def _take(self, frames: list[Any]) -> None:
        # Refused is what comes from a rank that was dropped, and what *deliver* answers with a `MessageError`.
        sender = sender_of(frames[0])
        if sender not in self._dropped:
            try:
                self._deliver(sender, [frame.bytes for frame in frames])
            except MessageError:
                self.drop(sender)
            else:
                return
        else:
            self._refused += 1
        self._disconnect(frames[0].get(self._source))

    def _disconnect(self, descriptor: int) -> None:
        with suppress(OSError), sockets.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getsockname()[1] == self._port:
                connection.shutdown(sockets.SHUT_RDWR)


def dial(context: Any, uri: str, keys: Keys, rank: str, prepare: Callable[[Any], None] | None = None) -> Any:
    """Return a PUSH socket that is being connected to *rank* at *uri*; *prepare* is called with it before.

    It never reconnects.  A rank that is gone stays gone: another process may have its port by now.  Send with
    NOBLOCK; `zmq.Again` means that the connection is lost, or that *rank* has left `QUEUE` messages unread.  Raise a
    `TransferFailed` if *rank* is none of this job.

    The socket lingers for `LINGER_MS` when it is closed.  *prepare* may attach a monitor, which must see the
    handshake.
    """
    import zmq

    socket = context.socket(zmq.PUSH)
    socket.sndhwm = QUEUE
    socket.linger = LINGER_MS
    socket.reconnect_ivl = -1
    try:
        keys.dial(socket, rank)
    except BaseException:
        socket.close()
        raise
    if prepare is not None:
        prepare(socket)
    socket.connect(uri)
    return socket


class ZmqChannel:
    """Ordered messages between ranks; see `pdsim.transfer.Channel`.

    Life: the worker makes it and reports *uri* to the supervisor, `open` tells it where the others are, programs
    send and receive, `close` ends it.  Used on the clock's thread only.  Messages with a topic do not reach the
    program: endpoints and groups use them.
    """

    def __init__(self, clock: WallClock, keys: Keys, bind: str = "127.0.0.1") -> None:
        import zmq

        self._again, self._noblock = zmq.Again, zmq.NOBLOCK
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
        """Messages and connections that were refused."""
        return self._inbox.refused

    def open(self, uris: Mapping[str, str]) -> None:
        """Learn where the other ranks are: name to URI, which is empty while a rank is being started again.

        What was not sent yet to one that has moved is lost.

        Ranks whose connection was dropped are heard again, since these are new processes.
        """
        for name in uris:
            socket = self._sockets.pop(name, None)
            if socket is not None:
                socket.close(linger=0)
            self._inbox.welcome(name)
        self._uris.update(uris)

    def send(self, receiver: str, payload: bytes) -> None:
        """Send without waiting; a `KeyError` names an unknown rank, a `MessageError` a message that is too large."""
        self._send(receiver, payload)

    def tell(self, receiver: str, topic: bytes, payload: bytes) -> None:
        """Send to who listens to *topic* at *receiver*, past the program."""
        self._send(receiver, payload, topic)

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

    def _send(self, receiver: str, *frames: bytes) -> None:
        # A rank that is gone, or `QUEUE` messages behind, gets nothing any more: no later message may overtake a
        # lost one.
        if len(frames[0]) > LARGEST:
            raise MessageError(
                f"a message of {len(frames[0])} bytes to {receiver}; the channel takes {LARGEST} at most"
            )
        if receiver not in self._sockets:
            if receiver not in self._uris:
                raise KeyError(f"no rank {receiver!r}; there are {', '.join(sorted(self._uris)) or 'no others'}")
            if not self._uris[receiver]:
                return  # it is gone, and the next life of it not there yet
            self._sockets[receiver] = dial(self._context, self._uris[receiver], self._keys, receiver)
        socket = self._sockets[receiver]
        if socket is None:
            return
        try:
            socket.send_multipart(frames, self._noblock)
        except (
            self._again
        ):  # gone, or so far behind that it counts as gone; and no later message may overtake this one
            socket.close(linger=0)
            self._sockets[receiver] = None

    def receive(self) -> Event:
        """Return an event that succeeds with the next `Message`."""
        if self._inbox.paused and len(self._received) <= QUEUE // 2:
            self._inbox.poll()
        return self._received.get()

    def refuse(self, sender: str) -> None:
        """Count a message of *sender* as refused, and drop its connection; see `pdsim.transfer.Channel`."""
        self._inbox.drop(sender)

    def subscribe(self, handler: Callable[[Message], None]) -> None:
        """Call *handler* with every `Message` from now on, one in each turn, which keeps their number bounded."""
        self._clock.process(self._hand_on(handler))

    def _hand_on(self, handler: Callable[[Message], None]) -> Program:
        while True:
            handler((yield self.receive()))

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
        # Raise a `MessageError` for more than one topic, or when `QUEUE` messages of topics nobody listens to are
        # kept.
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
