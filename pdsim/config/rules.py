# SPDX-License-Identifier: Apache-2.0
"""Refuse configurations: combinations that cannot run.

`check` refuses values that have the right types and ranges (`pdsim.config.build`) but not together: a line for each
has the value, the rule and the way out.  Experiments that place ranks in their own way have a function ``check``.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pdsim.compute.roofline import weight_bytes
from pdsim.config import Config, Launch, covers, presets
from pdsim.core import plugins
from pdsim.core.errors import BackendUnavailable, ConfigError, instead, near
from pdsim.core.units import format_size, format_time
from pdsim.hardware.machine import VENDORS, Machine, NetworkLink
from pdsim.kv.policy import Policy
from pdsim.kv.tiers import TIERS
from pdsim.models.llm import DTYPES, Llm, Parallel, Side
from pdsim.serving.deployment import colocated_places, places, staging_problems
from pdsim.serving.failures import Failures
from pdsim.serving.policies import handoff_of
from pdsim.serving.settings import Live, Workload
from pdsim.transfer.job import Place

__all__ = ["check", "notes", "placement"]


def check(config: Config) -> None:
    """Raise a `ConfigError` with one line for each reason why *config* cannot be run, if there are any.

    For ``target=real`` the engine's library is probed in a process of its own, which takes a second.
    """
    experiment = plugins.resolve(plugins.EXPERIMENTS, config.experiment.name)
    problems = list(_parts(config)) or [
        *_general(config, experiment),
        *(_serving(config) if getattr(experiment, "SERVES", False) else ()),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def notes(config: Config, typed: Iterable[str]) -> list[str]:
    """Return a line for each remark on *config*, which can be run all the same.

    Among them are options of a backend that were *typed* and that the model does not look at.
    """
    from backends.live.commands import refusals

    if config.target != "model":
        from backends import registry

        return list(registry.notes(config.backend)) if config.backend.implementation in registry.names() else []
    typed_options = {".".join(key.split(".")[2:]) for key in typed if covers(["backend.options"], key)}
    options = sorted(typed_options - set(config.backend.modelled))
    serves = getattr(plugins.resolve(plugins.EXPERIMENTS, config.experiment.name), "SERVES", False)
    lines = [*_uncalibrated(config), *(presets.notes(config) if serves else ())]
    if serves and (engine := presets.of_servers(config)):
        lines += [f"warning: {problem}" for problem in refusals(config, engine)]
    if not options:
        return lines
    named = f"backend.options{'.' if all(options) else ''}{', '.join(options)}"
    over_tcp = f"{config.backend.implementation}_tcp"
    wire = bool({"UCX_TLS", "MC_FORCE_TCP"} & set(options)) and over_tcp in plugins.options("backend")
    why = f"the model of TCP is backend={over_tcp}" if wire else "only the real engine reads options (target=real)"
    return [f"{named} has no effect on target=model: {why}", *lines]


def _uncalibrated(config: Config) -> Iterator[str]:
    # Host memory and processors differ more than GPUs: on a busy machine a transfer takes a hundred times as long.
    hw, backend = config.hw, config.backend
    if hw.vendor == "cpu" and not hw.guest and config.calibration is None:
        yield (
            f"warning: backend={backend.name} is not calibrated on hw={hw.name}, where transfers may take a hundred "
            f"times as long as predicted; calibrate first: pdsim calibrate target=real hw={hw.name} "
            f"backend={backend.name} --quick --to own/calibration, then run with --config-dir own"
        )


# --- within one part -----------------------------------------------------------------------------------------------


def _parts(config: Config) -> Iterator[str]:
    yield from _machine(config.hw)
    yield from _costs(config)
    yield from _llm(config.model)
    yield from _division(config.parallel)
    yield from _policy(config.policy)
    yield from _live(config.live)
    workload, engine, blend = config.workload, config.engine, config.compute.blend
    chosen = workload.skip or workload.seconds or workload.load
    if workload.arrivals == "sessions" and not workload.trace and chosen:
        yield "workload.arrivals=sessions has no skip, seconds or load: users come after their answers"
    yield from _tiers(config)
    if engine.lease and not engine.heartbeat < engine.lease:
        yield f"engine.heartbeat={engine.heartbeat} must be < engine.lease={engine.lease}, which it renews"
    if blend and not 1.0 <= blend <= 64.0:
        yield f"compute.blend must be 0 or from 1 to 64, got {blend}"
    for name in ("descriptors", "bytes", "gpus"):
        span = getattr(config.calibration, name, ())
        if span and (len(span) != 2 or not 0 < span[0] <= span[1]):
            yield f"calibration.{name} must be the least and the most of a sample, got {list(span)}"


def _tiers(config: Config) -> Iterator[str]:
    cache, page = config.cache, config.kv.page_size
    used = [f"cache.{tier}={size:g}" for tier in (*TIERS, "host_ratio") if (size := getattr(cache, tier))]
    if not used:
        return
    if not cache.prefill:
        yield f"{used[0]} keeps what prefill caches; set cache.prefill=true"
    if cache.prefetch != "none" and not (cache.host or cache.host_ratio):
        yield f"cache.prefetch={cache.prefetch} reads into host memory; set cache.host, or cache.prefetch=none"
    if cache.chunk > page and cache.chunk % page:
        yield f"cache.chunk={cache.chunk} must be whole pages of kv.page_size={page}"
    if cache.overlap and (cache.early or config.kv.layerwise):
        other = "cache.early" if cache.early else "kv.layerwise"
        yield f"cache.overlap=true computes while pages come, and {other}=true sends them before; set one to false"
    if getattr(config.experiment, "colocated", False) and (cache.ssd or cache.remote or cache.shared):
        yield f"{', '.join(used)}: colocated engines have a host memory of their own only; set cache.host alone"


def _machine(hw: Machine) -> Iterator[str]:
    if hw.interconnect.kind != "none" and not hw.interconnect.rate:
        yield f"hw.interconnect.rate must be > 0 for kind={hw.interconnect.kind}, got {hw.interconnect.rate}"
    if hw.nic.count and not hw.nic.rate:
        yield f"hw.nic.rate must be > 0 for hw.nic.count={hw.nic.count}, got {hw.nic.rate}"
    if hw.nic.count % hw.nic.rails:
        yield f"hw.nic.rails={hw.nic.rails} must divide hw.nic.count={hw.nic.count}"
    for card in hw.nic.devices:
        if card >= hw.nic.count:
            yield f"hw.nic.devices has card {card}, and a node has cards 0 to {hw.nic.count - 1}"
        elif not {card - card % hw.nic.rails + rail for rail in range(hw.nic.rails)} <= set(hw.nic.devices):
            yield f"hw.nic.devices has card {card} without the neighbours that hw.nic.rails={hw.nic.rails} needs"
    if hw.gpus and hw.gpu is None:
        yield f"hw.gpus={hw.gpus}, but hw.gpu does not say what a GPU is"
    if hw.guest and (hw.gpus or hw.nodes > 1):
        yield f"hw.guest is one host without GPUs, got hw.nodes={hw.nodes} and hw.gpus={hw.gpus}"
    if hw.link is not None:
        yield from _network_link(hw.link, hw.nodes)


def _network_link(link: NetworkLink, nodes: int) -> Iterator[str]:
    if not 2 <= nodes <= 250:
        yield f"hw.nodes must be from 2 to 250 with hw.link, which joins them, got {nodes}"
        return
    hops = nodes - 1
    if link.rates and len(link.rates) != hops:
        yield f"hw.link.rates must have a rate for each of {hops} hops, got {len(link.rates)}"
    for change in link.changes:
        if change.hop >= hops:
            yield f"hw.link.changes: hop must be < {hops}, got {change.hop}"
        if not change.start < change.end:
            yield f"hw.link.changes.end must be > start={change.start}, got {change.end}"
        if (change.kind == "slow") != (change.share > 0.0) or change.share >= 1.0:
            yield f"hw.link.changes.share must be > 0 and < 1 for slow and left out otherwise, got {change.share}"
    for one, other in pairwise(sorted(link.changes, key=lambda change: (change.hop, change.start))):
        if one.hop == other.hop and other.start < one.end:
            begins, ends = f"begins at {other.start:g} s", f"ends at {one.end:g} s"
            yield f"hw.link.changes: one of hop {one.hop} {begins}, before the one of {one.start:g} s {ends}"


def _costs(config: Config) -> Iterator[str]:
    backend, collective = config.backend, config.collective
    if unknown := [vendor for vendor in backend.vendors if vendor not in VENDORS]:
        yield f"backend.vendors must be of {', '.join(VENDORS)}, got {unknown[0]!r}; write backend.vendors=[nvidia]"
    if backend.intra is None and backend.inter is None:
        yield f"backend={backend.name} has costs neither in backend.intra nor in inter; leave one of them as it is"
    for at in ("intra", "inter"):
        model = getattr(backend, at)
        if model is not None and model.pipelined and not model.overlap:
            yield f"backend.{at}.pipelined must be false where overlap is, got True"
    if collective is not None and collective.timing == "device":
        for kind in ("plain", "symmetric"):
            if not getattr(collective, kind).device:
                yield (
                    f"collective.timing=device needs collective.{kind}.device, and nobody has measured it for "
                    f"{collective.name}; use timing=caller, or give the lines"
                )
                return


def _llm(model: Llm) -> Iterator[str]:
    hybrid = model.hybrid
    if "a" not in hybrid.pattern or set(hybrid.pattern) - set("awm"):
        yield f"model.hybrid.pattern must be of a, w and m with at least one a, got {hybrid.pattern!r}"
    if model.attention == "mla" and not model.latent_dim > 0:
        yield f"model.latent_dim must be > 0 for attention=mla, got {model.latent_dim}; write model.latent_dim=512"
    if model.attention == "gqa" and model.heads % model.kv_heads:
        yield f"model.heads={model.heads} must be a multiple of model.kv_heads={model.kv_heads}; correct one of them"
    needed: dict[str, float] = {}
    if "w" in hybrid.pattern:
        needed["hybrid.window"] = hybrid.window
    if "m" in hybrid.pattern:
        needed["hybrid.conv_groups"] = min(hybrid.conv_groups, default=0)
        names = ("conv_width", "ssm_heads", "ssm_head_elements", "ssm_dtype_bytes")
        needed |= {f"hybrid.{name}": getattr(hybrid, name) for name in names}
    yield from (f"model.{name} must be > 0, got {value}" for name, value in needed.items() if not value > 0)
    if model.expert_groups and not 0 < model.groups_per_token <= model.expert_groups:
        groups, chosen = model.expert_groups, model.groups_per_token
        yield f"model.groups_per_token must be >= 1 and <= expert_groups={groups}, got {chosen}"
    if model.dense_layers >= model.layers:
        yield f"model.dense_layers must be < layers={model.layers}, got {model.dense_layers}"
    if model.experts and not 0 < model.experts_per_token < model.experts:
        yield f"model.experts_per_token must be >= 1 and < experts={model.experts}, got {model.experts_per_token}"
    if model.kv_dtype and model.kv_dtype not in DTYPES:
        kinds = ", ".join(DTYPES)
        yield f"model.kv_dtype must be one of {kinds}, got {model.kv_dtype!r}; fp8 of vLLM and SGLang is fp8_e4m3"


def _division(parallel: Parallel) -> Iterator[str]:
    prefill, decode = parallel.prefill, parallel.decode
    for name, side in (("prefill", prefill), ("decode", decode)):
        key, tp = f"parallel.{name}", side.tp
        if tp % side.dp:
            fit = ", ".join(str(n) for n in range(1, tp + 1) if tp % n == 0)
            yield f"{key}.dp must divide tp={tp}, whose ranks it divides among groups, got {side.dp}; use {fit}"
        if side.ep not in (1, tp):
            yield f"{key}.ep must be 1 or tp={tp}, over all of whose ranks experts go, got {side.ep}"
        elif side.ep > 1 and side.pp * side.cp > 1:
            yield f"{key}.ep={side.ep} has no stages or context-parallel ranks; leave pp and cp at 1"
    if decode.cp != 1:
        yield f"parallel.decode.cp={decode.cp}: decode ranks are not context-parallel; leave decode.cp at 1"
    if decode.pp not in (1, prefill.pp):
        yield (
            f"parallel.decode.pp={decode.pp} and prefill.pp={prefill.pp}: decode has the stages of prefill or a "
            f"single one; use decode.pp=1 or decode.pp={prefill.pp}"
        )


def _policy(policy: Policy) -> Iterator[str]:
    if policy.staging and not (policy.queues and policy.notify == "write"):
        yield (
            f"backend.policy.staging needs queues, which own the buffers, and notify=write, got queues="
            f"{policy.queues} and notify={policy.notify}"
        )
    if policy.metadata_on == "host" and policy.metadata_by != "control":
        yield (
            f"backend.policy.metadata={policy.metadata_by} needs rows in the registered memory of the device, "
            "backend.policy.metadata_memory is host; use backend.policy.metadata=control"
        )


def _live(live: Live) -> Iterator[str]:
    for name in ("url", "prefill", "decode"):
        for address in getattr(live, name):
            if not address.startswith(("http://", "https://")):
                yield f"live.{name} must begin with http:// or https://, got {address!r}"
    if len(live.bootstrap_port) not in (1, max(1, len(live.prefill))):
        yield (
            f"live.bootstrap_port must be one port or one for each of {len(live.prefill)} prefill servers, "
            f"got {list(live.bootstrap_port)}"
        )
    if live.api == "chat" and live.prompts == "ids":
        yield "live.prompts must be text for live.api=chat, got 'ids'"


# --- between parts -------------------------------------------------------------------------------------------------


def _general(config: Config, experiment: Any) -> Iterator[str]:
    name, able = config.experiment.name, getattr(experiment, "TARGETS", ("model", "real"))
    if config.target not in able:
        yield f"experiment={name} does not run on target={config.target}; use target={' or target='.join(able)}"
    if config.target == "model" and config.launch != Launch():
        yield "launch sets options of processes, and target=model starts none; set target=real or leave launch out"
    if config.failures != Failures():
        if config.target != "model" or getattr(config.experiment, "colocated", False):
            yield "failures are drawn for prefill and decode instances of target=model only; leave failures out"
        elif config.workload.arrivals == "sessions" and config.workload.trace is None:
            yield "failures need arrivals whose end is known, not workload=sessions; choose another workload"
        backend, hw = config.backend, config.hw
        way = backend.intra if hw.nodes == 1 else backend.inter
        if config.failures.nic.every and not (hw.cards and way and way.path == "rdma"):
            yield (
                f"failures.nic.every={format_time(config.failures.nic.every)}: backend={backend.name} on "
                f"hw={hw.name} moves KV over no network card; leave it out, or take hw=2x8xh200 backend=mooncake"
            )
    yield from _autoscale(config)
    for key in ("router", "decode_router"):
        if router := getattr(config.experiment, key, ""):
            yield from _provided(f"experiment.{key}", router, plugins.ROUTERS)
    if not config.output:
        yield "output must name a folder, got ''; write output=FOLDER, or leave output out for results"
    if config.target == "live":
        from backends.live.live_deployment import problems

        yield from problems(config)
        return
    yield from _engine(config)
    collective = config.collective
    if collective is not None and (
        collective.timing == "device" or collective.implementation not in plugins.names(plugins.COLLECTIVES)
    ):
        from backends import registry

        yield from registry.check_collective(collective)
    if config.target == "real":
        yield from _real(config)


def _provided(key: str, name: str, group: str) -> Iterator[str]:
    known, at = plugins.names(group), f"{key}={name}"
    if name not in known:
        yield f"{at} is provided by no installed package; {instead(name, known)}"
        return
    way_out = f"correct the package {plugins.provider(group, name)}, or choose another"
    try:
        if not callable(plugins.resolve(group, name)):
            yield f"{at}: {plugins.target(group, name)} is neither a class nor a function; {way_out}"
    except BackendUnavailable as error:
        yield f"{at}: {error}; {way_out}"


def _autoscale(config: Config) -> Iterator[str]:
    how = config.autoscale
    if how.policy == "none":
        return
    if wrong := [*_provided("autoscale.policy", how.policy, plugins.AUTOSCALERS)]:
        yield from wrong
        return
    signature = inspect.signature(plugins.resolve(plugins.AUTOSCALERS, how.policy))
    try:
        signature.bind(None, **how.options)
    except TypeError as error:
        given = ", ".join([*signature.parameters][1:])
        yield f"autoscale.options do not suit autoscale.policy={how.policy}: {error}; it takes {given}"
    parallel = config.parallel
    if config.target != "model" or getattr(config.experiment, "colocated", False):
        yield "autoscale is for prefill and decode instances of target=model only; leave autoscale out"
    if parallel.prefill.dp > 1 or parallel.decode.dp > 1:
        yield "autoscale runs whole engines, not the groups of parallel.*.dp; leave dp at 1, or autoscale out"
    if config.cache.prefill or config.cache.decode:
        yield "autoscale keeps no account of a started instance's empty prefix cache; set cache=none"
    for name in ("prefill", "decode"):
        if how.least > (most := getattr(parallel, name).instances):
            yield f"autoscale.least must be <= parallel.{name}.instances={most}, got {how.least}"
    sides = parallel.prefill, parallel.decode
    fewest = how.least * sum(side.gpus // side.instances for side in sides)
    if 0 < how.gpus < fewest:
        yield f"autoscale.gpus={how.gpus} must be 0 or >= {fewest}, for autoscale.least={how.least} of each side"


def _serving(config: Config) -> Iterator[str]:
    yield from _workload(config.workload, config.model.context)
    if config.target == "live":
        return  # the servers have their own memory and places
    yield from placement(config)
    yield from _handoff(config)
    for name in ("prefill",) if getattr(config.experiment, "colocated", False) else ("prefill", "decode"):
        yield from _model(config, name, getattr(config.parallel, name))


def _engine(config: Config) -> Iterator[str]:
    hw, backend = config.hw, config.backend
    for key, name in (("hw.name", hw.name), ("backend.name", backend.name)):
        if not re.fullmatch(r"[^/\0]{1,64}", name):
            yield f"{key}={name!r:.80} must be 1 to 64 characters without a slash: it is part of a folder's name"
    if hw.vendor not in backend.vendors:
        yield (
            f"backend={backend.name} runs on {' and '.join(backend.vendors)} machines, hw={hw.name} is {hw.vendor}; "
            f"leave backend out for the one that suits hw={hw.name}, or see pdsim list backend"
        )
    if hw.link is not None and backend.inter is None:
        yield f"backend={backend.name} works within a node only, and hw={hw.name} joins nodes; {_elsewhere(hw)}"
    models = (backend.intra,) if hw.nodes == 1 else (backend.intra, backend.inter)
    for path in sorted({model.path for model in models if model is not None}):
        if path == "nvlink" and (not hw.gpus or hw.interconnect.kind == "none"):
            lack = (
                "has no GPUs (hw.gpus=0)" if not hw.gpus else "has no link between GPUs (hw.interconnect.kind=none)"
            )
        elif path == "rdma" and not hw.nic.count:
            lack = "has no network cards (hw.nic.count=0)"
        else:
            continue
        yield f"backend={backend.name} moves bytes over {path}, but hw={hw.name} {lack}; {_elsewhere(hw)}"


def _elsewhere(hw: Machine) -> str:
    if hw.vendor == "cpu":
        from backends import registry

        *others, last = registry.on_hosts(hw.nodes)
        return f"use backend={' or '.join(filter(None, (', '.join(others), last)))}"
    return f"leave backend out for the one that suits hw={hw.name}"


def _real(config: Config) -> Iterator[str]:
    # a machine with `guest` is emulated, and needs the emulator instead of the engine's library
    from backends import registry
    from backends.emulation.guest import engines
    from backends.emulation.link import emulated_link

    hw, backend = config.hw, config.backend
    provided = backend.implementation in registry.names()
    if config.memory != "timing":
        yield f"memory={config.memory} applies to target=model; real memory always has contents; leave memory out"
    if provided:
        yield from registry.check(backend)
    if hw.guest:
        if problem := engines.missing_requirements(backend.name):
            yield f"target=real emulates hw={hw.name}: {problem}"
        if backend.threads != 1:
            yield f"backend.threads={backend.threads}: ranks of an emulated machine post from one thread; use 1"
    elif backend.name in registry.backends():
        diagnosis = registry.diagnose(backend.name)
        if not diagnosis.works:
            yield f"backend={backend.name} does not work on this machine: {diagnosis.reason}; {diagnosis.remedy}"
    elif not provided:
        yield (
            f"backend={backend.name} needs the engine {backend.implementation!r}, which no package provides; "
            f"choose one of {', '.join(registry.backends())} (pdsim doctor)"
        )
    own = getattr(registry.load(backend.implementation), "options", ()) if backend.options and provided else ()
    for name in backend.options if provided else ():
        if name not in own and not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
            yield (
                f"backend.options.{name} is not an option of backend={backend.name}; {near(name, own)}choose one of "
                f"{', '.join((*own, 'environment variables'))} (in capitals)"
            )
    if hw.link is not None and (problem := emulated_link.missing_requirements()):
        yield problem
    yield from _gpus(config)


def _gpus(config: Config) -> Iterator[str]:
    hw, shared, collective = config.hw, config.launch.share_gpus, config.collective
    sharable = hw.gpus > 0 and hw.nodes == 1 and hw.vendor == "nvidia"
    here = _gpus_here(hw.vendor) if hw.gpus else 0
    if shared and (not sharable or here >= hw.gpus):
        lack = f"this machine has {here}" if sharable else f"hw={hw.name} has others, or none"
        yield (
            f"launch.share_gpus=true needs hw.gpus={hw.gpus} above the NVIDIA GPUs of this one machine, and {lack}; "
            "set hw.gpus=NUMBER of ranks, or leave it out"
        )
    elif hw.gpus and (hw.nodes > 1 or here < hw.gpus) and not (shared and here):
        share = "launch.share_gpus=true to have ranks share them, " if sharable and here else ""
        yield (
            f"target=real on hw={hw.name} needs {hw.nodes * hw.gpus} {hw.vendor} GPUs, but this machine has "
            f"{here or 'none'}; use {share}hw=loopback for real bytes, or target=model"
        )
    elif (
        shared
        and collective is not None
        and (config.parallel.prefill.cp > 1 or config.experiment.name == "allgather")
    ):
        yield (
            f"collective={collective.name} takes a GPU for each rank, and launch.share_gpus=true puts several on "
            "one; leave out parallel.prefill.cp and experiment=allgather, or use target=model"
        )


def _gpus_here(vendor: str) -> int:
    from backends.diagnosis import gpu_count

    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")  # of AMD's, those that have a number
    return gpu_count() if vendor == "nvidia" else sum(node.read_text().strip() not in ("", "0") for node in nodes)


_GENERATED = ("poisson", "gamma", "bursty", "diurnal", "sessions")
_DRAWN = ("rate", "input_mean", "input_cv", "output_mean", "output_cv", "ramp")
_USES = {
    **dict.fromkeys(_DRAWN, _GENERATED),
    "cv": ("gamma",),
    **dict.fromkeys(("burst", "burst_length"), ("bursty",)),
    **dict.fromkeys(("day", "peak"), ("diurnal",)),
    **dict.fromkeys(("speed", "jitter"), ("embedded",)),
    **dict.fromkeys(("users", "turns", "think", "shared"), ("sessions",)),
}
"""Which arrivals a key of the workload is for; the others do not look at it."""


def _workload(workload: Workload, context: int) -> Iterator[str]:
    trace, arrivals = workload.trace, workload.arrivals
    if trace == "":
        yield "workload.trace= is empty; name a file, or leave it out"
    if trace is not None and arrivals != Workload.arrivals:
        yield (
            f"workload.trace={trace} has requests of its own, and workload.arrivals={arrivals} generates some; "
            "leave out workload.trace, or workload=NAME and the keys of generated requests"
        )
        return
    if workload.tenants:
        yield from _tenants(workload, context)
    prompt, answer = workload.shared + workload.input_mean, workload.output_mean
    if arrivals in _GENERATED and prompt + answer > context:
        yield (
            f"prompts of {prompt:g} tokens in the mean (workload.input_mean) and answers of {answer:g} "
            f"(workload.output_mean) exceed model.context={context}; lower them, choose a model with a longer "
            "context (pdsim list model), or set model.context"
        )
    for name, uses in _USES.items():
        value = getattr(workload, name)
        if arrivals in uses or value == getattr(Workload, name):
            continue
        if trace is not None:
            yield f"workload.{name}={value} has no effect on a trace; leave it out"
            continue
        other = "or set workload.speed, which replays a trace faster" if name == "rate" else "or leave it out"
        yield f"workload.{name}={value} has no effect on {arrivals} arrivals; choose workload={uses[0]}, {other}"


def _tenants(workload: Workload, context: int) -> Iterator[str]:
    names = [tenant.name for tenant in workload.tenants]
    if workload.trace is not None or workload.arrivals not in ("poisson", "gamma", "bursty", "diurnal"):
        yield "workload.tenants generate requests; choose workload=poisson, gamma, bursty or diurnal"
    if len(set(names)) < len(names):
        yield f"workload.tenants {', '.join(names)} are not told apart; give each a name of its own"
    for name in ("rate", "input_mean", "input_cv", "output_mean", "output_cv"):
        if getattr(workload, name) != getattr(Workload, name):
            yield f"workload.{name} is each tenant's own; set it in workload.tenants, or leave them out"
    if workload.priority:
        yield f"workload.priority={workload.priority:g} is each tenant's own; set workload.tenants.priority"
    for tenant in workload.tenants:
        if tenant.input_mean + tenant.output_mean > context:
            yield (
                f"{tenant.input_mean:g} + {tenant.output_mean:g} tokens of workload.tenants {tenant.name} exceed "
                f"model.context={context}; lower them"
            )


def placement(config: Config) -> Iterator[str]:
    """Yield each problem of the placement of prefill and decode instances on the machine of *config*."""
    hw, backend, parallel = config.hw, config.backend, config.parallel
    if hw.prefill and hw.prefill not in (known := plugins.options("hw")):
        yield f"hw.prefill={hw.prefill} does not exist; {instead(hw.prefill, known, 'hw.prefill={}')}"
        return
    if hw.prefill and (config.target != "model" or not hw.gpus or getattr(config.experiment, "colocated", False)):
        yield f"hw.prefill={hw.prefill} has target=model, GPUs and a disaggregated deployment; leave hw.prefill out"
        return
    try:
        if getattr(config.experiment, "colocated", False):
            where = colocated_places(parallel, hw)
            yield from _split("prefill", parallel.prefill, where, hw) if hw.gpus else ()
            return
        prefill, decode = places(parallel, hw)
    except ConfigError as error:
        yield str(error)
        return
    if hw.gpus:
        yield from _split("prefill", parallel.prefill, prefill, hw)
        yield from _split("decode", parallel.decode, decode, hw)
    sides = {place.node for place in prefill}, {place.node for place in decode}
    if backend.intra is None and sides[0] & sides[1]:
        yield f"backend={backend.name} works across nodes only, but prefill and decode share one; {_elsewhere(hw)}"
    if backend.inter is None and len(sides[0] | sides[1]) > 1:
        yield (
            f"backend={backend.name} works within a node only, but prefill and decode lie on different nodes of "
            f"hw={hw.name}; use a backend over rdma or tcp, such as backend=mooncake"
        )


def _split(name: str, side: Side, where: Sequence[Place], hw: Machine) -> Iterator[str]:
    # *where* has the places of the ranks, those of one instance together
    together = side.tp if side.ep == 1 else side.attention_tp  # experts may lie on other nodes
    instances = [where[first : first + together] for first in range(0, len(where), together)]
    if side.ep > hw.gpus and side.ep % hw.gpus:
        yield (
            f"parallel.{name}.ep={side.ep} fills a node of hw={hw.name} ({hw.gpus} GPUs each) in part; "
            "choose a multiple of its GPUs"
        )
    spread = max(len({place.node for place in instance}) for instance in instances)
    if spread > 1 and (spread * hw.gpus != together or not hw.nic.count):
        yield (
            f"parallel.{name}.tp={side.tp} would put one instance on several nodes of hw={hw.name} ({hw.gpus} GPUs "
            "each), which it has to fill; choose tp values that fill the nodes, or experts and attention groups of "
            "their own (ep=tp, dp)"
        )


def _handoff(config: Config) -> Iterator[str]:
    kv, engine, backend = config.kv, config.engine, config.backend
    if kv.staging and not config.policy.staging:
        yield (
            f"kv.staging=true, but backend={backend.name} has no staged path (backend.policy.staging=false); "
            "use a mooncake or nixl backend, or leave kv.staging out"
        )
    if kv.staging:
        yield from staging_problems(
            config.hw, config.model, config.parallel, kv, config.scheduler, config.policy.queues
        )
    if kv.staging and engine.page_order == "heads":
        yield (
            "kv.staging=true gathers tokens, but pages are kept by heads (engine.page_order=heads), where "
            "a slice is one descriptor a page; leave kv.staging out"
        )
    yield from _drafts(config)
    if other := kv.decode_page_size:
        if max(kv.page_size, other) % min(kv.page_size, other):
            yield f"kv.decode_page_size={other} and kv.page_size={kv.page_size}: one must divide the other"
        if config.cache.prefill or config.cache.decode:
            yield f"kv.decode_page_size={other} has no prefix cache; set cache=none, or leave it out"
        if getattr(config.experiment, "colocated", False):
            yield f"kv.decode_page_size={other}, but colocated engines have one size; set kv.page_size"
    for key, name, group in (
        ("engine.scheduler", engine.scheduler, plugins.SCHEDULERS),
        ("engine.handoff", engine.handoff, plugins.HANDOFFS),
    ):
        if wrong := [*_provided(key, name, group)]:
            yield from wrong
            return
    pulls = f"engine={engine.name} pulls (engine.handoff={engine.handoff})"
    if not handoff_of(engine).serial:
        if config.cache.decode and not config.policy.decode_cache:  # SGLang's rule
            yield (
                f"cache.decode=true with backend={backend.name}: SGLang keeps a prefix cache on decode over nixl "
                "and mooncake only; choose such a backend, or leave cache.decode out"
            )
        return
    if kv.staging:
        yield f"kv.staging=true, but {pulls}; leave kv.staging out"
    if getattr(config.experiment, "dp_rank", "") == "query":
        yield (
            f"experiment.dp_rank=query, but {pulls}: prefill's answer names the group; leave experiment.dp_rank out"
        )


def _drafts(config: Config) -> Iterator[str]:
    engine = config.engine
    if engine.draft and not engine.acceptance:
        yield (
            f"engine.draft={engine.draft} needs engine.acceptance, the chance that a proposed token is accepted, "
            "such as 0.7"
        )
    if engine.draft_layers and not engine.draft:
        yield f"engine.draft_layers={engine.draft_layers} needs engine.draft, the tokens proposed a step"
    if engine.draft_layers and set(config.model.hybrid.pattern) != {"a"}:
        yield (
            f"engine.draft_layers={engine.draft_layers} is for models of full attention, not for "
            f"model={config.model.name}; leave it out"
        )
    if engine.draft_kv == "recomputed" and getattr(config.experiment, "colocated", False):
        yield "engine.draft_kv=recomputed, but colocated engines hand nothing over; leave it out"


# --- the model -----------------------------------------------------------------------------------------------------


def _model(config: Config, name: str, side: Side) -> Iterator[str]:
    # KV heads are divided among the ranks of an attention group, and repeated where there are fewer; models with a
    # latent cache have none to divide.  A host emulates compute and holds no weights.
    model, gpu, tp, attention_tp = config.model, config.hw.gpu, side.tp, side.attention_tp
    if model.heads % (tp if side.ep == 1 else attention_tp):
        fit = [n for n in (1, 2, 4, 8, 16, 32) if model.heads % n == 0]
        yield (
            f"parallel.{name}.tp={tp} does not divide the {model.heads} heads of model={model.name}; "
            f"use one of {', '.join(map(str, fit))}"
        )
    elif model.attention == "gqa" and model.kv_heads % attention_tp and attention_tp % model.kv_heads:
        heads = model.kv_heads
        fit = [n * side.dp for n in range(1, 65) if model.heads % n == 0 and (heads % n == 0 or n % heads == 0)]
        yield (
            f"parallel.{name}.tp={tp} over dp={side.dp} groups neither divides the {heads} KV heads of "
            f"model={model.name} nor is a multiple of them; use one of {', '.join(map(str, fit))}"
        )
    if gpu is None or not config.hw.gpus:
        return
    share, usable = weight_bytes(model, side), gpu.memory * config.scheduler.memory_fraction
    if share >= usable:
        most = 0.9  # of the memory, which servers rarely exceed
        more = f"set scheduler.memory_fraction={most}, " if share < gpu.memory * most else ""
        yield (
            f"model={model.name} puts {format_size(share)} of weights on each GPU at parallel.{name}.tp={tp}, "
            f"and {format_size(usable)} of {config.hw.name}'s {gpu.name} are usable (scheduler.memory_fraction="
            f"{config.scheduler.memory_fraction}); {more}raise tp or choose a smaller model (pdsim list model)"
        )
    elif share + config.kv.pool > usable:
        yield (
            f"kv.pool={format_size(config.kv.pool)} and {format_size(share)} of weights exceed the "
            f"{format_size(usable)} usable on each GPU at parallel.{name}.tp={tp}; lower kv.pool, or leave it "
            f"out to use all remaining memory"
        )
