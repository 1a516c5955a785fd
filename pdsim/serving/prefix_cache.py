# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a prompt a prefix cache holds: blocks by their hashes, the least recently used evicted first.

A hash names a block together with all before it, as `hash_ids` of Mooncake's traces do, so a lookup ends at the
first block that is missing.  A block is used after those before it, so it is evicted before them and no lookup skips
one.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdsim.serving.requests import HASHED, Request, RequestTable

__all__ = ["PrefixCache", "hit_share"]


class PrefixCache:
    """A cache of at most *capacity* blocks of `HASHED` tokens; None is unlimited.

    Invariant: a block is never held without those before it in the same prompt, because they are always used later.

    >>> cache = PrefixCache(capacity=2)
    >>> cache.insert(Request(0.0, 1024, 1, None, (7, 8)))
    >>> cache.match(Request(0.0, 1500, 1, None, (7, 8, 9))), cache.match(Request(0.0, 600, 1, None, (8,)))
    (1024, 512)
    """

    def __init__(self, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity must be >= 1 block or None, got {capacity}")
        self._capacity = capacity
        self._blocks: dict[int, int] = {}  # tokens of each, if there is a capacity the least recently used first
        self._oldest: list[int] = []  # blocks as they were ordered when this list was last made, the oldest last
        self._used: set[int] = set()  # since then

    def __len__(self) -> int:
        """Return the number of blocks that are held."""
        return len(self._blocks)

    def match(self, request: Request) -> int:
        """Return how many tokens of the prompt are held, from its start."""
        tokens = 0
        for block in request.hash_ids:
            held = self._blocks.get(block, 0)
            tokens += held
            if held < HASHED:  # a prompt may go on within a block that another has the beginning of
                break
        return min(tokens, request.input)

    def insert(self, request: Request) -> None:
        """Hold the prompt of *request*, and evict what is too much."""
        self._insert(request, 0)

    def use(self, request: Request) -> int:
        """Return what `match` does, and `insert`."""
        tokens = full = 0
        for block in request.hash_ids:
            held = self._blocks.get(block, 0)
            tokens += held
            if held < HASHED:
                break
            full += 1
        self._insert(request, full)
        return min(tokens, request.input)

    def _insert(self, request: Request, full: int) -> None:
        blocks, ids, whole = self._blocks, request.hash_ids, HASHED
        left = request.input - (len(ids) - 1) * whole  # tokens from the start of the last block on
        if self._capacity is None:  # nothing is ever evicted, so nobody asks which is the least recently used
            for block in reversed(ids[full:]):
                tokens = left if left < whole else whole  # noqa: FURB136
                if blocks.get(block, 0) < tokens:
                    blocks[block] = tokens
                left += whole
            return
        for block in reversed(ids[full:]):  # the first is the most recently used; there are dozens: calls take long
            held = blocks.get(block, 0)
            if held:
                del blocks[block]
            tokens = left if left < whole else whole  # noqa: FURB136
            blocks[block] = tokens if tokens > held else held  # noqa: FURB136
            left += whole
        for block in reversed(ids[:full]):
            del blocks[block]
            blocks[block] = whole
        self._used.update(ids)
        while len(blocks) > self._capacity:
            self._evict()

    def _evict(self) -> None:
        # The first of a dict from which the first are taken is found slowly, and an `OrderedDict` is slow at the
        # rest.
        if not self._oldest:
            self._oldest = list(reversed(self._blocks))
            self._used.clear()
        block = self._oldest.pop()
        if block not in self._used:
            del self._blocks[block]


def hit_share(requests: Iterable[Request], capacity: int | None = None) -> float | None:
    """Return the share of all prompt tokens that one cache holds when their request arrives.

    Each prompt is held from its arrival on, not from the end of its prefill.  None if no request has `hash_ids`.
    """
    if isinstance(requests, RequestTable) and requests.hash_ids is None:
        return None
    cache, held, tokens, hashed = PrefixCache(capacity), 0, 0, False
    for request in requests:
        hashed = hashed or bool(request.hash_ids)
        held += cache.use(request)
        tokens += request.input
    return held / tokens if hashed else None
