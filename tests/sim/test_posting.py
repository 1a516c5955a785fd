"""What posting, the wire, completion and the send queue cost.  All times are exact.

Unless told otherwise a transfer has 100 bytes in 4 descriptors: call 1, 4 descriptors of 0.25, 100 bytes at 100
bytes/s, latency 0.5.
"""

import itertools
from dataclasses import replace
from random import Random

import pytest

from backends.engines import mooncake
from pdsim.config.compose import compose
from pdsim.core.clock import Clock
from pdsim.core.errors import SendQueueFull
from pdsim.hardware.costs import InlineSaving, Jitter, Ramp
from pdsim.sim.faults import Draws
from pdsim.sim.hosts import PostingShare, PostingThread
from pdsim.sim.memory import CopyEngine
from pdsim.sim.model import Model
from pdsim.sim.network import Network
from pdsim.sim.posting import IsolatedTransfers, SendQueue
from pdsim.sim.topology import Route
from pdsim.transfer import Batch
from pdsim.transfer.job import Place, RankSpec
from tests.support.machines import cost, engine, machine


class Bench:
    """One link of *link* bytes/s out and one in; `log` has (time, tag) of all completions."""

    def __init__(self, way=0.0, link=100.0, threads=None, serial=0.0, **changes):
        self.clock = Clock()
        self.network = Network(self.clock)
        self.out = Route((self.network.link("out", link),), way)
        self.into = Route((self.network.link("in", link),), way)
        self.model = cost(**changes)
        self.poster = PostingThread(threads and PostingShare(self.clock, serial, 0.0), threads or 1)
        self.lane = self.new_lane()
        self.log = []

    def new_lane(self, name="a>b"):
        return SendQueue(self.network, self.poster, self.model, self.out, self.into, name)

    def post(self, tag, nbytes=100, descriptors=4, inward=False, lane=None, at=None):
        def now(_):
            return (lane or self.lane).post(nbytes, descriptors, inward, self.done, tag)

        return now(None) if at is None else self.clock.call_at(at, now, None)

    def done(self, posting):
        self.log.append((self.clock.now, posting.tag))

    def run(self):
        self.clock.run()
        return self.log


BARE = {"call": 0.0, "descriptor": 0.0, "latency": 0.0}
QUEUES = {**BARE, "queues": 2, "queue_rate": 25.0}
READ = {"read": 0.25, "read_descriptor": 0.125, "read_rate": 50.0}
PIPELINED = {"overlap": True, "pipelined": True}
DEPTH = {"depth": 4, "full": "wait"}
REFUSE = {"depth": 4, "full": "refuse"}
SMALL = {"small": InlineSaving(bytes=100, descriptors=4, saving=0.25)}


def post(tag="a", **how):
    return tag, how


