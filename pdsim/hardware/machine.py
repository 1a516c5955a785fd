# SPDX-License-Identifier: Apache-2.0
"""What a machine is: nodes, GPUs, links, network cards and hosts, as frozen data that a configuration fills in.

Rates are what software reaches, not what a data sheet promises, unless the source says so; `sources` says for each
number where it comes from, as ``"kind: text"`` with one of the kinds of `EVIDENCE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pdsim.core.units import Flops, NotNegative, NotNegativeInt, PositiveInt, Rate, Seconds, Size

EVIDENCE = ("measured", "published", "datasheet", "assumed")
"""From the strongest to the weakest; a result carries the weakest of the numbers that it used."""

VENDORS = ("nvidia", "amd", "cpu")
"""Whose machines there are; ``cpu`` has no GPUs."""


@dataclass(frozen=True, kw_only=True)
class Copies:
    """What `pdsim.transfer.Device.copy` costs beside the memory's bandwidth, on one kind of device.

    A copy of *n* descriptors keeps its rank's copies busy for ``call + n * descriptor`` before its first byte: they
    are planned and checked on the host, their table goes to the device, a kernel is launched over them, and its end
    is seen.  What a kernel loses to small ones is part of *descriptor*.  Where the device's last copy was another
    rank's it takes *context_switch* more: kernels of different processes do not run side by side.
    """

    call: Seconds = 0.0  # of one call, however much it copies
    descriptor: Seconds = 0.0  # of each piece that is copied
    context_switch: Seconds = 0.0  # where the last copy on the device was another rank's

    def busy(self, descriptors: int, switched: bool = False) -> Seconds:
        """Return the seconds from a copy of *descriptors* until the rank's next copy can begin."""
        return self.call + descriptors * self.descriptor + (self.context_switch if switched else 0.0)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator: its memory, its peak, and what its copy engines and kernels cost beside the bytes.

    Numbers of products are in `conf/hw`, with their sources.
    """

    name: str  # such as H100: what measurements and tables of forwards are chosen by
    memory: Annotated[Size, "> 0"]  # bytes of its memory
    memory_rate: Annotated[Rate, "> 0"]  # of its memory, reads and writes together
    compute: Annotated[Flops, "> 0"]  # dense bf16
    compute_fp8: Flops = 0.0  # of matrices of 8-bit elements; 0: none, they run as bf16
    # multiprocessors, which take the tiles of a kernel in turn; 0: unknown, no tile waits
    processors: NotNegativeInt = 0
    pcie: Annotated[Rate, "> 0"]  # to the host or a NIC, each direction
    copies: Copies = field(default_factory=Copies)
    idle_after: Seconds = 0.0  # without a transfer, after which its copy engines sleep
    idle_wake: Seconds = 0.0  # then, from the next transfer's start until they move its first byte
    slice: Seconds = 0.0  # for which one process has them while others wait; 0: processes copy side by side
    process_switch: Seconds = 0.0  # of copies within it, which are kernels: until those of another process begin


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """What joins the GPUs of a node: a ``switch`` (NVSwitch), a ``mesh`` of pairs (xGMI), or ``none``.

    On a switch each GPU has one port of *rate*, which all its peers share.  In a mesh each pair has a link of its
    own, so a GPU with seven peers sends seven times *rate* in all.
    """

    kind: Annotated[str, "one of switch, mesh, none"]  # mesh: a link between every two GPUs
    rate: Rate  # of a GPU's port, each direction; for a mesh, of the link between two GPUs
    latency: Seconds = 0.0  # one way, from GPU to GPU


@dataclass(frozen=True, kw_only=True)
class Nic:
    """The network cards of a node and the fabric between nodes, assumed free of contention.

    Ranks of several GPUs may share a card: with 8 GPUs and 4 cards, GPUs 0 and 1 use card 0.  ``count=0`` is a
    machine without network cards, which needs no rate.

    A GPU's own card is on its PCIe switch.  Where *devices* leaves that out, the GPU takes one of its socket, or of
    another socket, where *far* of the rate is left.  GPUs with the same choice take the cards in turn.
    """

    count: NotNegativeInt  # per node; GPU g uses card g * count // gpus
    rate: Rate  # of one card, each direction
    latency: Seconds = 0.0  # one way, from card to card
    devices: tuple[NotNegativeInt, ...] = ()  # cards that engines may use, as in UCX_NET_DEVICES; empty: all
    rails: PositiveInt = 1  # neighbouring cards that a transfer is spread over evenly: UCX_MAX_RMA_RAILS
    # of a card that are bonded to one device, RoCE LAG: a queue pair stays on one, with its share of *rate*
    ports: PositiveInt = 1
    far: Annotated[float, "> 0 and <= 1"] = 1.0  # share of the rate that a GPU of the other socket reaches
    gpudirect: bool = True  # cards reach the memory of GPUs; else bytes pass through the host's


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A store for KV that does not fit into memory.

    A call that moves *n* objects takes ``latency + n * object`` and, of bytes, what *read* or *write* allows to all
    calls together.
    """

    read: Rate = 0.0  # 0: it is never the limit
    write: Rate = 0.0  # as *read*
    latency: Seconds = 0.0  # of a request, however large
    object: Seconds = 0.0  # more, of each


