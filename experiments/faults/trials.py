# SPDX-License-Identifier: Apache-2.0
"""How scenarios of `experiment=faults` are tried: in processes, kept in a file, and made smaller if they fail."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children
from pathlib import Path
from typing import Any, NamedTuple

from experiments.faults.scenario import KINDS, Tried, attempt, draw
from experiments.parts import Parts
from pdsim.verify.invariants import Violation

CRASH = "crash"
"""Stands for an invariant where a scenario did not run to its end."""

_BATCH = 5
"""Scenarios that a process is given at a time."""

_ROOT = Path(__file__).resolve().parents[2]
_CODE = (
    *("pdsim/core", "pdsim/hardware", "pdsim/transfer", "pdsim/sim", "pdsim/kv", "pdsim/serving", "pdsim/verify"),
    "experiments/faults",
)
"""Folders of the sources that decide what becomes of a scenario."""


class FaultTrial(NamedTuple):
    """Which scenario, and how much of it (`experiments.faults.scenario.draw`)."""

    seed: int
    requests: int = 50
    intensity: float = 0.4
    without: frozenset[str] = frozenset()
    always: frozenset[str] = frozenset()

    def run(self) -> Tried:
        """Run it; an exception of the model itself, rather than of one of its ranks, is a violation too: `CRASH`."""
        try:
            return attempt(draw(self.seed, self.requests, self.intensity, self.without, self.always))
        except Exception as error:  # a campaign goes on
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error}, in {where.name}, line {where.lineno}"
            return Tried(self.seed, [Violation(CRASH, 0.0, what)], {}, 0, "")

    def command(self) -> str:
        """Return what replays it."""
        named = {"without": self.without, "always": self.always - self.without}
        kinds = "".join(f" 'experiment.{key}=[{','.join(sorted(of))}]'" for key, of in named.items() if of)
        return (
            f"python -m pdsim run experiment=faults experiment.seed={self.seed} experiment.requests={self.requests} "
            f"experiment.intensity={self.intensity:g}{kinds}"
        )


def tries(trials: Sequence[FaultTrial], workers: int) -> Iterator[Tried]:
    """Run *trials* on so many processes and yield what became of each.

    If whoever iterates stops, by Ctrl-C too, the processes are ended at once.
    """
    if workers == 1 or len(trials) <= _BATCH:
        yield from map(FaultTrial.run, trials)
        return
    pool = ProcessPoolExecutor(workers)
    try:
        yield from pool.map(FaultTrial.run, trials, chunksize=_BATCH)
    except BaseException:  # whoever stops asking, by a signal too, does not wait for what is under way
        pool.shutdown(wait=False, cancel_futures=True)  # its thread may not even have been started
        for process in active_children():
            process.kill()  # it would take a SIGTERM for an error of its scenario; it holds nothing
        raise
    pool.shutdown()


def shrunk(trial: FaultTrial, invariant: str) -> tuple[FaultTrial, Violation]:
    """Return the smallest scenario like *trial* that still violates *invariant*, and the violation.

    Kinds of faults are left out one by one, then requests by halves, quarters and so on, as long as the invariant
    stays violated.  Raise a `ValueError` if *trial* does not violate it.
    """
    violation = _violation(trial, invariant)
    if violation is None:
        raise ValueError(f"{trial} does not violate {invariant}")
    for kind in KINDS:
        smaller = trial._replace(without=trial.without | {kind})
        if still := _violation(smaller, invariant):
            trial, violation = smaller, still
    step = trial.requests // 2
    while step:
        still = _violation(smaller := trial._replace(requests=trial.requests - step), invariant)
        if still:
            trial, violation = smaller, still
        if not still or step >= trial.requests:
            step //= 2
    return trial, violation


def _violation(trial: FaultTrial, invariant: str) -> Violation | None:
    return next((each for each in trial.run().violations if each.invariant == invariant), None)


def code() -> str:
    """Return the SHA-256, in hexadecimal, of the sources in `_CODE`."""
    digest = hashlib.sha256()
    for path in sorted(path for room in _CODE for path in (_ROOT / room).rglob("*.py")):
        digest.update(str(path.relative_to(_ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def campaign_parts(path: Path, options: Mapping[str, Any]) -> Parts[Tried]:
    """Return what *path* keeps of the scenarios that this code ran with *options*, by seed."""
    return Parts(path, {"faults": 1, "code": code(), **options}, Tried, "scenarios")
