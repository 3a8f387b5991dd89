"""Several process groups at once, and meshes of (replicate, shard) beyond the square one that the harness trains."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW

from shardstep import ZeroRedundancyOptimizer
from tests.beside import batch
from tests.harness import run_ranks
from tests.meshes import mesh_of
from tests.oracle import assert_same, parameters, train, values_of

# With ``shard_gradients`` we sum in our own order: in float64 means of four ranks differ from DDP's by some 1e-16, and
# three steps leave that far below 1e-11. A gradient that is lost, doubled, or summed over one dimension alone: 1e-3.
CLOSE = {"rtol": 1e-11, "atol": 1e-13}


def several_groups(rank: int, world: int) -> None:
    """Pairs at once on gradients of their own, all ranks, and all ranks once more: none of their messages mix."""
    pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    mine = rank in (1, 2)
    cases = []
    for group, seed in ((pairs[mine], 100 * mine), (dist.group.WORLD, 50), (dist.new_group(), 70)):
        for options in ({"shard": "tensor"}, {"parameters_as_bucket_view": True, "bucket_cap_mb": 0.0005}):
            params, other = parameters(), parameters()
            opt = ZeroRedundancyOptimizer(params, Adam, group, lr=0.1, **options)
            cases.append((params, opt, other, Adam(other, lr=0.1), seed))
    for step in range(3):
        for params, opt, other, oracle, seed in cases:
            train(opt, params, [seed + step])
            train(oracle, other, [seed + step])
    for params, opt, other, oracle, seed in cases:
        assert_same(values_of(params), values_of(other), f"{seed}")
        opt.consolidate_state_dict(to=opt.world_size - 1)
        if opt.rank == opt.world_size - 1:
            assert_same(opt.state_dict(), oracle.state_dict(), f"{seed}")


def test_optimizers_over_several_groups_train_in_turns_and_at_once_as_the_oracle():
    run_ranks(several_groups, 4)


# --- meshes -----------------------------------------------------------------------------------------------------------


def train_net(model: nn.Module, optimizer: Any) -> None:
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, 4, 9)).square().mean().backward()
        optimizer.step()


def parts_of_a_mesh(rank: int, world: int) -> None:
    """A mesh of one dimension is its group; of a larger mesh any two dimensions work, on their own ranks."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "data"))
    deep = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "tensor", "shard"))
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2]), dist.new_group([1, 3])]
    for mesh, group, position in (
        (whole["data"], groups[rank // 2], rank % 2),
        (deep["replicate", "shard"], groups[2 + rank % 2], 0),
    ):
        for shard_gradients in (False, True):
            model, reference = (nn.Linear(9, 7).double() for _ in range(2))
            reference = DistributedDataParallel(reference, process_group=group)
            model.load_state_dict(reference.module.state_dict())
            ours = model if shard_gradients else DistributedDataParallel(model, process_group=group)
            opt = ZeroRedundancyOptimizer(model.parameters(), SGD, mesh, shard_gradients=shard_gradients, lr=0.1)
            assert (opt.rank, opt.mesh) == (position, mesh)
            train_net(ours, opt)
            train_net(reference, SGD(reference.parameters(), lr=0.1))
            for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, **CLOSE)
            opt.check_replicas()


def test_one_dimension_is_its_group_and_dimensions_of_a_larger_mesh_work():
    run_ranks(parts_of_a_mesh, 4)


def some_ranks_in_any_order(rank: int, world: int) -> None:
    """Rank 0 is in none of them. Gradients are the same on every rank, so that the mean of four is exact: bits."""
    for grid in ([[1, 2], [3, 4]], [[1, 3], [2, 4]], [[2, 1], [4, 3]], [[3, 4], [1, 2]]):
        mesh = DeviceMesh("cpu", grid, mesh_dim_names=("replicate", "shard"))
        for shard_gradients in (False, True) if rank else ():
            params, other = parameters(), parameters()
            options = {"shard_gradients": shard_gradients, "bucket_cap_mb": 0.0003, "lr": 0.125}
            opt, plain = ZeroRedundancyOptimizer(params, AdamW, mesh, **options), AdamW(other, lr=0.125)
            for _ in range(2):
                for some, optimizer in ((params, opt), (other, plain)):
                    optimizer.zero_grad()
                    sum((param**3).sum() for param in some).backward()
                    optimizer.step()
            assert_same(values_of(params), values_of(other), f"{grid}, {shard_gradients=}")
            opt.check_replicas()


def test_a_mesh_of_some_ranks_in_any_order_that_all_rows_have():
    """torch numbers ranks by their global numbers, not as the mesh does."""
    run_ranks(some_ranks_in_any_order, 5)


def called_by_users(rank: int, world: int) -> None:
    mesh, norm = mesh_of((2, 2)), nn.BatchNorm1d(9).double()
    norm.running_mean.fill_(rank)
    opt = ZeroRedundancyOptimizer(norm.parameters(), AdamW, mesh, lr=0.1)
    assert opt.mesh is mesh
    assert opt.process_group is mesh.get_group("shard")
    assert (opt.rank, opt.world_size, opt.global_rank) == (rank % 2, 2, rank)
    opt.broadcast_buffers(norm)
    assert_same(norm.running_mean, torch.zeros(9, dtype=torch.float64), "over both dimensions")
    train_net(DistributedDataParallel(norm), opt)
    opt.check_replicas()


def test_on_a_mesh_buffers_are_broadcast_over_both_dimensions():
    run_ranks(called_by_users, 4)
