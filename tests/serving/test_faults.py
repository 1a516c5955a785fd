"""Instances that are killed, start again or are refused, users who leave, and time limits: what becomes of requests
and pages, on the model, in exact times."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from experiments.serve import ServeOptions, job
from pdsim.core.errors import MessageError
from pdsim.kv.messages import ROUTER, VERSION, KvSpec, RegisterRank, Stop, TransferDone, encode, refusal
from pdsim.models.llm import Side
from pdsim.serving.decode import DecodeScheduler
from pdsim.serving.membership import InstanceRegistry
from pdsim.serving.settings import ServingEngine
from pdsim.serving.workload import Request
from pdsim.sim.endpoint import DETECTION
from pdsim.sim.faults import Faults, Stale
from pdsim.testing.cases import COLLECTIVE
from pdsim.transfer.job import RankSpec
from tests.support.configs import EIGHT
from tests.support.serving import GQA, ONE, POOL, Served, configured, simulate

TWO = Side(tp=1, instances=2)
TP2 = Side(tp=2)
CRAWLING = replace(EIGHT, interconnect=replace(EIGHT.interconnect, rate=4e5))  # 7 pages take 0.3 s
SLOW = replace(EIGHT, interconnect=replace(EIGHT.interconnect, rate=4e6))
LONG = Request(0.0, 100, 4)  # 7 pages of 16 tokens
PAGE = 16 * 2 * GQA.layers * GQA.kv_heads * GQA.head_dim * 2
"""Bytes of one."""


@pytest.fixture(autouse=True)
def _quarantine_is_counted(monkeypatch):
    known = DecodeScheduler.growing

    def compared(scheduler: DecodeScheduler) -> int:
        assert known(scheduler) == sum(not room.failed for room in scheduler.rooms.values())
        return known(scheduler)

    monkeypatch.setattr(DecodeScheduler, "growing", compared)


def serve(requests: Sequence[Request], *arguments: Any, **changes: Any) -> Served:
    options = {"deadline": 0.5} | changes.pop("options", {})
    return simulate(requests, *arguments, **({"model": GQA, "memory": "tracked"} | changes), options=options)


@pytest.mark.parametrize(("retries", "last"), [(1, "ok"), (0, "PeerLost")])
def test_a_request_that_has_not_moved_changes_instance(retries, last):
    # decode0 is lost while the last request waits there for pages; its prefill instance has not begun it
    many = [Request(0.0, 600, 200), Request(0.001, 600, 200), Request(0.002, 600, 200)]
    outcome = serve(many, {"decode0.0": 0.05}, decode=TWO, options={"router": "round_robin", "retries": retries})
    assert [status.partition(":")[0] for status in outcome.statuses] == ["PeerLost", "ok", last]
    assert [row["decode"] for row in outcome.rows] == ["decode0", "decode1", "decode1" if retries else "decode0"]
    assert outcome.at_rest("prefill0.0", "decode1.0")


def test_a_pulled_request_starts_again_until_decode_hears_of_it():
    # prefill0 is lost while it computes: decode cannot say of a room that it does not know whether bytes have moved
    engine = ServingEngine(handoff="pull", recompute=1, memory="grow", lease=30.0)
    changes = {"prefill": TWO, "engine": engine, "options": {"router": "round_robin", "retries": 1}}
    row = serve([LONG], **changes).rows[0]
    outcome = serve([LONG], {"prefill0.0": (row["started"] + row["prefilled"]) / 2}, **changes)
    assert (outcome.statuses, outcome.rows[0]["prefill"]) == (["ok"], "prefill1")
    assert outcome.at_rest("prefill1.0", "decode0.0")


def test_an_instance_ends_as_a_whole():
    outcome = serve([LONG], {"prefill0.1": 0.001}, prefill=Side(tp=2))
    assert "prefill0 is given up" in outcome.outcome.ranks["prefill0.0"].error
    assert outcome.outcome.ranks["decode0.0"].error == ""


def test_restarted_ranks_form_no_instance_with_ended_ones():
    # prefill0.1 ends unheard, and is started again first: the prefill0.0 that is known then has ended
    request, unheard = [Request(1.0, 100, 4)], Faults(stale=(Stale("prefill0.1", 0.0, 0.001, 0.5),))
    restarts = {"prefill0.1": 0.3, "prefill0.0": 0.301}
    outcome = serve(request, dict.fromkeys(restarts, 0.001), restarts, prefill=TP2, faults=unheard)
    assert outcome.statuses == ["ok"]
    calm = serve(request, prefill=TP2).rows[0]["arrived"]
    assert outcome.rows[0]["arrived"] == pytest.approx(calm, abs=1e-12)
    assert outcome.at_rest("prefill0.0", "decode0.0")


def test_a_late_registration_makes_nobody_wait_for_its_rank():
    # prefill0.1 registers at 0.7, when its instance has been given up; its next process, only after 0.7 + a deadline
    late, killed = Faults(stale=(Stale("prefill0.1", 0.0, 0.001, 0.7),)), {"prefill0.0": 0.8, "prefill0.1": 0.001}
    restarts = {"prefill0.0": 1.1, "prefill0.1": 1.4}
    outcome = serve([Request(1.6, 100, 4)], killed, restarts, prefill=TP2, faults=late)
    assert outcome.statuses == ["ok"]


@pytest.mark.parametrize("handoff", ["push", "pull"])
@pytest.mark.parametrize("instance", ["prefill0", "decode0"])
@pytest.mark.parametrize("later", [0.01, 0.2, 1.0])
def test_an_instance_that_starts_again_serves_again(handoff, instance, later):
    requests = [Request(0.05 * number, 100, 4) for number in range(60)]
    ranks = [f"{instance}.{index}" for index in range(2)]
    restarts = {name: 0.5 + later + 0.001 * index for index, name in enumerate(ranks)}
    engine = ServingEngine(handoff=handoff, recompute=int(handoff == "pull"), memory="grow", lease=30.0)
    outcome = serve(requests, {ranks[1]: 0.5, ranks[0]: 0.5}, restarts, prefill=TP2, decode=TP2, engine=engine)
    assert outcome.statuses[:9] == ["ok"] * 9
    assert outcome.statuses[-10:] == ["ok"] * 10  # served by the new incarnation
    assert {status.partition(":")[0] for status in outcome.statuses} <= {"ok", "PeerLost"}
    assert outcome.at_rest("prefill0.0", "decode0.0")


def test_context_parallel_ranks_gather_again_after_a_restart():
    # prefill0.1 is lost in a forward, so prefill0.0 waits in the gather that follows until the loss is detected
    requests = [Request(0.05 * number, 100, 4) for number in range(20)]
    restarts = {"prefill0.0": 0.7, "prefill0.1": 0.7}
    sides = {"prefill": Side(tp=1, cp=2), "collective": COLLECTIVE}
    outcome = serve(requests, {"prefill0.1": 0.5003}, restarts, **sides)
    lost = ["PeerLost: prefill0.0 was started again"] * 5
    assert outcome.statuses == ["ok"] * 10 + lost + ["ok"] * 5
    gathers = [row for row in outcome.outcome.ranks["prefill0.0"].transfers if row.operation == "all_gather"]
    # each incarnation meets once at its start, then gathers once a request
    assert [row.status for row in gathers] == ["ok"] * 11 + ["PeerLost"] + ["ok"] * 6
    assert gathers[11].completed == pytest.approx(0.5003 + DETECTION, abs=1e-12)
    assert gathers[12].submitted == 0.7
    before, after = gathers[10], gathers[-1]
    assert after.completed - after.submitted == pytest.approx(before.completed - before.submitted, abs=1e-12)
    assert outcome.at_rest("prefill0.0", "decode0.0")


def test_a_rank_restarted_at_once_is_noticed_by_enrolling():
    requests = [Request(0.05 * number, 100, 4) for number in range(40)]
    outcome = serve(requests, {"prefill0.0": 0.5}, {"prefill0.0": 0.51})
    lost = [status for status in outcome.statuses if status != "ok"]
    assert set(lost) <= {"PeerLost: prefill0.0 was started again", "PeerLost: no prefill instance is left"}
    # registered anew when the decode rank's proof is there, `DETECTION` after the kill: until then writes wait
    again = [row for row in outcome.rows if row["status"] == "ok" and row["reserved"] > 0.5]
    assert again[0]["reserved"] < 0.56
    assert 0.5 + DETECTION < again[0]["arrived"] < 0.5 + DETECTION + 0.051


def test_no_pages_are_kept_free_for_those_in_quarantine():
    engine = ServingEngine(name="growing", memory="grow", reserved_tokens=512)
    small = {"hw": CRAWLING, "kv": replace(POOL, pool=50 * PAGE), "engine": engine}
    outcome = serve([LONG, Request(0.15, 100, 4)], leaves=[(0, 0.1)], **small)
    assert outcome.statuses == ["Aborted: the user left after 0.1 s", "ok"]
    assert outcome.rows[1]["reserved"] == pytest.approx(0.15, abs=0.001)  # the write goes on to 0.3 s
    assert outcome.at_rest("prefill0.0", "decode0.0")


def test_a_preempted_request_does_not_wait_for_quarantine_for_ever():
    engine = ServingEngine(name="growing", memory="grow")
    stalled = replace(EIGHT, interconnect=replace(EIGHT.interconnect, rate=4e4))  # 8 pages take 3.4 s
    small = {"hw": stalled, "kv": replace(POOL, pool=8 * PAGE), "engine": engine}
    outcome = serve([Request(0.0, 16, 60), Request(0.0, 100, 4)], leaves=[(1, 0.1)], **small)
    assert outcome.statuses == [
        "OutOfMemory: 7 of 8 pages are in quarantine", "Aborted: the user left after 0.1 s"
    ]  # fmt: skip
    assert outcome.account("decode0.0") == (1, 0, 7)  # the slow write is still under way


def test_each_request_waits_for_quarantine_as_long():
    # the second and the third find 1 of 8 pages free, 0.15 s each: both together are longer than the deadline
    requests = [LONG, Request(0.15, 100, 4), Request(0.45, 100, 4)]
    small = {"hw": CRAWLING, "kv": replace(POOL, pool=8 * PAGE), "options": {"deadline": 0.2}}
    outcome = serve(requests, leaves=[(0, 0.1), (1, 0.2)], **small)
    assert [status.partition(":")[0] for status in outcome.statuses] == ["Aborted", "Aborted", "ok"]
    # the second fails, or leaves, and the queue is empty before the third comes: that one waits as long again
    for limit, patience in ((0.1, []), (0.15, [(1, 0.1)])):
        small["options"] = {"deadline": limit}
        requests = [LONG, Request(0.12, 100, 4), Request(0.12 + 0.12 + len(patience) * 0.04, 100, 4)]
        outcome = serve(requests, leaves=[(0, 0.1), *patience], **small)
        assert outcome.statuses[1].partition(":")[0] == ("Aborted" if patience else "OutOfMemory")
        assert outcome.statuses[2] == "ok"


def test_a_request_that_is_preempted_twice_waits_for_quarantine_twice():
    # the pages of the second come back after 8, those of the third after 14 times what a page takes
    link = replace(EIGHT, interconnect=replace(EIGHT.interconnect, rate=PAGE / 0.0625))
    small = {"hw": link, "kv": replace(POOL, pool=16 * PAGE), "engine": ServingEngine(name="growing", memory="grow")}
    requests = [Request(0.0, 16, 110), Request(0.07, 64, 4), Request(0.07, 160, 4)]
    outcome = serve(requests, leaves=[(1, 0.01), (2, 0.01)], **small)
    assert outcome.statuses[0] == "ok"
    assert outcome.outcome.ranks["decode0.0"].value["preemptions"] == 2


def test_a_user_who_leaves_makes_room_for_others():
    outcome = serve([Request(0.0, 100, 900), Request(0.0, 900, 4)], leaves=[(0, 0.05)])
    assert outcome.statuses == ["Aborted: the user left after 0.05 s", "ok"]
    assert outcome.rows[1]["reserved"] == pytest.approx(0.05, abs=0.01)
    assert outcome.at_rest("prefill0.0", "decode0.0")


def test_a_room_fails_at_its_limit_and_gives_pages_back():
    outcome = serve([LONG, Request(2.0, 100, 4)], hw=CRAWLING, options={"waiting_timeout": 0.2})
    assert outcome.statuses == ["TransferTimeout: not all of it has arrived within 0.2 s"] * 2
    assert outcome.at_rest("prefill0.0", "decode0.0") or outcome.account("decode0.0")[2] == 7
    # the second request finds no pages while the first is decoded
    outcome = serve([Request(0.0, 600, 400), Request(0.0, 600, 4)], options={"bootstrap_timeout": 0.05})
    assert outcome.statuses == ["ok", "TransferTimeout: no pages at decode within 0.05 s"]
    assert outcome.at_rest("prefill0.0", "decode0.0")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"page_size": 32}, "size=32, rank 0 of decode0 16"),
        ({"kv_dtype": "fp16"}, "dtype=fp16, rank 0 of decode0 bf16"),
    ],
)
def test_a_misfit_rank_is_told_both_values(change, words):
    outcome = serve([LONG], change={"decode1.0": change}, decode=TWO)
    assert outcome.statuses == ["ok"]
    assert words in outcome.outcome.ranks["decode1.0"].error
    assert "start it with" in outcome.outcome.ranks["decode1.0"].error


def beside(side: Side = ONE, **arguments: Any) -> Served:
    """Serve a request beside a `stranger` who is given *arguments*."""
    others = [RankSpec("stranger", "tests.serving.test_faults:stranger", arguments=arguments)]
    outcome = serve([LONG], prefill=side, decode=side, others=others)
    assert outcome.statuses == ["ok"]
    return outcome


def test_a_message_of_another_version_ends_its_sender():
    assert beside().outcome.ranks["stranger"].value == (
        f"schema version 99 where version {VERSION} is spoken: run the same pdsim on every rank"
    )


def test_who_refuses_the_router_ends_no_other():
    """As a rank of an older version did that read the first ping before the router read its registration."""
    ranks = beside(receiver=ROUTER, payload=refusal("an older version")).outcome.ranks
    assert (ranks[ROUTER].error, ranks["stranger"].value) == ("", "an older version")


@pytest.mark.parametrize("receiver", ["router", "prefill0.0", "prefill0.1", "decode0.0", "decode0.1"])
@pytest.mark.parametrize(
    "payload", [b"", b"\x08", b"\x08\x93\xa1\x93", bytes(encode(Stop())), encode(TransferDone(1, 1))[:-1]]
)
def test_no_message_of_a_stranger_ends_a_rank(receiver, payload):
    ranks = beside(TP2, receiver=receiver, payload=payload).outcome.ranks
    assert {name: rank.error for name, rank in ranks.items() if rank.error} == {}
    assert {name: rank.refused for name, rank in ranks.items() if rank.refused} == {receiver: 1}


@pytest.mark.parametrize("receiver", ["router", "decode0.0"])
def test_a_rank_may_not_stop_another_instance_nor_the_router(receiver):
    """What `Stop` of a peer's rank did: the run ended in order, with requests that nobody had served."""
    told = beside(receiver=receiver, payload=bytes(encode(Stop()))).outcome.ranks["stranger"].value
    assert told.startswith("Stop ")


