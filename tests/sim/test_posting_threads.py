"""Several threads of a rank that post: what they share slows them down, exactly as the form says."""

from dataclasses import replace

import numpy as np
import pytest

from pdsim.core.clock import Clock
from pdsim.sim.model import Model
from pdsim.sim.network import Network
from pdsim.sim.posting import PostingShare, PostingThread, PostingThreads, SendQueue
from pdsim.sim.topology import Route
from pdsim.transfer import Batch
from pdsim.transfer.job import Place, RankSpec
from tests.support.machines import cost, engine, machine


class Bench:
    """A link of 1000 bytes/s, and threads that post in 1 s a call and 0.25 s a descriptor; `log` has completions."""

    def __init__(self, threads, serial, **changes):
        self.clock = Clock()
        network = Network(self.clock)
        link = Route((network.link("out", 1000.0),), 0.0)
        self.poster = PostingThread(PostingThreads(PostingShare(self.clock, serial, 0.0), threads))
        self.queue = SendQueue(network, self.poster, cost(**changes), link, link, "a>b")
        self.log = []

    def post(self, tag, descriptors=4, nbytes=1000):
        return self.queue.post(
            nbytes, descriptors, False, lambda posting: self.log.append((self.clock.now, tag)), tag
        )

    def run(self):
        self.clock.run()
        return self.log


@pytest.mark.parametrize(("serial", "slower"), [(0.0, 1.0), (0.5, 1.5), (1.0, 2.0)])
def test_two_threads_slow_each_other_by_what_they_share(serial, slower):
    bench = Bench(threads=2, serial=serial)
    bench.post("a")
    bench.post("b")  # both posted at 2 * slower, and share the link from there
    assert bench.run() == [(2.0 * slower + 2.5, "a"), (2.0 * slower + 2.5, "b")]


def test_who_comes_later_slows_the_rest_and_who_ends_frees_it():
    bench = Bench(threads=2, serial=0.5)
    bench.post("a")  # 2 s of work: 1 alone, then at 1/1.5
    bench.clock.call_at(1.0, lambda _: bench.post("b", descriptors=0 + 8, nbytes=10), None)
    # a has 1 s left at 1.0: done at 2.5; b has 3 s, of which 1 is done by then, and goes on alone until 4.5
    assert bench.run() == [(4.0, "a"), (pytest.approx(5.01, abs=1e-12), "b")]


def test_transfers_wait_for_a_thread_in_their_order():
    bench = Bench(threads=1, serial=1.0)
    bench.post("a", nbytes=0)
    bench.post("b", nbytes=0)
    bench.post("c", nbytes=0)
    assert bench.run() == [(2.5, "a"), (4.5, "b"), (6.5, "c")]


def test_the_wire_starts_with_the_posting_where_they_overlap_and_ends_no_earlier():
    bench = Bench(threads=2, serial=0.5, overlap=True)
    bench.post("a")  # posting ends at 3, the wire long before
    bench.post("b")
    assert bench.run() == [(3.5, "a"), (3.5, "b")]
    bench = Bench(threads=2, serial=0.5, overlap=True)
    bench.post("a", nbytes=6000)
    assert bench.run() == [(6.5, "a")]


def test_what_is_aborted_while_it_waits_for_a_thread_never_moves():
    bench = Bench(threads=1, serial=1.0)
    bench.post("a")
    gone = bench.post("b")
    bench.queue.abort(gone)
    bench.post("c")
    assert bench.run() == [(3.5, "a"), (5.5, "c")]


def test_threads_of_a_process_and_processes_of_a_gpu_slow_each_other_by_shares_of_their_own():
    clock, log = Clock(), []
    share = PostingShare(clock, 0.5, 0.25)
    pair, single = PostingThreads(share, 2), PostingThreads(share, 1)
    for threads, tag in ((pair, "a"), (pair, "b"), (single, "c")):
        threads.post(2.0, lambda _: None, lambda tag: log.append((clock.now, tag)), tag)
    clock.run()  # a and b go on 1.75 times as slowly, c 1.5: c is done at 3, and from there on a and b have 1.5
    assert log == [(3.0, "c"), (pytest.approx(3.0 + (2.0 - 3.0 / 1.75) * 1.5), "a"), (log[1][0], "b")]


def test_ranks_of_one_gpu_share_where_the_engine_does_so_and_ranks_of_two_do_not():
    near = Model(machine(), replace(engine(cost(latency=0.0)), between=0.5))
    for places, seconds in (((0, 0), 3.0 + 2.0), ((0, 1), 2.0 + 1.0)):  # posting 2 s of work, then 1 s of a port
        specs = [
            RankSpec(f"{name}{index}", f"{__name__}:{name}", Place(0, gpu), {"index": index})
            for name, gpus in (("sends", places), ("receives", (2, 3)))
            for index, gpu in enumerate(gpus)
        ]
        outcome = near.run(specs)
        assert not [rank.error for rank in outcome.ranks.values() if rank.error]
        assert [outcome.ranks[f"sends{index}"].value for index in (0, 1)] == [seconds, seconds]


def sends(rank, index):
    """Write once, and return how long it took."""
    region = rank.endpoint.register(rank.device.allocate(100), "kv")
    message = yield rank.channel.receive()
    peer = rank.endpoint.connect(message.payload)
    zero = np.arange(4, dtype=np.int64) * 25
    yield rank.clock.timeout(10.0 - rank.clock.now)
    batch = Batch(region, peer.regions["kv"], zero, zero, np.full(4, 25, np.int64))
    record = yield rank.endpoint.write(peer, batch)
    rank.channel.send(message.sender, b"")
    return record.completed - record.submitted


def receives(rank, index):
    """Be written to."""
    rank.endpoint.register(rank.device.allocate(100), "kv")
    rank.channel.send(f"sends{index}", rank.endpoint.address())
    yield rank.channel.receive()
