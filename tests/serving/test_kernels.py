"""Forwards by operators: the sum that docs/model.md names, and fits that find again what rows were made of."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from backends.profiling.inventory import Subject, plan
from pdsim.calibration import compaction
from pdsim.calibration import kernels as fit
from pdsim.calibration.kernels import fit_roof, row_seconds
from pdsim.compute.forward import PIECE_LAUNCH, OperatorForward, between_nodes, captured, forward_time, peaks
from pdsim.compute.kernels import AllReduce, Correction, Kernels, Peaks, Roof
from pdsim.compute.shapes import layer_shape, products
from pdsim.config.compose import compose
from pdsim.core import files
from pdsim.core.errors import ConfigError
from pdsim.core.files import data
from pdsim.models.llm import Llm
from pdsim.results.evidence import gather

PEAKS = Peaks(flops=1e15, narrow=2e15, memory=4e12)
DENSE = Llm(
    name="dense", parameters=1e9, active=1e9, layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16,
    hf_config={"intermediate_size": 96},
)  # fmt: skip
ONE = Roof(launch=1e-6, memory_share=1.0)
KERNELS = Kernels(
    gpu="H", gemm=replace(ONE, flops_share=1.0), prefill=Roof(launch=2e-6, flops_share=0.5), decode=ONE, norm=ONE,
    activation=ONE, rotary=ONE,
)  # fmt: skip


def whole(**changes: object) -> OperatorForward:
    """A forward of `DENSE` with 256 bytes of keys and values a token."""
    given = {"model": DENSE, "kernels": KERNELS, "peaks": PEAKS, "kv_bytes": 256.0} | changes
    return OperatorForward(**given)


def test_a_step_is_the_sum_of_operators_and_context():
    products = [(128, 64), (64, 64), (192, 64), (64, 96)]
    gemm = sum(1e-6 + 2 * 3 * n * k / 1e15 + 2 * (3 * k + n * k + 3 * n) / 4e12 for n, k in products)
    norms = 2 * (1e-6 + 2 * 3 * 4 * 64 / 4e12)
    rest = 2e-6 + 2 * 3 * (3 * 96 + 2 * 8 * 16) / 4e12
    assert whole().step(3) == pytest.approx(2 * (gemm + norms + rest + 1e-6))
    assert whole().context == pytest.approx(256 / 4e12)
    assert whole().sequence == 0.0


SPLITTING = Roof(launch=1e-6, merge=2e-6, flops_share=0.25, memory_share=1.0, blend=21.0, tile=128, walk=1e-9)


def test_decode_attention_splits_sequences_while_few_tiles_fill_the_gpu():
    """1.6 tiles a multiprocessor are not split: 160 of 100 multiprocessors, 80 sequences with two KV heads.

    These take two turns of all multiprocessors, as 200 tiles would.
    """
    some = whole(kernels=replace(KERNELS, decode=SPLITTING), peaks=replace(PEAKS, processors=100))
    keys = 2 * 2 * 16 / 0.25e15  # FLOPs of a row, 16 wide, with a key and a value
    for sequences, rows in ((79, 2 * 64), (80, 200 / 80 * 128), (100, 2 * 128), (101, 300 / 101 * 128)):
        assert some.context_of(sequences) == pytest.approx(2 * keys * rows, rel=0.03)  # and a little of the bytes
    assert some.context == max(some.context_of(sequences) for sequences in range(1, 400))
    assert some.sequence == 2 * 1e-9
    plain = whole(peaks=replace(PEAKS, processors=100))
    assert some.step(79) - plain.step(79) == pytest.approx(2 * 2e-6)
    assert some.step(80) - plain.step(80) == pytest.approx(0.0)


PREFILLS = {"triton_prefill": Roof(launch=3e-6, flops_share=0.25), "triton_prefix": Roof(flops_share=0.125)}
TRITON = replace(KERNELS, triton_decode=Roof(launch=4e-6, memory_share=0.5, walk=5e-9), **PREFILLS)


def test_triton_walks_and_pads_to_the_longest_sequence():
    other, triton = whole(kernels=TRITON), whole(kernels=TRITON, triton=True)
    assert triton.step(1) - other.step(1) == pytest.approx(2 * 3e-6)
    assert triton.sequence == pytest.approx(2 * 5e-9)
    assert triton.context_of(1) == pytest.approx(256 / 2e12)
    time, pair = whole(kernels=TRITON, triton=True), 4 * 4 * 16 / 1e15  # seconds of a pair of tokens at the peak
    own = 100 * 101 / 2 + 10 * 11 / 2 + 90 * 10
    assert time._attention([(0, 100), (0, 10)]) == pytest.approx(3e-6 + own * pair / 0.25)
    beyond = time._attention([(7, 100), (50, 10)]) - time._attention([(0, 100), (0, 10)])
    assert beyond == pytest.approx(100 * 57 * pair / 0.125)


def test_pieces_of_a_batch_share_their_turns():
    tiles = Roof(launch=1e-6, merge=3e-6, tile=128, walk=1e-12)
    time = whole(kernels=replace(KERNELS, prefill=tiles), peaks=replace(PEAKS, processors=100))
    alone = time.prefill([(0, 128)])
    both = time.prefill([(0, 128), (0, 128)])
    linear = time._linear(256, 2, absorbed=False) - time._linear(128, 1, absorbed=False)
    assert both - alone == pytest.approx(linear)
    chunk = time.prefill([(1000, 128)]) - alone
    assert chunk == pytest.approx(2 * (3e-6 + 1000 * 32 * 1e-12))


def test_decode_batches_are_padded_to_the_next_graph():
    assert [captured(batch) for batch in (1, 2, 3, 5, 8, 9, 17)] == [1, 2, 4, 8, 8, 16, 24]
    assert [captured(batch, twelve=True) for batch in (2, 4, 5, 9, 12, 13)] == [2, 4, 8, 12, 12, 16]


def test_sums_across_nodes_go_over_the_cards():
    config = compose(["hw=2x8xh200", "model=qwen3-32b", "hw.nodes=4"])
    machine, model, rate = config.hw, config.model, config.hw.nic.rate * config.hw.nic.count
    assert between_nodes(machine, 8) == (0.0, 0.0)
    assert between_nodes(machine, 16) == (pytest.approx(1e-5), pytest.approx(1 / rate))
    assert between_nodes(machine, 32) == (pytest.approx(2e-5), pytest.approx(1.5 / rate))
    within, across = (
        forward_time(model, machine, config.compute, replace(config.parallel.decode, tp=tp)) for tp in (8, 16)
    )
    assert across.allreduce - within.allreduce == pytest.approx(2 * model.layers * 1e-5)
    more = 2 * model.layers * model.hidden * model.dtype_bytes / rate
    assert across.token_allreduce - within.token_allreduce == pytest.approx(more)
    pair = replace(KERNELS, allreduce={"2": AllReduce(latency=1e-5, rate=1e11)})
    near = whole(kernels=pair, tp=4, node=2)
    far = whole(kernels=pair, tp=4, node=2, between={4: (2e-5, 1e-9)})
    assert far.step(8) - near.step(8) == pytest.approx(2 * 2 * (2e-5 + 2 * 8 * 64 * 1e-9))


def test_experts_and_8_bits_launch_more_kernels():
    mixed = replace(DENSE, experts=8, experts_per_token=2, hf_config={"moe_intermediate_size": 32})
    slow = replace(KERNELS, layer_launch=1.0, mixed_launch=3.0, experts=ONE, routing=ONE)
    assert whole(kernels=slow, model=mixed).prefill([(0, 10)]) == 6.0
    assert whole(kernels=replace(slow, mixed_launch=0.0), model=mixed).prefill([(0, 10)]) == 2.0
    assert whole(kernels=replace(slow, prompt_host=0.5), model=mixed, launch_factor=2.0).prefill([(0, 10)]) == 13.0
    graphs = whole(kernels=replace(slow, prompt_host=0.5), model=mixed, graph_tokens=10)
    assert graphs.prefill([(0, 10)]) == 0.5 + 2 * PIECE_LAUNCH  # of two layers, experts among them
    assert graphs.prefill([(0, 11)]) > 1.0
    slow, narrow = replace(KERNELS, layer_launch=1.0, scale_launch=0.25), replace(DENSE, dtype_bytes=1)
    assert whole(kernels=slow).prefill([(0, 10)]) == 2.0
    assert whole(kernels=slow, model=narrow).prefill([(0, 10)]) == 4.0  # 2 layers of 4 products each
    assert whole(kernels=slow, model=narrow, graph_tokens=1).prefill([(0, 10)]) == 2.0  # torch.compile fuses it
    assert whole(kernels=replace(slow, fused_saving=0.125), model=narrow, graph_tokens=1).prefill([(0, 10)]) == 1.0


def test_torch_compile_leaves_rotary_two_kernels():
    apart = replace(KERNELS, rotary=replace(ONE, launch=5e-6))
    assert whole(kernels=apart).step(1) - whole(kernels=apart, graph_tokens=1).step(1) == pytest.approx(2 * 3e-6)
    assert whole(kernels=apart, graph_tokens=1, twelve=True).step(1) == whole(kernels=apart).step(1)  # SGLang


def test_tuned_experts_have_a_roof_of_their_own():
    mixed = replace(DENSE, experts=8, experts_per_token=2, hf_config={"moe_intermediate_size": 32})
    slow = replace(KERNELS, experts=ONE, experts_tuned=replace(ONE, launch=5e-6), routing=ONE)
    usual = whole(kernels=slow, model=mixed).experts(10, 8, 32)
    tuned = whole(kernels=replace(slow, tuned=("8x32",)), model=mixed).experts(10, 8, 32)
    assert tuned - usual == pytest.approx(4e-6)


def test_a_chunk_attends_to_earlier_tokens_or_waits_for_launches():
    later, first = whole().prefill([(100, 10)]), whole().prefill([(0, 10)])
    assert later - first == pytest.approx(2 * 4 * 16 * 4 * 1000 / 0.5e15)
    slow = replace(KERNELS, layer_launch=1.0)
    assert whole(kernels=slow).prefill([(0, 10)]) == 2.0
    assert whole(kernels=slow).prefill([(0, 10)], 0, 0.5) == 1.5  # and began half a second ago
    assert whole(kernels=slow).launching(10) == 2.0
    assert whole(kernels=slow).step(1) == whole().step(1)


def test_all_reduces_are_scaled_from_those_that_were_measured():
    pair = replace(KERNELS, allreduce={"2": AllReduce(latency=1e-5, rate=1e11)})
    assert pair.ring(2) == AllReduce(latency=1e-5, rate=1e11)
    assert pair.ring(4).latency == pytest.approx(2e-5)
    assert pair.ring(4).rate == pytest.approx(1e11 * 0.5 / 0.75)
    with pytest.raises(ValueError, match="measure one on several GPUs"):
        KERNELS.ring(2)


def test_operators_and_rows_that_lack_times_are_refused():
    latent = replace(DENSE, attention="mla", latent_dim=24, rope_dim=8)
    with pytest.raises(ValueError, match="has no mla_decode, which model=dense needs"):
        whole(model=latent)
    with pytest.raises(ConfigError, match="row 1 of the profile"):
        fit.rows_of([{"operator": "gemm", "seconds": "x", "low": "1", "high": "1"}])
    with pytest.raises(ConfigError, match="too few rows"):
        fit.fit([row for row in made() if row["operator"] != "gemm"], PEAKS)


def test_widths_come_from_the_configuration_or_from_the_parameters():
    assert layer_shape(DENSE).intermediate == 96
    assert layer_shape(replace(DENSE, hf_config={}, active=2 * (3 * 64 * 100 + 64 * 16 * 12))).intermediate == 100
    mixed = replace(DENSE, experts=8, experts_per_token=2, parameters=2e6, active=2e6 - 2 * 6 * 3 * 64 * 32)
    assert layer_shape(mixed).expert == 32
    assert [each.name for each in products(mixed, 1)] == ["qkv", "out", "router"]


def test_a_fit_finds_the_kernels_that_rows_were_made_with():
    rows = made()
    fitted = fit.fit(rows, PEAKS, "H")
    held = [one for one in fitted.errors if "fitted to" not in one.what]
    assert {"gemm, held out", "decode, held out", "step of dense tp1, graph"} <= {one.what for one in held}
    assert max(one.median for one in held) < 0.01


def test_a_fit_finds_the_tiles_that_rows_were_made_with():
    peaks = replace(PEAKS, processors=132)
    given = Roof(launch=6e-6, merge=9e-6, flops_share=0.9, blend=3.0, tile=128, walk=4e-11)
    sizes = {"operator": "prefill", "head_dim": 128, "value_dim": 128}
    sizes |= dict.fromkeys(("kv_heads", "seconds", "low", "high"), 1)
    texts = [
        {key: str(value) for key, value in (sizes | {"heads": heads, "tokens": tokens, "context": context}).items()}
        for heads, tokens in ((8, 128), (8, 1024), (32, 2048), (32, 8192))
        for context in (0, 1024, 8192)
    ]
    rows = [{"kernel": "", "dtype": "bf16", **row} for row in fit.rows_of(texts)]
    made = [{**row, "seconds": row_seconds(given, row, peaks)} for row in rows]
    roof = fit_roof("prefill", made, peaks)
    assert (roof.tile, roof.merge) == (128, pytest.approx(9e-6, rel=0.01))
    assert roof.walk == pytest.approx(4e-11, rel=0.02)


def test_every_second_size_is_held_out():
    fitted, held = fit.split(made())
    sizes = [sorted({row["tokens"] for row in part if row["operator"] == "norm"}) for part in (fitted, held)]
    assert sizes == [[1, 4, 64], [2, 16, 256]]
    assert not {row["operator"] for row in (*fitted, *held)} & {"step", "forward", "launch"}


def test_a_shape_that_was_measured_is_corrected():
    curve = Correction(tokens=(1, 4, 16), factor=(1.0, 2.0, 8.0))
    assert [curve.at(tokens) for tokens in (1, 2, 4, 8, 64)] == pytest.approx([1.0, 2**0.5, 2.0, 4.0, 8.0])
    plain, own = whole(), whole(kernels=replace(KERNELS, shapes={"64x64": curve}))
    assert own.gemm(4, 64, 64, "bf16") == 2 * plain.gemm(4, 64, 64, "bf16")
    assert own.gemm(4, 64, 96, "bf16") == plain.gemm(4, 64, 96, "bf16")


def test_published_tables_are_rows(tmp_path):
    gemm = {"gemm_dtype": "bfloat16", "m": 16, "n": 512, "k": 1024, "latency": 2.0}
    moe = {"moe_dtype": "fp8_block", "num_tokens": 4, "topk": 2, "num_experts": 64, "inter_size": 512}
    moe |= {"moe_tp_size": 8, "moe_ep_size": 1, "hidden_size": 64, "distribution": "balanced", "latency": 1.0}
    for name, rows in (("gemm", [gemm, gemm]), ("moe", [moe])):
        path = tmp_path / name / "vllm" / "1.0" / f"{name}_perf.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
    first, _, experts = compaction.published(tmp_path, "vllm", "1.0")
    assert (first["operator"], first["tokens"], first["n"], first["seconds"]) == ("gemm", 16, 512, 2e-3)
    assert (experts["hit"], experts["width"], experts["dtype"]) == (8, 64, "fp8")
    with pytest.raises(ConfigError, match=r"gemm_perf\.parquet is not a file; name a folder of systems/data"):
        list(compaction.published(tmp_path, "vllm", "2.0"))


def test_the_shipped_profile_says_what_was_measured():
    config = compose(["hw=2xh200", "model=qwen3-8b", "parallel=tp1", "compute=h200_torch", "experiment=serve"])
    _, texts = files.table(data("compute", "h200_torch.csv.gz"), "")
    steps = [row for row in fit.rows_of(texts) if row["operator"] == "step" and row["mode"] == "graph"]
    kernels, gpu = config.compute.kernels, peaks(config.hw)
    apart = [abs(timed(kernels, row, gpu) / row["seconds"] - 1) for row in steps if row["model"] == "qwen3-8b"]
    assert len(apart) == 18
    assert np.median(apart) < 0.05
    assert gather(config, serving=True)["compute"].startswith("measured: 2 x NVIDIA H200")


def test_another_day_is_foreseen():
    """Sizes, shapes and a whole decoder that nothing was fitted to, on an H200 of another day."""
    config = compose(["hw=2xh200", "model=qwen3-8b", "parallel=tp1", "compute=h200_torch", "experiment=serve"])
    kernels, gpu = replace(config.compute.kernels, layer_launch=0.0, mixed_launch=0.0), peaks(config.hw)
    _, texts = files.table(data("compute", "h200_second.csv.gz"), "")
    apart: dict[str, list[float]] = {}
    for row in fit.rows_of(texts):
        if row["model"] == "again":
            continue
        apart.setdefault(row["model"], []).append(abs(timed(kernels, row, gpu) / row["seconds"] - 1))
    top = {"step": 0.04, "split": 0.06, "decode": 0.05, "prefill": 0.05, "gemm": 0.07, "experts": 0.08} | {
        "norm": 0.11
    }
    assert {part: float(np.median(apart[part])) < bound for part, bound in top.items()} == dict.fromkeys(top, True)


def made() -> list[fit.Row]:
    """The rows that a profile of `DENSE` would have on a GPU of exactly these kernels."""
    rows = []
    for case in plan([Subject(DENSE)], 1e12, small=True):
        text = {key: str(value) for key, value in case.items()} | dict.fromkeys(("seconds", "low", "high"), "1")
        (row,) = fit.rows_of([{"kernel": "", "mode": "", "dtype": "bf16", "model": "", **text}])
        rows.append({**row, "seconds": 1e-6 if case["operator"] == "launch" else timed(KERNELS, row, PEAKS)})
    return rows


def timed(kernels: Kernels, row: fit.Row, gpu: Peaks) -> float:
    """The seconds of a row of a profile by *kernels*."""
    if row["operator"] == "step":
        time = fit.forward_of(kernels, row, gpu)
        return time.step(row["batch"]) + time.context_of(row["batch"]) * row["batch"] * row["context"]
    if row["operator"] == "forward":
        return fit.forward_of(kernels, row, gpu).prefill([(row["context"], row["tokens"])])
    name = f"gemm{'_fp8' * (row['dtype'] == 'fp8')}" if row["operator"] == "gemm" else row["operator"]
    return row_seconds(getattr(kernels, name), row, gpu)
