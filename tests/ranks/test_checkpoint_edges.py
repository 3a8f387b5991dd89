"""Checkpoints at their edges: what a review of the code found, once each."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardstep import ZeroRedundancyOptimizer, checkpoint
from shardstep.checkpoint.storage import directories, reader, writer
from tests.harness import run_ranks


def with_moments(params: list[nn.Parameter], *numbers: float) -> torch.optim.Optimizer:
    """A plain optimizer whose momentum buffers are these numbers."""
    optimizer = torch.optim.SGD(params, lr=0.0, momentum=0.9)
    for param, number in zip(params, numbers, strict=True):
        param.grad = torch.full_like(param, number)
    optimizer.step()
    return optimizer


def test_tensors_that_pass_through_host_memory_in_parts_are_whole_in_the_file(tmp_path, monkeypatch) -> None:
    """As on an accelerator: ``cpu()`` gives new memory, and a tensor is many windows of it."""
    for module in (writer, reader):
        monkeypatch.setattr(module, "WINDOW_BYTES", 32 * 1024)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor.clone())
    weight = nn.Parameter(torch.randn(300, 700).t())  # not contiguous, so it cannot be written as it lies
    optimizer = with_moments([weight], 3.0)
    model = nn.ParameterDict({"weight": weight})
    before = weight.detach().clone()
    checkpoint.save(tmp_path / "c", optimizer, model)
    checkpoint.verify(tmp_path / "c")
    with torch.no_grad():
        weight.zero_()
    checkpoint.load(tmp_path / "c", optimizer, model)
    assert torch.equal(weight, before)
    assert weight.stride() == (1, 700)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.full_like(weight, 3.0))


def test_names_that_are_digits_are_names(tmp_path) -> None:
    """A ParameterList calls its parameters "0" and "1"; in groups of another order they are still these."""
    first, second = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    model = nn.ParameterList([first, second])
    saved = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.1, momentum=0.9)
    first.grad, second.grad = torch.ones(4), torch.full((4,), 2.0)
    saved.step()
    checkpoint.save(tmp_path / "c", saved, model)
    swapped = torch.optim.SGD([{"params": [second]}, {"params": [first]}], lr=0.1, momentum=0.9)
    checkpoint.load(tmp_path / "c", swapped, model)
    assert torch.equal(swapped.state[first]["momentum_buffer"], torch.ones(4))
    assert torch.equal(swapped.state[second]["momentum_buffer"], torch.full((4,), 2.0))


SCHEDULERS = {
    "steps": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_extra_comes_back_as_it_was(asynchronous, tmp_path) -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = with_moments([param], 1.0)
    extra: dict[str, Any] = {
        "numbers as keys": {1: 2.0, 2: {3: 4}},
        "nothing": {},
        "lists": [{"b": 1}, {}, []],
        "empty first": [{}, {"b": 1}],
        "tensors": {"deep": {"er": [torch.ones(2), {"x": torch.zeros(1), "y": 5}]}},
        "a tuple": (torch.ones(1), 2),
        "counter": Counter([1, 1, 2]),
        "ordered": OrderedDict(x=1),
        "optimizer": optimizer.state_dict(),
        "tensor": torch.arange(4),
        "text": "ü",
        "none": None,
    } | {name: make(optimizer).state_dict() for name, make in SCHEDULERS.items()}
    told = {key: (type(value), str(value)) for key, value in extra.items()}
    checkpoint.save(tmp_path / "c", optimizer, extra=extra, asynchronous=asynchronous).wait()
    found = checkpoint.load(tmp_path / "c", optimizer)
    assert {key: (type(value), str(value)) for key, value in found.items()} == told


class TableState(torch.optim.SGD):
    """Keeps what DCP's dicts cannot: numbers as keys, and an empty dict."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("factors", {i: torch.eye(size) for i, size in enumerate(param.shape)})
                state.setdefault("nothing", {})
        return super().step(closure)


