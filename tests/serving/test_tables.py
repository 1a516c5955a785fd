"""Compact tables: curves between measured sizes, files, what ships, and forwards by them."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from omegaconf import OmegaConf

from pdsim.compute import tables
from pdsim.compute.forward import Compute, OperatorForward, forward
from pdsim.compute.kernels import Kernels, Roof
from pdsim.compute.lookup import Lookup
from pdsim.compute.tables import Curve, Grid, RangeWarning, Table
from pdsim.core.errors import ConfigError
from pdsim.hardware.machine import Machine
from pdsim.models.llm import Llm, Side
from pdsim.run import simulated
from tests.support.composed import composed

DENSE = Llm(
    name="d", parameters=1e9, active=1e9, layers=3, hidden=64, heads=4, kv_heads=2, head_dim=16,
    hf_config={"intermediate_size": 96},
)  # fmt: skip
MIXED = Llm(
    name="m", parameters=1e9, active=1e8, layers=5, hidden=64, heads=4, kv_heads=2, head_dim=16, experts=8,
    experts_per_token=2, hf_config={"moe_intermediate_size": 32},
)  # fmt: skip
ATTENTION = ("dtype", "kv_dtype", "head_dim", "window", "kv_heads")
SHIPPED = sorted(path.name.removesuffix(tables.SUFFIX) for path in tables.FOLDER.glob(f"*{tables.SUFFIX}"))


def grid(kind: str, columns: tuple[str, ...], key: tables.Key, seconds: object, **axes: list[float]) -> Grid:
    values = np.log(np.array([seconds], float))
    sizes = {name: np.array(each, float) for name, each in axes.items()}
    return Grid(kind=kind, columns=columns, keys={key: 0}, axes=sizes, values=values.astype(np.float32),
                measured=np.ones(values.shape, bool))  # fmt: skip


def table(**others: Grid) -> Table:
    """Products of 1 ms a hundred rows, prefill of 1 us a token pair, decode of 2 ms and 1 us a token of context."""
    rows = [1.0, 100.0, 10000.0]
    lengths, contexts = [1.0, 10.0, 100.0, 1000.0, 10000.0], [1.0, 128.0, 512.0, 1024.0, 2048.0, 4096.0]
    key = ("bfloat16", "bfloat16", 16, 0, 2)
    return Table("t", {}, {
        "gemm.bfloat16": grid("gemm.bfloat16", ("dtype",), ("bfloat16",),
                              [[[m * 1e-5 for m in rows] for _ in range(2)] for _ in range(2)],
                              n=[32, 256], k=[32, 256], tokens=rows),
        "prefill": grid("prefill", ATTENTION, key, [[[n * n * 1e-6 * b for n in lengths] for b in (1, 2)]],
                        heads=[4], batch=[1, 2], tokens=lengths),
        "decode": grid("decode", ATTENTION, key, [[[2e-3 + c * b * 1e-6 for c in contexts] for b in (1, 2)]],
                       heads=[4], batch=[1, 2], context=contexts),
        **others,
    })  # fmt: skip


MOE = grid("moe", ("dtype", "distribution", "hidden", "width", "top_k", "experts", "ep"),
           ("bfloat16", "balanced", 64, 32, 2, 8, 1), [1e-3, 1e-2], tokens=[1, 10])  # fmt: skip


def lookup(model: Llm = DENSE, **others: Grid) -> Lookup:
    return Lookup(table(**others), model, model.heads, model.kv_heads)


def test_a_curve_is_interpolated_and_divided_beyond_its_limit():
    curve = Curve([10, 100, 1000], [1.0, 10.0, 1000.0], 1000, "x")
    assert [curve(size) for size in (1, 10, 50, 100, 300, 1000)] == pytest.approx([1, 1, 5, 10, 90, 1000])
    alone = Curve([1, 100], [1.0, 100.0], 100, "one")
    batch = Curve([1, 10], [2.0, 20.0], 10, "two").times(2, alone.times(8))
    assert (batch(10), batch(50)) == pytest.approx((40.0, 400.0))


@pytest.mark.filterwarnings("error")
def test_beyond_its_limit_it_is_so_many_equal_calls():
    curve = Curve([1, 100], [2.0, 20.0], 100, "x", splits=True)
    assert curve(250) == pytest.approx(3 * curve(250 / 3))


@pytest.mark.parametrize(
    ("curve", "size", "seconds", "words"),
    [
        (Curve([1, 100], [2.0, 20.0], 100, "attention", growth=2.0), 300, 180.0, "attention: measured up to 100"),
        (Curve([1, 10, 100], [1.0, 2.0, 9.0], 10, "x"), 100, 20.0, "up to 10;"),  # a limit within the sizes
    ],
)
def test_what_does_not_split_is_extrapolated_with_a_warning(curve, size, seconds, words):
    with pytest.warns(RangeWarning, match=words):
        assert curve(size) == pytest.approx(seconds)


def test_a_file_gives_back_times_and_gaps(tmp_path):
    one = table(moe=MOE)
    one.grids["prefill"].measured[0, 0, 1, -1] = False
    paths = [tmp_path / f"{name}{tables.SUFFIX}" for name in ("a", "b")]
    for path in paths:
        tables.write(path, {"licence": "free"}, one.grids)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    loaded = tables.read(str(paths[0]))
    assert loaded.about == {"licence": "free"}
    for kind, given in one.grids.items():
        again = loaded.grids[kind]
        assert again.keys == given.keys
        assert again.columns == given.columns
        assert np.abs(again.values - given.values).max() <= tables.STEP / 2 + 1e-5
        assert (again.measured == given.measured).all()
        assert {name: list(sizes) for name, sizes in again.axes.items()} == {
            name: list(sizes) for name, sizes in given.axes.items()
        }


def test_tables_and_operators_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match=r"compute\.kernels\.table=h1000: .*choose one of .*h100_vllm"):
        tables.read("h1000")
    with pytest.raises(ConfigError, match=r"compute\.kernels\.table=t has no allreduce, but gemm"):
        lookup().allreduce(10, 2)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_table_says_its_source_and_never_falls(name):
    loaded = tables.read(name)
    assert loaded.about["licence"] == "Apache-2.0"
    assert loaded.about["source"].startswith("aiconfigurator-core 0.12.0, systems/data/")
    assert set(loaded.about["kinds"]) == set(loaded.grids)
    for kind, each in loaded.grids.items():
        by = [axis for axis in ("batch", "tokens", "context", "elements") if axis in each.axes]
        assert by
        for axis in by:
            falls = np.diff(each.values, axis=1 + list(each.axes).index(axis))
            assert falls.min(initial=0.0) >= -1.01 * tables.STEP, (kind, axis)


def test_shipped_tables_are_small_and_named_by_choices():
    assert sum(tables.path_of(name).stat().st_size for name in SHIPPED) <= 3e6
    for name in SHIPPED:
        file = OmegaConf.load(tables.FOLDER / f"{name}.yaml")
        assert file.kernels.table == name
        assert file.kernels.gpu == tables.read(name).about["gpu"]


def test_products_and_prompts_beyond_a_size_are_put_together():
    table = lookup()
    assert table.gemm(100, 128, 64, dtype="bf16") == pytest.approx(1e-3)
    assert table.gemm(100, 1000, 64, dtype="bf16") == pytest.approx(4e-3)
    table = lookup()
    assert table.prefill([(0, 1000)]) == pytest.approx(1.0)
    assert table.prefill([(0, 300), (0, 400)]) == pytest.approx(0.25)
    assert table.prefill([(900, 100)]) == pytest.approx(1.0 - 0.81)
    assert table.prefill([(0, 100)] * 4) == pytest.approx(0.04)


def test_a_decode_step_is_a_line_in_the_context():
    constant, slope = lookup().decode(2)
    assert constant == pytest.approx(2e-3, rel=1e-3)
    assert slope == pytest.approx(1e-6, rel=1e-3)
    assert lookup().decode(4)[0] == pytest.approx(4e-3, rel=1e-3)  # more sequences than measured: in two parts


@pytest.mark.parametrize("name", ["h100_vllm", "h200_sglang_table", "b200_vllm"])
@pytest.mark.parametrize("batch", [160, 200, 256, 400])
def test_batches_measured_at_short_contexts_read_as_fast(name, batch):
    lookup = Lookup(tables.read(name), composed("model=qwen3-8b").model, 32, 8)
    (constant, slope), (_, usual) = lookup.decode(batch), lookup.decode(64)
    assert 0.7 * usual < slope < 1.15 * usual  # of a token: memory is busy
    assert constant > 0.0


def test_other_shapes_and_widths_warn_and_scale():
    model = Llm(**{**vars(MIXED), "hidden": 128})
    assert lookup(MIXED, moe=MOE).experts(10, 32) == pytest.approx(1e-2)
    with pytest.warns(RangeWarning, match=r"counts as .*, the nearest measured, times 2\.00"):
        assert lookup(model, moe=MOE).experts(10, 32) == pytest.approx(2e-2)
    far = Llm(**{**vars(MIXED), "hidden": 8192})
    with pytest.raises(ConfigError, match="no experts like those of model=m"):
        lookup(far, moe=MOE).experts(10, 32)
    model = Llm(**{**vars(DENSE), "head_dim": 24})
    with pytest.warns(RangeWarning, match="4 heads of 24, 2 KV heads in bfloat16 count as 4 of 16, .* times 1.50"):
        lookup(model).prefill([(0, 10)])


def test_drawn_tokens_of_a_step_hit_fewer_experts():
    balanced = lookup(MIXED, moe=MOE)
    one = replace(balanced, imbalance="drawn")
    hit = 1 - (1 - 2 / 8) ** 4  # the share of eight experts that four balanced tokens hit
    assert one.experts(4, 32, step=True) == pytest.approx(hit * balanced.experts(4, 32))
    assert one.experts(1, 32, step=True) == pytest.approx(balanced.experts(1, 32))
    assert one.experts(4, 32) == pytest.approx(balanced.experts(4, 32))


def test_whole_experts_take_what_the_busiest_rank_does():
    whole = replace(MOE, keys={("bfloat16", "balanced", 64, 32, 2, 8, 4): 0})
    both = replace(MOE, keys=MOE.keys | dict.fromkeys(whole.keys, 1), values=np.concatenate([MOE.values] * 2),
                   measured=np.concatenate([MOE.measured] * 2))  # fmt: skip
    both.values[1] += np.log(3.0)
    assert lookup(MIXED, moe=both).experts(10, 8, ranks=4) == pytest.approx(3e-2)
    with pytest.warns(RangeWarning, match="the nearest measured"):  # of a table without such rows: each in parts
        assert lookup(MIXED, moe=MOE).experts(10, 8, ranks=4) == pytest.approx(0.25e-2)


@pytest.mark.parametrize("name", ["h200_vllm", "h200_sglang_table", "h200_trtllm"])
@pytest.mark.parametrize("width", [64, 128, 192, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 1), (32, 32), (32, 8)])
@pytest.mark.filterwarnings("ignore::pdsim.compute.tables.RangeWarning")
def test_no_shipped_attention_exceeds_the_gpu(name, width, heads, kv_heads):
    gpu = composed("hw=8xh200").hw.gpu
    model = Llm(**{**vars(DENSE), "head_dim": width, "heads": heads, "kv_heads": kv_heads})
    one = Lookup(tables.read(name), model, heads, kv_heads)
    flops, token = 2.0 * heads * width * 8192**2, 4.0 * kv_heads * width
    assert 0.2 < flops / one.prefill([(0, 8192)]) / gpu.compute < 1.0
    assert 0.3 < token / one.decode(16)[1] / gpu.memory_rate < 1.0


LONG = "workload=poisson", "workload.input_mean=40000", "workload.count=2", "scheduler.chunk=1024"


def test_each_run_hears_once_of_what_is_extrapolated(monkeypatch):
    heard, message = [], warnings.WarningMessage

    def hear(*parts):
        heard.append(str(parts[0]))
        return message(*parts)

    monkeypatch.setattr(warnings, "WarningMessage", hear)
    for _ in range(2):
        heard.clear()
        simulated(composed("hw=8xh200", *LONG))
        assert any("measured up to" in each for each in heard)
        assert len(heard) == len(set(heard))


def test_forwards_by_tables_are_sums_of_operators(monkeypatch):
    machine: Machine = composed("hw=8xh100").hw
    monkeypatch.setattr(tables, "read", lambda name: table())
    kernels = Kernels(gpu="H100", table="t", norm=Roof(launch=1e-3))
    one = forward(DENSE, machine, Compute(kernels=kernels, overhead=0.0), Side(tp=1, instances=1))
    assert isinstance(one, OperatorForward)
    # four products of a layer, two norms, and attention
    assert one.prefill([(0, 64)]) == pytest.approx(3 * (4 * 64e-5 + 2e-3 + 4.096e-3))
    assert one.prefill([(0, 100)]) == pytest.approx(3 * (4e-3 + 2e-3 + 1e-2), rel=2e-5)  # between two sizes
    assert one.step(2) == pytest.approx(3 * (4 * 2e-5 + 2e-3 + 2e-3), rel=1e-3)
    assert one.context_of(2) == pytest.approx(3e-6, rel=1e-3)
    assert one.context == pytest.approx(3e-6, rel=1e-2)
    assert one.sequence == 0.0


def test_a_step_hides_shared_experts_and_reduced_norms():
    config = composed("hw=8xb200", "model=deepseek-v3", "compute=b200_sglang")
    alone = replace(config.model, hf_config={**config.model.hf_config, "n_shared_experts": 0})
    normless = replace(config.compute, kernels=replace(config.compute.kernels, norm=None))

    def both(model: Llm, compute: Compute, tp: int) -> list[float]:
        one = forward(model, config.hw, compute, Side(tp=tp, instances=1))
        return [one.step(8), one.prefill([(0, 16384)])]

    step, prompt = both(config.model, config.compute, 8)
    assert both(alone, config.compute, 8)[0] == pytest.approx(step)
    assert both(alone, config.compute, 8)[1] < prompt  # no CUDA graph, one stream
    # only the two norms of latent attention stay beside what is reduced; one rank reduces nothing
    saved = [both(config.model, compute, tp)[0] for tp in (8, 1) for compute in (config.compute, normless)]
    assert 2 * (saved[0] - saved[1]) < saved[2] - saved[3]


@pytest.mark.parametrize(("block", "expected"), [(1.5e-5, 1.5e-5), (3e-5, 1e-5)])
def test_block_scaled_products_count_unless_measured_with_their_launches(block, expected):
    def products(dtype: str, seconds: float) -> Grid:
        sizes = {"n": [32, 256], "k": [32, 256], "tokens": [1.0, 100.0]}
        return grid(f"gemm.{dtype}", ("dtype",), (dtype,), np.full((2, 2, 2), seconds), **sizes)

    both = {f"gemm.{dtype}": products(dtype, seconds) for dtype, seconds in (("fp8_block", block), ("fp8", 1e-5))}
    assert Lookup(table(**both), DENSE, 4, 2).gemm(1, 64, 64, dtype="fp8") == pytest.approx(expected)


def test_attention_nobody_measured_at_these_heads_counts_as_its_neighbour():
    known = table().grid("prefill")
    lengths, (key,) = known.axes["tokens"], known.keys
    both = replace(
        known,
        keys={key: 0, ("bfloat16", "fp8", *key[2:]): 1},
        values=np.concatenate([known.values, known.values + 9]),
        measured=np.concatenate([known.measured, np.broadcast_to(lengths == 1.0, known.measured.shape)]),
    )
    one = Lookup(table(prefill=both), replace(DENSE, dtype_bytes=1), 4, 2)
    with pytest.warns(RangeWarning, match="bfloat16, the nearest measured"):
        assert one.prefill([(0, 100)]) == pytest.approx(1e-2)


def test_products_of_8_bits_lack_only_the_search_for_scales():
    narrow = replace(DENSE, dtype_bytes=1)
    with_launches, without = (Lookup(tables.read(name), narrow, 4, 2) for name in ("h200_vllm", "h200_sglang_table"))
    searched = with_launches.table.curve("quantize", ("scale", "fp8"), "tokens", width=4096)
    assert with_launches.quantize(1, 4096) == pytest.approx(searched(1))
    assert without.quantize(1, 4096) == 0.0
    converted = with_launches.table.curve("quantize", ("static", "fp8"), "tokens", width=4096)
    assert replace(with_launches, fused=True, _curves={}).quantize(1, 4096) == pytest.approx(-converted(1))
