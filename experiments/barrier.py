# SPDX-License-Identifier: Apache-2.0
"""A barrier of all ranks of a job, for experiments whose ranks begin a measurement together."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

from pdsim.core.errors import PeerLost, TransferError
from pdsim.transfer import Message
from pdsim.transfer.job import Rank

__all__ = ["Barrier"]

_SLACK = 2e-3
"""Seconds from the last arrival to a common start: more than a message between processes of one machine takes."""


class Barrier:
    """A barrier with stages for all ranks of a job, which fails once one of them is gone.

    A message is ``stage, NUL, payload``.  Ranks send a sign of life every quarter of *timeout*.

    One for each rank, made when its program begins; `tick` runs as a process of its own; then any number of
    `wait` and `start`, in the same order on all ranks.  A stage's name is used once.
    """

    def __init__(self, rank: Rank, timeout: float) -> None:
        self._rank = rank
        self._timeout = timeout
        self._arrived: dict[str, dict[str, bytes]] = {}
        self._heard: dict[str, float] = {}

    def tick(self) -> Generator[Any, Any, None]:
        """Tell the others for ever that this rank lives."""
        while True:
            yield self._rank.clock.timeout(self._timeout / 4)
            self._tell("alive")

    def wait(self, stage: str, payload: bytes = b"") -> Generator[Any, Any, dict[str, bytes]]:
        """Wait until all ranks are at *stage* and return what each of the others brought.

        Raise `PeerLost` if a rank has given up, or was not heard of for *timeout* seconds.
        """
        self._tell(stage, payload)
        arrived = self._arrived.setdefault(stage, {})
        self._heard = dict.fromkeys(self._rank.peers, self._rank.clock.now)  # nobody listened during the transfers
        while missing := [name for name in self._rank.peers if name not in arrived]:
            received = self._rank.channel.receive()
            yield received | self._rank.clock.timeout(self._timeout / 4)
            if received.processed:  # only triggered: its message goes to who asks next
                self._take(cast("Message", received.value))
            silent = [name for name in missing if self._rank.clock.now - self._heard[name] > self._timeout]
            if silent:
                raise PeerLost(f"{silent[0]} was not heard of for {self._timeout:g} s, at {stage!r}")
        return arrived

    def start(self, stage: str) -> Generator[Any, Any, None]:
        """Wait as `wait` does, and then for one instant that all ranks agree on: they share the clock of the job.

        What tells a rank that all have arrived comes at a different time to each, and short transfers would be over
        at one before another begins.
        """
        now = self._rank.clock.now
        others = yield from self.wait(stage, repr(now).encode())
        at = max(now, *map(float, others.values())) + _SLACK
        yield self._rank.clock.timeout(max(0.0, at - self._rank.clock.now))

    def give_up(self, error: TransferError) -> None:
        """Tell the others that this rank ends with *error*, so that they need not find out."""
        self._tell("lost", f"{type(error).__name__}: {error}".encode())

    def _tell(self, stage: str, payload: bytes = b"") -> None:
        for name in self._rank.peers:
            self._rank.channel.send(name, stage.encode() + b"\0" + payload)

    def _take(self, message: Message) -> None:
        sender = message.sender
        stage, _, payload = message.payload.partition(b"\0")
        self._heard[sender] = self._rank.clock.now
        if stage == b"lost":
            raise PeerLost(f"{sender} gave up: {payload.decode()}")
        self._arrived.setdefault(stage.decode(), {})[sender] = payload
