"""An optimizer that goes while something is under way on the device: its memory is not given away too early."""

from __future__ import annotations

import gc

import pytest
import torch

from shardstep.grads.reducer import GradientReducer
from tests.accelerator.devices import DEVICE, on_device, run_ranks, simulation_only, sizes
from tests.accelerator.modes import train_in
from tests.accelerator.training import OPTIMIZERS, loss_of, small_model


@on_device
def _drop(rank: int, world: int, mode: str, how: str, waits: bool = True) -> float:
    """What is allocated next is written, and found, by the stream that has computed."""
    if not waits:
        GradientReducer.__del__ = lambda self: None  # type: ignore[method-assign]
    model = small_model().to(DEVICE)
    called, optimizer = train_in(mode, model, *OPTIMIZERS["AdamW"])
    for step in range(3):
        optimizer.zero_grad()
        loss_of(called, step, rank).backward()
        if step < 2 or how == "after the step":
            optimizer.step()
    del model, called, optimizer
    gc.collect()
    found = [torch.ones(numel, dtype=torch.float64, device=DEVICE) for numel in range(1, 400, 3) for _ in range(3)]
    return float(sum(one.sum().item() - one.numel() for one in found))


@pytest.mark.parametrize("world", sizes(2, 3))
@pytest.mark.parametrize("how", ["before the step", "after the step"])
def test_an_optimizer_that_goes_while_gradients_are_reduced_keeps_their_memory(how: str, world: int) -> None:
    assert run_ranks(_drop, world, "shard_gradients", how) == [0.0] * world


@simulation_only
def test_memory_that_is_given_away_while_gradients_are_reduced_to_it_is_caught() -> None:
    """The negative control of the test above."""
    with pytest.raises(AssertionError, match="on the simulated device"):
        run_ranks(_drop, 2, "shard_gradients", "before the step", False)
