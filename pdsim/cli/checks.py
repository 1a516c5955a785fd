# SPDX-License-Identifier: Apache-2.0
"""Combinations that cannot be run, each valid by itself: found before anything is started or written.

A rule is a function that yields one line for each violation: what was asked for, the rule, the way
out.  All rules are asked, so that a user sees every line at once.

Rules here are about several parts of a configuration, or about this machine.  What one part can
find wrong by itself it refuses when it is made (its ``__post_init__``), and quantities that nobody
has are found by `pdsim.cli.plausible`.  Experiments that place ranks in their own way have a
``check`` of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pdsim.calibration.definition import covers
from pdsim.compute.roofline import weight_bytes
from pdsim.config import Config
from pdsim.core import plugins
from pdsim.core.errors import ConfigError
from pdsim.core.guards import instead, near
from pdsim.core.units import format_size
from pdsim.hardware.costs import Engine
from pdsim.hardware.machine import Machine
from pdsim.models.parallel import Side
from pdsim.serving.deployment import places
from pdsim.serving.seams import handoff_of
from pdsim.serving.settings import Workload
from pdsim.transfer.job import Place

__all__ = ["SERVING", "check", "notes"]

SERVING = ("serve",)
"""The experiments that place prefill and decode instances; the others check for themselves what they place."""


def check(config: Config) -> None:
    """Raise a `ConfigError` with one line for each reason why *config* cannot be run, if there are any.

    All reasons are found at once, each with the key, its value and what to set instead, so that a user corrects them
    in one go. Nothing is started and nothing written; for ``target=real`` the engine's library is probed in a
    process of its own, which takes a second.

    What a part of the configuration can find wrong by itself it has refused when it was made; here are the rules
    between parts, and those about this machine.
    """
    serves = config.experiment.name in SERVING
    problems = [*_general(config), *(_serving(config) if serves else ())]
    if problems:
        raise ConfigError("\n".join(problems))


def notes(config: Config, typed: Iterable[str]) -> list[str]:
    """Return what was *typed*, as dotted keys say, and changes nothing of this run: a line each.

    So far these are options of a backend that the model does not look at (`Engine.modelled` has
    those that it does).
    """
    typed_options = {".".join(key.split(".")[2:]) for key in typed if covers(["backend.options"], key)}
    options = sorted(typed_options - set(config.backend.modelled))
    if not options or config.target != "model":
        return []
    named = f"backend.options{'.' if all(options) else ''}{', '.join(options)}"
    return [f"{named} changes nothing of target=model: options are for the real engine, target=real"]


def _general(config: Config) -> Iterator[str]:
    """Yield what no experiment can do.

    This backend on this machine, and `target=real` on what this machine lacks.
    """
    name = config.experiment.name
    if config.target not in (
        able := getattr(plugins.resolve(plugins.EXPERIMENTS, name), "TARGETS", ("model", "real"))
    ):
        yield f"experiment={name} does not run on target={config.target}; use target={' or target='.join(able)}"
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
    """Yield what a serving run cannot do: its placement, the shape of its model and the memory for it."""
    yield from _workload(config.workload)
    if config.target == "live":
        return  # the servers have their own memory and places
    yield from _placement(config)
    yield from _staging(config)
    yield from _serving_engine(config)
    for name, side in (("prefill", config.parallel.prefill), ("decode", config.parallel.decode)):
        yield from _heads(config, name, side)
        yield from _memory(config, name, side)


# --- machine and engine --------------------------------------------------------------------------------------------


def _names(config: Config) -> Iterator[str]:
    """Yield for each name that the folder of a run cannot have in its own."""
    for key, name in (("hw.name", config.hw.name), ("backend.name", config.backend.name)):
        if not re.fullmatch(r"[^/\0]{1,64}", name):
            yield f"{key}={name!r:.80} must be 1 to 64 characters without a slash: it is part of a folder's name"


def _vendor(config: Config) -> Iterator[str]:
    """Yield if the engine runs on machines of other vendors only."""
    hw, backend = config.hw, config.backend
    if hw.vendor not in backend.vendors:
        yield (
            f"backend={backend.name} runs on {' and '.join(backend.vendors)} machines, hw={hw.name} is {hw.vendor}; "
            f"leave backend out for the one that suits hw={hw.name}, or see pdsim list backend"
        )


def _paths(config: Config) -> Iterator[str]:
    """Yield for each path of the engine that the machine does not have."""
    hw, backend = config.hw, config.backend
    if hw.link is not None and backend.inter is None:
        yield f"backend={backend.name} works within a node only, and hw={hw.name} joins nodes; {_elsewhere(config)}"
    models = (backend.intra,) if hw.nodes == 1 else (backend.intra, backend.inter)
    for path in sorted({model.path for model in models if model is not None}):
        if path == "nvlink" and (not hw.gpus or hw.interconnect.kind == "none"):
            lack = "has no GPUs" if not hw.gpus else "joins its GPUs by nothing (hw.interconnect.kind=none)"
        elif path == "rdma" and not hw.nic.count:
            lack = "has no network cards (hw.nic.count=0)"
        else:
            continue
        yield f"backend={backend.name} moves bytes over {path}, but hw={hw.name} {lack}; {_elsewhere(config)}"


def _elsewhere(config: Config) -> str:
    """Return what to do where the engine has no path.

    On hosts that is to name engines which work there; on machines with GPUs, to let the machine
    choose its own.
    """
    if config.hw.vendor == "cpu":
        from backends import registry

        *others, last = registry.on_hosts(config.hw.nodes)
        return f"use backend={' or '.join(filter(None, (', '.join(others), last)))}"
    return f"leave backend out for the one that suits hw={config.hw.name}"


def _real(config: Config) -> Iterator[str]:
    """Yield what real ranks cannot do here: memory of the model, options, the engine, the link, too few GPUs.

    A machine with ``guest`` is emulated, and needs the emulator instead of the engine's library.
    """
    hw, backend = config.hw, config.backend
    if config.memory != "timing":
        yield f"memory={config.memory} is of the model, and real memory has contents anyway; leave memory out"
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
    """Yield if the engine is provided by no package, or if its library does not work on this machine.

    A library is tried in a process of its own (`backends.registry.diagnose`), which takes a second.
    """
    from backends import registry

    if backend.name in registry.backends():
        found = registry.diagnose(backend.name)
        if not found.works:
            yield f"backend={backend.name} does not work on this machine: {found.reason}; {found.remedy}"
    elif backend.implementation not in registry.names():
        yield (
            f"backend={backend.name} needs the engine {backend.implementation!r}, which no package provides; "
            f"choose one of {', '.join(registry.backends())} (pdsim doctor)"
        )


def _own_rules(backend: Engine) -> Iterator[str]:
    """Yield what the implementation itself finds wrong with its configuration: `Variant.check` of its class."""
    from backends import registry

    if backend.implementation in registry.names():
        yield from registry.check(backend)


def _collective(config: Config) -> Iterator[str]:
    """Yield what the library of the collective cannot do, which the model does not look at."""
    if config.collective is not None:
        from backends import registry

        yield from registry.check_collective(config.collective)


def _options(backend: Engine) -> Iterator[str]:
    """Yield for each option that is neither one of the implementation's nor named as environment variables are."""
    from backends import registry

    if not backend.options or backend.implementation not in registry.names():
        return
    own = getattr(registry.load(backend.implementation), "options", ())
    for name in backend.options:
        if name not in own and not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
            yield (
                f"backend.options.{name} is no option of backend={backend.name}; {near(name, own)}there are "
                f"{', '.join((*own, 'environment variables'))}, whose names are capitals"
            )


