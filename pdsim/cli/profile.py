# SPDX-License-Identifier: Apache-2.0
"""`pdsim profile`: measure what a forward is made of on a GPU, or read what was measured; fit, and write it down.

Measuring needs PyTorch, fitting SciPy: without SciPy the measured rows are kept, and ``--from``
fits them elsewhere.

Two files come of it: ``NAME.csv``, the rows of `backends.profiling.inventory` below comments that
say where and how they were measured, and ``NAME.yaml``, a choice for ``compute=`` once it lies in
``conf/compute``.  With a folder of tables that others published (``--from DIR``) only the second is
written, or with ``--compact`` the table itself, thinned, and a choice for ``compute=`` that names it.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdsim.calibration import kernels as fits
from pdsim.cli.help import parse, plain_name
from pdsim.compute.forward import peaks
from pdsim.compute.kernels import Kernels, Roof
from pdsim.config import Config, load
from pdsim.config.compose import CommandLine, compose, initialized, plain
from pdsim.core.errors import ConfigError, PdsimError
from pdsim.results import record, store, terminal
from pdsim.results.record import Table
from pdsim.results.store import whole_file

if TYPE_CHECKING:
    from backends.profiling.runner import ProfiledDevice
    from pdsim.compute.tables import Grid

__all__ = ["errors", "profile", "read"]

_MODELS = (
    *(("qwen3-8b", 1, 0), ("llama-3.1-8b", 1, 0), ("llama-3.1-70b", 4, 4), ("llama-3.1-70b", 8, 8)),
    *(("qwen3-30b-a3b", 1, 8), ("deepseek-v3", 8, 1), ("qwen3-8b", 2, 0), ("qwen3-235b-a22b", 8, 8)),
)
"""What is measured by default: models, tensor-parallel ranks, and layers of a whole forward; 0: all."""


@dataclass(frozen=True, kw_only=True)
class _ProfileCommand:
    """The command line: what is not an override of the configuration."""

    overrides: tuple[str, ...]  # of the configuration, which names the GPU's peaks (hw=)
    source: Path | None = None  # rows to fit instead of measuring, or a folder of published tables
    models: tuple[tuple[str, int, int], ...] = _MODELS
    tables: tuple[str, str] = ("sglang", "0.5.10")  # engine and version, of a folder of tables
    compact: str = ""  # a compute= whose operators that no table has go with a compact table
    device: str = "cuda"  # or "cpu", to try the command where there is no GPU
    gpus: int = 0  # that measure at the same time; 0: all that are visible
    limit: float = 110.0  # seconds of measuring; what is not reached by then is left out
    name: str = ""  # of both files; "": the GPU's
    to: Path = Path()  # their folder


def profile(words: Sequence[str]) -> int:
    """Do what *words* ask for, print what was found, and return the exit status.

    Raises:
        ConfigError: an unknown option or value, no PyTorch, or no device that it can use; nothing was written.
        PdsimError: nothing could be measured.
    """
    asked = _asked(words)
    if asked.compact and (asked.source is None or not asked.source.is_dir()):
        raise ConfigError("--compact needs --from DIR, a folder of systems/data of aiconfigurator-core")
    config = compose([*asked.overrides, "experiment=serve"])
    where = None if asked.source else _device_found(asked.device)
    store.make(asked.to, "--to ")
    name = asked.name or (config.hw.gpu.name.lower() if config.hw.gpu else config.hw.name)
    if asked.compact:
        return _compacted(asked, config, name, shlex.join(["pdsim", "profile", *words]))
    if asked.source and asked.source.is_dir():
        return _from_tables(asked, config, name)
    if where is None:
        assert asked.source is not None
        about, rows = read(asked.source)
    else:
        about, rows = _measured(asked, where, config, shlex.join(["pdsim", "profile", *words]))
        path = asked.to / f"{name}.csv"
        _write(path, about, rows)
        print(f"profile: {path}")  # noqa: T201
    if find_spec("scipy") is None:
        elsewhere = "fit with pdsim profile --from FILE.csv where there is one"
        print(f"not fitted: SciPy is missing; {elsewhere}")  # noqa: T201
        return 0
    models = list(dict.fromkeys(row["model"] for row in rows if row.get("model")))
    title = (
        f"measured: {about.get('source', '')}, {about.get('date', '')}, {len(rows)} rows of data/compute/{name}.csv"
    )
    return _fitted(asked, config, name, fits.rows_of(rows), title, models)


def _from_tables(asked: _ProfileCommand, config: Config, name: str) -> int:
    # The tables are those of aiconfigurator, one folder a GPU.  Nothing is known of whole forwards
    # then, so the fit holds for every model whose operators are in the tables.
    from pdsim.compute import operators

    assert asked.source is not None
    engine, version = asked.tables
    rows = list(fits.published(operators.read(asked.source, engine, version)))
    title = f"published: aiconfigurator's tables of {asked.source.name}, {engine} {version}, {len(rows)} rows"
    return _fitted(asked, config, name, rows, title)


def _fitted(
    asked: _ProfileCommand, config: Config, name: str, rows: list[fits.Row], title: str, models: Sequence[str] = ()
) -> int:
    fit = fits.fit(rows, peaks(config.hw), config.hw.gpu.name if config.hw.gpu else config.hw.name)
    terminal.show_table(errors(fit))
    path = asked.to / f"{name}.yaml"
    with whole_file(path, "--to") as file:
        file.write(_yaml(name, title, models, fit).encode())
    print(f"compute: {path}")  # noqa: T201
    return 0


FUSED = {"norm": 0.65, "activation": 0.65, "rotary": 0.35}
"""Shares of the memory rate of what tables lack: an engine's kernels are fused, PyTorch's are not."""
HOST = {
    "vllm": {"layer_launch": 0.7e-3, "mixed_launch": 1.4e-3, "prompt_host": 3.8e-3},
    "sglang": {"layer_launch": 0.57e-3, "mixed_launch": 1.14e-3, "prompt_host": 3.8e-3},
}
"""Host time of an eager prefill: geometric means of five hosts' single requests of 128 to 512 tokens (data/live).

