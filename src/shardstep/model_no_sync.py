"""``model.no_sync()`` for a model that is not wrapped in DDP: ``add_no_sync``.

Loops that accumulate gradients say ``with model.no_sync():``, and frameworks look for it on the model. With
``shard_gradients=True`` there is no wrapper that has it; the optimizer has. The model is changed only if it is asked
for, and only by one attribute, which copies of the model do not carry along.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from shardstep.grads.reduced_gradients import ReducedGradients
from shardstep.optimizer import ZeroRedundancyOptimizer
from shardstep.state.dicts import unwrapped


def add_no_sync(model: nn.Module, *optimizers: ZeroRedundancyOptimizer) -> None:
    """Give a model that is not wrapped in DDP DDP's ``no_sync``: that of the optimizers which reduce its gradients.

    For programs that were written for DDP, and for frameworks that look for ``model.no_sync``. Put it where the model
    was wrapped; the loop stays as it is. Not collective. A copy of the model (or one from a pickle) has a ``no_sync``
    that does nothing: no optimizer reduces its gradients.

    Args:
        model: has parameters of each optimizer, and no ``no_sync`` of its own.
        *optimizers: one or several with ``shard_gradients=True``.

    Examples:
        ```python
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, shard_gradients=True)
        shardstep.add_no_sync(model, optimizer)
        with model.no_sync():
            model(batch).sum().backward()
        ```
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"add_no_sync expects a module but got a {type(model).__qualname__}. Pass the model.")
    existing = getattr(model, "no_sync", None)
    if existing is not None and not isinstance(existing, (ModelNoSync, partial)):
        raise ValueError(
            f"add_no_sync expects a model without a no_sync of its own, but {type(model).__qualname__} has one. Use "
            "that (DDP's is right also with shard_ddp_gradients), or pass the model inside."
        )
    found = [unwrapped(optimizer) for optimizer in optimizers]
    _check(model, found)
    setattr(model, "no_sync", ModelNoSync(found))  # noqa: B010 (a type checker knows no such attribute)


def _check(model: nn.Module, optimizers: list[Any]) -> None:
    if not optimizers:
        raise TypeError("add_no_sync expects one or several optimizers but got none. Pass those of the model.")
    params = list(model.parameters())
    for optimizer in optimizers:
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            raise TypeError(
                f"add_no_sync expects optimizers of class shardstep.ZeroRedundancyOptimizer but got a "
                f"{type(optimizer).__qualname__}. Pass the optimizer of the model's parameters."
            )
        if type(optimizer.engine.source) is not ReducedGradients:
            raise ValueError(
                "add_no_sync expects an optimizer that reduces the gradients itself, but this one leaves that to DDP. "
                "Use shard_gradients=True, or no_sync of DDP."
            )
        if not any(param in optimizer.engine.sharded.index_of for param in params):
            raise ValueError(
                "add_no_sync expects an optimizer of the model's parameters, but it has none of them. Pass the model "
                "whose parameters it was built with."
            )


class ModelNoSync:
    """What ``model.no_sync`` is. Keeps neither the model nor the optimizers alive."""

    def __init__(self, optimizers: list[ZeroRedundancyOptimizer]) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        living = [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]
        if len(living) < len(self._optimizers):
            raise RuntimeError(
                "model.no_sync expects the optimizer that it was made with, but that one is gone. Call "
                "shardstep.add_no_sync(model, optimizer) again after building another one."
            )
        with ExitStack() as stack:
            for optimizer in living:
                stack.enter_context(optimizer.no_sync())
            yield

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (nullcontext,)  # of a copy; and nothing of ours in a file
