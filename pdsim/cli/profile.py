# SPDX-License-Identifier: Apache-2.0
"""`pdsim profile`: measure the operators of a forward on a GPU, or read measurements; fit, and write the result.

Two files come of it: ``NAME.csv``, the rows of `backends.profiling.inventory` below comments that say where and how
they were measured, and ``NAME.yaml``, a choice for ``compute=`` once it lies in ``conf/compute``.  Without SciPy the
rows are kept, and ``--from`` fits them elsewhere.  Of a folder of tables that others published (``--from DIR``) only
the second is written, or with ``--compact`` the table itself, thinned, and a choice for ``compute=`` that names it.
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.profiling import inventory, runner
from pdsim.calibration import kernels as fits
from pdsim.cli.help import parse, plain_name
from pdsim.compute.forward import peaks
from pdsim.compute.kernels import Kernels, Roof
from pdsim.compute.row_work import Row
from pdsim.config import Config, load
from pdsim.config.compose import CommandLine, composed, initialized, plain
from pdsim.core import files
from pdsim.core.errors import ConfigError, PdsimError
from pdsim.results import record, store, terminal
from pdsim.results.record import Table

if TYPE_CHECKING:
    from pdsim.calibration.compaction import Summary
    from pdsim.compute.tables import Grid

_MODELS = (
    "qwen3-8b,llama-3.1-8b,llama-3.1-70b:4:4,llama-3.1-70b:8:8,qwen3-30b-a3b:1:8,deepseek-v3:8:1,qwen3-8b:2,"
    "qwen3-235b-a22b:8:8"
)
"""What is measured by default: models, tensor-parallel ranks, and layers of a whole forward; 0: all."""

Rows = list[dict[str, str]]


def profile(words: Sequence[str]) -> int:
    """Do what *words* ask for, print the errors of the fit, and return the exit status.

    Raises:
        ConfigError: an unknown option or value, no PyTorch, or no device that it can use; nothing was written.
        PdsimError: nothing could be measured.
    """
    overrides, asked = parse("profile", words)
    chosen = [word[6:] for word in overrides if word.startswith("model=")]
    models = _models(asked.get("--models") or (chosen or [_MODELS])[-1])
    engine, _, version = tables = asked.get("--tables", "sglang:0.5.10").partition(":")
    if not all(tables):
        raise ConfigError(
            f"--tables {asked['--tables']}: must be ENGINE:VERSION, as the folders of the tables are called, "
            "such as sglang:0.5.10"
        )
    if (kind := asked.get("--device", "cuda")) not in ("cuda", "cpu"):
        raise ConfigError(f"--device {kind}: must be cuda or cpu")
    for option in ("--name", "--compact"):
        plain_name(option, asked.get(option, ""))
    compact, to = asked.get("--compact", ""), asked.get("--to", Path())
    source = _installed(asked["--from"]) if "--from" in asked else None
    if compact and (source is None or not source.is_dir()):
        raise ConfigError("--compact needs --from DIR, a folder of systems/data of aiconfigurator-core")
    others = [word for word in overrides if not word.startswith("model=")]
    config = composed(CommandLine.of([*others, "experiment=serve"], asked))
    where = None if source else runner.device(kind)
    command = shlex.join(["pdsim", "profile", *words])
    store.make(to, "--to ")
    path = to / (asked.get("--name") or (config.hw.gpu.name.lower() if config.hw.gpu else config.hw.name))
    if compact and source is not None:
        return _compacted(source, (engine, version), compact, config, path, command)
    if source and source.is_dir():
        return _from_tables(source, (engine, version), config, path)
    if where is None:
        assert source is not None
        about, rows = files.table(source, "name a file that pdsim profile wrote")
    else:
        about, rows = _measured(models, where, config, command, asked)
        written = path.with_name(f"{path.name}.csv")
        files.write_table(written, list(rows[0]), (row.values() for row in rows), about)
        print(f"profile: {written}")  # noqa: T201
    if find_spec("scipy") is None:
        elsewhere = "fit with pdsim profile --from FILE.csv where there is one"
        terminal.show_lines(f"not fitted: SciPy is missing; {elsewhere}")
        return 0
    title = (
        f"measured: {about.get('source', '')}, {about.get('date', '')}, {len(rows)} rows of "
        f"data/compute/{path.name}.csv"
    )
    measured_of = list(dict.fromkeys(row["model"] for row in rows if row.get("model")))
    return _fitted(config, path, fits.rows_of(rows), title, measured_of)


def _models(text: str) -> list[tuple[str, int, int]]:
    models = []
    for word in text.split(","):
        match = re.fullmatch(r"([\w.-]+?)(?::(\d+))?(?::(\d+))?", word)
        if match is None or match[2] == "0":
            raise ConfigError(
                f"--models {text}: must be models as MODEL, MODEL:TP or MODEL:TP:LAYERS, with commas between them"
            )
        models.append((match[1], int(match[2] or 1), int(match[3] or 0)))
    return models


def _measured(
    models: Sequence[tuple[str, int, int]],
    where: runner.ProfiledDevice,
    config: Config,
    command: str,
    asked: Mapping[str, Any],
) -> tuple[dict[str, str], Rows]:
    nothing = CommandLine(words=())
    with initialized(nothing):  # without the checks of a deployment: a shard alone fits where the model does not
        shapes = {name: load(plain(nothing, [f"model={name}"])).model for name, _, _ in models}
    subjects = [inventory.Subject(shapes[name], tp, layers) for name, tp, layers in models]
    small = where.kind == "cpu"
    with terminal.Progress(f"profile {where.count} x {where.name}", at_once=True) as bar:
        rows, log = runner.measure(
            inventory.plan(subjects, where.memory, small),
            where,
            limit=asked.get("--limit", 110.0),
            seconds=0.004 if small else 0.02,
            repeats=5 if small else 7,
            folder=store.make(Path(config.output), "output=") / f"profile-{os.getpid()}",
            hidden=[subject.model.hidden for subject in subjects if subject.tp > 1],
            gpus=asked.get("--gpus", 0),
            progress=bar,
        )
    for line in log:
        print(line)  # noqa: T201
    if not rows:
        raise PdsimError("nothing could be measured; the lines above say why")
    source = f"{where.count} x {where.name}, PyTorch {where.torch}"
    return {"kind": "measured", "source": source, "command": command} | record.here(), rows


def _installed(source: Path) -> Path:
    # A bare name, such as h100_sxm, is a folder of the tables of aiconfigurator-core.
    if source.exists() or source.suffix or len(source.parts) > 1:
        return source
    from pdsim.compute.published import installed

    if (folder := installed()) is None:
        raise ConfigError(f"--from {source}: no such file; pip install 'pdsim[operators]' brings tables of GPUs")
    if not (folder / source).is_dir():
        known = ", ".join(sorted(each.name for each in folder.iterdir() if each.is_dir()))
        raise ConfigError(f"--from {source}: no such file, and aiconfigurator-core has tables of {known}")
    return folder / source


def _from_tables(source: Path, tables: tuple[str, str], config: Config, path: Path) -> int:
    # Nothing is known of whole forwards then, so the fit holds for every model whose operators are in the tables.
    from pdsim.calibration import compaction

    rows = list(compaction.published(source, *tables))
    title = f"published: aiconfigurator's tables of {source.name}, {' '.join(tables)}, {len(rows)} rows"
    return _fitted(config, path, rows, title)


def _fitted(config: Config, path: Path, rows: list[Row], title: str, models: Sequence[str] = ()) -> int:
    gpu = config.hw.gpu.name if config.hw.gpu else config.hw.name
    fit = fits.fit(rows, peaks(config.hw), gpu)
    heads = {"what": "", "rows": "", "median %": "of the absolute error", "p95 %": "", "bias %": "median, signed"}
    errors = [[one.what, one.count, 100 * one.median, 100 * one.p95, 100 * one.bias] for one in fit.errors]
    terminal.show_table(Table("Errors", heads, errors))
    held = [f"{one.what} {100 * one.median:.1f}" for one in fit.errors if not one.what.endswith(("to", "it"))]
    source = f"{title}; medians of the error in %: {'; '.join(held)}"
    about = f"{gpu}: times of operators, written by pdsim profile"
    head = [f"measured_of: [{', '.join(models)}]"] if models else []
    return _write_choice(path, about, ["overhead: 0s", *head], fit.kernels, source)


FUSED = {"norm": 0.65, "activation": 0.65, "rotary": 0.35}
"""Shares of the memory rate of what tables lack: an engine's kernels are fused, PyTorch's are not."""
HOST = {
    "vllm": {
        "layer_launch": 0.9e-3, "mixed_launch": 1.52e-3, "scale_launch": 20e-6, "fused_saving": 25e-6,
        "prompt_host": 5e-3,
    },
    "sglang": {"layer_launch": 0.57e-3, "mixed_launch": 1.14e-3, "prompt_host": 3.8e-3},
}  # fmt: skip
"""Host time of an eager prefill: vLLM's has the least errors of TTFT in the loads of five hosts (data/live).

