"""Faults on real engines: what is drawn, and what the checks count."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pdsim.kv.receiver import KvReceiver
from pdsim.serving.workload import Request
from pdsim.sim.faults import Faults, Pause
from pdsim.sim.model import Model
from pdsim.transfer.job import Outcome, RankResult
from tests.support.composed import composed
from tools import faults_trial
from tools.faults_trial import KINDS, PAGE, Check, Plan, draw

FREE = {"pages": 320, "free_pages": 320, "used_pages": 0, "quarantined_pages": 0, "open_rooms": 0}
BYTES = 2 * PAGE * (1 << 14)
LOST = "PeerLost: nothing from decode0 for 3.0 s"
APART = "PeerLost: one of them is not there"
LATE = "TransferTimeout: too late"
KILLED = "killed by signal 9, as was asked for"


def plan(**faults: Any) -> Plan:
    """One request of two pages, from one prefill to one decode rank."""
    return Plan(0, "mooncake_tcp", "push", False, 1, 1, [Request(0.2, 20, 3)], **faults)


def counted(
    of: Plan, status: str = "ok", nbytes: int = BYTES, ended: float = 2.0, probe: str = "ok", **ranks: Any
) -> dict[str, int]:
    """Return what the checks count; *ranks* are errors, or the values of leaders, by ``prefill`` and ``decode``."""
    value = {
        "rows": [["prefill0", "decode0", nbytes, status]],
        "histories": [[ended, [[1.0, 1, "prefill0", "decode0"]]]],
        "probes": [["prefill0", "decode0", probe]],
    }
    results = {"router": RankResult("router", value)}
    for side in ("prefill", "decode"):
        name, end = f"{side}0.0", ranks.get(side, FREE)
        results[name] = RankResult(name, error=end) if isinstance(end, str) else RankResult(name, {**FREE, **end})
    return dict(Check(of, Outcome(results, 9.0)).report(9.0, []).counts)


def kill(at: float, rank: str = "decode0.0") -> dict[str, Any]:
    return {"kill": {rank: at}}


def pause(*span: float, rank: str = "decode0.0") -> dict[str, Any]:
    return {"pause": {rank: [span]}}


def test_a_seed_gives_one_job_and_many_give_every_fault_on_both_engines():
    assert draw(3) == draw(3)
    for engine in (0, 1):
        jobs = [draw(seed) for seed in range(engine, 200, 2)]
        assert {job.engine for job in jobs} == {("mooncake_tcp", "nixl_tcp")[engine]}
        total = sum((job.injected() for job in jobs), Counter())
        assert min(total[kind] for kind in KINDS) > 20
        assert {job.handoff for job in jobs} == {"push", "pull"}
    job = plan(**kill(1.0), restart={"decode0.0": 2.0}, **pause(0.5, 3.0, rank="prefill0.0"))
    assert job.injected() == Counter(SIGKILL=1, restart=1, SIGSTOP=1, SIGCONT=1)
    assert job.injected(2.5) == Counter(SIGKILL=1, restart=1, SIGSTOP=1)  # which ends with the job


@pytest.mark.parametrize(
    ("faults", "seen", "counts"),
    [
        ({}, {}, {}),
        (kill(1.5), {"status": LOST, "decode": KILLED}, {}),
        (pause(1.5, 6.0), {"status": LOST, "ended": 5.0, "decode": "PeerLost: decode0 is given up"}, {}),
        # failures that no fault explains
        ({}, {"status": LATE}, {"violations": 1}),
        (pause(1.5, 1.6), {"status": LATE}, {"violations": 1}),  # nobody notices that
        ({}, {"probe": APART}, {"violations": 1}),
        (kill(1.5), {"probe": APART, "decode": KILLED}, {}),
        # bytes that are missing or wrong
        ({}, {"nbytes": BYTES - 1}, {"bytes_lost": 1}),
        ({}, {"nbytes": 0}, {"bytes_lost": 1}),
        (kill(1.5, "prefill0.0"), {"nbytes": 0}, {}),  # it died before it said how many
        ({}, {"status": "room 1: layer 0 of token 3 holds something else"}, {"bytes_lost": 1}),
        ({}, {"decode": {"free_pages": 318, "quarantined_pages": 2, "open_rooms": 1}}, {}),
        # ranks that hang or crash
        ({}, {"decode": "TransferTimeout: not done after 90 s, and killed"}, {"hangs": 1}),
        ({}, {"decode": "killed by signal 11\nsegmentation fault"}, {"crashes": 1}),
        ({}, {"decode": "ValueError: a defect"}, {"crashes": 1}),
        ({}, {"decode": KILLED}, {"crashes": 1}),  # nobody asked for it
    ],
)
def test_checks_count_what_no_fault_explains(faults: dict[str, Any], seen: dict[str, Any], counts: dict[str, int]):
    assert counted(plan(**faults), **seen) == counts


@pytest.mark.parametrize(
    ("status", "faults"),
    [(LATE, kill(3.0)), ("Stalled: nothing moved", kill(1.5)), ("ValueError: a defect", kill(1.5)), ("", {})],
)
def test_a_fault_does_not_explain_every_failure(status: str, faults: dict[str, Any]):
    assert counted(plan(**faults), status)["violations"] == 1


@pytest.mark.parametrize("held", [{"free_pages": 318}, {"free_pages": 318, "used_pages": 2}, {"open_rooms": 1}])
def test_pages_and_rooms_that_stay_are_leaks(held: dict[str, int]):
    assert counted(plan(), decode=held)["leaks"] > 0


def test_a_notice_that_dies_with_its_sender_stalls_no_request(monkeypatch: pytest.MonkeyPatch):
    """Seed 130, once: prefill had told the router that all was written, and was killed before it told decode."""
    job = draw(130)
    killed, notice = job.kill["prefill0.0"], KvReceiver.notice

    def lost_with_prefill(self: KvReceiver, notification: Any) -> None:
        if not killed - 0.2 < self._rank.clock.now < killed:
            notice(self, notification)

    monkeypatch.setattr(KvReceiver, "notice", lost_with_prefill)
    target, specs = faults_trial.job(job)
    pauses = tuple(Pause(name, *span) for name, spans in job.pause.items() for span in spans)
    model = Model(composed("hw=loopback").hw, target.engine, "timing", limit=100.0, faults=Faults(pauses=pauses))
    rows = model.run(specs, job.kill, job.restart).ranks["router"].value["rows"]
    assert [status for *_, status in (row[:4] for row in rows) if "before all of its KV" in status] == [
        "PeerLost: prefill0@1 is gone before all of its KV was known to be here"
    ]
    assert {row[3].partition(":")[0] for row in rows} == {"ok", "PeerLost"}