def stranger(rank: Any, receiver: str = "prefill0.0", payload: bytes = b"\x63what") -> Any:
    """Send *payload* until it is refused, and once more; return why it was."""
    rank.channel.send(receiver, payload)
    _, refusal = yield rank.channel.receive()
    rank.channel.send(receiver, payload)
    return refusal[1:].decode()


def register(instance: str, index: int, started: int = 0, page_size: int = 16) -> RegisterRank:
    return RegisterRank(instance, index, started, KvSpec(page_size, "bf16"))


def registry(ranks: int) -> InstanceRegistry:
    return InstanceRegistry(job(configured(Side(tp=ranks), model=GQA), ServeOptions()))


def test_newer_incarnations_and_ranks_replace_older_ones():
    table = registry(1)
    assert table.register(register("prefill0", 0, 5))
    assert table.register(register("decode0", 0, 5))
    assert len(list(table.introduce("prefill0@1", "decode0@1"))) == 2
    assert [table.replaces(register("prefill0", 0, when)) for when in (4, 5, 6)] == [False, False, True]
    assert table.lose("prefill0") == 5
    table.register(register("prefill0", 0, 6))
    assert table.current("prefill0") == "prefill0@2"
    table = registry(2)
    for index, started in ((0, 0), (1, 5), (0, 6)):  # the first ended when nothing had been heard of its sibling
        assert not table.replaces(register("prefill0", index, started))
        table.register(register("prefill0", index, started))
    table.register(register("decode0", 0))
    met = list(table.introduce("prefill0@1", "decode0@1"))
    assert [(name, connect.started) for name, connect in met[:2]] == [("prefill0.0", 6), ("prefill0.1", 5)]
    assert table.replaces(register("prefill0", 0, 7))


def test_a_rank_told_to_end_or_without_place_is_refused():
    table = registry(2)
    table.register(register("prefill0", 0, 5))
    assert table.lose("prefill0") == 5
    for index, started in ((1, 4), (1, 7)):  # the first was on the way when its instance was given up
        table.register(register("prefill0", index, started))
        assert not table.alive("prefill0@1")
    table.register(register("prefill0", 0, 6))
    assert table.alive("prefill0@1")
    with pytest.raises(MessageError, match="rank 2 of prefill0 has no place; there are prefill0 of 2, decode0 of 1"):
        registry(2).check(register("prefill0", 2))
