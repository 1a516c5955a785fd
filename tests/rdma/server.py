"""The guest's side of `tests.rdma.target`: it runs jobs, and forks their ranks, with everything imported.

To import what a rank needs takes an emulated processor ten seconds; a fork takes none.  No engine is started before the
fork: they do not survive one.

``python -m tests.rdma.server FOLDER MODULE ...`` imports each MODULE, then takes the path of one job after the other
from the FIFO ``FOLDER/jobs`` and says on the FIFO ``FOLDER/answers`` that it is done.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from backends import worker
from backends.launch import Processes

__all__ = ["Forked", "fork", "main"]


class Forked:
    """A forked rank, with what `backends.launch` uses of a `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self) -> int | None:
        return self._look(0)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def _look(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def fork(connection: int, output: IO[bytes]) -> Forked:
    """Start a rank as `backends.launch.spawn` does, but with all that this process has imported."""
    pid = os.fork()
    if pid:
        return Forked(pid)
    try:
        os.setsid()
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        mine = os.dup(connection)
        os.dup2(mine, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))  # or a sibling's connection would outlive the sibling
        sys.argv[1:] = ["3"]
        worker.main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def serve(job: Path) -> None:
    """Run the job at *job*, and leave beside it its `Outcome`, or the exception that kept it from starting."""
    engine, ranks, kill, options = pickle.loads(job.read_bytes())
    try:
        result: Any = Processes(engine, spawn=fork, **options).run(ranks, kill)
    except Exception as error:
        result = error
    job.with_name("result").write_bytes(pickle.dumps(result))


def main(folder: Path, *modules: str) -> None:
    """Serve jobs until the guest ends."""
    for module in modules:
        import_module(module)
    for name in "jobs", "answers":
        os.mkfifo(folder / name)
    while True:
        serve(Path((folder / "jobs").read_text().strip()))
        (folder / "answers").write_text("done\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
