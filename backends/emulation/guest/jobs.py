# SPDX-License-Identifier: Apache-2.0
"""The guest's side of `backends.emulation.guest.engines`: forks the ranks of jobs, with everything imported.

To import what a rank needs takes an emulated processor ten seconds; a fork takes none.

``python -m backends.emulation.guest.jobs FOLDER ENGINE MODULE`` loads the endpoint of ENGINE and imports MODULE, its
library.  It says ``ready`` on the FIFO ``FOLDER/answers``, takes the paths of jobs from ``FOLDER/jobs``, and says
``done`` after each.
"""

import gc
import os
import pickle
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from backends.jobs.launcher import Processes
from backends.jobs.spawn import ForkedRank, become
from backends.registry import load

LATE = ("zmq.utils.monitor", "zmq.utils.z85")  # modules that ranks import late, though all of them need them


def fork(connection: int, output: IO[bytes]) -> ForkedRank:
    """Start a rank as `backends.jobs.spawn.spawn` does, but with all that this process has imported."""
    pid = os.fork()
    return ForkedRank(pid) if pid else become(connection, output.fileno())


def serve(job: Path) -> None:
    """Run the job at *job*, and leave beside it its `Outcome`, or the exception that kept it from starting."""
    engine, ranks, kill, restart, options = pickle.loads(job.read_bytes())  # noqa: S301 the host wrote it
    for spec in ranks:
        with suppress(ImportError):  # the rank will say so
            import_module(spec.program.partition(":")[0])
    gc.collect()
    gc.freeze()  # or a rank's own collection would look at all of it, and thereby copy it
    try:
        result: Any = Processes(engine, spawn=fork, **options).run(ranks, kill, restart)
    except Exception as error:
        result = error
    job.with_name("result").write_bytes(pickle.dumps(result))


def main(folder: Path, engine: str, module: str) -> None:
    """Serve jobs until the guest ends."""
    for name in (module, *LATE):
        import_module(name)
    load(engine)
    answers = os.open(folder / "answers", os.O_RDWR)
    with os.fdopen(os.open(folder / "jobs", os.O_RDWR)) as jobs:
        os.write(answers, b"ready\n")
        for line in jobs:
            serve(Path(line.strip()))
            os.write(answers, b"done\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