def _guest(config: Config) -> Iterator[str]:
    """Yield if this machine cannot emulate the one that is asked for."""
    from backends.emulation.guest.engines import missing_requirements

    if problem := missing_requirements(config.backend.name):
        yield f"target=real emulates hw={config.hw.name}: {problem}"


def _link() -> Iterator[str]:
    """Yield if this process may not make the link between nodes."""
    from backends.emulation.link.emulated_link import missing_requirements

    if problem := missing_requirements():
        yield problem


def _gpus_here(vendor: str) -> int:
    """Return how many GPUs of *vendor* this machine has.

    NVIDIA's driver says so, or for others the nodes of Linux's KFD that have a GPU's number.
    """
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
    """Yield for each key that was set and changes nothing.

    Who asks for a rate must not be shown a trace's times.  A key counts as set if it has not its
    default.
    """
    arrivals = "embedded" if workload.trace is not None else workload.arrivals
    unset = Workload()
    for name, uses in _USES.items():
        value = getattr(workload, name)
        if arrivals not in uses and value != getattr(unset, name):
            if workload.trace is not None:
                yield f"workload.{name}={value} changes nothing of a trace; leave it out, and any workload=NAME too"
                continue
            other = "or set workload.speed, which replays a trace faster" if name == "rate" else "or leave it out"
            yield (
                f"workload.{name}={value} changes nothing of {arrivals} arrivals; choose workload={uses[0]}, {other}"
            )


