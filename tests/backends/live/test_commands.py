"""How servers are started: command lines, environments, GPUs and ports, and the keys that they cannot have."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from backends.live.commands import gpus_needed, launches, refusals, router
from backends.live.launch import write_model
from backends.live.live_deployment import problems
from pdsim.config.compose import compose

PAIR = ("hw=8xh200", "model=qwen3-8b", "parallel=tp1", "live.launch=true")


def made(engine, *words, release="", base=PAIR):
    config = compose([*base, f"engine={engine}", f"live.engine={engine}", *words])
    assert not list(refusals(config, engine))
    return launches(config, engine, Path("m"), release)


def flags(launch):
    """Return the command line after what all servers have in common, and the environment without what all have."""
    words = launch.command[launch.command.index("--port") + 2 :]
    common = ("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "CUDA_VISIBLE_DEVICES", "VLLM_NIXL_SIDE_CHANNEL_HOST")
    return " ".join(words), {k: v for k, v in launch.environment.items() if k not in common}


def test_servers_see_all_gpus_and_have_their_own_ports():
    prefill, decode = made("vllm", "parallel.decode.tp=2", "backend=nixl")
    assert (prefill.gpus, decode.gpus) == ((0,), (1, 2))
    assert prefill.environment["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    assert decode.environment["CUDA_VISIBLE_DEVICES"] == "1,2,0"
    servers = made("vllm", "parallel.prefill.instances=2", "backend=nixl")
    assert [one.name for one in servers] == ["prefill0", "prefill1", "decode0"]
    assert [one.port for one in servers] == [30100, 30101, 30102]
    assert [one.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for one in servers] == ["30600", "30620", "30640"]
    first, second, _ = made("sglang", "parallel.prefill.instances=2", "backend=nixl")
    assert (first.bootstrap_port, second.bootstrap_port) == (31000, 31001)


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ("parallel.decode.tp=2", 3),
        ("parallel.prefill.tp=2 parallel.prefill.cp=3", 7),
        ("parallel.prefill.cp=2 parallel.prefill.instances=3", 7),
        ("parallel.prefill.pp=2 parallel.prefill.cp=2", 5),
        ("parallel.prefill.tp=4 parallel.prefill.dp=2", 5),
        ("parallel.decode.tp=2 live.prefill_gpus=[0] live.decode_gpus=[0,1]", 2),
        ("live.layout=colocated parallel.decode.tp=2", 2),
        ("hw=loopback backend=nixl_tcp", 0),
    ],
)
def test_gpus_are_tp_times_pp_times_cp_of_each_instance(words, gpus):
    assert gpus_needed(compose([*PAIR, "engine=sglang", "backend=nixl", *words.split()])) == gpus


@pytest.mark.parametrize(
    ("engine", "words", "command"),
    [
        (
            "sglang",
            ("experiment.router=round_robin", "parallel.prefill.instances=2"),
            "python -m sglang_router.launch_router --pd-disaggregation --prefill http://127.0.0.1:30100 31000 "
            "--prefill http://127.0.0.1:30101 31001 --decode http://127.0.0.1:30102 --policy round_robin "
            "--host 127.0.0.1 --port 30103",
        ),
        (
            "sglang",
            ("live.layout=colocated", "parallel.decode.instances=2"),
            "python -m sglang_router.launch_router --worker-urls http://127.0.0.1:30100 http://127.0.0.1:30101 "
            "--host 127.0.0.1 --port 30102",
        ),
        (
            "vllm",
            ("parallel.decode.instances=2",),
            "python tests/v1/kv_connector/nixl_integration/toy_proxy_server.py --prefiller-hosts 127.0.0.1 "
            "--prefiller-ports 30100 --decoder-hosts 127.0.0.1 127.0.0.1 --decoder-ports 30101 30102 "
            "--host 127.0.0.1 --port 30103",
        ),
        ("sglang", ("live.layout=colocated",), ""),
    ],
    ids=["sglang pair", "sglang colocated", "vllm", "one server"],
)
def test_a_router_stands_before_several_servers(engine, words, command):
    config = compose([*PAIR, f"engine={engine}", f"live.engine={engine}", "backend=nixl", *words])
    assert router(config, engine, launches(config, engine, Path("m"))) == command


BASE = (
    "--skip-tokenizer-init --enable-metrics --incremental-streaming-output --context-length 40960 --tp-size {tp} "
    "--pp-size 1 --chunked-prefill-size {chunk} --max-running-requests {batch} --page-size 64 "
    "--mem-fraction-static 0.88 {more}--disable-radix-cache --disaggregation-mode prefill "
    "--disaggregation-transfer-backend {backend} --disaggregation-bootstrap-port 31000"
)
QUEUES = {"SGLANG_DISAGGREGATION_QUEUE_SIZE": "4"}
INTRA = {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "INTRA_NODE_NVLINK", "MC_INTRANODE_NVLINK": "1"}
NVLINK = {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "NVLINK", "MC_FORCE_MNNVL": "1"}
AUX = {"SGLANG_DISAGGREGATION_QUEUE_SIZE": "8", "SGLANG_MOONCAKE_SEND_AUX_TCP": "1"}
ALL_CP = {"SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1"}
CONTROL = "backend.policy.metadata=control"
CP = "nixl parallel.prefill.tp=2 parallel.prefill.cp=2"
DP = "nixl parallel.prefill.tp=4 parallel.prefill.dp=2"
OLD_CP = {"tp": 4, "more": "--attn-cp-size 2 --enable-prefill-context-parallel "}
NEW_CP = {"tp": 4, "more": "--attn-cp-size 2 --enable-prefill-cp --cp-strategy zigzag "}
GROUPS = {"tp": 4, "chunk": 16384, "batch": 512}
OLD_DP = GROUPS | {"more": "--dist-init-addr 127.0.0.1:31400 --dp-size 2 --enable-dp-attention "}
NEW_DP = GROUPS | {"more": "--dist-init-addr 127.0.0.1:31400 --attn-dp-size 2 "}


def staging(pool, buffer):
    sizes = {"POOL_SIZE_MB": str(pool), "BUFFER_SIZE_MB": str(buffer)}
    return {f"SGLANG_DISAGG_STAGING_{name}": value for name, value in ({"BUFFER": "1"} | sizes).items()}


@pytest.mark.parametrize(
    ("words", "release", "options", "environment"),
    [
        ("nixl", "", {}, QUEUES),
        ("mooncake_nvlink", "", {}, QUEUES | INTRA),
        ("mooncake_tcp", "", {}, QUEUES | {"MC_FORCE_TCP": "1"}),
        (f"mooncake backend.policy.pool=nvlink {CONTROL}", "", {}, QUEUES | NVLINK),
        (f"mooncake_nvlink {CONTROL} backend.policy.queues=8", "", {}, INTRA | AUX),
        # 65 pages of 64 tokens, of 36 layers' K and V of 4 heads a rank, 256 bytes each
        (
            "nixl kv.staging=true parallel.prefill.tp=2 scheduler.chunk=4096",
            "",
            {"tp": 2, "chunk": 4096},
            QUEUES | staging(4096, 293),
        ),
        ("mooncake kv.staging=true kv.staging_ring=1GiB kv.staging_buffer=4MiB", "", {}, QUEUES | staging(1024, 4)),
        (CP, "0.5.12", OLD_CP, QUEUES),
        (f"{CP} kv.all_cp_ranks=true", "0.5.14", NEW_CP, QUEUES | ALL_CP),
        (DP, "0.5.12", OLD_DP, QUEUES),
        (DP, "0.5.23", NEW_DP, QUEUES),
        ("nixl kv.pool=9GiB", "", {"more": "--max-total-tokens 65536 "}, QUEUES),
    ],
)
def test_sglang_prefill_gets_exactly_this_line_and_environment(words, release, options, environment):
    backend, *more = words.split()
    values = {"tp": 1, "chunk": 8192, "batch": 256, "more": "", "backend": backend.partition("_")[0]} | options
    own = ("kv.page_size=64", "scheduler.decode_batch=256", "scheduler.memory_fraction=0.88", "scheduler.chunk=8192")
    prefill = made("sglang", f"backend={backend}", *own, *more, release=release)[0]
    assert flags(prefill) == (BASE.format(**values), environment)


def test_sglang_over_tcp_keeps_the_variable_of_the_user(monkeypatch):
    monkeypatch.setenv("MC_FORCE_TCP", "0")
    assert made("sglang", "backend=mooncake_tcp")[0].environment["MC_FORCE_TCP"] == "0"


@pytest.mark.parametrize(("metadata", "own"), [("control", {}), ("write", {"SGLANG_MORI_SEND_AUX_RDMA": "1"})])
def test_sglang_sends_metadata_over_rdma_with_mori(metadata, own):
    base = ("hw=8xmi300x", *PAIR[1:])
    server = made("sglang", "backend=mori", f"backend.policy.metadata={metadata}", base=base)[0]
    assert flags(server)[1] == {"SGLANG_MORI_TRANSFER_SHARDS": "8"} | own


@pytest.mark.parametrize(
    ("words", "prefill", "decode"),
    [
        ((), "--disable-radix-cache", "--disable-radix-cache"),
        (("live.prefix_cache=true",), None, "--disable-radix-cache"),
        (("cache=sglang",), None, "--disable-radix-cache"),
        (("cache=sglang", "cache.decode=true"), None, "--disaggregation-decode-enable-radix-cache"),
    ],
)
def test_sglang_caches_prefixes_where_the_configuration_says(words, prefill, decode):
    servers = made("sglang", "backend=mooncake_nvlink", *words)
    assert [next((w for w in server.command if "radix" in w), None) for server in servers] == [prefill, decode]


VLLM = (
    "--max-model-len {context} --tensor-parallel-size {tp} --pipeline-parallel-size 1 --max-num-batched-tokens 8192 "
    "--max-num-seqs 1024 --block-size 16 --disable-uvicorn-access-log --{no}enable-prefix-caching{more} "
    "--gpu-memory-utilization 0.92{pool} --kv-transfer-config "
)
PUSH = "nixl_vllm live.connector=NixlPushConnector kv.pool=1GiB cache=vllm"
EXPERTS = "nixl_vllm model=qwen3-30b-a3b parallel.prefill.tp=4 parallel.prefill.dp=2 parallel.prefill.ep=4"
PUSHED = {"no": "", "pool": " --kv-cache-memory-bytes 1073741824"}


@pytest.mark.parametrize(
    ("words", "options", "connector", "extra"),
    [
        ("nixl_vllm", {}, "NixlConnector", {}),
        (PUSH, PUSHED, "NixlPushConnector", {}),
        ("mooncake_tcp", {}, "MooncakeConnector", {"kv_connector_extra_config": {"mooncake_protocol": "tcp"}}),
        (EXPERTS, {"tp": 2, "more": " --data-parallel-size 2 --enable-expert-parallel"}, "NixlConnector", {}),
    ],
)
def test_vllm_prefill_gets_exactly_this_line(words, options, connector, extra):
    line, environment = flags(made("vllm", "kv.page_size=16", *f"backend={words}".split())[0])
    values = {"context": 40960, "tp": 1, "no": "no-", "more": "", "pool": ""} | options
    begin, _, end = line.partition("{")
    assert begin == VLLM.format(**values)
    assert json.loads("{" + end) == {"kv_role": "kv_both", "kv_connector": connector} | extra
    assert environment == {"VLLM_NIXL_SIDE_CHANNEL_PORT": "30600"}


def test_a_colocated_server_has_no_connector():
    (server,) = made("vllm", "parallel.decode.tp=2", "live.layout=colocated")
    assert "--kv-transfer-config" not in server.command
    assert server.gpus == (0, 1)


@pytest.mark.parametrize(
    ("engine", "words", "line"),
    [
        ("vllm", "parallel.prefill.cp=2", "parallel.prefill.cp=2 .* no connector hands over context-parallel KV"),
        ("vllm", "parallel.decode.tp=2 parallel.decode.dp=2", "decode.dp=2 .* use tp=1 and instances=2"),
        ("vllm", "parallel.prefill.pp=2", "parallel.prefill.pp=2 .* NixlConnector takes no stages; set pp=1"),
        ("vllm", "kv.staging=true", "kv.staging=true .* have no staging buffer; use engine=sglang"),
        ("vllm", "kv.page_size=8", "kv.page_size=8 .* a multiple of 16 tokens; run engine=vllm, or set one"),
        ("vllm", "kv.state_slots=9", "kv.state_slots=9 .* one pool"),
        ("vllm", "backend=mooncake_nvlink", "backend=mooncake_nvlink .* use backend=mooncake or mooncake_tcp"),
        ("vllm", "cache=sglang", "cache.eviction=radix .* they evict by block; use cache=vllm"),
        ("vllm", "parallel.decode.tp=2 live.decode_gpus=[0]", r"live.decode_gpus=\[0\] names 1 GPUs, but .* 2;"),
        ("sglang", "cache=vllm", "cache.eviction=block .* use cache=sglang"),
        ("sglang", "backend=nvlink", "nvlink has no KV connector in engine=sglang; use one of backend=nixl"),
        ("sglang", "live.connector=ascend kv.staging=true", "kv.staging=true .* use mooncake or nixl"),
        ("sglang", "model=tiny-mla kv.staging=true", "kv.staging=true .* no heads to stage"),
        ("sglang", "live.connector=mori cache=sglang cache.decode=true", "cache.decode=true .* backend=mori"),
        (
            "sglang",
            "cache=sglang cache.decode=true live.decode_arguments=[--enable-hisparse]",
            "cache.decode=true .* not with --enable-hisparse",
        ),
        ("sglang", "backend.policy.metadata=control", "backend.policy.metadata=control .* NIXL writes it"),
        ("sglang", "kv.layerwise=true", "kv.layerwise=true is not for servers of engine=sglang"),
        ("sglang", "cache=sglang cache.host=1000000", "cache.host=1000000 .*--enable-hierarchical-cache"),
        ("sglang", "cache=sglang cache.limit=4096", "cache.limit=4096 .* set kv.pool"),
    ],
)
def test_a_key_that_the_engine_cannot_have_is_refused(engine, words, line):
    (refused,) = refusals(compose([*PAIR, "backend=nixl", "kv.page_size=16", *words.split()]), engine)
    assert re.search(line, refused)


@pytest.mark.parametrize("model", ["qwen3-8b", "llama-3.1-8b", "tiny"])
def test_a_model_folder_has_the_shape_and_all_tokens(tmp_path, model):
    llm = compose(["hw=8xh200", f"model={model}"]).model
    folder = write_model(llm, tmp_path / "model")
    shape = json.loads((folder / "config.json").read_text())
    layers, hidden, heads, kv = llm.layers, llm.hidden, llm.heads, llm.kv_heads
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    assert [shape[name] for name in names] == [layers, hidden, heads, kv, llm.head_dim]
    layer = hidden * llm.head_dim * 2 * (heads + kv) + 3 * hidden * shape["intermediate_size"]
    parameters = layers * layer + 2 * shape["vocab_size"] * hidden
    assert parameters == pytest.approx(llm.parameters, rel=0.02 if model != "tiny" else 0.7)
    words = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(words) == shape["vocab_size"]


def lines(*words):
    return list(problems(compose(["target=model", "hw=2xh200", *words])))


def test_what_is_missing_is_said_in_one_line_each():
    assert lines() == [
        "target=live needs live.url=URL, live.prefill=URL with live.decode=URL, or live.launch=true; none is"
    ]
    both = lines("live.url=http://a", "live.launch=true", "live.engine=vllm", "model=qwen3-8b", "backend=nixl")
    assert both[0].endswith("live.url and live.launch are set")
    assert lines("live.prefill=http://a", "live.engine=vllm") == [
        "live.prefill=['http://a'] has no live.decode; name the decode servers as well"
    ]
    assert lines("live.prefill=http://a", "live.decode=http://b", "engine=generic") == [
        "live.engine='' does not say which protocol joins prefill and decode; set live.engine=vllm or sglang"
    ]
    launch = ("live.launch=true", "engine=vllm", "live.engine=vllm", "model=qwen3-8b", "backend=nixl")
    config = compose(["hw=2xh200", *launch])
    shapeless = replace(config, model=replace(config.model, hf_config={}))
    assert "live.launch=true needs the architecture of model=qwen3-8b" in next(problems(shapeless))
    absent = lines(*launch, "live.python=/none/python")
    assert "live.launch=true needs vllm, which /none/python does not have" in absent[0]
    assert "needs 2 NVIDIA GPUs" in absent[1]
