"""Whether this process has a TCP connection whose other end is dead: bytes may still come out of it.

When a process ends, the kernel goes on delivering what the process had sent, from its send buffer and from the
receiver's, and says end-of-file only after the last byte.  An engine that has seen that closes its own end.  So once no
connection of this process has a dead end, nothing that dead processes had sent over TCP is left to be taken in.

It is read from ``/proc`` (see proc_pid_net(5)), which shows both ends of a connection if they are on this host and in
this network namespace.  An end that it does not show counts as dead: the answer errs towards yes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["half_open"]

_ESTABLISHED = "01"
_IDLE = {"03", "06", "07", "0A", "0C"}  # SYN_RECV, TIME_WAIT, CLOSE, LISTEN, NEW_SYN_RECV: no data comes out of these
_NOBODY = "0"
"""The inode of a socket that no process has any more."""


class _Socket(NamedTuple):
    local: str  # address and port, in hexadecimal
    remote: str
    state: str
    inode: str


def _sockets() -> Iterator[_Socket]:
    """Yield every TCP socket of this network namespace, as ``/proc/self/net/tcp`` and ``tcp6`` list them."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for line in lines:
            fields = line.split()
            yield _Socket(_plain(fields[1]), _plain(fields[2]), fields[3], fields[9])


def _plain(address: str) -> str:
    """Return an IPv4 address in IPv6 form as itself."""
    return address.removeprefix("0000000000000000FFFF0000")


def _mine() -> set[str]:
    """Return the inodes of this process's sockets."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            found.add(target[len("socket:[") : -1])
    return found


def half_open() -> bool:
    """Return whether a connection of this process may hold bytes of a process that has ended.

    Takes time in proportion to the number of sockets of the namespace.  True may be about a connection of anything in
    this process, so ask again later.
    """
    sockets, mine = list(_sockets()), _mine()
    ends = {(socket.local, socket.remote): socket for socket in sockets}
    for socket in sockets:
        if socket.inode not in mine or socket.state in _IDLE:
            continue
        other = ends.get((socket.remote, socket.local))
        if socket.state != _ESTABLISHED or other is None or other.inode == _NOBODY:
            return True
    return False
