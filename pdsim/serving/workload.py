"""Which requests arrive when: traces, read line by line, and generated arrivals.

Every source of chance is a stream of its own, named, so that one more draw from one changes nothing in another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pdsim.errors import ConfigError
from pdsim.serving.settings import Workload

__all__ = ["EMBEDDED", "HASHED", "Request", "load", "stream"]

EMBEDDED = "conversation_small.jsonl"
"""The trace in `pdsim/serving/data`, made by `generate.py` beside it."""

HASHED = 512
"""Tokens of a block that one of a Mooncake trace's `hash_ids` names."""

Floats = npt.NDArray[np.float64]
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


class Request(NamedTuple):
    """One request."""

    arrival: float  # seconds after the first could arrive
    input: int  # tokens
    output: int  # tokens, the first included
    patience: float | None = None  # seconds after its arrival at which its user leaves; None stays to the end
    hash_ids: tuple[int, ...] = ()  # of its prompt's blocks of `HASHED` tokens: equal ids are equal tokens


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the stream of random numbers called *name*: the same for one seed and name, whatever else is drawn."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *name.encode()])))


def load(
    workload: Workload, seed: int, context: int, progress: Callable[[float, str], None] = lambda *_: None
) -> list[Request]:
    """Return the requests of *workload* in order of arrival; *progress* is told how many have been drawn.

    Raise a `ConfigError` for a file that cannot be read, for a malformed line (with file, line and reason), and for a
    request of more than *context* tokens.
    """
    if workload.trace is None and workload.arrivals != "embedded":
        requests = iter(_generate(workload, seed, context, progress))
    elif workload.trace is None:
        requests = _read(Path(str(files("pdsim.serving") / "data" / EMBEDDED)), context)
    else:
        requests = _read(Path(workload.trace), context)
    if workload.trace is not None or workload.arrivals == "embedded":
        requests = (request._replace(arrival=request.arrival / workload.speed) for request in requests)
    found = _impatient(list(islice(requests, workload.count)), workload, seed)
    if not found:
        raise ConfigError(f"workload.trace={workload.trace} has no requests; name a file that has some")
    return found


def _impatient(requests: list[Request], workload: Workload, seed: int) -> list[Request]:
    """Return *requests*, some of which have users who leave.  More requests change nothing for those before."""
    if not workload.aborts:
        return requests
    chances, waits = stream(seed, "workload.aborts"), stream(seed, "workload.patience")
    drawn = zip(
        chances.random(len(requests)).tolist(),
        waits.exponential(workload.patience, len(requests)).tolist(),
        strict=True,
    )
    return [
        request._replace(patience=wait) if chance < workload.aborts else request
        for request, (chance, wait) in zip(requests, drawn, strict=True)
    ]


# --- traces ---------------------------------------------------------------------------------------------------------


class _MooncakeLine(msgspec.Struct):
    """What is used of a line of a Mooncake trace; only real servers see `hash_ids`: no prefix cache is modelled."""

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


def _read(path: Path, context: int) -> Iterator[Request]:
    """Yield the requests of the trace at *path*, arrivals from 0."""
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


def _checked(lines: Iterator[_Line], context: int) -> Iterator[Request]:
    first = next(lines, None)
    if first is None:
        return
    parse = _parser(first)
    origin = previous = None
    for line in lines if parse is _azure else _with(first, lines):
        try:
            time, given, wanted, *hashes = parse(line)
        except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise line.error(str(error)) from None
        if not (math.isfinite(time) and (previous is None or time >= previous)):
            raise line.error(f"timestamp {time} after {previous}: timestamps must be finite and must not decrease")
        if given < 1 or wanted < 1:
            raise line.error(f"{given} input and {wanted} output tokens: both must be >= 1")
        if given + wanted > context:
            raise ConfigError(
                f"{line.path}:{line.number}: {given} + {wanted} tokens exceed model.context={context}; choose a model "
                "with a longer context, set model.context, or cut the trace before this line with workload.count="
                f"{line.number - (2 if parse is _azure else 1)}"
            )
        previous = time
        origin = time if origin is None else origin
        yield Request(time - origin, given, wanted, None, *hashes)


_Parsed = tuple[float, int, int] | tuple[float, int, int, tuple[int, ...]]
"""Time in seconds, input and output tokens and, of a Mooncake trace, the ids of the prompt's blocks."""


def _with(first: _Line, rest: Iterator[_Line]) -> Iterator[_Line]:
    yield first
    yield from rest


