# SPDX-License-Identifier: Apache-2.0
"""List every command, option, choice, key, recipe and entry point that a user has.

    python -m tools.everything list > tools/everything.txt     # one line each, sorted
    python -m tools.everything compare tools/everything.txt    # what is gone, what is new; fails if anything is gone

Names come from the program: commands and options from its help, choices from ``conf/``, keys from the dataclasses
that type the configuration, recipes from the unmarked blocks of commands in README and ``docs/``, entry points from
pyproject.toml.  Tests run them: recipes in `tests.test_docs`, choices in `tests.test_conf`, keys in
`tests.test_everything`.
"""

import argparse
import re
import sys
import tomllib
import typing
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path

import pdsim
from pdsim.calibration import importers
from pdsim.cli import help as usage
from pdsim.config import Config, ExperimentOptions
from pdsim.config.keys import type_of
from pdsim.core import plugins
from pdsim.core.errors import dataclasses_in
from pdsim.kv.policy import Policy
from pdsim.results.kept import KeptRun
from tools.refit import WHAT

ROOT = Path(__file__).resolve().parents[1]


@cache
def known_keys() -> dict[str, str]:
    """Return every key with its type, as the dataclass has it.

    What stands in a list or a mapping is written ``backend.intra.ramp[].first``.
    """
    keys: dict[str, str] = {}
    _walk(Config, "", keys)
    _walk(Policy, "backend.policy", keys)
    for name in plugins.names(plugins.EXPERIMENTS):
        _walk(ExperimentOptions.class_for({"name": name}), f"experiment({name})", keys)
    return {key: keys[key] for key in sorted(keys)}


def _walk(cls: type, prefix: str, keys: dict[str, str]) -> None:
    hints = typing.get_type_hints(cls)
    for field in fields(cls):
        key = f"{prefix}.{field.name}".lstrip(".")
        below = dataclasses_in(hints[field.name])
        several = str(field.type).startswith(("tuple", "Mapping"))
        if prefix.startswith("experiment"):  # a machine or a model of a report has the keys of hw= and model=
            below = [cls for cls in below if cls.__module__.startswith("experiments.") and cls.__base__ is object]
        if key in ("experiment", "calibration", "policy") or re.search(r"\.sources$|^experiment.*\.name$", key):
            continue  # programs write these; experiments and policies are walked by themselves
        if several or not below:
            keys[key] = type_of(field)
        for each in below:
            _walk(each, f"{key}[]" if several else key, keys)


FORMS = ("svg", "pdf", "png")  # of figures
FOREIGN = {"--save-detailed", "--tensor-parallel-size"}
"""Options of other programs that the help names."""


def verbs() -> Iterator[str]:
    """Yield the commands."""
    yield from (f"verb {verb}" for verb in usage.COMMANDS)


def options() -> Iterator[str]:
    """Yield the options of each command, and the words that take their place."""
    for verb in usage.COMMANDS:
        flags = set(re.findall(r"(?<![\w=/-])--?[a-z][a-z-]*\b", usage.of(verb))) - FOREIGN
        yield from (f"option {verb} {flag}" for flag in {*flags, "--help"})
    yield from (f"option refit {what}" for what in WHAT)
    yield from (f"option calibrate --format={name}" for name in importers.FORMATS)
    yield from (f"option report --format={form}" for form in FORMS)


def choices() -> Iterator[str]:
    """Yield the choices of every configuration group."""
    yield from (f"choice {group}={name}" for group in plugins.groups() for name in plugins.options(group))
    yield from (f"choice experiment/on={path.stem}" for path in (ROOT / "conf/experiment/on").glob("*.yaml"))


def keys() -> Iterator[str]:
    """Yield the configuration keys; those of an experiment are written ``experiment(NAME).KEY``."""
    yield from (f"key {key}" for key in known_keys())


def recipes() -> Iterator[str]:
    """Yield the commands of README and ``docs/`` in blocks without a mark, numbered within their page."""
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))):
        text = page.read_text("utf-8")
        blocks = re.findall(r"(^<!-- [^\n]* -->\n)?^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        lines = "".join(text for mark, text in blocks if not mark).replace("\\\n", " ").splitlines()
        typed = (re.sub(r"\s+# .*", "", line).strip() for line in lines)
        for number, line in enumerate((line for line in typed if line), 1):
            yield f"recipe {page.relative_to(ROOT)} {number:02} {line}"


def python() -> Iterator[str]:
    """Yield the entry points, and the names of the Python interface."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for group, names in project["entry-points"].items():
        yield from (f"entry {group} {name}" for name in names)
    yield from (f"entry console {name}" for name in project["scripts"])
    yield from (f"python pdsim.{name}" for name in pdsim.__all__)
    yield from (f"python KeptRun.{name}" for name in vars(KeptRun) if not name.startswith("_"))


def listed() -> list[str]:
    """Return the lines of the list, sorted."""
    return sorted({*verbs(), *options(), *choices(), *keys(), *recipes(), *python()})


def compare(old: Path) -> int:
    """Print the names that are only in *old*, and only in this tree; return the number of those gone."""
    before, now = set(old.read_text("utf-8").splitlines()), set(listed())
    gone = sorted(before - now)
    for word, lines in (("gone", gone), ("new", sorted(now - before))):
        print("".join(f"{word}: {line}\n" for line in lines), end="")
    print(f"{len(before)} names before, {len(now)} now, {len(gone)} gone")
    return len(gone)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.everything", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("list", "compare"))
    parser.add_argument("old", nargs="?", type=Path, help="compare: a list of another tree")
    options = parser.parse_args(argv)
    if options.command == "compare":
        return 1 if compare(options.old or ROOT / "tools" / "everything.txt") else 0
    print("\n".join(listed()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
