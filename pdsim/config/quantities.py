# SPDX-License-Identifier: Apache-2.0
"""Refuse quantities that are not plausible.

`check` finds typing mistakes: ``hw.nic.rate=400`` means 400 bytes a second to the code, not 400 Gbps.
"""

import math
import re
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from pdsim.config import Config, covers, hints_of
from pdsim.core import units
from pdsim.core.errors import ConfigError

_DAY = 86400.0
_MONTH = 30 * _DAY
_FEW, _MANY = 1, 10**5  # counts in a machine or a model

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
    ("hw.interconnect.rate", 1e8, 4.5e11, 1e14),
    ("hw.interconnect.latency", 1e-10, 1e-6, 0.01),
    ("hw.nic.count", _FEW, 8, 1024),
    ("hw.nic.rate", 1e6, 5e10, 1e13),
    ("hw.nic.latency", 1e-10, 2e-6, 1.0),
    ("hw.host.memory", 2**24, 2**40, 2**50),
    ("hw.host.memory_rate", 1e8, 2e11, 1e14),
    ("hw.host.tcp_rate", 1e3, 2.5e9, 1e13),
    ("hw.host.tcp_latency", 1e-9, 5e-5, 10.0),
    ("hw.*wake", 1e-9, 1e-5, 1.0),
    ("rate:hw.link.*", 125.0, 1.25e7, 1e13),
    ("size:hw.link.*", 576, 2**22, 2**40),
    ("time:hw.link.changes.*", 1e-9, 2.0, _MONTH),
    ("time:hw.link.*", 1e-9, 5e-3, 100.0),
    ("backend.int??.queues", _FEW, 4, _MANY),
    ("backend.int??.line", 1e3, 4.5e11, 1e14),
    ("backend.int??.*rate", 1e3, 5e10, 1e14),
    ("size:backend.*", 1, 2**16, 2**40),
    ("time:backend.int??.*descriptor", 1e-12, 5e-6, 0.1),
    ("time:backend.int??.*", 1e-12, 5e-6, 1.0),
    ("backend.int??.*", _FEW, 16, 10**7),
    ("[bc]*.timeout", 1e-6, 30.0, _MONTH),  # of backend and collective
    ("collective.*.copies", _FEW, 1, 100),
    ("collective.*rate", 1e3, 3e11, 1e14),
    ("collective.pool", 2**10, 2**32, 2**44),
    ("collective.grow_latency", 1e-9, 1e-3, 60.0),
    ("time:collective.*", 1e-12, 2e-5, 10.0),
    ("count:model.*", 1e4, 3e10, 1e15),
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
    ("time:workload.*", 1e-6, 10.0, _MONTH),
    ("workload.peak", 1, 4, 1000),
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
    ("compute.*_latency", 1e-9, 1e-5, 1.0),
    ("compute.overhead", 1e-9, 2e-3, 60.0),
    ("compute.scale", 1e-9, 1.0, 1000.0),
    ("slo.ttft", 1e-6, 1.0, _DAY),
    ("slo.tpot", 1e-9, 0.03, 3600.0),
    ("time:autoscale.*", 1e-3, 60.0, _DAY),
    ("time:failures.*", 1e-3, 86400.0, 1e10),
    ("experiment.deadline", 1e-3, 60.0, _MONTH),
    ("experiment.*timeout", 1e-6, 60.0, _MONTH),
)
"""The first pattern that a key matches holds for it, places in lists left out; 0 and infinity are always allowed."""


class _Kind(NamedTuple):
    parse: Any
    show: Any
    units: Sequence[str] = ()  # to suggest
    bare: str = ""  # what a number alone is, of kinds that need a unit: a size without one is in bytes


_RATES = ("Gbps", "GB/s", "Mbps", "MB/s", "kbps", "kB/s", "TB/s", "B/s")
_FLOPS = ("TFLOPS", "PFLOPS", "GFLOPS", "FLOPS")
_KINDS = {
    "rate": _Kind(units.parse_rate, units.format_rate, _RATES, "bytes a second: {}B/s"),
    "time": _Kind(units.parse_time, units.format_time, ("s", "ms", "us", "ns", "min", "h"), "seconds: {}s"),
    "computation": _Kind(units.parse_flops, "{:.3g} FLOPS".format, _FLOPS, "operations a second: {}FLOPS"),
    "size": _Kind(units.parse_size, units.format_size, ("GiB", "MiB", "KiB", "TiB", "B")),
    "count": _Kind(units.parse_count, "{:.3g}".format, ("B", "M", "T")),
    "": _Kind(None, lambda value: f"{value:,.0f}" if float(value).is_integer() and value < 1e15 else f"{value:g}"),
}


class _Quantity(NamedTuple):
    key: str  # dotted, with places in lists in brackets: ``hw.link.changes[0].start``
    name: str  # without them
    kind: str  # of `_KINDS`
    value: float  # in the base unit of its kind


def check(config: Config, values: Mapping[str, Any], typed: Iterable[str]) -> None:
    """Raise a `ConfigError` with a line for each quantity without its unit, or beyond its `BOUNDS`, if there is any.

    Units are asked for where a quantity was *typed*, as dotted keys say; *config* was made of *values*.
    """
    keys = tuple(typed)
    problems: tuple[list[str], list[str]] = [], []
    for quantity, beyond in _questionable(config, {key.partition(".")[0] for key in keys}):
        by_hand, text = covers(keys, quantity.name), _written(values, quantity.key)
        line = _bare(quantity, text) if by_hand else ""
        if not line and config.check.plausible and beyond:
            line = _beyond(quantity, text)
        if line:
            problems[by_hand].append(line)
    if lines := problems[True] or problems[False]:  # what was typed may be why others are beyond their bounds
        raise ConfigError("\n".join(lines))


