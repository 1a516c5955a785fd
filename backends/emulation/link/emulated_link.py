# SPDX-License-Identifier: Apache-2.0
"""A known link between the nodes of a job on one machine: what ``hw.link`` describes, made real.

Every node is a network namespace without a name, with a TUN device, and all that ranks of different nodes say to
each other passes the packet forwarder, at the rate and with the delay that were asked for.  A namespace lasts as
long as a process or a descriptor is in it (those of pyroute2 are files, and stay).  It takes root, ``/dev/net/tun``.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from backends.emulation.link.packet_forwarder import ASKED, LATE
from pdsim.core.errors import BackendUnavailable, TransferError
from pdsim.hardware.machine import NetworkLink

SETTINGS = {
    "ipv4/tcp_congestion_control": "reno",  # whose window, where nothing is lost, only grows
    "ipv4/tcp_no_metrics_save": "1",  # a connection learns nothing from an earlier one
}
FORWARDER = Path(__file__).with_name("packet_forwarder.py")
PATIENCE = 20.0  # seconds for the packet forwarder to start, and to answer
MANY = 0.01  # share of late packets from which on what was measured is not of the link that was asked for
DEVICE = "link0"  # the name of the TUN device in every namespace
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_TUNSETIFF, _TUNSETOFFLOAD, _TUN_F_CSUM = 0x400454CA, 0x400454D0, 1
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8914, 0x8916, 0x891C, 0x8922, 0x8943
_QUEUE = 65536  # packets that wait in the device, which drops what is more: above what TCP's windows let out


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
            f"{LATE * 1e3:g} ms, {self.worst * 1e3:.1f} ms at most, as no processor was free; "
            f"measure on an idle machine or lower hw.link.rate"
        )


class EmulatedLink:
    """The nodes and the process that carries packets between them, within the block of `joined`."""

    def __init__(self, nodes: list[Node], control: socket.socket, forwarder: subprocess.Popen[bytes]) -> None:
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
            ends.append(_make(_address(node), link.mtu, settings))
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
        _make(_address(0), 1500, SETTINGS).close()
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


class Node(NamedTuple):
    """One namespace, as descriptors of this process: one to be entered, and a non-blocking one of IP packets."""

    namespace: int
    tun: int

    def close(self) -> None:
        os.close(self.tun)
        os.close(self.namespace)


def _make(address: str, mtu: int, settings: Mapping[str, str]) -> Node:
    """Return a new namespace whose device has *address* in a network of 24 bits, and packets of *mtu* bytes.

    *settings* are its ``/proc/sys/net`` files, by path from there.  Raise `BackendUnavailable` if this process may
    not.
    """
    try:
        with ThreadPoolExecutor(1) as thread:  # a namespace is a thread's: this one enters it for good
            return thread.submit(_build, address, mtu, settings).result()
    except OSError as error:
        raise BackendUnavailable(
            f"hw.link needs network namespaces and TUN devices, and this process may not make them ({error}); "
            f"run as root with /dev/net/tun, or use hw=loopback"
        ) from error


@contextmanager
def entered(namespace: int) -> Iterator[None]:
    """Let this thread, and no other, be in *namespace*, and processes that it starts meanwhile."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _call("setns", namespace, _CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", before, _CLONE_NEWNET)
    finally:
        os.close(before)


def see_devices() -> None:
    """Let ``/sys``, for this process, have the devices of its namespace: UCX looks for them there."""
    _call("unshare", _CLONE_NEWNS)
    _call("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
    _call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)


def _build(address: str, mtu: int, settings: Mapping[str, str]) -> Node:
    # The device has *address*; both are returned as descriptors.
    _call("unshare", _CLONE_NEWNET)
    for path, value in settings.items():
        (Path("/proc/sys/net") / path).write_text(value)
    with ExitStack() as opened:
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        opened.callback(os.close, tun)
        kind = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), kind))
        fcntl.ioctl(tun, _TUNSETOFFLOAD, _TUN_F_CSUM)  # with segmentation too, a "packet" would have 64 KiB
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            _set(control, "lo", _SIOCSIFFLAGS, struct.pack("H", _IFF_UP | _IFF_RUNNING))
            for request, text in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.0")):
                _set(control, DEVICE, request, struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(text)))
            for request, number in ((_SIOCSIFMTU, mtu), (_SIOCSIFTXQLEN, _QUEUE)):
                _set(control, DEVICE, request, struct.pack("i", number))
            _set(control, DEVICE, _SIOCSIFFLAGS, struct.pack("H", _IFF_UP | _IFF_RUNNING))
        namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        opened.pop_all()
        return Node(namespace, tun)


def _set(control: socket.socket, device: str, request: int, value: bytes) -> None:
    fcntl.ioctl(control, request, struct.pack("16s24s", device.encode(), value))


def _call(name: str, *arguments: int | bytes | None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
