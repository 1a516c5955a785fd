# SPDX-License-Identifier: Apache-2.0
"""What all endpoints of a simulated job share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from pdsim.sim.posting_threads import PostingShare, PostingThreads
from pdsim.transfer import Region

if TYPE_CHECKING:
    from pdsim.core.clock import Clock
    from pdsim.hardware.costs import Engine
    from pdsim.hardware.machine import Gpu
    from pdsim.sim.copy_engine import CopyEngine
    from pdsim.sim.faults import Chance, Observer
    from pdsim.sim.flows.network import Network
    from pdsim.sim.jitter import Draws
    from pdsim.sim.topology import Site, Topology

__all__ = ["EndpointAddress", "Fabric"]


class EndpointAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `pdsim.sim.sim_endpoint.SimEndpoint.address` says, as JSON.

    An address is good for one life of a rank; whoever connects with an older one gets `PeerLost`.
    """

    rank: str
    engine: str
    regions: list[Region]
    life: float = 0.0  # when the endpoint was made: a rank that is started again has another

    def __post_init__(self) -> None:
        """Have an address of the start as many bytes from a compiled clock, which begins at 0.0 and not at 0."""
        if not self.life:
            msgspec.structs.force_setattr(self, "life", 0)


@dataclass(frozen=True)
class Fabric:
    """What all endpoints of a job share.  *clock* is the job's, on which the hardware lives.

    *chance* is there only where faults are injected, *draws* only where something jitters: without both nothing
    is left to chance.  Endpoints find each other by rank in *endpoints*, where a rank that is started again takes
    the place of its last life.
    """

    clock: Clock
    network: Network
    topology: Topology
    engine: Engine
    chance: Chance | None = None
    observer: Observer | None = None
    gpu: Gpu | None = None  # the machine's
    draws: Draws | None = None  # of what jitters
    crowded: frozenset[tuple[int, int]] = frozenset()  # node and GPU of those that serve several ranks
    endpoints: dict[str, Any] = field(default_factory=dict)  # `SimEndpoint`s, by rank
    copiers: dict[str, CopyEngine] = field(default_factory=dict)  # by the site whose ranks they serve
    shares: dict[str, PostingShare] = field(default_factory=dict)  # the same, of GPUs

    def threads(self, site: Site) -> PostingThreads | None:
        """Return the posting threads of a rank at *site*; None if nothing keeps its only one from its work.

        Ranks of one GPU that serves several (*crowded*) share what their threads must do one at a time.
        """
        engine, crowded = self.engine, (site.node, site.gpu) in self.crowded
        if engine.threads == 1 and not (crowded and engine.between):
            return None
        share = PostingShare(self.clock, engine.serial, engine.between)
        if crowded:
            share = self.shares.setdefault(site.name, share)
        return PostingThreads(share, engine.threads)
