"""Which failures faults explain: those of requests that they reached, at their instances, in time."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from experiments.faults.causes import BACKLOG, GRACE, RECONNECTED, Causes, outages
from experiments.faults.scenario import Scenario, draw
from experiments.faults.settings import LIBRARY
from pdsim.kv.messages import ROUTER
from pdsim.sim.faults import Faults, Silence, Slow, Squeeze
from pdsim.transfer.job import Outcome, RankResult

RANKS = ("prefill0.0", "prefill1.0", "decode0.0", "decode1.0")
Row = tuple[str, float, str, float, str]  # prefill, begin, decode, end and status of a request


def scenario(**changes: Any) -> Scenario:
    """Return a scenario of two instances on either side in which nothing goes wrong but *changes*."""
    seed = next(seed for seed in range(100) if "2 x tp=1 to 2 x tp=1" in draw(seed, 3, 0.0).text)
    return replace(draw(seed, 3, 0.0), **changes)


PLAIN = scenario()
INFINITE = float("inf")


def causes(rows, dead=(), held=frozenset(), broken=frozenset(), probes=(), left=(), **changes):
    """Return what explains failures of the requests in *rows*."""
    histories = [[[end, status, [[start, 1 + n, p, d]]]] for n, (p, start, d, end, status) in enumerate(rows)]
    ends = [[p, d, 0, status] for p, _, d, _, status in rows]
    value = {"rows": ends, "histories": histories, "probes": list(probes), "changes": list(left)}
    ranks = {name: RankResult(name, error="Killed" if name in dead else "") for name in RANKS}
    outcome = Outcome({ROUTER: RankResult(ROUTER, value=value), **ranks}, 20.0)
    known = Causes(replace(PLAIN, **changes))
    assert known.know(outcome, held, broken) == [status for *_, status in rows]
    return known, outcome


def row(status, start=1.0, end=4.0, prefill="prefill0", decode="decode0"):
    return prefill, start, decode, end, status


def job(engine: Mapping[str, Any] = {}, **changes: Any) -> dict[str, Any]:
    return {"job": replace(PLAIN.job, engine=replace(PLAIN.job.engine, **engine), **changes)}


def killed(**ranks: float) -> dict[str, Any]:
    kill = {f"{instance}.0": at for instance, at in ranks.items()}
    return {"kill": kill, "dead": tuple(kill)}


def slow(rank: str, end: float) -> dict[str, Any]:
    return {"faults": Faults(slow=(Slow(rank, 0.0, end, 9.0),))}


def squeezed(name: str) -> dict[str, Any]:
    place = {spec.name: spec for spec in PLAIN.specs}[name].place
    link = f"node{place.node}/gpu{place.gpu}/nvlink.in"
    return {"faults": Faults(squeezes=(Squeeze(link, 4.0, 5.5, 0.0),))}


def full(what: str) -> dict[str, Any]:
    return {"engine": replace(PLAIN.engine, intra=replace(PLAIN.engine.intra, depth=96, full=what))}


LOST, LATE = "PeerLost: nothing from prefill0 for 2 s", "TransferTimeout: not complete"
NONE = "PeerLost: no prefill instance is left"
FAILED, REFUSED = "TransferFailed: the engine reports an error", "SendQueueFull: 9 descriptors on top of 90"
WAITED = "TransferTimeout: not all of it has arrived within 0.5 s"
SILENT = {"faults": Faults(silences=(Silence("prefill0.0", 2.0, 4.0),)), "dead": ("prefill0.0",)}
LONG = row(LATE, 5.0, 6.0, decode="decode1")
BACK = {"kill": {"prefill0.0": 1.0}, "restart": {"prefill0.0": 2.0}}
LEFT = {"left": [(1.0, "prefill1", "left")], "restart": {"prefill1.0": 6.0}}
ALL = {"kill": {"prefill0.0": 2.0}, "held": frozenset({1})}


@pytest.mark.parametrize(
    ("failed", "how", "may"),
    [
        (row(LOST), killed(prefill0=2.0), True),
        (row(LOST), killed(prefill0=0.5), True),  # it was sent to the dead
        (row(LOST), killed(prefill0=5.0), False),  # lost after its end
        (row(LOST), killed(decode0=2.0), False),  # not the one that is named
        (row(LOST, prefill="prefill1"), killed(prefill0=2.0), False),  # not one of its own
        (row(LOST, 1.9 + RECONNECTED, 9.0), BACK, True),
        (row(LOST, 2.1 + RECONNECTED, 9.0), BACK, False),  # it is back
        (row(NONE), killed(prefill0=0.5), False),
        (row(NONE), killed(prefill0=0.5, prefill1=0.7), True),
        (row(NONE), killed(prefill0=0.5) | LEFT, True),
        (row(NONE), killed(prefill0=5.5) | LEFT, False),  # nothing was lost by then
        (row(NONE, end=6.1 + RECONNECTED), killed(prefill0=0.5) | LEFT, False),  # prefill1 is back
        (row(LOST, prefill="prefill1"), LEFT, False),
        (row(LOST), SILENT, True),  # a silent rank may be given up
        (row(LOST, prefill="prefill1"), SILENT, False),
        (row(LOST, end=1.9), SILENT, False),
        (LONG, {}, False),
        (LONG, {"held": frozenset({1})}, True),
        (LONG, {"held": frozenset({2})}, False),  # another's room
        (LONG, slow("prefill0.0", 5.5), True),
        (LONG, slow("decode1.0", 5.0 - BACKLOG), True),
        (LONG, slow("decode1.0", 4.9 - BACKLOG), False),
        (LONG, slow("decode0.0", 5.5), False),
        (LONG, squeezed("decode1.0"), True),  # the link of its GPU
        (LONG, squeezed("decode0.0"), False),
        (row("Stalled: no request got anywhere"), ALL, False),
        (row("TransferFailed: what"), ALL, False),
        (row(FAILED), {}, False),
        (row(FAILED), {"broken": frozenset({1})}, True),
        (row(FAILED), {"broken": frozenset({2})}, False),
        (row(WAITED, end=1.6), job(waiting_timeout=0.5), True),
        (row(WAITED, end=1.4), job(waiting_timeout=0.5), False),
        (row(WAITED, end=1.6), {}, False),
        (row(REFUSED, end=1.6), full("refuse"), True),
        (row(REFUSED, end=1.6), full("wait"), False),
    ],
)
def test_a_fault_explains_what_it_reached(failed, how, may):
    assert causes([failed], **how)[0].last(0, failed[-1]) is may


@pytest.mark.parametrize(
    ("other", "how", "may"),
    [
        (row("ok", 1.0, 8.0), {"layerwise": True}, True),
        (row("ok", 1.0, 8.0), {}, False),
        (row("ok", 1.0, 8.0, decode="decode0", prefill="prefill1"), {"layerwise": True}, False),  # elsewhere
        (row("ok", 6.5, 8.0), {"layerwise": True}, False),  # later
    ],
)
def test_layer_by_layer_a_held_write_holds_rooms_beside(other, how, may):
    assert causes([LONG, other], held=frozenset({2}), **job(**how))[0].last(0, LONG[-1]) is may


def test_instances_are_out_until_they_are_back():
    assert outages(BACK["kill"], BACK["restart"], ["prefill0.0"])["prefill0"].end == INFINITE
    faults = Faults(silences=(Silence("decode0.0", 1.0, 4.0),))
    both = {"decode0.0": 2.0, "decode1.0": 2.0}
    failed = row("PeerLost: no decode instance is left", 5.9, 5.9)
    for kill, restart in (({}, {}), (both, dict.fromkeys(both, 3.0))):  # started again while silent, it is not heard
        assert outages(kill, restart, [], faults.silences)["decode0"].end == 4.0 + RECONNECTED
    for end, restart, may in (
        (5.9, dict.fromkeys(both, 3.0), False),  # decode1 is back
        (5.9, {"decode0.0": 3.0, "decode1.0": 4.0}, True),
        (6.1, dict.fromkeys(both, 4.0), False),
    ):
        later = (*failed[:3], end, failed[-1])
        assert causes([later], kill=both, restart=restart, faults=faults)[0].last(0, failed[-1]) is may


SHORT = row("OutOfMemory: 3 of 3 pages are in quarantine", 5.0, 9.0)
AWAY = {"faults": Faults(silences=(Silence("prefill0.0", 4.5, 9.0),))}


@pytest.mark.parametrize(
    ("other", "how", "may"),
    [
        (row(LATE, prefill="prefill1"), {}, True),
        (row(LATE, prefill="prefill1", decode="decode1"), {}, False),  # elsewhere
        (row(LATE, 9.5, 9.9, prefill="prefill1"), {}, False),  # later
        (row("ok", prefill="prefill1"), {}, False),
        (row("Aborted: the user left", prefill="prefill1"), {}, False),
        (row("ok", 4.0, 6.0, decode="decode1"), AWAY | job({"handoff": "pull"}), True),  # prefill is not told
        (row("ok", 4.0, 6.0, decode="decode1"), job({"handoff": "pull"}), False),
        (row("ok", 4.0, 6.0, decode="decode1"), AWAY, False),
    ],
)
def test_memory_is_short_where_another_request_failed_before(other, how, may):
    assert causes([SHORT, other], **how)[0].last(0, SHORT[-1]) is may


@pytest.mark.parametrize(("count", "proxy", "may"), [(9, 1e-3, False), (10, 1e-3, True), (30, 0.0, False)])
def test_a_lease_ends_by_a_long_queue_of_the_router(count, proxy, may):
    mine = row("TransferTimeout: the lease of 0.03 s ended without a heartbeat of the reader", end=1.6)
    others = [row("ok", 1.0, 1.5, "prefill1", "decode1")] * (count - 1)  # each is sent on twice
    how = job({"lease": 0.03, "heartbeat": 0.01, "proxy": proxy + 1e-9})
    known, _ = causes([mine, *others, row("ok", 1.7, 1.9, "prefill1", "decode1")], **how)
    assert known.last(0, mine[-1]) is may


@pytest.mark.parametrize(("failed", "may"), [(4.0, True), (3.9, False)])
def test_a_router_that_fails_loses_its_account(failed, may):
    known, _ = causes([row("ok", end=4.0)], outages=[(failed, 4.5)])  # 0 bytes, as the router says
    assert (not [*known.miscounted({1: 64})]) is may


def test_a_rank_ends_with_its_instance_router_or_group():
    alone, gone = f"PeerLost: nothing from {ROUTER} for 2.0 s", "PeerLost: prefill0 is given up"
    without, _ = causes([], kill={ROUTER: 1.0})
    latest = 1.0 + 1.5 * PLAIN.job.deadline + GRACE
    ends = [without.rank("decode0.0", alone, at) for at in (0.9, 2.0, latest, latest + 0.1)]
    assert ends == [False, True, True, False]
    assert not causes([])[0].rank("decode0.0", alone, 2.0)
    for how in ({"kill": {"prefill0.0": 2.0}}, {"faults": SILENT["faults"]}):
        known, _ = causes([], **how)
        assert [known.rank("prefill0.1", gone, at) for at in (1.9, 2.1)] == [False, True]
        assert not known.rank("prefill1.0", gone, 2.1)
        assert known.rank("prefill0.0", "Killed: as asked", 2.0) == ("kill" in how)
    error = "PeerLost: decode0 is given up (PeerLost: decode0.1 was started again), and decode0.0 with it"
    known, _ = causes([], kill={"decode0.0": 1.0, "decode0.1": 1.0}, restart={"decode0.0": 2.0, "decode0.1": 2.1})
    ends = [known.rank("decode0.0", error, at, born) for at, born in ((2.2, 2.0), (2.05, 2.0), (9.0, 2.2 + GRACE))]
    assert ends == [True, False, False]
    assert not known.rank("decode0.0", error.replace("0.1 was", "0.2 was"), 2.2, 2.0)
    error = (
        "TransferTimeout: a collective of prefill0.0+prefill0.1 is not over after 60 s; prefill0.0 had not called"
    )
    known, _ = causes([], restart={"prefill0.1": 2.0}, collective=LIBRARY)
    ends = [("prefill0.1", 62.0), ("prefill0.1", 62.1), ("prefill0.0", 62.0)]
    assert [known.rank(name, error, at) for name, at in ends] == [True, False, False]
    assert not known.rank("prefill0.1", error.partition(";")[0], 62.0)
    error, again = "PeerLost: prefill0.1 has left the group prefill0.0+prefill0.1", {"prefill0.0": 2.0}
    known, _ = causes([], kill={"prefill0.1": 1.0}, restart=again)  # born once it has gathered
    ends = [known.rank("prefill0.0", error, at, born) for at, born in ((1.6, 1.5), (0.9, 0.5), (2.6, 2.5))]
    assert ends == [True, False, False]


def test_a_pair_that_lives_must_serve_its_probe():
    ends = {("prefill0", "decode0"): "ok", ("prefill0", "decode1"): "PeerLost", ("prefill1", "decode1"): "Stalled"}
    known, outcome = causes([], dead=("prefill1.0",), probes=[[*pair, end] for pair, end in ends.items()])
    (what,) = known.unrecovered(outcome)
    assert what.startswith("prefill0 and decode1 live")


@pytest.mark.parametrize(("count", "may"), [(9, False), (10, True)])
def test_a_lease_ends_by_a_long_queue_of_probes(count, may):
    end = "TransferTimeout: the lease of 0.03 s ended without a heartbeat of the reader"
    probes = [["prefill0", "decode0", end], *[["prefill1", "decode1", "ok"]] * (count - 1)]
    known, outcome = causes([], probes=probes, **job({"lease": 0.03, "heartbeat": 0.01, "proxy": 1e-3 + 1e-9}))
    assert len([*known.unrecovered(outcome)]) == (not may)
