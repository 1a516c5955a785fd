# SPDX-License-Identifier: Apache-2.0
"""What is moved, and one move of it: regions of memory, a batch of descriptors over two, a transfer under way.

`pdsim.transfer` has all of it, beside the interfaces that rank programs use.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view
from simpy.events import Event

from pdsim.core.clock import Clock, fire
from pdsim.core.errors import InvalidBatch

if TYPE_CHECKING:
    from collections.abc import Callable


Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Arena:
    """Addresses of a piece of memory of *size* bytes that begins at *base*.

    Invariant: gaps are ascending, do not overlap and do not touch, and their bytes and those taken add up to *size*.

    >>> arena = Arena(100)
    >>> arena.take(60), arena.take(60), arena.take(40)
    (0, None, 60)
    >>> arena.give(0, 60); arena.give(60, 40); arena.take(100)
    0
    """

    def __init__(self, size: int, base: int = 0) -> None:
        self.size = size
        self._gaps = [(base, size)]  # address and size, ascending, never touching

    @property
    def free(self) -> int:
        """Bytes of all gaps together."""
        return sum(size for _, size in self._gaps)

    @property
    def largest_gap(self) -> int:
        """The most bytes that the next `take` can get."""
        return max((size for _, size in self._gaps), default=0)

    def take(self, size: int) -> int | None:
        """Return the first address with room for *size* bytes, or None."""
        for index, (address, room) in enumerate(self._gaps):
            if room >= size:
                self._gaps[index : index + 1] = [(address + size, room - size)] if room > size else []
                return address
        return None

    def give(self, address: int, size: int) -> None:
        """Undo a `take`."""
        insort(self._gaps, (address, size))
        merged: list[tuple[int, int]] = []
        for start, room in self._gaps:
            if merged and sum(merged[-1]) == start:
                start, room = merged[-1][0], merged.pop()[1] + room
            merged.append((start, room))
        self._gaps = merged


class Buffer(Protocol):
    """Memory that a `Device` allocated, valid until `Device.free`; regions over it must be deregistered first."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def pool(self) -> str:
        """The pool it came from."""

    @property
    def address(self) -> int:
        """Where it starts, in the address space of its device."""

    def read(self, offset: int, size: int) -> bytes:
        """Return a copy of *size* bytes at *offset*.

        Raise an `IndexError` outside the buffer and a `TypeError` if the device keeps no contents.
        """

    def write(self, offset: int, data: bytes) -> None:
        """Store *data* at *offset*; the errors of `read`."""


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory as either side names it.

    Plain data that may be sent, in `Endpoint.address`; `Peer.regions` has those of a peer.
    """

    owner: str  # the rank that registered it
    name: str  # unique among the regions of its owner
    size: int
    address: int  # in the owner's address space
    device: str  # the owner's name for the device it lies on

    @classmethod
    def local(cls, owner: str, device: str, buffer: Buffer) -> Region:
        """Return a name for *buffer*, of *device*, that only `Device.copy` understands; no engine knows of it."""
        return cls(owner, f"local:{buffer.address:#x}", buffer.size, buffer.address, device)


def _int64s(values: npt.ArrayLike, name: str) -> Int64s:
    # Floats are refused, even whole ones; an empty array may have any type.
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InvalidBatch(f"{name} must be a one-dimensional array of integers, got {array.dtype} of {array.shape}")
    return np.ascontiguousarray(array, dtype=np.int64)


def _check_inside(region: Region, offset: Int64s, size: Int64s, side: str) -> None:
    if offset.min() >= 0 and offset.max() <= region.size - int(size.max()):  # sufficient, and makes no arrays
        return
    # offset > region.size - size rather than offset + size > region.size: the sum may overflow
    outside = (offset < 0) | (offset > region.size - size)
    if outside.any():
        index = int(np.argmax(outside))
        raise InvalidBatch(
            f"{side} descriptor {index} covers [{offset[index]}, {int(offset[index]) + int(size[index])}) of region "
            f"{region.owner}/{region.name}, which has {region.size} bytes"
        )


_PART = 1 << 13
"""Descriptors compared at a time: few enough for the arrays to stay in the processor's cache."""


def _ascending(offset: Int64s, size: Int64s) -> bool:
    for first in range(0, len(offset) - 1, _PART):
        step = np.diff(offset[first : first + _PART + 1])
        if (step < size[first : first + len(step)]).any():
            return False
    return True


def _check_disjoint(offset: Int64s, size: Int64s) -> None:
    if _ascending(offset, size):  # as batches mostly are: no need to sort
        return
    order = np.argsort(offset, kind="stable")
    overlap = np.diff(offset[order]) < size[order][:-1]
    if overlap.any():
        first = int(np.argmax(overlap))
        one, other = int(order[first]), int(order[first + 1])
        raise InvalidBatch(
            f"targets of descriptors {one} and {other} overlap: engines keep no order among descriptors"
        )


