# SPDX-License-Identifier: Apache-2.0
"""`close` gives everything back, and may be called twice."""

import pytest

from pdsim.testing import programs

pytestmark = pytest.mark.core


def test_closing_twice_releases_everything(job):
    """After `close` no buffer counts as registered, and nothing can be registered any more."""
    outcome = job({"a": (programs.close_twice, {"peer": "b"}), "b": (programs.close_twice, {"peer": "a"})})
    for name in "ab":
        assert outcome.ranks[name].value == {"used": 0, "after close": "RegistrationError"}
