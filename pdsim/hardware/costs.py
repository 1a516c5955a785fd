# SPDX-License-Identifier: Apache-2.0
"""What transfer engines and collectives cost: each formula once, for the simulator and for fits alike.

Frozen data that a configuration fills in (`conf/backend`, `conf/collective`, `conf/calibration`).  Which links a
transfer crosses, and with whom it shares them, is the fabric's business and not known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from pdsim.core.units import NotNegativeInt, Positive, PositiveInt, Rate, Seconds, Share, Size


def _least(one: Any, other: Any) -> Any:  # of numbers, or of arrays
    return min(one, other) if isinstance(one, int | float) else np.minimum(one, other)


def _most(one: Any, other: Any) -> Any:
    return max(one, other) if isinstance(one, int | float) else np.maximum(one, other)


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """The *first* descriptors of a batch cost *extra* seconds each: doorbells of idle queue pairs, cold caches.

    A batch of *n* descriptors pays ``min(n, first) * extra`` on top of `EngineModel.posting`; several ramps add up.
    Published tables show the need: on Thor2 the cost of a descriptor falls over the first 16 queue pairs
    (`conf/calibration/thor2-write-1k.yaml`).
    """

    first: PositiveInt  # descriptors of a batch that cost more
    extra: Seconds  # more, for each of them


@dataclass(frozen=True, kw_only=True)
class InlineSaving:
    """Batches of up to *bytes* in all and up to *descriptors* that an engine moves within the call that posts them.

    It does so if nothing that it has posted otherwise is under way.  They take *saving* less, for nobody asks for
    their end.
    """

    bytes: Annotated[Size, "> 0"]  # most of a batch that is moved within the call that posts it
    descriptors: PositiveInt  # most of such a batch
    saving: Seconds = 0.0  # of posting and latency together

    def takes(self, descriptors: Any, nbytes: Any) -> Any:
        """Return whether a batch of so many *descriptors* and *nbytes* is one of them; numbers or arrays."""
        return (nbytes <= self.bytes) & (descriptors <= self.descriptors)


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """Random delays of simulated ranks, from 0 to these, drawn from the seed."""

    starts: Seconds = 0.0  # before a transfer is posted
    copies: Seconds = 0.0  # before a copy engine begins with a transfer


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Threads of an engine that post large batches while the caller waits.

    A batch of *least* descriptors or more is cut into pieces of ``max(n // threads, least)``, and each thread posts
    one: it takes as long as its longest piece.  NIXL's UCX backend does so with ``num_threads`` and
    ``split_batch_size`` (`nixlUcxThreadPoolEngine`).
    """

    threads: PositiveInt  # of the engine, among which a large batch is divided
    least: PositiveInt  # descriptors of a piece: smaller batches are not divided

    def longest(self, descriptors: Any) -> Any:
        """Return the descriptors that one thread posts of a batch of so many; a number or an array.

        >>> workers = Workers(threads=4, least=1024)
        >>> [workers.longest(count) for count in (1023, 1500, 8192)]
        [1023, 1024, 2048]
        """
        return _least(descriptors, _most(descriptors // self.threads, self.least))


@dataclass(frozen=True, kw_only=True)
class OptionCosts:
    """Costs of an engine that runs with these *options*, on top of its others.

    Seconds are added to those of the `EngineModel`, and *rate* is the share that is left of its rates.  *workers*
    take the place of its own.  *intervals*, from least to most, are those of *latency*, *descriptor* and *rate*.
    *errors*, ``mean``, ``median`` and ``p95``, are of samples left out, and hold instead of the calibration's.

    The first of `EngineModel.by_option` whose options all fit is applied, once, when a configuration is loaded.
    """

    options: Mapping[str, str]  # of `Engine.options`, all that are named here
    evidence: str = "assumed: nothing changes"  # of the numbers here, as a source has it
    latency: Seconds = 0.0  # more
    descriptor: Seconds = 0.0  # more, for each
    rate: Positive = 1.0  # share that is left of the engine's rates
    workers: Workers | None = None
    intervals: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # 95 % of sets of processes
    errors: Mapping[str, float] = field(default_factory=dict)  # mean, median and p95, of samples left out

    def chosen(self, options: Mapping[str, str]) -> bool:
        """Return whether these are the costs of an engine with *options*."""
        return all(options.get(name) == value for name, value in self.options.items())


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """What one engine costs on one kind of path.

    A transfer of *n* descriptors and *S* bytes takes two stages.  Posting occupies the poster for ``call + n *
    descriptor``, and for a *ramp* on top.  The wire carries ``S + n * wire_descriptor * r`` bytes over the path at a
    fair share, capped at *rate*, where *r* is what one transfer alone gets of path and queues, and starts when
    posting ends or, if *overlap*, when it starts.  If *pipelined* too, it starts when the first descriptor is
    posted, and ends no earlier than the last one's bytes can after its posting. The transfer is complete *latency*
    after both have ended.  (A sum for Mooncake's NVLink transport, a maximum for UCX and verbs: LogGP with g =
    *descriptor*.)  *in_order*, descriptors hold up the copies of the GPU that posts and no link that others share,
    and a rank's one thread is busy for *latency* too, for it asks for the end (4 x H100, `data/validation`).  NIXL's
    progress thread leaves a stream less than its *rate*, and the rest to other streams (`OptionCosts.rate`).

    A read takes *read* longer than a write, and each of its descriptors *read_descriptor* longer on the wire: what
    asking for the bytes costs, once and every time.  It has at most *read_rate*.

    *workers* post large batches: there a posting takes as long as that of the longest piece.

    A *small* batch takes ``small.saving`` less if nothing that its poster has posted is under way but such batches:
    so much less of *latency* and, where that is not enough, of *call*; never less than without both.
    """

    path: Annotated[str, "one of nvlink, rdma, tcp, shm"]  # links that it moves bytes over
    call: Seconds  # of posting a batch, besides its descriptors
    descriptor: Seconds  # of posting, for each one
    overlap: bool  # bytes move while descriptors are posted, instead of afterwards
    latency: Seconds  # from the last byte until the poster sees the end
    rate: Annotated[Rate, "> 0"] = math.inf  # of one transfer
    # of a copy with *streams*, after which its stream rests until it has had no more than *rate*; 0: no rest
    copy_rate: Rate = 0.0
    line: Rate = 0.0  # of the hardware that the rates were found on; 0: they do not depend on it
    wire_descriptor: Seconds = 0.0  # that each one occupies the wire for, besides its bytes
    read: Seconds = 0.0  # latency of a read beyond that of a write
    read_descriptor: Seconds = 0.0  # beyond *wire_descriptor*, of a read
    # of posting, beyond *descriptor*: of each one more than the largest batch before had, for which memory is taken
    fresh_descriptor: Seconds = 0.0
    read_rate: Annotated[Rate, "> 0"] = math.inf  # of one read, where it is slower than *rate*
    queues: PositiveInt = 1  # queue pairs or TCP streams to one peer
    # blocks to a peer that wait for their answers at once, over a `NetworkLink`; 0: all of a batch
    lanes: NotNegativeInt = 0
    # of one of them: all transfers to a peer share queues * queue_rate
    queue_rate: Annotated[Rate, "> 0"] = math.inf
    depth: NotNegativeInt = 0  # descriptors that may be outstanding to one peer; 0 is no limit
    full: Annotated[str, "one of wait, refuse"] = "wait"  # what posting does at the limit
    pipelined: bool = False  # with overlap
    in_order: bool = False  # the wire carries what a rank posts one transfer at a time, as a GPU's copy engine does
    # with *in_order*: it goes on with the same peer as long as there is something for that one
    streams: bool = False
    # with *in_order* and without *overlap*: all copies of a rank follow each other, and are over when all have ended
    one_stream: bool = False
    ramp: tuple[Ramp, ...] = ()
    small: InlineSaving | None = None  # batches that are done in the call that posts them
    workers: Workers | None = None  # threads of the engine that post large batches
    by_option: tuple[OptionCosts, ...] = ()  # by the engine's options; empty: they change nothing, or have done so

    def on_line(self, line: Rate) -> EngineModel:
        """Return this model on links of *line* bytes/s: its rates keep their share of the line rate."""
        if not self.line or not line or line == self.line:
            return self
        share = line / self.line
        return replace(
            self,
            line=line,
            rate=self.rate * share,
            copy_rate=self.copy_rate * share,
            read_rate=self.read_rate * share,
            queue_rate=self.queue_rate * share,
        )

    def on_cards(self, rate: Rate, rails: int, ports: int = 1) -> EngineModel:
        """Return this model with a transfer spread over *rails* cards of *rate*: each has queue pairs of its own.

        A queue pair has one of the *ports* that are bonded to a card, and no two the same while there are others.
        """
        own = replace(self, queue_rate=min(self.queue_rate, rate / ports)) if ports > 1 else self
        if rails == 1:
            return own
        names = ("rate", "read_rate", "queue_rate")
        return replace(own, **{name: getattr(own, name) * rails for name in names})

    def with_options(self, costs: OptionCosts) -> EngineModel:
        """Return this model with *costs* applied, and without other choices.

        *by_option* of the result is empty, so that the costs of options are never added twice.
        """
        return replace(
            self,
            latency=self.latency + costs.latency,
            descriptor=self.descriptor + costs.descriptor,
            rate=self.rate * costs.rate,
            copy_rate=self.rate if self.streams and costs.rate < 1.0 else self.copy_rate,
            read_rate=self.read_rate * costs.rate,
            queue_rate=self.queue_rate * costs.rate,
            workers=costs.workers or self.workers,
            by_option=(),
        )

    def posting(self, descriptors: Any) -> Any:
        """Return the seconds that a call with *descriptors* occupies its thread; a number or an array."""
        if self.workers is not None:
            descriptors = self.workers.longest(descriptors)
        seconds = self.call + descriptors * self.descriptor
        for ramp in self.ramp:
            seconds = seconds + _least(descriptors, ramp.first) * ramp.extra
        return seconds

    def inline_saving(self, descriptors: Any, nbytes: Any) -> tuple[Any, Any]:
        """Return the seconds of posting and of latency that a small batch on an idle engine saves; else 0."""
        if self.small is None:
            return 0.0, 0.0
        saving = self.small.saving * self.small.takes(descriptors, nbytes)
        late = _least(saving, self.latency)
        return _least(saving - late, self.call), late

    def fastest(self, *, read: bool) -> Rate:
        """Return the highest rate of one write, or of one *read*, in bytes/s; ``inf`` leaves it to the links."""
        return min(self.rate, self.read_rate) if read else self.rate

    def wire_overhead(self, narrowest: Rate, *, read: bool) -> float:
        """Return the bytes that links of *narrowest* could carry while a descriptor holds up a transfer."""
        seconds = self.wire_descriptor + (self.read_descriptor if read else 0.0)
        return seconds * min(self.fastest(read=read), narrowest) if seconds else 0.0

    def stages(self, descriptors: Any, nbytes: Any, narrowest: Rate = math.inf, *, read: bool = False) -> Any:
        """Return the seconds of posting, of the first descriptor's posting, of the wire, and of latency."""
        narrowest = min(narrowest, self.queues * self.queue_rate)
        held = descriptors * self.wire_overhead(narrowest, read=read)
        wire = (nbytes + held) / min(self.fastest(read=read), narrowest)
        early, late = self.inline_saving(descriptors, nbytes)
        latency = self.latency + (self.read if read else 0.0) - late
        return self.posting(descriptors) - early, self.posting(1) - early, wire, latency

    def isolated_time(self, descriptors: Any, nbytes: Any, narrowest: Rate = math.inf, *, read: bool = False) -> Any:
        """Return the seconds of an isolated write, or *read*, over links of *narrowest* bytes/s.

        Numbers give a number, arrays of one shape an array.
        """
        posting, first, wire, latency = self.stages(descriptors, nbytes, narrowest, read=read)
        if not self.overlap:
            return posting + wire + latency
        if not self.pipelined:
            return _most(posting, wire) + latency
        return _most(first + wire, posting + wire / descriptors) + latency


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A transfer engine: `conf/backend`.  One model for peers inside a node, one for peers across nodes.

    *intra* or *inter* is None where the engine does not connect such peers.  *options* are given to the real engine
    as they are.
    """

    name: str  # as a choice of ``backend``
    implementation: str  # the entry point that `target=real` loads
    vendors: tuple[str, ...]  # whose machines it runs on
    intra: EngineModel | None
    inter: EngineModel | None
    timeout: Annotated[Seconds, "> 0"] = 30.0  # deadline of a transfer
    threads: PositiveInt = 1  # of each rank that post
    serial: Share = 1.0  # share of posting that they do one at a time: `pdsim.sim.posting`
    between: Share = 0.0  # the same of the processes that post to one GPU
    # whether transfers go on over another card of the node when theirs fails; otherwise they fail
    failover: bool = False
    measured_on: tuple[str, ...] = ()  # the machines (`conf/hw`) that its own *measured* numbers hold for
    # for the real engine: environment variables and the like
    options: Mapping[str, str] = field(default_factory=dict)
    modelled: tuple[str, ...] = ()  # names of the options that have made its costs what they are: `OptionCosts`
    sources: Mapping[str, str] = field(default_factory=dict)

    def limits(self, nbytes: int, intra: float, inter: float) -> Iterator[tuple[str, float]]:
        """Yield the name and the rate of each model that is slower for *nbytes* than its link and than posting.

        *intra* and *inter* are the rates of the links in bytes/s: NVLink's, and the NIC's.
        """
        for name, model, line in (("intra", self.intra, intra), ("inter", self.inter, inter)):
            if model is None or model.path not in ("nvlink", "rdma"):
                continue
            if model.rate < line and nbytes / model.rate > model.posting(1):
                yield name, model.rate


@dataclass(frozen=True, kw_only=True)
class DeviceLine:
    """What an all-gather costs the GPU alone, by one of a library's protocols: ``latency + (n - 1) * S / rate``.

    It is the time between two events of a stream that the gather is queued on, without launch, host and waiting.
    """

    latency: Seconds  # of a gather on the GPU, however small
    rate: Annotated[Rate, "> 0"]  # bytes/s that one rank gets of all the others


@dataclass(frozen=True, kw_only=True)
class CollectiveModel:
    """What an all-gather costs on one kind of memory.

    *n* ranks with *S* bytes each take ``latency + (n - 1) * step + S / own_rate + (n - 1) * S / rate``, of which the
    last term is flows over the ranks' links, at a fair share and at most at *rate* out of each rank.  In a ``ring``
    each rank sends ``(n - 1) * S`` to the next one, ``direct`` is *S* from each rank to each other; over a switch
    both load every port alike.  *copies* is how many times more a byte passes the memory of the rank that it arrives
    at: two where it lands in a staging buffer and is copied from there.

    No call is over before the hosts are done with it.  One that does not follow the group's call before at once
    keeps them busy for *after_pause*, one on symmetric memory of a pool that has grown for *grown*; neither is added
    to what the call takes otherwise.

    All of this is what a caller sees who waits for each call, as `pdsim.transfer.group.Group` has it.  A library
    with *device* lines has another time, the GPU's own: that of the protocol which is the quickest for the size.  A
    program that queues gathers on a stream, as a model's forward does, pays that; a caller who waits for one on the
    bare library pays *launch* on top.

    *rate* is a bus bandwidth, what every rank's port carries each way.  What is reported otherwise is the
    algorithmic bandwidth, ``n * S / seconds``; nccl-tests' bus bandwidth is that times ``(n - 1) / n``.
    """

    path: Annotated[str, "one of nvlink, rdma, tcp, shm"]  # links that it moves bytes over
    pattern: Annotated[str, "one of ring, direct"]  # each rank sends to the next, or to every other
    latency: Seconds  # from the call of the last rank on
    step: Seconds  # more, for each rank but one
    rate: Annotated[Rate, "> 0"]  # bus bandwidth: what a rank's port carries each way
    # of what is not hidden: a rank's own piece, and filling the pipeline
    own_rate: Annotated[Rate, "> 0"] = math.inf
    copies: NotNegativeInt = 0  # times more that a byte passes the memory it arrives in
    after_pause: Seconds = 0.0  # from the call of the last rank on, where the ranks did something else before
    grown: Seconds = 0.0  # the same, in a pool that has grown
    device: tuple[DeviceLine, ...] = ()  # of the library's protocols; empty: not known
    stream: bool = False  # whether it costs what the device does, calls being queued: see `queued`
    launch: Seconds = 0.0  # of the host: from the call of the bare library to the device's start, and to see its end

    def before(self, ranks: int, size: float) -> Seconds:
        """Return the seconds from the last rank's call until *size* bytes of each of *ranks* move over the links."""
        if self.stream:
            return self.on_device(ranks, size) - (ranks - 1) * size / self.rate
        return self.latency + (ranks - 1) * self.step + size / self.own_rate

    def busy(self, *, paused: bool, grown: bool) -> Seconds:
        """Return the least seconds that a call keeps the hosts.

        *paused* says that the ranks did something else since the group's last call, *grown* that the pool has grown.
        """
        return max(self.after_pause if paused else 0.0, self.grown if grown else 0.0)

    def isolated_time(
        self, ranks: int, size: float, narrowest: Rate = math.inf, *, paused: bool = False, grown: bool = False
    ) -> Seconds:
        """Return the seconds of an isolated all-gather over links of *narrowest* bytes/s or more."""
        moved = (ranks - 1) * size / min(self.rate, narrowest)
        return max(self.before(ranks, size) + moved, self.busy(paused=paused, grown=grown))

    def on_device(self, ranks: int, size: float) -> Seconds:
        """Return the GPU's seconds for an isolated all-gather of *size* bytes of each of *ranks*.

        Raise `ValueError` if nobody has measured them.
        """
        if not self.device:
            raise ValueError("collective.device has no lines for this memory: the GPU's own time is not known")
        return min(line.latency + (ranks - 1) * size / min(line.rate, self.rate) for line in self.device)

    def queued(self) -> CollectiveModel:
        """Return the model of gathers that a program queues on a stream."""
        steady = replace(self, after_pause=0.0, grown=0.0)
        if not self.device:
            return steady
        return replace(steady, stream=True, rate=min(self.rate, max(line.rate for line in self.device)))


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A library of collectives: `conf/collective`.

    To reserve *size* bytes for each of *n* ranks, or to grow by them, takes ``n * grow_latency + size / grow_rate``:
    the ranks make their memory known to one another.

    *plain* and *symmetric* say what gathers cost on memory of each kind.
    """

    name: str  # as a choice of ``collective``
    implementation: str  # the entry point that `target=real` loads
    plain: CollectiveModel
    symmetric: CollectiveModel
    pool: Annotated[Size, "> 0"] = 4 << 30  # of each rank's symmetric pool, reserved before the first use
    grow: bool = True  # whether it may grow at run time
    grow_latency: Seconds  # of each rank
    grow_rate: Annotated[Rate, "> 0"]  # bytes/s by which the pool grows, after *grow_latency*
    measured_on: tuple[str, ...] = ()  # the machines (`conf/hw`) that its *measured* numbers hold for
    # whose time a call takes: the caller's, who waits for each, or, queued, the "device"'s
    timing: Annotated[str, "one of caller, device"] = "caller"
    check: bool = True  # compare sizes between ranks before anything moves; on real ranks that is a round trip
    timeout: Annotated[Seconds, "> 0"] = 30.0  # of a call, until the group is given up
    sources: Mapping[str, str] = field(default_factory=dict)
