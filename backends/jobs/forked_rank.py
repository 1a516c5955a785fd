# SPDX-License-Identifier: Apache-2.0
"""Ranks that are forked by a process that has imported what they need, instead of starting Python anew.

No engine may have been started before the fork: engines do not survive one.  `backends.emulation.guest.jobs` forks
the ranks of an emulated machine, `backends.jobs.warm_start` those of a suite.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from backends.jobs import worker

__all__ = ["ForkedRank", "become"]


class ForkedRank:
    """A forked rank, with what `backends.jobs.child_process` uses of a `Popen`; it is a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return how it ended, as `Popen.poll` does, or None if it has not."""
        return self._look(os.WNOHANG)

    def wait(self) -> int | None:
        """Return how it ended, when it has."""
        return self._look(0)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _look(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def become(connection: int, output: int, ready: Callable[[], None] = lambda: None) -> NoReturn:
    """Be the rank on the socket *connection*, its output going to the descriptor *output*, in a process just forked.

    It is in a session of its own, and has none of the other descriptors of the process that forked it: a sibling's
    connection would outlive the sibling.  *ready* is called first.
    """
    try:
        os.setsid()
        ready()
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        mine = os.dup(connection)
        os.dup2(mine, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        sys.argv[1:] = ["3"]
        worker.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)
