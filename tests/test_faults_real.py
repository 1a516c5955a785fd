"""Faults on real engines: what is drawn, what the checks find, and that a file is gone on with."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pdsim.kv.receiver import KvReceiver
from pdsim.serving.workload import Request
from pdsim.sim.faults import Faults, Pause
from pdsim.sim.model import Model
from pdsim.transfer.job import Outcome, RankResult
from tests.support.composed import composed
from tests.support.engines import make_target
from tools import faults_trial
from tools.faults_real import main, read, table
from tools.faults_trial import KINDS, PAGE, Check, Plan, draw

FREE = {"pages": 320, "free_pages": 320, "used_pages": 0, "quarantined_pages": 0, "open_rooms": 0}
BYTES = 2 * PAGE * (1 << 14)
LOST = "PeerLost: nothing from decode0 for 3.0 s"


def plan(**faults: Any) -> Plan:
    """One request of two pages, from one prefill to one decode rank."""
    return Plan(0, "mooncake_tcp", "push", False, 1, 1, [Request(0.2, 20, 3)], **faults)


def found(
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
        what = ranks.get(side, FREE)
        name = f"{side}0.0"
        results[name] = RankResult(name, error=what) if isinstance(what, str) else RankResult(name, {**FREE, **what})
    return dict(Check(of, Outcome(results, 9.0)).report(9.0, []).counts)


def test_a_seed_gives_one_job_and_many_give_every_fault_on_both_engines():
    assert draw(3) == draw(3)
    for engine in (0, 1):
        jobs = [draw(seed) for seed in range(engine, 200, 2)]
        assert {job.engine for job in jobs} == {("mooncake_tcp", "nixl_tcp")[engine]}
        total = sum((job.injected() for job in jobs), Counter())
        assert min(total[kind] for kind in KINDS) > 20
        assert {job.handoff for job in jobs} == {"push", "pull"}
        assert any(set(job.kill) == set(job.restart) == set(job.ranks) for job in jobs)  # all at once


def test_what_is_injected_ends_with_the_job():
    job = plan(kill={"decode0.0": 1.0}, restart={"decode0.0": 2.0}, pause={"prefill0.0": [(0.5, 3.0)]})
    assert job.injected() == Counter(SIGKILL=1, restart=1, SIGSTOP=1, SIGCONT=1)
    assert job.injected(2.5) == Counter(SIGKILL=1, restart=1, SIGSTOP=1)


def test_a_clean_job_has_nothing():
    assert found(plan()) == {}
    assert found(plan(kill={"decode0.0": 1.5}), LOST, decode="killed by signal 9, as was asked for") == {}
    assert (
        found(plan(pause={"decode0.0": [(1.5, 6.0)]}), LOST, ended=5.0, decode="PeerLost: decode0 is given up") == {}
    )


@pytest.mark.parametrize(
    ("status", "faults"),
    [
        ("TransferTimeout: too late", {}),
        ("TransferTimeout: too late", {"kill": {"decode0.0": 3.0}}),  # after its end
        ("TransferTimeout: too late", {"pause": {"decode0.0": [(1.5, 1.6)]}}),  # nobody notices that
        ("Stalled: nothing got anywhere", {"kill": {"decode0.0": 1.5}}),
        ("ValueError: a defect", {"kill": {"decode0.0": 1.5}}),
        ("", {}),
    ],
)
def test_a_failure_without_a_fault_that_explains_it_is_a_violation(status: str, faults: dict[str, Any]):
    assert found(plan(**faults), status)["violations"] == 1


def test_a_live_pair_that_serves_no_probe_is_a_violation():
    assert found(plan(), probe="PeerLost: they are not connected") == {"violations": 1}
    gone = "killed by signal 9, as was asked for"
    assert found(plan(kill={"decode0.0": 1.5}), probe="PeerLost: they are not connected", decode=gone) == {}


def test_bytes_that_are_missing_or_wrong_are_lost():
    assert found(plan(), nbytes=BYTES - 1) == {"bytes_lost": 1}
    assert found(plan(), nbytes=0) == {"bytes_lost": 1}
    assert found(plan(kill={"prefill0.0": 1.5}), nbytes=0) == {}  # it died before it said how many
    assert found(plan(), "room 1: layer 0 of token 3 holds something else") == {"bytes_lost": 1}


@pytest.mark.parametrize(
    "held", [{"free_pages": 318}, {"free_pages": 318, "used_pages": 2, "open_rooms": 1}, {"open_rooms": 1}]
)
def test_pages_and_rooms_that_stay_are_leaks(held: dict[str, int]):
    assert found(plan(), decode=held)["leaks"] > 0
    quarantined = {"free_pages": 318, "quarantined_pages": 2, "open_rooms": 1}
    assert found(plan(), decode=quarantined) == {}


def test_ranks_that_hang_or_crash_are_found():
    assert found(plan(), decode="TransferTimeout: not done after 90 s, and killed") == {"hangs": 1}
    assert found(plan(), decode="killed by signal 11\nsegmentation fault") == {"crashes": 1}
    assert found(plan(), decode="ValueError: a defect") == {"crashes": 1}
    killed = "killed by signal 9, as was asked for"
    assert found(plan(), decode=killed) == {"crashes": 1}  # nobody asked for it


def test_what_is_left_is_found():
    outcome = Outcome({"router": RankResult("router", {"rows": [], "histories": [], "probes": []})}, 1.0)
    assert Check(plan(), outcome).report(1.0, ["process 7"]).details == ["leftovers: process 7"]


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


@pytest.mark.slow
@pytest.mark.mooncake
def test_a_file_is_gone_on_with_and_its_rows_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make_target("mooncake_tcp")
    path = tmp_path / "found.csv"
    words = ["run", "--to", str(path), "--seeds"]
    assert main([*words, "2:3"]) == 0
    first = path.read_text()
    assert main([*words, "2:3"]) == 0
    assert path.read_text() == first
    (row,) = read([path])
    assert sum(int(row[kind]) for kind in KINDS) == draw(2).injected().total()
    other = tmp_path / "other.csv"
    other.write_text(first.replace("\n2,", "\n4,"))
    assert f"| requests | {2 * int(row['requests'])} | {2 * int(row['requests'])} |" in list(table([path, other]))
