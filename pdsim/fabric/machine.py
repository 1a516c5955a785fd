"""What is modelled: machines and engines, as plain frozen data that a configuration fills in.

Rates are what software reaches, not what a data sheet promises, unless the source says so.  Each class checks its own
ranges; `sources` says for each number where it comes from, as ``"kind: text"`` with one of the kinds of `EVIDENCE`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdsim.ranges import not_negative, one_of, positive
from pdsim.units import Flops, Rate, Seconds, Size

__all__ = [
    "EVIDENCE",
    "Change",
    "Collective",
    "CollectiveModel",
    "Copies",
    "Engine",
    "EngineModel",
    "Gpu",
    "Host",
    "Interconnect",
    "Machine",
    "Nic",
    "Ramp",
    "Small",
    "Wire",
]

EVIDENCE = ("measured", "published", "datasheet", "assumed")
"""From the strongest to the weakest; a result carries the weakest of the numbers that it used."""


@dataclass(frozen=True, kw_only=True)
class Copies:
    """What `pdsim.transfer.Device.copy` costs beside the memory's bandwidth, on one kind of device.

    A copy of *n* pieces keeps its rank's copies busy for ``call + n * piece`` before its first byte: the pieces are
    planned and checked on the host, their table goes to the device, a kernel is launched over them, and its end is
    seen.  What a kernel loses to small pieces is part of *piece*.  Where the device's last copy was another rank's it
    takes *turn* more: kernels of different processes do not run side by side.
    """

    call: Seconds = 0.0
    piece: Seconds = 0.0
    turn: Seconds = 0.0

    def __post_init__(self) -> None:
        not_negative("copies", call=self.call, piece=self.piece, turn=self.turn)

    def busy(self, pieces: int, turns: bool = False) -> Seconds:
        """Return for how long a copy of so many *pieces* keeps its rank's copies from the next one.

        *turns* says whether the device's last copy was another rank's.
        """
        return self.call + pieces * self.piece + (self.turn if turns else 0.0)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator."""

    name: str
    memory: Size
    memory_rate: Rate  # of its memory, reads and writes together
    compute: Flops  # dense bf16
    pcie: Rate  # to the host or a NIC, each direction
    copies: Copies = field(default_factory=Copies)
    rest: Seconds = 0.0  # without a transfer, after which its copy engines sleep
    rouse: Seconds = 0.0  # from the next transfer's start until they move its first byte

    def __post_init__(self) -> None:
        not_negative("gpu", rest=self.rest, rouse=self.rouse)
        positive("gpu", memory=self.memory, memory_rate=self.memory_rate, compute=self.compute, pcie=self.pcie)


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """What joins the GPUs of a node: a ``switch`` (NVSwitch), a ``mesh`` of pairs (xGMI), or ``none``."""

    kind: str
    rate: Rate  # of a GPU's port, each direction; for a mesh, of the link between two GPUs
    latency: Seconds = 0.0

    def __post_init__(self) -> None:
        one_of("interconnect", ("switch", "mesh", "none"), kind=self.kind)
        not_negative("interconnect", latency=self.latency, rate=self.rate)
        if self.kind != "none":
            positive("interconnect", rate=self.rate)


@dataclass(frozen=True, kw_only=True)
class Nic:
    """The network cards of a node and the fabric between nodes, which is taken to be free of contention."""

    count: int  # per node; GPU g uses card g * count // gpus
    rate: Rate  # of one card, each direction
    latency: Seconds = 0.0  # one way, from card to card

    def __post_init__(self) -> None:
        not_negative("nic", count=self.count, latency=self.latency)
        if self.count:
            positive("nic", rate=self.rate)


