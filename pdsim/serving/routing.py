"""Router policies that draw: by a stream of their own, so that one run is like the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdsim.serving.workload import stream

__all__ = ["PowerOfTwo"]


class PowerOfTwo:
    """The less loaded of two instances drawn at random (Mitzenmacher, "The power of two choices", 2001)."""

    def __init__(self) -> None:
        self._random = stream(0, "router.power_of_two")

    def choose(self, able: Sequence[str], load: Mapping[str, int]) -> str:
        """Return that one of *able*; the first of those drawn among equals."""
        drawn: list[int] = self._random.choice(len(able), size=min(2, len(able)), replace=False).tolist()
        return min((able[index] for index in drawn), key=load.__getitem__)
