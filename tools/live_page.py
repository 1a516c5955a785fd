# SPDX-License-Identifier: Apache-2.0
"""The tables and the figure of serving engines in docs/validation.md.

    python -m tools.live_page              # writes them
    python -m tools.live_page points       # prints the blind campaign point by point, with bounds and floors

They are made of what is in data/live: campaigns, predictions that were sealed before one, and those of the model
after a fit.  A point is a load and a metric; its floor is how far that metric was apart when the same
loads were measured again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from pdsim.results.record import Table
from pdsim.results.terminal import show_table
from pdsim.validation.verdicts import unseal
from tools.live_data import DATA, FITTED, LENGTHS, LOADS, METRICS, compare, loads, means, singles_of
from tools.live_data import THIRD as THIRD_LOADS

FIRST = "vllm-2xh200"
PAGE = DATA.parent.parent / "docs" / "validation.md"
FIGURE = PAGE.parent / "live.svg"

BLIND = DATA / "blind"
"""Sealed predictions, ``expected-VARIANT.json``, and what was measured then, ``VARIANT/``.

``second-VARIANT.json`` are of the model after a change, sealed while the servers were measured, before their author
had seen a figure of it.  Predictions of later campaigns are named by their folder, as in ``third/VARIANT``.
"""

ROWS = {
    "vllm": "**vLLM, blind**",
    "vllm-as-sglang": "vLLM, blind, by `engine=sglang`",
    "vllm26-pull": "vLLM 0.26.0, blind",
    "vllm-llama": "vLLM, Llama-3.1-8B, blind",
    "sglang": "**SGLang, blind**",
    "sglang-as-vllm": "SGLang, blind, by `engine=vllm`",
    "sglang-llama": "SGLang, Llama-3.1-8B, blind",
    "third/vllm": "**vLLM, blind again, third host**",
    "third/vllm-page64": "vLLM with blocks of 64, blind, third host",
    "third/vllm-nothread": "vLLM without NIXL's progress thread, third host",
    "third/vllm-threads0": "vLLM, `num_threads=0`, blind, third host",
    "third/vllm26-pull": "vLLM 0.26.0, pull, blind, third host",
    "third/vllm26-push": "vLLM 0.26.0, push, blind, third host",
    "third/sglang": "**SGLang, blind again, third host**",
    "fourth/vllm": "**vLLM, blind, fourth host**",
    "fourth/vllm-as-sglang": "vLLM, blind, fourth host, by `engine=sglang`",
    "fourth/sglang": "**SGLang, blind, fourth host, garbage frozen**",
    "fourth/sglang-as-vllm": "SGLang, blind, fourth host, by `engine=vllm`",
    "fifth/sglang": "**SGLang, blind, fifth host, garbage frozen**",
    "fifth/sglang-as-vllm": "SGLang, blind, fifth host, by `engine=vllm`",
    "fifth/vllm-chunk2k": "vLLM, chunks of 2,048, blind, fifth host",
    "sixth/vllm": "vLLM, blind, sixth host",
    "sixth/vllm-chunk2k": "vLLM, chunks of 2,048, blind, sixth host",
    "sixth/vllm-nothread": "vLLM without NIXL's progress thread, blind, sixth host",
    "sixth/vllm-threads0": "vLLM, `num_threads=0`, blind, sixth host",
    "fifth/vllm-page64": "vLLM with blocks of 64, blind, fifth host",
    "fifth/vllm-nothread": "vLLM without NIXL's progress thread, blind, fifth host",
    "fifth/vllm26-pull": "vLLM 0.26.0, pull, `engine=vllm26`, blind, fifth host",
    "fifth/vllm26-push": "vLLM 0.26.0, push, `engine=vllm26`, blind, fifth host",
}
"""Predictions of the blind campaigns, and what they are called in the table."""

SEALED = {"fifth": "fourth", "sixth": "fourth"}
"""Campaigns that were predicted for one before, which had no time for them."""

REPEATS = {
    "vllm": (
        ("third/vllm", "fixed700-35", "third/vllm", "fixed700-35@2"),
        ("fourth/vllm", "fixed500-40", "fourth/vllm", "fixed500-40@2"),
        ("third/vllm", "mixed3k-70", "fourth/vllm", "mixed3k-70"),
    ),
    "sglang": (
        ("third/sglang", "fixed700-35", "third/sglang", "fixed700-35@2"),
        *(("sglang", load, "third/sglang", load) for load in ("answers-45", "fixed3k-75", "fixed1k-30")),
    ),
}
"""Loads that were measured twice: minutes apart on the same servers, or on two hosts."""

HANDOFFS = {
    "vllm": "vLLM",
    "vllm-1to2": "vLLM, TP1 → TP2",
    "vllm-2to1": "vLLM, TP2 → TP1",
    "sglang": "SGLang",
    "sglang-1to2": "SGLang, TP1 → TP2",
    "sglang-2to1": "SGLang, TP2 → TP1",
}
"""Variants of the fourth campaign whose single requests are shown, and what they are called."""

HOSTS = (
    ("", "", ""),
    ("third/", "third/", ", third host"),
    ("fifth/", "fifth/", ", fifth host"),
    ("sixth/", "sixth/", ", sixth host"),
    ("fourth/", "fifth/", ", from the fourth host to the fifth"),
)
"""Campaigns before and after a change, and what is said of them."""

CHANGES = {
    "chunk 8192 -> 2048": ("vllm", "vllm-chunk2k"),
    "progress thread on -> off at decode": ("vllm", "vllm-nothread"),
    "pull -> push": ("vllm26-pull", "vllm26-push"),
    "blocks of 16 -> 64": ("vllm-again", "vllm-page64"),  # the same single requests before
    "posting threads 4 -> 0 at decode": ("vllm-again", "vllm-threads0"),
    "blocks of 16 -> 64, other servers": ("vllm", "vllm-page64"),
    "posting threads 4 -> 0, other servers": ("vllm", "vllm-threads0"),
}
"""Variants before and after a change, whose common loads are compared."""

NEAR = 0.15
"""The relative error that is asked for of single requests, from prefill's end to the first token."""

