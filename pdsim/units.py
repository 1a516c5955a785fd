"""Quantities as people write them (`400Gbps`, `1.5us`, `64KiB`) and as the code keeps them: SI floats and bytes.

Sizes are bytes, rates bytes per second, times seconds, everywhere in pdsim.  Decimal prefixes are powers of ten
(1 GB = 1e9 bytes), binary prefixes powers of two (1 GiB = 2**30); ``bps`` counts bits, ``B/s`` bytes.
"""

from __future__ import annotations

import math
import re
from typing import Annotated

__all__ = [
    "Flops",
    "Rate",
    "Seconds",
    "Size",
    "format_rate",
    "format_size",
    "format_time",
    "parse_flops",
    "parse_rate",
    "parse_size",
    "parse_time",
]

_PREFIX = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15} | {
    f"{letter}i": 2.0 ** (10 * power) for power, letter in enumerate("KMGT", start=1)
}
_SIZE = {f"{prefix}B": factor for prefix, factor in _PREFIX.items()} | {"": 1.0}
_RATE = (
    {f"{prefix}B/s": factor for prefix, factor in _PREFIX.items()}
    | {f"{prefix}bps": factor / 8 for prefix, factor in _PREFIX.items() if not prefix.endswith("i")}
    | {f"{prefix}bit/s": factor / 8 for prefix, factor in _PREFIX.items() if not prefix.endswith("i")}
    | {"": 1.0}
)
_TIME = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_FLOPS = {f"{prefix}FLOPS": factor for prefix, factor in _PREFIX.items() if not prefix.endswith("i")} | {"": 1.0}
_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([^\s\d]*)\s*")


def _parse(text: float | str, table: dict[str, float], what: str, example: str) -> float:
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise ValueError(f"{text!r} is not a {what}; write a number or something like {example}")
    if isinstance(text, str):
        match = _NUMBER.fullmatch(text)
        if match is None or match[2] not in table:
            raise ValueError(f"{text!r} is not a {what}; write a number or something like {example}")
        factor = table[match[2]]
        # 11us is 1.1e-05, but 11 * 1e-06 is 1.1000000000000001e-05: divide by the whole number instead
        value = float(match[1]) / round(1 / factor) if factor < 1 and factor != 0.125 else float(match[1]) * factor
    else:
        value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a finite {what}")
    return value


def parse_size(text: float | str) -> int:
    """Return bytes: ``parse_size("64KiB") == 65536``.  Raise a `ValueError` unless they are a whole number."""
    size = _parse(text, _SIZE, "size", "64KiB or 1.5GB")
    if not size.is_integer():
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(size)


def parse_rate(text: float | str) -> float:
    """Return bytes per second: ``parse_rate("400Gbps") == 50e9``.  Raise a `ValueError` for anything else."""
    return _parse(text, _RATE, "rate", "400Gbps or 50GB/s")


def parse_time(text: float | str) -> float:
    """Return seconds: ``parse_time("1.5us") == 1.5e-6``.  Raise a `ValueError` for anything else."""
    return _parse(text, _TIME, "time", "1.5us or 2ms")


def parse_flops(text: float | str) -> float:
    """Return floating-point operations per second: ``parse_flops("148TFLOPS") == 148e12``."""
    return _parse(text, _FLOPS, "rate of computation", "148TFLOPS")


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    for factor, unit in steps:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}"
    factor, unit = steps[-1]
    return f"{value / factor:.3g} {unit}"


def format_size(size: float) -> str:
    """Return *size* bytes with a binary prefix: ``"64 KiB"``."""
    return _scaled(size, ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")))


def format_rate(rate: float) -> str:
    """Return *rate* bytes per second with a decimal prefix: ``"50 GB/s"``."""
    return _scaled(rate, ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1, "B/s")))


def format_time(seconds: float) -> str:
    """Return *seconds* in the unit that keeps three digits readable: ``"1.5 us"``."""
    return _scaled(seconds, ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


# Types of configuration fields: `pdsim.config` finds the parser in the annotation.
Size = Annotated[int, parse_size]
Rate = Annotated[float, parse_rate]
Seconds = Annotated[float, parse_time]
Flops = Annotated[float, parse_flops]
