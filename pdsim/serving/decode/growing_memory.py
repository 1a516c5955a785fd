# SPDX-License-Identifier: Apache-2.0
"""Decode pages that grow with their requests, for a whole batch at a time and without an event for each page."""

from __future__ import annotations

import math

from pdsim.kv.pages import Pool
from pdsim.serving.decode.steps import RunningBatch, steps_that_fit
from pdsim.serving.deployment import Deployment

__all__ = ["GrowingMemory"]


class GrowingMemory:
    """The pages of *pool* that the requests of *batch* have, which grow as tokens come.

    Pages are given between steps: as many as the next step stores into.  How far the batch can go without looking
    again is known in closed form.

    Used with ``ServingEngine.memory=grow``.  The scheduler asks `short` between steps, preempts until it is false,
    and then lets all `grow`.
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
        pool, page_size = self._pool, self._job.page_size
        needs = [(number, -(-tokens // page_size) - pool.count(number)) for number, tokens in self._batch.contexts()]
        self._lacking = sorted(need for need in needs if need[1] > 0)
        return sum(pages for _, pages in self._lacking) > self._pool.free

    def grow(self) -> None:
        """Give every request the pages that its next step needs; `short` has just said that they are there.

        Raise a `ValueError` if they are not: the pool has changed since.
        """
        for number, lacks in self._lacking:
            if not self._pool.extend(number, lacks):
                raise ValueError(f"room {number} lacks {lacks} pages, {self._pool.free} are free")
        self._lacking = []

    def steps(self) -> float:
        """Return how many steps can be taken before a request lacks a page; infinity if none ever does."""
        members = self._batch.contexts()
        if not members:
            return math.inf
        most = self._batch.least()
        count = self._pool.count
        pages = self._pool.free + sum([count(number) for number, _ in members])
        contexts = [tokens for _, tokens in members]
        fit = steps_that_fit(contexts, self._job.page_size, pages, most)
        return math.inf if fit == most else fit