SHOWN = {"ttft_p50_s": "TTFT p50", "tpot_p50_s": "TPOT p50", "e2e_p50_s": "e2e p50"}
"""Metrics of what a change gains."""


def _read(name: str) -> dict[str, Any]:
    campaign, _, own = name.rpartition("/")
    folder = SEALED.get(campaign, campaign or BLIND.name)
    return unseal((DATA / folder / f"expected-{own}.json").read_bytes(), name)


def _folder(name: str) -> Path:
    campaign, _, own = name.rpartition("/")
    return DATA / (campaign or BLIND.name) / own.partition("-as-")[0]


def _measured(name: str) -> dict[str, Any]:
    return loads(_folder(name))


def floors(engine: str = "vllm") -> dict[str, float]:
    """Return by metric how far the same loads of *engine* were apart when they were measured twice: relative, means.

    Of vLLM they are four loads on two hosts, and those of `REPEATS` like SGLang's.
    """
    pairs = [
        (_measured(one)[load]["metrics"], _measured(other)[again]["metrics"])
        for one, load, other, again in REPEATS[engine]
    ]
    if engine == "vllm":
        first, second = (loads(DATA / name) for name in (FIRST, f"{FIRST}-again"))
        pairs += [(first[load]["metrics"], second[load]["metrics"]) for load in second]
    return {
        name: mean(abs(two[name] / one[name] - 1.0) for one, two in pairs if one.get(name) and two.get(name))
        for name in METRICS
    }


def _blind_rows() -> Iterator[str]:
    for name, label in ROWS.items():
        if measured := _measured(name):
            count = sum(load in measured for load in _read(name)["loads"])
            yield _row(f"{label}, {count} loads", means(_read(name), _folder(name)))


def _counted() -> Iterator[str]:
    for table in points():
        verdicts = [row[-1] for row in table.rows]
        if "bound" in verdicts:
            counts = (verdicts.count(one) for one in ("bound", "floor", "MISSED"))
            yield f"{table.title.replace('*', '').replace(', blind', '')} " + ", ".join(map(str, counts))


def _change_rows() -> Iterator[str]:
    rows = list(changes())
    if not rows:
        return
    heads = ["change", "load", *(f"{name}, {side}" for side in ("predicted", "measured") for name in SHOWN.values())]
    yield ""
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for change, load, *sides in rows:
        cells = [f"{side[name]:.2f}" if name in side else "-" for side in sides for name in SHOWN]
        yield f"| {change} | {load} | " + " | ".join(cells) + " |"


