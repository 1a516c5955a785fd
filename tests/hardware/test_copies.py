"""A GPU's memory, and copies within it: the kernel and numpy agree byte for byte."""

import numpy as np
import pytest

from backends.cuda.gather import Gather
from pdsim.core.clock import WallClock
from pdsim.core.errors import OutOfMemory, RegistrationError
from tests.backends.test_gather import CASES, batch, expected

pytest.importorskip("torch")


@pytest.fixture
def device():
    from backends.cuda.cuda_device import CudaDevice

    device = CudaDevice(WallClock(), 0, 1 << 30)
    yield device
    device.close()


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_moves_what_numpy_moves(device, case):
    pieces = batch(**CASES[case])
    source, target = (device.allocate(region.size) for region in (pieces.source, pieces.target))
    contents, image = expected(pieces)
    source.write(0, contents.tobytes())
    Gather(0).copy(source.address, target.address, pieces, device.stream)
    device.cuda.wait(device.stream)
    assert np.array_equal(np.frombuffer(target.read(0, target.size), np.uint8), image)


def test_a_buffer_begins_at_a_segment_of_its_own(device):
    addresses = [device.allocate(1).address for _ in range(3)]
    assert len({address >> 21 for address in addresses}) == 3


def test_memory_that_peers_may_map_is_zeroed_and_kept(device):
    buffer = device.allocate(5000)
    buffer.write(0, b"\xff" * 5000)
    buffer.kept = True
    device.free(buffer)
    assert device.used == 0
    again = device.allocate(6000)
    assert again.address == buffer.address
    assert again.read(0, 6000) == bytes(6000)


def test_what_the_gpu_does_not_have_is_refused(device):
    device.capacity = 1 << 50
    with pytest.raises(OutOfMemory, match="the GPU has no"):
        device.allocate(1 << 45)
    assert device.used == 0
    with pytest.raises(RegistrationError, match="is not memory of cuda:0"):
        device.copy(batch(**CASES["pages"]))
