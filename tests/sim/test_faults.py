"""What goes wrong on purpose: drawn from one seed, never against a promise of the waist, nothing without a plan."""

import dataclasses
import itertools

import pytest

from pdsim.core.errors import ConfigError, PeerLost, TransferError
from pdsim.sim.faults import Faults, Lag, Pause, Silence, Slow, Squeeze, Stale
from pdsim.sim.hosts import JobClock, RankClock
from pdsim.sim.memory import part_of
from pdsim.sim.model import Model
from pdsim.transfer import Batch, Region
from tests.support.machines import engine, machine, run


def one(rank):
    for index in range(20):
        rank.channel.send("ear", b"%d" % index)
        yield rank.clock.timeout(0.1)


def two(rank):
    yield from one(rank)


def ear(rank, count=40):
    heard = []
    for _ in range(count):
        message = yield rank.channel.receive()
        heard.append((message.sender, int(message.payload), rank.clock.now))
    return heard


def writer(rank, change_at=0.0, timeout=None):
    """Write 100 bytes "a", which take 2.75 s; set them to "b" at *change_at* after the call."""
    buffer = rank.device.allocate(1000)
    region = rank.endpoint.register(buffer, "kv")
    buffer.write(0, b"a" * 100)
    _, address = yield rank.channel.receive()
    peer = rank.endpoint.connect(address)
    start = rank.clock.now
    if change_at:
        rank.clock.call_at(start + change_at, lambda _: buffer.write(0, b"b" * 100), None)
    transfer = rank.endpoint.write(peer, Batch(region, peer.regions["kv"], [0], [0], [100]), timeout=timeout)
    try:
        yield transfer
        how = "ok"
    except TransferError as error:
        how = type(error).__name__
        yield transfer.settled
    rank.channel.send("reader", b"over")
    return [how, rank.clock.now - start]


def reader(rank, whole=False):
    """Look at the memory each eighth of a second until the writer is done; return what changed, and when.

    With *whole*, return what is there then.
    """
    buffer = rank.device.allocate(1000)
    rank.endpoint.register(buffer, "kv")
    rank.channel.send("writer", rank.endpoint.address())
    over, seen = [], []
    rank.channel.subscribe(over.append)
    while not over:
        yield rank.clock.timeout(0.125)
        now = buffer.read(0, 1).decode()
        if not seen or now != seen[-1][0]:
            seen.append([now, rank.clock.now])
    return buffer.read(0, 100).decode() if whole else seen


def notifier(rank):
    """Write ten times, one after the other; return when each was complete."""
    region = rank.endpoint.register(rank.device.allocate(1000), "kv")
    _, address = yield rank.channel.receive()
    peer, ends = rank.endpoint.connect(address), []
    for number in range(10):
        batch = Batch(region, peer.regions["kv"], [0], [0], [1])
        yield rank.endpoint.write(peer, batch, notify=bytes([number]))
        ends.append(rank.clock.now)
    return ends


def notified(rank):
    """Return which notifications come, and when."""
    rank.endpoint.register(rank.device.allocate(1000), "kv")
    rank.channel.send("notifier", rank.endpoint.address())
    seen = []
    while len(seen) < 10:
        notification = yield rank.endpoint.notifications.get()
        seen.append((notification.payload[0], rank.clock.now))
    return seen


def computer(rank):
    ends = []
    for _ in range(3):
        yield rank.device.compute(1.0)
        ends.append(rank.clock.now)
    return ends


def phoenix(rank):
    rank.endpoint.register(rank.device.allocate(100), "kv")
    rank.channel.send("friend", rank.endpoint.address())
    yield rank.clock.timeout(10.0)
    return rank.clock.now


def friend(rank):
    """Connect to both incarnations of the phoenix; the first address leads nowhere once it is over."""
    region = rank.endpoint.register(rank.device.allocate(100), "kv")
    _, before = yield rank.channel.receive()
    old = rank.endpoint.connect(before)
    _, after = yield rank.channel.receive()
    collected = []
    try:
        rank.endpoint.connect(before)
    except PeerLost:
        collected.append("gone")
    for peer in (old, rank.endpoint.connect(after)):
        try:
            record = yield rank.endpoint.write(peer, Batch(region, peer.regions["kv"], [0], [0], [10]))
            collected.append(record.status)
        except PeerLost:
            collected.append("lost")
    return collected


HELD = Faults(delayed=0.5, delay=1.0)


def model(faults=None, seed=0, **changes):
    return Model(machine(), engine(), memory="tracked", seed=seed, faults=faults, **changes)


def heard(faults, seed=0):
    return run(one, two, ear, model=model(faults, seed)).ranks["ear"].value


def of(sender, found):
    return [(number, at) for name, number, at in found if name == sender]


