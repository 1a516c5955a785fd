# SPDX-License-Identifier: Apache-2.0
"""Guards of sense: numbers without their unit, and quantities that no machine, model or workload has.

Both find slips of the keyboard, not errors of logic: ``hw.nic.rate=400`` is 400 bytes a second to
the code and 400 Gbps to whoever wrote it.  What a file says in base units is taken as it is;
`BOUNDS` hold wherever a value comes from.

Which numbers are rates, times or sizes is read from the annotations of the configuration's
dataclasses (`pdsim.core.units.Rate` and so on), so a new key is guarded without a word here; `BOUNDS`
need a row for it only if they are to say what is plausible.
"""

from __future__ import annotations

import math
import re
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from pdsim.calibration.definition import covers
from pdsim.config import Config
from pdsim.core import units
from pdsim.core.errors import ConfigError

__all__ = ["BOUNDS", "Quantity", "check"]

_DAY = 86400.0
_MONTH = 30 * _DAY
_FEW, _MANY = 1, 10**5  # of what is counted in a machine or a model
_LOOK = "or set check.plausible=false to take it as it is"

BOUNDS: tuple[tuple[str, float, float, float], ...] = (
    # key, least, usual, most, in SI units: an order of magnitude or more beyond anything that is built or thought of
    ("hw.nodes", _FEW, 2, _MANY),
    ("hw.gpus", _FEW, 8, 1024),
    ("hw.gpu.memory", 2**26, 80 * 2**30, 2**44),
    ("hw.gpu.memory_rate", 1e9, 3e12, 1e15),
    ("hw.gpu.compute", 1e10, 5e14, 1e18),
    ("hw.gpu.pcie", 1e8, 5e10, 1e13),
    ("time:hw.*.copies.*", 1e-12, 5e-6, 0.1),
    ("hw.*.idle_after", 1e-9, 1e-3, _DAY),
    ("hw.gpu.idle_wake", 1e-9, 1e-5, 1.0),
    ("hw.interconnect.rate", 1e8, 4.5e11, 1e14),
    ("hw.interconnect.latency", 1e-10, 1e-6, 0.01),
    ("hw.nic.count", _FEW, 8, 1024),
    ("hw.nic.rate", 1e6, 5e10, 1e13),
    ("hw.nic.latency", 1e-10, 2e-6, 1.0),
    ("hw.host.memory", 2**24, 2**40, 2**50),
    ("hw.host.memory_rate", 1e8, 2e11, 1e14),
    ("hw.host.tcp_rate", 1e3, 2.5e9, 1e13),
    ("hw.host.tcp_latency", 1e-9, 5e-5, 10.0),
    ("hw.host.wake", 1e-9, 1e-5, 1.0),
    ("hw.host.idle_wake", 1e-9, 1e-5, 1.0),
    ("hw.link.rate*", 125.0, 1.25e7, 1e13),
    ("hw.link.back", 125.0, 1.25e7, 1e13),
    ("hw.link.delay", 1e-9, 5e-3, 100.0),
    ("hw.link.timeout", 1e-6, 0.2, 3600.0),
    ("hw.link.backlog", 576, 2**24, 2**40),
    ("hw.link.window", 576, 2**22, 2**40),
    ("hw.link.initial", _FEW, 10, _MANY),
    ("hw.link.changes.start", 1e-9, 2.0, _MONTH),
    ("hw.link.changes.end", 1e-9, 2.0, _MONTH),
    ("backend.int??.queues", _FEW, 4, _MANY),
    ("backend.int??.line", 1e3, 4.5e11, 1e14),
    ("backend.int??.*rate", 1e3, 5e10, 1e14),
    ("backend.int??.small.bytes", 1, 2**16, 2**40),
    ("backend.int??.depth", _FEW, 128, 10**7),
    ("backend.int??.lanes", _FEW, 16, 10**7),
    ("backend.int??.ramp.first", _FEW, 64, 10**7),
    ("backend.int??.small.descriptors", _FEW, 16, 10**7),
    ("time:backend.int??.*descriptor", 1e-12, 5e-6, 0.1),
    ("time:backend.int??.*", 1e-12, 5e-6, 1.0),
    ("backend.timeout", 1e-6, 30.0, _MONTH),
    ("collective.*.copies", _FEW, 1, 100),
    ("collective.*rate", 1e3, 3e11, 1e14),
    ("collective.pool", 2**10, 2**32, 2**44),
    ("collective.timeout", 1e-6, 30.0, _MONTH),
    ("collective.grow_latency", 1e-9, 1e-3, 60.0),
    ("time:collective.*", 1e-12, 2e-5, 10.0),
    ("model.parameters", 1e4, 3e10, 1e15),
    ("model.active", 1e4, 3e10, 1e15),
    ("model.context", 2, 131072, 10**9),
    ("model.dtype_bytes", 1, 2, 8),
    ("model.layers", _FEW, 64, 10**4),
    ("model.hidden", _FEW, 8192, 10**7),
    ("model.*head*", _FEW, 64, _MANY),
    ("model.latent_dim", _FEW, 576, 10**6),
    ("parallel.*", _FEW, 4, _MANY),
    ("workload.count", 1, 1000, 10**7),
    ("workload.rate", 1e-6, 1.0, 1e7),
    ("workload.speed", 1e-6, 1.0, 1e6),
    ("workload.load", 0, 0.7, 20.0),
    ("workload.skip", 0, 600.0, _MONTH),
    ("workload.seconds", 0, 600.0, _MONTH),
    ("workload.warmup", 0, 60.0, _MONTH),
    ("workload.cooldown", 0, 60.0, _MONTH),
    ("workload.burst_length", 1e-6, 10.0, _MONTH),
    ("workload.patience", 1e-6, 10.0, _MONTH),
    ("workload.burst", 1, 4, 1e6),
    ("workload.*cv", 1e-6, 1.0, 100.0),
    ("workload.*_mean", 1, 1000, 10**9),
    ("kv.page_size", 1, 64, 10**6),
    ("kv.pool", 2**10, 40 * 2**30, 2**44),
    ("kv.staging_wait", 1e-9, 5.0, _DAY),
    ("kv.staging_*", 2**10, 2**32, 2**44),
    ("kv.window_share", 1e-6, 0.8, 1e6),
    ("scheduler.chunk", 1, 8192, 10**8),
    ("scheduler.*_batch", 1, 256, 10**7),
    ("compute.allreduce_rate", 1e6, 3e11, 1e14),
    ("compute.allreduce_latency", 1e-9, 1e-5, 1.0),
    ("compute.exchange_latency", 1e-9, 1e-5, 1.0),
    ("compute.overhead", 1e-9, 2e-3, 60.0),
    ("compute.scale", 1e-9, 1.0, 1000.0),
    ("slo.ttft", 1e-6, 1.0, _DAY),
    ("slo.tpot", 1e-9, 0.03, 3600.0),
    ("experiment.deadline", 1e-3, 60.0, _MONTH),
    ("experiment.*timeout", 1e-6, 60.0, _MONTH),
)
"""The first pattern that a key matches holds for it, places in lists left out; 0 and infinity are always allowed."""