SGLang's are single requests of 128 to 512 tokens on five hosts.  A product of 8 bits takes 20 us more (two hosts: 0
and 21 where a load's short prompts were quickest), compiled 25 less than one of 16 bits (five hosts).  *prompt_host*
is what prompts take beyond their operators.
"""
ROUTING = {"vllm": 3.6e-6, "sglang": 7e-6}
"""Of a layer with experts: vLLM's is what steps of one request of Qwen3-30B-A3B leave (data/live); 7 is assumed."""
TRITON = {
    "triton_prefill": Roof(launch=5e-6, flops_share=0.17),
    "triton_prefix": Roof(flops_share=0.11),
    "triton_decode": Roof(launch=8e-6, memory_share=0.75, walk=11.5e-9),
}
"""Attention of SGLang's Triton kernels: single requests of 128 to 8,192 tokens on one H100 (data/live/ninth).

A sequence has eight parts at most, so that a few wait for the *walk* along the longest one.  *memory_share* is
assumed, and *triton_prefix*, which has the ratio of H200's forwards of 16,384 and 32,768 tokens.
"""


def _compacted(source: Path, asked: tuple[str, str], compact: str, config: Config, path: Path, command: str) -> int:
    # What no table has, norms, activations, rotary embeddings and launches, is that of the choice *compact*.
    from pdsim.calibration import compaction
    from pdsim.compute import tables
    from pdsim.compute.published import tables_of

    engine, version = asked
    with initialized(nothing := CommandLine(words=())):
        base = load(plain(nothing, [f"compute={compact}"])).compute.kernels
    if base is None:
        raise ConfigError(f"--compact {compact} has no kernels; choose a profile, such as h200_torch")
    grids, summaries = {}, []
    for kind, used, columns in tables_of(source, engine, version):
        grids[kind.name], summary = compaction.compact(kind, columns, used)
        summaries.append(summary)
    gpu = config.hw.gpu.name if config.hw.gpu else config.hw.name
    origin = f"aiconfigurator-core{_release(source)}, systems/data/{source.name}"
    table = path.with_name(f"{path.name}{tables.SUFFIX}")
    about = {
        "gpu": gpu, "engine": engine, "version": version, "licence": "Apache-2.0", "source": origin,
        "command": command.replace(str(source), f"systems/data/{source.name}"),
    }  # fmt: skip
    tables.write(table, compaction.about(about, summaries), grids)
    _show_held_out(summaries)
    kept: dict[str, Any] = {
        each: replace(getattr(base, each) or Roof(), memory_share=share, merge=0.0) for each, share in FUSED.items()
    } | HOST.get(engine, {each: getattr(base, each) for each in ("layer_launch", "mixed_launch")})
    kept |= TRITON if engine == "sglang" else {}
    kernels = Kernels(
        gpu=gpu,
        table=path.name if path.resolve().parent == tables.FOLDER else str(table.resolve()),
        imbalance="drawn" if engine == "vllm" else Kernels.imbalance,
        routing=Roof(launch=ROUTING[engine]) if engine in ROUTING else None,  # a kernel that chooses, and a sum
        # SGLang computes prompts by heads (deepseek_v2.py, AttnForwardMethod.MHA)
        prefill_by_heads=engine == "sglang" and "mla_prefill" in grids and _absorbed(grids["mla_prefill"], config),
        **kept,
    )
    held = "; ".join(
        f"{one.kind} {one.rows}, {100 * one.median:.1f} and {100 * one.p95:.1f}"
        + (f" ({100 * one.quiet:.1f})" if one.disturbed else "")
        for one in summaries
    )
    hosts = "0.6 to 1.5 times as long on one of its hosts"
    launches = {
        "vllm": f"fitted to the loads of data/live (in-sample), {hosts}",
        "sglang": f"the mean of the hosts of data/live, {hosts}",
    }
    text = (
        f"published: {origin}, {engine} {version} (Apache-2.0), {sum(one.rows for one in summaries)} rows; rows, "
        "and median and p95 of the error in % of those held out (in brackets the p95 without disturbed ones, which "
        f"are far off from all their neighbours): {held}. Norms, activations and rotary embeddings reach the shares "
        "of the memory rate that vLLM's forwards of 2,048 to 8,192 tokens on six hosts with H200 do (data/live, "
        f"in-sample); launches are {launches.get(engine, f'assumed as in {compact}')}"
        + {
            "sglang": ". Triton's attention is assumed to reach the shares of H100's",
            "vllm": ". Tokens of decode steps draw their experts, as with the dummy weights of data/live; routing "
            "takes what steps of one request on three hosts there leave (in-sample)",
        }.get(engine, "")
    )
    title = f"{engine} {version} on {gpu}: a table of operators of AIConfigurator, written by pdsim profile"
    return _write_choice(path, title, [f"engine: {engine}", "overhead: 0s"], kernels, text)


