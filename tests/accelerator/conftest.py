"""Every test of this folder is about an accelerator, and needs it: the simulated device, or a GPU (``devices.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator import devices, simulated
from tests.accelerator.core import is_core

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before the marks are counted that leave tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("accelerator")
            if not is_core(item.path.name, item.name, _world_of(item)):
                item.add_marker("extended")
            reason = _out_of_place(item)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def _out_of_place(item: Any) -> str:
    """Why a test cannot run on the device that was chosen; empty if it can."""
    if devices.DEVICE == "sim":
        return ""
    if getattr(item.module, "on_device", None) is not devices.on_device:  # which one it has, it says in its imports
        return "is about the simulated device itself"
    world = _world_of(item)  # or pytest's own mark for "no values"
    return f"needs {world} devices" if isinstance(world, int) and not devices.fits(world) else ""


def _world_of(item: Any) -> Any:
    return item.callspec.params.get("world") if hasattr(item, "callspec") else None


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
