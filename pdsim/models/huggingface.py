# SPDX-License-Identifier: Apache-2.0
"""A model from its ``config.json``: `find` the file of a folder or of a name on the Hugging Face Hub, `read` it.

Parameters are counted from the widths: of the checkpoints in ``conf/model`` within 2 % of what their cards say.
"""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pdsim.core import files, plugins
from pdsim.core.errors import ConfigError, near

SHIPPED = {"deepseek-r1": "deepseek-v3", "deepseek-v3.1": "deepseek-v3", "deepseek-v3.2": "deepseek-v3.2-exp"}
"""Models of one shape with a file in ``conf/model``."""

UNREAD = {
    "hybrid_override_pattern": "layers of mamba or of an MLP alone",
    "layers_block_type": "layers of mamba or of an MLP alone",
    "mamba_d_state": "layers of mamba beside attention",
    "linear_attn_config": "linear attention of Kimi's kind",
    "compress_ratios": "compressed attention",
    "num_kv_shared_layers": "layers that share keys and values",
    "global_head_dim": "heads of two widths",
    "hybrid_layer_pattern": "heads of two widths",
    "block_configs": "layers of unlike widths",
}
"""Keys of models that `Llm` has no fields for, and what they mean."""

LAYERS = {
    "full_attention": "a",
    "chunked_attention": "a",
    "deepseek_sparse_attention": "a",
    "sliding_attention": "w",
    "linear_attention": "m",
}
"""Kinds of ``layer_types``, as letters of `Hybrid.pattern`."""

SHAPE = (
    "layers, hidden, heads, kv_heads, head_dim, latent_dim, rope_dim, experts, experts_per_token, expert_groups, "
    "groups_per_token, dense_layers, context, hybrid"
)
"""The numbers that the file itself has."""

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_NUMBERS = re.compile(
    r"hidden_size|\w*intermediate_size(_mlp)?|vocab_size|num_(hidden_layers|\w+_heads|experts\w*|local_experts)"
    r"|n_(routed_experts|shared_experts|group)|topk_group|experts_per_token|first_k_dense_replace|\w*head_dim"
    r"|(kv|q)_lora_rank|max_position_embeddings|sliding_window|full_attention_interval|linear_\w+|index_n_heads"
)
_CONTEXT = 131_072  # of a file that names none
_MOST = {"num_hidden_layers": 10_000}
_KINDS = {"layer_types": list, "mlp_only_layers": list}

ENCODERS = re.compile(
    r"[\w-]*bert[\w-]*|electra|mpnet|xlm[\w-]*|xlnet|t5|clip\w*|siglip\w*|vit\w*"  # model_type
    r"|\w+For(MaskedLM|PreTraining|SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice)"
)
"""Values of ``model_type`` and ``architectures`` of models that generate no tokens, unless ``is_decoder``."""

READ = re.compile(
    r"llama4?|mi[sx]tral|qwen[23].*|deepseek_v[23]\w*|kimi_k2\w*|glm\w*|minimax_m2|gpt_oss|gemma[23]\w*|phi3"
)
"""Values of ``model_type`` whose files were read and counted; others are taken to be like them."""


