# SPDX-License-Identifier: Apache-2.0
"""Pull: prefill computes, answers and keeps the KV under a lease; decode reads it when it has been asked (vLLM).

=====================  =====================================================================================
`Lent`                 prefill leader to router: computed, here are the pages
`PullRequest`          router to decode leader, which allocates pages and has its ranks read (`Fetch`)
`Renew`                decode leader to prefill leader, every heartbeat: these rooms are still wanted
`Collected`            decode leader to prefill leader: nothing of the room is read any more
`Revoked`              prefill leader to decode leader: the lease is over, or the request; `Collected` follows
=====================  =====================================================================================

Pages that may still be read are never handed out again: a room that ends early is in quarantine until `Collected`
or, if the reader is gone, until every prefill rank has proof that nothing of it moves.
"""

from __future__ import annotations

from pdsim.serving.decode.pull_decode import PullDecodeScheduler, PullDecodeWorker
from pdsim.serving.deployment import Deployment
from pdsim.serving.prefill.pull_prefill import PullPrefillScheduler, PullPrefillWorker
from pdsim.serving.rank_process import EngineProcess
from pdsim.transfer.job import Rank

__all__ = ["Pull"]


class Pull:
    """Decode hears of a request when prefill has answered; then it reads the KV.  No first-token metadata moves.

    *serial* says that the router asks one side after the other: it sends to decode what prefill has answered.
    """

    serial = True

    def prefill(self, rank: Rank, job: Deployment, instance: str, index: int) -> EngineProcess:
        """Return the program of a prefill rank."""
        return (PullPrefillWorker if index else PullPrefillScheduler)(rank, job, instance, index)

    def decode(self, rank: Rank, job: Deployment, instance: str, index: int) -> EngineProcess:
        """Return the program of a decode rank."""
        return (PullDecodeWorker if index else PullDecodeScheduler)(rank, job, instance, index)
