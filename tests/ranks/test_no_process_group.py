"""One process without a process group: an optimizer of one rank, in every mode."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.harness import run_ranks

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "bucket views": {"parameters_as_bucket_view": True},
    "sharded gradients": {"shard_gradients": True},
    "lazy gathers": {"lazy_gather": True},
    "whole tensors": {"shard": "tensor"},
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3)).double()


def sharded(model: nn.Module, **settings: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, **settings)


def train(model: nn.Module, optimizer: Any, steps: range, backward: Any = torch.Tensor.backward) -> None:
    for step in steps:
        optimizer.zero_grad()
        for seed in (step, step + 100):  # accumulated
            generator = torch.Generator().manual_seed(seed)
            backward(model(torch.randn(6, 7, dtype=torch.float64, generator=generator)).square().mean())
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()


def plain(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(steps))
    return model, optimizer


def assert_trained(model: nn.Module, steps: int) -> None:
    assert all(map(torch.equal, model.parameters(), plain(steps)[0].parameters()))


@pytest.mark.parametrize("mode", list(MODES))
def test_one_process_trains_and_adds_a_group_with_the_bits_of_the_plain_optimizer(mode):
    assert not dist.is_initialized()
    model, (expected, oracle) = make_model(), plain(2)
    optimizer = sharded(model, **MODES[mode])
    assert optimizer.process_group is None
    assert (optimizer.rank, optimizer.world_size, optimizer.global_rank) == (0, 1, 0)
    train(model, optimizer, range(2))
    for module, one in ((model, optimizer), (expected, oracle)):
        module.register_parameter("more", nn.Parameter(torch.ones(3, dtype=torch.float64)))
        one.add_param_group({"params": [module.more], "lr": 0.1})
        module[0].weight.requires_grad_(False)
        train(module, one, range(2, 4))
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    optimizer.check_replicas()
    optimizer.broadcast_buffers(model)
    optimizer.clip_grad_norm_(0.1)


def test_state_goes_through_dicts_and_checkpoints(tmp_path):
    model = make_model()
    optimizer = sharded(model, shard_gradients=True)
    train(model, optimizer, range(2))
    checkpoint.save(tmp_path / "2", optimizer, model, asynchronous=True).wait()
    optimizer.consolidate_state_dict()
    model, given = make_model(), optimizer.state_dict()
    optimizer = sharded(model)
    checkpoint.resume(tmp_path, optimizer, model)
    optimizer.load_state_dict(given)
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    optimizer.load_sharded_state_dict(optimizer.sharded_state_dict(model), model)
    optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    train(model, optimizer, range(2, 4))
    assert_trained(model, 4)


def initialize_late(rank: int, world: int, mode: str) -> str:
    store = dist.PrefixStore("late", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    model = make_model()
    optimizer = sharded(model, **MODES[mode])
    train(model, optimizer, range(1))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20))
    try:
        train(model, optimizer, range(1, 2))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("world", "mode"), [(2, "default"), (2, "sharded gradients"), (1, "default")])
def test_a_group_that_is_initialised_after_the_optimizer_was_built_is_an_error_unless_it_has_one_rank(world, mode):
    for error in run_ranks(initialize_late, world, mode, fresh=True):
        assert bool(error) == (world == 2)
        assert world == 1 or "built without a process group, and there are 2 ranks now" in error
        assert world == 1 or "init_process_group first and build the optimizer afterwards" in error