LARGE = post("large", nbytes=200)
TIMES = {
    "stages add up": ({}, [post()], [(3.5, "a")]),
    "with overlap the wire": ({"overlap": True}, [post(nbytes=300)], [(3.5, "a")]),
    "with overlap the posting": ({"overlap": True}, [post()], [(2.5, "a")]),
    "pipelined: 1.25 until the first, 4 on the wire": (PIPELINED, [post(nbytes=400)], [(5.75, "a")]),
    "pipelined: 2 until the last, an eighth to carry it": (PIPELINED, [post(nbytes=50)], [(2.625, "a")]),
    "a write where reads cost more": (READ, [post()], [(3.5, "a")]),
    "a read: 25 bytes more, half the rate": (READ, [post(inward=True)], [(5.25, "a")]),
    "turns at the poster": ({}, [post(), post("b")], [(3.5, "a"), (5.5, "b")]),
    "peers share the poster": ({}, [post(), post("b", peer="c")], [(3.5, "a"), (5.5, "b")]),
    "an idle poster starts at once": ({}, [post(), post("b", at=8.0)], [(3.5, "a"), (11.5, "b")]),
    "an overlapping wire waits its turn": (
        {"overlap": True},
        [post(nbytes=400), post("b")],  # a alone on the wire until 2, b posts until 4
        [(4.5, "b"), (5.5, "a")],
    ),
    "flows share a link": (BARE, [post(), post("b", nbytes=200)], [(2.0, "a"), (3.0, "b")]),
    "a rate caps": ({"rate": 50.0}, [post()], [(4.5, "a")]),
    "a descriptor occupies: 100 bytes": ({"rate": 50.0, "wire_descriptor": 0.5}, [post()], [(6.5, "a")]),
    "without a rate at the narrowest: 200 bytes": ({"wire_descriptor": 0.5}, [post()], [(5.5, "a")]),
    "a descriptor holds slow queues": ({**QUEUES, "rate": 80.0, "wire_descriptor": 0.5}, [post()], [(4.0, "a")]),
    "queues cap both directions": (QUEUES, [post(), post("b", inward=True)], [(4.0, "a"), (4.0, "b")]),
    "queues of peers are apart": (QUEUES, [post(), post("b", peer="c")], [(2.0, "a"), (2.0, "b")]),
    "the way adds its latency": ({"way": 2.0}, [post()], [(5.5, "a")]),
    "room after completion": (REFUSE, [post(), post("b", at=3.75)], [(3.5, "a"), (7.25, "b")]),
    "who waits gets in after completion": (DEPTH, [post(), post("b")], [(3.5, "a"), (7.0, "b")]),
    "who waits is not overtaken": (
        DEPTH,
        [post(descriptors=2), post("b"), post("c", descriptors=2)],
        [(3.0, "a"), (6.5, "b"), (9.5, "c")],
    ),
    "beyond the depth alone": (DEPTH, [post(descriptors=8), post("b")], [(4.5, "a"), (8.0, "b")]),
    "waiting keeps no peer": (DEPTH, [post(), post("b"), post("c", peer="c")], [(3.5, "a"), (5.5, "c"), (7.5, "b")]),
    "small": (SMALL, [post()], [(3.25, "a")]),
    "a small read": ({**SMALL, "read": 0.25}, [post(inward=True)], [(3.5, "a")]),
    "too many bytes": (SMALL, [post(nbytes=101)], [(3.51, "a")]),
    "too many descriptors": (SMALL, [post(descriptors=5)], [(3.75, "a")]),
    "small behind a large one": (SMALL, [LARGE, post()], [(4.5, "large"), (5.5, "a")]),
    "small behind one to another peer": (SMALL, [LARGE, post(peer="c")], [(4.5, "large"), (5.5, "a")]),
    "small behind small": (SMALL, [post(), post("b")], [(3.25, "a"), (5.25, "b")]),
    "small after a large one": (SMALL, [LARGE, post(at=5.0)], [(4.5, "large"), (8.25, "a")]),
}


@pytest.mark.parametrize(("changes", "posts", "expected"), TIMES.values(), ids=TIMES)
def test_transfers_complete_at(changes, posts, expected):
    bench = Bench(**changes)
    lanes = {"b": bench.lane, "c": bench.new_lane("a>c")}
    for tag, how in posts:
        bench.post(tag, lane=lanes[how.get("peer", "b")], **{key: how[key] for key in how.keys() - {"peer"}})
    assert bench.run() == expected


@pytest.mark.parametrize(("saving", "seconds"), [(0.5, 3.0), (1.0, 2.5), (9.0, 2.0)])
def test_inline_saving_is_of_latency_then_of_call(saving, seconds):
    bench = Bench(small=InlineSaving(bytes=100, descriptors=4, saving=saving))
    bench.post("a")
    assert bench.run() == [(seconds, "a")]


def test_mooncake_has_the_thresholds_of_its_endpoint():
    small = compose(["hw=2xh200", "backend=mooncake_nvlink", "calibration=none"]).backend.intra.small
    assert (small.bytes, small.descriptors) == (mooncake.SMALL, mooncake.FEW)


def test_descriptors_beyond_the_largest_batch_cost_more():
    bench = Bench(fresh_descriptor=0.5)
    ends = [0.0, *(bench.post("a", descriptors=count).posted for count in (4, 2, 7))]
    took = [after - before for before, after in itertools.pairwise(ends)]
    assert took == [1 + 4 * (0.25 + 0.5), 1 + 2 * 0.25, 1 + 7 * 0.25 + 3 * 0.5]


