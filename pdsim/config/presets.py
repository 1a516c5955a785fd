# SPDX-License-Identifier: Apache-2.0
"""What ``auto`` becomes: what serving engines start with, by release (`RELEASES`), and which ``compute`` fits.

A key whose composed value is ``auto`` takes the value of the release that ``engine.version`` names, so a value that
was typed, or that stands in a file, wins in any order.  Keys without a row keep the schema's default.

``compute=auto`` takes the first file that fits: a profile in a folder of one's own (``--config-dir``), pdsim's own
measurement of this engine, GPU and model, a published table of this engine and GPU, a roofline.  Files are read in
the order of their names, and installed packages are not looked at, so that the answer is the same on any machine.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pdsim.compute import tables
from pdsim.compute.forward import Compute, forward
from pdsim.compute.roofline import kv_shape, weight_bytes
from pdsim.core import plugins
from pdsim.core.errors import ConfigError
from pdsim.models.llm import Side

_Config = TypeVar("_Config")  # a `pdsim.config.Config`, which imports this

AUTO = "auto"
KEYS = (
    "kv.page_size", "scheduler.chunk", "scheduler.prefill_batch", "scheduler.decode_batch",
    "scheduler.memory_fraction", "scheduler.context", "compute.graph_tokens",
)  # fmt: skip
"""Keys that are ``auto`` unless a file or the command line says more."""


class Setting(NamedTuple):
    """The value of one key in a release."""

    key: str
    value: Any  # or a function of the `pdsim.config.Config`; None keeps the schema's default
    flag: str  # of the engine, or where it has none, what decides
    source: str  # its file in the engine's repository


_CONTEXT = int(1.5 * 2**30)
# measured: vLLM 0.22.1 on H200 1.4 and 1.5 GiB with Qwen3-8B, 3.5 with 30B-A3B; published: SGLang finds 137.9 of
# 139.7 GiB free before the weights of a model on eight H200 (InferenceX, issue 2128)

# --- SGLang --------------------------------------------------------------------------------------------------------

_SIZES = (
    (20, 2048, 8, 8),
    (35, 2048, 24, 80),
    (60, 4096, 32, 160),
    (160, 8192, 256, 512),
    (math.inf, 16384, 512, 512),
)
"""GPU memory below so many GiB, --chunked-prefill-size, and the largest captured batch below and from tp=4 on."""
_NEWER_SIZES = (_SIZES[0], (35, 4096, 48, 160), *_SIZES[2:])
_Sizes = tuple[tuple[float, int, int, int], ...]
_BLACKWELL = ("B200", "B300", "GB200", "GB300")  # of compute capability 10


def _mebibytes(config: Any) -> float:
    return float(config.hw.gpu.memory) / 2**20 if config.hw.gpu else 0.0


def _size(sizes: _Sizes, config: Any) -> tuple[float, int, int, int]:
    return next(row for row in sizes if _mebibytes(config) < row[0] * 1024)


def _colocated(config: Any) -> bool:
    live = config.experiment.name == "validate_live" and config.live.layout == "colocated"
    return live or getattr(config.experiment, "colocated", False)


def _sides(config: Any) -> tuple[tuple[str, Side], ...]:
    if _colocated(config):
        return (("null", config.parallel.prefill),)
    return ("prefill", config.parallel.prefill), ("decode", config.parallel.decode)


def _sglang_chunk(sizes: _Sizes, config: Any) -> int | None:
    # attention groups share it
    return _size(sizes, config)[1] // config.parallel.prefill.dp if config.hw.gpu else None


def _sglang_page(config: Any) -> int | None:
    # kernels of TensorRT-LLM on Blackwell, and sparse attention, take pages of 64; radix nodes with state need 1
    if config.hw.gpu is None:
        return None
    blackwell = config.hw.gpu.name in _BLACKWELL and "m" not in config.model.hybrid.pattern
    return 64 if blackwell or config.model.hybrid.index_bytes else 1


def _sglang_memory(sizes: _Sizes, by_mode: bool, config: Any) -> float | None:
    # Each side has a fraction of its own there and one key here, which takes the lower.  In *by_mode* releases one
    # reserves only for the phase that it runs.
    total = _mebibytes(config)
    if not total:
        return None
    fractions = []
    for mode, side in _sides(config):
        chunk = config.scheduler.chunk * config.parallel.prefill.dp
        _, _, few, many = _size(sizes, config)
        tp = side.tp * side.cp  # SGLang's tp_size is all GPUs of a stage
        captured = few if tp < 4 else many
        tokens = captured if by_mode and mode == "decode" else chunk
        reserved = 512 + 1.5 * max(tokens, 2048) + 128 * tp * side.pp
        if not (by_mode and mode == "prefill"):
            more = 4.5 if captured > 300 else 3.0
            reserved += 2 * captured + (more * captured * side.dp if side.dp > 1 else 0)
        graphs = mode in (("null", "prefill") if by_mode else ("null",))
        if graphs and side.pp == side.cp == 1 and (by_mode or side.dp == 1) and config.hw.vendor == "nvidia":
            reserved += 1536 if config.model.attention == "mla" else 8 * _prefill_graphs(chunk)
        if total > 60 * 1024:
            reserved = max(reserved, 10 * 1024)
        fractions.append(round((total - reserved) / total, 3))
    if min(fractions) < 0.3:  # of very many GPUs, whose servers do not start unless the flag is set
        return None
    with_aiter = config.hw.vendor == "amd" and config.model.attention != "mla" and config.model.context > 8192
    return round(min(fractions) * (0.85 if with_aiter else 1.0), 6)


def _sglang_graphs(config: Any) -> int:
    # steps with prompts run in pieces of CUDA graphs, unless they are of latent attention or of a pair of servers
    side = config.parallel.prefill
    plain = side.dp == side.pp == side.cp == 1 and config.hw.vendor == "nvidia" and config.model.attention != "mla"
    return int(config.scheduler.chunk) if _colocated(config) and plain else 0


def _prefill_graphs(most: int) -> int:
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, most + 1, 512))
    return sum(size <= most for step in steps for size in range(*step))


def _sglang_batch(config: Any) -> int | None:
    # of an attention group; a model with state gets what its state pool holds, which is not modelled
    if config.hw.gpu is None or "m" in config.model.hybrid.pattern:
        return None
    side = config.parallel.prefill if len(_sides(config)) == 1 else config.parallel.decode
    left = config.scheduler.room(config.hw.gpu.memory, weight_bytes(config.model, side))
    try:
        tokens = (config.kv.pool or left) / (kv_shape(config.model).token_bytes(side.attention_tp) / side.pp)
    except ValueError:  # which the rules say better, later
        return None
    return max(1, min(max(min(int(tokens / config.model.context * 512), 4096), 2048), int(tokens) // 2))


def _same_batch(config: Any) -> int | None:
    # of engines that limit the requests of a prompt step by nothing but those of a server
    return None if config.hw.gpu is None else int(config.scheduler.decode_batch)


def _sglang_grouping(config: Any) -> str:
    return "pages" if config.backend.implementation == "nixl" else "runs"


# --- vLLM and TensorRT-LLM -----------------------------------------------------------------------------------------


def _vllm_large(large: int, small: int, config: Any) -> int:
    gpu = config.hw.gpu
    return large if gpu is None or (gpu.memory >= 70 * 2**30 and "A100" not in gpu.name) else small


def _newer_vllm_chunk(config: Any) -> int:
    return 16384 if _mebibytes(config) >= 160 * 1024 else _vllm_large(8192, 2048, config)


def _vllm_graphs(config: Any) -> int:
    return 1024 if config.hw.gpu and config.hw.gpu.name in _BLACKWELL else 512


def _trtllm_memory(config: Any) -> float:
    # kv_cache_config.free_gpu_memory_fraction is of what the weights leave, which are those of the side with more
    if config.hw.gpu is None:
        return 0.9
    weights: float = max(weight_bytes(config.model, side) for _, side in _sides(config))
    share = weights / float(config.hw.gpu.memory)
    return round(min(1.0, 0.9 + 0.1 * share), 3)


# --- releases ------------------------------------------------------------------------------------------------------

_ARGS, _MEMORY, _NIXL = "srt/server_args.py", "srt/arg_groups/memory_hook.py", "srt/disaggregation/nixl/conn.py"
_RUNNER = "srt/model_executor/model_runner_kv_cache_mixin.py"
_CACHE, _ENGINE_ARGS, _BLOCKS = "vllm/config/cache.py", "vllm/engine/arg_utils.py", "vllm/v1/core/block_pool.py"
_WORKER = "vllm/v1/worker/gpu_worker.py"
_SCHEDULER, _FLASH = "vllm/v1/core/sched/scheduler.py", "vllm/v1/attention/backends/flash_attn.py"
_COMPILATION, _VLLM = "vllm/config/compilation.py", "vllm/config/vllm.py"
_LLM_ARGS = "tensorrt_llm/llmapi/llm_args.py"
_Value = Callable[[Any], Any]
_memory: _Value = partial(_sglang_memory, _SIZES, False)
_newer_memory: _Value = partial(_sglang_memory, _NEWER_SIZES, True)
_vllm_chunk: _Value = partial(_vllm_large, 8192, 2048)
_vllm_batch: _Value = partial(_vllm_large, 1024, 256)

RELEASES: Mapping[str, Mapping[str, tuple[Setting, ...]]] = {
    "sglang": {
        "0.5.12": (
            Setting("kv.page_size", _sglang_page, "--page-size", _ARGS),
            Setting("scheduler.chunk", partial(_sglang_chunk, _SIZES), "--chunked-prefill-size", _ARGS),
            Setting("scheduler.memory_fraction", _memory, "--mem-fraction-static", _ARGS),
            Setting("scheduler.context", _CONTEXT, "its share of what is free before weights", _RUNNER),
            Setting("scheduler.decode_batch", _sglang_batch, "--max-running-requests", _RUNNER),
            Setting("scheduler.prefill_batch", _same_batch, "--prefill-max-requests", _ARGS),
            Setting("backend.policy.grouping", "runs", "group_concurrent_contiguous", _NIXL),
            Setting("compute.graph_tokens", _sglang_graphs, "--piecewise-cuda-graph-max-tokens", _ARGS),
        ),
        "0.5.23": (
            Setting("scheduler.chunk", partial(_sglang_chunk, _NEWER_SIZES), "--chunked-prefill-size", _MEMORY),
            Setting("scheduler.memory_fraction", _newer_memory, "--mem-fraction-static", _MEMORY),
            Setting("backend.policy.grouping", _sglang_grouping, "prep_xfer_dlist", _NIXL),
        ),
    },
    "vllm": {
        "0.22.1": (
            Setting("kv.page_size", 16, "--block-size", _CACHE),
            Setting("scheduler.memory_fraction", 0.92, "--gpu-memory-utilization", _CACHE),
            Setting("scheduler.context", _CONTEXT, "non_kv_cache_memory", _WORKER),
            Setting("scheduler.chunk", _vllm_chunk, "--max-num-batched-tokens", _ENGINE_ARGS),
            Setting("scheduler.decode_batch", _vllm_batch, "--max-num-seqs", _ENGINE_ARGS),
            Setting("scheduler.prefill_batch", _same_batch, "--max-num-seqs", _SCHEDULER),
            Setting("engine.pages", "queue", "free_blocks", _BLOCKS),
            Setting("engine.packed", False, "get_kv_cache_shape", _FLASH),
            Setting("compute.graph_tokens", 512, "--max-cudagraph-capture-size", _COMPILATION),
        ),
        "0.24.0": (Setting("engine.pages", "stack", "free_blocks, prepend_n", _BLOCKS),),
        "0.26.0": (Setting("engine.packed", True, "get_kv_cache_shape", _FLASH),),
        "0.28.0": (
            Setting("scheduler.chunk", _newer_vllm_chunk, "--max-num-batched-tokens", _ENGINE_ARGS),
            Setting("compute.graph_tokens", _vllm_graphs, "--max-cudagraph-capture-size", _VLLM),
        ),
    },
    "trtllm": {
        "1.4.0rc4": (
            Setting("kv.page_size", 32, "kv_cache_config.tokens_per_block", _LLM_ARGS),
            Setting(
                "scheduler.memory_fraction", _trtllm_memory, "kv_cache_config.free_gpu_memory_fraction", _LLM_ARGS
            ),
            Setting("scheduler.chunk", 8192, "--max_num_tokens", _LLM_ARGS),
            Setting("scheduler.decode_batch", 2048, "--max_batch_size", _LLM_ARGS),
            Setting("scheduler.prefill_batch", 2048, "--max_batch_size", _LLM_ARGS),
        )
    },
}
"""By engine and release, oldest first, the settings that differ from those of the release before."""


def family(name: str) -> str:
    """Return the engine of `RELEASES` that the engine called *name* is, such as vllm for vllm26; "" of others."""
    return next((each for each in RELEASES if name.startswith(each)), "")


def release(name: str, version: str) -> str:
    """Return the release that *version* names of the engine called *name*: ``0.26`` is 0.26.0.

    No version is the oldest release, which the costs in ``conf/engine`` are of.  Raise a `ConfigError` if there is
    none, or if there are several.
    """
    known = list(RELEASES.get(family(name), ()))
    if not version:
        return known[0] if known else ""
    fit = [each for each in known if each == version or each.startswith(f"{version}.")]
    if len(fit) != 1:
        rule = f"pdsim knows {', '.join(known)}" if known else "only vllm, sglang and trtllm have releases"
        raise ConfigError(f"engine.version={version} is no release of engine={name}; {rule}; or leave it out")
    return fit[0]


def of_servers(config: Any) -> str:
    """Return the engine whose pairs of prefill and decode servers *config* models: vllm or sglang; "" of others."""
    pair = config.hw.gpus and not _colocated(config)
    name = family(config.engine.name)
    return name if pair and name in ("vllm", "sglang") else ""


def settings(name: str, version: str) -> dict[str, Setting]:
    """Return the settings of a release of the engine called *name*, by key.  Raise a `ConfigError` as `release`."""
    chosen, made = release(name, version), dict[str, Setting]()
    for each, changes in RELEASES.get(family(name), {}).items():
        made |= {setting.key: setting for setting in changes}
        if each == chosen:
            break
    return made


def left_open(values: dict[str, Any]) -> dict[str, Any]:
    """Return *values*, the schema's defaults, with those of `KEYS` as ``auto``."""
    for part, name in (key.split(".") for key in KEYS):
        values[part][name] = AUTO
    return values


