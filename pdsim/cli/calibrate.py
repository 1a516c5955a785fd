# SPDX-License-Identifier: Apache-2.0
"""`pdsim calibrate`: measure a designed grid or read measurements, fit, write the calibration, print its errors.

Both ways end in the same two files: ``NAME.yaml``, which `pdsim.config` lays over the configuration of a run, and
``NAME.csv``, one row for each measured point, from which it can be fitted again.  The fit, its files and its tables
are `pdsim.calibration.calibrate`.
"""

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pdsim.calibration import bundle, importers
from pdsim.calibration import calibrate as fits
from pdsim.calibration import samples as points
from pdsim.calibration.definition import drawn, measure
from pdsim.calibration.samples import Samples
from pdsim.cli.help import parse, plain_name
from pdsim.config import Config
from pdsim.config.compose import CommandLine, composed
from pdsim.core.errors import ConfigError
from pdsim.core.progress import within
from pdsim.results import record, store, terminal

_QUICK = {"--largest": 4 << 20, "--jobs": 3, "--held": 8, "--repeat": 3}
"""Options of ``--quick``, unless they are given."""
_ENOUGH = 150.0
"""Seconds within which a further job of ``--quick`` has to end, so that all ends within three minutes."""


def calibrate(words: Sequence[str]) -> int:
    """Measure a grid of transfers, or read ``--from`` a file; fit, write both files, and return the exit status.

    After each job ``NAME.partial.csv`` has all measurements so far, until NAME.csv has them. Raise a `ConfigError`
    for what is refused before the first transfer: the engine's model, the machine, the folder; and a `ValueError`
    for samples that nothing can be fitted to.  ``--from`` a bundle of `pdsim probe` writes all files that it has
    samples for, into folders of groups.
    """
    overrides, asked = parse("calibrate", words)
    said = (Path(word).name if "=" not in word else word for word in words if not word.startswith("output="))
    command = shlex.join(["pdsim", "calibrate", *said])
    name, to = plain_name("--name", asked.get("--name", "")), asked.get("--to", Path())
    if asked.get("--path", "intra") not in ("intra", "inter"):
        raise ConfigError(f"--path {asked['--path']}: must be intra or inter")
    if "--quick" in asked:
        if "--from" in asked:
            raise ConfigError("--quick measures less, and --from measures nothing; leave one of them out")
        asked = {**_QUICK, **asked}
    for option, least in (("--largest", points.SMALLEST), ("--repeat", 1), ("--jobs", 1)):
        if asked.get(option, least) < least:
            raise ConfigError(f"{option} {asked[option]}: must be >= {least}")
    if "--no-fit" in asked and "--from" in asked:
        raise ConfigError("--no-fit measures only, and --from fits only; leave one of them out")
    of_host = "--host" in asked
    if wrong := of_host and [word for word in ("--quick", "--no-fit", "--held", "--largest") if word in asked]:
        raise ConfigError(f"--host measures 20 transfers and fits one factor; leave out {wrong[0]}")
    if "--from" in asked and bundle.is_bundle(asked["--from"]):
        return _of_bundle(asked, overrides, command)
    beside = [] if of_host else ["calibration=none"]  # of a host, its factor is sought
    config = composed(
        CommandLine.of([*overrides, "experiment=transfer", *beside, *["host_factor=1"] * of_host], asked)
    )
    at = _path_of(config, asked)
    fits.base_of(config.backend, at)  # refuses what it has to before minutes of measuring
    store.make(to, "--to ")
    name = name or f"{config.backend.name}-{config.hw.name}"
    partial = to / f"{name}.partial.csv"
    if "--from" in asked:
        samples = importers.read(asked["--from"], asked.get("--format", ""))
    else:
        samples = _measured(asked, overrides, config, command, partial)
    if of_host:
        path = asked["--from"] if "--from" in asked else partial.replace(to / f"{name}.host.csv")
        _show_host(config, fits.of_host(samples, config.hw, config.backend, at), path)
        return 0
    if "--no-fit" in asked:
        partial = partial.replace(to / f"{name}.csv")
        terminal.show_lines(f"samples: {partial}; fit them with pdsim calibrate --from {partial}")
        return 0
    _fitted(config, at, name, samples, command, to)
    if "--from" not in asked:
        partial.unlink()
    return 0