Layers with experts take twice as long (one host).  *prompt_host* is what longer prompts take beyond their operators.
"""


def _compacted(asked: _ProfileCommand, config: Config, name: str, command: str) -> int:
    # What no table has, norms, activations, rotary embeddings and launches, is that of the choice ``--compact``.
    from pdsim.calibration import compaction
    from pdsim.compute import tables

    assert asked.source is not None
    engine, version = asked.tables
    grids, summaries = {}, []
    for kind, used, columns in compaction.tables_of(asked.source, engine, version):
        grids[kind.name], summary = compaction.compact(kind, columns, used)
        summaries.append(summary)
    gpu = config.hw.gpu.name if config.hw.gpu else config.hw.name
    source = {
        "gpu": gpu, "engine": engine, "version": version, "licence": "Apache-2.0",
        "source": f"aiconfigurator-core{_release(asked.source)}, systems/data/{asked.source.name}",
        "command": command.replace(str(asked.source), f"systems/data/{asked.source.name}"),
    }  # fmt: skip
    path = asked.to / f"{name}{tables.SUFFIX}"
    tables.write(path, compaction.about(source, summaries), grids)
    heads = {"what": "", "rows": "", "values": "", "held out": "rows", "median %": "", "p95 %": "",
             "disturbed %": "rows far off from all neighbours", "p95 of others %": ""}  # fmt: skip
    shown = [[one.kind, one.rows, one.kept, one.held, 100 * one.median, 100 * one.p95, 100 * one.disturbed,
              100 * one.quiet] for one in summaries]  # fmt: skip
    terminal.show_table(Table("Held out", heads, shown))
    with initialized(nothing := CommandLine(words=())):
        base = load(plain(nothing, [f"compute={asked.compact}"])).compute
    if base.kernels is None:
        raise ConfigError(f"--compact {asked.compact} has no kernels; choose a profile, such as h200_torch")
    shipped = path.resolve().parent == tables.FOLDER
    kept: dict[str, Any] = {
        each: replace(getattr(base.kernels, each) or Roof(), memory_share=share, merge=0.0)
        for each, share in FUSED.items()
    } | HOST.get(engine, {each: getattr(base.kernels, each) for each in ("layer_launch", "mixed_launch")})
    kernels = Kernels(
        gpu=gpu,
        table=name if shipped else str(path.resolve()),
        routing=None if engine == "trtllm" else Roof(launch=7e-6),  # assumed: one kernel that chooses, and a sum
        # SGLang computes prompts by heads (deepseek_v2.py, AttnForwardMethod.MHA)
        prefill_by_heads=engine == "sglang" and "mla_prefill" in grids and _absorbed(grids["mla_prefill"], config),
        **kept,
    )
    lines = [
        f"# {engine} {version} on {gpu}: a table of operators published by AIConfigurator, written by pdsim profile",
        f"name: {name}", f"engine: {engine}", "overhead: 0s", "kernels:", *_block(kernels), "source: >-",
        *_wrapped(
            f"published: {source['source']}, {engine} {version} (Apache-2.0), "
            f"{sum(one.rows for one in summaries)} rows; rows, and median and p95 of the error in % of those held "
            "out (in brackets the p95 without disturbed ones, which are far off from all their neighbours): "
            + "; ".join(f"{one.kind} {one.rows}, {100 * one.median:.1f} and {100 * one.p95:.1f}"
                        + (f" ({100 * one.quiet:.1f})" if one.disturbed else "") for one in summaries)
            + ". Norms, activations and rotary embeddings reach the shares of the memory rate that vLLM's forwards "
            "of 2,048 to 8,192 tokens on six hosts with H200 do (data/live, in-sample); launches are "
            + ("the mean of the hosts of data/live, 0.6 to 1.5 times as long on one of them"
               if engine in HOST else f"assumed as in {asked.compact}")
        ),
    ]  # fmt: skip
    path = asked.to / f"{name}.yaml"
    with whole_file(path, "--to") as file:
        file.write(("\n".join(lines) + "\n").encode())
    print(f"compute: {path}")  # noqa: T201
    return 0


def _absorbed(grid: Grid, config: Config) -> bool:
    # Whether the GPU could do the arithmetic of latent rows, 3.4 times that of heads, in the times of *grid*: 16 of
    # DeepSeek's heads, 2 (576 + 512) operations for each of them and each pair of tokens.
    import numpy as np

    sizes, logs, _ = grid.slice(next(iter(grid.keys)), "tokens", heads=16, batch=1)
    rates = 16 * 2 * (576 + 512) * sizes**2 / 2 / np.exp(logs)
    return bool(rates.max() < peaks(config.hw).flops)


def _release(folder: Path) -> str:
    releases = [each.name for parent in folder.parents for each in parent.glob("aiconfigurator_core-*.dist-info")]
    return f" {releases[0].split('-')[1].removesuffix('.dist')}" if releases else ""


def errors(fit: fits.KernelFit) -> Table:
    """Return how far off *fit* is, in per cent."""
    heads = {"what": "", "rows": "", "median %": "of the absolute error", "p95 %": "", "bias %": "median, signed"}
    rows = [[one.what, one.count, 100 * one.median, 100 * one.p95, 100 * one.bias] for one in fit.errors]
    return Table("Errors", heads, rows)


def _asked(words: Sequence[str]) -> _ProfileCommand:
    overrides, options = parse("profile", words)
    for name, parsed in (("--models", _models), ("--tables", _engine_and_version), ("--device", _device)):
        try:
            options |= {name: parsed(options[name])} if name in options else {}
        except ValueError as error:
            raise ConfigError(f"{name} {options[name]}: {error}") from error
    for name in ("--name", "--compact"):
        plain_name(name, options.get(name, ""))
    if models := [word[6:] for word in overrides if word.startswith("model=")]:
        options.setdefault("--models", _models(models[-1]))
    fields = {name.lstrip("-").replace("from", "source"): value for name, value in options.items()}
    return _ProfileCommand(overrides=tuple(word for word in overrides if not word.startswith("model=")), **fields)


def _models(text: str) -> tuple[tuple[str, int, int], ...]:
    models = []
    for word in text.split(","):
        match = re.fullmatch(r"([\w.-]+?)(?::(\d+))?(?::(\d+))?", word)
        if match is None or match[2] == "0":
            raise ValueError("must be models as MODEL, MODEL:TP or MODEL:TP:LAYERS, with commas between them")
        models.append((match[1], int(match[2] or 1), int(match[3] or 0)))
    return tuple(models)


def _engine_and_version(text: str) -> tuple[str, str]:
    engine, colon, version = text.partition(":")
    if not (engine and colon and version):
        raise ValueError("must be ENGINE:VERSION, as the folders of the tables are called, such as sglang:0.5.10")
    return engine, version


def _device(text: str) -> str:
    if text not in ("cuda", "cpu"):
        raise ValueError("must be cuda or cpu")
    return text


# --- rows ----------------------------------------------------------------------------------------------------------

Rows = list[dict[str, str]]


def _device_found(kind: str) -> ProfiledDevice:
    from backends.profiling import runner

    return runner.device(kind)


def _measured(
    asked: _ProfileCommand, where: ProfiledDevice, config: Config, command: str
) -> tuple[dict[str, str], Rows]:
    from backends.profiling import inventory, runner

    nothing = CommandLine(words=())
    with initialized(nothing):  # without the checks of a deployment: a shard alone fits where the model does not
        shapes = {name: load(plain(nothing, [f"model={name}"])).model for name, _, _ in asked.models}
    subjects = [inventory.Subject(shapes[name], tp, layers) for name, tp, layers in asked.models]
    small = where.kind == "cpu"
    rows, log = runner.measure(
        inventory.plan(subjects, where.memory, small),
        where,
        limit=asked.limit,
        seconds=0.004 if small else 0.02,
        repeats=5 if small else 7,
        folder=store.make(Path(config.output), "output=") / f"profile-{os.getpid()}",
        hidden=[subject.model.hidden for subject in subjects if subject.tp > 1],
        gpus=asked.gpus,
    )
    for line in log:
        print(line)  # noqa: T201
    if not rows:
        raise PdsimError("nothing could be measured; the lines above say why")
    about = {
        "kind": "measured",
        "source": f"{where.count} x {where.name}, PyTorch {where.torch}",
        "command": command,
    }
    return about | record.here(), rows


def _write(path: Path, about: Mapping[str, str], rows: Rows) -> None:
    text = io.StringIO()
    text.writelines(f"# {key}: {value}\n" for key, value in about.items())
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    with whole_file(path, "--to") as file:
        file.write(text.getvalue().encode())


def read(path: Path) -> tuple[dict[str, str], Rows]:
    """Return what the profile in *path* says about itself, and its rows, every value still a text.

    Raises:
        ConfigError: *path* cannot be read as UTF-8 or as CSV, or has no rows.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: {error}; name a file that pdsim profile wrote") from error
    about = dict(line[1:].strip().split(": ", 1) for line in lines if line.startswith("#") and ": " in line)
    if not rows:
        raise ConfigError(f"{path} has no rows; name a file that pdsim profile wrote")
    return about, rows


