"""The model is moved after the optimizer was built: to the device, and back, with steps in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import shardstep
from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.accelerator import devices
from tests.accelerator.devices import DEVICE, device, on_device, ranks, run_ranks, same
from tests.accelerator.modes import clone_weights
from tests.accelerator.training import OPTIMIZERS, SUMMED_OTHERWISE, loss_of, small_model, train_plainly

WORLD = ranks(3)
# By step: where the model is moved to. It starts on the CPU, where the optimizer is built.
JOURNEY = ("device", "device", "cpu", "device", "second", "cpu", "device", "device", "cpu")
WHEN = ("before backward", "between backwards", "before step", "before zero_grad")  # by step, too
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"parameters_as_bucket_view": True},
    "lazy": {"lazy_gather": True},
    "fused": {"fused": True},  # whose counter of steps is beside the parameter
    "shard_gradients": {"shard_gradients": True},
    "shard_gradients, views": {"shard_gradients": True, "parameters_as_bucket_view": True},
}


def place(name: str) -> torch.device:
    """Of the journey. Where GPUs are too few for a second one, the model stays on the first."""
    if name == "cpu":
        return torch.device("cpu")
    return devices.second_device() if name == "second" and devices.has_two(WORLD) else device()


def build(model: nn.Module, **settings: Any) -> ZeroRedundancyOptimizer:
    # Buckets of a few parameters each, so that some are cut, some are whole, and ranks own something of each.
    kind, options = OPTIMIZERS["AdamW"]
    return ZeroRedundancyOptimizer(model.parameters(), kind, bucket_cap_mb=1e-3, **settings, **options)


def travel(mode: str, rank: int, world: int, folder: str) -> tuple[list[Tensor], dict[str, Any], set[str]]:
    """Weights, the state dict on rank 0, and where the state of this rank is.

    At step 6 training goes on from a checkpoint, which is loaded before the move.
    """
    model = small_model()
    optimizer = build(model, **SETTINGS[mode])
    sharded = "shard_gradients" in mode
    parts = [rank] if sharded else range(world)  # else all of them: as DDP leaves gradients

    def backward(step: int) -> None:
        torch.stack([loss_of(model, step, part) for part in parts]).mean().div(2).backward()

    for step, stop in enumerate(JOURNEY):
        if step == 6:
            checkpoint.save(folder, optimizer, model=model)
            model = small_model()
            optimizer = build(model, **SETTINGS[mode])
            checkpoint.load(folder, optimizer, model=model)
        params, when = list(model.parameters()), WHEN[step % 4]
        moves = {moment: model.to if moment == when else lambda where: None for moment in WHEN}
        moves["before backward"](place(stop))
        optimizer.zero_grad()
        backward(step)
        moves["between backwards"](place(stop))
        backward(step)
        moves["before step"](place(stop))
        optimizer.clip_grad_norm_(1e9)  # asks every gradient
        optimizer.step()
        moves["before zero_grad"](place(stop))
        assert {param.device for param in params} == {place(stop)}
        assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
        if sharded:
            assert {optimizer.full_grad(param).device for param in params} == {place(stop)}  # type: ignore[union-attr]
    optimizer.check_replicas()
    optimizer.consolidate_state_dict(to=0)
    homes = {entry["exp_avg"].device.type for entry in optimizer.state.values() if entry}
    return clone_weights(model), optimizer.state_dict() if rank == 0 else {}, homes


@on_device
def _travel(rank: int, world: int, mode: str, folder: str) -> Any:
    return travel(mode, rank, world, folder)


@pytest.mark.parametrize("mode", SETTINGS)
def test_a_moved_model_trains_on_as_in_the_plain_optimizer(mode: str, tmp_path: Path) -> None:
    expected, plain = train_plainly("AdamW", len(JOURNEY), range(WORLD))
    results = run_ranks(_travel, WORLD, mode, str(tmp_path / "c"))
    for weights, _, homes in results:
        same(weights, expected, SUMMED_OTHERWISE)
        assert homes <= {"cpu"}
    found = results[0][1]["state"]
    for index, entry in plain["state"].items():
        same([found[index][key] for key in entry], list(entry.values()), SUMMED_OTHERWISE)


# --- what is refused --------------------------------------------------------------------------------------------------


def error_of(call: Any) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


@on_device
def _move_one_rank(rank: int, world: int) -> str:
    model = small_model()
    optimizer = build(model, shard_gradients=True)

    def iterate() -> None:
        optimizer.zero_grad()
        loss_of(model, 0).backward()
        optimizer.step()

    iterate()
    if rank == 1:
        model.to(device())
    return error_of(iterate)


@pytest.mark.long
def test_a_model_that_is_moved_on_one_rank_only_is_an_error_on_all() -> None:
    errors = run_ranks(_move_one_rank, 2, pg_timeout=4 if DEVICE == "sim" else 20)
    where = "sim:0" if DEVICE == "sim" else "cuda:1"  # of rank 1
    assert f"rank 1 waits in going on after the model was moved (the parameters are on {where} now" in errors[0]
    assert "expects a call on every rank of the group, but rank 0 did not call it" in errors[1]


@on_device
def _move_wrongly(rank: int, world: int) -> list[str]:
    errors = []
    model = small_model()
    optimizer = build(model)
    model.to(device())
    if rank == 1:
        model[0].to(torch.device(DEVICE, 1 - device().index))  # of the other rank, on CUDA: nothing is sent there
    errors.append(error_of(optimizer.step))
    model = small_model()
    optimizer = build(model)
    model.to(device(), torch.float32)
    errors.append(error_of(optimizer.step))
    for mode in ("default", "sharded", "stepping hook"):
        model = small_model()
        optimizer = build(model, overlap_with_ddp=mode == "stepping hook")
        ddp = DistributedDataParallel(model)
        if mode == "sharded":
            shardstep.shard_ddp_gradients(ddp, optimizer)
        elif mode == "stepping hook":
            ddp.register_comm_hook(None, shardstep.hook_with_zero_step(allreduce_hook, ddp, optimizer))
        model.to(device())
        errors.append(error_of(lambda ddp=ddp: [loss_of(ddp, 0, rank).backward(), optimizer.step()]))  # noqa: B023
    return errors


def test_models_that_cannot_be_followed_are_an_error_on_every_rank_that_says_why() -> None:
    for apart, converted, *wrapped in run_ranks(_move_wrongly, 2, pg_timeout=20):
        assert "to be moved together" in apart
        assert "Spread the model over devices first" in apart
        assert "expects to stay as it was when the optimizer was built (shape (13, 7), float64)" in converted
        assert len(wrapped) == 3
        for error in wrapped:
            assert "DistributedDataParallel cannot be moved" in error
            assert "wrap it (again) afterwards" in error
