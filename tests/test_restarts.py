"""A job that loses a process restarts by itself and ends where an undisturbed run ends. Real torchrun."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests import restart_worker
from tests.harness import run_ranks
from tests.launch import ENVIRONMENT, launcher
from tests.oracle import assert_same

FATAL_STEP = 7


@pytest.mark.long
def test_a_killed_rank_is_restarted_and_the_job_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Two ranks, before and after: the same gradients summed in the same order, so every bit is the same."""
    # Without the last one torchrun keeps one store for all restarts, in which gloo finds the addresses of processes
    # that are gone (pytorch issues 135712 and 167288).
    own = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*launcher(2), "--max-restarts", "2", "--monitor-interval", "0.1", restart_worker.__file__]
    command += [str(tmp_path), str(FATAL_STEP)]
    done = subprocess.run(command, env={**ENVIRONMENT, **own}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "killed").exists(), "nobody was killed"
    _, expected = run_ranks(restart_worker.run, 2, str(tmp_path / "undisturbed"))[0]
    for rank in range(2):
        facts = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert facts == {"began": FATAL_STEP, "restarts": 1}
        weights = torch.load(tmp_path / f"rank{rank}.weights", weights_only=True)
        assert_same(weights, expected, f"rank {rank}:")
