# SPDX-License-Identifier: Apache-2.0
"""Placement of ranks on processors, undisturbed processors, and time slices of threads."""

import ctypes
import os
import platform
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence

from pdsim.transfer.job import RankSpec

LEAST = 4  # processors of a rank: for its program, its engine's threads and its driver's. With fewer, ranks may roam
SLOWER = 1.3
"""Times the shortest `pace` seen, above which a processor is left: undisturbed ones differ by a tenth, those that
share their core with somebody else's thread take 1.6 to 2.0 (docs/validation.md)."""

EVERY = 5e-3
"""Seconds between two looks, which take 10 us each: processors change between quick and slow after 0.1 to 0.4 s."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # numbers of the system call
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")  # of version 1: size, policy, flags, nice, 0, slice in ns, and five 0


def shares(ranks: Sequence[RankSpec]) -> dict[str, list[int]]:
    """Return the processors of each of *ranks* if one drives a GPU and there are enough, or nothing: they may roam.

    A rank that drives a GPU spins while it waits, and two on the threads of one core slow each other down.
    Neighbouring numbers are threads of one core, or neighbours in one memory, so shares are runs of them, equally
    many for each rank.
    """
    here = sorted(os.sched_getaffinity(0))
    each = len(here) // max(1, len(ranks))
    if each < LEAST or all(spec.place.gpu is None for spec in ranks):
        return {}
    return {spec.name: here[index * each : (index + 1) * each] for index, spec in enumerate(ranks)}


def pace() -> float:
    """Return the seconds that a fixed piece of Python takes on this processor now: about 10 us."""
    shortest, total = float("inf"), 0
    for _ in range(2):  # an interrupt meets one of them
        began = time.perf_counter()
        for index in range(250):
            total += index & 7
        shortest = min(shortest, time.perf_counter() - began)
    return shortest


class QuickProcessor:
    """Moves the calling thread to one of *processors* that no hyperthread neighbour slows down.

    On a virtual machine the other thread of a core may work for another machine, and halve this one's pace.  No
    counter of the guest tells, but a fixed piece of work does.  The thread is moved and not bound.  It is made on
    the thread that it moves, which it takes through all of *processors* once, to know the shortest pace;
    `WallClock.idle` then calls `look` now and then.
    """

    def __init__(self, processors: Sequence[int], measure: Callable[[], float] = pace) -> None:
        self._processors = deque(processors)
        self._measure = measure
        self._shortest = float("inf")
        self._tried = 0  # in a row, all of them slow
        for processor in processors:
            os.sched_setaffinity(0, {processor})
            self._shortest = min(self._shortest, measure())
        os.sched_setaffinity(0, self._processors)

    def look(self) -> float:
        """Measure this processor and go to the next if it is slow; return in how many seconds to look again.

        That is at once after a move, unless all have been tried: then this one is as good as any.
        """
        now = self._measure()
        self._shortest = min(self._shortest, now)
        if now <= SLOWER * self._shortest or self._tried == len(self._processors):
            self._tried = 0
            return EVERY
        self._tried += 1
        self._processors.rotate(-1)
        os.sched_setaffinity(0, {self._processors[0]})
        os.sched_setaffinity(0, self._processors)
        return 0.0


def keep_for(seconds: float) -> None:
    """Let this thread, and those that it starts, keep a processor for *seconds* at a time while others wait for it.

    A thread that wakes up otherwise waits for the next tick of the kernel, up to 4 ms.  Shares of the processor stay
    what they are.  Linux has it from 6.12 on (EEVDF, sched_attr.sched_runtime, 0.1 to 100 ms); elsewhere nothing
    happens.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or not hasattr(os, "sched_getscheduler") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, round(seconds * 1e9), 0, 0, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, ctypes.create_string_buffer(attributes, len(attributes)), 0)
