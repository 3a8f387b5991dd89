"""Python work of a step grows with buckets, not with parameters. Calls are counted, nothing is timed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks


class Flat(torch.optim.Optimizer):
    """Gradient descent without a call per parameter, so that what is counted is ours."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                torch._foreach_add_(params, [param.grad for param in params], alpha=-group["lr"])


def calls_of(function: Callable[[], Any]) -> Counter[str]:
    """How often functions, also those written in C, are called from Python while this runs, by name."""
    calls = Counter[str]()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1
        elif event == "c_call":
            calls[getattr(argument, "__qualname__", repr(argument))] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def step_few_and_many(rank: int, world: int, options: dict[str, Any]) -> list[Counter[str]]:
    """The calls of a step over 200 and over 2,000 parameters in one bucket."""
    found = []
    for count in (200, 2_000):
        params = [Parameter(torch.full((496,), float(i))) for i in range(count)]
        optimizer = ZeroRedundancyOptimizer(params, Flat, bucket_cap_mb=25, **options)
        assert len(optimizer.layout.buckets) == 1
        for _ in range(4):  # the last one is counted: by then every buffer was used
            optimizer.zero_grad()
            torch.stack([param.sum() for param in params]).sum().backward()
            calls = calls_of(optimizer.step)
        optimizer.wait_for_parameters()
        assert all(torch.allclose(param, torch.full_like(param, i - 0.4)) for i, param in enumerate(params))
        found.append(calls)
    return found


MODES = {
    "default": {},
    "views": {"parameters_as_bucket_view": True},
    "lazy": {"lazy_gather": True},
    "sharded": {"shard_gradients": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_the_number_of_python_calls_of_a_step_does_not_grow_with_the_number_of_parameters(mode: str) -> None:
    for few, many in run_ranks(step_few_and_many, 2, MODES[mode]):
        assert few.total() > 30  # it counts something
        assert many.total() <= few.total() + 10, (many - few).most_common(5)
