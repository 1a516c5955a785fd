# SPDX-License-Identifier: Apache-2.0
"""Which requests arrive when: read from traces or generated, sessions included, then cut and spread.

Every random choice has a named stream of its own, so that one more draw from one changes nothing in another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.resources import files
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from pdsim.core.errors import ConfigError
from pdsim.core.files import regular
from pdsim.core.units import format_time
from pdsim.serving.requests import HASHED, Request, RequestTable, stream
from pdsim.serving.settings import Workload

__all__ = [
    "EMBEDDED",
    "HASHED",
    "GeneratedRequests",
    "Request",
    "draw",
    "grid",
    "lengths",
    "load",
    "read_trace",
    "sessions",
    "stream",
]

EMBEDDED = "conversation_small.jsonl"
"""The trace in `pdsim/serving/data`, of our own making: Poisson arrivals at a rate that swings between 0.4 and 1.2 a
second, log-normal inputs and outputs with means near 1,400 and 180 tokens, as short chats and some long texts."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GeneratedRequests:
    """Requests in order of arrival, and what a reader of results must know of how they were made."""

    requests: RequestTable
    notes: tuple[str, ...] = ()


def load(workload: Workload, seed: int, context: int) -> RequestTable:
    """Return the requests of `draw`."""
    return draw(workload, seed, context).requests


def draw(workload: Workload, seed: int, context: int) -> GeneratedRequests:
    """Return the requests of *workload*, but for `Workload.load`: see `pdsim.serving.load.scaled`.

    Equal arguments give equal requests on any machine.  Raise a `ConfigError` for a file that cannot be read, for a
    malformed line, for a request of more than *context* tokens, and if no request is left.
    """
    table, notes = _all(workload, seed, context)
    if workload.skip:
        table = table.taken(np.logical_or.accumulate(~(table.arrival < workload.skip)))
        table = table.but(arrival=table.arrival - workload.skip)
    if workload.seconds:
        table = table.taken(np.logical_and.accumulate(table.arrival < workload.seconds))
    table = table[: workload.count]
    if workload.count and len(table) < workload.count and not workload.seconds:
        notes += (f"warning: the trace has {len(table)} requests, fewer than workload.count={workload.count}",)
    if workload.trace is not None or workload.arrivals == "embedded":
        table = table.but(arrival=table.arrival / workload.speed)
    if workload.aborts:
        chances, waits = stream(seed, "workload.aborts"), stream(seed, "workload.patience")
        leaves = chances.random(len(table)) < workload.aborts
        table = table.but(patience=np.where(leaves, waits.exponential(workload.patience, len(table)), np.nan))
    if workload.priority:
        first = stream(seed, "workload.priority").random(len(table)) < workload.priority
        table = table.but(priority=first.astype(np.int64))
    if not table:
        cut = f" after workload.skip={workload.skip:g} s" if workload.skip else ""
        raise ConfigError(f"workload.trace={workload.trace} has no requests{cut}; name a file that has some")
    return GeneratedRequests(table, notes)


def _all(workload: Workload, seed: int, context: int) -> tuple[RequestTable, tuple[str, ...]]:
    if workload.trace is None and workload.arrivals == "sessions":
        users = workload.users
        starts = (
            [workload.ramp * user / users for user in range(users)] if users else _arrivals(workload, seed).tolist()
        )
        return RequestTable.of(sessions(workload, starts, seed, context)), ()
    if workload.tenants:
        return _of_tenants(workload, seed, context)
    if workload.trace is None and workload.arrivals != "embedded":
        return _generate(workload, seed, context)
    path = Path(str(files("pdsim.serving") / "data" / EMBEDDED)) if workload.trace is None else Path(workload.trace)
    requests = read_trace(path, context)
    if workload.jitter == "auto":
        return _spread(RequestTable.of(requests), seed)
    table = RequestTable.of(_needed(requests, workload))
    return table, _gridded(table) if workload.trace else ()


def _gridded(table: RequestTable) -> tuple[str, ...]:
    if not (spacing := grid(table.arrival)):
        return ()
    together = len(table) / len(np.unique(table.arrival))
    return (
        f"warning: arrivals lie on a grid of {format_time(spacing)}, {together:.1f} at a time, which makes bursts; "
        "workload.jitter=auto spreads them",
    )


