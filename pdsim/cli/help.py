# SPDX-License-Identifier: Apache-2.0
"""The help page of each command, and the parser of the options that the page lists.

Most words of a command line are Hydra's overrides, which argparse does not know.  So `parse` reads the options from
the page: the documented options are those parsed and completed.  A new command has a line in `COMMANDS`, a page in
the folder `pages`, and a function in `pdsim.cli.main`.  Nothing heavy is imported here: ``--help`` answers at once.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pdsim
from pdsim.core.errors import ConfigError, near
from pdsim.core.files import shown
from pdsim.core.plugins import groups, options

COMMANDS = {
    "run": "run an experiment on the model or on a real engine, and keep its results",
    "sweep": "run every combination of values, on all cores, Ray or Slurm; repeat the command to resume",
    "best": "rank the points of a sweep by goodput per GPU under an SLO",
    "explain": "show what limits a run, or why two runs differ",
    "report": "write an HTML page with the figures of a run, a sweep or a validation; or one as SVG, PDF, PNG",
    "timeline": "write a trace of one or more runs for ui.perfetto.dev",
    "show": "print the results of a kept run or sweep",
    "compare": "print the metrics of several runs side by side, and the keys that differ",
    "export": "write a run in the formats of AIPerf, nixlbench, or the metrics of vLLM and SGLang",
    "calibrate": "measure transfers of an engine, or read them from a file, and write a calibration",
    "refit": "fit shipped numbers again from their samples, and print the errors",
    "probe": "measure in ten minutes what works on this machine, and write one file to contribute",
    "profile": "measure the operators of a model on a GPU, and write a file for compute=",
    "validate": "predict transfers and requests, measure them on a real engine, and print the errors",
    "observe": "turn the logs of a deployment into a workload and a measured run",
    "diagnose": "say why measured transfers are slow: TCP, wire, host, polling",
    "recipe": "turn a command line or YAML of vLLM, SGLang, Dynamo or llm-d into a configuration, and back",
    "list": "list the choices of each group: pdsim list, pdsim list hw",
    "doctor": "list the engines and devices that work on this machine, and what the others need",
    "completion": "print the shell code that completes commands, groups and keys",
}


@cache
def _page(name: str) -> str:
    return (Path(__file__).parent / "pages" / f"{name}.txt").read_text(encoding="utf-8").removesuffix("\n")


def overview() -> str:
    """Return the help of the program."""
    commands = "\n".join(f"  {name:<11}{COMMANDS[name]}" for name in COMMANDS)
    return _page("overview").format(about=pdsim.__doc__, commands=commands)


def of(command: str) -> str:
    """Return the help of *command*, one of `COMMANDS`, with the groups and formats that packages add."""
    page = _page(command)
    if command == "run":
        return page.format(
            groups="\n".join(f"  {group + '=':<13}{' | '.join(options(group))}" for group in groups())
        )
    if command in ("calibrate", "diagnose"):
        from pdsim.calibration.importers import FORMATS

        return page.format(formats=", ".join(FORMATS))
    return page.format(groups=", ".join(groups())) if command == "list" else page


# --- options -------------------------------------------------------------------------------------------------------

_LONG = {
    "-v": "--verbose", "-q": "--quiet", "-o": "--output", "-m": "--multirun", "-c": "--cfg", "-cd": "--config-dir",
    "-cn": "--config-name", "-cp": "--config-path",
}  # fmt: skip


@cache
def flags(command: str) -> Mapping[str, str]:
    """Return the options of *command* by long name, with the placeholder of their value; "" if they take none.

    >>> flags("best")
    {'--slo': 'ttft=2s,tpot=30ms', '--verbose': '', '--json': ''}
    """
    usage, _, rest = _page(command).partition("\n\n")
    listed = re.findall(r"(?<![\w-])(--?[a-z][\w-]*)(?: ([^\s\]]+))?", usage)
    listed += re.findall(r"^  (--?[a-z][\w-]*)(?:, -\w+|, --\w+)?(?: (\S+))?(?: {2,}|$)", rest, re.MULTILINE)
    return {_LONG.get(name, name): value for name, value in listed if name not in ("--info", "--help")}


def parse(command: str, words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split *words* into overrides or folders, in their order, and the values of options by their long names.

    Raise a `ConfigError` for an unknown option, with the nearest known one, for an option without its value, and for
    a value of another type.

    >>> parse("calibrate", ["hw=loopback", "--jobs", "2"])
    (['hw=loopback'], {'--jobs': 2})
    """
    known, rest, values = flags(command), list[str](), dict[str, Any]()
    left = iter(words)
    for word in left:
        if not word.startswith("-"):
            rest.append(word)
            continue
        short, equals, text = word.partition("=")
        name = _LONG.get(short, short)
        if name not in known:
            hint = near(name, known) or "keys are written KEY=VALUE, without dashes; "
            if short[2:] in groups():  # a choice, not an option
                hint = f"write {short[2:]}={text or next(left, 'NAME')}, or "
            raise ConfigError(f"unknown option {shown(short)}; {hint}see pdsim {command} --help")
        if not known[name]:
            values[name] = True
            continue
        if not equals and (text := next(left, "")) == "":
            raise ConfigError(f"{name} needs a value after it; see pdsim {command} --help")
        try:
            value = _converted(known[name].partition(".")[0], text)
        except ValueError as error:
            raise ConfigError(f"{name} {text}: {error}") from error
        values[name] = (*values.get(name, ()), value) if name == "--zip" else value
    return rest, values


def plain_name(option: str, text: str) -> str:
    """Return *text*, the name of a file that *option* gives; raise a `ConfigError` if it is a path or has blanks."""
    if text and not re.fullmatch(r"[\w.-]+", text):
        raise ConfigError(
            f"{option} {text}: must be letters, digits, dots, hyphens and underscores; the folder is --to"
        )
    return text


def _converted(kind: str, text: str) -> Any:
    if kind in ("SIZE", "TIME"):
        from pdsim.core import units  # 8 ms, which --help does without

        return (units.parse_size if kind == "SIZE" else units.parse_time)(text)
    if kind == "N" and not text.isdecimal():
        raise ValueError("must be a whole number >= 0")
    return int(text) if kind == "N" else Path(text) if kind in ("FILE", "DIR") else text
