"""A forgotten DDP wrapper trains other weights, and all ranks agree on them. It is noticed, and nothing else is."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks


def warned(rank: int, world: int, way: str) -> list[int]:
    """How often it is said in each of four steps."""
    model = torch.nn.Linear(6, 5).bfloat16()
    trained = DistributedDataParallel(model) if way == "DDP" else model
    sharded = way == "shard_gradients"
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, shard_gradients=sharded)
    told = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step + (0 if way == "the same by hand" else 100 * rank))
        optimizer.zero_grad()
        scale = float("inf") if way == "overflow" and rank == 0 else 1.0
        if way != "none at all":
            (trained(torch.randn(3, 6, generator=generator).bfloat16()).square().mean() * scale).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        told.append(sum("averaged" in str(one.message) for one in caught))
    return told


@pytest.mark.parametrize("way", ["forgotten", "DDP", "the same by hand", "shard_gradients", "none at all", "overflow"])
def test_only_a_forgotten_wrapper_is_told_once_by_every_rank_that_differs_from_rank_0(way: str) -> None:
    told = [0, 1, 0, 0] if way == "forgotten" else [0, 0, 0, 0]
    assert run_ranks(warned, 3, way) == [[0, 0, 0, 0], told, told]