def _needed(requests: Iterable[Request], workload: Workload) -> Iterator[Request]:
    # Lines after the last that is asked for are not read.
    count, seconds = 0, workload.seconds or math.inf
    for request in requests:
        if request.arrival - workload.skip >= seconds:
            return
        yield request
        count += request.arrival >= workload.skip
        if count == workload.count:
            return


AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_BURSTGPT_HEADERS = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
)

_LINE = 1 << 20
"""Characters of a line; a million tokens have hashes of some 20 KiB."""

_GAP, _SPAN = 7 * 86400.0, 366 * 86400.0
"""Seconds between two requests, and of a trace; each idle day takes a quarter of a second to simulate."""


class _MooncakeLine(msgspec.Struct):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


class _BailianLine(_MooncakeLine):  # whose timestamp is in seconds
    chat_id: int = 0


_BAILIAN_BLOCK = 16
"""Tokens of a hash of a Qwen-Bailian trace."""

_decode_mooncake = msgspec.json.Decoder(_MooncakeLine).decode
_decode_bailian = msgspec.json.Decoder(_BailianLine).decode


def read_trace(path: Path, context: int) -> Iterator[Request]:
    """Yield the requests of the trace at *path*, arrivals from 0.

    It is Mooncake's or Qwen-Bailian's JSON lines, or Azure's or BurstGPT's CSV, told apart by the first line.
    Lines are read as they are needed.  Raise a `ConfigError` with file, line and reason for what is not a request,
    for times that decrease, and for more than *context* tokens.
    """
    try:
        with open(path, encoding="utf-8-sig", opener=regular) as file:
            yield from _parsed(path, iter(lambda: file.readline(_LINE + 1), ""), context)
    except OSError as error:
        raise ConfigError(f"workload.trace={path} cannot be read: {error.strerror}; name a file that can") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"workload.trace={path} is not text: {error.reason}; give JSON lines or CSV") from error
    except ValueError as error:  # of the name: a zero byte
        raise ConfigError(f"workload.trace={str(path)!r} cannot be read: {error}; name a file that can") from error


def _parsed(path: Path, file: Iterable[str], context: int) -> Iterator[Request]:
    parse = origin = previous = None
    count = 0
    for number, line in enumerate(file, start=1):
        text, where = line.strip(), f"{path}:{number}"
        if not text and len(line) <= _LINE:
            continue
        if len(line) > _LINE:
            raise ConfigError(f"{where}: a line of more than {_LINE >> 10} KiB; correct or delete the line")
        if parse is None:
            parse = _parser(text, where)
            if not text.startswith("{"):  # a header
                continue
        try:
            time, given, wanted, hash_ids = parse(text)
        except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{where}: {error}; correct or delete the line") from None
        wrong = ""
        if not (math.isfinite(time) and (previous is None or time >= previous)):
            wrong = f"timestamp {time} after {previous}: timestamps must be finite and must not decrease"
        elif previous is not None and time - previous > _GAP:
            wrong = f"{format_time(time - previous)} after the request before, more than {_GAP / 86400:.0f} days"
        elif origin is not None and time - origin > _SPAN:
            wrong = f"{format_time(time - origin)} after the first request, more than {_SPAN / 86400:.0f} days"
        elif given < 1 or wanted < 1:
            wrong = f"{given} input and {wanted} output tokens: both must be >= 1"
        if wrong:
            raise ConfigError(f"{where}: {wrong}; correct or delete the line")
        if given + wanted > context:
            cut = f"cut the trace before this line with workload.count={count}" if count else "delete the line"
            raise ConfigError(
                f"{where}: {given} + {wanted} tokens exceed model.context={context}; choose a model with a longer "
                f"context, set model.context, or {cut}"
            )
        previous = time
        count += 1
        origin = time if origin is None else origin
        yield Request(time - origin, given, wanted, None, hash_ids)


