"""Ranks that are alike run once where that changes nothing, and all of them run where it would."""

from dataclasses import replace

import pytest

from pdsim.core.errors import ConfigError
from pdsim.sim.faults import Faults
from pdsim.sim.model import Model
from pdsim.transfer import Batch
from pdsim.transfer.job import Place, RankSpec
from tests.support.machines import cost, engine, machine

RANKS = 4
ENGINE = engine()
SWITCH = machine(gpus=8)

# --- programs: a leader tells its followers what to write to the rank of their number on the other side ------------


def leader(rank, followers, told=None):
    for name in followers if told is None else told:
        rank.channel.send(name, b"go")
    for _ in followers:
        message = yield rank.channel.receive()
        if message.payload.startswith(b"{"):
            rank.endpoint.connect(message.payload)
    return rank.clock.now


def follower(rank, boss, target, failing=False, grouped=False):
    received = [(yield rank.channel.receive()).payload, (yield rank.channel.receive()).payload]
    order, address = sorted(received, key=len)  # they may come in either order
    peer = rank.endpoint.connect(address)
    buffer = rank.device.allocate(1000)
    region = rank.endpoint.register(buffer, "pool")
    if grouped:
        rank.group([rank.name, target])
    if failing:
        raise ValueError("on purpose")
    yield rank.endpoint.write(peer, Batch(region, peer.regions["pool"], [0], [0], [1000]), b"here")
    rank.channel.send(boss, b"done")
    return order.decode()


def sink(rank, source, also=None):
    buffer = rank.device.allocate(1000)
    rank.endpoint.register(buffer, "pool")
    rank.channel.send(source, rank.endpoint.address())
    if also:
        rank.channel.send(also, rank.endpoint.address())
    notification = yield rank.endpoint.notifications.get()
    return [notification.payload.decode(), rank.clock.now]


def specs(count=RANKS, told=None, also=None, **arguments):
    """One leader, and so many pairs of GPUs."""
    here = "tests.sim.test_fold"
    names = [f"from{number}" for number in range(count)]
    found = [
        RankSpec("leader", f"{here}:leader", Place(1, 0) if also else Place(), {"followers": names, "told": told})
    ]
    for number, name in enumerate(names):
        boss = {"boss": "leader", "target": f"into{number}"} | arguments
        found.append(RankSpec(name, f"{here}:follower", Place(0, number), boss, "from0" if number else ""))
    for number, name in enumerate(names):
        place = Place(0, count + number)
        found.append(
            RankSpec(
                f"into{number}", f"{here}:sink", place, {"source": name, "also": also}, "into0" if number else ""
            )
        )
    return found


def both(ranks, hw=SWITCH, made_of=ENGINE, **options):
    """Return the outcomes without and with folding."""
    return [Model(hw, made_of, fold=fold, **options).run(ranks) for fold in (False, True)]


def same(one, other):
    return (one.ranks, one.seconds, list(one.links.items()), list(one.pools.items())) == (
        other.ranks, other.seconds, list(other.links.items()), list(other.pools.items())
    )  # fmt: skip


def test_a_rank_stands_for_all_that_are_like_it():
    every, folded = both(specs())
    assert same(every, folded)
    assert folded.events < every.events
    assert [record.target for record in folded.ranks["from3"].transfers] == ["into3"]
    assert folded.links["node0/gpu3/nvlink.out"] == folded.links["node0/gpu0/nvlink.out"] > 0


def test_messages_of_all_count_where_a_receiver_wakes_for_each():
    slow = replace(SWITCH, host=replace(SWITCH.host, wake=1e-3, idle_wake=2e-3, idle_after=1e-2))
    every, folded = both(specs(), slow)
    assert same(every, folded)
    assert folded.events < every.events


def test_nothing_is_folded_that_does_not_say_so():
    plain = [replace(spec, like="") for spec in specs()]
    every, folded = both(plain)
    assert every.events == folded.events


@pytest.mark.parametrize(
    "options", [{"memory": "tracked"}, {"limit": 1e9}, {"faults": Faults(delayed=0.5, delay=1e-9)}]
)
def test_what_looks_at_single_ranks_runs_all(options):
    every, folded = both(specs(), **options)
    assert same(every, folded)
    assert every.events == folded.events


def test_ranks_that_share_a_link_run_all():
    cards = replace(SWITCH, nic=replace(SWITCH.nic, count=1))
    every, folded = both(specs(), cards, engine(intra=cost(path="rdma")))
    assert same(every, folded)
    assert every.events == folded.events


def test_pairs_that_share_a_card_stand_for_other_pairs():
    cards = replace(SWITCH, nic=replace(SWITCH.nic, count=4))
    every, folded = both(specs(), cards, engine(intra=cost(path="rdma")))
    assert same(every, folded)
    assert folded.events < every.events


def test_a_job_in_which_one_is_killed_runs_all():
    every, folded = (Model(SWITCH, ENGINE, fold=fold).run(specs(), {"from2": 1e-9}) for fold in (False, True))
    assert same(every, folded)
    assert "Killed" in folded.ranks["from2"].error


@pytest.mark.parametrize(
    "ranks",
    [
        specs(told=["from0", "from1", "from2", "from3", "from3"]),  # one is told more than the others
        specs(told=["from0", "from0", "from1", "from2", "from3"]),
        specs(failing=True),
        specs(grouped=True),
        specs(also="leader"),
    ],
    ids=["told more", "told twice", "fails", "has a group", "meets the leader"],
)
def test_ranks_that_turn_out_to_differ_are_run_again(ranks):
    every, folded = both(ranks, made_of=engine(intra=cost(), inter=cost(path="rdma")))
    assert same(every, folded)
    assert every.events == folded.events


def test_like_names_a_rank():
    with pytest.raises(ConfigError, match="like names 'nobody', which is not a rank"):
        Model(SWITCH, ENGINE).run([replace(specs()[1], like="nobody")])


def test_the_original_comes_first_and_is_like_nobody():
    backwards = list(reversed(specs()))
    chained = [replace(spec, like="from1") if spec.name == "from2" else spec for spec in specs()]
    for ranks in (backwards, chained):
        every, folded = both(ranks)
        assert same(every, folded)
        assert every.events == folded.events
