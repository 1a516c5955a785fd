"""Every file under conf/ can be run, says what it is, and says of each of its numbers where it comes from."""

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from functools import reduce
from itertools import product
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import conf
from experiments import transfer
from pdsim.calibration import samples as points
from pdsim.calibration.calibrate import link_of
from pdsim.config import UNSAID, Config, ExperimentOptions, as_written, build, compose, load, numbers, presets, rules
from pdsim.core import plugins
from pdsim.core.errors import ConfigError
from pdsim.core.files import data
from pdsim.core.plugins import describe, groups, options
from pdsim.core.progress import silent
from pdsim.hardware.machine import EVIDENCE, Gpu, Host, Machine, Nic
from pdsim.kv.policy import Staging
from pdsim.models.llm import Llm
from pdsim.sim.model import Model
from tests.support.composed import composed

REFERRED = {"states"}  # other groups that the file of an experiment names
POINTS_ONLY = ("calibration", "executor")  # the one is of a pair, the other of a sweep
CHOICES = [
    (group, option)
    for group in groups()
    for option in options(group)
    if group not in POINTS_ONLY
    and (group, option) not in {("model", "hf"), ("compute", "operators")}  # which take a file and a package
]
TRANSFER = transfer.TransferOptions(patterns=("pair",), size=(65536,), blocks=(4,), repeat=2, warmup=0)


CALIBRATIONS = sorted(set(options("calibration")) - {"none"})


def calibration_file(name):
    """Return what the file of calibration *name* says, over what the one that it is taken from does."""
    file = OmegaConf.load(Path(conf.__file__).parent / "calibration" / f"{name}.yaml")
    return OmegaConf.merge(calibration_file(file.pop("defaults")[0]), file) if "defaults" in file else file


@pytest.mark.slow
@pytest.mark.parametrize("name", CALIBRATIONS)
def test_every_calibration_has_its_machines_engines_and_samples(name):
    file = calibration_file(name)
    for hw, backend in product(file.hw, file.backend):
        config = composed(f"hw={hw}", f"backend={backend}", f"calibration={name}")
        assert config.calibration.intervals
        said = [
            f"{group}.{key}" for group in ("hw", "backend") for key, text in getattr(config, group).sources.items()
            if file.name in text
        ]  # fmt: skip
        assert set(said) == {key for key, value in file.parameters.items() if not isinstance(value, bool) and value}
    samples = points.read(data("calibration", f"{file.name}.csv"))
    taken_from_elsewhere = "taken for" in file.source
    assert config.calibration.kind == ("assumed" if taken_from_elsewhere else samples.about["kind"])
    spans = {(row.blocks, row.blocks * row.size) for row in samples.rows if row.pattern == "pair"}
    if config.hw.link is None:
        assert config.calibration.descriptors == (min(spans)[0], max(spans)[0])
        assert config.calibration.bytes == (min(span[1] for span in spans), max(span[1] for span in spans))


@pytest.mark.slow
@pytest.mark.parametrize("name", CALIBRATIONS)
def test_a_calibration_states_its_distance_from_its_samples(name):
    file = calibration_file(name)
    config = composed(f"hw={file.hw[0]}", f"backend={file.backend[0]}", f"calibration={name}")
    if config.hw.link is not None:
        pytest.skip("its samples are of many links: tests/calibration/test_unseen.py")
    samples = points.read(data("calibration", f"{file.name}.csv")).rows
    path = next(iter(file.intervals)).split(".")[1]
    model = getattr(config.backend, path)
    _, link = link_of(config.hw, model.path)
    operation = samples[0].operation if len({row.operation for row in samples}) == 1 else name.split("-")[1]
    alone = [row for row in samples if row.pattern == "pair" and row.concurrency == 1 and row.operation == operation]
    held = [row for row in alone if row.held]  # of these it says the error itself; of others that of folds
    errors = [
        abs(model.isolated_time(row.blocks, row.blocks * row.size, link) / row.seconds - 1.0)
        for row in held or alone
    ]
    assert sum(errors) <= (1.01 if held else 1.2) * file.held_out.mean * len(errors)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "option"), CHOICES, ids=lambda word: word)
