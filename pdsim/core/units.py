# SPDX-License-Identifier: Apache-2.0
"""Quantities as people write them (`400Gbps`, `1.5us`, `64KiB`) and as the code keeps them: SI floats and bytes.

Decimal prefixes are powers of ten (1 GB = 1e9 bytes), binary prefixes powers of two (1 GiB = 2**30); ``bps`` counts
bits, ``B/s`` bytes.
"""

import math
import re
import sys
from fractions import Fraction
from typing import Annotated

_DECIMAL = {"": 1, "K": 10**3, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = _DECIMAL | _BINARY
# Fractions, because 0.067 * 1e9 is no whole number and 0.1 * 1e-6 not the float that 100ns should be.
_SIZE = {f"{prefix}B": Fraction(factor) for prefix, factor in _BYTES.items()} | {"": Fraction(1)}
_RATE = (
    {f"{prefix}B/s": Fraction(factor) for prefix, factor in _BYTES.items()}
    | {f"{prefix}{bits}": Fraction(factor, 8) for prefix, factor in _DECIMAL.items() for bits in ("bps", "bit/s")}
    | {"": Fraction(1)}
)
_TIME = {"": Fraction(1), "s": Fraction(1), "min": Fraction(60), "h": Fraction(3600), "ms": Fraction(1, 10**3)} | {
    "us": Fraction(1, 10**6),
    "\u00b5s": Fraction(1, 10**6),  # the micro sign
    "\u03bcs": Fraction(1, 10**6),  # the Greek letter
    "ns": Fraction(1, 10**9),
}
_FLOPS = {f"{prefix}FLOPS": Fraction(factor) for prefix, factor in _DECIMAL.items()} | {"": Fraction(1)}
_FREQUENCY = dict.fromkeys(("", "/s", "req/s", "rps", "qps"), Fraction(1)) | dict.fromkeys(
    ("/min", "req/min", "rpm"), Fraction(1, 60)
)
_COUNT = {
    "": Fraction(1),
    "k": Fraction(10**3),
    "K": Fraction(10**3),
    "M": Fraction(10**6),
    "B": Fraction(10**9),
    "T": Fraction(10**12),
}
_NUMBER = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([^\s\d]*)\s*", re.ASCII)


def _parse(text: float | str, table: dict[str, Fraction], what: str, example: str) -> Fraction:
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise ValueError(f"{text!r} is not a {what}; write {example}")
    if not isinstance(text, str):
        if not abs(text) <= sys.float_info.max:  # nor not a number
            raise ValueError(f"{text!r} is not a finite {what}; write {example}")
        return Fraction(text)
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] not in table:
        raise ValueError(f"{text!r} is not a {what}; write {example}")
    number = float(match[1])
    if not math.isfinite(number * float(table[match[2]])):
        raise ValueError(f"{text!r} is not a finite {what}; write {example}")
    # the float decides what is nothing: a Fraction of 1e-999999999 would take forever
    return Fraction(match[1]) * table[match[2]] if number else Fraction(0)


def parse_size(text: float | str) -> int:
    """Return bytes.  Raise a `ValueError` unless *text* is a size and a whole number of bytes."""
    size = _parse(text, _SIZE, "size", "a number or something like 64KiB or 1.5GB")
    if size.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of bytes; write one, or something like 64KiB or 1.5GB")
    return int(size)


def parse_rate(text: float | str) -> float:
    """Return bytes per second.  Raise a `ValueError` that shows how to write one for anything else."""
    return float(_parse(text, _RATE, "rate", "something like 400Gbps or 50GB/s"))


def parse_time(text: float | str) -> float:
    """Return seconds, the float that the decimal number has.  Raise a `ValueError` for anything but a time."""
    return float(_parse(text, _TIME, "time", "something like 1.5us, 20ms or 2s"))


def parse_flops(text: float | str) -> float:
    """Return floating-point operations per second.  Raise a `ValueError` for anything else."""
    return float(_parse(text, _FLOPS, "rate of computation", "something like 148TFLOPS"))


def parse_count(text: float | str) -> float:
    """Return a number of things that come in billions, such as parameters.  Raise a `ValueError` otherwise."""
    return float(_parse(text, _COUNT, "number", "a number or something like 8k, 7B or 671e9"))


def parse_frequency(text: float | str) -> float:
    """Return how many a second.  Raise a `ValueError` for anything but a number, ``4req/s`` or ``240/min``."""
    return float(_parse(text, _FREQUENCY, "number a second", "something like 4 or 4req/s"))


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    factor, unit = next((step for step in steps if abs(value) >= 0.9995 * step[0]), steps[-1])
    number = value / factor
    return f"{number:.0f} {unit}" if 999.5 <= abs(number) < 1e6 else f"{number:.3g} {unit}"


def format_size(size: float) -> str:
    """Return *size* bytes with a binary prefix and three digits: ``94.1 GiB``."""
    return _scaled(size, ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")))


def format_rate(rate: float) -> str:
    """Return *rate* bytes per second with a decimal prefix and three digits: ``2.1 GB/s``."""
    return _scaled(rate, ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1, "B/s")))


def format_time(seconds: float) -> str:
    """Return *seconds* in the unit that keeps three digits readable, from nanoseconds to hours."""
    return _scaled(seconds, ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))


def instead_of(text: str, *, whole: bool = False) -> str:
    """Return what to write instead of *text*, a number with a unit where none belongs; nothing if it is none.

    >>> instead_of("8k", whole=True), instead_of("70%"), instead_of("2x"), instead_of("fast")
    ('; write 8000 or 8192', '; write 0.7', '; write 2', '')
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        return ""
    number, unit = float(match[1]), match[2]
    if unit in ("k", "K"):
        return f"; write {number * 1000:.0f} or {number * 1024:.0f}"
    if unit == "%":
        return "" if whole else f"; write {number / 100:g}"
    return f"; write {number:.12g}"


def is_number(text: str) -> bool:
    """Return whether *text* alone is a number to Python, infinities and NaN included; one with a unit is none."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def positive(owner: str, **values: float) -> None:
    """Raise a `ValueError`, such as "hw.nic.rate must be > 0, got 0", unless all *values* are > 0; NaN is not."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{owner}.{name} must be > 0, got {value}")


def not_negative(owner: str, **values: float) -> None:
    """Raise a `ValueError` unless all *values* are >= 0; NaN is not."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{owner}.{name} must be >= 0, got {value}")


def one_of(owner: str, allowed: tuple[str, ...], **values: str) -> None:
    """Raise a `ValueError` unless all *values* are among *allowed*, compared as whole names."""
    for name, value in values.items():
        if value not in allowed:  # a tuple of whole names: "nvlink" is not found in "intra_node_nvlink"
            choices = ", ".join(choice or "''" for choice in allowed)
            raise ValueError(f"{owner}.{name} must be one of {choices}, got {value!r}")


# Types of configuration fields: `pdsim.config` finds the parser in the annotation, and the rule of its values.
Size = Annotated[int, parse_size, ">= 0"]
Rate = Annotated[float, parse_rate, ">= 0"]
Seconds = Annotated[float, parse_time, ">= 0"]
Flops = Annotated[float, parse_flops, ">= 0"]
Count = Annotated[float, parse_count, ">= 0"]
Frequency = Annotated[float, parse_frequency, ">= 0"]
Positive = Annotated[float, "> 0"]
PositiveInt = Annotated[int, "> 0"]
NotNegative = Annotated[float, ">= 0"]
NotNegativeInt = Annotated[int, ">= 0"]
Share = Annotated[float, ">= 0 and <= 1"]
