# SPDX-License-Identifier: Apache-2.0
"""Who may speak to a rank: key pairs made for one job, and the doorkeeper that knows them.

Every control connection is CURVE (RFC 26, as ZeroMQ does it): encrypted, and accepted only from a rank of the same
job. The supervisor makes a key pair for each rank and hands it over on the socket pair that the rank's process
inherits: keys are on no command line, in no environment and in no file.  They end with the job.

Knows nothing of what is said.  Engines keep ports of their own (`docs/engines.md`), which this does not protect.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import msgspec

from pdsim.core.errors import BackendUnavailable, TransferFailed

__all__ = ["Doorkeeper", "Keys", "job_keys", "sender_of"]

_ZAP = "inproc://zeromq.zap.01"  # where a context asks who may connect: RFC 27
_DOMAIN = b"pdsim"  # without a domain libzmq asks nobody
_VERSION = b"1.0"


class Keys(msgspec.Struct, frozen=True):
    """What a rank called *name* needs: its *secret* key, and the *public* keys of all ranks, its own included (Z85).

    Sent to the rank's process by the supervisor, and never shown: `repr` leaves the secret out.
    """

    name: str
    secret: str
    public: dict[str, str]

    def __repr__(self) -> str:
        """Leave the secret out."""
        return f"Keys(name={self.name!r}, {len(self.public)} ranks)"

    def listen(self, socket: Any) -> None:
        """Have *socket* accept ranks of the job only; before it is bound, and in a context with a `Doorkeeper`.

        Handshakes are then answered by the `Doorkeeper` of the socket's context.
        """
        socket.curve_server = True
        socket.curve_secretkey = self.secret.encode()
        socket.zap_domain = _DOMAIN

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
    """Return new keys for ranks called *names*.  Raise `BackendUnavailable` if libzmq was built without CURVE.

    Every rank gets the public keys of all.  Keys are made anew for each job, and nothing keeps them.
    """
    import zmq

    if not zmq.has("curve"):
        raise BackendUnavailable(
            "libzmq has no CURVE, so ranks cannot authenticate each other; pip install pyzmq anew"
        )
    pairs = {name: tuple(key.decode() for key in zmq.curve_keypair()) for name in names}
    public = {name: pair[0] for name, pair in pairs.items()}
    return {name: Keys(name, pair[1], public) for name, pair in pairs.items()}


def sender_of(frame: Any) -> str:
    """Return the rank whose key the connection proved that *frame* came over.

    No part of the message can forge it.
    """
    name: str = frame.get("User-Id")
    return name


class Doorkeeper:
    """Answers, on a thread of its own, which keys may connect to sockets of *context*; ends with the context.

    *refused* counts handshakes that failed at the sockets that are watched: unknown keys, and whatever does not
    speak CURVE.

    Life: make it before the socket is bound; then `watch` the socket. Its thread ends when the context is
    terminated. One for each context, since the address that it answers at is fixed.
    """

    def __init__(self, context: Any, keys: Keys) -> None:
        import zmq
        from zmq.utils import z85

        self._zmq = zmq
        self._context = context
        self._names = {z85.decode(key): name for name, key in keys.public.items()}
        self._asked = context.socket(zmq.REP)
        self._asked.linger = 0
        self._asked.bind(_ZAP)
        self._failures: Any = None
        self.refused = 0

    def watch(self, socket: Any) -> None:
        """Count the handshakes that fail at *socket*, and begin to answer."""
        zmq = self._zmq
        failures = (
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        socket.monitor("inproc://failures", failures)
        self._failures = self._context.socket(zmq.PAIR)
        self._failures.linger = 0
        self._failures.rcvhwm = 0  # or a full queue would stop the thread that all connections share
        self._failures.connect("inproc://failures")
        threading.Thread(target=self._serve, name="doorkeeper", daemon=True).start()

    def _serve(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._asked, zmq.POLLIN)
        poller.register(self._failures, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    if socket is self._asked:
                        socket.send_multipart(self._answer(socket.recv_multipart()))
                    else:
                        socket.recv_multipart()
                        self.refused += 1
        except zmq.ContextTerminated:
            self._asked.close()
            self._failures.close()

    def _answer(self, question: list[bytes]) -> list[bytes]:
        request, name = question[1], self._names.get(question[-1])
        if name is None:
            return [_VERSION, request, b"400", b"not a rank of this job", b"", b""]
        return [_VERSION, request, b"200", b"", name.encode(), b""]