def _parser(text: str, where: str) -> Callable[[str], tuple[float, int, int, tuple[int, ...]]]:
    header = text.lstrip("\ufeff")
    if text.startswith("{"):
        return _bailian if '"chat_id"' in text else _mooncake
    if header == AZURE_HEADER:
        return _azure
    if header in _BURSTGPT_HEADERS:
        return _burstgpt
    raise ConfigError(
        f"{where}: no trace of Mooncake or Qwen-Bailian (JSON lines with timestamp, input_length, output_length), "
        f"Azure (CSV with the header {AZURE_HEADER}) or BurstGPT (Timestamp,Model,Request tokens,...); convert the "
        "trace to one of them"
    )


def _mooncake(text: str) -> tuple[float, int, int, tuple[int, ...]]:
    row = _decode_mooncake(text)
    return row.timestamp / 1e3, row.input_length, row.output_length, row.hash_ids


def _bailian(text: str) -> tuple[float, int, int, tuple[int, ...]]:
    # Prefixes are compared in blocks of `HASHED` tokens: a block is alike if all its hashes are.
    row, each = _decode_bailian(text), HASHED // _BAILIAN_BLOCK
    hashes = tuple(hash(row.hash_ids[first : first + each]) for first in range(0, len(row.hash_ids), each))
    return row.timestamp, row.input_length, row.output_length, hashes


def _burstgpt(text: str) -> tuple[float, int, int, tuple[int, ...]]:
    fields = text.split(",")
    if len(fields) not in (6, 8):
        raise ValueError(f"{len(fields)} fields, need the 6 or 8 of BurstGPT")
    given, wanted = _tokens(fields[-4]), _tokens(fields[-3])
    if not wanted:
        raise ValueError("a request that failed; take the file without fails")
    return float(fields[0]), given, wanted, ()


def _tokens(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number of tokens") from None


_AZURE_ORIGIN = datetime(2020, 1, 1)
"""Near enough that seconds since then keep the seventh digit."""


def _azure(text: str) -> tuple[float, int, int, tuple[int, ...]]:
    fields = text.split(",")
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} fields, need the 3 of {AZURE_HEADER}")
    try:
        whole = datetime.fromisoformat(fields[0]).replace(microsecond=0, tzinfo=None) - _AZURE_ORIGIN
    except ValueError:
        raise ValueError(f"{fields[0]!r} is not a time such as 2023-11-16 18:15:46.6805900") from None
    fraction = fields[0].partition(".")[2].partition("+")[0] or "0"  # datetime keeps six digits of seven
    return whole.total_seconds() + float(f"0.{fraction}"), _tokens(fields[1]), _tokens(fields[2]), ()


def grid(arrivals: Sequence[float] | Floats) -> float:
    """Return the spacing in seconds of the grid that *arrivals* lie on, 0 if there is none.

    There is one if several requests arrive at a time on average and nearly all gaps are multiples of the median gap
    within a hundredth.

    >>> grid([0.0, 0.0, 3.0, 3.0, 6.0, 6.0]), grid([0.0, 1.0, 2.5])
    (3.0, 0.0)
    """
    times = np.unique(np.asarray(arrivals, dtype=np.float64))
    if len(times) < 3 or len(arrivals) < 2 * len(times):
        return 0.0
    gaps = np.diff(times)
    spacing = float(np.median(gaps))
    off = np.abs(gaps / spacing - np.maximum(1, np.rint(gaps / spacing)))
    return spacing if float(np.mean(off <= 0.01)) >= 0.99 else 0.0


def _spread(requests: RequestTable, seed: int) -> tuple[RequestTable, tuple[str, ...]]:
    spacing = grid(requests.arrival)
    if not spacing:
        return requests, ("workload.jitter=auto: arrivals lie on no grid and stay as they are",)
    arrivals = requests.arrival.copy()
    times, first, counts = np.unique(arrivals, return_index=True, return_counts=True)
    room = np.minimum(np.append(np.diff(times), spacing), spacing)
    shares = stream(seed, "workload.jitter").random(len(arrivals))
    for start, count, most in zip(first.tolist(), counts.tolist(), room.tolist(), strict=True):
        arrivals[start : start + count] += most * np.sort(shares[start : start + count])
    note = (
        f"workload.jitter=auto: arrivals lie on a grid of {format_time(spacing)}, {len(arrivals) / len(times):.1f} "
        f"at a time; each was moved by a random part of that, in order"
    )
    return requests.but(arrival=arrivals), (note,)


