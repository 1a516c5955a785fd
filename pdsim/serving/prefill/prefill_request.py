# SPDX-License-Identifier: Apache-2.0
"""What the prefill leader knows of a request: its phases, pages and times."""

from __future__ import annotations

from collections.abc import Sequence

from pdsim.kv.consensus import Consensus
from pdsim.kv.messages import Destination, Submit
from pdsim.kv.plan import Runs
from pdsim.kv.status import Status

__all__ = ["PrefillRequest"]


class PrefillRequest:
    """A request at the prefill leader, from its `Submit` until every rank says that nothing of it moves.

    It waits for its *destination*, takes pages (*runs*) when its first forward begins, goes through forwards that
    cover *done* of its tokens, each of which sends a chunk of pages, and is *ended* with the last of them.

    Life: made with `Submit`; waits for its `Destination` (*noticed*); gets pages and a slot with its first forward
    (*started*); its chunks are computed and written; removed when all ranks have written all, or when a failed one
    has settled on every rank.  Times are seconds on the clock.
    """

    def __init__(self, request: Submit, consensus: Consensus) -> None:
        self.request = request
        self.consensus = consensus
        self.destination: Destination | None = None
        self.noticed = 0.0
        self.started = 0.0
        self.runs: Runs = ()  # of the whole request, once it has pages
        self.state: tuple[Runs, ...] = ()  # of each component
        self.done = 0  # tokens that a forward has covered or covers now, or that were cached
        self.sent = 0  # pages that a chunk has, and those that decode holds
        self.keys: Sequence[int] = ()  # of its pages, where there is a prefix cache
        self.priority = 0
        self.begun = False  # a step has a piece of it
        self.chunks = 0
        self.source_slot = -1
        self.nbytes = 0
        self.ended = 0.0  # its last forward, on this rank
        self.ready = 0.0  # when the host has made it known to the scheduler

    @property
    def failed(self) -> bool:
        """Whether its pages are in quarantine, until every rank says that nothing of it moves."""
        return self.consensus.status is Status.FAILED
