"""How servers are started: GPUs, ports, sides and connectors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from backends.live import model_folder
from backends.live.commands import gpus_needed, launches
from backends.live.live_deployment import problems
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError

PAIR = ("target=model", "hw=4xh200", "model=qwen3-8b", "live.launch=true", "parallel.prefill.tp=1")


def option(launch, name):
    return launch.command[launch.command.index(name) + 1]


def test_every_server_sees_all_gpus_its_own_first():
    config = compose([*PAIR, "parallel.decode.tp=2", "backend=nixl"])
    prefill, decode = launches(config, "vllm", Path("m"))
    assert (prefill.gpus, decode.gpus) == ((0,), (1, 2))
    assert prefill.environment["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    assert decode.environment["CUDA_VISIBLE_DEVICES"] == "1,2,0"
    assert (option(prefill, "--tensor-parallel-size"), option(decode, "--tensor-parallel-size")) == ("1", "2")
    assert gpus_needed(config) == 3


def test_sides_may_share_gpus():
    config = compose(
        [*PAIR, "parallel.decode.tp=2", "live.prefill_gpus=[0]", "live.decode_gpus=[0,1]", "backend=nixl"]
    )
    prefill, decode = launches(config, "vllm", Path("m"))
    assert (prefill.gpus, decode.gpus) == ((0,), (0, 1))
    assert gpus_needed(config) == 2
    wrong = compose([*PAIR, "parallel.decode.tp=2", "live.decode_gpus=[0]"])
    with pytest.raises(ConfigError, match=r"live.decode_gpus=\[0\] names 1 GPUs, but parallel.decode takes 2"):
        launches(wrong, "vllm", Path("m"))


def test_ports_and_side_channels_of_all_servers_differ():
    config = compose([*PAIR, "parallel.decode.tp=1", "parallel.prefill.instances=2", "backend=nixl"])
    found = launches(config, "vllm", Path("m"))
    assert [one.name for one in found] == ["prefill0", "prefill1", "decode0"]
    assert len({one.port for one in found}) == 3
    assert len({one.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for one in found}) == 3
    sglang = launches(config, "sglang", Path("m"))
    assert len({one.bootstrap_port for one in sglang[:2]}) == 2


def test_knobs_of_the_model_are_options_of_the_engine():
    words = ["scheduler.chunk=2048", "scheduler.decode_batch=64", "kv.page_size=16", "scheduler.memory_fraction=0.5"]
    config = compose([*PAIR, "parallel.decode.tp=1", "backend=nixl", *words, "live.connector=NixlPushConnector"])
    vllm = launches(config, "vllm", Path("m"))[0]
    assert option(vllm, "--max-num-batched-tokens") == "2048"
    assert option(vllm, "--max-num-seqs") == "64"
    assert option(vllm, "--block-size") == "16"
    assert option(vllm, "--gpu-memory-utilization") == "0.5"
    assert json.loads(option(vllm, "--kv-transfer-config"))["kv_connector"] == "NixlPushConnector"
    assert "--no-enable-prefix-caching" in vllm.command


@pytest.mark.parametrize(
    ("backend", "transport", "variable"),
    [("mooncake_nvlink", "mooncake", "MC_INTRANODE_NVLINK"), ("nixl", "nixl", None)],
)
def test_sglang_gets_the_transport_of_the_backend(backend, transport, variable):
    config = compose([*PAIR, "parallel.decode.tp=1", f"backend={backend}"])
    prefill, decode = launches(config, "sglang", Path("m"))
    assert option(prefill, "--disaggregation-transfer-backend") == transport
    assert (option(prefill, "--disaggregation-mode"), option(decode, "--disaggregation-mode")) == (
        "prefill",
        "decode",
    )
    assert variable is None or prefill.environment[variable] == "1"


@pytest.mark.parametrize(("exported", "given"), [(None, "1"), ("0", "0")])
def test_sglang_over_tcp_keeps_the_variable_that_a_user_set(monkeypatch, exported, given):
    if exported is not None:
        monkeypatch.setenv("MC_FORCE_TCP", exported)
    config = compose([*PAIR, "parallel.decode.tp=1", "backend=mooncake_tcp"])
    assert launches(config, "sglang", Path("m"))[0].environment["MC_FORCE_TCP"] == given


def test_a_backend_without_a_connector_is_refused():
    config = compose([*PAIR, "parallel.decode.tp=1", "backend=nvlink"])
    with pytest.raises(
        ConfigError, match="backend=nvlink has no KV connector in this engine; use one of backend=nixl"
    ):
        launches(config, "vllm", Path("m"))


def test_a_colocated_server_has_no_connector():
    config = compose([*PAIR, "parallel.decode.tp=2", "live.layout=colocated"])
    (server,) = launches(config, "vllm", Path("m"))
    assert "--kv-transfer-config" not in server.command
    assert server.gpus == (0, 1)


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-32b", "llama-3.1-8b", "llama-3.1-70b", "tiny"])
def test_a_model_folder_has_the_shape_and_a_word_for_every_token(tmp_path, model):
    llm = compose(["hw=8xh200", f"model={model}"]).model
    folder = model_folder.write(llm, tmp_path / "model")
    written = json.loads((folder / "config.json").read_text())
    assert (written["num_hidden_layers"], written["hidden_size"]) == (llm.layers, llm.hidden)
    assert (written["num_key_value_heads"], written["head_dim"]) == (llm.kv_heads, llm.head_dim)
    assert _parameters(written) == pytest.approx(llm.parameters, rel=0.02 if model != "tiny" else 0.7)
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(words) == written["vocab_size"]


def _parameters(found):
    hidden, heads, kv = found["hidden_size"], found["num_attention_heads"], found["num_key_value_heads"]
    attention = hidden * found["head_dim"] * 2 * (heads + kv)
    layer = attention + 3 * hidden * found["intermediate_size"]
    return found["num_hidden_layers"] * layer + 2 * found["vocab_size"] * hidden


def refusals(*words):
    return list(problems(compose(["target=model", "hw=2xh200", *words])))


def test_what_is_missing_is_said_in_one_line_each():
    assert refusals() == [
        "target=live needs live.url=URL, live.prefill=URL with live.decode=URL, or live.launch=true; none is"
    ]
    both = refusals("live.url=http://a", "live.launch=true", "live.engine=vllm", "model=qwen3-8b")
    assert both[0].endswith("live.url and live.launch are set")
    assert refusals("live.prefill=http://a", "live.engine=vllm") == [
        "live.prefill=['http://a'] has no live.decode; name the decode servers as well"
    ]
    assert refusals("live.prefill=http://a", "live.decode=http://b", "engine=generic") == [
        "live.engine='' does not say which protocol joins prefill and decode; set live.engine=vllm or sglang"
    ]
    config = compose(["hw=2xh200", "live.launch=true", "live.engine=vllm", "model=qwen3-8b"])
    shapeless = replace(config, model=replace(config.model, hf_config={}))
    assert "live.launch=true needs the architecture of model=qwen3-8b" in next(problems(shapeless))
    absent = refusals("live.launch=true", "live.engine=vllm", "model=qwen3-8b", "live.python=/none/python")
    assert "live.launch=true needs vllm, which /none/python does not have" in absent[0]
    assert "needs 2 NVIDIA GPUs" in absent[1]


def test_a_prefix_cache_on_decode_is_refused_as_sglang_refuses_it():
    cache = "--disaggregation-decode-enable-radix-cache"
    words = ("live.launch=true", "live.engine=sglang", "model=qwen3-8b", "hw=loopback")
    both = refusals(*words, f"live.decode_arguments=[{cache},--enable-hisparse]")
    assert (
        both[0]
        == f"live.decode_arguments has {cache} and --enable-hisparse: SGLang refuses both together; leave one out"
    )
    mori = refusals(*words, f"live.decode_arguments=[{cache}]", "live.connector=mori")
    assert "takes with nixl and mooncake only, not mori" in mori[0]
