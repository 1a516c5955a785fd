# SPDX-License-Identifier: Apache-2.0
"""What predictions and measurements amount to: parts of docs/validation.md and of its data, and both figures.

    python -m tools.validation                 # data/live/campaigns.csv, docs/accuracy.svg and docs/live.svg

`tools.reference` writes the parts.  A validation is a folder of `data/validation` with the ``expectations.json`` and
``measurements.json`` of a run of ``pdsim validate``; loads of real servers are in `data/live`.  Nothing is measured
or predicted here: the two are compared as they were kept.  Figures need matplotlib, the extra ``report``.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.validate import ValidateOptions, bounds
from pdsim.results import drawing
from pdsim.results.drawing import Figure, Marks, Panel, Scale
from pdsim.validation.agreement import agreement
from pdsim.validation.sealed import EXPECTED, MEASURED, predictions, read
from pdsim.validation.verdicts import Class, Compared, Value, by_class, compare
from tools import live_data
from tools.live_data import DATA, METRICS
from tools.tables import markdown

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "data" / "validation"
CAMPAIGNS = DATA / "campaigns.csv"
CHANGES = (("sliced", "staged"), ("metadata control", "metadata data"), ("default", "symmetric"))
"""Words of labels: what is before a change of the reports, and what is after it."""

FITTED = ("fixed-20", "fixed-60", "fixed-90", "mixed-60", "long-60", "trace-50")
"""Loads of the first campaign that parameters of the model were fitted to, as to its single requests."""

POOLS = {
    "**vLLM, blind, 4 hosts**": ("blind/vllm", "third/vllm", "fourth/vllm", "sixth/vllm"),
    "**SGLang, blind, 4 hosts**": ("blind/sglang", "third/sglang", "fourth/sglang", "fifth/sglang"),
}
"""Blind predictions that are one row of the page; `CAMPAIGNS` has all."""

HANDOFFS = ("vllm", "vllm-1to2", "sglang", "sglang-1to2")
"""Variants of the fourth campaign whose single requests are shown."""

LENGTHS = ("128", "512", "2048", "8192", "32768")
ENGINES = ("nvlink", "mooncake_nvlink", "nixl")
KINDS = {"transfers": ("pair", "bidirectional"), "handoffs": ("handoff", "metadata"), "serving": ("serve",)}

NAMES = [name[:-2].replace("_", " ").replace("ttft", "TTFT").replace("tpot", "TPOT") for name in METRICS]
COUNTED = (*NAMES, "within bound", "within repeats", "missed")


def _both(folder: Path) -> list[Compared]:
    expected, measured = read(predictions(folder))["expected"], read(folder / MEASURED)["measured"]
    return compare([Value(**row) for row in expected], [Value(**row) for row in measured])


def _stored() -> list[Path]:
    return sorted(path.parent for path in STORED.glob(f"*/{EXPECTED}*") if (path.parent / MEASURED).is_file())


def transfers() -> Iterator[str]:
    """Yield the lines about all transfers that were measured: errors of every class, then gains."""
    folders = _stored()
    yield from _reached(folders)
    yield ""
    yield from _gains(folders)


def _reached(folders: Sequence[Path]) -> Iterator[str]:
    made = [read(predictions(folder)) for folder in folders]
    rows: dict[str, dict[int, Class]] = {}
    for number, folder in enumerate(folders):
        for each in by_class(_both(folder), bounds(ValidateOptions()), made[number]["seed"]):
            rows.setdefault(each.name, {})[number] = each
    names = [f"`{expected['backend']}` on {expected['hw']}" for expected in made]
    cells = [
        [name, _bound(next(iter(of.values()))), *(_error(of.get(number)) for number in range(len(made)))]
        for name, of in rows.items()
    ]
    yield "Median of the absolute error in per cent, 95th percentile in brackets; bold is beyond its bound."
    yield ""
    yield from markdown(["class", "bound %", *names], cells)


def provenance() -> Iterator[str]:
    """Yield a line for each validation: its calibration and engine, and when it was predicted."""
    for folder in sorted(path.parent for path in STORED.glob(f"*/{EXPECTED}*")):
        expected = read(predictions(folder))
        about = f"- `{folder.name}`: calibration {expected['calibration']}, {expected['system']['model']['name']}, "
        measured = read(folder / MEASURED) if (folder / MEASURED).is_file() else None
        if measured is None:
            when = f"predicted {expected['written'][:16]}, not measured"
        else:
            before = "before" if measured["expectations"] == expected["sha256"] else "after"
            when = f"{', '.join(measured['engines'])}, predicted {before} measuring ({measured['began'][:16]})"
        yield f"{about}{when}; commit `{expected['commit'][:12]}`, SHA-256 `{expected['sha256'][:16]}`"


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


def _gains(folders: Sequence[Path]) -> Iterator[str]:
    # how many times longer what is before each of `CHANGES` takes
    factors: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    order = [f"{before} → {after}" for before, after in CHANGES]
    for folder in folders:
        expected = read(predictions(folder))
        times = {each.predicted.label: each for each in _both(folder) if each.predicted.quantity == "time"}
        for change, (before, after) in zip(order, CHANGES, strict=True):
            for label, one in times.items():
                other = times.get(label.replace(before, after), one)
                if other is not one:
                    both = one.predicted.value / other.predicted.value, one.measured / other.measured
                    factors.setdefault((change, expected["backend"], expected["hw"]), []).append(both)
    rows = [
        [*key, len(of_key), *(_range(values) for values in zip(*of_key, strict=True))]
        for key, of_key in sorted(factors.items(), key=lambda item: order.index(item[0][0]))
    ]
    yield "How many times less time, lowest to highest of all points."
    yield ""
    yield from markdown(("change", "backend", "hw", "points", "predicted", "measured"), rows)


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def serving() -> Iterator[str]:
    """Yield the lines about vLLM and SGLang: mean errors, repeats, points within, handoffs, and hosts left out."""
    every = live_data.blind()
    rows = [_row("asked", "", {name: 100 * bound for name, bound in METRICS.items()})]
    for engine, label in (("vllm", "vLLM"), ("sglang", "SGLang")):
        measured = live_data.loads(DATA / f"{engine}-2xh200")
        fitted = live_data.sealed(DATA / f"fitted-{engine}-2xh200.json")
        held = [load for load in measured if load not in fitted["fitted"]]
        rows.append(_pool(f"{label}, loads held out of the fit", engine, [live_data.errors(fitted, measured, held)]))
        for title, names in POOLS.items():
            if label in title.partition(",")[0]:
                rows.append(_pool(title, engine, [_errors(*every[name]) for name in names]))
        repeats = {name: 100 * value for name, value in live_data.floors(engine).items()}
        rows.append(_row(f"{label}, loads measured twice", len(live_data.REPEATS[engine]), repeats))
    yield from markdown(["mean absolute error, %", "loads", *COUNTED], rows)
    yield ""
    handoffs = []
    for name in HANDOFFS:
        made = live_data.sealed(DATA / "fourth" / f"expected-{name}.json")["singles"]
        seen = live_data.singles(DATA / "fourth" / name)
        both = [(made[n]["handoff"], seen[n]["handoff"]) if n in made and n in seen else None for n in LENGTHS]
        cells = [f"{each[0] * 1e3:.0f} / {each[1] * 1e3:.0f}" if each else None for each in both]
        handoffs.append([f"`{name}`", *cells])
    yield from markdown(["first token after prefill's end, ms, predicted / measured", *LENGTHS], handoffs)


def campaigns() -> str:
    """Return the text of `CAMPAIGNS`: a row for every blind prediction, with the columns of the page's table."""
    rows: list[list[Any]] = [["prediction", "loads", *COUNTED]]
    for name, (path, folder) in live_data.blind().items():
        rows.append(_pool(name, "sglang" if "sglang" in folder.name else "vllm", [_errors(path, folder)]))
    return "".join(f"{','.join('-' if cell is None else str(cell) for cell in row)}\n" for row in rows)


