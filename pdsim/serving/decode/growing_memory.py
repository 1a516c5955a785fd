"""Decode pages that grow with their requests, for a whole batch at a time and without an event for each page."""

from __future__ import annotations

import math

from pdsim.kv.pages import Pool
from pdsim.serving.decode.steps import Member, RunningBatch, steps_that_fit
from pdsim.serving.deployment import Deployment

__all__ = ["GrowingMemory"]


class GrowingMemory:
    """The pages of *pool* that the requests of *batch* have, which grow as tokens come.

    Pages are given between steps: as many as the next step stores into.  How far the batch can go without looking
    again is known in closed form.

    Used with ``ServingEngine.memory=grow``.  The scheduler asks `short` between steps, preempts until it is false, and
    then lets all `grow`.
    """

    def __init__(self, job: Deployment, pool: Pool, batch: RunningBatch) -> None:
        self._job = job
        self._pool = pool
        self._batch = batch
        self._lacking: list[tuple[int, int]] = []  # room and pages, of the next step

    def admits(self, tokens: int, others: int) -> bool:
        """Return whether a request of *tokens* may have pages beside *others* that have some.

        Each of them, and the new one, has `ServingEngine.reserved_tokens` kept free; the only one needs none.

        *tokens* are those of the context that it starts with; *others* counts requests, not tokens.
        """
        reserved = self._job.engine.reserved_tokens if others else 0
        kept = self._job.page_count(reserved) * others
        return self._pool.free - kept >= self._job.page_count(tokens + reserved)

    def short(self) -> bool:
        """Return whether there are too few pages for the next step of all."""
        needs = ((member.number, self._lacks(member)) for member in self._batch)
        self._lacking = [(number, pages) for number, pages in needs if pages]
        return sum(pages for _, pages in self._lacking) > self._pool.free

    def grow(self) -> None:
        """Give every request the pages that its next step needs, of which `short` has just said that they are there."""
        for number, lacks in self._lacking:
            if not self._pool.extend(number, lacks):
                raise ValueError(f"room {number} lacks {lacks} pages, {self._pool.free} are free")
        self._lacking = []

    def steps(self) -> float:
        """Return how many steps can be taken before a request lacks a page; infinity if none ever does."""
        members = list(self._batch)
        if not members:
            return math.inf
        most = min(member.left for member in members)
        pages = self._pool.free + sum(self._pool.count(member.number) for member in members)
        contexts = [member.context for member in members]
        fit = steps_that_fit(contexts, self._job.page_size, pages, most)
        return math.inf if fit == most else fit

    def _lacks(self, member: Member) -> int:
        return max(0, self._job.page_count(member.context) - self._pool.count(member.number))