def _show_held_out(summaries: Sequence[Summary]) -> None:
    columns = {
        "what": "", "rows": "", "values": "", "held out": "rows", "median %": "", "p95 %": "",
        "disturbed %": "rows far off from all neighbours", "p95 of others %": "",
    }  # fmt: skip
    rows = []
    for one in summaries:
        shares = (100 * share for share in (one.median, one.p95, one.disturbed, one.quiet))
        rows.append([one.kind, one.rows, one.kept, one.held, *shares])
    terminal.show_table(Table("Held out", columns, rows))


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


def _write_choice(path: Path, title: str, head: Sequence[str], kernels: Kernels, source: str) -> int:
    lines = [f"# {title}", f"name: {path.name}", *head, "kernels:", *_block(kernels), "source: >-"]
    lines += textwrap.wrap(source, 116, initial_indent="  ", subsequent_indent="  ")
    path = path.with_name(f"{path.name}.yaml")
    with files.whole_file(path, "--to") as file:
        file.write(("\n".join(lines) + "\n").encode())
    print(f"compute: {path}")  # noqa: T201
    return 0


def _block(part: Any, indent: str = "  ") -> Iterable[str]:
    # what differs from its default, nested
    if is_dataclass(part):
        own = [(each.name, getattr(part, each.name), each.default) for each in fields(part)]
    else:
        own = [(f'"{name}"', item, None) for name, item in part.items()]
    for key, value, default in own:
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
