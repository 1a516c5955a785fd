"""Bytes that say what they are, so that what arrived can be compared with what was sent.

Every eight bytes of a head (or latent row) hold room, plane, head and token; every eight of a metadata row hold room
and buffer.  Used wherever a device keeps contents: on real memory and on the model with ``memory=tracked``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from pdsim.kv.layout import AUX_ROWS, KvLayout
from pdsim.kv.pages import Pages
from pdsim.transfer import Buffer

__all__ = ["fill", "fill_aux", "verify", "verify_aux"]

Bytes = npt.NDArray[np.uint8]

_TOKEN, _HEAD, _PLANE, _ROOM = 0, 24, 36, 48  # first bit of each field
_AUX = 0xFFF  # no head has this number


def _word(room: int, plane: int, head: int) -> int:
    return (room & 0xFFFF) << _ROOM | (plane & 0xFFF) << _PLANE | (head & 0xFFF) << _HEAD


def _rows(layout: KvLayout, heads: range, room: int, plane: int, tokens: range) -> Bytes:
    """Return what the rows of *tokens* hold in *plane*, as bytes of shape (tokens, row)."""
    heads = heads if not layout.shape.latent_bytes else range(1)
    head_bytes = layout.row // len(heads)
    words = np.array([_word(room, plane, head) for head in heads], np.uint64)[None, :, None]
    numbers = np.arange(tokens.start, tokens.stop, dtype=np.uint64)[:, None, None] << np.uint64(_TOKEN)
    repeated = np.broadcast_to(words | numbers, (len(tokens), len(heads), -(-head_bytes // 8)))
    return np.ascontiguousarray(repeated).view(np.uint8)[:, :, :head_bytes].reshape(len(tokens), layout.row)


def _pieces(layout: KvLayout, pages: Pages, first_token: int) -> Iterator[tuple[int, int, range]]:
    """Yield plane, offset and tokens of each contiguous piece of *pages*."""
    for plane in range(layout.shape.planes):
        token = first_token
        for start, count in pages:
            tokens = range(token, token + count * layout.page_size)
            yield plane, plane * layout.plane + start * layout.item, tokens
            token = tokens.stop


def fill(buffer: Buffer, layout: KvLayout, heads: range, room: int, pages: Pages, first_token: int) -> None:
    """Write into *pages*, in this order, what a forward over *room* from *first_token* on would leave there."""
    for plane, offset, tokens in _pieces(layout, pages, first_token):
        buffer.write(offset, _rows(layout, heads, room, plane, tokens).tobytes())


def verify(buffer: Buffer, layout: KvLayout, heads: range, room: int, pages: Pages, tokens: int) -> str:
    """Return "" if *pages* hold the first *tokens* tokens of *room*, else what is wrong with the first that differs."""
    for plane, offset, piece in _pieces(layout, pages, 0):
        piece = range(piece.start, min(piece.stop, tokens))
        if not piece:
            continue
        expected = _rows(layout, heads, room, plane, piece)
        found = np.frombuffer(buffer.read(offset, expected.size), np.uint8).reshape(expected.shape)
        if not np.array_equal(found, expected):
            row = int(np.argmax((found != expected).any(axis=1)))
            byte = int(np.argmax(found[row] != expected[row]))
            return f"room {room} plane {plane} token {piece.start + row} byte {byte}: {_describe(found[row], byte)}"
    return ""


def _describe(row: Bytes, byte: int) -> str:
    start = byte // 8 * 8
    word = int.from_bytes(row[start : start + 8].tobytes(), "little")
    if not word:
        return "found zeros"
    fields = word >> _ROOM, word >> _PLANE & 0xFFF, word >> _HEAD & 0xFFF, word & 0xFFFFFF
    return "found room {} plane {} head {} token {}".format(*fields)


def _aux_row(room: int, index: int, size: int) -> bytes:
    return _word(room, index, _AUX).to_bytes(8, "little") * (size // 8)


def fill_aux(buffer: Buffer, layout: KvLayout, room: int, slot: int) -> None:
    """Write the first-token metadata of *room* into *slot*."""
    for index, (offset, size) in enumerate(zip(layout.aux_offsets(slot).tolist(), AUX_ROWS, strict=True)):
        buffer.write(offset, _aux_row(room, index, size))


def verify_aux(buffer: Buffer, layout: KvLayout, room: int, slot: int) -> str:
    """Return "" if *slot* holds the metadata of *room*, else which buffer does not."""
    for index, (offset, size) in enumerate(zip(layout.aux_offsets(slot).tolist(), AUX_ROWS, strict=True)):
        if buffer.read(offset, size) != _aux_row(room, index, size):
            return f"room {room}: metadata buffer {index} of slot {slot} holds something else"
    return ""
