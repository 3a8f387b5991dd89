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

pytestmark = pytest.mark.programs

WORKER = Path(restart_worker.__file__)
LAUNCHER = [sys.executable, "-m", "torch.distributed.run"]
FATAL_STEP = 7


def environment(**more: str) -> dict[str, str]:
    # Without the last one torchrun keeps one store for all restarts, in which gloo finds the addresses of processes
    # that are gone (pytorch issues 135712 and 167288).
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {**os.environ, **own, **more}


def undisturbed(world: int, directory: Path, mode: str) -> dict[str, Any]:
    directory.mkdir()
    told = run_ranks(restart_worker.run, world, str(directory), mode)
    assert all(one["began"] == 0 for one in told)
    for one in told[1:]:
        assert_same(one["weights"], told[0]["weights"], "ranks differ")
    return told[0]["weights"]


def outcome_of(directory: Path, rank: int) -> tuple[dict[str, int], dict[str, Any]]:
    facts = json.loads((directory / f"rank{rank}.json").read_text())
    return facts, torch.load(directory / f"rank{rank}.weights", weights_only=True)


@pytest.mark.long
def test_a_killed_rank_is_restarted_and_the_job_ends_with_the_same_weights(tmp_path: Path) -> None:
    """Two ranks, before and after: the same gradients summed in the same order, so every bit is the same."""
    mode, victim = "gradients", 0
    directory = tmp_path / "run"
    directory.mkdir()
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "--monitor-interval", "0.1"]
    fatal = ["--mode", mode, "--fatal-step", str(FATAL_STEP), "--victim", str(victim)]
    done = subprocess.run(
        [*LAUNCHER, *options, str(WORKER), str(directory), *fatal],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (directory / "killed").exists(), "nobody was killed"
    expected = undisturbed(2, tmp_path / "undisturbed", mode)
    for rank in range(2):
        facts, weights = outcome_of(directory, rank)
        assert facts == {"began": FATAL_STEP, "world": 2, "restarts": 1}
        assert_same(weights, expected, f"{mode}, rank {rank}:")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start_agent(number: int, port: int, directory: Path, mode: str) -> subprocess.Popen:
    """One of three hosts. The first has the rendezvous; the last one will be lost, agent and worker."""
    conf = f"is_host={int(number == 0)},join_timeout=60,last_call_timeout=3,keep_alive_interval=1,"
    options = [
        *("--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"),
        *("--rdzv-conf", conf + "keep_alive_max_attempt=2", "--local-addr", "127.0.0.1"),
    ]
    more = {"VICTIM": "1", "KILL_AGENT": "1"} if number == 2 else {}
    fatal = ["--mode", mode, "--fatal-step", str(FATAL_STEP), "--victim=-2"]
    return subprocess.Popen(
        [*LAUNCHER, *options, str(WORKER), str(directory), *fatal],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.hosts  # of a rank each, which share this machine
def test_a_job_that_loses_a_host_goes_on_with_two_of_three_ranks(tmp_path: Path) -> None:
    """The mean of 12 samples is summed as 3 x 4 and as 2 x 6: other roundings, float64.

    A step of AdamW moves a weight by about lr = 1e-2 whatever the gradient's size, so a relative error of 1e-15 in a
    gradient (eps = 2e-16, 12 summands) moves it by some 1e-17, and a little more where a gradient is close to its own
    rounding errors; 12 steps of a smooth model do not multiply that by a thousand. A lost, doubled or mixed step moves
    weights by 1e-3 and more.
    """
    directory = tmp_path / "run"
    directory.mkdir()
    port = free_port()
    agents = [start_agent(number, port, directory, "ddp") for number in range(3)]
    try:
        printed = [agent.communicate(timeout=100)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
    assert agents[2].returncode == -signal.SIGKILL, printed[2]
    for agent, text in zip(agents[:2], printed, strict=False):
        assert agent.returncode == 0, text
    expected = undisturbed(3, tmp_path / "undisturbed", "ddp")
    results = [outcome_of(directory, rank) for rank in range(2)]
    assert not (directory / "rank2.json").exists()
    for facts, weights in results:
        assert facts["world"] == 2
        assert facts["began"] == FATAL_STEP
        torch.testing.assert_close(weights, expected, rtol=1e-11, atol=1e-11)
    assert_same(results[1][1], results[0][1], "the ranks differ")


def test_a_program_that_is_started_again_by_hand_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Interrupted after steps 3 and 7, it goes on with 3, then 1, then 4 ranks. (Tolerance as above.)"""
    expected = undisturbed(2, tmp_path / "undisturbed", "gradients")
    directory = tmp_path / "run"
    directory.mkdir()
    steps = restart_worker.STEPS
    for world, until in ((3, 3), (1, 7), (4, steps)):
        told = run_ranks(stop_after, world, str(directory), until)
    assert told[0]["began"] == 7
    torch.testing.assert_close(told[0]["weights"], expected, rtol=1e-11, atol=1e-11)


def stop_after(rank: int, world: int, directory: str, until: int) -> dict[str, Any]:
    restart_worker.STEPS = until
    return restart_worker.run(rank, world, directory, "gradients")
