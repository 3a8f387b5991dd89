"""``accelerator.prepare`` moves the model to a second type of device after the optimizer was built.

Accelerate takes any device that ``ACCELERATE_TORCH_DEVICE`` names; it does not know the simulated one otherwise, so it
is told that this is a job of CPUs.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from shardstep import ZeroRedundancyOptimizer
from tests.accelerator.devices import DEVICE, device, on_device, run_ranks, same, sizes
from tests.accelerator.modes import clone_weights
from tests.accelerator.training import OPTIMIZERS, loss_of, small_model, train_plainly

accelerate = pytest.importorskip("accelerate")
STEPS = 4
# Sums of three ranks have another order than the oracle's mean: some roundings of float64 in numbers of the order of 1.
SUMMED_OTHERWISE = 1e-12


@on_device
def _prepared(rank: int, world: int, has_state: bool) -> Any:
    os.environ.update(WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # asked for, not used: the group exists already
    if DEVICE == "sim":
        os.environ["ACCELERATE_TORCH_DEVICE"] = "sim:0"
    accelerator = accelerate.Accelerator(cpu=DEVICE == "sim")
    kind, options = OPTIMIZERS["AdamW"]
    model = small_model()
    params = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(params, kind, bucket_cap_mb=1e-3, **options)
    first = 0
    if has_state:  # a step on the CPU, with everybody's batches: nobody averages yet
        sum(loss_of(model, 0, part) for part in range(world)).div(world).backward()  # type: ignore[union-attr]
        optimizer.step()
        first = 1
    called, prepared = accelerator.prepare(model, optimizer)
    assert {param.device for param in params} == {device()}
    for step in range(first, STEPS):
        prepared.zero_grad()
        accelerator.backward(loss_of(called, step, rank))
        prepared.step()
    optimizer.check_replicas()
    places = {value.device.type for state in optimizer.optim.state.values() for value in (state["exp_avg"],)}
    return clone_weights(model), places


@pytest.mark.parametrize("world", sizes(2, 3))
@pytest.mark.parametrize("has_state", [False, True])
def test_prepare_moves_the_model_and_training_goes_on_as_in_the_plain_optimizer(world: int, has_state: bool) -> None:
    expected, _ = train_plainly("AdamW", STEPS, range(world))
    for weights, places in run_ranks(_prepared, world, has_state):
        same(weights, expected, SUMMED_OTHERWISE)
        assert places <= {DEVICE}
