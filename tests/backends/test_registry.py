"""Finding engines: by name, without importing them, with a remedy where they do not work."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from backends import registry
from backends.diagnosis import devices
from pdsim.core import plugins
from pdsim.core.errors import BackendUnavailable, ConfigError


def test_names_are_listed_without_importing_an_engine():
    code = (
        "import sys; from backends.registry import names; assert {'mooncake', 'nixl'} <= set(names()); "
        "assert not {'mooncake', 'nixl_cu13', 'zmq', 'backends.engines.nixl'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_lists_what_there_is(monkeypatch):
    with pytest.raises(ConfigError, match=r"nothing is registered as 'fax' .* mooncake, .*nixl"):
        registry.load("fax")
    with pytest.raises(ConfigError, match="no installed package provides backend 'fax'; there are mooncake"):
        registry.diagnose("fax")
    broken = EntryPoint("broken", "no_such_module:Endpoint", plugins.BACKENDS)
    monkeypatch.setattr(plugins, "_entries", lambda group: {"broken": broken})
    with pytest.raises(BackendUnavailable, match=r"'broken' .* cannot be imported: No module named 'no_such_mod"):
        registry.load("broken")


@pytest.mark.parametrize("name", ["devices", *registry.backends()])
def test_all_work_or_say_why_not_and_what_to_do(name):
    every = devices() if name == "devices" else [registry.diagnose(name)]
    assert [each.name for each in every] == (["gpu", "rdma", "shm", "cma"] if name == "devices" else [name])
    assert all(each.works or (each.reason and each.remedy) for each in every)


def test_a_library_without_metadata_has_an_unknown_version(monkeypatch):
    monkeypatch.setattr(registry, "error_of", lambda probe: "")  # the library imports, from a folder of its own
    monkeypatch.setattr(registry, "installed", lambda library: "")
    diagnosis = registry.diagnose.__wrapped__("mooncake_tcp")
    assert (diagnosis.works, diagnosis.version) == (True, "version unknown")
