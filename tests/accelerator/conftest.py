"""Every test of this folder is about an accelerator, and needs it: the simulated device, or a GPU (``devices.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator import devices, simulated

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE) and _is_about_the_simulation(item):
            item.add_marker(pytest.mark.skip(reason="is about the simulated device itself"))


def _is_about_the_simulation(item: Any) -> bool:
    """Where another device was chosen: which one a test has, its module says in its imports."""
    return devices.DEVICE != "sim" and getattr(item.module, "on_device", None) is not devices.on_device


@pytest.fixture(scope="session")
def built() -> None:
    """Build the simulated device before the first test: no test's timeout is for that."""
    if devices.DEVICE == "sim" and not devices.missing() and not simulated.is_built():
        build = "from tests.accelerator.simulated import build; build()"
        subprocess.run([sys.executable, "-c", build], check=True, cwd=HERE.parent.parent)


@pytest.fixture(autouse=True)
def device(built: None) -> None:
    """Skip where it is not; where it must be (``SHARDSTEP_DEVICE=required``), that is a failure."""
    reason = devices.missing()
    what = "the simulated device" if devices.DEVICE == "sim" else devices.DEVICE
    if reason and os.environ.get("SHARDSTEP_DEVICE") == "required":
        pytest.fail(f"SHARDSTEP_DEVICE=required, but {what} needs {reason}", pytrace=False)
    if reason:
        pytest.skip(f"{what} needs {reason}")
