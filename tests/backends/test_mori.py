"""What MORI needs of a machine, and what is said where it is not there."""

import os
from importlib.util import find_spec

import pytest

from backends import registry
from backends.engines import rocm
from backends.jobs.launcher import Processes
from pdsim.core.errors import BackendUnavailable, ConfigError
from tests.backends import programs
from tests.support.engines import engine, spec

LACKS = rocm.missing()
lacking = pytest.mark.skipif(not LACKS, reason="this machine has all that MORI needs")


@lacking
@pytest.mark.parametrize("name", ["mori", "mori_inline"])
def test_an_endpoint_says_everything_that_is_missing(name):
    with pytest.raises(BackendUnavailable) as raised:
        Processes(engine(name), deadline=60).run([spec("a", programs.sleep, seconds=0)])
    assert [fact for fact in LACKS if fact not in str(raised.value)] == []
    assert "pip install 'pdsim[mori]'" in str(raised.value)


@lacking
def test_the_diagnosis_says_everything_that_is_missing():
    found = registry.diagnose("mori")
    assert (found.works, found.reason) == (False, "; ".join(LACKS))


def test_a_c_library_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.36")
    assert "glibc is 2.36, not >= 2.38" in rocm.missing()
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 2.38")
    assert not any(fact.startswith("glibc") for fact in rocm.missing())


def test_rocm_is_looked_for_where_the_linker_and_the_wheel_look(monkeypatch, tmp_path):
    monkeypatch.setattr(rocm, "ROCM", tmp_path)
    monkeypatch.setenv("MORI_ROCM_SMI_PATH", "libc.so.6")  # it can be loaded, and that is all that is asked
    found = rocm.missing(rdma=False)
    assert not any("smi" in fact or "RDMA" in fact for fact in found)
    assert any("libamdhip64.so.7" in fact for fact in found) == any("libamdhip64.so.7" in fact for fact in LACKS)


@pytest.mark.skipif(find_spec("mori") is not None, reason="amd-mori is installed")
def test_a_missing_wheel_is_named_with_the_pythons_that_it_is_for():
    assert any(fact.startswith("no package amd-mori (it has wheels for Python 3.10 and 3.12") for fact in LACKS)


def test_an_unknown_transport_is_a_configuration_error():
    from dataclasses import replace

    odd = replace(engine("mori"), options={"transport": "fax"})
    with pytest.raises(ConfigError, match=r"transport must be one of rdma, xgmi, rdma\+xgmi, got 'fax'"):
        Processes(odd, deadline=60).run([spec("a", programs.sleep, seconds=0)])
