"""Every mode against DDP with the plain optimizer: a covering array of configurations, programs for each of them.

``make test`` has every pair of values, ``make test-all`` every triple.
"""

from __future__ import annotations

import pytest

from tests.differential.cases import check
from tests.differential.configurations import AXES, SIMULATED, Configuration, covering

SEED = 1
PROGRAMS = 2  # for each configuration
PAIRS = covering(AXES, 2, SEED)
DEVICE_PAIRS = covering(SIMULATED, 2, SEED)


def _names(rows: list[Configuration]) -> list[str]:
    return [f"{number}-{row.mode}-{row.optimizer}-{row.ranks}" for number, row in enumerate(rows)]


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=_names(PAIRS))
def test_weights_gradients_and_state_are_those_of_ddp(number: int) -> None:
    check(PAIRS[number], PROGRAMS, seed=1000 + number)


@pytest.mark.parametrize("number", range(len(DEVICE_PAIRS)), ids=_names(DEVICE_PAIRS))
def test_weights_gradients_and_state_are_those_of_ddp_on_the_simulated_device(number: int) -> None:
    check(DEVICE_PAIRS[number], 1, seed=5000 + number)


@pytest.mark.again
@pytest.mark.parametrize("part", range(40))
def test_every_triple_of_values(part: int) -> None:
    for number, config in enumerate(covering(AXES, 3, SEED)):
        if number % 40 == part:
            check(config, 1, seed=9000 + number)
