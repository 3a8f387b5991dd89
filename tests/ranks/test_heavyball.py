"""heavyball beyond what the sweep (tests/optimizers) says of each of its classes: compiled steps, and random ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.twins import Twins, parameters

pytestmark = pytest.mark.extra

SHAPES = [(7, 5), (5,), (7, 5), (3, 2, 2), (11, 3), (1,), (66, 64)]
STEPS = 4


def twins_of(name: str, **sharded: Any) -> Twins:
    import heavyball

    def groups(params: list) -> list[dict[str, Any]]:
        return [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:], "lr": 0.02}]

    return Twins(partial(parameters, SHAPES, torch.float32), getattr(heavyball, name), groups, sharded=sharded)


def compiled(rank: int, world_size: int) -> None:
    twins = twins_of("AdamW")
    twins.step(STEPS)
    twins.check_weights()


def test_compiled_steps_of_other_groupings_end_with_the_same_bits():
    """The probe does not compile. What is compiled has other last bits, but the same ones in every grouping."""
    pytest.importorskip("heavyball")
    run_ranks(compiled, 3, timeout=170, pg_timeout=170)


def vouched(rank: int, world_size: int) -> None:
    torch.compiler.set_stance("force_eager")
    twins = twins_of("Muon", shard="tensor")
    twins.step(STEPS)
    for mine, theirs in zip(twins.ours, twins.theirs, strict=True):
        # bfloat16 within, rounded at random: as far apart as two runs of the plain optimizer are
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0.01)
    twins.opt.check_replicas()


def test_muon_trains_for_who_accepts_other_random_numbers():
    pytest.importorskip("heavyball")
    run_ranks(vouched, 3)
