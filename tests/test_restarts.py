"""Jobs that lose a process restart by themselves and end where an undisturbed run ends. Real torchrun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import restart_worker
from tests.harness import run_ranks
from tests.oracle import assert_same

pytestmark = pytest.mark.long

LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1", "--max-restarts", "3"]


def start(directory: Path, mode: str, *options: str, **environment: str) -> subprocess.Popen:
    # Without the last one torchrun keeps one store for all restarts, in which gloo finds the addresses of processes
    # that are gone (pytorch issues 135712 and 167288).
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(
        [*LAUNCHER, *options, restart_worker.__file__, str(directory), mode],
        env={**os.environ, **own, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def printed_by(jobs: list[subprocess.Popen], timeout: float) -> list[str]:
    try:
        return [job.communicate(timeout=timeout)[0] for job in jobs]
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()


def outcome_of(directory: Path, rank: int) -> tuple[dict[str, int], dict[str, Any]]:
    facts = json.loads((directory / f"rank{rank}.json").read_text())
    return facts, torch.load(directory / f"rank{rank}.weights", weights_only=True)


def test_a_killed_rank_is_restarted_and_the_job_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Two ranks, before and after: the same gradients summed in the same order, so every bit is the same."""
    job = start(tmp_path, "gradients", "--standalone", "--nproc-per-node", "2", VICTIM="rank 0")
    (printed,) = printed_by([job], timeout=120)
    assert job.returncode == 0, printed
    assert (tmp_path / "killed").exists(), "nobody was killed"
    expected = run_ranks(restart_worker.run, 2, str(tmp_path / "undisturbed"), "gradients")[0]
    for rank in range(2):
        facts, weights = outcome_of(tmp_path, rank)
        assert facts == {"began": restart_worker.FATAL_STEP, "world": 2, "restarts": 1}
        assert_same(weights, expected["weights"], f"rank {rank}:")


def test_a_job_that_loses_a_host_goes_on_with_two_of_three_ranks(tmp_path: Path) -> None:
    """Hosts of a rank each, which share this machine; the last one is lost, agent and worker.

    The mean of 12 samples is summed as 3 x 4 and as 2 x 6: other roundings, float64. A step of AdamW moves a weight by
    about lr = 1e-2 whatever the gradient's size, so a relative error of 1e-15 in a gradient (eps = 2e-16, 12 summands)
    moves it by some 1e-17, and a little more where a gradient is close to its own rounding errors; 12 steps of a smooth
    model do not multiply that by a thousand. A lost, doubled or mixed step moves weights by 1e-3 and more.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    agents = []
    for number in range(3):
        conf = f"is_host={int(number == 0)},join_timeout=60,last_call_timeout=3,keep_alive_interval=1,"
        options = [
            *("--nnodes", "2:3", "--nproc-per-node", "1", "--rdzv-conf", conf + "keep_alive_max_attempt=2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"),
            *("--local-addr", "127.0.0.1"),
        ]
        lost = {"VICTIM": "this host", "KILL_AGENT": "1"} if number == 2 else {"VICTIM": "another host"}
        agents.append(start(tmp_path, "ddp", *options, **lost))
    printed = printed_by(agents, timeout=100)
    assert agents[2].returncode == -signal.SIGKILL, printed[2]
    assert [agent.returncode for agent in agents[:2]] == [0, 0], printed
    expected = run_ranks(restart_worker.run, 3, str(tmp_path / "undisturbed"), "ddp")[0]
    results = [outcome_of(tmp_path, rank) for rank in range(2)]
    assert not (tmp_path / "rank2.json").exists()
    for facts, weights in results:
        assert (facts["world"], facts["began"]) == (2, restart_worker.FATAL_STEP)
        torch.testing.assert_close(weights, expected["weights"], rtol=1e-11, atol=1e-11)
    assert_same(results[1][1], results[0][1], "the ranks differ")
