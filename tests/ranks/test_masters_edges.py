"""float32 masters at the edges: reads between swaps, closures that are counted, inference mode, errors on one rank."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import error_of
from tests.ranks.test_masters import KEPT, MasterTwins

SPACING = 2.0**-7  # of bfloat16, between 1 and 2


def _swapped(rank, world, mode):
    """Other weights are swapped in, a checkpoint is made of them, and the training weights come back."""
    twins = MasterTwins(torch.optim.AdamW, mode, lr=0.003)
    twins.step(3)
    trained = [param.detach().clone() for param in twins.ours]
    for param in twins.ours:
        param.data.mul_(1.5)
    for param in twins.ours:
        twins.opt.full_state(param)
    for param, value in zip(twins.ours, trained, strict=True):
        param.data.copy_(value)
    twins.check("swapped back")
    twins.step(2)
    twins.check("trained on")


@pytest.mark.parametrize("mode", KEPT)
@pytest.mark.parametrize("world", [1, 3])
def test_reading_state_while_other_weights_are_swapped_in_leaves_masters_alone(world, mode):
    run_ranks(_swapped, world, mode)


def _lost_in_closures(rank, world, mode):
    param = Parameter(torch.ones(300, dtype=torch.bfloat16))
    opt = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=1.0, master_weights=mode)

    def closure():
        param.grad = torch.full_like(param, -SPACING / 10)
        param.grad[200:] = 0

    with opt.count_lost_updates() as lost:
        for _ in range(3):
            opt.step(closure)
            opt.zero_grad()
    return lost.by_group


@pytest.mark.parametrize("mode", [None, *KEPT])
def test_updates_that_are_lost_in_steps_with_closures_are_counted(mode):
    for shares in run_ranks(_lost_in_closures, 3, mode):
        assert shares == [pytest.approx(2 / 3)]


def _evaluated_first(rank, world, mode):
    from schedulefree import AdamWScheduleFree

    twins = MasterTwins(AdamWScheduleFree, mode, lr=0.01)
    with torch.inference_mode():
        twins.opt.eval()
        twins.opt.train()
    twins.plain.train()
    twins.step(3)
    twins.check("after inference mode")


@pytest.mark.parametrize("mode", KEPT)
def test_masters_that_are_made_in_inference_mode_can_be_trained(mode):
    run_ranks(_evaluated_first, 3, mode)


def _sparse_on_its_owner(rank, world):
    """Of two parameters only the second has a sparse gradient, and only one rank has a master of it."""
    dense, sparse = (Parameter(torch.ones(40, 1, dtype=torch.bfloat16)) for _ in range(2))
    opt = ZeroRedundancyOptimizer(
        [dense, sparse], torch.optim.SGD, lr=1.0, master_weights=torch.float32, shard="tensor", bucket_cap_mb=1e-5
    )
    dense.grad, sparse.grad = torch.ones_like(dense), torch.ones_like(sparse).to_sparse()
    return str(error_of(opt.step))


def test_a_sparse_gradient_that_only_its_owner_sees_is_an_error_on_all():
    for text in run_ranks(_sparse_on_its_owner, 3, fresh=True):
        assert "expects dense gradients" in text
