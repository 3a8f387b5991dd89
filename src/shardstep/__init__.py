"""Shards the optimizer of data-parallel PyTorch training: every rank keeps 1/N of the optimizer state."""

from shardstep.optimizer import ZeroRedundancyOptimizer
from shardstep.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from shardstep.report import MemoryReport
from shardstep.sharded_gradient import ShardedGradient

__all__ = [
    "MemoryReport",
    "ShardedGradient",
    "ZeroRedundancyOptimizer",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
]
__version__ = "0.1.0"
