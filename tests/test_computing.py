"""``compute=auto`` takes the file that fits GPU, engine and model, and says why."""

from hashlib import sha256

import pytest

from pdsim.compute import published, tables
from pdsim.compute.forward import forward
from pdsim.config import presets
from pdsim.config.compose import CommandLine, compose, composed
from pdsim.core.errors import ConfigError

PAIR = "hw=2xh200", "parallel=tp1"
COLOCATED = "experiment=serve", "experiment.deployment=colocated"
OPERATORS = (*COLOCATED, "compute=operators"), (*COLOCATED, "compute=h100_vllm")


@pytest.mark.parametrize(
    ("words", "name", "why"),
    [
        (("model=qwen3-8b", "engine=vllm26"), "h200_fa3", "pdsim's own measurement of qwen3-8b, engine=vllm, on"),
        (("model=qwen3-8b", "engine=sglang"), "h200_triton", "pdsim's own measurement of qwen3-8b, engine=sglang"),
        (("model=qwen3-8b", "engine=generic"), "h200_torch", "pdsim's own measurement of qwen3-8b, engine=generic"),
        ((*COLOCATED, "model=qwen3-8b", "engine=vllm"), "h200_vllm", "published operators of vllm on H200, table"),
        (("model=qwen3-32b", "engine=vllm"), "h200_vllm", "published operators of vllm on H200, table of SHA-256 "),
        (("hw=8xb200",), "b200_sglang", "published operators of sglang on B200, table of SHA-256 "),
        (
            ("hw=8xh20", "model=qwen3-32b"),
            "roofline",
            "sglang with qwen3-32b was not measured on H20; by a roofline TTFT, TPOT and output of MI300X",
        ),
        (("hw=loopback",), "roofline", "without a GPU compute is emulated"),
    ],
)
def test_auto_takes_the_first_that_fits(words, name, why):
    compute = compose([*PAIR, *words]).compute
    assert compute.name == name
    assert compute.chosen.startswith(why)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["hw=2x8xh200", "model=deepseek-v3", "parallel=tp8"], "latent attention"),
        (["compute=roofline"], "compute=roofline, a roofline"),
    ],
)
def test_triton_without_times_of_it_warns(words, what):
    config = compose([*PAIR, *words, "compute.attention=triton"])
    assert f"warning: compute.attention=triton has no effect on {what}" in presets.notes(config)


def test_products_of_flashinfer_bound_those_of_the_table():
    words = ["hw=8xb200", "parallel=tp8", "engine=sglang", "model=deepseek-v3", "experiment.deployment=colocated"]
    table, bound = (
        forward(config.model, config.hw, config.compute, config.parallel.prefill)
        for config in (compose([*words, *more]) for more in ([], ["compute.fp8_gemm=flashinfer_trtllm"]))
    )
    assert bound.gemm(2048, 24576, 7168, "fp8") == pytest.approx(2 * 2048 * 24576 * 7168 / 440e12)
    assert bound.gemm(2048, 24576, 7168, "fp8") > 4 * table.gemm(2048, 24576, 7168, "fp8")
    for few, dtype in ((1, "fp8"), (2048, "bf16")):
        assert bound.gemm(few, 2112, 7168, dtype) == table.gemm(few, 2112, 7168, dtype)
    config = compose([*PAIR, "compute=roofline", "compute.fp8_gemm=flashinfer_trtllm"])
    assert "warning: compute.fp8_gemm=flashinfer_trtllm has no effect on roofline, not a table" in presets.notes(
        config
    )


def test_triton_takes_a_table_that_has_it():
    words = ["hw=4xh100", "parallel=tp1", "engine=sglang", "model=qwen3-8b", "compute.attention=triton"]
    compute = compose(words).compute
    assert (compute.name, compute.attention) == ("h100_sglang", "triton")