class Quantity(NamedTuple):
    """A number of a configuration.

    Attributes:
        key: Dotted, with places in lists in brackets: ``hw.link.changes[0].start``.
        kind: Of `_UNITS`: rate, time, computation, size or count; empty for what has no unit.
        value: In the base unit of its kind.
    """

    key: str
    kind: str  # of `_UNITS`, or "" for what is counted
    value: float


_UNITS: Mapping[str, tuple[str, ...]] = {
    "rate": ("Gbps", "GB/s", "Mbps", "MB/s", "kbps", "kB/s", "TB/s", "B/s"),
    "time": ("s", "ms", "us", "ns", "min", "h"),
    "computation": ("TFLOPS", "PFLOPS", "GFLOPS", "FLOPS"),
    "size": ("GiB", "MiB", "KiB", "TiB", "B"),
    "count": ("B", "M", "T"),
}
"""By kind of quantity: the units to suggest."""

_PARSERS: Mapping[Any, tuple[str, Any]] = {
    units.parse_rate: ("rate", units.format_rate),
    units.parse_time: ("time", units.format_time),
    units.parse_flops: ("computation", lambda value: f"{value:.3g} FLOPS"),
    units.parse_size: ("size", units.format_size),
    units.parse_count: ("count", lambda value: f"{value:.3g}"),
}
_BY_KIND = {kind: (parse, show) for parse, (kind, show) in _PARSERS.items()}
_BASE = {
    "rate": ("bytes a second", "B/s"),
    "time": ("seconds", "s"),
    "computation": ("operations a second", "FLOPS"),
}
"""The kinds of which a number without a unit is refused: a size without one is bytes to everybody."""


