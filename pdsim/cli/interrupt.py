"""Ctrl-C before anything has begun: one line and the exit status 130, instead of a traceback out of an import.

A module of its own because it is imported before all others, and imports next to nothing.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

__all__ = ["beginning", "begun"]


def beginning() -> None:
    """From now on Ctrl-C ends the process at once, unless it is ignored: nothing has been written or started yet."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def begun() -> None:
    """From now on Ctrl-C is a `KeyboardInterrupt` again, which puts away what there is."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001
    os.write(2, b"pdsim: interrupted before anything had begun\n")
    raise SystemExit(130)
