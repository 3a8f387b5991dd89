"""Being called when autograd has finished a parameter's gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class GradientHooks:
    """Hooks on the gradients of parameters, for as long as their owner lives.

    Also on parameters that are frozen now: they may be unfrozen later.
    """

    def __init__(self, owner: Any, function: Callable[[Any, int, Tensor], None]) -> None:
        """``function(owner, index, param)`` is called whenever autograd has added to the gradient of a parameter."""
        self._owner = weakref.ref(owner)  # the parameters outlive the optimizer, which is free to go with all its state
        self._function = function
        self._handles: dict[int, Any] = {}
        weakref.finalize(owner, _remove, self._handles)

    def extend(self, params: Mapping[int, Tensor]) -> None:
        """Also on those of these parameters that have no hook yet."""
        for index, param in params.items():
            if index not in self._handles and (param.is_floating_point() or param.is_complex()):
                trained = param.requires_grad
                param.requires_grad_(True)
                try:
                    self._handles[index] = param.register_post_accumulate_grad_hook(self._hook_for(index))
                finally:
                    param.requires_grad_(trained)

    def _hook_for(self, index: int) -> Callable[[Tensor], None]:
        owner_ref, function = self._owner, self._function

        def on_gradient(param: Tensor) -> None:
            owner = owner_ref()
            if owner is not None:
                function(owner, index, param)

        return on_gradient


def _remove(handles: dict[int, Any]) -> None:
    for handle in handles.values():
        handle.remove()
