"""Which processors each rank of a job stays on, and how long a thread keeps one."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Sequence

from pdsim.transfer import RankSpec

__all__ = ["LEAST", "keep_for", "shares"]

LEAST = 4
"""Processors of a rank: for its program, its engine's threads and its driver's.  With fewer, ranks may roam."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # numbers of the system call
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")  # of version 1: size, policy, flags, nice, 0, slice in ns, and five 0


def shares(ranks: Sequence[RankSpec]) -> dict[str, list[int]]:
    """Return the processors of each of *ranks* if one drives a GPU and there are enough, or nothing: they may roam.

    A rank that drives a GPU spins while it waits, and two that meet on the threads of one core slow each other down
    until the scheduler parts them.  Neighbouring numbers are threads of one core, or neighbours in one memory: so
    shares are runs of them.
    """
    here = sorted(os.sched_getaffinity(0))
    each = len(here) // max(1, len(ranks))
    if each < LEAST or all(spec.place.gpu is None for spec in ranks):
        return {}
    return {spec.name: here[index * each : (index + 1) * each] for index, spec in enumerate(ranks)}


def keep_for(seconds: float) -> None:
    """Let this thread, and those that it starts, keep a processor for *seconds* at a time while others wait for it.

    A thread that wakes up runs at once where one with a longer slice does, and otherwise waits for that slice, or for
    the next tick of the kernel: up to 4 ms.  Shares of the processor stay what they are.  Linux has it from 6.12 on
    (EEVDF, sched_attr.sched_runtime, 0.1 to 100 ms); elsewhere nothing happens.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None or not hasattr(os, "sched_getscheduler") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, nice, 0, round(seconds * 1e9), 0, 0, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, ctypes.create_string_buffer(attributes, len(attributes)), 0)
