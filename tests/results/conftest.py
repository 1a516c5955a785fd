"""The configuration that the tests of this folder share."""

import pytest

from tests.support.configs import make_config


@pytest.fixture
def config(tmp_path):
    return make_config(tmp_path)
