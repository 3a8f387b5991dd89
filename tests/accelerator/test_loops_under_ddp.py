"""Whole training loops under DDP on the device, in the modes that leave gradients to DDP.

``test_reductions.py`` has the same loops for sharded gradients, ``test_steps.py`` what is in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer
from tests.accelerator import devices
from tests.accelerator.devices import (
    DEVICE,
    device,
    host_reads,
    module,
    on_accelerator_only,
    on_device,
    own_reads,
    run_ranks,
    same,
    simulation_only,
    sizes,
)

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"parameters_as_bucket_view": True},
    "lazy": {"lazy_gather": True},
}
SEEDS = range(5)
STEPS = 6
# DDP's backend adds up in its own order: some roundings of float64 over the steps of a test.
SUMMED_OTHERWISE = 1e-11


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(9, 9, bias=False) for _ in range(5))).double()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    batch = torch.randn(4, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))
    if next(model.parameters()).device.type != "cpu":  # as a DataLoader with pin_memory does it
        batch = batch.pin_memory().to(device(), non_blocking=True)
    return model(batch).square().mean()


class Side(NamedTuple):
    """One of the two that train: the oracle, or a rank."""

    optimizer: Any
    loss: Callable[[int], Tensor]
    no_sync: Callable[[], AbstractContextManager[Any]]
    clip: Callable[[float], Any]
    scaler: Any = None


def simple(side: Side, step: int) -> None:
    side.optimizer.zero_grad()
    side.loss(step).backward()
    side.optimizer.step()


def accumulating(side: Side, step: int) -> None:
    side.optimizer.zero_grad()
    with side.no_sync():
        side.loss(2 * step).backward()
    side.loss(2 * step + 1).backward()
    side.optimizer.step()


def clipping(side: Side, step: int) -> None:
    side.optimizer.zero_grad()
    side.loss(step).backward()
    side.clip(0.01)
    side.optimizer.step()


def scaling(side: Side, step: int) -> None:
    """(Powers of two: the oracle, which does not scale, has the same bits.)"""
    if side.scaler is None:
        clipping(side, step)
        return
    side.optimizer.zero_grad()
    side.scaler.scale(side.loss(step)).backward()
    side.scaler.unscale_(side.optimizer)
    side.clip(0.01)
    side.scaler.step(side.optimizer)
    side.scaler.update()


LOOPS = {one.__name__: one for one in (simple, accumulating, clipping, scaling)}
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "Muon": (torch.optim.Muon, {"lr": 1e-2}),  # needs whole tensors
}


def oracle(kind: str, loop: str, world: int) -> list[Tensor]:
    """One process, the CPU, the plain optimizer, the mean over all ranks' losses."""
    model = model_of()
    make, options = KINDS[kind]
    side = Side(
        make(model.parameters(), **options),
        lambda step: torch.stack([loss_of(model, step, rank) for rank in range(world)]).mean(),
        nullcontext,
        lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit),
    )
    for step in range(STEPS):
        LOOPS[loop](side, step)
    return [param.detach() for param in model.parameters()]


def side_of(model: nn.Module, rank: int, kind: str, mode: str) -> Side:
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-3)
    make, options = KINDS[kind]
    optimizer = ZeroRedundancyOptimizer(model.parameters(), make, bucket_cap_mb=1e-3, **MODES[mode], **options)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=3)
    return Side(optimizer, lambda step: loss_of(ddp, step, rank), ddp.no_sync, optimizer.clip_grad_norm_, scaler)


def weights_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().cpu() for param in model.parameters()]


def train(rank: int, kind: str) -> list[tuple[str, str, list[Tensor], list[str]]]:
    """Loop, case, weights, and where the host waited."""
    found = []
    for number, mode in enumerate(MODES):
        for place, loop in enumerate(LOOPS):
            for seed in SEEDS if loop == "simple" else (SEEDS[(number + place) % len(SEEDS)],):
                devices.seed(seed)
                model = model_of(rank).to(device())  # DDP gives all ranks the model of rank 0
                side = side_of(model, rank, kind, mode)
                for step in range(2):
                    LOOPS[loop](side, step)
                with host_reads() as reads:
                    for step in range(2, STEPS):
                        LOOPS[loop](side, step)
                lines = (
                    own_reads(reads) if loop == "scaling" else [str(read) for read in reads]
                )  # a scaler's are its own
                found.append((loop, f"{mode}, {loop}, seed {seed}", weights_of(model), lines))
    return found


@on_device
def _train(rank: int, world: int, kind: str) -> list[tuple[str, str, list[Tensor], list[str]]]:
    return train(rank, kind)


@on_accelerator_only
def _train_without_gloo(rank: int, world: int, kind: str) -> list[tuple[str, str, list[Tensor], list[str]]]:
    return train(rank, kind)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("function", [_train, _train_without_gloo])
