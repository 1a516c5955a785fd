"""Transfers over a link of known rate and delay, and what the model says of them: ``python -m benchmarks.known_link``.

``measure FILE rate,delay ...`` writes what both engines over TCP take there, ``fit FILE`` says which parameters suit
it best, and ``compare FILE`` how far the model is off, for transfers of 1 MiB and more in per cent and for smaller ones
in milliseconds.  ``recover FILE`` measures how much longer a transfer takes that is cut or stalled on its way.

A point is *blocks* of *size* bytes, *gap* seconds after the one before.  Steady points have short gaps and follow two
that are not counted; those after a long gap begin with the window to which TCP has shrunk by then.
"""

from __future__ import annotations

import csv
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from pdsim.config import Config
from pdsim.fabric.machine import Change
from pdsim.fabric.world import Model
from pdsim.results.record import Table
from pdsim.results.report import show_table
from pdsim.transfer import Batch, Place, Program, Rank, RankSpec
from pdsim.units import parse_rate

BACKENDS = ("mooncake_tcp", "nixl_tcp")
STEADY = [(1, 4 << 10 << shift) for shift in range(0, 14, 2)]  # 4 KiB to 16 MiB
BLOCKS = [(4, 4 << 10), (16, 4 << 10), (64, 4 << 10), (16, 64 << 10), (16, 256 << 10)]
COLD = [(1, 256 << 10), (1, 1 << 20), (1, 4 << 20)]
SHORT, LONG = 5e-3, 1.5  # seconds of a gap
LARGE = 1 << 20
COLUMNS = ("backend", "rate", "delay", "blocks", "size", "gap", "seconds", "low", "high", "repeats", "load")
Point = tuple[int, int, float, int]  # blocks, size, gap, transfers


def points() -> list[Point]:
    """Return what is run at every rate and delay."""
    steady = [(blocks, size, SHORT, 17 if blocks * size < LARGE else 11) for blocks, size in [*STEADY, *BLOCKS]]
    return [*steady, *((blocks, size, LONG, 5) for blocks, size in COLD)]


# --- programs -------------------------------------------------------------------------------------------------------


def write(rank: Rank, points: Sequence[Point]) -> Program:
    """Write every one of *points* to the rank whose address comes."""
    region = rank.endpoint.register(rank.device.allocate(32 << 20), "all")
    sender, address = yield rank.channel.receive()
    peer = rank.endpoint.connect(address)
    begun = False  # what a disturbance is timed against begins at a time of the job, however long it took to connect
    for number, (blocks, size, gap, many) in enumerate(points):
        offset = np.arange(blocks, dtype=np.int64) * size
        batch = Batch(region, peer.regions["all"], offset, offset, np.full(blocks, size))
        for _ in range(many):
            yield rank.clock.timeout(gap if begun else max(0.0, gap - rank.clock.now))
            begun = True
            yield rank.endpoint.write(peer, batch, label=str(number))
    rank.channel.send(sender, b"done")


def take(rank: Rank, writer: str) -> Program:
    """Be written to until the writer has done."""
    rank.endpoint.register(rank.device.allocate(32 << 20), "all")
    rank.channel.send(writer, rank.endpoint.address())
    yield rank.channel.receive()


def times(config: Config, every: Sequence[Point]) -> list[list[float]]:
    """Return the seconds of each transfer of each point, on the target of *config*."""
    if config.target == "model":
        target: Any = Model(config.hw, config.backend)
    else:
        from backends.launch import Processes

        target = Processes(config.backend, deadline=600, link=config.hw.link, nodes=config.hw.nodes)
    ranks = [
        RankSpec("writer", f"{__spec__.name}:write", Place(0), {"points": every}),
        RankSpec("taker", f"{__spec__.name}:take", Place(1), {"writer": "writer"}),
    ]
    outcome = target.run(ranks)
    if errors := [result.error for result in outcome.ranks.values() if result.error]:
        raise SystemExit("\n".join(errors))
    found: list[list[float]] = [[] for _ in every]
    for record in outcome.ranks["writer"].transfers:
        found[int(record.label)].append(record.seen - record.submitted)
    return found


def kept(point: Point, seconds: Sequence[float]) -> Sequence[float]:
    """Return what counts: of steady points all but the first two."""
    return seconds[2:] if point[2] == SHORT else seconds


# --- measurements ---------------------------------------------------------------------------------------------------


