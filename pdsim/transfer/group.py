# SPDX-License-Identifier: Apache-2.0
"""Collectives over ranks, independent of their endpoints' engine."""

from typing import Protocol

from simpy.events import Event

from pdsim.core.errors import InvalidBatch
from pdsim.transfer import Buffer

SYMMETRIC = "symmetric"
"""The pool whose memory all ranks of a group have registered with one another (`Group.reserve`)."""


class Group(Protocol):
    """Ranks that call the same collectives in the same order, such as an NCCL communicator.

    `pdsim.transfer.job.Rank.group` makes it, at no cost; the rank's end closes it.  Calls are served in order, one
    after the other; each begins when all ranks have made it.  They succeed with a `TransferRecord`, whose *engine*
    says what moved the bytes and whether as ``plain`` or as ``symmetric`` memory, or fail with a `TransferError`; a
    failure that nobody waits for does not end the run.

    A rank that is gone fails what waits for it with `PeerLost`, a deadline with `TransferTimeout`.  Either ends the
    group on this rank: nothing of it moves any more, and further calls fail with `PeerLost`.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The ranks, in the order in which their pieces stand in a target; the same on all of them."""

    @property
    def index(self) -> int:
        """The place of this rank among `names`."""

    @property
    def reserved(self) -> int:
        """Bytes of this rank's symmetric pool."""

    @property
    def growths(self) -> int:
        """How often the symmetric pool has grown at run time, which is after its first `reserve`."""

    @property
    def growth_seconds(self) -> float:
        """Seconds that this rank waited for growths."""

    def all_gather(
        self,
        source: Buffer,
        target: Buffer,
        size: int | None = None,
        *,
        times: int = 1,
        timeout: float | None = None,
        label: str = "",
    ) -> Event:
        """Copy the first *size* bytes (default: all) of every rank's *source* into every rank's *target*.

        The piece of rank *i* goes to ``[i * size, (i + 1) * size)``.  It is a symmetric all-gather if *target* comes
        from pool `SYMMETRIC`, and a plain one otherwise.

        With *times* it is repeated without a pause, as the layers of a forward do: `repeated` says on which bytes.

        Raise `InvalidBatch` if *size* is not positive or a buffer too small.  Fail with it, and move nothing, where
        sizes or pools differ between ranks (`pdsim.kv.allgather` pads); with ``check: false`` nobody looks.
        """

    def reserve(self, size: int, *, timeout: float | None = None) -> Event:
        """Give the symmetric pool *size* more bytes in one piece, on all ranks: allocated, registered and exchanged.

        It stalls every rank of the group, so pools are reserved at the start; later calls count as growths.
        Fail with `OutOfMemory` on all ranks if one has no room, or if growths are not allowed (``grow: false``), and
        with a `RegistrationError` if the pool belongs to another group of this rank.
        """

    def close(self) -> None:
        """Leave the group; others that wait for this rank lose it.  May be called twice."""


def check_gather(ranks: int, source: Buffer, target: Buffer, size: int, times: int = 1) -> None:
    """Raise `InvalidBatch` unless *size* bytes of *source*, from each of *ranks*, fit into *target*.

    Every implementation of `Group` calls this before it asks anything of another rank.
    """
    if not 0 < size <= source.size:
        raise InvalidBatch(f"size={size} must be > 0 and at most the {source.size} bytes of the source")
    if times < 1:
        raise InvalidBatch(f"times={times} must be >= 1")
    if target is source:
        raise InvalidBatch("source and target are one buffer; gather into another one")
    if target.size < ranks * size:
        raise InvalidBatch(
            f"{ranks} pieces of {size} bytes do not fit into a target of {target.size}; it needs {ranks * size}"
        )


def repeated(ranks: int, source: Buffer, target: Buffer, size: int, times: int) -> list[tuple[int, int]]:
    """Return where the piece of each of so many *times* begins in *source*, and where all pieces in *target*.

    A buffer with room for all of them has one after the other; a smaller one is used again each time.
    """
    step = size if source.size >= times * size else 0, ranks * size if target.size >= times * ranks * size else 0
    return [(number * step[0], number * step[1]) for number in range(times)]
