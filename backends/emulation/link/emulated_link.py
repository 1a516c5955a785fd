"""A known link between the nodes of a job on one machine: what ``hw.link`` describes, made real.

Every node is a network namespace, and all that ranks of different nodes say to each other, engines and control channel
alike, passes `backends.emulation.link.packet_forwarder`, at the rate and with the delay that were asked for.
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
from pdsim.errors import BackendUnavailable, TransferError
from pdsim.hardware import NetworkLink

__all__ = ["Lateness", "Testbed", "joined", "missing_requirements"]

SETTINGS = {
    "ipv4/tcp_congestion_control": "reno",  # whose window, where nothing is lost, only grows
    "ipv4/tcp_no_metrics_save": "1",  # a connection learns nothing from an earlier one
}
CARRIER = Path(__file__).with_name("packet_forwarder.py")
PATIENCE = 20.0
"""Seconds for the carrier to start, and to answer."""

MANY = 0.01
"""Share of late packets from which on what was measured is not of the link that was asked for."""


class Lateness(NamedTuple):
    """What the carrier says of itself, over one job."""

    packets: int  # that it passed on, counted at every hop
    late: int  # of them, by more than `LATE`
    worst: float  # seconds

    @property
    def complaint(self) -> str:
        """What a reader of the measurements must know, or nothing."""
        if self.late <= MANY * self.packets:
            return ""
        return (
            f"the link was late: {self.late / self.packets:.1%} of {self.packets} packets by more than {LATE * 1e3:g} "
            f"ms, {self.worst * 1e3:.1f} ms at most, for want of a processor; measure on an idle machine or lower "
            f"hw.link.rate"
        )


class Testbed:
    """The nodes and the process that carries packets between them.  Made by `joined`."""

    __test__ = False  # no test, whatever its name tells pytest

    def __init__(self, nodes: list[namespaces.Node], control: socket.socket, carrier: subprocess.Popen[bytes]) -> None:
        self._nodes = nodes
        self._control = control
        self._carrier = carrier

    def address(self, node: int) -> str:
        """Return the address of *node* on the link."""
        return _address(node)

    def namespace(self, node: int) -> int:
        """Return the namespace of *node*, a descriptor."""
        return self._nodes[node].namespace

    def go(self, origin: float) -> None:
        """Let changes happen at their times after *origin*, on the monotonic clock."""
        self._control.sendall(repr(origin).encode())

    def lateness(self) -> Lateness:
        """Return how punctual the carrier has been.  Raise a `TransferError` if nothing carries packets any more."""
        said = b""
        with suppress(OSError):
            self._control.sendall(ASKED)
            said = self._control.recv(256)
        if not said:
            self._carrier.kill()
            raise TransferError(f"the link's carrier ended with exit code {self._carrier.wait()}, or said nothing")
        return Lateness(*json.loads(said))


@contextmanager
def joined(wire: NetworkLink, nodes: int) -> Iterator[Testbed]:
    """Yield *nodes* nodes, joined in a chain by *wire*; nothing of them is left afterwards.

    Raise `BackendUnavailable` if this process may not make them.
    """
    with ExitStack() as made:
        found = []
        for node in range(nodes):
            settings = {**SETTINGS, "ipv4/tcp_wmem": f"4096 16384 {wire.window}"}
            found.append(namespaces.make(_address(node), wire.mtu, settings))
            made.callback(found[-1].close)
        control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.enter_context(control)
        with other:
            carrier = _start(wire, [node.tun for node in found], other)
        made.callback(_stop, carrier)
        control.settimeout(PATIENCE)
        if control.recv(2) != b"up":
            raise BackendUnavailable(f"the link's carrier did not start: exit code {carrier.wait()}")
        yield Testbed(found, control, carrier)


def missing_requirements() -> str:
    """Return why this process cannot make a link, or nothing if it can."""
    try:
        namespaces.make(_address(0), 1500, SETTINGS).close()
    except BackendUnavailable as error:
        return str(error)
    return ""


def _start(wire: NetworkLink, tuns: list[int], control: socket.socket) -> subprocess.Popen[bytes]:
    order = {
        "control": control.fileno(),
        "tuns": tuns,
        "up": [wire.forward(hop) for hop in range(len(tuns) - 1)],
        "down": [wire.backward(hop) for hop in range(len(tuns) - 1)],
        "delay": wire.delay,
        "backlog": wire.backlog,
        "changes": [(each.hop, each.kind, each.start, each.end, each.share) for each in wire.changes],
    }
    return subprocess.Popen(
        [sys.executable, "-I", str(CARRIER), json.dumps(order)],
        pass_fds=[*tuns, control.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _stop(carrier: subprocess.Popen[bytes]) -> None:
    carrier.kill()
    carrier.wait()


def _address(node: int) -> str:
    return f"10.78.0.{node + 1}"
