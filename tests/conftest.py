"""What all tests rest on."""

import signal
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from backends.emulation.guest.engines import Engines
from backends.emulation.guest.image import GuestUnavailable
from backends.emulation.guest.machine import Guest, boot
from tests.rdma.verbs import unavailable

# A shell without job control starts background jobs with Ctrl-C ignored, and what they start inherits that; tests of
# Ctrl-C need it to work, however the suite was started.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def guest() -> Iterator[Guest]:
    """A machine with an RDMA device, booted once for all tests; see `backends.emulation.guest`."""
    try:
        with boot() as machine:
            yield machine
    except GuestUnavailable as error:
        unavailable(error)


@pytest.fixture(scope="session")
def verbs(guest: Guest) -> Engines:
    """The engines that go over RDMA verbs, in the guest."""
    return Engines(guest)
