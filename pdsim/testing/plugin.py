# SPDX-License-Identifier: Apache-2.0
"""Options, marks and the RDMA guest for pytest, wherever pdsim is installed.

Imports nothing else of pdsim's until it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from pdsim.core import plugins

if TYPE_CHECKING:
    from backends.emulation.guest.machine import Guest

MARKS = {
    "rdma": "runs in an emulated machine with an RDMA device, which takes minutes: pytest -n 0 -m rdma",
    "not_in_guest": "has nothing to do with an engine's transfers, and is left out in the emulated machine",
    "timeout(seconds)": "of pytest-timeout, without which it does nothing",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    group = parser.getgroup("pdsim", "pdsim's conformance suite: pytest --pyargs pdsim.testing")
    group.addoption("--backend", help="run it for this backend or implementation only ('model': the simulator)")
    group.addoption("--collective", help="run its tests of groups for this collective only")


def pytest_configure(config: pytest.Config) -> None:
    """Register the suite's marks."""
    for name in plugins.names(plugins.BACKENDS):
        config.addinivalue_line("markers", f"{name}: needs the engine {name}")
    for name, text in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {text}")


@pytest.fixture(scope="session")
def rdma_guest() -> Iterator[Guest]:
    """Boot a machine with an RDMA device, once for all tests; see `backends.emulation.guest`.

    Takes minutes the first time, when the image is made.  Tests that use it are marked ``rdma``.
    """
    from backends.emulation.guest.machine import boot
    from pdsim.core.errors import BackendUnavailable
    from pdsim.testing.cases import unavailable

    try:
        with boot() as machine:
            yield machine
    except BackendUnavailable as error:
        unavailable(error)
