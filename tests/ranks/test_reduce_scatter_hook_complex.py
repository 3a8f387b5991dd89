"""Complex parameters under DDP's hooks: DDP hands their gradients over as pairs of real numbers.

Oracle: DDP with the plain optimizer, complex128, with the tolerance of ``tests/sharded_ddp_twins.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from tests.harness import run_ranks
from tests.hook_twins import BOTH, HOOKS, WIDTH, HookTwins, all_params
from tests.sharded_ddp_twins import ShardedTwins
from tests.versions import needs_complex_ddp


class Spectral(nn.Module):
    """Complex parameters in one bucket of DDP: dense in two orders, with gaps, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)

        def made(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.complex128) / 4

        self.first = nn.Parameter(made(WIDTH, 5))
        self.second = nn.Parameter(made(7, 5).t())
        self.real = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.third = nn.Parameter(made(7, 6)[:, ::2])
        self.phase = nn.Parameter(made())

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.real(batch).to(torch.complex128) @ self.first
        return torch.view_as_real(hidden @ self.second @ self.third * (1 + self.phase))


def some_of_it(module: nn.Module) -> list[nn.Parameter]:
    """The rest has no optimizer: DDP all-reduces it."""
    return [module.second, module.real.weight, module.phase]


def sharded_by_us(rank: int, world: int, hook: str) -> None:
    for as_view in BOTH:
        for groups in (all_params, some_of_it):
            ddp: dict[str, Any] = {"gradient_as_bucket_view": as_view, "bucket_cap_mb": 25}
            twins = ShardedTwins.make(AdamW, make=Spectral, groups=groups, ddp=ddp, hook=hook, lr=0.05)
            for _ in range(3):
                twins.each(lambda side: side.ddp.zero_grad())
                twins.zero_grad()
                twins.backward(0, sync=False)
                twins.backward(1)
                twins.check_gradients()
                if not hook and groups is all_params:
                    twins.clip(0.3)
                twins.step()
                twins.check_weights()


@needs_complex_ddp
@pytest.mark.parametrize("hook", ["", "interleaved"])
@pytest.mark.parametrize("world", [2, 3])
def test_complex_gradients_are_ddps_and_so_are_those_of_no_optimizer(world, hook):
    run_ranks(sharded_by_us, world, hook)


def reduced_by_ddp(rank: int, world: int) -> None:
    for hook in HOOKS:
        for as_view in BOTH:
            ddp = {"gradient_as_bucket_view": as_view, "bucket_cap_mb": 25}
            HookTwins(SGD, make=Spectral, groups=all_params, hook=hook, ddp=ddp, lr=0.1, momentum=0.9).iterate(3)


@needs_complex_ddp
@pytest.mark.parametrize("world", [2, 3])
def test_a_stepping_hook_around_all_reduce_steps_complex_parameters_as_ddp_does(world):
    run_ranks(reduced_by_ddp, world)
