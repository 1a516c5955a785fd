# SPDX-License-Identifier: Apache-2.0
"""The job without disaggregation, in one rank: requests arrive, a router policy chooses the engine, it serves them.

No KV is handed over, so nothing needs ranks or messages of its own: the model says how long a step of an instance
takes, whatever the number of its ranks.  KV that goes to host memory is on the links of the engine's GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdsim.kv.messages import Submit
from pdsim.serving.colocated.colocated_engine import ColocatedEngine, ColocatedRequest
from pdsim.serving.deployment import Deployment
from pdsim.serving.scheduler_host import SchedulerHost
from pdsim.serving.seams import RoutingQuery, route, router_policy
from pdsim.transfer import Program
from pdsim.transfer.job import Place, Rank

__all__ = ["instances", "program"]


def instances(job: Deployment) -> tuple[str, ...]:
    """Return the names of the engines of *job*: as many as it has prefill instances."""
    return tuple(f"colocated{number}" for number in range(job.prefill_instances))


def program(
    rank: Rank,
    *,
    job: Mapping[str, Any],
    requests: Sequence[Sequence[float]],
    blocks: Sequence[Sequence[int]] = (),
    after: Sequence[int] = (),
    priorities: Sequence[int] = (),
    places: Sequence[Sequence[int | None]],
) -> Program:
    """Serve *requests*, rows of arrival, input and output, and return what `pdsim.serving.router.program` does.

    *job* is `Deployment.plain`; *blocks*, *after* and *priorities* are as there.  *places* are node and GPU of each
    rank, engine by engine.  Fields of a row that belong to a handoff repeat the times beside them, and bytes are 0.
    """
    service = _Service(rank, Deployment.from_plain(job), requests, blocks, after, priorities, places)
    return (yield from service.run())


class _Service:
    """The engines of the job, the requests, and who is served where.

    Requests arrive by callbacks of the clock; the service ends when the last one has finished.
    """

    def __init__(
        self,
        rank: Rank,
        job: Deployment,
        requests: Sequence[Sequence[float]],
        blocks: Sequence[Sequence[int]],
        after: Sequence[int],
        priorities: Sequence[int],
        places: Sequence[Sequence[int | None]],
    ) -> None:
        self.clock = rank.clock
        self.job = job
        self.requests = requests
        self.blocks, self.priorities = blocks, priorities
        self.arrivals = [float(row[0]) for row in requests]
        self.waiting: dict[int, list[int]] = {}  # by the request whose end they come after
        for number, earlier in enumerate(after):
            if earlier >= 0:
                self.waiting.setdefault(earlier, []).append(number)
        self.closed = {number for numbers in self.waiting.values() for number in numbers}
        self.load = dict.fromkeys(instances(job), 0)
        self.policy = router_policy(job.policy)
        self.host = SchedulerHost(job.engine.prefill, job.engine.variation, job.seed, "colocated")
        device: Any = rank.device  # of the model: `experiments.serve` refuses others
        traffic = [device.traffic.of(Place(node or 0, gpu)) for node, gpu in places]
        ranks = len(traffic) // len(self.load)
        self.engines = {
            name: ColocatedEngine(self.clock, job, self._finished, traffic[number * ranks : (number + 1) * ranks])
            for number, name in enumerate(self.load)
        }
        self.where: dict[int, str] = {}
        self.ended: dict[int, ColocatedRequest] = {}
        self.all_done = self.clock.event()
        self.start = self.clock.now

    def run(self) -> Program:
        """Run all engines, let the requests come, and return their rows once the last has finished."""
        for engine in self.engines.values():
            self.clock.process(engine.run())
        for number, arrival in enumerate(self.arrivals):
            if number not in self.closed:
                self.clock.call_at(self.start + arrival, self._arrive, number)
        yield self.all_done
        found: dict[str, Any] = {
            "start": self.start,
            "rows": [self._row(number) for number in range(len(self.requests))],
        }
        if self.closed:
            found["arrivals"] = self.arrivals
        if self.job.cache.prefill:
            found["hits"] = {number + 1: one.cached for number, one in self.ended.items()}
            found["host_hits"] = {number + 1: one.loaded for number, one in self.ended.items() if one.loaded}
        return found

    def _arrive(self, number: int) -> None:
        """Choose the engine of a request and submit it, once its host has made it known."""
        given, wanted = map(int, self.requests[number][1:3])
        blocks = tuple(self.blocks[number]) if self.blocks else ()
        name = route(self.policy, RoutingQuery(list(self.engines), self.load, given, blocks))
        self.where[number] = name
        self.load[name] += given + wanted
        request = Submit(number, given, wanted, name, name)
        priority = self.priorities[number] if self.priorities else 0
        seconds = self.host.arrive(given, self.clock.now)
        if seconds:
            later = self.clock.now + seconds
            self.clock.call_at(later, lambda one: self.engines[name].submit(one, blocks, priority), request)
        else:
            self.engines[name].submit(request, blocks, priority)

    def _finished(self, one: ColocatedRequest) -> None:
        """Keep *one*, and let those arrive whose users waited for it, each after its think time."""
        request = one.request
        self.load[request.prefill] -= request.input + request.output
        self.ended[request.room] = one
        for number in self.waiting.pop(request.room, ()):
            self.arrivals[number] += self.clock.now - self.start
            self.clock.call_at(self.start + self.arrivals[number], self._arrive, number)
        if len(self.ended) == len(self.requests):
            self.all_done.succeed()

    def _row(self, number: int) -> list[Any]:
        """Return the row of a request; times of a handoff that there is none of are those of its neighbours."""
        one, name = self.ended[number], self.where[number]
        begin, first = one.started, one.prefilled
        return [name, name, 0, "ok", begin, begin, begin, first, first, first, first, one.finished]
