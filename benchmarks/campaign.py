# SPDX-License-Identifier: Apache-2.0
"""All that a machine with GPUs can tell, in one go: predictions put to the test, engines calibrated, and the rest.

    python -m benchmarks.campaign hw=8xh200 [backend=nvlink,nixl] [KEY=VALUE ...] [STEP:KEY=VALUE ...] [OPTION ...]

Each step is a command of pdsim in a process of its own, with a deadline; what fails or is stopped does not keep the
next from running.  Steps come in the order of what is lost without them: `doctor`; for each engine `validate`,
against the predictions committed for the machine if there are any, and `calibrate`; then `crossing`, `allgather`,
the seeds; and at last `again`, the validation compared with the model that was calibrated here, for which no GPU is
needed.

KEY=VALUE goes to every step, STEP:KEY=VALUE to that step only.  One folder holds all there is: a log of each step,
`runs`, `calibration` and ``campaign.json``, written anew after each.  Exit status 1 if a step failed or was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from benchmarks.validation import STORED
from experiments.validate.sealed import EXPECTED, MEASURED, keep
from pdsim.config.compose import compose
from pdsim.results.environment import environment

ENGINES = "nvlink,mooncake_nvlink,nixl"
LIMITS = {
    "doctor": 60,
    "validate": 240,
    "calibrate": 180,
    "crossing": 120,
    "allgather": 120,
    "seed": 240,
    "again": 300,
}
"""Seconds of each kind of step; on 2 x H200, with three jobs, a validation took 55 and a calibration 20."""

JOBS = "experiment.jobs=3"
"""Of a validation, whose ranks take several seconds to start: nine, as without a campaign, would take five
minutes."""

SEEDS = {"symmetric_allgather": "", "intranode_metadata": "mooncake_nvlink", "nixl_staging": "nixl"}
"""The reports about GPUs of one node, each with the engine that it is about; "" is any."""

CROSSING = 4
"""Ranks of a 2 x 2 crossing, each on a GPU."""

RANKS = (2, 4, 8)
"""Of all-gathers, as many as there are GPUs for."""

GRACE = 20.0
"""Seconds that a command has to put its ranks and files away when it is told to end."""


@dataclass(frozen=True)
class Step:
    """One command: its name, as ``"validate nvlink"``, the words after ``python -m pdsim``, and its deadline."""

    name: str
    words: tuple[str, ...]
    limit: float  # seconds

    @property
    def kind(self) -> str:
        """What is before the engine: ``"validate"``."""
        return self.name.partition(" ")[0]


@dataclass(frozen=True)
class Done:
    """What became of a step."""

    name: str
    command: str
    status: str  # "ok"; "failed": exit status 1, part of it or an error beyond its bound; "refused"; "stopped"; ...
    seconds: float
    log: str


def plan(
    hw: str, engines: Sequence[str], folder: Path, common: Sequence[str] = (), *, anew: bool = False
) -> Iterator[Step]:
    """Yield the steps on the machine *hw* with *engines*, whose results go to *folder*; *common* words go to all.

    With *anew* the predictions are made on the machine, whatever is committed.
    """
    base = (f"hw={hw}", f"output={folder / 'runs'}", *common)
    real = ("target=real", *base)
    yield Step("doctor", ("doctor",), LIMITS["doctor"])
    for engine in engines:
        known = STORED / f"{engine}-{hw}" / EXPECTED
        ahead = known.is_file() and not (known.parent / MEASURED).is_file()  # nobody has measured what it predicts
        given = (f"experiment.expected={known}",) if ahead and not anew else ()
        first = engine == engines[0]
        classes = () if given or first else ("experiment.classes=[pair,read,contention,handoff,metadata,serve]",)
        yield Step(
            f"validate {engine}",
            ("validate", *real, f"backend={engine}", JOBS, *given, *classes),
            LIMITS["validate"],
        )
    for engine in engines:
        to = ("--to", str(folder / "calibration"), "--name", _here(engine, hw))
        yield Step(f"calibrate {engine}", ("calibrate", *real, f"backend={engine}", *to), LIMITS["calibrate"])
    machine = compose([f"hw={hw}"]).hw
    gpus = machine.gpus * machine.nodes or max(RANKS)  # hosts have no such limit
    for engine in engines if gpus >= CROSSING else ():
        words = ("run", "experiment=crossing", *real, f"backend={engine}")
        yield Step(f"crossing {engine}", words, LIMITS["crossing"])
    ranks = f"experiment.ranks=[{','.join(str(count) for count in RANKS if count <= gpus)}]"
    words = ("run", "experiment=allgather", *real, f"backend={engines[0]}", ranks)
    yield Step("allgather", words, LIMITS["allgather"])
    for seed, engine in SEEDS.items():
        if not engine or engine in engines:
            words = ("run", f"experiment=seed_{seed}", *real, f"backend={engine or engines[0]}")
            yield Step(f"seed {seed}", words, LIMITS["seed"])
    for engine in engines:
        words = (
            "validate",
            *base,
            f"backend={engine}",
            "experiment.predict=now",
            f"calibration={_here(engine, hw)}",
        )
        yield Step(f"again {engine}", (*words, "--config-dir", str(folder.resolve())), LIMITS["again"])


def _here(engine: str, hw: str) -> str:
    """Return the name of the calibration that is made here, which is not that of one that is committed."""
    return f"{engine}-{hw}-campaign"


def ready(step: Step, folder: Path, hw: str) -> tuple[str, ...] | None:
    """Return the words of *step*, with what an earlier step has left in *folder*; None if that is missing."""
    if step.kind != "again":
        return step.words
    engine = step.name.partition(" ")[2]
    measured = sorted((folder / "runs").glob(f"validate-{hw}-{engine}-real-*/{MEASURED}"))
    if not measured or not (folder / "calibration" / f"{_here(engine, hw)}.yaml").is_file():
        return None
    return (*step.words, f"experiment.stored={measured[-1].parent}")


def execute(command: Sequence[str], log: Path, limit: float) -> tuple[str, float]:
    """Run *command*, whose output goes to *log*, and return what became of it and the seconds that it took.

    After *limit* seconds it is told to end, and `GRACE` seconds later it and whatever it started is killed.
    """
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = {0: "ok", 1: "failed", 2: "refused"}.get(
                process.wait(limit), f"ended with {process.returncode}"
            )
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit:g} s"
        finally:
            _end(process)
    return status, time.monotonic() - began


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError):  # its session: ranks that outlived it would keep their GPUs
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def campaign(steps: Sequence[Step], folder: Path, hw: str, limit: float = float("inf")) -> list[Done]:
    """Run *steps*, one after the other, as long as *limit* seconds allow, and return what became of each."""
    began = time.monotonic()
    done: list[Done] = []
    for number, step in enumerate(steps):
        left = limit - (time.monotonic() - began)
        words = ready(step, folder, hw)
        command = [sys.executable, "-m", "pdsim", *(words or step.words)]
        log = folder / f"{number:02}-{step.name.replace(' ', '-')}.log"
        if words is None or left <= 0:
            status, seconds = "not begun: " + ("no time is left" if words else "what it needs is missing"), 0.0
        else:
            status, seconds = execute(command, log, min(step.limit, left))
        done.append(Done(step.name, shlex.join(command[1:]), status, round(seconds, 1), log.name if seconds else ""))
        print(f"{step.name}: {status}, {seconds:.0f} s", flush=True)
        keep(folder / "campaign.json", _report(hw, done))
    return done


def _report(hw: str, done: Sequence[Done]) -> bytes:
    content: dict[str, Any] = {"hw": hw, **environment(), "steps": [asdict(one) for one in done]}
    return (json.dumps(content, indent=1) + "\n").encode()


def _terminated(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    raise SystemExit(128 + number)  # so that the step under way is ended, too


def main(arguments: Sequence[str]) -> int:
    """Run what *arguments* ask for and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="+", metavar="KEY=VALUE", help="hw=NAME, backend=NAMES, and of pdsim")
    parser.add_argument("--to", type=Path, help="the folder, which must be empty (default: campaign-HW-DATE)")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds of all steps together")
    parser.add_argument("--steps", default=",".join(LIMITS), help=f"which kinds (default: {','.join(LIMITS)})")
    parser.add_argument("--anew", action="store_true", help="predict here, and not as is committed for this machine")
    parser.add_argument("--list", action="store_true", help="print the commands, and run nothing")
    asked = parser.parse_intermixed_args(arguments)  # words and options in any order
    chosen = dict(word.split("=", 1) for word in asked.words if word.startswith(("hw=", "backend=")))
    if "hw" not in chosen:
        parser.error("hw is missing; add hw=NAME, such as hw=8xh200")
    if unknown := set(asked.steps.split(",")) - set(LIMITS):
        parser.error(f"--steps {','.join(sorted(unknown))}: there are {', '.join(LIMITS)}")
    folder = asked.to or Path(f"campaign-{chosen['hw']}-{time.strftime('%Y%m%d-%H%M%S')}")
    steps = list(_asked(asked, chosen, folder))
    if asked.list:
        print("\n".join(f"{step.name}: {shlex.join(step.words)}" for step in steps))
        return 0
    if folder.is_dir() and any(folder.iterdir()):
        parser.error(f"--to {folder} is not empty; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _terminated)
    done = campaign(steps, folder, chosen["hw"], asked.limit)
    print(f"all of it: {folder}")
    return int(any(one.status != "ok" for one in done))


def _asked(asked: argparse.Namespace, chosen: dict[str, str], folder: Path) -> Iterator[Step]:
    """Yield the steps that were asked for, each with the words that are for it alone."""
    others = [word for word in asked.words if not word.startswith(("hw=", "backend="))]
    own = [word.partition(":")[::2] for word in others if word.partition(":")[0] in LIMITS]
    common = [word for word in others if word.partition(":")[0] not in LIMITS]
    engines = chosen.get("backend", ENGINES).split(",")
    for step in plan(chosen["hw"], engines, folder, common, anew=asked.anew):
        if step.kind in asked.steps.split(","):
            mine = tuple(word for kind, word in own if kind == step.kind)
            yield Step(step.name, (*step.words, *mine), step.limit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
