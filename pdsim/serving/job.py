"""What every rank of a serving job is told, as plain data that crosses process boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from pdsim.kv.layout import KvLayout, KvShape
from pdsim.serving.compute import ForwardTime

__all__ = ["ROUTER", "Job", "instance_of", "leader", "rank_name"]

ROUTER = "router"


def rank_name(instance: str, tp_rank: int) -> str:
    """Return the name of a rank: ``rank_name("prefill0", 1) == "prefill0.1"``."""
    return f"{instance}.{tp_rank}"


def leader(instance: str) -> str:
    """Return the rank that schedules for *instance*."""
    return rank_name(instance, 0)


def instance_of(rank: str) -> str:
    """Return the instance that *rank* belongs to."""
    return rank.partition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The instances, their memory, their schedulers' limits, and how long a forward takes on either side."""

    prefill_tp: int
    prefill_instances: int
    decode_tp: int
    decode_instances: int
    shape: KvShape
    page_size: int
    prefill_pages: int
    decode_pages: int
    slots: int  # rows of first-token metadata on each rank
    chunk: int
    prefill_batch: int
    decode_batch: int
    prefill_time: ForwardTime
    decode_time: ForwardTime
    policy: str  # of the router
    deadline: float  # seconds of silence after which a rank counts as gone

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Job:
        """Return the job that `plain` made *plain* of."""
        return msgspec.convert(dict(plain), cls)

    def plain(self) -> dict[str, Any]:
        """Return the job as dictionaries and numbers."""
        return asdict(self)

    @property
    def prefills(self) -> tuple[str, ...]:
        """The prefill instances."""
        return tuple(f"prefill{index}" for index in range(self.prefill_instances))

    @property
    def decodes(self) -> tuple[str, ...]:
        """The decode instances."""
        return tuple(f"decode{index}" for index in range(self.decode_instances))

    def tp(self, instance: str) -> int:
        """Return how many ranks *instance* has."""
        return self.prefill_tp if instance.startswith("prefill") else self.decode_tp

    def ranks(self, instance: str) -> Iterator[str]:
        """Yield the ranks of *instance*, its leader first."""
        for tp_rank in range(self.tp(instance)):
            yield rank_name(instance, tp_rank)

    @property
    def prefill_layout(self) -> KvLayout:
        """The pool of a prefill rank."""
        return KvLayout(self.shape, self.prefill_tp, self.page_size, self.prefill_pages, self.slots)

    @property
    def decode_layout(self) -> KvLayout:
        """The pool of a decode rank."""
        return KvLayout(self.shape, self.decode_tp, self.page_size, self.decode_pages, self.slots)

    def longest(self, given: int, wanted: int) -> float:
        """Return how long a request of *given* and *wanted* tokens can take that is first in every queue."""
        chunks = [(done, min(self.chunk, given - done)) for done in range(0, given, self.chunk)]
        tokens = self.decode_pages * self.page_size
        step = self.decode_time.step(self.decode_batch) + self.decode_time.context * tokens
        return sum(self.prefill_time.prefill([chunk]) for chunk in chunks) + wanted * step

    def page_count(self, tokens: int) -> int:
        """Return how many pages hold *tokens* tokens."""
        return -(-tokens // self.page_size)