@dataclass(frozen=True, kw_only=True)
class Host:
    """A node's processor side."""

    memory: Size
    memory_rate: Rate  # reads and writes together
    tcp_rate: Rate  # of all TCP traffic of the node, each direction; loopback included
    tcp_latency: Seconds  # one way, of a control message
    wake: Seconds = 0.0  # from what a program waits for until it has acted: a message, a notification, a computation
    cold: Seconds = 0.0  # more, of a program that has had nothing to act upon for longer than *rest*
    rest: Seconds = 0.0
    copies: Copies = field(default_factory=Copies)  # of ranks without a GPU

    def __post_init__(self) -> None:
        positive("host", memory=self.memory, memory_rate=self.memory_rate, tcp_rate=self.tcp_rate)
        not_negative("host", tcp_latency=self.tcp_latency, wake=self.wake, cold=self.cold, rest=self.rest)


@dataclass(frozen=True, kw_only=True)
class Change:
    """What happens to a hop of a `Wire`, both ways, from *start* to *end*.

    It is ``slow`` and carries *share* of what it otherwise does, it is ``stall``ed and goes on where it was, or it is
    ``cut`` and loses what is on the wire.
    """

    kind: str
    start: Seconds  # after the start of the job
    end: Seconds
    share: float = 0.0
    hop: int = 0

    def __post_init__(self) -> None:
        one_of("hw.link.changes", ("slow", "stall", "cut"), kind=self.kind)
        not_negative("hw.link.changes", start=self.start, share=self.share, hop=self.hop)
        if not self.start < self.end:
            raise ValueError(f"hw.link.changes.end must be > start={self.start}, got {self.end}")
        if (self.kind == "slow") != (self.share > 0.0) or self.share >= 1.0:
            raise ValueError(
                f"hw.link.changes.share must be > 0 and < 1 for slow and left out otherwise, got {self.share}"
            )


