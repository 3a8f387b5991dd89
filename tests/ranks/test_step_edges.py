"""Steps at the edges, default mode: odd bucket sizes, many groups, an optimizer that goes, a forgotten DDP."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import parameters
from tests.twins import Twins


def odd_caps(rank: int, world: int) -> None:
    for cap in (1000, 4000, 4090, 4100, 8190):  # bytes; slots in shared memory are of whole pages
        sizes = [(cap // 8 + extra,) for extra in (-3, 0, 1, 5, 40, 60, 2, 7, 9)]
        twins = Twins(lambda sizes=sizes: parameters(sizes), AdamW, sharded={"bucket_cap_mb": cap / 2**20})
        for _ in range(9):
            twins.step()
            twins.check_weights()


def test_buckets_just_above_the_cap_do_not_overrun_the_ring() -> None:
    run_ranks(odd_caps, 3)


class Chooses(SGD):
    """Gives groups of vectors a learning rate of their own, unless they have one: as pytorch_optimizer's Muon does."""

    def __init__(self, params: Any, lr: float) -> None:
        groups = [dict(group) for group in params]
        for group in groups:
            group.setdefault("lr", lr if group["matrices"] else lr / 10)
        super().__init__(groups, lr=lr)


def many_groups(rank: int, world: int) -> None:
    twins = Twins(
        lambda: parameters([(5 + i % 7,) for i in range(60)]),
        AdamW,
        groups=lambda params: [{"params": [param], "lr": 0.01 * (1 + i)} for i, param in enumerate(params)],
        sharded={"bucket_cap_mb": 300 / 2**20},
    )
    twins.step(3)
    twins.check()
    twins = Twins(
        lambda: parameters([(7, 5), (13,)]),
        Chooses,
        groups=lambda params: [{"params": [param], "matrices": param.dim() == 2} for param in params],
        lr=0.1,
    )
    twins.step(3)
    twins.check()


def test_every_group_is_stepped_with_its_own_options_also_those_that_its_class_chooses() -> None:
    run_ranks(many_groups, 3)


def free(rank: int, world: int) -> bool:
    param = Parameter(torch.ones(50))
    optimizer = ZeroRedundancyOptimizer([param], AdamW)
    param.grad = torch.ones(50)
    optimizer.step()
    held = weakref.ref(optimizer)
    gc.disable()
    del optimizer
    return held() is None


def test_an_optimizer_is_freed_without_the_garbage_collector() -> None:
    assert run_ranks(free, 2) == [True, True]


# --- a forgotten DDP trains other weights, on which all ranks agree ---------------------------------------------------


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
