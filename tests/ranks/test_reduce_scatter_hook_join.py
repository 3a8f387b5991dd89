"""Uneven inputs under DDP with sharded gradients. Oracle: DDP in its own Join with the plain optimizer, float64.

The tolerance is that of ``tests/sharded_ddp_twins.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from shardstep import ZeroRedundancyOptimizer, shard_ddp_gradients
from tests.harness import run_ranks
from tests.hook_twins import BOTH, HOOKS, SMALL_CAP, WIDTH, Side, Tangled, all_params, batch_of
from tests.oracle import error_of
from tests.ranks.test_reduce_scatter_hook_models import Normed
from tests.sharded_ddp_twins import CLOSE, ShardedTwins
from tests.twins import assert_same as assert_close

UNEVEN = {1: [3], 2: [2, 5], 3: [4, 0, 6], 4: [5, 8, 6, 7]}
# With parameters that no rank uses every rank has a batch: on one that has none, torch 2.13 says of unused parameters
# what happens to be in its memory, and the oracle steps them.
NOT_EMPTY = {**UNEVEN, 3: [4, 1, 6]}
Loop = Callable[[Side, torch.Tensor, bool], None]  # one iteration of a side with a batch; of ours?


def fit(twins: ShardedTwins, loop: Loop, gamma: float = 1.0, numbers: Any = UNEVEN, **join: Any) -> None:
    """``gamma``: by which a scheduler changes the learning rate, on ranks with inputs. ``numbers``: of batches."""
    counts = numbers[torch.distributed.get_world_size()]
    for ours, side in enumerate((twins.theirs, twins.ours)):
        scheduler = ExponentialLR(side.optimizer, gamma=gamma)
        with Join([side.ddp, side.optimizer] if ours else [side.ddp], **join):
            for iteration in range(counts[twins.rank]):
                loop(side, batch_of(twins.rank, iteration), bool(ours))
                scheduler.step()
    twins.check_weights()
    buffers = twins.each(lambda side: [buffer.clone() for buffer in side.ddp.buffers()])
    assert_close(buffers[1], buffers[0], "running statistics", CLOSE)
    twins.ours.optimizer.check_replicas()


def plainly(side: Side, batch: torch.Tensor, ours: bool) -> None:
    side.optimizer.zero_grad()
    side.backward(batch)
    side.optimizer.step()


def clipped(side: Side, batch: torch.Tensor, ours: bool) -> None:
    """(The norm of one gradient is refused in a Join context: ranks without inputs are not asked.)"""
    side.optimizer.zero_grad()
    side.backward(batch)
    if ours:
        side.optimizer.clip_grad_norm_(0.1)
    else:
        nn.utils.clip_grad_norm_(side.ddp.parameters(), 0.1)
    side.optimizer.step()


class Partly(Normed):
    """With a layer that no rank uses, and one that only the rank with the most batches does. Weight decay would show.

    (If the only rank that uses a layer runs out of inputs, torch 2.13 goes on reporting that it is used.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3, dtype=torch.float64)
        self.rarely = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        output = super().forward(batch)
        counts = NOT_EMPTY[torch.distributed.get_world_size()]
        uses = counts[torch.distributed.get_rank()] == max(counts)
        return output + self.rarely(batch) if uses else output


def uneven(rank: int, world: int, by_initial: bool, as_view: bool, unused: bool, hook: str) -> None:
    ddp = {"gradient_as_bucket_view": as_view, "find_unused_parameters": unused}
    for loop in (plainly,) if hook else (plainly, clipped):
        make = Partly if unused else Normed
        twins = ShardedTwins.make(AdamW, make=make, groups=all_params, ddp=ddp, hook=hook, lr=0.05, weight_decay=0.3)
        twins.name = f"{loop.__name__} {by_initial=} {ddp} {hook}"
        # (A stepping hook steps with the options of its own rank, as around every other hook.)
        gamma, numbers = 1.0 if hook else 0.8, NOT_EMPTY if unused else UNEVEN
        fit(twins, loop, gamma, numbers, divide_by_initial_world_size=by_initial)


@pytest.mark.parametrize("hook", ["", *HOOKS])
@pytest.mark.parametrize("unused", BOTH)
@pytest.mark.parametrize("as_view", BOTH)
@pytest.mark.parametrize("by_initial", BOTH)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_uneven_inputs_end_in_the_weights_and_buffers_of_ddps_join(world, by_initial, as_view, unused, hook):
    """Ranks without a batch from the start, ranks that run out; a scheduler, which only ranks with inputs step."""
    run_ranks(uneven, world, by_initial, as_view, unused, hook)


