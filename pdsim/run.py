# SPDX-License-Identifier: Apache-2.0
"""One run of one configuration: the target that it runs on, the experiment, and the files that it leaves.

`run` is what the command line, `pdsim.simulate` and the workers of a sweep call with a composed configuration.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdsim.config import Config, compose, rules
from pdsim.core import plugins
from pdsim.core.errors import ConfigError, RunWarning
from pdsim.core.progress import ShowProgress
from pdsim.core.units import format_time
from pdsim.results import schema, terminal
from pdsim.results.evidence import extrapolations, host_note, of_transfers
from pdsim.results.record import Result
from pdsim.results.store import JOURNALS, Run, entries

if TYPE_CHECKING:
    from pdsim.verify.laws import LawChecker


class Meter:
    """Shows how far the experiment says it is, and between two such words what the ranks of its job count.

    Called by the experiment as a `ShowProgress`, by a model through `simulated`, by real processes through
    `measured`.
    """

    def __init__(self, show: ShowProgress | None) -> None:
        self._show = show
        self._share = self._until = 0.0
        self._text = ""

    def __call__(self, share: float, text: str = "", until: float | None = None) -> None:
        """Show that a step begins."""
        self._share, self._text = share, text
        self._until = share if until is None else until
        if self._show is not None:
            self._show(share, text)

    def simulated(self, now: float, done: int, of: int) -> None:
        """Show the virtual time *now*, and that *done* of *of* pieces of work are done; 0 of 0 is unknown."""
        self._within(done, of, f" ({format_time(now)} simulated)")

    def measured(self, now: float, done: int, of: int) -> None:  # noqa: ARG002  both targets call it alike
        """Show that *done* of *of* pieces of the job's work are done."""
        self._within(done, of, "")

    def _within(self, done: int, of: int, more: str) -> None:
        if self._show is None:
            return
        share, count = (done / of, f", {done} of {of}") if of else (0.0, "")
        self._show(self._share + (self._until - self._share) * share, f"{self._text}{count}{more}")


def run(
    config: Config,
    words: Sequence[str] = (),
    options: Sequence[str] = (),
    *,
    quiet: bool = False,
    name: str = "",
    durable: bool = True,
    progress: ShowProgress | None = None,
) -> tuple[Result, Path]:
    """Run the experiment of *config*, keep its result, and return it and its folder.

    *words* are the overrides that *config* was composed of, *options* say from which folder (``--config-dir=DIR``);
    what they set in vain is among the notes of the result.  With *quiet* nothing is shown meanwhile, with *progress*
    it is shown there; *name* and *durable* are those of `pdsim.results.store.Run`.

    Raise a `ConfigError` if the experiment refuses *config*; nothing is left of the run then.  Any other exception
    leaves what there is of the run in its folder and says where, as a note of the exception.
    """
    words = [word.lstrip("+") for word in words]
    notes = rules.notes(config, compose.set_keys(words))
    experiment = plugins.resolve(plugins.EXPERIMENTS, config.experiment.name)
    measure: Callable[..., Result] = experiment.run
    keeps_files: bool = getattr(experiment, "KEEPS_FILES", False)
    fresh = not Path(config.output).exists()
    kept = Run(config, command=["pdsim", "run", *options, *words], overrides=words, name=name, durable=durable)
    try:
        measures = config.target != "model" or keeps_files
        with kept, _shown(config, measures, quiet=quiet, progress=progress) as show:
            meter = Meter(show)
            own = {"folder": kept.folder} if keeps_files else {}
            checker = _checker(config)
            with _target(config, meter, kept, checker) as target:
                with _kept_warnings() as warned:
                    result = measure(config, target, meter, **own)
                if config.checks == "on":
                    result = _checked(result, checker)
                own_notes = [
                    *notes,
                    *getattr(target, "notes", ()),
                    *warned,
                    *extrapolations(config, result.transfers),
                    *host_note(config, result.transfers),
                    *of_transfers(config, () if result.requests else result.transfers),
                ]
                result = replace(result, notes=[*result.notes, *own_notes])
            return result, kept.finish(result)
    except ConfigError:  # found by the experiment itself, before it began
        shutil.rmtree(kept.folder)
        if fresh:
            with suppress(OSError):  # another run may have begun to use it
                Path(config.output).rmdir()
        raise
    except Exception as error:
        error.add_note(f"what there is of the run is in {kept.folder}")
        raise


