# SPDX-License-Identifier: Apache-2.0
"""The command line: a function for each command of `pdsim.cli.help`.

Exit status: 0 all went well, 1 a run failed, 2 what was typed cannot be run (and nothing was written), 130 Ctrl-C,
143 SIGTERM.  A command takes its words and returns the status.  It imports what it needs when it is called, so that
``--help`` answers at once; commands about kept folders are in `pdsim.cli.kept`, large ones in modules of their own.
"""

from __future__ import annotations

import errno
import os
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
from typing import TYPE_CHECKING, Any

import pdsim
from pdsim.cli import help as usage
from pdsim.cli.process import begun, only_json, terminable
from pdsim.core import plugins
from pdsim.core.errors import BackendUnavailable, ConfigError, PdsimError, instead, near, within
from pdsim.core.files import data, printable

if TYPE_CHECKING:
    from omegaconf import DictConfig


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
    left = "a run that had begun is marked incomplete" if words[:1] and words[0] in _KEEP else "nothing was kept"
    terminable()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who began this process; the next file would have its number
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        _check_packages()
        return _command([word for word in words if word != "--debug"])
    except SystemExit as end:
        if end.code == 128 + signal.SIGTERM:
            _fail(143, f"ended by SIGTERM; {left}")
        raise
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except (KeyboardInterrupt, Exception) as error:
        # a library's own cleaning up may fail on the way out of an interruption
        behind: BaseException | None = error
        while behind is not None:
            if isinstance(behind, KeyboardInterrupt):
                return _fail(130, f"interrupted; {str(behind) or left}")
            behind = behind.__context__
        if debug:
            traceback.print_exc()
        return _explained(error)


def _command(words: Sequence[str]) -> int:
    # ``pdsim``, ``pdsim help`` and ``--help`` print the overview, ``help COMMAND`` and ``COMMAND --help`` that of
    # one command. Raise a `ConfigError` for a word that is not a command.
    if not words or words[0] in ("--help", "-h") or words == ["help"]:
        return _say(usage.overview())
    for word in words:
        if any("\ud800" <= letter <= "\udfff" for letter in word):  # how Python keeps bytes that it cannot read
            raise ConfigError(f"{word} is not text in this terminal's encoding; set LC_ALL=C.UTF-8 or PYTHONUTF8=1")
    command, *rest = words
    if command == "help":
        if rest[0] not in _DO:
            return _say(_help_of_key(rest[0], rest[1:]))
        command, *rest = (*rest, "--help")
    if command in ("--version", "-V"):
        return _say(f"pdsim {pdsim.__version__}")
    if command not in _DO:
        raise ConfigError(_unknown(command, words))
    if "--help" in rest or "-h" in rest:
        return _say(usage.of(command))
    return _DO[command](rest)


def _help_of_key(name: str, words: Sequence[str]) -> str:
    # Of one key alone it also says what it is in the configuration of *words*.
    from pdsim.config import compose, keys

    group = name.partition("=")[0]
    every = keys.named(group)
    lines = [str(key) for key in every]
    if {key.name for key in every} == {group}:
        typed = [word for word in (name, *words) if "=" in word]
        lines += keys.now(every[0], compose.compose(typed), typed)
    if group in plugins.groups():
        lines.insert(
            0, f"{group}= chooses one of {', '.join(plugins.options(group))}; pdsim list {group} describes them"
        )
    if not lines:
        from pdsim.config import Config
        from pdsim.serving.settings import ELSEWHERE, NO_KEYS

        known = [*usage.COMMANDS, *plugins.groups(), *(key.name for key in keys.known())]
        last = name.rpartition(".")[2]
        hint = within(ELSEWHERE.get(last, last), Config, NO_KEYS) or near(name, known)
        raise ConfigError(f"no command and no key {name!r}; {hint}see pdsim --help, or pdsim help hw")
    return "\n".join(lines)


def _unknown(command: str, words: Sequence[str]) -> str:
    # An override such as ``hw=8xh20``, and the name of an experiment or a machine, are arguments of ``pdsim run``.
    if "=" in command:
        return f"{command!r} is not a command; did you mean pdsim run {' '.join(words)}?"
    for group in ("experiment", "hw"):
        if command in plugins.options(group):
            return f"{command!r} is not a command; did you mean pdsim run {group}={command}?"
    return f"unknown command {command!r}; {instead(command, (*usage.COMMANDS, '--help', '--version'))}"


