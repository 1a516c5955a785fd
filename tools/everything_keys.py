# SPDX-License-Identifier: Apache-2.0
"""The configuration keys that a user can set, and for each a value that it takes, for `tools.everything`."""

from __future__ import annotations

import copy
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from pdsim.cli.help import parse
from pdsim.config import Config, ExperimentOptions, as_written, compose
from pdsim.config.keys import type_of
from pdsim.core import plugins
from pdsim.core.errors import ConfigError
from pdsim.kv.policy import Policy

ROOT = Path(__file__).resolve().parents[1]


@cache
def known_keys() -> dict[str, str]:
    """Return every key with its type, as the dataclass has it.

    What stands in a list or a mapping is written ``backend.intra.ramp[].first``.
    """
    keys: dict[str, str] = {}
    _walk(Config, "", keys)
    _walk(Policy, "backend.policy", keys)
    for name in plugins.names(plugins.EXPERIMENTS):
        _walk(ExperimentOptions.class_for({"name": name}), f"experiment({name})", keys)
    return {key: keys[key] for key in sorted(keys)}


def _walk(cls: type, prefix: str, keys: dict[str, str]) -> None:
    hints = typing.get_type_hints(cls)
    for field in fields(cls):
        key = f"{prefix}.{field.name}".lstrip(".")
        below = [kind for kind in _parts(hints[field.name]) if isinstance(kind, type) and is_dataclass(kind)]
        several = str(field.type).startswith(("tuple", "Mapping"))
        if prefix.startswith("experiment"):  # a machine or a model of a report has the keys of hw= and model=
            below = [cls for cls in below if cls.__module__.startswith("experiments.") and cls.__base__ is object]
        if key in ("experiment", "calibration", "policy") or re.search(r"\.sources$|^experiment.*\.name$", key):
            continue  # programs write these; experiments and policies are walked by themselves
        if several or not below:
            keys[key] = type_of(field)
        for each in below:
            _walk(each, f"{key}[]" if several else key, keys)


def _parts(kind: Any) -> list[Any]:  # the types in the annotation "tuple[Ramp, ...] | None"
    return [part for each in typing.get_args(kind) for part in _parts(each)] or [kind]


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
    r"experiment\(compare_engines\)\.backends": "experiment.backends.nixl.timeout=3s",
    r"experiment\(compare_engines\)\.engines": "experiment.engines.vllm.proxy=3s",
    r"experiment\(report_figures\)\.backends": "experiment.backends.nixl.timeout=3s",
    r"experiment\(report_figures\)\.machines": "experiment.machines={}",
    r"experiment\(report_figures\)\.models": "experiment.models={}",
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


class Keys:
    """Sets one key at a time in what Hydra composed, types and checks it, as ``run KEY=VALUE --cfg job`` does."""

    def __init__(self) -> None:
        self._composed: dict[str, tuple[dict[str, Any], Any] | None] = {}
        self.said = ""  # to the last context that cannot be run

    def failure(self, name: str) -> str:
        """Return "" if a value of the key *name* other than its own is taken, else what was said to the last one."""
        experiment = re.match(r"experiment\((\w+)\)", name)
        own = f"experiment={experiment[1]} " if experiment else ""
        said = "no context has it"
        for context in CONTEXTS:
            values, base = self._base(own + context) or ({}, {})
            words = _words(name) if base else []
            for word in words:  # which grows: a refusal may name the values that there are
                said = self._try(name, word, [*own.split(), *context.split()], values, base)
                if not said:
                    return ""
                known = re.search(
                    r"(?:must be one of|must be of|must be|there are) ([\w', -]+?)(?: for .*)?(?:, got|; |$)", said
                )
                key, _, value = word.partition("=")
                if known and "mine" in value:
                    words += [
                        f"{key}={value.replace('mine', each)}"
                        for each in known[1].replace("'", "").replace(" or ", ", ").split(", ")
                        if each
                    ]
        return said

    def _try(self, name: str, word: str, context: Sequence[str], values: dict[str, Any], base: Any) -> str:
        key, _, inner = re.sub(r"\(\w+\)", "", name).partition("[].")
        at, _, value = word.partition("=")
        changed = copy.deepcopy(values)
        try:
            _set(changed, at, OverridesParser.create().parse_override(f"++{word}").value())
            config = as_written(compose.load(changed, [*context, word]))
        except (ConfigError, HydraException) as error:
            return f"{word}: {error}"
        seen = SEEN_IN.get(key, key)
        if (_at(config, seen) == _at(base, seen) and key not in ONE_VALUE) or inner.rpartition(".")[2] not in value:
            return f"{word}: changes nothing"
        return ""

    def choice(self, word: str) -> str:
        """Return "" if *word*, the choice of a group, composes with some context, else what was said to the last."""
        group = word.partition("=")[0]
        fitting = (context for context in CONTEXTS if f"{group}=" not in context)
        return "" if any(self._base(f"{context} {word}".strip()) for context in fitting) else self.said

    def _base(self, context: str) -> tuple[dict[str, Any], Any] | None:
        if context not in self._composed:
            rest, options = parse("run", context.split())
            line = compose.CommandLine.of(rest, options)
            try:
                with compose.initialized(line):
                    values = compose.plain(line, line.words)
                    self._composed[context] = values, as_written(compose.load(values, line.words))
            except Exception as error:  # what does not go together
                self._composed[context], self.said = None, str(error)
        return self._composed[context]


def _words(name: str) -> list[str]:
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


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *parts, last = key.split(".")
    for part in parts:
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    values[last] = value
