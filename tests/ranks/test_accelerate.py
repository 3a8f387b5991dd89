"""Accelerate: ``prepare`` of an optimizer with state, checkpoints through its wrapper, and the way round its DDP."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.harness import run_ranks
from tests.oracle import error_of
from tests.surroundings import as_under_torchrun

accelerate = pytest.importorskip("accelerate")
WAYS = ["load_state_dict", "checkpoint.load", "trained", "consolidated"]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3)).double()


def sharded(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, **options)


def train(model: nn.Module, optimizer: Any, steps: range, backward: Any = torch.Tensor.backward) -> None:
    for step in steps:
        optimizer.zero_grad()
        batch = torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        backward(model(batch).square().mean())
        optimizer.step()


def plain(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(steps))
    return model, optimizer


def with_state(way: str, folder: Path) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    """As far as two steps, in one of several ways."""
    model = make_model()
    optimizer = sharded(model)
    if way == "checkpoint.load":
        checkpoint.load(folder, optimizer, model)
    elif way == "load_state_dict":
        model.load_state_dict(plain(2)[0].state_dict())
        optimizer.load_state_dict(plain(2)[1].state_dict())
    else:
        train(model, optimizer, range(2))
        if way == "consolidated":
            optimizer.consolidate_state_dict(to=0)
    return model, optimizer


def prepared(rank: int, world: int, way: str, folder: Path) -> None:
    if world == 1:
        dist.destroy_process_group()
    else:
        as_under_torchrun(rank, world)
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == world
    inner, optimizer = with_state(way, folder)
    before = optimizer.memory().state
    model, wrapper = accelerator.prepare(inner, optimizer)
    assert optimizer.memory().state == before > 0
    train(model, wrapper, range(2, 4), accelerator.backward)
    # DDP averages equal gradients: a rounding or two.
    weights = [param.detach() for param in inner.parameters()]
    torch.testing.assert_close(weights, [one.detach() for one in plain(4)[0].parameters()], rtol=0, atol=1e-13)
    if rank == world - 1:
        time.sleep(0.3)  # a late rank does not overwrite what the others have saved
    checkpoint.save(folder / "through the wrapper", wrapper)
    fresh = sharded(make_model())
    checkpoint.load(folder / "through the wrapper", accelerator.prepare(fresh))
    for one, two in zip(inner.parameters(), fresh.param_groups[0]["params"], strict=True):
        assert torch.equal(fresh.full_state(two)["exp_avg"], optimizer.full_state(one)["exp_avg"])
    accelerator.free_memory()


@pytest.mark.parametrize(("world", "way"), [(2, way) for way in WAYS] + [(1, "load_state_dict")])
def test_an_optimizer_that_has_state_is_prepared_keeps_it_and_is_saved_through_the_wrapper(world, way, tmp_path):
    """Alone: without a process group."""
    model, optimizer = plain(2)
    checkpoint.save(tmp_path, optimizer, model)
    run_ranks(prepared, world, way, tmp_path, fresh=True)


def used_wrongly(rank: int, world: int) -> None:
    as_under_torchrun(rank, world)
    accelerator = accelerate.Accelerator(cpu=True)
    caught: list[Any] = []
    model = make_model()
    optimizer = sharded(model)
    train(model, optimizer, range(1))
    optimizer.register_state_dict_post_hook(lambda one, form: caught.append(form))
    accelerator.prepare(optimizer)  # asks for the state, moves it, and loads it: nothing of it need be there for that
    text = str(error_of(lambda: sharded(make_model()).load_state_dict(caught[-1])))
    assert "put the state of another optimizer on a device" in text
    assert "consolidate" in str(error_of(optimizer.state_dict, "everybody else still has to"))
    model = make_model()
    text = str(error_of(lambda: accelerator.prepare(model, sharded(model, shard_gradients=True))))
    assert "shard_gradients=True expects a model that is not wrapped" in text
    assert "With Accelerate: give accelerator.prepare everything but the model" in text


def test_what_accelerate_cannot_do_is_told_with_the_way_round():
    run_ranks(used_wrongly, 2, fresh=True)
