"""Nothing that a user could type before is lost; every key takes a value."""

import copy
import re
from collections.abc import Mapping
from functools import cache, reduce

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from pdsim.config import as_written, compose
from pdsim.core.errors import ConfigError
from tests.support.composed import tree
from tools import everything
from tools.everything import ROOT, known_keys


def test_no_name_of_the_record_is_gone(capsys):
    assert everything.compare(ROOT / "tools" / "everything.txt") == 0, capsys.readouterr().out


CONTEXTS = (
    "", "target=real hw=loopback", "hw=2x8xh20 backend=mooncake", "hw=link", "compute=h200_torch hw=8xh200",
    "target=live live.url=[http://localhost:8000]", "workload=poisson", "workload=sessions", "workload=bursty",
    "workload=diurnal",
    "workload=gamma", "model=tiny-hybrid",
    "model=deepseek-v3 parallel=tp8 hw=2x8xh20 scheduler.memory_fraction=0.95",
    "hw=2x8xmi300x backend=mori", "hw=rdma_guest backend=nixl",
    "live.prompts=text", "parallel=tp2 parallel.prefill.pp=2",
    "calibration=mooncake_nvlink-2xh200 hw=2xh200", "cache=vllm engine=vllm backend=nixl", "kv.staging=true",
    "hw=2xh200 backend=nixl", "hw=2xh200 backend=nixl check.plausible=false", "hw=2x8xh200_efa",
    "hw=loopback", "hw=8x8xh200", "hw=8xmi300x backend=mori",
    "hw=2x8xmi300x_cx7 backend=mori", "hw=2x8xh200_efa backend=mooncake_efa", "hw=link backend=nixl_tcp",
    "hw=2xh200 backend=nvlink", "hw=4xh200 backend=nvlink", "hw=4xh200 backend=nixl", "hw=8xh200 backend=nvlink",
    "hw=4xh200", "hw=8xh200", "hw=8xh200 backend=nixl", "hw=2xh200",
    "target=live live.launch=true engine=vllm hw=2xh200 model=qwen3-8b parallel=tp1",
)  # fmt: skip
"""What else is typed with a key: the first with which a value is taken counts."""

GIVEN = {
    "bool": ("true", "false"),
    "int": ("1", "2", "3", "4", "8", "0", "16", "96", "512", "1000", "9000"),
    "float": ("0.5", "0.9", "0.25", "1.5", "2", "3", "0", "1"),
    "Seconds": ("1ms", "2us", "20us", "1s", "2s", "90s", "0s"),
    "Size": ("64MiB", "4KiB", "1MiB", "8GiB", "1GiB", "100GB"),
    "Rate": ("40GB/s", "350GB/s", "3TB/s", "1GB/s", "100MB/s"),
    "Flops": ("100TFLOPS", "200TFLOPS"),
    "Frequency": ("2req/s", "2"),
    "Count": ("1B", "7B", "1000"),
}
OWN = {
    r"workload\.trace": "workload.trace={root}/pdsim/serving/data/conversation_small.jsonl",
    r"engine\.name": "engine.name=sglang_mine",
    r"engine\.version": "engine.version=0.5.23",
    r"launch\.bind": "launch.bind=127.0.0.2",
    r"live\.(url|prefill|decode)": "live.\\1=[http://localhost:8001]",
    r"backend\.vendors": "backend.vendors=[nvidia,amd]",
    r"hw\.guest": "hw.guest=false",
    r"(backend\.\w+)\.ramp.*": "\\1.ramp=[{first:1,extra:1us}]",
    r"(backend\.\w+)\.small\..*": "\\1.small={bytes:1KiB,descriptors:3,saving:1us}",
    r"(backend\.\w+)\.workers\..*": "\\1.workers={threads:3,least:5}",
    r"(backend\.\w+)\.by_option.*": "\\1.by_option=[{options:{progress_thread:'false',num_threads:'0'},"
    "evidence:'published: x',latency:1us,descriptor:1us,rate:0.9,workers:{threads:3,least:5},"
    "intervals:{latency:['1us','2us']},errors:{mean:0.1,median:0.1,p95:0.2}}]",
    r"(collective\.\w+)\.device.*": "\\1.device=[{latency:1us,rate:1GB/s}]",
    r"compute\.kernels\.allreduce.*": "compute.kernels.allreduce={2:{latency:1us,rate:1GB/s}}",
    r"compute\.kernels\.shapes.*": "compute.kernels.shapes={1x2:{tokens:[1],factor:[1.5]}}",
    r"hw\.link\.changes.*": "hw.link.changes=[{kind:slow,start:1s,end:2s,share:0.5,hop:0}]",
    r"workload\.tenants.*": "workload.tenants=[{name:chat,rate:3,ttft:1s,tpot:20ms,input_mean:100,input_cv:0.5,"
    "output_mean:10,output_cv:0.3,priority:1}]",
    r"experiment\(seed_nixl_staging\)\.experts": "experiment.experts.context=9000",
    r"experiment\(seed_nixl_staging\)\.tp": "experiment.tp=[2to1]",
    r"experiment\(\w+\)\.tp": "experiment.tp=[1to1]",
    r"experiment\(transfer\)\.placement": "experiment.placement=[spread]",
    r"model\.kv_dtype": "model.kv_dtype=fp16",
    r"parallel\.decode\.cp": "parallel.decode.cp=1",
    r"experiment\(\w+\)\.backends": "experiment.backends.nixl.timeout=3s",
    r"experiment\(compare_engines\)\.engines": "experiment.engines.vllm.proxy=3s",
    r"experiment\(report_figures\)\.(machines|models)": "experiment.\\1={}",
    r"experiment\(report_figures\)\.sglang": "experiment.sglang.proxy=3s",
    r"experiment\(seed_mooncake_tcp\)\.tcp": "experiment.tcp.timeout=3s",
    r"experiment\(seed_mori_state\)\.served": "experiment.served.context=9000",
    r"experiment\(seed_mori_state\)\.states": "experiment.states.mamba.context=9000",
}
"""Overrides for keys that have nothing in common with others of their type, by pattern."""

