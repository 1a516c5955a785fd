"""Finding engines: by name, without importing them, with a remedy where they do not work."""

import subprocess
import sys

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


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(ConfigError, match=r"nothing is registered as 'fax' .* mooncake, .*nixl"):
        registry.load("fax")


def test_a_module_that_cannot_be_imported_is_unavailable(monkeypatch):
    from importlib.metadata import EntryPoint

    broken = EntryPoint("broken", "no_such_module:Endpoint", plugins.BACKENDS)
    monkeypatch.setattr(plugins, "_entries", lambda group: {"broken": broken})
    with pytest.raises(
        BackendUnavailable, match=r"'broken' .* cannot be imported: No module named 'no_such_module'"
    ):
        registry.load("broken")


@pytest.mark.parametrize("name", registry.backends())
def test_every_engine_works_or_says_why_not_and_what_to_do(name):
    found = registry.diagnose(name)
    assert found.works or (found.reason and found.remedy)


def test_a_library_without_metadata_has_an_unknown_version(monkeypatch):
    monkeypatch.setattr(registry, "error_of", lambda probe: "")  # the library imports, from a folder of its own
    monkeypatch.setattr(registry, "installed", lambda library: "")
    found = registry.diagnose.__wrapped__("mooncake_tcp")
    assert (found.works, found.version) == (True, "version unknown")


def test_devices_work_or_say_why_not():
    found = devices()
    assert [device.name for device in found] == ["gpu", "rdma", "shm", "cma"]
    assert all(device.works or (device.reason and device.remedy) for device in found)


def test_an_unknown_engine_is_a_configuration_error():
    with pytest.raises(ConfigError, match="no installed package provides backend 'fax'; there are mooncake"):
        registry.diagnose("fax")
