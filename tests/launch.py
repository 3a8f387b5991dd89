"""Programs as users start them: with torchrun, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

# With gloo, torch can abort at the very end of a program, when all is done (comm/program_end.py). It may still do
# so where a thread gets no core for a tenth of a second. Such a run says nothing, so it is made again.
ABORTED_AT_THE_END = "terminate called without an active exception"


def launcher(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def run_again_if_aborted(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of a program, with what it printed as text."""
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, **options)
        if done.returncode == 0 or ABORTED_AT_THE_END not in done.stderr:
            break
    return done


def torchrun(ranks: int, *command: str, cwd: Path) -> str:
    """Run a program to its end, which has to be a good one; what it printed."""
    done = run_again_if_aborted([*launcher(ranks), *command], cwd=cwd, env=ENVIRONMENT, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
