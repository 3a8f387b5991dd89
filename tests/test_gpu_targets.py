"""What a machine without GPUs can show of ``make test-gpu`` and ``make bench-gpu``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import NAMES, SMOKE
from benchmarks.gpu_worker import hidden_share

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(torch.cuda.is_available() or Path("/dev/nvidia0").exists(), reason="there is a GPU")
@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu"])
def test_without_a_gpu_the_target_says_so_in_a_sentence_and_fails(target: str) -> None:
    ended = subprocess.run(["make", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert f"make {target} needs an NVIDIA GPU, and this machine has none." in ended.stderr
    assert not (ROOT / ".venv-gpu").exists()


@pytest.mark.long
def test_the_benchmark_for_gpus_runs_every_variant_on_the_cpu_and_writes_no_results(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--small", "--rounds", "2"]
    command += ["--output", str(tmp_path / "gpu.md")]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=env, timeout=120).stdout
    assert SMOKE in printed
    assert "does not run here" not in printed
    assert all(f"| {name} | " in printed for name in NAMES)
    assert list(tmp_path.iterdir()) == []


def test_communication_is_hidden_as_far_as_something_is_computed_meanwhile() -> None:
    assert hidden_share([(0, 4), (6, 8)], [(1, 2), (1.5, 3), (7, 20)]) == pytest.approx(3 / 6)
    assert hidden_share([(0, 2), (1, 3)], []) == 0
    assert hidden_share([], [(0, 1)]) is None
