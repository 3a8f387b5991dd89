"""Parameters that are DTensors. Replicated ones are taken as the plain tensors they are; all others are refused.

Oracle: DDP with the plain optimizer, float64. torch's ``replicate`` averages in an order of its own, so means differ
from DDP's by last bits, which a few steps leave far below ``CLOSE``; where gradients are given, bits are compared.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.harness import run_ranks
from tests.oracle import SHAPES, assert_same, error_of, parameters, values_of

try:
    from torch.distributed._composable.replicate_with_fsdp import replicate
except ImportError:  # an older torch has none that makes DTensors
    replicate = None

CLOSE = {"rtol": 1e-11, "atol": 1e-13}


def noise(shape: Any, seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def replicated(shapes: Any = SHAPES, dimensions: int = 1) -> list[Parameter]:
    """The parameters of ``tests.oracle``, each a DTensor that all ranks have whole."""
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,) if dimensions == 1 else (1, world))
    placements = [Replicate()] * dimensions
    return [Parameter(distribute_tensor(param.detach(), mesh, placements)) for param in parameters(shapes)]


def set_gradients(ours: list[Parameter], theirs: list[Parameter], step: int) -> None:
    for position, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        gradient = noise(other.shape, 100 * step + position)
        other.grad = gradient.clone()
        mine.grad = DTensor.from_local(gradient, mine.device_mesh, mine.placements, run_check=False)


def whole(params: list[Parameter]) -> list[Tensor]:
    return [param.to_local().detach().clone() for param in params]


def trained(rank: int, world: int, dimensions: int) -> None:
    for shard in ("element", "tensor"):
        ours, theirs = replicated(dimensions=dimensions), parameters()
        opt = ZeroRedundancyOptimizer(ours, AdamW, shard=shard, bucket_cap_mb=0.0005, lr=0.1)
        plain = AdamW(theirs, lr=0.1)
        assert all(mine is given for mine, given in zip(ours, opt.param_groups[0]["params"], strict=True))
        for step in range(3):
            set_gradients(ours, theirs, step)
            assert_same(opt.clip_grad_norm_(2.0), nn.utils.clip_grad_norm_(theirs, 2.0))
            opt.step()
            plain.step()
            assert_same(whole(ours), values_of(theirs), f"{shard}, step {step}")
            opt.zero_grad()
            assert all(param.grad is None for param in ours)
        ours[1].requires_grad_(False)
        theirs[1].requires_grad_(False)
        extra, other = replicated([(4, 3)], dimensions), parameters([(4, 3)])
        opt.add_param_group({"params": extra})
        plain.add_param_group({"params": other})
        set_gradients(ours + extra, theirs + other, 9)
        ours[1].grad = theirs[1].grad = None
        opt.step()
        plain.step()
        assert_same(whole(ours + extra), values_of(theirs + other), f"{shard}, after a change")
        opt.check_replicas()
        for mine, twin in zip(ours, theirs, strict=True):
            found = opt.full_state(mine)
            assert_same(found, plain.state[twin])
            assert all(type(value) is Tensor for value in found.values())
            assert mine in opt.state
        opt.consolidate_state_dict()
        if rank == 0:
            assert_same(opt.state_dict()["state"], plain.state_dict()["state"])
        opt.load_state_dict(plain.state_dict())
        _follows_other_memory(opt, ours, theirs, plain)


def _follows_other_memory(opt: Any, ours: list[Parameter], theirs: list[Parameter], plain: Any) -> None:
    for mine in ours:  # as ``model.to`` does it
        local = mine.to_local().detach().clone()
        mine.data = DTensor.from_local(local, mine.device_mesh, mine.placements, run_check=False)
    set_gradients(ours, theirs, 20)
    opt.step()
    plain.step()
    assert_same(whole(ours), values_of(theirs), "with other memory")


@pytest.mark.parametrize("dimensions", [1, pytest.param(2, marks=pytest.mark.again)])
def test_replicated_dtensors_are_stepped_to_the_bits_of_the_plain_optimizer(dimensions):
    """Cut and whole, clipped, frozen, added, consolidated, loaded; users see their DTensors, states are plain."""
    run_ranks(trained, 3, dimensions)


def net(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 5)).double()


def batch_of(rank: int, step: int) -> Tensor:
    return noise((4, 7), 1000 * step + rank)


def with_torchs_replicate(rank: int, world: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("replicate",))
    model, ddp = net(), DistributedDataParallel(net())
    replicate(model, mesh=mesh)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    opt = ZeroRedundancyOptimizer(model.named_parameters(), Adam, lr=0.02)
    plain = Adam(ddp.parameters(), lr=0.02)
    for step in range(4):
        for module, optimizer in ((model, opt), (ddp, plain)):
            optimizer.zero_grad()
            module(batch_of(rank, step)).square().mean().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            optimizer.step()
        for mine, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
            torch.testing.assert_close(mine.to_local().detach(), theirs.detach(), **CLOSE)
    opt.check_replicas()
    owned = sum(param.numel() for group in opt.optim.param_groups for param in group["params"])
    assert owned <= 161 / world + 1, "the state is not sharded"
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


def refusals(rank: int, world: int) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (1, world))
    params = {
        "shard": distribute_tensor(torch.ones(6, 4), mesh, [Shard(1)]),
        "one of two": distribute_tensor(torch.ones(6, 4), square, [Replicate(), Shard(0)]),
        "partial": DTensor.from_local(torch.ones(6, 4), mesh, [Partial()]),
    }
    told = {}
    for name, param in params.items():
        error = error_of(lambda: ZeroRedundancyOptimizer([Parameter(param)], SGD, lr=0.1), name)  # noqa: B023
        assert isinstance(error, ValueError), name
        told[name] = str(error)
    for name in ("shard_gradients", "overlap_with_ddp", "lazy_gather", "parameters_as_bucket_view"):
        error = error_of(lambda: ZeroRedundancyOptimizer(replicated(), SGD, lr=0.1, **{name: True}), name)  # noqa: B023
        assert isinstance(error, ValueError), name
        told[name] = str(error)
    ours = replicated()
    opt = ZeroRedundancyOptimizer(ours, SGD, lr=0.1)
    before = whole(ours)
    for param in ours:
        param.grad = DTensor.from_local(torch.ones(param.shape).double(), param.device_mesh, [Partial()])
    told["gradient"] = str(error_of(opt.step, "a partial gradient"))
    assert_same(whole(ours), before, "a step that was refused")
    told["copy"] = str(error_of(lambda: copy.deepcopy(opt), "a copy"))
    return told


def test_other_placements_are_refused_by_name_and_so_is_what_goes_with_plain_tensors_only():
    for told in run_ranks(refusals, 3):
        for name, placements in {
            "shard": "(Shard(dim=1),)",
            "one of two": "(Replicate(), Shard(dim=0))",
            "partial": "(Partial(sum),)",
        }.items():
            assert f"the placements {placements}" in told[name], told[name]
        for name in ("shard_gradients", "overlap_with_ddp", "lazy_gather", "parameters_as_bucket_view"):
            assert f"{name}=True expects plain tensors" in told[name]
            assert f"Drop {name}" in told[name]
        assert "gradient" in told["gradient"]
        assert "Partial(sum)" in told["gradient"]
        assert "Copy its state dict" in told["copy"]
