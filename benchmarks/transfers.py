# SPDX-License-Identifier: Apache-2.0
"""How fast the model moves batches and messages: per second of one core, and in SimPy events.

    python benchmarks/transfers.py [--transfers 50000] [--descriptors 1000] [--messages 200000]

Two GPUs of a machine of eight, Mooncake's NVLink transport: transfers one after the other and eight at a time, then
messages one after the other and in bursts.  Times include starting and ending the job and the ranks' own programs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from pdsim.core.clock import Clock
from pdsim.hardware.costs import Engine, EngineModel
from pdsim.hardware.machine import Gpu, Host, Interconnect, Machine, Nic
from pdsim.sim.model import Model
from pdsim.transfer import Batch, Program
from pdsim.transfer.job import Outcome, Place, Rank, RankSpec

BLOCK = 16384


def machine() -> Machine:
    """Return a node like 8xh200."""
    return Machine(
        name="bench",
        vendor="nvidia",
        nodes=1,
        gpus=8,
        gpu=Gpu(name="H200", memory=141_000_000_000, memory_rate=4.8e12, compute=989e12, pcie=55e9),
        interconnect=Interconnect(kind="switch", rate=390e9),
        nic=Nic(count=8, rate=49.6e9),
        host=Host(memory=2_000_000_000_000, memory_rate=213e9, tcp_rate=41e9, tcp_latency=50e-6),
    )


def engine() -> Engine:
    """Return what Mooncake's NVLink transport costs on H200."""
    cost = EngineModel(path="nvlink", call=11e-6, descriptor=2.2e-6, overlap=False, latency=0.0, rate=390e9)
    return Engine(name="bench", implementation="", vendors=("nvidia",), intra=cost, inter=None, timeout=1e6)


def sender(rank: Rank, transfers: int, descriptors: int, inflight: int) -> Program:
    """Write *transfers* batches, *inflight* at a time."""
    region = rank.endpoint.register(rank.device.allocate(descriptors * BLOCK), "kv")
    message = yield rank.channel.receive()
    peer = rank.endpoint.connect(message.payload)
    offset = np.arange(descriptors) * BLOCK
    batch = Batch(region, peer.regions["kv"], offset, offset, np.full(descriptors, BLOCK))
    for _ in range(transfers // inflight):
        flying = [rank.endpoint.write(peer, batch, b"done") for _ in range(inflight)]
        for transfer in flying:  # noqa: UP028 SimPy sends the record back, which a list's iterator cannot take
            yield transfer


def receiver(rank: Rank, descriptors: int, transfers: int) -> Program:
    """Wait for *transfers* notifications."""
    rank.endpoint.register(rank.device.allocate(descriptors * BLOCK), "kv")
    rank.channel.send("sender", rank.endpoint.address())
    for _ in range(transfers):
        yield rank.endpoint.notifications.get()


def talker(rank: Rank, messages: int, burst: int) -> Program:
    """Send *messages* in bursts, and wait for an answer to each burst."""
    for _ in range(messages // burst):
        for _ in range(burst):
            rank.channel.send("listener", b"x" * 100)
        yield rank.channel.receive()


def listener(rank: Rank, messages: int, burst: int) -> Program:
    """Answer every burst."""
    for _ in range(messages // burst):
        for _ in range(burst):
            yield rank.channel.receive()
        rank.channel.send("talker", b"y")


def run(*ranks: tuple[str, Mapping[str, Any]]) -> tuple[Outcome, float]:
    """Run functions of this module on a GPU each.  Return the outcome and the seconds of processor time."""
    specs = [
        RankSpec(name, f"{__name__}:{name}", Place(0, gpu), arguments) for gpu, (name, arguments) in enumerate(ranks)
    ]
    model = Model(machine(), engine())
    start = time.process_time()
    outcome = model.run(specs)
    seconds = time.process_time() - start
    errors = [result.error for result in outcome.ranks.values() if result.error]
    if errors:
        raise SystemExit("\n".join(errors))
    return outcome, seconds


def line(what: str, count: int, outcome: Outcome, seconds: float) -> str:
    """Return one row of the table."""
    return f"{what:34}{count / seconds:12,.0f}{seconds / count * 1e6:12.1f}{outcome.events / count:12.2f}"


def clock_events(count: int) -> float:
    """Return the seconds that *count* bare timeouts take: the floor under everything here."""
    clock = Clock()

    def tick() -> Program:
        for _ in range(count):
            yield clock.timeout(1.0)

    clock.process(tick())
    start = time.process_time()
    clock.run()
    return time.process_time() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transfers", type=int, default=50_000)
    parser.add_argument("--descriptors", type=int, default=1000)
    parser.add_argument("--messages", type=int, default=200_000)
    options = parser.parse_args()
    print(f"{'':34}{'per second':>12}{'us each':>12}{'events each':>12}")
    bare = clock_events(200_000)
    print(f"{'bare SimPy timeouts':34}{200_000 / bare:12,.0f}{bare / 0.2:12.1f}{1:12.2f}")
    for inflight in (1, 8):
        count, size = options.transfers, options.descriptors
        ranks = (
            ("sender", {"transfers": count, "descriptors": size, "inflight": inflight}),
            ("receiver", {"transfers": count, "descriptors": size}),
        )
        print(line(f"transfers of {size}, {inflight} at a time", count, *run(*ranks)))
    for burst in (1, 100):
        work = {"messages": options.messages, "burst": burst}
        count = options.messages + options.messages // burst
        print(line(f"messages, {burst} before an answer", count, *run(("talker", work), ("listener", work))))


if __name__ == "__main__":
    main()
