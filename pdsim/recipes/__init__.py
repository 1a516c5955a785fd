# SPDX-License-Identifier: Apache-2.0
"""A deployment's own words as a configuration: command lines of vLLM and SGLang, scripts and YAML with them.

`pdsim.recipes.commands` finds the servers in a text.  `translated` says what each flag becomes: ``flags.txt`` has
those of the known releases, each with the key that it decides.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pdsim.core import plugins
from pdsim.core.errors import ConfigError, near
from pdsim.kv.layout import KvShape
from pdsim.kv.policy import VARIABLES, described
from pdsim.models.huggingface import SHIPPED, expanded
from pdsim.models.llm import DTYPES
from pdsim.recipes.commands import ALIASES, Server

TIMELESS = re.compile(
    r"host|port|\S*-port|\S*-(names?|path|dir|address|addr|parser|plugin|revision|interval|timeout|logs?|metrics)"
    r"|served-model-name|trust-remote-code|api-key|ssl-\S+|allow\S*|(no-)?(enable|disable|log)-\S*(log|request)s?\S*"
    r"|uvicorn-\S+|tokenizer\S*|chat-template\S*|\S*tool-\S+|seed|random-seed|load-format|dtype|swap-space|device"
    r"|nnodes|node-rank|master-\S+|base-gpu-id|gpu-id-step|headless|distributed-executor-backend|root-path"
    r"|middleware|data-parallel-((hybrid|external)-lb|size-local|backend|(rank|start)\S*)|config-format"
    r"|generation-config|kv-events-config|watchdog-\S+|enable-metrics\S*|collect-\S+|dyn-\S+|store-kv|\S+-plane"
    r"|use-\S+-tokenizer"
    r"|endpoint|skip-tokenizer-init|language-model-only|(no-)?enable-chunked-prefill"
    r"|enable-cache-report|load-balance-method|prefill-round-robin-balance|model-loader-\S+"
)
"""Flags that change no modelled time, or that say what the simulator does anyway."""


@dataclass(frozen=True)
class Recipe:
    """A configuration, and where each part of it comes from."""

    words: tuple[str, ...]  # overrides of `pdsim run`
    taken: tuple[tuple[str, str, str], ...]  # side, flag as typed, and the override that it decides
    timeless: tuple[str, ...]  # flags without an effect on times
    unmodelled: tuple[str, ...]  # flags that the model has nothing for
    unknown: tuple[str, ...]  # flags that no known release has


@cache
def known() -> dict[str, dict[str, str]]:
    """Return by engine the key that each of its flags decides, as ``parallel.{side}.tp``, or "".

    Flags that only Dynamo has are under ``dynamo``, what InferenceX's matrix says of the load under ``inferencex``.
    """
    names: dict[str, dict[str, str]] = {}
    for line in (Path(__file__).parent / "flags.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            of = names.setdefault(line.split()[1], {})
        else:
            flag, _, key = line.partition(" ")
            of[flag] = key
    return names


def translated(every: Sequence[Server], hw: str = "", ignore_unknown: bool = False) -> Recipe:
    """Return the configuration of the servers *every*, on the machine *hw*.

    Raise a `ConfigError` for servers of several engines or models, and for a flag that no known release has, unless
    *ignore_unknown* is set.
    """
    engine, by_side, instances = _sides([server for server in every if not server.joins])
    config = _whole(engine, by_side, instances)
    if hw:
        config = {"hw": hw, **config}
    taken: list[tuple[str, str, str]] = []
    for side, server in by_side.items():
        cards = {f"--{_CARDS}": server.flags[_CARDS]} if _CARDS in server.flags else {}
        for variable, decided in wire_chosen({**server.environment, **cards}, config.get("backend", "")).items():
            config |= decided
            taken += [(side, variable, f"{key}={value}") for key, value in decided.items()]
    words = dict.fromkeys(f"{key}={value}" for key, value in config.items())
    timeless, unmodelled, unknown = dict[str, None](), dict[str, None](), dict[str, None]()
    flags = known()["dynamo"] | known()["inferencex"] | dict.fromkeys(ALIASES[engine], "") | known()[engine]
    for side, server in by_side.items():
        for flag, value in server.flags.items():
            typed, positive = f"--{flag} {value}".strip(), flag.removeprefix("no-")
            key = flags.get(positive, "").format(side="decode" if side == "server" else side)
            if key.endswith(".dp") and key not in config and value != "1":
                key = f"{key.removesuffix('dp')}instances"  # copies of the server
            if key in config:
                taken.append((side, typed, f"{key}={config[key]}"))
            elif flag == _CARDS and any(name.startswith(f"--{flag}=") for _, name, _ in taken):
                pass  # above
            elif key or TIMELESS.fullmatch(flag):
                timeless[typed] = None
            elif positive in flags:
                unmodelled[typed] = None
            elif ignore_unknown:
                unknown[typed] = None
            else:
                raise ConfigError(
                    f"--{flag} is no flag of {engine} as of the releases that pdsim knows; "
                    f"{near(flag, sorted(flags), '--{}')}leave it out, or pass --ignore-unknown"
                )
        timeless |= {f"{name}={value}": None for name, value in server.environment.items() if name in _ADDRESSES}
        environment = {name: value for name, value in server.environment.items() if name in VARIABLES}
        policy = [*described(environment, str(config.get("backend", "")).partition("_")[0])]
        words |= dict.fromkeys(policy)
        taken += [(side, "environment", word) for word in policy]
    return Recipe(tuple(words), tuple(taken), tuple(timeless), tuple(unmodelled), tuple(unknown))


def _sides(every: Sequence[Server]) -> tuple[str, dict[str, Server], dict[str, int]]:
    # The engine, and by side a server and how many there are: prefill and decode, or "server" alone.
    said = {(one.side, replace(one, role="").side, "kv-transfer-config" in one.flags) for one in every}
    if said == {("prefill", "server", False)}:
        every = [replace(one, role="") for one in every]  # only a name says so: Dynamo's llama-3-70b/vllm/agg
    engines = {server.engine for server in every}
    if len(engines) > 1:
        raise ConfigError("servers of vllm and of sglang in one deployment; give those of one engine")
    (engine,) = engines
    by_side = {server.side: server for server in every}
    if len(by_side) > 1 and "server" in by_side:
        raise ConfigError("some servers say prefill or decode and others nothing; give each its role")
    if len(by_side) == 1 and "server" not in by_side:
        (side,) = by_side
        other = "decode" if side == "prefill" else "prefill"
        raise ConfigError(f"there are {side} servers only; give the command of {other} too")
    if "server" in by_side and engine == "vllm" and (backend := _backend(engine, by_side["server"])):
        rule = "nothing says which of them prefills; write kv_producer and kv_consumer"
        raise ConfigError(f"--kv-transfer-config connects servers (backend={backend}), but {rule}")
    return engine, by_side, {side: sum(one.instances for one in every if one.side == side) for side in by_side}


_NUMBERS = (
    *("kv.page_size", "scheduler.memory_fraction", "scheduler.decode_batch", "scheduler.chunk", "kv.pool"),
    *("engine.look", "model.context"),
)
"""Keys that a flag gives a number, that of the decode servers but for one."""


def _whole(engine: str, by_side: Mapping[str, Server], instances: Mapping[str, int]) -> dict[str, Any]:
    pair = "server" not in by_side
    prefill, decode = (by_side.get(side) or by_side["server"] for side in ("prefill", "decode"))
    # vllm's nixl/metadata.py and sglang's disaggregation/common/conn.py compare it; nobody converts
    types = [server.flags.get("kv-cache-dtype", "auto") for server in (prefill, decode)]
    if types[0] != types[1]:
        raise ConfigError(
            f"--kv-cache-dtype is {types[0]} of prefill and {types[1]} of decode, which {engine} does not connect; "
            "give both the same"
        )
    config: dict[str, Any] = {"engine": engine, **_model(prefill, engine)}
    if not pair:
        config |= {"experiment.deployment": "colocated", "experiment.engines": 1}
    for side, server in by_side.items():
        name = "decode" if side == "server" else side
        sizes = _layout(engine, server, instances[side], config["model"])
        config |= {f"parallel.{name}.{key}": n for key, n in sizes.items()}
    if not pair:
        own = {key: n for key, n in config.items() if key.startswith("parallel.decode")}
        config |= {key.replace("decode", "prefill"): n for key, n in own.items()}
        config["experiment.engines"] = config.get("parallel.decode.instances", 1)
    for key in _NUMBERS:
        server = prefill if key == "scheduler.chunk" else decode
        for flag, value in server.flags.items():
            if known()[engine].get(flag) == key and value not in ("", "auto"):
                number = _number(flag, value)
                shared = flag in ("max-running-requests", "chunked-prefill-size")  # of all attention groups
                groups = _count(server.flags, "data-parallel-size") if shared else 1
                if number > 0:  # -1 is the engine's own choice
                    config[key] = max(1, int(number) // groups) if number == int(number) else number
    if "conc" in decode.flags:  # lengths of 0.8 to 1 times those written, ten requests a user
        config |= {"workload": "sessions", "workload.users": int(decode.flags["conc"]), "workload.turns": 1,
                   "workload.think": "0s", "workload.ramp": "0s", "workload.shared": 0,
                   "workload.count": 10 * int(decode.flags["conc"])}  # fmt: skip
        for name, flag in (("input", "isl"), ("output", "osl")):
            config |= {f"workload.{name}_mean": 0.9 * int(decode.flags[flag]), f"workload.{name}_cv": 0.064}
    off = {"vllm": "no-enable-prefix-caching", "sglang": "disable-radix-cache"}[engine]
    # pdsim's prefix caches keep no state beside KV
    config["cache"] = "none" if off in prefill.flags or _shipped(config["model"]).get("hybrid") else engine
    if "disaggregation-decode-enable-radix-cache" in decode.flags:
        config["cache.decode"] = "true"
    if {"no-async-scheduling", "disable-overlap-schedule"} & set(decode.flags):
        config["engine.overlap"] = "false"
    if "enable-mixed-chunk" in prefill.flags:
        config["engine.mixed"] = "true"
    if engine == "vllm":
        config["compute.graph_tokens"] = _graph_tokens(prefill.flags)
    elif "disable-piecewise-cuda-graph" in prefill.flags:
        config["compute.graph_tokens"] = 0
    if engine == "sglang" and "triton" in (decode.flags.get(f"{side}attention-backend") for side in ("decode-", "")):
        config["compute.attention"] = "triton"
    if (products := prefill.flags.get("fp8-gemm-backend")) == "flashinfer_trtllm":
        config["compute.fp8_gemm"] = products
    if "deepep" in decode.flags.get("moe-a2a-backend" if engine == "sglang" else "all2all-backend", ""):
        config["compute.exchange_by"] = "deepep"
    if pair and (backend := _backend(engine, prefill)):
        config["backend"] = backend
    if config["cache"] == engine:
        tiers = _tiers(engine, prefill, config)
        config |= tiers if pair else {key: size for key, size in tiers.items() if key.startswith("cache.host")}
    return config


_GIB = 2.0**30
_UNBOUNDED = 1e9
"""Tokens of a store whose size no flag says: it is never full."""


def _tiers(engine: str, server: Server, config: Mapping[str, Any]) -> dict[str, Any]:
    # Tiers below GPU memory, in tokens of an instance.  Sizes are of all ranks (vllm/config/cache.py), of each in GB
    # (sglang's mem_cache/memory_pool_host.py), of each in GiB (LMCache).
    flags, tp = server.flags, max(1, config["parallel.prefill.tp"] // config.get("parallel.prefill.dp", 1))
    rank = _token_bytes(config, tp)
    if engine == "sglang":
        if "enable-hierarchical-cache" not in flags:
            return {}
        size = _number("hicache-size", flags.get("hicache-size") or "0")
        ratio = _number("hicache-ratio", flags.get("hicache-ratio") or "2")
        tiers: dict[str, Any] = {"cache.host": size * 1e9 // rank} if size else {"cache.host_ratio": ratio}
        if policy := flags.get("hicache-write-policy"):
            tiers["cache.write"] = {"write_through": "through", "write_through_selective": "selective"}.get(
                policy, "back"
            )
        if storage := flags.get("hicache-storage-backend"):
            tiers["cache.ssd" if storage == "file" else "cache.remote"] = _UNBOUNDED
            tiers["cache.prefetch"] = flags.get("hicache-storage-prefetch-policy", "best_effort")
        return tiers
    tiers = {}
    if size := _number("kv-offloading-size", flags.get("kv-offloading-size") or "0"):
        tiers["cache.host"] = size * _GIB // (rank * tp)
    for connector in server.connectors:
        more, name = connector.get("kv_connector_extra_config") or {}, connector.get("kv_connector")
        if name == "OffloadingConnector" and "cpu_bytes_to_use" in more:
            tiers["cache.host"] = _number("cpu_bytes_to_use", str(more["cpu_bytes_to_use"])) // (rank * tp)
        elif name == "OffloadingConnector" and "num_cpu_blocks" in more:
            blocks = _number("num_cpu_blocks", str(more["num_cpu_blocks"]))
            tiers["cache.host"] = blocks * int(config.get("kv.page_size", 16))
        elif name in ("LMCacheConnectorV1", "LMCacheConnector"):
            tiers |= _lmcache(server.environment, rank)
    return tiers


def _lmcache(environment: Mapping[str, str], rank: float) -> dict[str, Any]:
    # its variables; a file that LMCACHE_CONFIG_FILE names is not read
    def size(name: str, usual: str) -> float:
        return _number(name, environment.get(name, usual)) * _GIB // rank

    tiers: dict[str, Any] = {"cache.chunk": _count(environment, "LMCACHE_CHUNK_SIZE", "256")}
    if environment.get("LMCACHE_LOCAL_CPU", "true").lower() not in _NO:
        tiers["cache.host"] = size("LMCACHE_MAX_LOCAL_CPU_SIZE", "5")
    if environment.get("LMCACHE_LOCAL_DISK"):
        tiers["cache.ssd"] = size("LMCACHE_MAX_LOCAL_DISK_SIZE", "0")
    if environment.get("LMCACHE_REMOTE_URL"):
        tiers["cache.remote"] = _UNBOUNDED
    return tiers


def _token_bytes(config: Mapping[str, Any], tp: int) -> int:
    model = str(config["model"])
    values = _shipped(model) or expanded({"path" if model[0] in "./~" else "id": model})
    kind = str(config.get("model.kv_dtype") or values.get("kv_dtype") or "")
    size = DTYPES.get(kind, int(config.get("model.dtype_bytes") or values.get("dtype_bytes", 2)))
    latent = int(values.get("latent_dim", 0)) * size if values.get("attention") == "mla" else 0
    shape = KvShape(int(values["layers"]), int(values["kv_heads"]), int(values["head_dim"]) * size, latent)
    try:
        return shape.token_bytes(tp)
    except ValueError as error:
        raise ConfigError(f"model={model}: {error}; choose another --tensor-parallel-size") from None


def _graph_tokens(flags: Mapping[str, str]) -> int:
    # vLLM compiles, and captures prompts up to twice the batch or 512 tokens, unless a flag turns that off
    # (vllm/config/vllm.py and compilation.py of 0.22.1)
    chosen = flags.get("compilation-config", "") + f" level={flags.get('optimization-level', '')}"
    if "enforce-eager" in flags or re.search(r"(mode\W*|level=)0\b|NONE|FULL_DECODE_ONLY", chosen):
        return 0
    batch = int(_number("max-num-seqs", flags.get("max-num-seqs", "256")))
    return _count(flags, "max-cudagraph-capture-size", str(min(2 * batch, 512)))


def _layout(engine: str, server: Server, instances: int, model: str) -> dict[str, int]:
    def size(flag: str) -> int:
        return _count(server.flags, flag)

    tp, dp, pp = size("tensor-parallel-size"), size("data-parallel-size"), size("pipeline-parallel-size")
    cp, ep = size("attention-context-parallel-size"), size("expert-parallel-size")
    if engine == "vllm":  # whose tp is of an attention group; copies of a dense model share nothing
        if dp > 1 and not _experts(model):
            instances, dp = instances * dp, 1
        tp *= dp
        ep = tp if "enable-expert-parallel" in server.flags else 1
    else:
        if "enable-dp-attention" not in server.flags:  # copies of the server
            instances, dp = instances * dp, 1
        if server.flags.get("moe-a2a-backend", "none") != "none":  # which exchanges tokens among all ranks
            ep = tp
    sizes = {"tp": tp // cp if cp > 1 else tp, "instances": instances, "pp": pp, "cp": cp, "dp": dp, "ep": ep}
    return {key: n for key, n in sizes.items() if n > 1 or key == "tp"}


def _experts(model: str) -> int:
    values = _shipped(model) or expanded({"path" if model[0] in "./~" else "id": model})
    return int(values.get("experts", 0))


def _shipped(model: str) -> dict[str, Any]:
    # the file of *model*; nothing without one
    return _file("model", model) if model in plugins.options("model") else {}


def _file(group: str, name: str) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]  # comes with omegaconf, its stubs do not

    return dict(yaml.safe_load((plugins.conf() / group / f"{name}.yaml").read_text(encoding="utf-8")))


def _model(server: Server, engine: str) -> dict[str, Any]:
    given = server.flags.get("model") or server.flags.get("model-path") or ""
    served = server.flags.get("served-model-name", "").split(" ")[0]
    name = served if given.startswith("/") and served else given
    if not name:
        raise ConfigError(f"the command of {engine} names no model; add it")
    narrow = re.search(r"fp8", server.flags.get("quantization", "") + name.rpartition("/")[2], re.IGNORECASE)
    bare = re.sub(
        r"-(instruct|thinking|fp8|dynamic|hf|it|base|\d{4}|\d+b-\d+e)\b", "", name.rpartition("/")[2].lower()
    )
    bare = bare.removeprefix("meta-").removeprefix("nvidia-")
    config: dict[str, Any] = {"model": SHIPPED.get(bare, bare)}
    if config["model"] not in plugins.options("model"):
        config["model"] = name if "/" in name else f"./{name}"
    elif narrow:
        config["model.dtype_bytes"] = 1
        config["model.kv_dtype"] = "bf16"
    cached = server.flags.get("kv-cache-dtype", "auto")
    if cached != "auto":
        types = {"fp8": "fp8_e4m3", "bfloat16": "bf16", "float16": "fp16"}
        config["model.kv_dtype"] = types.get(cached, cached)
    return config


def _backend(engine: str, server: Server) -> str:
    if engine == "sglang":
        asked = server.flags.get("disaggregation-transfer-backend", "mooncake")
        asked = "nixl_sglang" if asked == "nixl" else asked
        return asked if asked != "mooncake" or "SGLANG_MOONCAKE_CUSTOM_MEM_POOL" not in server.environment else ""
    names = {"NixlConnector": "nixl_vllm", "NixlPushConnector": "nixl_vllm", "MooncakeConnector": "mooncake",
             "MoRIIOConnector": "mori"}  # fmt: skip
    return names.get(str(server.transfer.get("kv_connector")), "")


def _number(flag: str, text: str) -> float:
    units = {"": 1, "k": 1000, "K": 1024, "m": 1e6, "M": 2**20, "g": 1e9, "G": 2**30}
    match = re.fullmatch(r"(-?[\d.]+)([kKmMgG]?)", text)
    if match is None:
        raise ConfigError(f"{_written(flag)} {text} is not a number; write digits, such as 8192, 8k or 0.9")
    return float(match[1]) * units[match[2]]


def _written(name: str) -> str:
    return name if "_" in name else f"--{name}"  # variables and keys of JSON have no dashes


def _count(flags: Mapping[str, str], flag: str, usual: str = "1") -> int:
    text = flags.get(flag) or usual
    if not re.fullmatch(r"0*[1-9]\d{0,8}", text):
        raise ConfigError(
            f"{_written(flag)} {text} is not a whole number > 0; correct it, or leave it out for {usual}"
        )
    return int(text)


_FAST = {"all", "ib", "rc", "dc", "ud", "srd"}  # and rc_x, rc_verbs, ud_mlx5 ...
_NO = ("0", "n", "no", "off", "false", "")
_CARDS = "disaggregation-ib-device"
_ADDRESSES = ("UCX_IB_GID_INDEX", "MC_GID_INDEX", "NCCL_IB_GID_INDEX", "UCX_IB_TRAFFIC_CLASS", "MC_IB_TC")
"""Variables that choose an address or a class of the same wire: with a wrong one nothing connects."""


def wire_chosen(environment: Mapping[str, str], backend: str) -> dict[str, dict[str, str]]:
    """Return the keys that the variables of *environment* decide, by variable, for *backend*.

    What is the default of UCX, ``UCX_TLS=all`` or ``UCX_IB_GPU_DIRECT_RDMA=try``, decides nothing, nor does
    ``UCX_MAX_RNDV_RAILS``: NIXL reads and writes remote memory, which ``UCX_MAX_RMA_RAILS`` spreads
    (`src/ucp/rma/put_offload.c`, openucx/ucx 9466d104; `src/plugins/ucx/ucx_utils.cpp`, ai-dynamo/nixl 8770b655).
    An interface such as ``eth0`` in the place of ``mlx5_0:1``, or ``cuda_ipc`` without verbs, leaves NVLink within a
    node and TCP between nodes (`conf/backend/nixl_tcp.yaml`).  Bonds are not numbered as cards are.

    >>> wire_chosen({"UCX_TLS": "tcp,cuda_copy", "UCX_MAX_RMA_RAILS": "2"}, "nixl_vllm")
    {'UCX_TLS=tcp,cuda_copy': {'backend': 'nixl_tcp'}, 'UCX_MAX_RMA_RAILS=2': {'hw.nic.rails': '2'}}
    >>> wire_chosen({"UCX_TLS": "^ib,cuda_ipc"}, "nixl"), wire_chosen({"UCX_TLS": "rc_x,cuda_copy"}, "nixl")
    ({'UCX_TLS=^ib,cuda_ipc': {'backend': 'nixl_tcp'}}, {})
    >>> wire_chosen({"UCX_NET_DEVICES": "mlx5_0:1,mlx5_3:1"}, "nixl")
    {'UCX_NET_DEVICES=mlx5_0:1,mlx5_3:1': {'hw.nic.devices': '[0,3]'}}
    >>> wire_chosen({"UCX_TLS": "cuda_ipc,tcp"}, "nixl")["UCX_TLS=cuda_ipc,tcp"]["backend.inter.path"]
    'tcp'
    >>> wire_chosen({"MC_MS_FILTERS": "mlx5_0, mlx5_2", "MC_MS_AUTO_DISC": "1"}, "mooncake")
    {'MC_MS_FILTERS=mlx5_0, mlx5_2': {'hw.nic.devices': '[0,2]'}}
    >>> wire_chosen({"MC_FORCE_TCP": "1", "UCX_TLS": "tcp", "MC_NUM_QP_PER_EP": "4"}, "mooncake")
    {'MC_FORCE_TCP=1': {'backend': 'mooncake_tcp'}, 'MC_NUM_QP_PER_EP=4': {'backend.inter.queues': '4'}}
    """
    engine, keys = backend.partition("_")[0], dict[str, dict[str, str]]()
    for name, text in environment.items():
        word = text.strip().lower()
        number = word if word.isdecimal() and int(word) else ""
        match engine, name:
            case "nixl", "UCX_TLS" if not _allows(word):
                chosen = {"backend": "nixl_tcp"}
            case "nixl", "UCX_MAX_RMA_RAILS" | "UCX_MAX_RMA_LANES" if number:
                chosen = {"hw.nic.rails": number}
            case ("nixl", "UCX_IB_NUM_PATHS") | ("mooncake", "MC_NUM_QP_PER_EP") if number:
                chosen = {"backend.inter.queues": number}
            case "nixl", "UCX_TLS" if not _allows(word, local=False) and not text.startswith("^"):
                chosen = _tcp()
            case ("nixl", "UCX_NET_DEVICES") | ("mooncake", "MC_MS_FILTERS") | (_, "--disaggregation-ib-device") if (
                cards := re.findall(r"(?:^|,) *(?!\w*bond)\w*?_(\d+)(?::\d+)? *(?=,|$)", word)
            ):
                chosen = {"hw.nic.devices": f"[{','.join(cards)}]"}
            case "nixl", "UCX_NET_DEVICES" if re.fullmatch(r"(eth|en|bond|ib)\w*(,(eth|en|bond|ib)\w*)*", word):
                chosen = _tcp()
            case "nixl", "UCX_IB_GPU_DIRECT_RDMA" if word in _NO:
                chosen = {"hw.nic.gpudirect": "false"}
            case "mooncake", "MC_FORCE_TCP" if word not in _NO:
                chosen = {"backend": "mooncake_tcp"}
            case _:
                continue
        keys[f"{name}={text}"] = chosen
    return keys


def _tcp() -> dict[str, str]:
    # what decides the wire between nodes, where UCX has TCP alone
    inter = _file("backend", "nixl_tcp")["inter"]
    inter |= {"queue_rate": inter["rate"], "overlap": str(inter["overlap"]).lower()}
    return {f"backend.inter.{key}": value for key, value in inter.items() if key != "source"}


def _allows(text: str, local: bool = True) -> bool:
    # whether the list *text*, "^" for all but these, leaves verbs or, within a node (*local*), cuda_ipc
    named = {word.strip().lstrip("\\") for word in text.removeprefix("^").split(",")}
    if text.startswith("^"):
        return "all" not in named and not ("ib" in named and named & {"cuda", "cuda_ipc"})
    verbs = {word.partition("_")[0] for word in named} & _FAST
    return bool(verbs or named & ({"", "cuda", "cuda_ipc"} if local else {""}))