def table_state(rank: int, world: int, directory: Path) -> None:
    params = [nn.Parameter(torch.ones(4, 3)) for _ in range(3)]
    optimizers = [ZeroRedundancyOptimizer(params, TableState, shard="tensor", lr=0.1, momentum=0.9) for _ in range(2)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizers[0].step()
    checkpoint.save(directory, optimizers[0])
    checkpoint.load(directory, optimizers[1])
    for param in params:
        mine, loaded = optimizers[0].state[param], optimizers[1].state[param]
        assert str(mine) == str(loaded)


def test_state_with_numbers_as_keys_comes_back_as_it_was(tmp_path) -> None:
    run_ranks(table_state, 2, tmp_path / "c")


def test_a_scalar_is_no_vector(tmp_path) -> None:
    checkpoint.save(tmp_path / "c", with_moments([nn.Parameter(torch.tensor(1.0))], 1.0))
    vector = torch.optim.SGD([nn.Parameter(torch.ones(5))], lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="wrongly shaped: 0"):
        checkpoint.load(tmp_path / "c", vector)
    assert not vector.state


def test_a_checkpoint_without_a_model_leaves_the_model_and_says_so(tmp_path) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "c", torch.optim.SGD(model.named_parameters(), lr=0.1))
    with pytest.warns(UserWarning, match="holds no model"):
        checkpoint.load(tmp_path / "c", torch.optim.SGD(model.named_parameters(), lr=0.1), model)


def test_when_no_checkpoint_can_be_read_resume_does_not_start_over(tmp_path) -> None:
    optimizer = with_moments([nn.Parameter(torch.ones(3))], 1.0)
    assert checkpoint.resume(tmp_path / "none", optimizer) is None
    for name in ("one", "two"):
        checkpoint.save(tmp_path / name, optimizer)
        (tmp_path / name / "__0_0.distcp").rename(tmp_path / name / "away")
    with pytest.raises(CheckpointError, match=r"none can be read.*two.*one"):
        checkpoint.resume(tmp_path, optimizer)


CheckpointError = checkpoint.CheckpointError


class Breaks(torch.optim.SGD):
    """Fails in the middle of a sharded step, which goes bucket by bucket."""

    left = 10**9

    def step(self, closure=None):
        Breaks.left -= 1
        if Breaks.left < 0:
            raise ArithmeticError("in the middle")
        return super().step(closure)


def save_a_torn_state(rank: int, world: int, parent: Path) -> None:
    params = [nn.Parameter(torch.ones(64, 64)) for _ in range(6)]
    optimizer = ZeroRedundancyOptimizer(params, Breaks, lr=0.1, momentum=0.9, bucket_cap_mb=0.016)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    checkpoint.save(parent / "whole", optimizer)
    Breaks.left = 2
    with pytest.raises((ArithmeticError, RuntimeError)):
        optimizer.step()
    with pytest.raises(RuntimeError, match="half updated"):
        checkpoint.save(parent / "torn", optimizer)


def test_a_state_that_is_half_updated_is_not_saved(tmp_path) -> None:
    run_ranks(save_a_torn_state, 2, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def save_two_at_once(rank: int, world: int, parent: Path) -> None:
    """Two optimizers (a GAN's) save in the background for the first time, and the first is held up on rank 0."""
    prepare = directories.prepare

    def slowly(path: Path, token: str) -> None:
        if path.name == "a":
            time.sleep(0.7)
        prepare(path, token)

    directories.prepare = slowly
    handles = []
    for number, name in enumerate("ab", start=1):
        model = nn.Linear(32, 32)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.0, momentum=0.9)
        for param in model.parameters():
            param.grad = torch.full_like(param, float(number))
        optimizer.step()
        handles.append(checkpoint.save(parent / name, optimizer, model, asynchronous=True))
    for handle in handles:
        handle.wait(20)


def test_the_first_saves_of_two_optimizers_do_not_meet_each_other(tmp_path) -> None:
    run_ranks(save_two_at_once, 2, tmp_path)
    for number, name in enumerate("ab", start=1):
        checkpoint.verify(tmp_path / name)
        model = nn.Linear(32, 32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        checkpoint.load(tmp_path / name, optimizer, model)
        assert torch.equal(optimizer.state[model.weight]["momentum_buffer"], torch.full((32, 32), float(number)))
