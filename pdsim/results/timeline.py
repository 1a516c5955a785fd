# SPDX-License-Identifier: Apache-2.0
"""What happened when, as trace events for ui.perfetto.dev (the JSON format of Chrome's tracing): `trace`.

A run is drawn from the rows that it kept, so a modelled, a real and a live run have the same tracks: queues and work
of each instance, posting and wire of each rank and engine, an arrow from the prefill to the decode of each request,
and counters of what is in use.  Several runs stand side by side, each workload's start at the same instant.
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
from pdsim.core.files import whole_file
from pdsim.results.kept import KeptRun

if TYPE_CHECKING:
    import pyarrow as pa

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
_PHASES = [track for _, track, _, _ in (*_SPANS, *_LIVE_SPANS)]
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


class _Traced:
    """The timeline of one run: slices, arrows between them, and counters, with times in ns."""

    def __init__(self, run: KeptRun) -> None:
        self.title = "{experiment} on {hw}, {backend}, {target}".format(**run.about)
        self.spans: list[_Span] = []
        self.arrows: list[list[int]] = []  # indices of spans
        self.counters: dict[tuple[str, str], list[tuple[int, float]]] = {}  # (process, name): time, value
        self._changes: dict[tuple[str, str], list[tuple[float, float]]] = {}  # the same: seconds, change
        self._requests(run.requests)
        self._transfers(run.transfers, run.start, run.requests.num_rows)
        for key, steps in self._changes.items():
            self.counters[key] = _levels(steps)
        for row in () if run.samples is None else run.samples.to_pylist():
            values = self.counters.setdefault(("links and memory", f"{row['kind']} {row['name']}, %"), [])
            values.append((round((row["time"] - run.start) * _NS), 100.0 * row["value"]))

    def _span(self, process: str, track: str, begin: float, end: float, name: str, about: Mapping[str, Any]) -> None:
        # *about* is what the viewer shows of a slice that is selected
        first, last = round(begin * _NS), round(end * _NS)
        self.spans.append(_Span(process, track, first, max(first, last), name, about))

    def _count(self, process: str, name: str, begin: float, end: float, value: float = 1.0) -> None:
        self._changes.setdefault((process, name), []).extend(((begin, value), (end, -value)))

    def _requests(self, table: pa.Table) -> None:
        # A request has a slice on its instances for each phase whose two ends are known, an arrow through those
        # between its prefill and its decode, and counts in the number of requests of each phase and in the bytes of
        # KV that its decode instance holds.  Runs of our own schedulers know other instants than live ones.
        own = "reserved_at" in table.column_names
        for row in table.to_pylist():
            times = _times(row, own)
            about = {"input": row["input"], "output": row["output"], "status": row["status"]}
            arrow = []
            for side, track, begin, end in _SPANS if own else _LIVE_SPANS:
                first, last, instance = times.get(begin), times.get(end), row[side]
                if first is None or last is None or not instance or last < first:
                    continue
                self._span(instance, track, first, last, f"request {row['id']}", about)
                self._count(instance, f"requests: {track}", first, last)
                if track in _ARROW and last > first:
                    arrow.append(len(self.spans) - 1)
            if len(arrow) > 1:
                self.arrows.append(arrow)
            held, free = times.get("reserved_at"), times.get("finished_at")
            if row["nbytes"] and held is not None and free is not None:
                self._count(row["decode"], "KV of requests, bytes", held, free, row["nbytes"])

    def _transfers(self, table: pa.Table, start: float, requests: int) -> None:
        # Times of the records are on the job's clock, and *start* is when its workload began.  A label that begins
        # with a room's number names its request.  A transfer that did not end is left out; rates are means over its
        # whole latency, of those that succeeded.
        for row in table.to_pylist():
            times = [row[name] for name in ("submitted", "posted", "completed", "seen")]
            if any(time is None or time != time for time in times):
                continue
            submitted, posted, completed, seen = (time - start for time in times)
            read = row["operation"] == "read"
            poster, other = (row["target"], row["source"]) if read else (row["source"], row["target"])
            about = {"bytes": row["nbytes"], "descriptors": row["batch_size"]}
            about |= {"label": row["label"], "status": row["status"]}
            if requests and (room := _ROOM.match(row["label"])):
                about["request"] = (int(room[1]) - 1) % requests
            name = f"{row['operation']} {row['label']}".strip()
            track = f"{row['engine']} {'from' if read else 'to'} {other}"
            self._span(poster, f"{track}: posting", submitted, posted, name, about)
            self._span(poster, f"{track}: wire", min(posted, completed), max(posted, completed), name, about)
            if seen > completed:
                self._span(poster, f"{track}: polling", completed, seen, name, about)
            if row["status"] == "ok" and completed > submitted:
                rate = row["nbytes"] / (completed - submitted)
                self._count(row["source"], "out, bytes/s", submitted, completed, rate)
                self._count(row["target"], "in, bytes/s", submitted, completed, rate)


def _times(row: Mapping[str, Any], own: bool) -> dict[str, float | None]:
    def after(name: str) -> float | None:
        return None if row.get(name) is None else row["arrival"] + row[name]

    times = {name: value for name, value in row.items() if name.endswith("_at") or name in ("arrival", "sent")}
    times |= {"first_at": after("ttft"), "finished_at": after("e2e")}
    if not own:
        return times | {"prefilled_at": after("prefilled")}
    pulled = row["asked_at"] is not None
    return times | {
        "asked_at": row["asked_at"] if pulled else row["arrival"],
        "sent_at": row["reserved_at"] if pulled else row["prefilled_at"],
    }


def _levels(steps: Sequence[tuple[float, float]]) -> list[tuple[int, float]]:
    # Changes of one nanosecond are one. What rounding leaves of a counter that returns to 0 is 0.
    merged: dict[int, float] = {}
    for time, by in steps:
        merged[round(time * _NS)] = merged.get(round(time * _NS), 0.0) + by
    biggest = max(abs(by) for _, by in steps)
    total, levels = 0.0, []
    for instant in sorted(merged):
        total += merged[instant]
        levels.append((instant, 0.0 if abs(total) < 1e-9 * biggest else total))
    return levels


def trace(folders: Sequence[Path], path: Path) -> int:
    """Write the trace of the complete runs in *folders* to *path*, compressed if that ends in ``.gz``.

    Return the number of events. Raise a `ConfigError` for a folder that is no complete run, for a run that kept
    neither requests nor transfers, and for a file that cannot be written.
    """
    runs = []
    for folder in folders:
        runs.append(_Traced(KeptRun(folder)))
        if not runs[-1].spans:
            raise ConfigError(
                f"{folder} kept no requests and no transfers that ended, so it has no timeline; "
                f"see pdsim report {folder}"
            )
    count = 0
    with whole_file(path) as raw, _packed(raw) if path.suffix == ".gz" else nullcontext(raw) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for count, event in enumerate(_events(runs), 1):
            comma = b",\n" if count > 1 else b""
            file.write(comma + json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode())
        file.write(b"\n]}\n")
    return count


def _packed(file: IO[bytes]) -> IO[bytes]:
    return gzip.GzipFile("", "wb", fileobj=file, mtime=0)  # type: ignore[return-value]


def _events(runs: Sequence[_Traced]) -> Iterator[dict[str, Any]]:
    # names of processes and tracks, then the rest in order of time
    first = min((span.begin for drawn in runs for span in drawn.spans), default=0)
    first = min(first, *(time for drawn in runs for each in drawn.counters.values() for time, _ in each[:1]), 0)
    ordered: list[tuple[int, int, dict[str, Any]]] = []
    pid = tid = arrow = 0
    for number, drawn in enumerate(runs):
        prefix = f"{chr(ord('A') + number % 26)}: " if len(runs) > 1 else ""
        processes: dict[str, int] = {}
        for name in sorted(
            {each.process for each in drawn.spans} | {name for name, _ in drawn.counters}, key=_order
        ):
            processes[name] = pid = pid + 1
            yield _meta("process_name", pid, 0, name=f"{prefix}{name}")
            yield _meta("process_labels", pid, 0, labels=drawn.title)
            yield _meta("process_sort_index", pid, 0, sort_index=pid)
        tracks: dict[tuple[str, str], list[int]] = {}
        for index, span in enumerate(drawn.spans):
            tracks.setdefault((span.process, span.track), []).append(index)
        places: dict[int, dict[str, int]] = {}
        for name, track in sorted(tracks, key=lambda each: (processes[each[0]], _place(each[1]))):
            lanes = _lanes(drawn.spans, tracks[name, track])
            for lane in range(max(lanes.values()) + 1):
                tid += 1
                shown = f"{track} {lane + 1}" if any(lanes.values()) else track
                yield _meta("thread_name", processes[name], tid, name=shown)
                yield _meta("thread_sort_index", processes[name], tid, sort_index=tid)
                of_lane = {"pid": processes[name], "tid": tid}
                places |= dict.fromkeys((index for index, own in lanes.items() if own == lane), of_lane)
        for index, span in enumerate(drawn.spans):
            about: dict[str, Any] = {"name": span.name, "cat": span.track, "ph": "X"} | places[index]
            about |= {"ts": (span.begin - first) / 1e3, "dur": (span.end - span.begin) / 1e3}
            ordered.append((span.begin, 1, about | {"args": dict(span.arguments)}))
        for passed in drawn.arrows:
            arrow += 1
            for step, index in enumerate(passed):
                span = drawn.spans[index]
                at = span.end - 1 if step == 0 else span.begin  # within the slice that it belongs to
                kind = "s" if step == 0 else "f" if step == len(passed) - 1 else "t"
                about = {"name": "handoff", "cat": "handoff", "ph": kind, "id": arrow} | places[index]
                ordered.append((at, 2, about | {"ts": (at - first) / 1e3} | ({"bp": "e"} if kind == "f" else {})))
        for (name, counter), values in drawn.counters.items():
            for time, value in values:
                about = {"name": counter, "ph": "C", "pid": processes[name], "ts": (time - first) / 1e3}
                ordered.append((time, 0, about | {"args": {"value": round(value, 6)}}))
    ordered.sort(key=lambda each: each[:2])
    yield from (event for _, _, event in ordered)


def _meta(kind: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _order(name: str) -> tuple[int, int, str]:
    side = 0 if name.startswith("prefill") else 1 if name.startswith("decode") else 2
    return side, name.count("."), name


def _place(track: str) -> tuple[int, str]:
    # Phases in the order of a request's life, then others by name.
    return (_PHASES.index(track) if track in _PHASES else len(_PHASES), track)


def _lanes(spans: Sequence[_Span], indices: Sequence[int]) -> dict[int, int]:
    # slices that overlap are in lanes of their own, the lowest that is free
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # end, lane
    lanes: dict[int, int] = {}
    for index in sorted(indices, key=lambda index: (spans[index].begin, spans[index].end, index)):
        while busy and busy[0][0] <= spans[index].begin:
            heappush(free, heappop(busy)[1])
        lanes[index] = heappop(free) if free else len(busy)
        heappush(busy, (spans[index].end, lanes[index]))
    return lanes
