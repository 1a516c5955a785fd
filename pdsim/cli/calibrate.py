# SPDX-License-Identifier: Apache-2.0
"""`pdsim calibrate`: measure a designed grid or read what others measured, fit, write it down, say how good it is.

Both ways end in the same two files, so that a calibration can be fitted again from its own samples:
``NAME.yaml``, which `pdsim.config.loading` lays over the configuration of a run, and ``NAME.csv``,
one row for each measured point (`pdsim.calibration.samples`).

The fit and its intervals are `pdsim.calibration.from_samples`; what is printed is
`pdsim.calibration.summary`.  This module asks for the transfers, several jobs of them, and decides
what can be refused before the first.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdsim.calibration import files, host_factor, importers, sample_grid, summary
from pdsim.calibration import samples as points
from pdsim.calibration.from_samples import base_of, fitted
from pdsim.calibration.samples import Samples
from pdsim.cli import options
from pdsim.config import Config
from pdsim.core.progress import within
from pdsim.core.units import parse_size
from pdsim.results import environment, store, terminal

__all__ = ["calibrate"]


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The command line: what is not an override of the configuration.

    Attributes:
        overrides: Of the configuration: machine, engine, target.
        source: A file of another tool, without which transfers are measured.
        tool: The format of that file, where its content does not tell.
        name: Of the calibration and its two files; by default engine and machine.
        to: Their folder.
        path: Where the transfers went: "intra" or "inter", by default what the machine has.
        largest: Bytes of the largest transfer of the grid.
        held: Points that are drawn at random and held out of the fit; half of them are measured as
            reads, too.
        repeat: Transfers of a point, at least.
        jobs: How often the ranks are started anew, for processes differ more than transfers.
    """

    overrides: tuple[str, ...]
    source: Path | None = None  # --from
    tool: str = ""  # --format
    name: str = ""  # --name
    to: Path = Path()  # --to
    path: str = ""  # --path: intra or inter
    largest: int = 256 << 20  # --largest: bytes of a transfer of the grid
    held: int = 16  # --held: random points to hold out, half of them as reads too
    repeat: int = 5  # --repeat: the least
    jobs: int = 9  # --jobs: how often the ranks are started anew


def calibrate(words: Sequence[str]) -> int:
    """Do what *words* ask for, print what was found, and return the exit status.

    Measure a grid of transfers, or read *--from* a file; fit; write ``NAME.yaml`` and its samples ``NAME.csv`` to
    the folder ``--to``. Everything that can be refused is refused before the first transfer: the engine's model, the
    machine, the folder. Raise a `ConfigError` for that, and a `ValueError` for samples that nothing can be fitted
    to.
    """
    asked = _asked(words)
    command = _said(words)
    from pdsim.config.compose import compose

    config = compose([*asked.overrides, "experiment=transfer", "calibration=none"])
    at = asked.path or ("intra" if config.backend.intra is not None and config.hw.nodes == 1 else "inter")
    base_of(config.backend, at)  # refuses what it has to before minutes of measuring
    store.make(asked.to, "--to ")
    samples = importers.read(asked.source, asked.tool) if asked.source else _measured(asked, config, command)
    with terminal.Progress("calibrate", at_once=True) as bar:
        bar(0.0, f"fits {len(samples.rows)} samples")  # hundreds of times, for the intervals
        done = fitted(
            samples,
            config.hw,
            config.backend,
            str(vars(config.experiment)["operation"]),
            at,
            asked.name or f"{config.backend.name}-{config.hw.name}",
            command,
        )
    title = f"{config.backend.name} on {config.hw.name}, {at}, {done.calibration.kind}: {done.calibration.form}"
    path = files.save(asked.to, done.calibration, done.samples, title)
    for one in (summary.parameters(done), summary.table([done])):
        terminal.show_table(one)
    if apart := summary.apart(samples):
        print(apart)  # noqa: T201
    print(f"calibration: {path}\nsamples: {path.with_suffix('.csv')}")  # noqa: T201
    return 0


def _asked(words: Sequence[str]) -> _Asked:
    overrides, found = options.parse(
        "calibrate",
        words,
        {
            "--from": ("source", Path),
            "--format": ("tool", str),
            "--name": ("name", _plain_name),
            "--to": ("to", Path),
            "--path": ("path", _which),
            "--largest": ("largest", _largest),
            "--held": ("held", _at_least(0)),
            "--repeat": ("repeat", _at_least(1)),
            "--jobs": ("jobs", _at_least(1)),
        },
    )
    return _Asked(overrides=overrides, **found)


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"must be a whole number >= {least}")
        return int(text)

    return parse


def _largest(text: str) -> int:
    size = parse_size(text)
    if size < sample_grid.SMALLEST:
        raise ValueError(f"must be >= {sample_grid.SMALLEST} bytes")
    return size


def _plain_name(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+", text):
        raise ValueError("must be letters, digits, dots, hyphens and underscores; the folder is --to")
    return text


def _which(text: str) -> str:
    if text not in ("intra", "inter"):
        raise ValueError("must be intra or inter")
    return text


def _said(words: Sequence[str]) -> str:
    kept = [word for word in words if not word.startswith("output=")]
    return shlex.join(["pdsim", "calibrate", *(Path(word).name if "=" not in word else word for word in kept)])


# --- samples -------------------------------------------------------------------------------------------------------


def _measured(asked: _Asked, config: Config, command: str) -> Samples:
    # It is measured in several jobs, for the same transfers of two pairs of processes differ by a tenth and more
    # (`pdsim.calibration.noise_floor`).  Writes have reads beside them.
    from pdsim.config.compose import compose
    from pdsim.run import run

    operation = str(vars(config.experiment)["operation"])
    cells, left = sample_grid.grid(operation, asked.largest, asked.held, config.seed)
    if operation == "write":
        more, more_left = sample_grid.reads(asked.largest, left)
        cells, left = [*cells, *more], [*left, *more_left]
    listed = store.make(Path(config.output), "output=") / f"calibrate-points-{os.getpid()}.csv"
    sample_grid.write(listed, [*cells, *left], asked.repeat)
    own = [f"experiment.points={listed}", "experiment.order=shuffled"]
    defaults = ["experiment.warmup=10", "experiment.verify=false"]
    chosen = [*defaults, *asked.overrides, "experiment=transfer", "calibration=none", *own]
    runs = []
    with terminal.Progress(f"calibrate {_where(config)}", at_once=True) as bar:
        bar(0.0, f"begins, {len(cells) + len(left)} points in {asked.jobs} jobs")
        for job in range(asked.jobs):
            shown = within(bar, job / asked.jobs, (job + 1) / asked.jobs, f"job {job + 1} of {asked.jobs},")
            runs.append(run(compose([*chosen, f"seed={config.seed + job}"]), chosen, progress=shown))
    rows = points.from_transfers([result.transfers for result, _ in runs], [cell.label for cell in left])
    folders = ", ".join(folder.name for _, folder in runs)
    kind = "measured" if config.target == "real" else "assumed"  # of the model, it says what the model was told
    about = {"kind": kind, "source": _where(config), "command": command, "results": folders}
    if kind == "measured":
        about |= environment.here() | {"turn": f"{host_factor.measure()[0] * 1e9:.2f}ns"}
    failures = "; ".join(failure for result, _ in runs for failure in result.failures)
    return Samples(rows, about | ({"failures": failures} if failures else {}))


def _where(config: Config) -> str:
    return f"{config.backend.name} on {config.hw.name}" + (" (the model)" if config.target == "model" else "")
