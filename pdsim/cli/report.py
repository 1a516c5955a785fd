# SPDX-License-Identifier: Apache-2.0
"""``pdsim report`` and ``pdsim timeline``: files to look at, of what a run, a sweep or a validation left behind.

Which of the three a folder is, its files say.  What a page says is made by the room that knows the
matter (`pdsim.results.report.run_report`, `pdsim.sweep.pareto`, `pdsim.validation.agreement`); this
module chooses and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdsim.core.errors import ConfigError, instead
from pdsim.results import drawing
from pdsim.results.report import page
from pdsim.results.report.page import Content
from pdsim.results.store import whole_file
from pdsim.sweep.best import SloLimits

__all__ = ["is_sweep", "report", "timeline", "written"]


def report(
    folder: Path, output: Path | None = None, figure: str = "", form: str = "", slo: SloLimits | None = None
) -> Path:
    """Write the page about *folder*, or only its *figure* as a file of *form*, to *output* and return its path.

    Raise a `ConfigError` for a folder that is none of the three, a figure that there is not, a missing library, and
    a file that cannot be written.
    """
    if not figure:
        if form:
            raise ConfigError("--format is of a figure; name it: --figure latency, or leave --format out")
        page.needs()  # before much is read in vain
        return written(output or folder / "report.html", page.page(_content(folder, slo)).encode())

    ending = output.suffix.lstrip(".") if output else ""
    form = form or (ending if ending in drawing.FORMATS else "svg")
    figures = {each.name: each for each in _content(folder, slo).figures}
    if figure not in figures:
        raise ConfigError(f"{folder} has no figure {figure!r}; {instead(figure, figures)}")
    return written(Path(output or f"{figure}.{form}"), drawing.image(figures[figure], form))


def written(path: Path, content: bytes) -> Path:
    """Write *content* to *path* and return it.  Raise a `ConfigError` if that cannot be done."""
    with whole_file(path) as file:
        file.write(content)
    return path


def _content(folder: Path, slo: SloLimits | None) -> Content:
    if is_sweep(folder):
        from pdsim.sweep import pareto

        return pareto.content(folder, slo)
    from pdsim.results.report import run_report
    from pdsim.validation import agreement
    from pdsim.validation.sealed import EXPECTED, MEASURED

    if (folder / EXPECTED).is_file() and (folder / MEASURED).is_file():
        return agreement.content(folder)
    return run_report.content(folder)


def is_sweep(folder: Path) -> bool:
    """Return whether *folder* is that of a sweep."""
    from pdsim.sweep.collect import LEDGER, POINTS

    return any((folder / name).is_file() for name in (POINTS, LEDGER))


def timeline(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the trace of the runs in *folders* to *output* and return its path.

    Raise a `ConfigError` for a sweep, and for what `pdsim.results.timeline.trace` refuses.
    """
    from pdsim.results.timeline import trace

    if sweeps := [folder for folder in folders if is_sweep(folder)]:
        raise ConfigError(f"{sweeps[0]} is a sweep; name some of its points, such as {sweeps[0]}/POINT")
    path = output or folders[0] / "timeline.json.gz"
    if not path.name.endswith((".json", ".json.gz")):
        raise ConfigError(f"-o {path}: a trace is a file .json or .json.gz")
    trace(folders, path)
    return path
