# SPDX-License-Identifier: Apache-2.0
"""Simulated memory: a `Device` for each rank, its buffers, the memory that ranks of one place share, and who copies.

With ``memory="timing"`` a buffer has a size and an address and no contents; with ``memory="tracked"`` it has bytes,
which the operating system commits only where something was written.

Memory that a transfer may still touch is never handed out again: a buffer that is freed while it is *held* stays
where it is, and counts as used, until the last hold is released.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from math import ceil
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from simpy.events import Event

from pdsim.core.clock import Clock, fire
from pdsim.core.errors import InvalidBatch, OutOfMemory, RegistrationError
from pdsim.core.units import format_size
from pdsim.sim.hosts import ComputationPlan, HostLatency, PostingThread, ScheduledComputations
from pdsim.sim.topology import SideTraffic
from pdsim.transfer import Batch, Buffer, Region
from pdsim.transfer.batch import Arena, move
from pdsim.transfer.group import SYMMETRIC

if TYPE_CHECKING:
    from pdsim.hardware.machine import Copies, Gpu
    from pdsim.sim.faults import Draws
    from pdsim.sim.network import Link, Network
    from pdsim.sim.sequence import Sleep

    Posting: TypeAlias = Any  # of `pdsim.sim.posting`, which imports this module
    _Copy = tuple[Batch, "SimBuffer", "SimBuffer", Event]


Bytes = npt.NDArray[np.uint8]

LAUNCH = 3e-6
"""Seconds from asking for a copy kernel to its first byte.  Published: aiconfigurator's for a memory kernel."""

POOLS = ("default", SYMMETRIC, "nvlink")

MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's flag, which Python has a name for from 3.13 on."""

BASE = 1 << 32
"""The first address: not 0, so that an address that was never set is never a valid one."""


