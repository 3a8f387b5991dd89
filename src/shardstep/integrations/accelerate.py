"""Accelerate: ``accelerator.save_state`` asks for ``optimizer.state_dict()``, which is to be whole by then."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardstep import ZeroRedundancyOptimizer


def consolidate_when_saving(accelerator: Any, *optimizers: Optimizer) -> RemovableHandle:
    """Have ``accelerator.save_state`` collect the state of these optimizers on rank 0, which writes it.

    Call it once, after ``accelerator.prepare``. ``save_state`` is collective then: call it on every rank. (With
    ``save_on_each_node`` only the first node's file has the state.)

    Args:
        accelerator: an ``accelerate.Accelerator``.
        *optimizers: what ``prepare`` returned, or what it was given.

    Returns:
        A handle; its ``remove`` undoes the call.

    Examples:
        ```python
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        consolidate_when_saving(accelerator, optimizer)
        ```
    """
    sharded: list[ZeroRedundancyOptimizer] = []
    for given in optimizers:
        optimizer = getattr(given, "optimizer", given)
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            raise TypeError(
                "consolidate_when_saving expects optimizers of class shardstep.ZeroRedundancyOptimizer but got a "
                f"{type(optimizer).__qualname__}. Leave others out: Accelerate saves them as they are."
            )
        sharded.append(optimizer)

    def consolidate(models: object, weights: object, directory: object) -> None:
        for optimizer in sharded:
            optimizer.consolidate_state_dict(to=0)

    return accelerator.register_save_state_pre_hook(consolidate)
