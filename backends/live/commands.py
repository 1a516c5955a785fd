# SPDX-License-Identifier: Apache-2.0
"""Command lines and environments that start vLLM and SGLang in the layout and with the settings of a configuration.

Every server sees all GPUs of the deployment, its own first: CUDA IPC cannot map the memory of a GPU
that is hidden.

What a simulated run is told by ``parallel``, ``scheduler`` and ``kv`` the servers are told by their
own flags, so that one configuration describes both; what has no counterpart here is given by
``live.arguments``.  Weights are not loaded but made up (``--load-format dummy``): times do not
depend on them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdsim.config import Config
from pdsim.core.errors import ConfigError
from pdsim.models.parallel import Side

__all__ = ["MODULES", "ServerLaunch", "gpus_needed", "launches"]

MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
"""The module of each engine that is its HTTP server."""

HOST = "127.0.0.1"

SIDE_CHANNEL = 500
"""From a server's port to that of vLLM's NIXL side channel, of which each rank takes one."""

SPACING = 20
"""From the side channel of one server to that of the next."""

BOOTSTRAP = 900
"""From `Live.port` to the bootstrap port of SGLang's first prefill server."""


@dataclass(frozen=True)
class ServerLaunch:
    """One server to start.

    Attributes:
        name: Role and number, such as "prefill0".
        role: "prefill", "decode" or "server".
        port: Of its HTTP interface, on this machine.
        bootstrap_port: At which SGLang's prefill servers meet those of decode.
        gpus: Its own, as numbers of the machine, in the order in which the server sees them.
        command: To start it, the interpreter first.
        environment: Added to this process's.
    """

    name: str
    role: str  # "prefill", "decode" or "server"
    port: int
    bootstrap_port: int
    gpus: tuple[int, ...]  # its own
    command: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"


def gpus_needed(config: Config) -> int:
    """Return how many GPUs the launched servers take; 0 of a machine without."""
    if not config.hw.gpus:
        return 0
    return 1 + max(gpu for _, _, gpus in _places(config) for gpu in gpus)


def launches(config: Config, engine: str, model: Path) -> list[ServerLaunch]:
    """Return the servers of *config*, which load the configuration in the folder *model*.

    Raise a `ConfigError` if the layout, or the backend, is not one that *engine* has.

    One for each instance of each side: prefill servers first, ports ascending from ``live.port``.  Arguments of the
    user come last, so that they override.
    """
    places = _places(config)
    every = sorted({gpu for _, _, gpus in places for gpu in gpus})
    found = []
    for number, (name, role, gpus) in enumerate(places):
        port = config.live.port + number
        prefills = [place[0] for place in places if place[1] == "prefill"]
        bootstrap = config.live.port + BOOTSTRAP + (prefills.index(name) if name in prefills else 0)
        visible = [*gpus, *(gpu for gpu in every if gpu not in gpus)]
        side = config.parallel.prefill if role == "prefill" else config.parallel.decode
        make = _vllm if engine == "vllm" else _sglang
        arguments, environment = make(config, role, side, number, bootstrap)
        own = {"prefill": config.live.prefill_arguments, "decode": config.live.decode_arguments}.get(role, ())
        command = (config.live.python or sys.executable, "-m", MODULES[engine], *_model(engine, model, config))
        command += ("--host", HOST, "--port", str(port), *arguments, *config.live.arguments, *own)
        if config.hw.gpus:
            environment |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, visible))}
        environment |= config.live.environment
        found.append(ServerLaunch(name, role, port, bootstrap, tuple(gpus), command, environment))
    return found


def _places(config: Config) -> list[tuple[str, str, tuple[int, ...]]]:
    # Names are role and number, ``"prefill0"``.  GPUs are dealt out in order unless the configuration names them.
    # Raise a `ConfigError` if it names another number of GPUs than the layout takes.
    live, parallel = config.live, config.parallel
    sides = [("prefill", parallel.prefill, live.prefill_gpus), ("decode", parallel.decode, live.decode_gpus)]
    if live.layout == "colocated":
        sides = [("server", parallel.decode, live.decode_gpus)]
    found: list[tuple[str, str, tuple[int, ...]]] = []
    free = 0
    for role, side, chosen in sides:
        size = side.tp * side.pp
        if chosen and len(chosen) != size * side.instances:
            raise ConfigError(
                f"live.{role}_gpus={list(chosen)} names {len(chosen)} GPUs, but parallel.{role} takes "
                f"{size * side.instances}; name as many, or leave it out"
            )
        for instance in range(side.instances):
            gpus = tuple(range(free, free + size)) if config.hw.gpus else ()
            free += size
            if chosen:
                gpus = chosen[instance * size : (instance + 1) * size]
            found.append((f"{role}{instance}", role, gpus))
    return found


