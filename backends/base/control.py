# SPDX-License-Identifier: Apache-2.0
"""Connections between endpoints beside the engine: signs of life, and short notes of a `kind`.

Engines differ in what they report: Mooncake says nothing when a peer dies between transfers, UCX over shared memory
never does.  So endpoints that know each other keep a TCP connection of their own, which the kernel closes when a
process ends.  A process that is stopped keeps it; only a deadline can tell.  Both ends of a line dial, so each sends
on a socket of its own, watches that, and receives all notes at one inbox.
"""

import contextlib
import secrets
import select
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from backends.base.processes import myself
from backends.base.zmq_channel import FAILURES, Inbox, Keys, dial, refusal
from pdsim.core.clock import WallClock
from pdsim.core.errors import MessageError, PeerLost

_HELLO, _BYE = b"hello", b"bye"
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | FAILURES


class Card(msgspec.Struct, frozen=True, array_like=True):
    """Who an endpoint is and where its control port listens; part of its address."""

    name: str
    uri: str
    token: bytes  # 16 random bytes, which tell two incarnations of one name apart
    process: str  # see `backends.base.processes`


@dataclass(eq=False)
class PeerLine:
    """The connection to one other endpoint; another incarnation of the rank has a line of its own."""

    card: Card  # who is at the other end
    socket: Any  # on which notes are sent; they are dropped when it can take no more
    monitor: Any  # reports the handshake and the end of the connection
    lost: str = ""  # why it is gone, for ever
    closed: bool = False  # whether it said goodbye, with nothing under way

    @property
    def name(self) -> str:
        return self.card.name


Handler = Callable[[PeerLine, list[bytes]], None]
"""Called with the line and the body of a note; raises a `MessageError` if that is not what it must be."""


def fields(body: list[bytes], *kinds: type[str] | type[int]) -> list[Any]:
    """Return *body* as one field of each of *kinds*.  Raise a `MessageError` if it is not that."""
    if len(body) != len(kinds):
        raise MessageError(f"{len(body)} fields in a note, need {len(kinds)}")
    try:
        return [kind(field.decode()) for kind, field in zip(kinds, body, strict=True)]
    except ValueError as error:
        raise MessageError(f"a field of a note: {error}") from None