def test_inward_transfers_use_the_other_direction():
    bench = Bench()
    bench.post("a", inward=True)
    bench.run()
    assert (bench.out.links[0].carried, bench.into.links[0].carried) == (0.0, 100.0)


def test_a_peer_connected_during_a_cut_is_as_fast_afterwards():
    bench = Bench(**PIPELINED)
    bench.network.set_capacity(bench.out.links[0], 0.0)
    lane = bench.new_lane("a>c")
    bench.network.set_capacity(bench.out.links[0], 100.0)
    bench.post("posting", nbytes=50, lane=lane)
    assert bench.run() == [(2.625, "posting")]


def test_a_refusing_queue_takes_no_more_than_its_depth():
    bench = Bench(depth=8, full="refuse")
    bench.post("a")
    bench.post("b")
    with pytest.raises(SendQueueFull, match="1 descriptors on top of 8 outstanding on a>b: the engine takes 8"):
        bench.post("c", descriptors=1)
    assert bench.run() == [(3.5, "a"), (5.5, "b")]
    with pytest.raises(SendQueueFull, match="5 descriptors on top of 0"):
        Bench(**REFUSE).post("a", descriptors=5)


@pytest.mark.parametrize(
    ("changes", "posts", "aborted", "expected"),
    [
        (DEPTH, "abc", ("b", 0.0), [(3.5, "a"), (7.0, "c")]),  # what waits for room
        (DEPTH, "ab", ("a", 2.5), [(6.0, "b")]),  # what has it
        (SMALL, "La", ("L", 0.0), [(5.25, "a")]),  # the poster is busy until 2 all the same
    ],
)
def test_an_aborted_transfer_makes_room(changes, posts, aborted, expected):
    bench = Bench(**changes)
    name, at = aborted
    for tag in posts:
        posting = bench.post(tag, nbytes=200 if tag == "L" else 100)
        for _ in range(2 * (tag == name)):
            bench.lane.abort(posting) if at == 0.0 else bench.clock.call_at(at, bench.lane.abort, posting)
    assert bench.run() == expected
    assert bench.lane.outstanding == 0


@pytest.mark.parametrize(("at", "carried"), [(1.0, 0.0), (2.5, 50.0), (3.25, 100.0)])
def test_an_aborted_transfer_is_never_reported(at, carried):
    bench = Bench()
    bench.clock.call_at(at, bench.lane.abort, bench.post("a"))
    assert bench.run() == []
    assert (bench.out.links[0].carried, bench.lane.outstanding) == (carried, 0)


THREE = {"queues": 3, "queue_rate": 25.0}
WIRES = [{}, {"rate": 60.0}, {"wire_descriptor": 0.3}, THREE, THREE | {"wire_descriptor": 0.3, "rate": 90.0}]


@pytest.mark.parametrize("descriptors", [1, 3, 64, 5000])
@pytest.mark.parametrize("nbytes", [1, 100, 7777])
@pytest.mark.parametrize("stages", [{}, {"overlap": True}, {"overlap": True, "pipelined": True}])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("read", [False, True], ids=["write", "read"])
def test_an_isolated_transfer_takes_what_the_closed_form_says(descriptors, nbytes, stages, wire, read):
    more = {"read": 0.6, "read_descriptor": 0.02, "read_rate": 45.0}
    bench = Bench(ramp=(Ramp(first=16, extra=0.7),), call=1 / 3, descriptor=0.01, **stages, **wire, **more)
    bench.post("a", nbytes=nbytes, descriptors=descriptors, inward=read)
    ((seconds, _),) = bench.run()
    assert seconds == pytest.approx(bench.model.isolated_time(descriptors, nbytes, 100.0, read=read), rel=1e-14)