def expanded(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return *values*, those of ``model`` as composed, with what their ``path`` or ``id`` names.

    Other keys in *values* win.  Raise a `ConfigError` if there is no such file or the model cannot be read.
    """
    own = {key: value for key, value in values.items() if key not in ("id", "path")}
    where = str(values.get("path") or values.get("id") or "")
    if not where:
        raise ConfigError("model=hf needs model.id=ORGANISATION/NAME, or model.path=FOLDER with a config.json")
    path = Path(where).expanduser() if values.get("path") else find(where)
    return {**read(path / "config.json" if path.is_dir() else path, where), **own}


def find(name: str) -> Path:
    """Return the ``config.json`` of *name*, ORGANISATION/NAME: of the Hub's cache, or downloaded into it.

    Downloading takes huggingface_hub.  Raise a `ConfigError` if neither has the file.
    """
    import socket  # here, for most runs name no such model
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{name.replace('/', '--')}"
    revision = cache / "refs/main"
    if revision.is_file():
        path = cache / "snapshots" / revision.read_text(encoding="utf-8").strip() / "config.json"
        if path.is_file():
            return path
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        from huggingface_hub import hf_hub_download

        if not getproxies():  # the library itself would try for half a minute
            socket.getaddrinfo(urlsplit(endpoint).hostname, None)
        path = Path(hf_hub_download(name, "config.json", cache_dir=cache.parent, endpoint=endpoint))
        if "quantization_config" not in path.read_text(encoding="utf-8"):
            with suppress(Exception):  # most models have none
                hf_hub_download(name, "hf_quant_config.json", cache_dir=cache.parent, endpoint=endpoint)
        return path
    except ImportError:
        why = "huggingface_hub is not installed (pip install 'pdsim[hf]')"
    except socket.gaierror:
        why = f"{endpoint} is not reachable"
    except Exception as error:  # of many libraries below it
        why = str(error).strip().split("\n")[0]
    shipped = near(name.rpartition("/")[2].lower(), plugins.options("model"), "model={}")
    raise ConfigError(
        f"model={name}: {cache} has no config.json, and it could not be downloaded: {why}; {shipped}save the file "
        "in a folder and set model=./FOLDER"
    )


def read(path: Path, name: str = "") -> dict[str, Any]:
    """Return what the configuration key ``model`` takes, from the ``config.json`` *path* of the model *name*.

    The name becomes the last part of *name*, in lower case.  A file ``hf_quant_config.json`` beside it counts too.
    Raise a `ConfigError` for a file that is not there or not such a one, and for a model that is not modelled.
    """
    name = name or str(path.parent)
    outer = _content(path, name)
    own = outer.get("text_config") or outer
    if not isinstance(own, dict):
        raise ConfigError(f"model={name}: text_config in {path} has no keys; name the file of a language model")
    beside = path.with_name("hf_quant_config.json")
    quantised = (
        outer.get("quantization_config")
        or own.get("quantization_config")
        or (_content(beside, name) if beside.is_file() else None)
    )
    said = {key: value for key, value in own.items() if value is not None}
    own = {**said, "model_type": str(said.get("model_type", "")), "quantization_config": quantised}
    if unread := [key for key in UNREAD if own.get(key)]:
        raise ConfigError(
            f"model={name}: {unread[0]} in {path} means {UNREAD[unread[0]]}, which are not modelled; describe "
            "the nearest model in a file of your own: DIR/model/NAME.yaml, --config-dir DIR model=NAME"
        )
    built = own.get("architectures")
    kinds = [own["model_type"], *(map(str, built) if isinstance(built, list) else ())]
    encoder = next(filter(ENCODERS.fullmatch, kinds), "is_encoder_decoder" if own.get("is_encoder_decoder") else "")
    if encoder and not own.get("is_decoder"):
        raise ConfigError(
            f"model={name}: {encoder} in {path} is no decoder, which alone is modelled; name the file of a model "
            "that generates tokens from its own KV cache"
        )
    if lacking := [key for key in _NEEDED if key not in own]:
        raise ConfigError(f"model={name}: {path} lacks {', '.join(lacking)}; name the file of a language model")
    for key, value in own.items():
        least, most = int(key in _NEEDED), _MOST.get(key, 1 << 31)
        if (kind := _KINDS.get(key)) and not isinstance(value, kind):
            raise ConfigError(
                f"model={name}: {key} must be a {kind.__name__}, got {value!r:.60}; correct it in {path}"
            )
        if _NUMBERS.fullmatch(key) and not (type(value) is int and least <= value <= most):
            rule = f"must be a whole number from {least} to {most}"
            raise ConfigError(f"model={name}: {key} {rule}, got {value!r:.60}; correct it in {path}")
    try:
        return _values(own, name)
    except KeyError as error:
        raise ConfigError(f"model={name}: {path} lacks {error.args[0]}; add it") from None
    except TypeError:
        raise ConfigError(f"model={name}: {path} has a value of a type that transformers never writes") from None


def _values(own: Mapping[str, Any], name: str) -> dict[str, Any]:
    widths = _experts(own)
    size, mlp, kv_dtype = _types(own)
    latent = own.get("kv_lora_rank")
    heads = own["num_attention_heads"]
    values = {
        "name": re.sub(r"[^a-z0-9.-]+", "-", Path(name).resolve().name.lower() if "/" in name else name.lower()),
        "layers": own["num_hidden_layers"],
        "hidden": own["hidden_size"],
        "heads": heads,
        "kv_heads": heads if latent else own.get("num_key_value_heads") or heads,
        "head_dim": own["v_head_dim"] if latent else own.get("head_dim") or own["hidden_size"] // heads,
        "dtype_bytes": size,
        "mlp_dtype": mlp,
        "kv_dtype": kv_dtype,
        "context": own.get("max_position_embeddings", _CONTEXT),
        "hybrid": _hybrid(own, name),
        **widths,
    }
    if latent:
        rope = own["qk_rope_head_dim"]
        values |= {"attention": "mla", "rope_dim": rope, "latent_dim": latent + rope}
    shape = {key: own[key] for key in ("n_shared_experts", "first_k_dense_replace") if own.get(key)}
    if widths:
        expert = own.get("moe_intermediate_size") or own["intermediate_size"]
        shared = own.get("shared_expert_intermediate_size", own.get("shared_intermediate_size", 0))
        shared = expert if own["model_type"].startswith("llama4") else shared  # which its file does not say
        shape |= {"moe_intermediate_size": expert, "first_k_dense_replace": widths["dense_layers"]}
        shape.setdefault("n_shared_experts", round((shared or 0) / expert))
        shape["intermediate_size"] = own.get("intermediate_size_mlp") or own.get("intermediate_size") or 0
    config = {key: value for key, value in own.items() if value is not None} | shape
    total, active = _parameters(values, config)
    source = f"published: config.json of {name}"
    if not READ.fullmatch(own["model_type"]):
        source = f"assumed: config.json of {name}, whose model_type={own['model_type']} is taken to be like others"
    values |= {
        "parameters": total,
        "active": active,
        "hf_config": config,
        "source": {
            SHAPE: source,
            "parameters, active": f"{source}, counted",
            "dtype_bytes": "published: dtype and quantization_config of config.json",
        },
    }
    return values


def _content(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.text(path))
    except OSError as error:
        raise ConfigError(
            f"model={name}: {path} cannot be read: {error.strerror}; name a folder with a config.json"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model={name}: {path} is not JSON: {error}; name a folder with a config.json") from None
    if not isinstance(content, dict):
        raise ConfigError(f"model={name}: {path} has no keys; name the config.json of a language model")
    return content


def _experts(own: Mapping[str, Any]) -> dict[str, int]:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = next((own[name] for name in names if own.get(name)), 0)
    if not experts:
        return {}
    dense = own.get("first_k_dense_replace") or len(own.get("mlp_only_layers") or ())
    every = own.get("interleave_moe_layer_step") or own.get("decoder_sparse_step") or own.get("moe_layer_freq") or 1
    if isinstance(every, int) and every > 1:
        dense = own["num_hidden_layers"] - own["num_hidden_layers"] // every
    groups = own.get("n_group") or 0
    return {
        "experts": experts,
        "experts_per_token": own.get("num_experts_per_tok") or own.get("experts_per_token") or 1,
        "expert_groups": groups if groups > 1 else 0,
        "groups_per_token": own.get("topk_group", 0) if groups > 1 else 0,
        "dense_layers": dense,
    }


def _types(own: Mapping[str, Any]) -> tuple[int, str, str]:
    # Bytes of a weight, the type of those of experts and MLPs where it has 4 bits, and the type of a KV element.
    kept = {"float32": (4, "fp32"), "float16": (2, "fp16")}.get(
        str(own.get("torch_dtype") or own.get("dtype")), (2, "bf16")
    )
    quantised = own.get("quantization_config") or {}
    text = json.dumps(quantised).lower()
    if not quantised:
        return kept[0], "", ""
    narrow = re.search(r'"kv_cache_(quant_algo|scheme)": ("fp8|{[^}]*"num_bits": 8)', text)
    kv = "fp8_e4m3" if narrow else kept[1]
    if not any(word in text for word in ("fp4", "awq", "gptq", '"num_bits": 4', '"bits": 4')):
        return 1, "", kv
    own_type = "mxfp4" if "mxfp4" in text else "nvfp4" if "fp4" in text else "int4"
    return kept[0], own_type, kv


def _hybrid(own: Mapping[str, Any], name: str) -> dict[str, Any]:
    layers = own["num_hidden_layers"]
    window = (own.get("sliding_window") or 0) if own.get("use_sliding_window", True) else 0
    window = window if window < own.get("max_position_embeddings", _CONTEXT) else 0
    kinds = own.get("layer_types")
    if not kinds:
        linear = own.get("full_attention_interval")
        mixed = own.get("sliding_window_pattern") or {"gemma2": 2, "gemma3_text": 6}.get(own["model_type"])
        mixed = len(mixed) if isinstance(mixed, str) else mixed  # EXAONE's LLLG
        every, rest = (linear, "linear_attention") if linear else (mixed or layers + 1, "sliding_attention")
        rest = rest if linear or window else "full_attention"
        kinds = ["full_attention" if (n + 1) % every == 0 else rest for n in range(layers)]
    if other := sorted(set(kinds) - set(LAYERS)):
        raise ConfigError(f"model={name}: layers of {other[0]} are not modelled; there are {', '.join(LAYERS)}")
    letters = "".join(LAYERS[kind] for kind in kinds)
    period = next(n for n in range(1, layers + 1) if (letters[:n] * layers)[:layers] == letters)
    shape: dict[str, Any] = {"pattern": letters[:period]}
    if "w" in letters:
        shape["window"] = window
    if "m" in letters:
        keys = own["linear_num_key_heads"] * own["linear_key_head_dim"]
        shape |= {
            "conv_groups": [keys, keys, own["linear_num_value_heads"] * own["linear_value_head_dim"]],
            "conv_width": own["linear_conv_kernel_dim"] - 1,
            "ssm_heads": own["linear_num_value_heads"],
            "ssm_head_elements": own["linear_key_head_dim"] * own["linear_value_head_dim"],
        }
    if index := own.get("index_head_dim"):
        # a key in FP8 with a scale of four bytes for each 128, as SGLang keeps it
        shape["index_bytes"] = index + 4 * -(-index // 128)
    return shape


def _parameters(values: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, int]:
    hidden, heads, width = values["hidden"], values["heads"], values["head_dim"]
    hybrid, layers = values["hybrid"], values["layers"]
    if values.get("attention") == "mla":
        query = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        rank, kept = config.get("q_lora_rank") or 0, config["kv_lora_rank"]
        attention = (hidden * rank + rank * heads * query) if rank else hidden * heads * query
        attention += hidden * values["latent_dim"] + kept * heads * (config["qk_nope_head_dim"] + width)
        attention += heads * width * hidden
        if index := config.get("index_head_dim"):
            attention += rank * config["index_n_heads"] * index + hidden * (index + config["index_n_heads"])
    else:
        gated = config.get("attn_output_gate") or config.get("model_type") == "qwen3_next"
        attention = hidden * width * (heads * (3 if gated else 2) + 2 * values["kv_heads"])
    total = layers * attention
    if "ssm_heads" in hybrid:
        keys, _, kept = hybrid["conv_groups"]
        linear = hidden * (2 * keys + 2 * kept + 2 * hybrid["ssm_heads"]) + kept * hidden
        pattern = (hybrid["pattern"] * layers)[:layers]
        total += pattern.count("m") * (linear - attention)
    dense = values.get("dense_layers", 0) if "experts" in values else layers
    total += dense * 3 * hidden * config["intermediate_size"]
    total += (
        config["vocab_size"]
        * hidden
        * (1 if config.get("tie_word_embeddings", "gemma" in config["model_type"]) else 2)
    )
    if "experts" not in values:
        return total, total
    expert = 3 * hidden * config["moe_intermediate_size"]
    mixed = layers - dense
    total += mixed * (hidden * values["experts"] + expert * config["n_shared_experts"])
    return total + mixed * expert * values["experts"], total + mixed * expert * values["experts_per_token"]
