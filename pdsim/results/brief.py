# SPDX-License-Identifier: Apache-2.0
"""What a run says at its end, in twelve lines: verdict, latencies, what bounds it, evidence, what to type next.

Failures, and what was typed in vain, come on top of the twelve.  Pure text, from the files of the
run; ``-v`` prints everything instead (`pdsim.results.terminal.show`).

The phase that takes the largest share of all requests' time is what bounds a run, as far as shares
can tell; ``pdsim explain``, which the last line names, finds out by simulating.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import join
from typing import Any

from pdsim.core.errors import ConfigError
from pdsim.core.units import format_time
from pdsim.results import reading
from pdsim.results.evidence import Evidence

__all__ = ["alike", "lines", "share"]

_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end", "transfer": "KV transfer"}
_BOUND = {
    "queueing": "requests wait for an instance: add instances, or lower the load",
    "compute": "forwards take most of the time: more GPUs an instance, or faster ones",
    "handshake": "prefill waits for the pages of decode: add memory to decode",
    "transfer": "KV arrives late: compare backends, or stage",
    "polling": "decode looks between two steps only: shorter steps",
}
_LONGEST = 48  # characters of a source
_MOST = 5  # rows of a table, or metrics, of an experiment that serves nothing


def lines(run: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yield the lines about *run*, which `pdsim.results.store.load` read from *folder*, below its headline.

    Of a run that served requests they are offered load, verdict, latencies and what bounds it; of any other its
    first table or metrics. Then come failures, the weakest evidence, the first warning, and what to type next.
    Without evidence there is no number.
    """
    proof, metrics = Evidence(run["evidence"]["sources"]), _values(run)
    if not proof.sources:
        yield "evidence: none, so no number is printed: give hw and backend their sources"
    elif "ttft_p50_s" in metrics:
        yield from _served(run, metrics, reading.configuration(folder / "config.yaml"))
    else:
        yield from _measured(run)
    yield from _failures(run["failures"])
    if proof.sources:
        yield _weakest(proof)
    if warnings := [note for note in run["notes"] if note.startswith("warning: ")]:
        yield warnings[0] + (f" (and {len(warnings) - 1} more: -v)" if len(warnings) > 1 else "")
    yield from (f"note: {note}" for note in run["notes"] if " changes nothing of " in note)  # what was typed in vain
    yield f"results: {folder}; next: {_next(run, folder)}"


def share(value: float) -> str:
    """Return *value*, a share of one, for people.

    >>> share(0.9412), share(0.0003), share(0.0), share(1e-9)
    ('94.1 %', '0.03 %', '0.0 %', '< 0.001 %')
    """
    percent = 100.0 * value
    if 0.0 < percent < 0.001:
        return "< 0.001 %"
    return f"{percent:.1f} %" if percent >= 10 or not percent else f"{percent:.2g} %"


def alike(used: Mapping[str, float]) -> list[tuple[str, int, float, float]]:
    """Return *used*, shares by name, those whose names differ in numbers only as one, most used first.

    A row has the name with ``*`` for the numbers, how many there are, and the least and the highest share.

    >>> alike({"gpu0/memory": 0.5, "gpu1/memory": 0.25, "host": 0.125})
    [('gpu*/memory', 2, 0.25, 0.5), ('host', 1, 0.125, 0.125)]
    """
    groups: dict[str, list[tuple[str, float]]] = {}
    for name, value in used.items():
        groups.setdefault(re.sub(r"\d+", "*", name), []).append((name, value))
    rows = [
        (pattern if len(found) > 1 else found[0][0], len(found), min(v for _, v in found), max(v for _, v in found))
        for pattern, found in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row[3], row[0]))


