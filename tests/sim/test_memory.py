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

CAPACITY = 1000


class Bench:
    """A device of 1000 bytes whose memory moves 100 bytes/s."""

    def __init__(self, tracked=True, pools=None):
        self.clock = JobClock()
        self.network = Network(self.clock)
        self.memory = DeviceMemory("gpu", CAPACITY, pools, tracked)
        self.link = self.network.link("memory", 100.0)
        self.device = self.new_device()

    def new_device(self, **costs):
        return SimDevice(self.memory, self.clock, self.network, self.link, **costs)


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def device(bench):
    return bench.device


def region(buffer, name="r", device="gpu"):
    return Region("rank", name, buffer.size, buffer.address, device)


class TestAddresses:
    def test_memory_that_is_free_in_pieces_does_not_do(self, device):
        buffers = [device.allocate(250) for _ in range(4)]
        device.free(buffers[0])
        device.free(buffers[2])
        with pytest.raises(
            OutOfMemory, match="300 B do not fit on gpu: 500 B of 1000 B are in use and the largest gap has 250 B"
        ):
            device.allocate(300)

    @settings(max_examples=50)
    @given(st.lists(st.one_of(st.integers(1, 400), st.integers(-10, -1)), max_size=60))
    def test_buffers_never_overlap_and_nothing_is_lost(self, steps):
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
        for buffer in live:
            device.free(buffer)
        assert device.allocate(CAPACITY).size == CAPACITY


class TestCapacity:
    def test_a_pool_has_a_limit_of_its_own(self):
        device = Bench(pools={"nvlink": 200}).device
        device.allocate(150, "nvlink")
        with pytest.raises(OutOfMemory, match="100 B do not fit in pool 'nvlink' of gpu: 150 B of 200 B are in use"):
            device.allocate(100, "nvlink")
        assert device.allocate(100).pool == "default"

    @pytest.mark.parametrize("size", [0, -1])
    def test_a_size_that_is_not_positive_is_refused(self, device, size):
        with pytest.raises(ValueError, match=f"size={size} must be > 0"):
            device.allocate(size)

    def test_an_unknown_pool_is_refused(self, device):
        with pytest.raises(ValueError, match="pool='fast' must be one of default, symmetric, nvlink"):
            device.allocate(1, "fast")
        with pytest.raises(ValueError, match="pool='fast'"):
            Bench(pools={"fast": 1})

    def test_the_peak_of_each_pool_is_remembered(self, bench, device):
        device.free(device.allocate(500))
        device.allocate(200)
        device.allocate(100, "nvlink")
        assert bench.memory.peaks() == {"default": 0.5, "nvlink": 0.1}

    def test_ranks_of_one_place_share_its_memory(self, bench, device):
        other = bench.new_device()
        buffer = other.allocate(700)
        assert device.used == 700
        with pytest.raises(OutOfMemory):
            device.allocate(400)
        with pytest.raises(ValueError, match="not allocated by this rank"):
            device.free(buffer)


class TestFree:
    def test_twice_is_refused(self, device):
        buffer = device.allocate(10)
        device.free(buffer)
        with pytest.raises(ValueError, match="freed already"):
            device.free(buffer)

    def test_of_what_is_held_waits_until_it_is_released(self, device):
        buffer = device.allocate(600)
        buffer.hold()
        buffer.hold()
        device.free(buffer)
        buffer.release()
        assert device.used == 600
        with pytest.raises(OutOfMemory):
            device.allocate(600)
        buffer.release()
        assert device.used == 0
        assert device.allocate(600).address == buffer.address

    def test_of_everything_comes_with_close(self, device):
        device.allocate(300)
        device.allocate(300)
        device.close()
        assert device.used == 0


class TestContents:
    def test_are_zero_again_after_reuse(self, device):
        buffer = device.allocate(4)
        buffer.write(0, b"abcd")
        device.free(buffer)
        assert device.allocate(4).read(0, 4) == bytes(4)

    @pytest.mark.parametrize(("offset", "size"), [(0, 9), (8, 1), (-1, 2)])
    def test_end_where_the_buffer_ends(self, device, offset, size):
        buffer = device.allocate(8)
        with pytest.raises(IndexError, match="outside a buffer of 8 bytes"):
            buffer.read(offset, size)
        with pytest.raises(IndexError):
            buffer.write(offset, b"x" * size)

    def test_are_not_there_after_free(self, device):
        buffer = device.allocate(8)
        device.free(buffer)
        with pytest.raises(ValueError, match="has been freed"):
            buffer.read(0, 1)

    def test_are_not_kept_with_memory_timing(self):
        device = Bench(tracked=False).device
        assert not device.holds_bytes
        with pytest.raises(TypeError, match="have no contents with memory=timing; run memory=tracked"):
            device.allocate(8).read(0, 1)
        with pytest.raises(TypeError, match="memory=tracked"):
            device.allocate(8).write(0, b"x")

    def test_are_not_committed_before_they_are_written(self):
        memory = DeviceMemory("gpu", 1 << 36, tracked=True)
        assert memory.allocate(1 << 36, "default").size == 1 << 36  # 64 GiB


