# SPDX-License-Identifier: Apache-2.0
"""What goes on though nobody wants it, or longer or more often than it may: a part of `pdsim.verify.invariants`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from pdsim.kv.messages import Arrival, Status, Submit
from pdsim.kv.pull import KvReader
from pdsim.kv.push import KvSender
from pdsim.kv.receiver import KvReceiver
from pdsim.serving.decode import DecodeScheduler
from pdsim.serving.router import Router
from pdsim.transfer import Batch, TransferRecord

_ROUNDING = 1e-9
"""Seconds by which two sums of the same times may differ."""


class BoundsChecker:
    """Calls *report* with an invariant (I12 to I15) and a text for what is not wanted, too long or too much."""

    def __init__(self, report: Callable[[str, str], None]) -> None:
        self._report = report
        self.moved: set[int] = set()  # rooms that have posted a transfer
        self._members: dict[str, Any] = {}
        self._rooms: dict[int, Submit] = {}
        self._arrived: Counter[tuple[str, str, int, int]] = Counter()  # by rank, incarnation, room and writer
        self._coming: dict[int, Any] = {}  # by program: the end of what comes back from host memory
        self._written: dict[tuple[str, str, int, int], int] = {}  # so many there are

    def submitted(self, request: Submit) -> None:
        """Note how many tokens *request* has."""
        self._rooms[request.room] = request

    def joined(self, member: Any) -> None:
        """Watch *member*, a rank's program."""
        self._members[member.rank.name] = member
        if isinstance(member, Router):
            return
        scheduler: Any = member.scheduler
        if isinstance(scheduler, DecodeScheduler):
            watched: Any = scheduler
            watched._between_steps = partial(self._stepped, member, scheduler._between_steps)
            watched._begin_step = partial(self._begins, member, scheduler._begin_step)
            watched.mover.offload = partial(self._moves, member, scheduler.mover.offload)
            watched.batch.join = partial(self._entered, member, scheduler.batch.join)
        if scheduler is not None:
            _Stall(self._report, member, scheduler.blocked)
        receiver = getattr(member.mover, "receiver", None)
        if isinstance(receiver, KvReceiver):
            kv: Any = receiver
            kv.arrive = partial(self._counted, member, receiver.arrive)
            if kv.landing is not None:
                kv.landing._arrive = kv.arrive
                for name in ("ask", "scatter", "give_back", "forget", "_expire"):
                    setattr(kv.landing, name, partial(self._in_line, member, kv.landing, getattr(kv.landing, name)))

    def posted(self, batch: Batch, label: str) -> None:
        """Check that the room of what is posted has not failed at the rank that posts it."""
        number = int(label.partition("/")[0])
        self.moved.add(number)
        for owner in {batch.source.owner, batch.target.owner}:
            mover = getattr(self._members.get(owner), "mover", None)
            part = getattr(mover, "sender", None) or getattr(mover, "receiver", None)
            if not isinstance(part, KvSender | KvReader):
                continue
            state: Any = part._rooms.get(number)
            if state is not None and (state.failed if isinstance(part, KvReader) else state.status is Status.FAILED):
                self._report("I13", f"room {number} failed on {owner}, which posts a transfer of it after that")

    def transferred(self, records: Iterable[TransferRecord], limit: float) -> None:
        """Check that none of *records* took more than *limit* seconds to end, or timed out in less."""
        for record in records:
            if record.operation not in ("write", "read"):
                continue  # a collective has a limit of its own
            seconds = record.completed - record.submitted
            early = record.status == "TransferTimeout" and seconds < limit - _ROUNDING
            if seconds > limit + _ROUNDING or early:
                what = f"{record.label!r} from {record.source} to {record.target} took {seconds:g} s"
                self._report("I15", f"{what} to end ({record.status}), its deadline is {limit:g} s")

    def _stepped(self, member: Any, step: Callable[[float], None], due: float) -> None:
        step(due)
        for number, room in member.scheduler.rooms.items():
            if room.left and room.state not in ("reserved", "failed"):
                self._report("I13", f"the user of room {number} left, and {member.rank.name} keeps it: {room.state}")

    def _moves(self, member: Any, offload: Callable[[Any], Any], message: Any) -> Any:
        moved = offload(message)
        if message.back:
            self._coming[id(member)] = moved
        return moved

    def _begins(self, member: Any, begin: Callable[[], None]) -> None:
        coming = self._coming.get(id(member))
        if coming is not None and not coming.triggered:
            self._report("I2", f"{member.rank.name} begins a step with KV that is not back from host memory")
        begin()

    def _entered(
        self, member: Any, join: Callable[[int, int, int], None], number: int, context: int, steps: int
    ) -> None:
        request = self._rooms.get(number)
        if request is not None and context + steps != request.input + request.output:
            what = f"room {number} is decoded to {context + steps} tokens on {member.rank.name}"
            self._report("I14", f"{what}, of {request.input} + {request.output}")
        join(number, context, steps)

    def _counted(
        self, member: Any, arrive: Callable[..., None], arrival: Arrival, reason: str = "", count: int = 1
    ) -> None:
        key = member.rank.name, member.incarnation, arrival.room, arrival.writer
        self._arrived[key] += count
        if arrival.count:
            self._written[key] = arrival.count
        most = self._written.get(key)
        if most is not None and self._arrived[key] > most:
            what = f"{self._arrived[key]} writes of rank {arrival.writer} for room {arrival.room}"
            self._report("I14", f"{member.rank.name} counts {what}, there are {most}")
        arrive(arrival, reason, count)

    def _in_line(self, member: Any, landing: Any, method: Callable[..., None], *arguments: Any) -> None:
        # Whatever freed a slot before this has also given it to whoever waits.
        line = landing.ring._line
        if line and landing.ring._place(next(iter(line.values()))) is not None and not member.has_ended:
            self._report("I12", f"a chunk waits for a slot of the ring of {member.rank.name}, where it fits")
        method(*arguments)


class _Stall:
    """Watches when a queue that only pages in quarantine block gives up: not before, and woken for it."""

    def __init__(self, report: Callable[[str, str], None], member: Any, stall: Any) -> None:
        self._report, self._member, self._seconds = report, member, stall._seconds
        self._since: float | None = None
        self._woken = False
        stall.too_long = partial(self._asked, stall.too_long)
        stall.clear = partial(self._cleared, stall.clear)
        stall._wake = partial(self._wakes, stall._wake)

    def _asked(self, too_long: Callable[[], bool]) -> bool:
        now, gives_up = self._member.clock.now, too_long()
        if self._since is None:
            self._since, self._woken = now, False
        waited = now - self._since
        if gives_up and waited < self._seconds - _ROUNDING:
            self._report(
                "I15", f"{self._member.rank.name} gives up after {waited:g} s what may wait {self._seconds:g}"
            )
        if gives_up and waited > self._seconds + _ROUNDING and not self._woken:
            self._report(
                "I12", f"nothing wakes {self._member.rank.name} when its queue has waited {self._seconds:g} s"
            )
        return gives_up

    def _cleared(self, clear: Callable[[], None]) -> None:
        self._since = None
        clear()

    def _wakes(self, wake: Callable[[], None]) -> None:
        self._woken = True
        wake()
