# SPDX-License-Identifier: Apache-2.0
"""`pdsim observe`: what a deployment has logged becomes a workload, and a measured run beside those of pdsim.

Logs of requests are read by `backends.live.observed`, logs of transfers by `pdsim.calibration.importers`; which of
them a file is, its content says.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pdsim.calibration import importers
from pdsim.calibration import samples as points
from pdsim.cli.help import parse
from pdsim.core import files, plugins
from pdsim.core.errors import ConfigError
from pdsim.results import terminal
from pdsim.results.store import Run, make


def observe(words: Sequence[str]) -> int:
    """Read the log that *words* name, write what it holds, print it, and return the exit status.

    A log of requests becomes a trace and a run, a log of transfers a file of samples.
    Raise a `ConfigError` for a file that is no such log, and for overrides that cannot be composed.
    """
    from backends.live import observed
    from pdsim.config.compose import compose

    rest, asked = parse("observe", words)
    names = [word for word in rest if "=" not in word]
    if len(names) != 1:
        raise ConfigError(f"observe needs one file, got {len(names)}; see pdsim observe --help")
    overrides = [word for word in rest if "=" in word]
    path, kind, to = Path(names[0]), asked.get("--format", ""), asked.get("--to", Path())
    text = files.given(path, "name a file that a client or a server has written")
    if (tool := kind or importers.tool_of(text)) in importers.SERVED:
        return _transfers(path, tool, to)
    requests = observed.read(path, kind)
    trace = make(to, "--to ") / f"{path.stem}.trace.jsonl"
    with files.whole_file(trace, "--to") as file:
        file.write(observed.trace(requests).encode())
    own = ["experiment=serve", "target=live", "live.url=http://observed", f"workload.trace={trace}"]
    config = compose([*overrides, *own])
    measured = plugins.resolve(plugins.EXPERIMENTS, "serve").observed(config, requests, path.name)
    with Run(config, command=["pdsim", "observe", path.name, *overrides], overrides=[*overrides, *own]) as run:
        folder = run.finish(measured)
    terminal.show(folder)
    print(f"workload: {trace}")  # noqa: T201
    return 0


def _transfers(path: Path, tool: str, to: Path) -> int:
    samples = importers.read(path, tool)
    file = make(to, "--to ") / f"{path.stem}.samples.csv"
    about = {**samples.about, "kind": "measured", "source": f"log of {tool}, {path.name}"}
    points.write(file, replace(samples, about=about))
    print(  # noqa: T201
        f"{len(samples.rows)} kinds of transfers: {file}\n"
        f"fit: pdsim calibrate --from {file} hw=... backend=...\n"
        f"predict: pdsim run experiment=transfer experiment.points={file} hw=... backend=..."
    )
    return 0
