"""Fabric: a strategy for ``shard_gradients=True``, with which the model is not wrapped in DDP.

Everything else works without it: ``strategy="ddp"`` collects the state when it saves, and ``shard_ddp_gradients`` may
be called with what ``fabric.setup`` returns.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from lightning.fabric.strategies import DDPStrategy
from torch.nn import Module
from torch.optim import Optimizer

from shardstep import ZeroRedundancyOptimizer

if TYPE_CHECKING:
    _Base = DDPStrategy
else:
    _Base = object


class UnwrappedModel(_Base):
    """The methods of ``ShardedStrategy``, for another base: ``class Mine(UnwrappedModel, DDPStrategy)``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sharded: list[ZeroRedundancyOptimizer] = []
        self._backward_sync_control = self  # Fabric asks it for ``no_backward_sync``

    def setup_module(self, module: Module) -> Module:
        """Leave the model as it is: the optimizer reduces gradients, and has given all ranks rank 0's parameters."""
        if any(True for _ in module.buffers()):
            module.register_forward_pre_hook(self._give_buffers)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            self._sharded.append(optimizer)
        return super().setup_optimizer(optimizer)

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[Any]:
        """While gradients are accumulated nothing is sent: what ``fabric.no_backward_sync`` enters."""
        stack = ExitStack()
        for optimizer in self._sharded if enabled else ():
            stack.enter_context(optimizer.no_sync())
        return stack

    def _give_buffers(self, module: Module, args: object) -> None:
        """Give all ranks rank 0's buffers, as DDP does before every forward in training."""
        if module.training and self._sharded:
            self._sharded[0].broadcast_buffers(module)


class ShardedStrategy(UnwrappedModel, DDPStrategy):
    """``Fabric(strategy=ShardedStrategy())`` for an optimizer with ``shard_gradients=True``.

    Processes, samplers and checkpoints are those of ``strategy="ddp"``, whose arguments it takes; those for DDP's
    wrapper mean nothing here. (For ``import lightning_fabric`` put ``UnwrappedModel`` before its ``DDPStrategy``.)
    """