def _handoff_rows() -> Iterator[str]:
    lengths = [str(length) for length in LENGTHS]
    shown = {n: label for n, label in HANDOFFS.items() if (_folder(f"fourth/{n}") / "singles.parquet").exists()}
    if not shown:
        return
    heads = ["first token after prefill's end, ms, predicted / measured", *lengths, "within 15 %"]
    yield ""
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for name, label in shown.items():
        made, measured = _read(f"fourth/{name}")["singles"], singles_of(_folder(f"fourth/{name}"))
        both = {n: (made[n]["handoff"], measured[n]["handoff"]) for n in lengths if n in made and n in measured}
        cells = [f"{both[n][0] * 1e3:.0f} / {both[n][1] * 1e3:.0f}" if n in both else "-" for n in lengths]
        near = sum(abs(one / other - 1.0) <= NEAR for one, other in both.values())
        yield f"| {label} | " + " | ".join([*cells, f"{near} of {len(both)}"]) + " |"


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return by load and metric how many times as large a latency is *after*."""
    return {
        load: {
            name: value / before["loads"][load]["metrics"][name]
            for name, value in made["metrics"].items()
            if value and before["loads"][load]["metrics"].get(name)
        }
        for load, made in after["loads"].items()
        if load in before["loads"]
    }


def changes() -> Iterator[tuple[str, str, Mapping[str, float], Mapping[str, float]]]:
    """Yield change, load, and by metric how many times as large it becomes: predicted and measured."""
    for first, second, host in HOSTS:
        for change, pair in CHANGES.items():
            names = [first + pair[0], second + pair[1]]
            before, after = ({"loads": _measured(name)} for name in names)
            if before["loads"] and after["loads"]:
                sealed = changed(*map(_read, names))
                for load, values in changed(before, after).items():
                    yield f"{change}{host}", load, sealed.get(load, {}), values


def points() -> Iterator[Table]:
    """Yield tables: points of the blind campaign with bound and floor, single requests, and what changes gain."""
    for name, label in ROWS.items():
        measured = _measured(name)
        floor = floors("sglang" if "sglang" in _folder(name).name else "vllm")
        if not measured:
            continue
        rows = []
        for load, made in _read(name)["loads"].items():
            for metric, bound in METRICS.items():
                one = made["metrics"].get(metric)
                other = measured.get(load, {}).get("metrics", {}).get(metric)
                if one and other:
                    error = one / other - 1.0
                    verdict = (
                        "bound" if abs(error) <= bound else "floor" if abs(error) <= 2 * floor[metric] else "MISSED"
                    )
                    rows.append(
                        [
                            load,
                            metric,
                            one * 1e3,
                            other * 1e3,
                            100 * error,
                            100 * bound,
                            200 * floor[metric],
                            verdict,
                        ]
                    )
        heads = ("load", "metric", "predicted ms", "measured ms", "error %", "bound %", "floor %", "within")
        yield Table(label, {head: _MEANING.get(head, head) for head in heads}, rows)
        *_, singles = compare(_read(name), _folder(name))
        yield singles
    floor = floors()
    gains = [
        [change, load, metric, made.get(metric), value, _judged(made.get(metric), value, floor[metric])]
        for change, load, made, values in changes()
        for metric, value in values.items()
        if metric in METRICS
    ]
    shown = ("change", "load", "metric", "predicted", "measured", "within")
    yield Table("Changes", {head: _MEANING.get(head, head) for head in shown}, gains)


_MEANING = {
    "error %": "predicted over measured, less 1",
    "bound %": "the relative error that is asked for",
    "floor %": "twice what the same loads differ by in this metric",
    "within": "the bound, else twice the floor; of changes: sign, and a quarter of the size or the floor",
    "predicted": "how many times as large after the change",
    "measured": "how many times as large after the change",
}


def _judged(made: float | None, measured: float, floor: float) -> str:
    # A change that is smaller than the *floor* is none.
    if made is None:
        return "-"
    sign = (made - 1.0) * (measured - 1.0) >= 0.0
    size = (
        "right"
        if abs(made - measured) <= 0.25 * abs(measured - 1.0)
        else "floor"
        if abs(made - measured) <= floor
        else "wrong"
    )
    return f"sign {'right' if sign else 'wrong'}, size {size}"


def page() -> Iterator[str]:
    """Yield the lines of docs/validation.md between this command's comments."""
    heads = [
        "",
        *(
            name.removesuffix("_s").replace("_", " ").replace("ttft", "TTFT").replace("tpot", "TPOT")
            for name in METRICS
        ),
    ]
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    yield _row("asked", {name: 100 * bound for name, bound in METRICS.items()})
    for engine, label, other in (("vllm", "vLLM", "sglang"), ("sglang", "SGLang", "vllm")):
        folder = DATA / f"{engine}-2xh200"
        first, today, swapped = (
            unseal((DATA / f"{name}-2xh200.json").read_bytes(), name)
            for name in (f"expected-{engine}", f"fitted-{engine}", f"fitted-{engine}-as-{other}")
        )
        held = [load for load in LOADS if load not in today["fitted"]]
        yield _row(f"{label}, predicted before measuring, all loads", means(first, folder))
        yield _row(f"{label}, fitted loads", means(today, folder, FITTED))
        seen = "held-out loads" if engine == "vllm" else "the other loads, seen before its last change"
        yield _row(f"**{label}, {seen}**", means(today, folder, held))
        yield _row(f"{label}, those loads by `engine={other}`", means(swapped, folder, held))
    first, again = (loads(DATA / name) for name in (FIRST, f"{FIRST}-again"))
    repeat = {"loads": {load: {"metrics": again[load]["metrics"]} for load in again}}
    yield _row("four of vLLM's loads again on another host, against the first", means(repeat, DATA / FIRST))
    for what, label in (
        ("again", "vLLM on that host, no load fitted"),
        ("page64", "vLLM with blocks of 64, no load fitted"),
    ):
        made = unseal((DATA / f"fitted-{FIRST}-{what}.json").read_bytes(), what)
        yield _row(f"**{label}**", means(made, DATA / f"{FIRST}-{what}"))
    yield from _blind_rows()
    for engine, label in (("vllm", "vLLM"), ("sglang", "SGLang")):
        today = unseal((DATA / f"fitted-{engine}-blind.json").read_bytes(), engine)
        yield _row(
            f"{label}, the first blind loads by the model of today, which knew them", means(today, BLIND / engine)
        )
        new = [load for load in THIRD_LOADS if load in _measured(f"third/{engine}")]
        label = f"**{label}, blind again, its {len(new)} loads of new kinds**"
        yield _row(label, means(_read(f"third/{engine}"), _folder(f"third/{engine}"), new))
        yield _row(
            f"{'vLLM' if engine == 'vllm' else 'SGLang'}, the same loads measured again, against the first time",
            {name: 100 * value for name, value in floors(engine).items()},
        )
    yield ""
    yield "Points within the bound, else within twice what the same loads differ by when measured again, or missed:"
    yield ""
    yield from (f"- {line}" for line in _counted())
    yield from _handoff_rows()
    yield from _change_rows()
    yield ""
    yield "![Predicted and measured latencies over load](live.svg)"


