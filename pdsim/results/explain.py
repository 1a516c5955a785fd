# SPDX-License-Identifier: Apache-2.0
"""Where the time of a run went, phase by phase, and which phase makes two runs differ.

From the rows that the runs kept: phases of requests add up to their end-to-end time, stages of transfers to their
latency.  What would help takes another simulation: `pdsim.sweep.what_if`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdsim.core.errors import ConfigError
from pdsim.core.units import format_rate, format_time
from pdsim.results import schema, store
from pdsim.results.record import Table
from pdsim.results.terminal import share

__all__ = ["accounts", "causes", "difference", "tables"]

PHASES = {
    "queueing": "waiting for pages, for an engine, for a place in a batch",
    "handshake": "from decode pages reserved to prefill knowing them",
    "compute": "forwards of prefill and decode",
    "transfer": "from the last prefill forward to all KV at decode",
    "polling": "until the decode scheduler looks",
}
STAGES = {
    "prep": "building descriptor lists, on the host",
    "post": "until the engine has taken all descriptors",
    "tx": "on the wire, and until the poller sees it",
}


def causes(folder: Path, request: int | None = None) -> dict[str, dict[str, float]]:
    """Return mean seconds of each phase of requests and each stage of transfers of the run in *folder*.

    Raise a `ConfigError` if *folder* is not a complete run, or has no rows at all, or has no such request that
    ended.
    """
    import pyarrow.compute as pc

    store.load(folder)
    means: dict[str, dict[str, float]] = {}
    requests = schema.read_table(folder / "requests.parquet")
    if "e2e" in requests.column_names and requests.num_rows:
        done = requests.filter(pc.is_valid(requests["e2e"]))
        if request is not None:
            done = done.filter(pc.equal(done["id"], request))
        if done.num_rows:
            means["request"] = {name: pc.mean(done[name]).as_py() or 0.0 for name in PHASES}
    if request is not None and "request" not in means:
        known = f"0 to {requests.num_rows - 1}" if requests.num_rows else "none"
        raise ConfigError(f"{folder} has no request {request} that ended; there are {known}")
    transfers = schema.read_table(folder / "transfers.parquet")
    done = transfers.filter(pc.equal(transfers["status"], "ok")) if transfers.num_rows else transfers
    if done.num_rows:
        means["transfer"] = {name: (pc.mean(done[f"{name}_us"]).as_py() or 0.0) * 1e-6 for name in STAGES}
        means["size"] = {name: pc.mean(done[name]).as_py() for name in ("nbytes", "batch_size")}
        means["size"]["poll"] = (pc.mean(done["poll_us"]).as_py() or 0.0) * 1e-6
    if not means:
        raise ConfigError(f"{folder} kept no requests and no transfers that ended, so nothing can be explained")
    return means


def tables(folders: Sequence[Path]) -> list[Table]:
    """Return a table of phases and one of stages of the runs in two *folders*, with the part in their difference.

    A table that one of them has no rows for is left out.
    """
    both = [causes(folder) for folder in folders]
    parts = (("request", "requests", PHASES), ("transfer", "transfers", STAGES))
    return [
        _two(title, [one[part] for one in both], what)
        for part, title, what in parts
        if all(part in one for one in both)
    ]


def accounts(folder: Path, request: int | None = None) -> dict[str, float]:
    """Return mean seconds by cause, of the requests of the run in *folder* or of one *request*.

    Raise a `ConfigError` as `causes` does, and for a *request* that there is none of or that did not end.
    """
    means = causes(folder, request)
    stages = means.get("transfer", {})
    busy = sum(stages.values())
    parts = {
        "posting": stages.get("prep", 0.0) + stages.get("post", 0.0),
        "link": stages.get("tx", 0.0) - means.get("size", {}).get("poll", 0.0),
        "host": means.get("size", {}).get("poll", 0.0),
    }
    if "request" not in means:
        return parts
    phases = means["request"]
    shares = {name: seconds / busy if busy else 0.0 for name, seconds in parts.items()}
    split = {name: phases["transfer"] * share for name, share in shares.items()}
    return {
        "compute": phases["compute"],
        "queue": phases["queueing"],
        "posting": split["posting"],
        "link": split["link"] if busy else phases["transfer"],
        "host": split["host"] + phases["handshake"],
        "polling": phases["polling"],
    }


def difference(folders: Sequence[Path]) -> list[str]:
    """Return what makes the runs in two *folders* differ, in a sentence about requests and one about transfers."""
    runs = [store.load(folder) for folder in folders]
    means = [causes(folder) for folder in folders]
    name = next((str(runs[1][key]) for key in ("backend", "hw") if runs[0][key] != runs[1][key]), "B")
    lines = []
    if all("request" in one for one in means):
        lines.append(_requests(name, [one["request"] for one in means]))
    if all("transfer" in one for one in means):
        lines.append(_transfers(name, means))
    return lines


def _requests(name: str, means: Sequence[Mapping[str, float]]) -> str:
    first, second = (sum(one.values()) for one in means)
    if abs(second - first) <= 1e-9 * first:
        return f"{name} serves a request in the same time, {format_time(second)} in the mean"
    change = {phase: means[1][phase] - means[0][phase] for phase in PHASES}
    most = max(change, key=lambda phase: change[phase] * (1 if second > first else -1))
    part = change[most] / (second - first)
    return (
        f"{name} serves a request {_times(second, first)} ({format_time(first)} -> {format_time(second)} in the "
        f"mean), {'all' if part > 0.995 else share(part)} of it by {most} "
        f"({format_time(means[0][most])} -> {format_time(means[1][most])}: {PHASES[most]})"
    )


def _transfers(name: str, means: Sequence[Mapping[str, Mapping[str, float]]]) -> str:
    # It is about descriptors and the cost of each, or about bytes and their rate, whichever differs more.
    first, second = (sum(one["transfer"].values()) for one in means)
    if abs(second - first) <= 1e-9 * first:
        return f"{name} takes the same time for a transfer, {format_time(second)} in the mean"
    posting = [one["transfer"]["prep"] + one["transfer"]["post"] for one in means]
    wire = [one["transfer"]["tx"] for one in means]
    sizes = [one["size"] for one in means]
    begin = f"{name} is {_times(second, first)} in a transfer ({format_time(first)} -> {format_time(second)})"
    if abs(posting[1] - posting[0]) >= abs(wire[1] - wire[0]):
        counts = [size["batch_size"] for size in sizes]
        each = [format_time(time / count) for time, count in zip(posting, counts, strict=True)]
        return f"{begin}: {_amount(counts, 'descriptors')} at {_instead(each)} each"
    nbytes = [size["nbytes"] for size in sizes]
    rates = [format_rate(size / time) if time else "-" for size, time in zip(nbytes, wire, strict=True)]
    return f"{begin}: {_amount(nbytes, 'bytes')} at {_instead(rates)}"


def _times(second: float, first: float) -> str:
    slower = second > first
    ratio = second / first if slower else first / second
    if not first or not second:
        return "slower" if slower else "faster"
    text = f"{_number(ratio)} times" if ratio >= 1.095 else share(ratio - 1)
    return f"{text} {'slower' if slower else 'faster'}"


def _amount(values: Sequence[float], what: str) -> str:
    # Half a per cent counts as equal.
    first, second = values
    ratio = second / first if first else 0.0
    if 0.995 <= ratio <= 1.005:
        return f"the same {what} ({_number(second)})"
    return f"{_number(ratio)} times the {what} ({_number(first)} -> {_number(second)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def _instead(texts: Sequence[str]) -> str:
    return texts[1] if texts[0] == texts[1] else f"{texts[1]} instead of {texts[0]}"


def _two(title: str, means: Sequence[Mapping[str, float]], what: Mapping[str, str]) -> Table:
    # The part is left out for a phase that changed in the other direction than the whole.
    first, second = means
    change = {name: second[name] - first[name] for name in what}
    total = sum(second.values()) - sum(first.values())
    order = sorted(change, key=lambda name: -abs(change[name]))
    rows: list[list[Any]] = [
        [
            name,
            format_time(first[name]),
            format_time(second[name]),
            _number(second[name] / first[name]) if first[name] else "-",
            share(change[name] / total) if total and change[name] * total > 0 else "-",
            what[name],
        ]
        for name in order
    ]
    slower = "slower" if total > 0 else "faster"
    verdict = f"B is {format_time(abs(total))} {slower}, most of it by {order[0]}" if total else "no difference"
    columns = dict.fromkeys(("phase", "A", "B", "B / A", "of the difference", "what"), "")
    return Table(f"Mean of {title}: {verdict}", columns, rows)
