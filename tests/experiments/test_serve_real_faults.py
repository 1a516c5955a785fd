"""Faults on the real engines: users who leave, a rank that is killed in mid-transfer.

Every page is accounted for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.serve import ServeOptions, job, specs
from pdsim.compute.forward import Compute
from pdsim.models.parallel import Parallel, Side
from pdsim.serving.settings import Kv, SchedulerLimits
from pdsim.serving.workload import Request
from pdsim.sim.model import Model
from pdsim.transfer.job import Outcome, RankSpec
from tests.support.composed import composed
from tests.support.configs import LOOPBACK, make_config
from tests.support.dying import KILLED, dying
from tests.support.engines import REAL, engine, make_target
from tests.support.serving import GQA

ENGINES = [pytest.param(name, marks=getattr(pytest.mark, name.split("_")[0])) for name in REAL[:2]]
LARGE = replace(GQA, layers=32)  # 16 KiB a token: 1500 take 24 MiB, whose forward takes next to nothing
MODEL = "model"
TCP = composed("hw=loopback", "backend=mooncake_tcp").backend
ONE = Side(tp=1)
TWO = Side(tp=1, instances=2)
REQUESTS = [Request(0.5 + 0.05 * number, 1500, 4) for number in range(16)]


def serve(
    name: str,
    requests: Sequence[Request],
    leaves: Sequence[Sequence[float]] = (),
    kill: Mapping[str, float] = {},
    restart: Mapping[str, float] = {},
    prefill: Side = TWO,
    decode: Side = ONE,
    expected: Sequence[str] = (),
    dies: tuple[str, str, int] | None = None,
) -> Outcome:
    """Serve *requests*; where instances are *expected* to serve at the end, `probes` has one request of each pair.

    Those are sent once the instances are connected, however long a busy machine takes to start a process.  A rank
    *dies* in mid-transfer as `tests.support.dying` says.
    """
    options = ServeOptions(deadline=3.0, router="round_robin")
    config = make_config(
        Path("unused"),
        target="real",
        hw=LOOPBACK,
        backend=TCP if name == MODEL else engine(name),
        model=LARGE,
        parallel=Parallel(prefill=prefill, decode=decode),
        experiment=options,
        kv=Kv(page_size=16, pool=80 << 20),
        scheduler=SchedulerLimits(chunk=512, decode_batch=4),
        compute=Compute(scale=0.001),
    )
    what = job(config, options)
    router, *others = specs(config, what, requests)
    router = replace(router, arguments={**router.arguments, "leaves": [list(leave) for leave in leaves]})
    if expected:
        router = probing(router, max(restart.values(), default=0.0), expected)
    if dies:
        others = dying(others, *dies)
    target = make_target(name) if name != MODEL else Model(LOOPBACK, TCP, memory="tracked")
    return target.run([router, *others], kill, restart)


def probing(router: RankSpec, calm: float, expected: Sequence[str]) -> RankSpec:
    """Return *router* with a probe through each pair, once all *expected* instances are there, from *calm* on."""
    more = {"calm": calm, "linger": 0.5, "expected": list(expected), "patience": 60.0}
    return replace(router, program="experiments.faults.programs:router", arguments={**router.arguments, **more})


def probes(outcome: Outcome) -> list[list[str]]:
    """Return prefill instance, decode instance and status of each probe."""
    return [list(probe) for probe in outcome.ranks["router"].value["probes"]]


def statuses(outcome: Outcome) -> list[str]:
    return [row[3].partition(":")[0] for row in outcome.ranks["router"].value["rows"]]


def account(outcome: Outcome, rank: str) -> tuple[int, int]:
    """Return the used and quarantined pages of a leader, of which no room is left that is not among them."""
    value = outcome.ranks[rank].value
    assert value["free_pages"] + value["used_pages"] + value["quarantined_pages"] == value["pages"]
    return value["used_pages"], value["quarantined_pages"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_users_who_leave_in_mid_transfer_leave_no_page_behind(name: str):
    # anywhere between the queue and the last token
    leaves = [(number, 0.004 * number) for number in range(1, 16, 2)]
    outcome = serve(name, REQUESTS, leaves)
    found = statuses(outcome)
    assert set(found[::2]) == {"ok"}
    assert {"Aborted"} <= set(found[1::2]) <= {"ok", "Aborted"}
    assert [account(outcome, rank) for rank in ("prefill0.0", "prefill1.0", "decode0.0")] == [(0, 0)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_pages_of_a_killed_prefill_rank_come_back_once_it_is_proven_that_it_writes_no_more(name: str):
    crowd = [Request(0.5 + 0.05 * number, 1500, 4) for number in range(40)]  # of 24 MiB each, in three writes
    outcome = serve(name, crowd, dies=("prefill0.0", "write", 5), expected=("prefill1", "decode0"))
    found = statuses(outcome)
    assert {"PeerLost"} <= set(found) <= {"ok", "PeerLost"}
    assert KILLED in outcome.ranks["prefill0.0"].error
    assert [(*pair, status.partition(":")[0]) for *pair, status in probes(outcome)] == [
        ("prefill0", "decode0", "PeerLost"),
        ("prefill1", "decode0", "ok"),
    ]
    assert [account(outcome, rank) for rank in ("prefill1.0", "decode0.0")] == [(0, 0)] * 2


# the same experiment on the model and on Mooncake over TCP
@pytest.mark.slow
@pytest.mark.parametrize("name", [MODEL, ENGINES[0]])
def test_an_instance_whose_rank_is_killed_and_started_again_serves_again(name: str):
    """The other rank of the instance ends with it and is started again too: an instance is formed as a whole."""
    requests = [Request(0.15 * number, 300, 4) for number in range(40)]
    kill = {"prefill0.1": 1.5}
    restart = {"prefill0.1": 2.0, "prefill0.0": 6.0}  # the router has given the instance up by then
    side, both = Side(tp=1, pp=2, instances=2), ("prefill0", "prefill1", "decode0")
    outcome = serve(name, requests, kill=kill, restart=restart, prefill=side, expected=both)
    rows = outcome.ranks["router"].value["rows"]
    assert set(statuses(outcome)) <= {"ok", "PeerLost"}
    assert {row[3] for row in rows if row[0] == "prefill1"} == {"ok"}  # a healthy peer is not poisoned
    assert probes(outcome) == [["prefill0", "decode0", "ok"], ["prefill1", "decode0", "ok"]]
    leaders = ("prefill0.0", "prefill1.0", "decode0.0")
    assert [outcome.ranks[rank].error for rank in (*leaders, "prefill0.1")] == [""] * 4
    assert [account(outcome, rank) for rank in leaders] == [(0, 0)] * 3


# each rank's new process takes its own time to be there, so that every order occurs
@pytest.mark.slow
@pytest.mark.parametrize("name", [MODEL, *ENGINES])
@pytest.mark.parametrize("side", [ONE, Side(tp=1, pp=2)], ids=["one", "two"])
def test_both_sides_killed_and_started_again_at_once_serve_again(name: str, side: Side):
    requests = [Request(0.2 * number, 300, 4) for number in range(20)]
    ranks = [f"{instance}.{index}" for instance in ("prefill0", "decode0") for index in range(side.pp)]
    kill, restart = dict.fromkeys(ranks, 1.0), dict.fromkeys(ranks, 1.5)
    outcome = serve(
        name, requests, kill=kill, restart=restart, prefill=side, decode=side, expected=("prefill0", "decode0")
    )
    assert set(statuses(outcome)) <= {"ok", "PeerLost"}
    assert probes(outcome) == [["prefill0", "decode0", "ok"]]
    assert [outcome.ranks[rank].error for rank in ranks] == [""] * len(ranks)
    assert [account(outcome, rank) for rank in ("prefill0.0", "decode0.0")] == [(0, 0)] * 2
