"""Parameters that are replicated DTensors are taken as the plain tensors they are. (All others are refused.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.harness import run_ranks
from tests.oracle import SHAPES, assert_same, parameters, values_of
from tests.twins import values

try:
    from torch.distributed._composable.replicate_with_fsdp import replicate
except ImportError:  # an older torch has none that makes DTensors
    replicate = None


def replicated(shapes: object = SHAPES) -> list[Parameter]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return [Parameter(distribute_tensor(param.detach(), mesh, [Replicate()])) for param in parameters(shapes)]


def like(param: Parameter, value: Tensor) -> DTensor:
    return DTensor.from_local(value, param.device_mesh, param.placements, run_check=False)


def whole(params: list[Parameter]) -> list[Tensor]:
    return [param.to_local().detach().clone() for param in params]


def trained(rank: int, world: int) -> None:
    for shard in ("element", "tensor"):
        ours, theirs = replicated(), parameters()
        opt = ZeroRedundancyOptimizer(ours, AdamW, shard=shard, bucket_cap_mb=0.0005, lr=0.1)
        plain = AdamW(theirs, lr=0.1)
        for step in range(6):
            if step == 2:
                ours += replicated([(4, 3)])
                theirs += parameters([(4, 3)])
                opt.add_param_group({"params": ours[-1:]})
                plain.add_param_group({"params": theirs[-1:]})
            if step == 4:  # other memory, as ``model.to`` does it
                for mine in ours:
                    mine.data = like(mine, mine.to_local().detach().clone())
                opt.load_state_dict(plain.state_dict())
            for position, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
                for param in (mine, other):
                    param.requires_grad_(position != 1 or step != 3)
                other.grad = values(other.shape, 100 * step + position) if other.requires_grad else None
                mine.grad = like(mine, other.grad.clone()) if other.requires_grad else None
            assert_same(opt.clip_grad_norm_(2.0), nn.utils.clip_grad_norm_(theirs, 2.0))
            opt.step()
            plain.step()
            assert_same(whole(ours), values_of(theirs), f"{shard}, step {step}")
        opt.check_replicas()
        for mine, twin in zip(ours, theirs, strict=True):
            found = opt.full_state(mine)
            assert_same(found, plain.state[twin])
            assert all(type(value) is Tensor for value in found.values())


def test_replicated_dtensors_are_stepped_to_the_bits_of_the_plain_optimizer():
    """Cut and whole, clipped, frozen, added, loaded; users see their DTensors, states are plain."""
    run_ranks(trained, 3)


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
    assert_same(values_of(other.parameters()), whole(list(model.parameters())))
    checkpoint.save(folder / "plain", plain_opt, other)
    replicate(again, mesh=mesh)
    third = ZeroRedundancyOptimizer(again.parameters(), Adam, lr=0.5)
    checkpoint.load(folder / "plain", third, again)
    assert_same(whole(list(again.parameters())), whole(list(model.parameters())))
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert_same(third.full_state(two), opt.full_state(one))


@pytest.mark.skipif(replicate is None, reason="this torch has no replicate that makes DTensors")
def test_torchs_replicate_trains_like_ddp_and_its_checkpoints_are_plain(tmp_path):
    run_ranks(with_torchs_replicate, 3, tmp_path)
