"""`experiment=faults`: scenarios are drawn from seeds, clean on the real code, and shrink when they are not."""

import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from msgspec.structs import replace as changed

from experiments.faults import (
    CRASH,
    FaultsOptions,
    FaultTrial,
    campaign_parts,
    reached,
    run,
    scenario,
    shrunk,
    tries,
)
from experiments.faults.scenario import KINDS, attempt, draw
from pdsim.core.clock import fire
from pdsim.core.errors import ConfigError
from pdsim.core.progress import silent
from pdsim.kv.messages import Status
from pdsim.kv.policy import Policy, Staging
from pdsim.kv.push import KvSender
from pdsim.kv.receiver import KvReceiver, StagingReceiver
from pdsim.results.record import Result
from pdsim.serving import router
from pdsim.serving.block_manager import BlockManager
from pdsim.serving.decode import DecodeScheduler
from pdsim.serving.fleet import Fleet
from pdsim.serving.forward_runs import ForwardRuns
from pdsim.serving.handoff.pull import PullDecodeLeader
from pdsim.serving.handoff.push import PushDecode, PushPrefill
from pdsim.serving.membership import _Side
from pdsim.serving.policies import LeastTokens
from pdsim.serving.prefill import PrefillScheduler, PrefillWorker
from pdsim.serving.rank_process import InstanceScheduler, PeerFence
from pdsim.serving.router import Arrivals, Router
from pdsim.serving.settings import Cache, HostCosts, ServingEngine
from pdsim.sim.endpoint import SimEndpoint, SimTransfer
from pdsim.sim.faults import Faults, Pause
from pdsim.sim.hosts import ScheduledComputations
from pdsim.sim.model import Model
from pdsim.sim.posting import IsolatedTransfers
from tests.mutants.mutant import patched
from tests.support.composed import composed
from tests.support.configs import make_config
from tools import faults_real

FIRST = {"delays", "late", "stray", "shuffle", "slow", "squeezes", "aborts", "kills", "restarts", "torn"}
"""Kinds that there were when the oldest seeds were found."""


def trial(seed: int, requests: int, kinds: str) -> FaultTrial:
    return FaultTrial(seed, requests, 0.4, frozenset(KINDS) - set(kinds.split()))


def explore(seed: int = 0, **options: Any) -> Result:
    experiment = FaultsOptions(**{"scenarios": 4, "workers": 1} | options)
    config = make_config(Path("unused"), experiment=experiment, seed=seed)
    return run(config, None, silent)  # scenarios bring their own


@pytest.mark.slow
def test_the_real_code_is_clean():
    trials = [FaultTrial(seed) for seed in range(1000, 1200)]
    tried = list(tries(trials, workers=2))
    assert [(each.seed, str(each.violations[0])) for each in tried if each.violations] == []
    assert [row for row in reached(tried).rows if row[1] < (20 if ">" in row[0] else 1)] == []


def test_a_seed_gives_one_scenario_and_one_course_of_events():
    assert attempt(draw(5, 30, 1.0)) == attempt(draw(5, 30, 1.0))
    assert draw(5, 30, 1.0).text != draw(6, 30, 1.0).text
    whole, less = (draw(3, count, 1.0, frozenset({"hurries"})).requests for count in (50, 10))
    assert whole[:10] == less
    whole, less = (
        draw(1, 50, 1.0, frozenset({"crowds", "stages", "moments", "hurries", "overtakes", *more}))
        for more in ((), ("aborts",))
    )
    assert (less.cancels, less.faults, less.kill) == ({}, whole.faults, whole.kill)


def test_every_kind_of_fault_can_happen():
    undoing = frozenset(("stages", "crowds", "runs", "layerwise", "blocks", "hurries", "scales"))  # others
    named = ", ".join(kind for kind in KINDS if kind not in undoing)
    every = (draw(seed, 50, 1.0, undoing, frozenset(KINDS) - undoing) for seed in range(20))
    scenario = next(each for each in every if {"silences", "pauses"} <= {*each.faults.kinds()})
    assert scenario.text.endswith(named)
    assert scenario.cancels
    assert scenario.kill
    assert scenario.restart
    faults = "delayed delay late lateness unnoticed notice stray torn shuffle slow squeezes lagging broken"
    assert set(scenario.faults.kinds()) == {*faults.split(), "silences", "stale", "pauses"}
    assert draw(1, 50, 0.0).faults.kinds() == ()


