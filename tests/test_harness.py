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
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardstep import ZeroRedundancyOptimizer
from shardstep.grads import scheduler
from shardstep.params import probe
from tests import verdicts
from tests.harness import run_ranks

kept: list[Any] = []  # in the process of a rank


class Armed:
    """As tests arm an optimizer of their own, to fail later."""

    count = 0


def pid(rank: int, world: int) -> int:
    return os.getpid()


def test_the_next_call_runs_in_the_same_processes():
    first = run_ranks(pid, 3)
    assert len(set(first)) == 3
    assert run_ranks(pid, 3) == first
    assert run_ranks(pid, 2) == first[:2]
    assert set(run_ranks(pid, 4)) > set(first)


def test_fresh_processes_are_nobody_elses():
    before = set(run_ranks(pid, 2))
    alone = set(run_ranks(pid, 2, fresh=True))
    assert not before & alone
    assert set(run_ranks(pid, 2)) == before


def who_prepared(rank: int, world: int) -> int:
    from tests import prepared  # not in the process of the tests: it changes what it is imported in

    return prepared.PREPARED_BY


def test_what_all_processes_begin_with_was_done_once_before_they_were_forked():
    preparers = {*run_ranks(who_prepared, 2), *run_ranks(who_prepared, 2, fresh=True)}
    assert len(preparers) == 1
    assert not preparers & {*run_ranks(pid, 2), os.getpid()}


def asks_the_probe(rank: int, world: int, lr: float) -> bool:
    """Whether it had to: nobody has built such an optimizer before."""
    examined = []

    def examine(*args: Any, **kwargs: Any) -> Any:
        examined.append(args)
        return probe.examine(*args, **kwargs)

    verdicts.examine = examine
    for _ in range(2):
        ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(5))], SGD, lr=lr)
    assert len(examined) < 2
    return bool(examined)


def test_what_the_probe_found_out_is_handed_on_to_new_processes():
    lr = random.random()
    assert run_ranks(asks_the_probe, 2, lr, fresh=True) == [True, True]
    assert run_ranks(asks_the_probe, 2, lr, fresh=True) == [False, False]
    assert run_ranks(asks_the_probe, 2, lr + 1, fresh=True) == [True, True]


def has_another_step(rank: int, world: int, lr: float) -> None:
    step = SGD.step
    SGD.step = lambda self, closure=None: step(self, closure)  # type: ignore[method-assign]
    ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(5))], SGD, lr=lr)


def test_what_the_probe_found_out_about_a_replaced_step_is_not_handed_on():
    lr = random.random()
    run_ranks(has_another_step, 2, lr, fresh=True)
    assert run_ranks(asks_the_probe, 2, lr, fresh=True) == [True, True]


def sets_what_is_put_back(rank: int, world: int) -> int:
    os.environ["SHARDSTEP_SHARED_MEMORY"] = "0"
    os.environ.pop("GLOO_SOCKET_IFNAME")
    os.chdir("/")
    torch.set_num_threads(2)
    torch.manual_seed(12345)
    np.random.seed(12345)
    random.seed(12345)
    warnings.simplefilter("error")
    scheduler.PATIENCE = 0.01
    Armed.count += 1
    dist.new_group([0])
    dist.all_reduce(torch.ones(1))
    return os.getpid()


def what_there_is(rank: int, world: int) -> tuple:
    with warnings.catch_warnings(record=True) as told:
        warnings.warn("told once to each call")
    return (
        dict(os.environ),
        os.getcwd(),
        torch.get_num_threads(),
        torch.initial_seed(),
        torch.rand(3).tolist(),
        np.random.rand(3).tolist(),
        list(map(str, warnings.filters)),
        scheduler.PATIENCE,
        Armed.count,
        dist.get_world_size(),
        dist.group.WORLD.group_name,
        len(told),
        random.random() != random.Random(12345).random(),
    )


def test_environment_directory_seeds_threads_filters_and_constants_are_put_back():
    expected = run_ranks(what_there_is, 2, fresh=True)
    pids = run_ranks(sets_what_is_put_back, 2)
    assert run_ranks(what_there_is, 2) == expected
    assert run_ranks(what_there_is, 2) == expected
    assert run_ranks(pid, 2) == pids, "it was the same processes"


def default_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def default_device() -> None:
    torch.set_default_device("meta")


def determinism() -> None:
    torch.use_deterministic_algorithms(True)


def no_gradients() -> None:
    torch.set_grad_enabled(False)


def hook_on_optimizers() -> None:
    register_optimizer_step_post_hook(lambda *_: None)


def hook_on_modules() -> None:
    torch.nn.modules.module.register_module_forward_hook(lambda *_: None)


def logging_handler() -> None:
    logging.getLogger("shardstep").addHandler(logging.NullHandler())


def logging_level() -> None:
    logging.getLogger("shardstep").setLevel(logging.DEBUG)


def signal_handler() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def thread() -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def patched_function_of_torch() -> None:
    real = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: real(*args, **kwargs)


def patched_method_of_ours() -> None:
    real = ZeroRedundancyOptimizer.zero_grad
    ZeroRedundancyOptimizer.zero_grad = lambda *args, **kwargs: real(*args, **kwargs)


def kept_optimizer() -> None:
    torch.kept = SGD([torch.nn.Parameter(torch.ones(1))])  # type: ignore[attr-defined]


def list_of_a_test() -> None:
    kept.append(1)


def compiled() -> None:
    torch.compile(lambda value: value + 1, backend="eager")(torch.ones(1))


TRACES = (
    default_dtype,
    default_device,
    determinism,
    no_gradients,
    hook_on_optimizers,
    hook_on_modules,
    logging_handler,
    logging_level,
    signal_handler,
    thread,
    patched_function_of_torch,
    patched_method_of_ours,
    kept_optimizer,
    list_of_a_test,
    compiled,
)


def leaves(rank: int, world: int, trace: Any) -> int:
    if rank == 1:
        trace()
    return os.getpid()


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.__name__)
def test_a_process_in_which_something_is_left_is_not_used_again(trace):
    clean, marked = run_ranks(leaves, 2, trace)
    after = run_ranks(pid, 2)
    assert clean in after
    assert marked not in after


def an_optimizer_in_a_cycle(rank: int, world: int) -> int:
    model = torch.nn.Linear(3, 3)
    model.optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    model.optimizer.step()
    return os.getpid()


def test_what_is_garbage_is_no_trace():
    assert run_ranks(an_optimizer_in_a_cycle, 2) == run_ranks(pid, 2)


def fails(rank: int, world: int, how: str) -> None:
    if rank == 1:
        if how == "raises":
            raise ValueError("the reason")
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exits":
            os._exit(7)
        time.sleep(600)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raises", "rank 1 of 2 failed first(?s:.*)ValueError: the reason"),
        ("is killed", "rank 1 of 2 failed first:\ndied with exit code -9"),
        ("exits", "rank 1 of 2 failed first:\ndied with exit code 7"),
        ("hangs", "still running after 2 s"),
    ],
)
def test_a_failure_is_told_and_its_processes_are_replaced(how, told):
    before = run_ranks(pid, 2)
    with pytest.raises(AssertionError, match=told):
        run_ranks(fails, 2, how, timeout=2 if how == "hangs" else 60)
    after = run_ranks(pid, 2)
    assert not set(before) & set(after)
    assert run_ranks(what_there_is, 2) == run_ranks(what_there_is, 2, fresh=True)