def _run(words: Sequence[str]) -> int:
    if any(map(_is_of_hydra, words)) or ("--cfg" in words and {"hydra", "all"} & set(words)):
        return _job_of_hydra(words)
    rest, asked = usage.parse("run", words)
    if "--multirun" in asked:
        return _DO["sweep"]([word for word in words if word not in ("-m", "--multirun")])
    from pdsim.config import compose
    from pdsim.kv.policy import described
    from pdsim.results import terminal
    from pdsim.run import run

    if wrong := [word for word in rest if word.partition("=")[0].split(".")[0] == "executor"]:
        raise ConfigError(f"{wrong[0]} is about many points; use pdsim sweep, or leave it out")
    if asked.get("--cfg", "job") != "job":
        raise ConfigError(f"--cfg {asked['--cfg']} is not known; --cfg job prints what the run will use")
    config = compose.composed(compose.CommandLine.of(rest, asked))
    if config.target == "real" and (variables := list(described(os.environ, config.backend.implementation))):
        sys.stderr.write(f"taken from SGLang's environment variables: {' '.join(variables)}\n")
        rest = [*variables, *rest]  # of two values of a key the last one counts
        config = compose.composed(compose.CommandLine.of(rest, asked))
    if "--cfg" in asked:
        from pdsim.config import keys

        sys.stdout.write(printable(keys.annotated(config)))
        return 0
    begun()
    json, quiet = "--json" in asked, "--quiet" in asked
    with only_json(json) as out:
        options = [f"{name}={value}" for name, value in asked.items() if name.startswith("--config-")]
        result, folder = run(config, rest, options, quiet=quiet or json)
        if json:
            out.write(terminal.as_json(folder) + "\n")
        elif not quiet:
            with suppress(SystemExit):  # rich's answer to a reader, such as head, that has seen enough
                terminal.show(folder, out, verbose="--verbose" in asked)
    return 1 if result.failures else 0


def _is_of_hydra(word: str) -> bool:
    options = ("--info", "-i", "--hydra-help", "--package", "-p", "--resolve")
    return word.lstrip("+~").startswith(("hydra.", "hydra/")) or word.partition("=")[0] in options


def _job_of_hydra(words: Sequence[str]) -> int:
    # With keys and options of Hydra's own the command is one of its applications: launchers and sweepers, folders,
    # logs and options are what they are in others.  Results are in the folder of the job, unless output= is set, and
    # a sweeper gets the goodput per GPU.
    import hydra

    from pdsim.config import compose

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
    sys.argv = ["pdsim", *options, "--", *ready, *hydras, *compose.places(compose.CommandLine())]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here, to be explained
    begun()
    hydra.main(config_path="pkg://conf", config_name="config", **compose.version_base())(job)()
    return 1 if failures else 0


def _validate(words: Sequence[str]) -> int:
    if taken := [word for word in words if word.startswith("experiment=")]:
        raise ConfigError(f"validate is an experiment itself, got {taken[0]}; choose with experiment.classes=[...]")
    if "--against" in words:
        at = words.index("--against")
        kind, *files = [word for word in words[at + 1 :] if "=" not in word and not word.startswith("-")] or [""]
        if kind != "inferencex" or not files:
            raise ConfigError(
                f"--against {kind} {' '.join(files)}: write --against inferencex FILE, a CSV of its rows"
            )
        rest = [word for word in words if word not in ("--against", kind, *files)]
        return _run(["experiment=scorecard", f"experiment.files=[{','.join(map(repr, files))}]", *rest])
    live = "target=live" in words or any(word.startswith("experiment.loads=") for word in words)
    return _run([f"experiment={'validate_live' if live else 'validate'}", *words])


def _of_folders(command: str) -> Callable[[Sequence[str]], int]:
    # the command is the function of that name in `pdsim.cli.kept`
    def act(words: Sequence[str]) -> int:
        from pdsim.cli import kept

        names, asked = usage.parse(command, words)
        begun()
        return _say(getattr(kept, command)(kept.folders(command, names), asked))

    return act


def _of_module(command: str) -> Callable[[Sequence[str]], int]:
    # the command is the function of that name in a module of that name
    def act(words: Sequence[str]) -> int:
        if command == "calibrate" and "--no-fit" not in words:
            plugins.require(command, "calibrate", "scipy")
        module = import_module(f"pdsim.cli.{command}")
        begun()
        return int(getattr(module, command)(words))

    return act


def _refit(words: Sequence[str]) -> int:
    plugins.require("refit", "calibrate", "scipy")
    if not data().is_dir():
        raise ConfigError("refit needs a checkout of the repository: samples and fits are not installed")
    return int(import_module("tools.refit").refit(words))


def _list(words: Sequence[str]) -> int:
    # Without a group it also names the implementations that packages register, with the package of those that are
    # not pdsim's.
    rest, asked = usage.parse("list", words)
    chosen, settings = ([word for word in rest if ("=" in word) is given] for given in (False, True))
    own = _own_folders(asked)
    known = plugins.groups(own)
    if wrong := [word for word in chosen if word not in known]:
        raise ConfigError(f"no group {wrong[0]!r}; {instead(wrong[0], known)}")
    if settings and (chosen != ["compute"] or {"--schema", "--json"} & set(asked)):
        raise ConfigError(f"{settings[0]}: a value is for what auto takes; write pdsim list compute {settings[0]}")
    if "--schema" in asked:
        return _schema(chosen)
    if "--json" in asked:
        every = {
            g: {name: plugins.describe(g, name, own) for name in plugins.options(g, own)} for g in chosen or known
        }
        return _say(dumps(every, ensure_ascii=False))
    for group in chosen or known:
        _say(f"{group}=")
        names = plugins.options(group, own)
        width = max(16, *map(len, names))
        for name in names:
            _say(f"  {name:<{width}} {plugins.describe(group, name, own)}")
    if chosen == ["compute"]:
        _taken(settings, asked)
    if not chosen:
        for what, group in (("backends", plugins.BACKENDS), ("collectives", plugins.COLLECTIVES)):
            provided = ((name, plugins.provider(group, name)) for name in plugins.names(group))
            known = [name if package == "pdsim" else f"{name} (from {package})" for name, package in provided]
            _say(f"implementations of {what} for target=real: {', '.join(known)} (pdsim doctor: which work here)")
    return 0


