"""What the jobs of these tests train: a small model, in every mode, and what the design says that comes out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


def ddp(model: nn.Module) -> Training:
    return Training(model, DistributedDataParallel(model), AdamW(model.parameters(), lr=1e-2))


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


class Variant(NamedTuple):
    """What must not show in the results."""

    shared_memory: bool
    cap: float  # bucket_cap_mb

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """While optimizers are built."""
        if not self.shared_memory:
            os.environ["SHARDSTEP_SHARED_MEMORY"] = "0"
        try:
            yield
        finally:
            os.environ.pop("SHARDSTEP_SHARED_MEMORY", None)


VARIANTS = [Variant(True, 25), Variant(False, 25), Variant(True, SMALL_CAP)]


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


def by_hand(dtype: torch.dtype, arrangement: Sequence[Sequence[int]]) -> list[Tensor]:
    """The weights by the definition of docs/design.md: the plain optimizer on sums in the promised order."""
    model = make_model(dtype)
    plain = Training(model, model, AdamW(model.parameters(), lr=1e-2))
    return train(plain, lambda gradient: mean_by_host(gradient, arrangement))


def mean_by_host(gradient: Tensor, arrangement: Sequence[Sequence[int]]) -> Tensor:
    """The ranks of a host in order, then hosts by their lowest rank; half precision in float32, rounded once."""
    parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, gradient.contiguous())
    wide = torch.float32 if gradient.dtype == torch.bfloat16 else gradient.dtype
    hosts = sorted(sorted(ranks) for ranks in arrangement)
    total = in_order([in_order([parts[rank].to(wide) for rank in ranks]) for ranks in hosts])
    return (total / len(parts)).to(gradient.dtype)


def in_order(summands: Sequence[Tensor]) -> Tensor:
    total = summands[0]
    for summand in summands[1:]:
        total = total + summand
    return total
