# SPDX-License-Identifier: Apache-2.0
"""How fast links are shared, next to SimGrid's C++ core on the same flows in the same run.

::

    python benchmarks/sharing.py --oracle DIR                                             # ours alone
    python benchmarks/sharing.py --oracle DIR --simgrid-lib DIR --simgrid-source DIR      # with SimGrid
    python benchmarks/sharing.py --oracle DIR --compiled PYTHON                           # and the compiled pdsim
    python benchmarks/sharing.py --scaling                                                # from 8 to 512 GPUs

README.md says where SimGrid's directories come from and how to read the table.  An oracle's is of ``*.npz`` files,
one a workload: ``link_capacity`` (bytes/s), ``path_links``, ``path_length``, and ``start`` (s), ``path``, ``size``
(bytes) and ``finish`` (s) of each flow.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, astuple, dataclass, replace
from datetime import UTC, datetime
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
    capacity: NDArray[np.float64]
    """[links]"""
    hops: NDArray[np.int64]
    """[paths] how many links each passes"""
    path_links: NDArray[np.int64]
    """[sum of hops] the numbers of the links, path after path"""
    start: NDArray[np.float64]
    """[flows] in rising order"""
    size: NDArray[np.float64]
    """[flows]"""
    path: NDArray[np.int64]
    """[flows] the number of the path"""
    finish: NDArray[np.float64] | None = None
    """[flows] when each ends according to the answer key, if there is one"""

    @property
    def paths(self) -> Iterator[list[int]]:
        """The links of each path."""
        for begin, end in pairwise([0, *np.cumsum(self.hops)]):
            yield self.path_links[begin:end].tolist()

    def first(self, flows: int) -> Workload:
        """Return the same links and paths with at most so many *flows*, the first; the answer key is for all."""
        if flows >= len(self.start):
            return self
        return replace(self, start=self.start[:flows], size=self.size[:flows], path=self.path[:flows], finish=None)


@dataclass(frozen=True)
class Cost:
    """What one simulation of a workload cost."""

    microseconds: float
    """CPU time per flow, without building the network."""
    touched: float
    """Paths given a rate, per flow."""
    events: float
    """Events of the clock that the network used, per flow."""


@dataclass(frozen=True)
class Row:
    """One line of the table: CPU microseconds per flow, best of several."""

    workload: str
    ours: float
    compiled: float | None
    """pdsim's compiled wheel, which gives the same times, bit for bit."""
    s4u: float | None
    """SimGrid through its public interface."""
    kernel: float | None
    """SimGrid's internal solver alone."""
    optim: str
    """The settings of ``network/optim`` that were fastest, for either."""
    difference: float | None
    """Largest relative difference of a completion time, to SimGrid in this run, else to the answer key."""

    def ratio(self, ours: float | None) -> float | None:
        """Return the speed of pdsim, pure or compiled, over that of SimGrid through its public interface."""
        return None if self.s4u is None or ours is None else self.s4u / ours


def read_oracle(directory: Path) -> list[Workload]:
    """Return the workloads of *directory*, with the completion times that SimGrid once gave."""
    workloads = []
    for file in sorted(directory.glob("*.npz")):
        with np.load(file) as key:
            workloads.append(
                Workload(
                    file.stem,
                    key["link_capacity"].astype(float),
                    key["path_length"].astype(np.int64),
                    key["path_links"].astype(np.int64),
                    key["start"],
                    key["size"],
                    key["path"].astype(np.int64),
                    key["finish"],
                )
            )
    return workloads


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
    ways = [network.path([links[i] for i in hops]) for hops in work.paths]
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
    return Cost(seconds / flows * 1e6, network.solver.touched / flows, network.events / flows), np.array(ends)


class SimGrid:
    """SimGrid's C++ core, driven by simgrid_core.cpp."""

    def __init__(self, library: Path, source: Path, scratch: Path) -> None:
        """Compile the driver in *scratch*.

        *source* is SimGrid's source, for its headers, and *library* its build.
        """
        self.scratch = scratch
        self.version = next(
            (
                line.split()[1]
                for line in (source / "PKG-INFO").read_text().splitlines()
                if line.startswith("Version")
            ),
            "unknown",
        )
        off = [f"-Denable_{part}=off" for part in ("python", "documentation", "smpi")]
        _call(
            "cmake", "-S", str(source.resolve()), "-B", str(scratch / "headers"), *off, cwd=scratch
        )  # it leaves files
        roots = [source / "include", source, scratch / "headers" / "include", scratch / "headers"]
        self.program = scratch / "simgrid_core"
        _call(
            *("g++", "-O3", "-std=c++17", str(HERE / "simgrid_core.cpp"), "-o", str(self.program)),
            *(f"-I{root}" for root in roots),
            *(f"-L{library}", "-lsimgrid", f"-Wl,-rpath,{library}"),
        )

    def simulate(self, work: Workload, way: str, optim: str) -> tuple[float, NDArray[np.float64]]:
        """Return CPU microseconds per flow and when each flow ends; *way* is "s4u" or "kernel"."""
        given, taken = self.scratch / "workload", self.scratch / "finish"
        counts = [len(work.capacity), len(work.hops), len(work.path_links), len(work.start)]
        fields = (work.capacity, work.hops, work.path_links, work.start, work.size, work.path)
        given.write_bytes(b"".join(a.tobytes() for a in (np.array(counts, np.int64), *fields)))
        options = [f"--cfg={option}" for option in (*OPTIONS, f"network/optim:{optim}")]
        answer = _call(str(self.program), way, str(given), str(taken), *options, "--log=root.thres:critical")
        return float(answer.split()[-1]) / counts[3] * 1e6, np.fromfile(taken)


