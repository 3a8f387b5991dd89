"""What the README shows is what runs: its example as pasted, and the main job."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def torchrun(ranks: int, *command: str, cwd: Path) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launcher, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_of_the_readme_runs_as_pasted(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    first, saving = blocks[0], blocks[1]
    assert len(first.strip().splitlines()) <= 15
    # The second block goes on where the first one stands before it leaves the group.
    body, leave = first.split("dist.destroy_process_group()")
    (tmp_path / "example.py").write_text(first)
    (tmp_path / "resume.py").write_text(body + saving.replace("# later", "dist.barrier()\n# later") + leave)
    for name in ("example.py", "resume.py"):
        printed = torchrun(2, name, cwd=tmp_path)
        for rank in range(2):
            # Half of AdamW's two float32 moments of 512 x 513 parameters, and a step counter per piece.
            state = int(re.search(rf"rank {rank}: MemoryReport\(.*state=(\d+)\)", printed)[1])  # type: ignore[index]
            assert state == pytest.approx(512 * 513 * 4, rel=0.01)


def test_the_main_job_learns_and_shows_its_memory() -> None:
    sizes = (
        "--steps 12 --layers 1 --width 64 --heads 4 --context 32 --batch-size 4 --eval-windows 32 --sample-length 40"
    )
    printed = torchrun(2, "examples/train_gpt.py", *sizes.split(), cwd=ROOT)
    losses = dict(re.findall(r"held-out loss (before|after) training:\s+([\d.]+)", printed))
    assert float(losses["after"]) < float(losses["before"])
    assert "optimizer" in printed
    assert "sample" in printed
