# SPDX-License-Identifier: Apache-2.0
"""The all-gather of each prefill forward with context parallelism: every rank gets the KV of all tokens.

A context-parallel rank computes its zigzag share of the tokens of a forward.  Attention needs them all, so the ranks
that hold the same heads and layers gather the rows of each tensor (K and V of each layer, a latent row, index rows),
padded to the longest rank's, and put them in order (`pdsim.kv.allgather`), as SGLang's
``cp_all_gather_reorganized_into_tensor_kv_cache`` does.  Here the gathers of a forward follow its computation, all
in a row, instead of alternating with its layers.

A page is gathered with the forward that completes it.
"""

from bisect import bisect_right
from itertools import accumulate

import numpy as np

from pdsim.core.errors import PeerLost, TransferError, TransferTimeout
from pdsim.kv.allgather import PaddedAllGather, Split, zigzag
from pdsim.kv.contents import Contents
from pdsim.kv.layout import KvLayout
from pdsim.kv.messages import Chunk, Forward, rank_name
from pdsim.kv.pages import after, sources
from pdsim.serving.deployment import Deployment, GatheredTensors, gathered_tensors
from pdsim.transfer import Buffer, Program, Region
from pdsim.transfer.job import Rank

LABEL = "forward"
"""Of the records of these gathers, among those of KV on its way to decode."""


class ForwardGather:
    """Gathers the KV of the forwards of *rank*, the *index*-th of *instance*, whose pool *contents* writes.

    Symmetric memory that cannot be had is replaced by plain memory; *fallback* then says why.
    """

    def __init__(
        self, rank: Rank, job: Deployment, instance: str, index: int, layout: KvLayout, contents: Contents
    ) -> None:
        grid, place = job.prefill, job.prefill.at(index)
        assert job.gather is not None
        others = (grid.rank(place.tp, place.pp, cp) for cp in range(grid.cp))
        self.memory, self.fallback = job.gather.memory, job.gather.fallback
        self._rank = rank
        self._pool = job.gather.pool
        self._group = rank.group([rank_name(instance, each) for each in others])
        self._page_size = layout.page_size
        self._tensors = gathered_tensors(layout)
        # with ``layerwise`` planes are sent while the forward runs, before they are gathered
        self._keeps = rank.device.holds_bytes and not job.layerwise
        self._checked = job.checked
        self._contents = contents
        contents.gathered = self._keeps

    def open(self) -> Program:
        """Reserve the symmetric pool if there is to be one, and gather once: before the first request."""
        if self.memory != "plain":
            try:
                yield self._group.reserve(self._pool)
            except TransferError as error:
                self._fall_back(error)
        ranks = len(self._group.names)
        yield from self._gather(zigzag([ranks], ranks), [], GatheredTensors(8, 1))

    def run(self, message: Forward) -> Program:
        """Gather the KV of *message*, whose forward has ended here, and store it in the pages of its chunks."""
        chunks = [(chunk, tokens) for chunk, tokens in zip(message.chunks, message.tokens, strict=True) if tokens]
        if not chunks:
            return
        split = zigzag([tokens for _, tokens in chunks], len(self._group.names))
        for number, tensors in enumerate(self._tensors):  # keys and values come first
            yield from self._gather(split, [] if number else chunks, tensors)

    def _gather(self, split: Split, chunks: list[tuple[Chunk, int]], tensors: GatheredTensors) -> Program:
        # Contents are those of *chunks*, with so many tokens each.
        rank, row = self._rank, tensors.row
        keep = self._keeps and bool(chunks)
        gather = self._buffers(split, tensors, keep)
        try:
            yield from gather.open()
        except TransferError as error:
            gather.close()
            self._fall_back(error)
            gather = self._buffers(split, tensors, keep)
            yield from gather.open()
        mine = rank.device.allocate((tensors.count if keep else 1) * split.longest * row)
        whole = rank.device.allocate(tensors.count * split.total * row)
        if keep:
            self._fill(split, chunks, tensors, mine)
        yield from gather.gather(split, mine, Region.local(rank.name, rank.device.name, whole), LABEL)
        if keep:
            self._store(split, chunks, tensors, whole)
        gather.close()
        for buffer in (mine, whole):
            rank.device.free(buffer)

    def _buffers(self, split: Split, tensors: GatheredTensors, keep: bool) -> PaddedAllGather:
        return PaddedAllGather(self._rank, self._group, tensors.row, split.longest, self.memory, tensors.count, keep)

    def _fall_back(self, error: TransferError) -> None:
        if isinstance(error, PeerLost | TransferTimeout):  # plain memory is no way out of a broken group
            raise error
        self.memory, self.fallback = "plain", f"{type(error).__name__}: {error}"

    def _fill(self, split: Split, chunks: list[tuple[Chunk, int]], tensors: GatheredTensors, mine: Buffer) -> None:
        # The rows of this rank, tensor after tensor.
        index = self._group.index
        place, count = 0, split.lengths[index]
        starts = list(accumulate((tokens for _, tokens in chunks), initial=0))
        for first, rows in split.pieces[index]:
            number = bisect_right(starts, first) - 1
            chunk = chunks[number][0]
            token = self._first(*chunks[number]) + first - starts[number]
            for tensor in range(tensors.count if chunk.room <= self._checked else 0):
                content = self._contents.token_rows(chunk.room, tensor, range(token, token + rows))
                mine.write((tensor * count + place) * tensors.row, content.tobytes())
            place += rows

    def _first(self, chunk: Chunk, tokens: int) -> int:
        # Of its last *tokens*: those before them, in pages of the same chunk, were cached.
        pages = chunk.first_page + sum(count for _, _, count in chunk.runs)
        return (chunk.tokens if chunk.last else pages * self._page_size) - tokens

    def _store(self, split: Split, chunks: list[tuple[Chunk, int]], tensors: GatheredTensors, whole: Buffer) -> None:
        start = 0
        for chunk, tokens in chunks:
            pages = after(sources(chunk.runs), self._first(chunk, tokens) // self._page_size - chunk.first_page)
            for tensor in range(tensors.count if chunk.room <= self._checked else 0):
                rows = whole.read((tensor * split.total + start) * tensors.row, tokens * tensors.row)
                self._contents.store(tensor, pages, np.frombuffer(rows, np.uint8).reshape(tokens, -1))
            start += tokens
