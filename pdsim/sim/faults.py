# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a modelled job, and the chance that decides it.

What happens is drawn from streams of `Model.seed`, one for each source of chance.  Nothing here breaks a promise of
the waist: messages of one sender to one receiver keep their order, and bytes move before `Transfer.settled`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from math import inf, log1p
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdsim.core.units import not_negative

if TYPE_CHECKING:
    from pdsim.core.clock import Clock
    from pdsim.core.units import Seconds
    from pdsim.hardware.costs import Jitter
    from pdsim.transfer import Batch


class Slow(NamedTuple):
    """From *start* to *end*, computing and posting take *factor* times as long on *rank*."""

    rank: str
    start: float
    end: float
    factor: float


class Silence(NamedTuple):
    """From *start* to *end*, no control message to or from *rank* arrives; at *end* all do, in order."""

    rank: str
    start: float
    end: float


class Stale(NamedTuple):
    """What *rank* sends, or is sent, from *start* until it is *killed* arrives at *end*, as to its next process."""

    rank: str
    start: float
    killed: float
    end: float
    received: bool = False  # what it is sent


class Lag(NamedTuple):
    """Half of the control messages that contain *tag* are held up for *mean* seconds, exponential.

    Only those from *sender* and to *receiver*, where these are given.
    """

    tag: bytes
    mean: float
    sender: str = ""
    receiver: str = ""


class Pause(NamedTuple):
    """From *start* to *end*, *rank* stands still, as a stopped process does; what its hardware does goes on."""

    rank: str
    start: float
    end: float


class Squeeze(NamedTuple):
    """From *start* to *end*, *link* carries *factor* times what it otherwise does; 0 cuts it."""

    link: str
    start: float
    end: float
    factor: float


class CardOutage(NamedTuple):
    """From *start* to *end*, *card* of *node* carries nothing."""

    node: int
    card: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Faults:
    """A plan.  Shares are from 0 to 1, times in seconds after the start; *delay* and *lateness* are means."""

    delayed: float = 0.0  # share of control messages that are held up, and those behind them on the same socket
    delay: float = 0.0  # for how long, exponential
    lagging: tuple[Lag, ...] = ()
    late: float = 0.0  # share of transfers whose last byte is held up, also beyond their deadline
    lateness: float = 0.0  # for how long, exponential
    unnoticed: float = 0.0  # share of notifications that are held up, and those behind them of the same writer
    notice: float = 0.0  # for how long, exponential
    broken: float = 0.0  # share of transfers that the engine reports as failed, though some or all bytes have moved
    stray: bool = False  # bytes are read and land at any instant between post and completion, not at the last
    torn: bool = False  # the same, and a transfer moves in two to four parts, each of them at instants of its own
    shuffle: bool = False  # what is due at one instant on several ranks happens in any order
    slow: tuple[Slow, ...] = ()
    squeezes: tuple[Squeeze, ...] = ()
    silences: tuple[Silence, ...] = ()
    stale: tuple[Stale, ...] = ()
    pauses: tuple[Pause, ...] = ()
    until: float = inf  # seconds after the start from which on no message and no transfer is held up any more

    def __post_init__(self) -> None:
        for name in ("delayed", "late", "unnoticed", "broken"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"faults.{name} must be >= 0 and <= 1, got {getattr(self, name)}")
        not_negative("faults", delay=self.delay, lateness=self.lateness, notice=self.notice, until=self.until)
        not_negative("faults", **{f"lag{number}": lag.mean for number, lag in enumerate(self.lagging)})
        for what, start, end, *factor in (*self.slow, *self.squeezes, *self.absences):
            not_negative(what, start=start, factor=sum(factor))
            if not start <= end:
                raise ValueError(f"{what}: start={start} and end={end} must be in order")

    @property
    def absences(self) -> tuple[Silence | Pause, ...]:
        """When a rank is not heard, though it lives."""
        return *self.silences, *self.pauses

    @property
    def lag(self) -> float:
        """For how many seconds control messages are held up, in the mean: the most of all kinds."""
        return max([self.delay, *(lag.mean for lag in self.lagging)])

    def kinds(self) -> tuple[str, ...]:
        """Return the names of what this plan makes use of."""
        return tuple(kind.name for kind in fields(self) if kind.name != "until" and getattr(self, kind.name))


class Observer:
    """What a job tells whoever checks it, in the order in which it happens.  It must not change anything.

    Bytes that are *read* at the source or have *landed* at the target may be a part of their transfer.  What is
    *held_up*, and what the engine will report as failed (*broken*), is the transfer that has just been posted.
    *joined* has a program's own object (`pdsim.transfer.Recorder.inspect`), *ended* the error of `RankResult`.
    """

    def sent(self, sender: str, receiver: str, payload: bytes) -> None: ...

    def posted(self, batch: Batch, label: str) -> None: ...

    def held_up(self, label: str) -> None: ...

    def broken(self, label: str) -> None: ...

    def read(self, batch: Batch, label: str) -> None: ...

    def landed(self, batch: Batch, label: str) -> None: ...

    def copied(self, batch: Batch) -> None: ...

    def joined(self, member: Any) -> None: ...

    def ended(self, rank: str, error: str) -> None: ...


