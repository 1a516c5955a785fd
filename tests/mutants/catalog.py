"""Known defects of KV handoffs, each as a small change of our own code that the trial must catch.

A mutant changes exactly what its line says, for the time of a ``with mutant.applied():``, and names the invariant of
`pdsim.verify.invariants` that has to find it.  *relevant* tells scenarios in which the change can show at all
from those that need not be run; they count as seeds all the same.  What is too rare among all scenarios has a
*setting* of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from unittest.mock import patch

from experiments.faults.scenario import Scenario, attempt, draw
from pdsim.kv import contents, mapping, push, state
from pdsim.kv.peers import DecodePeers
from pdsim.kv.pull import KvReader
from pdsim.kv.push import KvSender, Queues
from pdsim.kv.receiver import KvReceiver
from pdsim.kv.staging.ring import GatherBuffers, Ring
from pdsim.kv.staging.staging_receiver import StagingReceiver
from pdsim.serving import router
from pdsim.serving.decode import DecodeScheduler
from pdsim.serving.handoff.pull import PullPrefillLeader
from pdsim.serving.handoff.push import PushDecode, PushDecodeLeader, PushPrefillLeader
from pdsim.serving.membership import Membership
from pdsim.serving.prefill import PrefillScheduler
from pdsim.serving.prefill_worker import PrefillWorker
from pdsim.serving.rank_process import EngineRank
from pdsim.sim.endpoint import SimEndpoint
from tests.mutants.defects import (
    ELEVEN,
    PULLED,
    SHORT_LEASES,
    SLOW_WIRE,
    TWO_STAGED,
    Change,
    complete_with_the_first,
    concluded_once,
    connects_as_another,
    counted_as_done,
    counted_by_tp,
    counted_for_ever,
    counted_in_the_request,
    counts_messages,
    dies,
    failure_ignored,
    forgets_at_once,
    forgets_replicas,
    forgets_without_slot,
    frees_slot_at_once,
    frees_slots_at_once,
    gathers_what_failed,
    gives_back_with_the_lease,
    gone_by_prefix,
    impatient,
    key_unchecked,
    knows_no_abort,
    lose_unnoticed,
    maximum,
    mutated,
    not_waited_for,
    nothing,
    numbered_by_place,
    over_with_the_last,
    overtaken,
    quiesced_by_number,
    read_twice,
    releases_at_once,
    settles_at_once,
    share_by_number,
    sliced_after_all,
    stays_in_its_round,
    swapped,
    takes_up_late,
    unbound,
    without_counting,
)
from tests.mutants.survivors import (
    counts_metadata_twice,
    fails_all,
    failure_is_success,
    frees_when_complete,
    leaves_the_last,
    never_ready_again,
    one_page_late,
    proven_at_once,
    quiet_with_the_first,
    sends_before,
    sends_incomplete_pages,
)

__all__ = ["BY_TEST", "IMPOSSIBLE", "LIMIT", "MUTANTS", "Caught", "Mutant"]

REQUESTS = 50
"""Of each scenario."""

INTENSITY = 0.4
"""Probability of each kind of fault."""

LIMIT = 2000
"""Seeds, from 0 on, within which every mutant must be caught."""


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

    def catch(self, seeds: Iterable[int] = range(LIMIT)) -> Caught | None:
        """Explore *seeds* until *invariant* does not hold; return None if it always does."""
        run = 0
        for seed in seeds:
            with patched(self.setting):
                scenario = draw(seed, REQUESTS, INTENSITY, self.without)
                if not self.relevant(scenario):
                    continue
                run += 1
                with self.applied():
                    found = attempt(scenario).violations
                if any(violation.invariant == self.invariant for violation in found):
                    assert not self.setting or not attempt(scenario).violations, (
                        f"seed {seed} is not clean unchanged"
                    )
                    invariants = sorted({violation.invariant for violation in found})
                    return Caught(seed + 1, run, invariants)
        return None

    @property
    def without(self) -> frozenset[str]:
        """The kinds that would undo its setting: they choose ranks, machine, policy or the program of decode."""
        return frozenset({"held", "layouts", "nodes", "policies"}) if self.setting else frozenset()

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


# --- which scenarios -----------------------------------------------------------------------------------------------


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


def shares(scenario: Scenario) -> bool:
    """Context-parallel ranks divide the pages of a request."""
    return scenario.job.prefill.cp > 1 and scenario.job.all_cp_ranks


def holding(scenario: Scenario) -> bool:
    """Decode holds pages of requests, which no engine does yet."""
    return any(spec.program == "experiments.faults.programs:decode" for spec in scenario.specs)


def messages_of_metadata(scenario: Scenario) -> bool:
    return scenario.job.handoff.metadata_by == "control" and scenario.job.handoff.notify != "write"


def lost_and_back(side: str) -> Callable[[Scenario], bool]:
    """Return what tells whether an instance of *side* is lost and started again."""
    return lambda scenario: bool(scenario.restart) and all(name.startswith(side) for name in scenario.kill)


def replicating(scenario: Scenario) -> bool:
    job = scenario.job
    return job.prefill.tp < job.shape.heads < job.decode.tp and not job.shape.latent_bytes


MUTANTS = (
    Mutant("Z1", "a status is the greater of old and new, so that a failure can become a success", "I1",
           ((push, "advance", maximum), mutated(counted_as_done, KvSender, "_broken"),
            mutated(concluded_once, KvSender, "_conclude")), failing),
    Mutant("Z2", "the source head forgets that decode ranks replicate heads", "I2",
           ((mapping, "head_slice", forgets_replicas),), replicating),
    Mutant("Z3", "a ring that has become empty is not begun anew, nor a question refused in time", "I5",
           (mutated(stays_in_its_round, Ring, "_place"), (StagingReceiver, "_expire", nothing)), staged),
    Mutant("Z5", "slots of a room that failed are not given back", "I8", ((StagingReceiver, "give_back", nothing),),
           staged_and_failing),
    Mutant("Z6", "a room succeeds with its last chunk, though an earlier one still waits", "I3",
           ((KvSender, "_over", over_with_the_last),), staged),
    Mutant("Z7", "a room is complete when its last chunk is there", "I2",
           ((KvReceiver, "_check", without_counting),)),
    Mutant("Z8", "a gather buffer is filled again while it is written from", "I2",
           ((GatherBuffers, "lend", nothing), mutated(not_waited_for, KvSender, "_stage")), staged),
    Mutant("Z9", "slots are freed with their room, while writes to them may land", "I4",
           (mutated(frees_slots_at_once, DecodeScheduler, "fail"),), staged_and_failing),
    Mutant("Z10", "chunks are numbered by where they begin, so that two of them have one slot", "I4",
           (mutated(numbered_by_place, PrefillScheduler, "_chunk"), mutated(key_unchecked, Ring, "request")),
           staged),
    Mutant("Z11", "slices are written after a slot was granted, and the stale slot scattered over them", "I2",
           (mutated(sliced_after_all, KvSender, "_start"),), staged),
    Mutant("Z12", "pages are counted in the request, though those that decode holds are not sent",
           "I2", (mutated(counted_in_the_request, PrefillScheduler, "_chunk"),), holding),
    Mutant("Z13", "decode frees pages at an abort while writes to them are under way", "I3",
           (mutated(releases_at_once, DecodeScheduler, "fail"),), failing),
    Mutant("Z13b", "prefill says that nothing moves while writes are under way", "I3",
           ((KvSender, "_settle", settles_at_once),), failing),
    Mutant("Z14", "an abort raises in the thread that receives it", "I5",
           ((PrefillScheduler, "_abort", knows_no_abort),), lambda scenario: bool(scenario.cancels)),
    Mutant("Z15", "writers are told apart by their tensor-parallel rank alone", "I5",
           (mutated(counted_by_tp, KvSender, "_arrival"),), lambda scenario: scenario.job.prefill.pp > 1),
    Mutant("Z16", "the result of a write is not looked at", "I3",
           ((KvSender, "_written", failure_ignored),), failing),
    Mutant("Z17", "context-parallel ranks divide pages by number, not by position", "I2",
           ((KvSender, "_share", share_by_number),), shares),
    Mutant("Z18", "a write that fails raises in its worker, and a worker ends with the first exception", "I5",
           ((Queues, "_resume", dies),),
           lambda scenario: scenario.job.handoff.queues > 0 and failing(scenario)),
    Mutant("Z21", "a pair is connected after as many messages as it has ranks, whoever sent them", "I8",
           ((PushPrefillLeader, "_count_ready", counts_messages),),
           lambda scenario: scenario.job.prefill.size > 1 and delayed(scenario)),
    Mutant("Z21b", "the loss of an instance is that of all whose names begin like its own", "I5",
           ((PrefillScheduler, "drop", gone_by_prefix),), lambda scenario: bool(scenario.kill), ELEVEN),
    Mutant("Z22", "a metadata slot is freed at an abort while a write to it is under way", "I6",
           (mutated(frees_slot_at_once, DecodeScheduler, "fail"),
            (PushDecodeLeader, "forget", forgets_without_slot)), failing),
    Mutant("D1", "a follower's Ready that overtakes its leader's meeting is lost", "I5",
           ((PushPrefillLeader, "_count_ready", overtaken),), delayed),
    Mutant("D2", "metadata whose write timed out is sent again, and counted twice", "I8",
           (mutated(read_twice, KvSender, "_written"),), failing),
    Mutant("D3", "requests are given up as stalled before the loss of an instance can be noticed", "I5",
           (mutated(impatient, router.Router, "__init__"),
            mutated(lose_unnoticed, router.Router, "instance_lost"), (Membership, "owes", nothing)),
           lambda scenario: bool(scenario.kill)),
    Mutant("D4", "with one prefill instance end the slots of all ranks of the same numbers, of whichever one", "I4",
           ((StagingReceiver, "sever", quiesced_by_number),),
           lambda scenario: staged(scenario) and lost_and_back("prefill")(scenario), TWO_STAGED),
    Mutant("O1", "a follower takes up chunks in another order than its leader", "I7",
           (mutated(swapped, PrefillWorker, "compute"),), lambda scenario: scenario.job.prefill.size > 1),
    Mutant("O2", "a follower at decode takes up pages in another order than its leader", "I7",
           (mutated(takes_up_late, PushDecode, "_reserve"),),
           lambda scenario: scenario.job.decode.size > 1),
    Mutant("O3", "pages of a room that was given up in a queue are gathered, though not sent", "I3",
           (mutated(gathers_what_failed, KvSender, "_start"),), staged_and_failing),
    Mutant("O4", "the tokens of a request that failed stay outstanding at its instances", "I8",
           (mutated(counted_for_ever, router.OutstandingTokens, "uncount"),), failing),
    Mutant("O5", "the ranks of an instance that was lost are never forgotten", "I8",
           ((DecodePeers, "drop", nothing),), lost_and_back("decode")),
    Mutant("O6", "a rank takes an introduction that is meant for the incarnation before it", "I9",
           (mutated(connects_as_another, EngineRank, "_connect_peer"),), both_back),
    Mutant("S1", "an incomplete page is sent once, and not again when it is complete", "I10",
           (mutated(sends_incomplete_pages, PrefillScheduler, "_chunk"),)),
    Mutant("S2", "the last token of a request is never computed", "I10",
           (mutated(leaves_the_last, PrefillScheduler, "_chunk"),)),
    Mutant("S3", "a chunk is sent when its forward begins", "I10",
           (mutated(sends_before, PrefillWorker, "compute"),)),
    Mutant("S4", "a metadata slot is freed before the first token is read", "I6",
           (mutated(frees_when_complete, PushDecodeLeader, "_count"),
            (PushDecodeLeader, "read", nothing))),
    Mutant("S5", "pages are given back while one rank still scatters", "I3",
           ((DecodeScheduler, "_quiet", quiet_with_the_first),),
           lambda scenario: staged_and_failing(scenario) and scenario.job.decode.size > 1),
    Mutant("S6", "a write that the engine reports as failed counts as done", "I2",
           (mutated(failure_is_success, KvSender, "_written"),),
           lambda scenario: scenario.faults.broken > 0 and scenario.job.handoff.notify != "write"),
    Mutant("S7", "the message at the end of a room counts the messages with metadata twice", "I5",
           ((KvSender, "_notify", counts_metadata_twice),), messages_of_metadata),
    Mutant("S8", "a window begins one token late, for those who write and those who compare", "I2",
           (unbound(one_page_late, state, "window_span"), unbound(one_page_late, contents, "window_span")),
           lambda scenario: scenario.job.shape.state.window > 0),
    Mutant("S10", "an instance that was started again never becomes ready", "I9",
           (mutated(never_ready_again, PushPrefillLeader, "_count_ready"),), both_back),
    Mutant("S11", "the loss of one instance fails the requests of all", "I5",
           (mutated(fails_all, router.Router, "instance_lost"),),
           lambda scenario: bool(scenario.kill) and scenario.job.prefill_instances > 1),
    Mutant("S12", "a peer that is given up counts as quiesced at once", "I3",
           ((SimEndpoint, "quiesced", proven_at_once),),
           lambda scenario: any(silence.rank.startswith("prefill") for silence in scenario.faults.silences),
           SLOW_WIRE),
    Mutant("S13", "a gather buffer that was replaced is never given back", "I8",
           ((GatherBuffers, "_discard", nothing),), staged_and_failing),
    Mutant("P1", "prefill hands pages out again when a lease ends, though they are still read", "I3",
           (mutated(gives_back_with_the_lease, PullPrefillLeader, "_revoke"),), failing, SHORT_LEASES),
    Mutant("P2", "decode frees the pages of a room that failed while its reads are under way", "I3",
           ((KvReader, "forget", forgets_at_once),), failing, PULLED),
    Mutant("P3", "a room is complete when the first of its reads is", "I2",
           (mutated(complete_with_the_first, KvReader, "_ended"),),
           lambda scenario: scenario.job.prefill.size > scenario.job.decode.size, PULLED),
    Mutant("P4", "pages that a lost reader was reading never come back", "I8",
           ((PullPrefillLeader, "drop", nothing),), lost_and_back("decode"), PULLED),
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

BY_TEST = {
    "S9": ("an end-of-room message for an earlier incarnation is counted",
           "tests/serving/test_stale_destinations.py::test_an_arrival_for_an_earlier_incarnation_is_not_counted",
           "it has to be sent between an incarnation's end and the news of it, to a rank that is back by then: "
           "2,000 scenarios with ranks that are back at once show none"),
    "S14": ("a forgotten room is scattered",
            "tests/kv/test_landing.py::test_a_forgotten_room_keeps_its_slot_until_it_is_returned_and_is_not_scattered",
            "decode forgets a room when it is proven that no write of it moves, so none arrives later"),
}  # fmt: skip
"""Defects that scenarios cannot show: what is changed, the test that sees it, and why no scenario does."""
