# SPDX-License-Identifier: Apache-2.0
"""Bytes that say what they are, so that what arrived can be compared with what was sent.

Every eight bytes of a head (or latent row, or index row) hold room, plane, head and token; every eight of a metadata
row hold room and buffer.  The dimensions of a mamba layer are few bytes each, so theirs are drawn from room, tensor,
layer and dimension.  Used wherever a device keeps contents: on real memory and on the model with ``memory=tracked``.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pdsim.kv.layout import AUX_ROWS, REGION, HostMetadata, KvLayout, PageTable, Tensor, owned_heads, window_span
from pdsim.kv.messages import Chunk, RegisterPool
from pdsim.kv.pages import Pages, sources
from pdsim.kv.policy import Policy
from pdsim.transfer import Buffer
from pdsim.transfer.job import Rank

INLINE = Policy()
"""Everything is posted at once, and metadata lies on the device."""

EVERY = 1 << 62
"""A number above that of any room: contents of all of them are written and compared."""

Bytes = npt.NDArray[np.uint8]
Marks = tuple[tuple[int, int, int], ...]
"""Spans of tokens, each with its first, the one after its last, and what marks them."""

_TOKEN, _MARK, _HEAD, _PLANE, _ROOM = 0, 17, 24, 36, 48  # first bit of each field
_MARKED = 1 << _MARK
"""The first tokens, whose contents can be marked; a later token has its own bits there."""
_AUX, _INDEX = 0xFFF, 0xFFE  # no head has these numbers
_SMALL = 1 << 13
"""Bytes of rows that are kept: small pieces cost more to make than to compare."""


class Contents:
    """What the pool of tensor-parallel rank *tp_rank*, laid out as *layout* in *buffer*, holds or should hold.

    Metadata lies in *aux*, at the same offsets, if that is given.  Every byte follows from room, layer, head, token
    and position.  `fill` methods are called on the prefill side before bytes move, `verify` methods on the decode
    side after: they return "" or what is wrong.
    """

    def __init__(self, buffer: Buffer, layout: KvLayout, tp_rank: int, aux: Buffer | None = None) -> None:
        self.layout = layout
        self.marks: Callable[[int, range], Marks] | None = None
        """Says by which chunk each of some tokens of a room was computed, if bytes are to carry that too."""
        self.computed: Callable[[int], range] | None = None
        """Says which tokens of a room are computed here, whole pages of others before them, if no others are to be
        written."""
        self.prompt: Callable[[int], int] | None = None
        """Says by which number the tokens of a room go, if several rooms may share the pages of one prompt."""
        self.gathered = False
        """Whether keys and values are stored by `store`, as ranks gather them, and not by `fill`."""
        self._buffer = buffer
        self._metadata = aux or buffer
        self._tp_rank = tp_rank
        self._heads = range(1) if layout.shape.latent_bytes else owned_heads(layout.shape, layout.tp, tp_rank)
        self._kv, *self._state = layout.tables

    def fill(self, room: int, pages: Pages, first_token: int) -> None:
        """Write into *pages*, in this order, what a forward over *room* from *first_token* on would leave there."""
        for number, table in enumerate(self.layout.tables):
            if table.component == "index" or (table.component == "kv" and not self.gathered):
                self._fill(table, max(0, number - 1), room, pages, first_token)

    def fill_again(self, room: int, pages: Pages, first_token: int) -> None:
        """Write into *pages* what `fill` does, also what others have computed, and index rows of those tokens."""
        own, self.computed = self.computed, None
        self.fill(room, pages, first_token)
        self.computed = own

    def page_bytes(self, page: int) -> bytes:
        """Return the keys and values of *page*, and its index rows."""
        return b"".join([self._buffer.read(offset, size) for offset, size in self._planes(page)])

    def put_page(self, page: int, data: bytes) -> None:
        """Write what `page_bytes` returned into *page*."""
        begin = 0
        for offset, size in self._planes(page):
            self._buffer.write(offset, data[begin : begin + size])
            begin += size

    def token_rows(self, room: int, plane: int, tokens: range) -> Bytes:
        """Return the rows of *tokens* in the *plane*-th plane of keys and values: uint8 of shape (token, row)."""
        return next(self._rows(self._kv, 0, room, tokens, (self._kv.planes[plane],)))

    def store(self, plane: int, pages: Pages, rows: Bytes) -> None:
        """Write *rows* of tokens, from the first of *pages* on, into the *plane*-th plane of keys and values."""
        start, token = self._kv.offsets.item(plane), 0
        for page, count in pages:
            part = rows[token : token + count * self._kv.tokens]
            for offset, piece in self._pieces(self._kv, start + page * self._kv.item, part):
                self._buffer.write(offset, piece.tobytes())
            token += count * self._kv.tokens

    def fill_state(self, room: int, rows: tuple[Pages, ...], tokens: int, held: int = 0) -> None:
        """Write into *rows*, which name those of each component, the state of *room* after *tokens* tokens.

        Index rows are those of its pages without the first *held* ones.
        """
        for number, table, pages, first in self._parts(rows, tokens, held):
            self._fill(table, number, room, pages, first)

    def fill_aux(self, room: int, slot: int) -> None:
        """Write the first-token metadata of *room* into *slot*."""
        for index, (offset, size) in enumerate(self._aux(slot)):
            self._metadata.write(offset, _aux_row(room, index, size))

    def verify(self, room: int, pages: Pages, tokens: int, held: int = 0) -> str:
        """Compare *pages*, which are those after the first *held*, with the first *tokens* tokens of *room*."""
        return self.differs(self._kv, 0, room, pages, range(held * self.layout.page_size, tokens))

    def verify_state(self, room: int, rows: tuple[Pages, ...], tokens: int, held: int = 0) -> str:
        """Compare *rows* with what `fill_state` writes."""
        for number, table, pages, first in self._parts(rows, tokens, held):
            reason = self.differs(table, number, room, pages, range(first, tokens if table.tensor is None else 1))
            if reason:
                return f"{table.component}: {reason}"
        return ""

    def verify_aux(self, room: int, slot: int) -> str:
        """Compare *slot* with the metadata of *room*."""
        for index, (offset, size) in enumerate(self._aux(slot)):
            if self._metadata.read(offset, size) != _aux_row(room, index, size):
                return f"room {room}: metadata buffer {index} of slot {slot} holds something else"
        return ""

    def differs(self, table: PageTable, number: int, room: int, pages: Pages, tokens: range) -> str:
        """Compare *pages* of *table*, the state's *number*-th, with *tokens* of *room*."""
        wrong = []
        for page, stretch in _stretches(table, pages, tokens.start):
            piece = range(stretch.start, min(stretch.stop, tokens.stop))
            for place, expected in enumerate(self._rows(table, number, room, piece) if piece else ()):
                offset = table.offsets.item(place) + page * table.item
                parts = self._pieces(table, offset, expected)
                if any(self._buffer.read(start, part.size) != part.tobytes() for start, part in parts):
                    wrong.append((place, offset, piece, expected))
        if not wrong:
            return ""
        place, offset, piece, expected = min(wrong, key=lambda one: one[0])
        actual = np.empty_like(expected)
        for start, part in self._pieces(table, offset, actual):
            part[:] = np.frombuffer(self._buffer.read(start, part.size), np.uint8).reshape(part.shape)
        row = int(np.argmax((actual != expected).any(axis=1)))
        byte = int(np.argmax(actual[row] != expected[row]))
        what = _describe(actual[row], byte, marked=self.marks is not None and piece.stop <= _MARKED)
        return f"room {room} plane {table.planes[place]} token {piece.start + row} byte {byte}: {what}"

    def _planes(self, page: int) -> Iterator[tuple[int, int]]:
        for table in self.layout.tables:
            if table.component in ("kv", "index"):
                for start in table.offsets.tolist():
                    yield start + page * table.item, table.item

    def _aux(self, slot: int) -> Iterator[tuple[int, int]]:
        return zip(self.layout.aux_offsets(slot).tolist(), AUX_ROWS, strict=True)

    def _parts(self, rows: tuple[Pages, ...], tokens: int, held: int) -> Iterator[tuple[int, PageTable, Pages, int]]:
        state, page_size = self.layout.shape.state, self.layout.page_size
        pages = dict(zip(state.components, rows, strict=True))
        first = {"window": window_span(tokens, state.window, page_size)[0] * page_size, "index": held * page_size}
        for number, table in enumerate(self._state):
            yield number, table, pages[table.component], first.get(table.component, 0)

    def _fill(self, table: PageTable, number: int, room: int, pages: Pages, first_token: int) -> None:
        own = self.computed(room) if self.computed is not None and table.tensor is None else None
        for page, tokens in _stretches(table, pages, first_token):
            offset = page * table.item
            if own is not None:
                first = max(tokens.start, own.start)
                offset += (first - tokens.start) // table.tokens * table.item
                tokens = range(first, min(tokens.stop, own.stop))
            for place, rows in enumerate(self._rows(table, number, room, tokens) if tokens else ()):
                for start, piece in self._pieces(table, table.offsets.item(place) + offset, rows):
                    self._buffer.write(start, piece.tobytes())

    def _pieces(self, table: PageTable, offset: int, rows: Bytes) -> Iterator[tuple[int, Bytes]]:
        # Views of parts of *rows* and where they lie: with pages by heads, each head of a page.
        if not self.layout.by_heads or table.component not in ("kv", "window"):
            yield offset, rows
            return
        width = rows.shape[1] // len(self._heads)
        for page, first in enumerate(range(0, len(rows), table.tokens)):
            own, start = rows[first : first + table.tokens], offset + page * table.item
            for head in range(len(self._heads)):
                yield start + head * table.tokens * width, own[:, head * width : (head + 1) * width]

    def _rows(
        self, table: PageTable, number: int, room: int, tokens: range, planes: Sequence[int] = ()
    ) -> Iterator[Bytes]:
        # In each of *planes*, or all: uint8 of shape (token, row).  Several small ones are made at a time.
        planes = planes or table.planes
        if table.tensor is not None:
            for plane in planes:
                yield _slot(table.tensor, self.layout.tp, self._tp_rank, (room, number, plane))
            return
        heads = (_INDEX,) if table.component == "index" else self._heads
        room = room if self.prompt is None else self.prompt(room)
        marks = self.marks(room, tokens) if self.marks is not None and tokens.stop <= _MARKED else ()
        row = table.item // table.tokens
        size = len(tokens) * row
        make, many = (_few_rows, _SMALL // size) if size <= _SMALL else (_token_rows, 1)
        for first in range(0, len(planes), many):
            yield from make(heads, row, room, tuple(planes[first : first + many]), tokens, marks)


class KvPool:
    """The registered pool of *rank*, the *index*-th of its instance and the *tp_rank*-th that divides the heads.

    `rows` is where first-token metadata lies.  Where memory has contents, those of rooms up to number *checked* are
    written by `fill` and compared by `verify`.
    """

    def __init__(
        self, rank: Rank, layout: KvLayout, index: int, tp_rank: int, policy: Policy = INLINE, checked: int = EVERY
    ) -> None:
        self.rank = rank
        self.layout = layout
        self.index = index
        self.policy = policy
        self._checked = checked
        buffer = rank.device.allocate(layout.size, policy.memory_pool)
        self.region = rank.endpoint.register(buffer, REGION)
        self.rows: Buffer = HostMetadata(layout) if policy.metadata_on == "host" else buffer
        self.contents = Contents(buffer, layout, tp_rank, self.rows)

    def register(self, incarnation: str, peer: str) -> RegisterPool:
        """Return the message with which ranks of *peer* can reach this pool of *incarnation*."""
        return RegisterPool(peer, self.rank.endpoint.address(), incarnation, self.index, self.layout)

    def checks(self, room: int) -> bool:
        """Return whether the contents of *room* are written and compared."""
        return self.rank.device.holds_bytes and room <= self._checked

    def fill(self, chunk: Chunk, metadata: bool) -> None:
        """Write what the forward of *chunk* leaves here, with the last one state and *metadata*."""
        if not self.checks(chunk.room):
            return
        self.contents.fill(chunk.room, sources(chunk.runs), chunk.first_page * self.layout.page_size)
        if chunk.last:
            self.contents.fill_state(chunk.room, tuple(map(sources, chunk.state)), chunk.tokens, chunk.held)
            if metadata:
                self.contents.fill_aux(chunk.room, chunk.slots[0])

    def verify(
        self, room: int, tokens: int, pages: Pages, state: tuple[Pages, ...], held: int = 0, slot: int = -1
    ) -> str:
        """Compare what *room* has here, with metadata if it has a *slot*; return "" or what is wrong."""
        if not self.checks(room):
            return ""
        reason = self.contents.verify(room, pages, tokens, held)
        reason = reason or self.contents.verify_state(room, state, tokens, held)
        return reason or (self.contents.verify_aux(room, slot) if slot >= 0 else "")


def _stretches(table: PageTable, pages: Pages, token: int) -> Iterator[tuple[int, range]]:
    for page, count in pages:
        tokens = range(token, token + count * table.tokens)
        yield page, tokens
        token = tokens.stop


def _word(room: int, plane: int, head: int) -> int:
    return (room & 0xFFFF) << _ROOM | (plane & 0xFFF) << _PLANE | (head & 0xFFF) << _HEAD


def _token_rows(
    heads: range | tuple[int, ...],
    row: int,
    room: int,
    planes: tuple[int, ...],
    tokens: range,
    marks: Marks,
) -> Bytes:
    # In each of *planes* a word for each head, repeated to the head's size; marks go between token and head.
    numbers = np.arange(tokens.start, tokens.stop, dtype=np.uint64) << np.uint64(_TOKEN)
    for first, end, mark in marks:
        numbers[first - tokens.start : end - tokens.start] |= np.uint64(mark % (1 << _HEAD - _MARK) << _MARK)
    places = [[_word(room, plane, head) for head in heads] for plane in planes]
    words = np.array(places, np.uint64)[:, None, :, None] | numbers[:, None, None]
    every = np.broadcast_to(words, (*words.shape[:3], -(-(row // len(heads)) // 8)))
    flat = np.ascontiguousarray(every).view(np.uint8)[:, :, :, : row // len(heads)]
    return flat.reshape(len(planes), len(tokens), row)


_few_rows = lru_cache(maxsize=1024)(_token_rows)


def _slot(tensor: Tensor, tp: int, tp_rank: int, names: tuple[int, int, int]) -> Bytes:
    dims, first = [], 0
    for whole, local in zip(tensor.groups, tensor.local(tp), strict=True):
        dims.append(np.arange(first + tp_rank * local, first + (tp_rank + 1) * local, dtype=np.uint64))
        first += whole
    seed = np.uint64(0)
    for name in names:
        seed = _mixed(seed ^ np.array([name], np.uint64))[0]
    columns = np.arange(-(-tensor.dim_bytes // 8), dtype=np.uint64)
    words = _mixed(_mixed(seed ^ np.concatenate(dims))[:, None] ^ columns)
    return np.ascontiguousarray(words).view(np.uint8)[:, : tensor.dim_bytes].reshape(1, -1)


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # The finaliser of splitmix64 (Steele, Lea and Flood, *Fast splittable pseudorandom number generators*, 2014).
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _describe(row: Bytes, byte: int, marked: bool = False) -> str:
    # Where bytes are *marked*, a word has its chunk, modulo 128, beside a token of fewer bits.
    start = byte // 8 * 8
    word = int.from_bytes(row[start : start + 8].tobytes(), "little")
    if not word:
        return "found zeros"
    token = word & (_MARKED - 1 if marked else (1 << _HEAD) - 1)
    plane, head = word >> _PLANE & 0xFFF, word >> _HEAD & 0xFFF
    chunk = f" of chunk {word >> _MARK & (1 << _HEAD - _MARK) - 1}" if marked else ""
    return f"found room {word >> _ROOM} plane {plane} head {head} token {token}{chunk}"


def _aux_row(room: int, index: int, size: int) -> bytes:
    return _word(room, index, _AUX).to_bytes(8, "little") * (size // 8)
