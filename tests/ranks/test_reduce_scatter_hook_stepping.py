"""``reduce_scatter_hook`` inside the stepping hooks: the step is made in backward, at DDP's own volume.

Oracle: DDP with the plain optimizer, float64, with the tolerance of ``tests/sharded_ddp_twins.py`` unless bits are
named.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from shardstep import ShardedGradient, ZeroRedundancyOptimizer, hook_with_zero_step, reduce_scatter_hook
from tests.harness import run_ranks
from tests.hook_twins import BOTH, HOOKS, SMALL_CAP, Chain, Tangled, batch_of, delayed
from tests.oracle import error_of
from tests.ranks.test_reduce_scatter_hook import KINDS, KINDS_AND_CUTS, unused_in
from tests.ranks.test_reduce_scatter_hook_models import Late
from tests.sharded_ddp_twins import CLOSE, ShardedTwins, in_rank_order, sharded
from tests.surroundings import choose
from tests.twins import assert_same as assert_close


def steps_in_backward(
    rank: int, world: int, hook: str, kind: str, shard: str, as_view: bool, static: bool, unused: bool
) -> None:
    optimizer_class, options, make, groups = KINDS[kind]
    ddp = {"gradient_as_bucket_view": as_view, "static_graph": static, "find_unused_parameters": unused}
    twins = ShardedTwins.make(
        optimizer_class,
        make=make,
        groups=groups,
        ddp=ddp,
        zero={"shard": shard},
        hook=hook,
        schedule=partial(ExponentialLR, gamma=0.8),
        **options,
    )
    for iteration in range(5):
        forward = unused_in(rank, iteration, static, unused, make is Tangled)
        if iteration != 3:  # else gradients are added to those of the last step
            twins.zero_grad()
        if iteration % 2:
            twins.backward(1, sync=False, **forward)
        twins.backward(**forward)
        twins.check_gradients()
        twins.step()
        twins.check_weights()
    twins.check_state()


@pytest.mark.parametrize("unused", BOTH)
@pytest.mark.parametrize("static", BOTH)
@pytest.mark.parametrize("as_view", BOTH)
@pytest.mark.parametrize(("kind", "shard"), KINDS_AND_CUTS)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("world", [2, 3])
def test_a_step_in_backward_is_the_step_of_ddp_with_the_plain_optimizer(
    world, hook, kind, shard, as_view, static, unused
):
    """Two groups, a scheduler, accumulation with no_sync and without it, parameters that are not used."""
    run_ranks(steps_in_backward, world, hook, kind, shard, as_view, static, unused)


def many_buckets(rank: int, world: int, transport: str) -> None:
    """24 buckets of ours and as many of DDP's; ranks are late at random. Nobody may wait in a circle."""
    choose(transport)
    delays = random.Random(rank)
    for hook in HOOKS:
        twins = ShardedTwins.make(
            AdamW,
            make=lambda: Late(Chain(list(range(24))), delays),
            groups=lambda module: list(module.parameters()),
            zero={"bucket_cap_mb": SMALL_CAP},
            hook=hook,
            oracle=in_rank_order,
            lr=0.01,
        )
        assert len(twins.ours.optimizer.layout.buckets) == 24
        twins.train(6, close=None)
        twins.check_state(close=None)


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_many_buckets_on_late_ranks_end_with_the_bits_of_sums_in_rank_order(world, transport):
    run_ranks(many_buckets, world, transport)


def only_in_backward(rank: int, world: int) -> None:
    """``step`` does nothing more, a closure runs once, and gradients are sharded ones."""
    for hook in HOOKS:
        side = sharded(Tangled(), SGD, hook=hook, lr=0.1)
        before = side.weights()
        side.backward(batch_of(rank, 0))
        after = side.weights()
        assert not torch.equal(before[0], after[0])
        side.optimizer.step()
        assert_close(side.weights(), after, "step() after backward")
        assert {type(param.grad) for param in side.ddp.parameters()} == {ShardedGradient}
        error = error_of(lambda side=side: side.optimizer.clip_grad_norm_(1.0), "clipping")
        assert "the step is made during backward" in str(error)


def test_the_step_is_made_in_backward_and_nowhere_else():
    run_ranks(only_in_backward, 2)


def inside_another(rank: int, world: int) -> None:
    """The second optimizer's stepping hook is around that of the first, whose foreign gradients are all-reduced."""
    delays, models = random.Random(rank), []
    for ours in BOTH:
        ddp = DistributedDataParallel(Tangled(), bucket_cap_mb=SMALL_CAP)
        parts = [list(ddp.parameters())[::2], list(ddp.parameters())[1::2]]
        if ours:
            options: dict[str, Any] = {"overlap_with_ddp": True, "bucket_cap_mb": 0.001, "lr": 0.05}
            optimizers: list[Any] = [ZeroRedundancyOptimizer(part, AdamW, **options) for part in parts]
            inner = HOOKS["interleaved"](reduce_scatter_hook, ddp, optimizers[0])
            ddp.register_comm_hook(None, hook_with_zero_step(inner, ddp, optimizers[1]))
        else:
            optimizers = [AdamW(part, lr=0.05) for part in parts]
            ddp.register_comm_hook(None, delayed(delays))
        for iteration in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
            ddp(batch_of(rank, iteration)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        models.append([param.detach() for param in ddp.parameters()])
    assert_close(models[1], models[0], "two stepping hooks", CLOSE)


def test_a_stepping_hook_of_another_optimizer_around_it():
    run_ranks(inside_another, 3)


def one_hook_only(rank: int, world: int) -> list[str]:
    """Wrong use is told when the hook is made."""
    ddp = DistributedDataParallel(Tangled())
    plain = ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1)
    overlapping = ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1, overlap_with_ddp=True)
    make = partial(hook_with_zero_step, reduce_scatter_hook, ddp)
    found = [error_of(lambda: make(plain), "no overlap_with_ddp")]
    make(overlapping)
    found.append(error_of(lambda: make(overlapping), "a second hook"))
    stranger = torch.nn.Linear(3, 3)
    foreign = ZeroRedundancyOptimizer(stranger.parameters(), SGD, lr=0.1, overlap_with_ddp=True)
    found.append(error_of(lambda: make(foreign), "parameters of another model"))
    assert {type(error) for error in found} == {ValueError}
    return [str(error) for error in found]


def test_wrong_use_is_told_when_the_hook_is_made():
    for plain, second, foreign in run_ranks(one_hook_only, 2):
        assert "overlap_with_ddp=True" in plain
        assert "one hook for an optimizer" in second
        assert "parameters of the DDP module" in foreign


def never_registered(rank: int, world: int) -> None:
    """A hook that was made and not registered does not keep ``step`` from stepping."""
    ddp = DistributedDataParallel(Tangled())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1, overlap_with_ddp=True)
    hook_with_zero_step(reduce_scatter_hook, ddp, optimizer)
    before = ddp.module.layers[0].weight.detach().clone()
    ddp(batch_of(rank, 0)).square().mean().backward()
    gradient = ddp.module.layers[0].weight.grad.clone()
    optimizer.step()
    assert_close(ddp.module.layers[0].weight.detach(), before - 0.1 * gradient, "step()", CLOSE)


def test_a_hook_that_is_not_registered_does_not_stop_step():
    run_ranks(never_registered, 2)
