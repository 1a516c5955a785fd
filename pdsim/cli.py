"""The command line: ``pdsim run``, ``calibrate``, ``validate``, ``list`` and ``doctor``, in front of Hydra.

Exit status: 0 all went well, 1 a run failed, 2 what was typed cannot be run (and nothing was written), 130 Ctrl-C.
What a command needs is imported when it is given, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pdsim
from pdsim.errors import ConfigError, PdsimError
from pdsim.overrides import describe, explain, groups, near, options

__all__ = ["main"]

_COMMANDS = {
    "run": "run an experiment, on the model or on a real engine, and keep and print its results",
    "calibrate": "fit an engine's parameters to transfers that it measures, or that a file has, and write them down",
    "validate": "predict held-out points, then measure them on a real engine, and say how far off the predictions are",
    "list": "what there is to choose from: pdsim list, pdsim list hw",
    "doctor": "which engines and devices work on this machine, and what the others need",
}

_HELP = """\
{about}

usage: pdsim COMMAND ...        (or: python -m pdsim COMMAND ...)

{commands}

  pdsim run                                           serve the default trace on a modelled 8 x H20 node
  pdsim run hw=2x8xh20 workload.trace=trace.jsonl     another machine, a trace of your own
  pdsim run target=real hw=loopback                   the same experiment on a real engine, on this machine
  pdsim run --help                                    everything that `run` takes

  --help  --version"""

_RUN_HELP = """\
usage: pdsim run [KEY=VALUE ...] [OPTION ...]

Choose one of each (pdsim list says what each is):
{groups}

Set any key below them, sizes, rates and times with their units:
  hw.nic.rate=400Gbps  kv.pool=20GiB  backend.timeout=5s  parallel.prefill.tp=2  workload.rate=4
  target=model|real    on the SimPy model, or on the real engine (default: model)
  memory=tracked       simulated memory keeps contents, so that transfers are checked (default: timing)
  seed=0               one seed gives one run, bit for bit, on the model
  output=results       folder for the results

Options:
  --cfg job            print the composed configuration, with every key there is, and stop
  -m, --multirun       run every combination of values with commas: pdsim run -m hw=8xh20,8xh200 workload.rate=1,2
                       (in parallel: hydra/launcher=joblib)
  --config-dir DIR     look for more configuration files there: DIR/hw/mybox.yaml is hw=mybox
  --json               print one JSON object instead of tables
  --quiet, -q          print nothing but errors
  --debug              print the traceback of an error (or set PDSIM_DEBUG=1)"""


_CALIBRATE_HELP = """\
usage: pdsim calibrate [KEY=VALUE ...] [OPTION ...]

  pdsim calibrate target=real hw=loopback backend=nixl_shm      measure a grid on the real engine, fit, write
  pdsim calibrate --from out.txt hw=2x8xh100 backend=nixl       fit what nixlbench printed

KEY=VALUE as in pdsim run: hw, backend, target, experiment.operation=read, output, seed.

Options:
  --from FILE       fit these samples instead of measuring: a calibration's CSV, a published table, a tool's output
  --format NAME     of that file, if it does not show: {formats}
  --path NAME       intra or inter: which of the engine's models the samples are about (default: intra on one node)
  --name NAME       of the calibration (default: BACKEND-HW, the name that is chosen by itself)
  --to DIR          where NAME.yaml and NAME.csv are written (default: here; conf/calibration makes them a choice)
  --largest SIZE    bytes of the largest transfer that is measured (default: 256MiB)
  --held N          points that are drawn at random and held out (default: 16)
  --repeat N        transfers of a point, at least; short ones are made up to 50 times (default: 5)
  --jobs N          how often the ranks are started anew; the geometric mean of their medians counts (default: 9)"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in *arguments*, by default those of the process, and return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words or os.environ.get("PDSIM_DEBUG", "0") not in ("", "0")
    signal.signal(signal.SIGTERM, _terminated)
    try:
        _check_packages()
        return _command([word for word in words if word != "--debug"])
    except KeyboardInterrupt:
        return _fail(130, "interrupted; a run that had begun is marked incomplete")
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _explain(error)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    """Turn SIGTERM into an exception, so that processes and files are put away on the way out."""
    raise SystemExit(128 + number)


