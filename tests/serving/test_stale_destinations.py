"""Where to write is taken from the first `Destination` of a room that waits for one, and from no other.

What comes for a room that has one, that was given up or that is over must neither turn its writes elsewhere nor
revive it (the stale-metadata guard of SGLang's MORI backend).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from pdsim.core.clock import Clock
from pdsim.kv.messages import Arrival, Destination, Dropped, Forward
from pdsim.serving.handoff.push import PushDecode
from pdsim.serving.prefill_worker import PrefillWorker
from pdsim.serving.rank_process import EngineRank
from pdsim.serving.router import RoutedRequest, Router
from pdsim.serving.workload import Request
from pdsim.transfer.job import Outcome
from tests.serving.test_faults import SLOW, account, at_rest, serve, statuses

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


def writes(outcome: Outcome) -> int:
    return len(outcome.ranks["prefill0.0"].transfers)


def test_a_room_that_has_its_destination_keeps_it(monkeypatch: pytest.MonkeyPatch):
    plain = serve([FIRST, LATER])
    again(monkeypatch, after=0.0)
    outcome = serve([FIRST, LATER])
    assert statuses(outcome) == ["ok", "ok"]  # every byte is compared, in the pages that were named first
    assert writes(outcome) == writes(plain)
    assert outcome.ranks["prefill0.0"].value["ignored"] == 2
    assert at_rest(outcome, "prefill0.0", "decode0.0")


def test_a_room_that_was_given_up_stays_so(monkeypatch: pytest.MonkeyPatch):
    again(monkeypatch, after=1.0)
    outcome = serve([Request(0.0, 600, 4), LATER], leaves=[[0, 0.01]], hw=SLOW)
    assert [status.partition(":")[0] for status in statuses(outcome)] == ["Aborted", "ok"]
    assert outcome.ranks["prefill0.0"].value["ignored"] == 1
    assert at_rest(outcome, "prefill0.0", "decode0.0")


def test_a_room_that_is_over_is_not_written_again(monkeypatch: pytest.MonkeyPatch):
    plain = serve([FIRST, LATER])
    again(monkeypatch, after=1.0)
    outcome = serve([FIRST, LATER])
    assert statuses(outcome) == ["ok", "ok"]
    assert writes(outcome) == writes(plain)
    assert account(outcome, "prefill0.0")[1:] == (0, 0)
    assert at_rest(outcome, "prefill0.0", "decode0.0")


def test_an_arrival_for_an_earlier_incarnation_is_not_counted():
    """No scenario of faults shows this: `BY_TEST` in tests/mutants/catalog.py says why."""
    counted: list[Arrival] = []
    receiver = SimpleNamespace(take=counted.append)
    mover = SimpleNamespace(engine=SimpleNamespace(incarnation="decode0@2"), receiver=receiver)
    stale, mine = (Arrival(incarnation, 1, 0, 1, 4, 0.0, 0.0, 0.0) for incarnation in ("decode0@1", "decode0@2"))
    PushDecode._arrive(mover, "prefill0.0", stale)  # type: ignore[arg-type]
    PushDecode._arrive(mover, "prefill0.0", mine)  # type: ignore[arg-type]
    assert counted == [mine]


def test_what_a_leader_that_is_gone_has_asked_for_is_not_kept():
    """D10: a rank that was back, and in no incarnation yet, kept messages of the one before for ever."""
    clock, kept = Clock(), []
    engine = SimpleNamespace(incarnation="", clock=clock, job=SimpleNamespace(deadline=2.0))
    worker = SimpleNamespace(engine=engine, _ahead=kept)
    for _ in range(2):
        PrefillWorker._forward(worker, "prefill0.0", Forward("prefill0@1", 0.5, ()))  # type: ignore[arg-type]
    clock.run(until=1.9)
    assert len(kept) == 2
    clock.run(until=2.1)
    assert kept == []


def test_a_request_that_starts_anew_has_nothing_of_its_last_room():
    """D21: pages that nobody had read were collected while its reader was asked, and it stalled in its next room."""
    anew: list[RoutedRequest] = []
    request = RoutedRequest(0.0, 100, 4, room=7, tries=1, lost="PeerLost: prefill0", asked="decode0.0")
    request.answered = request.prefilled = True  # by `PrefillDone`, and by `TransferDone` of no bytes
    router = SimpleNamespace(
        _rooms={7: request},
        job=SimpleNamespace(retries=1),
        tokens=SimpleNamespace(uncount=lambda _: None),
        membership=SimpleNamespace(directory=SimpleNamespace(pop=lambda _: None)),
        _submit=anew.append,
    )
    Router._dropped(router, "decode0.0", Dropped(7, untouched=True))  # type: ignore[arg-type]
    assert anew == [request]
    assert (request.answered, request.prefilled, request.lost, request.asked) == (False, False, "", "")
