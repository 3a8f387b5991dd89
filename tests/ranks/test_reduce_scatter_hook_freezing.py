"""Parameters that are frozen after DDP was built. With ``find_unused_parameters`` DDP goes on handing them over.

Oracle: DDP with the plain optimizer, float64, with the tolerance of ``tests/sharded_ddp_twins.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.algorithms.join import Join
from torch.optim import AdamW

from tests.harness import run_ranks
from tests.hook_twins import BOTH, HOOKS, SMALL_CAP, HookTwins, Side, all_params
from tests.sharded_ddp_twins import ShardedTwins

OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.3}
FROZEN = ("layers.4.weight", "layers.2.bias", "layers.1.weight", "layers.0.weight", "layers.0.bias")


def freeze(side: Side) -> None:
    """Some of several buckets, and all of one; some come to DDP before what is trained, some after it."""
    for name, param in side.ddp.module.named_parameters():
        if name in FROZEN:
            param.requires_grad_(False)


def made(hook: str, as_view: bool) -> ShardedTwins:
    """DDP has one bucket, ours have a layer and a half: most are complete in the midst of DDP's."""
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": as_view, "bucket_cap_mb": 25}
    zero = {"bucket_cap_mb": 1.5 * SMALL_CAP}
    return ShardedTwins.make(AdamW, groups=all_params, ddp=ddp, zero=zero, hook=hook, **OPTIONS)


def frozen_later(rank: int, world: int, hook: str, as_view: bool) -> None:
    for when in (0, 2):
        twins = made(hook, as_view)
        for iteration in range(4):
            if iteration == when:
                twins.each(freeze)
            twins.zero_grad()
            if iteration == 3:
                twins.backward(1, sync=not hook, skip=[3])  # a stepping hook steps in each that is reduced
            twins.backward(skip=[3] if rank == 1 else [])
            if not hook:
                twins.check_gradients()
            twins.step()
            twins.check_weights()


@pytest.mark.parametrize("as_view", BOTH)
@pytest.mark.parametrize("hook", ["", *HOOKS])
@pytest.mark.parametrize("world", [2, 3])
def test_what_is_frozen_after_wrapping_holds_up_nothing_and_hurries_nothing(world, hook, as_view):
    """A bucket is sent when the gradients of what is trained have come, not before."""
    run_ranks(frozen_later, world, hook, as_view)


def frozen_under_all_reduce(rank: int, world: int) -> None:
    for hook in HOOKS:
        ddp = {"find_unused_parameters": True, "bucket_cap_mb": 25}
        zero = {"bucket_cap_mb": 1.5 * SMALL_CAP}
        twins = HookTwins(AdamW, groups=all_params, hook=hook, ddp=ddp, zero=zero, **OPTIONS)
        twins.iterate(2)
        for side in (twins.theirs, twins.ours):
            freeze(side)
        twins.iterate(2)


@pytest.mark.parametrize("world", [2, 3])
def test_a_stepping_hook_around_all_reduce_leaves_what_was_frozen_alone(world):
    run_ranks(frozen_under_all_reduce, world)


def frozen_in_join(rank: int, world: int, hook: str) -> None:
    for as_view in BOTH:
        twins = made(hook, as_view)
        twins.each(freeze)
        for ours, side in enumerate((twins.theirs, twins.ours)):
            with Join([side.ddp, side.optimizer] if ours else [side.ddp]):
                for iteration in range(1 + rank):
                    twins.iteration = iteration
                    side.optimizer.zero_grad()
                    side.backward(twins.batch())
                    side.optimizer.step()
        if rank == world - 1:  # the only one that has the last weights in plain DDP
            twins.check_weights()
        twins.ours.optimizer.check_replicas()


@pytest.mark.parametrize("hook", ["", "interleaved"])
@pytest.mark.parametrize("world", [2, 3])
def test_what_is_frozen_after_wrapping_holds_up_nothing_in_a_join_context(world, hook):
    run_ranks(frozen_in_join, world, hook, timeout=40, pg_timeout=10)
