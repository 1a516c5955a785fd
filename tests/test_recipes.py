# SPDX-License-Identifier: Apache-2.0
"""Command lines, scripts and YAML of deployments as configurations.

Their shapes are those of public recipes: the docs of vLLM and SGLang, Dynamo's ``recipes/llama-3-70b`` and
``recipes/deepseek-r1``, llm-d's ``guides/pd-disaggregation``.  The folder `recipes` has twelve files.
"""

import re
from pathlib import Path

import pytest

from experiments.serve import job
from pdsim.cli.main import main
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.recipes import translated
from pdsim.recipes.commands import servers

ONE = "experiment.deployment=colocated experiment.engines=1"
SIDES = ("prefill", "decode")
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
RECIPES = Path(__file__).parent / "recipes"
PAIR = """
#!/bin/bash
MODEL=deepseek-ai/DeepSeek-R1
# prefill
SGLANG_MOONCAKE_CUSTOM_MEM_POOL=NVLINK python3 -m sglang.launch_server --model-path ${MODEL} --tp 8 \\
  --disaggregation-mode prefill --chunked-prefill-size ${CHUNK:-16384} --host 0.0.0.0 > prefill.log 2>&1 &
python3 -m sglang.launch_server --model-path $MODEL --tp-size 8 --dp-size 8 --enable-dp-attention --ep-size 8 \\
  --disaggregation-mode decode --max-running-requests 1024 --mem-fraction-static 0.75 &
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "vllm serve Qwen/Qwen3-8B --tensor-parallel-size 2 --max-num-batched-tokens 8k "
            "--no-enable-prefix-caching",
            f"engine=vllm model=qwen3-8b {ONE} parallel.decode.tp=2 parallel.prefill.tp=2 scheduler.chunk=8000 "
            "cache=none compute.graph_tokens=512",
        ),
        (
            "VLLM_USE_V1=1 vllm serve Qwen/Qwen3-30B-A3B-FP8 -tp=4 --enable_expert_parallel --max-model-len=16384",
            f"engine=vllm model=qwen3-30b-a3b model.dtype_bytes=1 model.kv_dtype=bf16 {ONE} parallel.decode.tp=4 "
            "parallel.decode.ep=4 parallel.prefill.tp=4 parallel.prefill.ep=4 model.context=16384 cache=vllm "
            "compute.graph_tokens=512",
        ),
        (
            "vllm serve meta-llama/Llama-3.1-8B-Instruct -tp 1 --data-parallel-size 4 --kv-cache-dtype fp8",
            f"engine=vllm model=llama-3.1-8b model.kv_dtype=fp8_e4m3 {ONE[:-1]}4 parallel.decode.tp=1 "
            "parallel.decode.instances=4 parallel.prefill.tp=1 parallel.prefill.instances=4 cache=vllm "
            "compute.graph_tokens=512",
        ),
        (
            "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 8 --dp 8 "
            "--enable-dp-attention --chunked-prefill-size 65536 --page-size 64",
            f"engine=sglang model=deepseek-v3 {ONE} parallel.decode.tp=8 parallel.decode.dp=8 parallel.prefill.tp=8 "
            "parallel.prefill.dp=8 kv.page_size=64 scheduler.chunk=8192 cache=sglang",
        ),
        (
            "sglang serve --model meta-llama/Llama-3.1-70B-Instruct --tp 4 --dp 2 --disable-radix-cache "
            "--chunked-prefill-size -1",
            f"engine=sglang model=llama-3.1-70b {ONE[:-1]}2 parallel.decode.tp=4 parallel.decode.instances=2 "
            "parallel.prefill.tp=4 parallel.prefill.instances=2 cache=none",
        ),
        (
            "sglang serve --model Qwen/Qwen3-8B --tp 1 --scheduler-recv-interval 10 --enable-mixed-chunk",
            f"engine=sglang model=qwen3-8b {ONE} parallel.decode.tp=1 parallel.prefill.tp=1 engine.look=10 "
            "cache=sglang engine.mixed=true",
        ),
        (
            "sglang serve --model Qwen/Qwen3-8B --tp 1 --attention-backend triton --disable-radix-cache "
            "--fp8-gemm-backend flashinfer_trtllm",
            f"engine=sglang model=qwen3-8b {ONE} parallel.decode.tp=1 parallel.prefill.tp=1 cache=none "
            "compute.attention=triton compute.fp8_gemm=flashinfer_trtllm",
        ),
        (
            PAIR,
            "engine=sglang model=deepseek-v3 parallel.prefill.tp=8 parallel.decode.tp=8 parallel.decode.dp=8 "
            "parallel.decode.ep=8 scheduler.memory_fraction=0.75 scheduler.decode_batch=128 scheduler.chunk=16384 "
            "cache=sglang",
        ),
    ],
    ids=["vllm", "ep", "dp", "dp attention", "sglang dp", "sglang", "triton", "sglang pair"],
)
def test_a_recipe_becomes_overrides(text, words):
    assert " ".join(translated(servers(text)).words) == words


WIRES = """
export UCX_TLS={tls}
export MC_FORCE_TCP={force}
UCX_MAX_RNDV_RAILS=4 UCX_MAX_RMA_RAILS=2 UCX_IB_GPU_DIRECT_RDMA=n vllm serve Qwen/Qwen3-8B \\
  --kv-transfer-config '{{"kv_connector":"{connector}","kv_role":"kv_producer"}}' &