def written(faults, seed=0, whole=False, **how):
    ranks = run((writer, how), (reader, {"whole": whole}), model=model(faults, seed)).ranks
    return ranks["writer"].value, ranks["reader"].value


def test_a_seed_holds_up_messages_in_their_order():
    found = heard(HELD, seed=7)
    for sender in ("one", "two"):
        assert [number for number, _ in of(sender, found)] == list(range(20))
    assert [number for _, number, _ in found] != sorted(number for _, number, _ in found)
    assert found == heard(HELD, seed=7) != heard(HELD, seed=8)
    assert heard(Faults(), seed=3) == heard(None)  # a plan of nothing changes nothing
    assert (HELD.kinds(), Faults().kinds()) == (("delayed", "delay"), ())


def test_nothing_is_delayed_after_the_end_of_the_plan():
    calmed = heard(dataclasses.replace(HELD, until=0.05))  # the first of each is long there by then
    assert calmed[-6:] == heard(None)[-6:] != heard(HELD)[-6:]
    late = Faults(late=1.0, lateness=5.0, until=1e-9)  # before the write
    assert written(late, seed=2, timeout=3.0)[0] == ["ok", 2.75]


def test_notifications_come_late_and_in_order_though_writes_are_complete():
    plain, late = (run(notifier, notified, model=model(faults)).ranks for faults in (None, NOTICES))
    assert late["notifier"].value == plain["notifier"].value  # nothing holds up the writes
    assert [number for number, _ in late["notified"].value] == list(range(10))
    assert [at for _, at in plain["notified"].value] == plain["notifier"].value
    later = [at - end for (_, at), end in zip(late["notified"].value, plain["notifier"].value, strict=True)]
    assert min(later) == 0.0 < 5.0 < max(later)


NOTICES = Faults(unnoticed=0.3, notice=5.0)
ABSENT = {
    "silent": (Faults(silences=(Silence("one", 0.45, 1.25),)), ("one",)),
    "paused": (Faults(pauses=(Pause("ear", 0.45, 1.25),)), ("one", "two")),
    "paused in any order": (Faults(pauses=(Pause("ear", 0.45, 1.25),), shuffle=True), ("one", "two")),
}


@pytest.mark.parametrize(("faults", "senders"), ABSENT.values(), ids=ABSENT)
def test_an_absent_rank_gets_and_sends_messages_afterwards_in_order(faults, senders):
    plain, found = heard(None), heard(faults)
    for sender in ("one", "two"):
        assert [number for number, _ in of(sender, found)] == list(range(20))
        held = sender in senders
        expected = [1.25 if held and 0.45 <= was < 1.25 else was for _, was in of(sender, plain)]
        assert [at for _, at in of(sender, found)] == pytest.approx(expected)


def test_only_messages_of_the_named_kind_and_pair_lag():
    plain, found = heard(None), heard(Faults(lagging=(Lag(b"1", 5.0, sender="one", receiver="ear"),)))
    assert of("two", found) == of("two", plain)
    assert of("one", found)[0] == of("one", plain)[0]
    assert of("one", found)[-1][1] > of("one", plain)[-1][1] + 1.0
    assert heard(Faults(lagging=(Lag(b"1", 5.0, receiver="one"),))) == plain


def test_what_is_late_for_one_process_meets_the_next():
    kept = Faults(stale=(Stale("ear", 0.75, 1.0, 1.5, received=True),))
    for faults, first in ((Faults(), 12), (kept, 3)):
        ranks = run(one, (ear, {"count": 6}), model=model(faults), kill={"ear": 1.0}, restart={"ear": 1.2}).ranks
        assert ranks["ear"].value[0][1] == first


def test_a_paused_rank_resumes_while_its_hardware_went_on():
    paused = Faults(pauses=(Pause("computer", 0.5, 2.5),))
    assert run(computer, model=model(paused)).ranks["computer"].value == [2.5, 3.5, 4.5]  # the first ended at 1
    (how, seconds), seen = written(Faults(pauses=(Pause("writer", 1.0, 9.0),)))
    landed = 9.0 - seconds + 2.75  # as without the pause, at whose end it is seen
    assert (how, seen[-1][0]) == ("ok", "a")
    assert landed <= seen[-1][1] < landed + 0.125


def test_a_rank_killed_in_a_pause_does_not_resume():
    paused = model(Faults(pauses=(Pause("one", 0.45, 1.25),)))
    found = run(one, two, (ear, {"count": 20 + 5}), model=paused, kill={"one": 1.0}).ranks["ear"].value
    assert [number for number, _ in of("one", found)] == list(range(5))


def test_bytes_land_at_any_time_between_call_and_completion():
    read, landed = set(), set()
    for seed in range(12):
        ended, seen = written(Faults(stray=True), seed, change_at=1.5)
        assert ended == ["ok", 2.75]
        read.add(seen[-1][0])
        landed.add(seen[-1][1])
    assert read == {"a", "b"}  # before and after the writer changed them
    assert len(landed) > 4


