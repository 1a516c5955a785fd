# SPDX-License-Identifier: Apache-2.0
"""Whose memory is touched: watches pages, state rows, metadata and staging slots for the invariant checker.

At the instant at which bytes are read or land, and at which a device copies, the leader of the rank's own
incarnation is asked whose they are; also one that is gone: what it owned at its end stays owned until the last rank
of its incarnation has ended.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from pdsim.kv.layout import AUX_BYTES, AUX_ROWS, REGION, STAGING, KvLayout, PageTable
from pdsim.kv.pages import Pages, PrefixPagePool
from pdsim.kv.pull import KvReader
from pdsim.kv.push import KvSender
from pdsim.serving.handoff.push import PushDecodeLeader, PushPrefillLeader
from pdsim.serving.prefill import PrefillWorker
from pdsim.serving.router import Router
from pdsim.transfer import Batch
from pdsim.verify.computed import ComputedChecker

_AUX_ENDS = tuple(accumulate(AUX_ROWS))
"""Of the metadata buffers, for each slot that they have."""

Pieces = list[tuple[int, int]]
"""Offsets and sizes."""


class OwnershipChecker:
    """Watches whose memory bytes are read from, land on, and are copied between.

    It calls *report* with an invariant (I3, I4 or I6) and a text for each piece that touches memory of no room, or
    of another room than the transfer's, with whose number its label begins.  *computed* checks I10.
    """

    def __init__(self, report: Callable[[str, str], None], computed: ComputedChecker) -> None:
        self._report = report
        self._computed = computed
        self._members: dict[str, Any] = {}
        self._leaders: dict[str, list[Any]] = {}  # of all incarnations, by the rank's name
        self._gathers: dict[int, tuple[Batch, int]] = {}  # copies under way by identity, and their rooms
        self._router: Router | None = None
        self._came = Counter[tuple[str, int, str]]()  # by rank, room and component: bytes that have come
        self.unused: set[tuple[str, int]] = set()  # ranks that read for nobody, and the room

    def joined(self, member: Any) -> None:
        """Watch *member*, a rank's program, in place of an earlier incarnation of that rank."""
        name = member.rank.name
        self._members[name] = member
        if isinstance(member, Router):
            self._router = member
            return
        if member.scheduler is not None:
            self._leaders.setdefault(name, []).append(member)
            pages: Any = member.scheduler.pages
            pages.release = partial(self._freed, member, pages.release)
        if isinstance(member.worker, PrefillWorker) and isinstance(member.mover.sender, KvSender):
            sender: Any = member.mover.sender  # of any type, for mypy: a method of it is replaced
            sender._gather = self._watched(member, sender._gather)
        landing: Any = getattr(member.mover.receiver if member.worker is None else None, "landing", None)
        if landing is not None:
            landing.ring.advance = partial(self._given, name, landing.ring.advance)

    def _given(self, rank: str, advance: Callable[[], Iterator[tuple[Any, Any]]]) -> Iterator[tuple[Any, Any]]:
        given = set()
        for key, slot in advance():
            if key in given:
                self._report("I4", f"{rank} gives {key} a second slot of its ring")
                return  # it would not end
            given.add(key)
            yield key, slot

    def _freed(self, member: Any, release: Callable[..., None], room: int, **how: bool) -> None:
        # Whoever says that nothing of a failed room moves must be right: whether or not it still lands.
        ranks = {member.rank.name, *member.followers}
        for name, other in self._members.items() if room in member.scheduler.pages.quarantined else ():
            for posted in other.rank.endpoint.moving.values():
                batch, label = posted.transfer.batch, posted.transfer.label
                own = batch.source.owner in ranks or batch.target.owner in ranks
                if own and label.startswith(f"{room}/") and (name, room) not in self.unused:
                    what = f"{label} from {batch.source.owner} to {batch.target.owner} is under way"
                    self._report("I3", f"{member.rank.name} frees the pages of room {room}, and {what}")
        release(room, **how)

    def posted(self, batch: Batch, label: str) -> None:
        """Take note of a read that nobody uses: its rank posts it after its incarnation is over.

        A rank that stands still, or hears nothing, does not know that yet.  If it has not connected, a fence about
        it holds at once, so what it then reads may be another room's.  What it had posted before must still be safe.
        """
        reader = self._members.get(batch.target.owner)
        if self._router is None or reader is None or not isinstance(reader.mover.receiver, KvReader):
            return
        if reader.incarnation and not self._router.registry.alive(reader.incarnation):
            self.unused.add((batch.target.owner, _room(label)))

    def read(self, batch: Batch, label: str) -> None:
        """Check that what is read is the room's."""
        if batch.source.name == REGION and (batch.target.owner, _room(label)) not in self.unused:
            self._check("read from", batch.source.owner, _room(label), batch.source_offset, batch.size)

    def landed(self, batch: Batch, label: str) -> None:
        """Check that what is written is the room's."""
        if batch.target.name == STAGING:
            self._check_slot(batch, label)
        elif batch.target.name == REGION:
            self._check("landed on", batch.target.owner, _room(label), batch.target_offset, batch.size)
            self._count(batch.target.owner, _room(label), batch)

    def copied(self, batch: Batch) -> None:
        """Check that what is gathered, or scattered, is the room's."""
        if batch.source.name == STAGING:
            self._check_scatter(batch)
            return
        gathered = self._gathers.pop(id(batch), None)
        if gathered is not None:
            self._check("gathered from", batch.source.owner, gathered[1], batch.source_offset, batch.size)

    def check_bytes(self, rank: str, room: int, pages: int, tokens: int) -> None:
        """Check that *pages* and state of *room*, of *tokens*, have come to decode *rank*, in each plane once."""
        member = self._members[rank]
        layout, ranks = member.mover.layout, member.job.rank_map
        parts = [
            part for writer, part in ranks.writers(member.index).items() if ranks.prefill.at(writer)[1:] == (0, 0)
        ]
        heads = [part.heads.heads for part in parts if part.heads is not None and "kv" in part.components]
        copies = max(1, sum(heads) // max(1, layout.shape.local_heads(layout.tp)))  # replicas of a head all write it
        window, size = layout.shape.state.window, layout.page_size
        touched = {token // size for token in range(max(0, tokens - window), tokens)}
        rows = {"kv": pages * copies, "index": pages, "window": len(touched) * copies, "mamba": 1}
        for component in dict.fromkeys(table.component for table in layout.tables):
            most, came = rows[component] * layout.row_bytes(component), self._came[rank, room, component]
            if came != most:
                self._report("I14", f"{came} bytes of {component} of room {room} have come to {rank}, it has {most}")
        if (came := self._came[rank, room, "metadata"]) > AUX_BYTES:
            self._report("I14", f"{came} bytes of metadata of room {room} have come to {rank}, it has {AUX_BYTES}")

    def _count(self, rank: str, room: int, batch: Batch) -> None:
        pieces = list(zip(batch.target_offset.tolist(), batch.size.tolist(), strict=True))
        layout = self._members[rank].mover.layout
        for table in layout.tables:
            inside = sum(size for offset, size in pieces if table.start <= offset < table.end)
            self._came[rank, room, table.component] += inside
        start = layout.kv_bytes
        metadata = sum(size for offset, size in pieces if 0 <= offset - start < AUX_BYTES * layout.slots)
        self._came[rank, room, "metadata"] += metadata

    def _watched(self, member: Any, gather: Callable[[Any, Batch], Any]) -> Callable[[Any, Batch], Any]:
        # The batch itself is kept beside its identity, so that no other gets that identity meanwhile.
        def watch(state: Any, batch: Batch) -> Any:
            self._gathers[id(batch)] = batch, state.room
            for posted in member.rank.endpoint.moving.values():
                if posted.transfer.batch.source == batch.target:
                    what = f"room {state.room} gathers into {batch.target.name} of {member.rank.name}"
                    self._report("I4", f"{what}, from which {posted.transfer.label!r} is under way")
            return gather(state, batch)

        return watch

    def _leader(self, rank: str) -> Any:
        incarnation = self._members[rank].incarnation
        known = self._leaders.get(f"{rank.partition('.')[0]}.0", ())
        return next((leader for leader in known if incarnation and leader.incarnation == incarnation), None)

    def _check(self, verb: str, rank: str, room: int, offsets: Any, sizes: Any) -> None:
        layout: KvLayout = self._members[rank].mover.layout
        leader = self._leader(rank)
        if leader is None:
            self._report("I3", f"room {room} {verb} {rank}, which is in no incarnation of its instance")
            return
        pieces = list(zip(offsets.tolist(), sizes.tolist(), strict=True))  # few: lists take less time than arrays
        rows = [_rows(table, pieces) for table in layout.tables]
        if isinstance(leader.worker, PrefillWorker):
            self._check_computed(verb, leader, layout, room, rank, pieces, rows[0])
        for table, touched in zip(layout.tables, rows, strict=True):
            if not touched:
                continue
            pool = _pool(leader, table)
            foreign = touched - _numbers(pool.get(room, ()))
            if verb == "landed on" and isinstance(leader.scheduler.pages.pool, PrefixPagePool):
                known = {page.page for page in leader.scheduler.pages.pool._cached.values()}
                if known & touched:
                    self._report("I3", f"room {room} {verb} pages of {rank} that are a known prompt's")
            if foreign:
                owners = (owner for owner, rows in pool.items() if min(foreign) in _numbers(rows))
                owner = next((f"room {owner}'s" for owner in owners), "nobody's")
                text = f"room {room} {verb} {table.component} row {min(foreign)} of {rank}, which is {owner}"
                self._report("I3", text)
        self._check_aux(verb, leader, layout, room, rank, pieces)

    def _check_computed(
        self, verb: str, leader: Any, layout: KvLayout, room: int, rank: str, pieces: Pieces, rows: set[int]
    ) -> None:
        # Of keys and values, these are the tokens up to the last page that is read; of state and metadata, all of
        # the room's.
        request = leader.scheduler.rooms.get(room)
        if request is None:
            return  # over: whose pages these are says I3
        tokens, kv, share = request.request.input, layout.tables[0], 1.0
        if all(kv.start <= offset < kv.end for offset, _ in pieces):
            numbered = _numbered(leader.scheduler.pages.pool.owners.get(room, ()))
            last = max((place for place, row in enumerate(numbered) if row in rows), default=-1)
            tokens = min(tokens, (last + 1) * layout.page_size)
            plane, each = (max(pieces)[0] - kv.start) // (kv.rows * kv.item), layout.shape.tensors
            share = (plane // each + 1) * each / len(kv.planes)
        self._computed.check(verb, rank, room, tokens, leader.scheduler.hits.get(room, 0), share)

    def _check_aux(self, verb: str, leader: Any, layout: KvLayout, room: int, rank: str, pieces: Pieces) -> None:
        slots = _slots(layout, pieces)
        handoff, owned = leader.scheduler.handoff, set()  # nothing where no metadata moves
        if slots and isinstance(handoff, PushPrefillLeader | PushDecodeLeader):
            owned = {handoff.slots.owners.get(room)}
        if foreign := slots - owned:
            self._report("I6", f"room {room} {verb} metadata slot {min(foreign)} of {rank}, which is not its own")

    def _check_slot(self, batch: Batch, label: str) -> None:
        # It must lie in no other, be in one piece within the ring, and slots must not overlap.
        rank, (room, chunk) = batch.target.owner, map(int, label.split("/")[:2])
        ring = self._members[rank].mover.receiver.landing.ring
        key = room, int(batch.source.owner.partition(".")[2]), chunk
        start, size = int(batch.target_offset[0]), batch.nbytes
        if key not in ring.slots:
            self._report("I4", f"chunk {chunk} of room {room} landed in the ring of {rank}, where it has no slot")
            return
        first, length = ring.offset(key), ring.slots[key].size
        if not (first <= start and start + size <= first + length <= ring.size):
            self._report("I4", f"chunk {chunk} of room {room} landed outside its slot of the ring of {rank}")
        taken = sorted((slot.position % ring.size, slot.size) for slot in ring.slots.values())
        if any(low + length > high for (low, length), (high, _) in pairwise(taken)):
            self._report("I4", f"slots of the ring of {rank} overlap: {taken}")

    def _check_scatter(self, batch: Batch) -> None:
        rank, start = batch.target.owner, int(batch.source_offset[0])
        ring = self._members[rank].mover.receiver.landing.ring
        for key, slot in ring.slots.items():
            if slot.position % ring.size <= start < slot.position % ring.size + slot.size:
                self._check("scattered to", rank, key[0], batch.target_offset, batch.size)
                self._count(rank, key[0], batch)
                return
        self._report("I4", f"{rank} scattered from {start} of its ring, which is no slot")


def _room(label: str) -> int:
    return int(label.partition("/")[0])


def _rows(table: PageTable, pieces: Pieces) -> set[int]:
    start, end, item, rows = table.start, table.end, table.item, table.rows
    inside = [(offset - start, size) for offset, size in pieces if start <= offset < end]
    first = [offset // item for offset, _ in inside]
    last = [(offset + size - 1) // item for offset, size in inside]
    if first == last:
        return {row % rows for row in first}
    return {row % rows for low, high in zip(first, last, strict=True) for row in range(low, high + 1)}


def _slots(layout: KvLayout, pieces: Pieces) -> set[int]:
    start, slots = layout.kv_bytes, layout.slots
    inside = [offset - start for offset, _ in pieces if 0 <= offset - start < AUX_BYTES * slots]
    buffers = [bisect_right(_AUX_ENDS, offset // slots) for offset in inside]
    return {
        (offset - (_AUX_ENDS[buffer] - AUX_ROWS[buffer]) * slots) // AUX_ROWS[buffer]
        for offset, buffer in zip(inside, buffers, strict=True)
    }


def _pool(leader: Any, table: PageTable) -> dict[int, Any]:
    # The owners of its rows: keys and values, and the index, are of pages; the window and the state have pools.
    pages = leader.scheduler.pages
    if table.component in ("kv", "index"):
        owners: dict[int, Any] = pages.pool.owners
    else:
        owners = (pages.state.window if table.component == "window" else pages.state.slots).owners
    return owners


def _numbers(rows: Pages | int) -> set[int]:
    return {rows} if isinstance(rows, int) else set(_numbered(rows))


def _numbered(rows: Pages) -> list[int]:
    return [row for start, count in rows for row in range(start, start + count)]
