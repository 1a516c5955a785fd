# SPDX-License-Identifier: Apache-2.0
"""How fast links are shared, next to SimGrid's C++ core on the same flows in the same run.

::

    python benchmarks/sharing.py --oracle DIR                                             # ours alone
    python benchmarks/sharing.py --oracle DIR --simgrid-lib DIR --simgrid-source DIR      # with SimGrid
    python benchmarks/sharing.py --scaling                                                # from 8 to 512 GPUs

SimGrid's directories, in 10 to 20 minutes::

    apt-get install libboost-dev cmake g++
    python -m venv simgrid && simgrid/bin/pip install "pybind11<3" setuptools wheel
    simgrid/bin/pip install --no-build-isolation simgrid==4.1  # --simgrid-lib simgrid/lib/python3.*/site-packages
    simgrid/bin/pip download --no-deps --no-build-isolation --no-binary :all: simgrid==4.1
    tar xf simgrid-4.1.tar.gz  # --simgrid-source simgrid-4.1

An oracle's is of ``*.npz`` files, one a workload:
``link_capacity`` (bytes/s), ``path_links``, ``path_length``, and ``start`` (s), ``path``, ``size`` (bytes) and
``finish`` (s) of each flow.  With the Python of an environment whose pdsim is compiled, that is what is measured.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import astuple, dataclass
from itertools import pairwise, product
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import pdsim.core.clock
from pdsim.core.clock import Alarm, Clock
from pdsim.sim.network import Network

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

HERE = Path(__file__).parent
OPTIONS = (
    "network/model:CM02",
    "network/crosstraffic:0",
    "network/TCP-gamma:0",
    "precision/timing:1e-12",
    "precision/work-amount:1e-9",
)
LOADS = (0.3, 0.5, 0.7)
NODES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Workload:
    """Links, paths and flows; seconds, bytes, bytes/s."""

    name: str
    capacity: NDArray[np.float64]  # [links]
    hops: NDArray[np.int64]  # [paths] how many links each passes
    path_links: NDArray[np.int64]  # [sum of hops] the numbers of the links, path after path
    start: NDArray[np.float64]  # [flows] in rising order
    size: NDArray[np.float64]  # [flows]
    path: NDArray[np.int64]  # [flows] the number of the path
    finish: NDArray[np.float64] | None = None  # [flows] the answer key, if there is one


@dataclass(frozen=True)
class Cost:
    """What one simulation of a workload cost, per flow."""

    microseconds: float  # of the CPU, without building the network
    touched: float  # paths given a rate
    events: float  # of the clock, that the network used


def read_oracle(directory: Path) -> Iterator[Workload]:
    """Yield the workloads of *directory*, with the completion times that SimGrid once gave."""
    for file in sorted(directory.glob("*.npz")):
        with np.load(file) as key:
            capacity, start, size, finish = (key[name] for name in ("link_capacity", "start", "size", "finish"))
            hops, links, path = (key[name].astype(np.int64) for name in ("path_length", "path_links", "path"))
            yield Workload(file.stem, capacity.astype(float), hops, links, start, size, path, finish)


def any_to_any(nodes: int, load: float, flows_per_gpu: int = 40, seed: int = 1) -> Workload:
    """Return flows from any GPU of the first half to any of the second, over memory, PCIe and NIC of both.

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
    kinds = np.repeat([3350e9, 55e9, 50e9], gpus)  # link = kind * gpus + gpu
    path_links = np.stack([source, gpus + source, 2 * gpus + source, 2 * gpus + target, gpus + target, target])
    hops = np.full(len(pairs), 6)
    return Workload(f"{gpus} GPUs", kinds, hops, path_links.T.ravel(), start, size, path.ravel())


def simulate(work: Workload) -> tuple[Cost, NDArray[np.float64]]:
    """Return what pdsim's own sharing costs for *work*, and when each flow ends."""
    clock = Clock()
    network = Network(clock)
    links = [network.link(str(i), c) for i, c in enumerate(work.capacity.tolist())]
    spans = pairwise([0, *np.cumsum(work.hops).tolist()])
    ways = [network.path([links[i] for i in work.path_links[begin:end].tolist()]) for begin, end in spans]
    starts, sizes = work.start.tolist(), work.size.tolist()
    paths = [ways[i] for i in work.path.tolist()]
    flows, ends, following = len(starts), [0.0] * len(starts), 0

    def end(flow: int) -> None:
        ends[flow] = clock.now

    def arrive(_: Any) -> None:
        nonlocal following
        now = clock.now
        while following < flows and starts[following] <= now:
            network.start(paths[following], sizes[following], end, following)
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
    return Cost(seconds / flows * 1e6, network.touched / flows, network.events / flows), np.array(ends)


