# SPDX-License-Identifier: Apache-2.0
"""Where the time of a run went, phase by phase, and which phase makes two runs differ.

From the rows that the runs kept: phases of requests add up to their end-to-end time, stages of transfers to their
latency.  What would help takes another simulation: `pdsim.sweep.what_if`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pdsim.core.errors import ConfigError
from pdsim.core.units import format_rate, format_time
from pdsim.results import store
from pdsim.results.kept import KeptRun
from pdsim.results.record import Table
from pdsim.results.terminal import share

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

    run = KeptRun(folder)
    means: dict[str, dict[str, float]] = {}
    done = run.requests.filter(pc.is_valid(run.requests["e2e"]))
    if request is not None:
        done = done.filter(pc.equal(done["id"], request))
    if done.num_rows:
        means["request"] = {name: pc.mean(done[name]).as_py() or 0.0 for name in PHASES}
    elif request is not None:
        known = f"0 to {run.requests.num_rows - 1}" if run.requests.num_rows else "none"
        raise ConfigError(f"{folder} has no request {request} that ended; there are {known}")
    done = run.transfers.filter(pc.equal(run.transfers["status"], "ok"))
    if done.num_rows:
        stages = {name: (pc.mean(done[f"{name}_us"]).as_py() or 0.0) * 1e-6 for name in (*STAGES, "poll")}
        means["size"] = {name: pc.mean(done[name]).as_py() for name in ("nbytes", "batch_size")}
        means["size"]["poll"] = stages.pop("poll")
        means["transfer"] = stages
    if not means:
        raise ConfigError(
            f"{folder} kept no requests and no transfers that ended, so nothing can be explained; "
            f"see pdsim report {folder}"
        )
    return means


def accounts(folder: Path, request: int | None = None) -> dict[str, float]:
    """Return mean seconds by cause, of all requests of the run in *folder* or of one; raise as `causes`."""
    means = causes(folder, request)
    stages, poll = means.get("transfer", {}), means.get("size", {}).get("poll", 0.0)
    parts = {
        "posting": stages.get("prep", 0.0) + stages.get("post", 0.0),
        "link": stages.get("tx", 0.0) - poll,
        "host": poll,
    }
    if "request" not in means:
        return parts
    phases, busy = means["request"], sum(stages.values())
    split = {name: phases["transfer"] * seconds / busy if busy else 0.0 for name, seconds in parts.items()}
    return {
        "compute": phases["compute"],
        "queue": phases["queueing"],
        "posting": split["posting"],
        "link": split["link"] if busy else phases["transfer"],
        "host": split["host"] + phases["handshake"],
        "polling": phases["polling"],
    }


def difference(folders: Sequence[Path]) -> tuple[list[str], list[Table]]:
    """Return what makes the runs in two *folders* differ: a sentence about requests and one about transfers.

    Beside them, a table of phases and one of stages, with the part in the difference.  What one of the runs has no
    rows for is left out.
    """
    runs = [store.load(folder) for folder in folders]
    name = next((str(runs[1][key]) for key in ("backend", "hw") if runs[0][key] != runs[1][key]), "B")
    first, second = (causes(folder) for folder in folders)
    parts = (("request", "requests", PHASES), ("transfer", "transfers", STAGES))
    tables = [
        _table(title, first[part], second[part], what)
        for part, title, what in parts
        if part in first and part in second
    ]
    return list(_sentences(name, first, second)), tables


def _table(title: str, first: Mapping[str, float], second: Mapping[str, float], what: Mapping[str, str]) -> Table:
    change = {name: second[name] - first[name] for name in what}
    shares = {} if _same(first, second) else _shares(change)
    rows = [
        [
            name,
            format_time(first[name]),
            format_time(second[name]),
            _number(second[name] / first[name]) if first[name] else "-",
            share(shares[name]) if name in shares else "-",
            what[name],
        ]
        for name in sorted(change, key=lambda name: -abs(change[name]))
    ]
    columns = dict.fromkeys(("phase", "A", "B", "B / A", "of the difference", "what"), "")
    return Table(f"Mean of {title}", columns, rows)


def _shares(change: Mapping[str, float]) -> dict[str, float]:
    # Of what changed in the direction of the whole: with what went the other way shares would exceed 1.
    total = sum(change.values())
    along = {name: seconds for name, seconds in change.items() if seconds * total > 0}
    return {name: seconds / sum(along.values()) for name, seconds in along.items()}


def _same(first: Mapping[str, float], second: Mapping[str, float]) -> bool:
    return abs(sum(second.values()) - sum(first.values())) < 5e-4 * sum(first.values())


_Means = Mapping[str, Mapping[str, float]]


def _sentences(name: str, a: _Means, b: _Means) -> Iterator[str]:
    for part, verb, what in (("request", "serves", "a request"), ("transfer", "takes", "a transfer")):
        if part not in a or part not in b:
            continue
        first, second = sum(a[part].values()), sum(b[part].values())
        if _same(a[part], b[part]):
            same = f"{what} in the same time" if part == "request" else f"the same time for {what}"
            yield f"{name} {verb} {same}, {format_time(second)} in the mean"
        elif part == "request":
            shares = _shares({phase: b[part][phase] - a[part][phase] for phase in PHASES})
            most = max(shares, key=lambda phase: shares[phase])
            due = shares[most]
            yield (
                f"{name} serves a request {_times(second, first)} ({format_time(first)} -> {format_time(second)} in "
                f"the mean), {'all' if due > 0.995 else share(due)} of it by {most} "
                f"({format_time(a[part][most])} -> {format_time(b[part][most])}: {PHASES[most]})"
            )
        else:
            between = f"{format_time(first)} -> {format_time(second)}"
            yield f"{name} is {_times(second, first)} in a transfer ({between}): {_cause(a, b)}"


def _cause(a: _Means, b: _Means) -> str:
    # descriptors and the cost of each, or bytes and their rate, whichever differs more
    posting = [one["transfer"]["prep"] + one["transfer"]["post"] for one in (a, b)]
    wire = [one["transfer"]["tx"] for one in (a, b)]
    descriptors = abs(posting[1] - posting[0]) >= abs(wire[1] - wire[0])
    key, what = ("batch_size", "descriptors") if descriptors else ("nbytes", "bytes")
    first, second = (one["size"][key] for one in (a, b))
    if descriptors:
        each = [format_time(time / count) for time, count in zip(posting, (first, second), strict=True)]
    else:
        each = [format_rate(size / time) if time else "-" for size, time in zip((first, second), wire, strict=True)]
    ratio = second / first if first else 0.0
    amount = f"{_number(ratio)} times the {what} ({_number(first)} -> {_number(second)})"
    if 0.995 <= ratio <= 1.005:
        amount = f"the same {what} ({_number(second)})"
    rate = each[1] if each[0] == each[1] else f"{each[1]} instead of {each[0]}"
    return f"{amount} at {rate}{' each' if descriptors else ''}"


def _times(second: float, first: float) -> str:
    slower = "slower" if second > first else "faster"
    if not first or not second:
        return slower
    ratio = max(first, second) / min(first, second)
    return f"{_number(ratio)} times {slower}" if ratio >= 1.095 else f"{share(ratio - 1)} {slower}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"
