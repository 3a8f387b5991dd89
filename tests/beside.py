"""A model that shardstep trains beside the same model in DDP with the plain optimizer: one loop for both.

float64. DDP divides before it sums and sums in an order of its own, we sum in rank order and divide once: a few last
bits of each mean differ, and a few steps leave that far below ``CLOSE``. A gradient that is lost, doubled or of one
rank only changes the first digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from shardstep import ZeroRedundancyOptimizer, shard_ddp_gradients

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
SMALL = 0.0003  # MiB: a bucket for each layer, about
WAYS = ("shard_gradients", "shard_ddp_gradients")


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(number: int, *shape: int, rank: int | None = None) -> Tensor:
    """Another one for every number and rank."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(shape or (4, 5), generator=generator, dtype=torch.float64)


class Side:
    """``called`` is ``model``, or DDP around it."""

    def __init__(self, model: nn.Module, called: nn.Module, optimizer: Any) -> None:
        self.model, self.called, self.optimizer = model, called, optimizer
        self.no_sync: Callable[[], Any] = (called if called is not model else optimizer).no_sync

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def joinables(self) -> list[Any]:
        ours = isinstance(self.optimizer, ZeroRedundancyOptimizer)
        return [self.called] * (self.called is not self.model) + [self.optimizer] * ours

    def loss(self, number: int) -> Tensor:
        return self.called(batch(number)).square().mean()

    def backward(self, number: int) -> None:
        self.loss(number).backward()


class Beside:
    """Iterates over both sides: ours, then theirs. ``way``: one of ``WAYS``, or "default"."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = mlp,
        kind: Any = SGD,
        ours: dict[str, Any] | None = None,
        way: str = "shard_gradients",
        group: Any = None,
        ddp: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        ours = {"shard_gradients": way == "shard_gradients", "bucket_cap_mb": SMALL} | (ours or {})
        options = options or {"lr": 0.1}

        def wrapped(model: nn.Module) -> DistributedDataParallel:
            return DistributedDataParallel(model, process_group=group, **(ddp or {}))

        model, other = make(), make()
        called = model if way == "shard_gradients" else wrapped(model)
        optimizer = ZeroRedundancyOptimizer(list(model.named_parameters()), kind, group, **ours, **options)
        if way == "shard_ddp_gradients":
            shard_ddp_gradients(called, optimizer)
        self.ours = Side(model, called, optimizer)
        self.theirs = Side(other, wrapped(other), kind(other.parameters(), **options))

    def __iter__(self) -> Iterator[Side]:
        return iter((self.ours, self.theirs))

    def check(self, where: Any = "", **close: float) -> None:
        """Weights, on every rank."""
        for (name, mine), theirs in zip(self.ours.model.named_parameters(), self.theirs.params, strict=True):
            assert_close(mine.detach(), theirs.detach(), f"{where}: {name}", **close)

    def check_gradients(self, where: Any = "") -> None:
        for (name, mine), theirs in zip(self.ours.model.named_parameters(), self.theirs.params, strict=True):
            found = self.ours.optimizer.full_grad(mine)
            if theirs.grad is None or found is None:
                assert found is theirs.grad, f"{where}: {name} has {found}"
            else:
                assert_close(found, theirs.grad, f"{where}: the gradient of {name}")


def assert_close(ours: Any, theirs: Any, where: str, **close: float) -> None:
    torch.testing.assert_close(ours, theirs, msg=lambda text: f"{where}: {text}", **(CLOSE | close))
