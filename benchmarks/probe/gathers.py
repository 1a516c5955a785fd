# SPDX-License-Identifier: Apache-2.0
"""All-gathers by NCCL, a process on each of two GPUs: the device's time beside the caller's.

The *device's* time lies between two events of a stream that a kernel kept busy while the events and the gather were
queued, so that no launch is in it; of the two ranks the lesser is the gather without waiting for the other.  The
*caller's* time is from the call on an idle stream until the host has seen its end, both ranks starting at one
instant.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.probe.plan import GATHERS

MODES = ("plain", "registered", "symmetric")
"""Memory of the caching allocator; of `ncclMemAlloc`, registered with the communicator; the same as a window."""

RANKS = 2
WARMUP, REPEAT = 3, 10
BUSY = 1_500_000  # cycles of the kernel that the stream is kept busy with: some 0.8 ms

Found = tuple[int, int, int, Any, Any, Any, Any, Any, str]
"""Size, rank, repeat, start, prepare, post, total, device, note: as the end of a row has them."""


def measured(mode: str, seconds: float) -> Iterator[Found]:
    """Yield what both ranks found for each size, or one row with a note."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    pipes, processes = [], []
    start = time.monotonic() + seconds
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(theirs, mode, rank, port), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            if not pipe.poll(max(0.0, start - time.monotonic())):
                yield (0, 0, -1, "", "", "", "", "", "no answer in time")
                return
            yield from pipe.recv()
    except EOFError:
        yield (0, 0, -1, "", "", "", "", "", "a rank ended without an answer")
    finally:
        for process in processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()


def _main(pipe: Connection, mode: str, rank: int, port: int) -> None:
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NCCL_SOCKET_IFNAME="lo")
    try:
        pipe.send(_gather(mode, rank, port))
    except Exception as error:
        pipe.send([(0, rank, -1, "", "", "", "", "", f"{type(error).__name__}: {error}")])
    pipe.close()
    os._exit(0)  # the communicator's end may wait for a rank that is gone


def _gather(mode: str, rank: int, port: int) -> list[Found]:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    dist.barrier(device_ids=[rank])
    most = max(GATHERS)
    if mode == "plain":
        piece = torch.empty(most, dtype=torch.uint8, device=device)
        whole = torch.empty(most * RANKS, dtype=torch.uint8, device=device)
    else:
        backend: Any = dist.group.WORLD._get_backend(device)
        pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(pool):
            piece = torch.empty(most, dtype=torch.uint8, device=device)
            whole = torch.empty(most * RANKS, dtype=torch.uint8, device=device)
        backend.register_mem_pool(pool, **({"symm": True} if mode == "symmetric" else {}))
    piece.fill_(rank + 1)
    torch.cuda.synchronize()
    found: list[Found] = []
    for size in GATHERS:
        for repeat in range(-WARMUP, REPEAT):
            total, post = _caller(torch, dist, piece[:size], whole[: size * RANKS], rank)
            busy = _device(torch, dist, piece[:size], whole[: size * RANKS], rank)
            if repeat >= 0:
                found.append((size, rank, repeat, 0.0, 0.0, post, total, busy, ""))
        if whole[0].item() != 1 or whole[size * RANKS - 1].item() != RANKS:
            raise RuntimeError(f"wrong bytes after an all-gather of {size}")
    return found


def _caller(torch: Any, dist: Any, piece: Any, whole: Any, rank: int) -> tuple[float, float]:
    """Return microseconds until the host has seen the end, and until the call returned."""
    _meet(torch, dist, rank)
    begin = time.perf_counter()
    dist.all_gather_into_tensor(whole, piece)
    returned = time.perf_counter()
    torch.cuda.synchronize()
    end = time.perf_counter()
    return (end - begin) * 1e6, (returned - begin) * 1e6


def _device(torch: Any, dist: Any, piece: Any, whole: Any, rank: int) -> float:
    """Return microseconds of the device alone."""
    _meet(torch, dist, rank)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY)
    first.record()
    dist.all_gather_into_tensor(whole, piece)
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) * 1e3


def _meet(torch: Any, dist: Any, rank: int) -> None:
    """Let both ranks go on at one instant of the monotonic clock."""
    at = torch.tensor([time.monotonic_ns() + 1_000_000], dtype=torch.int64, device=f"cuda:{rank}")
    dist.all_reduce(at, op=dist.ReduceOp.MAX)
    torch.cuda.synchronize()
    start = int(at.item())
    while time.monotonic_ns() < start:
        pass
