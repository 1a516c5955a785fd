# SPDX-License-Identifier: Apache-2.0
"""What pdsim costs above the bare library: the same transfers through our endpoint and by the engine directly.

``python -m benchmarks.overhead [ENGINE ...]`` prints a table and exits with 1 if the bandwidth of the largest
transfer (64 MiB, between GPUs 256 MiB) is below 0.97 of the library's or, between GPUs, if 4 KiB take 15 us longer.
Engines between GPUs are mooncake_nvlink, nixl and nvlink, from GPU 0 to the last.  Both ways run in the same two
processes, over the same connection and memory, in turns.  Times are medians; the ratio of bandwidths is the median
over the turns, so that slow drifts of the machine cancel.  A bare NIXL target spins in the library, as NIXL's own
examples do; ours is polled by its clock.

Run it on a machine that does nothing else: with the two cores taken, differences of 5 % either way are the
scheduler's.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from backends.diagnosis import gpu_count
from backends.jobs.launcher import Processes
from pdsim.core.units import format_size
from pdsim.hardware.costs import Engine, EngineModel
from pdsim.transfer import Batch, Peer, Program, Region
from pdsim.transfer.job import Place, Rank, RankSpec

SHAPES = ((1, 4 << 10), (1, 64 << 10), (1, 1 << 20), (1, 16 << 20), (1, 64 << 20), (1000, 16 << 10))
"""Descriptors and bytes of each."""
GPU_SHAPES = ((1, 4 << 10), (1, 1 << 20), (1, 256 << 20), (1000, 16 << 10))
FLOOR = 0.97
"""Of the library's bandwidth in the largest transfer."""
WARM = 5
"""Transfers before those of a turn that are timed: both ways begin it after a message, for which the process
slept."""
ADDED = 15e-6
"""Seconds that the interface may add to 4 KiB between GPUs."""
REGION = 64 << 20
GPU_REGION = 256 << 20
GPU_ENGINES = ("mooncake_nvlink", "nixl", "nvlink")


def rounds_of(nbytes: int) -> tuple[int, int]:
    """Return how many rounds to run, and how many transfers of each kind in one."""
    return (15, 40) if nbytes < 1 << 20 else (11, 8) if nbytes < 16 << 20 else (25, 2)


def on_gpu(rank: Rank) -> bool:
    """Return whether *rank* works in a GPU's memory."""
    return rank.device.name != "cpu"


