"""Whether the step is made in backward, by a stepping hook of ``ddp_hooks.py``, as a state machine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto

from torch import Tensor

from shardstep.grads.source import GradientSource
from shardstep.params.sharded_parameters import ShardedParameters


class HookState(Enum):
    NONE = auto()  # no hook was made for the optimizer: ``step`` steps
    MADE = auto()  # one was, but DDP has not called it: it may never be registered
    CALLED = auto()  # the step is made in backward


class SteppedByHook(GradientSource):
    """A source of gradients for which a stepping hook may be made. A mixin: the gradients are another class's."""

    _hook = HookState.NONE
    _sharded: ShardedParameters
    _used: tuple[Tensor, int] | None = None  # after the first step in backward: a gradient of it, and its version

    @property
    def steps_in_backward(self) -> bool:  # type: ignore[override]
        return self._hook is HookState.CALLED

    @property
    def may_step_in_backward(self) -> bool:  # type: ignore[override]
        return self._hook is HookState.MADE

    @property
    def has_hook(self) -> bool:
        """Whether a stepping hook was made."""
        return self._hook is not HookState.NONE

    def made(self) -> None:
        """A hook was made."""
        if self._hook is HookState.NONE:
            self._hook = HookState.MADE

    def called(self) -> None:
        """DDP has called the hook. Only now: one that was never registered must not stop ``step``."""
        if self._hook is HookState.NONE:
            raise AssertionError("a hook that was not made cannot be called")
        self._hook, self._used = HookState.CALLED, None

    def watch(self) -> None:
        """Backward has made a step and is over: whoever changes the gradients now is warned by ``zero_grad``."""
        gradients = [param.grad for param in self._sharded.params.values() if param.grad is not None]
        smallest = min(gradients, key=Tensor.numel, default=None)  # clipping and unscaling change all of them
        self._used = None if smallest is None else (smallest, smallest._version)

    @contextmanager
    def cleared(self, set_to_none: bool) -> Iterator[None]:
        if self._used is not None and self._used[0]._version != self._used[1]:
            warnings.warn(
                "the gradients were changed after backward (clip_grad_norm_?), but a DDP hook had made the step by "
                "then, with the gradients as they were. Drop overlap_with_ddp to change them before the step.",
                stacklevel=4,
            )
        self._used = None
        with super().cleared(set_to_none):
            yield

    def clip(self, params: Sequence[Tensor], max_norm: float, order: float, error_if_nonfinite: bool) -> Tensor:
        if self._hook is not HookState.NONE:
            raise RuntimeError(
                "clip_grad_norm_ expects gradients that were not used yet, but with a DDP hook the step is made during "
                "backward. Drop overlap_with_ddp to clip."
            )
        return super().clip(params, max_norm, order, error_if_nonfinite)  # type: ignore[safe-super]
