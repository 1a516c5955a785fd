# SPDX-License-Identifier: Apache-2.0
"""The links of a machine, and which of them lie between two memories.

::

    nvlink   GPU memory - port out - port in - GPU memory          (a mesh has one link for each ordered pair)
    rdma     GPU memory - PCIe out - card tx - card rx - PCIe in - GPU memory
             (to a card that is not the GPU's: PCIe out - switch up - other socket, if so - switch down - card tx;
             without GPUDirect: PCIe out - switch up - host memory, written and read - switch down - card tx)
    tcp      host memory - node's tcp out - links of a chain, if any - node's tcp in - host memory
    shm      host memory (read) - host memory (written)
    offload  GPU memory - PCIe - host memory              (`Topology.offload`: KV that a GPU has no room for)
    tier     SSD, or remote store - card rx, or another node's host memory - card tx - card rx; then host memory
             (`Topology.tier`: prefixes that memory has no room for)
    exchange                                              (`Topology.exchange`: tokens and the experts of other GPUs)
             GPU memory - PCIe out - card tx - card rx - PCIe in - GPU memory
             GPU memory - port out - port in - GPU memory

Each direction of a port, a card or a bus is a link of its own; a memory is one link, for reads and writes.  For tcp
and shm, GPU memory is staged through the host.  The fabric between cards is free of contention: neither PFC nor ECN
is modelled, nor packets that cross.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
from simpy.events import Event

from pdsim.core.clock import Clock, fire
from pdsim.core.errors import ConfigError
from pdsim.sim.tcp import HopChain
from pdsim.transfer import Region

if TYPE_CHECKING:
    from pdsim.hardware.machine import Machine
    from pdsim.sim.network import Flow, Link, Network
    from pdsim.transfer.job import Place


@dataclass(frozen=True, slots=True)
class Site:
    """Where the memory of a rank lies, and the card through which it talks to other nodes."""

    node: int
    gpu: int | None  # None: the host
    card: int | None  # of the node's cards, or of its groups of *rails* cards; None: the machine has none

    @property
    def name(self) -> str:
        """Such as ``"node0/gpu3"`` or ``"node0/host"``."""
        return f"node{self.node}/host" if self.gpu is None else f"node{self.node}/gpu{self.gpu}"


@dataclass(frozen=True, slots=True)
class Route:
    """The way between two memories: what every byte passes, and the time that the way itself takes."""

    links: tuple[Link, ...]  # in physical order; a link that stands twice carries every byte twice
    latency: float  # seconds, on top of the engine's
    chain: HopChain | None = None  # whose round trip the latency is


class _Node:
    def __init__(self, machine: Machine, network: Network, name: str) -> None:
        host = machine.host
        self.memory = network.link(f"{name}/host/memory", host.memory_rate)
        self.tcp_out = network.link(f"{name}/tcp.out", host.tcp_rate)
        self.tcp_in = network.link(f"{name}/tcp.in", host.tcp_rate)
        self.loopback = network.link(f"{name}/tcp.loopback", host.tcp_rate)
        self.gpus: list[tuple[Link, Link, Link]] = []  # memory, PCIe out and in
        for index in range(machine.gpus):
            assert machine.gpu is not None
            rates = {"memory": machine.gpu.memory_rate, "pcie.out": machine.gpu.pcie, "pcie.in": machine.gpu.pcie}
            memory, out, into = (network.link(f"{name}/gpu{index}/{part}", rate) for part, rate in rates.items())
            self.gpus.append((memory, out, into))
        self.ports = _ports(machine, network, name)
        nic = machine.nic
        cards = range(nic.count // nic.rails)
        self.tx = [network.link(f"{name}/nic{card}/tx", nic.rails * nic.rate) for card in cards]
        self.rx = [network.link(f"{name}/nic{card}/rx", nic.rails * nic.rate) for card in cards]
        # of the PCIe switch of each card: to the host and from it; of each card: what GPUs of other sockets reach
        self.uplinks: list[tuple[Link, Link]] = []
        self.crossings: list[tuple[Link, Link]] = []
        if machine.gpu is not None and (nic.devices or not nic.gpudirect):
            for card in cards:
                switch, crossing = f"{name}/switch{card}", f"{name}/nic{card}/socket"
                pcie, far = nic.rails * machine.gpu.pcie, nic.far * nic.rails * nic.rate
                self.uplinks.append((network.link(f"{switch}/up", pcie), network.link(f"{switch}/down", pcie)))
                self.crossings.append((network.link(f"{crossing}.out", far), network.link(f"{crossing}.in", far)))
        self.storage: dict[str, tuple[Link, ...]] = {}  # of its SSDs and the remote store, once they are used
        self.hosts = 0  # ranks on the host so far


def _ports(machine: Machine, network: Network, name: str) -> dict[tuple[int, int], tuple[Link, ...]]:
    # A mesh has a link for each ordered pair, a switch a port out and a port in for each GPU; ports that nothing
    # joins have no entry.
    kind, rate = machine.interconnect.kind, machine.interconnect.rate
    port = "xgmi" if machine.vendor == "amd" else "nvlink"
    pairs = [(one, other) for one in range(machine.gpus) for other in range(machine.gpus) if one != other]
    if kind == "mesh":
        return {(a, b): (network.link(f"{name}/gpu{a}/{port}.gpu{b}", rate),) for a, b in pairs}
    if kind == "switch":
        out = [network.link(f"{name}/gpu{gpu}/{port}.out", rate) for gpu in range(machine.gpus)]
        into = [network.link(f"{name}/gpu{gpu}/{port}.in", rate) for gpu in range(machine.gpus)]
        return {(a, b): (out[a], into[b]) for a, b in pairs}
    return {}


class Topology:
    """All links of *machine*, made in *network*, and the ways between its memories."""

    def __init__(self, machine: Machine, network: Network) -> None:
        self.machine = machine
        self.network = network
        self.common: dict[str, Any] = {}  # what ranks of one run share, by name
        self._nodes = [_Node(machine, network, f"node{index}") for index in range(machine.nodes)]
        self._up: list[Link] = []  # the hops of `machine.link` toward nodes of a higher number, and of a lower
        self._down: list[Link] = []
        self.chain: HopChain | None = None
        if (wire := machine.link) is not None:
            share, hops = wire.segment / wire.mtu, range(machine.nodes - 1)
            self.chain = HopChain(wire)
            self._up = [network.link(f"link{hop}.up", wire.forward(hop) * share) for hop in hops]
            self._down = [network.link(f"link{hop}.down", wire.backward(hop) * share) for hop in hops]

    def site(self, place: Place) -> Site:
        """Return where a rank at *place* lies.

        GPU *g* has card ``g * cards // gpus`` if `Nic.devices` has it, else one of its socket, else of another one;
        ranks on the host take the cards of their node in turn.
        Raise a `ConfigError` if the machine has no such node or GPU.
        """
        machine, (node, gpu) = self.machine, (place.node, place.gpu)
        if not 0 <= node < machine.nodes:
            raise ConfigError(
                f"place.node={node}: {machine.name} has nodes 0 to {machine.nodes - 1}; take one of them"
            )
        if gpu is not None and not machine.gpus:
            raise ConfigError(f"place.gpu={gpu}: {machine.name} has no GPUs; take gpu=None, the host, or another hw")
        if gpu is not None and not 0 <= gpu < machine.gpus:
            raise ConfigError(f"place.gpu={gpu}: {machine.name} has GPUs 0 to {machine.gpus - 1}; take one of them")
        return Site(node, gpu, self._card(self._nodes[node], gpu))

    def around(self, site: Site, failed: Container[tuple[int, int]]) -> Site:
        """Return *site* with a card that is not among the *failed*, node and card: one of its socket if there is.

        It is as it was if its card works, or none does.
        """
        left = [card for card in self.machine.cards if (site.node, card) not in failed]
        if site.card is None or site.card in left or not left:
            return site
        return replace(site, card=left[0] if site.gpu is None else self._nearest(site.gpu, left))

    def memory(self, site: Site) -> Link:
        return self._out(site)[0]

    def offload(self, site: Site) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
        """Return the links from a GPU's memory at *site* to the memory of its host, and back; none on a host."""
        if site.gpu is None:
            return (), ()
        host = self._nodes[site.node].memory
        return (*self._out(site), host), (host, *reversed(self._in(site)))

    def tier(self, site: Site, tier: str, node: int, out: bool) -> tuple[Link, ...]:
        """Return the links from *tier* of *node*, as in `pdsim.kv.tiers`, to the host memory at *site*, or *out*."""
        own, there = self._nodes[site.node], self._nodes[node]
        if tier == "remote":
            links = (*self._storage("store", self._nodes[0], out), *self._cards(own, site.card, out))
        else:
            links = self._storage("ssd", there, out) if tier == "ssd" else ()
            if there is not own:
                far = () if tier == "ssd" else (there.memory,)
                links = (*far, *links, *self._cards(there, site.card, not out), *self._cards(own, site.card, out))
        return (*links, own.memory) if links else ()

    def _cards(self, node: _Node, card: int | None, out: bool) -> tuple[Link, ...]:
        if card is None:
            return (node.tcp_out if out else node.tcp_in,)
        return ((node.tx if out else node.rx)[card],)

    def _storage(self, kind: str, node: _Node, out: bool) -> tuple[Link, ...]:
        storage = getattr(self.machine.host, kind)
        rate, name = (storage.write, "write") if out else (storage.read, "read")
        if not rate:
            return ()
        key = f"{kind}.{name}"
        if key not in node.storage:
            at = "" if kind == "store" else f"node{self._nodes.index(node)}/host/"
            node.storage[key] = (self.network.link(at + key, rate),)
        return node.storage[key]

    def exchange(self, site: Site) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
        """Return the links of the GPU at *site* to GPUs of other nodes and back, and of its own node and back.

        Each rank of an engine sends as much as it gets, so its own links stand for both ends.
        """
        node = self._nodes[site.node]
        if site.gpu is None:
            return (), ()
        memory = self.memory(site)
        network: tuple[Link, ...] = ()
        if site.card is not None:
            out, into = self._to_card(site)
            network = (*out, node.tx[site.card], node.rx[site.card], *reversed(into))
        other = next((gpu for gpu in range(self.machine.gpus) if gpu != site.gpu), None)
        if self.machine.interconnect.kind != "switch" or other is None:
            return network, ()
        return network, (memory, node.ports[site.gpu, other][0], node.ports[other, site.gpu][1], memory)

    def route(self, kind: str, source: Site, target: Site) -> Route:
        """Return how bytes get from memory at *source* to that at *target* by *kind*, as in `EngineModel.path`.

        Raise a `ConfigError` if there is no such way on this machine.
        """
        return {"nvlink": self._nvlink, "rdma": self._rdma, "tcp": self._tcp, "shm": self._shm}[kind](source, target)

    def _card(self, node: _Node, gpu: int | None) -> int | None:
        gpus, cards = self.machine.gpus, len(node.tx)
        if not cards:
            return None
        usable: Sequence[int] = self.machine.cards if self.machine.nic.devices else range(cards)
        if gpu is None:
            node.hosts += 1
            return usable[(node.hosts - 1) % len(usable)]
        if (own := gpu * cards // gpus) in usable:
            return own
        return self._nearest(gpu, usable)

    def _nearest(self, gpu: int, usable: Sequence[int]) -> int:
        count = len(self._nodes[0].tx)
        near = [card for card in usable if self._socket(card, count) == self._socket(gpu, self.machine.gpus)]
        return (near or usable)[gpu % len(near or usable)]

    def _socket(self, index: int, count: int) -> int:
        return index * self.machine.host.sockets // count

    def _to_card(self, site: Site) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
        # from memory at *site* to its card, and, in the same order, what bytes from the card pass the other way
        node, nic, gpu, card = self._nodes[site.node], self.machine.nic, site.gpu, site.card
        out, into = self._out(site), self._in(site)
        if gpu is None or card is None or not node.uplinks:
            return out, into
        cards = len(node.tx)
        if (own := gpu * cards // self.machine.gpus) == card and nic.gpudirect:
            return out, into
        across = self._socket(gpu, self.machine.gpus) != self._socket(card, cards)
        there: tuple[Link, ...] = (node.memory,) * 2
        back = there
        if nic.gpudirect:
            there, back = ((link,) if across else () for link in node.crossings[card])
        (up, down), (card_up, card_down) = node.uplinks[own], node.uplinks[card]
        return (*out, up, *there, card_down), (*into, down, *back, card_up)

    def _nvlink(self, source: Site, target: Site) -> Route:
        if source.gpu is None or target.gpu is None:
            raise ConfigError(
                f"nvlink from {source.name} to {target.name}: it joins GPUs only; place both ranks on GPUs or "
                f"take a backend over tcp, rdma or shm"
            )
        if source.node != target.node:
            raise ConfigError(
                f"nvlink from {source.name} to {target.name}: it ends at the node; take a backend over rdma or tcp"
            )
        node = self._nodes[source.node]
        if source.gpu == target.gpu:
            return Route((self.memory(source),) * 2, 0.0)
        if self.machine.interconnect.kind == "none":
            raise ConfigError(
                f"nvlink from {source.name} to {target.name}: nothing joins the GPUs of {self.machine.name}; take a "
                f"backend over rdma, tcp or shm"
            )
        ports = node.ports[source.gpu, target.gpu]
        return Route((self.memory(source), *ports, self.memory(target)), self.machine.interconnect.latency)

    def _rdma(self, source: Site, target: Site) -> Route:
        if source.card is None or target.card is None:
            raise ConfigError(
                f"rdma from {source.name} to {target.name}: {self.machine.name} has no cards (nic.count=0); take a "
                f"backend over tcp, shm or nvlink"
            )
        cards = (self._nodes[source.node].tx[source.card], self._nodes[target.node].rx[target.card])
        out, into = self._to_card(source)[0], self._to_card(target)[1]
        return Route((*out, *cards, *reversed(into)), self.machine.nic.latency)

    def _tcp(self, source: Site, target: Site) -> Route:
        one, other = self._nodes[source.node], self._nodes[target.node]
        here, there = source.node, target.node
        hops = self._up[here:there] if here < there else self._down[there:here][::-1]
        wire = (one.loopback,) if one is other else (one.tcp_out, *hops, other.tcp_in)
        links = (*self._from_host(source), *wire, *self._into_host(target))
        return Route(links, 2 * self.delay(source, target), self.chain if hops else None)

    def delay(self, source: Site, target: Site) -> float:
        """Return how many seconds the links between nodes take one way, on top of `Host.tcp_latency`."""
        link = self.machine.link
        return 0.0 if link is None else abs(source.node - target.node) * link.delay

    def _shm(self, source: Site, target: Site) -> Route:
        if source.node != target.node:
            raise ConfigError(
                f"shm from {source.name} to {target.name}: memory is shared within a node only; take a backend over "
                f"rdma or tcp"
            )
        return Route((*self._from_host(source), *self._into_host(target)), 0.0)

    def _out(self, site: Site) -> tuple[Link, ...]:
        node = self._nodes[site.node]
        return (node.memory,) if site.gpu is None else node.gpus[site.gpu][:2]

    def _in(self, site: Site) -> tuple[Link, ...]:
        node = self._nodes[site.node]
        return (node.memory,) if site.gpu is None else node.gpus[site.gpu][::2]

    def _from_host(self, site: Site) -> tuple[Link, ...]:
        if site.gpu is None:
            return self._out(site)
        return (*self._out(site), *(self._nodes[site.node].memory,) * 2)

    def _into_host(self, site: Site) -> tuple[Link, ...]:
        if site.gpu is None:
            return self._in(site)
        return (*(self._nodes[site.node].memory,) * 2, *reversed(self._in(site)))


class EndpointAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `SimEndpoint.address` says, as JSON; good for one incarnation of a rank."""

    rank: str
    engine: str
    regions: list[Region]
    born: float = 0.0  # when the endpoint was made: a rank that is started again has another
    issue: int | msgspec.UnsetType = msgspec.UNSET  # how many proofs had been asked for, if any

    def __post_init__(self) -> None:
        # an address of the start has as many bytes from a compiled clock, which begins at 0.0 and not at 0
        if not self.born:
            msgspec.structs.force_setattr(self, "born", 0)


RATES = 8
"""Steps from a rate of an exchange to twice that: it is at most 9 % more than asked."""

Ways = tuple[Sequence["Link"], Sequence["Link"]]
"""Links there and back; or, of an exchange, those by way of other nodes and those within the node."""


class SideTraffic:
    """Flows of one rank's GPU that share links with its transfers; no contents move."""

    def __init__(self, clock: Clock, network: Network, offload: Ways = ((), ()), exchange: Ways = ((), ())) -> None:
        self._topology: Topology | None = None  # that `of` finds places in
        self._site: Site | None = None
        self._clock = clock
        self._network = network
        self._offload = offload
        self._exchange = exchange
        self._travelling: list[Flow] = []  # of the last exchange

    @classmethod
    def at(cls, site: Site, clock: Clock, network: Network, topology: Topology) -> SideTraffic:
        """Return what the GPU, or host, at *site* puts on the links of *topology*."""
        fabric = cls(clock, network, topology.offload(site), topology.exchange(site))
        fabric._topology, fabric._site = topology, site
        return fabric

    @property
    def node(self) -> int:
        """The node that it is on."""
        return 0 if self._site is None else self._site.node

    def common(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what all ranks of the run know by *name*; the first one *make*s it."""
        assert self._topology is not None, "made by SideTraffic.at"
        if name not in self._topology.common:
            self._topology.common[name] = make()
        return self._topology.common[name]

    def of(self, place: Place) -> SideTraffic:
        """Return what another GPU puts there: for a rank that stands for an engine of many."""
        assert self._topology is not None, "made by SideTraffic.at"
        return SideTraffic.at(self._topology.site(place), self._clock, self._network, self._topology)

    def offload(self, size: int, back: bool = False, rate: float = math.inf) -> Event:
        """Move *size* bytes to the host's memory, or *back*, at most at *rate*; on a host without a rate at once."""
        links = self._offload[back]
        if not links and rate == math.inf:
            return self._clock.timeout(0)
        done = self._clock.event()
        self._network.start(self._network.path(links, rate), size, self._carried, done)
        return done

    def tier(self, tier: str, size: int, objects: int, node: int = -1, out: bool = False, gpu: bool = True) -> Event:
        """Move *size* bytes, in *objects*, from *tier* of *node*, or this one (-1), into host memory or *out* of it.

        With *gpu* they go on to the GPU, as they come.
        """
        topology, site = self._topology, self._site
        assert topology is not None, "made by SideTraffic.at"
        assert site is not None, "made by SideTraffic.at"
        host, nic = topology.machine.host, topology.machine.nic
        node = site.node if node < 0 else node
        links = (*topology.tier(site, tier, node, out), *(self._offload[True] if gpu else ()))
        delay = nic.latency if tier == "remote" or node != site.node else 0.0
        if tier != "host":
            storage = host.store if tier == "remote" else host.ssd
            delay += storage.latency + objects * storage.object
        done, path = self._clock.event(), self._network.path(links)

        def start(_: None) -> None:
            self._network.start(path, size, self._carried, done)

        if delay:
            self._clock.call_at(self._clock.now + delay, start, None)
        else:
            start(None)
        return done

    def exchange(self, network: float, port: float, seconds: float) -> list[Event]:
        """Move bytes to GPUs of other nodes and to those of this one, spread over *seconds*, and as many back.

        What is left of the exchange before is dropped, for its forward is over.  Return an event for each way used.
        """
        for flow in self._travelling:
            self._network.abort(flow)
        self._travelling.clear()
        events = []
        for links, size in zip(self._exchange, (network, port), strict=True):
            if links and size:
                # a rate of few values, for each is a path; it is no less than asked, so that alone it ends in time
                rate = 2.0 ** (math.ceil(RATES * math.log2(size / seconds)) / RATES)
                done = self._clock.event()
                self._travelling.append(
                    self._network.start(self._network.path(links, rate), size, self._carried, done)
                )
                events.append(done)
        return events

    def _carried(self, done: Event) -> None:
        if not self._clock.stopped:
            fire(done)
