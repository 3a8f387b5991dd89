"""Lightning: a strategy for ``shard_gradients=True``, with which the model is not wrapped in DDP.

Everything else works without it: ``strategy="ddp"`` collects the state when it saves, and ``shard_ddp_gradients`` may
be called in ``on_train_start``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import DDPStrategy

from shardstep import ZeroRedundancyOptimizer

if TYPE_CHECKING:
    _Base = DDPStrategy
else:
    _Base = object


class UnwrappedModel(_Base):
    """The methods of ``ShardedStrategy``, for another base: ``class Mine(UnwrappedModel, DDPStrategy)``."""

    def configure_ddp(self) -> None:
        """Leave the model as it is: the optimizer reduces gradients, and has given all ranks rank 0's parameters."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Give all ranks rank 0's buffers, as DDP does, and go on."""
        module = self.lightning_module
        assert module is not None
        optimizers = self._sharded()
        if optimizers and any(True for _ in module.buffers()):
            optimizers[0].broadcast_buffers(module)
        return super().training_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While gradients are accumulated nothing is sent."""
        with ExitStack() as stack:
            for optimizer in self._sharded():
                stack.enter_context(optimizer.no_sync())
            yield

    def _sharded(self) -> list[ZeroRedundancyOptimizer]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, ZeroRedundancyOptimizer)]


class ShardedStrategy(UnwrappedModel, DDPStrategy):
    """``Trainer(strategy=ShardedStrategy())`` for an optimizer with ``shard_gradients=True``.

    Processes, samplers and checkpoints are those of ``strategy="ddp"``, whose arguments it takes; those for DDP's
    wrapper mean nothing here. (For ``import pytorch_lightning`` put ``UnwrappedModel`` before its ``DDPStrategy``.)
    """
