"""State dicts, new groups and freezing while the DDP hooks step inside backward. Oracle: see test_ddp_hooks.py."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.hook_twins import (
    BOTH,
    DECAY,
    HOOKS,
    OPTIMIZERS,
    SMALL_CAP,
    HookTwins,
    Side,
    Tangled,
    all_params,
    batch_of,
    two_groups,
)
from tests.oracle import assert_same, error_of, values_of

# --- state, groups, freezing --------------------------------------------------------------------------------------


def everywhere(optimizer: ZeroRedundancyOptimizer, to: int) -> dict[str, Any]:
    """Collective: the consolidated state dict, on every rank."""
    optimizer.consolidate_state_dict(to=to)
    box = [optimizer.state_dict() if optimizer.rank == to else None]
    dist.broadcast_object_list(box, src=to)
    return box[0]


def load_before_the_first_iteration(rank: int, world: int, hook: str) -> None:
    for name, (optimizer_class, options) in OPTIMIZERS.items():
        first = HookTwins(optimizer_class, hook=hook, **options)
        first.iterate(3)
        saved, weights = everywhere(first.zero, to=world - 1), first.ours.ddp.module.state_dict()
        resumed = HookTwins(optimizer_class, hook=hook, zero={"shard": "tensor", "bucket_cap_mb": SMALL_CAP}, **options)
        for side in (resumed.theirs, resumed.ours):
            side.ddp.module.load_state_dict(weights)
            side.optimizer.load_state_dict(saved)
        first.iterate(3)
        resumed.iteration = 3
        resumed.iterate(3)
        resumed.check()
        assert_same(resumed.ours.weights(), first.ours.weights(), f"{name}: resumed")


@pytest.mark.parametrize("hook", HOOKS)
def test_a_state_that_is_loaded_before_the_first_iteration_counts_in_it(hook):
    run_ranks(load_before_the_first_iteration, 2, hook)


def consolidate_at_any_time(rank: int, world: int, hook: str) -> None:
    twins = HookTwins(AdamW, hook=hook, **DECAY)
    twins.check_state()  # before anything has happened
    assert twins.zero.state_dict()["state"] == {}
    for iteration in range(4):
        twins.iterate(1, step=False)
        error = error_of(twins.zero.state_dict, "stale")  # the step was made, called for or not
        assert "consolidate_state_dict" in str(error)
        twins.check_state(to=iteration % world)
        saved = everywhere(twins.zero, to=0)
        twins.plain.load_state_dict(saved)
        if iteration == 2:
            twins.zero.load_state_dict(saved)
    # In the middle of an accumulation: nothing has changed yet.
    for side in (twins.theirs, twins.ours):
        side.optimizer.zero_grad()
        with side.ddp.no_sync():
            side.backward(batch_of(rank, 60))
    twins.check_state(to=1)
    for side in (twins.theirs, twins.ours):
        side.backward(batch_of(rank, 61))
        side.optimizer.step()
    twins.check()


@pytest.mark.parametrize("hook", HOOKS)
def test_the_state_can_be_consolidated_at_any_time_and_goes_on_in_the_plain_optimizer(hook):
    run_ranks(consolidate_at_any_time, 3, hook)


def groups_that_come_later(rank: int, world: int, hook: str) -> None:
    """DDP reduces all parameters from the start; the optimizer learns of some of them later."""
    for ddp in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        for cap in (SMALL_CAP, 25):
            twins = HookTwins(
                AdamW,
                hook=hook,
                ddp=ddp,
                zero={"bucket_cap_mb": cap},
                groups=lambda module: list(module.layers[1:3].parameters()),
                **DECAY,
            )
            twins.iterate(3)
            for side in (twins.theirs, twins.ours):
                added = list(side.ddp.module.layers[3:].parameters())
                side.optimizer.add_param_group({"params": added, "lr": 0.01})
            twins.iterate(2)
            for side in (twins.theirs, twins.ours):
                side.optimizer.add_param_group({"params": side.ddp.module.layers[0].weight, "weight_decay": 0.0})
            twins.iterate(2)
            twins.check()


@pytest.mark.parametrize("hook", HOOKS)
def test_groups_may_be_added_between_iterations(hook):
    run_ranks(groups_that_come_later, 2, hook)


def set_trainable(twins: HookTwins, layer: int, trainable: bool) -> None:
    for side in (twins.theirs, twins.ours):
        side.ddp.module.layers[layer].requires_grad_(trainable)


def frozen(rank: int, world: int, hook: str, cap: float) -> None:
    def make() -> nn.Module:
        module = Tangled()
        module.layers[0].requires_grad_(False)
        return module

    twins = HookTwins(AdamW, make=make, hook=hook, zero={"bucket_cap_mb": cap}, **DECAY)
    before = values_of(twins.ours.ddp.module.layers[0].parameters())
    twins.iterate(3)
    assert_same(values_of(twins.ours.ddp.module.layers[0].parameters()), before, "frozen from the start")
    twins.check()
    # DDP allows a parameter that it knows to be frozen later if it looks for unused ones.
    twins = HookTwins(AdamW, hook=hook, ddp={"find_unused_parameters": True}, zero={"bucket_cap_mb": cap}, **DECAY)
    twins.iterate(2)
    set_trainable(twins, 1, False)
    twins.iterate(2)
    set_trainable(twins, 3, False)
    set_trainable(twins, 1, True)
    twins.iterate(2)
    set_trainable(twins, 3, True)
    twins.iterate(2)
    twins.check()


@pytest.mark.parametrize("cap", [SMALL_CAP, 25])
@pytest.mark.parametrize("hook", HOOKS)
def test_parameters_may_be_frozen_from_the_start_and_in_between(hook, cap):
    run_ranks(frozen, 3, hook, cap)


def frozen_with_a_gradient(rank: int, world: int, hook: str, cap: float) -> None:
    def keep_zeros(optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    for grad_view in BOTH:
        ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": grad_view}
        twins = HookTwins(AdamW, hook=hook, ddp=ddp, zero={"bucket_cap_mb": cap}, **DECAY)
        twins.iterate(2, zero_grad=keep_zeros)
        set_trainable(twins, 1, False)
        twins.iterate(2, zero_grad=keep_zeros)
        twins.iterate(2)  # now it is None, and nothing more happens to it
        twins.check()


@pytest.mark.parametrize("cap", [SMALL_CAP, 25])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_frozen_parameter_that_holds_a_gradient_is_stepped_as_in_plain_torch(hook, cap):
    """DDP has it in a bucket and calls it unused; plain AdamW decays what has a gradient of zero."""
    run_ranks(frozen_with_a_gradient, 2, hook, cap)


def frozen_and_unknown_to_ddp(rank: int, world: int, hook: str, cap: float) -> None:
    def make() -> nn.Module:
        module = Tangled()
        for param in module.layers[1].requires_grad_(False).parameters():
            param.grad = torch.full_like(param, 0.25)
        return module

    twins = HookTwins(AdamW, make=make, groups=all_params, hook=hook, zero={"bucket_cap_mb": cap}, **DECAY)
    twins.iterate(2, zero_grad=None)
    twins.check()


@pytest.mark.parametrize("cap", [SMALL_CAP, 25])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_gradient_that_was_set_by_hand_on_a_frozen_parameter_is_used(hook, cap):
    """No bucket of DDP's brings it, and it may be alone in one of ours."""
    run_ranks(frozen_and_unknown_to_ddp, 2, hook, cap)