def opened(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return *values* of a configuration without the keys that are ``auto``, and those keys.

    Keys of engines, also of those that an experiment compares, have their values then.
    """
    keys: list[str] = []

    def without(part: Any, at: str) -> Any:
        if not isinstance(part, Mapping):
            return part
        own = (
            settings(str(part["name"]), str(part["version"])) if AUTO in part.values() and "version" in part else {}
        )
        kept = {}
        for name, value in part.items():
            if f"engine.{name}" in own and value == AUTO:
                kept[name] = own[f"engine.{name}"].value
            elif value == AUTO and at + name != "compute.name":
                keys.append(f"{at}{name}")
            else:
                kept[name] = without(value, f"{at}{name}.")
        return kept

    places = ("kv", "scheduler", "engine", "backend", "compute", "experiment")
    return {name: without(part, f"{name}.") if name in places else part for name, part in values.items()}, tuple(
        keys
    )


def filled(config: _Config, keys: tuple[str, ...]) -> tuple[_Config, dict[str, Any]]:
    """Return *config* with its release's values for *keys*, and the values among them of the backend's policy.

    Raise a `ConfigError` for a release that is not known.
    """
    whole: Any = config
    name = release(whole.engine.name, whole.engine.version)
    if name != whole.engine.version:
        whole = replace(whole, engine=replace(whole.engine, version=name))
    policy = {}
    for key, setting in settings(whole.engine.name, name).items():
        # in their order: memory depends on the chunk, the batch on memory
        value = setting.value(whole) if key in keys and callable(setting.value) else setting.value
        if key not in keys or value is None:
            continue
        part, _, field = key.rpartition(".")
        if part == "backend.policy":
            policy[field] = value
        else:
            whole = replace(whole, **{part: replace(getattr(whole, part), **{field: value})})
    return whole, policy


def on_host(config: _Config) -> tuple[_Config, dict[str, str]]:
    """Return *config* with all host time of its engine and of launches times ``engine.host_factor``, and sources."""
    whole: Any = config
    engine, compute = whole.engine, whole.compute
    if (factor := engine.host_factor) == 1.0:
        return config, {}
    own = {side: asdict(getattr(engine, side)) for side in ("prefill", "decode")}
    costs = ["proxy", *(f"{side}.{name}" for side in own for name, value in own[side].items() if value)]
    sources = {f"engine.{name}": f"assumed: times engine.host_factor={factor:g}" for name in costs}
    launched = replace(compute, launch_factor=compute.launch_factor * factor)
    return replace(whole, engine=engine.on_host(), compute=launched), sources


def notes(config: Any) -> Iterator[str]:
    """Yield what ``compute=auto`` took, and warnings: of a ``compute`` of another GPU or model, and of a page size.

    The page size is one that servers of the engine do not have.
    """
    yield from _compute_notes(config)
    name, page, sparse = family(config.engine.name), config.kv.page_size, config.model.hybrid.index_bytes
    takes, flag = "", ""
    if name == "vllm" and page % 16:
        takes, flag = "multiples of 16", "--block-size"
    elif name == "sglang" and _sglang_page(config) == 64 and page not in ((64,) if sparse else (16, 32, 64)):
        takes, flag = "64" if sparse else "16, 32 or 64", "--page-size"
    elif name == "trtllm" and page & (page - 1):
        takes, flag = "powers of two", "kv_cache_config.tokens_per_block"
    if (other := config.kv.decode_page_size) and (name == "sglang" or (name == "vllm" and other % page)):
        rule = "equal pages on both sides" if name == "sglang" else "pages of decode that are multiples of prefill's"
        yield f"warning: kv.decode_page_size={other}, kv.page_size={page}: engine={name} takes {rule}"
    if takes:
        engine, hw = config.engine.name, config.hw.name
        yield f"warning: kv.page_size={page}: {flag} of engine={engine} takes {takes} on hw={hw}"


# --- compute=auto --------------------------------------------------------------------------------------------------

ROOFLINE = (
    "by a roofline TTFT, TPOT and output of MI300X servers were 63, 43 and 81 % off, of MI355X 50, 16 and 22, "
    "disaggregated 72, 12 and 17, nearly all too fast; H100, blind, 27, 26 and 28"
)
"""How far a roofline with assumed shares is off (data/benchmarks/scorecard.csv, docs/model.md)."""
OPERATORS = "operators"
"""The ``compute`` that looks up in aiconfigurator-core's own tables."""
OWN, PASSED = "your own profile", "; not your own profile "


def computing(
    config: Any,  # a `pdsim.config.Config`, which imports this
    values: Mapping[str, Any],
    keys: Iterable[str],
    folders: Sequence[Path],
    build: Callable[[Mapping[str, Any]], Compute],
) -> Compute:
    """Return the compute that ``compute=auto`` or operators means in *config*; its `Compute.chosen` says why.

    *values* are those of ``compute`` as composed: those that differ from the defaults, or are among *keys*, the
    dotted keys set by hand, stay.  *folders* are one's own with configuration groups; *build* is the schema's.
    """
    names = {key.split(".")[1] for key in keys if key.startswith("compute.")}
    base = _unset()
    own = {key: value for key, value in values.items() if key in names or value != base[key]}
    if config.compute.name == OPERATORS:
        return build(_laid(_operators(config), own))
    passed = ""
    for content, why in _candidates(config, folders):
        compute = build(_laid({**content, "chosen": why + passed}, own))
        lacks = _lacks(config, compute) if compute.kernels else ""
        if not lacks:
            return compute
        passed = passed or (f"{PASSED}{content['name']}: {lacks}" if why.startswith(OWN) else "")
    here = config.hw.gpu.name if config.hw.gpu else ""
    if not here:
        return build({"name": "roofline", **own, "chosen": "without a GPU compute is emulated"})
    why = f"{config.engine.name} with {config.model.name} was not measured on {here}; {ROOFLINE}{passed}"
    return build({**_content(plugins.conf() / "compute" / "roofline.yaml"), **own, "chosen": why})


@cache
def _unset() -> dict[str, Any]:
    return asdict(Compute(name=AUTO))


def _compute_notes(config: Any) -> list[str]:
    compute, gpu, model = config.compute, config.hw.gpu.name if config.hw.gpu else "", config.model.name
    if not gpu:
        return []
    lines = []
    if compute.attention and (config.model.attention == "mla" or not (compute.kernels or compute.attention_padded)):
        what = "latent attention" if config.model.attention == "mla" else f"compute={compute.name}, a roofline"
        lines = [f"warning: compute.attention={compute.attention} has no effect on {what}"]
    if compute.fp8_gemm and not (compute.kernels and compute.kernels.table):
        lines.append(f"warning: compute.fp8_gemm={compute.fp8_gemm} has no effect on {compute.name}, not a table")
    if compute.chosen:
        warns = compute.name == "roofline" or PASSED in compute.chosen
        return [*lines, f"{'warning: ' if warns else ''}compute={compute.name}: {compute.chosen}"]
    of, models = compute.measured_gpu, compute.measured_of
    wrong = f"on {of}, not on {gpu}" if of not in ("", gpu) else ""
    if models and model not in models:
        wrong = wrong or f"of {', '.join(models)}, not of {model}"
    return [*lines, *([f"warning: compute={compute.name} was measured {wrong}; try compute=auto"] if wrong else [])]


def _candidates(config: Any, folders: Sequence[Path]) -> Iterator[tuple[dict[str, Any], str]]:
    gpu = config.hw.gpu.name if config.hw.gpu else ""
    engine, model = config.engine.name, config.model.name
    if not gpu:
        return
    for folder in folders:
        for path in sorted((folder / "compute").glob("*.yaml")):
            content = _content(path)
            if _gpu(content) == gpu and model in content.get("measured_of", [model]):
                yield {**content, "name": path.stem}, f"{OWN} of {gpu}, {path}"
    shipped = [_content(path) for path in _shipped(gpu)]
    # which are of pairs, whose prompts were launched kernel by kernel
    for content in () if _colocated(config) and config.compute.graph_tokens else shipped:
        kind = content.get("engine", "generic")  # vllm26 is of the family vllm
        measured = model in content.get("measured_of", ()) and _released(config.model)
        if _gpu(content) == gpu and engine.startswith(kind) and measured:
            yield content, f"pdsim's own measurement of {model}, engine={kind}, on {gpu}"
    for content in shipped:
        kind, table = content.get("engine", ""), content.get("kernels", {}).get("table")
        if _gpu(content) == gpu and table and (engine == "generic" or engine.startswith(kind)):
            sealed = hashlib.sha256(tables.path_of(table).read_bytes()).hexdigest()[:12]
            yield content, f"published operators of {kind} on {gpu}, table of SHA-256 {sealed}"


def _operators(config: Any) -> dict[str, Any]:
    # The constants of the choice that has a compact table of the GPU and the engine, with the table that it is of.
    from pdsim.compute import published

    gpu, engine = config.hw.gpu.name if config.hw.gpu else "", config.engine.name
    for path in _shipped(gpu) if gpu else ():
        content = _content(path)
        table = content.get("kernels", {}).get("table")
        if not table or not (engine == "generic" or engine.startswith(content["engine"])):
            continue
        about = tables.read(table).about
        folder, version = about["source"].rpartition("/")[2], about["version"]
        if published.installed(folder) is None:
            raise ConfigError(
                f"compute=operators needs aiconfigurator-core, which is not installed; {published.MISSING}"
            )
        kernels = {**content["kernels"], "table": f"{published.WHOLE}{folder}/{content['engine']}/{version}"}
        chosen = f"all rows of {content['engine']} {version} on {gpu}, of the installed aiconfigurator-core"
        return {**content, "kernels": kernels, "chosen": chosen}
    raise ConfigError(f"compute=operators has no tables of engine={engine} on hw={config.hw.name}; set compute=auto")


def _released(model: Any) -> bool:
    # Whether its weights have the type of its file, which is what was measured.
    path = plugins.conf() / "model" / f"{model.name}.yaml"
    if not path.is_file():
        return True
    own = _content(path)
    return (own.get("dtype_bytes", 2), own.get("mlp_dtype", "")) == (model.dtype_bytes, model.mlp_dtype)


def _laid(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: _laid(under[key], over[key]) for key in over if isinstance(over[key], dict) and key in under}
    return {**under, **over, **both}


def _gpu(content: Mapping[str, Any]) -> str:
    return str(content.get("gpu") or content.get("kernels", {}).get("gpu", ""))


@cache
def _shipped(gpu: str) -> list[Path]:
    return sorted((plugins.conf() / "compute").glob(f"{gpu.lower()}_*.yaml"))


@cache
def _content(path: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]  # comes with OmegaConf, its stubs do not

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former takes a tenth of the time
    content: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), loader)  # noqa: S506
    return content or {}


def _lacks(config: Any, compute: Compute) -> str:
    # What has no times of all operators of the model, as it is divided, or nothing.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tables.RangeWarning)
            for side in (config.parallel.prefill, config.parallel.decode):
                forward(config.model, config.hw, compute, side)
    except (ConfigError, ValueError, ZeroDivisionError) as error:  # of a model that the rules refuse, later
        return str(error).partition(";")[0]
    return ""
