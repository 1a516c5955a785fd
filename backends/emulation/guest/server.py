# SPDX-License-Identifier: Apache-2.0
"""Jobs that are run in the guest, from the host's side; `backends.emulation.guest.jobs` is the other."""

from __future__ import annotations

import os
import pickle
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.emulation.guest.machine import PATIENCE, Guest, GuestFailed

__all__ = ["Server"]

START = 240.0
"""Seconds that a server may take to import everything, on an emulated processor; assumed."""


class Server:
    """A server of jobs in *guest* on the engine *name*, an implementation, that has imported *module*, its library.

    *python* is the command that runs Python there, *env* what is added to its environment.

    It is started when this is made, which takes up to `START` seconds; `run` then takes one job after the
    other. It ends with the guest.  A job that is not answered in time makes it useless, since a late answer would be
    taken for the next job's.
    """

    def __init__(
        self,
        guest: Guest,
        name: str,
        module: str,
        python: Sequence[str] = (sys.executable,),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.guest = guest
        self.name = name
        self._count = 0
        self._answer = "done"  # the latest; after another one nobody knows what the next would be about
        self._fifos = f"/run/{name}"
        self._log = guest.folder / f"{name}.log"
        command = shlex.join([*python, "-m", "backends.emulation.guest.jobs", self._fifos, name, module])
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        environment = {"PYTHONPATH": path, "PDSIM_PATIENCE": f"{PATIENCE:g}", **(env or {})}
        script = (
            f"mkdir {self._fifos}; mkfifo {self._fifos}/jobs {self._fifos}/answers; "
            f"{{ setsid {command} > {self._log} 2>&1 < /dev/null; echo ended > {self._fifos}/answers; }} & "
            f'read answer < {self._fifos}/answers; [ "$answer" = ready ]'
        )
        status = guest.run("sh", "-c", script, timeout=START, env=environment).status
        if status:
            raise self._failure(f"did not start within {START:g} s" if status == 124 else "ended")

    def run(self, job: object, seconds: float) -> Any:
        """Run *job*, a tuple for `guest.jobs.serve`, and return its result or raise its exception.

        *seconds* bounds the wait.  Raise `GuestFailed` if there is no answer by then, or the server has ended.
        """
        if self._answer != "done":
            raise self._failure(f"cannot be used any more, an earlier job having been answered by {self._answer!r}")
        self._count += 1
        place = self.guest.folder / f"{self.name}{self._count}"
        place.mkdir()
        (place / "job").write_bytes(pickle.dumps(job))
        self._answer = self.guest.ask(self._fifos, f"{place}/job", seconds)
        if self._answer != "done":
            raise self._failure(f"is not done after {seconds:g} s" if self._answer == "late" else self._answer)
        result = pickle.loads((place / "result").read_bytes())  # noqa: S301 our own code wrote it, as the same user
        if isinstance(result, Exception):
            raise result
        return result

    def _failure(self, what: str) -> GuestFailed:
        text = self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""
        return GuestFailed(f"the server {self.name!r} in the guest {what}:\n{text}")