def two_of_them(rank: int, world: int) -> None:
    """A rank without inputs takes part in the reductions of both optimizers, in the order of the others."""
    models = []
    for ours in BOTH:
        ddp = DistributedDataParallel(Tangled(), bucket_cap_mb=SMALL_CAP)
        parts = [list(ddp.parameters())[:5], list(ddp.parameters())[5:8]]  # the rest is all-reduced
        if ours:
            optimizers: list[Any] = [ZeroRedundancyOptimizer(part, AdamW, bucket_cap_mb=0.001) for part in parts]
            shard_ddp_gradients(ddp, *optimizers)
        else:
            optimizers = [AdamW(part) for part in parts]
        with Join([ddp, *optimizers] if ours else [ddp], divide_by_initial_world_size=False):
            for iteration in range(UNEVEN[world][rank]):
                ddp.zero_grad()
                for optimizer in optimizers:
                    optimizer.zero_grad()
                ddp(batch_of(rank, iteration)).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
        models.append([param.detach() for param in ddp.parameters()])
    assert_close(models[1], models[0], "two optimizers", CLOSE)


@pytest.mark.parametrize("world", [2, 3])
def test_two_optimizers_and_parameters_of_none_in_one_join(world):
    run_ranks(two_of_them, world)


def scaled(side: Side, batch: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
    side.optimizer.zero_grad()
    scaler.scale(side.ddp(batch).square().mean()).backward()
    scaler.unscale_(side.optimizer)
    scaler.step(side.optimizer)
    scaler.update()


def scaler_in_join(rank: int, world: int) -> None:
    twins = ShardedTwins.make(AdamW, groups=all_params, lr=0.05)
    scalers = {id(side): torch.amp.GradScaler("cpu", init_scale=4.0) for side in (twins.theirs, twins.ours)}
    fit(twins, lambda side, batch, ours: scaled(side, batch, scalers[id(side)]))


def test_grad_scaler_in_a_join_context():
    run_ranks(scaler_in_join, 3)


def after_and_again(rank: int, world: int) -> None:
    """After a Join context all ranks train on, and in another one.

    (Without state: in the oracle a rank that had no inputs has missed steps of its own plain optimizer.)
    """
    twins = ShardedTwins.make(SGD, groups=all_params, lr=0.05)
    for _ in range(2):
        fit(twins, plainly)
        twins.train(2, clip=0.3)


def test_training_goes_on_after_a_join_context_and_in_another_one():
    run_ranks(after_and_again, 3)


def without_the_optimizer(rank: int, world: int) -> str:
    side = ShardedTwins.make(AdamW, groups=all_params, lr=0.05).ours

    def train() -> None:
        with Join([side.ddp]):
            for iteration in range(1 + rank):
                plainly(side, batch_of(rank, iteration), True)

    return str(error_of(train, "DDP alone in a Join context"))


def test_an_optimizer_that_is_not_in_the_join_context_is_missed():
    told = run_ranks(without_the_optimizer, 2, pg_timeout=3, fresh=True)
    assert "Use Join([ddp, optimizer])" in told[0]


def accumulating(rank: int, world: int, sharded: bool, no_sync: bool) -> str:
    """Two backwards for a step. Rank 0 has one step's batches, the others two."""
    ddp = DistributedDataParallel(Tangled(), bucket_cap_mb=SMALL_CAP)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1)
    if sharded:
        shard_ddp_gradients(ddp, optimizer)

    def train() -> None:
        with Join([ddp, optimizer]):
            for iteration in range(4 if rank else 2):
                with ddp.no_sync() if no_sync and iteration % 2 == 0 else nullcontext():
                    ddp(batch_of(rank, iteration)).square().mean().backward()
                if iteration % 2:
                    optimizer.step()
                    optimizer.zero_grad()

    return str(error_of(train, "accumulation in a Join context"))


@pytest.mark.parametrize("no_sync", BOTH)
def test_accumulation_in_a_join_context_is_refused_by_name(no_sync):
    told = run_ranks(accumulating, 3, True, no_sync, pg_timeout=4, fresh=True)
    got = (
        ["this one is in no_sync"] * 3
        if no_sync
        else ["no rank came to step here"] + ["no step since the last one"] * 2
    )
    for text, expected in zip(told, got, strict=True):
        assert "Do not accumulate gradients" in text, told
        assert expected in text, told


@pytest.mark.again  # the way to the error is the same
def test_without_sharded_gradients_the_rank_without_inputs_names_accumulation():
    """The others may be in DDP's forward, of which the optimizer knows nothing."""
    told = run_ranks(accumulating, 2, False, False, pg_timeout=3, fresh=True)
    assert "Do not accumulate gradients" in told[0], told


def skipping(rank: int, world: int) -> None:
    """As long as every rank has inputs, a step may be skipped (as GradScaler does), and gradients added up."""
    twins = ShardedTwins.make(SGD, groups=all_params, lr=0.1)
    for ours, side in enumerate((twins.theirs, twins.ours)):
        with Join([side.ddp, side.optimizer] if ours else [side.ddp]):
            for iteration in range(4):
                side.backward(batch_of(rank, iteration))
                if iteration != 1:
                    side.optimizer.step()
                    side.optimizer.zero_grad()
    twins.check_weights()
    twins.train(1)


def test_a_step_may_be_skipped_in_a_join_context_while_all_ranks_have_inputs():
    run_ranks(skipping, 3)
