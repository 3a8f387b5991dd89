"""Models that compute on several streams: autograd runs the backward of each branch on the stream of its forward."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer
from shardstep.grads.gradient_streams import GradientStreams
from tests.accelerator import devices, simulated
from tests.accelerator.devices import device, module, on_device, run_ranks, same, simulation_only, sizes
from tests.accelerator.modes import MODES, train_in

# The backend adds up in its own order: some roundings of float64 over the steps of a test.
SUMMED_OTHERWISE = 1e-11
STEPS = 4


class Branches(nn.Module):
    """Two branches, each on a stream of its own if there are streams. A bucket has layers of both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(8)).double()
        self.streams: tuple[Any, ...] = ()
        self.swaps = False

    def branches(self) -> tuple[nn.Module, nn.Module]:
        return nn.Sequential(*self.layers[0::2]), nn.Sequential(*self.layers[1::2])

    def forward(self, batch: Tensor) -> Tensor:
        one, other = self.branches()
        if not self.streams:
            return one(batch) * other(batch)
        here, results = module().current_stream(), []
        branches = (other, one) if self.swaps else (one, other)
        for stream, branch in zip(self.streams, branches, strict=True):
            stream.wait_stream(here)
            with module().stream(stream):
                results.append(branch(batch))
        for stream, result in zip(self.streams, results, strict=True):
            here.wait_stream(stream)
            result.record_stream(here)
        return results[0] * results[1]


def loss_of(model: nn.Module, step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    batch = torch.randn(5, 7, dtype=torch.float64, generator=generator)
    return model(batch.to(next(model.parameters()).device)).square().mean()


def oracle(parts: int) -> list[Tensor]:
    """One process, the CPU, the plain optimizer, the mean over all parts of a batch."""
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.stack([loss_of(model, step, part) for part in range(parts)]).mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def on_streams(count: int = 2) -> Branches:
    model = Branches().to(device())
    model.streams = tuple(module().Stream() for _ in range(count))
    return model


def weights_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().cpu() for param in model.parameters()]


@on_device
def _train(rank: int, world: int) -> list[tuple[str, list[Tensor]]]:
    found = []
    for mode in MODES:
        for seed in (1, 2, 3):
            devices.seed(seed)
            model = on_streams()
            called, optimizer = train_in(mode, model, torch.optim.SGD, {"lr": 0.5, "momentum": 0.9})
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(called, step, rank).backward()
                optimizer.step()
            if mode == "lazy":
                optimizer.wait_for_parameters()
            found.append((f"{mode}, {seed}", weights_of(model)))
    return found


@pytest.mark.parametrize("world", sizes(1, 2, 3))
def test_branches_on_two_streams_have_the_weights_of_the_cpu_and_no_race(world: int) -> None:
    expected = oracle(world)
    for found in run_ranks(_train, world):
        for case, weights in found:
            same(weights, expected, SUMMED_OTHERWISE, case)


@on_device
def _accumulate(rank: int, world: int, reduce_dtype: torch.dtype | None, cap_mb: float) -> list[Tensor]:
    model = on_streams()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.SGD,
        lr=0.5,
        momentum=0.9,
        shard_gradients=True,
        bucket_cap_mb=cap_mb,
        reduce_dtype=reduce_dtype,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.no_sync():
            for part in (0, 1):
                model.swaps = part == 1  # a gradient is made on the one stream, and added to on the other
                (loss_of(model, step, 3 * rank + part) / 3).backward()
        (loss_of(model, step, 3 * rank + 2) / 3).backward()
        optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("cap_mb", [1e-3, 25])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_gradients_that_change_streams_while_they_accumulate(reduce_dtype: torch.dtype | None, cap_mb: float) -> None:
    expected = oracle(6)
    for weights in run_ranks(_accumulate, 2, reduce_dtype, cap_mb):
        same(weights, expected, SUMMED_OTHERWISE)


@on_device
def _add_up(rank: int, world: int) -> list[Tensor]:
    """Buckets of one branch each: what is done with one must not be done on the stream of the other."""
    model = on_streams()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9, shard_gradients=True, bucket_cap_mb=1e-3
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            (loss_of(model, step, 3 * rank + part) / 3).backward()
        optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("world", sizes(1, 2, 3))