class Control:
    """All lines of one endpoint, as a `Source`.

    *handlers* are called with notes by kind; *on_lost* with a line whose other end has gone, once.

    Lines come about when this endpoint connects (`reach`) or another one does (a greeting).  One that is lost stays
    in `known`, because its end is a proof about its process.  Notes are ``kind, own token, token of the receiver,
    body...``; those for an earlier incarnation of this rank are ignored, and one that is no note loses the line.
    """

    def __init__(
        self,
        clock: WallClock,
        keys: Keys,
        bind: str,
        handlers: Mapping[bytes, Handler],
        on_lost: Callable[[PeerLine], None],
    ) -> None:
        self._clock, self._keys = clock, keys
        self._context = zmq.Context()
        self._handlers, self._on_lost = handlers, on_lost
        self._lines: dict[bytes, PeerLine] = {}  # by token
        self._epoll = select.epoll()
        self._inbox = Inbox(self._context, bind, self._deliver, keys)
        self._epoll.register(self._inbox.fileno(), select.EPOLLIN)
        self.card = Card(keys.name, self._inbox.uri, secrets.token_bytes(16), myself())
        clock.watch(self)

    def poll(self) -> bool:
        if not self._epoll.poll(0):
            return False
        progressed = self._inbox.poll()
        for line in self.lines:
            progressed |= self._watch(line)
        return progressed

    def fileno(self) -> int:
        return self._epoll.fileno()

    def busy(self) -> bool:
        return False

    @property
    def refused(self) -> int:
        return self._inbox.refused

    @property
    def lines(self) -> tuple[PeerLine, ...]:
        """All lines but lost ones."""
        return tuple(line for line in self._lines.values() if not line.lost)

    def known(self, name: str) -> list[PeerLine]:
        """Return the lines to all incarnations of rank *name* that this endpoint has known, lost ones included."""
        return [line for line in self._lines.values() if line.name == name]

    def reach(self, card: Card, timeout: float) -> PeerLine:
        """Return the line to *card*, made if need be.  Raise `PeerLost` if nothing answers within *timeout* seconds.

        Blocks for as long as the handshake takes, on the clock's thread.
        """
        self.poll()
        line = self._lines.get(card.token)
        if line is None:
            line = self._dial(card)
            event = recv_monitor_message(line.monitor)["event"] if line.monitor.poll(int(timeout * 1e3)) else 0
            if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._hang_up(line)
                reason = refusal(card.uri) if event else f"did not answer within {timeout:g} s"
                raise PeerLost(f"{line.name} at {card.uri}: {reason}")
            self._add(line)
            self.send(line, _HELLO, msgspec.msgpack.encode(self.card))
        self._watch(line)
        if line.lost:
            raise PeerLost(f"{card.name} {line.lost}")
        return line

    def welcome(self, name: str) -> None:
        """Accept messages of rank *name* again, after its restart."""
        self._inbox.welcome(name)

    def send(self, line: PeerLine, kind: bytes, *body: bytes) -> None:
        """Send a note without waiting; on a lost line it is dropped."""
        if not line.lost:
            with contextlib.suppress(zmq.Again):
                line.socket.send_multipart([kind, self.card.token, line.card.token, *body], zmq.NOBLOCK)

    def close(self, clean: bool) -> None:
        """Say goodbye (*clean*: nothing of this endpoint is under way any more) and close all sockets."""
        if self._context.closed:
            return
        self._clock.unwatch(self)
        for line in self.lines:
            if clean:
                self.send(line, _BYE)
            self._hang_up(line)
        self._epoll.close()
        self._inbox.close()
        self._context.term()

    def _dial(self, card: Card) -> PeerLine:
        monitors: list[Any] = []

        def watch(socket: Any) -> None:  # before it connects: it must see the handshake
            monitors.append(socket.get_monitor_socket(_EVENTS))
            monitors[0].linger = 0

        socket = dial(self._context, card.uri, self._keys, card.name, watch)
        return PeerLine(card, socket, monitors[0])

    def _add(self, line: PeerLine) -> None:
        self._lines[line.card.token] = line
        self._epoll.register(line.monitor.FD, select.EPOLLIN)

    def _hang_up(self, line: PeerLine) -> None:
        with contextlib.suppress(OSError, ValueError):  # never registered, or the descriptor is closed already
            self._epoll.unregister(line.monitor.FD)
        line.socket.disable_monitor()
        line.monitor.close()
        line.socket.close(0 if line.lost else None)

    def _watch(self, line: PeerLine) -> bool:
        progressed = False
        while not line.lost and line.monitor.get(zmq.EVENTS) & zmq.POLLIN:
            if recv_monitor_message(line.monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._lose(line, "is gone: its connection was closed")
                progressed = True
        return progressed

    def _lose(self, line: PeerLine, reason: str) -> None:
        if not line.lost:
            line.lost = reason
            self._hang_up(line)  # or its three descriptors would stay
            self._on_lost(line)

    def _deliver(self, sender: str, frames: list[bytes]) -> None:
        try:
            self._hear(sender, frames)
        except MessageError as error:
            for line in self.known(sender):
                self._lose(line, f"sent an invalid note: {error}")
            raise

    def _hear(self, sender: str, frames: list[bytes]) -> None:
        if len(frames) < 3:
            raise MessageError(f"{len(frames)} frames, need a kind and two tokens")
        kind, token, target, *body = frames
        if target != self.card.token:  # for an earlier incarnation of this rank
            return
        line = self._lines.get(token)
        if line is not None and line.name != sender:
            raise MessageError(f"a token of {line.name}")
        if kind == _HELLO:
            card = _card(sender, body)
            if card.token not in self._lines:
                self._add(self._dial(card))
        elif kind == _BYE:
            if line is not None:
                line.closed = True
                self._lose(line, "closed its endpoint")
        elif kind not in self._handlers:
            raise MessageError(f"a note of the unknown kind {kind!r}")
        elif line is not None:
            self._handlers[kind](line, body)


def _card(sender: str, body: list[bytes]) -> Card:
    if len(body) != 1:
        raise MessageError(f"{len(body)} fields in a greeting, need a card")
    try:
        card = msgspec.msgpack.decode(body[0], type=Card)
    except (msgspec.MsgspecError, ValueError) as error:
        raise MessageError(f"no card: {error}") from None
    if card.name != sender or not card.uri.startswith("tcp://"):
        raise MessageError(f"a card of {card.name!r} at {card.uri!r}")
    return card
