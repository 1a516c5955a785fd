# SPDX-License-Identifier: Apache-2.0
"""Count the files whose code runs on three ways through pdsim, by running them.

    python -m tools.walks              # the three, each in a process of its own: how many files, and which
    python -m tools.walks request      # one of them

- ``request``: ``pdsim run hw=8xh20 workload.count=1``, from the command line to the files of the result
- ``chunk``: in that run, from the end of the only forward of prefill to the request's start on decode
- ``number``: ``backend.intra.descriptor`` of a calibration, to a simulated microsecond of a transfer: the files of
  functions that have the number in an argument, a variable or an attribute of one

A file counts if the body of one of its functions runs.  Files are listed in the order in which they first do.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pdsim
from pdsim.__main__ import main as run_pdsim
from pdsim.core.clock import Clock
from pdsim.core.units import parse_time

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("pdsim", "backends", "experiments")
PARTS = ("<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""What is no function: the file itself, and loops in a line, which constants are made with."""
REQUEST = ("run", "hw=8xh20", "workload.count=1")
NUMBER = "3.217us"
TRANSFER = (
    *(
        "run",
        "experiment=transfer",
        "hw=2xh200",
        "backend=nvlink",
        "experiment.patterns=[pair]",
        "experiment.repeat=1",
    ),
    *("experiment.blocks=[4]", "experiment.size=[64KiB]", "experiment.concurrency=[1]", "experiment.warmup=0"),
)


def files(words: Sequence[str], counts: Callable[[FrameType, str, Any], bool] = lambda *_: True) -> list[str]:
    """Run ``pdsim`` with *words*, and return the project's files with a function for which *counts* is true.

    *counts* is given the frame of a function when it is called and when it returns, what happens, "call" or
    "return", and what is returned.
    """
    paths: dict[str, None] = {}

    def see(frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if event in ("call", "return") and code.co_flags & inspect.CO_NEWLOCALS and code.co_name not in PARTS:
            path = Path(code.co_filename)
            if (
                path.is_relative_to(ROOT)
                and path.relative_to(ROOT).parts[0] in ROOMS
                and counts(frame, event, value)
            ):
                paths.setdefault(str(path.relative_to(ROOT)))

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        sys.argv = ["pdsim", *words, f"output={folder}"]
        sys.setprofile(see)
        try:
            status = run_pdsim()
        finally:
            sys.setprofile(None)
    if status:
        raise RuntimeError(f"pdsim {' '.join(words)} ended with {status}")
    return list(paths)


def request() -> list[str]:
    """Return the files that one request on the model passes, from the command line to its row."""
    return files(REQUEST)


def chunk() -> list[str]:
    """Return the files that a chunk of KV passes on the model, from prefill's forward to the decode batch."""
    with tempfile.TemporaryDirectory() as folder:
        # in another process, so that what is kept from call to call is not yet there when it counts
        command = [sys.executable, "-m", "pdsim", *REQUEST, "--quiet", f"output={folder}"]
        subprocess.run(command, cwd=ROOT, check=True, timeout=120)
        run = pdsim.load(next(Path(folder).iterdir()))
        (row,) = run.requests.to_pylist()
        first, last = row["prefilled_at"] + run.start - 1e-9, row["joined_at"] + run.start + 1e-9
    clocks: list[Clock] = []

    def between(frame: FrameType, event: str, _: Any) -> bool:
        if not clocks and event == "return" and isinstance(frame.f_locals.get("self"), Clock):
            clocks.append(frame.f_locals["self"])
        return bool(clocks) and first <= clocks[0].now <= last

    return files(REQUEST, between)


def number() -> list[str]:
    """Return the files that a number of a calibration passes until a modelled transfer takes so long."""
    text = (ROOT / "conf" / "calibration" / "nvlink-2xh200.yaml").read_text(encoding="utf-8")
    text, changed = re.subn(r"(?m)^(\s*backend\.intra\.descriptor): .*$", rf"\1: {NUMBER}", text, count=1)
    assert changed, "the calibration has no backend.intra.descriptor"
    seconds = parse_time(NUMBER)

    def is_it(value: Any) -> bool:
        return value == NUMBER if isinstance(value, str) else isinstance(value, float) and value == seconds

    def has_it(frame: FrameType, event: str, returned: Any) -> bool:
        if event == "call":
            return False
        held = [*frame.f_locals.values(), returned]
        return any(map(is_it, held)) or any(map(is_it, (item for value in held for item in _within(value))))

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "calibration").mkdir()
        (Path(folder) / "calibration" / "marked.yaml").write_text(text, encoding="utf-8")
        return files((*TRANSFER, "--config-dir", folder, "calibration=marked"), has_it)


def _within(value: Any) -> Iterable[Any]:
    if type(value) is dict:
        return list(value.values())
    if isinstance(value, list | tuple):
        return value
    return getattr(value, "__dict__", {}).values() if is_dataclass(value) and not isinstance(value, type) else ()


WALKS = {"request": request, "chunk": chunk, "number": number}


def main(arguments: Sequence[str]) -> int:
    """Print the walk that *arguments* name, or all three."""
    for name in arguments:
        paths = WALKS[name]()
        print(f"{name}: {len(paths)} files", *paths, sep="\n  ")
    for name in () if arguments else WALKS:
        subprocess.run([sys.executable, "-m", "tools.walks", name], cwd=ROOT, check=True, timeout=300)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
