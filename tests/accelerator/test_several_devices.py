"""Models on several devices in one process: two accelerators, or one and the CPU."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from shardstep import ZeroRedundancyOptimizer
from tests.accelerator import devices
from tests.accelerator.devices import device, on_device, run_ranks, same

PLACES = [("device", "second"), ("device", "cpu"), ("cpu", "device")]
# The backend adds up in its own order: some roundings of float64 over the steps of a test.
SUMMED_OTHERWISE = 1e-11


def place(name: str) -> torch.device:
    if name == "second":
        return devices.second_device()
    return device() if name == "device" else torch.device("cpu")


def skip_without(second: str, world: int) -> None:
    if second == "second" and not devices.has_two(world):
        pytest.skip(f"needs two devices for each of {world} ranks")


class Net(nn.Module):
    """Two branches without a common parameter: autograd's threads work on both at the same time."""

    def __init__(self, first: torch.device | str = "cpu", second: torch.device | str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Sequential(*(nn.Linear(9, 9) for _ in range(20))).double().to(first)
        self.other = nn.Sequential(*(nn.Linear(9, 9) for _ in range(20))).double().to(second)
        self.first, self.second = first, second

    def forward(self, batch: Tensor) -> Tensor:
        return self.one(batch.to(self.first)).to(self.second) * self.other(batch.to(self.second))

    def in_turn(self) -> list[nn.Parameter]:
        """Of both branches in turn, so that their buckets are sent in turn."""
        return [param for pair in zip(self.one.parameters(), self.other.parameters(), strict=True) for param in pair]


def loss_of(model: Net, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 9, dtype=torch.float64, generator=generator)).square().mean()


def oracle(world: int, steps: int, limit: float) -> list[Tensor]:
    """One process, the CPU, the plain optimizer, the mean over all ranks' losses."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([loss_of(model, step, rank) for rank in range(world)]).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
    return [param.detach() for param in model.parameters()]


@on_device
def _train(rank: int, world: int, first: str, second: str, steps: int, limit: float) -> list[Tensor]:
    sys.setswitchinterval(1e-5)  # threads take turns often
    model = Net(place(first), place(second))
    optimizer = ZeroRedundancyOptimizer(
        model.in_turn(), torch.optim.SGD, lr=0.5, shard_gradients=True, bucket_cap_mb=1e-3
    )
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.clip_grad_norm_(limit)
        optimizer.step()
    return [param.detach().cpu() for param in model.parameters()]


@pytest.mark.parametrize(("first", "second"), PLACES)
def test_sharded_gradients_of_branches_on_several_devices_are_those_of_one(first: str, second: str) -> None:
    """Autograd has a thread per device: they must not send at the same time, nor the same bucket twice."""
    skip_without(second, 2)
    expected = oracle(2, 20, 0.01)
    for weights in run_ranks(_train, 2, first, second, 20, 0.01):
        same(weights, expected, SUMMED_OTHERWISE)


@on_device
def _clip(rank: int, world: int, first: str, second: str) -> list[Tensor]:
    model = Net(place(first), place(second))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5, bucket_cap_mb=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        torch.stack([loss_of(model, step, one) for one in range(world)]).mean().backward()  # as DDP leaves gradients
        optimizer.clip_grad_norm_(0.01)
        optimizer.step()
    return [param.detach().cpu() for param in model.parameters()]


@pytest.mark.parametrize(("first", "second"), PLACES)
def test_gradients_on_several_devices_are_clipped_together(first: str, second: str) -> None:
    """The factor goes from one to the other; the CPU must not read it before it is there."""
    skip_without(second, 2)
    expected = oracle(2, 3, 0.01)
    for weights in run_ranks(_clip, 2, first, second):
        same(weights, expected, SUMMED_OTHERWISE)
