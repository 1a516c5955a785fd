# SPDX-License-Identifier: Apache-2.0
"""What a slice of a token costs over Mooncake's NVLink transport, posted as SGLang posts those of unlike ranks.

    python -m benchmarks.sliced_copies measure --to FILE [--swapped]    (two GPUs, 25 s)
    python -m benchmarks.sliced_copies show FILE

Between unlike tensor parallelism SGLang 0.5.12 calls `batch_transfer_sync_write` once a layer and plane, from a pool
of threads, with a slice for each token.  From one rank to two, a slice took it 4.6 us; from two ranks to one, 21 us
(`data/live/fourth`).  A rank of prefill and one of decode is a process; two of them are on GPU 0, two on GPU 1.
What each candidate foresees is in `CANDIDATES`, written before the measurement.  What was found: slow is what goes
out from a GPU that is not the first that its process sees, whether its threads have chosen it or not.  With
``--swapped`` senders see the GPUs in the other order, and those on GPU 0 are slow.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from backends.cuda.runtime import cudart

CANDIDATES = {
    "device": "threads of a pool work on GPU 0 until they choose another: a sender on GPU 1 takes 15 us and more a "
    "slice, and 5 where its threads have chosen GPU 1",
    "within": "slices within a GPU are slow: 0 to 0 and 1 to 1 take 15 us and more, 0 to 1 and 1 to 0 take 5",
    "target": "two senders to one GPU slow each other: each alone takes 5 us a slice, both at once 10 and more",
    "pitch": "slices that lie apart at the target are slow: 1 to 1 and 0 to 1 take 15 us if pitched there, else 5",
    "host": "a thread of the sender that computes in Python slows it: 15 us beside one, 5 without, in all places",
    "none": "none of these: all cases take 3 to 7 us a slice, and SGLang loses the time elsewhere",
}
"""Each cause, and what it foresees."""

SLICE, TOKEN = 1024, 2048
"""Bytes: four of eight heads of 128 values of 2 bytes, and all eight."""
TOKENS, BATCHES, THREADS = 1024, 24, 4
"""Slices of a batch, batches of a transfer, and threads that post them."""
ROUNDS = 3


class Case(NamedTuple):
    """What is measured at once: *lanes* of sender and receiver, named ``s`` and ``r`` and their GPU.

    The slices lie apart at the *source*, or at the target. Threads have chosen their GPU if they *choose*; *busy*
    are threads beside them that compute in Python.
    """

    lanes: tuple[tuple[str, str], ...]
    source: bool = False
    choose: bool = False
    busy: int = 0
    threads: int = THREADS


CASES = {
    "0 to 1": Case((("s0", "r1"),)),
    "0 to 0": Case((("s0", "r0"),)),
    "1 to 1": Case((("s1", "r1"),)),
    "1 to 0": Case((("s1", "r0"),)),
    "0 to 1, apart at source": Case((("s0", "r1"),), source=True),
    "0 to 0, apart at source": Case((("s0", "r0"),), source=True),
    "1 to 1, apart at source": Case((("s1", "r1"),), source=True),
    "1 to 1, chosen": Case((("s1", "r1"),), choose=True),
    "1 to 0, chosen": Case((("s1", "r0"),), choose=True),
    "0 and 1 to 1": Case((("s0", "r1"), ("s1", "r1"))),
    "0 and 1 to 1, chosen": Case((("s0", "r1"), ("s1", "r1")), choose=True),
    "0 to 1, busy": Case((("s0", "r1"),), busy=1),
    "1 to 1, busy": Case((("s1", "r1"),), busy=1),
    "0 and 1 to 1, busy": Case((("s0", "r1"), ("s1", "r1")), busy=1),
    "0 to 1, one thread": Case((("s0", "r1"),), threads=1),
    "1 to 1, one thread": Case((("s1", "r1"),), threads=1),
}


def _serve(pipe: Connection, name: str, swapped: bool) -> None:
    """Be the process *name*: tell where its memory is, then send as asked until there is nothing more."""
    gpu = int(name[1])
    if swapped and name[0] == "s":
        os.environ["CUDA_VISIBLE_DEVICES"] = "1,0"
        gpu = 1 - gpu
    os.environ["MC_INTRANODE_NVLINK"] = "1"
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    from mooncake.engine import TransferEngine  # type: ignore[import-untyped, unused-ignore]

    cuda = cudart()
    cuda.use(gpu)
    size = TOKENS * TOKEN * BATCHES
    base = cuda.allocate(size)
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "") or engine.register_memory(base, size):
        raise SystemExit("Mooncake did not start")
    pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", base))
    while (order := pipe.recv()) is not None:
        case, session, target = order
        pipe.send(_sent(engine, case, session, base, target, gpu))
    os._exit(0)


def _sent(engine: Any, case: Case, session: str, base: int, target: int, gpu: int) -> float:
    """Send all batches of *case* and return the seconds."""
    pitch = (TOKEN, SLICE) if case.source else (SLICE, TOKEN)
    lengths = [SLICE] * TOKENS

    def batch(number: int) -> int:
        sources, targets = (
            [first + number * TOKENS * TOKEN + token * apart for token in range(TOKENS)]
            for first, apart in zip((base, target), pitch, strict=True)
        )
        return int(engine.batch_transfer_sync_write(session, sources, targets, lengths))

    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(100))

    beside = [threading.Thread(target=compute) for _ in range(case.busy)]
    for each in beside:
        each.start()
    chosen = (lambda: cudart().use(gpu)) if case.choose else None
    with ThreadPoolExecutor(case.threads, initializer=chosen) as pool:
        began = time.perf_counter()
        codes = list(pool.map(batch, range(BATCHES)))
        seconds = time.perf_counter() - began
    over.set()
    for each in beside:
        each.join()
    if any(codes):
        raise SystemExit(f"Mooncake refused a batch: {codes}")
    return seconds


def measure(to: Path, swapped: bool) -> None:
    """Measure all cases into *to*; with *swapped* senders see GPU 1 first."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in ("s0", "s1", "r0", "r1"):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_serve, args=(theirs, name, swapped), daemon=True))
        processes[-1].start()
        pipes[name] = ours
    where = {name: _answer(pipe) for name, pipe in pipes.items()}
    with to.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(("case", "round", "sender", "receiver", "slices", "seconds"))
        for number in range(ROUNDS + 1):  # the first is not kept: memory is mapped in it
            for name, case in CASES.items():
                for sender, receiver in case.lanes:
                    pipes[sender].send((case, *where[receiver]))
                for sender, receiver in case.lanes:
                    seconds = _answer(pipes[sender])
                    if number:
                        writer.writerow((name, number, sender, receiver, TOKENS * BATCHES, f"{seconds:.6f}"))
                out.flush()
    for pipe in pipes.values():
        pipe.send(None)
    for process in processes:
        process.join(3.0)
        if process.is_alive():
            process.kill()


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(60.0):
        raise TimeoutError("a process did not answer for 60 s")
    return pipe.recv()


def show(file: Path) -> None:
    """Print what a slice took in each case, in the round that took least and in that which took most."""
    found: dict[tuple[str, str, str], list[float]] = {}
    with file.open(encoding="utf-8") as lines:
        for row in csv.DictReader(line for line in lines if not line.startswith("#")):
            each = found.setdefault((row["case"], row["sender"], row["receiver"]), [])
            each.append(float(row["seconds"]) / int(row["slices"]) * 1e6)
    for (case, sender, receiver), took in found.items():
        print(f"{case:26}{sender} -> {receiver}{min(took):9.2f}{max(took):9.2f} us a slice")


def main() -> int:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="measure")
    measuring.add_argument("--to", type=Path, required=True)
    measuring.add_argument("--swapped", action="store_true", help="senders see GPU 1 first")
    commands.add_parser("show", help="print what was measured").add_argument("file", type=Path)
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.to, options.swapped)
    else:
        show(options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
