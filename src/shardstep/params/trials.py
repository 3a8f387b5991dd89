"""Trials: an optimizer steps tiny tensors a few times, and everything that changed is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardstep.params.comparison import difference_of_tensors, path_text, short_text, unlike
from shardstep.params.local_optimizer import options_of, run_step, step_subset

# Enough for what acts late: some optimizers warm up for ten steps. What diverges by then is looked at early, too.
STEPS = 12
EARLY = 3
# Learning rates below this are raised: what a schedule starts with (0, or 1e-6 in bfloat16) would hide every
# difference.
_LEARNING_RATE = 0.125
# One gradient is large: some optimizers clip. (Late, because it drowns what comes before in their averages.)
_LARGE_AT, _LARGE = 10, 1e4

Build = Callable[[Sequence[Tensor]], Optimizer]
Gradient = Callable[[int, int, Tensor], Tensor]  # of a step and the position of a parameter


class Subject(NamedTuple):
    """What is tried."""

    name: str  # of the optimizer class
    build: Build
    tensors: list[Tensor]  # the values that the parameters start with


class Trial(NamedTuple):
    """What some steps of an optimizer have led to."""

    early: list[Tensor]  # the parameters after a few steps
    params: list[Tensor]
    states: list[dict]
    options: dict  # of the group
    own: dict  # what the optimizer keeps for itself
    consumes: bool  # whether the gradients are gone


def run_trial(
    build: Build, tensors: Sequence[Tensor], gradient: Gradient, steps: int = STEPS, one_by_one: bool = False
) -> Trial:
    """Step copies of ``tensors`` a few times and show everything that changed. ``one_by_one``: each by itself."""
    optimizer, params = begin(build, tensors)
    go_on(optimizer, params, gradient, range(min(steps, EARLY)), one_by_one)
    early = [param.detach().clone() for param in params]
    go_on(optimizer, params, gradient, range(EARLY, steps), one_by_one)
    states = [dict(optimizer.state.get(param, {})) for param in params]
    own = {key: value for key, value in vars(optimizer).items() if isinstance(value, (bool, int, float, Tensor))}
    own |= {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    options = options_of(optimizer.param_groups[0])
    consumes = all(param.grad is None for param in params)
    return Trial(early, [param.detach() for param in params], states, options, own, consumes)


def first_difference(a: Trial, b: Trial) -> str:
    """What differs between two trials with the same tensors, or nothing."""
    difference = difference_of_tensors(a.early + a.params, b.early + b.params)
    if difference:
        return difference
    kinds = [("state", *pair) for pair in zip(a.states, b.states, strict=True)]
    kinds += [("option", a.options, b.options), ("attribute", a.own, b.own)]
    for kind, one, other in kinds:
        for key, left, right in unlike(one, other):
            return f"{kind} {path_text(key)} differs: {short_text(left)} and {short_text(right)}"
    return ""


def begin(build: Build, tensors: Sequence[Tensor]) -> tuple[Optimizer, list[torch.nn.Parameter]]:
    """An optimizer over copies of ``tensors``, ready to step."""
    params = [torch.nn.Parameter(tensor.clone()) for tensor in tensors]
    optimizer = build(params)
    _raise_learning_rate(optimizer)
    if callable(getattr(optimizer, "train", None)):  # schedule-free optimizers have to know
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer, params


def go_on(
    optimizer: Optimizer,
    params: Sequence[torch.nn.Parameter],
    gradient: Gradient,
    steps: range,
    one_by_one: bool = False,
) -> None:
    """Step some more times."""

    def set_gradients(step: int) -> None:
        for position, param in enumerate(params):
            # some optimizers act on gradients that are orthogonal to the parameter, some on large ones
            param.grad = _quarter_turn(param.detach()) if step % 3 == 2 else gradient(step, position, param)
            if step == _LARGE_AT:
                param.grad.mul_(_LARGE)

    for step in steps:
        set_gradients(step)
        for subset in [[param] for param in params] if one_by_one else [list(params)]:
            with step_subset(optimizer, {0: {"params": subset}}):
                run_step(optimizer, lambda step=step: loss_of(params, set_gradients, step))


def _raise_learning_rate(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            group["lr"] = rate.clamp(min=_LEARNING_RATE)
        elif isinstance(rate, (int, float)):
            group["lr"] = max(rate, _LEARNING_RATE)


def loss_of(params: Sequence[Tensor], set_gradients: Callable[[int], None], step: int) -> Tensor:
    """For optimizers that need a closure: a loss whose gradients do not couple the parameters."""
    set_gradients(step)
    return torch.stack([param.detach().abs().sum() for param in params]).sum()


# --- numbers ----------------------------------------------------------------------------------------------------------


def seed(device: torch.device) -> None:
    """The random numbers that are drawn from now on are always the same."""
    torch.default_generator.manual_seed(0)
    if device.type != "cpu":
        state = torch.Generator(device).manual_seed(0).get_state()
        torch.get_device_module(device).set_rng_state(state, device)


def scattered(shape: Sequence[int], like: Tensor, phase: int) -> Tensor:
    """Numbers between -1 and 1, all over the place, without drawing random ones."""
    dtype = like.dtype if like.is_floating_point() or like.is_complex() else torch.float32
    count = torch.Size(shape).numel()
    numbers = torch.arange(count).mul_(7919).add_(phase * 104729).remainder_(2003)
    return numbers.to(torch.float64).div_(1001).sub_(1).to(dtype).view(*shape).to(like.device)


def gradients(first: int = 0) -> Gradient:
    """Of the tensors from this one on."""
    return lambda step, position, param: scattered(param.shape, param, phase=11 + 3 * step + position + first)


def gradients_of_range(shape: Sequence[int], low: int, high: int) -> Gradient:
    """Of a range of a tensor of this shape."""

    def gradient(step: int, position: int, param: Tensor) -> Tensor:
        return scattered(shape, param, phase=11 + 3 * step).view(-1)[low:high].view(param.shape)

    return gradient


def _quarter_turn(values: Tensor) -> Tensor:
    """(a, b) -> (-b, a) for each pair of neighbours: orthogonal to ``values``, and so is each even range of it."""
    pairs = values.reshape(-1, 2)
    return torch.stack([-pairs[:, 1], pairs[:, 0]], dim=1).view(values.shape)