def test_a_torn_transfer_is_part_old_and_part_new():
    found = [written(Faults(torn=True), seed, whole=True, change_at=1.5) for seed in range(12)]
    assert all(ended == ["ok", 2.75] and set(there) <= {"a", "b"} for ended, there in found)
    assert sum(set(there) == {"a", "b"} for _, there in found) > 4
    # the caller has given up after 2 s; half of the bytes are what it stored after that
    late = Faults(torn=True, late=1.0, lateness=5.0)
    found = [written(late, seed, whole=True, change_at=2.5, timeout=2.0) for seed in range(12)]
    assert {ended[0] for ended, _ in found} == {"TransferTimeout"}
    assert any(set(there) == {"a", "b"} for _, there in found)


def test_the_parts_of_a_batch_are_all_of_it_once():
    one, two = Region("a", "kv", 1000, 0, "gpu0"), Region("b", "kv", 1000, 0, "gpu1")
    batch = Batch(one, two, [100, 0, 500], [0, 300, 200], [10, 20, 1])
    whole = [(100 + i, i) for i in range(10)] + [(i, 300 + i) for i in range(20)] + [(500, 200)]
    for cuts in ((0, 31), (0, 1, 31), (0, 10, 30, 31), (0, 5, 15, 31)):
        collected = []
        for first, end in itertools.pairwise(cuts):
            part = part_of(batch, first, end)
            rows = zip(part.source_offset, part.target_offset, part.size, strict=True)
            collected += [(source + i, target + i) for source, target, size in rows for i in range(size)]
        assert collected == whole


@pytest.mark.parametrize("seed", range(6))
def test_a_transfer_reported_as_failed_may_have_moved_in_part(seed):
    ended, there = written(Faults(broken=1.0), seed, whole=True)
    assert ended == ["TransferFailed", 2.75]  # settled at once
    landed = there.count("a")
    assert there == "a" * landed + "\0" * (100 - landed)


def test_slow_ranks_and_cut_links_carry_on_later():
    slow = Faults(slow=(Slow("computer", 0.5, 2.5, 3.0),))
    assert run(computer, model=model(slow)).ranks["computer"].value == [1.0, 4.0, 5.0]
    assert written(Faults(slow=(Slow("writer", 0.0, 9.0, 2.0),)))[0] == ["ok", 4.0]  # 2 * 1.25 + 1 + 0.5
    (how, took), _ = written(Faults(squeezes=(Squeeze("node0/gpu0/nvlink.out", 0.0, 10.0, 0.0),)))
    assert (how, took + 0.5 + 0.125) == ("ok", pytest.approx(11.5, abs=0.2))  # its address took half a second


def test_the_seed_draws_the_order_within_one_instant():
    plain = [sender for sender, *_ in heard(None)]
    orders = [[sender for sender, *_ in heard(Faults(shuffle=True), seed)] for seed in (1, 2)]
    assert plain == ["one", "two"] * 20
    assert orders[0] != orders[1]
    assert all(set(order[i : i + 2]) == {"one", "two"} for order in orders for i in range(0, 40, 2))


def test_a_restarted_rank_is_another_one_to_its_peers():
    ranks = run(phoenix, friend, kill={"phoenix": 2.0}, restart={"phoenix": 3.0}).ranks
    assert ranks["friend"].value == ["gone", "lost", "ok"]
    assert (ranks["phoenix"].value, ranks["phoenix"].error) == (13.0, "")


def test_keys_of_ranks_that_draw_the_same_order_differ():
    job = JobClock(itertools.repeat(0.5))
    ranks = [RankClock(job, name) for name in "ab"]
    keys = [next(clock.numbers) for _ in range(3) for clock in (*ranks, job)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"delayed": 1.5}, "delayed"),
        ({"broken": -0.1}, "broken"),
        ({"delay": -1.0}, "delay"),
        ({"slow": (Slow("a", 2.0, 1.0, 2.0),)}, "in order"),
        ({"silences": (Silence("a", 2.0, 1.0),)}, "in order"),
        ({"pauses": (Pause("a", 2.0, 1.0),)}, "in order"),
    ],
)
def test_a_plan_is_checked(changes, words):
    with pytest.raises(ValueError, match=words):
        Faults(**changes)


@pytest.mark.parametrize("what", [Slow("x", 0.0, 1.0, 2.0), Squeeze("x", 0.0, 1.0, 0.0), Pause("x", 0.0, 1.0)])
def test_a_plan_for_what_is_not_there_is_refused(what):
    kind = {Slow: "slow", Squeeze: "squeezes", Pause: "pauses"}[type(what)]
    with pytest.raises(ConfigError, match="'x'"):
        run(computer, model=model(Faults(**{kind: (what,)})))