@pytest.mark.slow
def test_a_violation_is_shrunk_and_printed_with_its_command(monkeypatch):
    def forgetful(self: KvSender, *arguments: Any) -> None: ...

    monkeypatch.setattr(KvSender, "_conclude", forgetful)
    smallest, violation = shrunk(FaultTrial(3, 20, without=frozenset(KINDS) - FIRST), "I8")
    assert (smallest.requests, smallest.without, violation.invariant) == (1, frozenset(KINDS), "I8")
    failures = explore(first=3, requests=20, without=tuple(set(KINDS) - FIRST)).failures
    (failure,) = [text for text in failures if text.startswith("I8")]
    assert failure.endswith(smallest.command())


def test_parts_add_up_and_are_not_run_again(tmp_path):
    file = tmp_path / "parts.jsonl"
    options = {"requests": 5, "parts": str(file)}
    assert "0 scenarios were run before" in explore(scenarios=2, **options).notes[1]
    with file.open("a") as cut:  # as if a run had been ended by force
        cut.write('[2, [], {"ok"')
    both, again, whole = explore(**options), explore(**options), explore(requests=5)
    assert "2 scenarios were run before" in both.notes[1]
    assert both.notes[1].endswith("keeps 4 scenarios, 0 with violations")
    assert "4 scenarios were run before" in again.notes[1]
    assert again.tables[0].rows == both.tables[0].rows == whole.tables[0].rows
    assert sum(row[1] for row in whole.tables[0].rows) == whole.values["requests"] == 20


def test_parts_of_other_code_or_options_do_not_add_up(tmp_path, monkeypatch):
    file = tmp_path / "parts.jsonl"
    campaign_parts(file, {"requests": 5})
    with pytest.raises(ConfigError, match="requests=5, these are of 6"):
        campaign_parts(file, {"requests": 6})
    monkeypatch.setattr("experiments.faults.code", lambda: "other")
    with pytest.raises(ConfigError, match="these are of other"):
        campaign_parts(file, {"requests": 5})
    file.write_text("{}\n")
    with pytest.raises(ConfigError, match="does not keep scenarios"):
        campaign_parts(file, {"requests": 5})


def test_real_engines_are_refused():
    with pytest.raises(ConfigError, match="target=model"):
        run(make_config(Path("unused"), target="real", experiment=FaultsOptions()), None, print)


