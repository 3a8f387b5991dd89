"""Ask an optimizer how it may be sharded, by stepping tiny tensors. A probe decides, not a list of names.

1. Can its state be carried from rank to rank and into files? What cannot is refused now, not at the first save.
2. Are its steps repeatable? Those that draw random numbers are not what the plain optimizer does on a part of its
   parameters: only for a user who vouches for them.
3. Are its parameters independent? Step tensors together, and each alone. LBFGS fails: no shard of it is right.
4. Is it element-wise? Step a tensor whole, and the same tensor in pieces. Bit-equal parameters and states:
   parameters may be cut anywhere.
5. May its step be split? Step tensors together, and one after the other. Schedule-free optimizers, and all
   that keep state on the group, fail: they step once.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from shardstep.comm.codec import encode
from shardstep.params.comparison import MISSING, close, equal, gap, leaves, short_text, tensors_in
from shardstep.params.local_optimizer import options_of, run_step, step_subset, undisturbed, unhooked_step
from shardstep.params.tensor_subclasses import classes_in, is_subclass, opened

# Enough for what acts late: some optimizers warm up for ten steps. What diverges by then is looked at early, too.
_STEPS = 12
_EARLY = 3
# Learning rates below this are raised: what a schedule starts with (0, or 1e-6 in bfloat16) would hide every
# difference.
_LEARNING_RATE = 0.125
# Two of them alike: some optimizers stack tensors of one shape.
_SMALL_SHAPES = ((24, 16), (8, 40), (24, 16))
# A multiple of every usual block, and with both sides multiples: what quantizes only such tensors does it here.
_LARGE_SHAPE = (128, 128)
_ALIGNMENT = 64  # of cuts, see partition.py
# One gradient is large: some optimizers clip. (Late, because it drowns what comes before in their averages.)
_LARGE_AT, _LARGE = 10, 1e4
_OTHER_NUMBERS = 1000  # a phase that no other tensor has
_CARRIED = ("state", "param_groups")  # of a state dict

Build = Callable[[Sequence[Tensor]], Optimizer]
Gradient = Callable[[int, int, Tensor], Tensor]  # of a step and the position of a parameter


class _Cut(NamedTuple):
    """A tensor, and pieces of it."""

    shape: tuple[int, int]
    pieces: tuple[tuple[int, int], ...]
    steps: int


_CUTS = (
    # Most optimizers that are not element-wise show it on a few elements, and some of them are slow on more.
    _Cut((24, 16), ((0, 64), (64, 384)), _EARLY),
    # Pieces that are multiples of 4096 like the whole, and one that begins, ends and counts at no multiple of anything.
    _Cut(_LARGE_SHAPE, ((0, 4096), (4096, 16384), (4098, 9100)), _EARLY),
    # 12480 elements, cut at 64 and 4224: multiples of the alignment that cuts have, but not of 256 or 2048, on which
    # 8-bit optimizers quantize in blocks; with pieces below and above the 4096 elements from which they do.
    _Cut((65, 192), ((0, 64), (64, 4224), (4224, 12480)), _STEPS),
)


class Verdict(NamedTuple):
    """How an optimizer may be sharded, and why not otherwise."""

    elementwise: bool
    splittable: bool
    reason: str  # what differed; empty if element-wise
    eager: bool = False  # makes state when it is built, before any step
    consumes: bool = False  # its step sets the gradients to None
    subclasses: tuple[type, ...] = ()  # of tensors made of other tensors, that its states are
    notes: tuple[str, ...] = ()  # options in which it notes which parameters there are
    moves_first: bool = False  # its step moves the parameters before it calls the closure, or may do so


class _Trace(NamedTuple):
    early: list[Tensor]  # the parameters after a few steps
    params: list[Tensor]
    states: list[dict]
    options: dict  # of the group
    own: dict  # what the optimizer keeps for itself
    consumes: bool  # whether the gradients are gone


def examine(
    optimizer_class: Callable[..., Optimizer],
    defaults: dict[str, Any],
    options: dict[str, Any],
    like: Tensor,
    vouched: bool = False,
) -> Verdict:
    """Probe ``optimizer_class`` with the options of one group, on tensors with the device and dtype of ``like``.

    ValueError if it couples its parameters or keeps what cannot be carried; and, unless the user vouched for it, if
    nothing can be seen of that: it cannot step the probe, or its steps are random.
    """
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))

    def build(tensors: Sequence[Tensor]) -> Optimizer:
        group = {"params": list(tensors), **copy.deepcopy(options)}
        return optimizer_class([group], **copy.deepcopy(defaults))

    with undisturbed(like.device):
        _seed(like.device)
        small = [_values(shape, like, phase) for phase, shape in enumerate(_SMALL_SHAPES)]
        large = _values(_LARGE_SHAPE, like, phase=5)
        try:
            fresh = build(small)
            eager, form = bool(fresh.state), fresh.state_dict()
        except Exception as error:  # the real tensors decide: they raise the same, or the probe's shape is to blame
            return Verdict(False, False, f"it cannot be built over the probe ({error})", moves_first=True)
        _refuse_other_forms(name, form)
        _refuse_communicating(name, build, small)
        try:
            together = _trace(build, small, _gradients())
            states = together.states + _trace(build, [large], _gradients(), steps=1).states
        except Exception as error:
            if vouched:
                return Verdict(False, False, f"it cannot step the probe ({error})", eager, moves_first=True)
            raise ValueError(
                f"{name} cannot be sharded: stepping a dense 2D tensor with it failed "
                f"({type(error).__name__}: {error}). Use another optimizer, or pass shard='tensor' if you know "
                "that it updates every tensor by itself."
            ) from error
        _refuse_uncarriable(name, states)
        _refuse_kept_elsewhere(name, build, form, small)
        more = eager, together.consumes, tuple(dict.fromkeys(classes_in(states)))
        difference = _first_difference(together, _trace(build, small, _gradients()))
        if difference:
            _refuse_random(name, difference, vouched)
            return Verdict(False, False, f"its steps are random ({difference})", *more, moves_first=True)
        notes = _refuse_coupled(name, build, small, together)
        reason = next(filter(None, (_why_not_elementwise(build, like, cut) for cut in _CUTS)), "")
        splittable = not _first_difference(together, _trace(build, small, _gradients(), one_by_one=True))
        moves_first = _moves_first(build, small)
    return Verdict(not reason, splittable, reason, *more, notes, moves_first)


def _seed(device: torch.device) -> None:
    """The random numbers that are drawn from now on are always the same."""
    torch.default_generator.manual_seed(0)
    if device.type != "cpu":
        state = torch.Generator(device).manual_seed(0).get_state()
        torch.get_device_module(device).set_rng_state(state, device)


# --- what is refused --------------------------------------------------------------------------------------------------


class _Communicates(Exception):
    pass


class _Listening(TorchDispatchMode):
    """Raises when somebody sends something."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise _Communicates
        return func(*args, **(kwargs or {}))


