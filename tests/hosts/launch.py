"""Starting one program on several hosts: with torchrun, or rank by rank as a batch system does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.hosts.namespaces import ROOT, Host, Program, open_hosts

_PORT = 29400
# Which ranks run on which host.
Arrangement = list[list[int]]


class Task(NamedTuple):
    """What ``worker.py`` does on every rank."""

    module: str
    function: str  # is given the folder that all hosts share, and ``args``
    args: Sequence[Any] = ()
    timeout: float = 60  # of the process group, seconds

    def command(self, folder: Path) -> list[str | Path]:
        return [Path(__file__).parent / "worker.py", folder, json.dumps(self)]


def run_on_hosts(
    function: Callable[..., Any], arrangement: Arrangement, folder: Path, *args: Any, by_torchrun: bool = True
) -> list[Any]:
    """``function(folder, *args)`` on every rank of a job; the results by rank. It is a function of a module."""
    command = Task(function.__module__, function.__name__, args).command(folder)
    counts = [len(ranks) for ranks in arrangement]
    with open_hosts(len(counts), folder) as hosts:
        if by_torchrun:
            started = torchrun(hosts, counts, command, folder)
        else:
            started = rank_by_rank(hosts, arrangement, command, folder)
        with started as job:
            job.succeed(150)
    return results_of(folder, sum(counts))


def results_of(folder: Path, ranks: int) -> list[Any]:
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


class Launched(NamedTuple):
    program: Program
    output: Path  # what it prints


class Job:
    """The programs of one job, which are killed when it is left."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for program, _ in self.launched:
            program.kill_group()

    def start(self, host: Host, command: Sequence[str | Path], env: Mapping[str, str], output: Path) -> None:
        with output.open("wb") as file:
            self.launched.append(Launched(host.start(command, {**_environment(), **env}, file), output))

    def wait(self, timeout: float) -> list[int]:
        """Their exit codes, in the order in which they were started. AssertionError if they take longer."""
        deadline = time.monotonic() + timeout
        for program, _ in self.launched:
            try:
                program.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"still running after {timeout} s\n{self.printed()}") from None
        return [program.returncode for program, _ in self.launched]

    def succeed(self, timeout: float) -> None:
        """Wait for a good end of all. AssertionError, with what they printed, if there is none."""
        codes = self.wait(timeout)
        assert not any(codes), f"ended with {codes}\n{self.printed()}"

    def printed(self) -> str:
        """Everything. Who fell silent first comes first: whoever waits for a time-out was not the first to fail."""
        outputs = sorted((output for _, output in self.launched), key=lambda path: path.stat().st_mtime)
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in outputs)


def torchrun(
    hosts: Sequence[Host],
    counts: Sequence[int],
    command: Sequence[str | Path],
    folder: Path,
    options: Sequence[str] = (),
    rendezvous: str = "",
    env: Mapping[str, str] | None = None,
) -> Job:
    """``counts[h]`` ranks on each host, with a c10d rendezvous on the first. Ranks are in the order of the hosts."""
    job = Job()
    for number, (host, count) in enumerate(zip(hosts, counts, strict=True)):
        conf = f"is_host={int(number == 0)},join_timeout=120{rendezvous}"
        agent = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts))),
            *("--nproc-per-node", str(count), "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-conf", conf),
            *("--rdzv-endpoint", f"{hosts[0].name}:{_PORT}", *options),
        ]
        job.start(host, [*agent, *command], env or {}, folder / f"{host.name}.txt")
    return job


def rank_by_rank(hosts: Sequence[Host], arrangement: Arrangement, command: Sequence[str | Path], folder: Path) -> Job:
    """The ranks of ``arrangement[h]`` on each host, in any order."""
    job = Job()
    world = sum(map(len, arrangement))
    master = next(host for host, ranks in zip(hosts, arrangement, strict=True) if 0 in ranks)
    for host, ranks in zip(hosts, arrangement, strict=True):
        for local_rank, rank in enumerate(ranks):
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(local_rank),
                "MASTER_ADDR": master.name,
                "MASTER_PORT": str(_PORT),
            }
            job.start(host, [sys.executable, *command], env, folder / f"rank{rank}.txt")
    return job


def _environment() -> dict[str, str]:
    """The machine's, without what may tell gloo about its network, and with the project's sources."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("GLOO_", "SHARDSTEP_"))}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    # Without the last one torchrun keeps one store for all restarts, in which gloo finds the addresses of processes
    # that are gone (pytorch issues 135712 and 167288).
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
