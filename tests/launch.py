"""Programs as users start them: with torchrun, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

# With gloo, torch 2.13 sometimes aborts at the very end of a program in which DDP and DCP were used, when everything is
# done; without shardstep as well (docs/log.md). Such a run says nothing, so it is made again.
ABORTED_AT_THE_END = "terminate called without an active exception"


def launcher(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def torchrun(ranks: int, *command: str, cwd: Path) -> str:
    """Run a program to its end, which has to be a good one; what it printed."""
    for _ in range(5):
        done = subprocess.run(
            [*launcher(ranks), *command], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=150
        )
        if done.returncode == 0 or ABORTED_AT_THE_END not in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
