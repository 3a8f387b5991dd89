"""The model is moved after the optimizer was built: to the simulated device, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardstep import ZeroRedundancyOptimizer
from tests.accelerator.simulated import needs_compiler, on_device
from tests.accelerator.training import OPTIMIZERS, loss_of, small_model, train_plainly
from tests.harness import run_ranks

pytestmark = needs_compiler

WORLDS = [1, 2, 3]
# By step: where the model is. It starts on the CPU, where the optimizer is built.
JOURNEYS = {
    "before there is state": ["sim", "sim", "sim"],
    "with state": ["cpu", "cpu", "sim", "sim"],
    "there and back": ["sim", "cpu", "sim", "sim:1", "cpu"],
}
# Sums of three or more ranks have another order than the oracle's mean, and the device's backend chooses its own: some
# roundings of float64 in numbers of the order of 1, over at most five steps.
SUMMED_OTHERWISE = 1e-12


def _build(name: str, model: torch.nn.Module, **settings: Any) -> ZeroRedundancyOptimizer:
    kind, options = OPTIMIZERS[name]
    # Buckets of a few parameters each, so that some are cut, some are whole, and ranks own something of each.
    return ZeroRedundancyOptimizer(model.parameters(), kind, bucket_cap_mb=1e-3, **settings, **options)


def _outcome(model: torch.nn.Module, optimizer: ZeroRedundancyOptimizer) -> tuple[list[Tensor], dict[str, Any]]:
    optimizer.check_replicas()
    optimizer.consolidate_state_dict(to=0)
    return [param.detach().cpu() for param in model.parameters()], optimizer.state_dict()


def _places_of_state(model: torch.nn.Module, optimizer: ZeroRedundancyOptimizer) -> set[tuple[str, str]]:
    return {
        (key, str(value.device))
        for param in model.parameters()
        for key, value in optimizer.state[param].items()
        if isinstance(value, Tensor)
    }


@on_device
def _train(rank: int, world: int, name: str, journey: list[str], views: bool) -> Any:
    model = small_model()
    params = list(model.parameters())
    optimizer = _build(name, model, parameters_as_bucket_view=views)
    for step, place in enumerate(journey):
        model.to(place)
        optimizer.zero_grad()
        loss_of(model, step).backward()  # the same on every rank, as DDP leaves gradients
        optimizer.step()
        assert {param.device for param in params} == {torch.empty(0, device=place).device}
        assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
        assert optimizer.engine.sharded.shares_memory == (world > 1 and place == "cpu")
    return _outcome(model, optimizer), _places_of_state(model, optimizer)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("journey", list(JOURNEYS))
def test_a_moved_model_trains_on_with_the_bits_of_the_plain_optimizer(
    world: int, views: bool, name: str, journey: str
) -> None:
    steps = JOURNEYS[journey]
    results = run_ranks(_train, world, name, steps, views, fresh=True)
    expected, state = train_plainly(name, len(steps))
    for (weights, _), _ in results:
        assert all(map(torch.equal, weights, expected))
    got = results[0][0][1]["state"]
    for index, entry in state["state"].items():
        assert all(torch.equal(got[index][key], entry[key]) for key in entry if isinstance(entry[key], Tensor))
    last = "cpu" if steps[-1] == "cpu" else "sim:0"
    homes = {"AdamW": {("exp_avg", last), ("exp_avg_sq", last), ("step", "cpu")}, "SGD": {("momentum_buffer", last)}}
    assert set().union(*(places for _, places in results)) == homes[name]
