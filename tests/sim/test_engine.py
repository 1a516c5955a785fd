"""What posting, the wire, completion and the send queue cost.  All times are exact."""

from dataclasses import replace

import pytest

from pdsim.core.clock import Clock
from pdsim.core.errors import SendQueueFull
from pdsim.hardware.costs import Ramp
from pdsim.sim.network import Network
from pdsim.sim.posting import PostingThread, SendQueue
from pdsim.sim.topology import Route
from pdsim.sim.wire import CopyEngine
from tests.support.machines import cost, machine


class Bench:
    """One link of 100 bytes/s out and one in; `log` has (time, tag) of all completions."""

    def __init__(self, way=0.0, **changes):
        self.clock = Clock()
        self.network = Network(self.clock)
        self.out = Route((self.network.link("out", 100.0),), way)
        self.into = Route((self.network.link("in", 100.0),), way)
        self.model = cost(**changes)
        self.poster = PostingThread()
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


def test_without_overlap_the_times_add_up():
    bench = Bench()
    bench.post("a")  # call 1, 4 descriptors of 0.25, 100 bytes at 100 bytes/s, latency 0.5
    assert bench.run() == [(3.5, "a")]


def test_with_overlap_the_longer_stage_counts():
    bench = Bench(overlap=True)
    bench.post("wire", nbytes=300)
    assert bench.run() == [(3.5, "wire")]
    bench = Bench(overlap=True)
    bench.post("posting", nbytes=100)
    assert bench.run() == [(2.5, "posting")]


def test_pipelined_the_wire_starts_with_the_first_descriptor():
    bench = Bench(overlap=True, pipelined=True)
    bench.post("wire", nbytes=400)  # 1.25 until the first is posted, 4 on the wire
    assert bench.run() == [(5.75, "wire")]


def test_pipelined_the_last_descriptor_is_carried_after_its_posting():
    bench = Bench(overlap=True, pipelined=True)
    bench.post("posting", nbytes=50)  # 2 until all are posted, an eighth for the last
    assert bench.run() == [(2.625, "posting")]


def test_the_first_descriptors_of_a_batch_may_cost_more():
    bench = Bench(ramp=(Ramp(first=2, extra=0.5), Ramp(first=8, extra=0.125)))
    assert bench.post("a").posted == 1 + 4 * 0.25 + 2 * 0.5 + 4 * 0.125


def test_descriptors_beyond_those_of_the_largest_batch_before_cost_more():
    bench = Bench(fresh_descriptor=0.5)
    first = bench.post("a", descriptors=4).posted
    assert first == 1 + 4 * (0.25 + 0.5)
    second = bench.post("b", descriptors=2).posted
    assert second - first == 1 + 2 * 0.25
    assert bench.post("c", descriptors=7).posted - second == 1 + 7 * 0.25 + 3 * 0.5


@pytest.mark.parametrize("descriptors", [1, 3, 64, 5000])
@pytest.mark.parametrize("nbytes", [1, 100, 7777])
@pytest.mark.parametrize("stages", [{}, {"overlap": True}, {"overlap": True, "pipelined": True}])
@pytest.mark.parametrize("wire", [{}, {"rate": 60.0}, {"wire_descriptor": 0.3}, {"queues": 3, "queue_rate": 25.0}])
@pytest.mark.parametrize("read", [False, True], ids=["write", "read"])
def test_a_transfer_that_is_alone_takes_what_the_closed_form_says(descriptors, nbytes, stages, wire, read):
    more = {"read": 0.6, "read_descriptor": 0.02, "read_rate": 45.0}
    bench = Bench(ramp=(Ramp(first=16, extra=0.7),), call=1 / 3, descriptor=0.01, **stages, **wire, **more)
    bench.post("a", nbytes=nbytes, descriptors=descriptors, inward=read)
    ((seconds, _),) = bench.run()
    assert seconds == pytest.approx(bench.model.isolated_time(descriptors, nbytes, 100.0, read=read), rel=1e-14)


def test_a_read_takes_longer_than_a_write_once_and_for_each_descriptor():
    bench = Bench(read=0.25, read_descriptor=0.125)
    bench.post("write")
    assert bench.run() == [(3.5, "write")]
    bench = Bench(read=0.25, read_descriptor=0.125)
    bench.post("read", inward=True)  # 4 * 0.125 * 100 = 50 bytes more on the wire
    assert bench.run() == [(4.25, "read")]