def _row(label: str, values: Mapping[str, float]) -> str:
    cells = (f"{values[name]:.0f}" if name in values else "-" for name in METRICS)
    return f"| {label} | " + " | ".join(cells) + " |"


def figure() -> str:
    """Return docs/live.svg: TTFT and TPOT, predicted and measured, over loads of fixed lengths, of both engines."""
    import io

    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "pdsim"
    picture = Figure(figsize=(9.0, 3.2), layout="constrained")
    axes = picture.subplots(1, 2)
    fixed = [name for name in LOADS if name.startswith("fixed")]
    shares = [int(name.partition("-")[2]) for name in fixed]
    for color, engine, label in (("tab:blue", "vllm", "vLLM"), ("tab:orange", "sglang", "SGLang")):
        measured = loads(DATA / f"{engine}-2xh200")
        made = unseal((DATA / f"fitted-{engine}-2xh200.json").read_bytes(), engine)["loads"]
        for axis, metric in zip(axes, ("ttft_p50_s", "tpot_p50_s"), strict=True):
            line = [made[load]["metrics"][metric] * 1e3 for load in fixed]
            points = [measured[load]["metrics"][metric] * 1e3 for load in fixed]
            axis.plot(shares, line, color=color, label=f"{label}, predicted")
            for share, load, point in zip(shares, fixed, points, strict=True):
                axis.plot(share, point, "o", color=color, fillstyle="none" if load in FITTED else "full")
            axis.plot([], [], "o", color=color, label=f"{label}, measured")
    for axis, name in zip(axes, ("TTFT", "TPOT"), strict=True):
        axis.set(
            xlabel="load, % of the prefill GPU (open points: fitted)", ylabel=f"median {name}, ms", ylim=(0, None)
        )
    axes[0].legend(frameon=False)
    out = io.StringIO()
    picture.savefig(out, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def rewritten() -> str:
    """Return docs/validation.md with `page` in it.  Raise a `ValueError` if it lacks the comments around it."""
    begin, end = "<!-- generated: python -m tools.live_page -->", "<!-- end of the live validation -->"
    before, marker, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not marker or not closed:
        raise ValueError(f"{PAGE.name} lacks the comments {begin} and {end}; put them where the table is to be")
    return before + begin + "\n\n" + "\n".join(page()) + "\n\n" + end + after


def main(words: Sequence[str] | None = None) -> int:
    """Write the page, or print the points; return the exit status."""
    if (sys.argv[1:] if words is None else list(words)) == ["points"]:
        for table in points():
            show_table(table)
        return 0
    FIGURE.write_text(figure(), encoding="utf-8")
    PAGE.write_text(rewritten(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
