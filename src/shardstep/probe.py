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

from shardstep.local import options_of, run_step, step_subset

# Enough for what acts late: some optimizers warm up for ten steps. What diverges by then is looked at early, too.
_STEPS = 12
_EARLY = 3
# Learning rates below this are raised: what a schedule starts with (0, or 1e-6 in bfloat16) would hide every
# difference.
_LEARNING_RATE = 0.125
_SMALL_SHAPES = ((24, 16), (8, 40))
_PLAIN = (type(None), bool, int, float, str, list, tuple, dict)


class _Cut(NamedTuple):
    """A tensor, and where it is cut into pieces."""

    shape: tuple[int, int]
    bounds: tuple[int, ...]
    steps: int


# Most optimizers that are not element-wise show it on a few elements, and some of them are slow on more.
_FEW = _Cut((24, 16), (0, 64, 384), _EARLY)
# 12480 elements, cut at 64 and 4224: multiples of the alignment that cuts have (see partition.py), but not of 256 or
# 2048, on which 8-bit optimizers quantize in blocks; with pieces below and above the 4096 elements from which they do.
_MANY = _Cut((65, 192), (0, 64, 4224, 12480), _STEPS)


class Verdict(NamedTuple):
    """How an optimizer may be sharded, and why not otherwise."""

    elementwise: bool
    splittable: bool
    reason: str  # what differed; empty if element-wise
    eager: bool = False  # makes state when it is built, before any step


class _Trace(NamedTuple):
    early: list[Tensor]  # the parameters after a few steps
    params: list[Tensor]
    states: list[dict]
    options: dict  # of the group
    own: dict  # what the optimizer keeps for itself


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
            eager = bool(build(small).state)
        except Exception as error:  # the real tensors decide: they raise the same, or the probe's shape is to blame
            return Verdict(False, False, f"it cannot be built over the probe ({error})")
        try:
            together = _trace(build, small)
        except Exception as error:
            if vouched:
                return Verdict(False, False, f"it cannot step the probe ({error})", eager)
            raise ValueError(
                f"{name} cannot be sharded: stepping a dense 2D tensor with it failed "
                f"({type(error).__name__}: {error}). Use another optimizer, or pass shard='tensor' if you know "
                "that it updates every tensor by itself."
            ) from error
        if _first_difference(together, _trace(build, small)):
            return Verdict(False, False, "its steps are random", eager)
        for position in range(len(small)):
            _refuse_coupled(name, together, position, _trace(build, small[position:][:1], first=position))
        reason = _why_not_elementwise(build, like, _FEW) or _why_not_elementwise(build, like, _MANY)
        splittable = not _first_difference(together, _trace(build, small, one_by_one=True))
    return Verdict(not reason, splittable, reason, eager)


def _refuse_coupled(name: str, together: _Trace, position: int, alone: _Trace) -> None:
    """What is on the group may count steps, but must not depend on which parameters there are."""
    here = slice(position, position + 1)
    one = _Trace(together.early[here], together.params[here], together.states[here], together.options, alone.own)
    difference = _first_difference(one, alone)
    if difference:
        raise ValueError(
            f"{name} cannot be sharded: the update of one parameter depends on the others ({difference} changes "
            "when a second parameter is stepped with it). Use an optimizer that updates each parameter by itself."
        )


def _why_not_elementwise(build: Callable[[Sequence[Tensor]], Optimizer], like: Tensor, cut: _Cut) -> str:
    """The first thing in which a piece differs from the same range of the whole, or nothing."""
    tensor = _values(cut.shape, like, phase=5)
    whole = _trace(build, [tensor], cut=cut, bounds=(0, tensor.numel()))
    for low, high in pairwise(cut.bounds):
        try:
            piece = _trace(build, [tensor.view(-1)[low:high]], cut=cut, bounds=(low, high))
        except Exception as error:
            return f"a flat piece of a tensor cannot be stepped ({error})"
        if not _equal(piece.params[0], whole.params[0].view(-1)[low:high]):
            return "the updated parameter differs between whole and in pieces"
        reason = _why_states_differ(piece.states[0], whole.states[0], low, high, tensor.numel())
        if reason:
            return reason
    return ""