# --- the configuration ---------------------------------------------------------------------------------------------


def _yaml(name: str, title: str, models: Sequence[str], fit: fits.KernelFit) -> str:
    # Without *models* it holds for all that need only the operators that there are.
    held = [f"{one.what} {100 * one.median:.1f}" for one in fit.errors if not one.what.endswith(("to", "it"))]
    lines = [f"# {name}: times of operators, written by pdsim profile", f"name: {name}", "overhead: 0s"]
    lines += [f"measured_of: [{', '.join(models)}]"] * bool(models)
    lines += ["kernels:", *_block(fit.kernels)]
    lines += ["source: >-", *_wrapped(f"{title}; medians of the error in %: {'; '.join(held)}")]
    return "\n".join(lines) + "\n"


def _block(part: Any, indent: str = "  ") -> Iterable[str]:
    # what differs from its default, nested
    own = (
        [(each.name, getattr(part, each.name), each.default) for each in fields(part)] if is_dataclass(part) else []
    )
    for key, value, default in own or ((f'"{name}"', item, None) for name, item in part.items()):
        if value in (default, None, (), {}):
            continue
        if is_dataclass(value) or isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _block(value, f"{indent}  ")
        else:
            yield f"{indent}{key}: {_text(key, value)}"


def _text(key: str, value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, bool | str):
        return str(value).lower() if isinstance(value, bool) else value
    if key.endswith("launch") or key in ("latency", "part", "merge", "block"):
        return f"{value * 1e6:.4g}us"
    if key == "walk":
        return f"{value * 1e9:.4g}ns"
    return f"{value / 1e9:.4g}GB/s" if key == "rate" else f"{value:g}"


def _wrapped(text: str, width: int = 116) -> Iterable[str]:
    import textwrap

    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ")
