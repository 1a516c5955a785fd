# SPDX-License-Identifier: Apache-2.0
"""What goes on though nobody wants it, or longer or more often than it may: a part of `pdsim.verify.invariants`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from math import ceil, inf
from typing import Any

from pdsim.kv.messages import Arrival, Finished, Status, Submit, epoch_of, instance_of
from pdsim.kv.pull import KvReader
from pdsim.kv.push import KvSender
from pdsim.kv.receiver import KvReceiver
from pdsim.serving.decode import DecodeScheduler
from pdsim.serving.prefill import PrefillWorker
from pdsim.serving.router import Router
from pdsim.transfer import Batch, TransferRecord

_ROUNDING = 1e-9
"""Seconds by which two sums of the same times may differ."""

_PHASES = ("noticed", "started", "prefilled", "arrived", "polled", "joined", "finished")
"""Times of `Finished` that follow each other in a pushed and in a pulled handoff."""


class BoundsChecker:
    """Calls *report* with an invariant (I12 to I15) and a text for what is not wanted, too long or too much."""

    def __init__(self, report: Callable[[str, str], None], reached: Counter[str]) -> None:
        self._report = report
        self._reached = reached
        self.moved: set[int] = set()  # rooms that have posted a transfer
        self._posted: set[tuple[Any, ...]] = set()
        self._begun: dict[int, deque[float]] = {}  # by sender: when its last writes were posted, one for each queue
        self.nbytes = Counter[int]()  # by room: of transfers that succeeded, and of metadata in messages
        self._members: dict[str, Any] = {}
        self._rooms: dict[int, Submit] = {}
        self._arrived: Counter[tuple[str, str, int, int]] = Counter()  # by rank, incarnation, room and writer
        self._coming: dict[int, Any] = {}  # by program: the end of what comes back from host memory
        self._loading: dict[int, list[Any]] = {}  # by program of prefill: the ends of what comes back
        self._needs: dict[tuple[int, int], list[Any]] = {}  # by program and forward: those that it waits for
        self._written: dict[tuple[str, str, int, int], int] = {}  # so many there are
        self.ended: dict[int, float] = {}  # rooms: the end of the last forward that decode's leader has heard of
        self._ends: dict[tuple[int, int], int] = {}  # by batch and room: the step in which it may end, or later

    def submitted(self, request: Submit) -> None:
        """Note how many tokens *request* has."""
        self._rooms[request.room] = request

    def joined(self, member: Any) -> None:
        """Watch *member*, a rank's program."""
        self._members[member.rank.name] = member
        if isinstance(member, Router):
            registry: Any = member.registry
            registry.choose = partial(self._chosen, registry, registry.choose)
            return
        scheduler: Any = member.scheduler
        if isinstance(scheduler, DecodeScheduler):
            watched: Any = scheduler
            watched._between_steps = partial(self._stepped, member, scheduler._between_steps)
            watched._begin_step = partial(self._begins, member, scheduler._begin_step)
            watched.mover.offload = partial(self._moves, member, scheduler.mover.offload)
            watched.batch.join = partial(self._entered, member, scheduler.batch.join)
            watched.batch.finished = partial(self._leaves, scheduler.batch, scheduler.batch.finished)
        if isinstance(member.worker, PrefillWorker):
            worker: Any = member.worker
            if scheduler is not None and member.job.cache.found != "scheduled":
                worker.compute = partial(self._begins_forward, member, worker.compute)
            if worker.tiers is not None and not member.job.cache.overlap:
                worker.tiers.move = partial(self._loads, member, worker.tiers.move)
                worker.compute = partial(self._computes, member, worker.compute)
                worker._begin_forward = partial(self._forward_begins, member, worker._begin_forward)
        if scheduler is not None:
            _Stall(self._report, member, scheduler.blocked)
            for holder, name in (
                (scheduler, "timers"),
                (scheduler.handoff, "_timers"),
                (scheduler.handoff, "_leases"),
            ):
                timers: Any = getattr(holder, name, None)
                if timers is not None:
                    timers._ring = partial(self._rings, member, timers, timers._ring)
        receiver = getattr(member.mover, "receiver", None)
        if isinstance(receiver, KvReceiver):
            kv: Any = receiver
            kv.arrive = partial(self._counted, member, receiver.arrive)
            if kv.landing is not None:
                kv.landing._arrive = kv.arrive
                _Ring(self._report, self._reached, member)

    def said(self, arrival: Arrival) -> None:
        """Count the metadata that *arrival* brings."""
        self.nbytes[arrival.room] += sum(map(len, arrival.rows))

    def finished(self, message: Finished) -> None:
        """Check that the times of *message* follow each other."""
        times = [(name, getattr(message, name)) for name in _PHASES]
        if message.first is not None:
            times[-1:] = [("first", message.first), times[-1]]
        ended = self.ended.get(message.room, message.prefilled)
        if abs(message.prefilled - ended) > _ROUNDING:
            self._report("I14", f"room {message.room} is prefilled at {message.prefilled:g} s, not {ended:g} s")
        for (first, one), (then, other) in pairwise(times):
            if one > other + _ROUNDING and then != "first":
                self._report("I14", f"room {message.room}: {then} at {other:g} s, {first} at {one:g} s")
        if message.first is not None and message.first < message.polled - _ROUNDING:
            self._report(
                "I14", f"the first token of room {message.room} is out at {message.first:g} s, before its KV"
            )

    def posted(self, batch: Batch, label: str) -> None:
        """Check that the room of what is posted has not failed at the rank that posts it, and its send queues."""
        number = int(label.partition("/")[0])
        self.moved.add(number)
        what = label, batch.source.owner, batch.target.owner, int(batch.target_offset[0]), batch.nbytes
        if what in self._posted:
            self._report("I14", f"{label} from {what[1]} to {what[2]} is posted twice")
        self._posted.add(what)
        for owner in {batch.source.owner, batch.target.owner}:
            self._check_credits(owner)
            mover = getattr(self._members.get(owner), "mover", None)
            part = getattr(mover, "sender", None) or getattr(mover, "receiver", None)
            if not isinstance(part, KvSender | KvReader):
                continue
            state: Any = part._rooms.get(number)
            if state is not None and (state.failed if isinstance(part, KvReader) else state.status is Status.FAILED):
                self._report("I13", f"room {number} failed on {owner}, which posts a transfer of it after that")
            queues = part._policy.queues if isinstance(part, KvSender) else 0
            if queues and part._under_way > queues:  # each begins a write when the one before is over
                self._report("I15", f"{owner} has {part._under_way} writes under way, from {queues} queues")
            other = instance_of(batch.target.owner if owner == batch.source.owner else batch.source.owner)
            due = [*(name for name, lists in part.peers._lists.items() if lists), *part.peers._waiting]
            early = [name for name in due if instance_of(name) == other]
            if early:
                self._report("I15", f"{owner} posts {label}, and makes its lists of descriptors of {early[0]} first")
            if isinstance(part, KvSender) and part._policy.handover and part._policy.queues:
                self._check_handover(owner, part, self._members[owner].clock.now)

    def _check_handover(self, owner: str, sender: KvSender, now: float) -> None:
        # Each queue's thread waits for the scheduler's before each write.
        policy = sender._policy
        begun = self._begun.setdefault(id(sender), deque(maxlen=policy.queues))
        if len(begun) == policy.queues and now - begun[0] < policy.handover - _ROUNDING:
            self._report("I15", f"{owner} posts {1 + policy.queues} writes in {now - begun[0]:g} s")
        begun.append(now)

    def transferred(self, records: Iterable[TransferRecord], limit: float) -> None:
        """Check that none of *records* took more than *limit* seconds to end, or timed out in less."""
        for record in records:
            if record.operation not in ("write", "read"):
                continue  # a collective has a limit of its own
            if record.status == "ok":
                self.nbytes[int(record.label.partition("/")[0])] += record.nbytes
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

    def _rings(self, member: Any, timers: Any, ring: Callable[[None], None], _: None) -> None:
        ring(None)
        late = [key for key, limit in timers._limits.items() if limit < member.clock.now - _ROUNDING]
        if late:
            self._report("I15", f"the time of room {late[0]} on {member.rank.name} is over, and nobody saw to it")

    def _loads(self, member: Any, move: Callable[[Any], Any], message: Any) -> Any:
        load = move(message)
        if message.reads and not message.prefetch:
            left = [one for one in self._loading.get(id(member), ()) if not one.triggered]
            self._loading[id(member)] = [*left, load]
        return load

    def _computes(self, member: Any, compute: Callable[[Any], Any], message: Any) -> Any:
        loading = [one for one in self._loading.get(id(member), ()) if not one.triggered]
        if loading:
            self._needs[id(member), id(message)] = loading
        return compute(message)

    def _forward_begins(self, member: Any, begin: Callable[[Any], Any], message: Any) -> Any:
        if not all(one.triggered for one in self._needs.pop((id(member), id(message)), ())):
            self._report("I10", f"{member.rank.name} begins a forward with KV that is not back from a tier")
        return begin(message)

    def _begins_forward(self, member: Any, compute: Callable[[Any], Any], message: Any) -> Any:
        rooms = [(chunk.room, member.scheduler.rooms.get(chunk.room)) for chunk in message.chunks]
        for number in [number for number, room in rooms if room is None or room.failed]:
            self._report("I13", f"{member.rank.name} begins a forward of room {number}, which is over or has failed")
        return compute(message)

    def _begins(self, member: Any, begin: Callable[[], None]) -> None:
        coming = self._coming.get(id(member))
        if coming is not None and not coming.triggered:
            self._report("I2", f"{member.rank.name} begins a step with KV that is not back from host memory")
        scheduler: Any = member.scheduler
        for room in scheduler.joined:
            if room.state != "running":
                self._report(
                    "I14", f"room {room.request.room} gets its first token on {member.rank.name}: {room.state}"
                )
        begin()
        batch, pages = scheduler.batch, scheduler.pages
        known = pages.held == pages._cached  # all pages
        steps = batch.steps(scheduler._due) if batch.runs and known else 0
        ends = [
            (number, tokens - ceil((end - batch._step - steps + 1) * growth - _ROUNDING))
            for end, number, tokens, growth in (batch._members if steps else ())
        ]
        needs = [pages.pool.rounded(member.job.page_count(end)) - pages.pool.count(number) for number, end in ends]
        if sum(need for need in needs if need > 0) > pages.pool.free:
            what = f"{pages.pool.free} pages are free on {member.rank.name}, and its batch needs {needs}"
            self._report("I14", f"{what} more until it looks again")

    def _entered(
        self, member: Any, join: Callable[[int, int, int], None], number: int, context: int, steps: int
    ) -> None:
        request = self._rooms.get(number)
        if request is not None and context + steps != request.input + request.output:
            what = f"room {number} is decoded to {context + steps} tokens on {member.rank.name}"
            self._report("I14", f"{what}, of {request.input} + {request.output}")
        join(number, context, steps)
        batch, most = member.scheduler.batch, 1 + member.job.engine.draft
        self._ends[id(batch), number] = batch._step + -(-steps // most)

    def _leaves(self, batch: Any, finished: Callable[[], Iterator[int]]) -> Iterator[int]:
        for number in finished():
            if batch._step < self._ends.pop((id(batch), number), 0):
                self._report("I14", f"room {number} ends before it has all its tokens")
            yield number

    def _chosen(self, registry: Any, choose: Callable[..., Any], room: int, *query: Any) -> Any:
        pair = choose(room, *query)
        for name in map(instance_of, pair or ()):
            if name in registry.resting:
                self._report("I13", f"{name} drains, and is given room {room}")
        return pair

    def _check_credits(self, owner: str) -> None:
        # One that exceeds the queue by itself may have it alone.
        endpoint: Any = getattr(getattr(self._members.get(owner), "rank", None), "endpoint", None)
        for peer, connection in getattr(endpoint, "_connections", {}).items():
            queue = connection.send_queue
            if not queue._depth:
                continue
            waits = [one for one in endpoint.moving.values() if one.connection is connection and one.posting]
            waits = [one for one in waits if not one.posting.aborted]
            for one, following in pairwise(waits):
                if one.posting.posted is None and following.posting.posted is not None:
                    self._report("I7", f"{owner} posts {following.transfer.label!r} before {one.transfer.label!r}")
            if late := [one for one in waits if one.posting.posted is None and one.transfer.triggered]:
                self._report("I15", f"{late[0].transfer.label!r} of {owner} has failed, and waits to be posted")
            first = queue._waiting[0].descriptors if queue._waiting else inf
            if queue.outstanding + first <= queue._depth or (first < inf and not queue.outstanding):
                self._report("I12", f"a post of {owner} waits, and there is room for it in the queue to {peer}")
            if 0 < queue._depth < queue.outstanding:
                own = [one for one in endpoint.moving.values() if one.connection is connection]
                under_way = [one for one in own if one.posting is not None and one.posting.posted is not None]
                if sum(not one.posting.aborted for one in under_way) > 1:
                    what = (
                        f"{queue.outstanding} descriptors are outstanding to {peer}, of {queue._depth} that may be"
                    )
                    self._report("I15", f"{owner}: {what}")

    def _counted(
        self, member: Any, arrive: Callable[..., None], arrival: Arrival, reason: str = "", count: int = 1
    ) -> None:
        key = member.rank.name, member.incarnation, arrival.room, arrival.writer
        self._arrived[key] += count
        if arrival.count:
            self._written[key] = arrival.count
            if member.index == 0:  # whose word the times of a request are
                self.ended[arrival.room] = max(arrival.ended, self.ended.get(arrival.room, 0.0))
        most = self._written.get(key)
        if most is not None and self._arrived[key] > most:
            what = f"{self._arrived[key]} writes of rank {arrival.writer} for room {arrival.room}"
            self._report("I14", f"{member.rank.name} counts {what}, there are {most}")
        arrive(arrival, reason, count)


class _Ring:
    """Watches the staging ring of a decode rank: who waits for a slot, and for whom slots and blocks are kept."""

    def __init__(self, report: Callable[[str, str], None], reached: Counter[str], member: Any) -> None:
        self._report, self._reached, self._member = report, reached, member
        self._landing = member.mover.receiver.landing
        self._writers: dict[Any, str] = {}  # by question: the incarnation that asked
        self._landing.ring.request = partial(self._asked, self._landing.ring.request)
        for name in ("ask", "scatter", "give_back", "forget", "sever", "_expire", "_scattered"):
            setattr(self._landing, name, partial(self._called, name, getattr(self._landing, name)))

    def _called(self, name: str, method: Callable[..., None], *arguments: Any) -> None:
        if name == "ask":
            asked = arguments[1]
            self._writers[asked.room, asked.writer, asked.chunk] = asked.prefill
        self._check_line()
        before = self._states()
        method(*arguments)
        after = self._states()
        for key in {**before, **after}:
            step = before.get(key, "new"), after.get(key, "over")
            if step[0] != step[1]:
                self._reached[f"slot {step[0]}>{step[1]}"] += 1
        if not self._member.has_ended:
            self._check_line()
            self._check_kept(arguments[0] if name == "sever" else "")
            if name == "scatter":
                self._check_scattered(arguments[0])

    def _asked(self, request: Callable[[Any, int], Any], key: Any, size: int) -> Any:
        before, slot = next(iter(self._landing.ring._line), None), request(key, size)
        if before is not None and slot is not None:
            self._report("I7", f"{self._member.rank.name} gives {key} a slot of its ring before {before}")
        return slot

    def _states(self) -> dict[Any, str]:
        line, states = self._landing.ring._line, {}
        for key, one in self._landing._questions.items():
            here = "scattering" if one.scattering else "arrived" if one.arrival else "given"
            states[key] = "waiting" if key in line else here
        return states

    def _check_line(self) -> None:
        # Whatever freed a slot has also given it to whoever waits.
        ring = self._landing.ring
        if not ring._line or self._member.has_ended:
            return
        taken = sorted((slot.position % ring.size, slot.size) for slot in ring.slots.values())
        starts, ends = [first for first, _ in taken] + [ring.size], [0] + [first + size for first, size in taken]
        gaps = (start - end for start, end in zip(starts, ends, strict=True))
        if max(gaps) >= next(iter(ring._line.values())):
            self._report("I12", f"a chunk waits for a slot of the ring of {self._member.rank.name}, where it fits")

    def _check_kept(self, severed: str) -> None:
        # A room that is over here keeps only slots that its writer may still reach, and a dead writer none; ranks
        # are *severed* one after the other.
        proven, name = self._member.mover.fence._proven, self._member.rank.name
        for key, state in self._states().items():
            question, writer = self._landing._questions[key], self._writers[key]
            if question.forgotten and state in ("waiting", "arrived"):
                self._report("I8", f"{name} has forgotten room {key[0]}, and keeps a chunk of it: {state}")
            dead = proven.get(instance_of(writer), 0) >= epoch_of(writer)
            if dead and severed in ("", question.sender) and state != "scattering":
                self._report("I8", f"{name} keeps a slot for {writer}, which has no transfer under way: {key}")

    def _check_scattered(self, arrival: Arrival) -> None:
        key, states = (arrival.room, arrival.writer, arrival.chunk), self._states()
        others = [state for other, state in states.items() if (other[0], other[2]) == (key[0], key[2])]
        if states.get(key) == "arrived" and "given" not in others:
            what = f"chunk {arrival.chunk} of room {arrival.room} is here"
            self._report("I12", f"all of {what}, and {self._member.rank.name} does not scatter it")


class _Stall:
    """Watches when a queue that only pages in quarantine block gives up: not before, and woken for it."""

    def __init__(self, report: Callable[[str, str], None], member: Any, stall: Any) -> None:
        self._report, self._member, self._seconds = report, member, stall._seconds
        self._since: float | None = None
        self._woken = False
        self._resumed = 0.0  # when the last pause of the rank ends: all that was due wakes it at that instant
        clock = member.clock
        clock.pause = partial(self._paused, clock.pause)
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
        if not gives_up and waited > self._seconds + _ROUNDING:
            self._report(
                "I15", f"{self._member.rank.name} waits {waited:g} s for what it may wait {self._seconds:g}"
            )
        if gives_up and waited > self._seconds + _ROUNDING and not self._woken and now > self._resumed:
            self._report(
                "I12", f"nothing wakes {self._member.rank.name} when its queue has waited {self._seconds:g} s"
            )
        return gives_up

    def _paused(self, pause: Callable[[float], None], end: float) -> None:
        self._resumed = end
        pause(end)

    def _cleared(self, clear: Callable[[], None]) -> None:
        self._since = None
        clear()

    def _wakes(self, wake: Callable[[], None]) -> None:
        self._woken = True
        wake()
