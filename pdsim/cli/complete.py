# SPDX-License-Identifier: Apache-2.0
"""What the shell completes after ``pdsim``: commands, options, choices of groups, keys, folders of runs.

The work is argcomplete's (extra ``completion``), which takes an argparse parser; this one describes the command line
and parses nothing.  ``eval "$(pdsim completion)"`` turns it on in bash and zsh.
"""

import argparse
from pathlib import Path
from typing import Any

from pdsim.cli import help as usage
from pdsim.core import plugins


def script() -> str:
    """Return what the shell evaluates to complete ``pdsim``.  Raise a `ConfigError` without argcomplete."""
    plugins.require("completion", "completion", "argcomplete")
    from argcomplete.shell_integration import shellcode

    return str(shellcode(["pdsim"])).strip()


def complete() -> None:
    """Answer the shell, which asks through the environment, and end the process; without argcomplete do nothing."""
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser(), always_complete_options=False)


def parser() -> argparse.ArgumentParser:
    """Return the command line as argparse has it: a sub-command each, its options, and what completes its words."""
    completers = dict.fromkeys(("run", "sweep", "validate", "calibrate"), values) | {"list": _groups}
    completers |= dict.fromkeys(("report", "best", "explain", "compare"), _folders)
    top = argparse.ArgumentParser(prog="pdsim", add_help=False)
    below = top.add_subparsers()
    for command in usage.COMMANDS:
        one = below.add_parser(command, add_help=False)
        for flag in usage.flags("run" if command == "validate" else command):
            action = one.add_argument(flag, nargs="?")
            action.completer = _folders if flag == "--config-dir" else None  # type: ignore[attr-defined]
        words = one.add_argument("words", nargs="*")
        if command in completers:
            words.completer = completers[command]  # type: ignore[attr-defined]
    return top


def values(prefix: str, **_: Any) -> list[str]:
    """Return the overrides that begin with *prefix*: groups and keys with ``=``, after it the choices of a group.

    >>> values("hw=2xh")
    ['hw=2xh200']
    """
    key, equals, value = prefix.partition("=")
    if equals:
        done, comma, _last = value.rpartition(",")  # of a sweep
        fixed = {"target": ("model", "real", "live"), "memory": ("timing", "tracked")}
        candidates = [f"{key}={done}{comma}{name}" for name in fixed.get(key) or plugins.options(key)]
    else:
        candidates = [f"{name}=" for name in (*plugins.groups(), "target", "memory", "seed", "output")]
        if prefix:
            from pdsim.config import keys

            dotted = [known.name for known in keys.known() if "." in known.name]
            if "." in prefix:
                candidates += [f"{name}=" for name in dotted]
            else:
                candidates += sorted({f"{name.split('.')[0]}." for name in dotted})
    return [word for word in candidates if word.startswith(prefix)]


def _groups(prefix: str, **_: Any) -> list[str]:
    return [group for group in plugins.groups() if group.startswith(prefix)]


def _folders(prefix: str, **_: Any) -> list[str]:
    head, slash, _tail = prefix.rpartition("/")
    try:
        names = sorted(path.name for path in Path(f"{head}{slash}" or ".").iterdir() if path.is_dir())
    except OSError:
        return []
    return [f"{head}{slash}{name}/" for name in names if not name.startswith(".")]
