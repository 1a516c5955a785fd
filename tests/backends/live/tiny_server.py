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

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, CONTEXT, SLOTS = 512, 64, 2, 4, 2, 128, 2048, 4
KV = HIDDEN // HEADS * KV_HEADS
ROWS = {"attn_q": HIDDEN, "attn_k": KV, "attn_v": KV, "attn_output": HIDDEN, "ffn_gate": INNER, "ffn_up": INNER}
MATRICES = {name: (rows, HIDDEN) for name, rows in ROWS.items()} | {"ffn_down": (HIDDEN, INNER)}
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # kinds of tokens


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
    writer.add_token_types([UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)

    norms = ["output_norm", *(f"blk.{n}.{name}" for n in range(LAYERS) for name in ("attn_norm", "ffn_norm"))]
    shapes = {f"blk.{n}.{name}": shape for n in range(LAYERS) for name, shape in MATRICES.items()}
    for name, shape in {"token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN), **shapes}.items():
        writer.add_tensor(f"{name}.weight", (random.standard_normal(shape) * 0.05).astype(np.float32))
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
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
