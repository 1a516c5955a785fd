# SPDX-License-Identifier: Apache-2.0
"""What the model says of what `benchmarks.known_link` measured: ``python -m benchmarks.known_link_model WHAT FILE``.

``fit`` says which parameters suit them best; ``compare`` how far the model is off, for messages of 1 MiB and more in
per cent and for smaller ones in milliseconds, with every point after it for links that have a shape; ``validated``
how far it was when it predicted; ``recovered`` how far for transfers that were cut or stalled.  Medians of the
repeats are what counts.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.known_link import (
    BACKENDS,
    DISTURBED_UNSEEN,
    LARGE,
    LONG,
    SHAPED,
    composed,
    disturbed,
    flows,
    kept,
    read,
    times,
)
from pdsim.calibration import link_fit
from pdsim.config import Config
from pdsim.results.record import Table
from pdsim.results.terminal import show_table

Rows = list[dict[str, str]]
Pairs = list[tuple[Mapping[str, str], float]]


@cache
def _composed(backend: str, link: str) -> Config:
    return composed(backend, link, "model")


def by_link(rows: Iterable[dict[str, str]]) -> Iterator[tuple[tuple[str, str], Rows]]:
    """Yield backend and link, and the rows of each."""
    for key, group in groupby(rows, lambda row: (row["backend"], row["link"])):
        yield key, list(group)


def pairs(rows: Iterable[dict[str, str]], change: Callable[[Config], Config] = lambda config: config) -> Pairs:
    """Return each of *rows* with the seconds of the model, whose configuration is *change*d first."""
    found: Pairs = []
    for (backend, link), own in by_link(rows):
        ways = flows(link)
        size = len(own) // len(ways)
        each = [own[begin : begin + size] for begin in range(0, len(own), size)]
        points = [(int(row["blocks"]), int(row["size"]), float(row["gap"])) for row in each[0]]
        every = [(*point, 1 if point[2] == LONG else 3) for point in points]
        modelled, _ = times(change(_composed(backend, link)), ways, every)
        for mine, seconds in zip(each, modelled, strict=True):
            found += zip(mine, (min(kept(p, s)) for p, s in zip(every, seconds, strict=True)), strict=True)
    return found


def fit(path: Path) -> None:
    """Print what brings the model nearest to the medians in *path*: the cost of an answer, and of a block."""
    for backend in BACKENDS:
        own = [row for row in read(path) if row["backend"] == backend]

        def predicted(latency: float, descriptor: float, own: Rows = own) -> list[float]:
            return [seconds for _, seconds in pairs(own, lambda config: _changed(config, latency, descriptor))]

        for name, value, low, high in link_fit.fit(predicted, [float(row["seconds"]) for row in own]):
            interval = f"95 % {low * 1e6:.1f}us to {high * 1e6:.1f}us"
            print(f"{backend}: {name} {value * 1e6:.1f}us, {interval}, {len(own)} points")


def _changed(config: Config, latency: float, descriptor: float) -> Config:
    assert config.backend.inter is not None
    model = replace(config.backend.inter, latency=latency, descriptor=descriptor)
    return replace(config, backend=replace(config.backend, inter=model))


def compare(path: Path) -> None:
    """Print how far the model is off at each backend and link of *path*."""
    found = [(key, pairs(own)) for key, own in by_link(read(path))]
    plain = [each for each in found if each[0][1] not in SHAPED]
    for backend in BACKENDS:
        plain.append(((backend, "all"), [pair for key, own in plain if key[0] == backend for pair in own]))
    columns = {
        "backend": "", "link": "",
        "large %": "messages of 1 MiB and more: median of the absolute error of the median time",
        "worst %": "of those",
        "small ms": "smaller messages: the same", "worst ms": "of those",
        "blocks %": "batches of blocks: the same", "idle %": "messages after a long gap: the same",
    }  # fmt: skip
    table = [[*key, *_errors(own)] for key, own in plain if own]
    show_table(Table(f"{path.name}: the model against the link", columns, table))
    shaped = [[*key, *_point(*pair)] for key, own in found if key[1] in SHAPED for pair in own]
    columns = {"backend": "", "link": "", "flow": "", "bytes": "", "measured ms": "", "model ms": "", "error %": ""}
    show_table(Table(f"{path.name}: links of another shape", columns, shaped))


def _point(row: Mapping[str, str], seconds: float) -> list[Any]:
    measured = float(row["seconds"])
    error = round((seconds / measured - 1.0) * 100.0, 1)
    return [row["flow"], int(row["size"]), round(measured * 1e3, 3), round(seconds * 1e3, 3), error]


def _errors(found: Pairs) -> list[float]:
    """Return median and worst absolute error of large and small messages, and medians of batches and after gaps."""
    kinds: dict[str, list[float]] = {"large": [], "small": [], "blocks": [], "idle": []}
    for row, seconds in found:
        measured, blocks, size = float(row["seconds"]), int(row["blocks"]), int(row["size"])
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
    of = statistics.median
    return [
        round(n, 2) for n in (of(large), max(large), of(small), max(small), of(kinds["blocks"]), of(kinds["idle"]))
    ]


def validated(path: Path) -> None:
    """Print how far off the predictions were that were written before *path* was measured, and today's model is."""
    rows = [{"blocks": "1", "gap": "0", **row} for row in read(path)]
    found = [(key, pairs(own)) for key, own in by_link(rows)]
    for backend in BACKENDS:
        found.append(((backend, "all"), [pair for key, own in found if key[0] == backend for pair in own]))
    table = []
    for key, own in found:
        before = [(row, float(row["predicted"])) for row, _ in own]
        table.append([*key, *_large_and_small(own), *_large_and_small(before), own[0][0]["notes"]])
    errors = {"large %": "median error of 1 MiB and more", "worst %": "", "small ms": "of less", "worst ms": ""}
    columns = {"backend": "", "link": "", **errors, **{f"{name} before": text for name, text in errors.items()}}
    show_table(Table(f"{path.name}: the model, and predictions of before", columns | {"notes": ""}, table))


