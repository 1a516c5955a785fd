"""Where the time of a run went, phase by phase, and which phase makes two runs differ.

From the rows that the runs kept: phases of requests add up to their end-to-end time, stages of transfers to their
latency.  What a relief of a phase would bring is not said: that takes another run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdsim.errors import ConfigError
from pdsim.results import store
from pdsim.results.brief import share
from pdsim.results.record import Table
from pdsim.units import format_size, format_time

__all__ = ["causes", "tables"]

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


def causes(folder: Path) -> dict[str, dict[str, float]]:
    """Return mean seconds of each phase of requests and each stage of transfers of the run in *folder*.

    The keys are ``"request"`` and ``"transfer"``, those without rows left out; ``"size"`` has mean bytes and
    descriptors of a transfer.  Raise a `ConfigError` if *folder* is not a complete run, or has no rows at all.
    """
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    store.load(folder)
    found: dict[str, dict[str, float]] = {}
    requests = pq.read_table(folder / "requests.parquet")
    if "e2e" in requests.column_names and requests.num_rows:
        done = requests.filter(pc.is_valid(requests["e2e"]))
        if done.num_rows:
            found["request"] = {name: pc.mean(done[name]).as_py() or 0.0 for name in PHASES}
    transfers = pq.read_table(folder / "transfers.parquet")
    done = transfers.filter(pc.equal(transfers["status"], "ok")) if transfers.num_rows else transfers
    if done.num_rows:
        found["transfer"] = {name: (pc.mean(done[f"{name}_us"]).as_py() or 0.0) * 1e-6 for name in STAGES}
        found["size"] = {name: pc.mean(done[name]).as_py() for name in ("nbytes", "batch_size")}
    if not found:
        raise ConfigError(f"{folder} kept no requests and no transfers that ended, so nothing can be explained")
    return found


def tables(folders: Sequence[Path]) -> list[Table]:
    """Return a table of phases and one of stages: of one run with shares, of two with the part in their difference."""
    found = [causes(folder) for folder in folders]
    parts = (("request", "requests", PHASES), ("transfer", "transfers", STAGES))
    made = [
        _one(title, each[0], what) if len(each) == 1 else _two(title, each, what)
        for part, title, what in parts
        if len(each := [one[part] for one in found if part in one]) == len(found)
    ]
    sizes = [one["size"] for one in found if "size" in one]
    if len(sizes) == len(found):
        rows = [
            [str(f), format_size(s["nbytes"]), f"{s['batch_size']:.4g}"] for f, s in zip(folders, sizes, strict=True)
        ]
        made.append(Table("A transfer, in the mean", {"run": "", "bytes": "", "descriptors": ""}, rows))
    return made


def _one(title: str, means: Mapping[str, float], what: Mapping[str, str]) -> Table:
    total = sum(means.values())
    order = sorted(means, key=lambda name: -means[name])
    bound = f"bound by {order[0]}" if total else "no time passed"
    rows = [
        [name, format_time(means[name]), share(means[name] / total) if total else "-", what[name]] for name in order
    ]
    return Table(
        f"Mean of {title}, {format_time(total)}: {bound}", {"phase": "", "time": "", "share": "", "what": ""}, rows
    )


def _two(title: str, means: Sequence[Mapping[str, float]], what: Mapping[str, str]) -> Table:
    first, second = means
    change = {name: second[name] - first[name] for name in what}
    total = sum(second.values()) - sum(first.values())
    order = sorted(change, key=lambda name: -abs(change[name]))
    rows: list[list[Any]] = [
        [
            name,
            format_time(first[name]),
            format_time(second[name]),
            f"{second[name] / first[name]:.3g}" if first[name] else "-",
            share(change[name] / total) if total and change[name] * total > 0 else "-",
            what[name],
        ]
        for name in order
    ]
    slower = "slower" if total > 0 else "faster"
    verdict = f"B is {format_time(abs(total))} {slower}, most of it by {order[0]}" if total else "no difference"
    columns = dict.fromkeys(("phase", "A", "B", "B / A", "of the difference", "what"), "")
    return Table(f"Mean of {title}: {verdict}", columns, rows)
