"""What the jobs of these tests train: a small model, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import shardstep
from shardstep import ZeroRedundancyOptimizer

STEPS = 4
BATCH = 5  # samples of a rank
SMALL_CAP = 0.02  # MB: several buckets, and one parameter that is larger than a bucket


class Training(NamedTuple):
    """A model, what a batch is given to, and its optimizer."""

    model: nn.Module
    forward: Callable[[Tensor], Tensor]
    optimizer: Optimizer


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(9, 130), nn.Tanh(), nn.Linear(130, 90), nn.Tanh(), nn.Linear(90, 4)).to(dtype)


def plain(model: nn.Module) -> Training:
    return Training(model, model, AdamW(model.parameters(), lr=1e-2))


def ddp(model: nn.Module) -> Training:
    return plain(model)._replace(forward=DistributedDataParallel(model))


def default(model: nn.Module, rule: type[Optimizer] = AdamW, **options: Any) -> Training:
    wrapped = DistributedDataParallel(model)
    return Training(model, wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), rule, lr=1e-2, **options))


def shard_gradients(model: nn.Module, rule: type[Optimizer] = AdamW, **options: Any) -> Training:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), rule, lr=1e-2, shard_gradients=True, **options)
    return Training(model, model, optimizer)


def reduce_scatter_hook(model: nn.Module, **options: Any) -> Training:
    training = default(model, **options)
    shardstep.shard_ddp_gradients(training.forward, training.optimizer)
    return training


# Every mode of ours: to test another one on several hosts, add it here, and to SUMMED if shardstep sums its gradients.
MODES: dict[str, Callable[..., Training]] = {
    "default": default,
    "shard_gradients": shard_gradients,
    "reduce_scatter_hook": reduce_scatter_hook,
}
SUMMED = ["shard_gradients", "reduce_scatter_hook"]


def loss_of(training: Training, rank: int, step: int) -> Tensor:
    dtype = next(training.model.parameters()).dtype
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = (torch.randn(BATCH, size, generator=generator, dtype=torch.float64).to(dtype) for size in (9, 4))
    return (training.forward(x) - y).square().mean()


def train(training: Training, reduce: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """The weights after a few steps. ``reduce``: what is done to each gradient first, if nobody else reduces them."""
    for step in range(STEPS):
        training.optimizer.zero_grad()
        loss_of(training, dist.get_rank(), step).backward()
        for param in training.model.parameters() if reduce is not None else ():
            assert param.grad is not None
            param.grad = reduce(param.grad)
        training.optimizer.step()
    return [param.detach().clone() for param in training.model.parameters()]
