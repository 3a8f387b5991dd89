"""float32 masters on the simulated device, and in a model that is moved there and back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardstep import ZeroRedundancyOptimizer
from tests.accelerator.simulated import on_device
from tests.harness import run_ranks
from tests.twins import values

STAY, JOURNEY = ["cpu"] * 5, ["cpu", "sim", "sim", "cpu", "sim"]


@on_device
def _train(rank, world, mode, journey, views):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(9, 23), nn.Linear(23, 31)).to(torch.bfloat16)
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(),
        torch.optim.AdamW,
        lr=0.01,
        master_weights=mode,
        bucket_cap_mb=3e-4,
        parameters_as_bucket_view=views,
    )
    for step, place in enumerate(journey):
        model.to(place)
        for i, param in enumerate(model.parameters()):
            param.grad = values(param.shape, 100 * step + i, torch.bfloat16).to(param.device)
        optimizer.step()
    optimizer.check_replicas()
    masters = [optimizer.full_state(param).get("master_weight", torch.empty(0)) for param in model.parameters()]
    return [param.detach().cpu() for param in model.parameters()], masters


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("mode", [torch.float32, "remainder", "stochastic"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_model_that_is_moved_has_the_same_masters_and_parameters(world, mode, views):
    expected = run_ranks(_train, world, mode, STAY, views, fresh=True)[0]
    found = run_ranks(_train, world, mode, JOURNEY, views, fresh=True)[0]
    for kind, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), ("parameters", "masters")[kind]
