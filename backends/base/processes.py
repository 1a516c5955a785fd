# SPDX-License-Identifier: Apache-2.0
"""Proofs that another process is dead and nothing of it is still to come; the environment of native engines.

A dead process has no memory left for bytes to land in: the one proof about a lost peer without its help, and only on
the same host.  What it had sent over TCP the kernel goes on delivering, and says end-of-file after the last byte; an
engine that has seen that closes its own end.  So once no connection of this process has a dead end (`half_open`),
nothing that dead processes had sent is left to be taken in.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from pdsim.core.clock import WallClock
from pdsim.core.errors import ConfigError

FIRST, LAST = 0.01, 30.0  # seconds until `when_dead` looks again, doubled each time, up to which it does


@cache
def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def _state(pid: int) -> tuple[str, int, str]:
    # state, threads and start time of a process: fields 3, 20 and 22 of proc_pid_stat(5)
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0, ""
    fields = text.rpartition(")")[2].split()  # the name before may hold anything, parentheses included
    return fields[0], int(fields[17]), fields[19]


def myself() -> str:
    """Return what names this process among all others: boot and namespace, process id, start time in clock ticks."""
    return f"{_host()}/{os.getpid()}/{_state(os.getpid())[2]}"


def is_dead(identity: str) -> bool:
    """Return whether the process that *identity* names has certainly ended.

    False is no proof of life: it is also the answer for a process of another host or namespace.
    """
    host, pid, start = identity.rsplit("/", 2)
    if host != _host():
        return False
    state, threads, started = _state(int(pid))
    # a zombie's other threads may still run, and hold its memory and its sockets until the last is gone
    return (state in "XZ" and threads <= 1) or started != start


def when_dead(clock: WallClock, identity: str, action: Callable[[], object], wait: float = FIRST) -> None:
    """Call *action* once the process that *identity* names has certainly ended: now, or when a later look shows it.

    The kernel closes the connections of a process some time before it is dead.
    """
    if is_dead(identity):
        action()
    elif wait < LAST:
        clock.call_at(clock.now + wait, lambda _: when_dead(clock, identity, action, 2 * wait), None)


_SELF = Path("/proc/self")
_ESTABLISHED, _CLOSE_WAIT, _LISTEN = "01", "08", "0A"
_IDLE = ("03", "06", "07", "0A", "0C")  # SYN_RECV, TIME_WAIT, CLOSE, LISTEN, NEW_SYN_RECV: no data comes out
_NOBODY = "0"  # the inode of a socket that no process has any more


class _Socket(NamedTuple):
    local: str  # address and port, in hexadecimal
    remote: str
    state: str
    inode: str

    @property
    def port(self) -> str:
        return self.local.rpartition(":")[2]


def _sockets(process: Path = _SELF) -> Iterator[_Socket]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (process / "net" / table).read_text().splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for line in lines:
            fields = line.split()
            local, remote = (field.removeprefix("0000000000000000FFFF0000") for field in fields[1:3])
            yield _Socket(local, remote, fields[3], fields[9])


def _elsewhere() -> Iterator[_Socket]:
    seen = {(_SELF / "ns" / "net").readlink()}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            namespace = (process / "ns" / "net").readlink()
            if namespace not in seen:
                sockets = list(_sockets(process))
                seen.add(namespace)
                yield from sockets


def _mine() -> set[str]:
    inodes = set()
    for descriptor in (_SELF / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                inodes.add(target[len("socket:[") : -1])
    return inodes


def half_open(accepted: bool = False) -> bool:
    """Return whether a connection of this process may hold bytes of a process that has ended.

    With *accepted*, look only at those that others opened, be they accepted yet or not.

    An end that is not shown (another host, or another user's namespace), or that could be one of several with equal
    addresses, counts as dead.  The answer may be about any connection of this process, so ask again later.
    """
    sockets, mine = list(_sockets()), _mine()
    ends = {(socket.local, socket.remote): socket for socket in sockets}
    listens = {socket.port for socket in sockets if socket.inode in mine and socket.state == _LISTEN}
    outside = []
    for socket in sockets:
        inbound = socket.port in listens
        waits = inbound and socket.inode == _NOBODY and socket.state in (_ESTABLISHED, _CLOSE_WAIT)
        own = waits or (socket.inode in mine and socket.state not in _IDLE)
        if not own or (accepted and not inbound):
            continue
        other = ends.get((socket.remote, socket.local))
        if socket.state != _ESTABLISHED or (other is not None and other.inode == _NOBODY):
            return True
        if other is None:
            outside.append(socket)
    if not outside:
        return False
    inodes: dict[tuple[str, str], list[str]] = {}
    for socket in _elsewhere():
        inodes.setdefault((socket.local, socket.remote), []).append(socket.inode)
    for socket in outside:
        others = inodes.get((socket.remote, socket.local), [])
        # the same addresses again, in namespaces of another job: whose end that is cannot be said
        if len(others) != 1 or others[0] == _NOBODY or (socket.local, socket.remote) in inodes:
            return True
    return False


def prepare(engine: str, needed: Mapping[str, str], defaults: Mapping[str, str]) -> None:
    """Set what *engine* needs, and *defaults* where the user has not set anything.

    Before the library is loaded: native libraries read their environment once.  Raise a `ConfigError` if the user's
    environment contradicts what is needed.
    """
    for name, value in needed.items():
        if os.environ.get(name, value) != value:
            raise ConfigError(
                f"backend {engine!r} needs {name}={value}, but the environment has {name}={os.environ[name]}; "
                f"unset it, or choose another backend"
            )
    for name, value in {**defaults, **needed}.items():
        os.environ.setdefault(name, value)


def installed(*distributions: str) -> str:
    """Return the version of the first of *distributions* that is installed, or "of unknown version"."""
    for name in distributions:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return "of unknown version"


@contextlib.contextmanager
def captured_stderr() -> Iterator[Callable[[], str]]:
    """Copy what native code writes to standard error; yield a function that returns it afterwards.

    The text is passed on to the original stream.  Works on the descriptor; not safe for two threads at a time.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        original = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            text = ""
            yield lambda: text
        finally:
            os.dup2(original, 2)
            os.close(original)
            file.seek(0)
            text = file.read().decode(errors="replace")
            os.write(2, text.encode())
