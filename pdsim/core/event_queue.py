# SPDX-License-Identifier: Apache-2.0
"""What is due on a clock, in the order of time; within an instant in that of priority, then of numbers.

It is kept sorted, the next at the end.  A simulation has tens to hundreds of events ahead, and most of what is added
is due before most of that: looking for its place from the end takes a fifth of what a heap of tuples does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, Final

from simpy.core import EmptySchedule

__all__ = ["Due", "EventQueue"]

Due = tuple[Any, ...]
"""Time, priority and number, negated; the clock whose it is; a function, or None, and its argument, or an event."""

NEAR: Final = 16
"""How many are looked at one by one before the rest is searched by halves; nine of ten are within the last ten."""


class EventQueue:
    """Everything that is scheduled on one clock, or on the clocks of one job, and the time that it is there."""

    __slots__ = ("_ahead", "now", "number")

    def __init__(self) -> None:
        self.now = 0.0
        """The time of what was taken last."""
        self.number = 0
        """Of what was added last, where things are numbered as they come."""
        self._ahead: list[Due] = []  # ascending, so that the next is the last

    def add(
        self,
        at: float,
        priority: int,
        numbers: Iterator[int] | None,
        clock: object,
        function: Callable[[Any], None] | None,
        argument: Any,
    ) -> None:
        """Add what is due at the time *at*, which must not lie before `now`.

        Its number is the next of *numbers*; with None things are numbered as they come.
        """
        if numbers is None:
            self.number = number = self.number + 1
        else:
            number = next(numbers)
        ahead, key = self._ahead, -at
        due = (key, -priority, -number, clock, function, argument)
        place = len(ahead)
        other: float  # said, so that it is compared as one where this is compiled
        if place > NEAR:
            other = ahead[place - NEAR][0]
            if other > key:
                place = bisect_right(ahead, due, 0, place - NEAR)
        while place:
            other = ahead[place - 1][0]
            if other < key or (other == key and ahead[place - 1] < due):
                break
            place -= 1
        ahead.insert(place, due)

    def peek(self) -> float:
        """Return the time of what is due next; infinity if there is nothing."""
        if not self._ahead:
            return inf
        key: float = self._ahead[-1][0]
        return -key

    def take(self) -> Due:
        """Remove what is due next, and let it be its time.  Raise an `EmptySchedule` if there is nothing."""
        if not self._ahead:
            raise EmptySchedule
        due = self._ahead.pop()
        key: float = due[0]
        self.now = -key
        return due