def check(config: Config, values: Mapping[str, Any], typed: Iterable[str]) -> None:
    """Raise a `ConfigError` with a line for each quantity without its unit, or beyond its `BOUNDS`, if there is any.

    Units are asked for where a quantity was *typed*, as dotted keys say; *values* are those that *config* was made
    of. Of 0 the unit does not matter.
    """
    keys = tuple(typed)
    problems: tuple[list[str], list[str]] = [], []
    for quantity, beyond in _judged(config, {key.partition(".")[0] for key in keys}):
        line = _bare(quantity, values, keys)
        if not line and beyond and config.check.plausible:
            line = _beyond(quantity, _written(values, quantity.key))
        if line:
            problems[covers(keys, _plain(quantity.key))].append(line)
    if found := problems[True] or problems[False]:  # what was typed may be why others are beyond their bounds
        raise ConfigError("\n".join(found))


def _bare(quantity: Quantity, values: Mapping[str, Any], typed: tuple[str, ...]) -> str:
    """Return what to say of a *quantity* that was typed without its unit, "" if it has one or needs none.

    Only rates, times and computation need one (`_BASE`), and only where its key is among *typed*, dotted keys with
    places in lists left out. The text is looked up in *values*: ``400Gbps`` and ``400`` are different texts of
    numbers alike.
    """
    key, kind, value = quantity
    if kind not in _BASE or not 0 < value < math.inf or not covers(typed, _plain(key)):
        return ""
    text = _written(values, key)
    if not re.fullmatch(r"[-+\d.eE_ ]+", text):
        return ""
    meant = _meant(_plain(key), kind, text)
    example = f"did you mean {meant}?" if meant else f"write it with one of {', '.join(_UNITS[kind])}."
    what, unit = _BASE[kind]
    return f"{key}={text} has no unit; {example} A number alone would be {what}: {text}{unit}"


def _beyond(quantity: Quantity, text: str = "") -> str:
    """Return what to say of a *quantity* outside its `BOUNDS`, "" if it is within them or has none.

    *text* is what was written, whose number may be meant with another unit.
    """
    key, kind, value = quantity
    row = _row(_plain(key), kind)
    if row is None or not value or not math.isfinite(value) or row[1] <= value <= row[3]:
        return ""
    show = _BY_KIND[kind][1] if kind else _counted
    meant = _meant(_plain(key), kind, text) if kind else ""
    hint = f"did you mean {meant}? Correct it, " if meant else "correct it, "
    return f"{key}={show(value)} is not plausible, from {show(row[1])} to {show(row[3])} is; {hint}{_LOOK}"


def _counted(number: float) -> str:
    """Return *number* as people write a count: whole ones in full with commas, others with six digits."""
    return f"{number:,.0f}" if float(number).is_integer() and abs(number) < 1e15 else f"{number:g}"


_JUDGED = (
    *("hw", "backend", "model", "parallel", "collective", "workload", "kv", "scheduler", "compute", "slo"),
    "experiment",
)
_last: dict[str, tuple[Any, list[tuple[Quantity, str]]]] = {}
"""The parts of the configuration that was judged last: in a sweep most are those of the next, too."""


def _judged(config: Config, typed: Collection[str]) -> Iterator[tuple[Quantity, str]]:
    """Yield the numbers of *config* in question, each with what `_beyond` says.

    They are all of the top-level keys *typed*, and of others those beyond their bounds; never those of a calibration
    and of sources.

    A part of the configuration that is the very object of the call before is not looked at again:
    in a sweep most are.
    """
    for name in _JUDGED:
        part = getattr(config, name)
        if name not in _last or _last[name][0] is not part:
            _last[name] = part, [(quantity, _beyond(quantity)) for quantity in _of(part, name)]
        yield from (_last[name][1] if name in typed else (pair for pair in _last[name][1] if pair[1]))


