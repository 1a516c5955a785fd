# SPDX-License-Identifier: Apache-2.0
"""Start a worker for each GPU, keep what they measure, and start one again behind a case that ended its process.

A kernel that is wrong for a size can end the process or poison its CUDA context, so the cases run in processes of
their own (`backends.profiling.measuring`), each seeing one GPU.  A job's files are in its folder: the cases as JSON,
and a CSV and a log for each worker.
"""

import csv
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.profiling.inventory import allreduces
from pdsim.core import plugins
from pdsim.core.errors import ConfigError
from pdsim.core.progress import ShowProgress, silent

Rows = list[dict[str, str]]
_RESTARTS = 3


@dataclass(frozen=True)
class ProfiledDevice:
    """The device that is measured, as PyTorch reports it."""

    kind: str  # "cuda" or "cpu"
    count: int  # GPUs that are visible; 1 for a processor
    name: str  # of the first one, as its driver gives it
    memory: float  # its bytes
    torch: str  # version of PyTorch


def device(kind: str) -> ProfiledDevice:
    """Return the device of *kind*, "cuda" or "cpu".  Raise a `ConfigError` without PyTorch, or a GPU for it."""
    plugins.require("profile", "torch", "torch")
    import torch

    if kind == "cpu":
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return ProfiledDevice("cpu", 1, "processor", memory, torch.__version__)
    if not torch.cuda.is_available():
        raise ConfigError("profile found no GPU that PyTorch can use; try --device cpu, or see pdsim doctor")
    about, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
    return ProfiledDevice("cuda", count, about.name, float(about.total_memory), torch.__version__)


def measure(
    cases: Sequence[Mapping[str, Any]],
    where: ProfiledDevice,
    *,
    limit: float,
    seconds: float,
    repeats: int,
    folder: Path,
    hidden: Sequence[int] = (),
    gpus: int = 0,
    progress: ShowProgress = silent,
) -> tuple[Rows, list[str]]:
    """Return the rows of *cases* on *where*, and a line for each that could not be measured.

    Each of *gpus* GPUs (0: all) takes its share of the cases, the most valuable first; with several, all-reduces of
    *hidden* elements a token follow, for which a quarter of the time is kept, 40 s at most.  It takes *limit*
    seconds, but for a case that has begun.  Each of *repeats* samples of a case takes *seconds*.  Rows are in
    *folder* as they come, so that they survive an end by force; *progress* is shown the share of *limit* that
    is over.
    """
    world = max(1, gpus or where.count)
    end = time.monotonic() + limit
    together = allreduces(hidden, world) if world > 1 else []
    if where.kind == "cpu":
        together = [case for case in together if case["kernel"] == "nccl"][::3]
    alone = max(limit * 0.75, limit - 40.0) if together else limit
    folder.mkdir(parents=True, exist_ok=True)
    job = {"device": where.kind, "world": world, "seconds": seconds, "repeats": repeats}

    def waiting() -> None:
        progress(
            1.0 - (end - time.monotonic()) / limit, f"{len(cases) + len(together)} cases, rows so far in {folder}"
        )

    log = _run(job, cases, where, end - limit + alone, folder / "alone", waiting, joint=False)
    if together:
        log += _run(job, together, where, end, folder / "together", waiting, joint=True)
    rows: Rows = []
    for path in [*(folder / f"alone-{rank}.csv" for rank in range(world)), folder / "together-0.csv"]:
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                rows += list(csv.DictReader(file))
    return rows, log


def _run(
    job: Mapping[str, Any],
    cases: Sequence[Mapping[str, Any]],
    where: ProfiledDevice,
    deadline: float,
    output: Path,
    waiting: Callable[[], None],
    joint: bool,
) -> list[str]:
    # *joint* workers see all GPUs, meet each other and are not restarted: the others would wait in a collective that
    # the new one has not entered.  A worker that goes on 30 s beyond the *deadline* is killed.
    numbered = [{**case, "number": number} for number, case in enumerate(cases)]
    meeting = output.with_suffix(".meeting").absolute()
    meeting.unlink(missing_ok=True)
    about = {**job, "cases": numbered, "output": str(output), "deadline": deadline, "meeting": str(meeting)}
    path = output.with_suffix(".json")
    path.write_text(json.dumps(about), encoding="utf-8")
    logs = [Path(f"{output}-{rank}.log") for rank in range(job["world"])]
    for log in logs:
        log.unlink(missing_ok=True)
    running = {rank: _start(path, rank, log, where, joint) for rank, log in enumerate(logs)}
    restarts = dict.fromkeys(running, 0)
    try:
        while running:
            time.sleep(0.05)
            waiting()
            for rank, process in list(running.items()):
                if time.monotonic() > deadline + 30.0:
                    process.kill()
                    process.wait()
                if (status := process.poll()) is None:
                    continue
                del running[rank]
                if status and not joint and restarts[rank] < _RESTARTS and time.monotonic() < deadline:
                    restarts[rank] += 1
                    running[rank] = _start(path, rank, logs[rank], where, joint)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    failed = []
    for log in logs:
        text = log.read_text(encoding="utf-8", errors="replace")
        failed += [line for line in text.splitlines() if line.startswith(("failed", "rank", "not compiled", "no "))]
        if "Traceback" in text:
            failed.append(f"a worker ended: {text.strip().splitlines()[-1][:300]}")
    return failed


def _start(job: Path, rank: int, log: Path, where: ProfiledDevice, joint: bool) -> subprocess.Popen[bytes]:
    # It begins behind the case that its log names last.  ``CUDA_VISIBLE_DEVICES`` of this process is kept to.
    # PyTorch compiles on one thread, so that workers do not disturb each other's measurements.
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ}
    if where.kind == "cuda" and not joint:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        every = visible.split(",") if visible else [str(number) for number in range(where.count)]
        environment["CUDA_VISIBLE_DEVICES"] = every[rank]
    with log.open("a+", encoding="utf-8", errors="replace") as file:
        file.seek(0)
        begun = re.findall(r"^case (\d+) ", file.read(), re.MULTILINE)
        after = begun[-1] if begun else "-1"
        words = [sys.executable, "-m", "backends.profiling.measuring", str(job), str(rank), after]
        return subprocess.Popen(words, env=environment, stdout=file, stderr=subprocess.STDOUT)