class SimBuffer:
    """A contiguous piece of a `DeviceMemory`."""

    __slots__ = ("_contents", "_held", "_memory", "address", "freed", "pool", "registered", "size", "touched")

    def __init__(self, memory: DeviceMemory, address: int, size: int, pool: str) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.freed = False
        self.registered = ""  # the region's name, or nothing
        self.touched = False  # whether anything was ever written to it: else it is all zeros
        self._memory = memory
        self._held = 0
        self._contents: npt.NDArray[np.uint8] | None = _zeros(size) if memory.tracked else None

    def __repr__(self) -> str:
        return f"<SimBuffer of {self.size} bytes at {self.address:#x} on {self._memory.name}>"

    @property
    def contents(self) -> npt.NDArray[np.uint8]:
        """The bytes themselves, to be read.  Raise a `TypeError` if the memory keeps none."""
        if self._contents is None:
            raise TypeError(
                f"buffers on {self._memory.name} have no contents with memory=timing; run memory=tracked"
            )
        return self._contents

    def touch(self) -> npt.NDArray[np.uint8]:
        """Return the bytes themselves, to be written; the errors of `contents`."""
        contents = self.contents
        self.touched = True
        return contents

    def read(self, offset: int, size: int) -> bytes:
        """Return a copy of *size* bytes at *offset*; the errors of `pdsim.transfer.Buffer.read`."""
        return self._slice(offset, size).tobytes()

    def write(self, offset: int, data: bytes) -> None:
        self._slice(offset, len(data))[:] = np.frombuffer(data, np.uint8)
        self.touched = True

    def hold(self) -> None:
        """Keep the memory from being handed out again until `release` has been called as often."""
        self._held += 1

    def release(self) -> None:
        self._held -= 1
        if self.freed:
            self._reclaim()

    def free(self) -> None:
        """Give the memory back as soon as nobody holds it.  Raise a `ValueError` if that was asked before."""
        if self.freed:
            raise ValueError(f"{self!r} has been freed already; free a buffer once")
        self.freed = True
        self._reclaim()

    def _reclaim(self) -> None:
        if not self._held:
            self._contents = None
            self._memory.reclaim(self)

    def _slice(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        if self.freed:
            raise ValueError(f"{self!r} has been freed; read and write a buffer before that")
        contents = self.contents
        if offset < 0 or size < 0 or offset + size > self.size:
            raise IndexError(f"[{offset}, {offset + size}) is outside a buffer of {self.size} bytes")
        return contents[offset : offset + size]


class DeviceMemory:
    """The memory of one GPU or host: addresses from *base* on, handed out first fit, and what each pool holds."""

    def __init__(self, name: str, capacity: int, tracked: bool = False, base: int = BASE) -> None:
        self.name = name
        self.capacity = capacity
        self.tracked = tracked
        self.used = 0
        self._copier: object = None
        self._pools = dict.fromkeys(POOLS, 0)
        self._peaks = dict.fromkeys(POOLS, 0)
        self._arena = Arena(capacity, base)
        self._buffers: dict[int, SimBuffer] = {}  # by address

    def allocate(self, size: int, pool: str) -> SimBuffer:
        """Return *size* zeroed bytes.  The errors of `pdsim.transfer.Device.allocate`."""
        if pool not in POOLS:
            raise ValueError(f"pool={pool!r} must be one of {', '.join(POOLS)}")
        address = self._arena.take(size)
        if address is None:
            raise OutOfMemory(
                f"{format_size(size)} do not fit on {self.name}: {format_size(self.used)} of "
                f"{format_size(self.capacity)} are in use and the largest gap has "
                f"{format_size(self._arena.largest_gap)}; free some or take less"
            )
        buffer = self._buffers[address] = SimBuffer(self, address, size, pool)
        self.used += size
        self._pools[pool] += size
        self._peaks[pool] = max(self._peaks[pool], self._pools[pool])
        return buffer

    def reclaim(self, buffer: SimBuffer) -> None:
        """Make the addresses of *buffer* free, and one gap with the free ones beside them."""
        del self._buffers[buffer.address]
        self.used -= buffer.size
        self._pools[buffer.pool] -= buffer.size
        self._arena.give(buffer.address, buffer.size)

    def at(self, address: int) -> SimBuffer | None:
        return self._buffers.get(address)

    def turns(self, copier: object) -> bool:
        """Note that *copier* copies now; return whether somebody else did so last."""
        before, self._copier = self._copier, copier
        return before is not None and before is not copier

    def peaks(self) -> dict[str, float]:
        """Return the most that each pool has held, as a share of the memory; pools never used are left out."""
        return {pool: peak / self.capacity for pool, peak in self._peaks.items() if peak}


class _Segment(DeviceMemory):
    # memory that was reserved in one piece; what it holds is part of it, and it goes when the last of that does

    def __init__(self, memory: DeviceMemory, size: int) -> None:
        self._whole = memory.allocate(size, SYMMETRIC)
        self._closed = False
        super().__init__(f"{memory.name}/{SYMMETRIC}", size, tracked=memory.tracked, base=self._whole.address)

    def reclaim(self, buffer: SimBuffer) -> None:
        super().reclaim(buffer)
        self.close(self._closed)

    def close(self, closed: bool = True) -> None:
        self._closed = closed
        if closed and not self.used:
            self._whole.free()


class SymmetricPool:
    """The memory that one rank's group has reserved, handed out first fit, segment after segment.

    Equal calls on all ranks give equal offsets, as symmetric memory must have.  A buffer lies within one segment.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._segments: list[_Segment] = []
        self.owner: object = None  # the group that reserved it

    @property
    def reserved(self) -> int:
        return sum(segment.capacity for segment in self._segments)

    def reserve(self, size: int) -> None:
        self._segments.append(_Segment(self._memory, size))

    def give_back(self) -> None:
        """Undo the last `reserve`, which nobody has used."""
        self._segments.pop().close()

    def allocate(self, size: int) -> SimBuffer:
        for segment in self._segments:
            with suppress(OutOfMemory):
                return segment.allocate(size, SYMMETRIC)
        used = sum(segment.used for segment in self._segments)
        raise OutOfMemory(
            f"{format_size(size)} do not fit into the symmetric pool of {self._memory.name}: {format_size(used)} of "
            f"{format_size(self.reserved)} are in use; have all ranks reserve more with Group.reserve"
        )

    def at(self, address: int) -> SimBuffer | None:
        return next((buffer for segment in self._segments if (buffer := segment.at(address)) is not None), None)

    def close(self) -> None:
        """Give the segments back, each as soon as nothing holds any of it."""
        for segment in self._segments:
            segment.close()
        self._segments.clear()


class SimDevice:
    """One rank's view of a `DeviceMemory`: the simulated `pdsim.transfer.Device`.

    Copies and computation are streams of their own; copies contend with everything else for the memory's bandwidth.
    Ranks that share a device do not slow each other's computation.  *copies* says what a copy costs beside
    bandwidth, *host_latency* when the rank learns of the end of a computation.
    """

    holds_bytes: bool

    def __init__(
        self,
        memory: DeviceMemory,
        clock: Clock,
        network: Network,
        link: Link,
        copies: Copies | None = None,
        host_latency: HostLatency | None = None,
        traffic: SideTraffic | None = None,
    ) -> None:
        self.memory = memory
        self.name, self.capacity = memory.name, memory.capacity
        self.symmetric = SymmetricPool(memory)
        self.holds_bytes = memory.tracked
        self._clock = clock
        self.network = network
        self._through = network.path([link, link])  # a copy reads and writes
        self.traffic = traffic or SideTraffic(clock, network)
        self._copies = copies
        self.host_latency = host_latency or HostLatency(clock)
        self._planned = 0.0  # when everything that was to be copied has been launched
        self._free = 0.0
        self._computations: ScheduledComputations | None = None  # the last that were scheduled
        self.slowness = 1.0  # how many times as long as usual computation takes
        self.steady = False  # whether nothing can happen to this rank that its program does not ask for
        self.scheduled: dict[Hashable, list[ScheduledComputations]] = {}  # of the job: one for each follower to come
        self.latency: Callable[[str], float] = lambda _: 0.0  # of messages from each rank
        self.watch: Callable[[Batch], None] | None = None  # told of every copy at its end
        self._buffers: dict[SimBuffer, None] = {}

    @property
    def used(self) -> int:
        return self.memory.used

    def allocate(self, size: int, pool: str = "default") -> SimBuffer:
        if size <= 0:
            raise ValueError(f"size={size} must be > 0")
        buffer = self.symmetric.allocate(size) if pool == SYMMETRIC else self.memory.allocate(size, pool)
        self._buffers[buffer] = None
        return buffer

    def free(self, buffer: Buffer) -> None:
        if not isinstance(buffer, SimBuffer) or not self.owns(buffer):
            raise ValueError(f"{buffer!r} is not allocated by this rank on {self.name}, or has been freed already")
        if buffer.registered:
            raise RegistrationError(f"{buffer!r} is registered as {buffer.registered!r}; deregister it first")
        del self._buffers[buffer]
        buffer.free()

    def owns(self, buffer: SimBuffer) -> bool:
        return buffer in self._buffers

    def copy(self, batch: Batch) -> Event:
        """Copy within the device: `Copies.busy`, twice the bytes at a fair share of the bandwidth, `LAUNCH`.

        Copies of a rank are planned one after the other; their bytes do not wait for one another.  Contents are read
        and written at the end.
        """
        source, target = self._buffer(batch.source), self._buffer(batch.target)
        done = self._clock.event()
        source.hold()
        target.hold()
        work = batch, source, target, done
        busy = self._copies.busy(len(batch), self.memory.turns(self)) if self._copies is not None else 0.0
        if busy:
            self._planned = max(self._clock.now, self._planned) + busy
            self.network.clock.call_at(self._planned, self._launch, work)
        else:
            self._launch(work)
        return done

    def compute(self, seconds: float) -> Event:
        if not seconds >= 0:
            raise ValueError(f"seconds={seconds} must be >= 0")
        self.computing = begin, seconds = self._begin(), seconds * self.slowness
        self._free = begin + seconds
        if self.host_latency.instant:
            return self._clock.at(self._free)
        done = self._clock.event()
        self.host_latency.arrive(self._free, self._computed, done)
        return done

    def _begin(self) -> float:
        # when it can compute
        if self._computations is not None:
            self._free = max(self._free, self._computations.free)
        return max(self._clock.now, self._free)

    @property
    def schedules(self) -> bool:
        """Whether `schedule` is possible."""
        return self.steady and not self.holds_bytes

    def schedule(
        self,
        name: Hashable,
        seconds: Sequence[float],
        changed: Callable[[], None],
        launches: ComputationPlan,
        followers: int,
    ) -> ScheduledComputations:
        """Begin computations of so many *seconds* now, which so many *followers* will `follow`."""
        own = ScheduledComputations(self.host_latency, self._clock, seconds, self._begin(), changed, launches)
        if followers:
            self.scheduled[name] = [own] * followers
        self._computations = own
        return own

    def follow(self, name: Hashable, leader: str, changed: Callable[[], None]) -> ScheduledComputations:
        """Begin computations now that the rank *leader* has begun under the same *name*."""
        led = self.scheduled[name].pop()
        if not self.scheduled[name]:
            del self.scheduled[name]
        beside = led, self.latency(leader)
        own = ScheduledComputations(
            self.host_latency, self._clock, led.seconds, self._begin(), changed, None, *beside
        )
        self._computations = own
        return own

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.registered = ""
            buffer.free()
        self._buffers.clear()
        self.symmetric.close()

    def _computed(self, done: Event) -> None:
        if self._clock.halted:
            self._clock.defer(fire, done)
        else:
            fire(done)

    def _launch(self, work: _Copy) -> None:
        batch, source, target, _ = work
        if self._clock.stopped:  # a rank that ends while it plans a copy launches none
            source.release()
            target.release()
        else:
            self.network.start(self._through, batch.nbytes, self._on_copied, work)

    def _on_copied(self, work: _Copy) -> None:
        clock = self.network.clock
        clock.call_at(clock.now + LAUNCH, self._finish, work)

    def _finish(self, work: _Copy) -> None:
        batch, source, target, done = work
        if self.watch is not None and not self._clock.stopped:
            self.watch(batch)
        if self.holds_bytes and not self._clock.stopped:
            copy_bytes(batch, source, target)
        source.release()
        target.release()
        if not self._clock.stopped:
            fire(done)

    def _buffer(self, region: Region) -> SimBuffer:
        if region.device != self.name:
            raise InvalidBatch(
                f"region {region.owner}/{region.name} lies on {region.device}, not on {self.name}: copy works "
                f"within a device; use Endpoint.write between devices"
            )
        buffer = self.memory.at(region.address)
        if buffer is None or self.symmetric.reserved:  # which may begin at the same address
            buffer = self.symmetric.at(region.address) or buffer
        if buffer is None or buffer.freed or buffer.size < region.size:
            raise RegistrationError(f"the memory of region {region.owner}/{region.name} has been freed")
        return buffer


class CopyEngine:
    """Carries the transfers that the ranks of one GPU post: of each rank one at a time, in the order of their wires.

    Copies of a GPU over NVLink take turns on all streams, too (measured on 4 x H200: `docs/validation.md`); with
    *streams*, one for each peer, it stays with one until that is empty (`data/benchmarks/crossing-4xh200.parquet`).

    Ranks are processes, which have it in turns of at most `Gpu.slice` seconds, even in the middle of a copy
    (`data/benchmarks/field-crossing-2xh200.csv`); with 0 their copies go on side by side.  Streams that rest after
    each copy, as NIXL's with its thread, fill each other's rests: one process reaches 0.69 of a port to one GPU, all
    of it to two or beside another process (`data/benchmarks/transfers-4xh100.parquet`).  On one stream the
    descriptors of a transfer take their time when the copies before it have ended, and an end is seen when the
    stream is idle (`data/benchmarks/transfers-4xh100.parquet`).  Copies *within* a GPU are kernels: they have an
    engine of their own, and wait `Gpu.process_switch` when the turn is another process'.
    After `Gpu.idle_after` seconds without a transfer it sleeps, and takes `Gpu.idle_wake` to begin.
    """

    def __init__(
        self,
        clock: Clock,
        gpu: Gpu | None = None,
        draws: Draws | None = None,
        *,
        streams: bool = False,
        within: bool = False,
    ) -> None:
        self.within = within
        self.posters: set[PostingThread] = set()  # of the ranks that post through it
        self._clock = clock
        self._draws = draws
        self._streams = streams
        self._idle_after, self._idle_wake, self._slice, self._switch = 0.0, 0.0, 0.0, 0.0
        if gpu is not None:
            self._idle_after, self._idle_wake, self._slice = gpu.idle_after, gpu.idle_wake, gpu.slice
            self._switch = gpu.process_switch if within else 0.0
        self.idle = clock.now  # since when, or when it will be awake
        self.busy: dict[Any, Posting] = {}  # by stream, `WireStage.stream`, as the next three
        self._ended: dict[Any, float] = {}  # when the last copy of each was
        self._waiting: dict[Any, deque[Posting]] = {}
        self.unseen: dict[Any, list[Posting]] = {}  # what ended while more was on the stream
        self._owner: PostingThread | None = None  # of the engine, since `_since`
        self._last: PostingThread | None = None  # who had it before
        self._since = 0.0
        self._over = False  # whether its slice is, and others wait
        self._number = 0  # of the owner's turn: an alarm of an earlier one says nothing
        self._served: Any = None  # what of the owner's is on the wire
        self._carried: dict[PostingThread, Posting] = {}  # of streams that rest after each copy
        self._ready: dict[PostingThread, deque[Posting]] = {}  # copies of other such streams
        self._stalled: dict[PostingThread, Posting] = {}  # in the order in which they get their turns

    def take(self, posting: Posting) -> None:
        """Call `SendQueue.carry` when the turn of *posting* has come among those of its stream."""
        stream = posting.wire.stream
        if stream in self.busy:
            self._waiting.setdefault(stream, deque()).append(posting)
        else:
            self._begin(posting)

    def _begin(self, posting: Posting) -> None:
        now = self._clock.now
        if not self.busy and now - self.idle > self._idle_after:
            self.idle = now + self._idle_wake
        stream = posting.wire.stream
        self.busy[stream] = posting
        at = self.idle if self._draws is None else max(now, self.idle) + self._draws.copy()
        if posting.work:
            at = max(at, self._ended.get(stream, 0.0) + posting.work)
        if at > now:
            self._clock.call_at(at, posting.queue.carry, posting)
        else:
            posting.queue.carry(posting)

    def alone_at(self, posting: Posting, begin: float) -> float | None:
        """Return when *posting*, whose turn comes at the time *begin*, is on the wire; None if others may matter."""
        if self.busy or len(self.posters) > 1 or self._draws is not None:
            return None
        at = begin + self._idle_wake if begin - self.idle > self._idle_after else max(begin, self.idle)
        return max(at, self._ended.get(posting.wire.stream, 0.0) + posting.work) if posting.work else at

    def resume(self, posting: Posting, on: float) -> None:
        """Serve *posting* from now on, which is on the wire at the time *on*, or has been since."""
        self.busy[posting.wire.stream], self.idle = posting, max(self.idle, on)

    def served(self, posting: Posting, ended: float) -> None:
        """Take note that *posting*, which was the only one, has *ended*."""
        self._ended[posting.wire.stream] = ended
        self.idle = max(self.idle, ended)

    def sleeps_before(self, at: float, pause: float) -> bool:
        """Return whether it may need waking for a transfer at *at*, or after *pause* seconds without any.

        It is not known where it is busy or several ranks post: then its rest depends on all of them.
        """
        if not self._idle_wake:
            return False
        idle = not self.busy and len(self.posters) == 1 and self.idle <= self._clock.now
        return not (idle and at - self.idle <= self._idle_after and pause < self._idle_after / 2)

    def sleep(self) -> Sleep | None:
        """Return since when it rests, if it sleeps and nobody but the one rank that posts can wake it."""
        known = not self.busy and len(self.posters) == 1 and self.idle <= self._clock.now
        return (self.idle, self._idle_after, self._idle_wake) if known and self._idle_wake else None

    def leave(self, posting: Posting) -> None:
        """Go on to the next of its stream, if it was *posting* that was carried."""
        poster, wire, stream, at = posting.queue.poster, posting.wire, posting.wire.stream, 0
        if self.busy.get(stream) is not posting:
            return
        del self.busy[stream]
        self._ended[stream] = self._clock.now
        if self._stalled.get(poster) is posting:
            del self._stalled[poster]
        self.idle = max(self.idle, self._clock.now)
        waiting = self._waiting.get(stream)
        while waiting:
            if self._streams:
                at = next((index for index, other in enumerate(waiting) if other.wire is wire), 0)
            following = waiting[at]
            del waiting[at]
            if not following.aborted:
                self._begin(following)
                return
        for other in self.unseen.pop(stream, ()):
            self._clock.call_at(self._clock.now + other.wire.latency, other.queue.finish, other)

    # --- turns of ranks ---

    @property
    def shared(self) -> bool:
        return self._slice > 0.0 and len(self.posters) > 1

    def start(self, posting: Posting) -> None:
        """Put *posting* on the wire, now or in the turn of its rank."""
        poster = posting.queue.poster
        if posting.wire.stream is not poster:
            if poster in self._carried:
                self._ready.setdefault(poster, deque()).append(posting)
                return
            self._carried[poster] = posting
        if not self.shared:
            posting.queue.start(posting)
            return
        if self._owner is None:
            self._own(poster)
        if self._owner is poster and not self._over:
            self._serve(posting)
            return
        self._stalled[poster] = posting
        if len(self._stalled) == 1:
            self._limit()

    def rest(self, posting: Posting) -> None:
        """Give the engine to the next rank, *posting* being off the wire, unless its own goes on at once."""
        poster = posting.queue.poster
        if self._carried.get(poster) is posting:
            del self._carried[poster]
            ready = self._ready.get(poster)
            while ready and poster not in self._carried:
                following = ready.popleft()
                if not following.aborted:
                    self.start(following)
        if self._served is posting:
            self._served = None
        if self._owner is poster and self._served is None:
            self._pass()

    def _own(self, poster: PostingThread) -> None:
        self._owner, self._since, self._over = poster, self._clock.now, False
        self._number += 1

    def _serve(self, posting: Posting) -> None:
        self._served, before, self._last = posting, self._last, self._owner
        if self._switch and before is not None and before is not self._owner:
            self._clock.call_at(self._clock.now + self._switch, self._start, posting)
        else:
            self._start(posting)

    def _start(self, posting: Posting) -> None:
        if self._served is posting:
            posting.queue.start(posting)

    def _pass(self) -> None:
        self._owner = None
        if self._stalled:
            poster = next(iter(self._stalled))
            posting = self._stalled.pop(poster)
            self._own(poster)
            if self._stalled:
                self._limit()
            self._serve(posting)

    def _limit(self) -> None:
        gone = ceil((self._clock.now - self._since) / self._slice)
        self._clock.call_at(self._since + max(1, gone) * self._slice, self._end_slice, self._number)

    def _end_slice(self, number: int) -> None:
        posting = self._served
        if number != self._number or not self._stalled or posting is None:
            return
        if posting.flow is None:  # it has hardly come to it
            self._over = True
            return
        left = posting.queue.stop(posting)
        if left < 1.0:  # it ends at this very instant
            posting.left, self._over = 0.0, True
            self._serve(posting)
            return
        posting.left, posting.flow, self._served = left, None, None
        assert self._owner is not None
        self._stalled[self._owner] = posting
        self._pass()


def copy_bytes(batch: Batch, source: SimBuffer, target: SimBuffer) -> None:
    """Move the contents of *batch* at once: all is read before anything is written."""
    if source is target:
        write_pieces(batch, target, [piece.copy() for piece in read_pieces(batch, source)])
    elif source.touched or target.touched:  # else zeros would be put in the place of zeros
        move(source.contents, target.touch(), batch.source_offset, batch.target_offset, batch.size)


def read_pieces(batch: Batch, source: SimBuffer) -> list[Bytes]:
    """Return views of what the descriptors of *batch* cover at the source."""
    contents = source.contents
    ends = zip(batch.source_offset.tolist(), (batch.source_offset + batch.size).tolist(), strict=True)
    return [contents[start:end] for start, end in ends]


def write_pieces(batch: Batch, target: SimBuffer, pieces: list[Bytes]) -> None:
    """Put *pieces*, one for each descriptor of *batch*, where they belong at the target."""
    written = target.touch()
    for to, piece in zip(batch.target_offset.tolist(), pieces, strict=True):
        written[to : to + len(piece)] = piece


def part_of(batch: Batch, first: int, end: int) -> Batch:
    """Return the descriptors of bytes *first* to *end* of *batch*, counted over its descriptors; ends may be cut."""
    if first <= 0 and end >= batch.nbytes:
        return batch
    ends = np.cumsum(batch.size)
    starts = ends - batch.size
    low, high = np.maximum(starts, first), np.minimum(ends, end)
    inside = low < high
    skipped, size = (low - starts)[inside], (high - low)[inside]
    source, target = batch.source_offset[inside] + skipped, batch.target_offset[inside] + skipped
    return Batch(batch.source, batch.target, source, target, size)


def _zeros(size: int) -> npt.NDArray[np.uint8]:
    if size < 1 << 20:
        return np.zeros(size, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)
