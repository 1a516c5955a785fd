"""Combinations that cannot be run, each valid by itself: found before anything is started or written.

A rule is a function that yields one line for each violation: what was asked for, the rule, the way out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

from pdsim.config import Config
from pdsim.errors import ConfigError
from pdsim.serving.settings import Side
from pdsim.units import format_size

__all__ = ["general", "refuse", "serving"]


def refuse(problems: Iterable[str]) -> None:
    """Raise a `ConfigError` with all *problems*, one a line, if there are any."""
    lines = list(problems)
    if lines:
        raise ConfigError("\n".join(lines))


def general(config: Config) -> Iterator[str]:
    """Yield what no experiment can do: this backend on this machine, and `target=real` on what this machine lacks."""
    yield from _vendor(config)
    yield from _paths(config)
    if config.target == "real":
        yield from _real(config)


def serving(config: Config) -> Iterator[str]:
    """Yield what a serving run cannot do: the placement, the shape of the model, its memory and its workload."""
    placement = [*_gpus(config), *_nodes(config)]
    yield from placement
    if not placement:
        yield from _connections(config)
    for name, side in (("prefill", config.parallel.prefill), ("decode", config.parallel.decode)):
        yield from _heads(config, name, side)
        yield from _memory(config, name, side)
    if config.workload.trace is not None and not Path(config.workload.trace).is_file():
        yield f"workload.trace={config.workload.trace} is not a file; name one, or leave it out"


# --- machine and engine ---------------------------------------------------------------------------------------------


def _vendor(config: Config) -> Iterator[str]:
    hw, backend = config.hw, config.backend
    if hw.vendor not in backend.vendors:
        yield (
            f"backend={backend.name} runs on {' and '.join(backend.vendors)} machines, hw={hw.name} is {hw.vendor}; "
            f"leave backend out for the one that suits hw={hw.name}, or see pdsim list backend"
        )


def _paths(config: Config) -> Iterator[str]:
    """Yield for each path of the engine that the machine does not have."""
    hw, backend = config.hw, config.backend
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
    if config.hw.vendor == "cpu":
        return "use backend=mooncake_tcp, nixl_tcp or nixl_shm"
    return f"leave backend out for the one that suits hw={config.hw.name}"


def _real(config: Config) -> Iterator[str]:
    hw, backend = config.hw, config.backend
    if config.memory != "timing":
        yield f"memory={config.memory} is of the model, and real memory has contents anyway; leave memory out"
    if backend.implementation not in {entry.name for entry in entry_points(group="pdsim.backends")}:
        yield (
            f"backend={backend.name} with target=real needs the engine {backend.implementation!r}, which is not "
            f"installed; use target=model, or see pdsim doctor"
        )
    if hw.gpus:
        wanted = f"{hw.nodes * hw.gpus} {hw.vendor} GPUs"
        here = _gpus_here(hw.vendor)
        enough = hw.nodes == 1 and here >= hw.gpus
        lack = "no engine of this version moves GPU memory" if enough else f"this machine has {here or 'none'}"
        yield f"target=real on hw={hw.name} needs {wanted}, but {lack}; use hw=loopback for real bytes, or target=model"


def _gpus_here(vendor: str) -> int:
    if vendor == "nvidia":
        return len([*Path("/dev").glob("nvidia[0-9]*")])
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    return sum(node.read_text().strip() not in ("", "0") for node in nodes)


# --- placement ------------------------------------------------------------------------------------------------------


def _gpus(config: Config) -> Iterator[str]:
    hw, prefill, decode = config.hw, config.parallel.prefill, config.parallel.decode
    need, have = prefill.gpus + decode.gpus, hw.nodes * hw.gpus
    if hw.gpus and need > have:
        yield (
            f"parallel.prefill ({prefill.instances} x tp={prefill.tp}) and parallel.decode ({decode.instances} x "
            f"tp={decode.tp}) need {need} GPUs, hw={hw.name} has {have}; lower tp or instances, or use a larger "
            f"machine (pdsim list hw)"
        )


def _nodes(config: Config) -> Iterator[str]:
    """Yield for each instance whose GPUs would lie on several nodes."""
    per_node = config.hw.gpus
    if not per_node:
        return
    for name, instance in _instances(config):
        if instance[0] // per_node != instance[-1] // per_node:
            yield (
                f"{name} would have GPUs of several nodes (tp={len(instance)}, {per_node} GPUs a node): tensor "
                f"parallelism is modelled within a node only; choose tp values that fill the nodes of "
                f"hw={config.hw.name}"
            )


def _instances(config: Config) -> list[tuple[str, range]]:
    """Return name and GPUs, counted over all nodes, of every instance: prefill first, then decode."""
    found, first = [], 0
    for name, side in (("prefill", config.parallel.prefill), ("decode", config.parallel.decode)):
        for index in range(side.instances):
            found.append((f"parallel.{name} instance {index}", range(first, first + side.tp)))
            first += side.tp
    return found


def _connections(config: Config) -> Iterator[str]:
    """Yield if prefill and decode meet within a node, or across nodes, where the engine does not work."""
    hw, backend = config.hw, config.backend
    instances = _instances(config)
    node = [gpus[0] // hw.gpus if hw.gpus else 0 for _, gpus in instances]
    prefill, decode = node[: config.parallel.prefill.instances], node[config.parallel.prefill.instances :]
    within = any(p == d for p in prefill for d in decode)
    across = any(p != d for p in prefill for d in decode)
    if within and backend.intra is None:
        yield f"backend={backend.name} works across nodes only, but prefill and decode share one; {_elsewhere(config)}"
    if across and backend.inter is None:
        yield (
            f"backend={backend.name} works within a node only, but prefill and decode lie on different nodes of "
            f"hw={hw.name}; use a backend over rdma or tcp, such as backend=mooncake"
        )


# --- the model ------------------------------------------------------------------------------------------------------


def _heads(config: Config, name: str, side: Side) -> Iterator[str]:
    model, tp = config.model, side.tp
    if model.heads % tp:
        fit = [n for n in (1, 2, 4, 8, 16, 32) if model.heads % n == 0]
        yield (
            f"parallel.{name}.tp={tp} does not divide the {model.heads} heads of model={model.name}; "
            f"use one of {', '.join(map(str, fit))}"
        )
    elif model.attention == "gqa" and model.kv_heads % tp and tp % model.kv_heads:
        yield (
            f"parallel.{name}.tp={tp} neither divides the {model.kv_heads} KV heads of model={model.name} nor is a "
            f"multiple of them; use a power of two"
        )


def _memory(config: Config, name: str, side: Side) -> Iterator[str]:
    """Yield if weights and KV pool exceed what a GPU may use.  A host emulates compute and holds no weights."""
    gpu, model = config.hw.gpu, config.model
    if gpu is None or not config.hw.gpus:
        return
    share = model.parameters * model.dtype_bytes / side.tp
    usable = gpu.memory * config.scheduler.memory_fraction
    if share >= usable:
        yield (
            f"model={model.name} puts {format_size(share)} of weights on each GPU at parallel.{name}.tp={side.tp}, and "
            f"{format_size(usable)} of {config.hw.name}'s {gpu.name} are usable (scheduler.memory_fraction="
            f"{config.scheduler.memory_fraction}); raise tp or choose a smaller model (pdsim list model)"
        )
    elif share + config.kv.pool > usable:
        yield (
            f"kv.pool={format_size(config.kv.pool)} and {format_size(share)} of weights exceed the "
            f"{format_size(usable)} usable on each GPU at parallel.{name}.tp={side.tp}; lower kv.pool, or leave it out "
            f"for what is left"
        )
