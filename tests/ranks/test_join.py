"""Uneven inputs, and buffers: what the programs of tests/differential do not do. Oracle: DDP in its own Join.

SGD without momentum: the plain optimizers of ranks that ran out stand still, and have no state to differ in. (The state
of ours is compared by ``Uneven``.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from shardstep import ZeroRedundancyOptimizer
from tests.beside import SMALL, Beside, Side, assert_close, batch, mlp
from tests.harness import run_ranks

LIMITS = {"timeout": 60, "pg_timeout": 20}


def train(side: Side, numbers: range) -> None:
    for number in numbers:
        side.optimizer.zero_grad()
        side.backward(number)
        side.optimizer.step()


def zero_by_model(side: Side, numbers: range) -> None:
    for number in numbers:
        side.model.zero_grad()
        side.backward(number)
        side.optimizer.step()


def train_by_schedule(side: Side, numbers: range) -> None:
    """The scheduler of a rank that ran out stands still; its share is stepped with the others' learning rate."""
    scheduler = LambdaLR(side.optimizer, lambda epoch: 0.5**epoch)
    for number in numbers:
        train(side, range(number, number + 1))
        scheduler.step()


def train_by_closure(side: Side, numbers: range) -> None:
    for number in numbers:

        def closure(number: int = number) -> Tensor:
            side.optimizer.zero_grad()
            loss = side.loss(number)
            loss.backward()
            return loss

        side.optimizer.step(closure)


def leave_batches_out(side: Side, numbers: range) -> None:
    """Reduced, then forgotten without a step, by all: ranks that ran out must forget their share of them."""
    for number in numbers:
        side.optimizer.zero_grad()
        side.backward(number)
        if number % 3 != 1:
            side.optimizer.step()


def unscale_and_clip(side: Side, numbers: range) -> None:
    """By every norm, with a step that the scaler skips and a clip that raises, on rank 1, which is the last."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in numbers:
        side.optimizer.zero_grad()
        scaler.scale(side.loss(number) * (math.nan if number in (1, 4) and dist.get_rank() == 1 else 1)).backward()
        scaler.unscale_(side.optimizer)
        arguments = 0.2, (1, 2, 3, math.inf)[number % 4]
        try:
            if isinstance(side.optimizer, ZeroRedundancyOptimizer):
                side.optimizer.clip_grad_norm_(*arguments, error_if_nonfinite=number >= 3)
            else:
                nn.utils.clip_grad_norm_(side.params, *arguments, error_if_nonfinite=number >= 3)
        except RuntimeError:
            assert number == 4
        else:
            scaler.step(side.optimizer)
        scaler.update()


def compare(rank: int, world: int, way: str, loop: Callable, counts: list[int], join: dict[str, Any]) -> None:
    both = Beside(way=way, lr=0.3)
    for side in both:
        with Join(side.joinables, **join):
            loop(side, range(counts[rank]))
    both.check("in the context")
    both.ours.optimizer.check_replicas()
    both.ours.optimizer.broadcast_buffers(nn.BatchNorm1d(3))  # what needs all ranks is possible again
    for side in both:
        side.optimizer.param_groups[0]["lr"] = 0.3
        train(side, range(20, 22))
    both.check("after the context")


UNEVEN = [2, 6, 3]
NOT_HEARD = pytest.mark.xfail(
    strict=True, reason="a rank that ran out does not hear of model.zero_grad(): wrong weights"
)
CASES = [
    ("default", train, UNEVEN, {"divide_by_initial_world_size": False}),
    ("default", train, [0, 0, 3], {}),
    ("default", train, [2, 2, 2], {"enable": False}),
    ("default", train_by_schedule, UNEVEN, {}),
    ("default", train_by_closure, UNEVEN, {}),
    ("shard_gradients", train, UNEVEN, {"divide_by_initial_world_size": False}),
    ("shard_gradients", train, [0, 0, 3], {}),
    ("shard_gradients", train, [0, 0, 0], {}),
    ("shard_gradients", train, [2, 2, 2], {"enable": False}),
    ("shard_gradients", train_by_schedule, UNEVEN, {}),
    ("shard_gradients", train_by_closure, UNEVEN, {}),
    ("shard_gradients", leave_batches_out, UNEVEN, {}),
    ("shard_gradients", unscale_and_clip, UNEVEN, {}),
    ("shard_ddp_gradients", train, UNEVEN, {"divide_by_initial_world_size": False}),
    ("shard_ddp_gradients", train_by_schedule, UNEVEN, {}),
    ("default", zero_by_model, UNEVEN, {}),
    pytest.param("shard_gradients", zero_by_model, UNEVEN, {}, marks=NOT_HEARD),
    pytest.param("shard_ddp_gradients", zero_by_model, UNEVEN, {}, marks=NOT_HEARD),
]


@pytest.mark.parametrize(("way", "loop", "counts", "join"), CASES)
def test_weights_in_and_after_the_context_are_those_of_ddp(way: str, loop: Any, counts: Any, join: Any) -> None:
    run_ranks(compare, 3, way, loop, counts, join, **LIMITS)


def end_early(rank: int, world: int) -> None:
    """Ranks with inputs are told in the middle of a backward. What was begun is given up."""
    both = Beside()
    for side in both:
        with pytest.raises(RuntimeError, match="exhausted"), Join(side.joinables, throw_on_early_termination=True):
            train(side, range(UNEVEN[rank]))
    both.check("the steps before")
    for side in both:
        train(side, range(20, 22))
    both.check("after the error")


def test_after_early_termination_sharded_training_goes_on() -> None:
    run_ranks(end_early, 3, **LIMITS)


# --- micro-batches and unused parameters: DDP is no oracle --------------------------------------------------------
# Of unused parameters a DDP rank that ran out sends its last map again; sums of earlier micro-batches it reduces again.


class Sometimes(nn.Module):
    """Weight decay shows whether a parameter was stepped that nobody had used."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.extra = mlp(), nn.Parameter(torch.ones(23, dtype=torch.float64))

    def forward(self, x: Tensor, uses_extra: bool) -> Tensor:
        loss = self.net(x).square().mean()
        return loss + self.extra.square().mean() * x.mean() if uses_extra else loss


