# SPDX-License-Identifier: Apache-2.0
"""Scenarios without faults, run with and without what stands for many events: both must end alike.

`pdsim.serving.forward_runs` tells of the forwards of a long prompt in one message, and `pdsim.sim.posting` has one
event for a transfer that shares nothing.  Checkers and faults turn the first off, so these scenarios have neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np

from experiments.faults.causes import Scenario
from experiments.faults.settings import late_programs
from pdsim.hardware.machine import Host
from pdsim.serving.deployment import Deployment
from pdsim.serving.forward_runs import ForwardRuns
from pdsim.serving.settings import HostCosts
from pdsim.serving.workload import Request
from pdsim.sim.faults import Faults
from pdsim.sim.hosts import SimChannel
from pdsim.sim.model import Model
from pdsim.sim.posting import IsolatedTransfers
from pdsim.transfer.job import Outcome
from pdsim.verify.invariants import Violation

_LONGEST = 400
"""Tokens of a prompt, at most."""

_FEW = 15
"""Requests of a scenario, at most."""

_APART = 1e-5
"""Seconds by which the same end may differ: a message that is longer by some bytes takes some nanoseconds more."""


def long_prompts(
    job: Deployment, requests: Sequence[Request], random: np.random.Generator
) -> tuple[Deployment, list[Request]]:
    """Return *job* whose host launches ahead, in a moment or for as long as forwards, and long *requests*."""
    more, slower, variation, busy = random.random(4).tolist()
    share = iter(random.random(8).tolist())
    names = "arrive", "admit", "step", "launch", "send", "send_next", "posted_beside", "posted_more"
    costs = {name: 10.0 ** (-6.0 + 3.5 * next(share)) for name in names}
    costs["launch"] /= job.shape.layers
    engine = replace(
        job.engine,
        ahead=True,
        overlap=True,
        noticed="decode",
        prefill=HostCosts(**costs),
        variation=max(0.0, variation - 0.5),
        busy=1.0 + max(0.0, 2 * busy - 1.0),
    )
    notify = "write" if job.handoff.notify == "poll" else job.handoff.notify
    queues = min(1, job.handoff.queues)  # writes of several queues end at one instant, in any order
    tokens = [40 + int((_LONGEST - 40) * share) for share in random.random(len(requests)).tolist()]
    pages = [int(job.page_count(longest) * (1.0 + 3 * more)) for longest in (_LONGEST, _LONGEST + 8)]
    job = replace(
        job,
        engine=engine,
        handoff=replace(job.handoff, notify=notify, queues=queues, handover=0.0),
        prefill_pages=pages[0],
        decode_pages=pages[1],
        staging=None,
    )
    spread = 10 ** (2 * slower)  # from prompts that wait for each other to some that are alone
    return job, [
        request._replace(arrival=request.arrival * spread, input=many)
        for request, many in zip(requests[:_FEW], tokens, strict=False)
    ]


def sleeping(host: Host, random: np.random.Generator) -> Host:
    """Return *host* as it is, with programs that wake late, or with those and no `idle_wake`, one in three each."""
    kind, late = random.random(), late_programs(host, random)
    if kind < 1 / 3:
        return host
    return late if kind < 2 / 3 else replace(late, idle_wake=0.0)


def compared(scenario: Scenario) -> tuple[list[Violation], list[str], int, Counter[str]]:
    """Return what differs, the statuses of the requests, the events, and how many runs of forwards there were.

    Messages of runs have more bytes: where 5 ns decide which step of decode sees an arrival, all after it differs.
    And what two ranks do at one instant may come in either order.  So what differs must do so, too, if messages of
    any length take as long, and those of each pair of ranks a time of their own.
    """
    at_once, runs, wrong = _both(scenario)
    if wrong:
        machine = scenario.machine
        machine = replace(machine, host=replace(machine.host, tcp_rate=1e18))
        with _apart(SimChannel, "latency_from", _own_latency):
            wrong = _both(replace(scenario, machine=machine))[2] and wrong
    violations = [Violation("I16", at_once.seconds, what) for what in wrong]
    statuses = [row[3] for row in at_once.ranks["router"].value["rows"]]
    return violations, statuses, at_once.events, Counter(Forwards=runs)


def _both(scenario: Scenario) -> tuple[Outcome, int, list[str]]:
    runs = count()
    with _apart(ForwardRuns, "begin", lambda begin, *message: (next(runs), begin(*message))[1]):
        at_once = _run(scenario, None)
    with _apart(IsolatedTransfers, "begin", lambda *_: False):
        one_by_one = _run(scenario, Faults())
    return at_once, next(runs), list(_differences(at_once, one_by_one))


def _own_latency(latency: Callable[..., float], channel: SimChannel, sender: str) -> float:
    return latency(channel, sender) + 1e-12 * crc32(f"{sender} {channel.name}".encode())  # up to 4 ms


def _run(scenario: Scenario, faults: Faults | None) -> Outcome:
    # With a plan of faults, though it has none, nobody knows when forwards end.
    model = Model(scenario.machine, scenario.engine, seed=scenario.seed, faults=faults, limit=scenario.limit)
    return model.run(scenario.specs)


@contextmanager
def _apart(owner: Any, name: str, instead: Any) -> Iterator[None]:
    original = getattr(owner, name)
    with patch.object(owner, name, lambda *arguments: instead(original, *arguments)):
        yield


def _differences(one: Outcome, other: Outcome) -> Iterator[str]:
    for name, rank in one.ranks.items():
        if rank.error or other.ranks[name].error:
            yield f"{name} ended: {rank.error or other.ranks[name].error}"
            return
    rows = zip(one.ranks["router"].value["rows"], other.ranks["router"].value["rows"], strict=True)
    for number, (mine, its) in enumerate(rows):
        if not all(map(_same, mine, its)):
            yield f"request {number} is {mine}, and one by one {its}"
            return
    for name, rank in one.ranks.items():
        mine, its = (sorted(map(_moved, each.transfers)) for each in (rank, other.ranks[name]))
        if len(mine) != len(its):
            yield f"{name} moves {len(mine)} transfers, and one by one {len(its)}"
        for first, second in zip(mine, its, strict=False):
            if not all(map(_same, first, second)):
                yield f"{name} moves {first}, and one by one {second}"
                return


def _moved(record: Any) -> tuple[Any, ...]:
    return (
        record.label,
        record.source,
        record.target,
        record.nbytes,
        record.submitted,
        record.posted,
        record.completed,
    )


def _same(one: Any, other: Any) -> bool:
    return abs(one - other) <= _APART if isinstance(one, float) and isinstance(other, float) else bool(one == other)
