# SPDX-License-Identifier: Apache-2.0
"""How fast links are shared, from 8 to 512 GPUs: ``python -m benchmarks.sharing``.

With the Python of an environment whose pdsim is compiled, that is what is measured.
"""

from __future__ import annotations

import argparse
import gc
import platform
import time
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import pdsim.core.clock
from pdsim.core.clock import Alarm, Clock
from pdsim.sim.network import Network

if TYPE_CHECKING:
    from collections.abc import Iterator


LOADS = (0.3, 0.5, 0.7)
NODES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Cost:
    """What one simulation of a workload cost, per flow."""

    microseconds: float  # of the CPU, without building the network
    touched: float  # paths given a rate
    events: float  # of the clock, that the network used


def simulate(nodes: int, load: float, flows_per_gpu: int, seed: int) -> Cost:
    """Return the cost of flows from any GPU of one half to any of the other, over memory, PCIe and NIC of both.

    Eight GPUs a node with a 50 GB/s NIC each; log-normal sizes around 100 MB, Poisson starts; *load* is the fraction
    of the NICs' capacity that the flows need.
    """
    rng = np.random.default_rng(seed)
    gpus, half = 8 * nodes, 4 * nodes
    flows = flows_per_gpu * half
    size = np.minimum(rng.lognormal(np.log(100e6) - 0.5, 1.0, flows), 1e9)
    start = np.cumsum(rng.exponential(size.mean() / (load * half * 50e9), flows))
    pairs, path = np.unique(rng.integers(0, half, (flows, 2)), axis=0, return_inverse=True)
    source, target = pairs[:, 0], pairs[:, 1] + half
    clock = Clock()
    network = Network(clock)
    links = [network.link(str(i), rate) for i, rate in enumerate(np.repeat([3350e9, 55e9, 50e9], gpus).tolist())]
    # a link is kind * gpus + gpu
    passed = np.stack([source, gpus + source, 2 * gpus + source, 2 * gpus + target, gpus + target, target]).T
    ways = [network.path([links[i] for i in way]) for way in passed.tolist()]
    starts, sizes = start.tolist(), size.tolist()
    paths = [ways[i] for i in path.ravel().tolist()]
    following = 0

    def arrive(_: Any) -> None:
        nonlocal following
        now = clock.now
        while following < flows and starts[following] <= now:
            network.start(paths[following], sizes[following], lambda _: None, None)
            following += 1
        if following < flows:
            arrival.arm(starts[following])

    arrival = Alarm(clock, arrive)
    arrival.arm(starts[0])
    gc.disable()  # a collection costs what the process has kept before
    try:
        begin = time.process_time()
        clock.run()
        seconds = time.process_time() - begin
    finally:
        gc.enable()
    return Cost(seconds / flows * 1e6, network.touched / flows, network.events / flows)


def any_to_any_cost(nodes: int, load: float, flows_per_gpu: int = 40) -> Cost:
    """Return the mean cost over independent machines of *nodes* nodes: 64 nodes in all, so that all are as sure."""
    costs = [simulate(nodes, load, flows_per_gpu, seed) for seed in range(64 // nodes)]
    return Cost(*(sum(figures) / len(costs) for figures in zip(*map(astuple, costs), strict=True)))


def growth(repeat: int) -> Iterator[str]:
    """Yield Markdown lines: any-to-any traffic from 8 to 512 GPUs, and the factor from the first to the last."""
    yield "| GPUs |" + "".join(f" load {load}: us/flow, paths touched, events |" for load in LOADS)
    yield "|---:|" + "---:|" * len(LOADS)
    first: list[float] = []
    for nodes in NODES:
        row = [
            min((any_to_any_cost(nodes, load) for _ in range(repeat)), key=lambda cost: cost.microseconds)
            for load in LOADS
        ]
        yield f"| {8 * nodes} |" + "".join(f" {c.microseconds:.1f}, {c.touched:.1f}, {c.events:.2f} |" for c in row)
        last = [cost.microseconds for cost in row]
        first = first or last
    yield "| growth |" + "".join(f" {b / a:.2f} x |" for a, b in zip(first, last, strict=True))


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="each figure is the best of so many")
    compiled = pdsim.core.clock.__file__.endswith(".so")
    repeat = parser.parse_args().repeat
    print(
        f"Python {platform.python_version()}, pdsim {'compiled' if compiled else 'pure'}, {platform.processor()}\n"
    )
    for line in growth(repeat):
        print(line, flush=True)


if __name__ == "__main__":
    main()
