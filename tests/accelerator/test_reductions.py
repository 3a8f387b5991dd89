"""Sharded gradients on the device: the weights of the CPU, no races, no host that waits, and few calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shardstep import ZeroRedundancyOptimizer
from tests.accelerator import devices, simulated
from tests.accelerator.devices import (
    DEVICE,
    device,
    host_reads,
    on_accelerator_only,
    on_device,
    own_reads,
    run_ranks,
    same,
    simulation_only,
    sizes,
)

WORLDS = sizes(1, 2, 3)
STEPS = 12
# The backend adds up in its own order, and averages at once: some roundings of float64 over the steps of a test.
SUMMED_OTHERWISE = 1e-11


class Net(nn.Module):
    """Parameters of several sizes, and one that is not always used."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes = [7, 24, 16, 40, 9, 3]
        self.layers = nn.ModuleList(nn.Linear(one, other) for one, other in pairwise(sizes))
        self.extra = nn.Parameter(torch.ones(3))
        self.to(dtype)

    def forward(self, batch: Tensor, extra: bool = True) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch * self.extra if extra else batch


def batch_of(step: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64).to(dtype)


def loss_of(model: nn.Module, step: int, rank: int, extra: bool = True) -> Tensor:
    param = next(model.parameters())
    batch = batch_of(step, rank, param.dtype)
    if param.device.type != "cpu":  # as a DataLoader with pin_memory does it: the host does not wait
        batch = batch.pin_memory().to(param.device, non_blocking=True)
    return model(batch, extra).square().mean()


# --- loops: one iteration each, the same for us and for the oracle ---------------------------------------------------

Losses = Callable[[int, bool], Tensor]  # of a step: the mean over the ranks for the oracle, this rank's own for us


class Side(NamedTuple):
    """One of the two that train: the oracle, or a rank."""

    model: nn.Module
    optimizer: Any
    losses: Losses
    clip: Callable[[float], Any]
    no_sync: Callable[[], Any] | None  # None: the oracle


def simple(side: Side, step: int) -> None:
    side.optimizer.zero_grad()
    side.losses(step, True).backward()
    side.optimizer.step()


def zero_twice(side: Side, step: int) -> None:
    simple(side, step)
    side.optimizer.zero_grad()


def accumulating(side: Side, step: int) -> None:
    side.optimizer.zero_grad()
    for part in range(3):
        side.losses(3 * step + part, True).backward()
    side.optimizer.step()


def without_sync(side: Side, step: int) -> None:
    side.optimizer.zero_grad()
    if side.no_sync is None:
        side.losses(2 * step, True).backward()
    else:
        with side.no_sync():
            side.losses(2 * step, True).backward()
    side.losses(2 * step + 1, True).backward()
    side.optimizer.step()


def clipping(side: Side, step: int) -> None:
    side.optimizer.zero_grad()
    side.losses(step, True).backward()
    side.clip(0.01)
    side.optimizer.step()


def torch_clipping(side: Side, step: int) -> None:
    side.optimizer.zero_grad()
    side.losses(step, True).backward()
    nn.utils.clip_grad_norm_(side.model.parameters(), 0.01)
    side.optimizer.step()


def keeping_memory(side: Side, step: int) -> None:
    side.optimizer.zero_grad(set_to_none=False)
    side.losses(step, True).backward()
    side.optimizer.step()


LOOPS = {
    one.__name__: one
    for one in (simple, zero_twice, accumulating, without_sync, clipping, torch_clipping, keeping_memory)
}


