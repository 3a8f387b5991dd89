"""Process groups whose key-value store is no TCPStore: the ranks compare over the store, beside their collectives."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.optim import AdamW

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import assert_same, error_of, parameters, train, values_of


def over_a_file(rank: int, world: int, path: str) -> None:
    dist.destroy_process_group()
    address = f"file://{path}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=20))
    ours, theirs = parameters(), parameters()
    optimizer = ZeroRedundancyOptimizer(ours, AdamW, lr=0.1)
    train(optimizer, ours, range(3))
    train(AdamW(theirs, lr=0.1), theirs, range(3))
    assert_same(values_of(ours), values_of(theirs))
    group = {"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.1 + rank}
    assert "lr is" in str(error_of(lambda: optimizer.add_param_group(group), "ranks that differ"))


def test_ranks_train_and_compare_over_a_file_store(tmp_path):
    run_ranks(over_a_file, 2, str(tmp_path / "store"), fresh=True)
