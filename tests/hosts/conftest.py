"""Hosts for the tests of this folder, or the reason why there are none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.namespaces import Host, open_hosts, why_not


@pytest.fixture(scope="session")
def namespaces() -> None:
    """For whoever makes hosts."""
    require_hosts()


def require_hosts() -> None:
    """Skip where hosts cannot be made; where they must be (``SHARDSTEP_HOSTS=required``), that is a failure."""
    reason = why_not()
    if reason and os.environ.get("SHARDSTEP_HOSTS") == "required":
        pytest.fail(f"SHARDSTEP_HOSTS=required, but {reason}", pytrace=False)
    if reason:
        pytest.skip(reason)


@pytest.fixture
def hosts(namespaces: None, tmp_path: Path) -> Iterator[list[Host]]:
    """Two hosts that share ``tmp_path``."""
    with open_hosts(2, tmp_path) as opened:
        yield opened