vllm serve Qwen/Qwen3-8B --kv-transfer-config '{{"kv_connector":"{connector}","kv_role":"kv_consumer"}}' &
"""


@pytest.mark.parametrize(
    ("tls", "force", "connector", "found"),
    [
        ("tcp,cuda_copy", "0", "NixlConnector", {"backend=nixl_tcp", "hw.nic.rails=2", "hw.nic.gpudirect=false"}),
        ("rc_x,cuda_copy", "1", "NixlConnector", {"backend=nixl_vllm", "hw.nic.rails=2", "hw.nic.gpudirect=false"}),
        ("^cuda_ipc", "1", "MooncakeConnector", {"backend=mooncake_tcp"}),
        ("tcp", "0", "MooncakeConnector", {"backend=mooncake"}),
    ],
)
def test_variables_of_the_library_choose_the_wire(tls, force, connector, found):
    recipe = translated(servers(WIRES.format(tls=tls, force=force, connector=connector)), hw="2x8xh100")
    assert {word for word in recipe.words if word.startswith(("backend", "hw.nic"))} == found
    assert {word for _, _, word in recipe.taken if word.startswith("hw.nic")} == found - {
        word for word in found if word.startswith("backend")
    }
    compose([*recipe.words, "workload=smoke"])


def test_gpus_of_a_node_keep_nvlink_where_nodes_have_tcp():
    text = WIRES.format(tls="cuda_ipc,cuda_copy,tcp", force="0", connector="NixlConnector")
    config = compose([*translated(servers(text), hw="2x8xh100").words, "workload=smoke"])
    assert (config.backend.intra.path, config.backend.inter.path) == ("nvlink", "tcp")
    assert config.backend.inter.isolated_time(1, 1 << 30) == pytest.approx(2**30 / 2e9, rel=1e-3)


def test_cards_are_read_from_a_flag_and_addresses_change_nothing():
    text = "MC_GID_INDEX=3 python -m sglang.launch_server --model-path Qwen/Qwen3-8B --disaggregation-mode %s "
    sides = [f"{text % side} --disaggregation-ib-device mlx5_1,mlx5_3" for side in ("prefill", "decode")]
    recipe = translated(servers(" &\n".join(sides)), hw="2x8xh100")
    assert "hw.nic.devices=[1,3]" in recipe.words
    assert "MC_GID_INDEX=3" in recipe.timeless
    assert not recipe.unmodelled
    assert compose([*recipe.words, "workload=smoke"]).hw.nic.devices == (1, 3)


LMCACHE = (
    "LMCACHE_MAX_LOCAL_CPU_SIZE=18 LMCACHE_LOCAL_DISK=file:///kv LMCACHE_MAX_LOCAL_DISK_SIZE=36 "
    "LMCACHE_REMOTE_URL=lm://store vllm serve Qwen/Qwen3-8B -tp=2 --kv-transfer-config "
    """'{"kv_connector": "MultiConnector", "kv_role": "kv_%s", "kv_connector_extra_config": {"connectors": """
    """[{"kv_connector": "NixlConnector"}, {"kv_connector": "LMCacheConnectorV1"}]}}'"""
)
HICACHE = "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 2 --enable-hierarchical-cache "
TOKEN = 147_456  # bytes of Qwen3-8B's KV: 36 layers, 8 heads of 128, K and V


