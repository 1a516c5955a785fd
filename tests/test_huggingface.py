# SPDX-License-Identifier: Apache-2.0
"""Models from a ``config.json``: of a folder, of the Hub's cache, of a server like the Hub."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pdsim.config import build
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.models.huggingface import SHAPE, expanded, find, read
from pdsim.models.llm import Llm
from tests.support.composed import composed

QWEN3 = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "max_position_embeddings": 40960, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
MOE = QWEN3 | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "intermediate_size": 18432, "vocab_size": 129280, "max_position_embeddings": 163840, "torch_dtype": "bfloat16",
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
NEXT = MOE | {
    "model_type": "qwen3_next", "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "max_position_embeddings": 262144,
    "shared_expert_intermediate_size": 512, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}  # fmt: skip


def saved(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def model(folder, config):
    return build(Llm, read(saved(folder, config) / "config.json", "some/Model"), "model")


@pytest.mark.parametrize(
    ("config", "name"),
    [(QWEN3, "qwen3-8b"), (MOE, "qwen3-30b-a3b"), (DEEPSEEK, "deepseek-v3"), (NEXT, "qwen3-next-80b-a3b")],
    ids=["dense", "experts", "latent", "hybrid"],
)
def test_a_file_gives_what_the_shipped_model_says(tmp_path, config, name):
    found, shipped = model(tmp_path, config), composed(f"model={name}").model
    known = [key for key in vars(shipped) if key not in ("name", "parameters", "active", "hf_config", "sources")]
    known.remove("kv_dtype")  # which engines leave in the type of activations
    assert [getattr(found, key) for key in known] == [getattr(shipped, key) for key in known]
    rounded = shipped.parameters, shipped.active  # by the card
    assert (found.parameters, found.active) == pytest.approx(rounded, rel=0.03, abs=9e8)


@pytest.mark.parametrize(
    ("quantization", "types"),
    [
        ({}, (2, "", "")),
        ({"quant_method": "fp8"}, (1, "", "bf16")),
        ({"quant_algo": "FP8", "kv_cache_scheme": "FP8"}, (1, "", "fp8_e4m3")),
        ({"quant_method": "mxfp4"}, (2, "mxfp4", "bf16")),
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, (2, "nvfp4", "fp8_e4m3")),
        ({"quant_method": "compressed-tensors", "weights": {"num_bits": 4}}, (2, "int4", "bf16")),
    ],
)
def test_types_are_those_of_the_quantization(tmp_path, quantization, types):
    found = model(tmp_path, QWEN3 | {"quantization_config": quantization})
    assert (found.dtype_bytes, found.mlp_dtype, found.kv_dtype) == types
    assert found.sources["dtype_bytes"].startswith("published")


def test_types_are_those_of_the_file_and_of_modelopt(tmp_path):
    assert model(tmp_path, QWEN3 | {"torch_dtype": "float32"}).dtype_bytes == 4
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"kv_cache_quant_algo": "FP8"}}')
    assert model(tmp_path, QWEN3).element == "fp8_e4m3"


@pytest.mark.parametrize(
    ("config", "pattern", "window"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 18, "sliding_window": 128}, "wa", 128),
        ({"model_type": "gemma3_text", "sliding_window": 512}, "wwwwwa", 512),
        ({"sliding_window_pattern": "LLLG", "sliding_window": 512, "max_position_embeddings": None}, "wwwa", 512),
        ({"sliding_window": 4096}, "w", 4096),
        ({"sliding_window": 4096, "use_sliding_window": False}, "a", 0),
    ],
)
def test_layers_attend_as_the_file_says(tmp_path, config, pattern, window):
    hybrid = model(tmp_path, QWEN3 | config).hybrid
    assert (hybrid.pattern, hybrid.window) == (pattern, window)


def test_an_unknown_type_is_assumed(tmp_path):
    mine = model(tmp_path, QWEN3 | {"model_type": "mine"})
    assert mine.sources[SHAPE].startswith("assumed: config.json of some/Model")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "qwen3"}, "lacks hidden_size, num_hidden_layers, num_attention_heads, vocab_size"),
        (QWEN3 | {"hybrid_override_pattern": "M*"}, "means layers of mamba or of an MLP alone"),
        (QWEN3 | {"model_type": "xlm-roberta", "architectures": None}, "xlm-roberta in .* is no decoder"),
        (
            QWEN3 | {"architectures": ["Qwen3ForSequenceClassification"]},
            "Qwen3ForSequenceClassification in .* no dec",
        ),
        (QWEN3 | {"is_encoder_decoder": True}, "is_encoder_decoder in .* is no decoder"),
        (QWEN3 | {"layer_types": ["mamba"] * 36}, "layers of mamba are not modelled"),
        ([], "has no keys"),
        ({"text_config": 5}, "text_config in .* has no keys"),
        (QWEN3 | {"num_hidden_layers": -1}, "num_hidden_layers must be a whole number from 1 to 10000, got -1"),
        (QWEN3 | {"head_dim": [64, 128]}, r"head_dim must be a whole number from 0 to 2147483648, got \[64, 128\]"),
        (QWEN3 | {"layer_types": "full"}, "layer_types must be a list, got 'full'; correct it in"),
        (QWEN3 | {"full_attention_interval": 4}, "lacks linear_num_key_heads; add it"),
        (QWEN3 | {"layer_types": [{}]}, "has a value of a type that transformers never writes"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, config, said):
    with pytest.raises(ConfigError, match=said):
        model(tmp_path, config)


def test_keys_of_ones_own_win(tmp_path):
    config = compose([f"model={saved(tmp_path, QWEN3)}", "model.layers=4", "hw=2xh200", "parallel=tp1"])
    assert (config.model.layers, config.model.hidden) == (4, 4096)


def test_a_missing_file_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"model=hf needs model.id=ORGANISATION/NAME, or model.path=FOLDER"):
        expanded({"id": "", "path": ""})
    with pytest.raises(ConfigError, match="name a folder with"):
        compose([f"model={tmp_path}/none", "hw=2xh200"])


def test_the_hubs_cache_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--some--Model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("abc")
    (folder / "snapshots/abc").mkdir(parents=True)
    saved(folder / "snapshots/abc", QWEN3)
    assert find("some/Model") == folder / "snapshots/abc/config.json"
    assert compose(["model=some/Model", "hw=2xh200", "parallel=tp1"]).model.name == "model"


class Hub(BaseHTTPRequestHandler):
    """Answers as huggingface.co does, for one model."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self):  # the name http.server asks for
        self.answer(b"")

    def do_GET(self):
        self.answer(json.dumps(QWEN3).encode())

    def answer(self, body):
        known = self.path == "/some/Model/resolve/main/config.json"
        self.send_response(200 if known else 404)
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("ETag", '"1"')
        if not known:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(json.dumps(QWEN3))) if known else "0")
        self.end_headers()
        self.wfile.write(body if known else b"")

    def log_message(self, *_):
        pass


def test_a_model_is_downloaded_from_a_hub(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        assert read(find("some/Model"), "some/Model")["layers"] == 36
        with pytest.raises(ConfigError, match="could not be downloaded"):
            find("some/Other")
        server.shutdown()