class Chance:
    """The draws of one job."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self._faults = faults
        self._messages = uniforms(seed, "fabric.messages")
        self._lags = uniforms(seed, "fabric.lags")
        self._lateness = uniforms(seed, "fabric.lateness")
        self._notices = uniforms(seed, "fabric.notices")
        self._instants = uniforms(seed, "fabric.instants")
        self._tears = uniforms(seed, "fabric.tears")
        self._breaks = uniforms(seed, "fabric.breaks")
        self.ties = uniforms(seed, "fabric.ties")
        self.strays = faults.stray or faults.torn
        self._calm = False

    def calm(self) -> None:
        """Hold up nothing from now on."""
        self._calm = True

    def message(self, sender: str, receiver: str, payload: bytes, at: float) -> float:
        """Return when *payload*, the next control message between these ranks, arrives that would do so *at*."""
        if self._calm:
            return at
        at += _held(self._messages, self._faults.delayed, self._faults.delay)
        for tag, mean, own, other in self._faults.lagging:
            if tag in payload and own in ("", sender) and other in ("", receiver):
                at += _held(self._lags, 0.5, mean)
        for rank, start, end in self._faults.silences:
            if rank in (sender, receiver) and start <= at < end:
                at = end
        for rank, start, killed, end, received in self._faults.stale:
            if rank == (receiver if received else sender) and start <= at < killed:
                at = end
        return at

    def breaks(self) -> float | None:
        """Return the share of the next transfer's bytes that move before the engine reports a failure, or None."""
        if self._calm or not self._faults.broken or next(self._breaks) >= self._faults.broken:
            return None
        kind = 3 * next(self._breaks)
        return 0.0 if kind < 1 else 1.0 if kind < 2 else next(self._breaks)

    def transfer(self) -> float:
        """Return for how long the completion of the next transfer is held up."""
        return 0.0 if self._calm else _held(self._lateness, self._faults.late, self._faults.lateness)

    def notification(self) -> float:
        """Return for how long the next notification is held up, though its transfer has completed."""
        return 0.0 if self._calm else _held(self._notices, self._faults.unnoticed, self._faults.notice)

    def parts(self, nbytes: int, seconds: float) -> Iterator[tuple[int, int, float, float]]:
        """Yield the parts in which a transfer of *nbytes* moves, each from its first byte to the one after its last.

        With the delays after which its source is read and its target written, if the transfer may take *seconds*:
        at once, at some time in between or, as good as never, at the end.
        """
        for first, end in pairwise((0, *self._cuts(nbytes), nbytes)):
            yield first, end, self._instant(seconds), self._instant(seconds)

    def _cuts(self, nbytes: int) -> list[int]:
        if not self._faults.torn or nbytes < 2:
            return []
        many = 1 + int(3 * next(self._tears))
        return sorted({1 + int((nbytes - 1) * next(self._tears)) for _ in range(many)})

    def _instant(self, seconds: float) -> float:
        kind = next(self._instants)
        return (0.0, seconds * next(self._instants), seconds * 1e3)[int(kind * 3)]


class Ties:
    """Keys for what is scheduled: those of one rank in order within an instant, those of several ranks in any.

    With *each*, every key is drawn: the hardware promises no order at all.  All of one job share *numbers*, so that
    no two keys are equal.
    """

    def __init__(self, clock: Clock, draws: Iterator[float], numbers: Iterator[int], each: bool = False) -> None:
        self._clock = clock
        self._draws = draws
        self._each = each
        self._numbers = numbers
        self._at = -1.0
        self._key = 0

    def __iter__(self) -> Ties:
        return self

    def __next__(self) -> int:
        now = self._clock.now
        if self._each or now != self._at:
            self._at, self._key = now, int(next(self._draws) * (1 << 20)) << 40
        return self._key + next(self._numbers)


def _held(draws: Iterator[float], share: float, mean: float) -> float:
    if not share or next(draws) >= share:
        return 0.0
    return -mean * log1p(-next(draws))


def uniforms(seed: int, name: str) -> Iterator[float]:
    """Yield numbers from 0 to 1 without end: of *seed*, a stream for each *name*."""
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *name.encode()])))
    while True:
        yield from random.random(64).tolist()


class Draws:
    """The delays of one job: a stream of *seed* for each source, so that one seed gives one run."""

    def __init__(self, jitter: Jitter, seed: int) -> None:
        self._jitter = jitter
        self._starts = uniforms(seed, "fabric.starts")
        self._copies = uniforms(seed, "fabric.copies")

    def start(self) -> Seconds:
        """Return by how much the next transfer is posted later."""
        return self._jitter.starts * next(self._starts) if self._jitter.starts else 0.0

    def copy(self) -> Seconds:
        """Return by how much a copy engine begins its next transfer later."""
        return self._jitter.copies * next(self._copies) if self._jitter.copies else 0.0
