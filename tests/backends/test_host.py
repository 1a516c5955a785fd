"""Host memory: the limit, what is held, and work in turn."""

import pytest

from backends.base.device import HostDevice
from pdsim.core.clock import WallClock
from pdsim.core.errors import OutOfMemory


@pytest.fixture
def device():
    return HostDevice(WallClock(), capacity=1 << 16)


def test_capacity_is_enforced_over_all_pools(device):
    device.allocate(1 << 15, "default")
    device.allocate(1 << 15, "nvlink")
    with pytest.raises(OutOfMemory, match="1 bytes asked for, 0 of 65536 left"):
        device.allocate(1)


def test_an_unknown_pool_is_refused(device):
    with pytest.raises(ValueError, match="pool must be one of default, symmetric, nvlink, got 'swimming'"):
        device.allocate(1, "swimming")


def test_held_memory_is_not_handed_out_again_even_when_freed(device):
    buffer = device.allocate(1 << 16)
    device.hold(buffer)
    device.free(buffer)
    assert device.used == 1 << 16
    with pytest.raises(OutOfMemory):
        device.allocate(1)
    device.release(buffer)
    assert device.used == 0
    device.allocate(1 << 16)


def test_the_peak_of_each_pool_is_kept(device):
    device.free(device.allocate(3000))
    device.allocate(1000)
    device.allocate(500, "nvlink")
    assert device.peak == {"default": 3000, "symmetric": 0, "nvlink": 500}
