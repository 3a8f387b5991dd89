"""Ask an optimizer how it may be sharded, by stepping tiny tensors. A probe decides, not a list of names.

1. Are its parameters independent? Step two tensors together, and one alone. LBFGS fails: no shard of it is right.
2. Is it element-wise? Step a tensor whole, and the same tensor in pieces. Bit-equal parameters and states:
   parameters may be cut anywhere.
3. May its step be split? Step two tensors together, and one after the other. Schedule-free optimizers, and all
   that keep state on the group, fail: they step once.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardstep.local import run_step, step_subset

_STEPS = 3
# 12480 elements, cut at 64 and 4224: multiples of the alignment that cuts have (see partition.py), but not of
# 256 or 2048, on which 8-bit optimizers quantize in blocks; with pieces below and above the 4096 elements
# from which they do.
_SHAPE = (65, 192)
_CUTS = (0, 64, 4224, 12480)
_SMALL_SHAPES = ((24, 16), (8, 40))


class Verdict(NamedTuple):
    """How an optimizer may be sharded, and why not otherwise."""

    elementwise: bool
    splittable: bool
    reason: str  # what differed; empty if element-wise


class _Trace(NamedTuple):
    params: list[Tensor]
    states: list[dict]
    options: list[dict]


def examine(
    optimizer_class: Callable[..., Optimizer],
    defaults: dict[str, Any],
    options: dict[str, Any],
    like: Tensor,
    vouched: bool = False,
) -> Verdict:
    """Probe ``optimizer_class`` with the options of one group, on tensors with the device and dtype of ``like``.

    ValueError if it couples its parameters or, unless the user vouched for it, if it cannot step the probe.
    """
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))

    def build(tensors: Sequence[Tensor]) -> Optimizer:
        group = {"params": list(tensors), **copy.deepcopy(options)}
        return optimizer_class([group], **copy.deepcopy(defaults))

    devices = [like.device] if like.device.type != "cpu" else []
    device_type = devices[0].type if devices else "cuda"
    with torch.random.fork_rng(devices, device_type=device_type), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = [_values(shape, like, phase) for phase, shape in enumerate(_SMALL_SHAPES)]
        try:
            build(small)
        except Exception as error:  # the real tensors decide: they raise the same, or the probe's shape is to blame
            return Verdict(False, False, f"it cannot be built over the probe ({error})")
        try:
            together = _trace(build, small)
        except Exception as error:
            if vouched:
                return Verdict(False, False, f"it cannot step the probe ({error})")
            raise ValueError(
                f"{name} cannot be sharded: stepping a dense 2D tensor with it failed "
                f"({type(error).__name__}: {error}). Use another optimizer, or pass shard='tensor' if you know "
                "that it updates every tensor by itself."
            ) from error
        if _first_difference(together, _trace(build, small)):
            return Verdict(False, False, "its steps are random")
        _refuse_coupled(name, together, _trace(build, small[:1]))
        reason = _why_not_elementwise(build, like)
        splittable = not _first_difference(together, _trace(build, small, one_by_one=True))
    return Verdict(not reason, splittable, reason)


def _refuse_coupled(name: str, together: _Trace, alone: _Trace) -> None:
    """Only the first tensor is compared: an optimizer that draws random numbers draws the same ones for it."""
    difference = _first_difference(
        _Trace(together.params[:1], together.states[:1], []), _Trace(alone.params, alone.states, [])
    )
    if difference:
        raise ValueError(
            f"{name} cannot be sharded: the update of one parameter depends on the others ({difference} changes "
            "when a second parameter is stepped with it). Use an optimizer that updates each parameter by itself."
        )


def _why_not_elementwise(build: Callable[[Sequence[Tensor]], Optimizer], like: Tensor) -> str:
    """The first thing in which a piece differs from the same range of the whole, or nothing.

    The smallest piece comes first: an optimizer that is not element-wise mostly shows it there, and one that
    builds a matrix over a vector is spared the long ones.
    """
    tensor = _values(_SHAPE, like, phase=5)
    whole = _trace(build, [tensor])
    for low, high in pairwise(_CUTS):
        try:
            piece = _trace(build, [tensor.view(-1)[low:high]], cut=(low, high))
        except Exception as error:
            return f"a flat piece of a tensor cannot be stepped ({error})"
        if not _equal(piece.params[0], whole.params[0].view(-1)[low:high]):
            return "the updated parameter differs between whole and in pieces"
        reason = _why_states_differ(piece.states[0], whole.states[0], low, high)
        if reason:
            return reason
    return ""


def _why_states_differ(piece: dict, whole: dict, low: int, high: int) -> str:
    if piece.keys() != whole.keys():
        return "the names of its states differ between whole and in pieces"
    for key, value in whole.items():
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.numel() != _CUTS[-1]:
                return f"state {key!r} has another shape than the parameter"
            value = value.reshape(-1)[low:high]
        if not _equal(piece[key], value):
            return f"state {key!r} differs between whole and in pieces"
    return ""


def _trace(
    build: Callable[[Sequence[Tensor]], Optimizer],
    values: Sequence[Tensor],
    cut: tuple[int, int] | None = None,
    one_by_one: bool = False,
) -> _Trace:
    """Step copies of ``values`` a few times and show everything that changed."""
    params = [torch.nn.Parameter(value.clone()) for value in values]
    optimizer = build(params)
    if callable(getattr(optimizer, "train", None)):  # schedule-free optimizers want to be told
        optimizer.train()  # type: ignore[attr-defined]

    def set_gradients(step: int) -> None:
        for position, param in enumerate(params):
            shape = param.shape if cut is None else _SHAPE
            gradient = _values(shape, param, phase=11 + 3 * step + position)
            param.grad = gradient if cut is None else gradient.view(-1)[slice(*cut)]

    for step in range(_STEPS):
        set_gradients(step)
        for subset in [[param] for param in params] if one_by_one else [params]:
            with step_subset(optimizer, [{"params": subset}]):
                run_step(optimizer, lambda step=step: _closure(params, set_gradients, step))
    own = {key: value for key, value in vars(optimizer).items() if isinstance(value, (int, float))}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return _Trace([p.detach() for p in params], [dict(optimizer.state.get(p, {})) for p in params], [*groups, own])


def _closure(params: Sequence[Tensor], set_gradients: Callable[[int], None], step: int) -> Tensor:
    """For optimizers that need one: a loss whose gradients do not couple the parameters."""
    set_gradients(step)
    return torch.stack([param.detach().abs().sum() for param in params]).sum()


def _values(shape: Sequence[int], like: Tensor, phase: int) -> Tensor:
    """Numbers between -1 and 1, all over the place, without drawing random ones."""
    dtype = like.dtype if like.is_floating_point() or like.is_complex() else torch.float32
    count = torch.Size(shape).numel()
    scattered = torch.arange(count).mul_(7919).add_(phase * 104729).remainder_(2003)
    return scattered.to(torch.float64).div_(1001).sub_(1).to(dtype).view(*shape).to(like.device)


def _first_difference(a: _Trace, b: _Trace) -> str:
    """What differs between two traces of the same tensors, or nothing."""
    if not all(map(_equal, a.params, b.params)):
        return "the parameter"
    for state_a, state_b in zip(a.states, b.states, strict=True):
        if state_a.keys() != state_b.keys():
            return "the set of states"
        for key in state_a:
            if not _equal(state_a[key], state_b[key]):
                return f"state {key!r}"
    return "" if _equal(a.options, b.options) else "an option of the group"


def _equal(a: Any, b: Any) -> bool:
    """Bit-equal, through dicts, lists and tuples."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and (not isinstance(a, (int, float, str)) or a == b or a != a)
