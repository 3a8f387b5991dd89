"""Whether the step is made in backward, by a stepping hook of ``ddp_hooks.py``, as a state machine."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from torch import Tensor

from shardstep.grads.source import GradientSource


class HookState(Enum):
    NONE = auto()  # no hook was made for the optimizer: ``step`` steps
    MADE = auto()  # one was, but DDP has not called it: it may never be registered
    CALLED = auto()  # the step is made in backward


class SteppedByHook(GradientSource):
    """A source of gradients for which a stepping hook may be made. A mixin: the gradients are another class's."""

    _hook = HookState.NONE

    @property
    def steps_in_backward(self) -> bool:  # type: ignore[override]
        return self._hook is HookState.CALLED

    @property
    def may_step_in_backward(self) -> bool:  # type: ignore[override]
        return self._hook is HookState.MADE

    def made(self) -> None:
        """A hook was made."""
        if self._hook is HookState.NONE:
            self._hook = HookState.MADE

    def called(self) -> None:
        """DDP has called the hook. Only now: one that was never registered must not stop ``step``."""
        if self._hook is HookState.NONE:
            raise AssertionError("a hook that was not made cannot be called")
        self._hook = HookState.CALLED

    def clip(self, params: Sequence[Tensor], max_norm: float, order: float, error_if_nonfinite: bool) -> Tensor:
        if self._hook is not HookState.NONE:
            raise RuntimeError(
                "clip_grad_norm_ expects gradients that were not used yet, but with a DDP hook the step is made during "
                "backward. Drop overlap_with_ddp to clip."
            )
        return super().clip(params, max_norm, order, error_if_nonfinite)  # type: ignore[safe-super]
