"""Compact tables made of published ones: sizes left out, errors of rows held out, and the command."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pdsim.calibration.compaction import compact
from pdsim.cli.profile import profile
from pdsim.compute import published, tables
from pdsim.compute.published import Kind, tables_of
from pdsim.core.errors import ConfigError

KIND = Kind("x", (), ("dtype",), ("n", "tokens"), lambda table: table, ("tokens",))


def rows(seconds: Any) -> dict[str, Any]:
    """Return columns of two types, over widths and tokens, of *seconds* of both."""
    n, tokens = np.meshgrid([32, 64, 128, 256], [2**power for power in range(16)], indexing="ij")
    times = seconds(n, tokens).ravel()
    dtype, both = np.repeat(["a", "b"], len(times)), np.concatenate([times, 3 * times])
    return {"dtype": dtype, "n": np.tile(n.ravel(), 2), "tokens": np.tile(tokens.ravel(), 2), "seconds": both}


def by_size(n: Any, tokens: Any) -> Any:
    return n * tokens * 1e-6


def test_lines_are_left_out_and_bends_are_kept():
    grid, summary = compact(KIND, rows(by_size))
    assert {name: list(sizes) for name, sizes in grid.axes.items()} == {"n": [32, 256], "tokens": [1, 2**15]}
    assert (summary.rows, summary.kept) == (128, 8)
    assert summary.p95 < 1e-6
    assert grid.values[1, 1, 1] == pytest.approx(np.log(3 * 256 * 2**15 * 1e-6))
    grid, summary = compact(KIND, rows(lambda n, tokens: np.maximum(1e-5, n * tokens * 1e-7)))
    assert len(grid.axes["tokens"]) > 2
    assert 0 < summary.held < 64
    assert summary.p95 < 0.15


def test_times_never_fall_with_tokens():
    wave = rows(lambda n, tokens: n * 1e-6 * (1 + 0.3 * (np.log2(tokens) % 2)))
    grid, _ = compact(KIND, wave)
    assert np.diff(grid.values, axis=2).min() >= -1e-6


def test_gaps_are_filled_and_marked():
    columns = rows(by_size)
    there = ~((columns["tokens"] == 2**15) & (columns["n"] == 256) & (columns["dtype"] == "a"))
    grid, _ = compact(KIND, {name: values[there] for name, values in columns.items()})
    assert grid.measured.sum() == grid.measured.size - 1
    assert not grid.measured[0, -1, -1]
    assert np.isfinite(grid.values).all()


def test_a_disturbed_row_is_not_fitted_to_and_counted():
    columns = rows(by_size)
    columns["seconds"][[7, 20, 43, 72, 93, 106]] *= 4.0
    grid, summary = compact(replace(KIND, noisy=True), columns)
    assert list(grid.axes["tokens"]) == [1, 2**15]
    assert summary.disturbed > 0.0
    assert summary.quiet < 0.01


@pytest.fixture
def folder(tmp_path):
    """Tables of products and attention of version 2.0, and of an all-reduce of 1.5, the last one before."""
    path = tmp_path / "data" / "gpu"
    files = {kind.name: kind.files[0] for kind in published.KINDS}

    def write(name: str, version: str, table: list[dict[str, Any]]) -> None:
        file = path / files[name].format(engine="vllm", version=version)
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(table), file)

    gemm = [
        {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": m * n * k * 1e-9, "kernel_source": "x"}
        for m in (1, 4, 16, 17, 64, 256) for n in (32, 64, 4096) for k in (32, 4096)
    ]  # fmt: skip
    write("gemm", "2.0", gemm)
    heads = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "head_dim": 128, "num_heads": 32}
    heads |= {"num_key_value_heads": 8, "window_size": 0}
    for name, tokens in (("prefill", True), ("decode", False)):
        write(name, "2.0", [
            heads | {"batch_size": batch, "latency": batch * n / 1e3} | (
                {"isl": n, "step": 0} if tokens else {"isl": 1, "step": n - 1}
            )
            for batch in (1, 8, 64) for n in (1, 64, 4096)
        ])  # fmt: skip
    for version in ("1.5", "1.4", "2.1"):
        write("allreduce", version, [
            {"num_gpus": 2, "message_size": size, "latency": size * 1e-6, "kernel_source": f"k_{kind}",
             "backend": kind} for size in (128, 4096) for kind in ("vllm_graph", "vllm_eager")
        ])  # fmt: skip
    return path


def test_a_file_that_lacks_is_taken_from_the_version_before(folder):
    found = {kind.name: (version, columns) for kind, version, columns in tables_of(folder, "vllm", "2.0")}
    assert {name: version for name, (version, _) in found.items()} == {
        "gemm.bfloat16": "2.0", "prefill": "2.0", "decode": "2.0", "allreduce": "1.5",
    }  # fmt: skip
    assert 17 not in found["gemm.bfloat16"][1]["tokens"]
    assert len(found["allreduce"][1]["seconds"]) == 2  # of a graph
    assert set(found["decode"][1]["context"].tolist()) == {1, 64, 4096}


def test_the_command_writes_a_table_and_a_choice(folder, tmp_path, capsys):
    words = ["hw=8xh100", "--from", str(folder), "--tables", "vllm:2.0", "--compact", "h200_torch", "--name", "mine"]
    assert profile([*words, "--to", str(tmp_path / "compute")]) == 0
    path = tmp_path / "compute" / f"mine{tables.SUFFIX}"
    loaded = tables.read(str(path))
    assert loaded.about["source"] == "aiconfigurator-core, systems/data/gpu"
    assert str(folder) not in loaded.about["command"]
    assert loaded.about["kinds"]["gemm.bfloat16"]["rows"] == 30
    text = (tmp_path / "compute" / "mine.yaml").read_text()
    assert f"  table: {path}\n" in text
    assert "  norm:\n    launch: 1.512us\n" in text
    assert "gemm.bfloat16" in capsys.readouterr().out


def test_tables_that_are_not_there_are_refused(folder):
    with pytest.raises(ConfigError, match="--compact needs --from DIR"):
        profile(["hw=8xh100", "--compact", "h200_torch"])
    with pytest.raises(ConfigError, match=r"gemm_perf\.parquet is not a file; name a folder of systems/data"):
        list(tables_of(folder, "sglang", "2.0"))
    with pytest.raises(ConfigError, match="--from h900_sxm: no such file"):
        profile(["hw=8xh100", "--from", "h900_sxm", "--compact", "h200_torch"])


def test_installed_tables_are_found_by_the_name_of_a_gpu(tmp_path):
    pytest.importorskip("aiconfigurator_core")  # pip install 'pdsim[operators]'
    words = ["hw=8xl40s", "--from", "l40s", "--tables", "vllm:0.24.0", "--compact", "h200_torch", "--name", "mine"]
    assert profile([*words, "--to", str(tmp_path)]) == 0
    assert "systems/data/l40s" in (tmp_path / "mine.yaml").read_text()
