# SPDX-License-Identifier: Apache-2.0
"""A model folder without weights, for ``--load-format dummy``: `config.json`, and a tokenizer.

vLLM's HTTP server wants the tokenizer; token *n* is the word ``tn``, so that any ids can be written out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdsim.core.errors import ConfigError
from pdsim.models.llm import Llm


def problem(model: Llm) -> str:
    """Return why *model* cannot be served with dummy weights, in one line, or nothing if it can."""
    if "architectures" in model.hf_config:
        return ""
    return (
        f"live.launch=true needs the architecture of model={model.name}, which conf/model/{model.name}.yaml "
        "does not name; add it there under hf_config, or choose a model that has it, such as model=qwen3-8b"
    )


def write(model: Llm, folder: Path) -> Path:
    """Write the folder of *model* and return it. Raise a `ConfigError` if the configuration has no `hf_config`."""
    if reason := problem(model):
        raise ConfigError(reason)
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = int(model.hf_config["vocab_size"])
    _write(folder / "config.json", _config(model))
    _write(folder / "generation_config.json", {"do_sample": False})
    _write(folder / "tokenizer.json", _tokenizer(vocabulary))
    words = {"unk_token": "t0", "bos_token": "t1", "eos_token": "t2", "pad_token": "t0"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.context, **words}
    _write(folder / "tokenizer_config.json", about)
    return folder


def _config(model: Llm) -> dict[str, Any]:
    return {
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.context,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32" if model.dtype_bytes == 4 else "bfloat16",
        **model.hf_config,
    }


def _tokenizer(vocabulary: int) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"t{n}": n for n in range(vocabulary)}, "unk_token": "t0"},
    }


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
