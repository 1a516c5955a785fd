# SPDX-License-Identifier: Apache-2.0
"""One status for a room out of those of all ranks of a group."""

from __future__ import annotations

from pdsim.kv.status import Status

__all__ = ["Consensus"]


class Consensus:
    """The status of one room in a group of *size* ranks: the least that any of them has.

    So one failed rank fails the room, and it has succeeded when all have.  SGLang finds that minimum by a collective
    before each step of the scheduler.  Here one rank of the group, its leader, schedules: ranks report to it what
    happened, and it tells them what to do, in one order, so that all of them see the same rooms in the same order.

    Life: `succeed` by each rank, or `fail` once and then `settle` by each rank.  Only the leader has an object of
    it. Raise a `ValueError` for a *size* below 1.
    """

    __slots__ = ("_reported", "_size", "status")

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size must be >= 1, got {size}")
        self._size = size
        self._reported: set[int] = set()
        self.status = Status.WAITING

    @property
    def over(self) -> bool:
        """Whether the status is final: it never changes any more."""
        return self.status is Status.FAILED or self.status is Status.SUCCESS

    def succeed(self, rank: int) -> bool:
        """Take note that *rank* has done its part; return whether that ends the room.

        A rank counts once however often it says so.  Raise a `ValueError` if there is no such rank.
        """
        if not 0 <= rank < self._size:
            self._check(rank)
        status = self.status
        if status is Status.FAILED or status is Status.SUCCESS:  # `over`: most calls of a room are this one
            return False
        reported = self._reported
        reported.add(rank)
        if len(reported) < self._size:
            return False
        self.status = Status.SUCCESS
        return True

    def fail(self) -> bool:
        """Take note that the room has failed on some rank; return whether that ends it, which it does once."""
        if self.over:
            return False
        self.status = Status.FAILED
        self._reported.clear()
        return True

    def settle(self, rank: int) -> bool:
        """Take note that of the failed room nothing moves on *rank*; return whether that was the last to say so."""
        self._check(rank)
        if self.status is not Status.FAILED or rank in self._reported:
            return False
        self._reported.add(rank)
        return len(self._reported) == self._size

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self._size:
            raise ValueError(f"rank {rank} is not one of {self._size}")
