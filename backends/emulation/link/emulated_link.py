# SPDX-License-Identifier: Apache-2.0
"""A known link between the nodes of a job on one machine: what ``hw.link`` describes, made real.

Every node is a network namespace, and all that ranks of different nodes say to each other passes the packet
forwarder, at the rate and with the delay that were asked for.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from backends.emulation.link import namespaces
from backends.emulation.link.packet_forwarder import ASKED, LATE
from pdsim.core.errors import BackendUnavailable, TransferError
from pdsim.hardware.machine import NetworkLink

__all__ = ["EmulatedLink", "Lateness", "joined", "missing_requirements"]

SETTINGS = {
    "ipv4/tcp_congestion_control": "reno",  # whose window, where nothing is lost, only grows
    "ipv4/tcp_no_metrics_save": "1",  # a connection learns nothing from an earlier one
}
FORWARDER = Path(__file__).with_name("packet_forwarder.py")
PATIENCE = 20.0  # seconds for the packet forwarder to start, and to answer
MANY = 0.01  # share of late packets from which on what was measured is not of the link that was asked for


class Lateness(NamedTuple):
    """The punctuality of the packet forwarder in one job."""

    packets: int  # that it passed on, counted at every hop
    late: int  # of them, by more than `LATE`
    worst: float  # seconds

    @property
    def complaint(self) -> str:
        """A note for readers of the measurements, or nothing."""
        if self.late <= MANY * self.packets:
            return ""
        return (
            f"the link was late: {self.late / self.packets:.1%} of {self.packets} packets by more than "
            f"{LATE * 1e3:g} ms, {self.worst * 1e3:.1f} ms at most, for want of a processor; "
            f"measure on an idle machine or lower hw.link.rate"
        )


class EmulatedLink:
    """The nodes and the process that carries packets between them, within the block of `joined`."""

    def __init__(
        self, nodes: list[namespaces.Node], control: socket.socket, forwarder: subprocess.Popen[bytes]
    ) -> None:
        self._nodes, self._control, self._forwarder = nodes, control, forwarder

    def address(self, node: int) -> str:
        return _address(node)

    def namespace(self, node: int) -> int:
        return self._nodes[node].namespace

    def go(self, origin: float) -> None:
        """Let changes happen at their times after *origin*, on the monotonic clock."""
        self._control.sendall(repr(origin).encode())

    def lateness(self) -> Lateness:
        """Return how punctual the packet forwarder has been.  Raise a `TransferError` if it has ended."""
        said = b""
        with suppress(OSError):
            self._control.sendall(ASKED)
            said = self._control.recv(256)
        if not said:
            self._forwarder.kill()
            raise TransferError(
                f"the packet forwarder ended with exit code {self._forwarder.wait()}, or said nothing"
            )
        return Lateness(*json.loads(said))


@contextmanager
def joined(link: NetworkLink, nodes: int) -> Iterator[EmulatedLink]:
    """Yield *nodes* nodes, joined in a chain by *link*; nothing of them is left afterwards.

    Raise `BackendUnavailable` if this process may not make them.
    """
    with ExitStack() as made:
        ends = []
        for node in range(nodes):
            settings = {**SETTINGS, "ipv4/tcp_wmem": f"4096 16384 {link.window}"}
            ends.append(namespaces.make(_address(node), link.mtu, settings))
            made.callback(ends[-1].close)
        control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.enter_context(control)
        with other:
            forwarder = _start(link, [node.tun for node in ends], other)
        made.callback(forwarder.wait)
        made.callback(forwarder.kill)
        control.settimeout(PATIENCE)
        if control.recv(2) != b"up":
            raise BackendUnavailable(f"the packet forwarder did not start: exit code {forwarder.wait()}")
        yield EmulatedLink(ends, control, forwarder)


def missing_requirements() -> str:
    """Return why this process cannot make a link, or nothing if it can: a namespace is made and closed again."""
    try:
        namespaces.make(_address(0), 1500, SETTINGS).close()
    except BackendUnavailable as error:
        return str(error)
    return ""


def _start(link: NetworkLink, tuns: list[int], control: socket.socket) -> subprocess.Popen[bytes]:
    order = {
        "control": control.fileno(),
        "tuns": tuns,
        "up": [link.forward(hop) for hop in range(len(tuns) - 1)],
        "down": [link.backward(hop) for hop in range(len(tuns) - 1)],
        "delay": link.delay,
        "backlog": link.backlog,
        "changes": [(each.hop, each.kind, each.start, each.end, each.share) for each in link.changes],
    }
    return subprocess.Popen(
        [sys.executable, "-I", str(FORWARDER), json.dumps(order)],
        pass_fds=[*tuns, control.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _address(node: int) -> str:
    return f"10.78.0.{node + 1}"
