# SPDX-License-Identifier: Apache-2.0
"""Fit and check engines over TCP on links of known rate and delay: `conf/calibration/*_tcp-link.yaml`.

    python -m tools.known_link fit FILE              # parameters and their intervals
    python -m tools.known_link validated FILE        # errors of those predictions, and of the model of today

The fitted samples are `data/calibration/*_tcp-link.csv`; the program that measured them is in the history.
`data/benchmarks/known_link_validate.csv` has predictions of ``pdsim validate target=real hw=link`` over other links,
and what was measured then.  A link is what `conf/hw/link.yaml` is changed by: ``"rate=200Mbps delay=1ms"``.  A point
is *blocks* of *size* bytes, *gap* seconds after the one before.  Steady points have short gaps, and follow two
that are not counted; those after a long gap begin with the window to which TCP has shrunk by then.
"""

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np

from pdsim.calibration.robust import robust_fit
from pdsim.config import Config
from pdsim.config.compose import compose
from pdsim.results.record import Table
from pdsim.results.terminal import show_table
from pdsim.sim.model import Model
from pdsim.transfer import Batch, Program
from pdsim.transfer.job import Place, Rank, RankSpec
from tools.tables import rows as rows_of

BACKENDS = ("mooncake_tcp", "nixl_tcp")
LONG = 1.5  # seconds between transfers that begin with a shrunk window
AT = 1.0  # second of the job at which the first transfer begins
LARGE = 1 << 20
START = {"latency": 6e-4, "descriptor": 1e-4}
"""What is fitted, and where the search begins: seconds of an answer, and of a block beside the bytes."""
Point = tuple[int, int, float, int]  # blocks, size, gap, transfers
Rows = list[dict[str, str]]
Pairs = list[tuple[Mapping[str, str], float]]


def write(rank: Rank, points: Sequence[Point], taker: str) -> Program:
    """Write every one of *points* to *taker*."""
    region = rank.endpoint.register(rank.device.allocate(32 << 20), "all")
    rank.channel.send(taker, b"")
    _, address = yield rank.channel.receive()
    peer = rank.endpoint.connect(address)
    first = AT - rank.clock.now
    for number, (blocks, size, gap, many) in enumerate(points):
        offset = np.arange(blocks, dtype=np.int64) * size
        batch = Batch(region, peer.regions["all"], offset, offset, np.full(blocks, size))
        for _ in range(many):
            yield rank.clock.timeout(max(0.0, gap + first))
            first = 0.0
            yield rank.endpoint.write(peer, batch, label=str(number))
    rank.channel.send(taker, b"done")


def take(rank: Rank) -> Program:
    """Register memory and wait until the writer is done."""
    rank.endpoint.register(rank.device.allocate(32 << 20), "all")
    writer, _ = yield rank.channel.receive()
    rank.channel.send(writer, rank.endpoint.address())
    yield rank.channel.receive()


def times(config: Config, every: Sequence[Point]) -> list[list[float]]:
    """Return the seconds of each transfer of each point on the model."""
    outcome = Model(config.hw, config.backend).run(
        [
            RankSpec("writer", f"{__spec__.name}:write", Place(0), {"points": every, "taker": "taker"}),
            RankSpec("taker", f"{__spec__.name}:take", Place(1), {}),
        ]
    )
    if errors := [result.error for result in outcome.ranks.values() if result.error]:
        raise SystemExit("\n".join(errors))
    seconds: list[list[float]] = [[] for _ in every]
    for record in outcome.ranks["writer"].transfers:
        seconds[int(record.label)].append(record.seen - record.submitted)
    return seconds


def _counted(point: Point, seconds: Sequence[float]) -> Sequence[float]:
    return seconds[2:] if point[2] < LONG else seconds


@cache
def _modelled(backend: str, link: str) -> Config:
    return compose(["target=model", f"backend={backend}", "hw=link", *(f"hw.link.{word}" for word in link.split())])


def pairs(rows: Iterable[dict[str, str]], change: Callable[[Config], Config] = lambda config: config) -> Pairs:
    """Return each of *rows* with the seconds of the model, whose configuration is *change*d first."""
    paired: Pairs = []
    for (backend, link), own in _by_link(rows):
        ends = [(int(row["blocks"]), int(row["size"]), float(row["gap"])) for row in own]
        every = [(*point, 1 if point[2] == LONG else 3) for point in ends]
        modelled = times(change(_modelled(backend, link)), every)
        seconds = (min(_counted(point, own)) for point, own in zip(every, modelled, strict=True))
        paired += zip(own, seconds, strict=True)
    return paired


def _by_link(rows: Iterable[dict[str, str]]) -> Iterator[tuple[tuple[str, str], Rows]]:
    for key, group in groupby(rows, lambda row: (row["backend"], row["link"])):
        yield key, list(group)


def fit(path: Path) -> None:
    """Print the costs of an answer and of a block that bring the model nearest to the medians in *path*.

    Intervals are those of linear least squares at the solution: 1.96 standard errors of the logarithms.
    """
    for backend in BACKENDS:
        own = [row for row in rows_of(path) if row["backend"] == backend]
        if not own:
            continue

        def predicted(values: dict[str, float], own: Rows = own) -> list[float]:
            return [seconds for _, seconds in pairs(own, lambda config: _changed(config, **values))]

        measured = [float(row["seconds"]) for row in own]
        best = robust_fit(predicted, measured, START, scale=0.02, step=1e-2)
        spread = best.spread()
        for name, value in best.values.items():
            by = math.exp(1.96 * spread[name])
            interval = f"95 % {value / by * 1e6:.1f}us to {value * by * 1e6:.1f}us"
            print(f"{backend}: {name} {value * 1e6:.1f}us, {interval}, {len(own)} points")


def _changed(config: Config, latency: float, descriptor: float) -> Config:
    assert config.backend.inter is not None
    model = replace(config.backend.inter, latency=latency, descriptor=descriptor)
    return replace(config, backend=replace(config.backend, inter=model))


def validated(path: Path) -> None:
    """Print the errors of the predictions that were written before *path* was measured, and of today's model."""
    rows = [{"blocks": "1", "gap": "0", **row} for row in rows_of(path)]
    links = [(key, pairs(own)) for key, own in _by_link(rows)]
    for backend in BACKENDS:
        links.append(((backend, "all"), [pair for key, own in links if key[0] == backend for pair in own]))
    table = []
    for key, own in links:
        before = [(row, float(row["predicted"])) for row, _ in own]
        table.append([*key, *_large_and_small(own), *_large_and_small(before), own[0][0]["notes"]])
    errors = {"large %": "median error of 1 MiB and more", "worst %": "", "small ms": "of less", "worst ms": ""}
    columns = {"backend": "", "link": "", **errors, **{f"{name} before": text for name, text in errors.items()}}
    show_table(Table(f"{path.name}: the model, and predictions of before", columns | {"notes": ""}, table))


def _large_and_small(own: Pairs) -> list[float]:
    large = [abs(p / float(row["measured"]) - 1.0) * 100.0 for row, p in own if int(row["size"]) >= LARGE]
    small = [abs(p - float(row["measured"])) * 1e3 for row, p in own if int(row["size"]) < LARGE]
    return [round(n, 2) for n in (statistics.median(large), max(large), statistics.median(small), max(small))]


if __name__ == "__main__":
    {"fit": fit, "validated": validated}[sys.argv[1]](Path(sys.argv[2]))
