# SPDX-License-Identifier: Apache-2.0
"""The process of one rank, from the supervisor's side: how it is started, heard, killed, and how it ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from backends.jobs import supervision
from pdsim.core import errors
from pdsim.core.errors import MessageError
from pdsim.transfer.job import RankResult

__all__ = ["ChildProcess", "Spawn", "search_path", "spawn"]

Spawn = Callable[[int, IO[bytes]], Any]
"""Starts a rank's process on a socket's descriptor, its output going to a file; returns what a `Popen` returns.

`spawn` starts Python anew; `backends.jobs.warm_start` forks a process that has imported what a rank needs."""

TAIL = 2000
"""Characters of a rank's output that go into the error of a rank that died."""


def search_path() -> list[str]:
    """Return where a rank is to look for modules: where this process does."""
    return [entry or str(os.getcwd()) for entry in sys.path]  # noqa: PTH109


def spawn(connection: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a rank's process anew, as `Spawn` says."""
    return subprocess.Popen(
        [sys.executable, "-m", "backends.jobs.worker", str(connection)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path()), "PYTHONUNBUFFERED": "1"},
        pass_fds=[connection],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a terminal's Ctrl-C is for the supervisor, which stops its ranks
    )


class ChildProcess:
    """One rank's process, which is started and sent its `Start` when this is made; `stop` leaves nothing behind.

    What it prints goes to a file without a name, whose end is part of the error of a rank that died.
    """

    def __init__(self, start: supervision.Start, spawn: Spawn, startup: float) -> None:
        self.name = start.name
        self.start = start  # a restart sends it again
        self.spawn = spawn
        self.uri = ""  # of its channel, once it is ready
        self.done: supervision.Done | None = None  # once the program has ended
        self.error = ""  # why it was killed by the supervisor, or did not start
        self.ended = False  # whether its socket is closed
        self.seconds = 0.0  # from the job's start to its end
        self.heard = time.monotonic()  # when something came from it last
        self._decoder = supervision.Decoder()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 closed by `stop`
        self.connection, other = socket.socketpair()
        with other:
            self.process = spawn(other.fileno(), self._output)
        self.connection.settimeout(startup)
        with suppress(OSError):  # it has ended, or is stopped and takes nothing: it will not be ready in time
            supervision.send(self.connection, start)

    def receive(self) -> list[supervision.Message]:
        """Return the messages that have arrived; note the end of the process when its socket closes."""
        try:
            piece = self.connection.recv(1 << 20)
        except ConnectionError:
            piece = b""
        if not piece:
            self.ended = True
            return []
        self.heard = time.monotonic()
        try:
            return self._decoder.feed(piece)
        except MessageError as error:
            self.end(f"MessageError: {error}")
            return []

    @property
    def broken(self) -> bool:
        """Whether it has ended without a result, or with an error."""
        return self.ended and (self.done is None or bool(self.done.error))

    def end(self, error: str) -> None:
        """Kill the process because of *error*, unless it has ended."""
        if not self.ended:
            self.error = error
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def stop(self) -> None:
        self.kill()
        self.process.wait()
        self.connection.close()
        self._output.close()

    def tail(self) -> str:
        """Return the end of what the process printed, on lines of its own."""
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - TAIL))
        text = self._output.read().decode(errors="replace").strip()
        return f"\n{text}" if text else ""

    def result(self) -> RankResult:
        """Return how the rank ended; a death and an error that is not pdsim's carry the end of what it printed."""
        code = self.process.wait()
        died = f"killed by signal {-code}" if code < 0 else f"exit code {code}" if code else ""
        if self.done is None:
            error = self.error or f"{died or 'ended without a result'}{self.tail()}"
            return RankResult(self.name, error=error)
        done, error = self.done, self.done.error
        if error and error.partition(":")[0] not in errors.__all__:
            error += self.tail()
        elif not error and died:
            error = f"{self.error or died} after its program had ended{self.tail()}"
        return RankResult(self.name, done.value, error, done.engine, done.transfers, done.refused)