def wrapped_again(rank: int, world: int, hook: str) -> None:
    """Fine-tuning: train the head, then unfreeze the rest and wrap the module anew; the optimizer stays."""
    optimizers = {}
    for kind in ("plain", "zero"):
        module = Tangled()
        module.layers[0].requires_grad_(False)
        if kind == "plain":
            optimizer = AdamW(two_groups(module), **DECAY)
        else:
            optimizer = ZeroRedundancyOptimizer(two_groups(module), AdamW, overlap_with_ddp=True, **DECAY)
        for phase in range(2):
            ddp = DistributedDataParallel(module, bucket_cap_mb=SMALL_CAP)
            inner = allreduce_hook if kind == "plain" else HOOKS[hook](allreduce_hook, ddp, optimizer)
            ddp.register_comm_hook(None, inner)
            for iteration in range(3):
                optimizer.zero_grad()
                Side(ddp, optimizer).backward(batch_of(rank, 10 * phase + iteration))
                optimizer.step()
            del ddp, inner
            gc.collect()
            module.layers[0].requires_grad_(True)
        optimizers[kind] = values_of(module.parameters())
    assert_same(optimizers["zero"], optimizers["plain"])


@pytest.mark.parametrize("hook", HOOKS)
def test_a_module_that_is_unfrozen_and_wrapped_again_goes_on_with_the_same_optimizer(hook):
    run_ranks(wrapped_again, 2, hook)