def test_operators_are_looked_up_in_the_whole_tables():
    pytest.importorskip("aiconfigurator_core")  # pip install 'pdsim[operators]'
    whole, thin = (compose(["hw=1xh100", "model=qwen3-8b", "engine=vllm", *words]) for words in OPERATORS)
    assert whole.compute.kernels.table == "aiconfigurator/h100_sxm/vllm/0.24.0"
    assert whole.compute.kernels.norm == thin.compute.kernels.norm
    times = [
        [one.prefill([(0, 3000)]), one.step(64), one.context_of(64)]
        for config in (whole, thin)
        for one in [forward(config.model, config.hw, config.compute, config.parallel.decode)]
    ]
    assert times[0] == pytest.approx(times[1], rel=0.1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("hw=1xh100", "engine=vllm"), "compute=operators needs aiconfigurator-core"),
        (("hw=8xh20", "engine=vllm"), "compute=operators has no tables of engine=vllm on hw=8xh20; set"),
    ],
)
def test_operators_that_nobody_has_are_refused(words, says, monkeypatch):
    monkeypatch.setattr(published, "installed", lambda _: None)
    with pytest.raises(ConfigError, match=says):
        compose([*words, "model=qwen3-8b", *COLOCATED, "compute=operators"])


def test_auto_keeps_keys_and_minds_the_type_of_weights():
    by_hand = "compute.overhead=1ms", "compute.kernels.imbalance=balanced"
    compute = compose([*PAIR, "model=qwen3-32b", *by_hand]).compute
    assert (compute.name, compute.overhead) == ("h200_sglang_table", 1e-3)
    assert compute.kernels.table == "h200_sglang_table"
    words = [*PAIR, "engine=vllm", "model=qwen3-8b"]
    assert compose(words).compute.name == "h200_fa3"
    assert compose([*words, "model.dtype_bytes=1"]).compute.name == "h200_vllm"


def test_a_profile_on_the_configuration_path_comes_first(tmp_path):
    (tmp_path / "compute").mkdir()
    own = "gpu: H200\nmeasured_of: [qwen3-8b]\nflops_share: 0.5\nsource: 'measured: here'\n"
    (tmp_path / "compute" / "mine.yaml").write_text(own)
    for model, name in (("qwen3-8b", "mine"), ("llama-3.1-8b", "h200_triton")):
        words = (*PAIR, f"model={model}")
        assert composed(CommandLine(words=words, folder=str(tmp_path))).compute.name == name


def test_a_profile_that_lacks_operators_is_named(tmp_path):
    (tmp_path / "compute").mkdir()
    own = "kernels:\n  gpu: H200\n  norm:\n    launch: 2us\nsource: 'measured: here'\n"
    (tmp_path / "compute" / "mine.yaml").write_text(own)
    words = (*PAIR, "model=qwen3-32b", "engine=vllm")
    config = composed(CommandLine(words=words, folder=str(tmp_path)))
    assert config.compute.name == "h200_vllm"
    lacks = "; not your own profile mine: compute.kernels has no decode, which model=qwen3-32b needs"
    assert config.compute.chosen.endswith(lacks)
    assert presets._compute_notes(config)[0].startswith("warning: compute=h200_vllm: published operators")


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        (("model=qwen3-8b", "compute=h200_fa3"), []),
        (("compute=roofline",), []),
        (("model=qwen3-8b", "compute=h100_torch"), ["h100_torch was measured on H100, not on H200"]),
        (("model=qwen3-32b", "compute=h200"), ["h200 was measured of qwen3-8b, not of qwen3-32b"]),
    ],
)
def test_a_compute_that_does_not_fit_warns(words, notes):
    expected = [f"warning: compute={note}; try compute=auto" for note in notes]
    assert list(presets.notes(compose([*PAIR, *words]))) == expected


def test_list_compute_says_what_auto_takes_why_and_errors(pdsim_says):
    status, out, _ = pdsim_says("list", "compute", "hw=2xh200", "parallel=tp1", "model=qwen3-32b", "engine=vllm")
    seal = sha256(tables.path_of("h200_vllm").read_bytes()).hexdigest()[:12]
    taken, errors = out.splitlines()[-2:]
    why = f"published operators of vllm on H200, table of SHA-256 {seal}"
    assert (status, taken) == (0, f"hw=2xh200 model=qwen3-32b engine=vllm takes compute=h200_vllm: {why}")
    assert errors.startswith("its source and errors: published: aiconfigurator-core")
    assert "median and p95 of the error in % of those held out" in errors
    line = pdsim_says("list", "compute", "hw=8xh20", "compute=h200")[1].splitlines()[-2]
    assert line.endswith("takes compute=h200: it was named")
