"""Parameters that are still on their way after a step: whoever touches them, from wherever, sees the new values."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import parameters
from tests.surroundings import choose

SHAPES = [(40, 50)] * 6


def touched_by_threads(rank: int, world: int, way: str) -> None:
    """Rank 1 is late with its step. On rank 0 one thread waits for a gather when others touch the same parameters."""
    choose(way)
    for shard in ("element", "tensor"):
        params, theirs = parameters(SHAPES), parameters(SHAPES)
        options = {"bucket_cap_mb": 40 * 50 * 8 * 2 / 2**20, "shard": shard, "lazy_gather": True}
        optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, **options)
        plain = torch.optim.SGD(theirs, lr=0.1)
        for step in range(2):
            for param in (*params, *theirs):
                param.grad = torch.full_like(param, step + 1)
            plain.step()
            if rank == 1:
                time.sleep(0.5)
            optimizer.step()
            seen: list[list[torch.Tensor]] = []

            def touch(delay: float, params: Any = params, seen: Any = seen) -> None:
                time.sleep(delay)
                seen.append([param.detach().clone() for param in params])

            threads = [threading.Thread(target=touch, args=(delay,), daemon=True) for delay in (0, 0.1, 0.15, 0.2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert len(seen) == len(threads), "a thread hangs"
            for values in seen:
                assert all(map(torch.equal, values, theirs)), f"a thread saw old values in step {step}, {shard}"


@pytest.mark.parametrize("way", ["shared memory", "sockets"])
def test_threads_that_touch_parameters_while_another_one_waits_see_the_new_values(way):
    run_ranks(touched_by_threads, 2, way)


def interrupted(rank: int, world: int) -> None:
    """A signal handler, and a thread, that touch all parameters again and again, in the middle of whatever happens."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(6)))
    options = {"lr": 1e-2, "bucket_cap_mb": 1500 / 2**20, "lazy_gather": True}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    stop, handling = threading.Event(), []

    def touch() -> float:
        return sum(param.detach().sum().item() for param in model.parameters())

    def keep_touching() -> None:
        while not stop.wait(0.001):
            touch()

    def handle(*_: Any) -> None:
        if not handling:  # (a handler that waits is interrupted by the next signal)
            handling.append(True)
            touch()
            handling.clear()

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.003)
    thread = threading.Thread(target=keep_touching)
    thread.start()
    try:
        for step in range(60):
            optimizer.zero_grad()
            model(torch.ones(4, 24) * step).square().mean().backward()
            optimizer.step()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        stop.set()
        thread.join()
    optimizer.wait_for_parameters()
    optimizer.check_replicas()
    assert all(type(param) is nn.Parameter and not vars(param) for param in model.parameters())


def test_signal_handlers_and_threads_may_touch_parameters_at_any_time():
    run_ranks(interrupted, 3, pg_timeout=20, fresh=True)
