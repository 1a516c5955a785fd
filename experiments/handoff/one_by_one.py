"""A router with one request under way at a time: what a handoff takes by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simpy.events import Event

from pdsim.job import Rank
from pdsim.serving.deployment import Deployment
from pdsim.serving.router import Router
from pdsim.transfer import Program

__all__ = ["program"]


def program(
    rank: Rank,
    *,
    job: Mapping[str, Any],
    requests: Sequence[Sequence[float]],
    leaves: Sequence[Sequence[float]] = (),
) -> Program:
    """Serve as `pdsim.serving.router.program` does, each of *requests* when the one before it is over.

    Arrival times and users who leave are ignored.  A handoff is measured alone: no other request is in its way.
    """
    return (yield from _SerialRouter(rank, Deployment.from_plain(job), requests, leaves).run())


class _SerialRouter(Router):
    """A `Router` that sends the next request out when the one before is closed."""

    def _arrive(self, _: Event | None) -> None:
        if not self._rooms and self._next < len(self.requests) and not self.ended.triggered:
            self._next += 1
            self._submit(self.requests[self._next - 1])
        self._stop_if_done()

    def _close(self, request: Any, status: str) -> None:
        super()._close(request, status)
        self._arrive(None)
