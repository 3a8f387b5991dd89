"""Real processes, real gloo. ``run_ranks`` runs a function on every rank and returns what each returned.

The forkserver start method with torch preloaded makes a 2-rank test cost about a tenth of a second.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
# Whatever a worker's test module imports is imported once, not once per rank.
_PRELOADED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.optim",
    "torch.distributed.checkpoint.state_dict",
    "accelerate",
    "pytest",
    "numpy",
    "shardstep",
]
_context.set_forkserver_preload(_PRELOADED)


def preload(modules: list[str]) -> None:
    """Have these imported once, too. Without effect when ``run_ranks`` was called before."""
    _context.set_forkserver_preload(_PRELOADED + modules)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 90,
    pg_timeout: float = 60,
    **kwargs: Any,
) -> list[Any]:
    """``function(rank, world_size, *args, **kwargs)`` on every rank of a gloo group; the results by rank.

    Raises the first real error of any rank (not the "connection closed by peer" that follows on the others).
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = []
    for rank in range(world_size):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_work, args=(function, rank, world_size, store.port, pg_timeout, sender, args, kwargs), daemon=True
        )
        process.start()
        sender.close()
        workers.append((process, receiver))
    outcomes = _await(workers, timeout)
    failures = [(at, rank, text) for rank, (kind, at, text) in enumerate(outcomes) if kind == "error"]
    if failures:
        _, rank, text = min(failures)
        raise AssertionError(f"rank {rank} of {world_size} failed first:\n{text}")
    return [torch.load(io.BytesIO(payload), weights_only=False) for _, _, payload in outcomes]


def _await(workers: list, timeout: float) -> list[tuple[str, float, Any]]:
    deadline = time.monotonic() + timeout
    outcomes: list[tuple[str, float, Any]] = []
    try:
        for process, receiver in workers:
            if not receiver.poll(max(deadline - time.monotonic(), 0.01)):
                outcomes.append(("error", float("inf"), f"still running after {timeout} s"))
                continue
            try:
                outcomes.append(receiver.recv())
            except EOFError:
                process.join(5)
                outcomes.append(("error", time.time(), f"died with exit code {process.exitcode}"))
        for process, _ in workers:
            process.join(max(deadline - time.monotonic(), 1))
    finally:
        for process, _ in workers:
            if process.is_alive():
                process.kill()
    return outcomes


def _work(function, rank, world_size, port, pg_timeout, sender, args, kwargs) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=pg_timeout)
        )
        dist.barrier()  # a rank that is done must not leave while slower ones still connect
        result = function(rank, world_size, *args, **kwargs)
        buffer = io.BytesIO()
        torch.save(result, buffer)
        sender.send(("ok", time.time(), buffer.getvalue()))
        dist.destroy_process_group()
    except BaseException:
        sender.send(("error", time.time(), traceback.format_exc()))
    finally:
        sender.close()
