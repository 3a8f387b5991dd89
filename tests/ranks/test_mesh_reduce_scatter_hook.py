"""``reduce_scatter_hook`` on meshes of (replicate, shard): DDP's buckets, reduced inside and summed across.

Oracle: DDP over all ranks and the plain optimizer, float64. Sums have another order than gloo's: a mean differs by last
bits, which a few steps leave below 1e-11; a sum over one dimension alone would be wrong in the first digits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

import shardstep
from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.hook_twins import HOOKS, SMALL_CAP, Tangled, batch_of, two_groups
from tests.meshes import Shape, check_alike, mesh_of
from tests.oracle import error_of


def trained(rank: int, world: int, shape: Shape, way: str, views: bool, unused: bool) -> None:
    arguments: dict[str, Any] = {"gradient_as_bucket_view": views, "find_unused_parameters": unused}
    ours, theirs = (DistributedDataParallel(Tangled(), bucket_cap_mb=SMALL_CAP, **arguments) for _ in range(2))
    opt = ZeroRedundancyOptimizer(
        two_groups(ours.module), AdamW, mesh_of(shape), overlap_with_ddp=way in HOOKS, bucket_cap_mb=SMALL_CAP, lr=0.05
    )
    plain = AdamW(two_groups(theirs.module), lr=0.05)
    hook = shardstep.reduce_scatter_hook  # type: ignore[attr-defined]
    if way in HOOKS:
        ours.register_comm_hook(None, HOOKS[way](hook, ours, opt))
    else:
        shardstep.shard_ddp_gradients(ours, opt)  # type: ignore[attr-defined]
    skip = ([2] if rank % 2 else [2, 4]) if unused else []  # layer 2 is used by nobody, layer 4 by odd ranks only
    for iteration in range(3):
        for module, optimizer in ((ours, opt), (theirs, plain)):
            optimizer.zero_grad()
            module(batch_of(rank, iteration), skip=skip).square().mean().backward()
            if way not in HOOKS:
                clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-11, atol=1e-13)
    check_alike(opt, shape)


@pytest.mark.parametrize(
    "shape", [(2, 2), *(pytest.param(s, marks=pytest.mark.again) for s in ((3, 1), (1, 3)))], ids=str
)
@pytest.mark.parametrize("way", ["step", *HOOKS])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("unused", [False, True])
def test_ddps_buckets_are_reduced_inside_and_across(shape, way, views, unused):
    """With a step after backward and torch's own clipping, and inside both stepping hooks."""
    run_ranks(trained, shape[0] * shape[1], shape, way, views, unused, timeout=60, pg_timeout=20)


def over_one_dimension(rank: int, world: int, bare: bool) -> None:
    mesh = mesh_of((2, 2))
    ddp = DistributedDataParallel(Tangled(), process_group=mesh.get_group("shard"))
    opt = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, mesh, lr=0.05)
    if bare:
        ddp.register_comm_hook(opt, shardstep.reduce_scatter_hook)
        error = error_of(lambda: ddp(batch_of(rank, 0)).square().mean().backward(), "DDP over one dimension")
    else:
        error = error_of(lambda: shardstep.shard_ddp_gradients(ddp, opt), "DDP over one dimension")
    assert isinstance(error, ValueError)
    ranks = "0, 1" if rank < 2 else "2, 3"
    assert "expects DDP to reduce over all ranks of the optimizer's mesh (replicate: 2, shard: 2)" in str(error)
    assert f"DDP has global ranks {ranks} and the mesh ranks 0, 1, 2, 3" in str(error)


@pytest.mark.parametrize("bare", [False, pytest.param(True, marks=pytest.mark.again)])
def test_ddp_over_one_dimension_of_the_mesh_is_refused(bare):
    run_ranks(over_one_dimension, 4, bare, timeout=60, pg_timeout=20)
