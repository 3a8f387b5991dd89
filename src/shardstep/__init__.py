"""Shards the optimizer of data-parallel PyTorch training: every rank keeps 1/N of the optimizer state."""

from typing import Any

from shardstep.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from shardstep.grads.sharded_gradient import ShardedGradient
from shardstep.optimizer import ZeroRedundancyOptimizer
from shardstep.state.memory import MemoryReport
from shardstep.state.shard import StateShard

__all__ = [
    "MemoryReport",
    "ShardedGradient",
    "StateShard",
    "ZeroRedundancyOptimizer",
    "checkpoint",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """``shardstep.checkpoint`` is imported when it is first used: it brings torch.distributed.checkpoint with it."""
    if name == "checkpoint":
        import shardstep.checkpoint

        return shardstep.checkpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
