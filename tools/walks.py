# SPDX-License-Identifier: Apache-2.0
"""Count the files whose code runs on three ways through pdsim, by running them: ``python -m tools.walks [WAY]``.

- ``request``: ``pdsim run hw=8xh20 workload.count=1``, from the command line to the files of the result
- ``chunk``: in that run, from the end of the only forward of prefill to the request's start on decode
- ``number``: ``backend.intra.descriptor`` of a calibration, to a simulated microsecond of a transfer: the files of
  functions that have the number in an argument, a variable or an attribute of one
"""

import argparse
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
NO_FUNCTION = ("<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
REQUEST = ("run", "hw=8xh20", "workload.count=1")
NUMBER = "3.217us"
TRANSFER = (
    *("run", "experiment=transfer", "hw=2xh200", "backend=nvlink", "experiment.patterns=[pair]"),
    *("experiment.repeat=1", "experiment.blocks=[4]", "experiment.size=[64KiB]", "experiment.warmup=0"),
)


def files(words: Sequence[str], counts: Callable[[FrameType, str, Any], bool] = lambda *_: True) -> list[str]:
    """Run ``pdsim`` with *words*; return the files with a function that *counts* when it is called or returns."""
    paths: dict[str, None] = {}

    def see(frame: FrameType, event: str, value: Any) -> None:
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        if event not in ("call", "return") or code.co_name in NO_FUNCTION or not path.is_relative_to(ROOT):
            return
        own = path.relative_to(ROOT)
        if code.co_flags & inspect.CO_NEWLOCALS and own.parts[0] in ROOMS and counts(frame, event, value):
            paths.setdefault(str(own))

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
    marked = (NUMBER, parse_time(NUMBER))

    def is_it(value: Any) -> bool:
        return isinstance(value, str | float) and value in marked

    def has_it(frame: FrameType, event: str, returned: Any) -> bool:
        held = [*frame.f_locals.values(), returned] if event == "return" else []
        return any(map(is_it, held)) or any(map(is_it, (item for value in held for item in _within(value))))

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "calibration").mkdir()
        (Path(folder) / "calibration" / "marked.yaml").write_text(text, encoding="utf-8")
        return files((*TRANSFER, "--config-dir", folder, "calibration=marked"), has_it)


def _within(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        return value
    held = is_dataclass(value) and not isinstance(value, type)
    return value.values() if type(value) is dict else getattr(value, "__dict__", {}).values() if held else ()


WALKS = {"request": lambda: files(REQUEST), "chunk": chunk, "number": number}


def main() -> None:
    """Print the walk that is named, or all, each in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m tools.walks", description="Print the files of each walk.")
    parser.add_argument("walk", nargs="?", choices=WALKS, metavar=f"{{{','.join(WALKS)}}}")
    if name := parser.parse_args().walk:
        paths = WALKS[name]()
        print(f"{name}: {len(paths)} files", *paths, sep="\n  ")
        return
    for name in WALKS:
        subprocess.run([sys.executable, "-m", "tools.walks", name], cwd=ROOT, check=True, timeout=300)


if __name__ == "__main__":
    main()
