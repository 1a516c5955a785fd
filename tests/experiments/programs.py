"""Rank programs of the tests of this folder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from experiments.transfer.exchange import exchange
from pdsim.transfer import Program
from pdsim.transfer.job import Rank


class Remembering:
    """A device that remembers what it allocated."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.buffers: list[Any] = []

    def allocate(self, size: int, pool: str = "default") -> Any:
        self.buffers.append(self.device.allocate(size, pool))
        return self.buffers[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)


def write_a_byte_between_the_blocks(rank: Rank, **arguments: Any) -> Program:
    """Run `exchange`, but let one byte change that nobody was to write."""
    device = Remembering(rank.device)
    value = yield from _disturbed(replace(rank, device=device), device, arguments)
    return value


def _disturbed(rank: Rank, device: Remembering, arguments: dict[str, Any]) -> Program:
    def disturb() -> Any:
        yield rank.clock.timeout(1e-6)
        buffer = device.buffers[0]
        while True:  # wherever the blocks lie in the slot, one of these bytes lies between them
            for place in range(0, buffer.size, arguments["points"][0]["size"]):
                buffer.write(place, b"!")
            yield rank.clock.timeout(1e-6)

    rank.clock.process(disturb())
    return (yield from exchange(rank, **arguments))
