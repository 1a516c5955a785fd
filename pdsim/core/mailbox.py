# SPDX-License-Identifier: Apache-2.0
"""Items that come one by one to the processes of a rank: its messages and notifications."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simpy.events import Event

from pdsim.core.clock import fire

if TYPE_CHECKING:
    from pdsim.core.clock import Clock

__all__ = ["Mailbox"]


class _Getter(Event):
    """A wait for one item.  Its first callback, *unclaimed*, sees to it that no item is lost with its waiter."""

    def __init__(self, clock: Any, unclaimed: Callable[[Event], None]) -> None:
        super().__init__(clock)
        self.callbacks.append(unclaimed)
        self.waiters = self.callbacks  # SimPy takes the list away before it calls what is in it

    @property
    def given_up(self) -> bool:
        return len(self.waiters) == 1


class Mailbox:
    """Items in the order in which they were put, for one or more processes that wait for them.

    Where `simpy.Store` costs two events an item and a linear `pop(0)`, this costs one event and constant time.  With
    `listen`, a function gets the items instead.

    Invariant: no item is lost and none is given twice, whatever happens to the processes that wait.
    """

    __slots__ = ("_clock", "_items", "_listener", "_waiting")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._items: deque[Any] = deque()
        self._waiting: deque[_Getter] = deque()
        self._listener: Callable[[Any], None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Any) -> None:
        """Hand *item* to the listener or the longest-waiting getter, in a turn of its own, or keep it."""
        if self._listener is not None:
            self._clock.call_at(self._clock.now, self._listener, item)
            return
        getter = self._getter()
        if getter is None:
            self._items.append(item)
        else:
            getter.succeed(item)

    def deliver(self, item: Any) -> None:
        """Do as `put` does, without an event of its own.  Like `fire`, only for callbacks."""
        if self._listener is not None:
            self._listener(item)
            return
        getter = self._getter()
        if getter is None:
            self._items.append(item)
        else:
            fire(getter, item)

    def listen(self, listener: Callable[[Any], None]) -> None:
        """Call *listener*, which must not raise, with every item from now on, those that are kept first.

        What `get` returned before gets nothing any more.  Raise a `RuntimeError` if there is a listener already.
        """
        if self._listener is not None:
            raise RuntimeError("this mailbox has a listener already")
        self._listener = listener
        for item in self.drain():
            self.put(item)

    def get(self) -> Event:
        """Return an event that succeeds with the next item.

        Yield it at once, alone or in a condition: a getter that nobody waits for counts as given up, and the item
        goes to the next.
        """
        getter = _Getter(self._clock, self._unclaimed)
        if self._items:
            getter.succeed(self._items.popleft())
        else:
            while self._waiting and self._waiting[0].given_up:  # lest a poll with a deadline piles them up
                self._waiting.popleft()
            self._waiting.append(getter)
        return getter

    def _getter(self) -> _Getter | None:
        while self._waiting:
            getter = self._waiting.popleft()
            if not getter.given_up:
                return getter
        return None

    def _unclaimed(self, event: Event) -> None:
        assert isinstance(event, _Getter)
        if not event.given_up:
            return
        getter = self._getter()
        if getter is None:
            self._items.appendleft(event.value)
        else:
            getter.succeed(event.value)

    def drain(self) -> list[Any]:
        """Return all items that are here now, without waiting."""
        items = list(self._items)
        self._items.clear()
        return items
