# SPDX-License-Identifier: Apache-2.0
"""Which pages of prompts are kept below GPU memory: in host memory, on an SSD, in a remote store.

Each tier evicts what was used least recently, by itself: a page may be in several.  So do SGLang's HiCache, vLLM's
offloading connector, LMCache and Mooncake Store.  Unknown here: bytes and time.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

TIERS = ("host", "ssd", "remote")
"""The fastest first."""

Origin = tuple[str, int]
"""The tier that a page is read from, and the node that it lies on there."""


class PageStore:
    """At most so many *pages* of one tier, by the hash of their tokens and all before them.

    >>> store = PageStore(2)
    >>> store.put([7, 8, 9], node=0)  # the end of a prompt is evicted first
    >>> store.find(7), store.find(9)
    (0, None)
    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._kept: OrderedDict[int, int] = OrderedDict()  # the node of each, the next to go first

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: int) -> int | None:
        """Return the node that has *key*; None if none has."""
        return self._kept.get(key)

    def touch(self, keys: Sequence[int]) -> None:
        """Count *keys* as used now."""
        for key in reversed(keys):
            if key in self._kept:
                self._kept.move_to_end(key)

    def put(self, keys: Sequence[int], node: int) -> None:
        """Keep *keys* on *node*, unless another one has them."""
        for key in reversed(keys):
            self._kept.setdefault(key, node)
            self._kept.move_to_end(key)
        while len(self._kept) > self.pages:
            self._kept.popitem(last=False)


class Tiers:
    """The *stores* of one instance on *node*, by tier; objects have *chunk* pages.

    *direct* are the tiers that are read when a request starts; what the others have is prefetched to host memory.
    """

    def __init__(
        self, stores: Mapping[str, PageStore], node: int = 0, chunk: int = 1, direct: Sequence[str] = TIERS
    ) -> None:
        self.stores = {tier: stores[tier] for tier in TIERS if tier in stores}
        self.node = node
        self.chunk = chunk
        self._direct = direct

    def find(self, keys: Sequence[int], skip: int, below: bool = False) -> list[Origin]:
        """Return where those of *keys* are that follow the first *skip*, as far as there are whole objects.

        With *below*, look also into tiers that are not direct.
        """
        stores = [(tier, store) for tier, store in self.stores.items() if below or tier in self._direct]
        origins: list[Origin] = []
        for key in keys[skip:]:
            for tier, store in stores:
                node = store.find(key)
                if node is not None:
                    origins.append((tier, node))
                    break
            else:
                break
        found = skip + len(origins)
        return origins[: max(0, found - found % self.chunk - skip)]

    def touch(self, keys: Sequence[int]) -> None:
        """Count *keys* as used now, in each tier that has them."""
        for store in self.stores.values():
            store.touch(keys)

    def lack(self, key: int) -> bool:
        """Return whether a tier has not *key*."""
        return any(store.find(key) is None for store in self.stores.values())

    def has(self, tier: str, key: int) -> bool:
        """Return whether *tier* is there and has *key*."""
        return tier in self.stores and self.stores[tier].find(key) is not None

    def missing(self, tier: str, keys: Sequence[int]) -> list[int]:
        """Return those of *keys* that *tier* has not."""
        return [key for key in keys if self.stores[tier].find(key) is None]

    def put(self, tier: str, keys: Sequence[int]) -> None:
        """Keep *keys* in *tier*, if there is one: they are there now."""
        if tier in self.stores:
            self.stores[tier].put(keys, self.node)
