"""Python work in a step: calls per bucket, not per parameter. Counted, not timed."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import collectives
from shardstep.params.lazy_gather import InFlightParameter
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
    """How often Python functions, and functions written in C, are called from Python while this runs, by name."""
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_name] += 1  # (co_qualname: Python 3.11)
        elif event == "c_call":
            calls[getattr(argument, "__qualname__", repr(argument))] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def counted(
    rank: int, world: int, transport: str, views: bool, memory_format: torch.memory_format, lazy: bool = False
) -> list:
    """For few and for many parameters in one bucket: its size in MiB, and the calls of a step."""
    os.environ["SHARDSTEP_SHARED_MEMORY"] = "1" if transport == "shared memory" else "0"
    if transport == "native":  # as other backends than gloo gather
        collectives.sends_pairwise = lambda group, device: False
    found = []
    # Below 64 KiB each, so that they are packed: two buckets of about 20 MiB, and two of many parameters.
    for count, numel in ((400, 13_000), (1600, 3_200), (200, 496), (10_000, 496)):
        value = torch.randn(2, 2, numel // 8, 2)
        params = [Parameter((value + i).to(memory_format=memory_format)) for i in range(count)]
        optimizer = ZeroRedundancyOptimizer(
            params, Flat, parameters_as_bucket_view=views, bucket_cap_mb=25, lazy_gather=lazy
        )
        for param in params:
            param.grad = torch.full_like(param, 2)
        for _ in range(3):  # until every slot of the ring was used
            optimizer.step()
        if lazy:  # the step before is still under way: this one ends it, and leaves the next
            assert isinstance(params[0], InFlightParameter)
        calls = calls_of(optimizer.step)
        for i, param in enumerate(params):
            assert torch.equal(param, (value + i) - 0.2 - 0.2 - 0.2 - 0.2), (count, i)
        (bucket,) = optimizer.layout.buckets
        found.append((bucket.numel * 4 / 2**20, calls))
    return found


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["plain", "last"])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("transport", ["shared memory", "sockets", "native"])
def test_the_number_of_python_calls_of_a_step_does_not_grow_with_the_number_of_parameters(
    transport, views, memory_format
):
    for found in run_ranks(counted, 2, transport, views, memory_format):
        assert all(15 < size < 25 for size, _ in (found[0], found[1], found[3])), found
        for (_, few), (_, many) in ((found[0], found[1]), (found[2], found[3])):
            assert few.total() > 30  # it counts something
            assert many.total() <= few.total() + 10, (many - few).most_common(5)


@pytest.mark.parametrize("transport", ["sockets", "native"])
def test_a_lazy_step_and_its_end_do_not_grow_with_the_number_of_parameters_either(transport):
    for found in run_ranks(counted, 2, transport, False, torch.contiguous_format, True):
        for (_, few), (_, many) in ((found[0], found[1]), (found[2], found[3])):
            assert many.total() <= few.total() + 10, (many - few).most_common(5)
