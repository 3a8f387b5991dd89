"""Shards the optimizer of data-parallel PyTorch training: every rank keeps 1/N of the optimizer state."""

from types import ModuleType
from typing import TYPE_CHECKING

from shardstep.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from shardstep.grads.sharded_gradient import ShardedGradient
from shardstep.model_no_sync import add_no_sync
from shardstep.optimizer import ZeroRedundancyOptimizer
from shardstep.params.lost_updates import LostUpdates
from shardstep.sharded_ddp import reduce_scatter_hook, shard_ddp_gradients
from shardstep.state.shards import StateShard
from shardstep.state.view import MemoryReport

if TYPE_CHECKING:
    from shardstep import checkpoint

__all__ = [
    "LostUpdates",
    "MemoryReport",
    "ShardedGradient",
    "StateShard",
    "ZeroRedundancyOptimizer",
    "add_no_sync",
    "checkpoint",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "reduce_scatter_hook",
    "shard_ddp_gradients",
]
__version__ = "0.2.0"


if not TYPE_CHECKING:  # a type checker that sees this believes in any name

    def __getattr__(name: str) -> ModuleType:
        """``shardstep.checkpoint`` is imported when first used: it brings torch.distributed.checkpoint with it."""
        if name == "checkpoint":
            import shardstep.checkpoint

            return shardstep.checkpoint
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
