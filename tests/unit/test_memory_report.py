"""What ``optimizer.memory()`` returns, as programs use it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.nn import Parameter

from shardstep import MemoryReport, ZeroRedundancyOptimizer


def test_a_report_unpacks_into_three_shows_all_of_it_and_can_be_copied():
    """Three is what it had before there were masters."""
    report = MemoryReport(1, 2, 3, masters=4, scratch=5, buffers=6)
    parameters, gradients, state = report
    assert (parameters, gradients, state, report.total) == (1, 2, 3, 21)
    assert MemoryReport(1, 2, 3).masters == 0
    for twin in (report, copy.copy(report), copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert repr(twin) == "MemoryReport(parameters=1, gradients=2, state=3, masters=4, scratch=5, buffers=6)"


@pytest.mark.parametrize("mode", [None, torch.float32])
def test_an_optimizer_reports_masters_beside_the_three(mode):
    param = Parameter(torch.ones(100, dtype=torch.bfloat16))
    opt = ZeroRedundancyOptimizer([param], torch.optim.AdamW, master_weights=mode)
    param.grad = torch.ones_like(param)
    opt.step()
    parameters, gradients, state = opt.memory()
    assert (parameters, gradients) == (200, 200)
    assert state == (4 + 2 * 100 * (2 if mode is None else 4))
    assert (opt.memory().masters >= 400) == (mode is not None)
