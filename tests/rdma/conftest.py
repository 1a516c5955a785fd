"""The emulated machine, as the tests of this folder call it."""

import pytest

from backends.emulation.guest.machine import Guest


@pytest.fixture
def guest(rdma_guest: Guest) -> Guest:
    return rdma_guest