def _large_and_small(found: Pairs) -> list[float]:
    large = [abs(_error(*pair)) * 100.0 for pair in found if int(pair[0]["size"]) >= LARGE]
    small = [abs(p - float(row["measured"])) * 1e3 for row, p in found if int(row["size"]) < LARGE]
    return [round(n, 2) for n in (statistics.median(large), max(large), statistics.median(small), max(small))]


def _error(row: Mapping[str, str], predicted: float) -> float:
    return predicted / float(row["measured"]) - 1.0


LEVELS = [(2.0 + (n + 0.5) / 15) / 3.0 for n in range(15)]
"""How full a stream may be when it is cut: between two thirds and all, each as likely."""


def recovered(path: Path) -> None:
    """Print how far the model is off for disturbed transfers: its median over `LEVELS` from that of the runs."""
    rows = read(path)
    plain = {key: statistics.median(own) for key, own in _runs(rows) if not key[2]}
    table: list[list[Any]] = []
    for key, own in _runs(rows):
        backend, link, kind, length = key
        if not kind:
            continue
        alone, _ = disturbed(backend, link, "model")
        every = [disturbed(backend, f"{link} filled={level}", "model", kind, float(length))[0] for level in LEVELS]
        predicted, measured = statistics.median(every), statistics.median(own)
        cost = measured - plain[backend, link, "", "0.0"]
        errors = [predicted / measured - 1.0, (predicted - alone) / cost - 1.0]
        table.append([*key, _listed(own), _listed(every), *(round(100.0 * e, 1) for e in errors)])
    columns = {
        "backend": "", "link": "", "what": "happens 0.2 s after the transfer began", "for": "seconds",
        "measured": "seconds of the transfer, each run, and how many of them",
        "model": "the same, for each level that the stream may be full to",
        "error %": "of the median", "of cost %": "error of what the disturbance adds",
    }  # fmt: skip
    show_table(Table(f"{path.name}: transfers that are disturbed", columns, table))
    for kind, unseen in [(kind, unseen) for kind in ("cut", "stall") for unseen in (True, False)]:
        errors = [row[6] for row in table if row[2] == kind and (row[1] in DISTURBED_UNSEEN) == unseen]
        where = "links that the model has not seen" if unseen else "the others"
        print(f"{kind}, {where}: {sum(abs(error) <= 10.0 for error in errors)} of {len(errors)} within 10 %")


def _listed(seconds: Iterable[float]) -> str:
    found = Counter(f"{value:.2f}" for value in sorted(seconds))
    return " ".join(value if many == 1 else f"{value}x{many}" for value, many in found.items())


def _runs(rows: Rows) -> Iterator[tuple[tuple[str, str, str, str], list[float]]]:
    for key, group in groupby(rows, lambda row: (row["backend"], row["link"], row["kind"], row["length"])):
        yield key, [float(row["seconds"]) for row in group]


if __name__ == "__main__":
    {"fit": fit, "compare": compare, "validated": validated, "recovered": recovered}[sys.argv[1]](Path(sys.argv[2]))
