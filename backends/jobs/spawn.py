# SPDX-License-Identifier: Apache-2.0
"""How a rank's process starts: as a new Python, or as the fork of a process that has imported what ranks need.

The second is for suites that start hundreds: behind a `WarmStart` is ``python -m backends.jobs.spawn FD MODULE...``,
which has no engine, no thread of pdsim's and nothing of the process that asks but what a start of Python would have
of it.  A measurement does not use it: what a rank is made of should not depend on those before it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import IO, Any, NoReturn

from pdsim.core.errors import TransferError

Spawn = Callable[[int, IO[bytes]], Any]
"""Starts a rank's process on a socket's descriptor, its output going to a file; returns what a `Popen` returns."""

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE = 60.0  # seconds for all that it imports, on a busy machine
_ENDED = "the process that forks ranks has ended; start the job again"


def _python(module: str, descriptor: int, *words: str, output: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", module, str(descriptor), *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(_search_path()), "PYTHONUNBUFFERED": "1"},
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a terminal's Ctrl-C is for the supervisor, which stops its ranks
    )


def _search_path() -> list[str]:
    return [entry or str(os.getcwd()) for entry in sys.path]  # noqa: PTH109


def spawn(connection: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a rank's process anew, as `Spawn` says."""
    return _python("backends.jobs.worker", connection, output=output)


class ForkedRank:
    """A forked child of this process, with what the supervisor uses of a `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def become(connection: int, output: int, ready: Callable[[], None] = lambda: None) -> NoReturn:
    """Be the rank on the socket *connection*, its output going to *output*, in a process just forked.

    It is in a session of its own, and has none of the other descriptors of the process that forked it: a sibling's
    connection would outlive the sibling.  *ready* is called first.
    """
    try:
        from backends.jobs import worker

        os.setsid()
        ready()
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.dup(connection), 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        sys.argv[1:] = ["3"]
        worker.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class WarmStart:
    """A `Spawn` that forks a process which has imported *modules*.

    That is started with the first rank, and ends with this one or with the block that this is the context of.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = tuple(modules)
        self._line: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> WarmStart:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._line is not None and self.process is not None:
            self._line.close()
            self.process.wait()

    def __call__(self, connection: int, output: IO[bytes]) -> ForkedRank:
        """Start a rank.  Raise a `TransferError` if nothing forks."""
        if self._line is None:
            self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._line.settimeout(_PATIENCE)
            with theirs:
                self.process = _python("backends.jobs.spawn", theirs.fileno(), *self._modules, output=2)
        asked = {
            "path": _search_path(),
            "environ": {**os.environ, "PYTHONUNBUFFERED": "1"},
            "folder": os.getcwd(),  # noqa: PTH109
            "processors": sorted(os.sched_getaffinity(0)),
        }
        answer, reason = b"", ""
        _adopt(True)  # a rank whose first parent has ended is a child of this process
        try:
            socket.send_fds(self._line, [json.dumps(asked).encode()], [connection, output.fileno()])
            answer = self._line.recv(64)
        except OSError as error:
            reason = f" ({error})"
        finally:
            _adopt(False)
        if not answer:
            self._line.close()  # or a late answer would be taken for that of the next request
            self._line = None
            raise TransferError(_ENDED + reason)
        return ForkedRank(int(answer))


def _adopt(on: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def _fork(asked: dict[str, Any], connection: int, output: int) -> int:
    # The rank is the child of a process that ends at once, so that the supervisor hears how it ends.
    read, write = os.pipe()
    middle = os.fork()
    if not middle:
        between = os.getpid()
        pid = os.fork()
        if pid:
            os.write(write, str(pid).encode())
            os.kill(os.getpid(), signal.SIGKILL)  # nothing of what this process was copied from is to end with it

        def ready() -> None:
            while os.getppid() == between:  # who ends with the supervisor must be its child
                time.sleep(1e-4)
            os.environ.clear()
            os.environ.update(asked["environ"])
            sys.path[:] = asked["path"]
            os.chdir(asked["folder"])
            os.sched_setaffinity(0, asked["processors"])

        become(connection, output, ready)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        pid = int(answer.read(16))  # the end of the file is that of the process between
    os.waitpid(middle, 0)
    return pid


def main(line: socket.socket, modules: Sequence[str]) -> None:
    """Import *modules*, and fork a rank for each request on *line*, until its other end is closed."""
    for name in ("backends.jobs.worker", *modules):
        import_module(name)
    gc.collect()
    gc.freeze()  # or a rank's own collection would look at all of it, and thereby copy it
    while True:
        request, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 2)
        if not request:
            return
        pid = _fork(json.loads(request), *descriptors)
        for each in descriptors:
            os.close(each)
        line.send(str(pid).encode())


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
