# SPDX-License-Identifier: Apache-2.0
"""What each side of a deployment runs on: prefill may have GPUs of another kind than decode, on nodes of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from pdsim.compute.forward import Compute
from pdsim.config import Config, build, presets
from pdsim.core.errors import ConfigError
from pdsim.hardware.machine import Machine


def prefill_pool(config: Config) -> tuple[Machine, Compute]:
    """Return the machine that prefill computes on, and its compute: those of *config* without `Machine.prefill`.

    Its GPUs and what joins them are of that other kind; cards, hosts and nodes are as in *config*.  Its compute is
    what ``compute=auto`` takes for it, unless *config* has one that was measured on no GPU.  Raise a `ConfigError`
    if there is no such machine, or it has no GPUs.
    """
    if not config.hw.prefill:
        return config.hw, config.compute
    other = _machine(config.hw.prefill)
    machine = replace(config.hw, gpu=other.gpu, interconnect=other.interconnect)
    if not (config.compute.chosen or config.compute.measured_gpu):
        return machine, config.compute
    own = partial(build, Compute, at="compute")
    return machine, presets.computing(replace(config, hw=machine), {}, (), (), own)


@cache
def _machine(name: str) -> Machine:
    from pdsim.config.compose import compose  # which takes a while

    machine = compose([f"hw={name}"]).hw
    if machine.gpu is None:
        raise ConfigError(f"hw.prefill={name} has no GPUs; name one that has, such as 8xb200")
    return machine
