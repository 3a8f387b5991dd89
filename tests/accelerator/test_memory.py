"""How much memory sharded gradients and a step take, by the device's allocator: numbers that docs/design.md states."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shardstep import MemoryReport, ZeroRedundancyOptimizer
from tests.accelerator.devices import DEVICE, device, module, on_device, ranks, run_ranks
from tests.accelerator.modes import train_in
from tests.accelerator.training import OPTIMIZERS, loss_of, small_model

COUNT, NUMEL = 16, 64 * 1024  # parameters, of float32
PARAM = NUMEL * 4
BUCKET = 2 * PARAM
# What autograd makes for sums, a few numbers that are kept, and rounding to the allocator's blocks.
SMALL = PARAM // 4


class Measured(NamedTuple):
    """Of a warm iteration, in bytes."""

    before: int  # held between iterations
    peak: int  # in backward
    adding: int  # the peak of a second backward, which adds to what is there
    step: int  # what a step takes at its peak beside what is held
    report: MemoryReport


class _Sum(torch.autograd.Function):
    """Keeps nothing but the parameter, and makes nothing but its gradient."""

    @staticmethod
    def forward(ctx: Any, param: Tensor) -> Tensor:
        ctx.save_for_backward(param)
        return param.sum()

    @staticmethod
    def backward(ctx: Any, *outgoing: Tensor) -> Tensor:
        return torch.ones_like(ctx.saved_tensors[0])


def _peak(call: Any) -> int:
    module().reset_peak_memory_stats()
    call()
    return module().max_memory_allocated()


@on_device
def _measure(rank: int, world: int, in_flight: int | None) -> tuple[Measured, int]:
    """And what this rank's share of the gradients takes."""
    empty = module().memory_allocated()
    params = [nn.Parameter(torch.ones(NUMEL, device=device())) for _ in range(COUNT)]
    optimizer = ZeroRedundancyOptimizer(
        params,
        torch.optim.SGD,  # without foreach, whose own memory is not ours
        lr=0.1,
        momentum=0.9,
        foreach=False,
        shard_gradients=True,
        gradient_buckets_in_flight=in_flight,
        bucket_cap_mb=BUCKET / 2**20,
    )
    assert len(optimizer.layout.buckets) == COUNT // 2

    def backward() -> None:
        """One gradient at a time, which autograd makes and hands over."""
        torch.stack([_Sum.apply(param) for param in params]).sum().backward()

    for _ in range(3):
        optimizer.zero_grad()
        before = module().memory_allocated() - empty
        peak, adding = _peak(backward) - empty, _peak(backward) - empty
        report, held = optimizer.memory(), module().memory_allocated()
        step = _peak(optimizer.step) - held
    return Measured(before, peak, adding, step, report), optimizer.layout.owned_elements(rank) * 4


@pytest.mark.parametrize("in_flight", [1, 3, None])
def test_sharded_gradients_take_the_share_and_as_many_packed_buckets_as_may_be_under_way(in_flight: int | None) -> None:
    world, packed = max(ranks(3), 2), (in_flight or 2) * BUCKET
    for measured, share in run_ranks(_measure, world, in_flight):
        held = COUNT * PARAM + share + packed
        arriving = BUCKET // world
        assert abs(measured.before - held) <= SMALL, "between iterations: parameters, state, packed buckets"
        assert abs(measured.peak - held - share - BUCKET) <= SMALL, "and the share, and gradients of a bucket"
        assert abs(measured.adding - held - share - BUCKET - arriving) <= SMALL, "and what arrives of one bucket"
        assert abs(measured.step - 2 * BUCKET) <= SMALL, "a step stages two buckets"
        assert abs(measured.report.buffers - packed) <= SMALL
        assert abs(measured.report.gradients - share) <= SMALL


@on_device
def _drop(rank: int, world: int, mode: str, steps: bool) -> float:
    """What is allocated next is written, and found, by the stream that has computed."""
    model = small_model().to(DEVICE)
    called, optimizer = train_in(mode, model, *OPTIMIZERS["AdamW"])
    for step in range(3):
        optimizer.zero_grad()
        loss_of(called, step, rank).backward()
        if step < 2 or steps:
            optimizer.step()
    del model, called, optimizer
    gc.collect()
    found = [torch.ones(numel, dtype=torch.float64, device=DEVICE) for numel in range(1, 400, 3) for _ in range(3)]
    return float(sum(one.sum().item() - one.numel() for one in found))


@pytest.mark.parametrize(
    ("mode", "steps"), [("shard_gradients", False), ("shard_gradients", True), ("lazy", True), ("scattering", True)]
)
def test_an_optimizer_that_goes_while_something_is_under_way_keeps_its_memory(mode: str, steps: bool) -> None:
    assert run_ranks(_drop, 2, mode, steps) == [0.0] * 2