def accumulate(rank: int, world: int, syncs: bool, keeps: bool, divides: bool) -> None:
    """Oracle: one process with everybody's batches. What a rank did not reduce before it ran out counts no more."""
    options = {"lr": 0.05, "weight_decay": 0.3}
    for period, counts in ((1, [4, 0, 7]), (2, [4, 3, 8]), (3, [5, 9, 1]), (3, [0, 7, 6])):
        model, other = Sometimes(), Sometimes()
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), AdamW, shard_gradients=True, bucket_cap_mb=SMALL, **options
        )
        plain = AdamW(other.parameters(), **options)
        with Join([optimizer], divide_by_initial_world_size=divides):
            for number in range(counts[rank]):
                if number % period == 0:
                    optimizer.zero_grad(set_to_none=not keeps)
                ends = number % period == period - 1
                with nullcontext() if syncs or ends else optimizer.no_sync():
                    model(batch(number), number % 3 == rank).backward()
                if ends:
                    optimizer.step()
        for number in range(max(counts)):
            start, ends = number - number % period, number % period == period - 1
            if number == start:
                plain.zero_grad(set_to_none=not keeps)
            active = [one for one in range(world) if number < counts[one]]
            for one in active:
                for micro in [number] * syncs or range(start, number + 1) if syncs or ends else ():
                    loss = other(batch(micro, rank=one), micro % 3 == one)
                    (loss / (world if divides else len(active))).backward()
            if ends:
                plain.step()
        assert_close(list(model.parameters()), list(other.parameters()), f"period {period}, {counts}")


@pytest.mark.parametrize(
    ("syncs", "keeps", "divides"), [(True, False, True), (True, True, False), (False, False, True)]
)
def test_micro_batches_and_unused_parameters_when_ranks_run_out(syncs: bool, keeps: bool, divides: bool) -> None:
    run_ranks(accumulate, 3, syncs, keeps, divides, **LIMITS)


def send_buffers(rank: int, world: int) -> None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return

    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()

    both = Beside(make, group=group)
    for number in range(4):
        both.ours.optimizer.broadcast_buffers(both.ours.model)  # as DDP does before each forward
        for side in both:
            train(side, range(number, number + 1))
        assert_close(list(both.ours.model.buffers()), list(both.theirs.model.buffers()), f"step {number}")
    both.check()


def test_broadcast_buffers_before_each_forward_equals_ddp() -> None:
    """In a subgroup: rank 0 of the group is rank 1 of all."""
    run_ranks(send_buffers, 3, **LIMITS)
