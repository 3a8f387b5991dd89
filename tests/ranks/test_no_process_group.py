"""One process without a process group: an optimizer of one rank, in every mode. Several processes: an error."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.harness import run_ranks

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "bucket views": {"parameters_as_bucket_view": True},
    "sharded gradients": {"shard_gradients": True},
    "sharded gradients and bucket views": {"shard_gradients": True, "parameters_as_bucket_view": True},
    "lazy gathers": {"lazy_gather": True},
    "whole tensors": {"shard": "tensor"},
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3)).double()


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(6, 7, dtype=torch.float64, generator=generator)).square().mean()


def _sharded(model: nn.Module, **settings: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, **settings)


def _train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        _loss(model, step).backward()
        _loss(model, step + 100).backward()  # accumulated
        optimizer.step()


def _plain(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _train(model, optimizer, range(steps))
    return model, optimizer


def _assert_equal(model: nn.Module, expected: nn.Module) -> None:
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


@pytest.mark.parametrize("mode", list(MODES))
def test_one_process_trains_with_the_bits_of_the_plain_optimizer(mode: str) -> None:
    assert not dist.is_initialized()
    model = _model()
    optimizer = _sharded(model, **MODES[mode])
    assert optimizer.process_group is None
    assert (optimizer.rank, optimizer.world_size, optimizer.global_rank) == (0, 1, 0)
    _train(model, optimizer, range(3))
    _assert_equal(model, _plain(3)[0])
    optimizer.check_replicas()
    optimizer.broadcast_buffers(model)
    assert optimizer.memory().state >= 2 * optimizer.memory().parameters
    assert optimizer.full_state(next(model.parameters()))["exp_avg"].shape == (13, 7)


@pytest.mark.parametrize("mode", list(MODES))
def test_one_process_clips_and_freezes_and_adds_groups_as_the_plain_optimizer_does(mode: str) -> None:
    models, head = [_model(), _model()], [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    optimizers = [_sharded(models[0], **MODES[mode]), torch.optim.AdamW(models[1].parameters(), lr=1e-2)]
    for model, optimizer, extra in zip(models, optimizers, head, strict=True):
        for step in range(4):
            if step == 1:
                optimizer.add_param_group({"params": [extra], "lr": 1e-1})
            model[0].weight.requires_grad_(step != 2)
            optimizer.zero_grad()
            (_loss(model, step) + extra.square().sum()).backward()
            params = [*model.parameters(), extra]
            if isinstance(optimizer, ZeroRedundancyOptimizer):
                optimizer.clip_grad_norm_(0.1)
            else:
                torch.nn.utils.clip_grad_norm_(params[: 4 if step == 0 else 5], 0.1)
            optimizer.step()
    # The norm is added up in another order than torch's: some roundings.
    for one, other in zip([*models[0].parameters(), head[0]], [*models[1].parameters(), head[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_state_dicts_go_to_the_plain_optimizer_and_back_and_through_torch_s_functions() -> None:
    model = _model()
    optimizer = _sharded(model)
    _train(model, optimizer, range(2))
    optimizer.consolidate_state_dict()
    expected, plain = _plain(2)
    plain.load_state_dict(optimizer.state_dict())
    _train(expected, plain, range(2, 4))
    model = _model()
    model.load_state_dict(_plain(2)[0].state_dict())
    optimizer = _sharded(model)
    optimizer.load_state_dict(_plain(2)[1].state_dict())
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    optimizer.load_sharded_state_dict(optimizer.sharded_state_dict(model), model)
    _train(model, optimizer, range(2, 4))
    _assert_equal(model, expected)
    _assert_equal(model, _plain(4)[0])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_are_saved_and_resumed(asynchronous: bool, tmp_path: Path) -> None:
    model = _model()
    optimizer = _sharded(model, shard_gradients=True)
    _train(model, optimizer, range(2))
    checkpoint.save(tmp_path / "2", optimizer, model, {"step": 2}, asynchronous=asynchronous).wait()
    for load in (checkpoint.resume, checkpoint.load):
        model = _model()
        optimizer = _sharded(model, parameters_as_bucket_view=True)
        load(tmp_path if load is checkpoint.resume else tmp_path / "2", optimizer, model)
        _train(model, optimizer, range(2, 4))
        _assert_equal(model, _plain(4)[0])


def test_a_checkpoint_of_three_ranks_is_loaded_by_one_process_alone(tmp_path: Path) -> None:
    run_ranks(_save, 3, str(tmp_path / "saved"))
    model = _model()
    optimizer = _sharded(model)
    checkpoint.load(tmp_path / "saved", optimizer, model)
    _train(model, optimizer, range(2, 4))
    _assert_equal(model, _plain(4)[0])


def _save(rank: int, world: int, folder: str) -> None:
    model = _model()
    optimizer = _sharded(model)
    _train(model, optimizer, range(2))  # the same on every rank
    checkpoint.save(folder, optimizer, model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_trains_on(copied: Any) -> None:
    model = _model()
    optimizer = _sharded(model)
    _train(model, optimizer, range(2))
    model, optimizer = copied((model, optimizer))
    assert optimizer.process_group is None
    _train(model, optimizer, range(2, 4))
    _assert_equal(model, _plain(4)[0])


def test_join_is_refused_and_says_what_is_missing() -> None:
    optimizer = _sharded(_model())
    with pytest.raises(RuntimeError, match="Join expects a process group"), Join([optimizer]):
        pass


# --- several processes ------------------------------------------------------------------------------------------------


def test_several_processes_without_a_group_are_told_which_call_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"4 processes were launched.*Call torch.distributed.init_process_group"):
        _sharded(_model())
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert _sharded(_model()).world_size == 1


def _initialize_late(rank: int, world: int, mode: str) -> str:
    store = dist.PrefixStore("late", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    model = _model()
    optimizer = _sharded(model, **MODES[mode])
    _train(model, optimizer, range(1))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=20))
    try:
        _train(model, optimizer, range(1, 2))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mode", ["default", "sharded gradients"])
def test_a_group_that_is_initialised_after_the_optimizer_was_built_is_an_error_on_every_rank(mode: str) -> None:
    for error in run_ranks(_initialize_late, 2, mode, fresh=True):
        assert "built without a process group, and there are 2 ranks now" in error
        assert "init_process_group first and build the optimizer afterwards" in error


def test_a_group_of_one_rank_that_is_initialised_later_changes_nothing() -> None:
    assert run_ranks(_initialize_late, 1, "default", fresh=True) == [""]
