"""The configuration that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdsim.config import Config
from tests.support.configs import make_config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path)