@dataclass(frozen=True, kw_only=True)
class Wire:
    """A link of known rate and delay that joins nodes in a chain: node 0 to 1 by hop 0, node 1 to 2 by hop 1.

    All TCP traffic between nodes shares it, and ``target=real`` makes it (`backends.testbed`).  It loses nothing but
    what a `Change` says.
    """

    rate: Rate  # of all packets, headers included, toward nodes of a higher number
    delay: Seconds  # one way, of each hop
    back: Rate = 0.0  # toward nodes of a lower number; 0 is as *rate*
    rates: tuple[Rate, ...] = ()  # of each hop, where they differ, toward nodes of a higher number
    mtu: int = 9000  # bytes of a packet
    backlog: Size = 16 << 20  # bytes that wait at a hop before what feeds it is held up
    initial: int = 10  # segments that a stream sends before the first answer
    window: Size = 4 << 20  # bytes that a stream has under way at most: net.ipv4.tcp_wmem
    filled: float = 5 / 6  # share of the window that is under way when a full stream is cut: 2/3 to 1, by chance
    timeout: Seconds = 0.2  # until a segment is sent again, on top of the round trip
    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        positive(
            "hw.link", rate=self.rate, backlog=self.backlog, **{f"rates[{i}]": r for i, r in enumerate(self.rates)}
        )
        positive("hw.link", initial=self.initial, window=self.window, timeout=self.timeout)
        not_negative("hw.link", delay=self.delay, back=self.back)
        if not 0.0 < self.filled <= 1.0:
            raise ValueError(f"hw.link.filled must be > 0 and <= 1, got {self.filled}")
        if not 576 <= self.mtu <= 65000:
            raise ValueError(f"hw.link.mtu must be from 576 to 65000 bytes, got {self.mtu}")

    def forward(self, hop: int) -> Rate:
        """Return what *hop* carries toward nodes of a higher number, in bytes/s of packets."""
        return self.rates[hop] if self.rates else self.rate

    def backward(self, hop: int) -> Rate:
        """Return what *hop* carries toward nodes of a lower number."""
        return self.back or self.forward(hop)

    @property
    def segment(self) -> int:
        """Bytes of data in a packet: IP and TCP take 20 each and time stamps 12."""
        return self.mtu - 52


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nodes of one kind: `conf/hw`."""

    name: str
    vendor: str
    nodes: int
    gpus: int  # per node; 0 is a machine of hosts only
    gpu: Gpu | None
    interconnect: Interconnect
    nic: Nic
    host: Host
    link: Wire | None = None  # between nodes, for TCP; without one only the hosts limit it
    guest: bool = False  # ``target=real`` emulates it, with an RDMA device (`backends.guest`)
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("hw", ("nvidia", "amd", "cpu"), vendor=self.vendor)
        if self.link is not None:
            self._check_link(self.link)
        positive("hw", nodes=self.nodes)
        not_negative("hw", gpus=self.gpus)
        if self.gpus and self.gpu is None:
            raise ValueError(f"hw.gpus={self.gpus}, but hw.gpu does not say what a GPU is")
        if self.guest and (self.gpus or self.nodes > 1):
            raise ValueError(f"hw.guest is one host without GPUs, got hw.nodes={self.nodes} and hw.gpus={self.gpus}")

    def _check_link(self, link: Wire) -> None:
        if not 2 <= self.nodes <= 250:
            raise ValueError(f"hw.nodes must be from 2 to 250 with hw.link, which joins them, got {self.nodes}")
        hops = self.nodes - 1
        if link.rates and len(link.rates) != hops:
            raise ValueError(f"hw.link.rates must have a rate for each of {hops} hops, got {len(link.rates)}")
        if beyond := [change.hop for change in link.changes if change.hop >= hops]:
            raise ValueError(f"hw.link.changes: hop must be < {hops}, got {beyond[0]}")


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """What the *first* descriptors of a batch cost *extra*, each: doorbells of idle queue pairs, cold caches."""

    first: int
    extra: Seconds

    def __post_init__(self) -> None:
        positive("ramp", first=self.first)
        not_negative("ramp", extra=self.extra)


@dataclass(frozen=True, kw_only=True)
class Small:
    """Batches of up to *bytes* in all and up to *descriptors* that an engine moves within the call that posts them.

    It does so if nothing that it has posted otherwise is under way.  They take *saves* less: nobody asks for their end.
    """

    bytes: Size
    descriptors: int
    saves: Seconds = 0.0

    def __post_init__(self) -> None:
        positive("small", bytes=self.bytes, descriptors=self.descriptors)
        not_negative("small", saves=self.saves)

    def takes(self, descriptors: int, nbytes: float) -> bool:
        """Return whether a batch of so many *descriptors* and *nbytes* is one of them."""
        return nbytes <= self.bytes and descriptors <= self.descriptors


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """What one engine costs on one kind of path.

    A transfer of *n* descriptors and *S* bytes takes two stages.  Posting occupies the poster for ``call + n *
    descriptor``, and for a *ramp* on top.  The wire carries ``S + n * wire_descriptor * rate`` bytes over the path at
    a fair share, capped at *rate*, and starts when posting ends or, if *overlap*, when it starts.  If *pipelined* too,
    it starts when the first descriptor is posted, and ends no earlier than the last one's bytes can after its posting.
    The transfer is complete *latency* after both have ended.  (A sum for Mooncake's NVLink transport, a maximum for
    UCX and verbs: LogGP with g = *descriptor*.)

    A read takes *read* longer than a write, and each of its descriptors *read_descriptor* longer on the wire: what
    asking for the bytes costs, once and every time.  It has at most *read_rate*.

    A *small* batch takes ``small.saves`` less if nothing that its poster has posted is under way but such batches: so
    much less of *latency* and, where that is not enough, of *call*; never less than without both.
    """

    path: str  # "nvlink", "rdma", "tcp" or "shm"
    call: Seconds
    descriptor: Seconds
    overlap: bool
    latency: Seconds
    rate: Rate = math.inf  # of one transfer
    wire_descriptor: Seconds = 0.0
    read: Seconds = 0.0  # latency of a read beyond that of a write
    read_descriptor: Seconds = 0.0  # beyond *wire_descriptor*, of a read
    read_rate: Rate = math.inf  # of one read, where it is slower than *rate*
    queues: int = 1  # queue pairs or TCP streams to one peer
    lanes: int = 0  # blocks to a peer that wait for their answers at once, over a `Wire`; 0: all of a batch
    queue_rate: Rate = math.inf  # of one of them: all transfers to a peer share queues * queue_rate
    depth: int = 0  # descriptors that may be outstanding to one peer; 0 is no limit
    full: str = "wait"  # what posting does at the limit: "wait" or "refuse"
    pipelined: bool = False  # with overlap
    in_order: bool = False  # the wire carries what a rank posts one transfer at a time, as a GPU's copy engine does
    ramp: tuple[Ramp, ...] = ()
    small: Small | None = None  # batches that are done in the call that posts them

    def __post_init__(self) -> None:
        one_of("engine", ("nvlink", "rdma", "tcp", "shm"), path=self.path)
        one_of("engine", ("wait", "refuse"), full=self.full)
        not_negative(
            "engine",
            call=self.call,
            descriptor=self.descriptor,
            latency=self.latency,
            wire_descriptor=self.wire_descriptor,
            read=self.read,
            read_descriptor=self.read_descriptor,
            depth=self.depth,
            lanes=self.lanes,
        )
        positive("engine", rate=self.rate, read_rate=self.read_rate, queues=self.queues, queue_rate=self.queue_rate)
        if self.pipelined and not self.overlap:
            raise ValueError("engine.pipelined must be false where overlap is, got True")

    def posting(self, descriptors: int) -> Seconds:
        """Return how long *descriptors* in one call keep the poster."""
        seconds = self.call + descriptors * self.descriptor
        for ramp in self.ramp:
            seconds += min(descriptors, ramp.first) * ramp.extra
        return seconds

    def saved(self, descriptors: int, nbytes: float) -> tuple[Seconds, Seconds]:
        """Return what a batch that finds nothing under way saves, of posting and of latency: 0 unless it is *small*."""
        if self.small is None or not self.small.takes(descriptors, nbytes):
            return 0.0, 0.0
        late = min(self.small.saves, self.latency)
        return min(self.small.saves - late, self.call), late

    def fastest(self, *, read: bool) -> Rate:
        """Return the rate of one write, or of one *read*."""
        return min(self.rate, self.read_rate) if read else self.rate

    def held_up(self, narrowest: Rate, *, read: bool) -> float:
        """Return the bytes that a descriptor's handling on the wire, over links of *narrowest*, would have carried.

        Without a rate of its own, the engine holds up what the narrowest link would have carried.
        """
        seconds, rate = self.wire_descriptor + (self.read_descriptor if read else 0.0), self.fastest(read=read)
        return seconds * (rate if math.isfinite(rate) else narrowest) if seconds else 0.0

    def alone(self, descriptors: int, nbytes: float, narrowest: Rate = math.inf, *, read: bool = False) -> Seconds:
        """Return how long a write, or a *read*, takes with nothing in its way, over links of *narrowest* or more.

        It is what the simulator gives for an idle endpoint, less the latency of the way.
        """
        narrowest = min(narrowest, self.queues * self.queue_rate)
        wire = (nbytes + descriptors * self.held_up(narrowest, read=read)) / min(self.fastest(read=read), narrowest)
        early, late = self.saved(descriptors, nbytes)
        posting = self.posting(descriptors) - early
        latency = self.latency + (self.read if read else 0.0) - late
        if not self.overlap:
            return posting + wire + latency
        if not self.pipelined:
            return max(posting, wire) + latency
        return max(self.posting(1) - early + wire, posting + wire / descriptors) + latency


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A transfer engine: `conf/backend`.  One model for peers inside a node, one for peers across nodes."""

    name: str
    implementation: str  # the entry point that `target=real` loads
    vendors: tuple[str, ...]  # whose machines it runs on
    intra: EngineModel | None
    inter: EngineModel | None
    timeout: Seconds = 30.0  # deadline of a transfer
    options: Mapping[str, str] = field(default_factory=dict)  # for the real engine: environment variables and the like
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive("backend", timeout=self.timeout)
        if self.intra is None and self.inter is None:
            raise ValueError(f"backend {self.name!r} says neither what intra nor what inter costs")


