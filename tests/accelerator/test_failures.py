"""Ranks that fail on the device, where others have enqueued more than they: nothing hangs, and nothing is lost."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer, hook_with_zero_step_interleaved, reduce_scatter_hook
from tests.accelerator import devices
from tests.accelerator.devices import device, module, on_accelerator_only, on_device, ranks, run_ranks, same
from tests.accelerator.modes import clone_weights, train_in
from tests.accelerator.training import OPTIMIZERS, SUMMED_OTHERWISE, loss_of, small_model, train_plainly

PATIENCE = 4.0  # seconds: the time-out of the process group
SOON = 16.0  # and what a busy machine may take beside it


class Fragile(torch.optim.AdamW):
    """Raises at one of its calls, of which there is one per bucket that this rank owns a part of."""

    calls, fails_at = 0, -1

    def step(self, closure: Any = None) -> Any:
        if self.calls == self.fails_at:
            raise ArithmeticError("broken on purpose")
        type(self).calls += 1
        return super().step(closure)


@on_device
def _fail_in_step(rank: int, world: int, settings: dict[str, Any], place: int) -> tuple[list[str], float]:
    """What the calls end with in and after a step in which rank 1 fails, and how long all of them took."""
    model = nn.Sequential(*(nn.Linear(7, 7) for _ in range(5))).double().to(device())
    ddp = DistributedDataParallel(model)
    # Every rank owns a part of each of the five buckets.
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), Fragile, lr=1e-2, shard="element", bucket_cap_mb=500 / 2**20, **settings
    )
    assert len(optimizer.layout.buckets) == 5

    def iterate(step: int) -> None:
        optimizer.zero_grad()
        loss_of(ddp, step, rank).backward()
        optimizer.step()

    for step in range(2):
        iterate(step)
    if rank == 1:
        Fragile.fails_at = Fragile.calls + place
    told, start = [], time.monotonic()
    for call in (lambda: iterate(2), optimizer.check_replicas, optimizer.consolidate_state_dict, optimizer.step):
        try:
            call()
            told.append("")
        except (ArithmeticError, RuntimeError) as error:
            told.append(f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - start
    with suppress(RuntimeError):  # what was enqueued and never met
        module().synchronize()
    return told, seconds


@devices.simulation_only  # NCCL's watchdog ends the process of a rank whose collective nobody joins
@pytest.mark.parametrize(
    ("settings", "place", "world"),
    [
        ({}, 2, 2),
        pytest.param({"parameters_as_bucket_view": True}, 0, 3, marks=pytest.mark.long),
        pytest.param({"lazy_gather": True}, 4, 2, marks=pytest.mark.long),
    ],
)
def test_a_rank_that_fails_in_its_step_is_named_on_all_and_nothing_goes_on(
    settings: dict[str, Any], place: int, world: int
) -> None:
    """The others have enqueued more than it. They hear of it when the ranks next compare, or at the time-out.

    (The simulated one computes at once, so it waits where something is unpacked. A GPU waits where the host looks.)
    """
    for rank, (told, seconds) in enumerate(run_ranks(_fail_in_step, world, settings, place, pg_timeout=PATIENCE)):
        assert seconds < PATIENCE + SOON, told
        if rank == 1:
            assert told[0] == "ArithmeticError: broken on purpose", told
        for one in (told[0] or told[1], *told[2:]):
            assert "broken on purpose" in one, told
            assert rank == 1 or "rank 1" in one, told
        for later in told[2:]:
            assert "Start the processes again, from a checkpoint" in later, told


@on_device
def _fail_in_backward(rank: int, world: int, inner: Any) -> None:
    ddp = DistributedDataParallel(small_model().to(device()), bucket_cap_mb=1e-3)
    optimizer = ZeroRedundancyOptimizer(ddp.module.parameters(), Fragile, overlap_with_ddp=True, bucket_cap_mb=1e-3)
    ddp.register_comm_hook(None, hook_with_zero_step_interleaved(inner, ddp, optimizer))
    for step in range(3):
        loss_of(ddp, step, rank).backward()
    Fragile.fails_at = Fragile.calls + 1
    with pytest.raises(ArithmeticError, match="on purpose"):
        loss_of(ddp, 3, rank).backward()
    for param in ddp.module.parameters():
        assert torch.isfinite(param.detach().cpu()).all()  # a race, if something still writes to it


@pytest.mark.parametrize("inner", [allreduce_hook, reduce_scatter_hook])
def test_parameters_can_be_read_after_an_update_failed_inside_backward(inner: Any) -> None:
    run_ranks(_fail_in_backward, 2, inner)


class Broken(RuntimeError):
    pass


def fail(gradient: Tensor) -> None:
    raise Broken


@on_accelerator_only
def _skip_batches(rank: int, world: int, find_unused: bool) -> list[Tensor]:
    """In some iterations a rank raises in its forward, in others within backward; all skip the batch.

    The ranks compare over the device, whose computation waits for the rank that failed. Hosts do not.
    """
    model = small_model().to(device())
    _, optimizer = train_in("shard_gradients", model, *OPTIMIZERS["AdamW"], find_unused=find_unused)
    for step in range(9):  # the last one goes well: nobody would meet what is left of one that failed
        optimizer.zero_grad()
        if step % 4 == 2:
            if rank != step % 3:
                loss_of(model, 100 + step, rank).backward()
        elif step % 4 == 3:
            handle = model[2].weight.register_hook(fail) if rank == step % 3 else None  # type: ignore[index]
            with suppress(Broken):
                loss_of(model, 100 + step, rank).backward()
            if handle is not None:
                handle.remove()
        else:
            loss_of(model, step // 4 * 2 + step % 4, rank).backward()  # numbers 0 to 4, without gaps
            optimizer.step()
    return clone_weights(model)


@pytest.mark.parametrize("find_unused", [False, True])
def test_a_batch_that_failed_on_one_rank_is_skipped_on_all(find_unused: bool) -> None:
    """Without a backend for the CPU. (With one: the differential harness.)"""
    world = ranks(2)
    expected, _ = train_plainly("AdamW", 5, range(world))
    for weights in run_ranks(_skip_batches, world, find_unused):
        same(weights, expected, SUMMED_OTHERWISE)