def composed(backend: str, rate: str, delay: str, *words: str) -> Config:
    """Return the configuration of one link."""
    from pdsim.run import compose

    return compose([f"backend={backend}", "hw=link", f"hw.link.rate={rate}", f"hw.link.delay={delay}", *words])


@cache
def _composed(backend: str, rate: str, delay: str) -> Config:
    return composed(backend, rate, delay, "target=model")


def measure(path: Path, links: Iterable[str]) -> None:
    """Add to *path* what the engines take on each of *links*, such as ``200Mbps,1ms``."""
    for link in links:
        rate, delay = link.split(",")
        for backend in BACKENDS:
            every = [point for point in points() if point[0] * point[1] / parse_rate(rate) < 2.0]
            found = times(composed(backend, rate, delay, "target=real"), every)
            _append(path, list(_rows(backend, rate, delay, every, found)))


def _rows(
    backend: str, rate: str, delay: str, every: Sequence[Point], found: Sequence[Sequence[float]]
) -> Iterator[list[Any]]:
    for point, seconds in zip(every, found, strict=True):
        own = kept(point, seconds)
        numbers = [f"{value:.6g}" for value in (statistics.median(own), min(own), max(own))]
        yield [backend, rate, delay, *point[:3], *numbers, len(own), f"{os.getloadavg()[0]:.1f}"]