class TestCopy:
    def test_reads_and_writes_the_memory(self, bench, device):
        source, target = device.allocate(100), device.allocate(100)
        done = device.copy(Batch(region(source), region(target), [0], [0], [100]))
        bench.clock.run(until=done)
        assert bench.clock.now == 2.0 + LAUNCH
        assert bench.link.carried == 200.0

    def test_within_a_buffer_reads_before_it_writes(self, bench, device):
        buffer = device.allocate(4)
        buffer.write(0, b"abcd")
        bench.clock.run(until=device.copy(Batch(region(buffer), region(buffer), [0, 1], [1, 2], [1, 2])))
        assert buffer.read(0, 4) == b"aabc"

    def test_contends_for_the_memory(self, bench, device):
        source, target = device.allocate(100), device.allocate(100)
        batch = Batch(region(source), region(target), [0], [0], [100])
        both = bench.clock.all_of([device.copy(batch), device.copy(batch)])
        bench.clock.run(until=both)
        assert bench.clock.now == 4.0 + LAUNCH

    def test_of_zeros_over_zeros_touches_nothing_and_of_zeros_over_bytes_clears_them(self, bench, device):
        zeros, others, used = (device.allocate(8) for _ in range(3))
        used.write(0, b"abcdefgh")
        for target in others, used:
            bench.clock.run(until=device.copy(Batch(region(zeros), region(target), [0, 2], [4, 6], [2, 2])))
        assert not others.touched
        assert used.read(0, 8) == b"abcd\0\0\0\0"

    def test_to_another_device_is_refused(self, device):
        source, target = device.allocate(8), device.allocate(8)
        with pytest.raises(InvalidBatch, match="lies on other, not on gpu"):
            device.copy(Batch(region(source), region(target, device="other"), [0], [0], [8]))


class TestPlanningACopy:
    """A call takes 1 s and a piece 0.25 s: 100 bytes in four pieces are planned at 2 s and there at 4."""

    @pytest.fixture
    def device(self, bench):
        return bench.new_device(copies=Copies(call=1.0, descriptor=0.25))

    @staticmethod
    def copy(device):
        source, target = device.allocate(100), device.allocate(100)
        offsets = [0, 25, 50, 75]
        return device.copy(Batch(region(source), region(target), offsets, offsets, [25] * 4))

    def test_waits_for_that_of_the_rank_s_copy_before_but_not_for_its_bytes(self, bench, device):
        ends = []
        for _ in range(2):
            self.copy(device).callbacks.append(lambda _: ends.append(bench.clock.now))
        bench.clock.run()
        assert ends == [4.0 + LAUNCH, 6.0 + LAUNCH]

    def test_goes_on_at_once_for_another_rank_on_the_same_device(self, bench, device):
        both = bench.clock.all_of([self.copy(device), self.copy(bench.new_device(copies=Copies(call=2.0)))])
        bench.clock.run(until=both)
        assert bench.clock.now == 6.0 + LAUNCH  # both move from 2 s on, and share the memory

    def test_takes_a_turn_more_where_the_last_one_was_another_rank_s(self, bench):
        costs = Copies(call=1.0, descriptor=0.25, context_switch=10.0)
        one, other = (bench.new_device(copies=costs) for _ in range(2))
        ends = []
        for device in (one, one, other, one):
            bench.clock.run(until=self.copy(device))
            ends.append(bench.clock.now)
        assert [round(after - before, 3) for before, after in pairwise([0.0, *ends])] == [4.0, 4.0, 14.0, 14.0]

    def test_of_a_rank_that_ends_meanwhile_moves_nothing_and_keeps_no_memory(self):
        bench = Bench()
        clock = RankClock(bench.clock, "rank")
        device = SimDevice(bench.memory, clock, bench.network, bench.link, Copies(call=1.0))
        self.copy(device)
        clock.stop()
        device.close()
        assert bench.memory.used == 200
        bench.clock.run()
        assert (bench.link.carried, bench.memory.used) == (0.0, 0)


class TestCompute:
    def test_is_noticed_by_whoever_waits_a_while_after_its_end(self, bench):
        device = bench.new_device(host_latency=HostLatency(replace(machine().host, wake=0.5)))
        log = []
        for seconds in (2.0, 1.0):
            device.compute(seconds).callbacks.append(lambda _: log.append(bench.clock.now))
        bench.clock.run()
        assert log == [2.5, 3.5]  # the second began at 2, and was not held up

    def test_is_served_in_order(self, bench, device):
        log = []
        for name, seconds in (("a", 2.0), ("b", 1.0)):
            device.compute(seconds).callbacks.append(lambda _, name=name: log.append((bench.clock.now, name)))
        bench.clock.run()
        assert log == [(2.0, "a"), (3.0, "b")]

    def test_of_negative_length_is_refused(self, device):
        with pytest.raises(ValueError, match=r"seconds=-1(\.0)? must be >= 0"):
            device.compute(-1)
