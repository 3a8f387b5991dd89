"""What crosses the link between two hosts, read from the interface and compared with what DDP sends there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import traffic_worker
from tests.hosts.launch import torchrun
from tests.hosts.namespaces import open_hosts
from tests.hosts.training import SUMMED


@pytest.fixture(scope="module")
def measured(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """2+2 ranks: bytes per iteration by mode, and the size of the gradients."""
    folder = tmp_path_factory.mktemp("traffic")
    command = [Path(traffic_worker.__file__), folder]
    with open_hosts(2, folder) as hosts, torchrun(hosts, [2, 2], command, folder) as job:
        job.succeed(150)
    return json.loads((folder / "traffic.json").read_text())


def test_the_interface_counts_what_the_ring_of_ddp_sends(measured: dict[str, Any]) -> None:
    """Each of 4 ranks sends 1.5 times the gradients to the next one, and two of these ways cross the link: together 3.
    Within a tenth, for headers and acknowledgements."""
    assert measured["crossed"]["ddp"] == pytest.approx(3 * measured["gradients"], rel=0.1)


@pytest.mark.parametrize("mode", SUMMED)
def test_sharded_gradients_take_two_thirds_of_the_bytes_of_ddp(measured: dict[str, Any], mode: str) -> None:
    """Every element crosses once in each direction: half of them as partial sums, half as new parameters."""
    assert measured["crossed"][mode] / measured["crossed"]["ddp"] <= 0.70


def test_the_default_mode_adds_a_third_to_the_bytes_of_ddp(measured: dict[str, Any]) -> None:
    """DDP's all-reduce, and half of the parameters in each direction."""
    assert measured["crossed"]["default"] / measured["crossed"]["ddp"] <= 1.40
