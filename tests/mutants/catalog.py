"""Known defects of KV handoffs, each as a small change of our own code that the trial must catch.

A mutant changes exactly what its line says, while a scenario runs, and names the invariant of
`pdsim.verify.invariants` that has to find it.  *relevant* tells scenarios in which the change can show at all
from those that need not be run; they count as seeds all the same.  What is too rare among all scenarios has a
*setting* of its own.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace as replaced
from functools import partial
from typing import Any

from msgspec.structs import replace as changed

from experiments.faults import scenario as scenarios
from experiments.faults.scenario import Scenario
from pdsim.core.clock import Timers, fire
from pdsim.core.errors import TransferError, TransferFailed, TransferTimeout
from pdsim.hardware.machine import Interconnect
from pdsim.kv import contents, layout, messages, pages, push
from pdsim.kv.layout import HeadSlice
from pdsim.kv.messages import Status, TransferDone, encode, epoch_of, index_of, instance_of
from pdsim.kv.pages import cut
from pdsim.kv.plan import Peers
from pdsim.kv.policy import Policy
from pdsim.kv.pull import KvReader
from pdsim.kv.push import GatherBuffers, KvSender, Queues, when_settled
from pdsim.kv.receiver import KvReceiver, Ring, StagingReceiver
from pdsim.models.llm import Side
from pdsim.serving import block_manager, prefill, router
from pdsim.serving.block_manager import DecodePages, QuarantineStall
from pdsim.serving.decode import DecodeScheduler, Preemption
from pdsim.serving.handoff.pull import PullDecodeLeader, PullPrefillLeader
from pdsim.serving.handoff.push import PushDecode, PushDecodeLeader
from pdsim.serving.membership import Membership
from pdsim.serving.offload import TierScheduler
from pdsim.serving.prefill import PrefillScheduler, PrefillWorker
from pdsim.serving.rank_process import EngineRank
from pdsim.serving.settings import ServingEngine
from pdsim.serving.steps import RunningBatch
from pdsim.sim.endpoint import SimEndpoint
from pdsim.sim.memory import SimBuffer, SymmetricPool
from pdsim.sim.posting import SendQueue
from pdsim.transfer import Transfer
from tests.mutants.members import MEMBERSHIP
from tests.mutants.mutant import Mutant


def both_back(scenario: Scenario) -> bool:
    return {name.rstrip("0123456789.d") for name in scenario.restart} == {"prefill", "decode"}


def staged(scenario: Scenario) -> bool:
    return scenario.job.staging is not None and scenario.job.prefill.tp != scenario.job.decode.tp


def failing(scenario: Scenario) -> bool:
    """Writes fail, or users leave."""
    return bool(scenario.cancels or scenario.faults.late or scenario.faults.squeezes)


def staged_and_failing(scenario: Scenario) -> bool:
    return staged(scenario) and failing(scenario)


def delayed(scenario: Scenario) -> bool:
    return scenario.faults.delayed > 0


def lost_and_back(side: str) -> Callable[[Scenario], bool]:
    """Return what tells whether an instance of *side* is lost and started again."""
    return lambda scenario: bool(scenario.restart) and all(name.startswith(side) for name in scenario.kill)


def replicating(scenario: Scenario) -> bool:
    job = scenario.job
    return job.prefill.tp < job.shape.heads < job.decode.tp and not job.shape.latent_bytes


def nothing(*_: Any) -> None:
    """Do nothing."""


def without_counting(self: KvReceiver, number: int, room: Any) -> None:
    if room.last is None or room.reserve is None:
        return
    there = room.reserve
    del self._rooms[number]
    reason = self.pool.verify(there.room, there.input, there.pages, there.state, there.held, there.slot)
    self.report(TransferDone(number, reason=reason), room.last)


def counted_by_tp(original: Any, self: KvSender, *arguments: Any) -> Any:
    return changed(original(self, *arguments), writer=self._map.prefill.at(self._index).tp)


def over_with_the_last(self: KvSender, state: Any) -> None:
    state.unfinished -= 1
    if state.status is Status.FAILED:
        self._settle(state)
    elif state.room in self._rooms:
        self._conclude(state)


def counted_as_done(original: Any, self: KvSender, write: Any, error: Exception) -> None:
    original(self, write, error)
    if write.room.room in self._rooms:
        self._over(write.room)


def failure_ignored(self: KvSender, write: Any, event: Any) -> None:
    state = write.room
    state.moving -= 1
    self._over(state)


def read_twice(original: Any, self: KvSender, write: Any, event: Any) -> None:
    again = not event.ok and isinstance(event.value, TransferTimeout) and write.room.status is not Status.FAILED
    if not again or write.rows or write.state:
        original(self, write, event)
        return
    self._hold(write.room, event)
    write.path = "control"
    when_settled(event, lambda: self._queues.put(0, write))


def forgets_replicas(original: Any, shape: Any, prefill_tp: int, decode_tp: int, *ranks: int) -> Any:
    found = original(shape, prefill_tp, decode_tp, *ranks)
    if found is None or prefill_tp > decode_tp:
        return found
    mine, theirs = shape.local_heads(prefill_tp), shape.local_heads(decode_tp)
    return HeadSlice(ranks[1] * theirs % mine, 0, theirs)


def share_by_number(original: Any, self: KvSender, chunk: Any) -> Any:
    if not self._map.all_cp_ranks or not chunk.runs:
        return original(self, chunk)
    first = min(source for source, _, _ in chunk.runs)
    mine = self._map.share(self._index, sum(count for _, _, count in chunk.runs))
    rows = []
    for source, target, count in chunk.runs:
        low, high = max(source, first + mine.start), min(source + count, first + mine.stop)
        if low < high:
            rows.append((low, target + low - source, high - low))
    return tuple(rows), chunk.last


def counted_in_the_request(original: Any, self: PrefillScheduler, room: Any, tokens: int) -> Any:
    chunk = original(self, room, tokens)
    left = sum(count for _, _, count in room.runs) - chunk.first_page
    return changed(chunk, runs=cut(room.runs, chunk.first_page, min(left, sum(count for _, _, count in chunk.runs))))


def pulled(original: Any, job: Any, random: Any, fixed: bool = False, lease: float = 30.0) -> Any:
    engine = ServingEngine(name="pull", handoff="pull", recompute=1, memory="grow", lease=lease, heartbeat=lease / 3)
    return replaced(original(job, random, fixed), engine=engine, staging=None)


PULLED = ((scenarios, "_squeezed", pulled),)
SHORT_LEASES = ((scenarios, "_squeezed", partial(pulled, lease=0.03)),)
"""Leases that end while a link is slow."""


def gives_back_with_the_lease(original: Any, self: PullPrefillLeader, number: int) -> None:
    original(self, number)
    if number in self._kept:
        self._return(number)


def forgets_at_once(self: KvReader, number: int) -> None:
    room = self._rooms.pop(number, None)
    if room is not None:
        room.failed = True
    self._quiet(messages.RankQuiesced(number))


def complete_with_the_first(original: Any, self: KvReader, room: Any, event: Any) -> None:
    original(self, room, event)
    if event.ok and room.missing and not room.failed:
        self._complete(room)
        room.failed = True


def quiesced_by_number(self: StagingReceiver, rank: str) -> None:
    for key, question in list(self._questions.items()):
        if key[1] == index_of(rank) and not question.scattering:
            self._drop(key)
    self._advance()


def gathers_what_failed(original: Any, self: KvSender, write: Any, queue: int) -> Any:
    position = write.room.asks.get(write.key)
    if write.rows and position is not None and position >= 0:
        return self._stage(write, queue, position)
    return original(self, write, queue)


def frees_slots_at_once(original: Any, self: Any, room: Any) -> None:
    landing, number = getattr(self.mover.receiver, "landing", None), room.request.room
    if landing is not None and room.waits:
        for key, question in list(landing._questions.items()):
            if key[0] == number and not question.scattering:
                landing._drop(key)
    original(self, room)


def not_waited_for(original: Any, self: KvSender, *arguments: Any) -> Any:
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
    chunk = original(self, *arguments)
    return changed(chunk, index=chunk.first_page * self.job.page_size // self.job.chunk)


def stays_in_its_round(original: Any, self: Ring, size: int) -> int | None:
    if self.slots:
        return original(self, size)  # type: ignore[no-any-return]
    return self.head if self.head % self.size + size <= self.size else None


def sliced_after_all(original: Any, self: KvSender, write: Any, queue: int) -> Any:
    position = write.room.asks.get(write.key) if write.rows else None
    if position is None or position < 0 or write.chunk.index % 2:
        yield from original(self, write, queue)
        return
    yield self._write(write, write[0], "staged")


def releases_at_once(original: Any, self: Any, room: Any) -> None:
    original(self, room)
    if isinstance(self.handoff, PushDecodeLeader):  # what is pulled is this side's own to give back
        self.handoff._release(room.request.room)


def frees_slot_at_once(original: Any, self: Any, room: Any) -> None:
    number = room.request.room
    if room.waits and number in self.handoff.slots.owners:
        self.handoff.slots.release(number)
    original(self, room)


def settles_at_once(self: KvSender, state: Any) -> None:
    if state.aborted and not state.planned:
        state.aborted = False
        self._rooms.pop(state.room, None)
        self.report(push.RankQuiesced(state.room))


def knows_no_abort(self: Any, sender_: str, message: Any) -> None:
    raise KeyError(f"ABORT of room {message.room}")


def gone_by_prefix(self: PrefillScheduler, incarnation: str) -> None:
    for room in [room for room in self.rooms.values() if room.request.decode.startswith(instance_of(incarnation))]:
        self._give_up(room)
    self.handoff.drop(incarnation)


def kills_the_second(original: Any, random: Any, kinds: Any, *more: Any) -> Any:
    kill, restart = original(random, [kind for kind in kinds if kind == "kills"], *more)
    return dict.fromkeys(["decode1.0"] * len(kill), *kill.values()), restart


ELEVEN = (
    (scenarios, "losses", kills_the_second),
    (scenarios, "SIDES", ((Side(tp=1), Side(tp=1, instances=11)),)),
    (scenarios, "_MACHINE", replaced(scenarios._MACHINE, gpus=16)),
)
"""So many instances that the name of one begins like that of another: decode1 and decode10."""

TWO_STAGED = (
    (scenarios, "SIDES", ((Side(tp=1, instances=2), Side(tp=2)),)),
    (scenarios, "_POLICIES", (Policy(queues=1, staging=True),)),
)
"""Ranks of two prefill instances that have slots in the same rings."""


SLOW_WIRE = (
    (scenarios, "_MACHINE", replaced(scenarios._MACHINE, interconnect=Interconnect(kind="switch", rate=2e4))),
    (scenarios, "_ENGINE", replaced(scenarios._ENGINE, timeout=5.0)),
    (scenarios, "RARE", {**scenarios.RARE, "silences": 2.0}),
)
"""Writes so long that an instance is given up while they are under way, and silences in four of five scenarios."""


def lose_unnoticed(original: Any, self: Any, *arguments: Any) -> None:
    moved = self._moved
    original(self, *arguments)
    self._moved = moved


def impatient(original: Any, self: Any, *arguments: Any) -> None:
    original(self, *arguments)
    self._patience -= self.job.deadline / 3


def swapped(original: Any, self: PrefillWorker, message: Any) -> Any:
    if not self.engine.index:
        return original(self, message)
    return original(self, changed(message, chunks=message.chunks[::-1]))


def takes_up_late(original: Any, self: PushDecode, sender_: str, message: Any) -> None:
    if message.room % 2:
        clock = self.engine.clock
        clock.call_at(clock.now + 1e-2, lambda _: original(self, sender_, message), None)
    else:
        original(self, sender_, message)


def sends_incomplete_pages(original: Any, self: PrefillScheduler, room: Any, tokens: int) -> Any:
    before = room.done
    chunk = original(self, room, tokens)
    first, end = (max(chunk.held, self.job.page_count(done)) for done in (before, room.done))
    return changed(chunk, first_page=first, runs=cut(room.runs, first - chunk.held, end - first))


def leaves_the_last(original: Any, self: PrefillScheduler, room: Any, tokens: int) -> Any:
    left = room.request.input - room.done - tokens
    return original(self, room, tokens + 1 if left == 1 else tokens)


def sends_before(original: Any, self: PrefillWorker, message: Any) -> Any:
    forward = original(self, message)
    self.mover.computed(message.chunks, True)
    forward.callbacks.pop()
    return forward


def frees_when_complete(original: Any, self: PushDecodeLeader, *arguments: Any) -> None:
    complete = self._scheduler.complete
    before = len(complete)
    original(self, *arguments)
    for room in complete[before:]:
        self.slots.release(room.request.room)


def quiet_with_the_first(self: DecodeScheduler, _: str, message: Any) -> None:
    if message.room not in self.rooms:
        self.engine.ignore()
        return
    self.forget(message.room)


def failure_is_success(original: Any, self: KvSender, write: Any, event: Transfer) -> None:
    if event.ok or not isinstance(event.value, TransferFailed):
        original(self, write, event)
        return
    self._under_way -= 1
    write.room.moving -= 1
    self._over(write.room)


def counts_metadata_twice(self: KvSender, state: Any, last: messages.Arrival) -> None:
    for name in state.writes:
        arrival = changed(last, count=1 + 2 * state.controls.get(name, 0))
        self._rank.channel.send(name, encode(arrival))


def one_page_late(original: Any, tokens: int, window: int, page_size: int) -> tuple[int, int]:
    first = max(0, tokens - window + 1) // page_size
    return first, -(-tokens // page_size) - first


def fails_all(original: Any, self: router.Router, incarnation: str, reason: str, formed: bool) -> None:
    original(self, incarnation, reason, formed)
    for request in tuple(self._rooms.values()):
        self._fail(request, reason)


def known_at_once(original: Any, self: DecodePages, request: Any, held: int) -> Any:
    given = original(self, request, held)
    if given is not None and request.room not in self.pool._keys:
        self.arrived(request.room)
    return given


def known_by_text(blocks: Any, tokens: int, page_size: int) -> list[int]:
    return [blocks[0]] * (tokens // page_size)


def keeps_asleep(original: Any, self: Any, number: int) -> None:
    self.wake = nothing
    original(self, number)
    del self.wake


def once_more(original: Any, self: router.Router, sender: str, message: Any) -> None:
    kept = self.job
    self.job = replaced(kept, retries=kept.retries + 1)
    original(self, sender, message)
    self.job = kept


def remembers_its_pages(original: Any, self: Preemption, number: int) -> Any:
    pages = self._pages.pool.owners[number]
    room = original(self, number)
    room.old = pages
    return room


def goes_on_in_its_old_pages(original: Any, self: Preemption, room: Any) -> None:
    join = self._batch.join
    number, pages = room.request.room, self._pages.pool.owners
    self._batch.join = lambda *what: (pages.__setitem__(number, room.old), join(*what))
    original(self, room, *())
    self._batch.join = join


def gathers_out_of_turn(self: PrefillWorker, message: Any, computed: Any, done: Any) -> Any:
    yield computed
    try:
        yield from self.engine.gather.run(message)
    except TransferError as error:
        self.engine.fail(error)
    else:
        fire(done)


def counts_no_bytes(original: Any, self: KvSender, write: Any, event: Any) -> None:
    write.room.nbytes -= event.batch.nbytes if event.ok else 0
    original(self, write, event)


def a_step_early(original: Any, self: RunningBatch) -> Iterator[int]:
    self._step += 1
    gone = list(original(self))
    self._step -= 1
    return iter(gone)


def waits_for_no_load(original: Any, self: PrefillWorker, message: Any) -> Any:
    if self.tiers is not None:
        self.tiers._load = None
    return original(self, message)


def renews_in_place(self: PullPrefillLeader, _: str, message: Any) -> None:
    for number in message.rooms:
        if number in self._kept and self._kept[number].state != "revoked":
            self._leases.add(number)


def renews_once(original: Any, self: PullDecodeLeader, beat: Any) -> None:
    original(self, beat)
    self._beats = True


def quiet_before_it_is_told(original: Any, self: KvSender, state: Any) -> None:
    state.aborted = state.aborted or state.status is Status.FAILED
    original(self, state)


def tells_early(original: Any, self: Any, out: Any, back: Any, prefetch: bool = False) -> Any:
    moved, ssd = original(self, out, back, prefetch), (self._moves, "ssd")
    if ssd in self._under_way:
        self._under_way[ssd][1]()
    return moved


def keeps_the_source(original: Any, self: PullDecodeLeader, number: int) -> None:
    self._sources.pop(number, None)
    original(self, number)


MUTANTS = (
    Mutant("Z1", "a status is the greater of old and new, so that a failure can become a success", "I1",
           ((push, "advance", lambda old, new: max(old, new)), (KvSender, "_broken", counted_as_done),
            (KvSender, "_conclude", lambda original, self, state:
             state.room in self._rooms and original(self, state))), failing),
    Mutant("Z2", "the source head forgets that decode ranks replicate heads", "I2",
           ((layout, "head_slice", forgets_replicas),), replicating),
    Mutant("Z3", "a ring that has become empty is not begun anew, nor a question refused in time", "I5",
           ((Ring, "_place", stays_in_its_round), (StagingReceiver, "_expire", nothing)), staged),
    Mutant("Z5", "slots of a room that failed are not given back", "I8", ((StagingReceiver, "give_back", nothing),),
           staged_and_failing),
    Mutant("Z6", "a room succeeds with its last chunk, though an earlier one still waits", "I3",
           ((KvSender, "_over", over_with_the_last),), staged),
    Mutant("Z7", "a room is complete when its last chunk is there", "I2",
           ((KvReceiver, "_check", without_counting),)),
    Mutant("Z8", "a gather buffer is filled again while it is written from", "I2",
           ((GatherBuffers, "lend", nothing), (KvSender, "_stage", not_waited_for)), staged),
    Mutant("Z9", "slots are freed with their room, while writes to them may land", "I4",
           ((DecodeScheduler, "fail", frees_slots_at_once),), staged_and_failing),
    Mutant("Z10", "chunks are numbered by where they begin, so that two of them have one slot", "I4",
           ((PrefillScheduler, "_chunk", numbered_by_place),
            (Ring, "request", lambda original, self, key, size:
             self.slots.get(key) or original(self, key, size))), staged),
    Mutant("Z11", "slices are written after a slot was granted, and the stale slot scattered over them", "I2",
           ((KvSender, "_begin", sliced_after_all),), staged),
    Mutant("Z12", "pages are counted in the request, though those that decode holds are not sent",
           "I2", ((PrefillScheduler, "_chunk", counted_in_the_request),),
           lambda s: any(spec.program == "experiments.faults.programs:decode" for spec in s.specs)),
    Mutant("Z13", "decode frees pages at an abort while writes to them are under way", "I3",
           ((DecodeScheduler, "fail", releases_at_once),), failing),
    Mutant("Z13b", "prefill says that nothing moves while writes are under way", "I3",
           ((KvSender, "_settle", settles_at_once),), failing),
    Mutant("Z14", "an abort raises in the thread that receives it", "I5",
           ((PrefillScheduler, "_abort", knows_no_abort),), lambda s: bool(s.cancels)),
    Mutant("Z15", "writers are told apart by their tensor-parallel rank alone", "I5",
           ((KvSender, "_arrival", counted_by_tp),), lambda s: s.job.prefill.pp > 1),
    Mutant("Z16", "the result of a write is not looked at", "I3",
           ((KvSender, "_written", failure_ignored),), failing),
    Mutant("Z17", "context-parallel ranks divide pages by number, not by position", "I2",
           ((KvSender, "_share", share_by_number),),
           lambda s: s.job.prefill.cp > 1 and s.job.all_cp_ranks),
    Mutant("Z18", "a write that fails raises in its worker, and a worker ends with the first exception", "I5",
           tuple((Queues, name, lambda original, self, *told: told[-1].ok and original(self, *told))
                 for name in ("_resume", "_over")),
           lambda s: s.job.handoff.queues > 0 and failing(s)),
    Mutant("Z21", "an instance is connected when the first of its ranks has registered", "I5",
           ((Peers, "connected", lambda self, incarnation: bool(self.of(incarnation))),),
           lambda s: s.job.decode.size > s.job.prefill.size and delayed(s)),
    Mutant("Z21b", "the loss of an instance is that of all whose names begin like its own", "I5",
           ((PrefillScheduler, "drop", gone_by_prefix),), lambda s: bool(s.kill), ELEVEN),
    Mutant("Z22", "a metadata slot is freed at an abort while a write to it is under way", "I6",
           ((DecodeScheduler, "fail", frees_slot_at_once),
            (PushDecodeLeader, "forget", lambda self, number:
             number in self.slots.owners and self.slots.release(number))),
           lambda s: failing(s) and s.job.engine.handoff == "push"),
    Mutant("D1", "what overtakes the first introduction of a rank is lost", "I5",
           ((EngineRank, "_keep", nothing),), delayed),
    Mutant("D2", "metadata whose write timed out is sent again, and counted twice", "I8",
           ((KvSender, "_written", read_twice),), failing),
    Mutant("D3", "requests are given up as stalled before the loss of an instance can be noticed", "I5",
           ((router.Router, "__init__", impatient),
            (router.Router, "instance_lost", lose_unnoticed), (Membership, "owes", nothing)),
           lambda s: bool(s.kill)),
    Mutant("D4", "with one prefill instance end the slots of all ranks of the same numbers, of whichever one", "I4",
           ((StagingReceiver, "sever", quiesced_by_number),),
           lambda s: staged(s) and lost_and_back("prefill")(s), TWO_STAGED),
    Mutant("O1", "a follower takes up chunks in another order than its leader", "I7",
           ((PrefillWorker, "compute", swapped),), lambda s: s.job.prefill.size > 1),
    Mutant("O2", "a follower at decode takes up pages in another order than its leader", "I7",
           ((PushDecode, "_reserve", takes_up_late),),
           lambda s: s.job.decode.size > 1),
    Mutant("O3", "pages of a room that was given up in a queue are gathered, though not sent", "I3",
           ((KvSender, "_begin", gathers_what_failed),), staged_and_failing),
    Mutant("O4", "the tokens of a request that failed stay outstanding at its instances", "I8",
           ((router.Router, "_count", lambda original, self, request, over=False:
             (not over or request.finished) and original(self, request, over)),), failing),
    Mutant("O5", "the ranks of an instance that was lost are never forgotten", "I8",
           ((Peers, "drop", nothing),), lost_and_back("decode")),
    Mutant("S1", "an incomplete page is sent once, and not again when it is complete", "I10",
           ((PrefillScheduler, "_chunk", sends_incomplete_pages),)),
    Mutant("S2", "the last token of a request is never computed", "I10",
           ((PrefillScheduler, "_chunk", leaves_the_last),)),
    Mutant("S3", "a chunk is sent when its forward begins", "I10",
           ((PrefillWorker, "compute", sends_before),)),
    Mutant("S4", "a metadata slot is freed before the first token is read", "I6",
           ((PushDecodeLeader, "_count", frees_when_complete),
            (PushDecodeLeader, "read", nothing))),
    Mutant("S5", "pages are given back while one rank still scatters", "I3",
           ((DecodeScheduler, "quiesced", quiet_with_the_first),),
           lambda s: staged_and_failing(s) and s.job.decode.size > 1),
    Mutant("S6", "a write that the engine reports as failed counts as done", "I2",
           ((KvSender, "_written", failure_is_success),),
           lambda s: s.faults.broken > 0 and s.job.handoff.notify != "write"),
    Mutant("S7", "the message at the end of a room counts the messages with metadata twice", "I5",
           ((KvSender, "_notify", counts_metadata_twice),),
           lambda s: s.job.handoff.metadata_by == "control" and s.job.handoff.notify != "write"),
    Mutant("S8", "a window begins one token late, for those who write and those who compare", "I2",
           ((pages, "window_span", one_page_late), (contents, "window_span", one_page_late)),
           lambda s: s.job.shape.state.window > 0),
    Mutant("S10", "an instance that was started again is never introduced", "I9",
           ((Membership, "introduce", lambda original, self, *pair:
             max(map(epoch_of, pair)) < 2 and original(self, *pair)),), both_back),
    Mutant("S11", "the loss of one instance fails the requests of all", "I5",
           ((router.Router, "instance_lost", fails_all),),
           lambda s: bool(s.kill) and s.job.prefill_instances > 1),
    Mutant("S12", "a peer that is given up counts as quiesced at once", "I3",
           ((SimEndpoint, "quiesced", lambda self, peer: self._clock.event().succeed()),),
           lambda s: any(silence.rank.startswith("prefill") for silence in s.faults.silences),
           SLOW_WIRE),
    Mutant("S13", "a gather buffer that was replaced is never given back", "I8",
           ((GatherBuffers, "_discard", nothing),), staged_and_failing),
    Mutant("P1", "prefill hands pages out again when a lease ends, though they are still read", "I3",
           ((PullPrefillLeader, "_revoke", gives_back_with_the_lease),), failing, SHORT_LEASES),
    Mutant("P2", "decode frees the pages of a room that failed while its reads are under way", "I3",
           ((KvReader, "forget", forgets_at_once),), failing, PULLED),
    Mutant("P3", "a room is complete when the first of its reads is", "I2",
           ((KvReader, "_ended", complete_with_the_first),),
           lambda s: s.job.prefill.size > s.job.decode.size, PULLED),
    Mutant("P4", "pages that a lost reader was reading never come back", "I8",
           ((PullPrefillLeader, "drop", nothing),), lost_and_back("decode"), PULLED),
    Mutant("C1", "a prompt is known at decode when it has pages, whether or not it arrives", "I2",
           ((DecodePages, "reserve", known_at_once),), lambda s: s.job.cache.decode),
    Mutant("C2", "pages are known by their prompt, wherever in it they lie", "I2",
           ((prefill, "page_keys", known_by_text), (block_manager, "page_keys", known_by_text)),
           lambda s: s.job.cache.prefill or s.job.cache.decode),
    Mutant("C3", "a rank sends cached pages before the chunks of the forward before", "I7",
           ((PrefillWorker, "_started", lambda self, message: self.mover.started(message)),),
           lambda s: s.job.cache.early and s.job.prefill.size > 1),
    Mutant("C4", "a failed room's pages are free while its forward waits for those from host memory", "I3",
           ((PrefillScheduler, "_still_wanted", lambda _, forward: forward),),
           lambda s: s.job.cache.host > 0 and bool(s.cancels)),
    Mutant("C5", "two forwards gather on one rank at a time", "I5",
           ((PrefillWorker, "_gathered", gathers_out_of_turn),), lambda s: s.job.gather is not None and delayed(s)),
    Mutant("C6", "a preempted request goes on in the pages that it had", "I2",
           ((Preemption, "preempt", remembers_its_pages), (Preemption, "_resume", goes_on_in_its_old_pages)),
           lambda s: s.job.engine.memory == "grow" and s.job.engine.preemption == "retract"),
    Mutant("C7", "a request is sent out once more than it may be", "I11",
           ((router.Router, "_dropped", once_more),), lambda s: len(s.kill) > 1),
    Mutant("C8", "prefill is not woken when pages leave quarantine", "I12",
           ((PrefillScheduler, "forget", keeps_asleep),), failing),
    Mutant("C9", "decode is not woken when pages leave quarantine", "I12",
           ((DecodeScheduler, "forget", keeps_asleep),), failing),
    Mutant("C10", "a post that is given up keeps its place in the send queue", "I8",
           ((SendQueue, "_leave", lambda original, self, posting: posting.aborted or original(self, posting)),),
           lambda s: bool(s.engine.intra.depth) and failing(s)),
    *MEMBERSHIP,
    Mutant("P5", "a renewed lease keeps its place among others", "I15",
           ((PullPrefillLeader, "_renew", renews_in_place),), lambda s: s.job.engine.handoff == "pull"),
    Mutant("P6", "pages of a request that decode never admits stay at prefill", "I8",
           ((PullDecodeLeader, "unadmitted", keeps_the_source),), failing, PULLED),
    Mutant("P7", "a second heartbeat renews no lease", "I12",
           ((PullDecodeLeader, "_renew", renews_once),), lambda s: s.job.engine.handoff == "pull"),
    Mutant("S17", "a rank says that a room which failed is quiet, before its leader stops it", "I3",
           ((KvSender, "_settle", quiet_before_it_is_told),)),
    Mutant("C17", "pages are known with their prompt when the next forward has been chosen", "I10",
           ((PrefillScheduler, "_cache", lambda original, self, room, _: original(self, room, room.done)),),
           lambda s: s.job.cache.prefill),
    Mutant("C18", "pages are in the SSD tier before they have been written there", "I10",
           ((TierScheduler, "_move", tells_early),), lambda s: s.job.cache.ssd > 0),
    Mutant("S15", "the bytes of a write are not counted", "I14", ((KvSender, "_written", counts_no_bytes),)),
    Mutant("S16", "a request leaves the batch a step early", "I14", ((RunningBatch, "finished", a_step_early),)),
    Mutant("C11", "a send queue takes a post as long as it has any room", "I15",
           ((SendQueue, "_has_room", lambda self, _: self.outstanding < self._depth or not self.outstanding),),
           lambda s: bool(s.engine.intra.depth)),
    Mutant("C12", "a forward does not wait for pages from host memory", "I10",
           ((PrefillWorker, "compute", waits_for_no_load),), lambda s: s.job.cache.host > 0),
    Mutant("C13", "a queue that was blocked once gives up at once the next time", "I15",
           ((QuarantineStall, "clear", nothing),)),
    Mutant("C14", "a chunk that waits no longer holds up those behind it", "I12",
           ((StagingReceiver, "_expire", lambda self, key: self.ring.withdraw(key) and self._refuse(key)),), staged),
    Mutant("C15", "the time limits of rooms never begin", "I15", ((Timers, "add", nothing),),
           lambda s: bool(s.job.bootstrap_timeout or s.job.waiting_timeout)),
    Mutant("C16", "memory that a transfer has used stays held", "I8", ((SimBuffer, "release", nothing),)),
    Mutant("C19", "ranks that had room for symmetric memory keep it though another had none", "I8",
           ((SymmetricPool, "give_back", nothing),),
           lambda s: any(spec.program.endswith("short_of_memory") for spec in s.specs)),
    Mutant("C20", "writes do not wait for lists of descriptors", "I15", ((Peers, "connected", Peers._has_all),)),
)  # fmt: skip

IMPOSSIBLE = {
    "Z4": "a question for a slot carries the pages that it is for, so it needs no registration of its room that it "
    "could overtake",
    "Z19": "rows are read through `Buffer.read`, which knows its own memory; there are no raw pointers to misread. "
    "`Policy` refuses rows on the host for the data path",
    "Z20": "the pool of a policy is looked up by its whole name in a table (`POOLS`), never searched for in a "
    "string; a name that is not there is refused",
    "S9b": "the message at the end of a room that leaves out those with metadata changes nothing: they precede it "
    "on the same socket, and a room waits for the ends of all its writers",
}
"""Hazards that cannot be written down as a change of our code, and why."""

_SWITCH = (
    "tests/serving/test_autoscale.py::test_gpus_go_from_one_side_to_the_other",
    "tests/serving/test_autoscale.py::test_a_switched_instance_serves_after_the_drain_and_the_switch",
)

BY_TEST = {
    "R1": ("a role switch begins while an instance of the other side still drains on its GPUs",
           _SWITCH[0],
           "a scenario has no autoscaler, only what a switch consists of: instances leave, and others join"),
    "R2": ("an instance that is to switch is off while it has requests",
           _SWITCH[0], "as R1"),
    "R3": ("an instance serves in its new role as soon as the GPUs are free",
           _SWITCH[1], "as R1"),
    "R4": ("GPUs that have drained are given to nobody before the next decision",
           _SWITCH[1], "as R1"),
    "O6": ("a rank takes an introduction that is meant for the incarnation before it",
           "tests/serving/test_introductions.py::test_an_introduction_of_an_earlier_process_is_ignored",
           "two instances are introduced with a room, and one has to be lost and back before that arrives: 2,000 "
           "scenarios in which both sides come back show none"),
    "S9": ("an end-of-room message for an earlier incarnation is counted",
           "tests/serving/test_stale_destinations.py::test_an_arrival_for_an_earlier_incarnation_is_not_counted",
           "it has to be sent between an incarnation's end and the news of it, to a rank that is back by then: "
           "2,000 scenarios with ranks that are back at once show none"),
    "S14": ("a forgotten room is scattered",
            "tests/kv/test_receiver.py::test_a_forgotten_room_is_not_scattered",
            "decode forgets a room when it is proven that no write of it moves, so none arrives later"),
}  # fmt: skip
"""Defects that scenarios cannot show: what is changed, the test that sees it, and why no scenario does."""
