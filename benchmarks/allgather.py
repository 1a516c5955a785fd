# SPDX-License-Identifier: Apache-2.0
"""All-gathers of the GPU libraries in `backends.collectives.nccl`, without the interface: every size in one job.

    python benchmarks/allgather.py OUTPUT.csv [--ranks 2] [--repeat 30]

Each rank is a process on a GPU of its own.  One row is one all-gather of one rank: `device_us` between two events
around it on its stream, `host_us` from the call until `poll` says that it is over, both after a barrier; or one
reservation: `host_us` is how long it took.  Contents are compared before anything is measured.
"""

from __future__ import annotations

import argparse
import csv
import os
import socket
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SIZES = [1 << shift for shift in range(12, 30)]
SEGMENTS = [2 << 20, 64 << 20, 1 << 30, 4 << 30]
COLUMNS = ["rank", "ranks", "memory", "operation", "size", "number", "device_us", "host_us", "right"]


def main() -> None:
    """Measure and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--largest", type=int, default=SIZES[-1])
    options = parser.parse_args()
    context = get_context("spawn")
    listener = socket.create_server(("127.0.0.1", 0))
    queue = context.Queue()
    arguments = options.ranks, options.repeat, options.warmup, options.largest, listener.getsockname()[1], queue
    ranks = [
        context.Process(target=be_rank, args=(index, listener if index == 0 else None, *arguments))
        for index in range(options.ranks)
    ]
    for rank in ranks:
        rank.start()
    rows, left = [], options.ranks
    while left:
        row = queue.get(timeout=120)
        left -= row is None
        rows += [row] if row else []
    for rank in ranks:
        rank.join(30)
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: [row["memory"], row["operation"], row["size"], row["number"]]))
    print(f"{len(rows)} rows in {options.output}")


def be_rank(
    index: int, listener: Any, ranks: int, repeat: int, warmup: int, largest: int, port: int, queue: Any
) -> None:
    """Measure all kinds of memory."""
    import torch

    from backends.base.symmetric_pool import ReservedPool
    from backends.collectives.nccl import Nccl, SymmetricMemory

    device = SimpleNamespace(gpu=index, symmetric=ReservedPool(f"cuda:{index}"))
    rank = Rank(index, ranks, repeat, warmup, [size for size in SIZES if size <= largest], queue)
    try:
        nccl = Nccl(device, 60.0)
        nccl.connect(index, ranks, "127.0.0.1", port, listener)
        if index == 0:
            print(torch.__version__, torch.cuda.nccl.version(), torch.cuda.get_device_name(0), flush=True)
        plain = [torch.empty(rank.sizes[-1] * n, dtype=torch.uint8, device="cuda") for n in (1, ranks)]
        rank.measure(nccl, "plain", *plain)
        windows = Nccl(device, 60.0)
        windows.window = True
        kinds = ((nccl, "registered"), (windows, "window"), (SymmetricMemory(device, 60.0), "symm_mem"))
        for library, memory in kinds:
            if library is not nccl:
                library._store, library._group, library._stream = nccl._store, nccl._group, nccl._stream
                library._index, library._count = index, ranks
            for size in (segment for segment in SEGMENTS if segment <= 8 * largest):
                for number in range(3 if size < 1 << 30 else 2):
                    rank.meet(nccl)
                    begin = time.perf_counter()
                    library.reserve(size)
                    rank.meet(nccl)
                    rank.tell(memory, "reserve", size, number, 0.0, (time.perf_counter() - begin) * 1e6)
            library.reserve(rank.sizes[-1] * (ranks + 1))
            whole = library._kept[-1]
            rank.measure(library, memory, whole[: rank.sizes[-1]], whole[rank.sizes[-1] :])
    except Exception as error:
        print(f"rank {index}: {type(error).__name__}: {error}", flush=True)
        raise
    finally:
        queue.put(None)
    time.sleep(2.0)
    queue.close()
    queue.join_thread()
    os._exit(0)


class Rank:
    """One rank's measurements."""

    def __init__(self, index: int, ranks: int, repeat: int, warmup: int, sizes: list[int], queue: Any) -> None:
        self.index = index
        self.ranks = ranks
        self.repeat = repeat
        self.warmup = warmup
        self.sizes = sizes
        self.queue = queue
        self.right = 0

    def meet(self, library: Any) -> None:
        """Wait until all ranks are here."""
        library._first(__import__("torch"))

    def measure(self, library: Any, memory: str, source: Any, target: Any) -> None:
        """Measure every size."""
        import torch

        library._tensor = lambda buffer: buffer  # buffers are tensors here
        library._stream.wait_stream(torch.cuda.current_stream())
        for size in self.sizes:
            self.right = self._check(library, source, target, size, memory != "plain")
            for number in range(-self.warmup, self.repeat if size < 64 << 20 else self.repeat * 2 // 3):
                self.meet(library)
                begin = time.perf_counter()
                work = library.start(source, target, size, memory != "plain")
                while (took := library.poll(work)) is None:
                    pass
                host = time.perf_counter() - begin
                if number >= 0:
                    self.tell(memory, "all_gather", size, number, took * 1e6, host * 1e6)

    def _check(self, library: Any, source: Any, target: Any, size: int, symmetric: bool) -> int:
        """Gather what says whose it is, and compare."""
        import torch

        steps = torch.arange(size, dtype=torch.int32, device="cuda")
        patterns = [((steps * 7 + rank * 31) % 251).to(torch.uint8) for rank in range(self.ranks)]
        source[:size] = patterns[self.index]
        target[: size * self.ranks] = 255
        torch.cuda.synchronize()
        self.meet(library)
        work = library.start(source, target, size, symmetric)
        while library.poll(work) is None:
            pass
        right = [bool(torch.equal(target[i * size : (i + 1) * size], patterns[i])) for i in range(self.ranks)]
        torch.cuda.synchronize()
        self.meet(library)
        if not all(right):
            print(f"rank {self.index}: {size} bytes, symmetric={symmetric}: pieces {right} are right", flush=True)
        return int(all(right))

    def tell(self, memory: str, operation: str, size: int, number: int, device: float, host: float) -> None:
        """Send a row."""
        times = round(device, 3), round(host, 3)
        cells = [self.index, self.ranks, memory, operation, size, number, *times, self.right]
        self.queue.put(dict(zip(COLUMNS, cells, strict=True)))


if __name__ == "__main__":
    main()
