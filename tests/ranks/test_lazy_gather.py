"""Parameters that are still on their way after a step: the same weights, and nobody sees a mixture."""

from __future__ import annotations

import copy
import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer
from shardstep.params.lazy_gather import InFlightParameter
from tests.harness import run_ranks
from tests.surroundings import choose
from tests.twins import parameters


def make_model() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double()


def batch_of(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def iterate(model: Any, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    model(batch_of(rank, step)).square().mean().backward()
    optimizer.step()


def beside_ddp(rank: int, world: int, shards_gradients: bool, compiled: bool) -> None:
    ddp = DistributedDataParallel(make_model())
    plain = torch.optim.AdamW(ddp.parameters(), lr=0.05)
    model = make_model()
    called: Any = model if shards_gradients else DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        lr=0.05,
        bucket_cap_mb=0.001,
        shard_gradients=shards_gradients,
        lazy_gather=True,
    )
    called = torch.compile(called, backend="eager") if compiled else called
    params = list(model.parameters())
    averages = [[p.detach().clone() for p in side.parameters()] for side in (model, ddp)]
    in_flight = 0
    for step in range(10):
        iterate(ddp, plain, rank, step)
        iterate(called, optimizer, rank, step)
        in_flight += sum(type(param) is InFlightParameter for param in params)
        optimizer.zero_grad()
        if step == 4:
            copied = copy.deepcopy(model)
            assert {type(param) for param in copied.parameters()} == {nn.Parameter}
            same(copied.parameters(), ddp.parameters())
        elif step == 5:
            same(model.state_dict().values(), ddp.module.state_dict().values())
        elif step == 6:
            assert repr(params[0]) == repr(params[0])
            assert type(params[0]) is nn.Parameter
        elif step == 7:
            optimizer.wait_for_parameters()
            assert {type(param) for param in params} == {nn.Parameter}
        elif step % 3 == 0:  # an average over parameters that were listed long ago
            for average, side in zip(averages, (params, list(ddp.parameters())), strict=True):
                for mean, param in zip(average, side, strict=True):
                    mean.lerp_(param.detach(), 0.1)
    same(params, ddp.parameters())
    same(averages[0], averages[1])
    assert (in_flight > 0) == (world > 1)


def same(mine: Any, theirs: Any) -> None:
    """Sums of three in another order than DDP's: last bits of float64 over ten steps. At two ranks bit-equal."""
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shards_gradients", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_lazy_gathers_end_in_the_weights_of_ddp_and_no_reader_sees_a_mixture(world, shards_gradients):
    """state_dict, an average of the parameters, a deep copy, a print: each finishes what it touches first."""
    run_ranks(beside_ddp, world, shards_gradients, False)


def test_a_compiled_model_computes_with_what_arrived():
    run_ranks(beside_ddp, 2, True, True)


def touched_by_threads(rank: int, world: int, way: str, shard: str) -> None:
    """Rank 1 is late with its step. On rank 0 one thread waits for a gather when others touch the same parameters."""
    choose(way)
    shapes = [(40, 50)] * 6
    params, theirs = parameters(shapes), parameters(shapes)
    options = {"bucket_cap_mb": 40 * 50 * 8 * 2 / 2**20, "shard": shard, "lazy_gather": True}
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, **options)
    plain = torch.optim.SGD(theirs, lr=0.1)
    for step in range(3):
        for param in (*params, *theirs):
            param.grad = torch.full_like(param, step + 1)
        plain.step()
        if rank == 1:
            time.sleep(0.5)
        optimizer.step()
        if rank == 0:
            assert all(type(param) is InFlightParameter for param in params)
        seen: list[list[torch.Tensor]] = []

        def touch(delay: float, seen: list = seen) -> None:
            time.sleep(delay)
            seen.append([param.detach().clone() for param in params])

        threads = [threading.Thread(target=touch, args=(delay,), daemon=True) for delay in (0, 0.1, 0.15, 0.2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(seen) == len(threads), "a thread hangs"
        for values in seen:
            assert all(map(torch.equal, values, theirs)), f"a thread saw old values in step {step}"


@pytest.mark.parametrize("shard", ["element", "tensor"])
@pytest.mark.parametrize("way", ["shared memory", "sockets"])
def test_threads_that_touch_parameters_while_another_one_waits_see_the_new_values(way, shard):
    run_ranks(touched_by_threads, 2, way, shard)


def interrupted(rank: int, world: int) -> None:
    """A signal handler, and a thread, that touch all parameters again and again, in the middle of whatever happens."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(6)))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-2, bucket_cap_mb=1500 / 2**20, lazy_gather=True
    )
    seen, stop = [0.0], threading.Event()

    def touch() -> None:
        seen[0] = sum(param.detach().sum().item() for param in model.parameters())

    def keep_touching() -> None:
        while not stop.wait(0.001):
            touch()

    handling: list[bool] = []

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


def seen_as_another_class(rank: int, world: int) -> None:
    param = nn.Parameter(torch.zeros(64))
    optimizer = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=1.0, lazy_gather=True)
    for step in range(1, 4):
        param.grad = torch.ones_like(param)
        time.sleep(0.05 * rank)  # so that some are waited for
        optimizer.step()
        assert param.as_subclass(torch.Tensor).tolist() == [-step] * 64


def test_a_parameter_that_is_taken_as_another_class_is_waited_for():
    run_ranks(seen_as_another_class, 2)


def told_to_threads(rank: int, world: int) -> list[str]:
    """Rank 1 never steps. What the threads of rank 0 are told when they touch parameters."""
    params = parameters([(40, 50)] * 2)
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, lazy_gather=True)
    told: list[str] = []
    if rank == 1:
        time.sleep(4)  # longer than the other one waits
        return told
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()

    def touch(delay: float) -> None:
        time.sleep(delay)
        try:
            params[0].sum()
        except RuntimeError as error:
            told.append(str(error))

    threads = [threading.Thread(target=touch, args=(delay,), daemon=True) for delay in (0, 0.3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return told


def test_if_the_gather_fails_every_thread_that_waits_for_it_is_told():
    told = run_ranks(told_to_threads, 2, pg_timeout=2)[0]
    assert len(told) == 2
    assert all("could not be gathered" in text for text in told), told