def test_every_option_composes_into_a_typed_configuration_of_that_name(group, option):
    config = composed(f"{group}={option}")
    assert describe(group, option)
    if group in ("hw", "backend", "model"):
        assert getattr(config, group).name == option
    if group == "experiment":
        assert config.experiment.name == {"crossing": "transfer"}.get(option, option)


@pytest.mark.parametrize(
    ("group", "option"),
    [  # of backends each composition is another one
        pytest.param(*choice, marks=[pytest.mark.slow] * (choice[0] == "backend"))
        for choice in CHOICES
        if choice[0] in ("hw", "backend", "model")
    ],
)
def test_every_number_has_a_source_and_every_source_a_number(group, option):
    if group == "model":  # its file is all of it
        file = OmegaConf.load(Path(conf.__file__).parent / group / f"{option}.yaml")
        part = build(Llm, OmegaConf.to_container(file))
    else:
        part = getattr(composed(f"{group}={option}"), group)
    known = set(numbers(part))
    assert known
    for keys, text in part.sources.items():
        kind, _, reason = text.partition(": ")
        assert kind in EVIDENCE
        assert reason
        assert text != UNSAID, f"{keys} has no source"
        for key in keys.split(", "):
            assert any(f"{number}.".startswith(f"{key}.") for number in known), f"{key} is the source of no number"


@pytest.mark.slow
@pytest.mark.parametrize("name", plugins.names(plugins.EXPERIMENTS))
def test_defaults_of_an_experiment_are_those_of_options(name):
    options = ExperimentOptions.class_for({"name": name})
    file = OmegaConf.load(Path(conf.__file__).parent / "experiment" / f"{name}.yaml")
    required = {each.name for each in fields(options) if each.default is each.default_factory is MISSING}
    assert set(file.get("experiment", file)) - {"name", "defaults"} <= required
    found = composed(f"experiment={name}").experiment
    assert found == options(**{key: getattr(found, key) for key in required | REFERRED & set(vars(found))})


ON = sorted(path.stem for path in (Path(conf.__file__).parent / "experiment" / "on").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ON)
def test_a_machines_file_scales_its_experiments(name):
    experiment, _, hw = name.partition("-")
    file = OmegaConf.load(Path(conf.__file__).parent / "experiment" / "on" / f"{name}.yaml")
    lists = {key: value for key, value in file.get("experiment", file).items() if not isinstance(value, str | int)}
    said = {key: tuple(value) for key, value in lists.items() if key != "size"}  # whose units are read elsewhere
    found = composed(f"experiment={experiment}", f"hw={hw}").experiment
    assert said
    assert {key: getattr(found, key) for key in said} == said


ALONE = [name for name in options("hw") if name.startswith("1x")]
PAIRS = sorted(set(options("hw")) - set(ALONE))


@pytest.mark.parametrize("hw", ALONE)
def test_one_gpu_is_refused_where_a_job_needs_two(hw):
    config = composed(f"hw={hw}")
    assert config.hw.nodes * config.hw.gpus == 1
    with pytest.raises(ConfigError, match=rf"parallel needs 1 \+ 1 GPUs, hw={hw} has 1"):
        rules.check(config)


@pytest.mark.parametrize("word", [f"hw={hw}" for hw in PAIRS] + [f"workload={name}" for name in options("workload")])
def test_every_machine_and_workload_can_be_served(word):
    config = composed(word)
    rules.check(config)
    assert config.hw.vendor in config.backend.vendors


