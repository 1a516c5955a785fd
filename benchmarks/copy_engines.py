# SPDX-License-Identifier: Apache-2.0
"""Which of several causes makes flows that share a GPU slow: bare CUDA copies between up to four processes.

    python -m benchmarks.copy_engines measure --to FILE     (two GPUs, 20 s)
    python -m benchmarks.copy_engines show FILE

Processes *a0* and *a1* are on the first GPU, *b0* and *b1* on the second; every lane has a stream and keeps *depth*
copies of one size queued for 16 ms, all lanes at once, and every copy's time in the queue is noted.  What each
candidate would have it say is in `CANDIDATES`, written before the measurement.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import sys
import tempfile
import time
from collections import defaultdict, deque
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from backends.cuda.runtime import Cudart, cudart
from benchmarks.probe.board import Board, Processors
from benchmarks.probe.plan import KIB, MIB, PLACES

CANDIDATES = {
    "slices": "the engine serves a process as long as it has work queued, for a slice of about 1.05 ms at most: at "
    "depth 1 processes alternate (16 MiB: 86 us, none above 200), from depth 2 on most copies of two processes take "
    "as long as alone (84 us) and every slice two of a process take about 1.1 ms; two streams of one process take "
    "172 us each; 1 GiB (2.75 ms) of two processes end at about 4.4 to 5.5 and 5.5 ms",
    "order": "the engine serves all copies of the GPU in the order of posting: at depth 2 all of two processes"
    " take 172 us as those of two streams do, none above 200; 1 GiB of two processes end at 2.75 and 5.5 ms",
    "streams": "as slices, and within a process the engine stays with a stream until that has no copy queued: at "
    "depth 2 and 4 copies of two streams of one process take 84 and 168 us as if each was alone, but for those that "
    "wait until the other stream runs dry, for ms; at depth 1 they alternate (86 us)",
    "launches": "one process' launches are what is slow: two streams of one process at 256 KiB have less than 1.2 "
    "times the rate of one, two processes 1.6 times and more",
    "directions": "both directions share an engine: opposite copies of 16 MiB take 86 us, not 43 to 48",
    "within": "copies within a GPU are slow: 16 MiB at 55 to 60 GB/s (280 to 300 us), whoever else copies",
    "switches": "copies within a GPU are kernels, and one process' kernels wait for another's to be switched away: "
    "16 MiB alone take 20 to 60 us, of two processes at once 250 to 350 us each",
    "host": "none of these: bare copies of 256 KiB at depth 2 reach 60 GB/s and more a process, four times those of "
    "pdsim's ranks, whose thread takes 14 to 17 us for each transfer, posting, asking and recording",
}
"""Each cause, and what it foresees."""

CASES: dict[str, tuple[tuple[str, str], ...]] = {
    "one": (("a0", "b0"),),
    "two streams": (("a0", "b0"), ("a0", "b1")),
    "two processes": (("a0", "b0"), ("a1", "b1")),
    "cross": (("a0", "b0"), ("a0", "b1"), ("a1", "b0"), ("a1", "b1")),
    "opposite": (("a0", "b0"), ("b0", "a0")),
    "exchange": (("a0", "b0"), ("b1", "a1")),
    "ring of four": (("a0", "b0"), ("b0", "a1"), ("a1", "b1"), ("b1", "a0")),
    "within": (("a0", "a1"),),
    "within both": (("a0", "a1"), ("a1", "a0")),
    "itself": (("a0", "a0"),),
    "within and out": (("a0", "a1"), ("a0", "b0")),
    "within beside out": (("a0", "a1"), ("a1", "b1")),
    "all to all": tuple((one, other) for one in PLACES for other in PLACES if one != other),
}
"""Lanes (source, target) that copy at once."""

SIZES = (256 * KIB, 4 * MIB, 16 * MIB)
DEPTHS = (1, 2, 4)
LARGE = 1024 * MIB
AHEAD = 16_000_000
"""Nanoseconds of copying."""


HEAD = ("case", "KiB", "depth", "copies", "p10 us", "p50", "p99", "most", "GB/s", "run us")


class Copy(NamedTuple):
    """One copy: the number of its lane, and the ns from the common start to its launch, after it, and to its end."""

    lane: int
    posted: int
    launched: int
    done: int


def _serve(pipe: Connection, name: str, page: Path) -> None:
    """Be rank *name*: share memory, then copy as ordered."""
    cuda = cudart()
    cuda.use(PLACES[name])
    board, processors = Board(page, name, list(PLACES)), Processors(list(PLACES).index(name), len(PLACES))
    processors.take()
    base = cuda.allocate(2 * LARGE)
    pipe.send(cuda.share(base))
    bases = {other: base if other == name else cuda.map(handle) for other, handle in pipe.recv().items()}
    streams = [cuda.stream() for _ in PLACES]
    pipe.send("ready")
    while order := pipe.recv():
        number, crew, lanes, size, depth, count = order
        processors.settle()
        start = board.meet(number, crew, lambda: None)
        while time.monotonic_ns() < start:
            pass
        pipe.send(
            _copies(
                cuda, start, [(lane, bases[to] + LARGE) for lane, to in lanes], base, streams, size, depth, count
            )
        )
    os._exit(0)


def _copies(
    cuda: Cudart,
    start: int,
    lanes: list[tuple[int, int]],
    base: int,
    streams: list[int],
    size: int,
    depth: int,
    count: int,
) -> list[Copy]:
    """Keep *depth* copies of each of *lanes* queued, for `AHEAD` or for *count* of them, and return all of them."""
    clock = time.monotonic_ns
    found: list[Copy] = []
    events = deque(cuda.event() for _ in range(depth * len(lanes)))
    waiting: list[deque[tuple[int, int, int]]] = [deque() for _ in lanes]
    left = [count or 1 << 30] * len(lanes)
    end = start + (1 << 60 if count else AHEAD)
    while any(waiting) or (clock() < end and any(left)):
        for index, (lane, target) in enumerate(lanes):
            queue = waiting[index]
            while queue and cuda.happened(queue[0][0]):
                event, posted, launched = queue.popleft()
                found.append(Copy(lane, posted - start, launched - start, clock() - start))
                events.append(event)
            if len(queue) < depth and left[index] and clock() < end:
                left[index] -= 1
                event, posted = events.popleft(), clock()
                cuda.copy(target, base, size, streams[index])
                cuda.record(event, streams[index])
                queue.append((event, posted, clock()))
    return found


def measure(to: Path) -> None:
    """Measure all cases into *to*."""
    context = multiprocessing.get_context("spawn")
    file, name = tempfile.mkstemp(prefix="pdsim-engines-")
    os.ftruncate(file, 4096)
    os.close(file)
    pipes, processes = {}, []
    for rank in PLACES:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_serve, args=(theirs, rank, Path(name)), daemon=True))
        processes[-1].start()
        pipes[rank] = ours
    handles = {rank: _answer(pipe) for rank, pipe in pipes.items()}
    for pipe in pipes.values():
        pipe.send(handles)
    for pipe in pipes.values():
        _answer(pipe)
    number, begun = 0, time.monotonic()
    points = [(case, size, depth, 0) for case in CASES for size in SIZES for depth in DEPTHS]
    points += [
        (case, LARGE, depth, 4) for case in ("one", "two streams", "two processes", "opposite") for depth in (1, 2)
    ]
    with to.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(("case", "size", "depth", "source", "target", "posted_us", "launched_us", "done_us"))
        for case, size, depth, count in [points[0], *points]:
            number += 1
            lanes: dict[str, list[tuple[int, str]]] = defaultdict(list)
            for lane, (source, target) in enumerate(CASES[case]):
                lanes[source].append((lane, target))
            for rank, mine in lanes.items():
                pipes[rank].send((number, list(lanes), mine, size, depth, count))
            copies = [copy for rank in lanes for copy in _answer(pipes[rank])]
            if number > 1:
                for copy in sorted(copies, key=lambda one: one.done):
                    writer.writerow(
                        (case, size, depth, *CASES[case][copy.lane], *(f"{t / 1e3:.1f}" for t in copy[1:]))
                    )
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join(3.0)
        if process.is_alive():
            process.kill()
    Path(name).unlink()
    print(f"{to}: {len(points)} points, {time.monotonic() - begun:.1f} s")


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(30.0):
        raise TimeoutError("a process did not answer for 30 s")
    return pipe.recv()


def show(file: Path) -> None:
    """Print for each point what a process' copies took, their rate, and how long a process had the engine."""
    points: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    with file.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            points[row["case"], row["size"], row["depth"]].append(row)
    print(("{:18}{:>9}{:>6}" + "{:>9}" * 7).format(*HEAD))
    for (case, size, depth), rows in points.items():
        for lane in dict.fromkeys((row["source"], row["target"]) for row in rows):
            mine = [row for row in rows if (row["source"], row["target"]) == lane]
            took = sorted(float(row["done_us"]) - float(row["posted_us"]) for row in mine)
            rate = len(mine) * int(size) / float(mine[-1]["done_us"]) / 1e3
            cells = (took[len(took) // 10], median(took), took[int(0.99 * (len(took) - 1))], took[-1], rate)
            print(f"{case:18}{int(size) >> 10:>9}{depth:>6}{len(mine):>9}", end="")
            print("".join(f"{cell:9.1f}" for cell in (*cells, _run(rows, lane[0]))), "->".join(lane))


def _run(rows: list[dict[str, str]], source: str) -> float:
    """Return the longest time in us in which only copies of *source* and of processes of the other GPU ended."""
    longest, begin = 0.0, None
    for row in rows:
        if row["source"] == source:
            begin = float(row["done_us"]) if begin is None else begin
            longest = max(longest, float(row["done_us"]) - begin)
        elif PLACES[row["source"]] == PLACES[source]:
            begin = None
    return longest


def main() -> int:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="measure")
    measuring.add_argument("--to", type=Path, required=True)
    commands.add_parser("show", help="print what was measured").add_argument("file", type=Path)
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.to)
    else:
        show(options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
