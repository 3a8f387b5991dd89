"""Optimizers on some of the ranks. `to` and every rank in a message count within the group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import assert_same, error_of, parameters, train, values_of


def trained_like_the_oracle(group: Any, gradients_from: int, **options: Any) -> None:
    """Train on ``group`` with its own gradients, consolidate to each of its ranks, load, train on."""
    params, other = parameters(), parameters()
    optimizer = ZeroRedundancyOptimizer(params, Adam, group, lr=0.1, **options)
    oracle = Adam(other, lr=0.1)
    assert (optimizer.rank, optimizer.world_size) == (group.rank(), group.size())
    assert optimizer.global_rank == dist.get_rank()
    assert optimizer.process_group is group
    steps = range(gradients_from, gradients_from + 2)
    train(optimizer, params, steps)
    train(oracle, other, steps)
    assert_same(values_of(params), values_of(other), f"{options}")
    for param, twin in zip(params, other, strict=True):
        assert_same(optimizer.full_state(param), oracle.state[twin])
    for to in range(group.size()):
        optimizer.consolidate_state_dict(to=to)
        given = optimizer.state_dict()
        if group.rank() <= to:  # who received it before keeps it
            assert_same(given, oracle.state_dict(), f"{options} to={to}")
        else:
            assert given["shardstep_full_state_at_rank"] == (to if to == 0 else list(range(to + 1)))
            assert given["state"] == {}
    error = error_of(lambda: optimizer.consolidate_state_dict(to=group.size()), "a global rank is no rank of the group")
    assert isinstance(error, ValueError)
    optimizer.load_state_dict(oracle.state_dict())
    train(optimizer, params, [gradients_from + 2])
    train(oracle, other, [gradients_from + 2])
    optimizer.check_replicas()
    assert_same(values_of(params), values_of(other), f"{options} after a load")


VARIANTS = ({}, {"shard": "tensor"}, {"parameters_as_bucket_view": True, "bucket_cap_mb": 0.0005})


def on_a_subgroup(rank: int, world: int, members: list[int]) -> None:
    group = dist.new_group(members)
    if rank in members:
        for options in VARIANTS:
            trained_like_the_oracle(group, 0, **options)
    else:
        error = error_of(lambda: ZeroRedundancyOptimizer(parameters(), Adam, group, lr=0.1), "not a member")
        assert isinstance(error, ValueError)
        assert "process_group" in str(error)
        assert f"rank {rank}" in str(error)


@pytest.mark.parametrize(
    ("world", "members"), [(4, [2, 3]), (4, [0, 2]), (4, [1, 2, 3]), (3, [0, 2]), (3, [1])], ids=str
)
def test_an_optimizer_on_some_ranks_equals_the_oracle_and_consolidates_to_group_ranks(world, members):
    run_ranks(on_a_subgroup, world, members)


def two_groups_at_once(rank: int, world: int) -> None:
    groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    mine = rank in (1, 2)
    for options in VARIANTS:
        trained_like_the_oracle(groups[mine], 100 * mine, **options)
    # A third one over everybody, beside them: meetings and messages of the groups do not mix.
    trained_like_the_oracle(dist.group.WORLD, 50)


def test_disjoint_groups_train_at_once_on_different_gradients():
    run_ranks(two_groups_at_once, 4)


def overlapping_groups(rank: int, world: int) -> None:
    """Two optimizers over two groups of the same ranks, in turn."""
    first, second = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    pairs = []
    for group in (first, second):
        params, other = parameters(), parameters()
        pairs.append((params, ZeroRedundancyOptimizer(params, Adam, group, lr=0.1), other, Adam(other, lr=0.1)))
    for step in range(3):
        for params, optimizer, other, oracle in pairs:
            train(optimizer, params, [step])
            train(oracle, other, [step])
            assert_same(values_of(params), values_of(other))


def test_two_groups_over_the_same_ranks_take_turns():
    run_ranks(overlapping_groups, 3)


def with_ddp(rank: int, world: int, members: list[int]) -> None:
    group = dist.new_group(members)
    if rank not in members:
        return
    torch.manual_seed(1)
    models = [nn.Linear(6, 5).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ddp, oracle_ddp = (DistributedDataParallel(model, process_group=group) for model in models)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), Adam, process_group=group, lr=0.1)
    oracle = Adam(oracle_ddp.parameters(), lr=0.1)
    for step in range(3):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
        for model, stepper in ((ddp, optimizer), (oracle_ddp, oracle)):
            stepper.zero_grad()
            model(batch).square().sum().backward()
            stepper.step()
    assert_same(values_of(ddp.parameters()), values_of(oracle_ddp.parameters()))
    optimizer.consolidate_state_dict()
    if rank == members[0]:
        assert_same(optimizer.state_dict(), oracle.state_dict())


def test_ddp_and_the_optimizer_on_a_subgroup_equal_ddp_with_the_plain_optimizer():
    run_ranks(with_ddp, 4, [2, 3])
    run_ranks(with_ddp, 4, [0, 1, 3])


def told_in_group_ranks(rank: int, world: int) -> str | None:
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return None
    lr = 0.1 if rank == 1 else 0.2
    return str(error_of(lambda: ZeroRedundancyOptimizer(parameters(), Adam, group, lr=lr), "different lr"))


def test_messages_count_ranks_within_the_group():
    told = run_ranks(told_in_group_ranks, 4)
    for rank in (1, 3):
        assert "lr is 0.1 on rank 0 but 0.2 on rank 1" in told[rank]