@pytest.mark.slow
def test_a_campaign_told_to_end_waits_for_no_scenario(tmp_path):
    words = ["experiment=faults", "experiment.scenarios=100000", "experiment.workers=2", f"output={tmp_path}"]
    process = subprocess.Popen([sys.executable, "-m", "pdsim", "run", *words], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(psutil.Process(process.pid).children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children()
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    assert len(workers) == 2
    assert psutil.wait_procs(workers, timeout=30)[1] == []


def answers_any(_: PushDecode, staging: StagingReceiver, *asked: Any) -> None:
    staging.ask(*asked)


def takes_its_own(self: PrefillWorker, message: Any) -> None:
    self.ended()
    clock, late = self.engine.clock, self.scheduler.launching(message.seconds) if self.scheduler else 0.0
    turns = self.posts.turns(clock.now, late, len(message.chunks))
    pieces = [message.chunks] if len(turns) == 1 else [(chunk,) for chunk in message.chunks]
    for number, (when, chunks) in enumerate(zip(turns, pieces, strict=True), 1):
        clock.call_at(when, lambda posts: self.mover.computed(*posts), (chunks, number == len(turns)))
    if not turns:
        self.mover.computed(message.chunks, True)
    self.sent()


def takes_any(original: Any, self: Any, sender: str, message: Any) -> None:
    original(self, sender, changed(message, incarnation=self.engine.incarnation))


def gathers_out_of_turn(self: PrefillWorker, message: Any, computed: Any, done: Any) -> Any:
    yield computed
    yield from self.engine.gather.run(message)
    fire(done)


def withdraws_asleep(original: Any, self: DecodeScheduler, number: int) -> bool:
    with patch.object(self, "wake"):
        return bool(original(self, number))


def keeps_blocks(self: StagingReceiver, room: int) -> None:
    for question in self._questions.values():
        question.forgotten = question.forgotten or question.key[0] == room
    self._quiet_if_still(room)


def waits_for_all_chunks(self: StagingReceiver, arrival: Any) -> Any:
    return (each for key, each in self._questions.items() if key[0] == arrival.room and key in self.ring.slots)


def faster(original: Any, *path: Any) -> tuple[float, Any]:
    rate, links = original(*path)
    return 1.01 * rate, links


def fails_rooms_alone(self: PullDecodeLeader, incarnation: str) -> None:
    for room in [room for room in self._scheduler.rooms.values() if room.request.prefill == incarnation]:
        self._scheduler.fail(room)


DEFECTS = [
    # D11: slots of a room whose writer was silent, and given up, when it asked
    (101759, 6, "late silences", (PushDecode, "_ask", answers_any), "I8"),
    # D14: pages of a room that nobody had begun were free, and then computed and written all the same
    (339, 3, "aborts edges hosts", (PrefillScheduler, "_still_wanted", lambda _, forward: forward), "I3"),
    # D15: ranks of an instance wrote two rooms in different orders, and a reader learned of a last chunk first
    (461, 3, "delays hosts shuffle", (PrefillWorker, "_computed", takes_its_own), "I7"),
    # pages of an aborted room were free while its forward waited for others from host memory
    (197, 12, "aborts pulls caches", (PrefillScheduler, "_still_wanted", lambda _, forward: forward), "I3"),
    # a follower sent cached pages before the chunks of the forward before, its leader after them
    (75, 12, "edges hosts caches", (PrefillWorker, "_started", lambda self, it: self.mover.started(it)), "I7"),
    # two forwards of a later stage gathered at a time, and not in one order on all ranks
    (641, 4, "delays layouts gathers", (PrefillWorker, "_gathered", gathers_out_of_turn), "I5"),
    # D5: a message to an earlier incarnation left a room behind at a rank that was started again
    (6031, 39, "delays slow kills restarts", (PushDecode, "_arrive", takes_any), "I8"),
    # the first request of a queue was withdrawn, and nobody looked at those behind it, which fit
    (26, 13, "late limits", (DecodeScheduler, "withdraw", withdraws_asleep), "I12"),
    (339, 3, "aborts edges hosts", (PrefillScheduler, "_still_wanted", lambda _, forward: forward), "I13"),
    # a chunk that was all there waited for the next one; blocks of a forgotten room stayed in the ring
    (96, 12, "stages", (StagingReceiver, "_waiting", waits_for_all_chunks), "I12"),
    (49, 30, "aborts late broken stages", (StagingReceiver, "forget", keeps_blocks), "I8"),
    # a room that was read waited for the word of a prefill instance that was lost before it looked
    (419, 12, "pulls moments", (PullDecodeLeader, "drop", fails_rooms_alone), "I12"),
]
"""Seed, requests and kinds of faults that show what a fix is for, the method without it, and what it breaks."""


@pytest.mark.parametrize(("seed", "requests", "kinds", "change", "law"), DEFECTS, ids=lambda value: str(value)[:9])
def test_a_fix_is_needed_where_it_was(seed, requests, kinds, change, law):
    shown = trial(seed, requests, kinds)
    assert not shown.run().violations
    with patched((change,)):
        assert law in {violation.invariant for violation in shown.run().violations}


def test_layers_leave_only_once_a_slow_device_computed_them():
    kinds = frozenset(("slow", "layerwise"))
    shown, layers = FaultTrial(114, 6, 0.4, frozenset(KINDS) - kinds, kinds), PushPrefill.layers

    def at_once(self: PushPrefill, message: Any, *_: float) -> None:
        layers(self, message, self.engine.clock.now, message.seconds)

    assert not shown.run().violations
    with patched(((PushPrefill, "layers", at_once),)):
        assert {each.invariant for each in shown.run().violations} == {"I10"}


def fails_what_is_written(original: Any, self: KvSender, writes: list[Any], event: Any) -> None:
    over = [write for write in writes if write.room.status is Status.SUCCESS]
    original(self, writes, event)
    for write in over if not event.ok else ():
        self._broken(write, event.value)


def goes_at_once(original: Any, self: BlockManager) -> list[tuple[int, int]]:
    pages: list[tuple[int, int]] = original(self)
    if pages:
        self.came([key for key, _ in pages])
    return pages


BESIDE = [
    (143, "broken layerwise", (KvSender, "_sequence_over", fails_what_is_written), "I1"),
    (384, "caches held tiers", (BlockManager, "outgoing", goes_at_once), "I3"),
]


@pytest.mark.parametrize(("seed", "kinds", "change", "law"), BESIDE, ids=lambda value: str(value)[:9])
def test_rooms_beside_each_other_have_what_is_theirs(seed, kinds, change, law):
    always = frozenset(kinds.split())
    shown = FaultTrial(seed, 8, 0.4, frozenset(KINDS) - always, always)
    assert not shown.run().violations
    with patched((change,)):
        assert law in {violation.invariant for violation in shown.run().violations}


def test_a_room_whose_part_is_written_waits_for_later_chunks():
    always = frozenset(("broken", "layerwise"))
    # two rooms of a sequence of three that fails have later chunks: with it they failed, and 3 requests were served
    assert FaultTrial(247, 8, 0.4, frozenset(KINDS) - always, always).run().statuses["ok"] == 5


@pytest.mark.parametrize(("seed", "requests"), [(21, 14), (736, 8)])
def test_what_decode_holds_is_computed_and_not_sent(seed, requests):
    kinds = frozenset(("caches", "held", "layerwise"))
    assert not FaultTrial(seed, requests, 0.4, frozenset(KINDS) - kinds, kinds).run().violations


def gives_up_anyway(self: Router, request: Any, reason: str, but: str = "") -> None:
    self._abort(request, but)
    self._close(request, reason)


def frees_at_once(self: PeerFence, _: str, message: Any) -> None:
    rooms, _ = self._fences.pop(message.number, ((), ()))
    for room in rooms:
        self.free(room)


def keeps_what_is_freed(original: Any, self: SimTransfer) -> None:
    if self.held is not None and self.held.freed:
        self.held.hold()
    original(self)


ENDINGS = [
    (0, (InstanceScheduler, "end_if_drained", lambda _: None), "I12"),  # each shutdown lasts a deadline
    (31, (Router, "_fail", gives_up_anyway), "I5"),  # all output of a request was there
    (5, (SimTransfer, "release", keeps_what_is_freed), "I8"),  # memory of a rank that has ended
    (15, (PeerFence, "_fenced", frees_at_once), "I3"),  # not every rank had the proof
]


@pytest.mark.parametrize(("seed", "change", "law"), ENDINGS, ids=lambda value: str(value)[:9])
def test_what_is_over_ends_once_and_for_a_reason(seed, change, law):
    with patched((change,)):
        assert law in {violation.invariant for violation in FaultTrial(seed).run().violations}


def never_serves(original: Any, self: Fleet, name: str, now: float) -> None:
    original(self, name, now)
    self.resting.add(name)


def tells_everybody(original: Any, self: Router, request: Any, reason: str, but: str = "") -> None:
    original(self, request, reason)


def thinks_not(original: Any, self: Arrivals, number: int) -> Any:
    request = original(self, number)
    request.arrival *= 0.5
    return request


ROUTING = [
    (0, (LeastTokens, "choose", lambda _, able, load: max(able, key=load.__getitem__)), "I11"),
    (1, (Router, "_fail", tells_everybody), "I1"),  # also who has said that a room failed
    (0, (Arrivals, "request", thinks_not), "I11"),
    (10, (Fleet, "serve", never_serves), "I13"),
    (3, (router, "_FINAL", ("ok", "Aborted")), "I11"),  # users ask again though they were refused
    (19, (_Side, "remove", lambda self, name: self.load.pop(name, None)), "I14"),  # and replicas know it
]


@pytest.mark.parametrize(("seed", "change", "law"), ROUTING, ids=lambda value: str(value)[:9])
def test_requests_go_where_and_when_they_should(seed, change, law):
    assert not FaultTrial(seed).run().violations
    with patched((change,)):
        assert law in {violation.invariant for violation in FaultTrial(seed).run().violations}


def test_forwards_known_ahead_end_as_single_ones_do():
    tried = [FaultTrial(seed, 8, always=frozenset({"runs"})).run() for seed in range(24)]
    assert [each.violations for each in tried] == [[]] * 24
    assert sum(each.reached["Forwards"] for each in tried) > 100


SHORTCUTS = [
    (0, (IsolatedTransfers, "_way", faster)),
    (1, (ForwardRuns, "_put_off", lambda *_: None)),  # KV waits while others are launched
    (5, (ForwardRuns, "go_on", lambda *_: None)),  # a request comes, and with it another pace
    (3, (ScheduledComputations, "_follow", lambda *_: None)),  # it wakes a host
]


@pytest.mark.parametrize(("seed", "change"), SHORTCUTS, ids=lambda value: str(value)[:40])
def test_what_shortcuts_overlook_is_seen(seed, change):
    with patched((change,)):
        tried = FaultTrial(seed, 8, always=frozenset({"runs"})).run()
    assert [each.invariant for each in tried.violations] == ["I16"]


def drops_what_failed(self: PrefillScheduler, forward: Any) -> Any:
    wanted = {number for number, room in self.rooms.items() if not room.failed}
    return forward and changed(forward, chunks=tuple(each for each in forward.chunks if each.room in wanted))


def test_a_scheduled_prompt_is_computed_though_its_room_fails(monkeypatch):
    """Others have found its pages by then."""
    cached = scenario.cached

    def scheduled(*arguments: Any) -> Any:
        job, requests = cached(*arguments)
        cache = replace(job.cache, prefill=True, found="scheduled", early=False)
        return replace(job, cache=cache, engine=replace(job.engine, ahead=True)), requests

    monkeypatch.setattr(scenario, "cached", scheduled)
    shown = FaultTrial(68, 8, 1.0, frozenset(KINDS) - {"aborts", "caches", "pulls", "edges"})
    assert not shown.run().violations
    with patched(((PrefillScheduler, "_still_wanted", drops_what_failed),)):
        assert shown.run().violations[0].invariant == "I2"


FIXED = [
    (1420, 22, "late pulls silences", {"ok": 20, "TransferTimeout": 1, "OutOfMemory": 1}),  # pages of a revoked room
    (5505, 1, "delays layouts pulls shuffle", None),  # decode reads one of the ranks that hold copies of a head
    (6511, 13, "hosts pauses pulls", None),  # a rank that went on after a pause posted a room's last chunk first
    (6898, 25, "engines layouts nodes squeezes", None),  # posts in order behind a slow link of another instance
    (11647, 1, "delays kills restarts", None),  # a follower was ready for an incarnation that was over
    (100216, 1, "kills nodes restarts silences", {"PeerLost": 1}),  # decode had given up what prefill had written
    (100416, 9, "kills late pauses restarts", None),  # a paused leader of an earlier incarnation asks to forget
    (101560, 6, "edges late silences", {"ok": 3, "TransferTimeout": 2, "OutOfMemory": 1}),  # slots in quarantine
    (101959, 1, "delays silences together", None),  # an instance starts again while it is silent
    (103262, 5, "scatter silences together", {"ok": 4, "PeerLost": 1}),  # the instance that is asked is lost too
    (1017510, 1, "delays layouts silences", None),  # a pair connects after the first request came
    (1041304, 17, "grows held late nodes silences squeezes together", None),  # slow retraction
    (1063091, 46, "aborts kills layouts scatter", None),  # pages of an aborted room whose prefill is lost
    (1079653, 1, "delays silences", None),  # an instance was given up before it registered
    (2012845, 1, "layouts losses pulls restarts silences", None),  # what a reader counted of a lost incarnation
    (2014735, 45, "aborts delays kills losses pulls restarts scatter silences", None),  # introductions out of order
    (3057851, 50, "edges full grows hosts kills nodes pulls restarts together", None),  # a queue outlasts a lease
    (6067980, 1, "gathers stale", None),  # a rank ended, and broke a group that it never joined
    (6024190, 2, "changes pauses pulls silences", None),  # a rank reads when it wakes, after it was given up
    # nobody took the place in the batch that the last preemption freed
    (4018535, 44, "aborts caches drafts layouts pauses pulls scatter stale", None),
    (6072242, 1, "drafts limits stale", None),  # a time limit shorter than making a probe's lists of descriptors
    # page hashes of requests that left the queue at decode
    (5001329, 50, "aborts caches edges engines held kills late limits nodes policies shuffle squeezes", None),
    (6008284, 7, "delays pulls", None),  # a lease ended, whose read decode had finished
    (6015779, 50, "delays late squeezes grows caches changes drafts", None),  # a write timed out, and had arrived
    (6007318, 47, "kills broken caches", None),  # no forward followed the last evictions
    (30118800, 8, "aborts hosts engines runs", None),  # a run was stopped before its second forward was chosen
    (30181382, 12, "engines runs", None),  # in a run, posts by the scheduler's thread did not hold it up
    (60007216, 1, "hosts runs", None),  # the notices of several writes held decode up at once
    (60021003, 5, "aborts runs", None),  # after a forward that computed nothing a post came too soon
]
"""Scenarios that once broke an invariant: seed, requests, kinds of faults, and how the requests end."""


@pytest.mark.parametrize(("seed", "requests", "kinds", "statuses"), FIXED, ids=[str(seed) for seed, *_ in FIXED])
def test_a_scenario_that_found_a_defect_is_clean(seed, requests, kinds, statuses):
    done = trial(seed, requests, kinds).run()
    assert not done.violations
    assert statuses is None or done.statuses == statuses


DEFAULT = (
    70004267,  # memory was taken that buffers of staging need, and too little was left to gather
    70014634,
    70028322,
    70014767,  # decode ranks register at one instant, in another order if forwards are runs
    70030622,
    200060522,  # a forward waits for a tier behind a cut link, and its room for that forward
    200023799,  # a rank left its group before another had gathered once
    261,  # what says that a room failed tells of a second loss, which ends it
    300031436,  # a forward of a room that failed waits for pages that leave over a cut link
)
"""Seeds of campaigns without kinds in each scenario."""


@pytest.mark.parametrize(
    "seed",
    [
        *DEFAULT,
        10003110,  # a scheduler that steps does not sleep
        22018259,  # at the end of a pause it is woken at the same instant
        22012202,  # what is pulled has not moved when it is computed
        60011063,  # a process and the one before it sent equal messages
        73000618,  # what a rank said that cannot be read came when its instance had started again
        60005774,  # late messages outlast a short deadline
        200034813,  # and so do late notices
        60015902,  # descriptors of large prompts took longer than a transfer may
    ],
)
def test_a_scenario_that_alarmed_wrongly_is_clean(seed):
    always = frozenset({"changes"} if seed not in DEFAULT else ())
    assert not FaultTrial(seed, always=always).run().violations


def test_reads_posted_before_the_reader_is_lost_are_watched():
    kinds = frozenset(("late", "pulls", "silences", "stray"))
    shown = FaultTrial(42, 12, 0.4, frozenset(KINDS) - kinds, kinds)
    assert not shown.run().violations
    with patched(((SimEndpoint, "quiesced", lambda self, _: self._clock.event().succeed()),)):
        assert any("read from" in violation.what for violation in shown.run().violations)


def test_a_scenario_that_cannot_be_run_is_a_violation(monkeypatch):
    def fails(*_: object) -> None:
        raise ZeroDivisionError("what")

    monkeypatch.setattr("experiments.faults.attempt", fails)
    (found,) = FaultTrial(1, 3).run().violations
    assert (found.invariant, found.what.startswith("ZeroDivisionError: what, in fails")) == (CRASH, True)


NOT_DRAWN = {
    "window_share": "of windows: all pages or fewer are the same to the protocol",
    "prefill_batch": "rooms in a forward: limited by the chunk, which is drawn",
    "handoff.pool, handoff.decode_cache": "where memory is and who may cache, which no model tells",
    "checked": "all contents are checked",
    "kv_dtype": "bytes are drawn with the models",
    "engine.name, engine.scheduler_options, engine.measured_on, engine.sources": "words, options from outside",
    "engine.step_tokens": "is the chunk, which is drawn",
    "engine.mixed, engine.look, engine.launching_holds, engine.compiling": "of colocated engines alone",
    "engine.host_factor": "multiplies costs of hosts, which are drawn",
    "cache.host_ratio": "another way to say cache.host, which is drawn",
    "engine.version": "names the settings that a release starts with, which are drawn one by one",
    "colocated": "contents are not checked: pdsim refuses them with memory=tracked",
    "backend.path, backend.call, backend.latency, backend.rate, backend.line, "
    "backend.copy_rate, backend.fresh_descriptor, backend.lanes, backend.ramp, backend.small, backend.workers, "
    "backend.by_option":
    "lengths of posting and of the wire, which other times of the scenario vary",
}  # fmt: skip
"""Settings that are the same in all scenarios, and why."""


def test_every_setting_of_the_protocol_is_drawn_or_excused():
    drawn: dict[str, set[str]] = {}

    def look(prefix: str, what: Any) -> None:
        for each in fields(what):
            value = getattr(what, each.name)
            if isinstance(value, ServingEngine | HostCosts | Policy | Staging | Cache):
                look(f"{prefix}{each.name}.", value)
            else:
                drawn.setdefault(prefix + each.name, set()).add(repr(value))

    for seed in range(300):
        scenario = draw(seed, 1, 0.4)
        look("", scenario.job)
        look("backend.", scenario.engine.intra)
    same = {name for name, values in drawn.items() if len(values) == 1 and name != "staging"}
    assert same == {name for names in NOT_DRAWN for name in names.split(", ")}


def test_a_notice_that_dies_with_its_sender_stalls_no_request(monkeypatch):
    """Seed 130, once: prefill had told the router that all was written, and was killed before it told decode."""
    job = faults_real.draw(130)
    killed, notice = job.kill["prefill0.0"], KvReceiver.notice

    def lost_with_prefill(self: KvReceiver, notification: Any) -> None:
        if not killed - 0.2 < self._rank.clock.now < killed:
            notice(self, notification)

    monkeypatch.setattr(KvReceiver, "notice", lost_with_prefill)
    target, specs = faults_real.job(job)
    pauses = tuple(Pause(name, *span) for name, spans in job.pause.items() for span in spans)
    model = Model(composed("hw=loopback").hw, target.engine, "timing", limit=100.0, faults=Faults(pauses=pauses))
    outcome = model.run(specs, job.kill, job.restart)
    rows = outcome.ranks["router"].value["rows"]
    judged = faults_real.Check(job, outcome).report(outcome.seconds, [])
    assert (judged.ok + judged.failed, judged.details) == (len(job.requests), [])
    assert [status for *_, status in (row[:4] for row in rows) if "before all of its KV" in status] == [
        "PeerLost: prefill0@1 is gone before all of its KV was known to be here"
    ]
    assert {row[3].partition(":")[0] for row in rows} == {"ok", "PeerLost"}