def _parser(line: _Line) -> Callable[[_Line], _Parsed]:
    if line.text.startswith("{"):
        return _mooncake
    if line.text.lstrip("\ufeff") == AZURE_HEADER:
        return _azure
    raise ConfigError(
        f"{line.path}:{line.number}: neither a Mooncake trace (JSON lines with timestamp, input_length, output_length) "
        f"nor an Azure one (CSV with the header {AZURE_HEADER}); convert the trace to one of them"
    )


_decode_mooncake = msgspec.json.Decoder(_MooncakeLine).decode


def _mooncake(line: _Line) -> _Parsed:
    found = _decode_mooncake(line.text)
    return found.timestamp / 1e3, found.input_length, found.output_length, found.hash_ids


_AZURE_ORIGIN = datetime(2020, 1, 1)
"""Near enough that seconds since then keep the seventh digit."""


def _azure(line: _Line) -> _Parsed:
    fields = line.text.split(",")
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} fields, need the 3 of {AZURE_HEADER}")
    moment = datetime.fromisoformat(fields[0])
    whole = moment.replace(microsecond=0, tzinfo=None) - _AZURE_ORIGIN
    return whole.total_seconds() + _fraction(fields[0]), int(fields[1]), int(fields[2])


def _fraction(text: str) -> float:
    """Return the part of a second in *text*, of which `datetime` keeps six of the seven digits."""
    digits = text.rpartition(".")[2] if "." in text else "0"
    return float(f"0.{digits}")


# --- generated ------------------------------------------------------------------------------------------------------


def _generate(workload: Workload, seed: int, context: int, progress: Callable[[float, str], None]) -> list[Request]:
    if workload.count is None:
        raise ConfigError(f"workload.arrivals={workload.arrivals} has no end; set workload.count=N")
    count = workload.count
    arrivals = np.cumsum(_gaps(workload, seed, count))
    outputs, inputs = stream(seed, "workload.output"), stream(seed, "workload.input")
    found: list[Request] = []
    for size in _blocks(count):
        output = _lengths(outputs, size, workload.output_mean, workload.output_cv)
        given = _lengths(inputs, size, workload.input_mean, workload.input_cv)
        output = np.minimum(output, context - 1)
        given = np.minimum(given, context - output)  # the tail of a log-normal has no end, the model's context has
        times = arrivals[len(found) : len(found) + size]
        progress(0.0, f"drawing request {len(found)} of {count}")
        found += [Request(*row) for row in zip(times.tolist(), given.tolist(), output.tolist(), strict=True)]
    return found


_BLOCK = 1 << 20
"""Requests drawn at a time: a signal waits until NumPy is done with as many."""


def _blocks(count: int) -> Iterator[int]:
    for start in range(0, count, _BLOCK):
        yield min(_BLOCK, count - start)


def _drawn(draw: Callable[[int], Floats], count: int) -> Floats:
    """Return *count* numbers, those that one call of *draw* gives."""
    found = np.empty(count)
    start = 0
    for size in _blocks(count):
        found[start : start + size] = draw(size)
        start += size
    return found


def _gaps(workload: Workload, seed: int, count: int) -> Floats:
    """Return the seconds before each arrival, of mean ``1 / rate``."""
    random = stream(seed, "workload.arrivals")
    mean = 1 / workload.rate
    if workload.arrivals == "poisson":
        return _drawn(lambda size: random.exponential(mean, size), count)
    if workload.arrivals == "gamma":
        shape = workload.cv**-2
        return _drawn(lambda size: random.gamma(shape, mean / shape, size), count)
    return _bursty_gaps(workload, random, count)


def _bursty_gaps(workload: Workload, random: np.random.Generator, count: int) -> Floats:
    """Return the gaps of a Poisson process whose rate switches between a burst's and none.

    Bursts of exponential length have *burst* times the mean rate, and pauses are as much longer as keeps the mean.
    Within a burst the process is Poisson, so its gaps are those of busy time; pauses fall in between.
    """
    mean = 1 / (workload.rate * workload.burst)
    busy = np.cumsum(_drawn(lambda size: random.exponential(mean, size), count))
    arrivals = np.empty(count)
    pause, end, index = 0.0, 0.0, 0
    while index < count:
        end += random.exponential(workload.burst_length)
        stop = int(np.searchsorted(busy, end))
        arrivals[index:stop] = busy[index:stop] + pause
        pause += random.exponential(workload.burst_length * (workload.burst - 1))
        index = max(index, stop)
    return np.diff(arrivals, prepend=0.0)


def _lengths(random: np.random.Generator, count: int, mean: float, cv: float) -> npt.NDArray[np.int64]:
    """Return log-normal lengths of so many tokens on average, at least 1."""
    variance = math.log1p(cv * cv)
    drawn = random.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)
