# SPDX-License-Identifier: Apache-2.0
"""Commands about kept folders: ``show``, ``report``, ``timeline``, ``best``, ``explain``, ``compare``, ``export``.

Each takes the folders and the options, prints tables itself, and returns the text to print after them.  What they
say is made by the room that knows the matter (`pdsim.results`, `pdsim.sweep`, `pdsim.validation`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any

from pdsim.core.errors import ConfigError, instead
from pdsim.core.files import whole_file
from pdsim.results import terminal
from pdsim.results.kept import KeptRun, SloLimits, parse_slo
from pdsim.results.store import make
from pdsim.run import recovered
from pdsim.sweep import best as ranking
from pdsim.sweep import collect
from pdsim.validation import sealed

Asked = Mapping[str, Any]


def folders(command: str, names: Sequence[str]) -> list[Path]:
    """Return *names* as paths; the files of a run that was killed are written first.

    Raise a `ConfigError` for a folder without a run, and if no folder is named.
    """
    paths = [Path(name) for name in names]
    if wrong := [folder for folder in paths if not folder.is_dir()]:
        raise ConfigError(f"{wrong[0]} is not a folder; name the folder of a run, such as one in results")
    if not paths:
        what = "sweep" if command == "best" else "run"
        raise ConfigError(
            f"{command} needs the folder of a {what}, such as one in results; see pdsim {command} --help"
        )
    for folder in paths:
        if folder.name.endswith(".incomplete"):
            recovered(folder)
        elif command != "report" and (folder / sealed.EXPECTED).is_file() and not (folder / "run.json").is_file():
            raise ConfigError(
                f"{folder} has the files of a validation alone, without its run; see pdsim report {folder}"
            )
    return paths


def show(folders: Sequence[Path], asked: Asked) -> str:
    """Print what runs and sweeps printed."""
    for folder in folders:
        if _is_sweep(folder):
            collect.show(folder, json="--json" in asked, verbose="--verbose" in asked)
        elif "--json" in asked:
            terminal.show_lines(terminal.as_json(folder))
        else:
            terminal.show(folder, verbose="--verbose" in asked)
    return ""


def report(folders: Sequence[Path], asked: Asked) -> str:
    """Write the page about a folder, or one of its figures, and return its path."""
    from pdsim.results import drawing
    from pdsim.results.report import page

    if len(folders) > 1:
        raise ConfigError(f"report is about one run, sweep or validation, got {len(folders)}")
    folder, figure, form = folders[0], asked.get("--figure", ""), asked.get("--format", "")
    slo = parse_slo(asked["--slo"]) if "--slo" in asked else None
    output: Path | None = asked.get("--output")
    if "--serve" in asked or "--port" in asked:
        page.needs()
        from pdsim.cli import browse

        browse.serve(folder, _content, asked.get("--port", 0))
        return ""
    if not figure:
        if form:
            raise ConfigError("--format is of a figure; name it: --figure latency, or leave --format out")
        page.needs()  # before much is read in vain
        return _written(output or folder / "report.html", page.page(_content(folder, slo)).encode())
    ending = output.suffix.lstrip(".") if output else ""
    form = form or (ending if ending in drawing.FORMATS else "svg")
    figures = {each.name: each for each in _content(folder, slo).figures}
    if figure not in figures:
        raise ConfigError(f"{folder} has no figure {figure!r}; {instead(figure, figures)}")
    return _written(output or Path(f"{figure}.{form}"), drawing.image(figures[figure], form))


def _content(folder: Path, slo: SloLimits | None) -> Any:
    if _is_sweep(folder):
        from pdsim.sweep import pareto

        return pareto.content(folder, slo)
    from pdsim.results.report.page import run_content
    from pdsim.validation import agreement

    if (folder / sealed.EXPECTED).is_file() and (folder / sealed.MEASURED).is_file():
        return agreement.content(folder)
    if slo is not None:
        raise ConfigError(
            f"--slo is of a sweep, and {folder} is a run; leave it out, or set slo.ttft when it is run"
        )
    return run_content(folder)


def _written(path: Path, content: bytes, option: str = "-o") -> str:
    with whole_file(path, option) as file:
        file.write(content)
    return str(path)


def timeline(folders: Sequence[Path], asked: Asked) -> str:
    """Write the trace of runs, and return its path and where it can be opened."""
    from pdsim.results.timeline import trace

    if sweeps := [folder for folder in folders if _is_sweep(folder)]:
        raise ConfigError(f"{sweeps[0]} is a sweep; name some of its points, such as {sweeps[0]}/POINT")
    path = asked.get("--output") or folders[0] / "timeline.json.gz"
    if not path.name.endswith((".json", ".json.gz")):
        raise ConfigError(f"-o {path}: a trace is a file .json or .json.gz")
    trace(folders, path)
    return f"{path}\nopen it at https://ui.perfetto.dev, which reads it in the browser and sends it nowhere"


def best(folders: Sequence[Path], asked: Asked) -> str:
    """Print the ranked points of a sweep, and return their chart."""
    if len(folders) > 1 or not _is_sweep(folders[0]):
        raise ConfigError(
            f"best ranks the points of one sweep, got {' '.join(map(str, folders))}; name the folder of a sweep, "
            "such as results/sweep-HASH, or see pdsim compare"
        )
    slo = parse_slo(asked["--slo"]) if "--slo" in asked else None
    ranked = ranking.rank(folders[0], slo)
    if "--json" in asked:
        return dumps([asdict(each) | {"goodput_per_gpu": each.value} for each in ranked], default=str)
    title = f"best of {len(ranked)} points in {folders[0]}, {slo or 'the SLO of each'}"
    terminal.show_table(ranking.table(ranked, title), definitions="--verbose" in asked)
    return "\n".join(["", *ranking.verdict(ranked), *ranking.chart(ranked)])


def explain(folders: Sequence[Path], asked: Asked) -> str:
    """Print what bounded a run, or what makes two differ."""
    from pdsim.cli.explain import explain_one, explain_two

    request, fast, json = asked.get("--request"), "--fast" in asked, "--json" in asked
    if len(folders) > 2:
        raise ConfigError(f"explain takes one run or two, got {len(folders)}")
    if request is not None and len(folders) > 1:
        raise ConfigError(f"--request {request} is of one run; name one folder")
    _refuse_sweeps("one or two of its points", folders)
    if len(folders) > 1:
        explain_two(folders, fast=fast, json=json)
    else:
        explain_one(folders[0], request=request, fast=fast, json=json)
    return ""


def compare(folders: Sequence[Path], asked: Asked) -> str:
    """Print what differs between runs, and their metrics."""
    from pdsim.results import compare

    _refuse_sweeps("two of its points", folders)
    slo = parse_slo(asked["--slo"]) if "--slo" in asked else None
    if "--json" in asked:
        return dumps(compare.as_dict(folders, slo), ensure_ascii=False)
    for table in compare.tables(folders, slo):
        terminal.show_table(table)
    return ""


def export(folders: Sequence[Path], asked: Asked) -> str:
    """Write a run in the format of another tool, and return the paths of the files."""
    from pdsim.results.export import FORMATS, exported

    _refuse_sweeps("one of its points", folders)
    if len(folders) > 1 or "--format" not in asked:
        raise ConfigError(f"export needs one run and its format; write --format {', '.join(FORMATS)}")
    files = exported(KeptRun(folders[0]), asked["--format"])
    to = make(asked.get("--to", folders[0]), "--to ")
    return "\n".join(_written(to / name, text.encode(), "--to") for name, text in files.items())


def _is_sweep(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (collect.POINTS, collect.LEDGER))


def _refuse_sweeps(points: str, folders: Sequence[Path]) -> None:
    if sweeps := [folder for folder in folders if _is_sweep(folder)]:
        raise ConfigError(f"{sweeps[0]} is a sweep; name {points}, or see pdsim show {sweeps[0]}")
