# SPDX-License-Identifier: Apache-2.0
"""What a GPU puts on its links beside transfers: KV on its way to host memory, and tokens to experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from simpy.events import Event

from pdsim.core.clock import Clock, fire

if TYPE_CHECKING:
    from pdsim.sim.flows.network import Flow, Link, Network
    from pdsim.sim.topology import Site, Topology
    from pdsim.transfer.job import Place

__all__ = ["RATES", "SideTraffic", "Ways"]

RATES = 8
"""Steps from a rate of an exchange to twice that: it is at most 9 % more than asked."""

Ways = tuple[Sequence["Link"], Sequence["Link"]]
"""Links there and back; or, of an exchange, those by way of other nodes and those within the node."""


class SideTraffic:
    """Flows of one rank's GPU that share links with its transfers; no contents move.

    *offload* and *exchange* are what `pdsim.sim.topology.Topology` returns for its site, empty on a host.
    """

    def __init__(self, clock: Clock, network: Network, offload: Ways = ((), ()), exchange: Ways = ((), ())) -> None:
        self.topology: Topology | None = None  # that `of` finds places in
        self._clock = clock
        self._network = network
        self._offload = offload
        self._exchange = exchange
        self._travelling: list[Flow] = []  # of the last exchange

    @classmethod
    def at(cls, site: Site, clock: Clock, network: Network, topology: Topology) -> SideTraffic:
        """Return what the GPU, or host, at *site* puts on the links of *topology*."""
        found = cls(clock, network, topology.offload(site), topology.exchange(site))
        found.topology = topology
        return found

    def of(self, place: Place) -> SideTraffic:
        """Return what another GPU puts there: for a rank that stands for an engine of many.

        Raise a `ValueError` if this one was not made by `at`.
        """
        if self.topology is None:
            raise ValueError(f"no topology is known that {place} could be in: make the traffic by SideTraffic.at")
        return SideTraffic.at(self.topology.site(place), self._clock, self._network, self.topology)

    def offload(self, size: int, back: bool = False, rate: float = math.inf) -> Event:
        """Move *size* bytes to the host's memory, or *back*, at a fair share of the links there, at most at *rate*.

        *rate* is in bytes/s.  On a host there is nowhere to go: what has no rate takes no time there.
        """
        links = self._offload[back]
        if not links and rate == math.inf:
            return self._clock.timeout(0)
        done = self._clock.event()
        self._network.start(self._network.path(links, rate), size, self._carried, done)
        return done

    def exchange(self, network: float, port: float, seconds: float) -> list[Event]:
        """Move bytes to GPUs of other nodes and to those of this one, spread over *seconds*, and as many back.

        Where the links carry other bytes too it takes longer.  What is left of the exchange before is dropped, for
        its forward is over.  Return an event for each way that is used.
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
