"""``torch.compile(model)`` in every mode, on the device (``aot_eager``: the device has no inductor)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.accelerator.devices import device, on_device, run_ranks, same, sizes
from tests.accelerator.modes import MODES, clone_weights, train_in
from tests.accelerator.test_kernels import SUMMED_OTHERWISE
from tests.accelerator.training import OPTIMIZERS, CountingBackend, OwnForward, loss_of, train_plainly

STEPS = 4


@on_device
def _train(rank: int, world: int, mode: str, waits: bool = True) -> Any:
    kind, options = OPTIMIZERS["AdamW"]
    model, backend = OwnForward().to(device()), CountingBackend("aot_eager")
    called, optimizer = train_in(mode, model, kind, options, ddp_cap_mb=25)  # dynamo wants its usual buckets
    compiled = torch.compile(called, backend=backend)
    for step in range(STEPS):
        optimizer.zero_grad()
        if waits:
            optimizer.wait_for_parameters()  # as the docstring of lazy_gather asks for with a compiled model
        loss_of(compiled, step, rank).backward()
        optimizer.step()
    assert backend.graphs > 0, "nothing was compiled"
    optimizer.check_replicas()
    return clone_weights(model)


@pytest.mark.parametrize("world", sizes(2, 3))
@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_model_trains_as_the_plain_optimizer_does(mode: str, world: int) -> None:
    expected, _ = train_plainly("AdamW", STEPS, range(world))
    for weights in run_ranks(_train, world, mode):
        same(weights, expected, SUMMED_OTHERWISE)


def test_a_compiled_model_that_does_not_wait_for_lazy_gathers_is_right_all_the_same() -> None:
    """(And slow: dynamo begins anew for parameters of another class. The race detector is on.)"""
    expected, _ = train_plainly("AdamW", STEPS, range(2))
    for weights in run_ranks(_train, 2, "lazy", waits=False):
        same(weights, expected, SUMMED_OTHERWISE)
