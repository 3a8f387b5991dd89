"""Sharded gradients and hooks on the device, with models that have groups, frozen parameters, dtypes, shared layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardstep import ZeroRedundancyOptimizer
from tests.accelerator import devices
from tests.accelerator.devices import device, on_device, run_ranks, same, sizes
from tests.accelerator.modes import MODES, clone_weights, train_in
from tests.accelerator.test_steps import Model, groups_of, sharded, train

# The backend adds up in its own order: some roundings of float64 over the steps of a test.
SUMMED_OTHERWISE = 1e-11


@on_device
def _train_groups(rank: int, world: int) -> list[tuple[str, list[Tensor]]]:
    """Two groups, two dtypes, a parameter that is frozen for a while, one and two devices. All ranks have one batch."""
    found = []
    for second in (device(), devices.second_device()) if devices.has_two(world) else (device(),):
        for seed, settings in enumerate(
            ({}, {"shard": "tensor"}, {"gradient_buckets_in_flight": 1}, {"lazy_gather": True})
        ):
            devices.seed(seed)
            model = Model(device(), second)
            optimizer = sharded(model, shard_gradients=True, **settings)
            found.append((f"{second}, {settings}", train(model, optimizer)))
    return found


@pytest.mark.parametrize("world", sizes(1, 2, 3))
def test_groups_dtypes_and_freezing_train_as_in_the_plain_optimizer(world: int) -> None:
    """The mean of three equal gradients may be off by a rounding, and one parameter is float32."""
    plain = Model("cpu", "cpu")
    expected = train(plain, torch.optim.AdamW(groups_of(plain), lr=1e-2, weight_decay=0.1))
    for found in run_ranks(_train_groups, world):
        for case, weights in found:
            torch.testing.assert_close(
                weights, expected, rtol=1e-5, atol=1e-7, msg=lambda text, case=case: f"{case}\n{text}"
            )


def matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(9, 9, bias=False) for _ in range(5))).double()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    batch = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(batch.to(next(model.parameters()).device)).square().mean()


def oracle(make: Any, kind: Any, options: dict[str, Any], world: int, steps: int) -> list[Tensor]:
    """One process, the CPU, the plain optimizer, the mean over all ranks' losses."""
    model = make()
    optimizer = kind(model.parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([loss_of(model, step, rank) for rank in range(world)]).mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


@on_device
def _train_whole(rank: int, world: int) -> list[tuple[str, list[Tensor]]]:
    found = []
    for mode in MODES:
        model = matrices().to(device())
        called, optimizer = train_in(mode, model, torch.optim.Muon, {"lr": 1e-2})
        for step in range(4):
            optimizer.zero_grad()
            loss_of(called, step, rank).backward()
            optimizer.step()
        found.append((mode, clone_weights(model)))
    return found


@pytest.mark.parametrize("world", sizes(1, 2, 3))
def test_muon_which_needs_whole_tensors_trains_in_every_mode(world: int) -> None:
    """(Its steps are made in bfloat16, whose roundings follow from last bits: 2^-8 of a step of 1e-2, four times.)"""
    expected = oracle(matrices, torch.optim.Muon, {"lr": 1e-2}, world, 4)
    for found in run_ranks(_train_whole, world):
        for mode, weights in found:
            same(weights, expected, 2e-4, mode)


class Shared(nn.Module):
    """A layer in two segments that are computed again, each in a backward of its own: its gradient comes in parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(4)).double()

    def forward(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = checkpoint(
                lambda value, layer=layer: torch.tanh(self.layers[3](layer(value))), batch, use_reentrant=True
            )
        return batch


@on_device
def _train_shared(rank: int, world: int, find_unused: bool) -> list[Tensor]:
    model = Shared().to(device())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.SGD,
        lr=0.1,
        momentum=0.9,
        shard_gradients=True,
        bucket_cap_mb=1e-3,
        find_unused_parameters=find_unused,
    )
    for step in range(4):
        optimizer.zero_grad()
        batch = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))
        model(batch.to(device()).requires_grad_()).square().mean().backward()
        optimizer.step()
    return clone_weights(model)


def shared_oracle(world: int) -> list[Tensor]:
    model = Shared()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(world):
            batch = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))
            (model(batch.requires_grad_()).square().mean() / world).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("world", sizes(1, 2, 3))
def test_a_gradient_that_comes_in_parts_is_whole_and_nothing_is_taken_for_unused(world: int, find_unused: bool) -> None:
    expected = shared_oracle(world)
    for weights in run_ranks(_train_shared, world, find_unused):
        same(weights, expected, SUMMED_OTHERWISE)


class Lonely(Shared):
    """The same, with a parameter that is used when somebody says so."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.uses_extra = nn.Parameter(torch.ones((), dtype=torch.float64)), True

    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch) * (self.extra if self.uses_extra else 1.0)


@on_device
def _leave_out(rank: int, world: int, first: int) -> list[str]:
    """What two backwards that add up end with, if a parameter is not used from the ``first`` of them on."""
    model, told = Lonely().to(device()), []
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, shard_gradients=True, bucket_cap_mb=1e-3
    )
    for number in range(2):
        model.uses_extra = number < first
        try:
            model(torch.ones(2, 9, dtype=torch.float64, device=device()).requires_grad_()).sum().backward()
            optimizer.clip_grad_norm_(1e9)  # a backward inside of others may leave the rest to whoever reads
            told.append("")
        except RuntimeError as error:
            told.append(str(error))
    del optimizer
    return told


@pytest.mark.parametrize("first", [0, 1])
def test_a_parameter_that_is_not_used_is_an_error_also_when_gradients_come_in_parts(first: int) -> None:
    for told in run_ranks(_leave_out, max(sizes(1, 2)), first):
        assert told[:first] == [""] * first
        assert "got none in this backward" in told[first], told
