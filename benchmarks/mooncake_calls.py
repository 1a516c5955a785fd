# SPDX-License-Identifier: Apache-2.0
"""What a blocking call of Mooncake costs against one descriptor more in a batch: by the real library, here.

``python -m benchmarks.mooncake_calls measure OUT.csv`` takes minutes.  It times, over TCP on loopback, and in the
emulated machine of `backends.emulation.guest` over TCP and over verbs (soft-RoCE), for several counts and sizes in
turns: *calls*, so many `transfer_sync_write` one after the other, and *batch*, one `batch_transfer_sync_write` of as
many descriptors.  Every sample is kept.  ``python -m benchmarks.mooncake_calls fit FILE.csv`` prints what follows.

The guest's TCP is measured to tell how slow its processors are: it is the same library as on the host.  Mooncake's
threads poll, and the guest has fewer processors than they are, so that a call over verbs waits for time slices
there: its seconds bound nothing.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

WAYS = ("host_tcp", "guest_tcp", "guest_rdma")
MODES = ("calls", "batch", "beside")
"""Ways to write: see the module; *beside* are calls while another thread of the process computes in Python."""
BESIDE = (4, 16)
"""Counts of those."""
COUNTS = (1, 4, 16, 64)
SIZES = (1024, 16384, 73728)
"""Of descriptors, in bytes; the last is a page of 64 tokens of one layer of DeepSeek-V3."""
ROUNDS = {"host_tcp": 100, "guest_tcp": 20, "guest_rdma": 20}
REGION = max(COUNTS) * max(SIZES)
WARM = 2
"""Rounds that are not kept: connections are made in the first."""
RESAMPLES = 2000
LOWEST = 0.1
"""Of the rounds: where a moment without other programs is."""
TIMES = 420.0
"""Seconds that one way may take in the guest; rounds that it does not come to are left out."""
OUT_OF_TIME = 124
"""Status of what `backends.emulation.guest.machine.Guest.run` has ended."""


_KEPT: dict[str, Any] = {}
"""What exports the memory that is registered, which keeps it."""


Span = tuple[float, float, float]


class CallSample(NamedTuple):
    """What one round found: seconds of so many *descriptors* of *size* bytes, in one of `MODES`."""

    way: str
    round: int
    mode: str
    descriptors: int
    size: int
    seconds: float


class CallCost(NamedTuple):
    """Seconds, each the least, the estimate and the most (95 % of resampled rounds), for descriptors of *size*."""

    way: str
    size: int
    blocking: Span  # one call of one descriptor, among such calls
    batch: Span  # what a batch takes beside its descriptors
    descriptor: Span  # one more in a batch
    beyond: Span  # what a blocking call takes beyond such a descriptor
    beside: (
        Span | None
    )  # the mean of a blocking call while another thread computes in Python, where that was measured


# --- measuring -----------------------------------------------------------------------------------------------------


def _engine(way: str, address: str) -> tuple[Any, int]:
    """Return an engine on *address* and the address of `REGION` bytes that are registered with it."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(address, "P2PHANDSHAKE", "tcp" if way.endswith("tcp") else "rdma", ""):
        raise RuntimeError(f"Mooncake does not start on {address} over {way}")
    memory = mmap.mmap(-1, REGION)
    memory.write(bytes(REGION))
    place = ctypes.addressof(_KEPT.setdefault(way, ctypes.c_char.from_buffer(memory)))
    if engine.register_memory(place, REGION):
        raise RuntimeError(f"Mooncake does not register {REGION} bytes")
    return engine, place


def target(way: str, address: str) -> None:
    """Be written to until standard input ends; say where on standard output."""
    engine, place = _engine(way, address)
    print(f"{address}:{engine.get_rpc_port()} {place}", flush=True)
    sys.stdin.read()


def samples(way: str, address: str) -> Iterator[CallSample]:
    """Yield what `ROUNDS` of all shapes take, in turns, between this process and one of its own."""
    engine, place = _engine(way, address)
    command = [sys.executable, "-m", "benchmarks.mooncake_calls", "target", way, "--address", address]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert peer.stdin is not None
    assert peer.stdout is not None
    try:
        session, there = next(line for line in peer.stdout if line.startswith(address)).split()
        for number in range(-WARM, ROUNDS[way]):
            for count, size in product(COUNTS, SIZES):
                for mode in MODES:
                    if mode == "beside" and (way != "host_tcp" or count not in BESIDE):
                        continue
                    with _computing(mode == "beside"):
                        seconds = _timed(engine, session, place, int(there), mode, count, size)
                    if number >= 0:
                        yield CallSample(way, number, mode, count, size, seconds)
    finally:
        peer.stdin.close()
        peer.kill()
        peer.wait()


@contextmanager
def _computing(really: bool) -> Iterator[None]:
    """Have another thread compute in Python meanwhile, as a scheduler's does beside its transfer workers."""
    ended = not really

    def compute() -> None:
        while not ended:
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        ended = True
        thread.join()