def _append(path: Path, rows: Sequence[Sequence[Any]], columns: Sequence[str] = COLUMNS) -> None:
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if fresh:
            writer.writerow(columns)
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of *path*, comments left out."""
    return list(csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#")))


# --- the model ------------------------------------------------------------------------------------------------------


def links(rows: Iterable[Mapping[str, str]]) -> Iterator[tuple[tuple[str, str, str], list[Mapping[str, str]]]]:
    """Yield backend, rate and delay, and the rows of each."""
    for key, group in groupby(rows, lambda row: (row["backend"], row["rate"], row["delay"])):
        yield key, list(group)


Pairs = list[tuple[Mapping[str, str], float]]


def pairs(rows: Iterable[Mapping[str, str]], change: Callable[[Config], Config] = lambda config: config) -> Pairs:
    """Return each of *rows* with the seconds of the model, whose configuration is *change*d first."""
    found: Pairs = []
    for key, own in links(rows):
        many = {SHORT: 3, LONG: 1}
        every = [(int(row["blocks"]), int(row["size"]), float(row["gap"]), many[float(row["gap"])]) for row in own]
        config = change(_composed(*key))
        seconds = [min(kept(point, all_of)) for point, all_of in zip(every, times(config, every), strict=True)]
        found += zip(own, seconds, strict=True)
    return found


def fit(path: Path) -> None:
    """Print what brings the model nearest to the shortest times in *path*: the cost of an answer, and of a block."""
    from scipy.optimize import least_squares

    def changed(config: Config, latency: float, descriptor: float) -> Config:
        assert config.backend.inter is not None
        model = replace(config.backend.inter, latency=latency, descriptor=descriptor)
        return replace(config, backend=replace(config.backend, inter=model))

    for backend in BACKENDS:
        own = [row for row in read(path) if row["backend"] == backend]

        def residuals(logs: Any, own: Any = own) -> list[float]:
            found = pairs(own, lambda config: changed(config, *np.exp(logs)))
            return [np.log(seconds / float(row["low"])) for row, seconds in found]

        found = least_squares(residuals, np.log([6e-4, 1e-4]), loss="soft_l1", f_scale=0.02, diff_step=1e-2)
        variance = 2.0 * found.cost / (len(own) - 2)
        spread = np.exp(1.96 * np.sqrt(np.diag(np.linalg.pinv(found.jac.T @ found.jac)) * variance))
        for name, value, by in zip(("latency", "descriptor"), np.exp(found.x) * 1e6, spread, strict=True):
            print(f"{backend}: {name} {value:.1f}us, 95 % {value / by:.1f}us to {value * by:.1f}us, {len(own)} points")


def compare(path: Path) -> None:
    """Print how far the model is off at each backend, rate and delay of *path*, by the shortest and the median time."""
    found = [(key, pairs(own)) for key, own in links(read(path))]
    for backend in BACKENDS:
        found.append(((backend, "all", ""), [pair for key, own in found if key[0] == backend for pair in own]))
    table = [[*key, name, *_errors(own, name)] for key, own in found for name in ("low", "seconds")]
    columns = {
        "backend": "", "rate": "of the link", "delay": "one way", "of": "what of the repeats is compared",
        "large %": "messages of 1 MiB and more: median of the absolute error", "worst %": "of those",
        "small ms": "smaller messages: the same", "worst ms": "of those",
        "blocks %": "batches of blocks: the same", "idle %": "messages after a long gap: the same",
    }  # fmt: skip
    show_table(Table(f"{path.name}: the model against the link", columns, table))


def _errors(found: Pairs, name: str) -> list[float]:
    """Return median and worst absolute error of large and small messages, and the medians of batches and after gaps."""
    kinds: dict[str, list[float]] = {"large": [], "small": [], "blocks": [], "idle": []}
    for row, seconds in found:
        measured, blocks, size = float(row[name]), int(row["blocks"]), int(row["size"])
        error = abs(seconds / measured - 1.0) * 100.0
        if float(row["gap"]) == LONG:
            kinds["idle"].append(error)
        elif blocks > 1:
            kinds["blocks"].append(error)
        elif size >= LARGE:
            kinds["large"].append(error)
        else:
            kinds["small"].append(abs(seconds - measured) * 1e3)
    large, small = kinds["large"], kinds["small"]
    numbers = [
        np.median(large),
        max(large),
        np.median(small),
        max(small),
        *map(np.median, (kinds["blocks"], kinds["idle"])),
    ]
    return [round(float(number), 2) for number in numbers]


# --- recovery -------------------------------------------------------------------------------------------------------

DISTURBED = [("cut", 0.1), ("cut", 0.5), ("cut", 1.0), ("stall", 0.3), ("stall", 1.0)]
AT, SIZE = 1.0, 16 << 20
RECOVERY = (
    "backend",
    "rate",
    "delay",
    "window",
    "kind",
    "seconds",
    "size",
    "undisturbed",
    "measured",
    "low",
    "high",
    "load",
)


def recover(path: Path, asked: Iterable[str]) -> None:
    """Add to *path* how long transfers take that are disturbed 0.2 s after they began, on each of the links *asked*.

    Such as ``200Mbps,1ms,4MiB``: rate, delay and largest window.
    """
    for link in asked:
        for backend in BACKENDS:
            key = (backend, *link.split(","))
            plain = [disturbed(key, "real") for _ in range(3)]
            for kind, seconds in DISTURBED:
                found = [disturbed(key, "real", kind, seconds) for _ in range(3)]
                numbers = [statistics.median(plain), statistics.median(found), min(found), max(found)]
                row = [*key, kind, seconds, SIZE, *(f"{number:.6g}" for number in numbers)]
                _append(path, [[*row, f"{os.getloadavg()[0]:.1f}"]], RECOVERY)


def disturbed(key: Sequence[str], target: str, kind: str = "", seconds: float = 0.0) -> float:
    """Return the seconds of one transfer that begins 1 s after the start, with what happens to it 0.2 s later."""
    backend, rate, delay, window = key
    config = composed(backend, rate, delay, f"target={target}", f"hw.link.window={window}")
    if kind:
        changes = (Change(kind=kind, start=AT + 0.2, end=AT + 0.2 + seconds),)
        assert config.hw.link is not None
        config = replace(config, hw=replace(config.hw, link=replace(config.hw.link, changes=changes)))
    return times(config, [(1, SIZE, AT, 1)])[0][0]


def recovered(path: Path) -> None:
    """Print how far the model is off for disturbed transfers: of the whole time, and of what the disturbance cost."""
    table: list[list[Any]] = []
    for row in read(path):
        key = row["backend"], row["rate"], row["delay"], row["window"]
        plain = disturbed(key, "model")
        predicted = disturbed(key, "model", row["kind"], float(row["seconds"]))
        measured, cost = float(row["measured"]), float(row["measured"]) - float(row["undisturbed"])
        errors = [predicted / measured - 1.0, (predicted - plain) / cost - 1.0]
        table.append([*key, row["kind"], row["seconds"], measured, predicted, *(round(100.0 * e, 1) for e in errors)])
    columns = {
        "backend": "", "rate": "of the link", "delay": "one way", "window": "largest",
        "what": "happens 0.2 s after the transfer began",
        "for": "seconds", "measured": "seconds of the transfer, median of 3", "model": "the same",
        "error %": "of that", "of cost %": "error of what the disturbance adds",
    }  # fmt: skip
    show_table(Table(f"{path.name}: transfers that are disturbed", columns, table))


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *([sys.argv[3:]] if sys.argv[3:] else []))
