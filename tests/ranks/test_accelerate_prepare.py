"""``accelerator.prepare`` with an optimizer that has state: loaded, or trained, before it. Also without any group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.harness import run_ranks

accelerate = pytest.importorskip("accelerate")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3)).double()


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(6, 7, dtype=torch.float64, generator=generator)).square().mean()


def _train(model: nn.Module, optimizer: Any, steps: range, backward: Any = torch.Tensor.backward) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(_loss(model, step))
        optimizer.step()


def _plain(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _train(model, optimizer, range(steps))
    return model, optimizer


def _save_plainly(folder: Path) -> None:
    model, optimizer = _plain(2)
    checkpoint.save(folder, optimizer, model)


def _program(rank: int, world: int, way: str, folder: str) -> list[torch.Tensor]:
    """Loads before ``prepare``, then trains with Accelerate."""
    if world > 1:  # what a launcher sets. The address is asked for, not used: the group exists already
        os.environ.update(WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == world
    model = _model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    if way == "checkpoint.load":
        checkpoint.load(folder, optimizer, model)
    else:
        done, plain = _plain(2)
        model.load_state_dict(done.state_dict())
        if way == "load_state_dict":
            optimizer.load_state_dict(plain.state_dict())
        else:
            model.load_state_dict(_model().state_dict())
            _train(model, optimizer, range(2))
            if way == "consolidated":
                optimizer.consolidate_state_dict(to=0)
    model, wrapped = accelerator.prepare(model, optimizer)
    assert optimizer.optim.state
    _train(model, wrapped, range(2, 4), accelerator.backward)
    accelerator.free_memory()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("way", ["load_state_dict", "checkpoint.load", "trained", "consolidated"])
def test_an_optimizer_that_has_state_is_prepared_and_keeps_it(world: int, way: str, tmp_path: Path) -> None:
    _save_plainly(tmp_path / "saved")
    expected = [param.detach() for param in _plain(4)[0].parameters()]
    for weights in run_ranks(_program, world, way, str(tmp_path / "saved"), fresh=True):
        # DDP averages equal gradients of 2 or 3 ranks: a rounding or two.
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-13)


@contextmanager
def _without_a_group() -> Iterator[None]:
    dist.destroy_process_group()
    yield
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the harness leaves


def _program_without_a_group(*args: Any) -> list[torch.Tensor]:
    with _without_a_group():
        weights = _program(*args)
        assert not dist.is_initialized()
    return weights


@pytest.mark.parametrize("way", ["load_state_dict", "checkpoint.load", "trained"])
def test_one_process_without_a_group_is_prepared_and_trains(way: str, tmp_path: Path) -> None:
    _save_plainly(tmp_path / "saved")
    (weights,) = run_ranks(_program_without_a_group, 1, way, str(tmp_path / "saved"), fresh=True)
    assert all(map(torch.equal, weights, _plain(4)[0].parameters()))


def test_a_dict_that_was_made_to_move_state_is_no_state_dict_for_another_optimizer() -> None:
    run_ranks(_give_the_dict_to_another, 1, fresh=True)


def _give_the_dict_to_another(rank: int, world: int) -> None:
    model, caught = _model(), []
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    _train(model, optimizer, range(1))
    optimizer.register_state_dict_post_hook(lambda one, form: caught.append(form))
    accelerate.Accelerator(cpu=True).prepare(optimizer)
    assert caught[-1]["state"] == {}
    other = ZeroRedundancyOptimizer(_model().parameters(), torch.optim.AdamW, lr=1e-2)
    with pytest.raises(ValueError, match="put the state of another optimizer on a device"):
        other.load_state_dict(caught[-1])
    with pytest.raises(RuntimeError, match="consolidate"):  # everybody else still has to
        optimizer.state_dict()