def _taken(words: Sequence[str], asked: Mapping[str, Any]) -> None:
    from pdsim.config import compose

    config: Any = compose.composed(compose.CommandLine.of(words, asked))
    compute, of = config.compute, f"hw={config.hw.name} model={config.model.name} engine={config.engine.name}"
    _say(f"{of} takes compute={compute.name}: {compute.chosen or 'it was named'}")
    if compute.source:
        _say(f"its source and errors: {' '.join(compute.source.split())}")


_COPIED = {"hw": "8xh100", "model": "qwen3-8b"}  # simple ones; of other groups the first


def _schema(groups: Sequence[str]) -> int:
    from pdsim.config import keys

    if not groups:
        raise ConfigError("--schema needs a group; write pdsim list hw --schema")
    for group in groups:
        _say("\n".join(map(str, keys.named(group))))
        base = plugins.conf() / group / f"{_COPIED.get(group) or plugins.options(group)[0]}.yaml"
        _say(f"begin with a copy of {base} as DIR/{group}/NAME.yaml, and run with --config-dir DIR {group}=NAME")
    return 0


def _own_folders(asked: Mapping[str, Any]) -> list[Path]:
    if "--config-dir" not in asked:
        return []
    from pdsim.config import compose

    return list(compose.CommandLine.of((), asked).folders)


def _doctor(words: Sequence[str]) -> int:
    rest, asked = usage.parse("doctor", words)
    if rest:
        raise ConfigError(f"doctor takes no arguments but --host and --config-dir, got {rest[0]!r}")
    if "--json" in asked and "--host" not in asked:
        raise ConfigError("doctor --json prints what --host measures; write doctor --host --json")
    from pdsim.cli.doctor import host, report

    return _say(host("--json" in asked) if "--host" in asked else report(_own_folders(asked)))


def _completion(words: Sequence[str]) -> int:
    from pdsim.cli.complete import script

    if words:
        raise ConfigError(f"completion takes no arguments, got {words[0]!r}")
    return _say(script())


_MODULES = ("sweep", "calibrate", "probe", "profile", "observe", "diagnose", "recipe")
_DO: Mapping[str, Callable[[Sequence[str]], int]] = {
    "run": _run,
    "validate": _validate,
    "refit": _refit,
    "list": _list,
    "doctor": _doctor,
    "completion": _completion,
    **{name: _of_module(name) for name in _MODULES},
    **{name: _of_folders(name) for name in ("best", "explain", "show", "report", "timeline", "compare", "export")},
}

_KEEP = ("run", "sweep", "calibrate", "probe", "validate", "observe")
"""Commands that keep runs."""


def _say(text: str) -> int:
    if text:
        print(printable(text), flush=True)  # noqa: T201
    return 0


def _fail(status: int, text: str) -> int:
    for line in printable(text).splitlines():
        print(f"pdsim: {line}", file=sys.stderr)  # noqa: T201
    return status


def _explained(error: BaseException) -> int:
    if isinstance(error, ConfigError):
        return _fail(2, str(error))
    if "hydra" in sys.modules:
        from pdsim.config import compose

        if (refusal := compose.explain(error)) is not None:
            return _fail(2, refusal)
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))  # where what a run has left is
    if isinstance(error, PermissionError) and error.filename is not None:
        way_out = "change its permissions, or name another"
        return _fail(1 if notes else 2, f"{error.filename}: {error.strerror}{notes}; {way_out}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return _fail(1, f"{error.strerror}{notes}; make room, or name a folder elsewhere")
    more = "" if isinstance(error, PdsimError) else "; --debug shows where"
    kind = "" if isinstance(error, BackendUnavailable) else f"{type(error).__name__}: "
    return _fail(1, f"{kind}{' '.join(f'{error}{notes}'.split())}{more}")


def _check_packages() -> None:
    home = Path(pdsim.__file__).resolve().parent.parent
    for name in ("conf", "backends", "experiments"):
        spec = find_spec(name)
        folder = Path(spec.origin).resolve().parent if spec is not None and spec.origin else None
        if folder is None or folder.parent != home:
            what = folder or "a folder of that name"
            raise ConfigError(
                f"the package {name!r} of pdsim is hidden by {what}; use the command pdsim, or python -P -m pdsim, "
                f"or run from another directory"
            )
