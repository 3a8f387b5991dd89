"""The reductions and gathers of other backends than gloo, run here on gloo: it has the same collectives, only slower.

On an accelerator nothing goes along with a bucket, so unused parameters are found only if the user asks for it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import collectives
from tests.harness import run_ranks
from tests.oracle import error_of


class Model(nn.Module):
    """One large parameter, small ones, and one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = nn.Linear(9, 33), nn.Linear(33, 4)
        self.extra = nn.Parameter(torch.ones(4))
        self.double()

    def forward(self, batch: torch.Tensor, extra: bool) -> torch.Tensor:
        out = self.second(torch.tanh(self.first(batch)))
        return out * self.extra if extra else out


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, uses_extra) -> None:
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        batch = torch.randn(3, 9, generator=generator, dtype=torch.float64)
        model(batch, uses_extra(step, rank)).square().mean().backward()
        optimizer.step()


def always(step: int, rank: int) -> bool:
    return True


def sometimes(step: int, rank: int) -> bool:
    return step % 2 == 0 and (rank == 0 or step > 2)


def as_on_an_accelerator(rank: int, world: int, shard: str) -> None:
    collectives.sends_pairwise = lambda group, device: False
    for find_unused, uses_extra in ((False, always), (True, sometimes)):
        for cap in (0.001, 25):
            ddp = DistributedDataParallel(Model(), find_unused_parameters=True)
            train(ddp, torch.optim.AdamW(ddp.parameters(), lr=0.02), rank, uses_extra)
            model = Model()
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(),
                torch.optim.AdamW,
                lr=0.02,
                shard=shard,
                bucket_cap_mb=cap,
                shard_gradients=True,
                find_unused_parameters=find_unused,
            )
            train(model, optimizer, rank, uses_extra)
            # Sums of at most 4 numbers in another order: a few last bits of float64, over 6 steps.
            for mine, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shard", ["element", "tensor"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_native_reductions_equal_ddp(world, shard):
    """Equal and unequal shards: one reduce-scatter, or one reduce per owner."""
    run_ranks(as_on_an_accelerator, world, shard)


def unused_without_asking(rank: int, world: int) -> None:
    collectives.sends_pairwise = lambda group, device: False
    model = Model()
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.AdamW, shard_gradients=True)
    error = error_of(lambda: train(model, optimizer, rank, lambda step, rank: False))
    assert "'extra'" in str(error)
    assert "find_unused_parameters=True" in str(error)


def test_an_unused_parameter_is_an_error_where_the_ranks_do_not_tell_each_other():
    """Stepping it with zeros, or on one rank only, would be silently different from DDP."""
    run_ranks(unused_without_asking, 2)