def _command(words: Sequence[str]) -> int:
    if not words or words[0] in ("--help", "-h", "help"):
        return _say(_help())
    command, *rest = words
    if command in ("--version", "-V"):
        return _say(f"pdsim {pdsim.__version__}")
    if command not in _COMMANDS:
        raise ConfigError(_unknown(command, words))
    if "--help" in rest or "-h" in rest:
        return _say({"run": _run_help, "validate": _run_help, "calibrate": _calibrate_help}.get(command, _help)())
    return {"run": _run, "calibrate": _calibrate, "validate": _validate, "list": _list, "doctor": _doctor}[command](
        rest
    )


def _help() -> str:
    commands = "\n".join(f"  {name:<11}{text}" for name, text in _COMMANDS.items())
    return _HELP.format(about=pdsim.__doc__, commands=commands)


def _run_help() -> str:
    return _RUN_HELP.format(groups="\n".join(f"  {group + '=':<13}{' | '.join(options(group))}" for group in groups()))


def _calibrate_help() -> str:
    from pdsim.calibration.tools import FORMATS

    return _CALIBRATE_HELP.format(formats=", ".join(FORMATS))


def _unknown(command: str, words: Sequence[str]) -> str:
    if "=" in command:
        return f"{command!r} is no command; did you mean pdsim run {' '.join(words)}?"
    for group in ("experiment", "hw"):
        if command in options(group):
            return f"{command!r} is no command; did you mean pdsim run {group}={command}?"
    return f"unknown command {command!r}; {near(command, _COMMANDS)}There are {', '.join(_COMMANDS)}; see pdsim --help"


# --- commands -------------------------------------------------------------------------------------------------------


def _run(words: Sequence[str]) -> int:
    from pdsim.run import run

    own = {"--json", "--quiet", "-q"}
    rest = [word for word in words if word not in own]
    return run(rest, json="--json" in words, quiet=bool({"--quiet", "-q"} & set(words)))


def _calibrate(words: Sequence[str]) -> int:
    from pdsim.calibration.command import calibrate

    if find_spec("scipy") is None:
        raise ConfigError("calibrate needs scipy; pip install 'pdsim[calibrate]'")
    return calibrate(words)


def _validate(words: Sequence[str]) -> int:
    if taken := [word for word in words if word.startswith("experiment=")]:
        raise ConfigError(f"validate is an experiment itself, got {taken[0]}; choose with experiment.classes=[...]")
    return _run(["experiment=validate", *words])


def _list(words: Sequence[str]) -> int:
    if wrong := [word for word in words if word not in groups()]:
        raise ConfigError(f"no group {wrong[0]!r}; {near(wrong[0], groups())}There are {', '.join(groups())}")
    for group in words or groups():
        _say(f"{group}=")
        width = max(16, *map(len, options(group)))
        for option in options(group):
            _say(f"  {option:<{width}} {describe(group, option)}")
    if not words:
        found = sorted({entry.name for entry in entry_points(group="pdsim.backends")})
        _say(f"implementations of backends for target=real: {', '.join(found)} (pdsim doctor: which work here)")
    return 0


def _doctor(words: Sequence[str]) -> int:
    if words:
        raise ConfigError(f"doctor takes no arguments, got {words[0]!r}")
    from pdsim.doctor import report

    return _say(report())


# --- speaking -------------------------------------------------------------------------------------------------------


def _say(text: str) -> int:
    print(text, flush=True)  # noqa: T201
    return 0


def _fail(status: int, text: str) -> int:
    for line in text.splitlines():
        print(f"pdsim: {line}", file=sys.stderr)  # noqa: T201
    return status


def _explain(error: Exception) -> int:
    """Print *error* in one line for each mistake, and return the exit status."""
    if isinstance(error, ConfigError):
        return _fail(2, str(error))
    refusal = explain(error) if "hydra" in sys.modules else None
    if refusal is not None:
        return _fail(2, refusal)
    text = " ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", ()))])
    hint = "" if isinstance(error, PdsimError) else "; --debug shows where"
    return _fail(1, f"{type(error).__name__}: {' '.join(text.split())}{hint}")


def _check_packages() -> None:
    """Raise a `ConfigError` if the working directory hides a package of ours, whose names are everyday words."""
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
