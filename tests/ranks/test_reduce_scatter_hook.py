"""``shard_ddp_gradients``: DDP with sharded gradients trains as DDP with the plain optimizer does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from tests.harness import run_ranks
from tests.hook_twins import BOTH, OPTIMIZERS, Chain, Tangled, all_params, two_groups
from tests.oracle import assert_same
from tests.sharded_ddp_twins import ShardedTwins, in_rank_order, sharded

KINDS = {
    "AdamW": (*OPTIMIZERS["AdamW"], Tangled, two_groups),
    "SGD": (*OPTIMIZERS["SGD"], Tangled, two_groups),
    "Muon": (torch.optim.Muon, {"lr": 0.05, "weight_decay": 0.1}, partial(Chain, [3, 0, 4, 1, 2]), all_params),
}
# Muon orthogonalizes whole matrices: they cannot be cut.
KINDS_AND_CUTS = [("AdamW", "element"), ("AdamW", "tensor"), ("SGD", "element"), ("SGD", "tensor"), ("Muon", "tensor")]


def unused_in(rank: int, iteration: int, static: bool, find_unused: bool, skips: bool) -> dict[str, Any]:
    """Which layers are left out: of a static graph always the same, else other ones per rank and iteration."""
    if not skips or not (static or find_unused):
        return {}
    return {"skip": [2] if static else [2, iteration % 2] if rank == 0 else [2]}


def trains_as_ddp(rank: int, world: int, kind: str, shard: str, as_view: bool, static: bool, unused: bool) -> None:
    optimizer_class, options, make, groups = KINDS[kind]
    ddp = {"gradient_as_bucket_view": as_view, "static_graph": static, "find_unused_parameters": unused}
    schedule = partial(ExponentialLR, gamma=0.8)
    twins = ShardedTwins.make(
        optimizer_class, make=make, groups=groups, ddp=ddp, zero={"shard": shard}, schedule=schedule, **options
    )
    for iteration in range(5):
        forward = unused_in(rank, iteration, static, unused, make is Tangled)
        twins.zero_grad()
        if iteration == 1:  # DDP has rebuilt its buckets
            twins.backward(1, sync=False, **forward)
        twins.backward(**forward)
        if iteration >= 2:
            twins.backward(2, **forward)
        if iteration == 3:
            twins.backward(3, sync=False, **forward)
            twins.backward(4, **forward)
        if iteration != 1:
            twins.clip(0.3)
        twins.check_gradients()
        twins.step()
        twins.check_weights()
    twins.check_state()


@pytest.mark.parametrize("unused", BOTH)
@pytest.mark.parametrize("static", BOTH)
@pytest.mark.parametrize("as_view", BOTH)
@pytest.mark.parametrize(("kind", "shard"), KINDS_AND_CUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_weights_gradients_and_state_are_those_of_ddp_with_the_plain_optimizer(
    world, kind, shard, as_view, static, unused
):
    """Two groups, a scheduler, clipping, accumulation with no_sync, without it, and with it after a reduction."""
    run_ranks(trains_as_ddp, world, kind, shard, as_view, static, unused)


def rebuilt_buckets(rank: int, world: int) -> None:
    """DDP's buckets before and after are not the same, so the matrix above does see it rebuild them."""
    numbers = []

    def counting(state, bucket):
        if bucket.index() == 0:
            numbers.append([])
        numbers[-1].append([param.shape for param in bucket.parameters()])
        return in_rank_order(state, bucket)

    twins = ShardedTwins.make(torch.optim.SGD, oracle=counting, lr=0.1)
    twins.train(3)
    assert numbers[0] != numbers[1] == numbers[2]


def test_the_model_of_these_tests_has_its_buckets_rebuilt():
    run_ranks(rebuilt_buckets, 2)


def trained_weights(rank: int, world: int, caps: tuple[float, float], shard: str) -> list[torch.Tensor]:
    zero, ddp = {"shard": shard, "bucket_cap_mb": caps[0]}, {"bucket_cap_mb": caps[1]}
    side = sharded(Tangled(), torch.optim.AdamW, ddp=ddp, zero=zero, lr=0.05)
    twins = ShardedTwins(side, side)
    for _ in range(4):
        side.optimizer.zero_grad()
        side.backward(twins.batch())
        side.optimizer.step()
        twins.iteration += 1
    return side.weights()


def bits(rank: int, world: int) -> None:
    """Against DDP with a hook that adds up in rank order, and across sizes of our buckets, DDP's, and runs."""
    twins = ShardedTwins.make(torch.optim.AdamW, oracle=in_rank_order, lr=0.05)
    twins.train(4, close=None)
    twins.check_state(close=None)
    expected = twins.theirs.weights()
    for caps in ((0.0005, 0.002), (25, 0.002), (0.002, 25), (0.002, 0.0005), (0.002, 0.002)):
        for shard in ("element", "tensor"):
            assert_same(trained_weights(rank, world, caps, shard), expected, f"{caps} {shard}")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_weights_have_the_same_bits_for_every_bucket_size_and_run_and_those_of_sums_in_rank_order(world):
    run_ranks(bits, world)


def bare_hook(rank: int, world: int) -> None:
    one = sharded(Tangled(), torch.optim.AdamW, lr=0.05)
    other = sharded(Tangled(), torch.optim.AdamW, bare=True, lr=0.05)
    twins = ShardedTwins(one, other, name="the bare hook")
    twins.train(3, close=None)


def test_the_hook_that_is_registered_by_hand_does_the_same():
    run_ranks(bare_hook, 3)