@pytest.mark.parametrize(
    ("words", "backend", "prefill", "decode"),
    [
        ((), "mooncake_nvlink", 4, 4),  # 8xh20
        (("hw=2xh200",), "mooncake_nvlink", 1, 1),
        (("hw=2x8xh20",), "mooncake", 8, 8),
        (("hw=8x8xh200",), "mooncake", 32, 32),
        (("hw=8xmi300x",), "mori", 4, 4),
        (("hw=loopback",), "mooncake_tcp", 1, 1),
    ],
)
def test_the_machine_decides_what_is_not_said(words, backend, prefill, decode):
    config = composed(*words)
    assert config.backend.name == backend
    assert (config.parallel.prefill.gpus, config.parallel.decode.gpus) == (prefill, decode)


AMD = {"mooncake", "mooncake_tcp", "mori", "mori_inline", "nixl_tcp"}
NIXL = {"nixl", "nixl_sglang", "nixl_tcp", "nixl_trtllm", "nixl_vllm"}
NVIDIA = NIXL | {"mooncake", "mooncake_efa", "mooncake_nvlink", "mooncake_tcp", "nvlink"}
HOST = {"mooncake_tcp", "nixl_tcp", "nixl_shm"}


def refusal(config: Config) -> str:
    try:
        rules.check(config)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("hw", PAIRS)
def test_every_backend_moves_bytes_or_is_refused_with_a_reason(hw):
    machine = composed(f"hw={hw}")
    works = set()
    for backend in options("backend"):
        engine = composed(f"backend={backend}").backend
        config = replace(machine, backend=engine, experiment=TRANSFER)
        if why := refusal(config):
            assert f"backend={backend}" in why
            continue
        result = transfer.run(config, Model(config.hw, engine), silent)
        assert not result.failures
        assert [record.nbytes for record in result.transfers] == [4 * 65536] * 2
        works.add(backend)
    expected = {"nvidia": NVIDIA, "amd": AMD, "cpu": HOST}[machine.hw.vendor]
    assert works == (expected if machine.hw.link is None else expected - {"nixl_shm"})


def modelled(config: Config, blocks: int, size: int) -> float:
    """Return the seconds that one transfer takes, between two GPUs of one node or, if there are more, of two."""
    point = replace(TRANSFER, blocks=(blocks,), size=(size,), repeat=1, placement=("spread",))
    result = transfer.run(replace(config, experiment=point), Model(config.hw, config.backend), silent)
    (record,) = result.transfers
    return record.completed - record.submitted


ON_H200 = ("hw=2xh200", "calibration=none", "backend=mooncake_nvlink")


@pytest.mark.parametrize(
    ("words", "blocks", "size", "measured", "within"),
    [
        (ON_H200, 1, 4096, 13e-6, 0.03),
        (ON_H200, 1, 2**28, 689e-6, 0.03),
        (ON_H200, 1024, 16384, 2290e-6, 0.03),
        ((*ON_H200[:2], "backend=nixl"), 1, 4096, 19e-6, 0.03),
        ((*ON_H200[:2], "backend=nixl"), 1024, 16384, 5120e-6, 0.03),
        (("hw=8xmi300x",), 1, 1024, 11.10e-6, 0.01),  # across nodes, as published for Thor2
        (("hw=8xmi300x",), 32768, 1024, 4617.83e-6, 0.01),
        (("hw=8xmi300x",), 128, 2**20, 2777.76e-6, 0.02),
    ],
)
def test_the_shipped_numbers_give_back_what_was_measured(words, blocks, size, measured, within):
    config = composed(*words)
    if config.hw.vendor == "amd":
        config = replace(config, hw=replace(config.hw, nodes=2))
    assert modelled(config, blocks, size) == pytest.approx(measured, rel=within)


def test_templates_of_machine_and_model_have_every_key(pdsim_says):
    folder = Path(conf.__file__).parents[1] / "examples" / "machine"
    status, said, problems = pdsim_says("run", "--config-dir", str(folder), "hw=mybox", "--cfg", "job")
    assert not status, problems
    template = OmegaConf.load(folder / "hw" / "mybox.yaml")
    for part, cls in ((template, Machine), (template.gpu, Gpu), (template.nic, Nic), (template.host, Host)):
        left_out = {"link", "guest", "copies", "sources", "prefill"}
        assert {each.name for each in fields(cls)} - left_out <= set(part)
    assert "name: mybox" in said
    folder = Path(conf.__file__).parents[1] / "examples" / "machine"
    model = compose.composed(compose.CommandLine.of(["model=mymodel"], {"--config-dir": folder})).model
    template = OmegaConf.load(folder / "model" / "mymodel.yaml")
    assert {each.name for each in fields(Llm)} - {"sources"} == set(template) - {"source"}
    assert model.kv_bytes == 2


