"""The training that every framework's program here does, and what is written down about it.

A step takes the rows of two micro-batches, of which each rank has an equal part: so the mean gradient, and the weights,
do not depend on the number of ranks. Everything is float64.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from shardstep import ZeroRedundancyOptimizer

PLAIN, ZERO1, HOOK, ZERO2 = "plain", "zero1", "shard_ddp_gradients", "shard_gradients"
MIDDLE, END = 4, 8  # steps: saved, and trained in all
ACCUMULATE, ROWS = 2, 6  # micro-batches per step, and their rows over all ranks
CLIP = 0.05  # well below every norm
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


class Model(nn.Module):
    """A small net with a buffer that differs between ranks unless somebody gives all of them rank 0's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(7, 31), nn.Tanh(), nn.Linear(31, 3)).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.seen_before = torch.zeros(())  # the last forward

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen_before = self.seen.clone()
        self.seen += inputs.sum()
        return self.net(inputs).square().mean()


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def rows_of(micro: int) -> Tensor:
    """The rows of a micro-batch, of all ranks."""
    generator = torch.Generator().manual_seed(100 + micro)
    return torch.randn(ROWS, 7, dtype=torch.float64, generator=generator)


def my_rows(micro: int) -> Tensor:
    share = ROWS // dist.get_world_size()
    return rows_of(micro)[dist.get_rank() * share :][:share]


def new_optimizer(mode: str, params: Any) -> Any:
    if mode == PLAIN:
        return AdamW(params, **OPTIONS)
    return ZeroRedundancyOptimizer(params, AdamW, shard_gradients=mode == ZERO2, **OPTIONS)


def new_scheduler(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def report(path: Path, model: Model, optimizer: Any, gradient: str | None = None) -> None:
    """Write down how it ended. Collective; an error on a rank whose parameters are not those of the others.

    ``gradient``: of which class gradients were, if they are gone by now.
    """
    mine: dict[str, Any] = {"lr": optimizer.param_groups[0]["lr"], "seen_before": model.seen_before}
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.check_replicas()
        mine["state_bytes"] = optimizer.memory().state
        mine["gradient"] = gradient or type(model.net[0].weight.grad).__name__
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"weights": dict(model.net.state_dict()), "ranks": ranks}, path)