@contextmanager
def _shown(
    config: Config, measures: bool, *, quiet: bool, progress: ShowProgress | None
) -> Iterator[ShowProgress | None]:
    if quiet or progress is not None:
        yield progress
        return
    with terminal.Progress(f"{config.experiment.name} on {config.hw.name}", at_once=measures) as bar:
        if measures:
            bar(0.0, "begins")
        yield bar


def recovered(folder: Path) -> bool:
    """Write the files of the run in *folder*, which was killed, from its journals; return whether that was possible.

    The folder stays marked incomplete, and the first of its failures says how many requests had ended.  It holds for
    experiments that name a function ``partial``, such as `serve`.
    """
    if not any((folder / name).is_file() for name in JOURNALS):
        return False
    from pdsim.config import load

    values = schema.read_nested(folder / "config.yaml")
    config = load({key: value for key, value in values.items() if key not in ("defaults", "hydra")})
    experiment = plugins.resolve(plugins.EXPERIMENTS, config.experiment.name)
    partial = getattr(experiment, "partial", None)
    own = {"folder": folder} if getattr(experiment, "KEEPS_FILES", False) else {}
    with _kept_warnings() as warned:
        result = None if partial is None else partial(config, *(entries(folder / name) for name in JOURNALS), **own)
    if result is None:
        return False
    Run(config, left=folder).write_partial(replace(result, notes=[*result.notes, *warned]))
    return True


def simulated(config: Config, progress: ShowProgress | None = None) -> Result:
    """Run the experiment of *config* on the model, whatever its target, and return the result without keeping it.

    Raise a `ConfigError` if the experiment refuses *config*.
    """
    model, meter = replace(config, target="model", samples=0), Meter(progress)
    measure: Callable[..., Result] = plugins.resolve(plugins.EXPERIMENTS, model.experiment.name).run
    with _kept_warnings(), _target(model, meter) as target:
        return measure(model, target, meter)


@contextmanager
def _kept_warnings() -> Iterator[list[str]]:
    # Yield what becomes a line for each `RunWarning` of the block; those of other kinds are shown as ever.
    lines: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", RunWarning)  # one for each text: a long run has millions
        yield lines
    for each in caught:
        if not issubclass(each.category, RunWarning):
            warnings.showwarning(each.message, each.category, each.filename, each.lineno)
        elif (line := f"warning: {each.message}") not in lines:
            lines.append(line)


def _checker(config: Config) -> LawChecker | None:
    if config.checks == "off" or config.target != "model":
        return None
    from pdsim.verify.laws import LawChecker

    return LawChecker()


def _checked(result: Result, checker: LawChecker | None) -> Result:
    from pdsim.verify import laws

    landed = None if checker is None else checker.landed_bytes
    violations = [*(() if checker is None else checker.violations)]
    violations += laws.broken(result.outcome, result.requests, result.transfers, landed)
    note = f"checks=on: {len(violations)} violations of the laws of simulation"
    return replace(result, failures=[*result.failures, *violations], notes=[*result.notes, note])


@contextmanager
def _target(
    config: Config, meter: Meter, kept: Run | None = None, observer: LawChecker | None = None
) -> Iterator[Any]:
    # real processes, servers and emulated machines are imported only here, so a simulation needs none of them
    if config.target == "model":
        from pdsim.sim.model import Model

        yield Model(
            config.hw,
            config.backend,
            memory=config.memory,
            seed=config.seed,
            progress=meter.simulated,
            observer=observer,
            collective=config.collective,
            jitter=config.jitter,
            samples=config.samples,
            journal=kept.journal if kept else None,
        )
        return
    if config.target == "live":
        from backends.live.live_deployment import deployed

        assert kept is not None
        with deployed(config, kept.folder, meter, kept.journal.requests.append) as deployment:
            yield deployment
        return
    from backends.diagnosis import gpu_count
    from backends.jobs.launcher import SILENCE, Processes

    host, collective = config.hw.host.memory, config.collective
    silence = config.launch.silence or config.experiment.silence or SILENCE
    if config.hw.guest:
        from backends.emulation.guest.engines import emulated

        meter(0.0, "an emulated machine starts")
        with emulated(config.backend, host, silence, device_capacity=host, collective=collective) as target:
            yield target
        return

    gpu = config.hw.gpu.memory if config.hw.gpu and config.hw.gpus else config.hw.host.memory
    yield Processes(
        config.backend,
        bind=config.launch.bind,
        silence=silence,
        device_capacity=host,
        gpu_capacity=gpu,
        collective=collective,
        link=config.hw.link,
        nodes=config.hw.nodes,
        gpus=gpu_count() if config.launch.share_gpus else 0,
        progress=meter.measured,
    )
