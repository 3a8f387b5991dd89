"""Processes that run cases: four ranks of one gloo group, kept from case to case; a smaller case uses some of them."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import resource
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests import forkserver
from tests.differential import entered, trial
from tests.differential.configurations import Configuration

forkserver.preload(
    ("tests.differential.entered", "torch", "torch.distributed", "torch._dynamo", "torch.distributed.checkpoint",
     "torch.distributed.checkpoint.state_dict", "shardstep", "shardstep.checkpoint", "tests.differential.pool")
)  # fmt: skip
SIZE = 4
CASES = 25  # after which the processes are started anew: side groups of deleted optimizers stay open (issue 26)
STARTING = 240.0  # on a busy machine


class Outcome(NamedTuple):
    """Of a case on all ranks."""

    error: str  # of the rank that failed first; empty if none did
    counts: dict[str, int]


class Pool:
    """``run`` runs a case. After one that failed the processes are killed, and the next case gets others."""

    def __init__(self, device: str = "cpu") -> None:
        self._device, self._ranks, self._left = device, list[Any](), 0
        self._folder = tempfile.TemporaryDirectory(prefix="shardstep-cases-")
        self._number, self._test = 0, ""

    def run(self, config: Configuration, program: Any, timeout: float = 90, by: Any = trial.run) -> Outcome:
        """``by(config, program, folder)`` on every rank: it says what a program is."""
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        if not self._left or (entered.FOLDER and test != self._test):
            self.close()
            self._start()
        self._left, self._number, self._test = self._left - 1, self._number + 1, test
        folder = Path(self._folder.name) / str(self._number)
        for _, pipe in self._ranks:
            pipe.send((by, config, program, folder, test))
        answers = self._answers(time.monotonic() + timeout)
        failures = sorted((at, rank, text) for rank, (at, text, _) in enumerate(answers) if text)
        if failures:
            self.close()
            _, rank, text = failures[0]
            return Outcome(f"process {rank}: {text}", {})
        return Outcome("", max((counts for _, _, counts in answers), key=len))

    def _start(self) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store = store  # as long as the processes
        for rank in range(SIZE):
            ours, theirs = forkserver.context.Pipe()
            process = forkserver.context.Process(
                target=_work, args=(theirs, rank, store.port, self._device), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        for _, pipe in self._ranks:
            if not pipe.poll(STARTING):
                raise RuntimeError("a process of the pool did not start")
            pipe.recv()
        self._left = CASES

    def _answers(self, deadline: float) -> list[tuple[float, str, dict[str, int]]]:
        """From each rank: when it failed, how, and what it ran. Once a rank has failed the others get two seconds."""
        waiting = dict(enumerate(self._ranks))
        found: dict[int, Any] = {}
        while waiting:
            pipes = {pipe: rank for rank, (_, pipe) in waiting.items()}
            ready = multiprocessing.connection.wait(list(pipes), max(deadline - time.monotonic(), 0))
            for pipe in ready:
                rank = pipes[pipe]
                try:
                    found[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    found[rank] = (0.0, "the process died", {})
                if found[rank][1]:
                    deadline = min(deadline, time.monotonic() + 2)
                del waiting[rank]
            if not ready:
                late = {rank: (float("inf"), "still running", {}) for rank in waiting}
                found, waiting = {**found, **late}, {}
        return [found[rank] for rank in range(SIZE)]

    def close(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks, self._left = [], 0


@functools.cache
def pool(device: str) -> Pool:
    """The one of this pytest worker."""
    return Pool(device)


def _work(pipe: Any, rank: int, port: int, device: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    backends = "gloo"
    if device == "sim":
        from tests.accelerator import simulated

        simulated.load()
        backends = simulated.BACKENDS
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=STARTING))
    dist.init_process_group(backends, store=store, rank=rank, world_size=SIZE, timeout=timedelta(seconds=30))
    dist.barrier()
    gc.freeze()  # what was imported is not looked at again
    pipe.send("ready")
    while True:
        try:
            by, config, program, folder, test = pipe.recv()
        except EOFError:
            return
        os.environ["SHARDSTEP_SHARED_MEMORY"] = "1" if config.transport == "shared memory" else "0"
        torch.manual_seed(0)
        try:
            counts = by(config, program, folder)
            entered.write(test)
            pipe.send((0.0, "", counts))
        except BaseException:
            pipe.send((time.time(), traceback.format_exc(), {}))