def documented() -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Yield engine, release, key, and the engine's own value on an L40S, an H100, an H200 and a B200."""
    page = Path(conf.__file__).parents[1] / "docs" / "serving-engines.md"
    row = r"^\|(?: `engine=(\w+) engine.version=([\w.]+)`)? \| `([\w.]+)` \| [^|]+" + r" \| (\S+)" * 4 + r" \|$"
    engine = version = ""
    for own, release, key, *values in re.findall(row, page.read_text(encoding="utf-8"), re.MULTILINE):
        engine, version = own or engine, release or version  # an empty cell is as the one above
        yield engine, version, key, tuple(values)


DOCUMENTED = list(documented())


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "version", "key", "values"), DOCUMENTED)
def test_a_documented_default_of_an_engine_is_what_composes(engine, version, key, values):
    for hw, value in zip(("8xl40s", "8xh100", "8xh200", "8xb200"), values, strict=True):
        config = composed(f"engine={engine}", f"engine.version={version}", f"hw={hw}", "model=qwen3-32b")
        if key == "backend":
            assert config.backend.name == value
            continue
        found = reduce(getattr, key.removeprefix("backend.").split("."), config)
        # the driver reports up to 0.7 % more memory than the machine's file, and SGLang's fraction follows it
        assert found == pytest.approx(float(value), abs=0.002) if key.endswith("fraction") else str(found) == value


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ("experiment=serve experiment.deployment=colocated", 8192),
        ("experiment=validate_live live.layout=colocated", 8192),
        ("experiment=serve experiment.deployment=colocated model=deepseek-v3 parallel=tp8", 0),
        ("experiment=serve", 0),
    ],
)
def test_colocated_prompts_of_sglang_run_in_graphs(words: str, tokens: int):
    config = composed("engine=sglang", "hw=8xh200", "model=qwen3-8b", *words.split())
    assert config.compute.graph_tokens == tokens


def test_every_setting_of_every_release_is_documented():
    rows = {(engine, version, key) for engine, version, key, *_ in DOCUMENTED}
    settings = {
        (engine, version, setting.key)
        for engine, releases in presets.RELEASES.items()
        for version, changed in releases.items()
        for setting in changed
    }
    assert settings - rows == set()


@pytest.mark.parametrize(
    "words",
    [
        ("kv.page_size=32", "engine=vllm", "scheduler.memory_fraction=0.8", "hw=8xh200"),
        ("hw=8xh200", "engine=vllm", "scheduler.memory_fraction=0.8", "kv.page_size=32"),
        ("engine=vllm", "scheduler.memory_fraction=0.8", "kv.page_size=32", "hw=8xh200", "engine.version=0.26"),
    ],
)
def test_typed_keys_win_over_engines_in_any_order(words):
    config = composed("model=qwen3-8b", *words)
    assert (config.kv.page_size, config.scheduler.memory_fraction, config.scheduler.decode_batch) == (32, 0.8, 1024)


def test_releases_change_what_changed_and_unknown_ones_are_refused():
    old, middle, new = (
        composed("engine=vllm", f"engine.version={name}").engine for name in ("0.22", "0.24", "0.26")
    )
    assert (old.version, old.pages, old.packed) == ("0.22.1", "queue", False)
    assert (middle.version, middle.pages, middle.packed) == ("0.24.0", "stack", False)
    assert (new.version, new.pages, new.packed) == ("0.26.0", "stack", True)
    own = composed("engine=vllm26").engine
    assert own == replace(new, name="vllm26", sources=own.sources)
    typed = composed("engine=vllm", "engine.version=0.26", "engine.pages=queue").engine
    assert (typed.pages, typed.packed) == ("queue", True)
    with pytest.raises(ConfigError, match=r"engine.version=0.99 .* pdsim knows 0.22.1, 0.24.0, 0.26.0, 0.28.0"):
        composed("engine=vllm", "engine.version=0.99")
    with pytest.raises(ConfigError, match="only vllm, sglang and trtllm have releases"):
        composed("engine=generic", "engine.version=0.99")