def _generate(workload: Workload, seed: int, context: int) -> tuple[RequestTable, tuple[str, ...]]:
    # The tail of a log-normal has no end, the model's context has: what exceeds it is taken from the input.
    arrivals = _arrivals(workload, seed)
    outputs, inputs = stream(seed, "workload.output"), stream(seed, "workload.input")
    wanted = lengths(outputs, len(arrivals), workload.output_mean, workload.output_cv)
    prompts = lengths(inputs, len(arrivals), workload.input_mean, workload.input_cv)
    wanted = np.minimum(wanted, context - 1)
    given = np.minimum(prompts, context - wanted)
    cut = int(np.sum(given < prompts))
    note = (
        f"warning: {cut} of {len(given)} prompts were cut to model.context={context}: their mean is "
        f"{given.mean():.0f} tokens, with workload.input_mean={workload.input_mean:g}"
    )
    return RequestTable(arrivals, given, wanted), (note,) if cut else ()


_TENANT = ("rate", "input_mean", "input_cv", "output_mean", "output_cv")
"""Keys of a tenant that take the place of the workload's."""


def _of_tenants(workload: Workload, seed: int, context: int) -> tuple[RequestTable, tuple[str, ...]]:
    # Each has streams of its own, named after it, so one more tenant changes nothing of another's requests.
    tables, notes = [], []
    for tenant in workload.tenants:
        own = replace(workload, tenants=(), **{key: getattr(tenant, key) for key in _TENANT})
        streams = int(stream(seed, f"workload.tenants.{tenant.name}").integers(1 << 62))
        table, more = _generate(own, streams, context)
        tables.append(table)
        notes += [f"{note} ({tenant.name})" for note in more]
    arrival, given, wanted = (
        np.concatenate([getattr(table, name) for table in tables]) for name in ("arrival", "input", "output")
    )
    which = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    order = np.argsort(arrival, kind="stable")
    ranks = np.array([tenant.priority for tenant in workload.tenants])[which]
    merged = RequestTable(arrival, given, wanted, priority=ranks if ranks.any() else None, tenant=which)
    return merged.taken(order), tuple(notes)


def lengths(random: np.random.Generator, count: int, mean: float, cv: float) -> npt.NDArray[np.int64]:
    """Return log-normal lengths of so many tokens on average, at least 1; *cv* is the coefficient of variation.

    >>> lengths(np.random.default_rng(0), 3, mean=100, cv=0.0).tolist()
    [100, 100, 100]
    """
    variance = math.log1p(cv * cv)
    mu, sigma = math.log(mean) - variance / 2, math.sqrt(variance)
    drawn = _drawn(lambda size: random.lognormal(mu, sigma, size), count)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)


def _arrivals(workload: Workload, seed: int) -> Floats:
    end = workload.skip + workload.seconds
    if workload.count is None and not workload.seconds:
        raise ConfigError(
            f"workload.arrivals={workload.arrivals} has no end; set workload.count=N or workload.seconds=600s"
        )
    count = workload.count or math.ceil(workload.rate * end) + 1
    while True:
        arrivals = _ramped(np.cumsum(_gaps(workload, seed, count)), workload.ramp)
        arrivals = _diurnal(arrivals, workload) if workload.arrivals == "diurnal" else arrivals
        enough = workload.count and int(np.sum(arrivals >= workload.skip)) >= workload.count
        if enough or (workload.seconds and arrivals[-1] >= end):
            return arrivals
        count *= 2


def _ramped(arrivals: Floats, ramp: float) -> Floats:
    if not ramp:
        return arrivals
    return np.where(arrivals < ramp / 2, np.sqrt(2 * ramp * arrivals), arrivals + ramp / 2)


_STEPS = 4096
"""Equal parts of a day; the rate of diurnal arrivals is constant within each."""


