# SPDX-License-Identifier: Apache-2.0
"""The decode side of the staged path, on one rank: who gets a slot, scatters, slots taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from pdsim.core.errors import OutOfMemory, TransferError
from pdsim.kv.layout import KvLayout
from pdsim.kv.mapping import RankMap
from pdsim.kv.messages import Arrival, RankQuiesced, StagingRelease, StagingReply, StagingRequest, encode
from pdsim.kv.pages import Pages
from pdsim.kv.peers import STAGING
from pdsim.kv.policy import Staging
from pdsim.kv.staging.ring import BlockPlan, Ring, block_plans
from pdsim.transfer import Region
from pdsim.transfer.job import Rank

__all__ = ["StagingReceiver"]

_Key = tuple[int, int, int]  # room, writer, chunk


@dataclass(slots=True)
class _Question:
    """A chunk for which a slot was asked."""

    sender: str
    pages: Pages
    forgotten: bool = False  # the pages may be another room's by now
    scattering: bool = False
    arrived: Callable[[], None] | None = None  # scatters the block, which is in its slot


class StagingReceiver:
    """The staging ring of decode rank *index*, whose pool is the region *pool*, laid out as *layout*.

    A room that is forgotten keeps its slots until its writers return them, for only they know when nothing moves.
    What arrives there meanwhile is not scattered.  *quiet* is called once for each room to `forget`, as soon as
    nothing of it is being scattered.

    Life of a question: `ask`; then a refusal, or a slot at once or later; `scatter` when the block has arrived,
    after which the slot is free.  A writer that gives its room up sends `StagingRelease`;
    `sever` frees the slots of one that is dead.
    """

    def __init__(
        self,
        rank: Rank,
        layout: KvLayout,
        index: int,
        rank_map: RankMap,
        pool: Region,
        staging: Staging,
        quiet: Callable[[RankQuiesced], None],
    ) -> None:
        self.ring: Ring[_Key] = Ring(staging.ring)
        rank.gauge("ring", rank.name, lambda: self.ring.used / self.ring.size)
        self.refused = 0  # questions that were answered with no
        self._rank = rank
        self._pool = pool
        self._wait = staging.wait
        self._by_writer = staging.scatter == "writer"
        self._quiet = quiet
        self._region = rank.endpoint.register(rank.device.allocate(staging.ring), STAGING)
        self._plans = dict(_plans(layout, index, rank_map))
        self._questions: dict[_Key, _Question] = {}

    def __len__(self) -> int:
        """Return the number of questions and slots that are not done with."""
        return len(self._questions)

    def ask(self, sender: str, message: StagingRequest) -> None:
        """Answer at once or when there is room, but no later than `Staging.wait` from now.

        A block that is larger than the ring can never have a slot, and is refused at once; so is one that has
        waited too long.  Slots are given in the order of the questions.
        """
        key = message.room, message.writer, message.chunk
        self._questions[key] = _Question(sender, message.pages)
        try:
            slot = self.ring.request(key, message.size)
        except OutOfMemory:
            self._refuse(key)
            return
        if slot is None:
            self._rank.clock.call_at(self._rank.clock.now + self._wait, self._expire, key)
        else:
            self._answer(key, slot.position)

    def scatter(self, arrival: Arrival, done: Callable[[Arrival, str], None]) -> None:
        """Copy the block that has arrived into its pages, free its slot, and call *done* with what went wrong.

        With ``scatter="chunk"`` it waits for the blocks of the other writers that have a slot for this chunk.
        *done* is called with the arrival and "", or the text of the error, once the copy has ended, unless the
        room was forgotten meanwhile.
        """
        key = arrival.room, arrival.writer, arrival.chunk
        question = self._questions.get(key)
        if question is None or question.forgotten or key not in self.ring:
            return  # of a room that was given up
        question.arrived = partial(self._scatter, key, question, arrival, done)
        same = [
            other
            for at, other in self._questions.items()
            if at[0] == key[0] and at[2] == key[2] and at in self.ring and not other.scattering
        ]
        ready = [other.arrived for other in ([question] if self._by_writer else same)]
        for scatter in ready if all(ready) else ():
            assert scatter is not None
            scatter()

    def _scatter(
        self, key: _Key, question: _Question, arrival: Arrival, done: Callable[[Arrival, str], None]
    ) -> None:
        offset = self.ring[key].position % self.ring.size
        question.scattering = True
        try:
            batch = self._plans[arrival.writer].scatter(self._region, offset, self._pool, question.pages)
            copied = self._rank.device.copy(batch)
        except TransferError as error:
            self._scattered(key, question, partial(done, arrival, f"{type(error).__name__}: {error}"))
            return
        copied.callbacks.append(lambda _: self._scattered(key, question, partial(done, arrival, "")))

    def give_back(self, message: StagingRelease) -> None:
        """Free what a writer has of a room of which nothing moves any more.

        A slot that is being scattered is freed when that ends.
        """
        for key, question in list(self._questions.items()):
            if key[:2] == (message.room, message.writer) and not question.scattering:
                self._drop(key)
        self._advance()

    def sever(self, rank: str) -> None:
        """Free all that prefill *rank* has which, as is proven, writes no more and can return nothing itself.

        A writer's number would not do: every prefill instance has one of that number.
        """
        for key, question in list(self._questions.items()):
            if question.sender == rank and not question.scattering:
                self._drop(key)
        self._advance()

    def forget(self, room: int) -> None:
        """Scatter nothing more of *room*.

        Questions without a slot are dropped.  Slots stay: a block may still land there, until its writer returns
        them or is proven to be dead.  `RankQuiesced` follows when no copy of the room is under way.
        """
        busy = False
        for key, question in list(self._questions.items()):
            if key[0] == room:
                question.forgotten = True
                busy |= question.scattering
                if key not in self.ring:
                    self._drop(key)
        self._advance()
        if not busy:
            self._quiet(RankQuiesced(room))

    def _scattered(self, key: _Key, question: _Question, done: Callable[[], None]) -> None:
        self._drop(key)
        self._advance()
        if not question.forgotten:
            done()
        elif not any(other.scattering for at, other in self._questions.items() if at[0] == key[0]):
            self._quiet(RankQuiesced(key[0]))

    def _expire(self, key: _Key) -> None:
        if self.ring.withdraw(key):
            self._refuse(key)
            self._advance()

    def _refuse(self, key: _Key) -> None:
        self.refused += 1
        self._answer(key, -1)
        del self._questions[key]

    def _answer(self, key: _Key, position: int) -> None:
        room, _, chunk = key
        self._rank.channel.send(self._questions[key].sender, encode(StagingReply(room, chunk, position)))

    def _advance(self) -> None:
        for key, slot in self.ring.advance():
            self._answer(key, slot.position)

    def _drop(self, key: _Key) -> None:
        del self._questions[key]
        if not self.ring.withdraw(key):
            self.ring.release(key)


def _plans(layout: KvLayout, index: int, rank_map: RankMap) -> Iterator[tuple[int, BlockPlan]]:
    # Writers are ranks of a prefill group by index; those that keep the same heads write pages directly, and need
    # no plan.
    for writer in rank_map.writers(index):
        part = rank_map.part(writer, index)
        if part is not None and part.heads is not None and "kv" in part.components:
            theirs = replace(
                layout, tp=rank_map.prefill.tp, pp=rank_map.prefill.pp, stage=rank_map.prefill.at(writer).pp
            )
            yield writer, block_plans(theirs, layout, part.heads)[1]
