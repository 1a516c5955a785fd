"""Plain mappings become frozen dataclasses, or one line for each mistake."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Literal

import pytest

from experiments import transfer
from pdsim.config import ON_THE_COMMAND_LINE, UNSAID, Config, build, defaults, load
from pdsim.config.compose import compose
from pdsim.core.errors import ConfigError
from pdsim.core.units import Seconds, Size
from pdsim.hardware.costs import Engine, EngineModel
from pdsim.hardware.machine import Machine
from pdsim.serving.settings import Kv, Workload

MACHINE = {
    "name": "box",
    "vendor": "nvidia",
    "nodes": 1,
    "gpus": 2,
    "gpu": {"name": "G", "memory": "80GB", "memory_rate": "2TB/s", "compute": "312TFLOPS", "pcie": "25GB/s"},
    "interconnect": {"kind": "switch", "rate": "240GB/s"},
    "nic": {"count": 1, "rate": "400Gbps", "latency": "2us"},
    "host": {"memory": "1TB", "memory_rate": 2e11, "tcp_rate": "10Gbps", "tcp_latency": "50us"},
    "sources": {"gpu": "datasheet: G", "nodes, gpus": "assumed: two", "nic.rate": "measured: here"},
}
ENGINE = {
    "name": "engine",
    "implementation": "engine",
    "vendors": ["nvidia"],
    "intra": {"path": "nvlink", "call": "1us", "descriptor": "2us", "overlap": True, "latency": 0},
    "inter": None,
}
MODEL = {
    "name": "m", "parameters": 1e9, "active": 1e9, "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4,
    "head_dim": 16,
}  # fmt: skip
CONFIG = {
    "target": "model",
    "experiment": {"name": "transfer"},
    "hw": MACHINE,
    "backend": ENGINE,
    "model": MODEL,
    "parallel": {"prefill": {"tp": 1}, "decode": {"tp": 1}},
}


def changed(values, key, value):
    head, _, rest = key.partition(".")
    return {**values, head: changed(values[head], rest, value) if rest else value}


def refusal(cls, values, at=""):
    with pytest.raises(ConfigError) as caught:
        build(cls, values, at)
    return str(caught.value)


# --- what is understood


def test_nested_dataclasses_lists_and_nothing_are_built():
    engine = build(Engine, ENGINE, "backend")
    assert (engine.vendors, engine.inter, engine.timeout) == (("nvidia",), None, 30.0)
    assert engine.intra == EngineModel(path="nvlink", call=1e-6, descriptor=2e-6, overlap=True, latency=0.0)


@dataclass(frozen=True, kw_only=True)
class Everything:
    size: tuple[Size, ...] = ()
    deadline: Seconds | None = None
    mode: Literal["write", "read"] = "write"
    options: Mapping[str, str] = field(default_factory=dict)
    share: float = 0.5
    count: int = 1


def test_each_kind_of_annotation_is_converted():
    values = {"size": ["64KiB", 1], "deadline": "5ms", "mode": "read", "options": {"A": 1, "B": "x"}, "share": 1}
    built = build(Everything, {**values, "count": 2.0})
    made = {"size": (65536, 1), "deadline": 0.005, "options": {"A": "1", "B": "x"}, "count": 2}
    assert asdict(built) == values | made
    assert (type(built.count), type(built.share)) == (int, float)


# --- what is refused


def test_mistakes_are_told_at_once_with_the_remedy():
    keys = ", ".join(field.name for field in fields(Kv))
    assert refusal(Kv, {"pol": 1}, "kv") == f"unknown key kv.pol; did you mean kv.pool? kv has {keys}"
    values = changed(changed(changed(CONFIG, "hw.gpuss", 1), "hw.nic.rate", "fast"), "kvv", {})
    lines = refusal(Config, values).splitlines()
    said = ["unknown key kvv", "unknown key hw.gpuss", "hw.nic.rate: 'fast' is not a rate"]
    assert [line.split(";")[0] for line in lines] == said
    values = {**MACHINE, "nic": {"count": 1}}
    assert refusal(Machine, values, "hw") == "hw.nic.rate is missing and has no default; set hw.nic.rate=VALUE"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hw.gpus", "abc", "hw.gpus must be a whole number, got 'abc'"),
        ("hw.gpus", 1.5, "hw.gpus must be a whole number, got 1.5"),
        ("hw.gpus", True, "hw.gpus must be a whole number, got True"),
        ("hw.name", ["a"], "hw.name must be text, got ['a']"),
        ("backend.intra.overlap", 1, "backend.intra.overlap must be true or false, got 1"),
        ("model.parameters", float("inf"), "model.parameters: inf is not a finite number; write a number"),
        ("hw.nic", 3, "hw.nic must have keys of its own (count, rate, latency, "),
        ("hw.gpu.memory", "80Gb", "hw.gpu.memory: '80Gb' is not a size; write a number or something like 64KiB"),
        ("backend.vendors", ["nvidia", 1.5], "backend.vendors[1] must be text, got 1.5"),
        ("hw.sources", "none", "hw.sources must be a mapping of keys to values, got 'none'"),
        ("target", "rael", "target must be one of model, real, live, got 'rael'; did you mean real?"),
        ("hw.gpus", "8k", "hw.gpus must be a whole number, got '8k'; write 8000 or 8192"),
        ("backend.serial", "70%", "backend.serial must be a finite number, got '70%'; write 0.7"),
        ("backend.serial", "2x", "backend.serial must be a finite number, got '2x'; write 2"),
        ("launch", {"bind": "everywhere"}, "launch.bind: 'everywhere' is not an IP address such as 127.0.0.1"),
    ],
)
def test_a_wrong_type_has_its_key_and_remedy(key, value, message):
    assert refusal(Config, changed(CONFIG, key, value)).startswith(message)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("hw.nic.rate", -1, "hw.nic.rate must be >= 0, got -1"),
        ("hw.gpus", -1, "hw.gpus must be >= 0, got -1"),
        ("parallel.prefill.tp", 0, "parallel.prefill.tp must be > 0, got 0"),
        ("backend.intra.path", "ib", "backend.intra.path must be one of nvlink, rdma, tcp, shm, got 'ib'"),
        ("backend.timeout", "0s", "backend.timeout must be > 0, got '0s'"),
        ("seed", -1, "seed must be >= 0 and < 9223372036854775808, got -1"),
    ],
)
def test_a_value_out_of_range_has_its_key_and_remedy(key, value, rule):
    assert (
        refusal(Config, changed(CONFIG, key, value)) == f"{rule}; leave {key} out to keep what the configuration has"
    )


RULES = [
    ("hw.guest=true", "hw.guest is one host without GPUs, got hw.nodes=1 and hw.gpus=8"),
    ("hw.interconnect.rate=0", "hw.interconnect.rate must be > 0 for kind=switch, got 0"),
    ("hw=link hw.link.rates=[1GB/s,2GB/s]", "hw.link.rates must have a rate for each of 1 hops, got 2"),
    ("hw=link hw.link.changes=[{kind:cut,start:1s,end:2s,hop:1}]", "hop must be < 1, got 1"),
    ("hw=link hw.link.changes=[{kind:cut,start:1s,end:2s,share:0.5}]", "left out otherwise, got 0.5"),
    ("hw=link hw.link.changes=[{kind:slow,start:1s,end:2s}]", "must be > 0 and < 1 for slow"),
    ("backend.intra.pipelined=true", "backend.intra.pipelined must be false where overlap is"),
    ("backend.policy.staging=true backend.policy.queues=0", "backend.policy.staging needs queues"),
    ("backend.policy.metadata=write backend.policy.metadata_memory=host", "use backend.policy.metadata=control"),
    ("model.hybrid.pattern=wa", "model.hybrid.window must be > 0, got 0"),
    ("model.dense_layers=80", "model.dense_layers must be < layers=80, got 80"),
    ("model=qwen3-30b-a3b model.experts_per_token=128", "must be >= 1 and < experts=128, got 128"),
    ("model.expert_groups=4 model.groups_per_token=5", "must be >= 1 and <= expert_groups=4, got 5"),
    ("parallel.decode.ep=2", "parallel.decode.ep must be 1 or tp=4"),
    ("parallel.decode.tp=2 scheduler.memory_fraction=0.5", "set scheduler.memory_fraction=0.9, raise tp or choose"),
    (
        "model.heads=40 model.kv_heads=10 parallel.decode.tp=2",
        "nor is a multiple of them; use one of 1, 2, 5, 10, 20",
    ),
    ("parallel.decode.tp=4 parallel.decode.dp=8", "parallel.decode.dp must divide tp=4"),
    ("parallel.prefill.ep=4 parallel.prefill.pp=2", "parallel.prefill.ep=4 has no stages"),
    ("parallel.decode.pp=3", "use decode.pp=1 or decode.pp=1"),
    ("workload=sessions workload.skip=1s", "workload.arrivals=sessions has no skip, seconds or load"),
    ("cache.host=100", "cache.host=100 keeps what prefill caches; set cache.prefill=true"),
    ("engine.lease=1s", "engine.heartbeat=5.0 must be < engine.lease=1.0"),
    ("compute.blend=0.5", "compute.blend must be 0 or from 1 to 64, got 0.5"),
    ("live.url=[somewhere]", "live.url must begin with http:// or https://, got 'somewhere'"),
    ("live.bootstrap_port=[1,2]", "live.bootstrap_port must be one port or one for each of 0 prefill servers"),
    ("live.api=chat", "live.prompts must be text for live.api=chat, got 'ids'"),
    ("experiment=capacity ++experiment.router=nobodys", "router=nobodys is provided by no installed package"),
    ("experiment=compare_engines ++experiment.metadata=[mail]", "metadata[0] must be one of policy, batch, "),
    ("experiment=handoff ++experiment.tp=[1-2]", "tp[0]: '1-2' is not a pair of numbers of ranks; write one"),
    ("experiment=seed_nixl_staging ++experiment.tp=[2to2]", "tp[0]: '2to2' has equal sides; write unlike"),
    ("experiment=seed_mooncake_tcp ++experiment.tp=[1to2]", "tp[0]: '1to2' has sides of different TP; write equal"),
    ("experiment=transfer ++experiment.patterns=[star]", "'star' is not a pattern; there are pair, pairs"),
    ("experiment=transfer ++experiment.patterns=['pair:2']", "'pair:2' has a count that it cannot have; write pair"),
    ("experiment=transfer ++experiment.patterns=['cross:2x']", "a count that it cannot have; write cross:2 or "),
    ("experiment=transfer ++experiment.size=[]", "experiment.size must be non-empty, got"),
    ("experiment=transfer ++experiment.schedule=[late]", "experiment.schedule[0] must be one of free, "),
    ("experiment=validate_live ++experiment.bounds={ttft:0.1}", "experiment.bounds must be one of ttft_p50, "),
    ("autoscale.policy=rain", "autoscale.policy=rain is provided by no installed package"),
    ("autoscale.policy=schedule", "autoscale.options do not suit autoscale.policy=schedule: missing a re"),
    ("autoscale.policy=thresholds cache=vllm kv.checked=0", "autoscale keeps no account of a started"),
    ("autoscale.policy=thresholds experiment.deployment=colocated", "autoscale is for prefill and decode"),
    ("autoscale.policy=thresholds autoscale.least=2 parallel=tp2 parallel.prefill.instances=2", "autoscale.least"),
    ("autoscale.policy=thresholds autoscale.gpus=1", "autoscale.gpus=1 must be 0 or >= 8, for autoscale"),
    ("autoscale.policy=thresholds parallel=tp2 parallel.decode.dp=2", "autoscale runs whole engines"),
    ("workload=tenants workload.rate=3", "workload.rate is each tenant's own"),
    ("workload=tenants workload.arrivals=sessions", "workload.tenants generate requests"),
    ("workload=tenants workload.priority=0.5", "workload.priority=0.5 is each tenant's own"),
    ("workload=tenants model.context=4096", "8000 + 500 tokens of workload.tenants batch exceed"),
    ("failures.node.every=24h experiment.deployment=colocated", "failures are drawn for prefill and decode inst"),
    ("failures.nic.every=24h hw=8xh200", "failures.nic.every=24 h: "),
    ("failures.gpu.every=24h workload=sessions", "failures need arrivals whose end is known"),
    ("hw=8xmi300x kv.staging=true", "backend=mori has no staged path"),
]


@pytest.mark.parametrize(("words", "message"), RULES)
def test_values_that_exclude_each_other_are_one_line(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        compose(words.split())
    assert "\n" not in str(caught.value)


# --- what is complete


def test_options_and_defaults_are_complete():
    experiment = load(changed(CONFIG, "experiment.size", ["64KiB", "1MiB"])).experiment
    assert experiment == transfer.TransferOptions(size=(65536, 1048576))
    plain = defaults()
    kv = asdict(Kv()) | {"page_size": "auto"}
    assert (plain["kv"], plain["workload"], "hw" in plain) == (kv, asdict(Workload()), False)


# --- where numbers come from


def test_typed_values_and_those_without_source_are_assumed():
    sources = load(CONFIG, ["hw.nic.rate", "hw.gpus", "hw.gpu.memory", "backend.options.X", "hw.name"]).hw.sources
    typed = dict.fromkeys(("nic.rate", "gpus", "gpu.memory"), ON_THE_COMMAND_LINE)
    kept = {"nodes": "assumed: two", "gpu": "datasheet: G", "interconnect.rate": UNSAID}
    assert {**sources, **typed, **kept} == sources
    assert "name" not in sources
    sources = load(CONFIG).hw.sources
    assert sources["nodes, gpus"] == "assumed: two"
    assert "gpu.memory" not in sources  # "gpu" speaks for it


def test_a_source_of_no_known_kind_is_refused():
    with pytest.raises(ConfigError, match=r"hw.sources.gpu: 'a guess' must begin with one of measured, published"):
        load(changed(CONFIG, "hw.sources", {"gpu": "a guess"}))