def _show_host(config: Config, found: fits.OfHost, path: Path) -> None:
    before, after = (f"{np.median(of):.1%} ({np.quantile(of, 0.95):.0%})" for of in (found.before, found.after))
    known = config.calibration.hosts if config.calibration is not None else ()
    use = f"hw={config.hw.name} backend={config.backend.name} host_factor={found.factor:.3g}"
    terminal.show_lines(
        f"host_factor={found.factor:.3g}, jobs {found.each[0]:.3g} to {found.each[-1]:.3g}: {len(found.after)} "
        f"transfers in {path}, whose errors are {before} without it and {after} with it, median (95th percentile)"
    )
    if len(set(known)) > 1:
        low, high = np.quantile(drawn(known, config.seed, 1000), (0.025, 0.975))
        terminal.show_lines(
            f"95 of 100 hosts: {low:.2f} to {high:.2f}, as the {len(known)} of the calibration differ"
        )
    terminal.show_lines(f"to use it: pdsim run {use}")


def _fitted(config: Config, at: str, name: str, samples: Samples, command: str, to: Path) -> None:
    with terminal.Progress("calibrate", at_once=True) as bar:
        doing = f"fits {len(samples.rows)} samples"
        bar(0.0, doing)
        done = fits.fitted(
            samples,
            config.hw,
            config.backend,
            str(vars(config.experiment)["operation"]),
            at,
            name,
            command,
            within(bar, 0.0, 1.0, doing),
        )
    title = f"{config.backend.name} on {config.hw.name}, {at}, {done.calibration.kind}: {done.calibration.form}"
    path = fits.save(to, done.calibration, done.samples, title)
    for one in (fits.parameter_table(done), fits.table([done])):
        terminal.show_table(one)
    if apart := fits.job_spread(samples):
        print(apart)  # noqa: T201
    kept = (
        f", of {runs.count(',') + 1} runs in {config.output}" if (runs := samples.about.get("results", "")) else ""
    )
    print(f"calibration: {path}\nsamples: {path.with_suffix('.csv')}{kept}")  # noqa: T201


def _of_bundle(asked: Mapping[str, Any], overrides: Sequence[str], command: str) -> int:
    # a folder for --config-dir: calibrations, profiles of forwards, and the machine if it was the user's own
    source = asked["--from"]
    about, texts = bundle.read(source)
    if wrong := [word for word in overrides if word.startswith(("hw=", "backend="))]:
        raise ConfigError(f"{wrong[0]}: a bundle says what it is of; leave it out")
    hw, to = str(about["hw"]), asked.get("--to", Path(source.stem))
    measured: dict[str, list[Path]] = {"hw": [], "transfers": [], "compute": []}
    for name, text in texts.items():
        group, _, file = ("hw", "/", f"{hw}.yaml") if name == "hw.yaml" else name.partition("/")
        if group in measured:
            path = store.make(to / {"transfers": "calibration"}.get(group, group), "--to ") / file
            path.write_text(text, encoding="utf-8")
            measured[group].append(path)
    if not measured["transfers"] + measured["compute"]:
        raise ConfigError(f"--from {source}: no samples in it; its about.json says why")
    own: dict[str, Any] = {"--config-dir": to} if measured["hw"] else {}
    failed = []
    words = [*about.get("words", ()), *overrides, f"hw={hw}"]
    for path in measured["transfers"]:
        backend = path.stem.removesuffix(f"-{hw}")
        try:
            line = CommandLine.of([*words, f"backend={backend}", "experiment=transfer", "calibration=none"], own)
            config = composed(line)
            _fitted(config, _path_of(config, asked), path.stem, importers.read(path), command, path.parent)
            terminal.show_lines(f"to use it: pdsim run --config-dir {to} hw={hw} backend={backend}")
        except ValueError as error:  # too few
            failed.append(f"{path} is not fitted: {error}")
    for path in measured["compute"]:
        from pdsim.cli.profile import profile

        folder = [f"{name}={value}" for name, value in own.items()]
        profile(["--from", str(path), *words, "--name", path.stem, "--to", str(path.parent), *folder])
        terminal.show_lines(f"to use it: pdsim run --config-dir {to} hw={hw} compute={path.stem}")
    terminal.show_lines(*failed)
    return 1 if failed else 0