@pytest.mark.parametrize("world", sizes(1, 2, 3))
def test_every_loop_has_the_weights_of_the_cpu_whatever_the_seed(world: int, function: Any, kind: str) -> None:
    expected = {loop: oracle(kind, loop, world) for loop in LOOPS}
    for found in run_ranks(function, world, kind):
        for loop, case, weights, lines in found:
            same(weights, expected[loop], SUMMED_OTHERWISE, case)
            assert lines == [], case


# --- a rank that fails -----------------------------------------------------------------------------------------------

PATIENCE = 4.0  # seconds: the time-out of the process group
SOON = 16.0  # and what a busy machine may take beside it


class Fragile(torch.optim.AdamW):
    """Raises at one of its calls, of which there is one per bucket that this rank owns a part of."""

    calls, fails_at = 0, -1

    def step(self, closure: Any = None) -> Any:
        if self.calls == self.fails_at:
            raise ArithmeticError("broken on purpose")
        type(self).calls += 1
        return super().step(closure)


@on_device
def _fail_in_step(rank: int, world: int, mode: str, place: int) -> tuple[list[str], float]:
    """What the calls end with in and after a step in which rank 1 fails, and how long all of them took."""
    model = nn.Sequential(*(nn.Linear(9, 9) for _ in range(5))).double().to(device())
    ddp = DistributedDataParallel(model)
    # Every rank owns a part of each of the five buckets.
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), Fragile, lr=1e-2, shard="element", bucket_cap_mb=800 / 2**20, **MODES[mode]
    )
    assert len(optimizer.layout.buckets) == 5

    def iterate(step: int) -> None:
        optimizer.zero_grad()
        loss_of(ddp, step, rank).backward()
        optimizer.step()

    for step in range(2):
        iterate(step)
    if rank == 1:
        Fragile.fails_at = Fragile.calls + place
    told, start = [], time.monotonic()
    for call in (lambda: iterate(2), optimizer.check_replicas, optimizer.consolidate_state_dict, optimizer.step):
        try:
            call()
            told.append("")
        except (ArithmeticError, RuntimeError) as error:
            told.append(f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - start
    with suppress(RuntimeError):  # what was enqueued and never met
        module().synchronize()
    return told, seconds


@simulation_only  # NCCL's watchdog ends the process of a rank whose collective nobody joins
@pytest.mark.parametrize("world", sizes(2, 3))
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_rank_that_fails_in_its_step_is_named_on_all_and_nothing_goes_on(mode: str, place: int, world: int) -> None:
    """The others have enqueued more than it. They hear of it when the ranks next compare, or at the time-out.

    (The simulated one computes at once, so it waits where something is unpacked. A GPU waits where the host looks.)
    """
    for rank, (told, seconds) in enumerate(run_ranks(_fail_in_step, world, mode, place, pg_timeout=PATIENCE)):
        assert seconds < PATIENCE + SOON, told
        if rank == 1:
            assert told[0] == "ArithmeticError: broken on purpose", told
        first = told[0] or told[1]
        for one in (first, *told[2:]):
            assert "broken on purpose" in one, told
            assert rank == 1 or "rank 1" in one, told
        for later in told[2:]:
            assert "Start the processes again, from a checkpoint" in later, told


# --- state -----------------------------------------------------------------------------------------------------------


@on_device
def _consolidate(rank: int, world: int, mode: str) -> tuple[Any, list[Tensor]]:
    """The state dict on rank 0 after some steps, and weights after going on from it in another optimizer."""
    model = model_of().to(device())
    side = side_of(model, rank, "AdamW", mode)
    for step in range(STEPS // 2):
        simple(side, step)
    side.optimizer.consolidate_state_dict(to=0)
    full = [side.optimizer.state_dict() if rank == 0 else None]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    dist.broadcast_object_list(full, src=0, device=device())
    again = model_of(7).to(device())
    again.load_state_dict(state)
    other = side_of(again, rank, "AdamW", mode)
    other.optimizer.load_state_dict(full[0])
    for step in range(STEPS // 2, STEPS):
        simple(other, step)
    return full[0] if rank == 0 else None, weights_of(again)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("world", sizes(1, 2, 3))
def test_a_consolidated_state_dict_is_that_of_the_plain_optimizer_and_training_goes_on(world: int, mode: str) -> None:
    expected = oracle("AdamW", "simple", world)
    for rank, (full, weights) in enumerate(run_ranks(_consolidate, world, mode)):
        same(weights, expected, SUMMED_OTHERWISE)
        if rank == 0:
            assert set(full["state"]) == set(range(5))
            assert all(full["state"][index]["exp_avg"].shape == (9, 9) for index in range(5))
