"""The changes of our code that `tests.mutants.catalog` makes, and the settings that some of them need to show."""

from __future__ import annotations

from dataclasses import replace as replaced
from functools import partial
from typing import Any

from msgspec.structs import replace as changed

from experiments.faults import scenario as scenarios
from pdsim.core.errors import TransferTimeout
from pdsim.hardware.machine import Interconnect
from pdsim.kv import mapping, messages, push
from pdsim.kv.mapping import HeadSlice
from pdsim.kv.messages import TransferDone
from pdsim.kv.plan import cut
from pdsim.kv.policy import Policy
from pdsim.kv.pull import KvReader
from pdsim.kv.push import KvSender, Queues
from pdsim.kv.receiver import KvReceiver
from pdsim.kv.rooms import Status
from pdsim.kv.staging.ring import Ring
from pdsim.kv.staging.staging_receiver import StagingReceiver
from pdsim.models.parallel import Side
from pdsim.serving import router
from pdsim.serving.deployment import ROUTER, index_of, instance_of
from pdsim.serving.handoff.pull import PullPrefillLeader
from pdsim.serving.handoff.push import PushDecode, PushDecodeLeader, PushPrefillLeader
from pdsim.serving.prefill import PrefillScheduler
from pdsim.serving.prefill_worker import PrefillWorker
from pdsim.serving.rank_process import EngineRank
from pdsim.serving.settings import ServingEngine
from pdsim.transfer import Transfer

Change = tuple[Any, str, Any]  # owner, attribute, what it becomes


# --- incarnations --------------------------------------------------------------------------------------------------


def connects_as_another(original: Any, self: EngineRank, sender: str, message: Any) -> None:
    """Take an introduction for one's own, whichever incarnation of this rank it is meant for."""
    original(self, sender, changed(message, started=self.started))


# --- statuses and counting -----------------------------------------------------------------------------------------


def maximum(old: Status, new: Status) -> Status:
    return max(old, new)


def without_counting(self: KvReceiver, number: int, room: Any) -> None:
    if room.last is None or room.reserve is None:
        return
    del self._rooms[number]
    self.report(TransferDone(number, self._verify(room.reserve)), room.last)


def counted_by_tp(original: Any, self: KvSender, *arguments: Any) -> Any:
    return changed(original(self, *arguments), writer=self._place.tp)


def over_with_the_last(self: KvSender, state: Any) -> None:
    state.unfinished -= 1
    if state.status is Status.FAILED:
        self._settle(state)
    elif state.room in self._rooms:
        self._conclude(state)


def counted_as_done(original: Any, self: KvSender, write: Any, error: Exception) -> None:
    original(self, write, error)
    if write.state.room in self._rooms:
        self._over(write.state)


def concluded_once(original: Any, self: KvSender, state: Any) -> None:
    """What is written of a room that is over is not counted: the change to its status is all there is to see."""
    if state.room in self._rooms:
        original(self, state)


def failure_ignored(self: KvSender, write: Any, event: Any) -> None:
    state = write.state
    state.moving -= 1
    self._over(state)


def read_twice(original: Any, self: KvSender, write: Any, event: Any) -> None:
    """Send again as a message what may have arrived."""
    again = not event.ok and isinstance(event.value, TransferTimeout) and write.state.status is not Status.FAILED
    if not again or write.spec is None or write.spec.rows or write.spec.state:
        original(self, write, event)
        return
    event.settled.callbacks.append(partial(self._settled, write.state))
    self._retry(write, event, event.value)


# --- layout --------------------------------------------------------------------------------------------------------


def forgets_replicas(shape: Any, prefill_tp: int, decode_tp: int, prefill_rank: int, decode_rank: int) -> Any:
    found = HEAD_SLICE(shape, prefill_tp, decode_tp, prefill_rank, decode_rank)
    if found is None or prefill_tp > decode_tp:
        return found
    mine, theirs = shape.local_heads(prefill_tp), shape.local_heads(decode_tp)
    return HeadSlice(decode_rank * theirs % mine, 0, theirs)


HEAD_SLICE = mapping.head_slice


def share_by_number(self: KvSender, chunk: Any) -> Any:
    """Divide the pages of a chunk by their numbers, as if they were neighbours."""
    if not self._all_cp_ranks or not chunk.runs:
        return SHARE(self, chunk)
    first = min(source for source, _, _ in chunk.runs)
    mine = mapping.share(sum(count for _, _, count in chunk.runs), self._grid.cp, self._place.cp)
    rows = []
    for source, target, count in chunk.runs:
        low, high = max(source, first + mine.start), min(source + count, first + mine.stop)
        if low < high:
            rows.append((low, target + low - source, high - low))
    return tuple(rows), chunk.last


SHARE = KvSender._share


