"""What ``optimizer.memory()`` returns, as programs use it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.nn import Parameter

from shardstep import MemoryReport, ZeroRedundancyOptimizer


def test_a_report_unpacks_into_what_it_had_before_there_were_masters():
    report = MemoryReport(1, 2, 3, masters=4, scratch=5, buffers=6)
    parameters, gradients, state = report
    assert (parameters, gradients, state) == (1, 2, 3) == report[:]
    assert (report.parameters, report.gradients, report.state, report.masters, report.scratch) == (1, 2, 3, 4, 5)
    assert report.total == 21
    assert MemoryReport(1, 2, 3).masters == 0


def test_a_report_shows_all_of_it_and_copies_have_it():
    report = MemoryReport(1, 2, 3, masters=4, scratch=5, buffers=6)
    assert repr(report) == "MemoryReport(parameters=1, gradients=2, state=3, masters=4, scratch=5, buffers=6)"
    for twin in (copy.copy(report), copy.deepcopy(report), pickle.loads(pickle.dumps(report))):
        assert type(twin) is MemoryReport
        assert repr(twin) == repr(report)


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
