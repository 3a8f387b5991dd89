"""Meshes that do not fit, and ranks of a mesh that do not agree: an error on every rank, which names who and where."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from shardstep import ZeroRedundancyOptimizer, hook_with_zero_step
from tests.harness import run_ranks
from tests.meshes import mesh_of
from tests.oracle import assert_same, error_of, parameters, train, values_of

TIMEOUT = 6  # seconds that ranks wait for each other


def refused(rank: int, world: int) -> dict[str, str]:
    """What is refused on every rank, without a word between them; afterwards a mesh that fits works."""
    meshes = {
        "three dimensions": init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "tensor", "shard")),
        "the wrong order": init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate")),
        "mixed rows": DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("replicate", "shard")),
    }
    told = {}
    for name, mesh in meshes.items():
        error = error_of(lambda: ZeroRedundancyOptimizer(parameters(), Adam, mesh), name)  # noqa: B023
        assert isinstance(error, ValueError), name
        told[name] = str(error)
    params, other = parameters(), parameters()
    # Ranks may come in any order that is the same in every row.
    optimizer, oracle = ZeroRedundancyOptimizer(params, Adam, DeviceMesh("cpu", [[1, 0], [3, 2]])), Adam(other)
    train(optimizer, params, range(2))
    train(oracle, other, range(2))
    assert_same(values_of(params), values_of(other))
    return told


def test_a_mesh_that_does_not_fit_is_refused_with_its_dimensions():
    for told in run_ranks(refused, 4):
        three = told["three dimensions"]
        assert "of two (replicate, shard), but got one of 3: (replicate: 2, tensor: 1, shard: 2)" in three
        assert "mesh['replicate', 'shard']" in three
        assert "in this order, but got (shard: 2, replicate: 2)" in told["the wrong order"]
        assert "[[0, 1], [3, 2]]" in told["mixed rows"]
        assert "ranks of every row ascend" in told["mixed rows"]


def not_in_the_mesh(rank: int, world: int) -> None:
    """Ranks 0 and 1 are; they build, and nobody waits for rank 2."""
    for mesh in (DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicate", "shard"))):
        if rank == 2:
            error = error_of(lambda: ZeroRedundancyOptimizer(parameters(), Adam, mesh), "not in the mesh")  # noqa: B023
            assert isinstance(error, ValueError)
            text = str(error)
            assert "global rank 2 is not in the mesh" in text
            assert ("(replicate: 2, shard: 1)" if mesh.ndim == 2 else "(without a name: 2)") in text
        else:
            params = parameters()
            train(ZeroRedundancyOptimizer(params, Adam, mesh), params, range(2))


def test_a_mesh_without_this_rank_is_refused_with_its_dimensions():
    run_ranks(not_in_the_mesh, 3, pg_timeout=TIMEOUT)


def disagreements(rank: int, world: int) -> dict[str, str]:
    """Rank 3, in the second replica, is the odd one. Nothing is left behind: the next one works."""
    mesh, odd, told = mesh_of((2, 2)), rank == 3, {}
    told["option"] = str(error_of(lambda: ZeroRedundancyOptimizer(parameters(), SGD, mesh, lr=0.2 if odd else 0.1)))
    told["mesh"] = str(error_of(lambda: ZeroRedundancyOptimizer(parameters(), SGD, None if odd else mesh, lr=0.1)))
    params = [] if odd else parameters()
    told["failure"] = str(error_of(lambda: ZeroRedundancyOptimizer(params, SGD, mesh, lr=0.1)))
    params = parameters()
    opt = ZeroRedundancyOptimizer(params, SGD, mesh, lr=0.1)
    train(opt, params, range(1))
    frozen = params[2 if odd else 1]
    frozen.requires_grad_(False)
    frozen.grad = None
    told["frozen"] = str(error_of(opt.step))
    frozen.requires_grad_(True)
    added = nn.Parameter(torch.ones(4 if odd else 3))
    told["group"] = str(error_of(lambda: opt.add_param_group({"params": [added]})))
    told["to"] = str(error_of(lambda: opt.consolidate_state_dict(to=1 if odd else 0)))
    train(opt, params, range(1))
    if odd:
        params[2].data.add_(1)
    told["replicas"] = str(error_of(opt.check_replicas))
    return told


def test_ranks_of_different_replicas_compare_and_are_named_by_number_and_place():
    common = "rank 0 (replicate 0, shard 0), rank 1 (replicate 0, shard 1), rank 2 (replicate 1, shard 0)"
    odd = "rank 3 (replicate 1, shard 1)"
    ranks = run_ranks(disagreements, 4, pg_timeout=TIMEOUT, timeout=60)
    for rank, told in enumerate(ranks):
        assert f"lr is 0.1 on {common} but 0.2 on {odd}" in told["option"]
        assert "mesh is (replicate: 2, shard: 2) on" in told["mesh"]
        assert "none on rank" in told["mesh"]
        assert rank == 3 or f"failed on {odd}" in told["failure"], told["failure"]
        assert f"parameter 1: requires_grad is False on {common} but True on {odd}" in told["frozen"]
        assert f"shape is [3] on {common} but [4] on {odd}" in told["group"]
        assert f"to is 0 on {common} but 1 on {odd}" in told["to"]
        assert "parameter 2 of shape" in told["replicas"]
        assert f"differs between {common} and {odd}" in told["replicas"]


def averaged_within_a_replica(rank: int, world: int) -> list[str]:
    """DDP over the shard group alone: the replicas drift apart."""
    mesh = mesh_of((2, 2))
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(3, 2), process_group=mesh.get_group("shard"))
    opt = ZeroRedundancyOptimizer(model.parameters(), SGD, mesh, lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            if step == 2:
                dist.barrier()  # nothing makes the replicas wait for each other; now rank 0 has made its first step
            batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            opt.zero_grad()
            model(batch).sum().square().backward()
            opt.step()
    assert "replicate 1" in str(error_of(opt.check_replicas, "the replicas have drifted apart"))
    return [str(warning.message) for warning in caught if "averaged over the ranks" in str(warning.message)]


def test_gradients_that_are_averaged_within_replicas_only_are_noticed():
    first, second, third, fourth = run_ranks(averaged_within_a_replica, 4)
    assert first == second == []
    assert all("on rank 0 (replicate 0, shard 0)" in text for (text,) in (third, fourth))


def hooked_within_a_replica(rank: int, world: int) -> None:
    mesh = mesh_of((2, 2))
    model = DistributedDataParallel(nn.Linear(3, 2), process_group=mesh.get_group("shard"))
    opt = ZeroRedundancyOptimizer(model.parameters(), SGD, mesh, overlap_with_ddp=True, lr=0.1)
    error = error_of(lambda: hook_with_zero_step(allreduce_hook, model, opt), "DDP over one replica")
    assert isinstance(error, ValueError)
    assert f"lacks global ranks {'2, 3' if rank < 2 else '0, 1'}" in str(error)


def test_a_stepping_hook_of_a_ddp_over_one_replica_is_refused():
    run_ranks(hooked_within_a_replica, 4)


def reads_alone(rank: int, world: int) -> str:
    """Rank 1 does not ask. Its shard group is rank 0 and itself; the other replica reads undisturbed."""
    model = nn.Linear(3, 2)
    opt = ZeroRedundancyOptimizer(model.parameters(), SGD, mesh_of((2, 2)), shard_gradients=True, lr=0.1)
    model(torch.ones(4, 3)).sum().backward()
    opt.clip_grad_norm_(1.0)
    if rank == 0:
        text = str(error_of(lambda: opt.clip_grad_norm_(1.0)))
    else:
        text = "" if rank == 1 else str(float(opt.clip_grad_norm_(1.0)))
    return text


def test_a_rank_that_reads_gradients_alone_names_its_shard_group_only():
    told = run_ranks(reads_alone, 4, pg_timeout=2, timeout=30, fresh=True)
    assert "rank 1 (replicate 0, shard 1) did not take part" in told[0], told[0]
    assert "replicate 1" not in told[0]
    assert told[2] == told[3] != ""
