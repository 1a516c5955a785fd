# SPDX-License-Identifier: Apache-2.0
"""Measure all points: four rank processes for each variant, then two for NCCL; one CSV with its provenance."""

from __future__ import annotations

import csv
import mmap
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.probe import gathers, ranks
from benchmarks.probe.plan import (
    BINDING,
    BOUND,
    GPU,
    HOST,
    MIB,
    PATTERNS,
    PLACES,
    VARIANTS,
    Point,
    Scale,
    Variant,
    fingerprint,
    in_rounds,
)

PATIENCE = 30.0
"""Seconds that a rank has for an answer."""

PACKAGES = ("mooncake-transfer-engine-cuda13", "mooncake-transfer-engine-non-cuda", "nixl-cu13", "torch", "numpy")


class Row(NamedTuple):
    """One line of the CSV.  Microseconds; *start* to *total* count from the instant at which all flows may start."""

    section: str  # "pair", "contention", "gather" or "host"
    library: str
    variant: str
    pattern: str
    operation: str
    descriptors: int
    size: int  # bytes of a descriptor; of a gather, of one rank
    flow: int  # or rank
    repeat: int
    start: float | str = ""  # it began to prepare
    prepare: float | str = ""  # NIXL's handle, Mooncake's lists
    post: float | str = ""  # the posting call returned
    total: float | str = ""  # the end was seen; of a gather, by the caller
    device: float | str = ""  # of a gather: between two events of the GPU's stream that was kept busy before
    note: str = ""
    where: str = ""  # NIXL with its thread: processors of each rank's posting thread, and of its others that run


