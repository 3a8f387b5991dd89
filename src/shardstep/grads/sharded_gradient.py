"""What ``param.grad`` is once gradients are sharded: a tensor of the parameter's shape of which a rank has its piece.

Programs look at ``param.grad``, set it to None, scale it, ask for its norm. They go on working, because a sharded
gradient knows its owner and answers for all ranks. What would need the whole gradient raises and names ``full_grad``.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from shardstep.grads.clipping import checked_order
from shardstep.grads.ddp_caller import is_called_by_ddp
from shardstep.grads.instead import INSTEAD, WHOLE

aten = torch.ops.aten


class Owner(Protocol):
    """Who keeps the shards behind sharded gradients."""

    reduces_in_ddp: bool  # whether DDP's own reads and writes of ``param.grad`` are a part of it

    def settle(self) -> None:
        """Collective. Bring in what is under way."""

    def check_all_present(self, what: str) -> None:
        """RuntimeError if ranks may be without inputs: nobody would tell them."""

    def changed(self) -> None:
        """A reduced gradient was changed in place, or something is to be added to it."""

    def displaced(self, index: int, by: Tensor) -> None:
        """DDP puts a view of its new bucket in the place of a sharded gradient."""

    def local(self, index: int) -> Tensor | None:
        """This rank's piece of a parameter's reduced gradient, 1D; None if it owns no piece of it."""

    def norm_of(self, index: int, order: float, dtype: torch.dtype) -> Tensor:
        """Collective. The norm of a parameter's whole gradient, 0-dim."""

    def unscale(self, like: Tensor, found_inf: Tensor, inverse_scale: Tensor) -> None:
        """Collective. Multiply all shards of ``like``'s device and dtype; tell every rank if any has an inf or nan."""


class Copied(Enum):
    """What DDP got when it copied a sharded gradient into its bucket."""

    NOT = auto()  # it did not
    NOTHING = auto()  # zeros: autograd has added nothing since the last reduction
    SOMETHING = auto()