def test_a_read_may_have_a_lower_rate_than_a_write():
    bench = Bench(read_rate=50.0)
    bench.post("write")
    assert bench.run() == [(3.5, "write")]
    bench = Bench(read_rate=50.0)
    bench.post("read", inward=True)
    assert bench.run() == [(4.5, "read")]


def test_posting_ends_when_the_descriptors_are_taken():
    bench = Bench()
    assert bench.post("a").posted == 2.0


def test_transfers_take_turns_at_the_poster():
    bench = Bench()
    assert [bench.post("a").posted, bench.post("b").posted] == [2.0, 4.0]
    assert bench.run() == [(3.5, "a"), (5.5, "b")]


def test_lanes_of_one_endpoint_share_its_poster():
    bench = Bench()
    assert [bench.post("a").posted, bench.post("b", lane=bench.new_lane("a>c")).posted] == [2.0, 4.0]


def test_a_poster_that_was_idle_starts_when_it_is_asked():
    bench = Bench()
    bench.post("a")
    bench.post("b", at=8.0)
    assert bench.run() == [(3.5, "a"), (11.5, "b")]


def test_with_overlap_the_wire_waits_for_the_turn_too():
    bench = Bench(overlap=True)
    bench.post("a", nbytes=400)  # wire 0 to 4, alone until 2
    bench.post("b", nbytes=100)  # posting 2 to 4, and half of the wire from 2
    assert bench.run() == [(4.5, "b"), (5.5, "a")]


def test_flows_share_a_link():
    bench = Bench(call=0.0, descriptor=0.0, latency=0.0)
    bench.post("a", nbytes=100)
    bench.post("b", nbytes=200)
    assert bench.run() == [(2.0, "a"), (3.0, "b")]


def test_the_rate_caps_a_transfer():
    bench = Bench(rate=50.0)
    bench.post("a")
    assert bench.run() == [(4.5, "a")]


def test_a_descriptor_occupies_the_wire():
    bench = Bench(rate=50.0, wire_descriptor=0.5)  # 4 * 0.5 * 50 = 100 bytes more
    bench.post("a")
    assert bench.run() == [(6.5, "a")]


def test_without_a_rate_a_descriptor_holds_up_the_narrowest_link():
    bench = Bench(wire_descriptor=0.5)  # 4 * 0.5 * 100 = 200 bytes more
    bench.post("a")
    assert bench.run() == [(5.5, "a")]


def test_queues_cap_all_transfers_to_a_peer_together():
    bench = Bench(call=0.0, descriptor=0.0, latency=0.0, queues=2, queue_rate=25.0)
    bench.post("a")
    bench.post("b", inward=True)  # the other direction, but the same queues
    assert bench.run() == [(4.0, "a"), (4.0, "b")]


def test_queues_of_different_peers_are_not_shared():
    bench = Bench(call=0.0, descriptor=0.0, latency=0.0, queues=2, queue_rate=25.0)
    bench.post("a")
    bench.post("b", lane=bench.new_lane("a>c"))
    assert bench.run() == [(2.0, "a"), (2.0, "b")]


def test_the_way_adds_its_latency_to_the_engine_s():
    bench = Bench(way=2.0)
    bench.post("a")
    assert bench.run() == [(5.5, "a")]


def test_inward_transfers_use_the_other_direction():
    bench = Bench()
    bench.post("a", inward=True)
    bench.run()
    assert (bench.out.links[0].carried, bench.into.links[0].carried) == (0.0, 100.0)


