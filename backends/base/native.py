# SPDX-License-Identifier: Apache-2.0
"""What native engines take from and leave in the process: environment variables in, log lines out."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from pdsim.core.errors import ConfigError

__all__ = ["captured_stderr", "installed", "prepare"]


def prepare(engine: str, needed: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Set what *engine* needs, and *defaults* where the user has not set anything; return what now holds.

    Raise a `ConfigError` if the user's environment contradicts what is needed.

    Must be called before the library is loaded: native libraries read their environment once.  Variables stay set
    for the process, which runs one rank only.
    """
    for name, value in needed.items():
        if os.environ.get(name, value) != value:
            raise ConfigError(
                f"backend {engine!r} needs {name}={value}, but the environment has {name}={os.environ[name]}; "
                f"unset it, or choose another backend"
            )
    for name, value in {**defaults, **needed}.items():
        os.environ.setdefault(name, value)
    return {name: os.environ[name] for name in (*defaults, *needed)}


def installed(*distributions: str) -> str:
    """Return the version of the first of *distributions* that is installed, or "of unknown version"."""
    for name in distributions:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return "of unknown version"


@contextlib.contextmanager
def captured_stderr() -> Iterator[Callable[[], str]]:
    """Copy what native code writes to the standard error stream; yield a function that returns it afterwards.

    The text is passed on to the original stream afterwards.  Works on the file descriptor, so it sees C and C++; not
    safe for two threads at a time.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as file:
        original = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            text = ""
            yield lambda: text
        finally:
            os.dup2(original, 2)
            os.close(original)
            file.seek(0)
            text = file.read().decode(errors="replace")
            os.write(2, text.encode())