_SMALL = 4096
"""Bytes of a piece up to which a loop over pieces takes longer than its bytes do."""
_CACHED = 1 << 18
"""Bytes moved at a time: they are read and written while they are in the cache."""


def move(source: Bytes, target: Bytes, source_offset: Int64s, target_offset: Int64s, size: Int64s) -> None:
    """Copy the descriptors of a valid `Batch` between two arrays of bytes that do not overlap.

    Small pieces of equal sizes, as the heads of tokens are, go many at a time: a tenth to a third of a loop's time.
    """
    each = int(size[0])
    if each > _SMALL or len(size) == 1 or int(size.min()) != int(size.max()):
        rows = zip(source_offset.tolist(), target_offset.tolist(), size.tolist(), strict=True)
        for start, to, count in rows:
            target[to : to + count] = source[start : start + count]
        return
    ours, theirs = sliding_window_view(source, each), sliding_window_view(target, each, writeable=True)
    step = max(1, _CACHED // each)
    for first in range(0, len(size), step):
        theirs[target_offset[first : first + step]] = ours[source_offset[first : first + step]]


class Batch:
    """Descriptors: for each *i*, ``size[i]`` bytes from ``source_offset[i]`` to ``target_offset[i]``.

    Three int64 arrays of equal length over two regions; 100,000 descriptors are normal.  Bytes flow from *source* to
    *target* whoever posts: for a read, *source* is the peer's.

    Raise `InvalidBatch` if the batch is empty or the lengths differ, if a size is not positive, if a descriptor
    reaches outside its region, or if two targets overlap; sources may.
    """

    __slots__ = ("_size", "_source_offset", "_target_offset", "nbytes", "source", "target")

    def __init__(
        self,
        source: Region,
        target: Region,
        source_offset: npt.ArrayLike,
        target_offset: npt.ArrayLike,
        size: npt.ArrayLike,
    ) -> None:
        self.source = source
        self.target = target
        self._source_offset = _int64s(source_offset, "source_offset")
        self._target_offset = _int64s(target_offset, "target_offset")
        self._size = lengths = _int64s(size, "size")
        count = len(lengths)
        if not len(self._source_offset) == len(self._target_offset) == count:
            raise InvalidBatch(
                f"{len(self._source_offset)} source offsets, {len(self._target_offset)} target offsets and "
                f"{count} sizes: a batch needs as many of each"
            )
        if not count:
            raise InvalidBatch("an empty batch: there is nothing to transfer")
        if lengths.min() <= 0:
            index = int(np.argmin(lengths))
            raise InvalidBatch(f"size[{index}]={lengths[index]}: sizes must be positive")
        _check_inside(source, self._source_offset, lengths, "source")
        _check_inside(target, self._target_offset, lengths, "target")
        _check_disjoint(self._target_offset, lengths)
        self.nbytes = int(lengths.sum())

    @property
    def source_offset(self) -> Int64s:
        """Where each descriptor begins in the source."""
        return self.arrays()._source_offset

    @property
    def target_offset(self) -> Int64s:
        """Where each descriptor begins in the target."""
        return self.arrays()._target_offset

    @property
    def size(self) -> Int64s:
        """The bytes of each descriptor."""
        return self.arrays()._size

    def __len__(self) -> int:
        return len(self._size)

    def __repr__(self) -> str:
        return (
            f"<Batch of {len(self)} descriptors, {self.nbytes} bytes, {self.source.owner}/{self.source.name} -> "
            f"{self.target.owner}/{self.target.name}>"
        )

    def arrays(self) -> Batch:
        """Return the batch that has the arrays."""
        return self

    def over(self, source: Region, target: Region) -> Batch:
        """Return the same descriptors over other regions, without checking again what cannot have changed.

        Raise `InvalidBatch` if either region is smaller than the one it replaces.
        """
        if source.size < self.source.size or target.size < self.target.size:
            raise InvalidBatch(
                f"regions of {source.size} and {target.size} bytes cannot stand for {self.source.size} and "
                f"{self.target.size}"
            )
        return LazyBatch(source, target, len(self), self.nbytes, self.arrays)


class LazyBatch(Batch):
    """A valid batch whose arrays *make* returns on first use.

    The simulator on memory without contents needs no more than the number of descriptors and the bytes.  *make* is
    called at most once, for all batches that `over` derives from this one, and returns a batch of *count*
    descriptors and *nbytes* over regions at least as large; else an `AssertionError` is raised.
    """

    __slots__ = ("_count", "_made", "_make")

    def __init__(self, source: Region, target: Region, count: int, nbytes: int, make: Callable[[], Batch]) -> None:
        self.source = source
        self.target = target
        self.nbytes = nbytes
        self._count = count
        self._make = make
        self._made: Batch | None = None

    def __len__(self) -> int:
        return self._count

    def arrays(self) -> Batch:
        """Return the same batch with its arrays made."""
        made = self._made
        if made is None:
            made = self._made = self._make().arrays()
            if len(made) != self._count or made.nbytes != self.nbytes:
                raise AssertionError(f"{self!r} stands for {made!r}")
        return made


def single_descriptor(source: Region, target: Region, source_offset: int, target_offset: int, size: int) -> Batch:
    """Return a batch of one descriptor, checked like any other; its arrays are made on first use."""

    def make() -> Batch:
        return Batch(source, target, [source_offset], [target_offset], [size])

    inside = 0 <= source_offset <= source.size - size and 0 <= target_offset <= target.size - size
    return LazyBatch(source, target, 1, size, make) if inside and size > 0 else make()


@dataclass(frozen=True)
class Peer:
    """The other side of a connection, as `Endpoint.connect` returns it."""

    name: str  # rank
    regions: Mapping[str, Region]
    handle: Any = field(default=None, repr=False, compare=False)  # the engine's own


class TransferRecord(NamedTuple):
    """What one transfer was and when each stage of it ended; seconds on the clock of the rank that posted it.

    As in nixlbench: *prep* is ``prepared - submitted`` (descriptor lists built), *post* is ``posted - prepared``
    (the engine has taken all descriptors), *tx* is ``seen - posted``, of which ``completed - posted`` is the wire
    (bytes at the target, acknowledged) and ``seen - completed`` what the poller added.
    """

    engine: str
    operation: str  # "write", "read", "all_gather" or "reserve"
    source: str  # rank; of a collective, all of them
    target: str  # rank
    nbytes: int
    descriptors: int
    submitted: float
    prepared: float
    posted: float
    completed: float
    seen: float
    status: str = "ok"  # or the name of the exception's class
    label: str = ""  # the caller's, opaque to the engine


class Transfer(Event):
    """One write or read under way.

    Succeeds with its `TransferRecord`, or fails with a `TransferError`.  A failure that nobody waits for does not
    end the run: the recorder has it.  Its states; `pdsim.sim.endpoint` and `backends.base.endpoint` use the same
    names for the transitions::

                        refused by the engine
        prepared ───────────────────────────────┐
            │ post                              │
            ▼         engine, deadline, peer    ▼
         posted ────────────────────────────► failed
            │              fail                 │
            │ complete                          ├─ bytes may still move ──► quarantined
            ▼                                   │  quarantine                    │
        completed                               │ nothing moves                  │ quiesce
            │                                   ▼                                ▼
            └──────────────────────────────► quiesced ◄──────────────────────────┘

    *settled* is a second event: it succeeds once the engine has proven that no byte of this transfer moves any more.
    After success both are triggered together.  After a time-out or a lost peer it may come later, or never: until
    then the memory on **both** sides is in quarantine, and whoever owns it must not hand it out again.

    *posted* is when the call that posts it keeps its thread no longer; on a virtual clock maybe after it returns.
    """

    def __init__(self, clock: Clock, batch: Batch, label: str = "") -> None:
        self.env = cast(Any, clock)  # and so on: what `Event.__init__` does, as SimPy's own `Timeout` does it
        self.callbacks = []
        self._defused = True
        self.batch = batch
        self.label = label
        self.posted = clock.now
        self._settled: Event | None = None  # made when it is asked for, which is seldom
        self._quiesced = False

    @property
    def settled(self) -> Event:
        """The second event; see above."""
        if self._settled is None:
            self._settled = Event(self.env)
            if self._quiesced:
                fire(self._settled)
        return self._settled

    def settle(self, *, now: bool = False) -> None:
        """Trigger `settled`, at once if nobody waits for it, so that it takes no turn of the clock; for endpoints.

        With *now*, who waits for it goes on at once too: only for callbacks, like `fire`.
        """
        if self._settled is None:
            self._quiesced = True
        elif self._settled.callbacks and not now:
            self._settled.succeed()
        else:
            fire(self._settled)


def check_sides(rank: str, peer: Peer, batch: Batch, *, write: bool) -> tuple[Region, Region]:
    """Return the regions of *batch* on the side of *rank*, which posts it, and on that of *peer*.

    Every endpoint calls this before it posts.  Raise `InvalidBatch` if the first is not a region of *rank*, or the
    second was not in the address that *peer* was connected with.
    """
    local, remote = (batch.source, batch.target) if write else (batch.target, batch.source)
    if local.owner != rank:
        side, operation = ("source", "write") if write else ("target", "read")
        raise InvalidBatch(f"the {side} of a {operation} must be a region of {rank}, got one of {local.owner}")
    known = peer.regions.get(remote.name)
    if known is not remote and known != remote:
        raise InvalidBatch(
            f"region {remote.owner}/{remote.name} is not in the address of {peer.name}, which has "
            f"{', '.join(sorted(peer.regions)) or 'none'}; connect again with a newer address"
        )
    return local, remote
