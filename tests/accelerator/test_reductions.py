"""Sharded gradients on the simulated device: the weights of the CPU, no races, no host that waits, and few calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shardstep import ZeroRedundancyOptimizer
from tests.accelerator import simulated
from tests.accelerator.simulated import on_device
from tests.harness import run_ranks

WORLDS = [1, 2, 3]
STEPS = 12
# The backend adds up in its own order, and averages at once: some roundings of float64 over the steps of a test.
CLOSE = {"rtol": 0, "atol": 1e-11}


class Net(nn.Module):
    """Parameters of several sizes, and one that is not always used."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes = [7, 24, 16, 40, 9, 3]
        self.layers = nn.ModuleList(nn.Linear(one, other) for one, other in zip(sizes, sizes[1:], strict=False))
        self.extra = nn.Parameter(torch.ones(3))
        self.to(dtype)

    def forward(self, batch: Tensor, extra: bool = True) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch * self.extra if extra else batch


def batch_of(step: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, step: int, rank: int, extra: bool = True) -> Tensor:
    param = next(model.parameters())
    return model(batch_of(step, rank, param.dtype).to(param.device), extra).square().mean()


# --- loops: one iteration each, the same for us and for the oracle -----------------------------------------------------

Losses = Callable[[int, bool], Tensor]  # of a step: the mean over the ranks for the oracle, this rank's own for us


class Side(NamedTuple):
    """One of the two that train: the oracle, or a rank."""

    model: nn.Module
    optimizer: Any
    losses: Losses
    clip: Callable[[float], Any]
    no_sync: Callable[[], Any] | None  # None: the oracle


def simple(side: Side, step: int) -> None:
    side.optimizer.zero_grad()
    side.losses(step, True).backward()
    side.optimizer.step()


def zero_twice(side: Side, step: int) -> None:
    simple(side, step)
    side.optimizer.zero_grad()


def accumulating(side: Side, step: int) -> None:
    side.optimizer.zero_grad()
    for part in range(3):
        side.losses(3 * step + part, True).backward()
    side.optimizer.step()


def without_sync(side: Side, step: int) -> None:
    side.optimizer.zero_grad()
    if side.no_sync is None:
        side.losses(2 * step, True).backward()
    else:
        with side.no_sync():
            side.losses(2 * step, True).backward()
    side.losses(2 * step + 1, True).backward()
    side.optimizer.step()


def clipping(side: Side, step: int) -> None:
    side.optimizer.zero_grad()
    side.losses(step, True).backward()
    side.clip(0.01)
    side.optimizer.step()


def torch_clipping(side: Side, step: int) -> None:
    side.optimizer.zero_grad()
    side.losses(step, True).backward()
    nn.utils.clip_grad_norm_(side.model.parameters(), 0.01)
    side.optimizer.step()


def keeping_memory(side: Side, step: int) -> None:
    side.optimizer.zero_grad(set_to_none=False)
    side.losses(step, True).backward()
    side.optimizer.step()


LOOPS = {
    one.__name__: one
    for one in (simple, zero_twice, accumulating, without_sync, clipping, torch_clipping, keeping_memory)
}


def oracle(loop: str, world: int) -> list[Tensor]:
    """One process, the CPU, the plain optimizer, the mean over all ranks' losses."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    side = Side(
        model,
        optimizer,
        lambda step, extra: torch.stack([loss_of(model, step, rank, extra) for rank in range(world)]).mean(),
        lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit),
        None,
    )
    for step in range(STEPS):
        LOOPS[loop](side, step)
    return [param.detach() for param in model.parameters()]


def sharded(rank: int, **settings: Any) -> Side:
    model = Net().to("sim")
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-2, shard_gradients=True, **{"bucket_cap_mb": 4e-3, **settings}
    )
    losses = lambda step, extra: loss_of(model, step, rank, extra)  # noqa: E731
    return Side(model, optimizer, losses, optimizer.clip_grad_norm_, optimizer.no_sync)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().cpu() for param in model.parameters()]


def buckets_of(side: Side) -> int:
    return len(side.optimizer.engine.sharded.layout.buckets)


@on_device
def _train(rank: int, world: int, loops: Sequence[str], shard: str) -> dict[str, Any]:
    found = {}
    for number, loop in enumerate(loops):
        simulated.seed(number)
        side = sharded(rank, shard=shard)
        for step in range(2):
            LOOPS[loop](side, step)
        with simulated.host_reads() as reads:
            for step in range(2, STEPS):
                LOOPS[loop](side, step)
        with simulated.collectives() as calls:
            pass
        ours = [read for read in reads if "batch" not in read.line and "loss_of" not in read.line]
        found[loop] = weights_of(side.model), [str(read) for read in ours if read.origin == "shardstep"], dict(calls)
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("shard", ["element", "tensor"])
def test_every_loop_has_the_weights_of_the_cpu_and_never_makes_the_host_wait(world: int, shard: str) -> None:
    results = run_ranks(_train, world, list(LOOPS), shard, fresh=True)
    for loop in LOOPS:
        expected = oracle(loop, world)
        for found in results:
            weights, reads, _ = found[loop]
            torch.testing.assert_close(weights, expected, **CLOSE)
            assert reads == [], loop
