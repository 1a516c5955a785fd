# SPDX-License-Identifier: Apache-2.0
"""Read traces line by line: Mooncake's JSON lines and Azure's CSV, told apart by content."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from pdsim.core.errors import ConfigError

__all__ = ["Row", "read"]

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


class Row(NamedTuple):
    """One request of a trace.

    Plain and immutable; `pdsim.serving.workload` makes a `Request` of it. Two prompts whose *hash_ids* begin alike
    have those blocks of 512 tokens in common.
    """

    time: float  # seconds after the first
    input: int  # tokens
    output: int  # tokens
    hash_ids: tuple[int, ...] = ()  # of the blocks of its prompt, where the trace has any


class _MooncakeLine(msgspec.Struct):
    """A line of a Mooncake trace."""

    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Line:
    """A line of a trace, and how to complain about it."""

    path: Path
    number: int
    text: str

    def error(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.path}:{self.number}: {reason}; correct or delete the line")


def read(path: Path, context: int) -> Iterator[Row]:
    """Yield the requests of the trace at *path*, arrivals from 0.

    Lines are read as they are needed, so a long trace that is cut is not read to its end.  Raise a `ConfigError`
    with file, line and reason for what is not a request, for times that decrease, and for more than *context*
    tokens.
    """
    try:
        with path.open(encoding="utf-8") as file:
            yield from _checked(_lines(path, file), context)
    except OSError as error:
        raise ConfigError(f"workload.trace={path} cannot be read: {error.strerror}; name a file that can") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"workload.trace={path} is not text: {error.reason}; give JSON lines or CSV") from error
    except ValueError as error:  # of the name: a zero byte
        raise ConfigError(f"workload.trace={str(path)!r} cannot be read: {error}; name a file that can") from error


def _lines(path: Path, file: Iterator[str]) -> Iterator[_Line]:
    for number, text in enumerate(file, start=1):
        if text.strip():
            yield _Line(path, number, text.strip())


def _checked(lines: Iterator[_Line], context: int) -> Iterator[Row]:
    first = next(lines, None)
    if first is None:
        return
    parse = _parser(first)
    origin = previous = None
    for line in lines if parse is _azure else _with(first, lines):
        try:
            time, given, wanted, hash_ids = parse(line)
        except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise line.error(str(error)) from None
        if not (math.isfinite(time) and (previous is None or time >= previous)):
            raise line.error(f"timestamp {time} after {previous}: timestamps must be finite and must not decrease")
        if given < 1 or wanted < 1:
            raise line.error(f"{given} input and {wanted} output tokens: both must be >= 1")
        if given + wanted > context:
            raise ConfigError(
                f"{line.path}:{line.number}: {given} + {wanted} tokens exceed model.context={context}; choose a "
                f"model with a longer context, set model.context, or cut the trace before this line with "
                f"workload.count={line.number - (2 if parse is _azure else 1)}"
            )
        previous = time
        origin = time if origin is None else origin
        yield Row(time - origin, given, wanted, hash_ids)


def _with(first: _Line, rest: Iterator[_Line]) -> Iterator[_Line]:
    yield first
    yield from rest


def _parser(line: _Line) -> Callable[[_Line], tuple[float, int, int, tuple[int, ...]]]:
    if line.text.startswith("{"):
        return _mooncake
    if line.text.lstrip("\ufeff") == AZURE_HEADER:
        return _azure
    raise ConfigError(
        f"{line.path}:{line.number}: neither a Mooncake trace (JSON lines with timestamp, input_length, "
        f"output_length) nor an Azure one (CSV with the header {AZURE_HEADER}); convert the trace to one of them"
    )


_decode_mooncake = msgspec.json.Decoder(_MooncakeLine).decode


def _mooncake(line: _Line) -> tuple[float, int, int, tuple[int, ...]]:
    row = _decode_mooncake(line.text)
    return row.timestamp / 1e3, row.input_length, row.output_length, row.hash_ids


_AZURE_ORIGIN = datetime(2020, 1, 1)
"""Near enough that seconds since then keep the seventh digit."""


def _azure(line: _Line) -> tuple[float, int, int, tuple[int, ...]]:
    fields = line.text.split(",")
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} fields, need the 3 of {AZURE_HEADER}")
    moment = datetime.fromisoformat(fields[0])
    whole = moment.replace(microsecond=0, tzinfo=None) - _AZURE_ORIGIN
    return whole.total_seconds() + _fraction(fields[0]), int(fields[1]), int(fields[2]), ()


def _fraction(text: str) -> float:
    # >>> _fraction("2023-11-16 18:01:51.1630340")
    # 0.163034
    digits = text.rpartition(".")[2] if "." in text else "0"
    return float(f"0.{digits}")
