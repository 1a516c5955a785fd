"""What MORI needs of a machine, and what is said where it is not there."""

import os
from dataclasses import replace

import pytest

from backends.engines import mori as rocm
from backends.jobs.launcher import Processes
from pdsim.core.errors import BackendUnavailable, ConfigError
from tests.backends import programs
from tests.support.engines import engine, spec

LACKS = rocm.missing()


@pytest.mark.skipif(not LACKS, reason="this machine has all that MORI needs")
@pytest.mark.parametrize("name", ["mori", "mori_inline"])
def test_an_endpoint_says_everything_that_is_missing(name):
    with pytest.raises(BackendUnavailable) as raised:
        Processes(engine(name), deadline=60).run([spec("a", programs.sleep, seconds=0)])
    assert [fact for fact in LACKS if fact not in str(raised.value)] == []
    assert "pip install 'pdsim[mori]'" in str(raised.value)


def test_a_c_library_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.36")
    assert "glibc is 2.36, not >= 2.38" in rocm.missing()
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.38")
    assert not any(fact.startswith("glibc") for fact in rocm.missing())


def test_an_unknown_transport_is_a_configuration_error():
    odd = replace(engine("mori"), options={"transport": "fax"})
    with pytest.raises(ConfigError, match=r"transport must be one of rdma, xgmi, rdma\+xgmi, got 'fax'"):
        Processes(odd, deadline=60).run([spec("a", programs.sleep, seconds=0)])
