"""heavyball beyond what the sweep (tests/optimizers) says of each of its classes: compiled steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.oracle import parameters
from tests.twins import Twins

pytestmark = pytest.mark.extra

SHAPES = [(7, 5), (5,), (7, 5), (3, 2, 2), (11, 3), (1,), (66, 64)]


def groups(params: list) -> list[dict[str, Any]]:
    return [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "lr": 0.02}]


def compiled(rank: int, world_size: int) -> None:
    import heavyball

    twins = Twins(partial(parameters, SHAPES, torch.float32), heavyball.AdamW, groups)
    twins.step(4)
    twins.check_weights()


def test_compiled_steps_of_other_groupings_end_with_the_same_bits():
    """The probe does not compile. What is compiled has other last bits, but the same ones in every grouping."""
    pytest.importorskip("heavyball")
    run_ranks(compiled, 3, timeout=170, pg_timeout=170)
