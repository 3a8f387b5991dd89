"""Starting a program of a framework."""

from __future__ import annotations

import os
import subprocess

from tests.launch import ROOT, launcher

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}


def start(ranks: int, *command: str) -> str:
    """Run a program under torchrun to its end, which has to be a good one; what it printed."""
    done = subprocess.run(
        [*launcher(ranks), *command], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, f"{command} at {ranks}\n{done.stdout}{done.stderr}"
    return done.stdout
