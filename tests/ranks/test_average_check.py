"""A forgotten DDP wrapper trains other weights, and all ranks agree on them. It is noticed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks

WAYS = ("forgotten", "DDP", "the same by hand", "shard_gradients", "none at all", "overflow")


def warned(rank: int, world: int, way: str, dtype: torch.dtype) -> list[list[str]]:
    """What is said in each of four steps."""
    model = torch.nn.Linear(6, 5).to(dtype)
    trained = DistributedDataParallel(model) if way == "DDP" else model
    options: dict[str, Any] = {"shard_gradients": True} if way == "shard_gradients" else {}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, **options)
    told = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step + (0 if way == "the same by hand" else 100 * rank))
        optimizer.zero_grad()
        scale = float("inf") if way == "overflow" and rank == 0 else 1.0
        if way != "none at all":
            (trained(torch.randn(3, 6, generator=generator).to(dtype)).square().mean() * scale).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        told.append([str(one.message) for one in caught if "averaged" in str(one.message)])
    return told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_only_a_forgotten_wrapper_is_told_once_by_every_rank_that_differs_from_rank_0(way, dtype):
    by_rank = run_ranks(warned, 3, way, dtype)
    assert by_rank[0] == [[], [], [], []]
    for rank, told in enumerate(by_rank[1:], start=1):
        if way != "forgotten":
            assert told == [[], [], [], []]
            continue
        assert [len(step) for step in told] == [0, 1, 0, 0]
        assert f"on rank {rank}. Wrap the model in DistributedDataParallel, or pass shard_gradients=True" in told[1][0]