# --- placement -----------------------------------------------------------------------------------------------------


def _placement(config: Config) -> Iterator[str]:
    """Yield for each reason why ranks cannot be placed.

    Too few GPUs, an instance on several nodes, or a place where the engine does not work.
    """
    try:
        prefill, decode = places(config.parallel, config.hw)
    except ConfigError as error:
        yield str(error)
        return
    if config.hw.gpus:
        yield from _split("prefill", config.parallel.prefill, prefill, config.hw)
        yield from _split("decode", config.parallel.decode, decode, config.hw)
    yield from _connections(config, {place.node for place in prefill}, {place.node for place in decode})


def _split(name: str, side: Side, where: Sequence[Place], hw: Machine) -> Iterator[str]:
    """Yield if an instance of *side* would lie on several nodes.

    *where* has the places of its ranks, those of one instance together.
    """
    together = side.tp if side.ep == 1 else side.attention_tp  # experts may lie on other nodes
    instances = [where[first : first + together] for first in range(0, side.gpus, together)]
    if side.ep > hw.gpus and side.ep % hw.gpus:
        yield (
            f"parallel.{name}.ep={side.ep} leaves a node of hw={hw.name} ({hw.gpus} GPUs each) in part to others; "
            "choose a multiple of its GPUs"
        )
    if any(len({place.node for place in instance}) > 1 for instance in instances):
        yield (
            f"parallel.{name}.tp={side.tp} would put one instance on several nodes of hw={hw.name} ({hw.gpus} GPUs "
            f"each): tensor parallelism is modelled within a node only; choose tp values that fill the nodes, or "
            "experts and attention groups of their own (ep=tp, dp)"
        )


def _connections(config: Config, prefill: set[int], decode: set[int]) -> Iterator[str]:
    """Yield if prefill and decode meet within a node, or across nodes, where the engine does not work."""
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
    """Yield if staging is asked of an engine that has no staged path."""
    if config.kv.staging and not config.policy.staging:
        yield (
            f"kv.staging=true, but backend={config.backend.name} has no staged path (backend.policy.staging=false); "
            "use a mooncake or nixl backend, or leave kv.staging out"
        )


def _serving_engine(config: Config) -> Iterator[str]:
    """Yield for each part of the serving engine that no package has, and if a pulled handoff is asked for more."""
    engine = config.engine
    for key, name, group in (
        ("engine.scheduler", engine.scheduler, plugins.SCHEDULERS),
        ("engine.handoff", engine.handoff, plugins.HANDOFFS),
    ):
        if name not in plugins.names(group):
            yield f"{key}={name} is nothing that a package provides; {instead(name, plugins.names(group))}"
            return
    if config.kv.staging and engine.page_order == "heads":
        yield (
            "kv.staging=true gathers tokens, but pages are kept by heads (engine.page_order=heads), slices "
            "of which are one piece a page; leave kv.staging out"
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
    """Yield if tensor parallelism does not divide the model's heads, or neither divides nor multiplies its KV heads.

    KV heads are divided among the ranks of an attention group, `Side.attention_tp`, and repeated where there are
    fewer heads than ranks. Models with a latent cache have none to divide.
    """
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
    """Yield if weights and KV pool exceed what a GPU may use.

    *name* is the side, for the message.  ``scheduler.memory_fraction`` of a GPU may be used, and a
    pool that is left out takes what the weights leave.  A host emulates compute and holds no
    weights.
    """
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
            f"out for what is left"
        )