def counted_in_the_request(original: Any, self: PrefillScheduler, room: Any, tokens: int) -> Any:
    """Cut a chunk's pages out of those that are sent by their place in the whole request."""
    chunk = original(self, room, tokens)
    return changed(chunk, runs=cut(room.runs, chunk.first_page, sum(count for _, _, count in chunk.runs)))


# --- pulled handoffs -----------------------------------------------------------------------------------------------


def pulled(job: Any, random: Any, lease: float = 30.0, fixed: bool = False) -> Any:
    """Have decode pull what the scenario would have pushed."""
    engine = ServingEngine(name="pull", handoff="pull", recompute=1, memory="grow", lease=lease, heartbeat=lease / 3)
    return replaced(SQUEEZED(job, random, fixed), engine=engine, staging=None)


SQUEEZED = scenarios._squeezed
PULLED = ((scenarios, "_squeezed", pulled),)
SHORT_LEASES = ((scenarios, "_squeezed", partial(pulled, lease=0.03)),)
"""Leases that end while a link is slow."""


def gives_back_with_the_lease(original: Any, self: PullPrefillLeader, number: int) -> None:
    """Hand pages out again when a lease ends, as if nobody read them any more."""
    original(self, number)
    if number in self._lent:
        self._return(self._lent[number])


def forgets_at_once(self: KvReader, number: int) -> None:
    """Say that nothing of a room moves while it is read."""
    room = self._rooms.pop(number, None)
    if room is not None:
        room.failed = True
    self._quiet(messages.RankQuiesced(number))


def complete_with_the_first(original: Any, self: KvReader, room: Any, event: Any) -> None:
    """Take a room for complete when the first of its reads is."""
    original(self, room, event)
    if event.ok and room.missing and not room.failed:
        self._complete(room)
        room.failed = True


# --- staging -------------------------------------------------------------------------------------------------------


def quiesced_by_number(self: StagingReceiver, rank: str) -> None:
    """Free what the writer of that number has, of whichever instance it is."""
    for key, question in list(self._questions.items()):
        if key[1] == index_of(rank) and not question.scattering:
            self._drop(key)
    self._advance()


def gathers_what_failed(original: Any, self: KvSender, write: Any, queue: int) -> Any:
    """Gather also for a room that was given up while it stood in the queue; nothing of that is written."""
    position = write.state.asks.get(write.key)
    if write.spec is not None and write.spec.rows and position is not None and position >= 0:
        return self._stage(write, write.spec, queue, position)
    return original(self, write, queue)


def frees_slots_at_once(original: Any, self: Any, room: Any) -> None:
    landing, number = self.mover.receiver.landing, room.request.room
    if landing is not None and room.waits:
        for key, question in list(landing._questions.items()):
            if key[0] == number and not question.scattering:
                landing._drop(key)
    original(self, room)


def not_waited_for(original: Any, self: KvSender, *arguments: Any) -> Any:
    """Go on with the next chunk while a block is being written."""
    program, value = original(self, *arguments), None
    while True:
        try:
            event = program.send(value)
        except StopIteration:
            return
        if isinstance(event, Transfer):
            return
        value = yield event


