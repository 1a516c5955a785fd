"""Which failures faults explain: those of requests that they reached, at their instances, in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from experiments.faults.causes import BACKLOG, GRACE, RECONNECTED, Causes, outages
from experiments.faults.scenario import Scenario, draw
from pdsim.serving.deployment import ROUTER
from pdsim.sim.faults import Faults, Silence, Slow, Squeeze
from pdsim.transfer.job import Outcome, RankResult

RANKS = ("prefill0.0", "prefill1.0", "decode0.0", "decode1.0")
LOST = "PeerLost: nothing from prefill0 for 2 s"
LATE = "TransferTimeout: not complete"
SHORT = "OutOfMemory: 3 of 3 pages are in quarantine"


def scenario(**changes: Any) -> Scenario:
    """Return a scenario of two instances on either side in which nothing goes wrong but *changes*."""
    seed = next(seed for seed in range(100) if "2 x tp=1 to 2 x tp=1" in draw(seed, 3, 0.0).text)
    return replace(draw(seed, 3, 0.0), **changes)


def causes(
    rows: Sequence[tuple[str, float, str, float, str]],
    dead: Sequence[str] = (),
    held: frozenset[int] = frozenset(),
    broken: frozenset[int] = frozenset(),
    probes: Sequence[Sequence[str]] = (),
    **changes: Any,
) -> tuple[Causes, Outcome]:
    """Return what explains failures of requests as in *rows*: prefill, begin, decode, end and status of each."""
    histories = [[end, [[start, 1 + n, p, d]]] for n, (p, start, d, end, _) in enumerate(rows)]
    value = {
        "rows": [[p, d, 0, status] for p, _, d, _, status in rows],
        "histories": histories,
        "probes": list(probes),
    }
    ranks = {name: RankResult(name, error="Killed" if name in dead else "") for name in RANKS}
    outcome = Outcome({ROUTER: RankResult(ROUTER, value=value), **ranks}, 20.0)
    found = Causes(scenario(**changes))
    assert found.know(outcome, held, broken) == [status for *_, status in rows]
    return found, outcome


def explained(row: tuple[str, float, str, float, str], **how: Any) -> bool:
    return causes([row], **how)[0].request(0, row[-1])


@pytest.mark.parametrize(
    ("row", "kill", "may"),
    [
        (("prefill0", 1.0, "decode0", 4.0, LOST), {"prefill0.0": 2.0}, True),
        (("prefill0", 1.0, "decode0", 4.0, LOST), {"prefill0.0": 0.5}, True),  # it was sent to the dead
        (("prefill0", 1.0, "decode0", 4.0, LOST), {"prefill0.0": 5.0}, False),  # lost after its end
        (("prefill0", 1.0, "decode0", 4.0, LOST), {"decode0.0": 2.0}, False),  # not the one that is named
        (("prefill1", 1.0, "decode0", 4.0, LOST), {"prefill0.0": 2.0}, False),  # not one of its own
    ],
)
def test_a_loss_explains_what_its_instance_was_serving(row: Any, kill: Mapping[str, float], may: bool):
    assert explained(row, kill=kill, dead=tuple(kill)) is may


def test_an_instance_that_is_back_explains_nothing_more():
    kill, restart = {"prefill0.0": 1.0}, {"prefill0.0": 2.0}
    back = 2.0 + RECONNECTED
    assert explained(("prefill0", back - 0.1, "decode0", 9.0, LOST), kill=kill, restart=restart)
    assert not explained(("prefill0", back + 0.1, "decode0", 9.0, LOST), kill=kill, restart=restart)
    assert outages(kill, restart, ["prefill0.0"])["prefill0"].end == float("inf")  # it has not come back


def test_no_instance_is_left_when_all_of_a_side_are_out():
    row = ("prefill0", 1.0, "decode0", 4.0, "PeerLost: no prefill instance is left")
    one = {"prefill0.0": 0.5}
    assert not explained(row, kill=one, dead=tuple(one))
    both = {**one, "prefill1.0": 0.7}
    assert explained(row, kill=both, dead=tuple(both))


def test_a_timeout_is_explained_by_what_slowed_its_own_instances():
    row = ("prefill0", 5.0, "decode1", 6.0, LATE)
    assert not explained(row)
    assert explained(row, held=frozenset({1}))
    assert not explained(row, held=frozenset({2}))  # another's room
    for rank, until, may in (
        ("prefill0.0", 5.5, True),
        ("decode1.0", 5.0 - BACKLOG, True),
        ("decode1.0", 4.9 - BACKLOG, False),
        ("decode0.0", 5.5, False),
    ):
        assert explained(row, faults=Faults(slow=(Slow(rank, 0.0, until, 9.0),))) is may


def test_a_squeezed_link_reaches_the_rank_of_its_gpu():
    specs = {spec.name: spec for spec in scenario().specs}
    links = {name: f"node{specs[name].place.node}/gpu{specs[name].place.gpu}/nvlink.in" for name in RANKS}
    row = ("prefill0", 5.0, "decode1", 6.0, LATE)
    for name, may in (("decode1.0", True), ("decode0.0", False)):
        assert explained(row, faults=Faults(squeezes=(Squeeze(links[name], 4.0, 5.5, 0.0),))) is may


def test_memory_is_short_where_another_request_has_failed_before():
    mine = ("prefill0", 5.0, "decode0", 9.0, SHORT)
    for other, may in (
        (("prefill1", 1.0, "decode0", 4.0, LATE), True),
        (("prefill1", 1.0, "decode1", 4.0, LATE), False),  # elsewhere
        (("prefill1", 9.5, "decode0", 9.9, LATE), False),  # later
        (("prefill1", 1.0, "decode0", 4.0, "ok"), False),
        (("prefill1", 1.0, "decode0", 4.0, "Aborted: the user left"), False),
    ):
        assert causes([mine, other])[0].request(0, SHORT) is may


def test_pages_of_a_request_that_was_pulled_may_stay_where_prefill_is_not_told():
    mine, other = ("prefill0", 5.0, "decode0", 9.0, SHORT), ("prefill0", 4.0, "decode1", 6.0, "ok")
    faults = Faults(silences=(Silence("prefill0.0", 4.5, 9.0),))
    for handoff, away, may in (("pull", faults, True), ("pull", Faults(), False), ("push", faults, False)):
        job = replace(scenario().job, engine=replace(scenario().job.engine, handoff=handoff))
        assert causes([mine, other], job=job, faults=away)[0].request(0, SHORT) is may


def test_a_stall_and_an_unknown_failure_are_never_explained():
    kill = {"prefill0.0": 2.0}
    for status in ("Stalled: no request got anywhere", "TransferFailed: what"):
        assert not explained(("prefill0", 1.0, "decode0", 4.0, status), kill=kill, held=frozenset({1}))


def test_a_silent_rank_may_be_given_up_and_its_instance_with_it():
    faults = Faults(silences=(Silence("prefill0.0", 2.0, 4.0),))
    row = ("prefill0", 1.0, "decode0", 4.0, LOST)
    assert explained(row, faults=faults, dead=("prefill0.0",))
    assert not explained(("prefill1", 1.0, "decode0", 4.0, LOST), faults=faults, dead=("prefill0.0",))
    assert not explained(("prefill0", 1.0, "decode0", 1.9, LOST), faults=faults, dead=("prefill0.0",))
    found, _ = causes([], faults=faults)
    assert [found.rank("prefill0.1", "PeerLost: prefill0 is given up", at) for at in (1.9, 2.1)] == [False, True]
    assert not found.rank("decode0.0", "PeerLost: decode0 is given up", 2.1)


def test_a_silent_rank_that_lives_is_back_after_its_silence():
    faults = Faults(silences=(Silence("decode0.0", 1.0, 4.0),))
    both = {"decode0.0": 2.0, "decode1.0": 2.0}
    row = ("prefill0", 5.9, "decode0", 5.9, "PeerLost: no decode instance is left")
    for how, end in (({}, 4.0), ({"kill": both, "restart": dict.fromkeys(both, 3.0)}, 4.0)):
        found, _ = causes([row], faults=faults, **how)  # started again during the silence, it is not heard
        assert outages(how.get("kill", {}), how.get("restart", {}), [], faults.silences)["decode0"].end == end + 2.0
    assert not found.request(0, row[-1])  # decode1 is back
    assert explained(row, kill=both, restart={"decode0.0": 3.0, "decode1.0": 4.0}, faults=faults)
    assert not explained((*row[:3], 6.1, row[-1]), kill=both, restart=dict.fromkeys(both, 4.0), faults=faults)


def test_a_reported_failure_is_that_of_a_room_whose_transfer_broke():
    row = ("prefill0", 1.0, "decode0", 4.0, "TransferFailed: the engine reports an error")
    assert not explained(row)
    assert explained(row, broken=frozenset({1}))
    assert not explained(row, broken=frozenset({2}))


def test_a_limit_explains_a_room_that_took_as_long():
    status = "TransferTimeout: not all of it has arrived within 0.5 s"
    job = replace(scenario().job, waiting_timeout=0.5)
    assert explained(("prefill0", 1.0, "decode0", 1.6, status), job=job)
    assert not explained(("prefill0", 1.0, "decode0", 1.4, status), job=job)
    assert not explained(("prefill0", 1.0, "decode0", 1.6, status))


def test_a_lease_ends_by_the_queue_of_the_router_if_that_is_long_enough():
    status = "TransferTimeout: the lease of 0.03 s ended without a heartbeat of the reader"
    mine = ("prefill0", 1.0, "decode0", 1.6, status)
    for count, proxy, may in ((9, 1e-3, False), (10, 1e-3, True), (30, 0.0, False)):  # each is sent on twice
        engine = replace(scenario().job.engine, lease=0.03, heartbeat=0.01, proxy=proxy + 1e-9)
        others = [("prefill1", 1.0, "decode1", 1.5, "ok")] * (count - 1) + [("prefill1", 1.7, "decode1", 1.9, "ok")]
        found, _ = causes([mine, *others], job=replace(scenario().job, engine=engine))
        assert found.request(0, status) is may


def test_a_full_queue_explains_a_refusal_where_it_refuses():
    status = "SendQueueFull: 9 descriptors on top of 90 outstanding"
    engine = scenario().engine
    for full, may in (("refuse", True), ("wait", False)):
        other = replace(engine, intra=replace(engine.intra, depth=96, full=full))
        assert explained(("prefill0", 1.0, "decode0", 1.6, status), engine=other) is may


def test_ranks_end_in_time_when_the_router_is_lost():
    found, _ = causes([], kill={ROUTER: 1.0})
    alone, deadline = f"PeerLost: nothing from {ROUTER} for 2.0 s", scenario().job.deadline
    latest = 1.0 + 1.5 * deadline + GRACE
    assert [found.rank("decode0.0", alone, at) for at in (0.9, 2.0, latest, latest + 0.1)] == [
        False,
        True,
        True,
        False,
    ]
    assert not causes([])[0].rank("decode0.0", alone, 2.0)


def test_a_rank_ends_once_its_instance_has_lost_one():
    found, _ = causes([], kill={"prefill0.0": 2.0})
    gone = "PeerLost: prefill0 is given up"
    assert found.rank("prefill0.0", "Killed: as asked", 2.0)
    assert [found.rank("prefill0.1", gone, at) for at in (1.9, 2.1)] == [False, True]
    assert not found.rank("prefill1.0", gone, 2.1)


def test_a_pair_that_lives_must_serve_its_probe():
    probes = [
        ["prefill0", "decode0", "ok"],
        ["prefill0", "decode1", "PeerLost: what"],
        ["prefill1", "decode1", "Stalled"],
    ]
    found, outcome = causes([], dead=("prefill1.0",), probes=probes)
    (what,) = found.unrecovered(outcome)
    assert what.startswith("prefill0 and decode1 live")
