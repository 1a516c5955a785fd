"""Checkers of the protocol's invariants, which watch a modelled job from outside while it runs.

==  ==========================================================================================================
I1  a room ends once on each rank: what has failed never succeeds
I2  a room that is done at decode holds there, on every rank, exactly what was computed: every byte is compared
I3  nothing is read from, or lands on, a page or state row that is not its room's at that moment
I4  staging: nothing is written outside the slot that its room has, and slots never overlap
I5  every room ends, and for a cause; no rank ends but those that were killed
I6  first-token metadata is read from, and lands in, the slot that its room has, and is that room's
I7  the ranks of a group take up the same chunks of the same rooms in one order
I8  when all is over nothing is left: no pages, slots, ring bytes, and no container longer than at the start
==  ==========================================================================================================

`Checks` is a `pdsim.fabric.faults.Observer`.  It is told of messages and transfers by the model, shown every rank's
program object (`joined`), and asks these objects whose a page is at the instant at which bytes land.  It changes
nothing, and costs nothing where there is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from pdsim.kv.contents import Contents
from pdsim.kv.layout import AUX_ROWS, KvLayout, Table
from pdsim.kv.messages import (
    Destination,
    Finished,
    Message,
    MessageError,
    Prefilled,
    Reserve,
    Stop,
    Submit,
    decode,
)
from pdsim.kv.pages import Pages
from pdsim.kv.paths import REGION, STAGING
from pdsim.transfer import Batch

__all__ = ["Checks", "Violation"]

T = TypeVar("T", bound=Message)
_NOT_STATE = frozenset(
    {"rank", "job", "clock", "handlers", "layout", "requests", "last_heard", "fallbacks", "fleet", "_over", "_severed"}
)
"""Attributes that a census leaves out: not the protocol's own, statistics, as long as the workload, bounded by the
number of instances, or what is remembered of rooms that are over for longer than a scenario lasts
(`pdsim.kv.rooms.OVER`)."""

_POOLS = frozenset({"_starts", "_counts", "_free"})
"""Lists of what is free; how much that is says what is owned."""


class Violation(NamedTuple):
    """An invariant that did not hold, when and how."""

    invariant: str  # "I1" to "I8"
    at: float  # seconds after the start
    what: str

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.invariant} at {self.at:.6f} s: {self.what}"


class Checks:
    """Watches one job.  *allowed* says whether the status of a request, or the error of a rank, has a cause.

    ``excused(instance)`` says whether an instance was killed, so that what waits for it may stay in quarantine.
    """

    def __init__(
        self,
        allowed: Callable[[str, str], bool] = lambda _, error: not error,
        excused: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.violations: list[Violation] = []
        self._allowed = allowed
        self._excused = excused
        self._members: dict[str, Any] = {}
        self._gone: set[str] = set()
        self._reports: dict[tuple[str, int], str] = {}  # by rank and room: how it ended
        self._rooms: dict[int, Submit] = {}
        self._targets: dict[int, Destination | Reserve] = {}
        self._order: dict[str, list[tuple[int, int]]] = {}  # by prefill rank: room and chunk, as they are taken up
        self._baseline: dict[str, dict[str, int]] = {}
        self._handlers: dict[type[Message], Callable[[str, Any], None]] = {
            Submit: self._on_submit,
            Destination: self._on_target,
            Reserve: self._on_target,
            Prefilled: self._on_prefilled,
            Finished: self._on_finished,
            Stop: self._on_stop,
        }
        self._stopped = False
        self._late = False  # a rank was started again, and tables of peers may have grown since requests began

    # --- what the model tells ---

    def joined(self, member: Any) -> None:
        """Watch what *member*, a rank's program, reports and owns."""
        again = member.rank.name in self._members
        self._members[member.rank.name] = member
        self._gone.discard(member.rank.name)
        self._late |= again
        self._baseline.pop(member.rank.name, None)
        for rank_room in [key for key in self._reports if key[0] == member.rank.name]:  # a new life knows nothing
            del self._reports[rank_room]
        for name in ("sender", "receiver"):
            part = getattr(member, name, None)
            if part is not None:
                part._report = self._watched(member.rank.name, part._report)
        if hasattr(member, "sender"):
            member.sender.send = self._ordered(member.rank.name, member.sender.send)

    def sent(self, sender: str, receiver: str, payload: bytes) -> None:  # noqa: ARG002
        """Look at a control message."""
        try:
            message = decode(payload)
        except MessageError:
            return  # a refusal, which ends its receiver: `ended` will tell
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(sender, message)

    def posted(self, batch: Batch, label: str) -> None:
        """Do nothing: it is what lands that counts."""

    def read(self, batch: Batch, label: str) -> None:
        """Check that what is read is the room's."""
        self._check_owner("read from", batch.source.owner, batch.source.name, label, batch.source_offset, batch.size)

    def landed(self, batch: Batch, label: str) -> None:
        """Check that what is written is the room's."""
        if batch.target.name == STAGING:
            self._check_slot(batch, label)
            return
        self._check_owner("landed on", batch.target.owner, batch.target.name, label, batch.target_offset, batch.size)

    def copied(self, batch: Batch) -> None:
        """Check that what is scattered is the room's."""
        if batch.source.name == STAGING:
            self._check_scatter(batch)

    def ended(self, rank: str, error: str) -> None:
        """Check that *rank* had a cause to end, if it ended with an *error*."""
        self._gone.add(rank)
        if error and not self._allowed(rank, error):
            self._found("I5", f"{rank} ended: {error}")

    # --- after the run ---

    def finish(self, statuses: Iterable[str]) -> list[Violation]:
        """Return what was found, also that of the requests whose *statuses* the router kept."""
        for number, status in enumerate(statuses):
            if not status:
                self._found("I5", f"request {number} never ended")
            elif status != "ok" and not self._allowed(str(number), status):
                self._found("I5", f"request {number} ended without a cause: {status}")
        self._check_order()
        return self.violations

    # --- I1, I2, I6 ---

    def _watched(self, rank: str, report: Callable[..., None]) -> Callable[..., None]:
        def watch(message: Any, *more: Any) -> None:
            kind = type(message).__name__
            if kind in ("Sent", "Arrived"):
                self._on_report(rank, kind, message)
            report(message, *more)

        return watch

    def _on_report(self, rank: str, kind: str, message: Any) -> None:
        end = "failed" if message.reason else "succeeded"
        before = self._reports.setdefault((rank, message.room), end)
        if before != end:
            self._found("I1", f"room {message.room} {before} on {rank} and then {end}")
        if kind == "Arrived" and message.reason and "metadata" in message.reason:
            self._found("I6", f"{rank}: {message.reason}")
        elif kind == "Arrived" and message.reason and message.reason.startswith("room "):
            self._found("I2", f"{rank}: {message.reason}")

    def _on_submit(self, _: str, message: Submit) -> None:
        if not self._rooms:
            self._baseline = {name: dict(_census(member)) for name, member in self._members.items()}
        self._rooms[message.room] = message

    def _on_target(self, _: str, message: Destination | Reserve) -> None:
        self._targets[message.room] = message

    def _on_prefilled(self, sender: str, message: Prefilled) -> None:
        if self._reports.get((sender, message.room)) == "failed":
            self._found("I1", f"room {message.room} failed on {sender}, which says that it is written")

    def _on_finished(self, _: str, message: Finished) -> None:
        request, target = self._rooms[message.room], self._targets.get(message.room)
        if target is None:
            self._found("I2", f"room {message.room} finished without a destination")
            return
        for name, member in self._group(_instance(request.decode)):
            contents: Contents = member.receiver._contents
            if name in self._gone or not member.rank.device.holds_bytes:
                continue
            reason = contents.verify(message.room, target.pages, request.input, target.held)
            reason = reason or contents.verify_state(message.room, target.state, request.input, target.held)
            if reason:
                self._found("I2", f"{name} at the end of decoding: {reason}")

    # --- I3, I4, I6 ---

    def _check_owner(self, verb: str, rank: str, region: str, label: str, offsets: Any, sizes: Any) -> None:
        room = int(label.partition("/")[0])
        member = self._members[rank]
        part = _part(member)
        if region == REGION:
            self._check_rows(verb, part.layout, room, rank, offsets, sizes)

    def _check_rows(self, verb: str, layout: KvLayout, room: int, rank: str, offsets: Any, sizes: Any) -> None:
        leader = self._members.get(f"{_instance(rank)}.0")
        if leader is None or leader.life != self._members[rank].life:
            return  # a leader that was started again owns nothing of the ranks that have yet to end
        for table in layout.tables:
            inside = (offsets >= table.start) & (offsets < table.end)
            if inside.any():
                foreign = _rows(table, offsets[inside], sizes[inside]) - _owned(leader, table, room)
                if foreign:
                    owner = _owner(leader, table, min(foreign))
                    text = f"room {room} {verb} {table.component} row {min(foreign)} of {rank}, which is {owner}"
                    self._found("I3", text)
        self._check_aux(verb, leader, layout, room, rank, offsets)

    def _check_aux(self, verb: str, leader: Any, layout: KvLayout, room: int, rank: str, offsets: Any) -> None:
        end = layout.kv_bytes + sum(AUX_ROWS) * layout.slots
        inside = offsets[(offsets >= layout.kv_bytes) & (offsets < end)]
        if len(inside):
            slot = int((inside[0] - layout.kv_bytes) // AUX_ROWS[0])
            if leader.slots._owned.get(room) != slot:
                self._found("I6", f"room {room} {verb} metadata slot {slot} of {rank}, which is not its own")

    def _check_slot(self, batch: Batch, label: str) -> None:
        """Check that what lands in a staging ring lies in the slot of its room, writer and chunk, and in no other."""
        rank, (room, chunk) = batch.target.owner, map(int, label.split("/")[:2])
        ring = self._members[rank].receiver.landing.ring
        key = room, int(batch.source.owner.partition(".")[2]), chunk
        start, size = int(batch.target_offset[0]), batch.nbytes
        if key not in ring:
            self._found("I4", f"chunk {chunk} of room {room} landed in the ring of {rank}, where it has no slot")
            return
        first = ring[key].position % ring.size
        if not (first <= start and start + size <= first + ring[key].size <= ring.size):
            self._found("I4", f"chunk {chunk} of room {room} landed outside its slot of the ring of {rank}")
        taken = sorted((slot.position % ring.size, slot.size) for slot in ring._slots.values())
        if any(low + length > high for (low, length), (high, _) in pairwise(taken)):
            self._found("I4", f"slots of the ring of {rank} overlap: {taken}")

    def _check_scatter(self, batch: Batch) -> None:
        """Check that what leaves a staging ring lies in a slot, and that the pages are those of the slot's room."""
        rank, start = batch.target.owner, int(batch.source_offset[0])
        ring = self._members[rank].receiver.landing.ring
        for key, slot in ring._slots.items():
            if slot.position % ring.size <= start < slot.position % ring.size + slot.size:
                layout = self._members[rank].receiver.layout
                self._check_rows("scattered to", layout, key[0], rank, batch.target_offset, batch.size)
                return
        self._found("I4", f"{rank} scattered from {start} of its ring, which is no slot")

    # --- I7 ---

    def _check_order(self) -> None:
        groups: dict[str, list[str]] = {}
        for rank in self._order:
            groups.setdefault(_instance(rank), []).append(rank)
        for ranks in groups.values():
            for other in ranks[1:]:
                self._check_pair(ranks[0], other)

    def _ordered(self, rank: str, send: Callable[[Any], None]) -> Callable[[Any], None]:
        order = self._order[rank] = []

        def watch(chunk: Any) -> None:
            order.append((chunk.room, chunk.index))
            send(chunk)

        return watch

    def _check_pair(self, one: str, other: str) -> None:
        for mine, theirs in zip(self._order[one], self._order[other], strict=False):  # one may have been stopped sooner
            if mine != theirs:
                self._found("I7", f"{one} took up chunk {mine} where {other} took up {theirs}")
                return

    # --- I8 ---

    def _on_stop(self, *_: Any) -> None:
        if self._stopped or not self._rooms:
            return
        self._stopped = True
        for name, member in self._members.items():
            if not self._excused(_instance(name)) and not member.ended.triggered:
                self._check_rest(name, member)

    def _check_rest(self, name: str, member: Any) -> None:
        before = self._baseline.get(name)  # none of a rank that was started again
        for path, container in _containers(member):
            numbers = _room_numbers(container)
            grown = len(container) - (before or {}).get(path, 0 if before is not None or numbers else len(container))
            if grown <= 0:
                continue
            rooms = [room for room in numbers if not self._in_quarantine(room)]
            if rooms or not (numbers or self._late):
                left = f"rooms {rooms[:5]}" if rooms else f"{grown} entries"
                self._found("I8", f"{name}{path} still has {left} when all is over")
        pool = getattr(member, "pages", None)
        if pool is not None:
            owned = sum(count for pages in pool._owned.values() for _, count in pages)
            if pool.free + owned != pool.pages or sum(pool._counts) != pool.free:
                self._found("I8", f"{name}: {pool.free} pages free and {owned} owned of {pool.pages}")

    def _in_quarantine(self, room: int) -> bool:
        request = self._rooms.get(room)
        return request is not None and (
            self._excused(_instance(request.prefill)) or self._excused(_instance(request.decode))
        )

    # --- all ---

    def _group(self, instance: str) -> Iterator[tuple[str, Any]]:
        for name, member in self._members.items():
            if _instance(name) == instance:
                yield name, member

    def _found(self, invariant: str, what: str) -> None:
        at = next(iter(self._members.values())).clock.now if self._members else 0.0
        self.violations.append(Violation(invariant, at, what))


def _part(member: Any) -> Any:
    """Return the sender or the receiver of a rank."""
    return member.sender if hasattr(member, "sender") else member.receiver


def _instance(name: str) -> str:
    """Return the instance of a rank, or of one of its lives."""
    return name.partition(".")[0].partition("@")[0]


# --- whose a row is -------------------------------------------------------------------------------------------------


def _rows(table: Table, offsets: Any, sizes: Any) -> set[int]:
    """Return the rows of *table* that pieces at *offsets* of *sizes* bytes touch."""
    plane = table.rows * table.item
    first = (offsets - table.start) % plane // table.item
    last = (offsets - table.start + sizes - 1) % plane // table.item
    if (first == last).all():
        return set(first.tolist())
    return {row for low, high in zip(first.tolist(), last.tolist(), strict=True) for row in range(low, high + 1)}


def _pool(leader: Any, table: Table) -> dict[int, Any]:
    """Return the owners of the rows of *table*, and what they own."""
    if table.component in ("kv", "index"):
        owned: dict[int, Any] = leader.pages._owned
    elif table.component == "window":
        owned = leader.state._window._owned
    else:
        owned = leader.state._slots._owned
    return owned


def _numbers(rows: Pages | int) -> set[int]:
    if isinstance(rows, int):
        return {rows}
    return {row for start, count in rows for row in range(start, start + count)}


def _owned(leader: Any, table: Table, room: int) -> set[int]:
    return _numbers(_pool(leader, table).get(room, ()))


def _owner(leader: Any, table: Table, row: int) -> str:
    found = (owner for owner, rows in _pool(leader, table).items() if row in _numbers(rows))
    return next((f"room {owner}'s" for owner in found), "nobody's")


# --- what is left ---------------------------------------------------------------------------------------------------


def _census(member: Any) -> Iterator[tuple[str, int]]:
    return ((path, len(container)) for path, container in _containers(member))


def _containers(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield every dict, list, set and deque that *root* and the protocol's objects in it hold, with its path."""
    todo, seen = [("", root)], {id(root)}
    while todo:
        path, holder = todo.pop()
        for name, value in _attributes(holder):
            if name in _NOT_STATE | _POOLS or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, dict | list | set | deque):
                yield f"{path}.{name}", value
            elif type(value).__module__.startswith(("pdsim.kv", "pdsim.serving")):
                todo.append((f"{path}.{name}", value))


def _attributes(holder: Any) -> list[tuple[str, Any]]:
    found = dict(getattr(holder, "__dict__", {}))
    for kind in type(holder).__mro__:
        slots = getattr(kind, "__slots__", ())
        found |= {name: getattr(holder, name) for name in slots if hasattr(holder, name)}
    return list(found.items())


def _room_numbers(container: Iterable[Any]) -> list[int]:
    """Return the rooms that *container* is about, as far as its keys or entries say."""
    entries: list[Any] = list(container)
    return [room for room in map(_room_number, entries) if room is not None]


def _room_number(entry: Any) -> int | None:
    if isinstance(entry, tuple) and entry:
        entry = entry[0]
    for name in ("request", "chunk"):
        entry = getattr(entry, name, entry)
    entry = getattr(entry, "room", entry)
    return entry if isinstance(entry, int) else None
