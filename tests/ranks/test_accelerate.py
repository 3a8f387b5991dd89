"""Accelerate: ``prepare`` of an optimizer that has state, and checkpoints through its wrapper."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.harness import run_ranks
from tests.oracle import error_of
from tests.ranks.test_no_process_group import make_model, plain, sharded, train
from tests.surroundings import as_under_torchrun

accelerate = pytest.importorskip("accelerate")
WAYS = ["load_state_dict", "checkpoint.load", "trained"]


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


def wrapped(rank: int, world: int) -> None:
    as_under_torchrun(rank, world)
    model = make_model()
    optimizer = sharded(model, shard_gradients=True)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    text = str(error_of(lambda: train(model, optimizer, range(1), accelerator.backward)))
    assert "shard_gradients=True expects a model that is not wrapped" in text
    assert "docs/frameworks.md" in text


def test_a_model_that_accelerate_wraps_is_refused_at_the_first_backward():
    """(That the ways round train as plain DDP, in every framework: tests/frameworks/test_resuming.py.)"""
    run_ranks(wrapped, 2, fresh=True)
