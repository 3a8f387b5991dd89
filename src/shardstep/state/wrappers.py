"""The optimizer inside what frameworks put around it.

A wrapper that is mistaken for the optimizer loses state silently. So it is opened, or refused by name.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch.optim import Optimizer

from shardstep.params.local_optimizer import inner_optimizers
from shardstep.state.state_dicts import ShardedOptimizer

# Wrappers that keep no state of their own and have the optimizer inside as ``.optimizer``. By name: none of these
# packages is imported here.
_TRANSPARENT = (
    ("accelerate.optimizer", "AcceleratedOptimizer"),
    ("lightning.pytorch.core.optimizer", "LightningOptimizer"),
    ("pytorch_lightning.core.optimizer", "LightningOptimizer"),
    ("lightning.fabric.wrappers", "_FabricOptimizer"),
    ("lightning_fabric.wrappers", "_FabricOptimizer"),
)


class Wrapper(Protocol):
    """What a framework calls the optimizer, for type checkers: Lightning's and Fabric's are no ``Optimizer``."""

    @property
    def optimizer(self) -> Optimizer: ...


def unwrapped(optimizer: Any) -> Any:
    """The optimizer itself. TypeError, which names the wrapper, if it is inside of one that is not known."""
    while any((kind.__module__, kind.__name__) in _TRANSPARENT for kind in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer
    for name, inner in inner_optimizers(optimizer):
        raise TypeError(
            f"optimizer expects the optimizer itself but got a {type(optimizer).__qualname__}, which has a "
            f"{type(inner).__qualname__} inside (.{name}). Pass that one, if the wrapper has no state of its own."
        )
    return optimizer
