"""Models with branches on several streams or devices: autograd runs each on the stream, or thread, of its forward.

``test_modes.py`` trains branches on streams in every mode. Here gradients change streams, memory comes and goes, the
gradient of a layer comes in parts, and branches are on two accelerators, or on one and the CPU.
"""

from __future__ import annotations

import gc
import sys
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardstep import ZeroRedundancyOptimizer
from tests.accelerator import devices
from tests.accelerator.devices import device, module, on_device, run_ranks, same
from tests.accelerator.modes import clone_weights, train_in
from tests.accelerator.training import OPTIMIZERS, SUMMED_OTHERWISE, Branches, loss_of, on_streams, train_plainly

STEPS, PARTS = 4, 3


def _take_memory(model: Branches) -> None:
    """On the streams of the branches: of what was freed there, if it was freed too early."""
    for stream in model.streams:
        with module().stream(stream):
            made = [torch.ones(numel, dtype=torch.float64, device=device()) for numel in range(8, 200, 3)]
            torch._foreach_mul_(made, 2.0)


@on_device
def _train(rank: int, world: int, accumulates: str, reduce_dtype: torch.dtype | None) -> list[Tensor]:
    model, (kind, options) = on_streams(device()), OPTIMIZERS["SGD"]
    _, optimizer = train_in("shard_gradients", model, kind, {**options, "reduce_dtype": reduce_dtype})
    for step in range(STEPS):
        optimizer.zero_grad()
        _take_memory(model)
        for part in range(PARTS):
            unsynced = accumulates == "without sync" and part < PARTS - 1
            model.swaps = unsynced and part == 1  # a gradient is made on the one stream, and added to on the other
            with optimizer.no_sync() if unsynced else nullcontext():
                (loss_of(model, step, PARTS * rank + part) / PARTS).backward()
        optimizer.step()
    for param in model.parameters():
        param.grad = None
    del optimizer
    gc.collect()
    _take_memory(model)
    return clone_weights(model)


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
@pytest.mark.parametrize("accumulates", ["without sync", "after each reduction"])
def test_gradients_change_streams_while_they_accumulate(accumulates: str, reduce_dtype: torch.dtype | None) -> None:
    expected, _ = train_plainly("SGD", STEPS, range(2 * PARTS), Branches)
    for weights in run_ranks(_train, 2, accumulates, reduce_dtype):
        same(weights, expected, SUMMED_OTHERWISE)


class Shared(nn.Module):
    """A layer that is computed again in two segments, each in a backward of its own: its gradient comes in parts."""

    def __init__(self, comes_last: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Identity() if comes_last else nn.Linear(7, 7).double()
        self.layer = nn.Linear(7, 7).double()
        self.extra = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, batch: Tensor, uses_extra: bool = True) -> Tensor:
        batch = self.first(batch.requires_grad_())
        for _ in range(2):
            batch = torch.tanh(checkpoint(self.layer, batch, use_reentrant=True))
        return batch * self.extra if uses_extra else batch


@on_device
def _train_shared(rank: int, world: int, find_unused: bool, comes_last: bool) -> Any:
    model, (kind, options) = Shared(comes_last).to(device()), OPTIMIZERS["SGD"]
    _, optimizer = train_in("shard_gradients", model, kind, options, find_unused=find_unused)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    weights = clone_weights(model)
    try:
        loss_of(model, 0, rank, uses_extra=False).backward()
        optimizer.clip_grad_norm_(1e9)  # a backward inside of others may leave the rest to whoever reads
    except RuntimeError as error:
        return weights, str(error)
    return weights, ""


# Known, and wrong: when every parameter has its gradient, or a part of it, what comes next counts as another backward.
TAKEN_FOR_ANOTHER = pytest.mark.xfail(strict=True, reason="parameters that got their gradient before are missed")


@pytest.mark.parametrize(
    ("find_unused", "comes_last"),
    [(False, False), (True, False), (True, True), pytest.param(False, True, marks=TAKEN_FOR_ANOTHER)],
)
def test_a_gradient_that_comes_in_parts_is_whole_and_one_that_does_not_come_is_an_error(
    find_unused: bool, comes_last: bool
) -> None:
    expected, (kind, options) = Shared(comes_last), OPTIMIZERS["SGD"]
    optimizer = kind(expected.parameters(), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):  # (one after the other: two such backwards at once are an error of torch)
            (loss_of(expected, step, rank) / 2).backward()
        optimizer.step()
    for weights, error in run_ranks(_train_shared, 2, find_unused, comes_last):
        same(weights, clone_weights(expected), SUMMED_OTHERWISE)
        assert ("got none in this backward" in error) == (not find_unused), error


# --- several devices --------------------------------------------------------------------------------------------------

LIMIT = 0.01
SETTINGS = {
    "default": {},
    "views": {"parameters_as_bucket_view": True},
    "lazy": {"lazy_gather": True},
    "whole tensors": {"shard": "tensor"},
    "shard_gradients": {"shard_gradients": True},
}


def place(name: str) -> torch.device:
    if name == "second":
        return devices.second_device()
    return device() if name == "device" else torch.device("cpu")


@on_device
def _train_on_devices(rank: int, world: int, first: str, second: str, mode: str) -> list[Tensor]:
    sys.setswitchinterval(1e-5)  # threads take turns often
    here, places = device(), (place(first), place(second))
    model, (kind, options) = Branches(*places), OPTIMIZERS["SGD"]
    parts = [rank] if mode == "shard_gradients" else range(world)  # else all of them: as DDP leaves gradients
    with ExitStack() as stack:
        for one in places:
            if one.type != "cpu" and first == "device":  # all runs on a stream that is not the default one
                stream = module().Stream(device=one)
                stream.wait_stream(module().current_stream(one))
                stack.enter_context(module().stream(stream))
        module().set_device(here)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, bucket_cap_mb=1e-3, **SETTINGS[mode], **options)
        for step in range(12):
            optimizer.zero_grad()
            torch.stack([loss_of(model, step, part) for part in parts]).mean().backward()
            optimizer.clip_grad_norm_(LIMIT)
            optimizer.step()
        return clone_weights(model)


WITH_CPU = [
    (*places, mode) for places in (("device", "cpu"), ("cpu", "device")) for mode in ("lazy", "shard_gradients")
]


@pytest.mark.parametrize(("first", "second", "mode"), [*(("device", "second", mode) for mode in SETTINGS), *WITH_CPU])
def test_branches_on_several_devices_train_as_on_one(first: str, second: str, mode: str) -> None:
    """Autograd has a thread per device: they must not send at the same time, nor the same bucket twice.

    Clipping takes a factor from one to the other; the CPU must not read it before it is there.
    """
    if second == "second" and not devices.has_two(2):
        pytest.skip("needs two devices for each of 2 ranks")
    expected, _ = train_plainly("SGD", 12, range(2), Branches, LIMIT)
    for weights in run_ranks(_train_on_devices, 2, first, second, mode):
        same(weights, expected, SUMMED_OTHERWISE)
