"""Python work in a step: calls per bucket, not per parameter. Counted, not timed."""

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
from tests.surroundings import choose


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
    """How often functions are called from Python while this runs, by name."""
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            calls[frame.f_code.co_name if event == "call" else repr(argument)] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def count_calls(rank: int, world: int, transport: str, zero: dict[str, Any]) -> list[Counter[str]]:
    """Of a step, for few and for many parameters in one bucket."""
    choose(transport)
    found = []
    for count in (200, 10_000):
        params = [Parameter(torch.full((496,), float(i))) for i in range(count)]
        optimizer = ZeroRedundancyOptimizer(params, Flat, bucket_cap_mb=25, **zero)
        for param in params:
            param.grad = torch.ones_like(param)
        for _ in range(3):  # until every slot of the ring was used
            optimizer.step()
        found.append(calls_of(optimizer.step))
    return found


@pytest.mark.parametrize("zero", [{}, {"parameters_as_bucket_view": True}, {"lazy_gather": True}], ids=str)
@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
def test_the_calls_of_a_step_do_not_grow_with_the_number_of_parameters(transport: str, zero: dict[str, Any]) -> None:
    for few, many in run_ranks(count_calls, 2, transport, zero):
        assert few.total() > 30  # it counts something
        assert many.total() <= few.total() + 10, (many - few).most_common(5)