@pytest.mark.parametrize("saving", [0.1, 0.6, 9.0])
@pytest.mark.parametrize("stages", [{}, {"overlap": True}, PIPELINED])
def test_a_small_isolated_transfer_takes_what_the_closed_form_says(saving, stages):
    for nbytes, descriptors in ((77, 1), (100, 4), (100, 5), (101, 4)):
        bench = Bench(call=1 / 3, small=InlineSaving(bytes=100, descriptors=4, saving=saving), **stages)
        bench.post("a", nbytes=nbytes, descriptors=descriptors)
        ((seconds, _),) = bench.run()
        assert seconds == pytest.approx(bench.model.isolated_time(descriptors, nbytes, 100.0), rel=1e-14)


@pytest.mark.parametrize("descriptors", [1, 100_000])
@pytest.mark.parametrize("stages", [{}, {"overlap": True}, PIPELINED])
def test_an_isolated_transfer_is_one_event(descriptors, stages):
    bench = Bench(**stages)
    bench.post("a", descriptors=descriptors)
    bench.run()
    assert bench.clock.scheduled() == 1


SHORT, LONG = {"nbytes": 10, "descriptors": 8}, {"nbytes": 6000}
THREADS = {  # how many, what they share, posts, changes of the engine, ends; 1000 bytes of a link of 1000 bytes/s
    "two that share nothing": (2, 0.0, [post(), post("b")], {}, [(4.5, "a"), (4.5, "b")]),
    "two that share half": (2, 0.5, [post(), post("b")], {}, [(5.5, "a"), (5.5, "b")]),
    "two that share all": (2, 1.0, [post(), post("b")], {}, [(6.5, "a"), (6.5, "b")]),
    # a has 1 s left at 1.0: done at 2.5; b has 3 s, of which 1 is done by then, and goes on alone until 4.5
    "a later one": (2, 0.5, [post(), post("b", at=1.0, **SHORT)], {}, [(4.0, "a"), (5.01, "b")]),
    "one, in order": (1, 1.0, [post(tag, nbytes=0) for tag in "abc"], {}, [(2.5, "a"), (4.5, "b"), (6.5, "c")]),
    "the wire ends with the posting": (2, 0.5, [post(), post("b")], {"overlap": True}, [(3.5, "a"), (3.5, "b")]),
    "the wire starts with it": (2, 0.5, [post(**LONG)], {"overlap": True}, [(6.5, "a")]),
}


@pytest.mark.parametrize(("threads", "serial", "posts", "changes", "ends"), THREADS.values(), ids=THREADS)
def test_threads_post_side_by_side(threads, serial, posts, changes, ends):
    bench = Bench(link=1000.0, threads=threads, serial=serial, **changes)
    for tag, how in posts:
        bench.post(tag, **({"nbytes": 1000} | how))
    assert bench.run() == [(pytest.approx(at, abs=1e-12), tag) for at, tag in ends]


def test_what_is_aborted_before_its_thread_never_moves():
    bench = Bench(link=1000.0, threads=1, serial=1.0)
    bench.post("a", nbytes=1000)
    bench.lane.abort(bench.post("b", nbytes=1000))
    bench.post("c", nbytes=1000)
    assert bench.run() == [(3.5, "a"), (5.5, "c")]


def test_threads_and_processes_slow_each_other_by_shares():
    clock, log = Clock(), []
    share = PostingShare(clock, 0.5, 0.25)
    pair, single = PostingThread(share, 2), PostingThread(share)
    for thread, tag in ((pair, "a"), (pair, "b"), (single, "c")):
        thread.post(2.0, lambda _: None, lambda tag: log.append((clock.now, tag)), tag)
    clock.run()  # a and b go on 1.75 times as slowly, c 1.5: c is done at 3, and from there on a and b have 1.5
    assert log == [(3.0, "c"), (pytest.approx(3.0 + (2.0 - 3.0 / 1.75) * 1.5), "a"), (log[1][0], "b")]


def sends(rank, index):
    region = rank.endpoint.register(rank.device.allocate(100), "kv")
    message = yield rank.channel.receive()
    peer = rank.endpoint.connect(message.payload)
    yield rank.clock.timeout(10.0 - rank.clock.now)
    zero = [0, 25, 50, 75]
    record = yield rank.endpoint.write(peer, Batch(region, peer.regions["kv"], zero, zero, [25] * 4))
    rank.channel.send(message.sender, b"")
    return record.completed - record.submitted