class SimGrid:
    """SimGrid's C++ core, driven by simgrid_core.cpp, which is compiled in *scratch*.

    *source* is SimGrid's source, for its headers, and *library* its build.
    """

    def __init__(self, library: Path, source: Path, scratch: Path) -> None:
        self.scratch = scratch
        self.program = scratch / "simgrid_core"
        headers = scratch / "headers"  # cmake leaves files
        off = [f"-Denable_{part}=off" for part in ("python", "documentation", "smpi")]
        _call("cmake", "-S", str(source), "-B", str(headers), *off, cwd=scratch)
        roots = [f"-I{root}" for root in (source / "include", source, headers / "include", headers)]
        link = f"-L{library}", "-lsimgrid", f"-Wl,-rpath,{library}"
        _call("g++", "-O3", "-std=c++17", str(HERE / "simgrid_core.cpp"), "-o", str(self.program), *roots, *link)

    def simulate(self, work: Workload, way: str, optim: str) -> tuple[float, NDArray[np.float64]]:
        """Return CPU microseconds per flow and when each flow ends; *way* is "s4u" or "kernel"."""
        given, taken = self.scratch / "workload", self.scratch / "finish"
        counts = [len(work.capacity), len(work.hops), len(work.path_links), len(work.start)]
        fields = (work.capacity, work.hops, work.path_links, work.start, work.size, work.path)
        given.write_bytes(b"".join(a.tobytes() for a in (np.array(counts, np.int64), *fields)))
        options = [f"--cfg={option}" for option in (*OPTIONS, f"network/optim:{optim}")]
        answer = _call(str(self.program), way, str(given), str(taken), *options, "--log=root.thres:critical")
        return float(answer.split()[-1]) / counts[3] * 1e6, np.fromfile(taken)


def compare(work: Workload, simgrid: SimGrid | None, repeat: int) -> str:
    """Return a row of the table for *work*.  All take turns, so that they meet the same noise."""
    ours, key = inf, work.finish
    theirs = {"s4u": inf, "kernel": inf}
    for _ in range(repeat):
        cost, ends = simulate(work)
        ours = min(ours, cost.microseconds)
        for way, optim in product(theirs, ("Full", "Lazy")):
            if simgrid is None:
                break
            took, key = simgrid.simulate(work, way, optim)
            theirs[way] = min(theirs[way], took)
    figures = [f"{time:.1f}" if time < inf else "-" for time in (ours, *theirs.values())]
    figures.append(f"{theirs['s4u'] / ours:.2f}" if simgrid else "-")
    difference = "-" if key is None else f"{np.max(np.abs(ends / key - 1.0)):.0e}"
    return f"| {work.name} | {' | '.join(figures)} | {difference} |"


def any_to_any_cost(nodes: int, load: float, flows_per_gpu: int = 40) -> Cost:
    """Return the mean cost over independent machines of *nodes* nodes: 64 nodes in all, so that all are as sure."""
    costs = [simulate(any_to_any(nodes, load, flows_per_gpu, seed))[0] for seed in range(64 // nodes)]
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, and print tables of Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    env = os.environ.get
    parser.add_argument("--oracle", type=Path, default=env("PDSIM_ORACLE"), help="workloads with SimGrid's answers")
    parser.add_argument("--only", default="", help="comma-separated names of workloads")
    parser.add_argument("--simgrid-lib", type=Path, default=env("SIMGRID_LIB"), help="directory of libsimgrid.so")
    parser.add_argument("--simgrid-source", type=Path, default=env("SIMGRID_SOURCE"), help="SimGrid 4.1's source")
    parser.add_argument("--scaling", action="store_true", help="any-to-any traffic from 8 to 512 GPUs")
    parser.add_argument("--repeat", type=int, default=5, help="each figure is the best of so many")
    args = parser.parse_args(argv)
    if not args.oracle and not args.scaling:
        parser.error("nothing to run: give --oracle DIR, --scaling or both")
    compiled = pdsim.core.clock.__file__.endswith(".so")
    print(
        f"Python {platform.python_version()}, pdsim {'compiled' if compiled else 'pure'}, {platform.processor()}\n"
    )
    if args.oracle:
        only = set(filter(None, args.only.split(",")))
        with tempfile.TemporaryDirectory() as scratch:
            simgrid = None
            if args.simgrid_lib and args.simgrid_source:
                simgrid = SimGrid(args.simgrid_lib.resolve(), args.simgrid_source.resolve(), Path(scratch))
            print("CPU microseconds per flow; the largest relative difference of a completion time.\n")
            print(
                "| workload | pdsim | SimGrid s4u | SimGrid kernel | speed / s4u | difference |\n|---|" + "---:|" * 5
            )
            for work in read_oracle(args.oracle):
                if not only or work.name in only:
                    print(compare(work, simgrid, args.repeat), flush=True)
    if args.scaling:
        for line in growth(args.repeat):
            print(line, flush=True)
    return 0


def _call(*command: str, cwd: Path | None = None) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    if answer.returncode:
        sys.exit(f"{command[0]} failed:\n{answer.stdout[-2000:]}{answer.stderr[-4000:]}")
    return answer.stdout


if __name__ == "__main__":
    sys.exit(main())