SEEN_IN = {"host_factor": "backend", "draw_host": "backend", "engine.host_factor": "engine.proxy"}
"""Where the effect of a key is, if it is not kept itself."""

ONE_VALUE = {"parallel.decode.cp"}
"""Keys that take their default alone."""


@cache
def base(context):
    """Return what Hydra composes of *context*, and that typed; nothing of what does not go together."""
    try:
        values = tree(*context.split())
        return values, as_written(compose.load(values, context.split()))
    except Exception:
        return {}, {}


def failure(name):
    """Return "" if the key *name* accepts another value than its own, else the message of the last refusal."""
    experiment = re.match(r"experiment\((\w+)\)", name)
    own = f"experiment={experiment[1]} " if experiment else ""
    said = "no context has it"
    for context in CONTEXTS:
        words = typed(name) if base(own + context)[1] else []
        for word in words:  # which grows: a refusal may name the values that there are
            said = refusal(name, word, own + context)
            if not said:
                return ""
            known = re.search(
                r"(?:must be one of|must be of|must be|there are) ([\w', -]+?)(?: for .*)?(?:, got|; |$)", said
            )
            if known and "mine" in word.partition("=")[2]:
                words += [
                    word.replace("mine", each) for each in re.findall(r"[\w-]+", known[1].replace(" or ", ", "))
                ]
    return said


def refusal(name, word, context):
    key, _, inner = re.sub(r"\(\w+\)", "", name).partition("[].")
    at, _, value = word.partition("=")
    values, before = base(context)
    changed = copy.deepcopy(values)
    *parts, last = at.split(".")
    try:
        place = changed
        for part in parts:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[last] = OverridesParser.create().parse_override(f"++{word}").value()
        config = as_written(compose.load(changed, [*context.split(), word]))
    except (ConfigError, HydraException) as error:
        return f"{word}: {error}"
    seen = SEEN_IN.get(key, key)
    if (value_at(config, seen) == value_at(before, seen) and key not in ONE_VALUE) or inner.rpartition(".")[
        2
    ] not in value:
        return f"{word}: changes nothing"
    return ""


def value_at(values, key):
    return reduce(
        lambda inner, part: inner.get(part) if isinstance(inner, Mapping) else None, key.split("."), values
    )


def typed(name):
    for pattern, word in OWN.items():
        if match := re.fullmatch(pattern, name):
            return [match.expand(word).replace("{root}", str(ROOT))]
    key = re.sub(r"\(\w+\)", "", name)
    kind = known_keys()[name]
    if kind.startswith("Mapping"):
        return [f"{key}={{{of}:{value}}}" for of in ("a", "mine") for value in ("b", "0.5")]
    depth = kind.count("tuple[")
    element = (re.search(r"(\w+)(?:, \.\.\.)?\]", kind) or re.match(r"(\w+)", kind) or [""])[1]
    return [f"{key}={'[' * depth}{value}{']' * depth}" for value in GIVEN.get(element, ("mine",))]


@pytest.mark.slow
@pytest.mark.timeout(600)  # 16 s of a processor
def test_every_key_takes_a_value_other_than_its_own():
    assert {key: said for key in known_keys() if (said := failure(key))} == {}
