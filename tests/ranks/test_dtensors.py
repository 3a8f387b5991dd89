"""Parameters that are replicated DTensors are taken as the plain tensors they are. (All others are refused.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.harness import run_ranks
from tests.oracle import assert_same, values, values_of

try:
    from torch.distributed._composable.replicate_with_fsdp import replicate
except ImportError:  # an older torch has none that makes DTensors
    replicate = None


def whole(model: nn.Module) -> list[Tensor]:
    return [param.to_local().detach().clone() for param in model.parameters()]


def net(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 5)).double()


def with_torchs_replicate(rank: int, world: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("replicate",))
    model, ddp = net(), DistributedDataParallel(net())
    replicate(model, mesh=mesh)
    opt = ZeroRedundancyOptimizer(model.named_parameters(), Adam, lr=0.02)
    plain = Adam(ddp.parameters(), lr=0.02)
    for step in range(4):
        for module, optimizer in ((model, opt), (ddp, plain)):
            optimizer.zero_grad()
            module(values((4, 7), 1000 * step + rank)).square().mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
        for mine, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
            # torch's ``replicate`` averages in an order of its own: last bits
            torch.testing.assert_close(mine.to_local().detach(), theirs.detach(), rtol=1e-11, atol=1e-13)
    opt.check_replicas()
    # A checkpoint of it is like any other: a plain model loads it, and back.
    checkpoint.save(folder / "replicate", opt, model)
    other, again = net(8), net(9)
    plain_opt = ZeroRedundancyOptimizer(other.parameters(), Adam, lr=0.5)
    checkpoint.load(folder / "replicate", plain_opt, other)
    assert_same(values_of(other.parameters()), whole(model))
    checkpoint.save(folder / "plain", plain_opt, other)
    replicate(again, mesh=mesh)
    third = ZeroRedundancyOptimizer(again.parameters(), Adam, lr=0.5)
    checkpoint.load(folder / "plain", third, again)
    assert_same(whole(again), whole(model))
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert_same(third.full_state(two), opt.full_state(one))


@pytest.mark.skipif(replicate is None, reason="this torch has no replicate that makes DTensors")
def test_torchs_replicate_trains_like_ddp_and_its_checkpoints_are_plain(tmp_path):
    run_ranks(with_torchs_replicate, 3, tmp_path)
