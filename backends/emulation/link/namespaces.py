# SPDX-License-Identifier: Apache-2.0
"""Network namespaces that have no name, each with a TUN device.

A namespace is there as long as a process or a descriptor is in it, so nothing is left behind however all of them
end; those of pyroute2 are files, which outlive a process that is killed.  It takes CAP_SYS_ADMIN and CAP_NET_ADMIN,
as root has them, and ``/dev/net/tun``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from pdsim.core.errors import BackendUnavailable

__all__ = ["DEVICE", "Node", "entered", "make", "see_devices"]

DEVICE = "link0"  # the name of the TUN device in every namespace
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_REC, _MS_SLAVE = 0x4000, 0x80000
_TUNSETIFF, _TUNSETOFFLOAD, _TUN_F_CSUM = 0x400454CA, 0x400454D0, 1
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8914, 0x8916, 0x891C, 0x8922, 0x8943
_QUEUE = 65536  # packets that wait in the device, which drops what is more: above what TCP's windows let out


class Node(NamedTuple):
    """One namespace, as descriptors of this process: one to be entered, and a non-blocking one of IP packets."""

    namespace: int
    tun: int

    def close(self) -> None:
        """Give both back."""
        os.close(self.tun)
        os.close(self.namespace)


def make(address: str, mtu: int, settings: Mapping[str, str]) -> Node:
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


@contextlib.contextmanager
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
    with contextlib.ExitStack() as opened:
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
