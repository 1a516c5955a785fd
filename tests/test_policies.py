"""Each backend's policy: read from its file, checked, and the alias `mooncake_tcp` with its arguments."""

from dataclasses import replace

import pytest

from pdsim.config import rules
from pdsim.core.errors import ConfigError
from pdsim.kv.policy import Staging
from tests.support.composed import composed


def test_metadata_within_a_node_goes_as_kv_does():
    policy = composed("backend=mooncake_nvlink").policy
    assert (policy.metadata_by, policy.metadata_on, policy.memory_pool) == ("write", "device", "default")


def test_a_policy_is_set_under_its_backend():
    assert composed("backend.policy.queues=2").policy.queues == 2
    with pytest.raises(ConfigError, match=r"did you mean backend\.policy\.queues\?"):
        composed("+backend.policy.queue=2")


def test_a_backend_without_a_staged_path_refuses_staging():
    with pytest.raises(ConfigError, match=r"backend=mori has no staged path"):
        rules.check(composed("hw=8xmi300x", "kv.staging=true"))


@pytest.mark.parametrize("changes", [{"ring": 0}, {"buffer": 0}, {"wait": 0.0}])
def test_sizes_of_the_staged_path_are_positive(changes):
    with pytest.raises(ValueError, match="must be > 0"):
        Staging(**({"ring": 1, "buffer": 1, "wait": 1.0} | changes))


def test_the_alias_forces_tcp():
    assert composed("hw=loopback", "backend=mooncake_tcp").backend.options == {"MC_FORCE_TCP": "1"}


@pytest.mark.parametrize(("value", "said"), [(None, 0), ("1", 0), ("0", 1)])
def test_an_exported_value_is_kept_with_a_note(monkeypatch, value, said):
    config = replace(composed("hw=loopback", "backend=mooncake_tcp"), target="real")
    if value is not None:
        monkeypatch.setenv("MC_FORCE_TCP", value)
    rules.check(config)
    lines = rules.notes(config, ())
    assert len(lines) == said
    assert all("MC_FORCE_TCP=0 is kept" in line and "backend=mooncake is the one for RDMA" in line for line in lines)


NVLINK = ["hw=8xh200", "backend=nvlink", "cache.decode=true"]
MORI = ["hw=2x8xmi300x", "backend=mori", "cache.decode=true"]


@pytest.mark.parametrize("words", [NVLINK, MORI])
def test_sglang_keeps_prefixes_on_decode_over_nixl_and_mooncake_only(words):
    with pytest.raises(ConfigError, match=r"cache\.decode=true with backend=\w+: .* over nixl and mooncake only"):
        rules.check(composed(*words))
    rules.check(composed(*words, "engine=vllm"))  # which pulls
    for words in (["hw=2x8xh20", "backend=mooncake"], ["hw=8xh20", "backend=nixl"]):
        rules.check(composed(*words, "cache.decode=true"))
