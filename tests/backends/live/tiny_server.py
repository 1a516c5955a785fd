"""llama.cpp's HTTP server on a model of random weights, made on the spot: ``tiny_server.py FOLDER PORT [KEY]``."""

import os
import sys
import time
from pathlib import Path

try:  # absent where the tests are skipped
    import gguf
    import xllamacpp
except ImportError:
    gguf = xllamacpp = None
import numpy as np

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, CONTEXT = 512, 64, 2, 4, 2, 128, 2048
SLOTS = 4
KINDS = {"normal": 1, "unknown": 2, "control": 3, "byte": 6}


def write(path: Path) -> None:
    """Write a llama of random weights, half a MB, whose vocabulary is bytes and the words t0, t1 and so on."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    tokens = [b"<unk>", b"<s>", b"</s>", *(f"<0x{byte:02X}>".encode() for byte in range(256))]
    words = [f"▁t{number}".encode() for number in range(VOCABULARY - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + words)
    writer.add_token_scores([-1000.0] * len(tokens) + [-float(number) for number in range(len(words))])
    kinds = [KINDS["unknown"], KINDS["control"], KINDS["control"], *[KINDS["byte"]] * 256]
    writer.add_token_types(kinds + [KINDS["normal"]] * len(words))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)

    def tensor(name, *shape):
        writer.add_tensor(name, (random.standard_normal(shape) * 0.05).astype(np.float32))

    def ones(name):
        writer.add_tensor(name, np.ones(HIDDEN, np.float32))

    tensor("token_embd.weight", VOCABULARY, HIDDEN)
    ones("output_norm.weight")
    tensor("output.weight", VOCABULARY, HIDDEN)
    kv = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        ones(f"{at}attn_norm.weight")
        ones(f"{at}ffn_norm.weight")
        tensor(f"{at}attn_q.weight", HIDDEN, HIDDEN)
        tensor(f"{at}attn_k.weight", kv, HIDDEN)
        tensor(f"{at}attn_v.weight", kv, HIDDEN)
        tensor(f"{at}attn_output.weight", HIDDEN, HIDDEN)
        tensor(f"{at}ffn_gate.weight", INNER, HIDDEN)
        tensor(f"{at}ffn_up.weight", INNER, HIDDEN)
        tensor(f"{at}ffn_down.weight", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(folder: str, port: str, key: str = "") -> None:
    """Serve until killed, or until the process that started this one has ended."""
    parent = os.getppid()
    model = Path(folder) / "tiny.gguf"
    write(model)
    settings = xllamacpp.CommonParams()
    settings.model.path = str(model)
    settings.hostnames = ["127.0.0.1"]
    settings.port = int(port)
    settings.n_ctx = CONTEXT * SLOTS
    settings.n_parallel = SLOTS
    settings.n_gpu_layers = 0
    settings.cpuparams.n_threads = 1
    settings.warmup = False
    settings.endpoint_metrics = True
    settings.api_keys = [key] if key else []
    server = xllamacpp.Server(settings)
    print("listening on", server.listening_address, flush=True)  # noqa: T201
    while os.getppid() == parent:
        time.sleep(1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
