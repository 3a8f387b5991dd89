"""Every test of this folder is about the simulated device, and needs it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.accelerator.simulated import missing

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before the marks are counted that leave tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("accelerator")


@pytest.fixture(autouse=True)
def device() -> None:
    """Skip where it cannot be built; where it must be (``SHARDSTEP_DEVICE=required``), that is a failure."""
    reason = missing()
    if reason and os.environ.get("SHARDSTEP_DEVICE") == "required":
        pytest.fail(f"SHARDSTEP_DEVICE=required, but the simulated device needs {reason} to be built", pytrace=False)
    if reason:
        pytest.skip(f"the simulated device needs {reason} to be built")