def _errors(path: Path, folder: Path) -> dict[str, list[tuple[str, float]]]:
    return live_data.errors(live_data.sealed(path), live_data.loads(folder))


def _pool(label: str, engine: str, every: Sequence[Mapping[str, Sequence[tuple[str, float]]]]) -> list[Any]:
    floor = live_data.floors(engine)
    counted = [sum(some) for some in zip(*(live_data.counts(each, floor) for each in every), strict=True)]
    count = sum(len({load for rows in each.values() for load, _ in rows}) for each in every)
    return _row(label, count, live_data.means(every), counted)


def _row(label: str, count: object, values: Mapping[str, float], counted: Sequence[Any] = (None,) * 3) -> list[Any]:
    return [label, count, *(f"{values[name]:.0f}" if name in values else None for name in METRICS), *counted]


def accuracy() -> Figure:
    """Return simulated against measured times of transfers, handoffs and serving, a panel for each engine."""
    panels = []
    for engine in ENGINES:
        times = [each for each in _both(STORED / f"{engine}-2xh200") if each.predicted.quantity == "time"]
        series = {
            kind: [(e.measured, e.predicted.value, "") for e in times if e.predicted.group.startswith(groups)]
            for kind, groups in KINDS.items()
        }
        panels.append(replace(agreement(series, engine, "s", (8e-6, 2.0)), height=330))
    return Figure("accuracy", "", "", panels, columns=3)


def live() -> Figure:
    """Return TTFT and TPOT, predicted and measured, over loads of fixed lengths, of both serving engines."""
    panels = []
    for metric, title in (("ttft_p50_s", "TTFT"), ("tpot_p50_s", "TPOT")):
        series = []
        for colour, (engine, label) in enumerate((("vllm", "vLLM"), ("sglang", "SGLang"))):
            measured = live_data.loads(DATA / f"{engine}-2xh200")
            made = live_data.sealed(DATA / f"fitted-{engine}-2xh200.json")["loads"]
            fixed = [load for load in measured if load.startswith("fixed")]
            for kind, of, what, some in (
                ("line", made, "predicted", fixed),
                ("points", measured, "measured", [load for load in fixed if load not in FITTED]),
                ("points", measured, "", [load for load in fixed if load in FITTED]),
            ):
                shares = [float(load.partition("-")[2]) for load in some]
                times = [of[load]["metrics"][metric] * 1e3 for load in some]
                name = f"{label}, {what}" if what else ""
                series.append(Marks(kind, shares, times, name, colour, hollow=not what))
        panels.append(
            Panel(Scale("load, % of the prefill GPU", ""), Scale(f"median {title}", "ms", low=0), series, title, 320)
        )
    return Figure("live", "", "", panels, columns=2)


def main() -> None:
    """Write the campaigns and the figures."""
    CAMPAIGNS.write_text(campaigns(), encoding="utf-8")
    for figure in (accuracy(), live()):
        (ROOT / "docs" / f"{figure.name}.svg").write_bytes(drawing.image(figure, "svg", titled=False))


if __name__ == "__main__":
    main()
