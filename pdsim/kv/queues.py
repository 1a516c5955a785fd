"""The queues of a prefill rank: each has one worker, which does one thing after the other.

What stands first in a queue holds up what stands behind it, and nothing in another queue.  Unknown here: what the jobs
do, and which queue is whose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from simpy.events import Event

from pdsim.clock import Clock
from pdsim.transfer import Program

__all__ = ["Job", "Queues"]

Job = Callable[[int], Program]
"""Called with the number of its queue; the worker goes on when the program ends."""


@dataclass(slots=True)
class _Queue:
    jobs: deque[Job] = field(default_factory=deque)
    idle: Event | None = None


class Queues:
    """*count* queues with a blocking worker each; with 0, a job starts at once and waits for nobody.

    *failed* is called with a job that raised, and its exception.  The worker goes on with the next: one bad job must
    not end the service of all others.
    """

    def __init__(self, clock: Clock, count: int, failed: Callable[[Job, Exception], None]) -> None:
        if count < 0:
            raise ValueError(f"count must be >= 0, got {count}")
        self._clock = clock
        self._failed = failed
        self._queues = [_Queue() for _ in range(count)]
        for number in range(count):
            clock.process(self._work(number))

    def __len__(self) -> int:
        """Return the number of queues."""
        return len(self._queues)

    def put(self, key: int, job: Job) -> None:
        """Append *job* to the queue that *key* falls to: ``key % count``."""
        if not self._queues:
            self._clock.process(self._do(job, 0))
            return
        queue = self._queues[key % len(self._queues)]
        queue.jobs.append(job)
        if queue.idle is not None:
            idle, queue.idle = queue.idle, None
            idle.succeed()

    def _work(self, number: int) -> Program:
        queue = self._queues[number]
        while True:
            while queue.jobs:
                yield from self._do(queue.jobs.popleft(), number)
            queue.idle = Event(self._clock)
            yield queue.idle

    def _do(self, job: Job, number: int) -> Program:
        try:
            yield from job(number)
        except Exception as error:
            self._failed(job, error)