def _refuse_communicating(name: str, build: Build, values: Sequence[Tensor]) -> None:
    try:
        with _Listening():
            _trace(build, values, _gradients(), steps=1)
    except _Communicates:
        raise ValueError(
            f"{name} cannot be sharded: its step sends something to other ranks by itself, for all parameters, of "
            "which a rank has a part. Use an optimizer that only updates."
        ) from None
    except Exception:  # what else may be wrong shows when nobody listens
        return


def _refuse_uncarriable(name: str, states: Sequence[dict]) -> None:
    for key, value in (item for state in states for item in state.items()):
        try:
            encode(opened({key: value}), lift=lambda tensor: 0)
        except TypeError as error:
            raise ValueError(
                f"{name} cannot be sharded: its state {key!r} cannot be carried to other ranks or into a checkpoint: "
                f"it {error}"
            ) from error
        for tensor in tensors_in(value):
            if type(tensor) not in (Tensor, torch.nn.Parameter) and not is_subclass(tensor):
                raise ValueError(
                    f"{name} cannot be sharded: its state {key!r} cannot be carried to other ranks or into a "
                    f"checkpoint: it holds a {type(tensor).__qualname__}, which is a tensor that does not say what it "
                    "is made of (__tensor_flatten__, __tensor_unflatten__)."
                )


def _refuse_other_forms(name: str, form: dict[str, Any]) -> None:
    if not form.keys() >= set(_CARRIED):
        raise ValueError(
            f"{name} cannot be sharded: what it keeps cannot be carried to other ranks or into a checkpoint. A state "
            f"dict expects {' and '.join(_CARRIED)} but it has {', '.join(map(repr, form))}. Use the optimizers that "
            "it is made of."
        )


def _refuse_kept_elsewhere(name: str, build: Build, form: dict[str, Any], values: Sequence[Tensor]) -> None:
    """What a state dict has beside states and groups is not carried: a new optimizer must go on the same without it."""
    beside = [key for key in form if key not in _CARRIED]
    if not beside:
        return
    optimizer, params = _begin(build, values)
    _go_on(optimizer, params, _gradients(), range(_EARLY))
    saved = copy.deepcopy(optimizer.state_dict())
    ends = []
    for keys in (saved.keys(), _CARRIED):
        _seed(values[0].device)
        loaded, copies = _begin(build, [param.detach() for param in params])
        loaded.load_state_dict(copy.deepcopy({key: saved[key] for key in keys}))
        _go_on(loaded, copies, _gradients(), range(_EARLY, _STEPS))
        ends.append([param.detach() for param in copies])
    difference = _difference_of_params(*ends)
    if difference:
        raise ValueError(
            f"{name} cannot be sharded: its state dict keeps {', '.join(map(repr, beside))} beside state and "
            f"param_groups, which is not carried to other ranks or into a checkpoint, and without which it goes on "
            f"otherwise ({difference})."
        )