class TestDepth:
    """A send queue of bounded depth."""

    def test_a_queue_that_refuses_takes_no_more_than_its_depth(self):
        bench = Bench(depth=8, full="refuse")
        bench.post("a", descriptors=4)
        bench.post("b", descriptors=4)
        with pytest.raises(SendQueueFull, match="1 descriptors on top of 8 outstanding on a>b: the engine takes 8"):
            bench.post("c", descriptors=1)
        assert bench.run() == [(3.5, "a"), (5.5, "b")]

    def test_a_queue_that_refuses_has_room_again_after_completion(self):
        bench = Bench(depth=4, full="refuse")
        bench.post("a")
        bench.post("b", at=3.75)
        assert bench.run() == [(3.5, "a"), (7.25, "b")]

    def test_a_batch_beyond_the_depth_is_always_refused(self):
        with pytest.raises(SendQueueFull, match="5 descriptors on top of 0"):
            Bench(depth=4, full="refuse").post("a", descriptors=5)

    def test_a_refused_batch_takes_no_time_of_the_poster(self):
        bench = Bench(depth=4, full="refuse")
        with pytest.raises(SendQueueFull):
            bench.post("a", descriptors=5)
        bench.post("b")
        assert bench.run() == [(3.5, "b")]

    def test_a_queue_that_waits_lets_in_what_fits_after_completion(self):
        bench = Bench(depth=4, full="wait")
        bench.post("a")
        assert bench.post("b").posted is None
        assert bench.run() == [(3.5, "a"), (7.0, "b")]

    def test_waiting_is_first_come_first_served(self):
        bench = Bench(depth=4, full="wait")
        bench.post("a", descriptors=2)  # posted at 1.5, complete at 3
        bench.post("b", descriptors=4)
        bench.post("c", descriptors=2)  # would fit at once, but b was here before
        assert bench.run() == [(3.0, "a"), (6.5, "b"), (9.5, "c")]

    def test_a_batch_beyond_the_depth_goes_alone(self):
        bench = Bench(depth=4, full="wait")
        bench.post("a", descriptors=8)
        bench.post("b", descriptors=4)
        assert bench.run() == [(4.5, "a"), (8.0, "b")]

    def test_waiting_for_one_peer_does_not_keep_the_poster_from_another(self):
        bench = Bench(depth=4, full="wait")
        bench.post("a")
        bench.post("b")
        bench.post("c", lane=bench.new_lane("a>c"))  # posting 2 to 4
        assert bench.run() == [(3.5, "a"), (5.5, "c"), (7.5, "b")]


class TestAbort:
    """What is aborted is never reported, and makes room."""

    def test_in_the_queue(self):
        bench = Bench(depth=4, full="wait")
        bench.post("a")
        bench.lane.abort(bench.post("b"))
        bench.post("c")
        assert bench.run() == [(3.5, "a"), (7.0, "c")]

    def test_while_posting(self):
        bench = Bench()
        posting = bench.post("a")
        bench.clock.call_at(1.0, bench.lane.abort, posting)
        bench.post("b")
        assert bench.run() == [(5.5, "b")]
        assert bench.out.links[0].carried == 100.0

    def test_on_the_wire(self):
        bench = Bench()
        posting = bench.post("a")
        bench.clock.call_at(2.5, bench.lane.abort, posting)
        assert bench.run() == []
        assert bench.out.links[0].carried == 50.0
        assert bench.lane.outstanding == 0

    def test_between_the_wire_and_completion(self):
        bench = Bench()
        posting = bench.post("a")
        bench.clock.call_at(3.25, bench.lane.abort, posting)
        assert bench.run() == []

    def test_makes_room_for_who_waits(self):
        bench = Bench(depth=4, full="wait")
        posting = bench.post("a")
        bench.post("b")
        bench.clock.call_at(2.5, bench.lane.abort, posting)
        assert bench.run() == [(6.0, "b")]

    def test_twice_is_once(self):
        bench = Bench(depth=4, full="wait")
        posting = bench.post("a")
        bench.lane.abort(posting)
        bench.lane.abort(posting)
        assert bench.lane.outstanding == 0


class TestEvents:
    """The cost of a transfer in SimPy events does not depend on its descriptors."""

    @pytest.mark.parametrize("descriptors", [1, 100_000])
    @pytest.mark.parametrize(
        ("overlap", "pipelined", "expected"), [(True, False, 2), (False, False, 3), (True, True, 3)]
    )
    def test_alone(self, descriptors, overlap, pipelined, expected):
        bench = Bench(overlap=overlap, pipelined=pipelined)
        bench.post("a", descriptors=descriptors)
        bench.run()
        assert bench.clock.scheduled() == expected