def _diurnal(arrivals: Floats, workload: Workload) -> Floats:
    # Arrivals at the mean rate, moved so that the rate is a sine over the day, lowest at its begin.
    swing = (workload.peak - 1) / (workload.peak + 1)
    share = np.linspace(0.0, 1.0, _STEPS + 1)  # of a day, by which this share of its requests has come:
    come = share - swing * np.sin(2 * np.pi * share) / (2 * np.pi)
    days, within = np.divmod(arrivals / workload.day, 1.0)
    return (days + np.interp(within, come, share)) * workload.day


_BLOCK = 1 << 20
"""Numbers drawn at a time: a signal waits until NumPy is done with as many."""


def _drawn(draw: Callable[[int], Floats], count: int) -> Floats:
    return np.concatenate([draw(min(_BLOCK, count - start)) for start in range(0, count, _BLOCK)])


def _gaps(workload: Workload, seed: int, count: int) -> Floats:
    random = stream(seed, "workload.arrivals")
    mean = 1 / workload.rate
    if workload.arrivals in ("poisson", "diurnal", "sessions"):
        return _drawn(lambda size: random.exponential(mean, size), count)
    if workload.arrivals == "gamma":
        shape = workload.cv**-2
        return _drawn(lambda size: random.gamma(shape, mean / shape, size), count)
    return _bursty_gaps(workload, random, count)


def _bursty_gaps(workload: Workload, random: np.random.Generator, count: int) -> Floats:
    # Bursts of exponential length have *burst* times the mean rate, and pauses are as much longer as keeps the mean.
    # Within a burst the process is Poisson, so its gaps are those of busy time; pauses fall in between.
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


# Users wait for an answer and think before they ask again: a closed loop, whose load is not known beforehand.
# The prompt of a turn is the whole session so far, answers included, and new tokens, so `hash_ids` of a session's
# prompts begin alike, and those of all sessions do within `Workload.shared` tokens.

_SESSION_BLOCKS = 1 << 20
"""Numbers of blocks for each session."""


def sessions(workload: Workload, starts: Sequence[float], seed: int, context: int) -> list[Request]:
    """Return `Workload.count` requests of sessions of `Workload.turns` turns; a user's first is at one of *starts*.

    With `Workload.users` each of them begins a session when the one before is over; otherwise every start is a user
    of one session.  A session whose next prompt and answer would exceed *context* ends early: a new one begins.
    """
    count = workload.count
    if count is None:
        raise ConfigError("workload.arrivals=sessions has no end; set workload.count=N, requests of all users")
    new = lengths(stream(seed, "workload.input"), count, workload.input_mean, workload.input_cv).tolist()
    answers = lengths(stream(seed, "workload.output"), count, workload.output_mean, workload.output_cv).tolist()
    thinks = stream(seed, "workload.think").exponential(workload.think, count).tolist() if workload.think else [0.0]
    users = workload.users or math.ceil(count / workload.turns)
    turn, said, session = [0] * users, [0] * users, list(range(users))
    requests: list[Request] = []
    for number in range(count):
        # users take turns, or those of one session follow one another
        user, back = (number % users, users) if workload.users else (number // workload.turns, 1)
        first = number < users if workload.users else number % workload.turns == 0
        prompt = (said[user] or workload.shared) + new[number]
        if turn[user] == workload.turns or prompt + answers[number] > context:
            turn[user], session[user] = 0, session[user] + users
            prompt = workload.shared + new[number]
        prompt = min(prompt, context - 1)
        answer = min(answers[number], context - prompt)
        arrival = starts[user] if first else thinks[number % len(thinks)]
        blocks = tuple(_block(session[user], index, workload.shared) for index in range(-(-prompt // HASHED)))
        requests.append(Request(arrival, prompt, answer, None, blocks, -1 if first else number - back))
        turn[user], said[user] = turn[user] + 1, prompt + answer
    return requests


def _block(session: int, index: int, shared: int) -> int:
    # Blocks within *shared* tokens are alike in all sessions.
    return index if (index + 1) * HASHED <= shared else (session + 1) * _SESSION_BLOCKS + index