def _refuse_random(name: str, difference: str, vouched: bool) -> None:
    if not vouched:
        raise ValueError(
            f"{name} cannot be sharded: its steps draw random numbers (between two runs of the same steps "
            f"{difference}). A rank that steps a part of the parameters draws other numbers for them than the plain "
            "optimizer would, so the weights would not be the same. Pass shard='tensor' if you know that it updates "
            "every tensor by itself and other random numbers will do."
        )


def _refuse_coupled(name: str, build: Build, values: Sequence[Tensor], together: _Trace) -> tuple[str, ...]:
    """What is on the group may count steps, and may tell which parameters there are, but not what they did.

    Returns the options that tell which there are.
    """
    notes: dict[str, None] = {}
    elsewhere: _Trace | None = None  # the same shapes with other numbers, for a while
    for position, value in enumerate(values):
        alone = _trace(build, [value], _gradients(position))
        here = slice(position, position + 1)
        difference = _difference_of_params(together.early[here] + together.params[here], alone.early + alone.params)
        if difference:
            raise _coupled(name, difference)
        for key, ours, theirs in _unlike(alone.states[0], together.states[position]):
            if theirs is MISSING and any(equal(leaves(state).get(key, MISSING), ours) for state in together.states):
                continue  # a clock of the group, kept with its first parameter
            raise _coupled(name, f"state {_path(key)} is {short_text(ours)} alone and {short_text(theirs)} with them")
        for key, ours, theirs in _unlike(alone.options, together.options):
            if elsewhere is None:
                others = [_values(other.shape, other, _OTHER_NUMBERS + i) for i, other in enumerate(values)]
                elsewhere = _trace(build, others, _gradients(_OTHER_NUMBERS), steps=_EARLY)
            if equal(leaves(elsewhere.options).get(key, MISSING), theirs):
                notes[key[0]] = None  # it does nothing: the parameters are the same
                continue
            raise _coupled(
                name, f"option {_path(key)} of the group is {short_text(ours)} alone and {short_text(theirs)} with them"
            )
    return tuple(notes)


def _coupled(name: str, difference: str) -> ValueError:
    return ValueError(
        f"{name} cannot be sharded: the update of one parameter depends on the others (stepped alone and with others, "
        f"{difference}). Use an optimizer that updates each parameter by itself."
    )


# --- what is decided --------------------------------------------------------------------------------------------------


def _why_not_elementwise(build: Build, like: Tensor, cut: _Cut) -> str:
    """The first thing in which a piece differs from the same range of the whole, or nothing.

    A cut that is not aligned may differ by a few roundings: kernels compute the last elements of a tensor otherwise.
    """
    tensor = _values(cut.shape, like, phase=5)
    count = tensor.numel()
    whole = _trace(build, [tensor], _gradients_of_range(cut.shape, 0, count), cut.steps)
    for low, high in cut.pieces:
        values = tensor.view(-1)[low:high]
        try:
            piece = _trace(build, [values], _gradients_of_range(cut.shape, low, high), cut.steps)
        except Exception as error:
            return f"a flat piece of a tensor cannot be stepped ({error})"
        same = equal if low % _ALIGNMENT == high % _ALIGNMENT == 0 else close
        if not same(piece.params[0], whole.params[0].view(-1)[low:high]):
            return "the updated parameter differs between whole and in pieces"
        reason = _why_states_differ(piece.states[0], whole.states[0], low, high, count, same)
        if reason:
            return reason
    return ""


def _moves_first(build: Build, values: Sequence[Tensor]) -> bool:
    """Whether the parameters are others when the closure is called than when the step began."""
    optimizer, params = _begin(build, values)
    step = unhooked_step(optimizer)
    if "closure" not in inspect.signature(step).parameters:
        return False
    moved = False
    for number in range(_EARLY):
        before = [param.detach().clone() for param in params]

        def set_gradients(number: int) -> None:
            for position, param in enumerate(params):
                param.grad = _gradients()(number, position, param)

        def closure(number: int = number, before: list[Tensor] = before) -> Tensor:
            nonlocal moved
            moved = moved or not equal(before, [param.detach() for param in params])
            return _closure(params, set_gradients, number)

        set_gradients(number)
        try:
            step(closure)
        except Exception:  # it wants another kind of closure: nobody can use it with an ordinary one
            return False
    return moved


