# SPDX-License-Identifier: Apache-2.0
"""What the shell completes after ``pdsim``: commands, options, choices of groups, keys, folders of runs.

The work is argcomplete's (extra ``completion``), which takes an argparse parser; this one describes
the command line and parses nothing.  ``eval "$(pdsim completion)"`` turns it on in bash and zsh.

Options are found in the help pages, so that what can be completed is what is documented.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pdsim.cli import help as usage
from pdsim.core import plugins
from pdsim.core.errors import ConfigError

__all__ = ["complete", "parser", "script", "values"]

_OVERRIDES = ("run", "sweep", "validate", "calibrate")
_FOLDERS = ("report", "best", "explain", "compare")


def script() -> str:
    """Return what the shell evaluates to complete ``pdsim``.  Raise a `ConfigError` without argcomplete."""
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        raise ConfigError("completion needs argcomplete; pip install 'pdsim[completion]'") from None
    text: str = shellcode(["pdsim"])
    return text.strip()


def complete() -> None:
    """Answer the shell, which asks through the environment, and end the process; without argcomplete do nothing."""
    try:
        import argcomplete
    except ImportError:
        return
    argcomplete.autocomplete(parser(), always_complete_options=False)


def parser() -> argparse.ArgumentParser:
    """Return the command line as argparse has it: a sub-command each, its options, and what completes its words."""
    top = argparse.ArgumentParser(prog="pdsim", add_help=False)
    below = top.add_subparsers()
    for command in usage.COMMANDS:
        one = below.add_parser(command, add_help=False)
        for flag in usage.flags("run" if command == "validate" else command):
            action = one.add_argument(flag, nargs="?")
            action.completer = _folders if flag == "--config-dir" else None  # type: ignore[attr-defined]
        words = one.add_argument("words", nargs="*")
        if command in _OVERRIDES:
            words.completer = values  # type: ignore[attr-defined]
        elif command in _FOLDERS:
            words.completer = _folders  # type: ignore[attr-defined]
        elif command == "list":
            words.completer = _groups  # type: ignore[attr-defined]
    return top


def values(prefix: str, **_: Any) -> list[str]:
    """Return the overrides that begin with *prefix*: groups and keys with ``=``, after it the choices of a group.

    >>> values("hw=2xh")
    ['hw=2xh200']
    """
    key, equals, value = prefix.partition("=")
    if equals:
        done, comma, _last = value.rpartition(",")  # of a sweep
        candidates = [f"{key}={done}{comma}{name}" for name in _choices(key)]
    else:
        candidates = [f"{group}=" for group in plugins.groups()]
        candidates += [f"{name}=" for name in ("target", "memory", "seed", "output")]
        if "." in prefix:
            candidates += [f"{name}=" for name in _keys()]
        else:
            candidates += sorted({f"{name.split('.')[0]}." for name in _keys() if "." in name}) if prefix else []
    return [word for word in candidates if word.startswith(prefix)]


def _choices(key: str) -> tuple[str, ...] | list[str]:
    fixed = {"target": ("model", "real", "live"), "memory": ("timing", "tracked")}
    return fixed.get(key) or plugins.options(key)


def _keys() -> list[str]:
    from pdsim.config import keys

    return [key.name for key in keys.known()]


def _groups(prefix: str, **_: Any) -> list[str]:
    return [group for group in plugins.groups() if group.startswith(prefix)]


def _folders(prefix: str, **_: Any) -> list[str]:
    head, slash, _tail = prefix.rpartition("/")
    where = Path(f"{head}{slash}" or ".")
    try:
        names = sorted(path.name for path in where.iterdir() if path.is_dir())
    except OSError:
        return []
    return [f"{head}{slash}{name}/" for name in names if not name.startswith(".")]