def test_branches_add_to_gradients_that_were_reduced(world: int) -> None:
    expected = oracle(3 * world)
    for weights in run_ranks(_add_up, world):
        same(weights, expected, SUMMED_OTHERWISE)


@on_device
def _prepare_early(rank: int, world: int, given_up: bool) -> list[Tensor]:
    """The stream of a branch makes tensors before it waits for the parameters, or when the optimizer is gone."""
    model = on_streams()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9, shard_gradients=True, bucket_cap_mb=1e-3
    )

    def make_tensors() -> None:
        for stream in model.streams:
            with module().stream(stream):
                made = [torch.ones(numel, dtype=torch.float64, device=device()) for numel in range(8, 200, 3)]
                torch._foreach_mul_(made, 2.0)

    for step in range(STEPS):
        optimizer.zero_grad()
        make_tensors()
        loss_of(model, step, rank).backward()
        optimizer.step()
    if given_up:
        for param in model.parameters():
            param.grad = None
        del optimizer
        gc.collect()
        make_tensors()
    return weights_of(model)


@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("world", sizes(1, 2))
def test_memory_of_a_branch_is_not_given_away_before_the_step_has_read_it(world: int, given_up: bool) -> None:
    expected = oracle(world)
    for weights in run_ranks(_prepare_early, world, given_up):
        same(weights, expected, SUMMED_OTHERWISE)


class OnTwoDevices(nn.Module):
    """A branch on each of two devices: autograd has a thread for each, in which the other's stream is the default."""

    def __init__(self, first: torch.device | str = "cpu", second: torch.device | str = "cpu") -> None:
        super().__init__()
        self.model = Branches()
        self.one, self.other = self.model.branches()
        self.one.to(first)
        self.other.to(second)
        self.first, self.second = torch.device(first), torch.device(second)

    def forward(self, batch: Tensor) -> Tensor:
        return self.one(batch.to(self.first)).to(self.second) * self.other(batch.to(self.second))


@contextmanager
def side_streams(places: list[torch.device]) -> Iterator[None]:
    """Everything runs on a stream of its own, on each of these devices."""
    with ExitStack() as stack:
        for place in places:
            stream = module().Stream(device=place)
            stream.wait_stream(module().current_stream(place))
            stack.enter_context(module().stream(stream))
        module().set_device(places[0])
        yield


@on_device
def _train_on_two_devices(rank: int, world: int, parts: int) -> list[Tensor]:
    places = [device(), devices.second_device()]
    model = OnTwoDevices(*places)
    with side_streams(places):
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, lr=0.5, momentum=0.9, shard_gradients=True, bucket_cap_mb=1e-3
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(parts):
                (loss_of(model, step, parts * rank + part) / parts).backward()
            optimizer.step()
        return weights_of(model)


@pytest.mark.skipif(not devices.has_two(2), reason="needs two devices for each of 2 ranks")
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("world", sizes(1, 2))
def test_two_devices_that_both_compute_on_streams_of_their_own(world: int, parts: int) -> None:
    expected = oracle(world * parts)
    for weights in run_ranks(_train_on_two_devices, world, parts):
        same(weights, expected, SUMMED_OTHERWISE)


@on_device
def _train_without_notes(rank: int, world: int) -> str:
    GradientStreams.note = lambda *_: None  # type: ignore[method-assign]
    model = on_streams()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5, shard_gradients=True)
    try:
        loss_of(model, 0, rank).backward()
    except RuntimeError as error:
        del optimizer
        with simulated.races_ignored():
            module().synchronize()
        return str(error)
    return ""


@simulation_only
def test_streams_that_are_not_waited_for_would_be_noticed() -> None:
    """The negative control of this file."""
    for error in run_ranks(_train_without_notes, 2):
        assert "A race on the simulated device" in error


@on_device
def _plain_ddp(rank: int, world: int) -> list[Tensor]:
    model = on_streams()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(ddp, step, rank).backward()
        optimizer.step()
    return weights_of(model)


def test_plain_ddp_takes_such_a_model_too() -> None:
    """So the model of this file is one that users may have."""
    for weights in run_ranks(_plain_ddp, 2):
        same(weights, oracle(2), SUMMED_OTHERWISE)
