"""Write the generated parts of docs/validation.md from the committed validations: ``python -m benchmarks.validation``.

A validation is a folder of `data/validation` with the ``expectations.json`` and ``measurements.json`` of a
run of ``pdsim validate``.  Nothing is measured or predicted here: the two are compared as they were kept, point by
point, and as what the reports' changes gain.  Of a folder with expectations only, which were written ahead of a machine
to measure on, the predictions are shown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.validate import Options, bounds
from experiments.validate.files import EXPECTED, MEASURED, read
from pdsim.results.record import Table
from pdsim.validation.compare import Value, by_class, by_decade, compare, foretold, tables

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "data" / "validation"
PAGE = ROOT / "docs" / "validation.md"
CHANGES = (("sliced", "staged"), ("metadata control", "metadata data"), ("default", "symmetric"))
"""Words of labels: what is before a change of the reports, and what is after it."""

BEGIN, END = "<!-- generated: python -m benchmarks.validation -->", "<!-- end -->"
AHEAD, END_AHEAD = "<!-- generated, predictions: python -m benchmarks.validation -->", "<!-- end of predictions -->"


def section(folder: Path) -> Iterator[str]:
    """Yield the lines about the validation in *folder*."""
    expected, measured = read(folder / EXPECTED), read(folder / MEASURED)
    found = compare([Value(**row) for row in expected["expected"]], [Value(**row) for row in measured["measured"]])
    before = "before" if measured["expectations"] == expected["sha256"] else "after"
    yield f"### {expected['backend']} on {expected['hw']}"
    yield ""
    yield (
        f"Calibration {expected['calibration']}; predictions of {expected['written']}, SHA-256 "
        f"`{expected['sha256'][:16]}`, made {before} the measurements, which began {measured['began']} "
        f"with {', '.join(measured['engines'])}."
    )
    yield ""
    for table in tables(by_class(found, bounds(Options()), expected["seed"]), by_decade(found, expected["seed"])):
        yield from _markdown(table)


def gains(folders: Sequence[Path]) -> Iterator[str]:
    """Yield the lines about how many times longer what is before each of `CHANGES` takes, in *folders*."""
    columns = {"change": "", "backend": "", "hw": "", "at": "", "predicted": "", "measured": ""}
    rows = []
    for folder in folders:
        expected, measured = read(folder / EXPECTED), read(folder / MEASURED)
        ours, real = (
            {row["label"]: row["value"] for row in rows if row["quantity"] == "time"}
            for rows in (expected["expected"], measured["measured"])
        )
        for before, after in CHANGES:
            for label in real:
                other = label.replace(before, after)
                if other != label and other in real and {label, other} <= ours.keys():
                    at = label.replace(before, "").replace("  ", " ")
                    found = (f"{times[label] / times[other]:.3g}" for times in (ours, real))
                    rows.append([f"{before} → {after}", expected["backend"], expected["hw"], at, *found])
    rows.sort(key=lambda row: [before for before, _ in CHANGES].index(row[0].partition(" → ")[0]))
    yield "### What a change gains"
    yield ""
    yield from _markdown(Table("Gains", columns, rows))


def predictions(folders: Sequence[Path]) -> Iterator[str]:
    """Yield the lines about the predictions in *folders* that were made ahead, machine by machine."""
    made = [read(folder / EXPECTED) for folder in folders]
    for hw in sorted({expected["hw"] for expected in made}, reverse=True):
        engines = [expected for expected in made if expected["hw"] == hw]
        yield f"### {hw}"
        yield ""
        for expected in engines:
            yield (
                f"- `{expected['backend']}`: calibration {expected['calibration']}, "
                f"{expected['system']['model']['name']}, written {expected['written']} at commit "
                f"`{expected['commit'][:12]}`, SHA-256 `{expected['sha256'][:16]}`"
            )
        yield ""
        yield from _markdown(_medians(engines))


def _medians(engines: Sequence[Mapping[str, Any]]) -> Table:
    """Return the median of each class on all of *engines*, with what the calibration's uncertainty leaves of it."""
    rows: dict[tuple[str, str], dict[str, list[Any]]] = {}
    for expected in engines:
        for row in foretold([Value(**value) for value in expected["expected"]]).rows:
            rows.setdefault((row[0], row[1]), {})[expected["backend"]] = list(row)
    names = [expected["backend"] for expected in engines]
    columns = {"class": "", "median": "", "points": ""} | {f"`{name}`": "" for name in names}
    cells = []
    for (group, quantity), found in rows.items():
        unit = "µs" if quantity == "time" else "GB/s"
        told = [_median(found[name]) if name in found else "-" for name in names]
        cells.append([group, unit, max(row[2] for row in found.values()), *told])
    return Table("Predicted", columns, cells)


def _median(row: Sequence[Any]) -> str:
    value = f"{row[4]:,.0f}" if row[4] >= 1000.0 else f"{row[4]:.4g}"
    return value + (f" ± {row[6]:.1f} %" if row[6] else "")


def _markdown(table: Table) -> Iterator[str]:
    yield f"| {' | '.join(table.columns)} |"
    yield f"|{'---|' * len(table.columns)}"
    for row in table.rows:
        cells = ("-" if cell is None else f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row)
        yield f"| {' | '.join(cells)} |"
    yield ""


def main(folders: Sequence[str]) -> None:
    """Rewrite the page from *folders*, by default from all that are committed."""
    found = [Path(folder) for folder in folders] or sorted(path.parent for path in STORED.glob(f"*/{MEASURED}"))
    lines = [*gains(found), *(line for folder in found for line in section(folder))]
    _rewrite(BEGIN, END, lines)
    ahead = sorted(path.parent for path in STORED.glob(f"*/{EXPECTED}") if not (path.parent / MEASURED).is_file())
    _rewrite(AHEAD, END_AHEAD, list(predictions(ahead)) or ["None is committed."])


def _rewrite(begin: str, end: str, lines: Sequence[str]) -> None:
    """Put *lines* between the marks *begin* and *end* of the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n\n" + "\n".join(lines).strip() + f"\n\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
