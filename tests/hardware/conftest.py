"""Tests that need an NVIDIA GPU: skipped, with the reason, elsewhere."""

import pytest

from backends.diagnosis import devices


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip all of this folder where there is no GPU."""
    gpu = devices()[0]
    for item in items:
        if not gpu.works and "hardware" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason=f"{gpu.reason}; {gpu.remedy}"))
