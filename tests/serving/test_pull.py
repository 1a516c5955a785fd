"""The pulled handoff: contents, leases, and readers and sources that end, on the model in exact times."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pdsim.kv.messages import Abort, Destination, Renew, TransferDone
from pdsim.models.llm import Hybrid, Side
from pdsim.serving.prefill import PrefillRequest
from pdsim.serving.rank_process import EngineRank
from pdsim.serving.settings import HostCosts, ServingEngine
from pdsim.serving.workload import Request
from pdsim.sim.endpoint import DETECTION
from tests.serving.test_faults import CRAWLING, SLOW, TWO
from tests.serving.test_faults import serve as serve_with
from tests.support.serving import GQA, MLA, Served, configured

PULL = ServingEngine(name="pull", handoff="pull", recompute=1, memory="grow", lease=0.4, heartbeat=0.1)
PATIENT = replace(PULL, lease=30.0)
LONG = Request(0.0, 100, 4)  # 7 pages of 16 tokens, which take 0.3 s on `CRAWLING`


def serve(requests: Sequence[Request], *arguments: Any, **changes: Any) -> Served:
    return serve_with(requests, *arguments, **({"engine": PULL} | changes))


SIDES = [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)]


@pytest.mark.parametrize("order", ["tokens", "heads", "packed"])
@pytest.mark.parametrize(("prefill", "decode"), SIDES, ids=[f"{one}to{other}" for one, other in SIDES])
def test_every_byte_arrives_between_ranks_of_any_number(prefill, decode, order):
    requests = [Request(0.01 * number, 60 + 7 * number, 5) for number in range(12)]
    engine = replace(PULL, packed=True) if order == "packed" else replace(PULL, page_order=order)
    outcome = serve(requests, prefill=Side(tp=prefill), decode=Side(tp=decode), engine=engine)
    assert outcome.statuses == ["ok"] * 12  # contents compared
    assert {record.operation for rank in outcome.outcome.ranks.values() for record in rank.transfers} == {"read"}
    assert outcome.at_rest("prefill0.0", "decode0.0")


@pytest.mark.parametrize("order", ["best_fit", "queue", "stack"])
@pytest.mark.parametrize("handoff", ["pull", "push"])
@pytest.mark.parametrize(("prefill", "decode"), [(16, 64), (64, 16)])
def test_sides_with_pages_of_their_own_hand_all_over(prefill, decode, handoff, order):
    requests = [Request(0.01 * number, 60 + 7 * number, 90) for number in range(12)]
    kv = replace(configured().kv, page_size=prefill, decode_page_size=decode, pool=3 << 17)
    engine = replace(PULL, handoff=handoff, pages=order, recompute=int(handoff == "pull"))
    outcome = serve(requests, kv=kv, engine=engine, prefill=Side(tp=2), decode=Side(tp=1))
    assert outcome.statuses == ["ok"] * 12  # contents compared
    assert outcome.at_rest("prefill0.0", "decode0.0")
    assert outcome.outcome.ranks["decode0.0"].value["preemptions"] > 0  # the larger pages of the batch run out
    job = outcome.job
    assert (job.page_size, job.prefill_block, job.decode_block) == (16, prefill // 16, decode // 16)


@pytest.mark.parametrize(
    ("prefill", "decode", "count"), [(16, 0, 63), (64, 0, 16), (16, 64, 63), (64, 16, 63), (64, 64, 16)]
)
def test_used_pages_take_a_descriptor_each_of_the_smaller(prefill, decode, count):
    kv = replace(configured().kv, page_size=prefill, decode_page_size=decode, pool=1 << 20)
    requests = [Request(0.0, 1000, 4), Request(0.5, 1000, 4)]  # the pool, and its blocks again, last one first
    served = serve(requests, kv=kv, engine=replace(PULL, pages="queue"))
    counts = [read.descriptors for read in served.outcome.ranks["decode0.0"].transfers]
    assert counts == [4, 4 * count]  # of K and V in two layers


def test_pages_that_nobody_reads_change_nothing(monkeypatch):
    requests = [Request(0.01 * number, 60 + 7 * number, 5) for number in range(12)]

    def served() -> tuple[Any, Any]:
        outcome = serve(requests, prefill=Side(tp=1), memory="timing").outcome
        return outcome.events, [*outcome.ranks["decode0.0"].transfers]

    short, start = served(), PrefillRequest.start

    def named(room: PrefillRequest, now: float, kept: Destination, _: Any, *rest: Any) -> None:
        start(room, now, kept, kept.pages, *rest)
        assert room.runs

    monkeypatch.setattr(PrefillRequest, "start", named)
    assert served() == short


@pytest.mark.parametrize(
    "changes",
    [
        {"model": MLA},
        {"model": replace(MLA, hybrid=Hybrid(index_bytes=12))},
        {"model": replace(GQA, hybrid=Hybrid(pattern="aw", window=40))},
        {"prefill": Side(tp=1, pp=2)},
        {"prefill": Side(tp=1, cp=2), "kv": replace(configured().kv, all_cp_ranks=True)},
    ],
)
def test_state_stages_and_shares_of_a_prompt_are_pulled(changes):
    assert serve([LONG], **changes).statuses == ["ok"]


def test_neighbouring_pages_are_one_descriptor_a_layer_and_plane():
    outcome = serve([LONG])
    (read,) = outcome.outcome.ranks["decode0.0"].transfers
    assert read.descriptors == 2 * GQA.layers


def test_prefill_keeps_the_pages_until_they_are_read():
    # the pool of prefill holds one request: the second begins when the first has been read
    requests = [Request(0.0, 600, 2), Request(0.001, 600, 2)]
    one, two = serve(requests, hw=SLOW).rows
    assert two["started"] == pytest.approx(one["arrived"], abs=1e-3)


def test_heartbeats_keep_a_lease_as_long_as_the_read_takes():
    crawl = replace(CRAWLING, interconnect=replace(CRAWLING.interconnect, rate=1e5))  # 1.1 s, the lease is 0.4
    assert serve([LONG], hw=crawl, options={"deadline": 5.0}).statuses == ["ok"]


@pytest.fixture
def silent(monkeypatch):
    """Let no heartbeat through, and keep what else is sent."""
    send, sent = EngineRank.send, []

    def without(self: EngineRank, receivers: Any, message: Any) -> None:
        if not isinstance(message, Renew):
            sent.append(message)
            send(self, receivers, message)

    monkeypatch.setattr(EngineRank, "send", without)
    return sent


def test_an_ended_lease_quarantines_pages_until_the_read_ends(silent):
    crawl = replace(CRAWLING, interconnect=replace(CRAWLING.interconnect, rate=1e5))
    outcome = serve([LONG, Request(3.0, 20, 2)], hw=crawl)
    first, _ = outcome.statuses
    assert first == "TransferTimeout: the lease of 0.4 s ended without a heartbeat of the reader"
    assert outcome.statuses[1] == "ok"
    assert outcome.at_rest("prefill0.0", "decode0.0")
    assert [message.room for message in silent if isinstance(message, Abort) and message.prefill] == [1]
    assert [message.room for message in silent if isinstance(message, TransferDone) and not message.reason] == [2]


def test_pages_of_a_lost_reader_serve_others():
    requests = [Request(0.0, 600, 4), Request(0.001, 600, 4)]
    pair = {"decode": TWO, "options": {"router": "round_robin"}, "engine": PATIENT}
    outcome = serve(requests, {"decode0.0": 0.1}, hw=SLOW, **pair)
    first, second = outcome.rows
    assert first["status"].startswith("PeerLost")
    assert second["status"] == "ok"
    # the silence is noticed by the fourth ping, and the proof is there by then
    assert second["started"] == pytest.approx(0.5 * 4 / 3, abs=1e-2)
    assert outcome.at_rest("prefill0.0", "decode1.0")


def test_a_lost_lender_fails_its_reads_once_noticed():
    outcome = serve([LONG], {"prefill0.0": 0.1}, hw=CRAWLING)
    (read,) = outcome.outcome.ranks["decode0.0"].transfers
    assert outcome.statuses == ["PeerLost: prefill0.0 is gone"]  # by the read, before silence tells
    assert read.status == "PeerLost"
    assert read.seen == pytest.approx(0.1 + DETECTION, abs=1e-2)
    assert outcome.at_rest("decode0.0")


@pytest.mark.parametrize("leaves", [(), [(0, 0.13)]], ids=["stays", "leaves"])
@pytest.mark.parametrize("end", [{}, {"prefill0.0": 0.15}], ids=["lives", "ends"])
def test_reads_that_prefill_has_not_noticed_count(end, leaves):
    engine = replace(PATIENT, noticed="prefill", prefill=HostCosts(launch=0.05))
    requests = [Request(0.0, 100, 4), Request(0.001, 100, 4)]  # read at 0.1 s, noticed at 0.2 s
    outcome = serve(requests, end, engine=engine, leaves=leaves)
    first, second = outcome.statuses
    assert first == ("Aborted: the user left after 0.13 s" if leaves else "ok")
    assert second == ("PeerLost: no prefill instance is left" if end else "ok")
    assert outcome.at_rest("decode0.0", *(() if end else ("prefill0.0",)))
