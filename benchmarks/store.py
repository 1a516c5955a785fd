"""Time KV objects to and from Mooncake's store over TCP and a disk, beside the model's tiers.

    python -m benchmarks.store predict FILE       # what `pdsim.sim.topology.SideTraffic.tier` says on hw=loopback
    python -m benchmarks.store measure FILE [--folder DISK]     # fills in the measured seconds, and fits Storage

The store's memory is another process's, on loopback; files are read and written past the page cache (O_DIRECT).
"""

import argparse
import contextlib
import csv
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls

SIZES = tuple(1 << power for power in (16, 18, 20, 22, 24))
"""Bytes of an object: 16 tokens of a small model on one of many ranks, to 256 of Qwen3-8B on two."""

OBJECTS = 1, 8, 32
POINTS = [
    point for point in product(("store", "ssd"), ("write", "read"), SIZES, OBJECTS) if point[2] * point[3] <= 1 << 27
]
REPEATS = 7
DEADLINE = 60.0
"""Seconds for each start of a process, and for each point."""

FIELDS = "tier", "verb", "size", "objects", "predicted", "measured", "again"


def predicted(tier: str, verb: str, size: int, objects: int) -> float:
    """Return the seconds of the model."""
    from pdsim.config.compose import compose
    from pdsim.core.clock import Clock
    from pdsim.sim.network import Network
    from pdsim.sim.topology import SideTraffic, Topology
    from pdsim.transfer.job import Place

    machine = compose(["hw=loopback"]).hw
    # one call asks the master before it writes or reads, which is a message there and one back
    store = replace(machine.host.store, latency=2 * machine.host.tcp_latency)
    machine = replace(machine, host=replace(machine.host, store=store))
    clock = Clock()
    network = Network(clock)
    topology = Topology(machine, network)
    traffic = SideTraffic.at(topology.site(Place(node=0, gpu=None)), clock, network, topology)
    name = "remote" if tier == "store" else tier
    clock.run(until=traffic.tier(name, size * objects, objects, out=verb == "write", gpu=False))
    return float(clock.now)


def serve(master: str) -> None:
    """Lend 2 GiB to the store of *master* until standard input ends."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", 2 << 30, 16 << 20, "tcp", "", master)
    print("ready" if code == 0 else f"setup returned {code}", flush=True)
    sys.stdin.read()
    store.close()


def free_port() -> int:
    """Return a port that nobody listens to."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def process(*words: str, ready: str = "") -> Iterator[None]:
    """Run *words*; wait until it prints *ready*, and end it afterwards."""
    with tempfile.TemporaryFile("w+") as log:
        one = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            until = time.monotonic() + DEADLINE
            while ready and one.poll() is None and time.monotonic() < until:
                log.seek(0)
                if ready in log.read():
                    break
                time.sleep(0.1)
            else:
                log.seek(0)
                if ready:
                    raise SystemExit(f"{words[0]} was not ready within {DEADLINE:g} s: {log.read()[-500:]}")
            yield
        finally:
            one.send_signal(signal.SIGTERM)
            try:
                one.wait(10)
            except subprocess.TimeoutExpired:
                one.kill()


@contextlib.contextmanager
def mooncake() -> Iterator[Callable[[str, int, int], float]]:
    """Yield a function that times one call of *verb* on so many objects of a size."""
    from mooncake.store import MooncakeDistributedStore

    port, metrics = free_port(), free_port()
    master = f"127.0.0.1:{port}"
    found = find_spec("mooncake.store")
    if found is None or found.origin is None:
        raise SystemExit("mooncake.store is not installed: uv pip install mooncake-transfer-engine")
    binary = str(Path(found.origin).parent / "mooncake_master")
    with process(binary, f"--rpc_port={port}", f"--metrics_port={metrics}", "--rpc_address=127.0.0.1"):
        wait_for(port)
        with process(sys.executable, "-m", "benchmarks.store", "serve", master, ready="ready"):
            store = MooncakeDistributedStore()
            code = store.setup(f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master)
            if code:
                raise SystemExit(f"setup of the store returned {code}")
            memory = mmap.mmap(-1, 1 << 27)
            address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
            store.register_buffer(address, 1 << 27)
            calls = 0

            def call(verb: str, size: int, objects: int) -> float:
                nonlocal calls
                calls += verb == "write"
                keys = [f"{size}.{objects}.{calls}.{n}" for n in range(objects)]
                places = [address + n * size for n in range(objects)]
                np.frombuffer(memory, np.uint8)[: size * objects] = calls % 251 if verb == "write" else 255
                begin = time.perf_counter()
                if verb == "write":
                    codes = store.batch_put_from(keys, places, [size] * objects)
                else:
                    codes = store.batch_get_into(keys, places, [size] * objects)
                seconds = time.perf_counter() - begin
                if codes != [0 if verb == "write" else size] * objects:
                    raise SystemExit(f"{verb} of {objects} objects of {size} B returned {codes[:3]}")
                if verb == "read":
                    got = np.frombuffer(memory, np.uint8)[: size * objects]
                    if not (got == calls % 251).all():
                        raise SystemExit(f"{objects} objects of {size} B came back with other bytes")
                    store.remove_by_regex(f"{size}.*", True)
                return seconds

            yield call
            store.close()


