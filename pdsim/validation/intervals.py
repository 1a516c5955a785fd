"""What a calibration's uncertainty does to predictions: the same prediction at both ends of every interval.

Deviations of several parameters add in quadrature, as if they were independent.  Fitted parameters are not quite:
those that trade against each other make these intervals too wide rather than too narrow.  So do the ends of a ramp:
where it ends and what it costs, which trade most, go to their lower ends together, and to their upper ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import is_dataclass, replace
from typing import Any

from pdsim.config import Config
from pdsim.costs import Ramp
from pdsim.units import parse_rate, parse_time
from pdsim.validation.verdicts import Value

__all__ = ["predicted", "variants"]


def variants(config: Config) -> Iterator[tuple[str, Config, Config]]:
    """Yield for each parameter that the calibration of *config* knows an interval of: its key, and both ends of it.

    Values are in SI units.  The three configurations differ in that one parameter only; a ramp is one parameter.
    Raise a `ValueError` for an interval that cannot be parsed.
    """
    intervals = config.calibration.intervals if config.calibration is not None else {}
    for key, (low, high) in sorted(intervals.items()):
        yield key, _with(config, key.split("."), _value(low)), _with(config, key.split("."), _value(high))


def predicted(config: Config, predict: Callable[[Config], Sequence[Value]]) -> list[Value]:
    """Return what *predict* says of *config*, with the interval that the calibration leaves, if it has any.

    *predict* is called once, and twice more for each parameter that has an interval; it must return the same values
    in the same order each time.  A parameter that only ever moves a value upwards widens the interval upwards alone.
    """
    centre = predict(config)
    down, up = [0.0] * len(centre), [0.0] * len(centre)
    known = False
    for _, *ends in variants(config):
        known = True
        moved = [[value.value - at.value for value, at in zip(predict(end), centre, strict=True)] for end in ends]
        for index, changes in enumerate(zip(*moved, strict=True)):
            down[index] = math.hypot(down[index], min(0.0, *changes))
            up[index] = math.hypot(up[index], max(0.0, *changes))
    if not known:
        return list(centre)
    spans = zip(centre, down, up, strict=True)
    return [replace(value, low=value.value - below, high=value.value + above) for value, below, above in spans]


def _value(text: str) -> float | tuple[Ramp, ...]:
    """Return *text*, an end of an interval, as seconds, as bytes/s, or as the steps of a ramp.

    >>> _value("200GB/s"), _value("4 x 1s and 9 x 2s")
    (200000000000.0, (Ramp(first=4, extra=1.0), Ramp(first=9, extra=2.0)))
    """
    if " x " in text:
        steps = (step.split(" x ") for step in text.split(" and "))
        return tuple(Ramp(first=max(1, int(first)), extra=parse_time(extra)) for first, extra in steps)
    for parse in (parse_time, parse_rate):
        with suppress(ValueError):
            return parse(text)
    raise ValueError(f"calibration.intervals: {text!r} is neither a time nor a rate nor the steps of a ramp")


def _with(owner: Any, path: Sequence[str], value: float | tuple[Ramp, ...]) -> Any:
    """Return a copy of *owner* with *value* at *path*."""
    head, *rest = path
    below = getattr(owner, head)
    return replace(owner, **{head: _with(below, rest, value) if rest and is_dataclass(below) else value})