def _of(instance: Any, at: str) -> Iterator[Quantity]:
    """Yield the quantities of *instance*, with keys that begin with *at*; none if it is not a dataclass."""
    if not is_dataclass(instance):
        return
    hints = _hints(type(instance))  # type: ignore[arg-type]  # a class is hashable
    for field in fields(instance):
        yield from _under(hints[field.name], getattr(instance, field.name), f"{at}.{field.name}")


@cache
def _hints(cls: type) -> Mapping[str, Any]:
    """Return the annotations of *cls* with their units (`typing.Annotated`), which take a millisecond to resolve."""
    return typing.get_type_hints(cls, include_extras=True)


def _under(hint: Any, value: Any, at: str) -> Iterator[Quantity]:
    """Yield the quantities of *value*, which *hint* is the annotation of; *at* is its key.

    Dataclasses and sequences are gone into; mappings, such as options and sources, have no
    quantities.
    """
    if is_dataclass(value):
        yield from _of(value, at)
    elif isinstance(value, tuple | list):
        inner = next(iter(typing.get_args(hint)), None)
        for index, item in enumerate(value):
            yield from _under(inner, item, f"{at}[{index}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield Quantity(at, _kind(hint), value)


def _kind(hint: Any) -> str:
    """Return the kind of quantity that *hint* is the annotation of, "" if it is a plain number.

    The first parser anywhere within *hint* counts: ``Seconds``, ``tuple[Seconds, ...]`` and ``Seconds | None`` are
    times.
    """
    if typing.get_origin(hint) is typing.Annotated:
        return _PARSERS.get(typing.get_args(hint)[1], ("", None))[0]
    return next((kind for inner in typing.get_args(hint) if (kind := _kind(inner))), "")


def _plain(key: str) -> str:
    """Return *key* without the places in lists."""
    return re.sub(r"\[\d+\]", "", key)


def _written(values: Any, key: str) -> str:
    """Return what *values* say at *key*, "" if that is no number and no text.

    One value may stand for a list of one.
    """
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(values, Mapping):
            values = values.get(part)
        elif isinstance(values, list | tuple):
            values = values[int(part)] if part.isdecimal() and int(part) < len(values) else None
    return str(values) if isinstance(values, int | float | str) and not isinstance(values, bool) else ""


@cache
def _row(key: str, kind: str) -> tuple[str, float, float, float] | None:
    """Return the row of `BOUNDS` for *key*; one that names a kind holds for that kind only."""
    return next((row for row in BOUNDS if fnmatchcase(f"{kind}:{key}" if ":" in row[0] else key, row[0])), None)


def _meant(key: str, kind: str, text: str) -> str:
    """Return the number of *text* with the unit that brings it nearest to what *key* usually is; "" if none does.

    Nearest is by ratio; units like the one that was written, bits or bytes, go before others, and minutes last.
    Numbers that nobody writes, such as 0.0001 or 3000000, are not suggested, nor what stands there already.  A key
    without bounds gets the first unit of its kind.

    >>> _meant("hw.interconnect.latency", "time", "2h"), _meant("hw.nic.rate", "rate", "450kbps")
    ('2us', '450Gbps')
    """
    match = re.match(r"\s*([-+\d.eE_]*\d\.?)\s*([A-Za-z/]*)\s*$", text)
    number = float(match[1]) if match else 0.0
    if match is None or not 0.1 <= number < 1e5:
        return ""
    row, parse = _row(key, kind), _BY_KIND[kind][0]
    if row is None:
        return f"{number:.12g}{_UNITS[kind][0]}"
    _, least, usual, most = row
    found = []
    for unit in _UNITS[kind]:
        value = float(parse(f"{number:.12g}{unit}"))
        if least <= value <= most:
            other = unit in ("min", "h") or (kind == "rate" and unit[-3:] != match[2][-3:] != "")
            found.append((other, abs(math.log(value / usual)), f"{number:.12g}{unit}"))
    nearest = min(found, default=(False, 0.0, ""))[2]
    return "" if nearest == text else nearest
