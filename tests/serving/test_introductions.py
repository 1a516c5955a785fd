"""The first room of two instances introduces their ranks; what is there before they are connected waits for that."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pdsim.kv.messages import ConnectPeer, Gone, RegisterPool, incarnation_name, instance_of
from pdsim.kv.plan import Peers
from pdsim.kv.policy import Policy
from pdsim.kv.receiver import KvReceiver
from pdsim.models.llm import Side
from pdsim.serving.handoff.push import PushDecode
from pdsim.serving.rank_process import RankProcess
from pdsim.serving.workload import Request
from pdsim.sim.faults import Faults, Pause
from pdsim.sim.hosts import JobClock
from tests.serving.test_faults import CRAWLING, serve
from tests.serving.test_pull import PULL
from tests.support.serving import Served, configured

KV = configured().kv
STAGING = replace(KV, staging=True, staging_ring=1 << 20, staging_buffer=1 << 20)
STAGED = {"kv": STAGING, "policy": Policy(queues=2, staging=True)}
ONE, LATE = Request(0.0, 100, 4), 0.3
SIDES = {"prefill": Side(tp=2), "decode": Side(tp=1)}


def delay(monkeypatch: pytest.MonkeyPatch, kind: type, receiver: str) -> None:
    """Have messages of *kind* to ranks whose names end with *receiver* leave `LATE` seconds late."""
    send: Callable[..., None] = RankProcess.send

    def late(self: RankProcess, receivers: Any, message: Any) -> None:
        for name in [receivers] if isinstance(receivers, str) else receivers:
            if isinstance(message, kind) and name.endswith(receiver):
                self.clock.call_at(self.clock.now + LATE, lambda _, name=name: send(self, name, message), None)
            else:
                send(self, name, message)

    monkeypatch.setattr(RankProcess, "send", late)


def begun(outcome: Served) -> list[float]:
    return [record.submitted for rank in outcome.outcome.ranks.values() for record in rank.transfers]


@pytest.mark.parametrize(
    "changes",
    [{}, STAGED, {"kv": replace(KV, layerwise=True)}, {"engine": PULL}],
    ids=["push", "staged", "layerwise", "pull"],
)
def test_transfers_wait_until_all_ranks_are_connected(monkeypatch, changes):
    delay(monkeypatch, RegisterPool, "")
    outcome = serve([ONE, Request(0.01, 100, 4)], **SIDES, **changes)
    assert outcome.statuses == ["ok", "ok"]  # contents compared
    assert min(begun(outcome)) > LATE
    assert outcome.at_rest("prefill0.0", "decode0.0")


@pytest.mark.parametrize("changes", [{}, STAGED, {"engine": PULL}], ids=["push", "staged", "pull"])
def test_a_room_given_up_while_waiting_moves_nothing(monkeypatch, changes):
    delay(monkeypatch, RegisterPool, "")
    outcome = serve([ONE, Request(0.5, 100, 4)], **SIDES, **changes, leaves=[[0, 0.2]])
    assert [status.partition(":")[0] for status in outcome.statuses] == ["Aborted", "ok"]
    assert min(begun(outcome)) > 0.5
    assert outcome.at_rest("prefill0.0", "decode0.0")


@pytest.mark.parametrize("changes", [{}, {"engine": PULL}], ids=["push", "pull"])
@pytest.mark.parametrize("receiver", ["prefill0.1", "decode0.1"])  # leaders hear it before their first request
def test_what_overtakes_the_introduction_is_kept(monkeypatch, changes, receiver):
    delay(monkeypatch, ConnectPeer, receiver)
    outcome = serve([ONE], prefill=Side(tp=2), decode=Side(tp=2), **changes)
    assert outcome.statuses == ["ok"]
    assert max(begun(outcome)) > LATE
    assert outcome.at_rest("prefill0.0", "decode0.0")


@pytest.mark.parametrize(("side", "changes"), [("prefill", {}), ("decode", {"engine": PULL})])
def test_an_introduction_of_an_earlier_process_is_ignored(monkeypatch, side, changes):
    send: Callable[..., None] = RankProcess.send

    def again(self: RankProcess, receivers: Any, message: Any) -> None:
        send(self, receivers, message)
        if isinstance(message, ConnectPeer) and receivers.startswith(side):
            other = incarnation_name(instance_of(message.peer), 9)
            send(self, receivers, ConnectPeer(message.incarnation, other, message.started - 1))

    monkeypatch.setattr(RankProcess, "send", again)
    assert serve([ONE, ONE], **SIDES, **changes).statuses == ["ok", "ok"]


def test_a_question_of_a_dead_writer_gets_no_slot(monkeypatch):
    """It arrives after the proof that the writer is dead, and before the leader forgets its room."""
    late: list[tuple[Any, ...]] = []
    ask, sever = PushDecode._ask, KvReceiver.sever
    monkeypatch.setattr(PushDecode, "_ask", lambda *question: late.append(question))

    def proven(self: KvReceiver, rank: str) -> None:
        sever(self, rank)
        while late:
            ask(*late.pop())

    monkeypatch.setattr(KvReceiver, "sever", proven)
    outcome = serve([ONE], {"prefill0.0": 0.02}, **SIDES, **STAGED)
    assert outcome.statuses == ["PeerLost: nothing from prefill0 for 0.5 s"]
    report = outcome.outcome.ranks["decode0.0"].value
    assert (report["staging_held"], report["open_rooms"], report["ignored"]) == (0, 0, 2)  # one of each writer


def test_a_rank_that_connects_after_the_proof_writes_nothing(monkeypatch):
    """It stands still before it is connected, is given up, and goes on when its pages are another room's."""
    for kind in (RegisterPool, Gone, Gone, Gone):
        delay(monkeypatch, kind, "prefill0.1")
    sides = {"prefill": Side(tp=2, instances=2), "decode": Side(tp=2)}
    faults = Faults(pauses=(Pause("prefill0.1", 0.1, 1.2),))
    outcome = serve([ONE, Request(1.0, 100, 4)], **sides, faults=faults, hw=CRAWLING)
    assert outcome.statuses == ["PeerLost: nothing from prefill0 for 0.5 s", "ok"]
    late = outcome.outcome.ranks["prefill0.1"].transfers
    assert [(record.submitted, record.status) for record in late] == [(1.2, "TransferFailed")]
    assert outcome.at_rest("prefill1.0", "decode0.0")


