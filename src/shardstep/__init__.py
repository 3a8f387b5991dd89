"""Shards the optimizer of data-parallel PyTorch training."""
