"""How much of a single-pair error is the form's, and how much is that jobs differ: ``python -m benchmarks.jobs``.

From the medians of every job of the calibrations and validations on 2 x H200 (``results/jobs-2xh200.csv``) it fits each
engine twice, to the geometric mean of the jobs and to the quickest of them, and prints how far both fits are from what
they have not seen, measured in the same way: the 16 points that `calibrate` holds out, and the written and read pairs
of `validate`.  What jobs leave of the first is the floor of `pdsim.calibration.jobs`.  Nothing is measured here.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from pdsim.calibration import fit, grid, jobs
from pdsim.calibration.fit import Fit
from pdsim.calibration.forms import points_of
from pdsim.calibration.points import Sample
from pdsim.run import compose

SAMPLES = Path(__file__).parent / "results" / "jobs-2xh200.csv"
ENGINES = ("nvlink", "mooncake_nvlink", "nixl")
WAYS: dict[str, Callable[[Sequence[float]], float]] = {"mean": jobs.mean, "quickest": min}


def samples(host: str, backend: str, run: str, of: Callable[[Sequence[float]], float]) -> list[Sample]:
    """Return a sample for each point of *run* of *backend* on *host*: *of* the medians of its jobs."""
    held = {(cell.blocks, cell.size) for cell in grid.grid("write", 256 << 20, 16, seed=0)[1]}
    found: dict[tuple[str, int, int], list[float]] = {}
    with SAMPLES.open(encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            if (row["host"], row["backend"], row["run"]) == (host, backend, run):
                point = row["operation"], int(row["blocks"]), int(row["size"])
                found.setdefault(point, []).append(float(row["seconds"]))
    return [
        Sample(
            operation=operation,
            blocks=blocks,
            size=size,
            seconds=of(every),
            low=min(every),
            high=max(every),
            per_job=tuple(every) if len(every) > 1 else (),
            held=run == "calibrate" and (blocks, size) in held,
        )
        for (operation, blocks, size), every in found.items()
    ]


def fitted(backend: str, of: Callable[[Sequence[float]], float]) -> tuple[Fit, dict[str, list[Sample]]]:
    """Return the fit of *backend* to host A's calibration, and the classes of points that it has not seen."""
    base = compose(["hw=2xh200", f"backend={backend}", "experiment=transfer", "calibration=none"]).backend.intra
    assert base is not None
    seen = samples("A", backend, "calibrate", of)
    found = fit.choose(points_of([row for row in seen if not row.held]), base)
    after = samples("A", backend, "validate", of)
    unseen = {f"{kind}, `validate`": [row for row in after if row.operation == kind] for kind in ("write", "read")}
    return found, {"held out, `calibrate`": [row for row in seen if row.held], **unseen}


def rows() -> Iterator[list[str]]:
    """Yield for each engine and class: the error of the mean, the floor of it, and the error of the quickest job."""
    for backend in ENGINES:
        both = {name: fitted(backend, of) for name, of in WAYS.items()}
        for name, mean in both["mean"][1].items():
            least = jobs.floor(row.per_job for row in mean)
            assert least is not None
            cells = [_cell(fit.errors(both["mean"][0], points_of(mean))), f"{least.median:.1%} ({least.p95:.1%})"]
            cells.append(_cell(fit.errors(both["quickest"][0], points_of(both["quickest"][1][name]))))
            yield [f"`{backend}`, {name}", str(len(mean)), f"{least.apart:.1%}", *cells]


def _cell(errors: fit.Floats) -> str:
    size = np.abs(errors)
    return f"{np.median(size):.1%} ({np.percentile(size, 95.0):.1%})"


def main() -> None:
    """Print the table of docs/validation.md."""
    heads = ["points", "of", "a job is off the others by", "mean of three jobs", "floor of that", "quickest of three"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows():
        print(f"| {' | '.join(row)} |".replace("%", " %"))
    for backend in ENGINES:
        for name, of in WAYS.items():
            found, _ = fitted(backend, of)
            print(f"{backend}, {name}: {found.form.name} { ({key: found.at[key] for key in found.form.free}) }")


if __name__ == "__main__":
    main()
