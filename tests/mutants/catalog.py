"""Known defects of KV handoffs, each as a small change of our own code that the trial must catch.

A mutant changes exactly what its line says, for the time of a ``with mutant.applied():``, and names the invariant of
`pdsim.kv.checks` that has to find it.  *relevant* tells scenarios in which the change can show at all from those that
need not be run; they count as seeds all the same.  What is too rare among all scenarios has a *setting* of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from dataclasses import replace as replaced
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

from msgspec.structs import replace as changed

from experiments import _faults_scenario as scenarios
from experiments._faults_scenario import Scenario, attempt, draw
from pdsim.errors import TransferTimeout
from pdsim.kv import mapping, outgoing, sender
from pdsim.kv.landing import Landing
from pdsim.kv.links import Links
from pdsim.kv.mapping import HeadSlice
from pdsim.kv.messages import Arrived, Ask
from pdsim.kv.plan import cut
from pdsim.kv.policy import Policy
from pdsim.kv.queues import Queues
from pdsim.kv.receiver import KvReceiver
from pdsim.kv.sender import KvSender
from pdsim.kv.staging import GatherBuffers, Ring
from pdsim.kv.status import Status
from pdsim.serving import decode, prefill, reader, router
from pdsim.serving.job import ROUTER, index_of, instance_of
from pdsim.serving.settings import Side
from pdsim.transfer import Transfer

__all__ = ["IMPOSSIBLE", "LIMIT", "MUTANTS", "Caught", "Mutant"]

REQUESTS = 50
"""Of each scenario."""

INTENSITY = 0.4
"""Probability of each kind of fault."""

LIMIT = 150
"""Seeds, from 0 on, within which every mutant must be caught."""

Change = tuple[Any, str, Any]  # owner, attribute, what it becomes


class Caught(NamedTuple):
    """How a mutant was caught."""

    seeds: int  # that were needed
    run: int  # of which so many were run: the change could show
    invariants: list[str]  # that did not hold in the last


@dataclass(frozen=True)
class Mutant:
    """One defect: *hazard* it stands for, *what* is changed, and the *invariant* that catches it.

    *setting* changes what is drawn; under it alone nothing may be found.
    """

    hazard: str
    what: str
    invariant: str
    changes: tuple[Change, ...]
    relevant: Callable[[Scenario], bool] = lambda _: True
    setting: tuple[Change, ...] = ()

    def catch(self) -> Caught | None:
        """Explore seeds until *invariant* does not hold; return None if it always does."""
        run = 0
        for seed in range(LIMIT):
            with patched(self.setting):
                scenario = draw(seed, REQUESTS, INTENSITY)
                if not self.relevant(scenario):
                    continue
                run += 1
                with self.applied():
                    found = attempt(scenario).violations
                if any(violation.invariant == self.invariant for violation in found):
                    assert not self.setting or not attempt(scenario).violations, f"seed {seed} is not clean unchanged"
                    invariants = sorted({violation.invariant for violation in found})
                    return Caught(seed + 1, run, invariants)
        return None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Change the code for as long as the context lasts."""
        with patched(self.changes):
            yield


