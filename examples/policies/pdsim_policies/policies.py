# SPDX-License-Identifier: Apache-2.0
"""A scheduling policy and a router policy."""

from collections.abc import Mapping, Sequence

from pdsim.serving.policies import FirstCome, Prompt


class ShortestFirst(FirstCome):
    """Prefill the prompt with the fewest tokens left."""

    def prefill(self, queue: Sequence[Prompt], budget: int) -> tuple[int, int]:
        """Return the place of that prompt in *queue*, and as many of its tokens as *budget* allows."""
        left = [prompt.request.input - prompt.done for prompt in queue]
        index = min(range(len(queue)), key=left.__getitem__)
        return index, min(budget, left[index])


class Pinned:
    """Send every request to the first instance that is connected."""

    def choose(self, able: Sequence[str], load: Mapping[str, int]) -> str:  # noqa: ARG002 a protocol
        """Return the first of *able*."""
        return able[0]
