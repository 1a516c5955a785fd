# SPDX-License-Identifier: Apache-2.0
"""Push: prefill writes each chunk into pages that decode has reserved, as soon as it is computed (SGLang)."""

from __future__ import annotations

from pdsim.serving.decode.decode_scheduler import DecodeScheduler
from pdsim.serving.decode.decode_worker import DecodeWorker
from pdsim.serving.deployment import Deployment
from pdsim.serving.prefill.prefill_scheduler import PrefillScheduler
from pdsim.serving.prefill.prefill_worker import PrefillWorker
from pdsim.serving.rank_process import EngineProcess
from pdsim.transfer.job import Rank

__all__ = ["Push"]


class Push:
    """Both sides hear of a request at once; decode says where to write, and first-token metadata goes with the KV.

    Rooms meet by their number, whichever side hears first. The first rank of an instance schedules, the others do
    what it says.
    """

    serial = False

    def prefill(self, rank: Rank, job: Deployment, instance: str, index: int) -> EngineProcess:
        """Return the program of a prefill rank."""
        return (PrefillWorker if index else PrefillScheduler)(rank, job, instance, index)

    def decode(self, rank: Rank, job: Deployment, instance: str, index: int) -> EngineProcess:
        """Return the program of a decode rank."""
        return (DecodeWorker if index else DecodeScheduler)(rank, job, instance, index)
