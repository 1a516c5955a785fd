# SPDX-License-Identifier: Apache-2.0
"""How far blind predictions of transfers were off, and whether 95 % intervals from other hosts hold them.

    python -m tools.transferred   # `pdsim.results.evidence.FACTORS`, and the table of docs/validation.md

Predictions were sealed before they were measured: in `data/validation`, in `transfers-*.parquet` of
`data/benchmarks` (means of three to nine jobs) and, of bare libraries, in `probe-*.parquet` (each set of processes).
The first probes are left out, for no calibration was of bare libraries then.
"""

import csv
import gzip
import math
import sys
from collections.abc import Iterator, Sequence
from statistics import median, stdev
from typing import NamedTuple

from pdsim.core.files import data
from pdsim.results.evidence import cause
from pdsim.validation.sealed import MEASURED, predictions, read
from pdsim.validation.verdicts import Value, compare, grouped
from tools.tables import markdown, rows

TRANSFERS = ("4xh100", "4xh100-again", "2xh100", "2xh200", "2xh200-flight")
PROBES = ("bare", "rounds", "placed")
THREADED = ("thread", "nixl thread", "nixl_placed")
"""How the names of sets begin whose NIXL has a progress thread."""


class Point(NamedTuple):
    """One blind prediction: its class, as in `pdsim.results.evidence.FACTORS`, and its error."""

    cause: str
    host: str
    error: float  # predicted over measured or its inverse, as a logarithm: at least 0


def points() -> list[Point]:
    """Return all of them."""
    return [*_validations(), *_transfers(), *_probes()]


def _point(software: str, host: str, value: Value, measured: float, threads: int = 1) -> Point:
    error = abs(math.log(value.value / measured))
    return Point(cause(software, value.group, value.label, value.nbytes, threads), host, error)


def _validations() -> Iterator[Point]:
    for path in sorted(data("validation").glob(f"*/{MEASURED}")):
        expected = read(predictions(path.parent))
        both = [[Value(**row) for row in rows] for rows in (expected["expected"], read(path)["measured"])]
        for one in compare(*both):
            yield _point("", f"validation {expected['hw']}", one.predicted, one.measured)


def _transfers() -> Iterator[Point]:
    for name in TRANSFERS:
        for row in rows(data("benchmarks", f"transfers-{name}.parquet")):
            of = row.get("set") or row["backend"]
            group = row.get("group") or row["label"].partition(" ")[0]
            value = Value(group, row["label"], row["quantity"], int(row["nbytes"]), float(row["predicted"]))
            software = "thread" if of.startswith(THREADED) else ""
            yield _point(software, name, value, float(row["measured"]), 3 if of.endswith("_threads") else 1)


def _probes() -> Iterator[Point]:
    keys = ("section", "library", "variant", "pattern", "operation", "descriptors", "size", "flow")
    for name in PROBES:
        path = data("benchmarks", f"probe-{name}-2xh200-predicted.csv.gz")
        sealed = csv.DictReader(
            line for line in gzip.decompress(path.read_bytes()).decode().splitlines() if line[0] != "#"
        )
        made = {tuple(row[key] for key in keys): float(row["total"]) for row in sealed}
        for again in ("", "-again"):
            measured = rows(data("benchmarks", f"probe-{name}-2xh200{again}.parquet"))
            for key, same in grouped(measured, lambda row: tuple(row[key] for key in keys)).items():
                section, library, variant, pattern, _, descriptors, size, _ = key
                if section in ("pair", "contention"):
                    software = "bare thread" if library == "nixl" and variant != "off" else "bare"
                    group = section if section == "pair" else pattern
                    value = Value(group, "", "time", int(descriptors) * int(size), made[key])
                    yield _point(software, name, value, median(float(row["total_ns"]) for row in same) / 1e3)


def factor(own: Sequence[Point]) -> float:
    """Return the factor that one more point, on one more host, is within with 95 %.

    It is that of 95 of 100 points, wider by the standard error of the mean of hosts, each with its own.
    """
    of_hosts = [_most(same) for same in grouped(own, lambda point: point.host).values()]
    return round(math.exp(_most(own) + stdev(of_hosts) / math.sqrt(len(of_hosts))), 2)


def _most(own: Sequence[Point]) -> float:
    errors = sorted(point.error for point in own)
    return errors[min(len(errors), math.ceil(0.95 * (len(errors) + 1))) - 1]


def factors(every: Sequence[Point]) -> dict[str, float]:
    """Return by class the `factor` of *every* point."""
    return {name: factor(own) for name, own in sorted(grouped(every, lambda point: point.cause).items())}


def held(own: Sequence[Point]) -> list[list[bool]]:
    """Return whether each point of each host is within the factor of the others' points."""
    hosts = grouped(own, lambda point: point.host)
    limits = {host: math.log(factor([point for point in own if point.host != host])) for host in hosts}
    return [[point.error <= limits[host] for point in here] for host, here in hosts.items()]


def table() -> Iterator[str]:
    """Yield the table of docs/validation.md: of each class its factor, and the points that other hosts' hold."""
    cells = {name: _cell(own) for name, own in grouped(points(), lambda point: point.cause).items()}
    columns = {"": "engines", "thread ": "NIXL's thread", "bare ": "bare", "bare thread ": "bare, thread"}
    kinds = ("small", "large", "apart", "shared", "handoff")
    lines = ([kind, *(cells.get(f"{column}{kind}") for column in columns)] for kind in kinds)
    yield from markdown(("transfers", *columns.values()), lines)


def _cell(own: Sequence[Point]) -> str:
    of_hosts = held(own)
    least = min(sum(here) / len(here) for here in of_hosts)
    return f"{factor(own):.2f}: {sum(map(sum, of_hosts))}/{len(own)} ({100 * least:.0f})"


def main() -> None:
    """Print the factors and the table."""
    sys.stdout.write("\n".join((str(factors(points())), *table())) + "\n")


if __name__ == "__main__":
    main()
