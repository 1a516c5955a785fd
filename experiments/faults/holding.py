"""The decode side of a scenario in which requests find some of their first pages at decode, as with a prefix cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdsim.job import Rank
from pdsim.kv.messages import Submit
from pdsim.serving.decode.scheduler import DecodeScheduler
from pdsim.serving.decode.worker import DecodeWorker
from pdsim.serving.deployment import Deployment
from pdsim.transfer import Program

__all__ = ["HoldingScheduler", "program"]


def program(rank: Rank, *, instance: str, index: int, job: Mapping[str, Any]) -> Program:
    """Run one rank of a decode instance whose leader says that it holds pages already."""
    kind = DecodeWorker if index else HoldingScheduler
    return (yield from kind(rank, Deployment.from_plain(job), instance, index).run())


class HoldingScheduler(DecodeScheduler):
    """Holds from none to all but one of the pages of a request's input, by the number of its room."""

    def held(self, request: Submit) -> int:
        """Return how many pages of *request* are not to be sent."""
        pages = self.job.page_count(request.input)
        # a page that the input fills in part is sent, whatever is held
        return min(request.room % pages, (request.input - 1) // self.job.page_size)