def test_a_written_configuration_keeps_what_it_was_given():
    config = composed("hw=8xh100", "engine.version=0.5.23")
    again = load(as_written(config))
    assert (again.kv, again.scheduler, again.policy, again.engine) == (
        config.kv, config.scheduler, config.policy, config.engine,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("engine=vllm", "kv.page_size=24"), "--block-size of engine=vllm takes multiples of 16"),
        (("engine=trtllm", "kv.page_size=24"), "kv_cache_config.tokens_per_block of engine=trtllm takes powers"),
        (("engine=sglang", "hw=8xb200", "kv.page_size=1"), "--page-size of engine=sglang takes 16, 32 or 64"),
        (("engine=sglang", "backend=nvlink"), "backend=nvlink has no KV connector in engine=sglang"),
    ],
)
def test_what_an_engine_does_not_have_is_warned_of_once(words, said):
    lines = rules.notes(composed("hw=8xh100", "model=qwen3-8b", *words), ())
    assert len([line for line in lines if said in line]) == 1
    assert not [line for line in rules.notes(composed("hw=8xh100", "model=qwen3-8b"), ()) if "engine=" in line]


def test_a_policy_is_of_its_backend_and_set_under_it():
    policy = composed("backend=mooncake_nvlink").policy
    assert (policy.metadata_by, policy.metadata_on, policy.memory_pool) == ("write", "device", "default")
    assert composed("backend.policy.queues=2").policy.queues == 2
    with pytest.raises(ConfigError, match=r"did you mean backend\.policy\.queues\?"):
        composed("+backend.policy.queue=2")


@pytest.mark.parametrize("changes", [{"ring": 0}, {"buffer": 0}, {"wait": 0.0}])
def test_sizes_of_the_staged_path_are_positive(changes):
    with pytest.raises(ValueError, match="must be > 0"):
        Staging(**({"ring": 1, "buffer": 1, "wait": 1.0} | changes))


def test_the_alias_forces_tcp():
    assert composed("hw=loopback", "backend=mooncake_tcp").backend.options == {"MC_FORCE_TCP": "1"}


@pytest.mark.parametrize(("value", "said"), [(None, 0), ("1", 0), ("0", 1)])
def test_an_exported_value_is_kept_with_a_note(monkeypatch, value, said):
    config = replace(composed("hw=loopback", "backend=mooncake_tcp"), target="real")
    if value is not None:
        monkeypatch.setenv("MC_FORCE_TCP", value)
    rules.check(config)
    lines = rules.notes(config, ())
    assert len(lines) == said
    assert all("MC_FORCE_TCP=0 is kept" in line and "backend=mooncake is the one for RDMA" in line for line in lines)


NVLINK = ["hw=8xh200", "backend=nvlink", "cache.decode=true"]
MORI = ["hw=2x8xmi300x", "backend=mori", "cache.decode=true"]


@pytest.mark.parametrize("words", [NVLINK, MORI])
def test_sglang_keeps_prefixes_on_decode_over_nixl_and_mooncake_only(words):
    with pytest.raises(ConfigError, match=r"cache\.decode=true with backend=\w+: .* over nixl and mooncake only"):
        rules.check(composed(*words))
    rules.check(composed(*words, "engine=vllm"))  # which pulls
    for words in (["hw=2x8xh20", "backend=mooncake"], ["hw=8xh20", "backend=nixl"]):
        rules.check(composed(*words, "cache.decode=true"))
