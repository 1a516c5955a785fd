# SPDX-License-Identifier: Apache-2.0
"""The process of a command: what signals do to it from its start to its end, and what may write to its output.

Ctrl-C is one line and an exit status of ours at any time, before anything has begun and after all is done too.  So
this module is imported before all others, and imports next to nothing.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TextIO


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while a command is at work.

    A class of its own: CPython remembers a plain `KeyboardInterrupt` that leaves code compiled from a string, as the
    methods of a dataclass are, and ends ``python -m`` by SIGINT afterwards, whatever status the command has
    returned.
    """


def beginning() -> None:
    """From now on Ctrl-C ends the process at once, unless it is ignored: nothing has been written or started yet."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def begun() -> None:
    """From now on Ctrl-C is an `Interrupted`, a `KeyboardInterrupt`, which puts away what there is."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _interrupt)


def ended() -> None:
    """From now on Ctrl-C is ignored, if there is no thread to wait for."""
    if signal.getsignal(signal.SIGINT) in (_end, _interrupt) and threading.active_count() == 1:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def terminable() -> None:
    """From now on SIGTERM is a `SystemExit` of 143, so that processes and files are put away on the way out."""
    signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, frame: FrameType | None) -> None:
    if not _later(frame, _terminated, number):
        raise SystemExit(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _later(frame, _interrupt, number):
        raise Interrupted


def _later(frame: FrameType | None, handle: Callable[[int, FrameType | None], None], number: int) -> bool:
    # What is imported may swallow an exception, as Cython's modules do, so an import that is under way ends first.
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            signal.signal(signal.SIGALRM, lambda _, then: handle(number, then))
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return True
        frame = frame.f_back
    return False


def _end(*_: object) -> NoReturn:
    os.write(2, b"pdsim: interrupted before anything had begun\n")
    raise SystemExit(130)


@contextmanager
def only_json(json: bool) -> Iterator[TextIO]:
    """Yield standard output; with *json*, other output, that of engines included, goes to standard error."""
    if not json:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as out:
            yield out
    finally:
        os.dup2(kept, 1)
        os.close(kept)
