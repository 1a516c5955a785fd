"""What the emulated machine with an RDMA device needs of this one, and what is said where that is not there."""

import os

import pytest

from backends.emulation.guest import engines, machine
from backends.emulation.guest import mori as space
from pdsim.core.errors import BackendUnavailable


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without programs, without libraries and with an empty cache."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "PROVIDER", "no-such-library.so")
    monkeypatch.setattr(space, "_candidates", lambda: iter(()))


def test_everything_to_install_is_named_at_once(bare):
    found = engines.missing_requirements("mori")
    for package in (
        "qemu-system-x86",
        "util-linux",
        "iproute2",
        "ibverbs-providers",
        "gcc",
        "binutils",
        "Python 3.12",
    ):
        assert package in found
    assert "apt-get install -y --no-install-recommends qemu-system-x86" in found


def test_a_guest_that_lacks_something_is_not_started(bare):
    with pytest.raises(BackendUnavailable, match=r"apt-get install .* qemu-system-x86"), machine.boot():
        pass
    assert not os.listdir(os.environ["HOME"])  # noqa: PTH208


def test_an_engine_that_does_not_go_over_rdma_has_no_guest():
    assert (
        "backend=mooncake, mori, mori_inline, nixl; for backend=nixl_shm use hw=loopback"
        in engines.missing_requirements("nixl_shm")
    )
