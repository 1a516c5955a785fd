# SPDX-License-Identifier: Apache-2.0
"""A sweep from its points to its table: finished points are kept, the others are run, every row is appended.

`measure` runs one point in any process, or takes the results that an earlier process left.
"""

import shutil
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdsim.core.errors import ConfigError, RunWarning
from pdsim.core.progress import ShowProgress
from pdsim.results import store
from pdsim.run import run
from pdsim.sweep import collect
from pdsim.sweep.collect import FINAL, Ledger
from pdsim.sweep.executors import Executor
from pdsim.sweep.points import Point
from pdsim.sweep.trackers import Track


def sweep(
    folder: Path, points: Sequence[Point], executor: Executor, progress: ShowProgress, track: Track | None = None
) -> list[dict[str, Any]]:
    """Run the *points* without a final row in *folder*, and return the rows of all, in order.

    *track* is called with each final row, also with those of earlier calls.

    Interrupted at any moment, it has lost the points under way: called again, it goes on.  ``points.parquet`` has
    the rows that there are when it ends, however it ends.  Raise a `ConfigError` if *folder* cannot be written to,
    or if another process runs this sweep.
    """
    store.make(folder.parent, "output=")
    store.make(folder, "output=")
    with collect.locked(folder):
        book = Ledger(folder)
        try:
            _run(folder, points, book, executor, progress, _telling(track))
            return [book.rows[point.name] for point in points]
        finally:
            book.close()
            collect.write(
                folder, [book.rows[each.name] for each in points if each.name in book.rows], book.definitions
            )


def _telling(track: Track | None) -> Track:
    # A tracker that fails is given up with a warning: the rows are kept, and the same command tells it again.
    failed = track is None

    def tell(row: Mapping[str, Any]) -> None:
        nonlocal failed
        if failed or track is None or row["status"] not in FINAL:
            return
        try:
            track({key: value for key, value in row.items() if key != "definitions"})
        except Exception as error:
            failed = True
            why = " ".join(f"{type(error).__name__}: {error}".split())
            warnings.warn(
                f"--track: {why}; no more points are tracked, repeat the command", RunWarning, stacklevel=2
            )

    return tell


def _run(
    folder: Path, points: Sequence[Point], book: Ledger, executor: Executor, progress: ShowProgress, tell: Track
) -> None:
    # The generator of the executor is closed whatever happens, which ends the processes or jobs under way.
    for point in points:
        if point.config is None:
            _keep(book, measure(point))
        if point.name in book.rows:
            tell(book.rows[point.name])
    left = [each for each in points if book.rows.get(each.name, {}).get("status") not in FINAL]
    begun, before = time.monotonic(), len(points) - len(left)
    if not left:
        return
    progress(before / len(points), f"{before} of {len(points)} points, {len(left)} begin")
    best = max(map(_goodput, book.rows.values()), default=(0.0, ""))
    rows = executor.run(measure, [point.within(str(folder)) for point in left])
    try:
        for done, row in enumerate(rows, 1):
            _keep(book, row)
            tell(row)
            rate = done / max(time.monotonic() - begun, 1e-9)
            best = max(best, _goodput(row))
            text = f"{before + done} of {len(points)} points, {rate:.3g}/s"
            progress(
                (before + done) / len(points), text + (f"; best {best[0]:.3g} good/s/GPU ({best[1]})" * any(best))
            )
    finally:
        rows.close()


def _keep(book: Ledger, row: Mapping[str, Any]) -> None:
    # It is there if an earlier run of the sweep was refused the same.
    content = dict(row)
    definitions = content.pop("definitions", {})
    if book.rows.get(content["point"]) != content:
        book.append(content, definitions)


def _goodput(row: Mapping[str, Any]) -> tuple[float, str]:
    value = row.get("gpus") and row["metrics"].get("goodput")
    return (value / row["gpus"], str(row["point"])) if value else (0.0, "")


def measure(point: Point) -> dict[str, Any]:
    """Run *point*, keep its results in a folder of its name, and return its row; errors are in the row."""
    if point.config is None:
        return _refused(point, point.refusal)
    folder = Path(point.config.output) / point.name
    if folder.is_dir():
        try:
            return _kept(point, folder)
        except ConfigError:
            shutil.rmtree(folder)
    unfinished = folder.with_name(folder.name + store.INCOMPLETE)
    if unfinished.exists():  # of a process that was killed: the sweep's lock says that it is no more
        shutil.rmtree(unfinished)
    try:
        run(point.config, point.words, quiet=True, name=point.name, durable=False)
    except ConfigError as error:
        return _refused(point, str(error))
    except Exception as error:
        return point.row("failed", " ".join(f"{type(error).__name__}: {error}".split()))
    return _kept(point, folder)


def _refused(point: Point, why: str) -> dict[str, Any]:
    # The lines of *why*, a reason each, are put on one.
    return point.row("infeasible", "; ".join(" ".join(each.split()) for each in why.splitlines() if each.strip()))


def _kept(point: Point, folder: Path) -> dict[str, Any]:
    kept = store.load(folder)
    return point.row(
        kept["status"],
        kept["error"],
        folder=folder.name,
        evidence=kept["evidence"]["weakest"],
        metrics={name: metric["value"] for name, metric in kept["metrics"].items()},
        definitions={name: metric["definition"] for name, metric in kept["metrics"].items()},
    )