def elsewhere(python: str, work: Workload) -> tuple[float, NDArray[np.float64]]:
    """Return what `simulate` says with the compiled pdsim of the environment of *python*: microseconds and ends.

    Raise a `SystemExit` if that pdsim is not compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        np.savez(
            Path(folder, "workload.npz"),
            link_capacity=work.capacity,
            path_length=work.hops,
            path_links=work.path_links,
            start=work.start,
            size=work.size,
            path=work.path,
            finish=work.start,
        )
        answer = _call(python, "-P", str(Path(__file__).resolve()), "--oracle", folder, "--one")
        return float(answer), np.load(Path(folder, "ends.npy"))


def one(folder: Path) -> None:
    """Do for `elsewhere` what it was asked for: the workload in *folder*, twice, of which the first warms up."""
    if not pdsim.core.clock.__file__.endswith(".so"):
        raise SystemExit(f"{pdsim.core.clock.__file__} is not compiled; install with PDSIM_COMPILE=1 pip install .")
    (work,) = read_oracle(folder)
    (cost, _), (again, ends) = simulate(work), simulate(work)
    np.save(folder / "ends.npy", ends)
    print(min(cost.microseconds, again.microseconds))


def compare(
    workloads: Sequence[Workload], simgrid: SimGrid | None, repeat: int, compiled: str | None = None
) -> Iterator[Row]:
    """Yield a row for each workload.  All take turns, so that they meet the same noise."""
    for work in workloads:
        ours: list[float] = []
        fast: list[float] = []
        theirs = {"s4u": (inf, ""), "kernel": (inf, "")}
        key = work.finish
        for _ in range(repeat):
            cost, ends = simulate(work)
            ours.append(cost.microseconds)
            if compiled:
                took, same = elsewhere(compiled, work)
                fast.append(took)
                if not np.array_equal(same, ends):
                    raise RuntimeError(f"{work.name}: the compiled pdsim gives other times")
            if simgrid:
                for way, optim in product(theirs, ("Full", "Lazy")):
                    took, key = simgrid.simulate(work, way, optim)
                    theirs[way] = min(theirs[way], (took, optim))
        yield Row(
            work.name,
            min(ours),
            min(fast, default=None),
            theirs["s4u"][0] if simgrid else None,
            theirs["kernel"][0] if simgrid else None,
            "/".join(dict.fromkeys(optim for _, optim in theirs.values())),
            None if key is None else float(np.max(np.abs(ends / key - 1.0))),
        )


def any_to_any_cost(nodes: int, load: float, flows_per_gpu: int = 40) -> Cost:
    """Return the mean cost over independent machines of *nodes* nodes: 64 nodes in all, so that all are as sure."""
    costs = [simulate(any_to_any(nodes, load, flows_per_gpu, seed))[0] for seed in range(64 // nodes)]
    return Cost(*(sum(figures) / len(costs) for figures in zip(*map(astuple, costs), strict=True)))


def grow(repeat: int) -> Iterator[tuple[float, int, Cost]]:
    """Yield (load, GPUs, cost) of any-to-any traffic from 8 to 512 GPUs."""
    for load, nodes in product(LOADS, NODES):
        costs = (any_to_any_cost(nodes, load) for _ in range(repeat))
        yield load, 8 * nodes, min(costs, key=lambda cost: cost.microseconds)


def machine(simgrid: SimGrid | None) -> dict[str, str]:
    """Return what the figures depend on besides the code."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in _read("/proc/cpuinfo").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    packages = {name: importlib.metadata.version(name) for name in ("simpy", "numpy")}
    versions = {"SimGrid": simgrid.version} if simgrid else {}
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    cpu = f"{os.cpu_count()} x {model}"
    return {"date": when, "machine": cpu, "Python": platform.python_version(), **packages, **versions}