def initiate(rank: Rank) -> Program:
    """Measure all shapes; return descriptors and bytes of each, and its `figures`."""
    region = GPU_REGION if on_gpu(rank) else REGION
    buffer = rank.device.allocate(region)
    buffer.write(0, bytes(range(256)) * (region // 256))
    mine = rank.endpoint.register(buffer, "source")
    rank.channel.send("target", rank.endpoint.address())
    peer = rank.endpoint.connect((yield rank.channel.receive()).payload)
    bare = {"mooncake": bare_mooncake, "nixl": bare_nixl, "nvlink": bare_cuda}[rank.endpoint.kind](rank, peer)  # type: ignore[attr-defined]
    table = []
    for count, size in GPU_SHAPES if on_gpu(rank) else SHAPES:
        offsets = np.arange(count, dtype=np.int64) * size
        batch = Batch(mine, peer.regions["sink"], offsets, offsets, np.full(count, size, np.int64))
        rounds, times = rounds_of(batch.nbytes)
        ours_s: list[float] = []
        bare_s: list[float] = []
        for turn in range(rounds + 1):
            ours = yield from through_endpoint(rank, peer, batch, times)
            rank.channel.send("target", b"bare")
            yield rank.channel.receive()
            direct = [bare(batch) for _ in range(WARM + times)][WARM:]
            rank.channel.send("target", b"over")
            if rank.endpoint.kind == "nixl":  # type: ignore[attr-defined]
                rank.endpoint._agent.send_notif(peer.handle.handle, b"over")  # type: ignore[attr-defined]
            yield rank.channel.receive()
            if turn:  # the first round warms caches and connections
                ours_s += ours
                bare_s += direct
        table.append([count, size, *figures(ours_s, bare_s, times)])
    rank.channel.send("target", b"end")
    return table


def figures(ours: Sequence[float], bare: Sequence[float], times: int) -> list[float]:
    """Return the medians, the shortest times (which other load disturbs least), and the ratio of bandwidths."""
    turns = range(0, len(ours), times)
    ratios = [statistics.median(bare[i : i + times]) / statistics.median(ours[i : i + times]) for i in turns]
    return [statistics.median(ours), statistics.median(bare), min(ours), min(bare), statistics.median(ratios)]


def through_endpoint(rank: Rank, peer: Peer, batch: Batch, times: int) -> Generator[Any, Any, list[float]]:
    """Return how long each of *times* writes took until its program went on."""
    seconds = []
    for _ in range(WARM + times):
        start = time.perf_counter()
        yield rank.endpoint.write(peer, batch)
        seconds.append(time.perf_counter() - start)
    return seconds[WARM:]


def addresses(batch: Batch) -> tuple[Any, Any]:
    """Return where the blocks of *batch* start, here and at the peer."""
    return batch.source_offset + batch.source.address, batch.target_offset + batch.target.address


def bare_mooncake(rank: Rank, peer: Peer) -> Callable[[Batch], float]:
    """Return a function that writes a batch as a program that uses Mooncake directly would."""
    engine = rank.endpoint._native  # type: ignore[attr-defined]

    def write(batch: Batch) -> float:
        near, far = addresses(batch)
        start = time.perf_counter()
        code = engine.batch_transfer_sync_write(
            peer.handle.handle.session, near.tolist(), far.tolist(), batch.size.tolist()
        )
        assert code == 0
        return time.perf_counter() - start

    return write


def bare_nixl(rank: Rank, peer: Peer) -> Callable[[Batch], float]:
    """Return a function that writes a batch as a program that uses NIXL directly would."""
    agent = rank.endpoint._agent  # type: ignore[attr-defined]

    def rows(at: Any, batch: Batch, where: Region) -> Any:
        memory, _, number = where.device.partition(":")
        device = int(number or 0)
        table: Any = [(at.item(), batch.size.item(), device)] if len(at) == 1 else None
        if table is None:
            table = np.stack([at, batch.size, np.full_like(at, device)], axis=1).astype(np.uint64)
        return agent.get_xfer_descs(table, "VRAM" if memory == "cuda" else "DRAM")

    def write(batch: Batch) -> float:
        near, far = addresses(batch)
        start = time.perf_counter()
        ends = rows(near, batch, batch.source), rows(far, batch, batch.target)
        handle = agent.initialize_xfer("WRITE", *ends, peer.handle.handle, b"")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state
        agent.release_xfer_handle(handle)
        return time.perf_counter() - start

    return write


def bare_cuda(rank: Rank, peer: Peer) -> Callable[[Batch], float]:
    """Return a function that writes a batch as a program that uses CUDA directly would."""
    cuda = rank.device.cuda  # type: ignore[attr-defined]
    partner = peer.handle.handle
    (there,) = partner.mapped.values()
    stream, event = cuda.stream(), cuda.event()

    def write(batch: Batch) -> float:
        start = time.perf_counter()
        here = batch.source.address
        if len(batch.size) == 1:
            cuda.copy(there + batch.target_offset.item(), here + batch.source_offset.item(), batch.nbytes, stream)
        else:
            cuda.copy_batch(batch.target_offset + there, batch.source_offset + here, batch.size, stream)
        cuda.record(event, stream)
        while not cuda.happened(event):
            pass
        return time.perf_counter() - start

    return write


def serve(rank: Rank) -> Program:
    """Be the target; in a bare turn, spin in the library until it is over."""
    rank.endpoint.register(rank.device.allocate(GPU_REGION if on_gpu(rank) else REGION), "sink")
    address = (yield rank.channel.receive()).payload
    rank.endpoint.connect(address)
    rank.channel.send("initiator", rank.endpoint.address())
    while True:
        message: Any = yield rank.channel.receive()
        if message.payload == b"end":
            return
        if message.payload == b"bare":
            rank.channel.send("initiator", b"go")
            if rank.endpoint.kind == "nixl":  # type: ignore[attr-defined]
                while not rank.endpoint._agent.get_new_notifs():  # type: ignore[attr-defined]
                    pass
        else:
            rank.channel.send("initiator", b"next")


def measure(name: str) -> tuple[str, list[list[float]]]:
    """Return the engine as it reports itself, and a row for each shape."""
    model = EngineModel(path="tcp", call=0, descriptor=0, overlap=False, latency=0)
    engine = Engine(name=name, implementation=name.partition("_")[0], vendors=("cpu",), intra=model, inter=None)
    last = max(0, gpu_count() - 1)
    places = (Place(gpu=0), Place(gpu=last)) if name in GPU_ENGINES else (Place(), Place())
    outcome = Processes(engine, deadline=600).run(
        [
            RankSpec("initiator", "benchmarks.overhead:initiate", places[0]),
            RankSpec("target", "benchmarks.overhead:serve", places[1]),
        ]
    )
    for result in outcome.ranks.values():
        if result.error:
            raise SystemExit(f"{name}: {result.name}: {result.error}")
    return outcome.ranks["initiator"].engine, outcome.ranks["initiator"].value


def table(engine: str, rows: Sequence[Sequence[float]]) -> str:
    """Return the figures of one engine, a line for each shape."""
    lines = [
        f"{engine}",
        f"{'batch':>16} {'pdsim us':>10} {'bare us':>10} {'added us':>9} {'added, least':>12} "
        f"{'bandwidth ratio':>15}",
    ]
    for count, size, ours, bare, ours_least, bare_least, ratio in rows:
        shape = f"{count:.0f} x {format_size(size)}"
        lines.append(
            f"{shape:>16} {ours * 1e6:10.1f} {bare * 1e6:10.1f} {(ours - bare) * 1e6:9.1f} "
            f"{(ours_least - bare_least) * 1e6:12.1f} {ratio:15.3f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engines", nargs="*", default=["mooncake_tcp", "nixl_tcp", "nixl_shm"])
    below = False
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}"
    )
    for name in parser.parse_args().engines:
        engine, rows = measure(name)
        print(f"\n{name}: {table(engine, rows)}", flush=True)
        below |= max(rows, key=lambda row: row[1])[-1] < FLOOR
        below |= name in GPU_ENGINES and rows[0][2] - rows[0][3] > ADDED
    return int(below)


if __name__ == "__main__":
    sys.exit(main())