def oracle(loop: str, world: int) -> list[Tensor]:
    """One process, the CPU, the plain optimizer, the mean over all ranks' losses."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    side = Side(
        model,
        optimizer,
        lambda step, extra: torch.stack([loss_of(model, step, rank, extra) for rank in range(world)]).mean(),
        lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit),
        None,
    )
    for step in range(STEPS):
        LOOPS[loop](side, step)
    return [param.detach() for param in model.parameters()]


def sharded(rank: int, **settings: Any) -> Side:
    model = Net().to(device())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-2, shard_gradients=True, **{"bucket_cap_mb": 4e-3, **settings}
    )
    losses = lambda step, extra: loss_of(model, step, rank, extra)  # noqa: E731
    return Side(model, optimizer, losses, optimizer.clip_grad_norm_, optimizer.no_sync)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().cpu() for param in model.parameters()]


def buckets_of(side: Side) -> int:
    return len(side.optimizer.engine.sharded.layout.buckets)


@on_device
def _train(rank: int, world: int, loops: Sequence[str], shard: str) -> dict[str, Any]:
    found = {}
    for number, loop in enumerate(loops):
        devices.seed(number)
        side = sharded(rank, shard=shard)
        for step in range(2):
            LOOPS[loop](side, step)
        with host_reads() as reads:
            for step in range(2, STEPS):
                LOOPS[loop](side, step)
        found[loop] = weights_of(side.model), [str(read) for read in reads]
    return found


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("shard", ["element", "tensor"])
def test_every_loop_has_the_weights_of_the_cpu_and_never_makes_the_host_wait(world: int, shard: str) -> None:
    results = run_ranks(_train, world, list(LOOPS), shard)
    for loop in LOOPS:
        expected = oracle(loop, world)
        for found in results:
            weights, reads = found[loop]
            same(weights, expected, SUMMED_OTHERWISE)
            assert reads == [], loop


# --- negative control ------------------------------------------------------------------------------------------------


@on_device
def _forget_to_wait(rank: int, world: int) -> str:
    from shardstep.grads.native import Native

    Native.join = lambda self: None  # type: ignore[method-assign]
    side = sharded(rank)
    try:
        simple(side, 0)
    except RuntimeError as error:
        return str(error)
    return ""


@simulation_only
def test_a_step_that_does_not_wait_for_the_reductions_would_be_noticed() -> None:
    for error in run_ranks(_forget_to_wait, 2):
        assert "A race on the simulated device" in error
        assert "reduce_scatter" in error


# --- calls, and averages ---------------------------------------------------------------------------------------------


@on_device
def _count(rank: int, world: int, shard: str) -> tuple[int, dict[str, int], bool]:
    side = sharded(rank, shard=shard)
    for step in range(3):
        simple(side, step)
    with simulated.collectives() as calls, simulated.allocations() as warm:
        simple(side, 3)
    with simulated.allocations() as again:
        simple(side, 4)
    return buckets_of(side), dict(calls), sorted(warm) == sorted(again)


@simulation_only
@pytest.mark.parametrize("shard", ["element", "tensor"])
def test_a_bucket_is_one_reduce_scatter_also_for_unequal_shards(shard: str) -> None:
    for buckets, calls, repeats in run_ranks(_count, 3, shard):
        assert buckets > 3
        assert sum(count for kind, count in calls.items() if kind.startswith("reduce")) == buckets
        assert repeats, "a warm iteration allocates what the one before it gave back"


@on_device
def _overflow(rank: int, world: int) -> list[Tensor]:
    found = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        param = nn.Parameter(torch.zeros(600, dtype=dtype, device=device()))
        optimizer = ZeroRedundancyOptimizer([param], torch.optim.SGD, lr=1.0, shard_gradients=True)
        largest = torch.full((600,), 65504.0 / (1 + rank % 2), dtype=dtype, device=device())
        (param * largest).sum().backward()
        optimizer.step()
        found.append(param.detach().float().cpu())
    return found


@pytest.mark.parametrize("world", sizes(2, 3))
def test_means_that_float16_can_hold_do_not_overflow_on_the_way(world: int) -> None:
    expected = -sum(65504.0 / (1 + rank % 2) for rank in range(world)) / world
    for half, brain, single in run_ranks(_overflow, world):
        # A few roundings of 11, 8 and 24 bits.
        torch.testing.assert_close(half, torch.full_like(half, expected), rtol=4 * 2.0**-11, atol=0)
        torch.testing.assert_close(brain, torch.full_like(brain, expected), rtol=4 * 2.0**-8, atol=0)
        torch.testing.assert_close(single, torch.full_like(single, expected), rtol=4 * 2.0**-24, atol=0)


# --- unused parameters -----------------------------------------------------------------------------------------------


def _uses_extra(step: int, rank: int) -> bool:
    return step % 3 == 0 or (step % 3 == 1 and rank == 0)


@on_device
def _leave_unused(rank: int, world: int, rounds: int) -> tuple[list[Tensor], int, list[str], Counter[str] | None]:
    side = sharded(rank, find_unused_parameters=True)

    def iterate(step: int) -> None:
        side.optimizer.zero_grad()
        for number in range(rounds):
            side.losses(rounds * step + number, _uses_extra(rounds * step + number, rank)).backward()
        side.optimizer.step()

    for step in range(2):
        iterate(step)
    with host_reads() as reads, devices.collectives() as calls:
        for step in range(2, STEPS):
            iterate(step)
    return weights_of(side.model), buckets_of(side), own_reads(reads), calls


def _oracle_of_unused(world: int, rounds: int) -> list[Tensor]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(rounds * step, rounds * step + rounds):
            losses = [loss_of(model, number, rank, _uses_extra(number, rank)) for rank in range(world)]
            torch.stack(losses).mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rounds", [1, 2])
def test_unused_parameters_are_told_once_per_round_and_read_at_the_step(world: int, rounds: int) -> None:
    expected = _oracle_of_unused(world, rounds)
    for weights, buckets, lines, calls in run_ranks(_leave_unused, world, rounds):
        same(weights, expected, SUMMED_OTHERWISE)
        assert len(lines) <= rounds * (STEPS - 2), "one wait at the step, for what a round has told"
        assert all("usage_exchange.py" in line for line in lines)
        if world > 1 and calls is not None:
            assert sum(calls.values()) == (STEPS - 2) * ((rounds + 1) * buckets + rounds)


# --- GradScaler ------------------------------------------------------------------------------------------------------


@on_device
def _scale(rank: int, world: int) -> tuple[list[Tensor], list[str]]:
    side = sharded(rank)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=3)

    def iterate(step: int) -> None:
        side.optimizer.zero_grad()
        scaler.scale(side.losses(step, True)).backward()
        scaler.unscale_(side.optimizer)
        side.clip(0.01)
        scaler.step(side.optimizer)
        scaler.update()

    for step in range(2):
        iterate(step)
    with host_reads() as reads:
        for step in range(2, STEPS):
            iterate(step)
    return weights_of(side.model), own_reads(reads)


@pytest.mark.parametrize("world", WORLDS)
def test_a_scaler_unscales_without_a_host_read_of_ours(world: int) -> None:
    expected = oracle("clipping", world)
    for weights, lines in run_ranks(_scale, world):
        same(weights, expected, SUMMED_OTHERWISE)
        assert lines == []


# --- aborted iterations ----------------------------------------------------------------------------------------------


def fail_now_and_then(rank: int, world: int, find_unused: bool, buckets: int) -> list[Tensor]:
    """In some iterations a rank raises in its forward; all skip the batch. In others it raises within backward.

    ``buckets``: may be under way. When the others have sent more, their computation waits for the rank that failed, but
    not their hosts: batches come from pinned memory.

    (The device runs kernels at once, so whatever touched the result of a reduction that one rank has not joined yet
    would really wait for it. Here the backend averages, and nothing does.)
    """
    side = sharded(rank, find_unused_parameters=find_unused, gradient_buckets_in_flight=buckets)

    class Broken(RuntimeError):
        pass

    def fail(gradient: Tensor) -> None:
        raise Broken

    for step in range(STEPS + 1):  # the last one goes well: nobody would meet what is left of one that failed
        side.optimizer.zero_grad()
        if step % 4 == 2:
            if rank != step % 3:
                side.losses(100 + step, True).backward()
        elif step % 4 == 3:
            loss = side.losses(100 + step, True)
            handle = side.model.layers[2].weight.register_hook(fail) if rank == step % 3 else None  # type: ignore[index]
            with suppress(Broken):
                loss.backward()
            if handle is not None:
                handle.remove()
        else:
            side.losses(step, True).backward()
            side.optimizer.step()
    return weights_of(side.model)


@on_device
def _fail(rank: int, world: int, find_unused: bool, buckets: int) -> list[Tensor]:
    return fail_now_and_then(rank, world, find_unused, buckets)


@on_accelerator_only
def _fail_without_gloo(rank: int, world: int, find_unused: bool, buckets: int) -> list[Tensor]:
    """The ranks compare over the device, whose computation waits for the rank that failed."""
    return fail_now_and_then(rank, world, find_unused, buckets)


@pytest.mark.parametrize("world", sizes(2, 3))
@pytest.mark.parametrize("find_unused", [False, True])
def test_a_batch_that_failed_on_one_rank_is_skipped_on_all(world: int, find_unused: bool) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS + 1):
        if step % 4 < 2:
            optimizer.zero_grad()
            torch.stack([loss_of(model, step, rank) for rank in range(world)]).mean().backward()
            optimizer.step()
    for function in (_fail, _fail_without_gloo) if world == 2 else (_fail,):
        for weights in run_ranks(function, world, find_unused, 2):
            same(weights, [param.detach() for param in model.parameters()], SUMMED_OTHERWISE)