class Crew:
    """The rank processes of one variant."""

    def __init__(self, variant: Variant, scale: Scale, gpus: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.variant, self.scale = variant, scale
        half = ranks.SLOTS * scale.total
        self.turn, self.where = 1, ""
        file, page = tempfile.mkstemp(prefix="pdsim-probe-")
        os.ftruncate(file, mmap.PAGESIZE)
        os.close(file)
        self.page = Path(page)
        self.pipes: dict[str, Connection] = {}
        self.processes = []
        for name, gpu in PLACES.items():
            ours, theirs = context.Pipe()
            arguments = (theirs, name, variant, gpu if gpus else None, half, self.page)
            process = context.Process(target=ranks.main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes[name] = ours
            self.processes.append(process)
        try:
            descriptions = {name: self.answer(name) for name in self.pipes}
            for name in self.pipes:
                self.order(name, "meet", descriptions)
            for name in self.pipes:
                self.answer(name)
        except BaseException:
            self.end()
            raise

    def order(self, name: str, *order: Any) -> None:
        """Send an order."""
        self.pipes[name].send(order)

    def answer(self, name: str) -> Any:
        """Return what a rank answers; raise if that is an error, or nothing for `PATIENCE` seconds."""
        if not self.pipes[name].poll(PATIENCE):
            raise TimeoutError(f"{name} did not answer for {PATIENCE:.0f} s")
        status, found = self.pipes[name].recv()
        if status != "ok":
            raise RuntimeError(f"{name}: {found}")
        return found

    def ask(self, name: str, *order: Any) -> Any:
        """Send an order and return its answer."""
        self.order(name, *order)
        return self.answer(name)

    def go(self, point: Point, turns: int) -> list[list[tuple[int, ranks.Times]]]:
        """Run the flows of *point* so many times; return the times of each flow, by its number, for each turn."""
        orders: dict[str, list[tuple[int, ranks.Flow]]] = {}
        for number, (initiator, target) in enumerate(PATTERNS[point.pattern]):
            mine = orders.setdefault(initiator, [])
            thread = len(mine) if self.variant.threads == 0 else len(mine) % self.variant.threads
            flow = ranks.Flow(target, point.operation, point.count, point.size, number, thread)
            mine.append((number, flow))
        for name, mine in orders.items():
            self.order(name, "go", self.turn, turns, list(orders), [flow for _, flow in mine])
        self.turn += turns
        found = {name: self.answer(name) for name in orders}
        self.where = _where(self.processes, list(PLACES)) if self.variant.progress else ""
        return [
            [
                (number, times)
                for name, mine in orders.items()
                for (number, _), times in zip(mine, found[name][turn], strict=True)
            ]
            for turn in range(turns)
        ]

    def check(self, operation: str) -> None:
        """Move one batch of 3 pieces of 4 KiB and see that its bytes arrive, and no others."""
        for index, name in enumerate(self.pipes):
            self.ask(name, "fill", 1 + index, 0)
        self.go(Point("one", operation, 3, 4096), 1)
        receiver, sent = ("b0", 1) if operation == "write" else ("a0", 3)
        found = [self.ask(receiver, "peek", offset) for offset in (0, 4096, 3 * 4096 - 1, 3 * 4096)]
        if found != [sent, sent, sent, 0]:
            raise RuntimeError(f"wrong bytes after a {operation}: {found}, expected {[sent] * 3 + [0]}")

    def end(self) -> None:
        """End the processes, willing or not."""
        for pipe in self.pipes.values():
            try:
                pipe.send(("end",))
            except OSError:
                continue
        for process in self.processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join(5.0)
        self.page.unlink(missing_ok=True)


def rows(variant: Variant, scale: Scale, gpus: bool, deadline: float) -> Iterator[Row]:
    """Yield the rows of *variant*; what fails is a row with a note, and ends the variant."""
    point = Point("", "", 0, 0)
    try:
        crew = Crew(variant, scale, gpus)
    except Exception as error:
        yield _row(variant, point, f"did not start: {error}")
        return
    try:
        for operation in ("write", "read"):
            crew.check(operation)
        if variant is VARIANTS[0]:
            for rank, name in enumerate(PLACES):
                for repeat in range(5):
                    turn, launch = crew.ask(name, "host")
                    yield Row("host", "python", "loop", "", "", 1, 0, rank, repeat, total=turn * 1e-3)
                    yield Row("host", "cuda", "launch", "", "", 1, 4096, rank, repeat, total=launch * 1e-3)
        for turn, section, point in in_rounds(variant, scale):
            if time.monotonic() > deadline:
                yield _row(variant, point, "out of time")
                return
            found = crew.go(point, scale.warmup + scale.repeat)[scale.warmup :]
            for repeat, flows in enumerate(found, turn * scale.repeat):
                for number, times in flows:
                    row = _row(variant, point)._replace(section=section, where=crew.where)
                    yield _timed(row, number, repeat, times)
    except Exception as error:
        yield _row(variant, point, f"failed: {error}")
    finally:
        crew.end()


def _where(processes: Sequence[Any], names: Sequence[str]) -> str:
    """Return for each process, as ``a0 3/7,9``, where its first thread ran last, and its others that run now."""
    said = []
    for process, name in zip(processes, names, strict=True):
        first, others = "", []
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            if int(task.name) == process.pid:
                first = fields[36]
            elif fields[0] == "R":
                others.append(fields[36])
        said.append(f"{name} {first}/{','.join(others)}")
    return " ".join(said)


def _row(variant: Variant, point: Point, note: str = "") -> Row:
    """Return a row without times."""
    of = (point.pattern, point.operation, point.count, point.size)
    return Row("pair", variant.library, variant.name, *of, flow=0, repeat=-1, note=note)


def _timed(row: Row, flow: int, repeat: int, times: ranks.Times) -> Row:
    """Return *row* with the times of a flow, in microseconds."""
    start, prepare = times.begun / 1e3, times.prepared / 1e3
    post, total = times.posted / 1e3, times.done / 1e3
    return row._replace(flow=flow, repeat=repeat, start=start, prepare=prepare, post=post, total=total)


def measure(to: Path, *, host: bool, seconds: float, predictions: str, bound: bool = False) -> int:
    """Measure into *to* for at most *seconds*, and return the number of variants that did not finish.

    With *bound* measure those of `BOUND` and no all-gathers instead.
    """
    scale, began = HOST if host else BINDING if bound else GPU, time.monotonic()
    deadline = began + seconds
    bad = 0
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("w", newline="", encoding="utf-8") as file:
        for key, value in provenance(scale, predictions).items():
            file.write(f"# {key}: {value}\n")
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        for what, found in _sections(scale, not host, deadline, bound):
            noted = ""
            for row in found:
                writer.writerow(f"{cell:.3f}" if isinstance(cell, float) else cell for cell in row)
                noted = row.note or noted
            file.flush()
            bad += bool(noted)
            print(f"{time.monotonic() - began:6.1f} s  {what} {noted}", flush=True)
    return bad


def _sections(scale: Scale, gpus: bool, deadline: float, bound: bool) -> Iterator[tuple[str, Iterator[Row]]]:
    for variant in BOUND if bound else VARIANTS:
        yield f"{variant.library} {variant.name}", rows(variant, scale, gpus, deadline - 25.0 * (gpus and not bound))
    if gpus and not bound:
        for mode in gathers.MODES:
            found = gathers.measured(mode, max(10.0, min(60.0, deadline - time.monotonic())))
            yield f"gathers {mode}", (Row("gather", "nccl", mode, "", "all-gather", 1, *rest) for rest in found)


def provenance(scale: Scale, predictions: str) -> dict[str, str]:
    """Return what the figures depend on."""
    cpu = [line.split(":")[1] for line in _text("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    query = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(sys.orig_argv[1:]),
        "plan": fingerprint(scale),
        "predictions": predictions or "none",
        "commit": _called("git", "rev-parse", "HEAD"),
        "host": f"{(cpu or [platform.processor()])[0].strip()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "gpus": _called(*query).replace("\n", "; "),
        "versions": ", ".join([f"python {platform.python_version()}", *filter(None, map(_version, PACKAGES))]),
        "largest": f"{scale.total // MIB} MiB a transfer",
    }


def _version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""


def _called(*command: Sequence[str] | str) -> str:
    try:
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _text(path: str) -> str:
    file = Path(path)
    return file.read_text() if file.exists() else ""
