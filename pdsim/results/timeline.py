# SPDX-License-Identifier: Apache-2.0
"""What happened when, as trace events for ui.perfetto.dev (the JSON format of Chrome's tracing): `trace`.

A run is drawn from the rows that it kept, so a modelled, a real and a live run have the same
tracks: queues and work of each instance, posting and wire of each rank and engine, an arrow from
the prefill to the decode of each request, and counters of what is in use.  Several runs stand side
by side, each workload's start at the same instant.

Nothing is recorded for this while a run goes on: the instants of requests and the records of
transfers are enough.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from heapq import heappop, heappush
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from pdsim.core.errors import ConfigError
from pdsim.results.kept import KeptRun
from pdsim.results.whole_file import whole_file

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["events", "trace"]

_NS = 1e9
_ROOM = re.compile(r"(\d+)/")
"""How labels of transfers of a handoff begin: with the room, from 1, which grows by the requests for each new
try."""
_SPANS = (
    # of which instance, name of the track, begin, end; of a run of our own schedulers
    ("decode", "waiting for pages", "asked_at", "reserved_at"),
    ("prefill", "waiting for prefill", "noticed_at", "started_at"),
    ("prefill", "prefill", "started_at", "prefilled_at"),
    ("decode", "KV under way", "sent_at", "arrived_at"),
    ("decode", "waiting for the batch", "arrived_at", "joined_at"),
    ("decode", "decode", "joined_at", "finished_at"),
)
_LIVE_SPANS = (
    ("prefill", "waiting for a connection", "arrival", "sent"),
    ("prefill", "prefill", "sent", "prefilled_at"),
    ("decode", "handoff", "prefilled_at", "first_at"),
    ("decode", "decode", "first_at", "finished_at"),
)
_ARROW = ("prefill", "KV under way", "handoff", "decode")
"""Tracks that the arrow of a request passes, those that there are."""


class _Span(NamedTuple):
    """A slice of a track; times in ns."""

    process: str
    track: str
    begin: int
    end: int
    name: str
    arguments: Mapping[str, Any]


class _Drawn:
    """What one run has to show: slices, arrows between them, and changes of counters, all with times in ns."""

    def __init__(self) -> None:
        self.spans: list[_Span] = []
        self.arrows: list[list[int]] = []  # indices of spans
        self.counters: dict[tuple[str, str], list[tuple[int, float]]] = {}  # (process, name): time, value

    def span(self, process: str, track: str, begin: float, end: float, name: str, **arguments: Any) -> int:
        # *arguments* are what the viewer shows of a slice that is selected.
        times = round(begin * _NS), round(end * _NS)
        self.spans.append(_Span(process, track, times[0], max(times), name, arguments))
        return len(self.spans) - 1

    def changes(self, process: str, name: str, steps: Sequence[tuple[float, float]]) -> None:
        # *steps* are (seconds, change), in any order; changes of one nanosecond are one. What rounding leaves of a
        # counter that returns to 0 is 0.
        if not steps:
            return
        total, values = 0.0, self.counters.setdefault((process, name), [])
        merged: dict[int, float] = {}
        for time, by in steps:
            merged[round(time * _NS)] = merged.get(round(time * _NS), 0.0) + by
        biggest = max(abs(by) for _, by in steps)
        for time in sorted(merged):
            total += merged[time]
            values.append((time, 0.0 if abs(total) < 1e-9 * biggest else total))


def trace(folders: Sequence[Path], path: Path) -> int:
    """Write the trace of the complete runs in *folders* to *path*, compressed if that ends in ``.gz``.

    Return the number of events. Raise a `ConfigError` for a folder that is no complete run, for a run that kept
    neither requests nor transfers, and for a file that cannot be written.
    """
    drawn = []
    for folder in folders:
        run = KeptRun(folder)
        shown = _run(run)
        if not shown.spans:
            raise ConfigError(f"{folder} kept no requests and no transfers that ended, so it has no timeline")
        drawn.append((_title(run), shown))
    count = 0
    with whole_file(path) as raw, _packed(raw) if path.suffix == ".gz" else nullcontext(raw) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for count, event in enumerate(events(drawn), 1):
            comma = b",\n" if count > 1 else b""
            file.write(comma + json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode())
        file.write(b"\n]}\n")
    return count


def _packed(file: IO[bytes]) -> IO[bytes]:
    return gzip.GzipFile("", "wb", fileobj=file, mtime=0)  # type: ignore[return-value]


def _title(run: KeptRun) -> str:
    about = run.about
    return f"{about['experiment']} on {about['hw']}, {about['backend']}, {about['target']}"


def _run(run: KeptRun) -> _Drawn:
    drawn = _Drawn()
    if run.requests.num_rows:
        _requests(drawn, run.requests)
    _transfers(drawn, run.transfers, run.start, run.requests.num_rows)
    if run.samples is not None:
        for kind, name, time, value in _rows(run.samples, "kind", "name", "time", "value"):
            key = ("links and memory", f"{kind} {name}, %")
            drawn.counters.setdefault(key, []).append((round((time - run.start) * _NS), 100.0 * value))
    return drawn


def _rows(table: pa.Table, *names: str) -> Iterator[tuple[Any, ...]]:
    return zip(*(table[name].to_pylist() for name in names), strict=True)


def _requests(drawn: _Drawn, table: pa.Table) -> None:
    # A request has a slice on its instances for each phase whose two ends are known, an arrow through those between
    # its prefill and its decode, and counts in the number of requests of each phase and in the bytes of KV that its
    # decode instance holds from pages reserved to the last token. Runs of our own schedulers know other instants
    # than live ones.
    own = "reserved_at" in table.column_names
    levels: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in table.to_pylist():
        times = _times(row, own)
        arrow = []
        for side, track, begin, end in _SPANS if own else _LIVE_SPANS:
            first, last, instance = times.get(begin), times.get(end), row[side]
            if first is None or last is None or not instance or last < first:
                continue
            what = {"input": row["input"], "output": row["output"], "status": row["status"]}
            index = drawn.span(instance, track, first, last, f"request {row['id']}", **what)
            levels.setdefault((instance, track), []).extend(((first, 1.0), (last, -1.0)))
            if track in _ARROW and last > first:
                arrow.append(index)
        if len(arrow) > 1:
            drawn.arrows.append(arrow)
        held = times.get("reserved_at"), times.get("finished_at")
        if row["nbytes"] and held[0] is not None and held[1] is not None:
            key = (row["decode"], "KV of requests, bytes")
            levels.setdefault(key, []).extend(((held[0], row["nbytes"]), (held[1], -row["nbytes"])))
    for (instance, name), steps in levels.items():
        drawn.changes(instance, name if "bytes" in name else f"requests: {name}", steps)


def _times(row: Mapping[str, Any], own: bool) -> dict[str, float | None]:
    arrival = row["arrival"]

    def after(name: str) -> float | None:
        return None if row.get(name) is None else arrival + row[name]

    times = {name: value for name, value in row.items() if name.endswith("_at") or name in ("arrival", "sent")}
    times |= {"first_at": after("ttft"), "finished_at": after("e2e")}
    if not own:
        return times | {"prefilled_at": after("prefilled")}
    pulled = row["asked_at"] is not None
    return times | {
        "asked_at": row["asked_at"] if pulled else arrival,
        "sent_at": row["reserved_at"] if pulled else row["prefilled_at"],
    }


def _transfers(drawn: _Drawn, table: pa.Table, start: float, requests: int) -> None:
    # Times of the records are on the job's clock, and *start* is when its workload began. A label that begins with a
    # room's number names its request, for rooms count from 1 and go on with each new try. A transfer that did not
    # end is left out; rates are means over its whole latency, of those that succeeded.
    rates: dict[tuple[str, str], list[tuple[float, float]]] = {}
    names = ("engine", "operation", "source", "target", "label", "status", "nbytes", "batch_size")
    stages = ("submitted", "posted", "completed", "seen")
    for row in _rows(table, *names, *stages):
        engine, operation, source, target, label, status, nbytes, descriptors, *times = row
        if any(time is None or time != time for time in times):
            continue
        submitted, posted, completed, seen = (time - start for time in times)
        poster, other = (target, source) if operation == "read" else (source, target)
        room = _ROOM.match(label)
        about: dict[str, Any] = {"bytes": nbytes, "descriptors": descriptors, "label": label, "status": status}
        if room and requests:
            about["request"] = (int(room[1]) - 1) % requests
        name = f"{operation} {label}".strip()
        track = f"{engine} {'from' if operation == 'read' else 'to'} {other}"
        drawn.span(poster, f"{track}: posting", submitted, posted, name, **about)
        drawn.span(poster, f"{track}: wire", min(posted, completed), max(posted, completed), name, **about)
        if seen > completed:
            drawn.span(poster, f"{track}: polling", completed, seen, name, **about)
        if status == "ok" and completed > submitted:
            rate = nbytes / (completed - submitted)
            for rank, way in ((source, "out"), (target, "in")):
                rates.setdefault((rank, f"{way}, bytes/s"), []).extend(((submitted, rate), (completed, -rate)))
    for (rank, name), steps in rates.items():
        drawn.changes(rank, name, steps)


def events(runs: Sequence[tuple[str, _Drawn]]) -> Iterator[dict[str, Any]]:
    """Yield the trace events of *runs*, each with a title: names of tracks, then the rest in order of time."""
    first = min((span.begin for _, drawn in runs for span in drawn.spans), default=0)
    first = min(first, *(time for _, d in runs for each in d.counters.values() for time, _ in each[:1]), 0)
    ordered: list[tuple[int, int, dict[str, Any]]] = []
    process, thread, arrow = 0, 0, 0
    for number, (title, drawn) in enumerate(runs):
        prefix = f"{chr(ord('A') + number % 26)}: " if len(runs) > 1 else ""
        known: dict[str, int] = {}
        for name in sorted(
            {span.process for span in drawn.spans} | {name for name, _ in drawn.counters}, key=_order
        ):
            process += 1
            known[name] = process
            yield _meta("process_name", process, 0, name=f"{prefix}{name}")
            yield _meta("process_labels", process, 0, labels=title)
            yield _meta("process_sort_index", process, 0, sort_index=process)
        tracks: dict[tuple[str, str], list[int]] = {}
        for index, span in enumerate(drawn.spans):
            tracks.setdefault((span.process, span.track), []).append(index)
        places: dict[int, tuple[int, int]] = {}
        for name, track in sorted(tracks, key=lambda each: (known[each[0]], _track(each[1]))):
            lanes = _lanes(drawn.spans, tracks[name, track])
            several = max(lanes.values()) > 0
            for lane in range(max(lanes.values()) + 1):
                shown = f"{track} {lane + 1}" if several else track
                yield _meta("thread_name", known[name], thread + 1 + lane, name=shown)
                yield _meta("thread_sort_index", known[name], thread + 1 + lane, sort_index=thread + 1 + lane)
            for index, lane in lanes.items():
                places[index] = (known[name], thread + 1 + lane)
            thread += max(lanes.values()) + 1
        for index, span in enumerate(drawn.spans):
            pid, tid = places[index]
            about: dict[str, Any] = {"name": span.name, "cat": span.track, "ph": "X", "pid": pid, "tid": tid}
            about |= {"ts": (span.begin - first) / 1e3, "dur": (span.end - span.begin) / 1e3}
            ordered.append((span.begin, 1, about | {"args": dict(span.arguments)}))
        for passed in drawn.arrows:
            arrow += 1
            for step, index in enumerate(passed):
                span, (pid, tid) = drawn.spans[index], places[index]
                at = span.end - 1 if step == 0 else span.begin  # within the slice that it belongs to
                kind = "s" if step == 0 else "f" if step == len(passed) - 1 else "t"
                about = {"name": "handoff", "cat": "handoff", "ph": kind, "id": arrow, "pid": pid, "tid": tid}
                about |= {"ts": (at - first) / 1e3} | ({"bp": "e"} if kind == "f" else {})
                ordered.append((at, 2, about))
        for (name, counter), values in drawn.counters.items():
            for time, value in values:
                about = {"name": counter, "ph": "C", "pid": known[name], "ts": (time - first) / 1e3}
                ordered.append((time, 0, about | {"args": {"value": round(value, 6)}}))
    ordered.sort(key=lambda each: each[:2])
    yield from (event for _, _, event in ordered)


def _meta(kind: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _order(name: str) -> tuple[int, int, str]:
    side = 0 if name.startswith("prefill") else 1 if name.startswith("decode") else 2
    return side, name.count("."), name


def _track(name: str) -> tuple[int, str]:
    # Phases in the order of a request's life, then others by name.
    known = [track for _, track, _, _ in (*_SPANS, *_LIVE_SPANS)]
    return (known.index(name) if name in known else len(known), name)


def _lanes(spans: Sequence[_Span], indices: Sequence[int]) -> dict[int, int]:
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # end, lane
    lanes: dict[int, int] = {}
    for index in sorted(indices, key=lambda index: (spans[index].begin, spans[index].end, index)):
        while busy and busy[0][0] <= spans[index].begin:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else len(busy)
        lanes[index] = lane
        heappush(busy, (spans[index].end, lane))
    return lanes
