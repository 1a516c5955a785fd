"""The job without disaggregation, in one rank: requests arrive, a router policy chooses the engine, it serves them.

No KV is handed over, so nothing needs ranks, links or messages of its own: the model says how long a step of an
instance takes, whatever the number of its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simpy.events import Event

from pdsim.job import Rank
from pdsim.kv.messages import Submit
from pdsim.serving.colocated.engine import ColocatedEngine, ColocatedRequest
from pdsim.serving.deployment import Deployment
from pdsim.serving.host import Host
from pdsim.serving.seams import router_policy
from pdsim.transfer import Program

__all__ = ["instances", "program"]


def instances(job: Deployment) -> tuple[str, ...]:
    """Return the names of the engines of *job*."""
    return tuple(f"colocated{number}" for number in range(job.prefill_instances))


def program(rank: Rank, *, job: Mapping[str, Any], requests: Sequence[Sequence[float]]) -> Program:
    """Serve *requests*, rows of arrival, input and output, and return what `pdsim.serving.router.program` does."""
    service = _Service(rank, Deployment.from_plain(job), requests)
    return (yield from service.run())


class _Service:
    def __init__(self, rank: Rank, job: Deployment, requests: Sequence[Sequence[float]]) -> None:
        self.clock = rank.clock
        self.job = job
        self.requests = requests
        self.load = dict.fromkeys(instances(job), 0)
        self.policy = router_policy(job.policy)
        self.host = Host(job.engine.prefill, job.engine.variation, job.seed, "colocated")
        self.engines = {name: ColocatedEngine(self.clock, job, self._finished) for name in self.load}
        self.where: dict[int, str] = {}
        self.ended: dict[int, ColocatedRequest] = {}
        self.all_done = Event(self.clock)
        self.start = self.clock.now

    def run(self) -> Program:
        for engine in self.engines.values():
            self.clock.process(engine.run())
        for number, (arrival, *_) in enumerate(self.requests):
            self.clock.call_at(self.start + arrival, self._arrive, number)
        yield self.all_done
        return {"start": self.start, "rows": [self._row(number) for number in range(len(self.requests))]}

    def _arrive(self, number: int) -> None:
        _, given, wanted = map(int, self.requests[number])
        name = self.policy.choose(list(self.engines), self.load)
        self.where[number] = name
        self.load[name] += given + wanted
        request = Submit(number, given, wanted, name, name)
        seconds = self.host.arrive(given)
        if seconds:
            self.clock.call_at(self.clock.now + seconds, self.engines[name].submit, request)
        else:
            self.engines[name].submit(request)

    def _finished(self, one: ColocatedRequest) -> None:
        request = one.request
        self.load[request.prefill] -= request.input + request.output
        self.ended[request.room] = one
        if len(self.ended) == len(self.requests):
            self.all_done.succeed()

    def _row(self, number: int) -> list[Any]:
        """Return the row of a request; times of a handoff that there is none of are those of its neighbours."""
        one, name = self.ended[number], self.where[number]
        begin, first = one.started, one.prefilled
        return [name, name, 0, "ok", begin, begin, begin, first, first, first, first, one.finished]