def usual(name: str, kind: str) -> float | None:
    """Return a usual value of the key *name*, of a *kind* such as ``rate``, in its base unit; None if unknown."""
    row = _row(name, kind)
    return None if row is None else row[2]


def _bare(quantity: _Quantity, text: str) -> str:
    kind = _KINDS[quantity.kind]
    if not kind.bare or not 0 < quantity.value < math.inf or not re.fullmatch(r"[-+\d.eE_ ]+", text):
        return ""
    meant = _meant(quantity, text)
    example = f"did you mean {meant}?" if meant else f"write it with one of {', '.join(kind.units)}."
    return f"{quantity.key}={text} has no unit; {example} A number alone would be {kind.bare.format(text)}"


def _beyond(quantity: _Quantity, text: str) -> str:
    row = _row(quantity.name, quantity.kind)
    assert row is not None
    show, meant = _KINDS[quantity.kind].show, _meant(quantity, text)
    return (
        f"{quantity.key}={text if re.search('[a-zA-Z]', text) else show(quantity.value)} is not plausible, expected "
        f"{show(row[1])} to {show(row[3])}; "
        + (f"did you mean {meant}? Correct it, " if meant else "correct it, ")
        + "or set check.plausible=false to take it as it is"
    )


_PARTS = ("hw", "backend", "model", "parallel", "collective", "workload", "kv", "scheduler", "compute")
_last: dict[str, tuple[Any, list[tuple[_Quantity, bool]]]] = {}
"""By key, the part of the last configuration and its quantities: in a sweep most are those of the next, too."""


def _questionable(config: Config, typed: Collection[str]) -> Iterator[tuple[_Quantity, bool]]:
    # All numbers of a part with a key that was *typed*; of other parts, only the numbers beyond their bounds.
    for name in (*_PARTS, "slo", "experiment"):
        part = getattr(config, name)
        if name not in _last or _last[name][0] != part:
            _last[name] = part, [(quantity, _is_beyond(quantity)) for quantity in _quantities(None, part, name)]
        yield from (each for each in _last[name][1] if each[1] or name in typed)


def _is_beyond(quantity: _Quantity) -> bool:
    row, value = _row(quantity.name, quantity.kind), quantity.value
    return row is not None and 0 != abs(value) < math.inf and not row[1] <= value <= row[3]


def _quantities(hint: Any, value: Any, at: str) -> Iterator[_Quantity]:
    # mappings, such as options and sources, have no quantities
    if is_dataclass(value) and not isinstance(value, type):
        hints = hints_of(type(value))
        for field in fields(value):
            yield from _quantities(hints[field.name], getattr(value, field.name), f"{at}.{field.name}")
    elif isinstance(value, tuple | list):
        inner = next(iter(typing.get_args(hint)), None)
        for index, item in enumerate(value):
            yield from _quantities(inner, item, f"{at}[{index}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield _Quantity(at, re.sub(r"\[\d+\]", "", at), _kind(hint), value)


@cache
def _kind(hint: Any) -> str:
    # the first parser anywhere within counts: ``Seconds``, ``tuple[Seconds, ...]`` and ``Seconds | None`` are times
    if typing.get_origin(hint) is typing.Annotated:
        parser = typing.get_args(hint)[1]
        return next((name for name, kind in _KINDS.items() if kind.parse is parser), "")
    return next((kind for inner in typing.get_args(hint) if (kind := _kind(inner))), "")


def _written(values: Any, key: str) -> str:
    # ``400Gbps`` and ``400`` are different texts of numbers alike; one value may stand for a list of one
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(values, Mapping):
            values = values.get(part)
        elif isinstance(values, list | tuple):
            values = values[int(part)] if part.isdecimal() and int(part) < len(values) else None
    return str(values) if isinstance(values, int | float | str) and not isinstance(values, bool) else ""


@cache
def _row(name: str, kind: str) -> tuple[str, float, float, float] | None:
    return next((row for row in BOUNDS if _matches(f"{kind}:{name}" if ":" in row[0] else name, row[0])), None)


def _matches(name: str, pattern: str) -> bool:
    # fnmatch compiles an expression for each pattern
    return fnmatchcase(name, pattern) if "*" in pattern or "?" in pattern else name == pattern


def _meant(quantity: _Quantity, text: str) -> str:
    # nearest is by ratio; units like the one that was written, bits or bytes, go before others, and minutes last
    row, kind = _row(quantity.name, quantity.kind), _KINDS[quantity.kind]
    match = re.match(r"\s*([-+\d.eE_]*\d\.?)\s*([A-Za-z/]*)\s*$", text)
    number = float(match[1]) if match else 0.0
    if match is None or not kind.units or not 0.1 <= number < 1e5:
        return ""
    if row is None:
        return f"{number:.12g}{kind.units[0]}"
    readings = []
    for unit in kind.units:
        value = float(kind.parse(f"{number:.12g}{unit}"))
        if row[1] <= value <= row[3]:
            other = unit in ("min", "h") or (quantity.kind == "rate" and unit[-3:] != match[2][-3:] != "")
            readings.append((other, abs(math.log(value / row[2])), f"{number:.12g}{unit}"))
    nearest = min(readings, default=(False, 0.0, ""))[2]
    return "" if nearest == text else nearest
