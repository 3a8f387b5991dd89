"""The processes of ranks are used again, and no test can tell."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardstep import ZeroRedundancyOptimizer
from shardstep.grads import scheduler
from tests.harness import run_ranks

kept: list[Any] = []  # in the process of a rank


class Armed:
    """As tests arm an optimizer of their own, to fail later."""

    count = 0


def pid(rank: int, world: int) -> int:
    return os.getpid()


def test_the_next_call_runs_in_the_same_processes_unless_it_wants_fresh_ones():
    first = run_ranks(pid, 3)
    assert len(set(first)) == 3
    assert not set(run_ranks(pid, 2, fresh=True)) & set(first)
    assert run_ranks(pid, 3) == first
    assert run_ranks(pid, 2) == first[:2]
    assert set(run_ranks(pid, 4)) > set(first)


def asks_the_probe(rank: int, world: int, lr: float, replace: bool = False) -> int:
    """How often it was asked for two optimizers of a class."""
    from tests import prepared  # not in the process of the tests: it changes what it is imported in

    asked, real, step = [], prepared.examine, SGD.step
    prepared.examine = lambda *args, **kwargs: asked.append(1) or real(*args, **kwargs)
    if replace:
        SGD.step = lambda self, closure=None: step(self, closure)  # type: ignore[method-assign]
    for _ in range(2):
        ZeroRedundancyOptimizer([Parameter(torch.ones(5))], SGD, lr=lr)
    return len(asked)


def test_what_the_probe_found_out_goes_to_other_processes_unless_a_test_had_replaced_something():
    lr = random.random()
    for replace, expected in ((True, 2), (False, 1), (False, 0), (True, 2)):
        assert run_ranks(asks_the_probe, 2, lr, replace, fresh=True) == [expected] * 2


def sets_what_is_put_back(rank: int, world: int) -> int:
    os.environ["SHARDSTEP_SHARED_MEMORY"] = "0"
    os.environ.pop("GLOO_SOCKET_IFNAME")
    os.chdir("/")
    torch.set_num_threads(2)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(12345)
    warnings.simplefilter("error")
    scheduler.PATIENCE = 0.01
    Armed.count += 1
    model = torch.nn.Linear(3, 3)
    model.optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)  # a cycle: garbage is no trace
    dist.new_group([0])
    return os.getpid()


def what_there_is(rank: int, world: int) -> list[Any]:
    with warnings.catch_warnings(record=True) as told:
        warnings.warn("told once to each call")
    drawn = [torch.initial_seed(), torch.rand(3).tolist(), np.random.rand(3).tolist()]
    own = random.random() != random.Random(12345).random()
    constants = [scheduler.PATIENCE, Armed.count, torch.get_num_threads(), dist.group.WORLD.group_name]
    return [dict(os.environ), os.getcwd(), list(map(str, warnings.filters)), len(told), drawn, own, constants]


def test_environment_directory_seeds_threads_filters_and_constants_are_put_back():
    expected = run_ranks(what_there_is, 2, fresh=True)
    pids = run_ranks(sets_what_is_put_back, 2)
    assert run_ranks(what_there_is, 2) == expected
    assert run_ranks(pid, 2) == pids, "it was the same processes"


TRACES = {
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "determinism": lambda: torch.use_deterministic_algorithms(True),
    "hook on optimizers": lambda: register_optimizer_step_post_hook(lambda *_: None),
    "logging": lambda: logging.getLogger("shardstep").addHandler(logging.NullHandler()),
    "signal": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    "thread": lambda: threading.Thread(target=time.sleep, args=(600,), daemon=True).start(),
    "function of torch": lambda: setattr(dist, "all_reduce", lambda *_: None),
    "method of ours": lambda: setattr(ZeroRedundancyOptimizer, "zero_grad", lambda *_: None),
    "optimizer": lambda: setattr(torch, "kept", SGD([Parameter(torch.ones(1))])),
    "list of a test": lambda: kept.append(1),
    "compiled": lambda: torch.compile(lambda value: value + 1, backend="eager")(torch.ones(1)),
}


def leaves(rank: int, world: int, trace: str) -> int:
    if rank == 1:
        TRACES[trace]()
    return os.getpid()


@pytest.mark.parametrize("trace", TRACES)
def test_a_process_in_which_something_is_left_is_not_used_again(trace):
    clean, marked = run_ranks(leaves, 2, trace)
    after = run_ranks(pid, 2)
    assert clean in after
    assert marked not in after


def fails(rank: int, world: int, how: str) -> None:
    if rank == 1:
        if how == "raises":
            raise ValueError("the reason")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    dist.barrier()


FAILURES = {
    "raises": "rank 1 of 2 failed first(?s:.*)ValueError: the reason",
    "is killed": "rank 1 of 2 failed first:\ndied with exit code -9",
    "hangs": "still running after 2 s",
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_is_told_and_its_processes_are_replaced(how):
    before = run_ranks(pid, 2)
    with pytest.raises(AssertionError, match=FAILURES[how]):
        run_ranks(fails, 2, how, timeout=2 if how == "hangs" else 60)
    assert not set(before) & set(run_ranks(pid, 2))
