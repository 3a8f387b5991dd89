"""Programs as users start them: with torchrun, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

# What torch says when it aborts at the very end of a program, after all is done (comm/program_end.py).
ABORTED_AT_THE_END = "terminate called without an active exception"


def launcher(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def torchrun(ranks: int, *command: str, cwd: Path) -> str:
    """Run a program to its end, which has to be a good one; what it printed."""
    command = (*launcher(ranks), *command)
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, timeout=150, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
