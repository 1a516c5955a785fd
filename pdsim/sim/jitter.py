# SPDX-License-Identifier: Apache-2.0
"""What makes simulated starts as uneven as real ones: delays that are drawn from a seed.

Ranks of a simulation start at one instant to the last bit, so their copies meet, share a port and part at one
instant, again and again; on a machine such convoys break up.  Without a `Jitter`, nothing here is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdsim.sim.faults import uniforms

if TYPE_CHECKING:
    from pdsim.core.units import Seconds
    from pdsim.hardware.costs import Jitter

__all__ = ["Draws"]


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