def _model(engine: str, model: Path, config: Config) -> list[str]:
    name = "--model" if engine == "vllm" else "--model-path"
    return [name, str(model), "--served-model-name", config.model.name, "--load-format", "dummy"]


def _vllm(config: Config, role: str, side: Side, number: int, _: int) -> tuple[list[str], dict[str, str]]:
    arguments = [
        *("--max-model-len", str(config.model.context)),
        *("--tensor-parallel-size", str(side.tp)),
        *("--pipeline-parallel-size", str(side.pp)),
        *("--max-num-batched-tokens", str(config.scheduler.chunk)),
        *("--max-num-seqs", str(config.scheduler.decode_batch)),
        *("--block-size", str(config.kv.page_size)),
        "--disable-uvicorn-access-log",
        f"--{'' if config.live.prefix_cache else 'no-'}enable-prefix-caching",
    ]
    environment: dict[str, str] = {}
    if config.hw.gpus:
        arguments += ["--gpu-memory-utilization", str(config.scheduler.memory_fraction)]
    else:
        space = max(1, round(config.kv.pool / 2**30))
        environment |= {"VLLM_CPU_KVCACHE_SPACE": str(space)}
    if role != "server":
        connector = config.live.connector or _connector(config, _VLLM)
        transfer: dict[str, Any] = {"kv_connector": connector, "kv_role": "kv_both"}
        if not config.hw.gpus:
            transfer["kv_buffer_device"] = "cpu"
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
        channel = config.live.port + SIDE_CHANNEL + SPACING * number
        environment |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(channel)}
    return arguments, environment


def _sglang(config: Config, role: str, side: Side, _: int, bootstrap: int) -> tuple[list[str], dict[str, str]]:
    # Prompts are token ids, so the server needs no tokenizer.
    arguments = [
        "--skip-tokenizer-init",
        "--enable-metrics",
        "--incremental-streaming-output",  # else every chunk repeats all tokens so far
        *("--context-length", str(config.model.context)),
        *("--tp-size", str(side.tp)),
        *("--pp-size", str(side.pp)),
        *("--chunked-prefill-size", str(config.scheduler.chunk)),
        *("--max-running-requests", str(config.scheduler.decode_batch)),
        *("--page-size", str(config.kv.page_size)),
        *("--mem-fraction-static", str(config.scheduler.memory_fraction)),
        *(() if config.live.prefix_cache else ("--disable-radix-cache",)),
        *(() if config.hw.gpus else ("--device", "cpu")),
    ]
    environment = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}  # whoever asks whether it is up adds no request
    if role == "server":
        return arguments, environment
    arguments += [
        *("--disaggregation-mode", role),
        *("--disaggregation-transfer-backend", config.live.connector or _connector(config, _SGLANG)),
        *("--disaggregation-bootstrap-port", str(bootstrap)),
    ]
    needed = _ENVIRONMENTS.get(config.backend.name, {})
    kept = {name: os.environ[name] for name in needed if name == "MC_FORCE_TCP" and name in os.environ}
    return arguments, environment | needed | kept


_VLLM = {"nixl": "NixlConnector", "mooncake": "MooncakeConnector", "mori": "MoRIIOConnector"}
_SGLANG = {"nixl": "nixl", "mooncake": "mooncake", "mori": "mori"}
_ENVIRONMENTS = {
    "mooncake_nvlink": {"SGLANG_MOONCAKE_CUSTOM_MEM_POOL": "INTRA_NODE_NVLINK", "MC_INTRANODE_NVLINK": "1"},
    "mooncake_tcp": {"MC_FORCE_TCP": "1"},
}
"""What SGLang needs in its environment for a transport of Mooncake's."""


def _connector(config: Config, names: Mapping[str, str]) -> str:
    family = config.backend.name.partition("_")[0]
    if family not in names:
        raise ConfigError(
            f"backend={config.backend.name} has no KV connector in this engine; "
            f"use one of {', '.join(_known(names))}, or name one with live.connector"
        )
    return names[family]


def _known(names: Mapping[str, str]) -> Sequence[str]:
    return [f"backend={name}" for name in names]
