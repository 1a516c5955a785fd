"""What SGLang's environment variables mean, as keys."""

import pytest

from pdsim.core.errors import ConfigError
from pdsim.kv.policy import described

POOL = "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"


@pytest.mark.parametrize(
    ("engine", "variables", "keys"),
    [
        ("mooncake", {POOL: "INTRA_NODE_NVLINK"}, ["backend.policy.pool=intra_node_nvlink"]),
        ("mooncake", {"SGLANG_MOONCAKE_SEND_AUX_TCP": "true"}, ["backend.policy.metadata=control"]),
        ("mori", {"SGLANG_MOONCAKE_SEND_AUX_TCP": "1"}, []),
        ("mori", {"SGLANG_MORI_SEND_AUX_RDMA": "1"}, ["backend.policy.metadata=write"]),
        ("nixl", {"SGLANG_DISAGG_STAGING_BUFFER": "0"}, []),
        (
            "nixl",
            {"SGLANG_DISAGG_STAGING_BUFFER": "1", "SGLANG_DISAGG_STAGING_POOL_SIZE_MB": "512"},
            ["kv.staging=true", "kv.staging_ring=512MiB"],
        ),
    ],
)
def test_variables_of_sglang_are_keys(engine, variables, keys):
    assert list(described(variables, engine)) == keys


@pytest.mark.parametrize(("name", "text"), [(POOL, "BAREX"), ("SGLANG_DISAGGREGATION_QUEUE_SIZE", "few")])
def test_a_variable_that_no_key_has_is_refused(name, text):
    with pytest.raises(ConfigError, match=f"{name}={text} .*; unset it, or set backend.policy"):
        list(described({name: text}, "mooncake"))