def receives(rank, index):
    rank.endpoint.register(rank.device.allocate(100), "kv")
    rank.channel.send(f"sends{index}", rank.endpoint.address())
    yield rank.channel.receive()


@pytest.mark.parametrize(("places", "seconds"), [((0, 0), 3.0 + 2.0), ((0, 1), 2.0 + 1.0)])
def test_ranks_of_one_gpu_share_what_the_engine_says(places, seconds):  # posting 2 s of work, then 1 s of a port
    specs = [
        RankSpec(f"{name}{index}", f"{__name__}:{name}", Place(0, gpu), {"index": index})
        for name, gpus in (("sends", places), ("receives", (2, 3)))
        for index, gpu in enumerate(gpus)
    ]
    ranks = Model(machine(), replace(engine(cost(latency=0.0)), between=0.5)).run(specs).ranks
    assert [ranks[name].value for name in ("sends0", "sends1")] == [seconds, seconds]


class Crossing:
    """GPUs a, b and e send to c and d, ports of 100 bytes/s; `log` has (time, tag) of all completions.

    With *apart*, each lane ("ac", "ad") is of a process of its own.
    """

    def __init__(self, apart=False, streams=False, within=False, draws=None, gpu=None, share=False, **changes):
        self.clock = Clock()
        self.network = Network(self.clock)
        self.log, self.lanes = [], {}
        changes = {"call": 0.0, "descriptor": 0.0, "latency": 0.0, "in_order": True, "streams": streams} | changes
        model = cost(**changes)
        ports = {name: self.network.link(name, 100.0) for name in "abcde"}
        for source in "abe":
            poster = PostingThread(PostingShare(self.clock, 1.0, 0.5) if share else None)
            device = replace(machine().gpu, **(gpu or {}))
            copier = CopyEngine(self.clock, device, draws, streams=streams, within=within)
            for sink in "cd":
                way, back = Route((ports[source], ports[sink]), 0.0), Route((ports[sink], ports[source]), 0.0)
                name, poster = source + sink, PostingThread() if apart else poster
                copier.posters.add(poster)
                self.lanes[name] = SendQueue(self.network, poster, model, way, back, name, copier, draws, sink)

    def post(self, names, nbytes=100):
        return [self.lanes[name].post(nbytes, 1, False, self.done, name) for name in names.split()]

    def done(self, posting):
        self.log.append((self.clock.now, posting.tag))

    def play(self, posts, aborts=()):
        """Post *posts* (time, names, bytes), stop the first ones of *aborts* (time, name), and return the log."""
        posted = {}
        for at, names, *nbytes in posts:
            self.clock.call_at(at, lambda w: [posted.setdefault(p.tag, p) for p in self.post(*w)], (names, *nbytes))
        for at, name in aborts:
            self.clock.call_at(at, lambda name: self.lanes[name].abort(posted[name]), name)
        self.clock.run()
        return self.log


def turns(seconds=100.0, **gpu):
    return {"apart": True, "gpu": {"slice": seconds, **gpu}}


