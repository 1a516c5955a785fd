# SPDX-License-Identifier: Apache-2.0
"""What hybrid models keep of a request beside the keys and values of its tokens.

Three components, of which a model has any number:

- ``mamba``: one slot a request, in which every mamba layer keeps its convolution and its recurrent state;
- ``window``: keys and values of the layers with sliding-window attention, in a smaller pool of pages, of which a
  request needs only those that its window touches;
- ``index``: one row a token beside its keys and values, the same on every rank (sparse attention), in the very pages
  of the request.

All of it is handed over once, with the last chunk.  Unknown here: who writes to whom (`pdsim.kv.mapping`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pdsim.kv.pages import PagePool, Pages, SlotPool

__all__ = ["COMPONENTS", "StatePool", "StateShape", "Tensor", "stage_layers", "window_span"]

COMPONENTS = ("mamba", "window", "index")
"""In the order in which they lie in a region and in which messages name their rows."""


@dataclass(frozen=True)
class Tensor:
    """What a mamba layer keeps in one tensor: *dim_bytes* bytes in each dimension.

    The dimensions come in *groups*, each of which is divided over the tensor-parallel ranks by itself.  A
    convolution over q, k and v has three: a rank keeps its share of each, so that its slice of the whole is not
    contiguous.

    >>> Tensor(groups=(4096, 1024), dim_bytes=6).nbytes(tp=4)
    7680
    """

    groups: tuple[int, ...]
    dim_bytes: int

    def __post_init__(self) -> None:
        if not self.groups or min(self.groups) < 1 or self.dim_bytes < 1:
            raise ValueError(f"groups={self.groups} and dim_bytes={self.dim_bytes} must be >= 1")

    def local(self, tp: int) -> tuple[int, ...]:
        """Return the dimensions of each group on each of *tp* ranks.  Raise a `ValueError` if they do not divide."""
        if any(group % tp for group in self.groups):
            raise ValueError(f"mamba dimensions {self.groups} over tp={tp}: tp must divide each of them; lower tp")
        return tuple(group // tp for group in self.groups)

    def nbytes(self, tp: int) -> int:
        """Return the bytes of a slot in one layer on each of *tp* ranks."""
        return sum(self.local(tp)) * self.dim_bytes


@dataclass(frozen=True)
class StateShape:
    """Which layers keep what: layer *i* is ``pattern[i % len(pattern)]``.

    ``a`` is full attention, ``w`` attention over the last *window* tokens, ``m`` a mamba layer that keeps the
    tensors *mamba*.  Layers with full attention keep *index_bytes* more of each token, 0 without sparse attention.

    >>> StateShape(pattern="wwa", window=1024).layers("a", range(8))
    (2, 5)
    """

    pattern: str = "a"
    window: int = 0
    mamba: tuple[Tensor, ...] = ()
    index_bytes: int = 0

    def __post_init__(self) -> None:
        if "a" not in self.pattern or set(self.pattern) - set("awm"):
            raise ValueError(f"pattern={self.pattern!r} must be of a, w and m, with at least one a (full attention)")
        if self.window < 0 or bool(self.window) != ("w" in self.pattern):
            raise ValueError(f"window={self.window} must be > 0 exactly if pattern={self.pattern!r} has a w")
        if bool(self.mamba) != ("m" in self.pattern):
            raise ValueError(f"mamba={self.mamba} must name tensors exactly if pattern={self.pattern!r} has an m")
        if self.index_bytes < 0:
            raise ValueError(f"index_bytes must be >= 0, got {self.index_bytes}")

    @property
    def components(self) -> tuple[str, ...]:
        """Those of `COMPONENTS` that there are."""
        have = {"mamba": bool(self.mamba), "window": bool(self.window), "index": bool(self.index_bytes)}
        return tuple(name for name in COMPONENTS if have[name])

    def layers(self, kind: str, among: range) -> tuple[int, ...]:
        """Return the layers of *kind* (a, w or m) *among* these."""
        return tuple(layer for layer in among if self.pattern[layer % len(self.pattern)] == kind)


def stage_layers(layers: int, pp: int, stage: int) -> range:
    """Return which of *layers* the *stage* of *pp* pipeline stages has, one after the other.

    Where *pp* does not divide them, the last ``layers % pp`` stages have one more (as in SGLang).  Raise a
    `ValueError` if a stage would have none.

    >>> [stage_layers(8, 3, stage) for stage in range(3)]
    [range(0, 2), range(2, 5), range(5, 8)]
    """
    if not 1 <= pp <= layers:
        raise ValueError(f"pp={pp} over {layers} layers: every stage needs at least one; lower pp")
    base, more = divmod(layers, pp)
    without = pp - more
    first = stage * base + max(0, stage - without)
    return range(first, first + base + (stage >= without))


def window_span(tokens: int, window: int, page_size: int) -> tuple[int, int]:
    """Return the first page of a request of *tokens* tokens that its window touches, and how many it touches.

    *window* and *page_size* are tokens.  A window that begins within a page touches all of it:

    >>> window_span(tokens=300, window=128, page_size=64)
    (2, 3)
    """
    first = max(0, tokens - window) // page_size
    return first, -(-tokens // page_size) - first


class StatePool:
    """The slots and window pages of one group, a request at a time; all ranks of the group use the same numbers.

    A request takes one mamba slot, and window pages for the most that its window can touch while it grows, so
    nothing that runs can run out.  Models without mamba or window layers take none of them.

    Owners are rooms.  What is allocated for one is released together.
    """

    def __init__(self, shape: StateShape, page_size: int, slots: int, window_pages: int) -> None:
        self._shape = shape
        self._components = shape.components
        self._page_size = page_size
        self.slots = SlotPool(slots) if shape.mamba else None
        self.window = PagePool(window_pages) if shape.window else None

    def __len__(self) -> int:
        """Return the number of owners."""
        return max((len(pool) for pool in (self.slots, self.window) if pool is not None), default=0)

    def need(self, tokens: int, reach: int) -> int:
        """Return the window pages that a request of *tokens* needs which grows to *reach* tokens."""
        now = window_span(tokens, self._shape.window, self._page_size)[1]
        if reach <= tokens:
            return now
        # as it moves on, it may begin anywhere within its first page
        return min(-(-self._shape.window // self._page_size) + 1, -(-reach // self._page_size))

    def allocate(self, owner: int, tokens: int, reach: int, pages: Pages) -> tuple[Pages, ...] | None:
        """Return the rows of each component that *owner* gets, or None if there are too few.

        *tokens* are those of the handoff and *reach* those that it grows to, *pages* its pages of keys and values,
        where index rows lie too.
        """
        if not self._components:
            return ()
        rows: dict[str, Pages] = {"index": pages}
        if self.window is not None:
            window = self.window.allocate(owner, self.need(tokens, reach))
            if window is None:
                return None
            rows["window"] = window
        if self.slots is not None:
            slot = self.slots.allocate(owner)
            if slot is None:
                if self.window is not None:
                    self.window.release(owner)
                return None
            rows["mamba"] = ((slot, 1),)
        return tuple(rows[name] for name in self._components)

    def release(self, owner: int) -> None:
        """Take the rows of *owner* back.  Raise a `KeyError` if it has none."""
        for pool in (self.slots, self.window):
            if pool is not None:
                pool.release(owner)
