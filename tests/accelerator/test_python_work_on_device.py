"""Python work of a step on the device, with buckets of the default size: calls per bucket, not per parameter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from shardstep import ZeroRedundancyOptimizer
from tests.accelerator.devices import device, on_device, run_ranks
from tests.ranks.test_python_work import Flat, calls_of

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"parameters_as_bucket_view": True},
    "lazy": {"lazy_gather": True},
    "shard_gradients": {"shard_gradients": True},
}
# Parameters, and elements of each: about 20 MiB, which is one bucket of the size that large models have; and 12 buckets
# of the size that is chosen for these.
FEW, MANY = (400, 13_056), (1600, 3_264)
CAPS = {"25 MiB": (25, 1), "chosen": (None, 12)}


@on_device
def _count(rank: int, world: int, mode: str, cap: str) -> list[tuple[int, Counter[str], Counter[str]]]:
    """For few and for many parameters: the number of buckets, the calls of clipping, and of a step."""
    found = []
    for count, numel in (FEW, MANY):
        params = [Parameter(torch.full((numel,), float(index), device=device())) for index in range(count)]
        optimizer = ZeroRedundancyOptimizer(params, Flat, bucket_cap_mb=CAPS[cap][0], **MODES[mode])

        def backward(params: list[Parameter] = params, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            torch.stack([param.sum() for param in params]).sum().backward()  # every gradient is 1, on every rank

        for _ in range(3):
            backward()
            optimizer.clip_grad_norm_(1e9)
            optimizer.step()
        backward()
        clipping = calls_of(lambda optimizer=optimizer: optimizer.clip_grad_norm_(1e9))
        stepping = calls_of(optimizer.step)
        for index, param in enumerate(params):
            expected = torch.full((), float(index))
            for _ in range(4):
                expected -= 0.1
            assert torch.equal(param.detach().cpu(), expected.expand(numel)), index
        found.append((len(optimizer.layout.buckets), clipping, stepping))
    return found


@pytest.mark.parametrize("cap", list(CAPS))
@pytest.mark.parametrize("mode", list(MODES))
def test_clipping_and_stepping_take_as_many_calls_for_many_parameters_as_for_few(mode: str, cap: str) -> None:
    for few, many in run_ranks(_count, 2, mode, cap):
        assert abs(few[0] - CAPS[cap][1]) <= 1, few[0]
        assert few[0] == many[0]
        for some, more in zip(few[1:], many[1:], strict=True):
            assert some.total() > 20  # it counts something
            # Of the 1200 parameters that there are more this rank owns 600.
            assert more.total() <= some.total() + 10 * few[0], (more - some).most_common(5)
