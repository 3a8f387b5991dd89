"""Schedulers of the learning rate, and GradScaler, drive the sharded optimizer as they drive the plain one."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import AdamW
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import assert_same, parameters, set_gradients, train, values_of

STEPS, SAVED_AT = 12, 6
# How to build each class over an optimizer with two groups. Each changes something within 12 steps.
BUILDERS: dict[str, Any] = {
    "LambdaLR": lambda opt: lrs.LambdaLR(opt, [lambda epoch: 0.9**epoch, lambda epoch: 1 + 0.1 * (epoch % 3)]),
    "MultiplicativeLR": lambda opt: lrs.MultiplicativeLR(opt, [lambda epoch: 1.1, lambda epoch: 0.8]),
    "StepLR": lambda opt: lrs.StepLR(opt, step_size=3, gamma=0.3),
    "MultiStepLR": lambda opt: lrs.MultiStepLR(opt, milestones=[2, 5, 8], gamma=0.3),
    "ConstantLR": lambda opt: lrs.ConstantLR(opt, factor=0.25, total_iters=4),
    "LinearLR": lambda opt: lrs.LinearLR(opt, start_factor=0.1, total_iters=7),
    "ExponentialLR": lambda opt: lrs.ExponentialLR(opt, gamma=0.7),
    "SequentialLR": lambda opt: lrs.SequentialLR(
        opt, [lrs.LinearLR(opt, 0.1, total_iters=4), lrs.ExponentialLR(opt, 0.6)], milestones=[4]
    ),
    "PolynomialLR": lambda opt: lrs.PolynomialLR(opt, total_iters=9, power=2.0),
    "CosineAnnealingLR": lambda opt: lrs.CosineAnnealingLR(opt, T_max=5, eta_min=1e-4),
    "ChainedScheduler": lambda opt: lrs.ChainedScheduler(
        [lrs.ConstantLR(opt, factor=0.1, total_iters=3), lrs.ExponentialLR(opt, 0.9)], optimizer=opt
    ),
    "ReduceLROnPlateau": lambda opt: lrs.ReduceLROnPlateau(opt, factor=0.5, patience=1, cooldown=1),
    "CyclicLR": lambda opt: lrs.CyclicLR(opt, base_lr=[1e-3, 2e-3], max_lr=[1e-1, 2e-1], step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda opt: lrs.CosineAnnealingWarmRestarts(opt, T_0=3, T_mult=2),
    "OneCycleLR": lambda opt: lrs.OneCycleLR(opt, max_lr=[0.1, 0.3], total_steps=STEPS + 1),
    "SWALR": lambda opt: SWALR(opt, swa_lr=[0.5, 0.25], anneal_epochs=4),
}


def make(kind: Any, params: list) -> Any:
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
    if kind is AdamW:
        return AdamW(groups, lr=0.05)
    return ZeroRedundancyOptimizer(groups, AdamW, lr=0.05)


def full_dict(optimizer: Any) -> dict[str, Any]:
    """On every rank."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return copy.deepcopy(optimizer.state_dict())
    optimizer.consolidate_state_dict(to=0)
    box = [optimizer.state_dict()]
    dist.broadcast_object_list(box)
    return box[0]


def drive(kind: Any, name: str) -> Any:
    """Train under the scheduler, saved and resumed in the middle: options and weights after each step, and warnings."""
    params, trace = parameters(), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = make(kind, params)
        scheduler = BUILDERS[name](optimizer)
        for step in range(STEPS):
            if step == SAVED_AT:
                saved = copy.deepcopy(scheduler.state_dict()), full_dict(optimizer)
                optimizer = make(kind, params)
                scheduler = BUILDERS[name](optimizer)
                scheduler.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            train(optimizer, params, [step])
            scheduler.step(*([3.0, 2.0, 2.0, 2.0, 2.5, 1.0][step % 6],) * (name == "ReduceLROnPlateau"))
            options = [{key: value for key, value in group.items() if key != "params"} for group in
                       optimizer.param_groups]  # fmt: skip
            trace.append((copy.deepcopy(options), values_of(params)))
    return trace, sorted({str(item.message) for item in caught})


def drives_alike(rank: int, world_size: int, name: str) -> None:
    found, expected = (drive(kind, name) for kind in (ZeroRedundancyOptimizer, AdamW))
    assert_same(found[0], expected[0], name)
    assert set(found[1]) <= set(expected[1])
    assert len({options[0]["lr"] for options, _ in found[0]}) > 1, f"{name} changed nothing, so this shows nothing"


@pytest.mark.parametrize("name", BUILDERS)
def test_a_scheduler_drives_it_as_it_drives_the_plain_one(name):
    run_ranks(drives_alike, 2, name)


def test_the_table_has_every_scheduler():
    found = {name for name, kind in inspect.getmembers(lrs, inspect.isclass) if issubclass(kind, lrs.LRScheduler)}
    assert {name for name in found if name.strip("_") != "LRScheduler"} <= BUILDERS.keys()


# --- GradScaler -----------------------------------------------------------------------------------------------------


def scaled(rank: int, world_size: int) -> None:
    """Steps 0 and 3 overflow: the first of all, where there is no state yet, and one in the middle."""
    ours, theirs = parameters(), parameters()
    optimizer = ZeroRedundancyOptimizer(ours, AdamW, lr=0.02, shard="tensor", fused=True)
    sides = [(ours, optimizer), (theirs, AdamW(theirs, lr=0.02, fused=True))]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in sides]
    for step in range(6):
        before = values_of(ours)
        for (params, each), scaler in zip(sides, scalers, strict=True):
            factor = scaler.scale(torch.tensor(1.0, dtype=torch.float64))  # powers of two: exact
            set_gradients(params, step)
            for param in params:
                param.grad *= factor
            if step in (0, 3):
                params[-1].grad[0, 0] = float("inf")
            if step % 2:
                scaler.unscale_(each)
            scaler.step(each)
            scaler.update()
        assert_same(values_of(ours), values_of(theirs), f"step {step}")
        assert (step in (0, 3)) == all(torch.equal(one, other) for one, other in zip(ours, before, strict=True))
        assert scalers[0].state_dict() == scalers[1].state_dict()


def test_a_step_of_fused_adamw_that_overflows_is_skipped_on_all_ranks_together():
    """Plain fused AdamW divides by the scale in its kernel. The scale is a power of two, so both ways are exact."""
    run_ranks(scaled, 3)
