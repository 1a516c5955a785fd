"""Published operator tables: read by path, interpolated in logarithms, summed over the layers of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pdsim.compute.operators import FILES, read
from pdsim.compute.shapes import LayerShape
from pdsim.core.errors import ConfigError
from pdsim.models.llm import Llm

DENSE = Llm(name="d", parameters=1e9, active=1e9, layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16)
MIXED = Llm(
    name="m", parameters=1e9, active=1e8, layers=5, hidden=64, heads=4, kv_heads=2, head_dim=16, experts=8,
    experts_per_token=2,
)  # fmt: skip


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    path = folder / FILES[name].format(engine="sglang", version="0.5.10")
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tables in which every product of 10 rows takes 1 ms and of 1,000 rows 100, and attention 2 and 3 ms."""
    shapes = [(128, 64), (64, 64), (192, 64), (64, 96)]
    gemm = [
        {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": m / 10} for n, k in shapes for m in (10, 1000)
    ]
    write(tmp_path, "gemm", gemm)
    heads = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "num_heads": 4, "num_key_value_heads": 2}
    heads |= {"head_dim": 16}
    write(tmp_path, "prefill", [heads | {"batch_size": 1, "isl": n, "step": 0, "latency": 2.0} for n in (10, 1000)])
    write(tmp_path, "decode", [heads | {"batch_size": 10, "isl": 1, "step": n, "latency": 3.0} for n in (1, 1000)])
    moe = {"moe_dtype": "bfloat16", "hidden_size": 64, "inter_size": 32, "topk": 2, "num_experts": 8}
    moe |= {"moe_tp_size": 1, "moe_ep_size": 1, "distribution": "balanced"}
    write(tmp_path, "moe", [moe | {"num_tokens": n, "latency": 7.0} for n in (1, 1000)])
    return tmp_path


def test_a_forward_is_the_sum_of_its_layers_operators(folder: Path):
    loaded = read(folder)
    # four products of a layer: queries, keys and values; output; both of the MLP
    shape = LayerShape(intermediate=96)
    assert loaded.step(DENSE, shape, 10, 500, 1) == pytest.approx(3 * (3e-3 + 4 * 1e-3))
    assert loaded.forward(DENSE, shape, 1000, 1) == pytest.approx(3 * (2e-3 + 4 * 100e-3))


def test_layers_with_experts_have_those_instead_of_the_dense_products(folder: Path):
    shape = LayerShape(intermediate=96, dense=1, expert=32)
    assert read(folder).step(MIXED, shape, 10, 500, 1) == pytest.approx(5 * (3e-3 + 2e-3) + 1 * 2e-3 + 4 * 7e-3)


def test_between_sizes_it_interpolates_in_logarithms_and_beyond_in_proportion(folder: Path):
    loaded = read(folder)
    assert loaded.gemm(100, 128, 64, "bfloat16") == pytest.approx(10e-3)
    assert loaded.gemm(2000, 128, 64, "bfloat16") == pytest.approx(200e-3)
    assert loaded.gemm(10, 256, 64, "bfloat16") == pytest.approx(4e-3 / 3)  # the nearest shape has 192 columns


def test_what_was_not_measured_is_said(folder: Path):
    with pytest.raises(ConfigError, match="no table of allreduce was read"):
        read(folder).allreduce(10, 64, 2)
    with pytest.raises(ConfigError, match="has no row with gemm_dtype=int4"):
        read(folder).gemm(10, 128, 64, "int4")
    with pytest.raises(ConfigError, match="name a folder of systems/data"):
        read(folder / "nowhere")