class ShardedGradient(Tensor):
    """The gradient of one parameter, spread over the ranks. Has no memory of its own.

    With ``shard_gradients=True`` this is what ``param.grad`` is after backward. It has the parameter's shape, dtype and
    device. It can be set to None, set to zero, multiplied or divided by a number, clamped, and asked for its norm;
    GradScaler, ``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_`` need no more. ``detach()`` and ``data`` are
    itself. Everything but setting it to None is collective: do it on every rank. What would need the whole gradient
    raises and names the call that does; ``ZeroRedundancyOptimizer.full_grad`` gives the whole.
    """

    _owner: Owner
    _index: int
    _label: str
    whose: str  # which optimizer's
    incoming: Tensor | None  # what autograd wanted to add, for the owner to take
    copied: Copied  # what of that DDP has taken into its bucket

    @staticmethod
    def __new__(
        cls, param: Tensor, owner: Owner, index: int, label: str, whose: str, device: torch.device | None = None
    ) -> ShardedGradient:
        gradient = torch.Tensor._make_wrapper_subclass(
            cls,
            param.shape,
            strides=param.stride(),
            dtype=param.dtype,
            device=device or param.device,
            requires_grad=False,
        )
        gradient._owner, gradient._index, gradient._label, gradient.whose = owner, index, label, whose
        gradient.incoming, gradient.copied = None, Copied.NOT
        return gradient

    def on_device(self, device: torch.device) -> ShardedGradient:
        """The same gradient, of a parameter that was moved."""
        moved = ShardedGradient(self, self._owner, self._index, self._label, self.whose, device)
        moved.incoming = None if self.incoming is None else self.incoming.to(device)
        moved.copied = self.copied
        return moved

    def take_incoming(self) -> Tensor | None:
        """What autograd added since the last call."""
        incoming, self.incoming = self.incoming, None
        return incoming

    def take_copied(self) -> Copied:
        """Whether DDP has copied it into its bucket since the last call, and what."""
        copied, self.copied = self.copied, Copied.NOT
        return copied

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"ShardedGradient(of {self._label}, shape {tuple(self.shape)}; see optimizer.full_grad)"

    def detach(self) -> ShardedGradient:
        return self  # it has no graph. (Another object on ``param.grad`` would be no sharded gradient of it.)

    @property
    def data(self) -> ShardedGradient:  # type: ignore[override]
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, ShardedGradient):
            raise RuntimeError(_refusal("setting .data", self))
        Tensor.data.__set__(self, value)  # as model.cpu() does, with itself  # pyrefly: ignore

    def numpy(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(_refusal("numpy", self))

    def tolist(self) -> NoReturn:
        raise RuntimeError(_refusal("tolist", self))

    def __array__(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(_refusal("numpy", self))

    def __reduce_ex__(self, proto: object) -> NoReturn:
        raise RuntimeError(_refusal("pickle or copy", self))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in INSTEAD:  # told by the name that the user wrote: some functions become others further down
            raise RuntimeError(_refusal(name, _first(args)))
        with torch._C.DisableTorchFunctionSubclass():  # answers are plain tensors
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore
        handler = _HANDLERS.get(func)
        if handler is None:
            raise RuntimeError(_refusal(str(func), _first(args)))
        try:
            return handler(func, *args, **(kwargs or {}))
        except ReferenceError:
            gradient = _first(args)
            assert gradient is not None, "nothing else has an owner"
            raise RuntimeError(
                f"{func} expects an optimizer that keeps the gradient of {gradient._label}, but {gradient.whose} is "
                "gone. Set param.grad to None (model.zero_grad()) when you give up an optimizer."
            ) from None


def _refusal(what: str, gradient: ShardedGradient | None) -> str:
    label, whose = (gradient._label, gradient.whose) if gradient is not None else ("a parameter", "its optimizer")
    return (
        f"{what} expects a whole gradient, but that of {label} is sharded over the ranks by {whose}. Use "
        f"{INSTEAD.get(what, WHOLE)}"
    )


def _first(value: Any) -> ShardedGradient | None:
    if isinstance(value, ShardedGradient):
        return value
    if isinstance(value, (list, tuple)):
        return next(filter(lambda found: found is not None, map(_first, value)), None)
    return None


def _accumulate(func: Any, gradient: Any, other: Any, alpha: float = 1) -> Any:
    """Autograd adds a new gradient to the one that is there. Kept for the owner's hook, which is next to run."""
    if not isinstance(gradient, ShardedGradient) or torch._C._current_graph_task_id() < 0:
        raise RuntimeError(_refusal("adding", _first((gradient, other))))
    gradient.incoming = other if gradient.incoming is None else gradient.incoming + other
    gradient._owner.changed()
    return gradient


def _copy(func: Any, target: Any, source: Any, non_blocking: bool = False) -> Any:
    """DDP fills its bucket from ``param.grad``, and afterwards ``param.grad`` from its bucket.

    The first time it gets what came in since the last reduction. The second time nothing is to be done: its bucket
    holds this rank's gradients, and the sum is in the shards.
    """
    gradient = _first((target, source))
    assert gradient is not None
    in_backward = torch._C._current_graph_task_id() >= 0
    if in_backward and not gradient._owner.reduces_in_ddp:
        raise _reduced_twice(gradient)
    if not gradient._owner.reduces_in_ddp or not (in_backward or is_called_by_ddp(__name__)):
        raise RuntimeError(_refusal(str(func), gradient))
    if gradient is not source:
        return target
    if not in_backward:  # it rebuilds its buckets
        gradient._owner.displaced(gradient._index, target)
        return target.zero_()
    incoming = gradient.take_incoming()
    gradient.copied = Copied.NOTHING if incoming is None else Copied.SOMETHING
    return target.zero_() if incoming is None else target.copy_(incoming)


def _reduced_twice(gradient: ShardedGradient) -> ValueError:
    """In backward nobody but DDP takes a gradient off a parameter: into its bucket, to average it once more."""
    return ValueError(
        "shard_gradients=True expects a model that is not wrapped, because the optimizer reduces the gradients itself, "
        f"but DistributedDataParallel reduces that of {gradient._label} as well ({gradient.whose}). Do not wrap the "
        "model; or drop shard_gradients and call shardstep.shard_ddp_gradients(ddp, optimizer) after the wrap. With a "
        "framework that wraps by itself: docs/frameworks.md."
    )


def _multiply_out(func: Any, gradient: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """DDP fills its bucket with ``param.grad`` divided by the number of ranks."""
    if isinstance(gradient, ShardedGradient) and torch._C._current_graph_task_id() >= 0:
        raise _reduced_twice(gradient)
    raise RuntimeError(_refusal(str(func), _first((gradient, *args))))


def _move(func: Any, gradient: ShardedGradient, *, device: Any = None, dtype: Any = None, **kwargs: Any) -> Any:
    """``model.to(device)`` moves gradients, too. The shards follow when they are used."""
    if device is None or dtype not in (None, gradient.dtype):
        raise RuntimeError(_refusal(str(func), gradient))
    return gradient.on_device(torch.device(device))


def _apply(func: Any, gradient: ShardedGradient, *args: Any, **kwargs: Any) -> ShardedGradient:
    """Scale or zero: each rank its piece."""
    if any(isinstance(arg, Tensor) and arg.dim() > 0 for arg in args):
        raise RuntimeError(_refusal(str(func), gradient))
    gradient._owner.check_all_present("changing a sharded gradient in place")
    gradient._owner.settle()
    if gradient.incoming is not None:  # after DDP's no_sync: not reduced yet
        gradient.incoming = gradient.incoming.clone()  # autograd may have given it to others, too
        func(gradient.incoming, *args, **kwargs)
    local = gradient._owner.local(gradient._index)
    if local is not None:
        func(local, *args, **kwargs)
    gradient._owner.changed()
    return gradient


def _clamp(func: Any, gradient: ShardedGradient, *args: Any, **kwargs: Any) -> ShardedGradient:
    """Change each element by itself, not linearly: only what is reduced can be."""
    if gradient.incoming is not None:
        raise RuntimeError(
            f"{func} expects a reduced gradient, but to that of {gradient._label} something was added in no_sync. Call "
            "it after a backward outside of no_sync."
        )
    return _apply(func, gradient, *args, **kwargs)


def _replace_nans(func: Any, gradient: Any, *args: Any, out: Any, **kwargs: Any) -> Any:
    """``torch.nan_to_num(param.grad, out=param.grad)``, as some programs write it."""
    if out is not gradient:
        raise RuntimeError(_refusal(str(func), _first((gradient, out))))
    return _clamp(aten.nan_to_num_.default, gradient, *args, **kwargs)


def _apply_each(one: Any) -> Callable[..., None]:
    """A call over a list: one over the list of this rank's pieces."""

    def handler(func: Any, gradients: list[Tensor], *args: Any) -> None:
        if any(isinstance(arg, Tensor) and arg.dim() > 0 for arg in args):  # before anything is changed
            raise RuntimeError(_refusal(str(func), _first(gradients)))
        simple: list[ShardedGradient] = []
        for gradient in gradients:  # among them perhaps plain ones, of parameters of another optimizer
            if not isinstance(gradient, ShardedGradient):
                one(gradient, *args)
            elif gradient.incoming is not None:
                _HANDLERS[one](one, gradient, *args)
            else:
                simple.append(gradient)
        owners = {id(gradient._owner): gradient._owner for gradient in simple}
        for owner in owners.values():
            owner.check_all_present("changing a sharded gradient in place")
            owner.settle()
        pieces = [gradient._owner.local(gradient._index) for gradient in simple]
        there = [piece for piece in pieces if piece is not None]
        if there:
            func(there, *args)
        for owner in owners.values():
            owner.changed()

    return handler


def _norm(
    func: Any, gradient: ShardedGradient, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    if dim is not None or keepdim:
        raise RuntimeError(_refusal(str(func), gradient))
    order = checked_order(ord, "the order of a sharded gradient's norm")
    return gradient._owner.norm_of(gradient._index, order, dtype or gradient.dtype)


def _norms(func: Any, gradients: list[Tensor], ord: float = 2, dtype: Any = None) -> list[Tensor]:
    # (A plain one among them comes to torch's own function, a sharded one back here.)
    return [torch.linalg.vector_norm(gradient, ord, dtype=dtype) for gradient in gradients]


def _unscale(func: Any, gradients: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    plain = [gradient for gradient in gradients if not isinstance(gradient, ShardedGradient)]
    if plain:
        func(plain, found_inf, inverse_scale)
    owners = {id(one._owner): one for one in gradients if isinstance(one, ShardedGradient)}
    for gradient in owners.values():  # in the order of the list, which is the same on every rank
        gradient._owner.unscale(gradient, found_inf, inverse_scale)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.add_.Tensor: _accumulate,
    aten.copy_.default: _copy,
    aten.mul.out: _multiply_out,
    aten._to_copy.default: _move,
    aten.zero_.default: _apply,
    aten.mul_.Tensor: _apply,
    aten.div_.Tensor: _apply,
    aten.clamp_.default: _clamp,
    aten.clamp_min_.default: _clamp,
    aten.clamp_max_.default: _clamp,
    aten.nan_to_num_.default: _clamp,
    aten.nan_to_num.out: _replace_nans,
    aten._foreach_clamp_min_.Scalar: _apply_each(aten.clamp_min_.default),
    aten._foreach_clamp_max_.Scalar: _apply_each(aten.clamp_max_.default),
    aten._foreach_zero_.default: _apply_each(aten.zero_.default),
    aten._foreach_mul_.Scalar: _apply_each(aten.mul_.Tensor),
    aten._foreach_mul_.Tensor: _apply_each(aten.mul_.Tensor),
    aten._foreach_div_.Scalar: _apply_each(aten.div_.Tensor),
    aten._foreach_div_.Tensor: _apply_each(aten.div_.Tensor),
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _norms,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
