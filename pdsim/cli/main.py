# SPDX-License-Identifier: Apache-2.0
"""The command line: a function for each command of `pdsim.cli.help`.

Exit status: 0 all went well, 1 a run failed, 2 what was typed cannot be run (and nothing was written), 130 Ctrl-C,
143 SIGTERM.  A command imports what it needs when it is called, so that ``--help`` answers at once.

A command takes its words and returns the status.  Functions here check words and folders, choose between text and
JSON, and print; the work is done by the library (`pdsim.run` for ``run``) or by a module of the command's own.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from io import TextIOWrapper
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

import pdsim
from pdsim.cli import help as usage
from pdsim.cli.process import begun, only_json, terminable
from pdsim.core import plugins
from pdsim.core.errors import ConfigError, PdsimError, instead
from pdsim.core.repository import data

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from pdsim.config import Config

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in *arguments*, by default those of the process, and return the exit status.

    It never raises for what a user can cause: an exception becomes one line a mistake on standard error, or a
    traceback with ``--debug`` or ``PDSIM_DEBUG=1``.

    - 0: the command did what it was told; also if the reader of its output has gone (``pdsim list | head``)
    - 1: a run failed, or a point of a sweep; what there is of it is kept
    - 2: a `ConfigError`: what was typed cannot be run, and nothing was written
    - 130, 143: Ctrl-C, SIGTERM

    >>> from contextlib import redirect_stdout
    >>> from io import StringIO
    >>> with redirect_stdout(StringIO()) as printed:
    ...     status = main(["--version"])
    >>> status, printed.getvalue().split()[0]
    (0, 'pdsim')
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or os.environ.get("PDSIM_DEBUG", "0") not in ("", "0")
    terminable()
    _print_anything()
    try:
        _check_packages()
        return _command([word for word in words if word != "--debug"])
    except KeyboardInterrupt as interrupt:
        return _interrupted(words[0], interrupt)
    except SystemExit as end:
        if end.code == 128 + signal.SIGTERM:
            _fail(143, f"ended by SIGTERM; {_left(words[0])}")
        raise
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        behind = error.__context__  # a library's own cleaning up may fail on the way out of an interruption
        while behind is not None:
            if isinstance(behind, KeyboardInterrupt):
                return _interrupted(words[0], behind)
            behind = behind.__context__
        if debug:
            traceback.print_exc()
        return _explain(error)


def _interrupted(command: str, interrupt: KeyboardInterrupt) -> int:
    return _fail(130, f"interrupted; {str(interrupt) or _left(command)}")


def _left(command: str) -> str:
    return "a run that had begun is marked incomplete" if command in _KEEP else "nothing was kept"


def _command(words: Sequence[str]) -> int:
    # ``pdsim``, ``pdsim help`` and ``--help`` print the overview, ``help COMMAND`` and ``COMMAND --help`` that of
    # one command. Raise a `ConfigError` for a word that is not a command.
    if not words or words[0] in ("--help", "-h") or words == ["help"]:
        return _say(usage.overview())
    command, *rest = words
    if command == "help":
        command, *rest = (*rest, "--help")
    if command in ("--version", "-V"):
        return _say(f"pdsim {pdsim.__version__}")
    if command not in _DO:
        raise ConfigError(_unknown(command, words))
    if "--help" in rest or "-h" in rest:
        return _say(usage.of(command))
    return _DO[command](rest)


def _unknown(command: str, words: Sequence[str]) -> str:
    # An override such as ``hw=8xh20``, and the name of an experiment or a machine, are arguments of ``pdsim run``.
    if "=" in command:
        return f"{command!r} is no command; did you mean pdsim run {' '.join(words)}?"
    for group in ("experiment", "hw"):
        if command in plugins.options(group):
            return f"{command!r} is no command; did you mean pdsim run {group}={command}?"
    return f"unknown command {command!r}; {instead(command, usage.COMMANDS)}; see pdsim --help"


# --- commands ------------------------------------------------------------------------------------------------------


def _run(words: Sequence[str]) -> int:
    # With ``-m`` or ``--multirun``, Hydra's own words for it, this is ``pdsim sweep``.  With ``--json`` the only
    # thing on standard output is one JSON object, with ``--quiet`` nothing is.  ``--cfg job`` prints the
    # configuration, with calibrations applied, and runs nothing.  Return 1 if anything failed, else 0.
    #
    # Raise a `ConfigError` for a run that cannot start, before anything is written. Raise what the experiment
    # raises.
    rest, json, quiet = _speaking(words)
    if any(map(_is_of_hydra, rest)) or ("--cfg" in rest and {"hydra", "all"} & set(rest)):
        return _job_of_hydra(rest)
    if {"-m", "--multirun"} & set(rest):
        return _sweep([word for word in words if word not in ("-m", "--multirun")])
    from pdsim.config import compose
    from pdsim.results import terminal
    from pdsim.run import run

    line = compose.read([word for word in rest if word not in _VERBOSE])
    if wrong := [word for word in line.words if word.partition("=")[0].split(".")[0] == "executor"]:
        raise ConfigError(f"{wrong[0]} is about many points; use pdsim sweep, or leave it out")
    config = compose.composed(line)
    if line.cfg:
        return _show_configuration(config)
    begun()
    with only_json(json) as out:
        result, folder = run(config, line.words, quiet=quiet or json)
        if json:
            out.write(terminal.as_json(folder) + "\n")
        elif not quiet:
            with suppress(SystemExit):  # rich's answer to a reader, such as head, that has seen enough
                terminal.show(folder, out, verbose=_is_verbose(rest))
    return 1 if result.failures else 0


def _is_of_hydra(word: str) -> bool:
    name = word.partition("=")[0]
    return word.lstrip("+~").startswith(("hydra.", "hydra/")) or name in (
        *("--info", "-i", "--hydra-help", "--package", "-p", "--resolve"),
    )


def _job_of_hydra(words: Sequence[str]) -> int:
    # With keys and options of Hydra's own the command is one of its applications: launchers and sweepers, folders,
    # logs and options are what they are in others.  Results are in the folder of the job, unless output= is set, and
    # a sweeper gets the goodput per GPU.
    import hydra

    from pdsim.config import compose
    from pdsim.config.compose import CommandLine

    failures: list[str] = []

    def job(values: DictConfig) -> float | None:
        from hydra.core.hydra_config import HydraConfig

        about = HydraConfig.get()
        if not any(word.lstrip("+").startswith("output=") for word in about.overrides.task):
            values.output = about.runtime.output_dir
        run = pdsim.simulate(values)
        _say(str(run))
        failures.extend(run.failures)
        goodput = run.metrics.get("goodput")
        return None if goodput is None else goodput / run.config["hw.nodes"] / max(1, run.config["hw.gpus"])

    options = [word for word in words if word.startswith("-") or "=" not in word]
    overrides = [word for word in words if word not in options]
    hydras = [word for word in overrides if _is_of_hydra(word)]
    ready = compose.ready([word for word in overrides if word not in hydras])
    sys.argv = ["pdsim", *options, "--", *ready, *hydras, *compose.places(CommandLine())]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here, to be explained
    begun()
    hydra.main(config_path="pkg://conf", config_name="config", version_base="1.3")(job)()
    return 1 if failures else 0


def _show_configuration(config: Config) -> int:
    from omegaconf import OmegaConf

    from pdsim.config import loading

    sys.stdout.write(OmegaConf.to_yaml(OmegaConf.create(loading.as_written(config))))
    return 0


def _sweep(words: Sequence[str]) -> int:
    # Those that an earlier call with the same words has run are not run again.
    from pdsim.cli.sweep import sweep

    begun()
    rest, json, quiet = _speaking(words)
    return sweep([word for word in rest if word not in _VERBOSE], json=json, quiet=quiet)


_VERBOSE = ("-v", "--verbose")


def _is_verbose(words: Sequence[str]) -> bool:
    return any(word in _VERBOSE for word in words)


def _speaking(words: Sequence[str]) -> tuple[list[str], bool, bool]:
    quiet = bool({"--quiet", "-q"} & set(words))
    return [word for word in words if word not in ("--json", "--quiet", "-q")], "--json" in words, quiet


def _show(words: Sequence[str]) -> int:
    # As a report, or as one JSON object a folder.
    from pdsim.cli.report import is_sweep
    from pdsim.results import terminal

    for folder in _folders("show", words):
        if is_sweep(folder):
            from pdsim.sweep import collect

            collect.show(folder, json="--json" in words, verbose=_is_verbose(words))
        elif "--json" in words:
            _say(terminal.as_json(folder))
        else:
            terminal.show(folder, verbose=_is_verbose(words))
    return 0


def _report(words: Sequence[str]) -> int:
    # A page cannot be had as JSON, nor more than one folder on it: both raise a `ConfigError`.
    from pdsim.cli.report import report
    from pdsim.sweep import best

    if told := {"--json", *_VERBOSE} & set(words):
        raise ConfigError(f"report writes a page, and has no {told.pop()}; pdsim show prints")
    options, rest = _options("report", words, "-o", "--figure", "--format", "--slo")
    folders = _folders("report", rest)
    if len(folders) > 1:
        raise ConfigError(f"report is about one run, sweep or validation, got {len(folders)}")
    slo = best.parse_slo(options["--slo"]) if options["--slo"] else None
    path = report(folders[0], options["-o"], figure=options["--figure"], form=options["--format"], slo=slo)
    return _say(str(path))


def _timeline(words: Sequence[str]) -> int:
    from pdsim.cli.report import timeline

    options, rest = _options("timeline", words, "-o")
    path = timeline(_folders("timeline", rest), options["-o"])
    return _say(f"{path}\nopen it at https://ui.perfetto.dev, which reads it in the browser and sends it nowhere")


def _options(command: str, words: Sequence[str], *flags: str) -> tuple[dict[str, str], list[str]]:
    found, rest = {}, [re.sub("^--output(=|$)", r"-o\1", word) for word in words]
    for flag in flags:
        found[flag], rest = _value(flag, rest, command)
    if unknown := [word for word in rest if word.startswith("-")]:
        raise ConfigError(f"{command} has no option {unknown[0]!r}; {instead(unknown[0], flags)}")
    return found, rest


def _best(words: Sequence[str]) -> int:
    # ``--slo ttft=2s,tpot=30ms`` judges all points by one SLO, instead of each by the one it was run with.
    from dataclasses import asdict

    from pdsim.cli.report import is_sweep
    from pdsim.results import terminal
    from pdsim.sweep import best

    slo, rest = _value("--slo", words, "best")
    folders = _folders("best", rest)
    if len(folders) > 1 or not is_sweep(folders[0]):
        raise ConfigError(f"best needs the folder of one sweep, got {' '.join(map(str, folders))}")
    asked = best.parse_slo(slo) if slo else None
    ranked = best.rank(folders[0], asked)
    if "--json" in words:
        return _say(dumps([asdict(each) | {"goodput_per_gpu": each.value} for each in ranked], default=str))
    title = f"best of {len(ranked)} points in {folders[0]}, {asked or 'the SLO of each'}"
    terminal.show_table(best.table(ranked, title), definitions=_is_verbose(words))
    return _say("\n".join(["", *best.chart(ranked)]))


def _explained(words: Sequence[str]) -> int:
    # Relief is simulated, a run for each cause; ``--fast`` leaves that out. ``--request N`` explains request *N*
    # alone. Raise a `ConfigError` for a sweep, for more than two folders, and for a request of two runs.
    from pdsim.cli.explain import explain_one, explain_two

    number, rest = _value("--request", words, "explain")
    if number and not number.isdecimal():
        raise ConfigError(f"--request {number}: must be the number of a request, from 0")
    fast, json = "--fast" in rest, "--json" in rest
    folders = _folders("explain", [word for word in rest if word != "--fast"])
    if len(folders) > 2:
        raise ConfigError(f"explain takes one run or two, got {len(folders)}")
    if number and len(folders) > 1:
        raise ConfigError(f"--request {number} is of one run; name one folder")
    _refuse_sweeps("explain", folders)
    if len(folders) > 1:
        explain_two(folders, fast=fast, json=json)
    else:
        explain_one(folders[0], request=int(number) if number else None, fast=fast, json=json)
    return 0


def _value(flag: str, words: Sequence[str], command: str) -> tuple[str, list[str]]:
    found, rest, left = "", [], iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        if name != flag:
            rest.append(word)
        elif not (found := value if equals else next(left, "")):
            raise ConfigError(f"{flag} needs a value after it; see pdsim {command} --help")
    return found, rest


def _compare(words: Sequence[str]) -> int:
    from pdsim.results import compare, terminal

    folders = _folders("compare", words)
    _refuse_sweeps("compare", folders)
    if "--json" in words:
        return _say(dumps(compare.as_dict(folders), ensure_ascii=False))
    for table in compare.tables(folders):
        terminal.show_table(table)
    return 0


def _refuse_sweeps(command: str, folders: Sequence[Path]) -> None:
    from pdsim.cli.report import is_sweep

    if sweeps := [folder for folder in folders if is_sweep(folder)]:
        points = "two of its points" if command == "compare" else "one or two of its points"
        raise ConfigError(f"{sweeps[0]} is a sweep; name {points}, or see pdsim show {sweeps[0]}")


def _folders(command: str, words: Sequence[str]) -> list[Path]:
    # Raise a `ConfigError` for an option that *command* has not, what is no folder of a run, and if there is none.
    begun()
    folders = [Path(word) for word in words if word not in ("--json", *_VERBOSE)]
    if flags := [word for word in map(str, folders) if word.startswith("-")]:
        raise ConfigError(f"unknown option {flags[0]}; see pdsim {command} --help")
    if wrong := [folder for folder in folders if not folder.is_dir()]:
        raise ConfigError(f"{wrong[0]} is no folder; name the folder of a run, such as one in results")
    if not folders:
        raise ConfigError(f"{command} needs the folder of a run, such as one in results; see pdsim {command} --help")
    for folder in folders:
        if folder.name.endswith(".incomplete"):
            from pdsim.run import recovered

            recovered(folder)
        elif (
            command != "report" and (folder / "expectations.json").is_file() and not (folder / "run.json").is_file()
        ):
            raise ConfigError(
                f"{folder} has the files of a validation alone, without its run; see pdsim report {folder}"
            )
    return folders


def _calibrate(words: Sequence[str]) -> int:
    # It needs SciPy, which the extra ``calibrate`` has; without it raise a `ConfigError` before anything is
    # measured.
    from pdsim.cli.calibrate import calibrate

    if find_spec("scipy") is None:
        raise ConfigError("calibrate needs scipy; pip install 'pdsim[calibrate]'")
    begun()
    return calibrate(words)


def _refit(words: Sequence[str]) -> int:
    if find_spec("scipy") is None:
        raise ConfigError("refit needs scipy; pip install 'pdsim[calibrate]'")
    if not data().is_dir():
        raise ConfigError("refit needs a checkout of the repository: samples and fits are not installed")
    return int(import_module("tools.refit").refit(words))


def _profile(words: Sequence[str]) -> int:
    from pdsim.cli.profile import profile

    begun()
    return profile(words)


def _validate(words: Sequence[str]) -> int:
    if taken := [word for word in words if word.startswith("experiment=")]:
        raise ConfigError(f"validate is an experiment itself, got {taken[0]}; choose with experiment.classes=[...]")
    live = "target=live" in words or any(word.startswith("experiment.loads=") for word in words)
    return _run([f"experiment={'validate_live' if live else 'validate'}", *words])


def _observe(words: Sequence[str]) -> int:
    from pdsim.cli.observe import observe

    begun()
    return observe(words)


def _list(words: Sequence[str]) -> int:
    # Without a group it also names the implementations that packages register, with the package of those that are
    # not pdsim's.
    chosen, own = _chosen("list", words)
    known = plugins.groups(own)
    if wrong := [word for word in chosen if word not in known]:
        raise ConfigError(f"no group {wrong[0]!r}; {instead(wrong[0], known)}")
    for group in chosen or known:
        _say(f"{group}=")
        names = plugins.options(group, own)
        width = max(16, *map(len, names))
        for name in names:
            _say(f"  {name:<{width}} {plugins.describe(group, name, own)}")
    if not chosen:
        for what, group in (("backends", plugins.BACKENDS), ("collectives", plugins.COLLECTIVES)):
            found = (f"{name}{_from(group, name)}" for name in plugins.names(group))
            _say(f"implementations of {what} for target=real: {', '.join(found)} (pdsim doctor: which work here)")
    return 0


def _chosen(command: str, words: Sequence[str]) -> tuple[Sequence[str], Sequence[Path]]:
    if not any(word.startswith("-") for word in words):
        return words, ()  # and pdsim.config is not imported, which takes longer than to list all groups
    from pdsim.config import compose

    line = compose.read(words, command)
    return line.words, line.folders


def _from(group: str, name: str) -> str:
    provider = plugins.provider(group, name)
    return "" if provider == "pdsim" else f" (from {provider})"


def _doctor(words: Sequence[str]) -> int:
    chosen, own = _chosen("doctor", [word for word in words if word != "--host"])
    if chosen:
        raise ConfigError(f"doctor takes no arguments but --host and --config-dir, got {chosen[0]!r}")
    from pdsim.cli.doctor import host, report

    return _say(host() if "--host" in words else report(own))


def _completion(words: Sequence[str]) -> int:
    from pdsim.cli.complete import script

    if words:
        raise ConfigError(f"completion takes no arguments, got {words[0]!r}")
    return _say(script())


_DO: Mapping[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "sweep": _sweep,
    "best": _best,
    "explain": _explained,
    "show": _show,
    "report": _report,
    "timeline": _timeline,
    "compare": _compare,
    "calibrate": _calibrate,
    "refit": _refit,
    "profile": _profile,
    "validate": _validate,
    "observe": _observe,
    "list": _list,
    "doctor": _doctor,
    "completion": _completion,
}

_KEEP = ("run", "sweep", "calibrate", "validate", "observe")
"""Commands that keep runs."""

# --- speaking ------------------------------------------------------------------------------------------------------


def _say(text: str) -> int:
    print(text, flush=True)  # noqa: T201
    return 0


def _print_anything() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _fail(status: int, text: str) -> int:
    for line in text.splitlines():
        print(f"pdsim: {line}", file=sys.stderr)  # noqa: T201
    return status


def _explain(error: Exception) -> int:
    if isinstance(error, ConfigError):
        return _fail(2, str(error))
    if "hydra" in sys.modules:
        from pdsim.config import compose

        if (refusal := compose.explain(error)) is not None:
            return _fail(2, refusal)
    text = " ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", ()))])
    hint = "make room, or name a folder elsewhere" if "No space left" in text else "--debug shows where"
    more = "" if isinstance(error, PdsimError) else f"; {hint}"
    return _fail(1, f"{type(error).__name__}: {' '.join(text.split())}{more}")


def _check_packages() -> None:
    home = Path(pdsim.__file__).resolve().parent.parent
    for name in ("conf", "backends", "experiments"):
        spec = find_spec(name)
        found = Path(spec.origin).resolve().parent if spec is not None and spec.origin else None
        if found is None or found.parent != home:
            what = found or "a folder of that name"
            raise ConfigError(
                f"the package {name!r} of pdsim is hidden by {what}; use the command pdsim, or python -P -m pdsim, "
                f"or run from another directory"
            )
