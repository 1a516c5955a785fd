# SPDX-License-Identifier: Apache-2.0
"""A router with one request under way at a time: what a handoff takes by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simpy.events import Event

from pdsim.serving.deployment import Deployment
from pdsim.serving.router import Arrivals, RoutedRequest, Router
from pdsim.transfer import Program
from pdsim.transfer.job import Rank

__all__ = ["program"]


def program(
    rank: Rank,
    *,
    job: Mapping[str, Any],
    requests: Sequence[Sequence[float]],
    leaves: Sequence[Sequence[float]] = (),
) -> Program:
    """Serve as `pdsim.serving.router.program` does, each of *requests* when the one before it is over.

    Arrival times and users who leave are ignored.
    """
    return (yield from _SerialRouter(rank, Deployment.from_plain(job), requests, leaves).run())


class _OneByOne(Arrivals):
    """Each request arrives when the one before it is over, whatever its time."""

    def follow(self, request: RoutedRequest) -> None:  # noqa: ARG002 whichever it was
        self._advance(None)

    def _advance(self, _: Event | None) -> None:
        if self._next < len(self._table) and not self._process.has_ended:
            self._next += 1
            self._arrive(self.request(self._next - 1))
        self._idle()


class _SerialRouter(Router):
    """A `Router` that sends the next request out when the one before is closed."""

    arrivals_type = _OneByOne

    def _arrive(self, request: RoutedRequest) -> None:
        self._submit(request)