@dataclass(frozen=True, kw_only=True)
class CollectiveModel:
    """What an all-gather costs on one kind of memory.

    *n* ranks with *S* bytes each take ``latency + (n - 1) * step + S / own_rate + (n - 1) * S / rate``, of which the
    last term is flows over the ranks' links, at a fair share and at most at *rate* out of each rank.  In a ``ring``
    each rank sends ``(n - 1) * S`` to the next one, ``direct`` is *S* from each rank to each other; over a switch both
    load every port alike.  *copies* is how many times more a byte passes the memory of the rank that it arrives at:
    two where it lands in a staging buffer and is copied from there.

    No call is over before the hosts are done with it.  One that does not follow the group's call before at once keeps
    them busy for *cold*, one on symmetric memory of a pool that has grown for *grown*; neither is added to the rest.

    *rate* is a bus bandwidth, what every rank's port carries each way.  What is reported otherwise is the algorithmic
    bandwidth, ``n * S / seconds``; nccl-tests' bus bandwidth is that times ``(n - 1) / n``.
    """

    path: str  # "nvlink", "rdma", "tcp" or "shm"
    pattern: str  # "ring" or "direct"
    latency: Seconds  # from the call of the last rank on
    step: Seconds  # more, for each rank but one
    rate: Rate
    own_rate: Rate = math.inf  # of what is not hidden: a rank's own piece, and filling the pipeline
    copies: int = 0
    cold: Seconds = 0.0  # from the call of the last rank on, where the ranks did something else before
    grown: Seconds = 0.0  # the same, in a pool that has grown

    def __post_init__(self) -> None:
        one_of("collective", ("nvlink", "rdma", "tcp", "shm"), path=self.path)
        one_of("collective", ("ring", "direct"), pattern=self.pattern)
        not_negative("collective", latency=self.latency, step=self.step, copies=self.copies)
        not_negative("collective", cold=self.cold, grown=self.grown)
        positive("collective", rate=self.rate, own_rate=self.own_rate)

    def before(self, ranks: int, size: float) -> Seconds:
        """Return what passes before *size* bytes of each of *ranks* begin to move over the links."""
        return self.latency + (ranks - 1) * self.step + size / self.own_rate

    def busy(self, *, cold: bool, grown: bool) -> Seconds:
        """Return for how long a call keeps the hosts at least."""
        return max(self.cold if cold else 0.0, self.grown if grown else 0.0)

    def alone(
        self, ranks: int, size: float, narrowest: Rate = math.inf, *, cold: bool = False, grown: bool = False
    ) -> Seconds:
        """Return how long an all-gather takes with nothing in its way, over links that carry *narrowest* or more."""
        moved = (ranks - 1) * size / min(self.rate, narrowest)
        return max(self.before(ranks, size) + moved, self.busy(cold=cold, grown=grown))


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A library of collectives: `conf/collective`.

    To reserve *size* bytes for each of *n* ranks, or to grow by them, takes ``n * grow_latency + size / grow_rate``:
    the ranks make their memory known to one another.
    """

    name: str
    implementation: str  # what `target=real` loads: "nccl", "symm_mem" or "gloo"
    plain: CollectiveModel
    symmetric: CollectiveModel
    pool: Size = 4 << 30  # of each rank's symmetric pool, reserved before the first use
    grow: bool = True  # whether it may grow at run time
    grow_latency: Seconds  # of each rank
    grow_rate: Rate
    check: bool = True  # compare sizes between ranks before anything moves; on real ranks that is a round trip
    timeout: Seconds = 30.0
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("collective", ("nccl", "symm_mem", "gloo"), implementation=self.implementation)
        positive("collective", pool=self.pool, grow_rate=self.grow_rate, timeout=self.timeout)
        not_negative("collective", grow_latency=self.grow_latency)