@pytest.mark.parametrize(
    ("text", "tiers"),
    [
        ("vllm serve Qwen/Qwen3-8B -tp=2 --kv-offloading-size 9", {"host": 9 * 2**30 // TOKEN}),
        (
            """vllm serve Qwen/Qwen3-8B --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": """
            """"kv_both", "kv_connector_extra_config": {"num_cpu_blocks": 1000}}'""",
            {"host": 16000},
        ),
        (
            f"{LMCACHE % 'producer'} &\n{LMCACHE % 'consumer'}",
            {"chunk": 256, "host": 36 * 2**30 // TOKEN, "ssd": 72 * 2**30 // TOKEN, "remote": 10**9},
        ),
        (HICACHE + "--hicache-size 9", {"host": 18 * 10**9 // TOKEN}),
        (
            f"{HICACHE}--disaggregation-mode prefill --hicache-storage-backend mooncake "
            "--hicache-write-policy write_back\npython -m sglang.launch_server --model-path Qwen/Qwen3-8B --tp 2 "
            "--disaggregation-mode decode",
            {"host_ratio": 2, "write": "back", "remote": 10**9, "prefetch": "best_effort"},
        ),
    ],
    ids=["vllm", "connector", "lmcache", "hicache", "hicache pair"],
)
def test_flags_of_offloading_become_tiers(text, tiers):
    recipe = translated(servers(text), hw="2x8xh100")
    found = dict(word.removeprefix("cache.").split("=") for word in recipe.words if word.startswith("cache."))
    assert {key: float(word) if word[0].isdigit() else word for key, word in found.items()} == tiers
    config = compose([*recipe.words, "workload=smoke"])
    what = job(config, config.experiment)
    assert what.cache.host == tiers.get("host", 2 * what.prefill_pages * what.page_size)


BRANCHES = """
if [[ "$MODEL" != /* ]]; then hf download "$MODEL"; fi
CONTEXT=""
if [ "$EVAL" = true ]; then
    CONTEXT="--context-length $LONGEST"
fi
if [[ $ISL -eq 1024 ]]; then
    python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B --max-running-requests 512 $CONTEXT > log 2>&1 &
else
    python3 -m sglang.launch_server --model-path Qwen/Qwen3-8B --max-running-requests 256 $CONTEXT > log 2>&1 &
fi
"""


def test_of_branches_the_first_that_starts_a_server_counts():
    words = translated(servers(BRANCHES)).words
    assert "scheduler.decode_batch=512" in words
    assert "experiment.engines=1" in words
    assert not [word for word in words if word.startswith("model.context")]


def test_one_server_is_one_engine_on_a_larger_machine(pdsim_prints):
    words = ["vllm serve Qwen/Qwen3-8B -tp 2", "hw=8xh100", "workload=smoke", "workload.count=2"]
    assert "poisson arrivals, 1 x TP2, vllm" in pdsim_prints("recipe", *words, "--run")
    config = compose(["hw=8xh100", "model=qwen3-8b", "parallel=tp2", *f"{ONE[:-1]}3".split()])
    with pytest.raises(ConfigError, match=r"experiment.engines=3, but the GPUs of both sides hold 2 of tp=2"):
        job(config, config.experiment)


def test_ranks_on_other_nodes_are_no_further_server():
    text = "".join(
        f"python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3-0324 --tp-size 16 --dp-size 8 "
        f"--enable-dp-attention --moe-a2a-backend deepep --node-rank {rank} --disaggregation-mode {side}\n"
        for side in ("prefill", "decode")
        for rank in (0, 1)
    )
    sizes = " ".join(f"parallel.{side}.tp=16 parallel.{side}.dp=8 parallel.{side}.ep=16" for side in SIDES)
    assert (
        " ".join(translated(servers(text)).words)
        == f"engine=sglang model=deepseek-v3 {sizes} cache=sglang compute.exchange_by=deepep backend=mooncake"
    )


def test_every_flag_is_accounted_for_and_unknown_ones_named():
    text = "vllm serve Qwen/Qwen3-8B -tp 2 --enforce-eager --port 80 --speculative-config.method=mtp"
    made = translated(servers(text), hw="8xh100")
    assert made.taken == (
        ("server", "--model Qwen/Qwen3-8B", "model=qwen3-8b"),
        ("server", "--tensor-parallel-size 2", "parallel.decode.tp=2"),
        ("server", "--enforce-eager", "compute.graph_tokens=0"),
    )
    assert (made.timeless, made.unmodelled) == (("--port 80",), ("--speculative-config method=mtp",))
    assert made.words[0] == "hw=8xh100"
    found = servers("vllm serve Qwen/Qwen3-8B --max-num-seq 64")
    with pytest.raises(ConfigError, match=r"--max-num-seq is no flag of vllm .* did you mean --max-num-seqs\?"):
        translated(found)
    assert translated(found, ignore_unknown=True).unknown == ("--max-num-seq 64",)


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ("", 512),
        ("--max-num-seqs 64", 128),
        ("--max-cudagraph-capture-size 1024", 1024),
        ("-O0", 0),
        ("--compilation-config '{\"mode\": 0}'", 0),
        ("--compilation-config.cudagraph_mode=FULL_DECODE_ONLY", 0),
    ],
)
def test_prompts_up_to_the_captured_size_have_no_launches(flags, tokens):
    words = translated(servers(f"vllm serve Qwen/Qwen3-8B {flags}")).words
    assert words[-1] == f"compute.graph_tokens={tokens}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ls -l", "no server is started here"),
        ("vllm serve m --kv-transfer-config {x", "--kv-transfer-config is not JSON"),
        ("vllm serve m --quantization 'fp8", "No closing quotation"),
        ("vllm serve -tp 2", "names no model"),
        ("vllm serve Qwen/Qwen3-8B --block-size large", "--block-size large is not a number"),
        ('vllm serve Qwen/Qwen3-8B --kv-transfer-config \'{"kv_connector":"NixlConnector"}\'', "which of them"),
        ("vllm serve Qwen/Qwen3-8B -dp 2.5", "--data-parallel-size 2.5 is not a whole number > 0; correct it"),
        ("sglang serve --model Qwen/Qwen3-8B --tp 3", "one must divide the other; choose another --tensor-par"),
        ("vllm serve m --kv-transfer-config '[1]'", "--kv-transfer-config [1] is no connector; write {"),
        (
            "LMCACHE_CHUNK_SIZE=x vllm serve Qwen/Qwen3-8B --kv-transfer-config "
            '\'{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}\'',
            "LMCACHE_CHUNK_SIZE x is not a whole",
        ),
        ("replicas: '{{ n }}'\ncommand: [vllm, serve, m]", "replicas: {{ n }} is not a whole number; write one"),
        ("vllm serve a/b\npython -m sglang.launch_server --model-path a/b", "give those of one engine"),
        ("python -m sglang.launch_server --model-path a/b --disaggregation-mode prefill", "give the command of"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        translated(servers(text))
    assert "\n" not in str(refused.value)


def test_the_command_prints_runs_and_writes(tmp_path, pdsim_prints):
    words = ["VLLM_USE_V1=1 vllm serve Qwen/Qwen3-8B -tp 2 --max-num-seqs 64", "hw=2xh200", "workload=smoke"]
    assert "written: mine.yaml" in pdsim_prints("recipe", *words, "-o", "mine.yaml", "--run")
    (kept,) = (tmp_path / "results").iterdir()
    printed = pdsim_prints("recipe", "--to", "vllm", str(kept))
    assert "--gpu-memory-utilization 0.92" in printed
    assert "--model Qwen/Qwen3-8B --served-model-name qwen3-8b" in printed
    assert [word.rpartition("=")[2] for word in translated(servers(printed)).words if "tp=" in word] == ["2", "2"]
    assert "decode_batch: 64" in pdsim_prints("run", "--config-dir", ".", "--config-name", "mine", "--cfg", "job")
    own = kept / "config.yaml"
    own.write_text(own.read_text().replace("eviction: block", "eviction: radix"))
    assert "--mem-fraction-static 0.9" in pdsim_prints("recipe", "--to", "sglang", kept)  # vLLM's is of other bytes


def test_files_that_cannot_be_read_or_written_are_refused(tmp_path, pdsim_refuses):
    (tmp_path / "image").write_bytes(b"\x89PNG")
    assert "image: 'utf-8' codec can't decode byte 0x89" in pdsim_refuses("recipe", tmp_path / "image")
    said = pdsim_refuses("recipe", "vllm serve Qwen/Qwen3-8B", "hw=1xh200", "-o", "/nowhere/mine.yaml")
    assert "/nowhere/mine.yaml: No such file or directory; name a file that can be written with" in said


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve Qwen/Qwen3-30B-A3B -tp 4 --enable-expert-parallel",
        "vllm serve Qwen/Qwen3-Next-80B-A3B-Instruct --tensor-parallel-size 4 --enable-prefix-caching",
        "python -m sglang.launch_server --model-path meta-llama/Llama-4-Scout-17B-16E-Instruct --tp 8",
    ],
    ids=["experts", "mamba", "scout"],
)
def test_a_colocated_recipe_runs(text):
    assert main(["recipe", text, "hw=8xh200", "workload=smoke", "workload.count=2", "--run"]) == 0


FILES = sorted(RECIPES.iterdir())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_public_files_are_read_as_they_are(file):
    """The comments of a file say where it is from, what it means, and which flags the model has nothing for."""
    said = dict(re.findall(r"^# (means|ignored): ?(.*)$", file.read_text(), re.MULTILINE))
    made = translated(servers(file.read_text()))
    ignored = " ".join(flag.split()[0].removeprefix("--") for flag in made.unmodelled)
    assert (" ".join(made.words), ignored) == (said["means"], said["ignored"])


@pytest.mark.parametrize("file", [FILES[0], *(pytest.param(file, marks=pytest.mark.slow) for file in FILES[1:])])
def test_public_files_run(file):
    assert main(["recipe", str(file), "hw=8xh200", "hw.nodes=4", "workload.count=2", "--run"]) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: {framework: vllm}\nb: {framework: sglang}", "the matrix has 2 entries; give the text of one"),
        ("a: {framework: trt}", "framework: trt is not read; give an entry of vllm or sglang"),
        ("a: {framework: vllm, model: a/b}", "the entry of the matrix is not whole: KeyError"),
    ],
)
def test_of_a_matrix_one_whole_entry_is_read(text, said):
    with pytest.raises(ConfigError, match=said):
        servers(text)


@pytest.mark.parametrize("start", ["vllm serve", "python -m sglang.launch_server --model-path"])
def test_engines_do_not_connect_sides_of_two_kv_types(start):
    sides = "\n".join(
        f"{start} Qwen/Qwen3-8B --disaggregation-mode {side} --kv-cache-dtype {kind}"
        for side, kind in (("prefill", "bfloat16"), ("decode", "fp8_e4m3"))
    )
    with pytest.raises(ConfigError, match="--kv-cache-dtype is bfloat16 of prefill and fp8_e4m3 of decode"):
        translated(servers(sides))
