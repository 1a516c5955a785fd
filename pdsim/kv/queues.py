"""The queues of a prefill rank: each has one worker, which does one thing after the other.

What stands first in a queue holds up what stands behind it, and nothing in another queue.  Unknown here: what the items
are, and which queue is whose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from simpy.events import Event

from pdsim.clock import Clock, fire
from pdsim.transfer import Program

__all__ = ["Queues"]

T = TypeVar("T")


@dataclass(slots=True)
class _Queue(Generic[T]):
    items: deque[T] = field(default_factory=deque)
    idle: Event | None = None


class Queues(Generic[T]):
    """*count* queues with a blocking worker each; with 0, an item is worked on at once and waits for nobody.

    *work* is called with an item and the number of its queue; the worker goes on when the program ends.  *failed* is
    called with an item whose program raised, and the exception.  The worker goes on with the next: one bad item must
    not end the service of all others.
    """

    def __init__(
        self,
        clock: Clock,
        count: int,
        work: Callable[[T, int], Program],
        failed: Callable[[T, Exception], None],
    ) -> None:
        if count < 0:
            raise ValueError(f"count must be >= 0, got {count}")
        self._clock = clock
        self._work_on = work
        self._failed = failed
        self._queues: list[_Queue[T]] = [_Queue() for _ in range(count)]
        for number in range(count):
            clock.process(self._work(number))

    def put(self, key: int, item: T) -> None:
        """Append *item* to the queue that *key* falls to: ``key % count``.

        A worker that is idle begins before this returns, without an event of its own; so only a callback may call it.
        """
        if not self._queues:
            self._clock.process(self._alone(item))
            return
        queue = self._queues[key % len(self._queues)]
        queue.items.append(item)
        if queue.idle is not None:
            idle, queue.idle = queue.idle, None
            fire(idle)

    def _work(self, number: int) -> Program:
        queue = self._queues[number]
        while True:
            while queue.items:
                item = queue.items.popleft()
                try:
                    yield from self._work_on(item, number)
                except Exception as error:
                    self._failed(item, error)
            queue.idle = Event(self._clock)
            yield queue.idle

    def _alone(self, item: T) -> Program:
        try:
            yield from self._work_on(item, 0)
        except Exception as error:
            self._failed(item, error)