def _why_states_differ(piece: dict, whole: dict, low: int, high: int, numel: int) -> str:
    if piece.keys() != whole.keys():
        return "the names of its states differ between whole and in pieces"
    for key, value in whole.items():
        if not isinstance(value, (Tensor, *_PLAIN)):
            return f"state {key!r} is an object of which nothing is known"
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.numel() != numel:
                return f"state {key!r} has another shape than the parameter"
            value = value.reshape(-1)[low:high]
            if piece[key].shape != value.shape:
                return f"state {key!r} of a piece has another shape than the piece"
        if not _equal(piece[key], value):
            return f"state {key!r} differs between whole and in pieces"
    return ""


def _trace(
    build: Callable[[Sequence[Tensor]], Optimizer],
    values: Sequence[Tensor],
    cut: _Cut | None = None,
    bounds: tuple[int, int] = (0, 0),
    first: int = 0,
    one_by_one: bool = False,
) -> _Trace:
    """Step copies of ``values`` a few times and show everything that changed.

    Args:
        cut, bounds: the only value is this range of that tensor, and so is its gradient.
        first: the values are the tensors from this one on, and so are their gradients.
        one_by_one: step one tensor after the other.
    """
    params = [torch.nn.Parameter(value.clone()) for value in values]
    optimizer = build(params)
    _raise_learning_rate(optimizer)
    if callable(getattr(optimizer, "train", None)):  # schedule-free optimizers want to be told
        optimizer.train()  # type: ignore[attr-defined]

    def set_gradients(step: int) -> None:
        for position, param in enumerate(params, first):
            if step % 3 == 2:  # some optimizers act on gradients that are orthogonal to the parameter
                param.grad = _quarter_turn(param.detach())
                continue
            shape = param.shape if cut is None else cut.shape
            gradient = _values(shape, param, phase=11 + 3 * step + position)
            param.grad = gradient if cut is None else gradient.view(-1)[slice(*bounds)].view(param.shape)

    early: list[Tensor] = []
    for step in range(_STEPS if cut is None else cut.steps):
        if step == _EARLY:
            early = [param.detach().clone() for param in params]
        set_gradients(step)
        for subset in [[param] for param in params] if one_by_one else [params]:
            with step_subset(optimizer, {0: {"params": subset}}):
                run_step(optimizer, lambda step=step: _closure(params, set_gradients, step))
    states = [dict(optimizer.state.get(param, {})) for param in params]
    own = {key: value for key, value in vars(optimizer).items() if isinstance(value, (bool, int, float, Tensor))}
    own |= {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    options = options_of(optimizer.param_groups[0])
    return _Trace(early, [param.detach() for param in params], states, options, own)


def _raise_learning_rate(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            group["lr"] = rate.clamp(min=_LEARNING_RATE)
        elif isinstance(rate, (int, float)):
            group["lr"] = max(rate, _LEARNING_RATE)


def _quarter_turn(values: Tensor) -> Tensor:
    """(a, b) -> (-b, a) for each pair of neighbours: orthogonal to ``values``, and so is each even range of it."""
    pairs = values.reshape(-1, 2)
    return torch.stack([-pairs[:, 1], pairs[:, 0]], dim=1).view(values.shape)


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
    if not all(map(_equal, a.early + a.params, b.early + b.params)):
        return "the parameter"
    for state_a, state_b in zip(a.states, b.states, strict=True):
        if state_a.keys() != state_b.keys():
            return "the set of states"
        for key in state_a:
            if not _equal(state_a[key], state_b[key]):
                return f"state {key!r}"
    if not _equal(a.options, b.options):
        return "an option of the group"
    return "" if _equal(a.own, b.own) else "an attribute of the optimizer"


def _equal(a: Any, b: Any) -> bool:
    """Bit-equal, through dicts, lists and tuples."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and (not isinstance(a, (int, float, str)) or a == b or a != a)


def _bits(tensor: Tensor) -> Tensor:
    """As bytes, so that NaN equals NaN."""
    return tensor.detach().reshape(-1).view(torch.uint8)