def table(rows: Sequence[Row]) -> str:
    """Return *rows* as Markdown."""
    heads = [
        "workload",
        "pdsim",
        "compiled",
        "SimGrid s4u",
        "SimGrid kernel",
        "optim",
        "speed / s4u",
        "compiled / s4u",
        "difference",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in rows:
        figures = (row.ours, row.compiled, row.s4u, row.kernel)
        times = [*(_figure(figure, ".1f") for figure in figures), row.optim or "-"]
        ratios = [_figure(row.ratio(row.ours), ".2f"), _figure(row.ratio(row.compiled), ".2f")]
        lines.append("| " + " | ".join([row.workload, *times, *ratios, _figure(row.difference, ".0e")]) + " |")
    return "CPU microseconds per flow; the largest relative difference of a completion time.\n\n" + "\n".join(lines)


def growth(costs: Sequence[tuple[float, int, Cost]]) -> str:
    """Return *costs* as Markdown, one line for each number of GPUs."""
    lines = ["| GPUs |" + "".join(f" load {load}: us/flow, paths touched, events |" for load in LOADS)]
    lines.append("|---:|" + "---:|" * len(LOADS))
    cells = {(load, gpus): cost for load, gpus, cost in costs}
    for gpus in dict.fromkeys(gpus for _, gpus, _ in costs):
        row = [cells[load, gpus] for load in LOADS]
        lines.append(
            f"| {gpus} |" + "".join(f" {c.microseconds:.1f}, {c.touched:.1f}, {c.events:.2f} |" for c in row)
        )
    first, last = 8 * NODES[0], 8 * NODES[-1]
    factors = [cells[load, last].microseconds / cells[load, first].microseconds for load in LOADS]
    return "\n".join([*lines, "| growth |" + "".join(f" {factor:.2f} x |" for factor in factors)])


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    env = os.environ.get
    parser.add_argument("--oracle", type=Path, default=env("PDSIM_ORACLE"), help="workloads with SimGrid's answers")
    parser.add_argument("--only", default="", help="comma-separated names of workloads")
    parser.add_argument("--simgrid-lib", type=Path, default=env("SIMGRID_LIB"), help="directory of libsimgrid.so")
    parser.add_argument("--simgrid-source", type=Path, default=env("SIMGRID_SOURCE"), help="SimGrid 4.1's source")
    parser.add_argument("--compiled", help="the Python of an environment with the compiled pdsim")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--scaling", action="store_true", help="any-to-any traffic from 8 to 512 GPUs")
    parser.add_argument("--repeat", type=int, default=5, help="each figure is the best of so many")
    parser.add_argument("--write", action="store_true", help="keep the figures in data/benchmarks")
    args = parser.parse_args()
    if args.one:
        one(args.oracle)
        return 0
    only = set(filter(None, args.only.split(",")))
    workloads = [work for work in read_oracle(args.oracle) if not only or work.name in only] if args.oracle else []
    if not workloads and not args.scaling:
        parser.error("nothing to run: give --oracle DIR, --scaling or both")
    with tempfile.TemporaryDirectory() as scratch:
        simgrid = None
        if args.simgrid_lib and args.simgrid_source:
            simgrid = SimGrid(args.simgrid_lib.resolve(), args.simgrid_source.resolve(), Path(scratch))
        elif workloads:
            print("SimGrid is absent: give --simgrid-lib and --simgrid-source; README.md says how to install it\n")
        rows = list(compare(workloads, simgrid, args.repeat, args.compiled))
        costs = list(grow(args.repeat)) if args.scaling else []
        report(machine(simgrid), rows, costs, args.write)
    return 0


def report(
    about: dict[str, str], rows: Sequence[Row], costs: Sequence[tuple[float, int, Cost]], write: bool
) -> None:
    """Print the figures and, if *write*, keep them."""
    title = ", ".join(f"{key} {value}" if key not in ("date", "machine") else value for key, value in about.items())
    parts = [title, table(rows) if rows else "", growth(costs) if costs else ""]
    text = "\n\n".join(filter(None, parts))
    print(text)
    if write:
        stem = HERE.parent / "data" / "benchmarks" / f"sharing-{about['date']}"
        stem.parent.mkdir(exist_ok=True)
        stem.with_suffix(".md").write_text(text + "\n")
        figures = {
            "about": about,
            "comparison": [asdict(row) for row in rows],
            "scaling": [{"load": load, "gpus": gpus, **asdict(cost)} for load, gpus, cost in costs],
        }
        stem.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _call(*command: str, cwd: Path | None = None) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    if answer.returncode:
        sys.exit(f"{command[0]} failed:\n{answer.stdout[-2000:]}{answer.stderr[-4000:]}")
    return answer.stdout


def _read(path: str) -> str:
    file = Path(path)
    return file.read_text() if file.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
