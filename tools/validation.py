# SPDX-License-Identifier: Apache-2.0
"""Write the generated parts of docs/validation.md: ``python -m tools.validation``.

``python -m tools.validation predictions`` prints the medians of what is predicted for machines not yet
measured.

A validation is a folder of `data/validation` with the ``expectations.json`` and ``measurements.json`` of a
run of ``pdsim validate``.  Nothing is measured or predicted here: the two are compared as they were kept, point by
point, and as what the reports' changes gain.  Of a folder with expectations only, which were written ahead of a
machine to measure on, the predictions are shown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.validate import ValidateOptions, bounds
from experiments.validate.sealed import EXPECTED, MEASURED, read
from pdsim.results.record import Table
from pdsim.validation.verdicts import Class, Value, by_class, compare, foretold

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "data" / "validation"
PAGE = ROOT / "docs" / "validation.md"
CHANGES = (("sliced", "staged"), ("metadata control", "metadata data"), ("default", "symmetric"))
"""Words of labels: what is before a change of the reports, and what is after it."""

BEGIN, END = "<!-- generated: python -m tools.validation -->", "<!-- end -->"
AHEAD, END_AHEAD = "<!-- generated, predictions: python -m tools.validation -->", "<!-- end of predictions -->"


def reached(folders: Sequence[Path]) -> Iterator[str]:
    """Yield the lines of the errors of every class in *folders*, a column each, and whose predictions they are."""
    pairs = [(read(folder / EXPECTED), read(folder / MEASURED)) for folder in folders]
    rows: dict[str, dict[int, Class]] = {}
    for number, (expected, measured) in enumerate(pairs):
        both = compare(
            [Value(**row) for row in expected["expected"]], [Value(**row) for row in measured["measured"]]
        )
        for each in by_class(both, bounds(ValidateOptions()), expected["seed"]):
            rows.setdefault(each.name, {})[number] = each
    names = [f"`{expected['backend']}` on {expected['hw']}" for expected, _ in pairs]
    columns = {"class": "", "bound %": ""} | dict.fromkeys(names, "")
    cells = [
        [name, _bound(next(iter(of.values()))), *(_error(of.get(number)) for number in range(len(pairs)))]
        for name, of in rows.items()
    ]
    yield "### Errors by class"
    yield ""
    yield "Median of the absolute error in per cent, 95th percentile in brackets; bold is beyond its bound."
    yield ""
    yield from _markdown(Table("Errors", columns, cells))
    for expected, measured in pairs:
        before = "before" if measured["expectations"] == expected["sha256"] else "after"
        yield (
            f"- `{expected['backend']}`: calibration {expected['calibration']}, {', '.join(measured['engines'])}, "
            f"predicted {before} measuring"
        )
        yield f"  ({measured['began'][:16]}, SHA-256 `{expected['sha256'][:16]}`)"
    yield ""


def _error(each: Class | None) -> str:
    if each is None:
        return "-"
    text = f"{each.median * 100:.1f}" + ("" if each.p95 is None else f" ({each.p95 * 100:.1f})")
    return f"**{text}**" if each.beyond else text


def _bound(each: Class) -> str:
    limit = each.bound
    if limit is None:
        return "-"
    return f"{limit.median * 100:g}" + ("" if limit.p95 is None else f" ({limit.p95 * 100:g})")


def gains(folders: Sequence[Path]) -> Iterator[str]:
    """Yield the lines about how many times longer what is before each of `CHANGES` takes, in *folders*."""
    factors: dict[tuple[str, str, str], list[tuple[float, ...]]] = {}
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
                    key = (f"{before} → {after}", expected["backend"], expected["hw"])
                    factors.setdefault(key, []).append(tuple(of[label] / of[other] for of in (ours, real)))
    columns = {"change": "", "backend": "", "hw": "", "points": "", "predicted": "", "measured": ""}
    order = [f"{before} → {after}" for before, after in CHANGES]
    rows = [
        [*key, len(of_key), *(_range(values) for values in zip(*of_key, strict=True))]
        for key, of_key in sorted(factors.items(), key=lambda item: order.index(item[0][0]))
    ]
    yield "### What a change gains"
    yield ""
    yield "How many times less time, lowest to highest of all points."
    yield ""
    yield from _markdown(Table("Gains", columns, rows))


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def predictions(folders: Sequence[Path]) -> Iterator[str]:
    """Yield a line for each of the predictions in *folders* that were made ahead, with the hash of its file."""
    for folder in folders:
        expected = read(folder / EXPECTED)
        yield (
            f"- `{expected['backend']}` on {expected['hw']}: calibration {expected['calibration']}, "
            f"{expected['system']['model']['name']},"
        )
        yield (
            f"  written {expected['written'][:16]} at commit `{expected['commit'][:12]}`, SHA-256 "
            f"`{expected['sha256'][:16]}`"
        )


def medians(folders: Sequence[Path]) -> Iterator[str]:
    """Yield a table for each machine in *folders*: the predicted median of each class on each engine."""
    made = [read(folder / EXPECTED) for folder in folders]
    for hw in sorted({expected["hw"] for expected in made}, reverse=True):
        yield f"### {hw}"
        yield ""
        yield from _markdown(_medians([expected for expected in made if expected["hw"] == hw]))


def _medians(engines: Sequence[Mapping[str, Any]]) -> Table:
    rows: dict[tuple[str, str], dict[str, list[Any]]] = {}
    for expected in engines:
        for row in foretold([Value(**value) for value in expected["expected"]]).rows:
            rows.setdefault((row[0], row[1]), {})[expected["backend"]] = list(row)
    names = [expected["backend"] for expected in engines]
    columns = {"class": "", "median": "", "points": ""} | {f"`{name}`": "" for name in names}
    cells = []
    for (group, quantity), values in rows.items():
        unit = "µs" if quantity == "time" else "GB/s"
        told = [_median(values[name]) if name in values else "-" for name in names]
        cells.append([group, unit, max(row[2] for row in values.values()), *told])
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


def main(words: Sequence[str]) -> None:
    """Rewrite the page from the folders *words*, by default all that are committed; or print the predictions."""
    ahead = sorted(path.parent for path in STORED.glob(f"*/{EXPECTED}") if not (path.parent / MEASURED).is_file())
    if list(words) == ["predictions"]:
        print("\n".join(medians(ahead)))
        return
    folders = [Path(folder) for folder in words] or sorted(path.parent for path in STORED.glob(f"*/{MEASURED}"))
    _rewrite(BEGIN, END, [*reached(folders), *gains(folders)])
    _rewrite(AHEAD, END_AHEAD, list(predictions(ahead)) or ["None is committed."])


def _rewrite(begin: str, end: str, lines: Sequence[str]) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text(f"{before}{begin}\n\n" + "\n".join(lines).strip() + f"\n\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
