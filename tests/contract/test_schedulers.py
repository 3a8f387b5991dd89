"""Every learning-rate scheduler of torch drives the sharded optimizer exactly as it drives the plain one."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs

import shardstep
from tests.contract.subjects import assert_equal, clones, full_state_dict, new_params, set_gradients
from tests.harness import run_ranks

STEPS = 12
SAVED_AT = 6


def _decay(epoch: int) -> float:
    return 0.9**epoch


def _wave(epoch: int) -> float:
    return 1.0 + 0.1 * (epoch % 3)


# How to build each class over an optimizer with two groups. Each changes something within 12 steps.
BUILDERS: dict[str, Any] = {
    "LambdaLR": lambda opt: lrs.LambdaLR(opt, [_decay, _wave]),
    "MultiplicativeLR": lambda opt: lrs.MultiplicativeLR(opt, [_wave, lambda epoch: 0.8]),
    "StepLR": lambda opt: lrs.StepLR(opt, step_size=3, gamma=0.3),
    "MultiStepLR": lambda opt: lrs.MultiStepLR(opt, milestones=[2, 5, 8], gamma=0.3),
    "ConstantLR": lambda opt: lrs.ConstantLR(opt, factor=0.25, total_iters=4),
    "LinearLR": lambda opt: lrs.LinearLR(opt, start_factor=0.1, total_iters=7),
    "ExponentialLR": lambda opt: lrs.ExponentialLR(opt, gamma=0.7),
    "SequentialLR": lambda opt: lrs.SequentialLR(
        opt, [lrs.LinearLR(opt, 0.1, total_iters=4), lrs.ExponentialLR(opt, 0.6)], milestones=[4]
    ),
    "PolynomialLR": lambda opt: lrs.PolynomialLR(opt, total_iters=9, power=2.0),
    "CosineAnnealingLR": lambda opt: lrs.CosineAnnealingLR(opt, T_max=5, eta_min=1e-4),
    "ChainedScheduler": lambda opt: lrs.ChainedScheduler(
        [lrs.ConstantLR(opt, factor=0.1, total_iters=3), lrs.ExponentialLR(opt, 0.9)], optimizer=opt
    ),
    "ReduceLROnPlateau": lambda opt: lrs.ReduceLROnPlateau(opt, factor=0.5, patience=1, cooldown=1),
    "CyclicLR": lambda opt: lrs.CyclicLR(opt, base_lr=[1e-3, 2e-3], max_lr=[1e-1, 2e-1], step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda opt: lrs.CosineAnnealingWarmRestarts(opt, T_0=3, T_mult=2),
    "OneCycleLR": lambda opt: lrs.OneCycleLR(opt, max_lr=[0.1, 0.3], total_steps=STEPS + 1),
}

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
}


def scheduler_names() -> list[str]:
    """All classes of the module but the base class, which is abstract."""
    return [
        name
        for name, found in inspect.getmembers(lrs, inspect.isclass)
        if issubclass(found, lrs.LRScheduler) and name.strip("_") != "LRScheduler"
    ]


def _make(sharded: bool, kind: str, params: list, tensor_lr: bool) -> torch.optim.Optimizer:
    optimizer_class, options = OPTIMIZERS[kind]

    def rate(value: float) -> Any:
        return torch.tensor(value, dtype=torch.float64) if tensor_lr else value

    groups = [{"params": params[:2]}, {"params": params[2:], "lr": rate(0.02)}]
    if sharded:
        return shardstep.ZeroRedundancyOptimizer(groups, optimizer_class, lr=rate(0.05), **options)
    return optimizer_class(groups, lr=rate(0.05), **options)


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


def _drive(rank: int, world_size: int, sharded: bool, name: str, kind: str, tensor_lr: bool, resume: bool):
    """Train under the scheduler. Returns options and weights after every step, and the warnings."""
    params = new_params()
    trace = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = _make(sharded, kind, params, tensor_lr)
        scheduler = BUILDERS[name](optimizer)
        for step in range(STEPS):
            if resume and step == SAVED_AT:
                saved = copy.deepcopy(scheduler.state_dict()), full_state_dict(optimizer, rank, world_size)
                optimizer = _make(sharded, kind, params, tensor_lr)
                scheduler = BUILDERS[name](optimizer)
                scheduler.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            set_gradients(params, step)
            optimizer.step()
            if name == "ReduceLROnPlateau":
                scheduler.step([3.0, 2.0, 2.0, 2.0, 2.5, 1.0][step % 6])
            else:
                scheduler.step()
            trace.append((_options(optimizer), clones(params)))
    return trace, {(item.category.__name__, str(item.message)) for item in caught}


# Optimizer, tensor learning rate, saved and resumed in the middle.
CASES = (("SGD", False, False), ("AdamW", False, True), ("AdamW", True, True))


def _shares_its_rates(name: str) -> bool:
    """Whether ``initial_lr`` and ``lr`` are one tensor: SequentialLR of torch 2.6, where each step changes both.

    A state dict that was copied rank by rank makes two of it, so that the plain optimizer is no oracle there.
    """
    optimizer = _make(False, "AdamW", new_params(), True)
    BUILDERS[name](optimizer)
    return any(group["lr"] is group.get("initial_lr") for group in optimizer.param_groups)


def _drives_alike(rank: int, world_size: int, name: str) -> None:
    rates = set()
    for kind, tensor_lr, resume in CASES[: 2 if _shares_its_rates(name) else 3]:
        case = f"{name} over {kind}, tensor lr {tensor_lr}, resumed {resume}"
        expected, plain_warnings = _drive(rank, world_size, False, name, kind, tensor_lr, resume)
        found, our_warnings = _drive(rank, world_size, True, name, kind, tensor_lr, resume)
        for step, ((options, weights), (plain_options, plain_weights)) in enumerate(zip(found, expected, strict=True)):
            for ours, plain in zip(options, plain_options, strict=True):
                assert _same(ours, plain), f"{case}, step {step}: {ours} instead of {plain}"
            assert_equal(weights, plain_weights, f"{case}, step {step}: weights")
            rates.add(float(options[0]["lr"]))
        assert our_warnings <= plain_warnings, f"{case}: {our_warnings - plain_warnings}"
    assert len(rates) > 1, f"{name} changed nothing, so this shows nothing"


@pytest.mark.parametrize("name", scheduler_names())
def test_the_scheduler_drives_the_sharded_optimizer_as_it_drives_the_plain_one(name):
    assert name in BUILDERS, f"torch has a new scheduler, {name}: say how to build it"
    run_ranks(_drives_alike, 3, name)


def test_the_schedulers_that_the_issue_names_are_among_those_found():
    named = {"OneCycleLR", "CyclicLR", "ReduceLROnPlateau", "LambdaLR", "MultiplicativeLR", "SequentialLR"}
    assert named | {"ChainedScheduler"} <= set(scheduler_names())


def _order_warnings(rank: int, world_size: int) -> None:
    for scheduler_first in (True, False):
        texts = []
        for sharded in (False, True):
            params = new_params()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer = _make(sharded, "AdamW", params, tensor_lr=False)
                scheduler = lrs.StepLR(optimizer, 1)
                for step in range(2):
                    if scheduler_first:
                        scheduler.step()
                    set_gradients(params, step)
                    optimizer.step()
                    if not scheduler_first:
                        scheduler.step()
            texts.append([str(item.message) for item in caught if "optimizer.step()" in str(item.message)])
        plain, ours = texts
        assert len(plain) == scheduler_first, "the plain optimizer is warned about exactly in the wrong order"
        assert ours == plain


def test_a_wrong_order_of_steps_is_warned_about_exactly_when_the_plain_optimizer_is():
    run_ranks(_order_warnings, 2)


def _swa(rank: int, world_size: int) -> None:
    from torch.optim.swa_utils import SWALR

    results = []
    for sharded in (False, True):
        params = new_params()
        optimizer = _make(sharded, "SGD", params, tensor_lr=False)
        scheduler = SWALR(optimizer, swa_lr=[0.5, 0.25], anneal_epochs=4)
        for step in range(6):
            set_gradients(params, step)
            optimizer.step()
            scheduler.step()
        results.append((params, _options(optimizer)))
    assert_equal(results[1][0], results[0][0])
    assert results[1][1] == results[0][1]


def test_swalr_drives_it_too():
    run_ranks(_swa, 3)
