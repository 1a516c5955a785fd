"""Control messages over pyzmq: the wall clock's `Channel`.

Each rank binds one PULL socket and connects a PUSH socket to every rank that it sends to.  ZeroMQ's descriptor is
edge-triggered and sending on a socket may swallow the edge of receiving on it; sockets that only send and sockets that
only receive do not have that problem.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from simpy.events import Event

from pdsim.clock import Mailbox, WallClock
from pdsim.transfer import Message

__all__ = ["Inbox", "ZmqChannel", "dial"]

LINGER_MS = 2000
"""How long `close` may go on sending what was sent before it; a receiver that is alive takes it in microseconds."""


class Inbox:
    """A bound PULL socket as a `Source`: calls *deliver* with the frames of each message."""

    def __init__(self, context: Any, bind: str, deliver: Callable[[list[bytes]], None]) -> None:
        import zmq

        self._pollin = zmq.POLLIN
        self._events = zmq.EVENTS
        self._socket = context.socket(zmq.PULL)
        self._socket.rcvhwm = 0
        self._socket.linger = 0
        port = self._socket.bind_to_random_port(f"tcp://{bind}")
        self.uri = f"tcp://{bind}:{port}"
        self._fd = int(self._socket.FD)
        self._deliver = deliver

    def poll(self) -> bool:
        """Deliver everything that has arrived."""
        found = False
        while not self._socket.closed and self._socket.get(self._events) & self._pollin:
            self._deliver(self._socket.recv_multipart())
            found = True
        return found

    def fileno(self) -> int:
        """Return ZeroMQ's descriptor, which `poll` re-arms by draining the socket."""
        return self._fd

    def busy(self) -> bool:
        """Return False: the descriptor tells."""
        return False

    def close(self) -> None:
        """Close the socket and its port."""
        self._socket.close()


def dial(context: Any, uri: str, prepare: Callable[[Any], None] | None = None) -> Any:
    """Return a PUSH socket that is being connected to *uri*; *prepare* is called with it before.

    Its queue has no limit and it never reconnects.  A rank that is gone stays gone: another process may have its port
    by now.  Send with NOBLOCK and ignore `zmq.Again`, which means that the connection is lost.
    """
    import zmq

    socket = context.socket(zmq.PUSH)
    socket.sndhwm = 0
    socket.linger = LINGER_MS
    socket.reconnect_ivl = -1
    if prepare is not None:
        prepare(socket)
    socket.connect(uri)
    return socket


class ZmqChannel:
    """Ordered messages between ranks; see `pdsim.transfer.Channel`."""

    def __init__(self, clock: WallClock, rank: str, bind: str = "127.0.0.1") -> None:
        import zmq

        self._again, self._noblock = zmq.Again, zmq.NOBLOCK
        self._rank = rank.encode()
        self._clock = clock
        self._context = zmq.Context()
        self._inbox = Inbox(self._context, bind, self._deliver)
        self._received = Mailbox(clock)
        self._uris: dict[str, str] = {}
        self._sockets: dict[str, Any] = {}
        self._listeners: dict[bytes, Callable[[Message], None]] = {}
        self._unheard: dict[bytes, list[Message]] = {}
        self.uri = self._inbox.uri
        clock.watch(self._inbox)

    def open(self, uris: Mapping[str, str]) -> None:
        """Learn where the other ranks are: name to URI, which is empty while a rank is being started again.

        What was not sent yet to one that has moved is lost.
        """
        for name in uris:
            socket = self._sockets.pop(name, None)
            if socket is not None:
                socket.close(linger=0)
        self._uris.update(uris)

    def send(self, receiver: str, payload: bytes) -> None:
        """Send without waiting; a `KeyError` names an unknown rank."""
        self._send(receiver, payload)

    def tell(self, receiver: str, topic: bytes, payload: bytes) -> None:
        """Send to who listens to *topic* at *receiver*, past the program."""
        self._send(receiver, payload, topic)

    def listen(self, topic: bytes, deliver: Callable[[Message], None]) -> None:
        """Call *deliver* with every message of *topic*, those that came before included."""
        self._listeners[topic] = deliver
        for message in self._unheard.pop(topic, ()):
            deliver(message)

    def _send(self, receiver: str, *frames: bytes) -> None:
        socket = self._sockets.get(receiver)
        if socket is None:
            if receiver not in self._uris:
                raise KeyError(f"no rank {receiver!r}; there are {', '.join(sorted(self._uris)) or 'no others'}")
            if not self._uris[receiver]:
                return  # it is gone, and the next life of it not there yet
            socket = self._sockets[receiver] = dial(self._context, self._uris[receiver])
        with contextlib.suppress(self._again):  # the receiver is gone
            socket.send_multipart([self._rank, *frames], self._noblock)

    def receive(self) -> Event:
        """Return an event that succeeds with the next `Message`."""
        return self._received.get()

    def close(self) -> None:
        """Close the sockets, once what was sent has been handed to the system or 2 s have passed."""
        if self._context.closed:
            return
        self._clock.unwatch(self._inbox)
        self._inbox.close()
        for socket in self._sockets.values():
            socket.close()
        self._context.term()

    def _deliver(self, frames: list[bytes]) -> None:
        sender, payload, *topic = frames
        message = Message(sender.decode(), payload)
        if not topic:
            self._received.put(message)
        elif topic[0] in self._listeners:
            self._listeners[topic[0]](message)
        else:
            self._unheard.setdefault(topic[0], []).append(message)
