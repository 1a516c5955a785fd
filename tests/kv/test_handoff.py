"""Sender and receiver over the modelled waist: order, counts, failures, and when pages may be used again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pdsim.core.errors import MessageError
from pdsim.kv.layout import KvLayout, KvShape
from pdsim.kv.mapping import Grid, RankMap
from pdsim.kv.messages import (
    Chunk,
    Destination,
    RankQuiesced,
    RegisterPool,
    TransferDone,
    decode,
    encode,
)
from pdsim.kv.push import KvSender
from pdsim.kv.receiver import KvReceiver
from pdsim.sim.model import Model
from pdsim.transfer import Program
from pdsim.transfer.job import Outcome, Place, Rank, RankSpec
from tests.support.configs import ENGINE, MACHINE

SHAPE = KvShape(layers=2, heads=2, head_bytes=16)
LAYOUT = KvLayout(SHAPE, tp=1, page_size=4, pages=8, slots=2)
HERE = "tests.kv.test_handoff"


def chunk(index: int, runs: list[list[int]], last: bool, room: int = 7, first_page: int = 0) -> Chunk:
    return Chunk(room, "decode0", index, first_page, 10, tuple(map(tuple, runs)), last, (0, 1), 0.0, 0.0)


def prefill(rank: Rank, *, script: list[list[Any]]) -> Program:
    """Do what *script* says, at the times it says, and return what was reported and when."""
    reports: list[list[Any]] = []

    def report(message: TransferDone | RankQuiesced) -> None:
        fields = [getattr(message, name) for name in message.__struct_fields__]
        reports.append([rank.clock.now, type(message).__name__, *fields])

    sender = KvSender(rank, LAYOUT, Grid(1), 0, report)
    message = yield rank.channel.receive()
    register = decode(message.payload)
    assert isinstance(register, RegisterPool)
    sender.links.connect(register)

    def act(step: list[Any]) -> None:
        action, *arguments = step
        if action == "expect":
            sender.expect([chunk(*arguments)])
        elif action == "send":
            sender.send(chunk(*arguments))
        else:
            sender.abort(*arguments)

    for at, *step in script:
        rank.clock.call_at(at, act, step)
    yield rank.clock.at(script[-1][0])
    yield rank.clock.timeout(5.0)
    return {"reports": reports, "open": len(sender)}


def receive(rank: Rank, *, reserve_at: float = 0.0, seconds: float = 1.0) -> Program:
    """Register, reserve pages 2 to 4 for room 7, and return what arrived and when."""
    reports: list[list[Any]] = []
    receiver = KvReceiver(
        rank,
        LAYOUT,
        "decode0",
        0,
        RankMap(SHAPE, Grid(1), Grid(1)),
        lambda message, last: reports.append([rank.clock.now, message.reason, last.count]),
        lambda message: None,
    )
    rank.channel.send("prefill0.0", encode(receiver.register("decode0", "prefill0")))

    def notice() -> Program:
        while True:
            receiver.notice((yield rank.endpoint.notifications.get()))

    rank.clock.process(notice())
    yield rank.clock.at(reserve_at)
    receiver.reserve(Destination("decode0@1", 7, 10, ((2, 3),), 1))
    yield rank.clock.timeout(seconds)
    return {"reports": reports, "open": len(receiver)}


def run(
    script: list[list[Any]], kill: Mapping[str, float] = {}, memory: str = "tracked", **receiver: Any
) -> Outcome:
    machine, engine = receiver.pop("machine", MACHINE), receiver.pop("engine", ENGINE)
    ranks = [
        RankSpec("prefill0.0", f"{HERE}:prefill", Place(0, 0), {"script": script}),
        RankSpec("decode0.0", f"{HERE}:receive", Place(0, 1), receiver),
    ]
    return Model(machine, engine, memory=memory).run(ranks, kill)


# ten tokens of room 7: two pages after the first forward, the last page after the second
FIRST = [0, [[0, 2, 2]], False]
LAST = [1, [[5, 4, 1]], True, 7, 2]
WHOLE = [[0.1, "expect", *FIRST], [0.2, "send", *FIRST], [0.2, "expect", *LAST], [0.3, "send", *LAST]]
BYTES = 3 * 4 * SHAPE.token_bytes(1) + 1600


def reports(outcome: Outcome, rank: str) -> list[list[Any]]:
    assert not outcome.ranks[rank].error
    return outcome.ranks[rank].value["reports"]


def test_a_room_is_complete_when_all_writes_are_intact():
    outcome = run(WHOLE)
    ((at, reason, count),) = reports(outcome, "decode0.0")
    # 4 descriptors of the last page, then 10 of metadata: 5 us a call and 1 us each, then 1600 bytes at 10 GB/s
    assert at == pytest.approx(0.3 + 9e-6 + 15e-6 + 1600 / 10e9, rel=1e-12)
    assert (reason, count) == ("", 3)
    ((_, kind, room, nbytes, *rest),) = reports(outcome, "prefill0.0")
    assert (kind, room, nbytes, *rest) == ("TransferDone", 7, BYTES, "", "")


def test_nothing_is_remembered_of_a_room_that_is_over():
    outcome = run(WHOLE)
    assert [rank.value["open"] for rank in outcome.ranks.values()] == [0, 0]


def test_a_last_chunk_that_overtakes_does_not_complete_the_room():
    slow = replace(ENGINE, intra=replace(ENGINE.intra, queues=1, descriptor=0.0, call=0.0, rate=1e4))
    # 1024, 512 and 1600 bytes at 10 kB/s: posted together, the smallest arrives first
    script = [[0.1, "expect", *FIRST], [0.1, "expect", *LAST], [0.2, "send", *FIRST], [0.2, "send", *LAST]]
    outcome = run(script, engine=slow)
    ((at, reason, _),) = reports(outcome, "decode0.0")
    arrivals = sorted(record.completed for record in outcome.ranks["prefill0.0"].transfers)
    assert len(set(arrivals)) == 3
    assert (at, reason) == (arrivals[-1], "")


def test_writes_may_be_noticed_before_the_pages_are_known():
    ((at, reason, _),) = reports(run(WHOLE, reserve_at=0.6), "decode0.0")
    assert (at, reason) == (0.6, "")


def test_bytes_that_are_not_those_of_the_room_are_found():
    # the second chunk is written to page 3, over the first, and page 4 stays empty
    wrong = [1, [[5, 3, 1]], True, 7, 2]
    script = [[0.1, "expect", *FIRST], [0.2, "send", *FIRST], [0.2, "expect", *wrong], [0.3, "send", *wrong]]
    ((_, reason, _),) = reports(run(script), "decode0.0")
    assert reason == "room 7 plane 0 token 4 byte 0: found room 7 plane 0 head 0 token 8"


# --- failures ------------------------------------------------------------------------------------------------------


def test_a_lost_peer_fails_the_room_once_and_names_the_instance():
    outcome = run(
        [*WHOLE[:2], [0.7, "expect", *LAST], [0.8, "send", *LAST], [0.9, "abort", 7]], kill={"decode0.0": 0.5}
    )
    (first, second) = reports(outcome, "prefill0.0")
    assert first[1:3] == ["TransferDone", 7]
    assert first[4].startswith("PeerLost")
    assert first[5] == "decode0"
    assert second[1:] == ["RankQuiesced", 7]


def test_a_room_settles_after_its_writes_and_its_leader():
    crawling = replace(MACHINE, interconnect=replace(MACHINE.interconnect, rate=1000.0))
    hasty = replace(ENGINE, timeout=0.1)
    script = [[0.1, "expect", *FIRST], [0.2, "send", *FIRST], [0.35, "abort", 7]]
    outcome = run(script, machine=crawling, engine=hasty, seconds=2.0)
    (failed, settled) = reports(outcome, "prefill0.0")
    assert failed[0] == pytest.approx(0.3)
    assert failed[4].startswith("TransferTimeout")
    assert settled[1:] == ["RankQuiesced", 7]
    # the write goes on after its deadline: 4 descriptors cost 9 us, 1024 bytes take 1.024 s
    assert settled[0] == pytest.approx(0.2 + 9e-6 + 1.024, rel=1e-9)


def test_an_abort_stops_what_has_not_been_written():
    script = [
        [0.1, "expect", *FIRST],
        [0.2, "send", *FIRST],
        [0.2, "expect", *LAST],
        [0.25, "abort", 7],
        [0.3, "send", *LAST],
    ]
    outcome = run(script)
    assert reports(outcome, "prefill0.0") == [
        [0.3, "RankQuiesced", 7]
    ]  # when the forward that was under way has ended
    assert reports(outcome, "decode0.0") == []
    assert len(outcome.ranks["prefill0.0"].transfers) == 1


def test_an_abort_of_an_unknown_room_is_settled_at_once():
    assert reports(run([[0.1, "abort", 99]]), "prefill0.0") == [[0.1, "RankQuiesced", 99]]


@pytest.mark.parametrize(
    ("page_size", "layers", "words"),
    [(16, 2, "decode0 has kv.page_size=4, this rank 16"), (4, 3, "decode0 keeps KvShape(layers=2")],
)
def test_a_pool_of_another_kind_is_refused_with_both_values(page_size: int, layers: int, words: str):
    ranks = [
        RankSpec("prefill0.0", f"{HERE}:mismatched", Place(0, 0), {"page_size": page_size, "layers": layers}),
        RankSpec("decode0.0", f"{HERE}:receive", Place(0, 1), {}),
    ]
    assert words in Model(MACHINE, ENGINE).run(ranks).ranks["prefill0.0"].value


def mismatched(rank: Rank, *, page_size: int, layers: int) -> Program:
    layout = KvLayout(replace(SHAPE, layers=layers), 1, page_size, 8, 2)
    sender = KvSender(rank, layout, Grid(1), 0, lambda message: None)
    message = yield rank.channel.receive()
    register = decode(message.payload)
    assert isinstance(register, RegisterPool)
    with pytest.raises(MessageError) as caught:
        sender.links.connect(register)
    return str(caught.value)
