"""Every mode against DDP with the plain optimizer: a covering array of configurations, programs for each of them.

``make test`` has every pair of values, ``make test-all`` every triple (SHARDSTEP_STRENGTH=3).
"""

from __future__ import annotations

import os

import pytest

from tests.differential.cases import check
from tests.differential.configurations import AXES, SIMULATED, Configuration, covering

SEED = 1
STRENGTH = int(os.environ.get("SHARDSTEP_STRENGTH", "2"))
PROGRAMS = 2  # for each configuration
CONFIGURATIONS = covering(AXES, STRENGTH, SEED)
ON_DEVICE = covering(SIMULATED, STRENGTH, SEED)


def _names(rows: list[Configuration]) -> list[str]:
    return [f"{number}-{row.mode}-{row.optimizer}-{row.ranks}" for number, row in enumerate(rows)]


@pytest.mark.parametrize("number", range(len(CONFIGURATIONS)), ids=_names(CONFIGURATIONS))
def test_weights_gradients_and_state_are_those_of_ddp(number: int) -> None:
    check(CONFIGURATIONS[number], PROGRAMS, seed=1000 + number)


@pytest.mark.parametrize("number", range(len(ON_DEVICE)), ids=_names(ON_DEVICE))
def test_weights_gradients_and_state_are_those_of_ddp_on_the_simulated_device(number: int) -> None:
    check(ON_DEVICE[number], 1, seed=5000 + number)