def _path_of(config: Config, asked: Mapping[str, Any]) -> str:
    return asked.get("--path") or ("intra" if config.backend.intra and config.hw.nodes == 1 else "inter")


def _measured(
    asked: Mapping[str, Any], overrides: Sequence[str], config: Config, command: str, partial: Path
) -> Samples:
    # It is measured in several jobs, for the same transfers of two pairs of processes differ by a tenth and more
    # (`pdsim.calibration.samples.floor`).  Writes have reads beside them.  What there is goes to *partial*.
    from pdsim.run import run

    of_host = "--host" in asked
    largest, repeat = asked.get("--largest", 256 << 20), asked.get("--repeat", 5)
    jobs = asked.get("--jobs", 3 if of_host else 9)
    operation = str(vars(config.experiment)["operation"])
    cells, left = points.of_host(operation), list[points.Cell]()
    if not of_host:
        cells, left = points.grid(operation, largest, asked.get("--held", 16), config.seed)
    if operation == "write" and not of_host:
        more, more_left = points.reads(largest, left)
        cells, left = [*cells, *more], [*left, *more_left]
    listed = store.make(Path(config.output), "output=") / f"calibrate-points-{os.getpid()}.csv"
    points.write_points(listed, [*cells, *left], repeat)
    own = [f"experiment.points={listed}", "experiment.order=shuffled"]
    defaults = ["experiment.warmup=10", "experiment.verify=false"]
    beside = [] if of_host else ["calibration=none"]
    chosen = [*defaults, *overrides, "experiment=transfer", *beside, *own]
    folders = [f"--config-dir={asked['--config-dir']}"] if "--config-dir" in asked else []
    runs: list[tuple[record.Result, Path]] = []
    began = time.monotonic()
    try:
        with terminal.Progress(f"calibrate {_where(config)}", at_once=True) as bar:
            bar(0.0, f"begins, {len(cells) + len(left)} points in {jobs} jobs, each kept in {partial}")
            for job in range(jobs):
                if job and "--quick" in asked and (time.monotonic() - began) * (job + 1) / job > _ENOUGH:
                    break  # one like those before would end too late
                shown = within(bar, job / jobs, (job + 1) / jobs, f"job {job + 1} of {jobs},")
                one = composed(CommandLine.of([*chosen, f"seed={config.seed + job}"], asked))
                runs.append(run(one, chosen, folders, progress=shown))
                samples = _samples(runs, left, config, command)
                points.write(partial, samples)
    except KeyboardInterrupt:
        if not runs:
            raise
        fit = f"pdsim calibrate --from {partial} {shlex.join(overrides)}"
        raise KeyboardInterrupt(f"samples of {len(runs)} of {jobs} jobs are kept; to fit them: {fit}") from None
    return samples


def _samples(
    runs: Sequence[tuple[record.Result, Path]], left: Sequence[points.Cell], config: Config, command: str
) -> Samples:
    rows = points.from_transfers([result.transfers for result, _ in runs], [cell.label for cell in left])
    folders = ", ".join(folder.name for _, folder in runs)
    # of the model, it says what the model was told; on a shared GPU, what one GPU's memory does
    kind = "measured" if config.target == "real" and not config.launch.share_gpus else "assumed"
    about = {"kind": kind, "source": _where(config), "command": command, "results": folders}
    if config.target == "real":
        about |= record.here() | {"turn": f"{measure()[0] * 1e9:.2f}ns"}
    failures = "; ".join(failure for result, _ in runs for failure in result.failures)
    return Samples(rows, about | ({"failures": failures} if failures else {}))


def _where(config: Config) -> str:
    how = " (the model)" if config.target == "model" else ", ranks share a GPU" if config.launch.share_gpus else ""
    return f"{config.backend.name} on {config.hw.name}{how}"
