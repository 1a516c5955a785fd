# SPDX-License-Identifier: Apache-2.0
"""What a calibration's uncertainty does to predictions: the same prediction at both ends of every interval.

Deviations of several parameters add in quadrature, as if they were independent.  Fitted parameters are not quite:
those that trade against each other make these intervals too wide rather than too narrow.  So do the ends of a ramp:
where it ends and what it costs, which trade most, go to their lower ends together, and to their upper ones.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import is_dataclass, replace
from typing import Any

from pdsim.calibration.definition import Calibration, on_host, widening
from pdsim.config import Config
from pdsim.core.units import parse_rate, parse_time
from pdsim.hardware.costs import Ramp
from pdsim.results.evidence import BLIND, WHOLE, cause
from pdsim.validation.verdicts import Value


def blind_error(deviations: Iterable[float]) -> float:
    """Return what 95 of 100 *deviations* do not exceed; of fewer than 20, the largest.

    >>> blind_error([0.01, -0.2, 0.05])
    0.2
    """
    sizes = sorted(map(abs, deviations))
    return sizes[math.ceil(0.95 * len(sizes)) - 1]


def variants(config: Config) -> Iterator[tuple[str, Config, Config]]:
    """Yield the key of each parameter with an interval in the calibration, and *config* at both ends of it.

    A ramp is one parameter, and so is the host, from the quickest to the slowest known, unless the run was given its
    ``host_factor``.  Raise a `ValueError` for an interval that cannot be parsed.
    """
    if (calibration := config.calibration) is None:
        return
    for key, (low, high) in sorted(calibration.intervals.items()):
        yield key, _with(config, key.split("."), _value(low)), _with(config, key.split("."), _value(high))
    if not calibration.host and len(set(calibration.hosts)) > 1:
        ends = (on_host(config.backend, of(calibration.hosts)) for of in (min, max))
        low_host, high_host = (replace(config, backend=backend) for backend in ends)
        yield "hosts", low_host, high_host


def predicted(config: Config, predict: Callable[[Config], Sequence[Value]]) -> list[Value]:
    """Return the predictions for *config*, with the interval that follows from its calibration, if it has one.

    *predict* is called once, and twice more for each parameter that has an interval (`variants`; not of `WHOLE`).
    What adds in quadrature is the error that the calibration has at 95 of 100 points left out of its fit, and that
    of predictions on other hosts (`BLIND`).  The whole grows with `Value.factor`, by which the value lies beyond the
    samples (`widening`).
    """
    centre = list(predict(config))
    if (calibration := config.calibration) is None:
        return centre
    centre = [replace(value, factor=_factor(config, value)) for value in centre]
    down, up = [0.0] * len(centre), [0.0] * len(centre)
    known = calibration.held_out is not None
    for _, *ends in variants(config):
        known = True
        moved = [[value.value - at.value for value, at in zip(predict(end), centre, strict=True)] for end in ends]
        for index, changes in enumerate(zip(*moved, strict=True)):
            down[index] = math.hypot(down[index], min(0.0, *changes))
            up[index] = math.hypot(up[index], max(0.0, *changes))
    spans = zip(centre, down, up, strict=True)
    return [_spanned(calibration, *each) for each in spans] if known else centre


def _factor(config: Config, value: Value) -> float:
    assert config.calibration is not None
    gpus = min(value.gpus, config.hw.nodes * config.hw.gpus)
    nbytes = value.nbytes if value.descriptors else 0
    return math.prod(config.calibration.factors(descriptors=value.descriptors, nbytes=nbytes, gpus=gpus).values())


def _spanned(calibration: Calibration, value: Value, below: float, above: float) -> Value:
    held = calibration.held_out_reads if value.group.endswith(", read") else None
    held = held or calibration.held_out
    error = value.value * math.hypot(held.p95 if held is not None else 0.0, BLIND[cause(value.group)])
    wide = widening(value.factor)
    if cause(value.group) in WHOLE:
        below = above = 0.0
    low = value.value - wide * math.hypot(below, error)
    return replace(value, low=max(0.0, low), high=value.value + wide * math.hypot(above, error))


def _value(text: str) -> float | tuple[Ramp, ...]:
    # >>> _value("200GB/s"), _value("4 x 1s and 9 x 2s")
    # (200000000000.0, (Ramp(first=4, extra=1.0), Ramp(first=9, extra=2.0)))
    if " x " in text:
        steps = (step.split(" x ") for step in text.split(" and "))
        return tuple(Ramp(first=max(1, int(first)), extra=parse_time(extra)) for first, extra in steps)
    for parse in (parse_time, parse_rate):
        with suppress(ValueError):
            return parse(text)
    raise ValueError(f"calibration.intervals: {text!r} is neither a time nor a rate nor the steps of a ramp")


def _with(owner: Any, path: Sequence[str], value: float | tuple[Ramp, ...]) -> Any:
    head, *rest = path
    below = getattr(owner, head)
    return replace(owner, **{head: _with(below, rest, value) if rest and is_dataclass(below) else value})
