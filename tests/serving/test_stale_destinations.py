"""Where to write is taken from the first `Destination` of a room that waits for one, and from no other.

What comes for a room that has one, that was given up or that is over must neither turn its writes elsewhere nor
revive it (the stale-metadata guard of SGLang's MORI backend).
"""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from experiments.serve import ServeOptions, job, specs
from pdsim.kv.messages import Arrival, Destination, Dropped, Forward, TransferDone, encode
from pdsim.models.llm import Side
from pdsim.serving.deployment import Deployment
from pdsim.serving.prefill import prefill_rank
from pdsim.serving.rank_process import EngineRank
from pdsim.serving.router import RoutedRequest, Router
from pdsim.serving.workload import Request
from pdsim.sim.model import Model
from pdsim.transfer import Program
from pdsim.transfer.job import Outcome, Rank, RankSpec
from tests.serving.test_faults import SLOW, serve
from tests.support.serving import GQA, Served, configured

FIRST, LATER = Request(0.0, 100, 4), Request(2.0, 100, 4)  # the second keeps the job going for a while


def again(monkeypatch: pytest.MonkeyPatch, after: float) -> None:
    """Have the decode leader name pages twice for each room, *after* so many seconds others than at first."""
    send: Callable[..., None] = EngineRank.send

    def twice(self: EngineRank, receivers: Any, message: Any) -> None:
        send(self, receivers, message)
        if isinstance(message, Destination):
            stale = replace(message, pages=tuple((start + 16, count) for start, count in message.pages))
            self.clock.call_at(self.clock.now + after, lambda _: send(self, receivers, stale), None)

    monkeypatch.setattr(EngineRank, "send", twice)


def writes(outcome: Served) -> int:
    return len(outcome.outcome.ranks["prefill0.0"].transfers)


@pytest.mark.parametrize("after", [0.0, 1.0], ids=["while it is written", "when it is over"])
def test_a_room_that_has_its_destination_keeps_it(after, monkeypatch):
    plain = serve([FIRST, LATER])
    again(monkeypatch, after)
    outcome = serve([FIRST, LATER])
    assert outcome.statuses == ["ok", "ok"]  # every byte is compared, in the pages that were named first
    assert writes(outcome) == writes(plain)
    assert outcome.outcome.ranks["prefill0.0"].value["ignored"] == (0 if after else 2)
    assert outcome.at_rest("prefill0.0", "decode0.0")


def test_a_room_that_was_given_up_stays_so(monkeypatch):
    again(monkeypatch, after=1.0)
    outcome = serve([Request(0.0, 600, 4), LATER], leaves=[[0, 0.01]], hw=SLOW)
    assert [status.partition(":")[0] for status in outcome.statuses] == ["Aborted", "ok"]
    assert outcome.outcome.ranks["prefill0.0"].value["ignored"] == 1
    assert outcome.at_rest("prefill0.0", "decode0.0")


def alone(program: str, *ranks: RankSpec, **arguments: Any) -> Outcome:
    config = configured(Side(tp=2), model=GQA)
    plain = job(config, ServeOptions()).plain()
    spec = RankSpec("alone", f"{__name__}:{program}", arguments={"plain": plain, **arguments})
    return Model(config.hw, config.backend).run([spec, *ranks])


def sending(rank: Rank, plain: Any, incarnation: str) -> Program:
    yield rank.clock.timeout(0.1)
    rank.channel.send("decode0.0", encode(Arrival(incarnation, 99, 0, 2, 4, 0.0, 0.0, 0.0)))


@pytest.mark.parametrize(("incarnation", "rooms"), [("decode0@7", 0), ("decode0@1", 1)])
def test_an_arrival_for_an_earlier_incarnation_is_not_counted(incarnation, rooms):
    """No scenario of faults shows this: `BY_TEST` in tests/mutants/catalog.py says why."""
    config = configured(model=GQA)
    served = specs(config, job(config, ServeOptions()), [FIRST, LATER])
    outcome = alone("sending", *served, incarnation=incarnation)
    assert outcome.ranks["decode0.0"].value["open_rooms"] == rooms


def keeping(rank: Rank, plain: Any) -> Program:
    engine = prefill_rank(rank, Deployment.from_plain(plain | {"deadline": 2.0}), "prefill0", 1)
    counts = []
    for messages, seconds in ((1, 2.7), (1, 1.2), (0, 0.2), (0, 2.7)):
        for _ in range(messages):
            engine.handlers[Forward]("prefill0.0", Forward("prefill0@1", 0.5, ()))
        yield rank.clock.timeout(seconds)
        counts.append(len(engine.early))
    return counts


def test_messages_around_a_lost_incarnation_are_dropped():
    # D10: a rank that was back, and in no incarnation yet, kept messages of the one before for ever.
    # Each was forgotten a deadline after the first: a follower that is silent for longer skipped a forward.
    assert alone("keeping").ranks["alone"].value == [1, 2, 1, 0]
    # D7, D8: they left a room behind at a rank that was started again.
    assert alone("misled").ranks["alone"].value == [2, False, 0]


def misled(rank: Rank, plain: Any) -> Program:
    engine = prefill_rank(rank, Deployment.from_plain(plain), "prefill0", 0)
    engine.incarnation = "prefill0@2"
    engine.handlers[Forward]("prefill0.0", Forward("prefill0@1", 0.5, ()))
    engine.handlers[Destination]("decode0.0", Destination("prefill0@1", 7, 10, ((0, 1),), 0))
    yield rank.clock.timeout(0.1)
    return engine.ignored, engine.working(), len(engine.scheduler.handoff._destinations)


def dropping(rank: Rank, plain: Any) -> Program:
    router = Router(rank, Deployment.from_plain(plain | {"retries": 1}), [])
    request = RoutedRequest(0.0, 100, 4, room=7, tries=1, lost="PeerLost: prefill0", asked="decode0.0")
    request.answered = request.prefilled = True  # by `PrefillDone`, and by `TransferDone` of no bytes
    router._rooms[7], router.has_ended = request, True  # nobody is there to be stopped
    router.membership.directory.set(7, "prefill0@1")
    router.handlers[TransferDone]("prefill0.0", TransferDone(7, reason="TransferFailed: no address"))
    router.handlers[Dropped]("decode0.0", Dropped(7, untouched=True))
    yield rank.clock.timeout(0)
    known = 7 in router.membership.directory
    return request.answered, request.prefilled, request.lost, request.asked, request.status, known


def test_a_restarted_request_has_nothing_of_its_room():
    """D21: pages that nobody had read were collected while its reader was asked, and it stalled in its next room.

    What the lost instance still says of it decides nothing.
    """
    anew = [False, False, "", "", "PeerLost: no prefill instance is left", False]
    assert alone("dropping").ranks["alone"].value == anew