def wait_for(port: int) -> None:
    """Return once somebody listens to *port*."""
    until = time.monotonic() + DEADLINE
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if time.monotonic() > until:
            raise SystemExit(f"mooncake_master did not listen within {DEADLINE:g} s")
        time.sleep(0.1)


@contextlib.contextmanager
def disk(folder: str) -> Iterator[Callable[[str, int, int], float]]:
    """Yield a function that times objects of a file in *folder*, one after the other."""
    memory = mmap.mmap(-1, max(SIZES))
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        file = os.open(Path(inside) / "objects", os.O_RDWR | os.O_CREAT | os.O_DIRECT)

        def call(verb: str, size: int, objects: int) -> float:
            piece = memoryview(memory)[:size]
            move = os.pwritev if verb == "write" else os.preadv
            begin = time.perf_counter()
            for number in range(objects):
                if move(file, [piece], number * size) != size:
                    raise SystemExit(f"{verb} of {size} B ended early")
            if verb == "write":
                os.fdatasync(file)
            return time.perf_counter() - begin

        yield call
        os.close(file)


def measure(call: Callable[[str, int, int], float], size: int, objects: int) -> dict[str, tuple[float, float]]:
    """Return the medians of two rounds, of writes and of reads of what they wrote."""
    rounds: dict[str, list[float]] = {"write": [], "read": []}
    until = time.monotonic() + DEADLINE
    for _ in range(2 * REPEATS + 1):
        for verb, times in rounds.items():
            times.append(call(verb, size, objects))
        if time.monotonic() > until and len(rounds["read"]) > 5:
            break
    pairs = {verb: times[1:] for verb, times in rounds.items()}  # the first is warm-up
    return {verb: (median(times[::2]), median(times[1::2])) for verb, times in pairs.items()}


def fitted(rows: list[dict[str, Any]]) -> tuple[float, float, float, list[float]]:
    """Return latency, seconds of an object and bytes/s that fit the first round, and errors of the second in %."""
    terms = np.array([[1.0, row["objects"], row["size"] * row["objects"]] for row in rows])
    first, again = (np.array([float(row[name]) for row in rows]) for name in ("measured", "again"))
    (latency, each, byte), _ = nnls(terms / first[:, None], np.ones(len(rows)))
    errors = np.abs(terms @ [latency, each, byte] / again - 1) * 100
    return latency, each, 1 / byte, errors.tolist()


def main() -> None:
    """Run one of the commands above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("command", choices=("predict", "measure", "serve"))
    parser.add_argument("file", help="CSV of the points")
    parser.add_argument("--folder", default=".", help="on the disk that is measured")
    given = parser.parse_args()
    if given.command == "serve":
        serve(given.file)
        return
    if given.command == "predict":
        rows: list[dict[str, Any]] = [
            dict(zip(FIELDS, (*point, f"{predicted(*point):.6g}", "", ""), strict=True)) for point in POINTS
        ]
    else:
        with Path(given.file).open() as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            row |= {"size": int(row["size"]), "objects": int(row["objects"])}
        for tier, opened in (("store", mooncake()), ("ssd", disk(given.folder))):
            with opened as call:
                for size, objects in sorted({(row["size"], row["objects"]) for row in rows}):
                    times = measure(call, size, objects)
                    for row in rows:
                        if (row["tier"], row["size"], row["objects"]) == (tier, size, objects):
                            row["measured"], row["again"] = (f"{each:.6g}" for each in times[row["verb"]])
    with Path(given.file).open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    if given.command == "predict":
        return
    for tier, verb in product(("store", "ssd"), ("write", "read")):
        those = [row for row in rows if (row["tier"], row["verb"]) == (tier, verb)]
        blind = [abs(float(row["predicted"]) / float(row["measured"]) - 1) * 100 for row in those]
        latency, each, rate, errors = fitted(those)
        print(
            f"{tier} {verb}: blind {median(blind):.0f} % (p95 {np.percentile(blind, 95):.0f}); fitted latency "
            f"{latency * 1e6:.0f} us, object {each * 1e6:.0f} us, {rate / 1e9:.2f} GB/s: second round "
            f"{median(errors):.0f} % (p95 {np.percentile(errors, 95):.0f})"
        )


if __name__ == "__main__":
    main()
