"""A router that lets everything come to rest before it stops the ranks, so that what is left then is left for good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdsim.job import Rank
from pdsim.serving.deployment import Job
from pdsim.serving.router import Router
from pdsim.transfer import Program

__all__ = ["program"]


def program(
    rank: Rank,
    *,
    job: Mapping[str, Any],
    requests: Sequence[Sequence[float]],
    leaves: Sequence[Sequence[float]],
    linger: float,
) -> Program:
    """Serve as `pdsim.serving.router.program` does, and stop the ranks *linger* seconds after the last request."""
    router = _Router(rank, Job.from_plain(job), requests, leaves)
    router.linger = linger
    return (yield from router.run())


class _Router(Router):
    linger = 0.0
    _resting = False

    def _stop_if_done(self) -> None:
        if not self._resting and not self._rooms and self._next == len(self.requests):
            self._resting = True
            self.clock.call_at(self.clock.now + self.linger, lambda _: super(_Router, self)._stop_if_done(), None)
