# SPDX-License-Identifier: Apache-2.0
"""Whether another process is dead, as opposed to silent.

A dead process has no memory left for bytes to land in.  That is the one proof about a lost peer that can be had
without its help, and only on the same host: elsewhere, and for a process that cannot be seen, the answer is no.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

from pdsim.core.clock import WallClock

__all__ = ["is_dead", "myself", "when_dead"]

FIRST, LAST = 0.01, 30.0
"""Seconds until `when_dead` looks again, doubled each time, and from which on it looks no more."""


@cache
def _host() -> str:
    """Name this boot of this host and this namespace of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def _state(pid: int) -> tuple[str, int, str]:
    """Return the state, number of threads and start time of a process; ``("X", 0, "")`` if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0, ""
    fields = text.rpartition(")")[2].split()  # the name before may hold anything, parentheses included
    return fields[0], int(fields[17]), fields[19]  # fields 3, 20 and 22 of proc_pid_stat(5)


def myself() -> str:
    """Return what names this process among all others, now and later.

    Boot and namespace, process id, and start time in clock ticks: an id that is used again has another start time.
    """
    return f"{_host()}/{os.getpid()}/{_state(os.getpid())[2]}"


def is_dead(identity: str) -> bool:
    """Return whether the process that *identity* names has certainly ended.

    False is no proof of life: it is also the answer for a process of another host or namespace.  A zombie counts as
    dead once its other threads have ended.
    """
    host, pid, start = identity.rsplit("/", 2)
    if host != _host():
        return False
    state, threads, started = _state(int(pid))
    # a zombie's other threads may still run, and hold its memory and its sockets until the last is gone
    return (state in "XZ" and threads <= 1) or started != start


def when_dead(clock: WallClock, identity: str, action: Callable[[], object], wait: float = FIRST) -> None:
    """Call *action* once the process that *identity* names has certainly ended: now, or when a later look shows it.

    The kernel closes the connections of a process some time before the process is dead, so that whoever acts on
    their end may come too early.  Of a process on another host, or one that goes on, nothing is ever called.
    """
    if is_dead(identity):
        action()
    elif wait < LAST:
        clock.call_at(clock.now + wait, lambda _: when_dead(clock, identity, action, 2 * wait), None)
