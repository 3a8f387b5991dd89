"""A program ends well although its last collective was a moment ago (comm/program_end.py says what goes wrong).

Two things see to it: the optimizer waits a moment at exit, and our programs wait for all ranks before they leave.
"""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.launch import ABORTED_AT_THE_END, ENVIRONMENT, ROOT, launcher

pytestmark = pytest.mark.programs

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


def programs() -> dict[str, str]:
    """Every program that users may copy: the examples, and the snippets of README and the docs."""
    found = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for position, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
            found[f"{page.name} {position}"] = code
    return found


def leaves_early(program: str) -> bool:
    """Whether it leaves the process group, and the last call of torch.distributed before that is no barrier."""
    before, leave, _ = program.partition("dist.destroy_process_group()")
    calls = re.findall(r"\bdist\.(\w+)\(", before)
    return bool(leave) and (not calls or calls[-1] != "barrier")


def test_every_program_that_we_show_waits_for_all_ranks_before_it_leaves():
    shown = programs()
    leaving = {name for name, program in shown.items() if "dist.destroy_process_group()" in program}
    assert leaving >= {"README.md 0", "zero2.py", "memory.py", "train_gpt.py"}
    assert not [name for name in leaving if leaves_early(shown[name])]
    assert leaves_early("dist.barrier()\ndist.all_reduce(x)\ndist.destroy_process_group()")  # it can be seen