@dataclass(frozen=True, kw_only=True)
class Host:
    """A node's processor side: memory that all its ranks share, TCP, and the latency of programs.

    Control messages take *tcp_latency* one way and share *tcp_rate* with TCP engines.  *wake*, *idle_wake* and
    *idle_after* are the host latency of a rank's program; on H200 they are fitted to handoffs (`pdsim refit
    handoffs`).
    """

    memory: Annotated[Size, "> 0"]  # bytes, of a node
    memory_rate: Annotated[Rate, "> 0"]  # reads and writes together
    sockets: PositiveInt = 1  # that GPUs and cards are spread over
    tcp_rate: Annotated[Rate, "> 0"]  # of all TCP traffic of the node, each direction; loopback included
    tcp_latency: Seconds  # one way, of a control message
    wake: Seconds = 0.0  # from what a program waits for until it has acted: a message, a notification, a computation
    idle_wake: Seconds = 0.0  # more, of a program that has had nothing to act upon for longer than *idle_after*
    idle_after: Seconds = 0.0  # without anything to act upon
    copies: Copies = field(default_factory=Copies)  # of ranks without a GPU
    # the node's SSDs together: one of PCIe 4, as data sheets of 2023 have it
    ssd: Storage = Storage(read=6.8e9, write=4e9, latency=1e-4)
    store: Storage = field(default_factory=Storage)  # a remote store of all nodes, beside the network cards


@dataclass(frozen=True, kw_only=True)
class LinkChange:
    """What happens to a hop of a `NetworkLink`, both ways, from *start* to *end*.

    It is ``slow`` and carries *share* of what it otherwise does, it is ``stall``ed and goes on where it was, or it
    is ``cut`` and loses what is on the wire.
    """

    # it carries less, waits and goes on, or loses what is on the wire
    kind: Annotated[str, "one of slow, stall, cut"]
    start: Seconds  # after the start of the job
    end: Seconds  # as *start*
    share: NotNegative = 0.0  # of its rate that is left, of kind=slow
    hop: NotNegativeInt = 0  # which of the link's hops, from 0


@dataclass(frozen=True, kw_only=True)
class NetworkLink:
    """A link of known rate and delay that joins nodes in a chain: node 0 to 1 by hop 0, node 1 to 2 by hop 1.

    All TCP traffic between nodes shares it, and ``target=real`` makes it (`backends.emulation.link.emulated_link`).
    It loses nothing but what a `LinkChange` says.

    Rates count whole packets.  Defaults of *initial*, *window* and *timeout* are those of Linux.
    """

    rate: Annotated[Rate, "> 0"]  # of all packets, headers included, toward nodes of a higher number
    delay: Seconds  # one way, of each hop
    back: Rate = 0.0  # toward nodes of a lower number; 0 is as *rate*
    rates: tuple[Annotated[Rate, "> 0"], ...] = ()  # of each hop, where they differ, toward nodes of a higher number
    mtu: Annotated[int, ">= 576 and <= 65000"] = 9000  # bytes of a packet
    backlog: Annotated[Size, "> 0"] = 16 << 20  # bytes that wait at a hop before what feeds it is held up
    initial: PositiveInt = 10  # segments that a stream sends before the first answer
    window: Annotated[Size, "> 0"] = 4 << 20  # bytes that a stream has under way at most: net.ipv4.tcp_wmem
    # share of the window that is under way when a full stream is cut: 2/3 to 1, by chance
    filled: Annotated[float, "> 0 and <= 1"] = 5 / 6
    timeout: Annotated[Seconds, "> 0"] = 0.2  # until a segment is sent again, on top of the round trip
    changes: tuple[LinkChange, ...] = ()

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
    """Nodes of one kind, as `conf/hw` describes them.

    A machine with ``gpus=0`` has ranks on its hosts only; one with *link* has two or more nodes, which it joins.
    *sources* says of each number, by dotted key, where it comes from: ``{"gpu.memory": "datasheet: H20 SXM"}``.
    """

    name: str  # as results and calibrations call it
    vendor: Annotated[str, "one of nvidia, amd, cpu"]  # whose GPUs: backends run on those of some
    nodes: PositiveInt  # alike, joined by their network cards
    gpus: NotNegativeInt  # per node; 0 is a machine of hosts only
    gpu: Gpu | None
    interconnect: Interconnect
    nic: Nic
    host: Host
    link: NetworkLink | None = None  # between nodes, for TCP; without one only the hosts limit it
    price: NotNegative | None = None  # of a GPU for an hour, in any currency: what `experiment=capacity` counts
    prefill: str = ""  # another hw, whose GPUs prefill has, on nodes of its own; cards and hosts are as here
    guest: bool = False  # ``target=real`` emulates it, with an RDMA device (`backends.emulation.guest`)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def cards(self) -> list[int]:
        """The cards of a node, or groups of *rails* cards, that ranks use."""
        nic = self.nic
        every = range(nic.count // nic.rails)
        return [card for card in every if not nic.devices or card * nic.rails in nic.devices]
