# SPDX-License-Identifier: Apache-2.0
"""Which processors of a guest share a core, and which are far from each other or from a GPU: by measuring.

A guest's kernel says that every processor is a core of its own.  Two loops on the two threads of one core each take
longer; a word that goes to and fro between two sockets takes longer; so does a launch on a GPU of the other socket.
"""

from __future__ import annotations

import csv
import ctypes
import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.probe.drivers import Memory

TURNS = 1500
"""Of a word between two processors."""

LOOP = 4000
"""Turns of a loop, some 0.1 ms."""


def measure(to: Path, *, gpus: bool) -> None:
    """Write rows (what, first, second, value) to *to*: loops and round trips in ns, launches by GPU in ns.

    ``loop`` is of one processor alone, ``beside`` of one while another is busy with the same, ``trip`` of a word to
    the other processor and back, ``launch`` of a copy within the GPU *second* by the processor *first*.
    """
    count = os.cpu_count() or 1
    page = mmap.mmap(-1, mmap.PAGESIZE)
    cells = memoryview(page).cast("q")
    context: Any = multiprocessing.get_context("fork")
    other = context.Process(target=_echo, args=(page,), daemon=True)
    other.start()
    rows: list[tuple[str, int, int, float]] = []
    pairs = [(0, other) for other in range(1, count)] + [(first, first + 1) for first in range(1, count - 1)]
    for first in range(count):
        os.sched_setaffinity(0, {first})
        rows.append(("loop", first, first, min(_loop() for _ in range(15))))
    for first, second in pairs:
        os.sched_setaffinity(0, {first})
        cells[2] = second
        cells[1] = 1  # be busy
        while cells[3] != second:
            pass
        time.sleep(0)
        rows.append(("beside", first, second, sorted(_loop() for _ in range(21))[10]))
        cells[1] = 2  # answer
        trips = []
        for turn in range(1, TURNS):
            begin = time.perf_counter_ns()
            cells[4] = turn
            while cells[5] != turn:
                pass
            trips.append(time.perf_counter_ns() - begin)
        rows.append(("trip", first, second, sorted(trips)[len(trips) // 10]))
        cells[5] = cells[4] = 0
    cells[1] = 3
    other.join(2.0)
    if other.is_alive():
        other.kill()
    for gpu in range(2) if gpus else ():
        memory = Memory(1 << 20, gpu)
        memory.launch_ns(time.perf_counter_ns)
        for first in range(count):
            os.sched_setaffinity(0, {first})
            found = min(memory.launch_ns(time.perf_counter_ns, 300) for _ in range(4))
            rows.append(("launch", first, gpu, found))
    with to.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("what", "first", "second", "ns"))
        writer.writerows((*row[:3], f"{row[3]:.1f}") for row in rows)
    print(f"{to}: {len(rows)} rows")


def spin(processor: int) -> subprocess.Popen[bytes]:
    """Return a process that keeps *processor* busy until its parent ends."""
    work = (
        f"import ctypes, os; ctypes.CDLL(None).prctl(1, 9); os.sched_setaffinity(0, {{{processor}}})\nwhile 1: pass"
    )
    return subprocess.Popen([sys.executable, "-S", "-c", work])


def _loop() -> float:
    """Return the ns of one turn of a fixed loop."""
    begin, total = time.perf_counter_ns(), 0
    for index in range(LOOP):
        total += index & 3
    return (time.perf_counter_ns() - begin) / LOOP


def _echo(page: mmap.mmap) -> None:
    """Do on the processor in cell 2 what cell 1 says: 1 be busy, 2 send cell 4 back in cell 5, 3 end."""
    ctypes.CDLL(None).prctl(1, 9)
    cells = memoryview(page).cast("q")
    while (what := cells[1]) != 3:
        if cells[3] != cells[2]:
            os.sched_setaffinity(0, {cells[2]})
            cells[3] = cells[2]
        if what == 1:
            sum(range(100))
        elif what == 2:
            cells[5] = cells[4]
