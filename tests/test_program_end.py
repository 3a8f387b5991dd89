"""A program ends well although its last collective was a moment ago (comm/program_end.py says what goes wrong).

Two things see to it: the optimizer waits a moment at exit, and our programs wait for all ranks before they leave.
"""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.launch import ABORTED_AT_THE_END, ENVIRONMENT, ROOT, launcher

# With so long a switch interval a thread of gloo gets the GIL only when the main thread gives it up by itself. Without
# the optimizer about 0.9 of the runs abort.
PROGRAM = """
import sys, torch, torch.distributed as dist
from shardstep import ZeroRedundancyOptimizer

dist.init_process_group("gloo")
ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=0.1)
sys.setswitchinterval(30)
for _ in range(20):
    mine = torch.ones(3)
    rows = [torch.empty(3) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    del mine, rows
"""


@pytest.mark.long
def test_a_program_with_a_sharded_optimizer_does_not_abort_at_its_end(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [*launcher(2), "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert ABORTED_AT_THE_END not in done.stderr
    assert done.returncode == 0, done.stderr


def test_every_program_that_we_show_waits_for_all_ranks_before_it_leaves():
    """The examples, and the snippets of README and the docs: the last call before they leave is a barrier."""
    shown = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for position, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
            shown[f"{page.name} {position}"] = code
    leaving = {name: code for name, code in shown.items() if "dist.destroy_process_group()" in code}
    assert leaving.keys() >= {"README.md 0", "zero2.py", "memory.py", "train_gpt.py"}
    for name, code in leaving.items():
        calls = re.findall(r"\bdist\.(\w+)\(", code.partition("dist.destroy_process_group()")[0])
        assert calls[-1] == "barrier", name
