"""Jobs of the tests, run in the guest: a `Target` whose ranks are processes there."""

from __future__ import annotations

import os
import pickle
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdsim.fabric.machine import Engine
from pdsim.transfer import Outcome, RankSpec
from tests.rdma.guest import PATIENCE, Guest, GuestFailed

__all__ = ["GuestTarget", "Server"]

START = 240.0
"""Seconds that a server may take to import everything, on an emulated processor."""
JOB = 90.0
"""Seconds of a job on the host, after which its ranks are killed; the guest's are `PATIENCE` times as many."""


class Server:
    """A server of jobs in *guest*, called *name*, that has imported *modules*.

    *python* is the command that runs Python there, *env* what is added to its environment.
    """

    def __init__(
        self,
        guest: Guest,
        name: str,
        modules: Sequence[str],
        python: Sequence[str] = (sys.executable,),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.guest = guest
        self.name = name
        self._count = 0
        self._fifos = f"/run/{name}"
        self._log = guest.folder / f"{name}.log"
        command = shlex.join([*python, "-m", "tests.rdma.server", self._fifos, *modules])
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        environment = {"PYTHONPATH": path, "PDSIM_PATIENCE": f"{PATIENCE:g}", **(env or {})}
        script = (
            f"mkdir {self._fifos}; setsid {command} > {self._log} 2>&1 < /dev/null & "
            f"while [ -d /proc/$! ]; do [ -p {self._fifos}/answers ] && exit 0; sleep 0.2; done; exit 1"
        )
        self._check(guest.run("sh", "-c", script, timeout=START, env=environment).status)

    def run(self, job: object, seconds: float) -> Any:
        """Run *job*, a tuple that `tests.rdma.server.serve` takes, and return its result or raise its exception."""
        self._count += 1
        place = self.guest.folder / f"{self.name}{self._count}"
        place.mkdir()
        (place / "job").write_bytes(pickle.dumps(job))
        script = f"echo {place}/job > {self._fifos}/jobs && read answer < {self._fifos}/answers"
        self._check(self.guest.run("sh", "-c", script, timeout=seconds).status)
        result = pickle.loads((place / "result").read_bytes())
        if isinstance(result, Exception):
            raise result
        return result

    def _check(self, status: int) -> None:
        if status:
            text = self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""
            what = "is not done in time" if status == 124 else f"ended with status {status}"
            raise GuestFailed(f"the server {self.name!r} in the guest {what}:\n{text}")


class GuestTarget:
    """A `Target` for *engine* on *server*; *options* are those of `backends.launch.Processes`."""

    def __init__(self, server: Server, engine: Engine, **options: Any) -> None:
        self.server = server
        self.engine = engine
        self.deadline = JOB * PATIENCE
        self.startup = 60.0 * PATIENCE
        self.options = {"deadline": self.deadline, "startup": self.startup, "device_capacity": 1 << 30, **options}

    def run(self, ranks: Sequence[RankSpec], kill: Mapping[str, float] | None = None) -> Outcome:
        """Run *ranks* in the guest; see `pdsim.transfer.Target.run`."""
        job = (self.engine, list(ranks), dict(kill or {}), self.options)
        outcome: Outcome = self.server.run(job, self.deadline + self.startup + 30)
        return outcome