SLEEPY = {"gpu": {"idle_after": 2.0, "idle_wake": 0.5}}
SWITCH = {**turns(process_switch=0.25), "within": True}
HOST = {"descriptor": 1.0, "latency": 0.5}
RESTS = {"streams": True, "rate": 50.0, "copy_rate": 100.0, "overlap": True}
COPIES = {
    "one at a time": ({}, [(0, "ac ad")], "1.0 ac 2.0 ad"),
    "one port of two": ({}, [(0, "ac ad bc bd")], "2.0 ac 2.0 bc 4.0 ad 4.0 bd"),
    "two ports": ({}, [(0, "ac ad bd bc")], "1.0 ac 1.0 bd 2.0 ad 2.0 bc"),
    "processes side by side": ({"apart": True}, [(0, "ac ad ac ad")], "2.0 ac 2.0 ad 4.0 ac 4.0 ad"),
    "a stream until it is empty": (
        {"streams": True},
        [(0, "ac ad ac ad"), (1.5, "ac"), (3.5, "ac")],
        "1.0 ac 2.0 ac 3.0 ac 4.0 ad 5.0 ad 6.0 ac",
    ),
    "a process as long as it has something queued": (turns(), [(0, "ac ad ac ad")], "1.0 ac 2.0 ac 3.0 ad 4.0 ad"),
    # c until 1.5, d until 3.0, c until 3.5, d until 4
    "a slice ends within a copy": (turns(1.5), [(0, "ac ad ac ad")], "1.0 ac 2.5 ad 3.5 ac 4.0 ad"),
    "slices while nobody waits": (turns(1.5), [(0, "ac", 400), (2.0, "ad")], "4.0 ad 5.0 ac"),
    # as metadata behind the KV of another process
    "a small copy after it": (turns(), [(0, "ac"), (0.5, "ad", 200), (1.5, "ac", 50)], "1.0 ac 3.0 ad 3.5 ac"),
    "a copy ends with its slice": (turns(1.0), [(0, "ac ad ac ad")], "1.0 ac 2.0 ad 3.0 ac 4.0 ad"),
    "a switch": (SWITCH, [(0, "ac ad ad"), (5.0, "ad"), (7.0, "ac")], "1.0 ac 2.25 ad 3.25 ad 6.0 ad 8.25 ac"),
    "waking after a rest": (SLEEPY, [(2.0, "ac"), (5.0, "ac"), (8.5, "ac")], "3.0 ac 6.0 ac 10.0 ac"),
    "waking for two": (SLEEPY, [(4.0, "ac"), (4.25, "ac")], "5.5 ac 6.5 ac"),
    # posted at 6, where the wire was done at 5.5
    # ac complete at 2.5, while its thread posts ad from 1.5 to 2.5 and asks for that until 3
    "an end is found after the post that follows": (HOST, [(0, "ac ad")], "3.0 ac 4.0 ad"),
    "with overlap within the call": ({**HOST, "overlap": True}, [(0, "ac ad")], "1.5 ac 3.0 ad"),
    "descriptors hold up the GPU that posts": ({"wire_descriptor": 0.5}, [(0, "ac ad")], "1.5 ac 3.0 ad"),
    "and other processes there": (turns() | {"wire_descriptor": 0.5}, [(0, "ac ad")], "1.5 ac 3.0 ad"),
    "a stream that rests after each copy": (RESTS, [(0, "ac ac")], "2.0 ac 4.0 ac"),
    "until its host has seen the end": ({**RESTS, "latency": 0.5}, [(0, "ac"), (1.5, "ac")], "2.5 ac 5.0 ac"),
    "and then posts the next": ({**RESTS, **PIPELINED, "descriptor": 0.25}, [(0, "ac ac")], "2.25 ac 4.5 ac"),
    "another stream while one rests": (RESTS, [(0, "ac ad ac ad")], "2.0 ac 3.0 ad 4.0 ac 5.0 ad"),
    "another process while one rests": (turns() | RESTS, [(0, "ac ad ac ad")], "2.0 ac 3.0 ad 4.0 ac 5.0 ad"),
    "not the port of their sink": ({"wire_descriptor": 0.5}, [(0, "ac bc")], "2.0 ac 2.0 bc"),
    "waking beside the posting": ({**SLEEPY, "overlap": True, "descriptor": 2.0}, [(4.0, "ac")], "6.0 ac"),
}


@pytest.mark.parametrize(("how", "posts", "expected"), COPIES.values(), ids=COPIES)
def test_a_copy_engine_carries(how, posts, expected):
    words = expected.split()
    assert Crossing(**how).play(posts) == list(zip(map(float, words[::2]), words[1::2], strict=True))


@pytest.mark.parametrize("how", [HOST, {**HOST, "overlap": True}, {**HOST, "one_stream": True}])
def test_a_thread_alone_on_its_gpu_posts_as_without_a_share(how):
    posts = [(0, "ac ad ac"), (2.25, "ad"), (9.0, "ac")]
    assert sorted(Crossing(share=True, **how).play(posts)) == sorted(Crossing(**how).play(posts))


