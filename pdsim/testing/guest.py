# SPDX-License-Identifier: Apache-2.0
"""The engines that go over RDMA verbs, as tests run them in the guest."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import pytest

from backends.emulation.guest.engines import Engines, GuestTarget
from backends.emulation.guest.machine import PATIENCE
from pdsim.core.errors import BackendUnavailable
from pdsim.hardware.costs import Engine

__all__ = ["target", "unavailable"]

JOB = 90.0
"""Seconds of a job on the host, after which its ranks are killed; the guest's are `PATIENCE` times as many."""


def unavailable(error: BackendUnavailable) -> NoReturn:
    """Skip the test that needs what this machine lacks, or fail it where engines are required."""
    if os.environ.get("PDSIM_REQUIRE_ENGINES"):
        pytest.fail(str(error))
    pytest.skip(str(error))


def target(engines: Engines, engine: Engine, **options: Any) -> GuestTarget:
    """Return the target for *engine* in the guest of *engines*; *options* are `Processes`'s."""
    try:
        engines.server(engine.implementation)
    except BackendUnavailable as error:
        unavailable(error)
    return GuestTarget(engines, engine, **{"deadline": JOB * PATIENCE, "device_capacity": 1 << 30, **options})
