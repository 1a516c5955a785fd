# SPDX-License-Identifier: Apache-2.0
"""``compute=auto``: which file of ``conf/compute`` says how long forwards take on a GPU, for an engine and a model.

The first that fits: a profile in a folder of one's own (``--config-dir``), pdsim's own measurement of this engine,
GPU and model, a published table of this engine and GPU, a roofline.  Files are read in the order of their names, and
installed packages are not looked at, so that the answer is the same on any machine.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from pdsim.compute import tables
from pdsim.compute.forward import Compute, forward
from pdsim.core import plugins
from pdsim.core.errors import ConfigError

__all__ = ["AUTO", "chosen", "notes"]

AUTO = "auto"
"""The choice of ``compute`` that is replaced by another."""
ROOFLINE = "TTFT, TPOT and end to end were 27, 26 and 28 % off on H100"
"""How far a roofline with assumed shares is off (docs/model.md)."""


def chosen(
    config: Any,  # a `pdsim.config.Config`, which imports this
    values: Mapping[str, Any],
    keys: Iterable[str],
    folders: Sequence[Path],
    build: Callable[[Mapping[str, Any]], Compute],
) -> Compute:
    """Return what ``compute=auto`` stands for in *config*; its `Compute.chosen` says why.

    *values* are those of ``compute`` as composed, of which those that differ from the defaults, or are among *keys*,
    the dotted keys set by hand, stay.  *folders* are one's own with configuration groups; *build* is the schema's.
    """
    names = {key.split(".")[1] for key in keys if key.startswith("compute.")}
    base = asdict(Compute(name=AUTO))
    own = {key: value for key, value in values.items() if key in names or value != base[key]}
    for content, why in _candidates(config, folders):
        compute = build(_laid({**content, "chosen": why}, own))
        if compute.kernels is None or _serves(config, compute):
            return compute
    here = config.hw.gpu.name if config.hw.gpu else ""
    if not here:
        return build({"name": "roofline", **own, "chosen": "without a GPU compute is emulated"})
    why = f"{config.engine.name} with {config.model.name} was not measured on {here}; {ROOFLINE}"
    return build({**_content(plugins.conf() / "compute" / "roofline.yaml"), **own, "chosen": why})


def notes(config: Any) -> list[str]:
    """Return what ``compute=auto`` took in *config*, or that what was named by hand is of another GPU or model."""
    compute, gpu, model = config.compute, config.hw.gpu.name if config.hw.gpu else "", config.model.name
    if not gpu:
        return []
    if compute.chosen:
        return [f"{'warning: ' if compute.name == 'roofline' else ''}compute={compute.name}: {compute.chosen}"]
    of, models = compute.measured_gpu, compute.measured_of
    wrong = f"on {of}, not on {gpu}" if of not in ("", gpu) else ""
    if models and model not in models:
        wrong = wrong or f"of {', '.join(models)}, not of {model}"
    return [f"warning: compute={compute.name} was measured {wrong}; try compute=auto"] if wrong else []


def _candidates(config: Any, folders: Sequence[Path]) -> Iterator[tuple[dict[str, Any], str]]:
    gpu = config.hw.gpu.name if config.hw.gpu else ""
    engine, model = config.engine.name, config.model.name
    if not gpu:
        return
    for folder in folders:
        for path in sorted((folder / "compute").glob("*.yaml")):
            content = _content(path)
            if _gpu(content) == gpu and model in content.get("measured_of", [model]):
                yield {"name": path.stem, **content}, f"your own profile of {gpu}, {path}"
    shipped = [_content(path) for path in sorted((plugins.conf() / "compute").glob(f"{gpu.lower()}_*.yaml"))]
    for content in shipped:
        family = content.get("engine", "generic")  # vllm26 is of the family vllm
        measured = model in content.get("measured_of", ()) and _released(config.model)
        if _gpu(content) == gpu and engine.startswith(family) and measured:
            yield content, f"pdsim's own measurement of {model}, engine={family}, on {gpu}"
    for content in shipped:
        family, table = content.get("engine", ""), content.get("kernels", {}).get("table")
        if _gpu(content) == gpu and table and (engine == "generic" or engine.startswith(family)):
            sealed = hashlib.sha256(tables.path_of(table).read_bytes()).hexdigest()[:12]
            yield content, f"published operators of {family} on {gpu}, table of SHA-256 {sealed}"


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
def _content(path: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]  # comes with OmegaConf, its stubs do not

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former takes a tenth of the time
    content: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), loader)  # noqa: S506
    return content or {}


def _serves(config: Any, compute: Compute) -> bool:
    # Whether there are times of all operators of the model, as it is divided.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tables.RangeWarning)
            for side in (config.parallel.prefill, config.parallel.decode):
                forward(config.model, config.hw, compute, side)
    except (ConfigError, ValueError, ZeroDivisionError):  # of a model that the rules refuse, later
        return False
    return True