ABORTS = {
    "a stream that rests": (RESTS, [(0, "ac ad ac")], [(1.5, "ac"), (1.75, "ad")], [(3.75, "ac")]),
    "what it carries and what waits": ({}, [(0, "ac ad"), (0.25, "ac")], [(0.5, "ad"), (0.5, "ac")], [(1.5, "ac")]),
    "what it wakes up for": (SLEEPY, [(4.0, "ac ad")], [(4.25, "ac")], [(5.5, "ad")]),
    "before the switch is over": (SWITCH, [(0, "ac ad"), (2.0, "ac")], [(1.125, "ad")], [(1.0, "ac"), (3.25, "ac")]),
    "what is served": (turns(), [(0, "ac ad")], [(0.5, "ac")], [(1.5, "ad")]),
    "what waits for its turn": (turns(), [(0, "ac ad")], [(0.5, "ad")], [(1.0, "ac")]),
}


@pytest.mark.parametrize(("how", "posts", "aborts", "expected"), ABORTS.values(), ids=ABORTS)
def test_a_copy_engine_goes_on_after_an_abort_of(how, posts, aborts, expected):
    assert Crossing(**how).play(posts, aborts) == expected


def test_a_slow_poster_leaves_the_port_to_another():
    crossing = Crossing(apart=True, overlap=True)
    slow = crossing.lanes["ac"]
    slow.model = replace(slow.model, call=3.0)
    assert crossing.play([(0, "ac ad")]) == [(2.0, "ad"), (3.0, "ac")]


def test_no_byte_is_lost_or_moved_twice_in_slices():
    crossing = Crossing(**turns(0.375))
    assert crossing.play([(0, "ac ad " * 8)])[-1][0] == pytest.approx(16.0)
    carried = {link.name: link.carried for link in crossing.network.links}
    assert (carried["a"], carried["c"], carried["d"]) == pytest.approx((1600.0, 800.0, 800.0))


def convoy(draws=None):
    """Return the completions of two sources that post to the same two sinks in the same order."""
    return Crossing(draws=draws).play([(0, "ac ad bc bd " * 20)])


def test_jitter_of_the_seed_breaks_a_convoy():
    assert convoy()[-1][0] == 80.0  # 40 transfers of a second from each source, at half the rate
    assert convoy(Draws(Jitter(copies=0.3), 3))[-1][0] < 70.0
    jitter = Jitter(starts=0.01, copies=0.01)
    assert convoy(Draws(jitter, 3)) == convoy(Draws(jitter, 3))
    assert convoy(Draws(jitter, 3)) != convoy(Draws(jitter, 4))


def test_delays_lie_between_nothing_and_what_is_set():
    draws = Draws(Jitter(starts=2.0), 0)
    delays = [draws.start() for _ in range(1000)]
    assert 0.0 <= min(delays) < 0.1
    assert 1.9 < max(delays) < 2.0
    assert draws.copy() == 0.0


OTHERS = [{"wire_descriptor": 0.5}, {**HOST, "overlap": True}, {**HOST, "one_stream": True}]
SHARED = [{}, SLEEPY, turns(), HOST, *OTHERS]


@pytest.mark.parametrize("how", SHARED)
@pytest.mark.parametrize("seed", range(20))
def test_isolated_transfers_end_as_others_do(how, seed, monkeypatch):
    random = Random(seed)
    moments = sorted(random.choice((random.uniform(0, 12), random.randrange(12) / 2)) for _ in range(8))
    posts = [(at, random.choice(("ac", "ad", "bc", "bd", "ec")), random.choice((50, 100, 200))) for at in moments]
    posts += [(20.0, name) for name in ("ac", "bc", "ec")]
    aborts = [(moments[3] + random.uniform(0, 2), posts[3][1])] if seed % 2 else []
    isolated = Crossing(**how).play(posts, aborts)
    monkeypatch.setattr(IsolatedTransfers, "begin", lambda *_: False)
    written = Crossing(**how).play(posts, aborts)
    assert sorted(name for _, name in isolated) == sorted(name for _, name in written)
    assert [at for at, _ in isolated] == pytest.approx([at for at, _ in written], rel=1e-12)
