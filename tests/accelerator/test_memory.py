"""How much memory each mode holds and takes, by the device's allocator: numbers that docs/design.md states."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shardstep import MemoryReport, ZeroRedundancyOptimizer
from tests.accelerator import devices, simulated
from tests.accelerator.devices import device, on_device, run_ranks, simulation_only, sizes
from tests.accelerator.modes import MODES, train_in

COUNT, NUMEL = 16, 64 * 1024  # parameters, of float32
PARAM = NUMEL * 4
BUCKET = 2 * PARAM
# What autograd makes for sums, a few numbers that are kept, and rounding to the allocator's blocks.
SMALL = PARAM // 4


class Measured(NamedTuple):
    before: int  # held between iterations
    peak: int  # in backward
    adding: int  # the peak of a second backward, which adds to what is there
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


def _loss(params: list[nn.Parameter]) -> Tensor:
    """One gradient at a time, which autograd makes and hands over."""
    return torch.stack([_Sum.apply(param) for param in params]).sum()  # type: ignore[misc]


@on_device
def _measure(rank: int, world: int, in_flight: int | None) -> tuple[Measured, int]:
    """Of a warm iteration. And what the parameters, the state and this rank's share of the gradients take."""
    torch.manual_seed(1)
    empty = devices.memory_held()
    params = [nn.Parameter(torch.randn(NUMEL, device=device())) for _ in range(COUNT)]
    optimizer = ZeroRedundancyOptimizer(
        params,
        torch.optim.AdamW,
        lr=0.1,
        shard_gradients=True,
        gradient_buckets_in_flight=in_flight,
        bucket_cap_mb=BUCKET / 2**20,
    )
    assert len(optimizer.layout.buckets) == COUNT // 2
    for _ in range(3):
        optimizer.zero_grad()
        before = devices.memory_held() - empty
        devices.reset_peak_memory()
        _loss(params).backward()
        peak = devices.peak_memory() - empty
        devices.reset_peak_memory()
        _loss(params).backward()
        adding = devices.peak_memory() - empty
        report = optimizer.memory()
        optimizer.step()
    owned = optimizer.layout.owned_elements(rank) * 4
    return Measured(before, peak, adding, report), owned


@pytest.mark.parametrize("world", sizes(2, 3))
@pytest.mark.parametrize("in_flight", [1, 2, 3, None])
def test_sharded_gradients_take_the_share_and_as_many_packed_buckets_as_may_be_under_way(
    in_flight: int | None, world: int
) -> None:
    packed = (in_flight or 2) * BUCKET
    for measured, share in run_ranks(_measure, world, in_flight):
        state = 2 * share
        held = COUNT * PARAM + state + packed
        assert abs(measured.before - held) <= SMALL, "between iterations: parameters, state, packed buckets"
        assert abs(measured.peak - held - share - BUCKET) <= SMALL, "and the share, and gradients of a bucket"
        arriving = BUCKET // world
        assert abs(measured.adding - held - share - BUCKET - arriving) <= SMALL, "and what arrives of one bucket"
        assert abs(measured.report.buffers - packed) <= SMALL
        assert abs(measured.report.gradients - share) <= SMALL


@on_device
def _staging(rank: int, world: int) -> int:
    """What a warm step takes at its peak beside what it holds."""
    params = [nn.Parameter(torch.randn(NUMEL, device=device())) for _ in range(COUNT)]
    optimizer = ZeroRedundancyOptimizer(
        params, torch.optim.SGD, lr=1e-2, bucket_cap_mb=BUCKET / 2**20, shard_gradients=True, foreach=False
    )
    for _ in range(3):
        optimizer.zero_grad()
        _loss(params).backward()
        devices.reset_peak_memory()
        held = devices.memory_held()
        optimizer.step()
        used = devices.peak_memory() - held
    return used


@pytest.mark.parametrize("world", sizes(2, 3))
def test_a_step_stages_two_buckets_and_takes_nothing_else(world: int) -> None:
    for used in run_ranks(_staging, world):
        assert abs(used - 2 * BUCKET) <= SMALL


@on_device
def _ten_iterations(rank: int, world: int, mode: str, clips: bool) -> Any:
    """Where warm iterations took memory that was never used before; and how often they took some."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(48, 48), nn.Tanh()))).to(device())
    options = {"lr": 1e-3, "weight_decay": 0.1}
    called, optimizer = train_in(mode, model, torch.optim.AdamW, options, cap_mb=0.02, ddp_cap_mb=0.02)
    batch = torch.randn(8, 48, device=device())

    def iterate() -> None:
        optimizer.zero_grad()
        called(batch).square().mean().backward()
        if clips:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()

    for _ in range(4):
        iterate()
    with simulated.allocations() as made:
        for _ in range(10):
            iterate()
    return [one for one in made if one.is_new], len(made)


STEP_IN_BACKWARD = ("hook", "interleaved", "scattering")
LOOPS = [(mode, False) for mode in MODES] + [(mode, True) for mode in MODES if mode not in STEP_IN_BACKWARD]


@simulation_only
@pytest.mark.parametrize(("mode", "clips"), LOOPS)
def test_ten_warm_iterations_take_no_memory_that_was_not_used_before(mode: str, clips: bool) -> None:
    for fresh, count in run_ranks(_ten_iterations, 2, mode, clips):
        assert fresh == []
        assert count > 100  # it counts something