def _timed(engine: Any, session: str, place: int, there: int, mode: str, count: int, size: int) -> float:
    """Return the seconds of *count* descriptors of *size* bytes; they lie apart, so that none can be joined."""
    offsets = [(max(COUNTS) - 1 - number) * max(SIZES) for number in range(count)]
    sources, targets = [place + at for at in offsets], [there + at for at in offsets]
    begin = time.perf_counter()
    if mode == "batch":
        failed = engine.batch_transfer_sync_write(session, sources, targets, [size] * count)
    else:
        failed = any(engine.transfer_sync_write(session, *pair, size) for pair in zip(sources, targets, strict=True))
    seconds = time.perf_counter() - begin
    if failed:
        raise RuntimeError(f"Mooncake did not write {count} x {size} bytes to {session}")
    return seconds


def measure(ways: Iterable[str], out: Path) -> None:
    """Write all samples of *ways* to *out*."""
    chosen = tuple(ways)
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(CallSample._fields)
        if "host_tcp" in chosen:
            writer.writerows(_own("host_tcp"))
            file.flush()
        if guests := [way for way in chosen if way.startswith("guest")]:
            from backends.emulation.guest.machine import boot

            with boot() as guest:
                for way in guests:
                    path = guest.folder / way
                    words = (sys.executable, "-m", "benchmarks.mooncake_calls", "own", way, str(path))
                    env = {"PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)}
                    done = guest.run(*words, timeout=TIMES, env=env)
                    if done.status not in (0, OUT_OF_TIME):
                        raise RuntimeError(f"{way}: status {done.status}: {done.output[-2000:]}")
                    writer.writerows(_read(path))
                    file.flush()


def _own(way: str) -> Iterator[CallSample]:
    """Yield the samples of *way*, taken on the machine that this process runs on."""
    if way.endswith("tcp"):
        os.environ["MC_FORCE_TCP"] = "1"
    yield from samples(way, "10.8.0.1" if way.startswith("guest") else "127.0.0.1")


# --- what follows --------------------------------------------------------------------------------------------------


def _read(path: Path) -> list[CallSample]:
    """Return the samples of a file."""
    with path.open(encoding="utf-8", newline="") as file:
        return [
            CallSample(
                row["way"],
                int(row["round"]),
                row["mode"],
                int(row["descriptors"]),
                int(row["size"]),
                float(row["seconds"]),
            )
            for row in csv.DictReader(file)
        ]


def costs(rows: Iterable[CallSample], seed: int = 0) -> Iterator[CallCost]:
    """Yield what each way costs with descriptors of each size.

    Of the rounds the lowest tenth is taken for each count, for other programs can only add to it; costs of batches
    are least squares over counts, relative to how long they take, and intervals 95 % of `RESAMPLES` drawings of
    rounds.
    """
    table: dict[tuple[str, int], dict[str, dict[int, list[float]]]] = {}
    for row in rows:
        times = table.setdefault((row.way, row.size), {})
        times.setdefault(row.mode, {}).setdefault(row.descriptors, []).append(row.seconds)
    rng = np.random.default_rng(seed)
    for (way, size), times in table.items():
        arrays = {mode: {count: np.array(found) for count, found in of.items()} for mode, of in times.items()}
        total = min(len(found) for of in arrays.values() for found in of.values())
        drawn = np.array([_fitted(arrays, rng.integers(0, total, total)) for _ in range(RESAMPLES)])
        spans = np.stack([np.quantile(drawn, (0.025, 0.975), axis=0)[0], _fitted(arrays, np.arange(total)),
                          np.quantile(drawn, 0.975, axis=0)])  # fmt: skip
        found = [(float(low), float(best), float(high)) for low, best, high in spans.T]
        yield CallCost(way, size, found[0], found[1], found[2], found[3], found[4] if "beside" in arrays else None)


def _fitted(times: dict[str, dict[int, Any]], rounds: Any) -> tuple[float, ...]:
    """Return the estimates of `CallCost`, in its order, from those *rounds*."""
    counts = np.array(sorted(times["batch"]), dtype=float)
    calls, batch = (
        np.array([np.quantile(times[mode][int(count)][rounds], LOWEST) for count in counts])
        for mode in ("calls", "batch")
    )
    parts = np.stack([1 / batch, counts / batch], axis=1)
    fixed, each = np.linalg.lstsq(parts, np.ones(len(counts)), rcond=None)[0]
    blocking = float(np.median((calls / counts)[counts > 1]))
    of = times.get("beside", {})
    beside = float(np.mean([found[rounds].mean() / count for count, found in of.items()])) if of else 0.0
    return blocking, float(fixed), float(each), blocking - float(each), beside


def main() -> None:
    """Measure, or print what samples say."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mooncake_calls")
    parser.add_argument("what", choices=("measure", "fit", "own", "target"))
    parser.add_argument("words", nargs="+", help="a file of samples; before it, for own and target, a way")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--address", default="127.0.0.1")
    options = parser.parse_args()
    if options.what == "target":
        target(options.words[0], options.address)
    elif options.what == "own":
        with Path(options.words[1]).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(CallSample._fields)
            for sample in _own(options.words[0]):
                writer.writerow(sample)
                file.flush()
    elif options.what == "measure":
        measure(options.ways, Path(options.words[0]))
    else:
        print("us: least, estimate, most; beside: the mean while another thread computes in Python")
        for cost in costs(_read(Path(options.words[0]))):
            for name, span in zip(cost._fields[2:], cost[2:], strict=True):
                if span:
                    shown = "".join(f"{1e6 * part:9.1f}" for part in span)
                    print(f"{cost.way:11}{cost.size:7}  {name:11}{shown}")


if __name__ == "__main__":
    main()