def _values(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each metric of *run* by name."""
    return {name: metric["value"] for name, metric in run["metrics"].items()}


def _served(run: Mapping[str, Any], metrics: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a run of requests says: offered load, verdict on the SLO, latencies, and what bounds it."""
    total, done, failed = (metrics.get(name, 0) for name in ("requests", "requests_ok", "requests_failed"))
    met = metrics.get("slo_attainment") or 0.0
    limits = [config.get(f"slo.{name}") for name in ("ttft", "tpot")]
    if not all(isinstance(limit, int | float) for limit in limits):
        raise ConfigError(f"config.yaml of the run has no limits in slo, got {limits}; it was changed since")
    slo = f"TTFT <= {format_time(config['slo.ttft'])} and TPOT <= {format_time(config['slo.tpot'])}"
    yield from (note for note in run["notes"] if note.startswith("offered load: "))
    offered = max(metrics.get(f"offered_load_{side}") or 0.0 for side in ("prefill", "decode"))
    load = "overloaded, latencies measure the queue" if offered > 1.0 else "it keeps up"
    rate, good = metrics.get("request_rate"), metrics.get("goodput")
    served = f"{done} served in {format_time(metrics['makespan_s'])}{f', {failed} failed' if failed else ''}"
    speed = f" ({rate:.3g}/s, {good:.3g}/s within the SLO)" if rate is not None and good is not None else ""
    verdict = f"SLO {'met' if met >= 0.99 else 'missed'}: {share(met)} of {total} requests have {slo}"
    yield f"{verdict}; {load}: {served}{speed}"
    yield f"{'':<12}{'p50':>10}{'p90':>10}{'p99':>10}"
    for name, title in _LATENCIES.items():
        found = [metrics.get(f"{name}_{q}_s") for q in ("p50", "p90", "p99")]
        cells = "".join(f"{'-' if value is None else format_time(value):>10}" for value in found)
        yield f"{title:<12}{cells}"
    yield from _bound(run, metrics)


def _bound(run: Mapping[str, Any], metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield the phase that takes most of the time with what helps, the others, and the fullest link and memory."""
    shares = {name: metrics.get(f"share_{name}") or 0.0 for name in _BOUND}
    most = max(shares, key=lambda name: shares[name])
    used = [
        f"{what} {share(most)}"
        for what, found in (("busiest link", run["links"]), ("fullest memory", run["pools"]))
        for _, _, _, most in alike(found)[:1]
    ]
    if shares[most]:
        others = [f"{name} {share(value)}" for name, value in shares.items() if name != most and value >= 5e-4]
        yield f"bound by {', '.join([f'{most} {share(shares[most])}', *others, *used])}; {_BOUND[most]}"
    elif used:
        yield f"use: {', '.join(used)}"


def _measured(run: Mapping[str, Any]) -> Iterator[str]:
    """Yield the first table of a run that serves nothing, or its metrics, the first of either."""
    if not run["tables"]:
        named = [(name, metric["value"]) for name, metric in run["metrics"].items()]
        yield from (f"{name}: {_cell(value)}" for name, value in named[:_MOST])
        left = len(named) - _MOST
    else:
        table = run["tables"][0]
        rows = [list(table["columns"]), *([_cell(value) for value in row] for row in table["rows"][:_MOST])]
        widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
        yield table["title"]
        for row in rows:
            yield "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
        left = len(table["rows"]) - _MOST
    if left > 0:
        yield f"... and {left} more: -v"


def _failures(failures: Sequence[str]) -> Iterator[str]:
    """Yield the first three failures, and how many more there are."""
    yield from (f"failed: {failure}" for failure in failures[:3])
    if len(failures) > 3:
        yield f"... and {len(failures) - 3} more: -v"


def _weakest(proof: Evidence) -> str:
    """Return the weakest kind of evidence, and what is the first to rest on it."""
    texts = proof.texts(proof.weakest)
    borrowed = [text for text in texts if text.startswith("measured on ")]  # it says most about transfers
    text = borrowed[0] if borrowed else next(iter(texts))
    left = len(proof.kinds[proof.weakest]) - len(texts[text])
    more = f"; {left} more: -v" if left else ""
    head = text.split(": ")[0] if borrowed else text
    short = head if len(head) <= _LONGEST else f"{head[:_LONGEST].rstrip()}..."
    names = texts[text]
    keys = f"{names[0]} and {len(names) - 1} more" if len(names) > 2 else ", ".join(names)
    return f"weakest evidence: {proof.weakest} ({keys}: {short}{more})"


def _next(run: Mapping[str, Any], folder: Path) -> str:
    """Return the commands that lead on: of a validation its figures; else what bounds it, and other seeds."""
    if run["experiment"].startswith("validate"):
        return f"pdsim report {join([str(folder)])}"
    words = [word for word in run.get("overrides", ()) if not word.startswith(("output=", "seed="))]
    return f"pdsim explain {join([str(folder)])}; pdsim sweep {join([*words, 'seed=0,1,2'])}"


def _cell(value: Any) -> str:
    """Return *value* with four digits, - where nothing was measured."""
    if value is None:
        return "-"
    if isinstance(value, float) and not isinstance(value, bool):
        return f"{value:.4g}"
    return str(value)