@contextmanager
def patched(changes: tuple[Change, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        yield


# --- which scenarios ------------------------------------------------------------------------------------------------


def staged(scenario: Scenario) -> bool:
    return scenario.job.staging is not None and scenario.job.prefill.tp != scenario.job.decode.tp


def failing(scenario: Scenario) -> bool:
    """Writes fail, or users leave."""
    return bool(scenario.cancels or scenario.faults.late or scenario.faults.squeezes)


def staged_and_failing(scenario: Scenario) -> bool:
    return staged(scenario) and failing(scenario)


def delayed(scenario: Scenario) -> bool:
    return scenario.faults.delayed > 0


def shares(scenario: Scenario) -> bool:
    """Context-parallel ranks divide the pages of a request."""
    return scenario.job.prefill.cp > 1 and scenario.job.all_cp_ranks


def lost_and_back(side: str) -> Callable[[Scenario], bool]:
    """Return what tells whether an instance of *side* is lost and started again."""
    return lambda scenario: bool(scenario.restart) and all(name.startswith(side) for name in scenario.kill)


def replicating(scenario: Scenario) -> bool:
    job = scenario.job
    return job.prefill.tp < job.shape.heads < job.decode.tp and not job.shape.latent_bytes


# --- statuses and counting ------------------------------------------------------------------------------------------


def maximum(old: Status, new: Status) -> Status:
    return max(old, new)


def without_counting(self: KvReceiver, number: int, room: Any) -> None:
    if room.last is None or room.reserve is None:
        return
    del self._rooms[number]
    self._report(Arrived(number, self._verify(room.reserve)), room.last)


def counted_by_tp(original: Any, self: KvSender, *arguments: Any) -> Any:
    return changed(original(self, *arguments), writer=self._place.tp)


def over_with_the_last(self: KvSender, state: Any) -> None:
    state.unfinished -= 1
    if state.status is Status.FAILED:
        self._settle(state)
    elif state.room in self._rooms:
        self._conclude(state)


def counted_as_done(original: Any, self: KvSender, delivery: Any, error: Exception) -> None:
    original(self, delivery, error)
    self._over(delivery.state)


def failure_ignored(self: KvSender, delivery: Any, event: Any) -> None:
    state = delivery.state
    state.moving -= 1
    self._over(state)


def read_twice(original: Any, self: KvSender, delivery: Any, event: Any) -> None:
    """Send again as a message what may have arrived."""
    again = not event.ok and isinstance(event.value, TransferTimeout) and delivery.state.status is not Status.FAILED
    if not again or delivery.piece is None or delivery.piece.rows or delivery.piece.state:
        original(self, delivery, event)
        return
    event.settled.callbacks.append(partial(self._settled, delivery.state))
    self._retry(delivery, event, event.value)


# --- layout ---------------------------------------------------------------------------------------------------------


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


def counted_in_the_request(original: Any, self: prefill.Leader, room: Any, tokens: int) -> Any:
    """Cut a chunk's pages out of those that are sent by their place in the whole request."""
    chunk = original(self, room, tokens)
    return changed(chunk, runs=cut(room.runs, chunk.first_page, sum(count for _, _, count in chunk.runs)))


HELD = ((decode.Leader, "held", lambda self, request: self.job.page_count(request.input) // 2),)
"""Decode has the first half of the pages of every request already."""


# --- staging --------------------------------------------------------------------------------------------------------


def knows_rooms_only(original: Any, self: reader.Worker, *arguments: Any) -> None:
    """Drop a question that overtakes the registration of its room, which is never asked again."""
    original(self, *arguments)
    ask, rooms = self.handlers.get(Ask), self.receiver._rooms
    if ask is not None:
        self.handlers[Ask] = lambda sender_, message: ask(sender_, message) if message.room in rooms else None


def severed_by_number(self: Landing, rank: str) -> None:
    """Free what the writer of that number has, of whichever instance it is."""
    for key, question in list(self._questions.items()):
        if key[1] == index_of(rank) and not question.scattering:
            self._drop(key)
    self._advance()


def gathers_what_failed(original: Any, self: KvSender, delivery: Any, queue: int) -> Any:
    """Gather also for a room that was given up while it stood in the queue; nothing of that is written."""
    position = delivery.state.asks.get(delivery.key)
    if delivery.piece is not None and delivery.piece.rows and position is not None and position >= 0:
        return self._stage(delivery, delivery.piece, queue, position)
    return original(self, delivery, queue)


def frees_slots_at_once(original: Any, self: Any, room: Any) -> None:
    landing, number = self.receiver.landing, room.request.room
    if landing is not None and not room.consensus.over:
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


def numbered_by_place(original: Any, self: prefill.Leader, *arguments: Any) -> Any:
    """Number a chunk by where it begins, as if all before it had been full: those of shared forwards are not."""
    chunk = original(self, *arguments)
    return changed(chunk, index=chunk.first_page * self.job.page_size // self.job.chunk)


def key_unchecked(original: Any, self: Ring[Any], key: Any, size: int) -> Any:
    """Give the slot that *key* has already."""
    return self._slots[key] if key in self._slots else original(self, key, size)


def stays_in_its_round(original: Any, self: Ring[Any], size: int) -> int | None:
    """Do not begin an empty ring anew: what does not fit behind its head waits for ever."""
    if self._slots:
        return original(self, size)  # type: ignore[no-any-return]
    return self.head if self.head % self.size + size <= self.size else None


def sliced_after_all(original: Any, self: KvSender, delivery: Any, queue: int) -> Any:
    """Write slices although a slot was granted, and let the other side scatter what the slot holds."""
    position = delivery.state.asks.get(delivery.key) if delivery.piece is not None and delivery.piece.rows else None
    if position is None or position < 0 or delivery.chunk.index % 2:
        yield from original(self, delivery, queue)
        return
    batch = delivery.target.batch(delivery.piece).over(self._region, delivery.target.region)
    yield self._write(delivery, batch, "staged")


# --- pages and slots ------------------------------------------------------------------------------------------------


def releases_at_once(original: Any, self: Any, room: Any) -> None:
    original(self, room)
    self._release(room.request.room)


def frees_slot_at_once(original: Any, self: Any, room: Any) -> None:
    number = room.request.room
    if not room.consensus.over and number in self.slots._owned:
        self.slots.release(number)
    original(self, room)


def drops_without_slot(self: Any, number: int) -> None:
    del self._rooms[number]
    self.pages.release(number)
    if number in self.slots._owned:
        self.slots.release(number)
    self.state.release(number)
    self._end_if_drained()


def settles_at_once(self: KvSender, state: Any) -> None:
    """Say that nothing moves while writes are under way."""
    if state.aborted and not state.planned:
        state.aborted = False
        self._rooms.pop(state.room, None)
        self._report(sender.Settled(state.room))


# --- ranks ----------------------------------------------------------------------------------------------------------


def knows_no_abort(self: Any, sender_: str, message: Any) -> None:
    raise KeyError(f"ABORT of room {message.room}")


def dies(self: Queues[Any], number: int) -> Any:
    """A worker ends with the first exception of an item."""
    queue = self._queues[number]
    while True:
        while queue.items:
            try:
                yield from self._work_on(queue.items.popleft(), number)
            except Exception:
                return
        queue.idle = self._clock.event()
        yield queue.idle


class Unraised(Exception):
    """Nothing raises this, so who catches it catches nothing."""


def counts_messages(self: Any, _: int, message: Any) -> None:
    """A rank that says twice that it is ready stands for another one that is not."""
    ready = self._ready.setdefault(message.peer, set())
    ready.add(len(ready))
    if len(ready) == self.job.prefill.size:
        self.send(ROUTER, message)


def gone_by_prefix(self: prefill.Leader, life: str) -> None:
    """Give up the rooms of every instance whose name begins like that of *life*."""
    prefill.Worker.peer_gone(self, life)
    self._ready.pop(life, None)
    for room in [room for room in self._rooms.values() if room.request.decode.startswith(instance_of(life))]:
        self._give_up(room)


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


def overtaken(self: Any, rank: int, message: Any) -> None:
    if message.peer not in self._met:
        self.ignore()
    else:
        COUNT_READY(self, rank, message)


COUNT_READY = prefill.Leader._count_ready


def lose_unnoticed(self: Any, instance: str, reason: str) -> None:
    """A loss does not count as progress."""
    moved = self._moved
    LOSE(self, instance, reason)
    self._moved = moved


LOSE = router.Router._lose


def impatient(original: Any, self: Any, *arguments: Any) -> None:
    original(self, *arguments)
    self._patience -= self.job.deadline / 3


def swapped(original: Any, self: Any, message: Any) -> Any:
    """A follower takes up the chunks of a forward in another order than its leader."""
    if not self.index:
        return original(self, message)
    return original(self, changed(message, chunks=message.chunks[::-1]))


def takes_up_late(original: Any, self: reader.Worker, sender_: str, message: Any) -> None:
    """A follower takes up the pages of every other room a moment later, when those of the next may have come."""
    if message.room % 2:
        self.clock.call_at(self.clock.now + 1e-2, lambda _: original(self, sender_, message), None)
    else:
        original(self, sender_, message)


def counted_for_ever(original: Any, self: router.Router, request: Any) -> None:
    """A request that fails stays among the tokens outstanding of its instances."""
    if request.finished is not None:
        original(self, request)


def mutated(function: Any, owner: Any, name: str) -> Change:
    """Return the change of method *name* of *owner* to *function*, which is given the original first."""
    original = getattr(owner, name)

    def method(self: Any, *arguments: Any) -> Any:
        return function(original, self, *arguments)

    return owner, name, method


def nothing(*_: Any) -> None:
    """Do nothing."""


MUTANTS = (
    Mutant("Z1", "a status is the greater of old and new, so that a failure can become a success", "I1",
           ((outgoing, "advance", maximum), mutated(counted_as_done, KvSender, "_broken")), failing),
    Mutant("Z2", "the source head forgets that decode ranks replicate heads", "I2",
           ((mapping, "head_slice", forgets_replicas),), replicating),
    Mutant("Z3", "a ring that has become empty is not begun anew, nor a question refused in time", "I5",
           (mutated(stays_in_its_round, Ring, "_place"), (Landing, "_expire", nothing)), staged),
    Mutant("Z4", "a question for a slot that overtakes the registration of its room is dropped", "I5",
           (mutated(knows_rooms_only, reader.Worker, "__init__"),),
           lambda scenario: staged(scenario) and delayed(scenario) and scenario.job.decode.size > 1),
    Mutant("Z5", "slots of a room that failed are not given back", "I8", ((Landing, "give_back", nothing),),
           staged_and_failing),
    Mutant("Z6", "a room succeeds with its last chunk, though an earlier one still waits", "I3",
           ((KvSender, "_over", over_with_the_last),), staged),
    Mutant("Z7", "a room is complete when its last chunk is there", "I2", ((KvReceiver, "_check", without_counting),)),
    Mutant("Z8", "a gather buffer is filled again while it is written from", "I2",
           ((GatherBuffers, "lend", nothing), mutated(not_waited_for, KvSender, "_stage")), staged),
    Mutant("Z9", "slots are freed with their room, while writes to them may land", "I4",
           (mutated(frees_slots_at_once, decode.Leader, "_fail"),), staged_and_failing),
    Mutant("Z10", "chunks are numbered by where they begin, so that two of them have one slot", "I4",
           (mutated(numbered_by_place, prefill.Leader, "_chunk"), mutated(key_unchecked, Ring, "request")), staged),
    Mutant("Z11", "slices are written after a slot was granted, and the stale slot scattered over them", "I2",
           (mutated(sliced_after_all, KvSender, "_deliver"),), staged),
    Mutant("Z12", "pages are counted in the request, though those that decode holds are not sent",
           "I2", (mutated(counted_in_the_request, prefill.Leader, "_chunk"),), setting=HELD),
    Mutant("Z13", "decode frees pages at an abort while writes to them are under way", "I3",
           (mutated(releases_at_once, decode.Leader, "_fail"),), failing),
    Mutant("Z13b", "prefill says that nothing moves while writes are under way", "I3",
           ((KvSender, "_settle", settles_at_once),), failing),
    Mutant("Z14", "an abort raises in the thread that receives it", "I5",
           ((prefill.Leader, "_abort", knows_no_abort),), lambda scenario: bool(scenario.cancels)),
    Mutant("Z15", "writers are told apart by their tensor-parallel rank alone", "I5",
           (mutated(counted_by_tp, KvSender, "_arrival"),), lambda scenario: scenario.job.prefill.pp > 1),
    Mutant("Z16", "the result of a write is not looked at", "I3", ((KvSender, "_written", failure_ignored),), failing),
    Mutant("Z17", "context-parallel ranks divide pages by number, not by position", "I2",
           ((KvSender, "_share", share_by_number),), shares),
    Mutant("Z18", "a write that fails raises in its worker, and a worker ends with the first exception", "I5",
           ((Queues, "_work", dies), (sender, "TransferError", Unraised)),
           lambda scenario: scenario.job.handoff.queues > 0 and failing(scenario)),
    Mutant("Z21", "a pair is connected after as many messages as it has ranks, whoever sent them", "I8",
           ((prefill.Leader, "_count_ready", counts_messages),),
           lambda scenario: scenario.job.prefill.size > 1 and delayed(scenario)),
    Mutant("Z21b", "the loss of an instance is that of all whose names begin like its own", "I5",
           ((prefill.Leader, "peer_gone", gone_by_prefix),), lambda scenario: bool(scenario.kill), ELEVEN),
    Mutant("Z22", "a metadata slot is freed at an abort while a write to it is under way", "I6",
           (mutated(frees_slot_at_once, decode.Leader, "_fail"), (decode.Leader, "_drop", drops_without_slot)),
           failing),
    Mutant("D1", "a follower's Ready that overtakes its leader's meeting is lost", "I5",
           ((prefill.Leader, "_count_ready", overtaken),), delayed),
    Mutant("D2", "metadata whose write timed out is sent again, and counted twice", "I8",
           (mutated(read_twice, KvSender, "_written"),), failing),
    Mutant("D3", "requests are given up as stalled before the loss of an instance can be noticed", "I5",
           (mutated(impatient, router.Router, "__init__"), (router.Router, "_lose", lose_unnoticed)),
           lambda scenario: bool(scenario.kill)),
    Mutant("D4", "with one prefill instance end the slots of all ranks of the same numbers, of whichever one", "I4",
           ((Landing, "sever", severed_by_number),),
           lambda scenario: staged(scenario) and lost_and_back("prefill")(scenario), TWO_STAGED),
    Mutant("O1", "a follower takes up chunks in another order than its leader", "I7",
           (mutated(swapped, prefill.Worker, "compute"),), lambda scenario: scenario.job.prefill.size > 1),
    Mutant("O2", "a follower at decode takes up pages in another order than its leader", "I7",
           (mutated(takes_up_late, reader.Worker, "_reserve"),), lambda scenario: scenario.job.decode.size > 1),
    Mutant("O3", "pages of a room that was given up in a queue are gathered, though not sent", "I3",
           (mutated(gathers_what_failed, KvSender, "_deliver"),), staged_and_failing),
    Mutant("O4", "the tokens of a request that failed stay outstanding at its instances", "I8",
           (mutated(counted_for_ever, router.Router, "_uncount"),), failing),
    Mutant("O5", "the ranks of an instance that was lost are never forgotten", "I8", ((Links, "drop", nothing),),
           lost_and_back("decode")),
)  # fmt: skip

IMPOSSIBLE = {
    "Z19": "rows are read through `Buffer.read`, which knows its own memory; there are no raw pointers to misread. "
    "`Policy` refuses rows on the host for the data path",
    "Z20": "the pool of a policy is looked up by its whole name in a table (`POOLS`), never searched for in a string; "
    "a name that is not there is refused",
}
"""Hazards that cannot be written down as a change of our code, and why."""