def numbered_by_place(original: Any, self: PrefillScheduler, *arguments: Any) -> Any:
    """Number a chunk by where it begins, as if all before it had been full: those of shared forwards are not."""
    chunk = original(self, *arguments)
    return changed(chunk, index=chunk.first_page * self.job.page_size // self.job.chunk)


def key_unchecked(original: Any, self: Ring[Any], key: Any, size: int) -> Any:
    """Give the slot that *key* has already."""
    return self.slots[key] if key in self.slots else original(self, key, size)


def stays_in_its_round(original: Any, self: Ring[Any], size: int) -> int | None:
    """Do not begin an empty ring anew: what does not fit behind its head waits for ever."""
    if self.slots:
        return original(self, size)  # type: ignore[no-any-return]
    return self.head if self.head % self.size + size <= self.size else None


def sliced_after_all(original: Any, self: KvSender, write: Any, queue: int) -> Any:
    """Write slices although a slot was granted, and let the other side scatter what the slot holds."""
    position = write.state.asks.get(write.key) if write.spec is not None and write.spec.rows else None
    if position is None or position < 0 or write.chunk.index % 2:
        yield from original(self, write, queue)
        return
    batch = write.target.batch(write.spec).over(self._region, write.target.region)
    yield self._write(write, batch, "staged")


# --- pages and slots -----------------------------------------------------------------------------------------------


def releases_at_once(original: Any, self: Any, room: Any) -> None:
    original(self, room)
    self.handoff._release(room.request.room)


def frees_slot_at_once(original: Any, self: Any, room: Any) -> None:
    number = room.request.room
    if room.waits and number in self.handoff.slots.owners:
        self.handoff.slots.release(number)
    original(self, room)


def forgets_without_slot(self: PushDecodeLeader, number: int) -> None:
    if number in self.slots.owners:
        self.slots.release(number)


def settles_at_once(self: KvSender, state: Any) -> None:
    """Say that nothing moves while writes are under way."""
    if state.aborted and not state.planned:
        state.aborted = False
        self._rooms.pop(state.room, None)
        self.report(push.RankQuiesced(state.room))


# --- ranks ---------------------------------------------------------------------------------------------------------


def knows_no_abort(self: Any, sender_: str, message: Any) -> None:
    raise KeyError(f"ABORT of room {message.room}")


def dies(self: Queues[Any], queue: Any, event: Any) -> None:
    """A worker ends with the first transfer that fails: its queue stays busy for ever."""
    if not event.ok:
        return
    if queue.program is not None:
        waits = self._advance(queue, queue.program, event)
        if waits is not None:
            waits.callbacks.append(lambda event: self._resume(queue, event))
            return
    self._next(queue)


class Unraised(Exception):
    """Nothing raises this, so who catches it catches nothing."""


def counts_messages(self: Any, _: int, message: Any) -> None:
    """A rank that says twice that it is ready stands for another one that is not."""
    ready = self.readiness._ready.setdefault((message.incarnation, message.peer), set())
    ready.add(len(ready))
    if len(ready) == self._scheduler.job.prefill.size:
        self._engine.send(ROUTER, message)


def gone_by_prefix(self: PrefillScheduler, incarnation: str) -> None:
    """Give up the rooms of every instance whose name begins like that of *incarnation*."""
    for room in [room for room in self.rooms.values() if room.request.decode.startswith(instance_of(incarnation))]:
        self._give_up(room)
    self.handoff.drop(incarnation)


def kills_the_second(seed: int, ranks: list[str], span: float) -> dict[str, float]:
    return dict.fromkeys(["decode1.0"], *KILLS(seed, ranks, span).values())


KILLS = scenarios._kills

ELEVEN = (
    (scenarios, "_kills", kills_the_second),
    (scenarios, "_SIDES", ((Side(tp=1), Side(tp=1, instances=11)),)),
    (scenarios, "_MACHINE", replaced(scenarios._MACHINE, gpus=16)),
)
"""So many instances that the name of one begins like that of another: decode1 and decode10."""

TWO_STAGED = (
    (scenarios, "_SIDES", ((Side(tp=1, instances=2), Side(tp=2)),)),
    (scenarios, "_POLICIES", (Policy(queues=1, staging=True),)),
)
"""Ranks of two prefill instances that have slots in the same rings."""


SLOW_WIRE = (
    (scenarios, "_MACHINE", replaced(scenarios._MACHINE, interconnect=Interconnect(kind="switch", rate=5e4))),
    (scenarios, "_ENGINE", replaced(scenarios._ENGINE, timeout=5.0)),
)
"""Writes so long that an instance is given up while they are under way."""


def overtaken(self: Any, rank: int, message: Any) -> None:
    if message.peer not in self._scheduler.worker.peers:
        self._engine.ignore()
    else:
        COUNT_READY(self, rank, message)


COUNT_READY = PushPrefillLeader._count_ready


def lose_unnoticed(original: Any, self: Any, *arguments: Any) -> None:
    """A loss does not count as progress."""
    moved = self._moved
    original(self, *arguments)
    self._moved = moved


def impatient(original: Any, self: Any, *arguments: Any) -> None:
    original(self, *arguments)
    self._patience -= self.job.deadline / 3


def swapped(original: Any, self: PrefillWorker, message: Any) -> Any:
    """A follower takes up the chunks of a forward in another order than its leader."""
    if not self.engine.index:
        return original(self, message)
    return original(self, changed(message, chunks=message.chunks[::-1]))


def takes_up_late(original: Any, self: PushDecode, sender_: str, message: Any) -> None:
    """A follower takes up the pages of every other room a moment later, when those of the next may have come."""
    if message.room % 2:
        clock = self.engine.clock
        clock.call_at(clock.now + 1e-2, lambda _: original(self, sender_, message), None)
    else:
        original(self, sender_, message)


def counted_for_ever(original: Any, self: router.OutstandingTokens, request: Any) -> None:
    """A request that fails stays among the tokens outstanding of its instances."""
    if request.finished is not None:
        original(self, request)


def mutated(function: Any, owner: Any, name: str) -> Change:
    """Return the change of method *name* of *owner* to *function*, which is given the original first."""
    original = getattr(owner, name)

    def method(self: Any, *arguments: Any) -> Any:
        return function(original, self, *arguments)

    return owner, name, method


def unbound(function: Any, owner: Any, name: str) -> Change:
    """Return the change of function *name* of module *owner* to *function*, which is given the original first."""
    return owner, name, partial(function, getattr(owner, name))


def nothing(*_: Any) -> None:
    """Do nothing."""
