# SPDX-License-Identifier: Apache-2.0
"""What a copy of a staged block costs: planning it on this machine, and moving it where there is a GPU.

    python -m benchmarks.gather [TOKENS ...]

Blocks are those of Llama-3.1-8B between TP 1 and TP 2: half the heads of 64 planes.  The rank of TP 1 gathers and
scatters pieces of 1 KiB, one a token and plane; the ranks of TP 2 runs of pages, which are divided into tiles.
Columns are medians of what `pdsim.transfer.Device.copy` does one after the other: the batch is *planned* and
checked, made a *table* of tiles, and, on a GPU, *moved*: the table goes there, the kernel runs, and its end is
waited for.  *host* is what host memory takes to move the same instead (`pdsim.transfer.batch.move`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import numpy as np

from backends.cuda.gather import Gather, tiles
from backends.jobs.worker import keep_memory
from pdsim.kv.layout import KvLayout, KvShape
from pdsim.kv.mapping import HeadSlice
from pdsim.kv.staging.ring import block_plans
from pdsim.results.record import Table
from pdsim.results.terminal import show_table
from pdsim.transfer import Batch, Region
from pdsim.transfer.batch import Int64s, move

SHAPE = KvShape(layers=32, heads=8, head_bytes=256)
PAGE = 64  # tokens
REPEAT = 11
LARGEST = 1 << 29  # bytes of a pool that is made for *host*
HEADS = ("copy", "tokens", "pieces", "tiles", "planned us", "table us", "moved us", "host us")


def blocks(tokens: int) -> Iterator[tuple[str, Callable[[], Batch]]]:
    """Yield the four copies of a block of *tokens*, as what plans them."""
    pages = tokens // PAGE
    whole, half = (KvLayout(SHAPE, tp, PAGE, 2 * pages, 1) for tp in (1, 2))
    ours = block_plans(whole, half, HeadSlice(0, 0, SHAPE.heads // 2))
    theirs = block_plans(half, whole, HeadSlice(0, 0, SHAPE.heads // 2))
    nbytes, runs = ours[0].nbytes(pages), ((pages // 2, pages),)
    block = Region("rank", "block", 2 * nbytes, 0, "device")
    pools = {layout.tp: Region("rank", "kv", layout.size, 0, "device") for layout in (whole, half)}
    yield "gather, TP 1", partial(ours[0].gather, pools[1], runs, block, 0)
    yield "scatter, TP 2", partial(ours[1].scatter, block, nbytes, pools[2], runs)
    yield "gather, TP 2", partial(theirs[0].gather, pools[2], runs, block, 0)
    yield "scatter, TP 1", partial(theirs[1].scatter, block, nbytes, pools[1], runs)


def _planned(plan: Callable[[], Batch]) -> Batch:
    return plan().arrays()


def table(batch: Batch) -> None:
    """Do as `backends.cuda.gather` does before it calls the GPU."""
    columns = tiles(batch)
    np.stack(columns, axis=1, out=_buffer(len(columns[0])))


@cache
def _buffer(rows: int) -> Int64s:  # kept from call to call, as pinned memory is
    return np.empty((rows, 3), np.int64)


def median_us(work: Callable[[], object]) -> float:
    """Return the median of `REPEAT` calls, after one to warm up."""
    work()
    seconds = []
    for _ in range(REPEAT):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds)) * 1e6


def on_gpu(batch: Batch) -> float | None:
    """Return the microseconds of a copy on GPU 0 from its call to its end; None if there is no GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    gather, stream = Gather(0), torch.cuda.Stream(0)
    source, target = (torch.empty(region.size, dtype=torch.uint8, device="cuda:0") for region in _regions(batch))

    def copy() -> None:
        gather.copy(source.data_ptr(), target.data_ptr(), batch, stream.cuda_stream)
        stream.synchronize()

    return median_us(copy) - median_us(lambda: table(batch))


def on_host(batch: Batch) -> float | None:
    """Return the microseconds of a copy in host memory; None if it is larger than `LARGEST`."""
    if max(region.size for region in _regions(batch)) > LARGEST:
        return None
    source, target = (np.zeros(region.size, np.uint8) for region in _regions(batch))
    return median_us(lambda: move(source, target, batch.source_offset, batch.target_offset, batch.size))


def _regions(batch: Batch) -> tuple[Region, Region]:
    return batch.source, batch.target


def main(words: Sequence[str]) -> None:
    """Print a row for each copy of each number of tokens."""
    keep_memory()  # as ranks of real jobs do
    rows = []
    for tokens in map(int, words or ("512", "2048", "8192")):
        for name, plan in blocks(tokens):
            batch = plan().arrays()
            planned = median_us(partial(_planned, plan))
            times = planned, median_us(partial(table, batch)), on_gpu(batch), on_host(batch)
            rows.append([name, tokens, len(batch), len(tiles(batch)[0]), *times])
    show_table(Table("Copies of a block", dict.fromkeys(HEADS, ""), rows))


if __name__ == "__main__":
    main(sys.argv[1:])
