"""What ``optimizer.memory()`` returns, as programs use it."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from shardstep import ZeroRedundancyOptimizer


@pytest.mark.parametrize("mode", [None, torch.float32])
def test_a_report_counts_each_kind_of_memory_and_all_of_it(mode):
    param = Parameter(torch.ones(100, dtype=torch.bfloat16))
    opt = ZeroRedundancyOptimizer([param], torch.optim.AdamW, master_weights=mode)
    param.grad = torch.ones_like(param)
    opt.step()
    report = opt.memory()
    assert (report.parameters, report.gradients) == (200, 200)
    assert report.state == (4 + 2 * 100 * (2 if mode is None else 4))
    assert (report.masters >= 400) == (mode is not None)
    assert report.total == sum(report)
