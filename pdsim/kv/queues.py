# SPDX-License-Identifier: Apache-2.0
"""The send queues of a prefill rank: each has one worker, which does one thing after the other.

What stands first in a queue holds up what stands behind it, and nothing in another queue.  Unknown here: what the
items are, and which queue is whose.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from simpy.events import Event

from pdsim.core.clock import Clock
from pdsim.transfer import Program

__all__ = ["Queues"]

T = TypeVar("T")


class _Queue(Generic[T]):
    """Items in order, and the worker's place in the one that it works on."""

    __slots__ = ("busy", "item", "items", "number", "program")

    def __init__(self, number: int) -> None:
        self.number = number
        self.items: deque[T] = deque()
        self.busy = False
        self.item: T  # that is worked on, if busy
        self.program: Program | None = None  # which does that, if it takes more than one event


class Queues(Generic[T]):
    """*count* queues with a blocking worker each; with 0, an item is worked on at once and waits for nobody.

    *work* is called with an item and the number of its queue, and returns what the worker waits for before it goes
    on with the next: an event, whether that succeeds or fails; a program; or None.  *failed* is called with an item
    whose *work* or program raised, and the exception.  The worker goes on with the next: one bad item must not end
    the service of all others.

    Workers are callbacks and no processes: an item costs no event of its own.

    Life of an item: `put` appends it, the worker takes it out and calls *work*, waits for what that returns, and
    takes the next.  Nothing is ever taken out otherwise, so *work* must look whether its item still matters.
    """

    def __init__(
        self,
        clock: Clock,
        count: int,
        work: Callable[[T, int], Program | Event | None],
        failed: Callable[[T, Exception], None],
    ) -> None:
        if count < 0:
            raise ValueError(f"count must be >= 0, got {count}")
        self._clock = clock
        self._work = work
        self._failed = failed
        self._queues: list[_Queue[T]] = [_Queue(number) for number in range(count)]

    def put(self, key: int, item: T) -> None:
        """Append *item* to the queue that *key* falls to: ``key % count``.

        A worker that is idle begins before this returns, without an event of its own; so only a callback may call
        it.
        """
        if not self._queues:
            self._clock.process(self._alone(item))
            return
        queue = self._queues[key % len(self._queues)]
        queue.items.append(item)
        if not queue.busy:
            queue.busy = True
            self._next(queue)

    def _next(self, queue: _Queue[T]) -> None:
        """Work on *queue* until there is something to wait for."""
        while queue.items:
            queue.item = item = queue.items.popleft()
            try:
                waits: Any = self._work(item, queue.number)  # an event has no callbacks once it is over
            except Exception as error:
                self._failed(item, error)
                continue
            if waits is not None and not isinstance(waits, Event):
                queue.program = waits
                waits = self._advance(queue, waits, None)
            if waits is not None and waits.callbacks is not None:
                waits.callbacks.append(lambda event: self._resume(queue, event))
                return
        queue.busy = False

    def _resume(self, queue: _Queue[T], event: Event) -> None:
        """Go on after *event*: with the program of the item, or with the next item."""
        if queue.program is not None:
            waits = self._advance(queue, queue.program, event)
            if waits is not None:
                assert waits.callbacks is not None
                waits.callbacks.append(lambda event: self._resume(queue, event))
                return
        self._next(queue)

    def _advance(self, queue: _Queue[T], program: Program, event: Any) -> Any:
        """Let *program* go on after *event*, as SimPy's `Process` does; return what it waits for, None at last."""
        value: Any = None
        ok = True
        while True:
            if event is not None:
                value, ok = event.value, bool(event.ok)
                if not ok:
                    event.defused = True
            try:
                event = program.send(value) if ok else program.throw(value)
            except StopIteration:
                break
            except Exception as error:
                self._failed(queue.item, error)
                break
            if event.callbacks is not None:
                return event
        queue.program = None
        return None

    def _alone(self, item: T) -> Program:
        try:
            waits = self._work(item, 0)
            if waits is not None and not isinstance(waits, Event):
                yield from waits
        except Exception as error:
            self._failed(item, error)
