"""Reductions beside the computation, by trace and allocator; under DDP, in Join, on meshes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import shardstep
from shardstep import ZeroRedundancyOptimizer
from tests.accelerator import simulated
from tests.accelerator.devices import (
    DEVICE,
    device,
    host_reads,
    on_accelerator_only,
    on_device,
    own_reads,
    run_ranks,
    same,
    simulation_only,
    sizes,
)
from tests.accelerator.simulated import Entry, Log
from tests.accelerator.test_reductions import STEPS, SUMMED_OTHERWISE, Net, loss_of, oracle, sharded, simple, weights_of
from tests.accelerator.timeline import Timeline, overlaps

# --- the trace -------------------------------------------------------------------------------------------------------


@on_device
def _trace(rank: int, world: int) -> Log:
    """Eight layers, each of which is a bucket."""
    torch.manual_seed(2)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8))).to(device())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, shard_gradients=True, bucket_cap_mb=16 * 16 * 4 / 2**20
    )
    batch = torch.randn(4, 16).to(device())
    for step in range(4):
        optimizer.zero_grad()
        with simulated.tracing() as log:
            loss = model(batch).square().mean()
            simulated.mark("backward")
            loss.backward()
            simulated.mark("step")
            if step == 3:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            simulated.mark("end")
    return log


@simulation_only
def test_a_bucket_is_reduced_while_backward_computes_the_next() -> None:
    """Its reductions take half as long as backward, and as long."""
    logs = run_ranks(_trace, 2)
    kernels = Timeline(logs).of(kind="kernel", stream="default", between=("backward", "step"))
    for factor in (0.5, 1.0):
        long = factor * len(kernels) / 8

        def duration(entry: Entry, long: float = long) -> float:
            return long if "reduce_scatter" in entry.name else 1.0

        timeline = Timeline(logs, duration, launching=0.0)
        computing = timeline.of(kind="kernel", stream="default", between=("backward", "step"))
        reductions = timeline.of(name="reduce_scatter", between=("backward", "step"))
        assert len(reductions) == 8
        for reduction in reductions[:-1]:
            assert any(overlaps(reduction, kernel) for kernel in computing)
        hidden = timeline.hidden(between=("backward", "step"))
        if factor == 0.5:  # all but the last, and backward waits for none
            assert hidden == 7 / 8
            assert all(before.end == kernel.start for before, kernel in itertools.pairwise(computing))
        else:  # a reduction takes longer than a layer, so they follow each other at once: no more can be hidden
            assert hidden > 0.7
            assert all(before.end == after.start for before, after in itertools.pairwise(reductions))
        reading = timeline.of(kind="kernel", stream="default", between=("step", "end"))[0]
        assert reading.start >= reductions[-1].end, "what reads gradients waits for them"


# --- accelerator-only groups -----------------------------------------------------------------------------------------


@on_accelerator_only
def _train_there_only(rank: int, world: int) -> list[Tensor]:
    side = sharded(rank)
    for step in range(STEPS):
        simple(side, step)
    return weights_of(side.model)


def test_a_group_that_serves_the_accelerator_only_is_enough() -> None:
    for weights in run_ranks(_train_there_only, 2):
        same(weights, oracle("simple", 2), SUMMED_OTHERWISE)


# --- under DDP -------------------------------------------------------------------------------------------------------


@on_device
def _train_ddp(rank: int, world: int, mode: str, views: bool) -> tuple[list[Tensor], list[str]]:
    model = Net().to(device())
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=views, bucket_cap_mb=4e-3)
    stepping = mode != "sharded"
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-2, bucket_cap_mb=4e-3, overlap_with_ddp=stepping
    )
    if stepping:
        make = shardstep.hook_with_zero_step_interleaved if mode == "interleaved" else shardstep.hook_with_zero_step
        ddp.register_comm_hook(None, make(shardstep.reduce_scatter_hook, ddp, optimizer))
    else:
        shardstep.shard_ddp_gradients(ddp, optimizer)

    def iterate(step: int) -> None:
        optimizer.zero_grad()
        loss_of(ddp, step, rank).backward()
        optimizer.step()

    for step in range(3):
        iterate(step)
    with host_reads() as reads:
        for step in range(3, STEPS):
            iterate(step)
    return weights_of(model), own_reads(reads)


@pytest.mark.parametrize("world", sizes(1, 2, 3))
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("mode", ["sharded", "last", "interleaved"])
def test_the_reduce_scatter_hook_has_the_weights_of_the_cpu_and_never_makes_the_host_wait(
    world: int, views: bool, mode: str
) -> None:
    for weights, reads in run_ranks(_train_ddp, world, mode, views):
        same(weights, oracle("simple", world), SUMMED_OTHERWISE)
        assert reads == []


# --- Join ------------------------------------------------------------------------------------------------------------


@on_device
def _join(rank: int, world: int, by_initial: bool) -> list[Tensor]:
    side = sharded(rank)
    with Join([side.optimizer], divide_by_initial_world_size=by_initial):
        for step in range(2 + rank):
            side.optimizer.zero_grad()
            side.losses(step, True).backward()
            side.clip(0.01)
            side.optimizer.step()
    return weights_of(side.model)


@pytest.mark.parametrize("world", sizes(1, 2, 3))
@pytest.mark.parametrize("by_initial", [False, True])
def test_ranks_without_inputs_take_part(by_initial: bool, world: int) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1 + world):
        there = [rank for rank in range(world) if step < 2 + rank]
        optimizer.zero_grad()
        losses = torch.stack([loss_of(model, step, rank) for rank in there]).sum()
        (losses / (world if by_initial else len(there))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
    for weights in run_ranks(_join, world, by_initial):
        same(weights, [param.detach() for param in model.parameters()], SUMMED_OTHERWISE)


# --- meshes ----------------------------------------------------------------------------------------------------------


@on_device
def _train_mesh(rank: int, world: int) -> Any:
    mesh = init_device_mesh(DEVICE, (2, world // 2), mesh_dim_names=("replicate", "shard"))
    side = sharded(rank, process_group=mesh)
    for step in range(2):
        simple(side, step)
    with host_reads() as reads:
        for step in range(2, STEPS):
            simple(side, step)
    return weights_of(side.model), own_reads(reads)


def test_replicas_of_a_mesh_are_summed_on_the_reduce_stream() -> None:
    for weights, reads in run_ranks(_train_mesh, 4):
        same(weights, oracle("simple", 4), SUMMED_OTHERWISE)
        assert reads == []