def test_an_introduction_after_the_proof_connects_nobody(monkeypatch):
    """A leader's question overtakes it; what lives on would write into pages that are free."""
    for kind, receiver in ((ConnectPeer, "decode0.1"), (Gone, "decode0.1"), (Gone, "prefill0.1")):
        for _ in range(3):
            delay(monkeypatch, kind, receiver)
    sides = {"prefill": Side(tp=2, instances=2), "decode": Side(tp=2)}
    outcome = serve([ONE, Request(2.0, 100, 4)], {"prefill0.0": 0.1}, **sides)
    assert outcome.statuses == ["PeerLost: nothing from prefill0 for 0.5 s", "ok"]
    assert outcome.outcome.ranks["prefill0.1"].transfers == []
    assert outcome.at_rest("prefill1.0", "decode0.0")


def test_pairs_that_no_room_joins_are_not_introduced(monkeypatch):
    sent: list[tuple[str, str]] = []
    send: Callable[..., None] = RankProcess.send

    def counted(self: RankProcess, receivers: Any, message: Any) -> None:
        if isinstance(message, ConnectPeer):
            sent.append((receivers, message.peer))
        send(self, receivers, message)

    monkeypatch.setattr(RankProcess, "send", counted)
    sides = {"prefill": Side(tp=1, instances=2), "decode": Side(tp=1, instances=2)}
    outcome = serve([ONE, ONE], **sides, options={"router": "round_robin"})
    assert outcome.statuses == ["ok", "ok"]
    assert len(sent) == 2 * len({(row["prefill"], row["decode"]) for row in outcome.rows})


def test_messages_of_the_instant_go_after_waiting_ones():
    clock, moved = JobClock(), list[str]()
    rank: Any = SimpleNamespace(clock=clock)
    layout: Any = None
    peers = Peers[str](rank, layout, {}, lambda *_: "")

    def move(name: str) -> None:
        if peers.connected("decode0@1"):
            moved.append(name)
        else:
            peers.wait("decode0@1", 1, lambda: move(name))

    move("question")
    peers.expect("decode0@1")  # all of no ranks
    move("chunk")
    assert moved == []
    clock.turn(1, {"a rank"}, pytest.fail)
    move("later")
    assert moved == ["question", "chunk", "later"]
