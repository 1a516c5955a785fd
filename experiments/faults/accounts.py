# SPDX-License-Identifier: Apache-2.0
"""Whether what the router reports of requests is what its users sent, and what the instances said.

The requests of the scenario are compared with what the router sent out, its rows with the last `Finished`, and the
times at which requests arrive with those at which earlier ones end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.faults.causes import History, Record, Scenario
from pdsim.kv.messages import Finished, RequestHints, Submit
from pdsim.serving.requests import PHASES, STAMPS, request_columns

_ROUNDING = 1e-9
"""Seconds by which two sums of the same times may differ."""


def misrouted(scenario: Scenario, record: Record, submitted: Mapping[int, Submit]) -> Iterator[str]:
    """Yield each request that is *submitted* as another, or at another time, than its user sent."""
    job = scenario.job
    for past in record.histories:
        request = scenario.requests[past.number]
        ids = tuple(request.hash_ids) if job.cache.prefill or job.cache.decode else ()
        for message in (submitted[room] for _, room, *_ in past.tries if room in submitted):
            hints = message.hints or RequestHints()
            sent = message.input, message.output, hints.priority
            if sent != (request.input, request.output, request.priority) or (ids and hints.blocks != ids):
                yield f"request {past.number} is {request[1:]}, and is sent out as {sent} with blocks {hints.blocks}"
    if record.value:
        yield from _mistimed(scenario, *record)


def misreported(
    scenario: Scenario, record: Record, finished: Mapping[int, Finished], nbytes: Mapping[int, int]
) -> Iterator[str]:
    """Yield each row of *record* that is not what instances said, and counts that do not add up.

    They said *finished* and how many *nbytes* moved, by room.
    """
    value, histories, last = record
    if not value:
        return
    for number, (row, place) in enumerate(zip(value["rows"], last, strict=True)):
        past = histories[place]
        said = finished[past.tries[-1][1]] if past.status == "ok" else None
        stamps = [getattr(said, name, None) for name in STAMPS]
        own = [*(past.tries[-1][2:] if past.tries else row[:2]), *stamps[: len(row) - 4]]
        if [*row[:2], *row[4:]] != own:
            yield f"request {number} has the row {row}, and ended as {own}"
        moved = nbytes.get(past.tries[-1][1], 0) if past.tries else 0
        if row[2] not in (0, moved):
            yield f"request {number} counts {row[2]} bytes, and its last room moved {moved}"
    columns: Mapping[str, Any] = request_columns(scenario.requests, value)
    whole, parts = (np.array([columns[name].values for name in names]) for names in (("e2e",), PHASES))
    for number in np.flatnonzero(np.abs(parts.sum(0) - whole[0]) > _ROUNDING).tolist():
        yield f"request {number} takes {whole[0][number]:g} s, and its phases {parts[:, number].tolist()}"
    again = sum(max(0, len(past.tries) - 1) for past in histories)
    refused = sum(past.status.startswith(("PeerLost: no", "Shed", "RouterLost")) for past in histories if past.tries)
    by_router, by_users = value["sent_again"]
    if not again <= by_router <= again + refused or by_users != len(histories) - len(last):
        yield f"{value['sent_again']} requests count as sent again: {again} in another room, {len(histories)} in all"


def _mistimed(
    scenario: Scenario, value: Mapping[str, Any], histories: Sequence[History], last: Sequence[int]
) -> Iterator[str]:
    # Requests that do not arrive when they should, and a router that begins too early or too late.
    start, deadline, job = value["start"], scenario.job.deadline, scenario.job
    formed: dict[str, float] = {}
    for at, name, what in value["changes"]:
        if what == "formed":
            formed.setdefault(name, at)
    latest = max(formed.values()) if formed.keys() >= {*job.prefills, *job.decodes} else np.inf
    known = not scenario.misspeaks and (start < latest or not scenario.kill)  # one that is lost is not waited for
    if latest <= deadline and abs(start - latest) > _ROUNDING and known:
        yield f"requests may arrive from {start:g} s on, and all instances are formed at {latest:g} s"
    firsts = [place + 1 for place in (-1, *last[:-1])]
    for number, (place, request) in enumerate(zip(firsts, scenario.requests, strict=True)):
        due = start + request.arrival
        if request.after >= 0:
            before, row = histories[last[request.after]], value["rows"][request.after]
            ended = row[4 + STAMPS.index("finished")] if before.status == "ok" else before.ended
            due = max(before.ended, ended + request.arrival)
        if abs(histories[place].began - due) > _ROUNDING:
            yield f"request {number} is sent out at {histories[place].began:g} s, and arrives at {due:g} s"


def misdrained(scenario: Scenario, record: Record) -> Iterator[str]:
    """Yield each instance that serves again sooner or later than it may, though its side lost no other."""
    limits = {name: seconds for name, _, seconds in scenario.specs[0].arguments["drains"]}
    began, changes = dict[str, float](), record.value["changes"] if record.value else ()
    for at, name, what in changes:
        since = began.pop(name, at)
        if what == "draining":
            began[name] = at
        elif what == "serving" and abs(at - since - limits[name]) > _ROUNDING:
            side = next(side for side in (scenario.job.prefills, scenario.job.decodes) if name in side)
            lost = any((when, how) == (at, "lost") and other in side for when, other, how in changes)
            if at > since + limits[name] or not lost:
                yield f"{name} serves again after {at - since:g} s, and may drain for {limits[name]:g}"
