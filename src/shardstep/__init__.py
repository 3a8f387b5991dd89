"""Shards the optimizer of data-parallel PyTorch training: every rank keeps 1/N of the optimizer state."""

from shardstep.optimizer import ZeroRedundancyOptimizer
from shardstep.report import MemoryReport

__all__ = ["MemoryReport", "ZeroRedundancyOptimizer"]
__version__ = "0.1.0"
