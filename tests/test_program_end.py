"""A program ends well although its last collective was a moment ago (comm/program_end.py says what goes wrong)."""

from __future__ import annotations

import subprocess

import pytest

from tests.launch import ABORTED_AT_THE_END, ENVIRONMENT, launcher

# With so long a switch interval a thread of gloo gets the GIL only when the main thread gives it up by itself.
PROGRAM = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
if {sharded}:
    from shardstep import ZeroRedundancyOptimizer
    ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=0.1)
sys.setswitchinterval(30)
for _ in range(20):
    mine = torch.ones(3)
    rows = [torch.empty(3) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    del mine, rows
"""


def runs_that_aborted(sharded: bool, most: int, tmp_path) -> int:
    (tmp_path / "program.py").write_text(PROGRAM.format(sharded=sharded))
    aborted = 0
    for _ in range(most):
        command = [*launcher(2), "program.py"]
        done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
        aborted += ABORTED_AT_THE_END in done.stderr
        assert done.returncode == 0 or aborted, done.stderr
    return aborted


def test_a_program_with_a_sharded_optimizer_does_not_abort_at_its_end(tmp_path):
    assert runs_that_aborted(sharded=True, most=1, tmp_path=tmp_path) == 0


@pytest.mark.again  # the negative control: a statistic, about 0.9 per run here
def test_the_program_without_one_does(tmp_path):
    if not runs_that_aborted(sharded=False, most=6, tmp_path=tmp_path):
        pytest.skip("this version of torch ends well by itself")