def _why_states_differ(
    piece: dict, whole: dict, low: int, high: int, count: int, same: Callable[[Any, Any], bool]
) -> str:
    if piece.keys() != whole.keys():
        return "the names of its states differ between whole and in pieces"
    for key, value in whole.items():
        if is_subclass(value):
            return f"state {key!r} is a {type(value).__name__}, which is carried whole"
        if not isinstance(value, Tensor) and any(tensor.dim() > 0 for tensor in tensors_in(value)):
            return f"state {key!r} is a {type(value).__name__} with tensors in it, which is carried whole"
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.numel() != count:
                return f"state {key!r} has another shape than the parameter"
            value = value.reshape(-1)[low:high]
            if piece[key].shape != value.shape:
                return f"state {key!r} of a piece has another shape than the piece"
        if not same(piece[key], value):
            return f"state {key!r} differs between whole and in pieces"
    return ""


# --- stepping ---------------------------------------------------------------------------------------------------------


def _trace(
    build: Build, values: Sequence[Tensor], gradient: Gradient, steps: int = _STEPS, one_by_one: bool = False
) -> _Trace:
    """Step copies of ``values`` a few times and show everything that changed. ``one_by_one``: each by itself."""
    optimizer, params = _begin(build, values)
    _go_on(optimizer, params, gradient, range(min(steps, _EARLY)), one_by_one)
    early = [param.detach().clone() for param in params]
    _go_on(optimizer, params, gradient, range(_EARLY, steps), one_by_one)
    states = [dict(optimizer.state.get(param, {})) for param in params]
    own = {key: value for key, value in vars(optimizer).items() if isinstance(value, (bool, int, float, Tensor))}
    own |= {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    options = options_of(optimizer.param_groups[0])
    consumes = all(param.grad is None for param in params)
    return _Trace(early, [param.detach() for param in params], states, options, own, consumes)


def _begin(build: Build, values: Sequence[Tensor]) -> tuple[Optimizer, list[torch.nn.Parameter]]:
    """An optimizer over copies of ``values``, ready to step."""
    params = [torch.nn.Parameter(value.clone()) for value in values]
    optimizer = build(params)
    _raise_learning_rate(optimizer)
    if callable(getattr(optimizer, "train", None)):  # schedule-free optimizers have to know
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer, params


def _go_on(
    optimizer: Optimizer,
    params: Sequence[torch.nn.Parameter],
    gradient: Gradient,
    steps: range,
    one_by_one: bool = False,
) -> None:
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
                run_step(optimizer, lambda step=step: _closure(params, set_gradients, step))


def _raise_learning_rate(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            group["lr"] = rate.clamp(min=_LEARNING_RATE)
        elif isinstance(rate, (int, float)):
            group["lr"] = max(rate, _LEARNING_RATE)


def _gradients(first: int = 0) -> Gradient:
    """Of the tensors from this one on."""
    return lambda step, position, param: _values(param.shape, param, phase=11 + 3 * step + position + first)


def _gradients_of_range(shape: Sequence[int], low: int, high: int) -> Gradient:
    """Of a range of a tensor of this shape."""

    def gradient(step: int, position: int, param: Tensor) -> Tensor:
        return _values(shape, param, phase=11 + 3 * step).view(-1)[low:high].view(param.shape)

    return gradient


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


# --- comparing --------------------------------------------------------------------------------------------------------


def _first_difference(a: _Trace, b: _Trace) -> str:
    """What differs between two traces of the same tensors, or nothing."""
    difference = _difference_of_params(a.early + a.params, b.early + b.params)
    if difference:
        return difference
    kinds = [("state", *pair) for pair in zip(a.states, b.states, strict=True)]
    kinds += [("option", a.options, b.options), ("attribute", a.own, b.own)]
    for kind, one, other in kinds:
        for key, left, right in _unlike(one, other):
            return f"{kind} {_path(key)} differs: {short_text(left)} and {short_text(right)}"
    return ""


def _difference_of_params(a: Sequence[Tensor], b: Sequence[Tensor]) -> str:
    apart = [gap(one, other) for one, other in zip(a, b, strict=True) if not equal(one, other)]
    return f"the parameter differs by up to {max(apart):.2g}" if apart else ""


def _unlike(a: dict, b: dict) -> Iterator[tuple[tuple, Any, Any]]:
    """What differs between two dicts that may hold dicts: the keys on the way there, and both values."""
    if equal(a, b):
        return
    one, other = leaves(a), leaves(b)
    for key in one | other:
        left, right = one.get(key, MISSING), other.get(key, MISSING)
        if not equal(left, right):
            yield key, left, right


def _path(key: tuple) -> str:
    first, *rest = key
    return f"{first!r}{''.join(f'[{part!r}]' for part in rest)}"