class Crossing:
    """Two sources and two sinks, ports of 100 bytes/s; `log` has (time, tag) of all completions."""

    def __init__(self, gpu=None, streams=False, within=False, **changes):
        self.clock = Clock()
        self.network = Network(self.clock)
        self.model = cost(call=0.0, descriptor=0.0, latency=0.0, in_order=True, **changes)
        self.log = []
        self.lanes = {}
        ports = {name: self.network.link(name, 100.0) for name in "abcd"}
        for source in "ab":
            poster, copier = PostingThread(), CopyEngine(self.clock, gpu, streams=streams, within=within)
            for sink in "cd":
                way, back = Route((ports[source], ports[sink]), 0.0), Route((ports[sink], ports[source]), 0.0)
                name = source + sink
                self.lanes[name] = SendQueue(self.network, poster, self.model, way, back, name, copier)

    def post(self, *names, nbytes=100):
        return [self.lanes[name].post(nbytes, 1, False, self.done, name) for name in names]

    def done(self, posting):
        self.log.append((self.clock.now, posting.tag))

    def run(self):
        self.clock.run()
        return self.log


def test_a_copy_engine_carries_one_transfer_at_a_time_in_the_order_of_posting():
    crossing = Crossing()
    crossing.post("ac", "ad")
    assert crossing.run() == [(1.0, "ac"), (2.0, "ad")]


def test_sources_that_begin_with_the_same_sink_use_one_port_of_two():
    crossing = Crossing()
    crossing.post("ac", "ad", "bc", "bd")
    assert crossing.run() == [(2.0, "ac"), (2.0, "bc"), (4.0, "ad"), (4.0, "bd")]


def test_sources_that_begin_with_different_sinks_use_both():
    crossing = Crossing()
    crossing.post("ac", "ad", "bd", "bc")
    assert crossing.run() == [(1.0, "ac"), (1.0, "bd"), (2.0, "ad"), (2.0, "bc")]


def test_a_copy_engine_goes_on_when_what_it_carries_or_would_carry_is_aborted():
    crossing = Crossing()
    first, second, _ = crossing.post("ac", "ad", "ac")
    crossing.clock.call_at(
        0.5, lambda _: (crossing.lanes["ad"].abort(second), crossing.lanes["ac"].abort(first)), None
    )
    assert crossing.run() == [(1.5, "ac")]


def test_copies_of_two_processes_on_one_gpu_go_on_side_by_side():
    crossing = Crossing()
    crossing.lanes["ad"]._poster = PostingThread()  # of another rank on the same GPU
    crossing.post("ac", "ad", "ac", "ad")
    assert crossing.run() == [(2.0, "ac"), (2.0, "ad"), (4.0, "ac"), (4.0, "ad")]


def test_a_process_whose_posting_is_slow_leaves_the_port_to_another():
    crossing = Crossing(overlap=True)
    slow = crossing.lanes["ac"]
    slow.model = cost(call=3.0, descriptor=0.0, latency=0.0, in_order=True, overlap=True)
    slow._poster = PostingThread()
    crossing.post("ac", "ad")
    assert crossing.run() == [(2.0, "ad"), (3.0, "ac")]


def test_a_copy_engine_stays_with_a_stream_until_it_is_empty():
    crossing = Crossing(streams=True)
    crossing.post("ac", "ad", "ac", "ad")
    crossing.clock.call_at(1.5, crossing.post, "ac")
    crossing.clock.call_at(3.5, crossing.post, "ac")
    assert crossing.run() == [(1.0, "ac"), (2.0, "ac"), (3.0, "ac"), (4.0, "ad"), (5.0, "ad"), (6.0, "ac")]


