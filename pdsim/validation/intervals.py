# SPDX-License-Identifier: Apache-2.0
"""The 95 % interval of a predicted transfer: by how much blind predictions of its class were off on other hosts."""

import math
from collections.abc import Iterable
from dataclasses import replace

from pdsim.calibration.definition import widening
from pdsim.config import Config
from pdsim.results.evidence import FACTORS, cause, software
from pdsim.validation.verdicts import Value

GPUS = 4
"""Of the largest machine that blind predictions were made for."""


def spanned(config: Config, values: Iterable[Value]) -> list[Value]:
    """Return *values*, predicted for *config*, each with its interval, if the calibration knows its errors.

    The interval is a factor both ways: that of the class (`FACTORS`), or the error that the calibration has at 95 of
    100 points left out of its fit, if that is more.  Its logarithm grows with `Value.factor`, by which the value
    lies beyond the samples, and beyond `GPUS` (`widening`).
    """
    return [_spanned(config, value) for value in values]


def _spanned(config: Config, value: Value) -> Value:
    if (calibration := config.calibration) is None:
        return value
    gpus = min(value.gpus, config.hw.nodes * config.hw.gpus)
    nbytes = value.nbytes if value.descriptors else 0
    if calibration.gpus:
        calibration = replace(calibration, gpus=(calibration.gpus[0], max(GPUS, calibration.gpus[1])))
    beyond = calibration.factors(descriptors=value.descriptors, nbytes=nbytes, gpus=gpus)
    value = replace(value, factor=math.prod(beyond.values()))
    held = calibration.held_out_reads if value.group.endswith(", read") else None
    if (held := held or calibration.held_out) is None:
        return value
    name = cause(software(config), value.group, value.label, value.nbytes, config.backend.threads)
    wide = max(FACTORS[name], 1.0 + held.p95) ** widening(value.factor)
    return replace(value, low=value.value / wide, high=value.value * wide)
