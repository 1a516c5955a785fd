# SPDX-License-Identifier: Apache-2.0
"""Refuse configurations: combinations that cannot run, and quantities that are not plausible.

`check` applies the rules between parts of a configuration and those about this machine.  A rule is a function that
yields one line for each violation: the value, the rule, the way out.  All rules apply, so that a user sees every
line at once, before anything is started or written.  A part checks its own values (``__post_init__``); experiments
that place ranks in their own way have a ``check`` of their own.

`check_quantities` finds typing mistakes: ``hw.nic.rate=400`` means 400 bytes a second to the code and 400 Gbps to
its author.  Numbers of files are in base units; `BOUNDS` hold wherever a value comes from.  Annotations of the
dataclasses (`pdsim.core.units.Rate` and so on) say which numbers are rates, times or sizes, so a new key needs a row
of `BOUNDS` only for its plausible range.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pdsim.calibration.definition import covers
from pdsim.compute.roofline import weight_bytes
from pdsim.config import Config, Launch, computing
from pdsim.core import plugins, units
from pdsim.core.errors import ConfigError, instead, near
from pdsim.core.units import format_size
from pdsim.hardware.costs import Engine
from pdsim.hardware.machine import Machine
from pdsim.models.parallel import Side
from pdsim.serving.deployment import colocated_places, places
from pdsim.serving.policies import handoff_of
from pdsim.serving.settings import Workload
from pdsim.transfer.job import Place

__all__ = ["BOUNDS", "Quantity", "check", "check_quantities", "notes"]


def check(config: Config) -> None:
    """Raise a `ConfigError` with one line for each reason why *config* cannot be run, if there are any.

    Each line has the key, its value and what to set instead, so that a user corrects all in one go.  Nothing is
    started and nothing written; for ``target=real`` the engine's library is probed in a process of its own, which
    takes a second.
    """
    experiment = plugins.resolve(plugins.EXPERIMENTS, config.experiment.name)
    problems = [*_general(config, experiment), *(_serving(config) if getattr(experiment, "SERVES", False) else ())]
    if problems:
        raise ConfigError("\n".join(problems))


def notes(config: Config, typed: Iterable[str]) -> list[str]:
    """Return a line for each thing that a run of *config* should say, though it is not wrong.

    These are options of a backend that were *typed*, as dotted keys say, and that the model does not look at
    (`Engine.modelled` has those that it does), what the backend says of its environment, and where times of forwards
    come from.
    """
    if config.target != "model":
        from backends import registry

        return list(registry.notes(config.backend)) if config.backend.implementation in registry.names() else []
    typed_options = {".".join(key.split(".")[2:]) for key in typed if covers(["backend.options"], key)}
    options = sorted(typed_options - set(config.backend.modelled))
    serves = getattr(plugins.resolve(plugins.EXPERIMENTS, config.experiment.name), "SERVES", False)
    forwards = computing.notes(config) if serves else []
    if not options:
        return forwards
    named = f"backend.options{'.' if all(options) else ''}{', '.join(options)}"
    return [f"{named} has no effect on target=model: only the real engine reads options (target=real)", *forwards]


def _general(config: Config, experiment: Any) -> Iterator[str]:
    name, able = config.experiment.name, getattr(experiment, "TARGETS", ("model", "real"))
    if config.target not in able:
        yield f"experiment={name} does not run on target={config.target}; use target={' or target='.join(able)}"
    if config.target == "model" and config.launch != Launch():
        yield "launch sets options of processes, and target=model starts none; set target=real or leave launch out"
    if not config.output:
        yield "output must name a folder, got ''"
    if config.target == "live":
        from backends.live.live_deployment import problems

        yield from problems(config)
        return
    yield from _names(config)
    yield from _vendor(config)
    yield from _paths(config)
    yield from _collective(config)
    if config.target == "real":
        yield from _real(config)


def _serving(config: Config) -> Iterator[str]:
    yield from _workload(config.workload)
    if config.target == "live":
        return  # the servers have their own memory and places
    yield from _placement(config)
    yield from _staging(config)
    yield from _decode_cache(config)
    yield from _serving_engine(config)
    sides = {"prefill": config.parallel.prefill}
    if not getattr(config.experiment, "colocated", False):
        sides["decode"] = config.parallel.decode
    for name, side in sides.items():
        yield from _heads(config, name, side)
        yield from _memory(config, name, side)


# --- machine and engine --------------------------------------------------------------------------------------------


def _names(config: Config) -> Iterator[str]:
    for key, name in (("hw.name", config.hw.name), ("backend.name", config.backend.name)):
        if not re.fullmatch(r"[^/\0]{1,64}", name):
            yield f"{key}={name!r:.80} must be 1 to 64 characters without a slash: it is part of a folder's name"


def _vendor(config: Config) -> Iterator[str]:
    hw, backend = config.hw, config.backend
    if hw.vendor not in backend.vendors:
        yield (
            f"backend={backend.name} runs on {' and '.join(backend.vendors)} machines, hw={hw.name} is {hw.vendor}; "
            f"leave backend out for the one that suits hw={hw.name}, or see pdsim list backend"
        )


def _paths(config: Config) -> Iterator[str]:
    hw, backend = config.hw, config.backend
    if hw.link is not None and backend.inter is None:
        yield f"backend={backend.name} works within a node only, and hw={hw.name} joins nodes; {_elsewhere(config)}"
    models = (backend.intra,) if hw.nodes == 1 else (backend.intra, backend.inter)
    for path in sorted({model.path for model in models if model is not None}):
        if path == "nvlink" and (not hw.gpus or hw.interconnect.kind == "none"):
            lack = "has no GPUs" if not hw.gpus else "has no link between GPUs (hw.interconnect.kind=none)"
        elif path == "rdma" and not hw.nic.count:
            lack = "has no network cards (hw.nic.count=0)"
        else:
            continue
        yield f"backend={backend.name} moves bytes over {path}, but hw={hw.name} {lack}; {_elsewhere(config)}"


def _elsewhere(config: Config) -> str:
    if config.hw.vendor == "cpu":
        from backends import registry

        *others, last = registry.on_hosts(config.hw.nodes)
        return f"use backend={' or '.join(filter(None, (', '.join(others), last)))}"
    return f"leave backend out for the one that suits hw={config.hw.name}"


def _real(config: Config) -> Iterator[str]:
    # a machine with `guest` is emulated, and needs the emulator instead of the engine's library
    hw, backend = config.hw, config.backend
    if config.memory != "timing":
        yield f"memory={config.memory} applies to target=model; real memory always has contents; leave memory out"
    yield from _own_rules(backend)
    yield from _guest(config) if hw.guest else _engine(backend)
    yield from _options(backend)
    if hw.link is not None:
        yield from _link()
    if hw.gpus:
        wanted = f"{hw.nodes * hw.gpus} {hw.vendor} GPUs"
        here = _gpus_here(hw.vendor)
        if hw.nodes > 1 or here < hw.gpus:
            yield (
                f"target=real on hw={hw.name} needs {wanted}, but this machine has {here or 'none'}; "
                "use hw=loopback for real bytes, or target=model"
            )


def _engine(backend: Engine) -> Iterator[str]:
    from backends import registry

    if backend.name in registry.backends():
        diagnosis = registry.diagnose(backend.name)
        if not diagnosis.works:
            yield f"backend={backend.name} does not work on this machine: {diagnosis.reason}; {diagnosis.remedy}"
    elif backend.implementation not in registry.names():
        yield (
            f"backend={backend.name} needs the engine {backend.implementation!r}, which no package provides; "
            f"choose one of {', '.join(registry.backends())} (pdsim doctor)"
        )


def _own_rules(backend: Engine) -> Iterator[str]:
    from backends import registry

    if backend.implementation in registry.names():
        yield from registry.check(backend)


def _collective(config: Config) -> Iterator[str]:
    collective = config.collective
    if collective is None:
        return
    if collective.timing == "device" or collective.implementation not in plugins.names(plugins.COLLECTIVES):
        from backends import registry

        yield from registry.check_collective(collective)


def _options(backend: Engine) -> Iterator[str]:
    from backends import registry

    if not backend.options or backend.implementation not in registry.names():
        return
    own = getattr(registry.load(backend.implementation), "options", ())
    for name in backend.options:
        if name not in own and not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
            yield (
                f"backend.options.{name} is not an option of backend={backend.name}; {near(name, own)}choose one of "
                f"{', '.join((*own, 'environment variables'))} (in capitals)"
            )


def _guest(config: Config) -> Iterator[str]:
    from backends.emulation.guest.engines import missing_requirements

    if problem := missing_requirements(config.backend.name):
        yield f"target=real emulates hw={config.hw.name}: {problem}"


def _link() -> Iterator[str]:
    from backends.emulation.link.emulated_link import missing_requirements

    if problem := missing_requirements():
        yield problem


def _gpus_here(vendor: str) -> int:
    # NVIDIA's driver says so, or for others the nodes of Linux's KFD that have a GPU's number.
    if vendor == "nvidia":
        from backends.diagnosis import gpu_count

        return gpu_count()
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    return sum(node.read_text().strip() not in ("", "0") for node in nodes)


# --- the workload --------------------------------------------------------------------------------------------------

_GENERATED = ("poisson", "gamma", "bursty")
_USES = {
    "rate": (*_GENERATED, "sessions"),
    "cv": ("gamma",),
    "burst": ("bursty",),
    "burst_length": ("bursty",),
    "speed": ("embedded",),
    "jitter": ("embedded",),
    **dict.fromkeys(("input_mean", "input_cv", "output_mean", "output_cv", "ramp"), (*_GENERATED, "sessions")),
    **dict.fromkeys(("users", "turns", "think", "shared"), ("sessions",)),
}
"""Which arrivals a key of the workload is for; the others do not look at it."""


def _workload(workload: Workload) -> Iterator[str]:
    arrivals = "embedded" if workload.trace is not None else workload.arrivals
    unset = Workload()
    for name, uses in _USES.items():
        value = getattr(workload, name)
        if arrivals not in uses and value != getattr(unset, name):
            if workload.trace is not None:
                yield f"workload.{name}={value} has no effect on a trace; leave it out, and any workload=NAME too"
                continue
            other = "or set workload.speed, which replays a trace faster" if name == "rate" else "or leave it out"
            yield (
                f"workload.{name}={value} has no effect on {arrivals} arrivals; choose workload={uses[0]}, {other}"
            )


# --- placement -----------------------------------------------------------------------------------------------------


def _placement(config: Config) -> Iterator[str]:
    try:
        if getattr(config.experiment, "colocated", False):
            where = colocated_places(config.parallel, config.hw)
            if config.hw.gpus:
                yield from _split("prefill", config.parallel.prefill, where, config.hw)
            return
        prefill, decode = places(config.parallel, config.hw)
    except ConfigError as error:
        yield str(error)
        return
    if config.hw.gpus:
        yield from _split("prefill", config.parallel.prefill, prefill, config.hw)
        yield from _split("decode", config.parallel.decode, decode, config.hw)
    yield from _connections(config, {place.node for place in prefill}, {place.node for place in decode})


def _split(name: str, side: Side, where: Sequence[Place], hw: Machine) -> Iterator[str]:
    # *where* has the places of the ranks, those of one instance together
    together = side.tp if side.ep == 1 else side.attention_tp  # experts may lie on other nodes
    instances = [where[first : first + together] for first in range(0, len(where), together)]
    if side.ep > hw.gpus and side.ep % hw.gpus:
        yield (
            f"parallel.{name}.ep={side.ep} fills a node of hw={hw.name} ({hw.gpus} GPUs each) in part; "
            "choose a multiple of its GPUs"
        )
    if any(len({place.node for place in instance}) > 1 for instance in instances):
        yield (
            f"parallel.{name}.tp={side.tp} would put one instance on several nodes of hw={hw.name} ({hw.gpus} GPUs "
            f"each): tensor parallelism is modelled within a node only; choose tp values that fill the nodes, or "
            "experts and attention groups of their own (ep=tp, dp)"
        )


def _connections(config: Config, prefill: set[int], decode: set[int]) -> Iterator[str]:
    backend, nodes = config.backend, prefill | decode
    if backend.intra is None and prefill & decode:
        yield (
            f"backend={backend.name} works across nodes only, but prefill and decode share one; {_elsewhere(config)}"
        )
    if backend.inter is None and len(nodes) > 1:
        yield (
            f"backend={backend.name} works within a node only, but prefill and decode lie on different nodes of "
            f"hw={config.hw.name}; use a backend over rdma or tcp, such as backend=mooncake"
        )


def _staging(config: Config) -> Iterator[str]:
    if config.kv.staging and not config.policy.staging:
        yield (
            f"kv.staging=true, but backend={config.backend.name} has no staged path (backend.policy.staging=false); "
            "use a mooncake or nixl backend, or leave kv.staging out"
        )


def _decode_cache(config: Config) -> Iterator[str]:
    # SGLang's rule; an engine that pulls, such as vLLM, has none
    engine, backend = config.engine, config.backend
    if not config.cache.decode or config.policy.decode_cache:
        return
    if engine.handoff in plugins.names(plugins.HANDOFFS) and not handoff_of(engine).serial:
        yield (
            f"cache.decode=true with backend={backend.name}: SGLang keeps a prefix cache on decode over nixl and "
            "mooncake only; choose such a backend, or leave cache.decode out"
        )


def _serving_engine(config: Config) -> Iterator[str]:
    engine = config.engine
    for key, name, group in (
        ("engine.scheduler", engine.scheduler, plugins.SCHEDULERS),
        ("engine.handoff", engine.handoff, plugins.HANDOFFS),
    ):
        if name not in plugins.names(group):
            yield f"{key}={name} is provided by no installed package; {instead(name, plugins.names(group))}"
            return
    if config.kv.staging and engine.page_order == "heads":
        yield (
            "kv.staging=true gathers tokens, but pages are kept by heads (engine.page_order=heads), where "
            "a slice is one descriptor a page; leave kv.staging out"
        )
    if not handoff_of(engine).serial:
        return
    if config.kv.staging:
        yield (
            f"kv.staging=true, but engine={engine.name} pulls (engine.handoff={engine.handoff}); "
            "leave kv.staging out"
        )
    if getattr(config.experiment, "dp_rank", "") == "query":
        yield (
            f"experiment.dp_rank=query, but engine={engine.name} pulls (engine.handoff={engine.handoff}): prefill's "
            "answer names the group; leave experiment.dp_rank out"
        )


# --- the model -----------------------------------------------------------------------------------------------------


def _heads(config: Config, name: str, side: Side) -> Iterator[str]:
    # KV heads are divided among the ranks of an attention group, `Side.attention_tp`, and repeated where there are
    # fewer heads than ranks. Models with a latent cache have none to divide.
    model, tp, attention_tp = config.model, side.tp, side.attention_tp
    if model.heads % (tp if side.ep == 1 else attention_tp):
        fit = [n for n in (1, 2, 4, 8, 16, 32) if model.heads % n == 0]
        yield (
            f"parallel.{name}.tp={tp} does not divide the {model.heads} heads of model={model.name}; "
            f"use one of {', '.join(map(str, fit))}"
        )
    elif model.attention == "gqa" and model.kv_heads % attention_tp and attention_tp % model.kv_heads:
        yield (
            f"parallel.{name}.tp={tp} over dp={side.dp} groups neither divides the {model.kv_heads} KV heads of "
            f"model={model.name} nor is a multiple of them; use powers of two"
        )


def _memory(config: Config, name: str, side: Side) -> Iterator[str]:
    # a pool that is left out takes what the weights leave; a host emulates compute and holds no weights
    gpu, model = config.hw.gpu, config.model
    if gpu is None or not config.hw.gpus:
        return
    share = weight_bytes(model, side)
    usable = gpu.memory * config.scheduler.memory_fraction
    if share >= usable:
        yield (
            f"model={model.name} puts {format_size(share)} of weights on each GPU at parallel.{name}.tp={side.tp}, "
            f"and {format_size(usable)} of {config.hw.name}'s {gpu.name} are usable (scheduler.memory_fraction="
            f"{config.scheduler.memory_fraction}); raise tp or choose a smaller model (pdsim list model)"
        )
    elif share + config.kv.pool > usable:
        yield (
            f"kv.pool={format_size(config.kv.pool)} and {format_size(share)} of weights exceed the "
            f"{format_size(usable)} usable on each GPU at parallel.{name}.tp={side.tp}; lower kv.pool, or leave it "
            f"out to use all remaining memory"
        )


# --- quantities ----------------------------------------------------------------------------------------------------

_DAY = 86400.0
_MONTH = 30 * _DAY
_FEW, _MANY = 1, 10**5  # counts in a machine or a model
_LOOK = "or set check.plausible=false to take it as it is"

BOUNDS: tuple[tuple[str, float, float, float], ...] = (
    # key, least, usual, most, in SI units: an order of magnitude or more beyond anything that is built or thought of
    ("hw.nodes", _FEW, 2, _MANY),
    ("hw.gpus", _FEW, 8, 1024),
    ("hw.gpu.memory", 2**26, 80 * 2**30, 2**44),
    ("hw.gpu.memory_rate", 1e9, 3e12, 1e15),
    ("hw.gpu.compute", 1e10, 5e14, 1e18),
    ("hw.gpu.pcie", 1e8, 5e10, 1e13),
    ("time:hw.*.copies.*", 1e-12, 5e-6, 0.1),
    ("hw.*.idle_after", 1e-9, 1e-3, _DAY),
    ("hw.gpu.idle_wake", 1e-9, 1e-5, 1.0),
    ("hw.interconnect.rate", 1e8, 4.5e11, 1e14),
    ("hw.interconnect.latency", 1e-10, 1e-6, 0.01),
    ("hw.nic.count", _FEW, 8, 1024),
    ("hw.nic.rate", 1e6, 5e10, 1e13),
    ("hw.nic.latency", 1e-10, 2e-6, 1.0),
    ("hw.host.memory", 2**24, 2**40, 2**50),
    ("hw.host.memory_rate", 1e8, 2e11, 1e14),
    ("hw.host.tcp_rate", 1e3, 2.5e9, 1e13),
    ("hw.host.tcp_latency", 1e-9, 5e-5, 10.0),
    ("hw.host.wake", 1e-9, 1e-5, 1.0),
    ("hw.host.idle_wake", 1e-9, 1e-5, 1.0),
    ("hw.link.rate*", 125.0, 1.25e7, 1e13),
    ("hw.link.back", 125.0, 1.25e7, 1e13),
    ("hw.link.delay", 1e-9, 5e-3, 100.0),
    ("hw.link.timeout", 1e-6, 0.2, 3600.0),
    ("hw.link.backlog", 576, 2**24, 2**40),
    ("hw.link.window", 576, 2**22, 2**40),
    ("hw.link.initial", _FEW, 10, _MANY),
    ("hw.link.changes.start", 1e-9, 2.0, _MONTH),
    ("hw.link.changes.end", 1e-9, 2.0, _MONTH),
    ("backend.int??.queues", _FEW, 4, _MANY),
    ("backend.int??.line", 1e3, 4.5e11, 1e14),
    ("backend.int??.*rate", 1e3, 5e10, 1e14),
    ("backend.int??.small.bytes", 1, 2**16, 2**40),
    ("backend.int??.depth", _FEW, 128, 10**7),
    ("backend.int??.lanes", _FEW, 16, 10**7),
    ("backend.int??.ramp.first", _FEW, 64, 10**7),
    ("backend.int??.small.descriptors", _FEW, 16, 10**7),
    ("time:backend.int??.*descriptor", 1e-12, 5e-6, 0.1),
    ("time:backend.int??.*", 1e-12, 5e-6, 1.0),
    ("backend.timeout", 1e-6, 30.0, _MONTH),
    ("collective.*.copies", _FEW, 1, 100),
    ("collective.*rate", 1e3, 3e11, 1e14),
    ("collective.pool", 2**10, 2**32, 2**44),
    ("collective.timeout", 1e-6, 30.0, _MONTH),
    ("collective.grow_latency", 1e-9, 1e-3, 60.0),
    ("time:collective.*", 1e-12, 2e-5, 10.0),
    ("model.parameters", 1e4, 3e10, 1e15),
    ("model.active", 1e4, 3e10, 1e15),
    ("model.context", 2, 131072, 10**9),
    ("model.dtype_bytes", 1, 2, 8),
    ("model.layers", _FEW, 64, 10**4),
    ("model.hidden", _FEW, 8192, 10**7),
    ("model.*head*", _FEW, 64, _MANY),
    ("model.latent_dim", _FEW, 576, 10**6),
    ("parallel.*", _FEW, 4, _MANY),
    ("workload.count", 1, 1000, 10**7),
    ("workload.rate", 1e-6, 1.0, 1e7),
    ("workload.speed", 1e-6, 1.0, 1e6),
    ("workload.load", 0, 0.7, 20.0),
    ("workload.skip", 0, 600.0, _MONTH),
    ("workload.seconds", 0, 600.0, _MONTH),
    ("workload.warmup", 0, 60.0, _MONTH),
    ("workload.cooldown", 0, 60.0, _MONTH),
    ("workload.burst_length", 1e-6, 10.0, _MONTH),
    ("workload.patience", 1e-6, 10.0, _MONTH),
    ("workload.burst", 1, 4, 1e6),
    ("workload.*cv", 1e-6, 1.0, 100.0),
    ("workload.*_mean", 1, 1000, 10**9),
    ("kv.page_size", 1, 64, 10**6),
    ("kv.pool", 2**10, 40 * 2**30, 2**44),
    ("kv.staging_wait", 1e-9, 5.0, _DAY),
    ("kv.staging_*", 2**10, 2**32, 2**44),
    ("kv.window_share", 1e-6, 0.8, 1e6),
    ("scheduler.chunk", 1, 8192, 10**8),
    ("scheduler.*_batch", 1, 256, 10**7),
    ("compute.allreduce_rate", 1e6, 3e11, 1e14),
    ("compute.allreduce_latency", 1e-9, 1e-5, 1.0),
    ("compute.exchange_latency", 1e-9, 1e-5, 1.0),
    ("compute.overhead", 1e-9, 2e-3, 60.0),
    ("compute.scale", 1e-9, 1.0, 1000.0),
    ("slo.ttft", 1e-6, 1.0, _DAY),
    ("slo.tpot", 1e-9, 0.03, 3600.0),
    ("experiment.deadline", 1e-3, 60.0, _MONTH),
    ("experiment.*timeout", 1e-6, 60.0, _MONTH),
)
"""The first pattern that a key matches holds for it, places in lists left out; 0 and infinity are always allowed."""


class Quantity(NamedTuple):
    """A number of a configuration.

    Attributes:
        key: Dotted, with places in lists in brackets: ``hw.link.changes[0].start``.
        kind: Of `_UNITS`: rate, time, computation, size or count; empty for what has no unit.
        value: In the base unit of its kind.
    """

    key: str
    kind: str  # of `_UNITS`, or "" for a count
    value: float


_UNITS: Mapping[str, tuple[str, ...]] = {
    "rate": ("Gbps", "GB/s", "Mbps", "MB/s", "kbps", "kB/s", "TB/s", "B/s"),
    "time": ("s", "ms", "us", "ns", "min", "h"),
    "computation": ("TFLOPS", "PFLOPS", "GFLOPS", "FLOPS"),
    "size": ("GiB", "MiB", "KiB", "TiB", "B"),
    "count": ("B", "M", "T"),
}
"""By kind of quantity: the units to suggest."""

_PARSERS: Mapping[Any, tuple[str, Any]] = {
    units.parse_rate: ("rate", units.format_rate),
    units.parse_time: ("time", units.format_time),
    units.parse_flops: ("computation", lambda value: f"{value:.3g} FLOPS"),
    units.parse_size: ("size", units.format_size),
    units.parse_count: ("count", lambda value: f"{value:.3g}"),
}
_BY_KIND = {kind: (parse, show) for parse, (kind, show) in _PARSERS.items()}
_BASE = {
    "rate": ("bytes a second", "B/s"),
    "time": ("seconds", "s"),
    "computation": ("operations a second", "FLOPS"),
}
"""Kinds that need a unit; a size without one is in bytes."""


def check_quantities(config: Config, values: Mapping[str, Any], typed: Iterable[str]) -> None:
    """Raise a `ConfigError` with a line for each quantity without its unit, or beyond its `BOUNDS`, if there is any.

    Units are asked for where a quantity was *typed*, as dotted keys say; *values* are those that *config* was made
    of. Of 0 the unit does not matter.
    """
    keys = tuple(typed)
    problems: tuple[list[str], list[str]] = [], []
    for quantity, beyond in _questionable(config, {key.partition(".")[0] for key in keys}):
        line = _bare(quantity, values, keys)
        if not line and beyond and config.check.plausible:
            line = _beyond(quantity, _written(values, quantity.key))
        if line:
            problems[covers(keys, _without_places(quantity.key))].append(line)
    if lines := problems[True] or problems[False]:  # what was typed may be why others are beyond their bounds
        raise ConfigError("\n".join(lines))


def _bare(quantity: Quantity, values: Mapping[str, Any], typed: tuple[str, ...]) -> str:
    # Only rates, times and computation need one (`_BASE`), and only where its key is among *typed*, dotted keys with
    # places in lists left out. The text is looked up in *values*: ``400Gbps`` and ``400`` are different texts of
    # numbers alike.
    key, kind, value = quantity
    if kind not in _BASE or not 0 < value < math.inf or not covers(typed, _without_places(key)):
        return ""
    text = _written(values, key)
    if not re.fullmatch(r"[-+\d.eE_ ]+", text):
        return ""
    meant = _meant(_without_places(key), kind, text)
    example = f"did you mean {meant}?" if meant else f"write it with one of {', '.join(_UNITS[kind])}."
    what, unit = _BASE[kind]
    return f"{key}={text} has no unit; {example} A number alone would be {what}: {text}{unit}"


def _beyond(quantity: Quantity, text: str = "") -> str:
    # *text* is what was written, whose number may be meant with another unit.
    key, kind, value = quantity
    row = _row(_without_places(key), kind)
    if row is None or not value or not math.isfinite(value) or row[1] <= value <= row[3]:
        return ""
    show = _BY_KIND[kind][1] if kind else _counted
    meant = _meant(_without_places(key), kind, text) if kind else ""
    hint = f"did you mean {meant}? Correct it, " if meant else "correct it, "
    return f"{key}={show(value)} is not plausible, expected {show(row[1])} to {show(row[3])}; {hint}{_LOOK}"


def _counted(number: float) -> str:
    return f"{number:,.0f}" if float(number).is_integer() and abs(number) < 1e15 else f"{number:g}"


_GUARDED = (
    *("hw", "backend", "model", "parallel", "collective", "workload", "kv", "scheduler", "compute", "slo"),
    "experiment",
)
_last: dict[str, tuple[Any, list[tuple[Quantity, str]]]] = {}
"""The parts of the last configuration: in a sweep most are those of the next, too."""


def _questionable(config: Config, typed: Collection[str]) -> Iterator[tuple[Quantity, str]]:
    # Numbers of a calibration and of sources are left out.  A part that is the object of the call before is not
    # looked at again: in a sweep most are.
    for name in _GUARDED:
        part = getattr(config, name)
        if name not in _last or _last[name][0] is not part:
            _last[name] = part, [(quantity, _beyond(quantity)) for quantity in _of(part, name)]
        yield from (_last[name][1] if name in typed else (pair for pair in _last[name][1] if pair[1]))


def _of(instance: Any, at: str) -> Iterator[Quantity]:
    if not is_dataclass(instance):
        return
    hints = _hints(type(instance))  # type: ignore[arg-type]  # a class is hashable
    for field in fields(instance):
        yield from _under(hints[field.name], getattr(instance, field.name), f"{at}.{field.name}")


@cache
def _hints(cls: type) -> Mapping[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _under(hint: Any, value: Any, at: str) -> Iterator[Quantity]:
    # Dataclasses and sequences are gone into; mappings, such as options and sources, have no
    # quantities.
    if is_dataclass(value):
        yield from _of(value, at)
    elif isinstance(value, tuple | list):
        inner = next(iter(typing.get_args(hint)), None)
        for index, item in enumerate(value):
            yield from _under(inner, item, f"{at}[{index}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield Quantity(at, _kind(hint), value)


def _kind(hint: Any) -> str:
    # The first parser anywhere within *hint* counts: ``Seconds``, ``tuple[Seconds, ...]`` and ``Seconds | None`` are
    # times.
    if typing.get_origin(hint) is typing.Annotated:
        return _PARSERS.get(typing.get_args(hint)[1], ("", None))[0]
    return next((kind for inner in typing.get_args(hint) if (kind := _kind(inner))), "")


def _without_places(key: str) -> str:
    return re.sub(r"\[\d+\]", "", key)


def _written(values: Any, key: str) -> str:
    # One value may stand for a list of one.
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(values, Mapping):
            values = values.get(part)
        elif isinstance(values, list | tuple):
            values = values[int(part)] if part.isdecimal() and int(part) < len(values) else None
    return str(values) if isinstance(values, int | float | str) and not isinstance(values, bool) else ""


@cache
def _row(key: str, kind: str) -> tuple[str, float, float, float] | None:
    return next((row for row in BOUNDS if fnmatchcase(f"{kind}:{key}" if ":" in row[0] else key, row[0])), None)


def _meant(key: str, kind: str, text: str) -> str:
    # Nearest is by ratio; units like the one that was written, bits or bytes, go before others, and minutes last.
    # Numbers that nobody writes, such as 0.0001 or 3000000, are not suggested, nor what stands there already.  A key
    # without bounds gets the first unit of its kind.
    #
    # >>> _meant("hw.interconnect.latency", "time", "2h"), _meant("hw.nic.rate", "rate", "450kbps")
    # ('2us', '450Gbps')
    match = re.match(r"\s*([-+\d.eE_]*\d\.?)\s*([A-Za-z/]*)\s*$", text)
    number = float(match[1]) if match else 0.0
    if match is None or not 0.1 <= number < 1e5:
        return ""
    row, parse = _row(key, kind), _BY_KIND[kind][0]
    if row is None:
        return f"{number:.12g}{_UNITS[kind][0]}"
    _, least, usual, most = row
    readings = []
    for unit in _UNITS[kind]:
        value = float(parse(f"{number:.12g}{unit}"))
        if least <= value <= most:
            other = unit in ("min", "h") or (kind == "rate" and unit[-3:] != match[2][-3:] != "")
            readings.append((other, abs(math.log(value / usual)), f"{number:.12g}{unit}"))
    nearest = min(readings, default=(False, 0.0, ""))[2]
    return "" if nearest == text else nearest