class TestSlices:
    """Processes c and d of GPU a have its copy engine in turns of 1.5 s."""

    @staticmethod
    def crossing(seconds=1.5, within=False, **changes):
        crossing = Crossing(replace(machine().gpu, slice=seconds, **changes), within=within)
        for lane in ("ac", "ad"):
            queue = crossing.lanes[lane]
            queue._poster = PostingThread()
            queue._copier.posters.add(queue._poster)
        return crossing

    def test_a_process_has_the_engine_as_long_as_it_has_something_queued(self):
        crossing = self.crossing(100.0)
        crossing.post("ac", "ad", "ac", "ad")
        assert crossing.run() == [(1.0, "ac"), (2.0, "ac"), (3.0, "ad"), (4.0, "ad")]

    def test_a_slice_ends_in_the_middle_of_a_copy(self):
        crossing = self.crossing()
        crossing.post("ac", "ad", "ac", "ad")  # c until 1.5, d until 3.0, c until 3.5, d until 4
        assert crossing.run() == [(1.0, "ac"), (2.5, "ad"), (3.5, "ac"), (4.0, "ad")]

    def test_slices_follow_each_other_while_nobody_waits(self):
        crossing = self.crossing()
        crossing.post("ac", nbytes=400)
        crossing.clock.call_at(2.0, crossing.post, "ad")  # the second slice ends at 3.0
        assert crossing.run() == [(4.0, "ad"), (5.0, "ac")]

    def test_a_copy_that_ends_with_its_slice_is_not_taken_away(self):
        crossing = self.crossing(1.0)
        crossing.post("ac", "ad", "ac", "ad")
        assert crossing.run() == [(1.0, "ac"), (2.0, "ad"), (3.0, "ac"), (4.0, "ad")]

    def test_within_a_gpu_every_other_process_waits_for_the_switch(self):
        crossing = self.crossing(100.0, process_switch=0.25, within=True)
        crossing.post("ac", "ad", "ad")
        crossing.clock.call_at(5.0, crossing.post, "ad")
        crossing.clock.call_at(7.0, crossing.post, "ac")
        assert crossing.run() == [(1.0, "ac"), (2.25, "ad"), (3.25, "ad"), (6.0, "ad"), (8.25, "ac")]

    def test_an_abort_before_the_switch_is_over_lets_nothing_begin_and_the_way_back_is_another(self):
        crossing = self.crossing(100.0, process_switch=0.25, within=True)
        _, second = crossing.post("ac", "ad")
        crossing.clock.call_at(1.125, lambda _: crossing.lanes["ad"].abort(second), None)
        crossing.clock.call_at(2.0, crossing.post, "ac")
        assert crossing.run() == [(1.0, "ac"), (3.25, "ac")]

    @pytest.mark.parametrize("name", ["ac", "ad"])
    def test_an_abort_of_what_is_served_or_waits_leaves_the_engine_to_the_other(self, name):
        crossing = self.crossing(100.0)
        posted = dict(zip(("ac", "ad"), crossing.post("ac", "ad"), strict=True))
        crossing.clock.call_at(0.5, lambda _: crossing.lanes[name].abort(posted[name]), None)
        assert crossing.run() == [(1.5, "ad")] if name == "ac" else [(1.0, "ac")]

    def test_no_byte_is_lost_or_moved_twice(self):
        crossing = self.crossing(0.375)
        crossing.post(*("ac", "ad") * 8)
        assert crossing.run()[-1][0] == pytest.approx(16.0)
        carried = {
            link.name: bytes_
            for link, bytes_ in zip(crossing.network.links, crossing.network.carried(), strict=True)
        }
        assert (carried["a"], carried["c"], carried["d"]) == pytest.approx((1600.0, 800.0, 800.0))


class TestRousing:
    """A copy engine sleeps after 2 s without a transfer, and takes 0.5 s to begin with the next."""

    @staticmethod
    def crossing(**changes):
        return Crossing(replace(machine().gpu, idle_after=2.0, idle_wake=0.5), **changes)

    @staticmethod
    def post(crossing, *ats):
        for at in ats:
            crossing.clock.call_at(at, crossing.post, "ac")

    def test_delays_what_comes_after_a_rest_and_nothing_else(self):
        crossing = self.crossing()
        self.post(crossing, 2.0, 5.0, 8.5)
        assert [at for at, _ in crossing.run()] == [3.0, 6.0, 10.0]

    def test_delays_what_waits_its_turn_with_the_first(self):
        crossing = self.crossing()
        self.post(crossing, 4.0, 4.25)
        assert [at for at, _ in crossing.run()] == [5.5, 6.5]

    def test_goes_on_beside_the_posting_where_the_wire_does(self):
        crossing = self.crossing(overlap=True)
        crossing.model = replace(crossing.model, descriptor=2.0)
        crossing.lanes["ac"].model = crossing.model
        self.post(crossing, 4.0)
        assert [at for at, _ in crossing.run()] == [6.0]  # posted, where the wire was done at 5.5

    def test_is_not_begun_again_for_the_next_when_the_first_is_stopped_meanwhile(self):
        crossing = self.crossing()

        def stop(_):
            (posting,) = crossing.post("ac")
            crossing.post("ad")
            crossing.clock.call_at(4.25, crossing.lanes["ac"].abort, posting)

        crossing.clock.call_at(4.0, stop, None)
        assert crossing.run() == [(5.5, "ad")]
