"""Simulated memory: addresses, capacity, contents, quarantine, and the time that work on it takes."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdsim.core.errors import InvalidBatch, OutOfMemory
from pdsim.hardware.machine import Copies
from pdsim.sim.hosts import HostLatency, JobClock, RankClock
from pdsim.sim.memory import LAUNCH, DeviceMemory, SimDevice
from pdsim.sim.network import Network
from pdsim.transfer import Batch, Region
from tests.support.machines import machine


class Bench:
    """A device of 1000 bytes whose memory moves 100 bytes/s; `ends` has when what was asked for is over."""

    def __init__(self, tracked=True, **costs):
        self.clock = JobClock()
        self.network = Network(self.clock)
        self.memory = DeviceMemory("gpu", 1000, tracked)
        self.link = self.network.link("memory", 100.0)
        self.device = self.new_device(**costs)
        self.ends = []

    def new_device(self, clock=None, **costs):
        return SimDevice(self.memory, clock or self.clock, self.network, self.link, **costs)

    def copy(self, *devices, pieces=1):
        offsets = [index * 100 // pieces for index in range(pieces)]
        for device in devices or (self.device,):
            source, target = (region(device.allocate(100)) for _ in "ab")
            self.watch(device.copy(Batch(source, target, offsets, offsets, [100 // pieces] * pieces)))

    def watch(self, event):
        event.callbacks.append(lambda _: self.ends.append(self.clock.now))

    def run(self):
        self.clock.run()
        return self.ends


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def device(bench):
    return bench.device


def region(buffer, name="r", device="gpu"):
    return Region("rank", name, buffer.size, buffer.address, device)


def test_memory_that_is_free_in_pieces_does_not_do(device):
    buffers = [device.allocate(250) for _ in range(4)]
    for buffer in buffers[::2]:
        device.free(buffer)
    words = "300 B do not fit on gpu: 500 B of 1000 B are in use and the largest gap has 250 B"
    with pytest.raises(OutOfMemory, match=words):
        device.allocate(300)


@settings(max_examples=50)
@given(st.lists(st.one_of(st.integers(1, 400), st.integers(-10, -1)), max_size=60))
def test_buffers_never_overlap_and_nothing_is_lost(steps):
    device, live = Bench(tracked=False).device, []
    for step in steps:
        if step > 0:
            try:
                live.append(device.allocate(step))
            except OutOfMemory:
                continue
        elif live:
            device.free(live.pop(step % len(live)))
        spans = sorted((buffer.address, buffer.address + buffer.size) for buffer in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert device.used == sum(buffer.size for buffer in live)
    device.close()
    assert device.allocate(1000).size == 1000


def test_the_peak_of_a_pool_is_a_share(bench):
    bench.device.free(bench.device.allocate(500))
    bench.device.allocate(150, "nvlink")
    assert bench.device.allocate(100).pool == "default"
    assert bench.memory.peaks() == {"default": 0.5, "nvlink": 0.15}


@pytest.mark.parametrize(("size", "pool"), [(0, "default"), (-1, "default"), (0, "symmetric"), (1, "fast")])
def test_nonsense_is_refused(device, size, pool):
    words = f"size={size} must be > 0" if size < 1 else "pool='fast' must be one of default, symmetric, nvlink"
    with pytest.raises(ValueError, match=words):
        device.allocate(size, pool)


def test_ranks_of_one_place_share_its_memory(bench, device):
    buffer = bench.new_device().allocate(700)
    assert device.used == 700
    with pytest.raises(OutOfMemory):
        device.allocate(400)
    with pytest.raises(ValueError, match="not allocated by this rank"):
        device.free(buffer)


def test_memory_that_is_held_waits_until_it_is_released(device):
    buffer = device.allocate(600)
    buffer.hold()
    buffer.hold()
    device.free(buffer)
    with pytest.raises(ValueError, match="freed already"):
        device.free(buffer)
    buffer.release()
    assert device.used == 600
    buffer.release()
    assert device.used == 0
    assert device.allocate(600).address == buffer.address


def test_contents_are_zero_again_after_reuse(device):
    buffer = device.allocate(4)
    buffer.write(0, b"abcd")
    device.free(buffer)
    with pytest.raises(ValueError, match="has been freed"):
        buffer.read(0, 1)
    assert device.allocate(4).read(0, 4) == bytes(4)


def test_contents_are_neither_kept_with_timing_nor_committed_early():
    buffer = Bench(tracked=False).device.allocate(8)
    for call in (lambda: buffer.read(0, 1), lambda: buffer.write(0, b"x")):
        with pytest.raises(TypeError, match="have no contents with memory=timing; run memory=tracked"):
            call()
    assert DeviceMemory("gpu", 1 << 36, tracked=True).allocate(1 << 36, "default").size == 1 << 36  # 64 GiB


@pytest.mark.parametrize(("copies", "ends"), [(1, [2.0 + LAUNCH]), (2, [4.0 + LAUNCH] * 2)])
def test_copies_read_and_write_the_memory_and_contend(bench, copies, ends):
    bench.copy(*[bench.device] * copies)
    assert bench.run() == ends
    assert bench.link.carried == 200.0 * copies


def test_a_copy_within_a_buffer_reads_before_it_writes(bench, device):
    buffer = device.allocate(4)
    buffer.write(0, b"abcd")
    bench.clock.run(until=device.copy(Batch(region(buffer), region(buffer), [0, 1], [1, 2], [1, 2])))
    assert buffer.read(0, 4) == b"aabc"


def test_a_copy_of_zeros_touches_nothing_or_clears(bench, device):
    zeros, others, used = (device.allocate(8) for _ in range(3))
    used.write(0, b"abcdefgh")
    for target in others, used:
        bench.clock.run(until=device.copy(Batch(region(zeros), region(target), [0, 2], [4, 6], [2, 2])))
    assert not others.touched
    assert used.read(0, 8) == b"abcd\0\0\0\0"


def test_a_copy_to_another_device_is_refused(device):
    source, target = device.allocate(8), device.allocate(8)
    with pytest.raises(InvalidBatch, match="lies on other, not on gpu"):
        device.copy(Batch(region(source), region(target, device="other"), [0], [0], [8]))


PIECES = Copies(call=1.0, descriptor=0.25)  # 100 bytes in four pieces are planned at 2 s and there at 4


@pytest.mark.parametrize(("other", "ends"), [(None, [4.0 + LAUNCH, 6.0 + LAUNCH]), (2.0, [6.0 + LAUNCH] * 2)])
def test_copies_are_planned_in_turn_for_each_rank(other, ends):
    bench = Bench(copies=PIECES)
    second = bench.device if other is None else bench.new_device(copies=Copies(call=other))
    bench.copy(bench.device, second, pieces=4)
    assert bench.run() == ends


def test_a_copy_after_another_rank_s_takes_a_turn_more(bench):
    one, other = (bench.new_device(copies=replace(PIECES, context_switch=10.0)) for _ in range(2))
    for device in (one, one, other, one):
        bench.copy(device, pieces=4)
        bench.run()
    assert [round(b - a, 3) for a, b in pairwise([0.0, *bench.ends])] == [4.0, 4.0, 14.0, 14.0]


def test_a_rank_that_ends_while_it_plans_copies_nothing(bench):
    clock = RankClock(bench.clock, "rank")
    device = bench.new_device(clock, copies=Copies(call=1.0))
    bench.copy(device)
    clock.stop()
    device.close()
    assert bench.memory.used == 200
    bench.run()
    assert (bench.link.carried, bench.memory.used) == (0.0, 0)


@pytest.mark.parametrize(("wake", "expected"), [(0.0, [2.0, 3.0]), (0.5, [2.5, 3.5])])
def test_computation_is_served_in_order_and_noticed_later(wake, expected):
    bench = Bench()
    bench.device = bench.new_device(host_latency=HostLatency(bench.clock, replace(machine().host, wake=wake)))
    for seconds in (2.0, 1.0):
        bench.watch(bench.device.compute(seconds))
    assert bench.run() == expected
    with pytest.raises(ValueError, match=r"seconds=-1(\.0)? must be >= 0"):
        bench.device.compute(-1)
