# SPDX-License-Identifier: Apache-2.0
"""Command lines and environments that start vLLM and SGLang as a configuration describes them.

``parallel``, ``scheduler``, ``kv``, ``cache`` and ``backend.policy`` become the engine's own flags and variables;
`refusals` names each key that the engine cannot have. Weights are dummies: times do not depend on them. Every server
sees all GPUs of the deployment, its own first: CUDA IPC cannot map the memory of a hidden GPU.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdsim.compute.roofline import kv_shape
from pdsim.config import Config
from pdsim.models.llm import Side
from pdsim.serving.settings import Kv

MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
"""The module of each engine that is its HTTP server."""

HOST = "127.0.0.1"

SIDE_CHANNEL, BOOTSTRAP, INIT = 500, 900, 1300
"""From ``live.port`` to the ports of vLLM's NIXL side channels, of SGLang's bootstrap servers, and of its groups."""

SPACING = 20  # ports between the side channels, and between the groups, of two servers: each rank takes one
_CONNECTORS = {
    "vllm": {"nixl": "NixlConnector", "mooncake": "MooncakeConnector", "mori": "MoRIIOConnector"},
    "sglang": {"nixl": "nixl", "mooncake": "mooncake", "mori": "mori"},
}
_POOLS = {
    "nvlink": {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "NVLINK", "MC_FORCE_MNNVL": "1"},
    "intra_node_nvlink": {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "INTRA_NODE_NVLINK", "MC_INTRANODE_NVLINK": "1"},
}
_CACHED = ("nixl", "mooncake", "mooncake_tcp")  # transfer backends of SGLang that stage, and cache on decode
_DECODE_CACHE = "--disaggregation-decode-enable-radix-cache"

# first releases of SGLang with these spellings
_PREFILL_CP = (0, 5, 14)
_ATTENTION_DP = (0, 5, 23)


@dataclass(frozen=True)
class ServerLaunch:
    """One server to start."""

    name: str  # role and number, such as "prefill0"
    role: str  # "prefill", "decode" or "server"
    port: int  # of its HTTP interface, on this machine
    bootstrap_port: int  # of the bootstrap server of an SGLang prefill server
    gpus: tuple[int, ...]  # its own, as numbers of the machine, in the order in which the server sees them
    command: tuple[str, ...]  # the interpreter first
    environment: Mapping[str, str]  # added to this process's

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


def gpus_needed(config: Config) -> int:
    """Return how many GPUs the launched servers take; 0 of a machine without."""
    if not config.hw.gpus:
        return 0
    return 1 + max(gpu for *_, gpus in _places(config) for gpu in gpus)


def launches(config: Config, engine: str, model: Path, release: str = "") -> list[ServerLaunch]:
    """Return the servers of *config*, which load the configuration in the folder *model*: prefill servers first.

    Ports ascend from ``live.port``. Arguments of the user come last, so that they override. Flags are those of the
    engine's *release*, such as "0.5.12", or of the newest known one. `refusals` yields nothing for *config*.
    """
    live, places = config.live, _places(config)
    version = tuple(map(int, re.findall(r"\d+", release)[:3])) or _ATTENTION_DP
    every = sorted({gpu for *_, gpus in places for gpu in gpus})
    servers = []
    for number, (name, role, side, gpus) in enumerate(places):
        bootstrap = live.port + BOOTSTRAP + (number if role == "prefill" else 0)
        if engine == "vllm":
            arguments, environment = _vllm(config, role, side, number)
        else:
            arguments, environment = _sglang(config, role, side, number, bootstrap, version)
        path = "--model" if engine == "vllm" else "--model-path"
        command = (
            *(live.python or sys.executable, "-m", MODULES[engine], path, str(model)),
            *("--served-model-name", config.model.name, "--load-format", "dummy"),
            *("--host", HOST, "--port", str(live.port + number)),
            *(*arguments, *_added(config, role)),
        )
        if config.hw.gpus:
            visible = [*gpus, *(gpu for gpu in every if gpu not in gpus)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, visible))
        environment |= live.environment
        servers.append(ServerLaunch(name, role, live.port + number, bootstrap, gpus, command, environment))
    return servers


def router(config: Config, engine: str, servers: Sequence[ServerLaunch]) -> str:
    """Return the command of the router, or vLLM's proxy, before *servers*; "" of a single server.

    It listens on the port after theirs.  SGLang's router has policies of the same names except ``least_tokens``: it
    gets its own default.
    """
    port, policy = servers[-1].port + 1, getattr(config.experiment, "router", "")
    roles = {role: [each for each in servers if each.role == role] for role in ("prefill", "decode", "server")}
    if len(servers) == 1 or (engine == "vllm" and roles["server"]):
        return ""
    if engine == "vllm":
        words = ["python", "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"]  # in vLLM's repository
        for role, name in (("prefill", "prefiller"), ("decode", "decoder")):
            ports = [str(each.port) for each in roles[role]]
            words += [f"--{name}-hosts", *[HOST] * len(ports), f"--{name}-ports", *ports]
    else:
        words = ["python", "-m", "sglang_router.launch_router"]
        words += ["--worker-urls", *(each.url for each in servers)] if roles["server"] else ["--pd-disaggregation"]
        for each in roles["prefill"]:
            words += ["--prefill", each.url, str(each.bootstrap_port)]
        for each in roles["decode"]:
            words += ["--decode", each.url]
        words += ["--policy", policy] if policy in ("round_robin", "power_of_two", "cache_aware") else []
    return shlex.join([*words, "--host", HOST, "--port", str(port)])


def _added(config: Config, role: str) -> tuple[str, ...]:
    live = config.live
    return (*live.arguments, *{"prefill": live.prefill_arguments, "decode": live.decode_arguments}.get(role, ()))


def _sides(config: Config) -> list[tuple[str, Side, tuple[int, ...]]]:
    live, parallel = config.live, config.parallel
    if live.layout == "colocated":
        return [("server", parallel.decode, live.decode_gpus)]
    return [("prefill", parallel.prefill, live.prefill_gpus), ("decode", parallel.decode, live.decode_gpus)]


def _places(config: Config) -> list[tuple[str, str, Side, tuple[int, ...]]]:
    # GPUs are dealt out in order unless the configuration names them.
    places, free = [], 0
    for role, side, chosen in _sides(config):
        size = side.gpus // side.instances
        for instance in range(side.instances):
            gpus = chosen[instance * size : (instance + 1) * size] or tuple(range(free, free + size))
            free += size
            places.append((f"{role}{instance}", role, side, gpus if config.hw.gpus else ()))
    return places


def _flags(**values: object) -> list[str]:
    # one of None or False is left out; True stands alone
    words: list[str] = []
    for name, value in values.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def _page(config: Config, role: str) -> int:
    kv = config.kv
    return kv.decode_page_size if role == "decode" and kv.decode_page_size else kv.page_size


def _caches(config: Config, role: str) -> bool:
    cached = config.cache.prefill if role == "prefill" else config.cache.decode
    return cached or (config.live.prefix_cache and role != "decode")


def _vllm(config: Config, role: str, side: Side, number: int) -> tuple[list[str], dict[str, str]]:
    cached = _caches(config, role) or config.live.prefix_cache
    gpus, pool = bool(config.hw.gpus), config.kv.pool
    arguments = _flags(
        max_model_len=config.model.context,
        tensor_parallel_size=side.attention_tp,
        pipeline_parallel_size=side.pp,
        max_num_batched_tokens=config.scheduler.chunk,
        max_num_seqs=config.scheduler.decode_batch,
        block_size=_page(config, role),
        disable_uvicorn_access_log=True,
        enable_prefix_caching=cached,
        no_enable_prefix_caching=not cached,
        data_parallel_size=side.dp if side.dp > 1 else None,
        enable_expert_parallel=side.ep > 1,
        gpu_memory_utilization=config.scheduler.memory_fraction if gpus else None,
        kv_cache_memory_bytes=int(pool) if gpus and pool else None,
    )
    environment = {} if gpus else {"VLLM_CPU_KVCACHE_SPACE": str(max(1, round(pool / 2**30)))}
    if role != "server":
        transfer: dict[str, Any] = {"kv_connector": _connector(config, "vllm"), "kv_role": "kv_both"}
        if not gpus:
            transfer["kv_buffer_device"] = "cpu"
        if (protocol := config.backend.name.removeprefix("mooncake_")) in ("tcp", "efa"):
            transfer["kv_connector_extra_config"] = {"mooncake_protocol": protocol}
        arguments += _flags(kv_transfer_config=json.dumps(transfer))
        channel = config.live.port + SIDE_CHANNEL + SPACING * number
        environment |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(channel)}
    return arguments, environment


def _sglang(
    config: Config, role: str, side: Side, number: int, bootstrap: int, release: tuple[int, ...]
) -> tuple[list[str], dict[str, str]]:
    # Prompts are token ids, so the server needs no tokenizer; without --incremental-streaming-output every chunk
    # repeats all tokens so far.  SGLang's tensor parallelism is the whole world of a stage, and it divides the sizes
    # of chunks and batches among the attention groups.
    scheduler, kv, hybrid = config.scheduler, config.kv, config.model.hybrid
    groups, split, cached = side.dp > 1, side.cp > 1, _caches(config, role)
    new_dp, new_cp = release >= _ATTENTION_DP, release >= _PREFILL_CP
    token_bytes = kv_shape(config.model).token_bytes(side.attention_tp) / side.pp
    # init addresses of neighbouring servers would overlap
    address = f"{HOST}:{config.live.port + INIT + SPACING * number}"
    sparse = bool(hybrid.index_bytes)
    pair = role != "server"
    arguments = _flags(
        skip_tokenizer_init=True,
        enable_metrics=True,
        incremental_streaming_output=True,
        context_length=config.model.context,
        tp_size=side.tp * side.cp,
        pp_size=side.pp,
        chunked_prefill_size=scheduler.chunk * side.dp,
        max_running_requests=scheduler.decode_batch * side.dp,
        page_size=_page(config, role),
        mem_fraction_static=scheduler.memory_fraction,
        ep_size=side.ep if side.ep > 1 else None,
        dist_init_addr=address if groups else None,
        attn_dp_size=side.dp if groups and new_dp else None,
        dp_size=side.dp if groups and not new_dp else None,
        enable_dp_attention=groups and not new_dp,
        attn_cp_size=side.cp if split else None,
        enable_prefill_cp=split and new_cp,
        cp_strategy=("interleave" if sparse else "zigzag") if split and new_cp else None,
        enable_nsa_prefill_context_parallel=split and not new_cp and sparse,
        enable_prefill_context_parallel=split and not new_cp and not sparse,
        max_total_tokens=int(kv.pool // token_bytes) if kv.pool else None,
        max_mamba_cache_size=kv.state_slots * side.dp if kv.state_slots else None,
        swa_full_tokens_ratio=kv.window_share if "w" in hybrid.pattern else None,
        device=None if config.hw.gpus else "cpu",
        disaggregation_decode_enable_radix_cache=cached and role == "decode",
        disable_radix_cache=not cached,
        disaggregation_mode=role if pair else None,
        disaggregation_transfer_backend=_connector(config, "sglang") if pair else None,
        disaggregation_bootstrap_port=bootstrap if pair else None,
    )
    environment = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}  # whoever asks whether it is up adds no request
    return arguments, environment | (_transfer(config) if pair else {})


def _transfer(config: Config) -> dict[str, str]:
    # Variables of SGLang's transfer: pool and transport, path of the metadata, staging, queues.
    kv, policy, connector = config.kv, config.policy, _connector(config, "sglang")
    mooncake, mori, control = connector == "mooncake", connector == "mori", policy.metadata_by == "control"
    # SGLang keeps a variable of Mooncake's that the user has set
    own = {key: os.environ.get(key, value) for key, value in config.backend.options.items() if key.startswith("MC_")}
    variables = {
        "MOONCAKE_PROTOCOL": "efa" if config.backend.name == "mooncake_efa" else "",
        "SGLANG_MORI_TRANSFER_SHARDS": str(policy.queues) if mori and policy.queues else "",
        "SGLANG_DISAGGREGATION_QUEUE_SIZE": str(policy.queues) if not mori and policy.queues else "",
        "SGLANG_MOONCAKE_SEND_AUX_TCP": "1" if mooncake and control and policy.pool != "nvlink" else "",
        "SGLANG_MORI_SEND_AUX_RDMA": "1" if mori and not control else "",
        "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "1" if kv.all_cp_ranks else "",
    }
    if kv.staging:
        variables["SGLANG_DISAGG_STAGING_BUFFER"] = "1"
        variables["SGLANG_DISAGG_STAGING_POOL_SIZE_MB"] = _mebibytes(kv.staging_ring)
        variables["SGLANG_DISAGG_STAGING_BUFFER_SIZE_MB"] = _mebibytes(kv.staging_buffer or _chunk_bytes(config))
    pool = _POOLS.get(policy.pool, {}) if mooncake else {}
    return {**pool, **own, **{name: value for name, value in variables.items() if value}}


def _chunk_bytes(config: Config) -> int:
    parallel = config.parallel
    tokens = (config.scheduler.chunk // config.kv.page_size + 1) * config.kv.page_size
    ranks = max(parallel.prefill.attention_tp, parallel.decode.attention_tp)
    return tokens * kv_shape(config.model).token_bytes(ranks)


def _mebibytes(size: float) -> str:
    return str(max(1, -(-int(size) // 2**20)))


def refusals(config: Config, engine: str) -> Iterator[str]:
    """Yield a line for each key of *config* that a launched *engine* cannot have, with the way out."""
    for role, side, chosen in _sides(config):
        if chosen and len(chosen) != side.gpus:
            yield (
                f"live.{role}_gpus={list(chosen)} names {len(chosen)} GPUs, but parallel.{role} takes {side.gpus}; "
                "name as many, or leave it out"
            )
    connector = _connector(config, engine) if config.live.layout == "pair" else ""
    if config.live.layout == "pair" and not connector:
        known = ", ".join(f"backend={name}" for name in _CONNECTORS[engine])
        yield (
            f"backend={config.backend.name} has no KV connector in engine={engine}; use one of {known}, or name one "
            "with live.connector"
        )
    for key, value, reason in _unsupported(config, engine, connector):
        yield f"{key}={value} is not for servers of engine={engine}: {reason}"


def _connector(config: Config, engine: str) -> str:
    return config.live.connector or _CONNECTORS[engine].get(config.backend.name.partition("_")[0], "")


def _unsupported(config: Config, engine: str, connector: str) -> Iterator[tuple[str, object, str]]:
    kv, cache = config.kv, config.cache
    if config.engine.draft:
        name = "--speculative-algorithm" if engine == "sglang" else "--speculative-config"
        yield (
            "engine.draft",
            config.engine.draft,
            f"name a drafter with live.arguments=[{name}, ...], and leave it out",
        )
    radix = "radix" if engine == "sglang" else "block"
    if kv.layerwise:
        yield "kv.layerwise", "true", "they send whole chunks; leave it out"
    if (cache.prefill or cache.decode) and cache.eviction != radix:
        yield "cache.eviction", cache.eviction, f"they evict by {radix}; use cache={engine}"
    if cache.host:
        name = "--enable-hierarchical-cache" if engine == "sglang" else "--kv-offloading-size"
        yield "cache.host", int(cache.host), f"set it with live.arguments=[{name}, ...]"
    if cache.limit:
        yield "cache.limit", int(cache.limit), "their cache takes what the pool leaves; set kv.pool"
    yield from (_of_vllm if engine == "vllm" else _of_sglang)(config, connector)


def _of_vllm(config: Config, connector: str) -> Iterator[tuple[str, object, str]]:
    kv = config.kv
    for role, side, _ in _sides(config):
        key = f"parallel.{'decode' if role == 'server' else role}"
        if side.cp > 1:
            yield f"{key}.cp", side.cp, "no connector hands over context-parallel KV; use engine=sglang, or cp=1"
        if side.pp > 1 and (connector == "NixlConnector" or (connector == "NixlPushConnector" and role == "decode")):
            yield (
                f"{key}.pp",
                side.pp,
                f"{connector} takes no stages; set pp=1, or push from stages of prefill alone",
            )
        if side.dp > 1 and not config.model.experts:
            yield (
                f"{key}.dp",
                side.dp,
                f"a dense model has no attention groups; use tp={side.attention_tp} and "
                f"instances={side.instances * side.dp}",
            )
    if config.hw.gpus and (odd := [size for role, _, _ in _sides(config) if (size := _page(config, role)) % 16]):
        yield "kv.page_size", odd[0], "their kernels take a multiple of 16 tokens; run engine=vllm, or set one"
    if kv.staging:
        yield "kv.staging", "true", "their connectors have no staging buffer; use engine=sglang, or leave it out"
    if kv.all_cp_ranks:
        yield "kv.all_cp_ranks", "true", "no connector hands over context-parallel KV; leave it out"
    if kv.state_slots or ("w" in config.model.hybrid.pattern and kv.window_share != Kv.window_share):
        key, value = ("state_slots", kv.state_slots) if kv.state_slots else ("window_share", kv.window_share)
        yield f"kv.{key}", value, "one pool holds pages of all kinds; leave it out"
    if connector == "MooncakeConnector" and config.policy.pool != "default":
        yield "backend", config.backend.name, "their pool is not NVLink's; use backend=mooncake or mooncake_tcp"


def _of_sglang(config: Config, connector: str) -> Iterator[tuple[str, object, str]]:
    kv, policy = config.kv, config.policy
    if config.live.layout == "colocated":
        return
    if kv.staging and connector not in _CACHED:
        yield "kv.staging", "true", f"backend={connector} stages nothing; use mooncake or nixl, or leave it out"
    if kv.staging and config.model.attention == "mla":
        yield "kv.staging", "true", f"model={config.model.name} has latent rows and no heads to stage; leave it out"
    arguments = _added(config, "decode")
    if config.cache.decode or _DECODE_CACHE in arguments:
        key, value = ("cache.decode", "true") if config.cache.decode else ("live.decode_arguments", _DECODE_CACHE)
        if connector not in _CACHED:
            yield key, value, f"not with backend={connector}; use mooncake or nixl, or leave it out"
        if "--enable-hisparse" in arguments:
            yield key, value, "not with --enable-hisparse; leave out one of them"
    if connector == "nixl" and policy.metadata_by == "control":
        yield "backend.policy.metadata", "control", "NIXL writes it; leave it out, or use backend=mooncake"
    if connector == "mooncake" and policy.pool == "nvlink" and policy.metadata_by != "control":
        yield "backend.policy.metadata", policy.metadata_by, "over TCP with pool=nvlink; set it to control"
