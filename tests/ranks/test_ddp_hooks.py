"""The two DDP hooks that step inside backward. Oracle: DDP with the same inner hook and the plain optimizer, float64.

Both sides reduce the same buckets with the same hook, so the gradients have the same bits, and the optimizers used here
are bit-equal on equal gradients (docs/design.md, "Exactness"): all is compared bit by bit, after every iteration.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from tests.harness import run_ranks
from tests.hook_twins import (
    BOTH,
    DECAY,
    HOOKS,
    OPTIMIZERS,
    SMALL_CAP,
    Chain,
    HookTwins,
    Side,
    Tangled,
    all_params,
    batch_of,
    delayed,
    two_groups,
)
from tests.oracle import assert_same, values_of
from tests.surroundings import choose


def halve_every_second(optimizer: Any) -> StepLR:
    return StepLR(optimizer, step_size=2, gamma=0.5)


# --- every iteration ----------------------------------------------------------------------------------------------


def every_combination(rank: int, world: int, name: str, hook: str) -> None:
    """Two groups with different options and a scheduler; our buckets many and small, or one that cuts parameters."""
    optimizer_class, options = OPTIMIZERS[name]
    for grad_view, static, shard_buckets in itertools.product(BOTH, BOTH, BOTH):
        twins = HookTwins(
            optimizer_class,
            hook=hook,
            shard_buckets=shard_buckets,
            ddp={"gradient_as_bucket_view": grad_view, "static_graph": static},
            zero={"bucket_cap_mb": SMALL_CAP if shard_buckets else 25},
            schedule=halve_every_second,
            name=f"{name} {hook} {grad_view=} {static=} {shard_buckets=}",
            **options,
        )
        twins.iterate(5, step=grad_view)
        # DDP began with one bucket and rebuilt: five, in another order than the parameters are registered in.
        assert twins.ours_buckets == ([1, 1, 5, 5, 5] if static else [1, 5, 5, 5, 5])
        twins.check(to=world - 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_iteration_is_that_of_ddp_and_the_plain_optimizer(world, hook, name):
    """Catches lost first updates, updates with half a gradient, stale learning rates and what a rebuild shuffles."""
    run_ranks(every_combination, world, name, hook, pg_timeout=20)


def alone(rank: int, world: int) -> None:
    for hook, static, find_unused in itertools.product(HOOKS, BOTH, BOTH):
        ddp = {"static_graph": static, "find_unused_parameters": find_unused}
        twins = HookTwins(AdamW, hook=hook, ddp=ddp, **DECAY)
        twins.iterate(4, skip=[4] if find_unused else [])
        twins.check()


def test_one_rank_alone():
    run_ranks(alone, 1)


def ddp_without_any_hook(rank: int, world: int) -> None:
    """The oracle of the other tests has the inner hook; DDP itself reduces without one, in slightly other arithmetic.

    It multiplies by 1/3 where the hook divides by 3: one rounding per gradient, 1e-16 relative. AdamW divides by the
    root of the second moment, so a step moves by at most about that times lr; 1e-11 is far above 6 of them and far
    below an update (0.05).
    """
    ours = HookTwins(AdamW, **DECAY).ours
    plain_ddp = DistributedDataParallel(Tangled(), bucket_cap_mb=SMALL_CAP)
    plain = Side(plain_ddp, AdamW(two_groups(plain_ddp.module), **DECAY))
    before = plain.weights()
    for iteration in range(6):
        for side in (plain, ours):
            side.optimizer.zero_grad()
            side.backward(batch_of(rank, iteration))
            side.optimizer.step()
        for mine, theirs, first in zip(ours.weights(), plain.weights(), before, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)
            assert not torch.allclose(mine, first, rtol=0, atol=1e-3)


def test_weights_are_those_of_ddp_without_any_hook():
    run_ranks(ddp_without_any_hook, 3)


def accumulate(rank: int, world: int, hook: str) -> None:
    """The first and the second micro-batch weigh as much as the last, whatever is done about old gradients."""
    for grad_view in BOTH:
        twins = HookTwins(AdamW, hook=hook, ddp={"gradient_as_bucket_view": grad_view}, **DECAY)
        twins.iterate(2, micro=2)
        twins.iterate(1)
        twins.iterate(2, micro=1, zero_grad=lambda optimizer: optimizer.zero_grad(set_to_none=False))
        twins.iterate(2, micro=1, zero_grad=None)
        twins.iterate(2, zero_grad=None)
        twins.check()
    twins = HookTwins(SGD, hook=hook, ddp={"static_graph": True}, **OPTIMIZERS["SGD"][1])
    twins.iterate(2)  # DDP wants its first iterations with a static graph to be reduced
    twins.iterate(3, micro=2)
    twins.check()


@pytest.mark.parametrize("hook", HOOKS)
def test_accumulation_under_no_sync_is_ddps(hook):
    run_ranks(accumulate, 3, hook)


def step_or_not(rank: int, world: int, hook: str) -> None:
    """Calling step, leaving it out, and both in turns: one update per backward."""
    twins = HookTwins(SGD, hook=hook, **OPTIMIZERS["SGD"][1])
    twins.iterate(2, step=False)
    twins.iterate(2, step=True)
    twins.zero.step()
    twins.zero.step()
    twins.check_weights()
    twins.iterate(2, step=False)
    twins.check()
    called = []

    def evaluate(side: Side) -> torch.Tensor:
        called.append(side)
        side.optimizer.zero_grad()
        return side.backward(batch_of(rank, 77))

    for _ in range(3):
        losses = [side.optimizer.step(lambda side=side: evaluate(side)) for side in (twins.theirs, twins.ours)]
        assert called == [twins.theirs, twins.ours]
        called.clear()
        assert_same(losses[1].detach(), losses[0].detach(), "what the closure returned")
        twins.check_weights()
    twins.check()


@pytest.mark.parametrize("hook", HOOKS)
def test_step_may_be_called_or_not_and_runs_a_closure(hook):
    run_ranks(step_or_not, 2, hook)


def options_by_hand(rank: int, world: int, hook: str) -> None:
    twins = HookTwins(SGD, hook=hook, **OPTIMIZERS["SGD"][1])
    twins.iterate(2)
    for side in (twins.theirs, twins.ours):
        side.optimizer.param_groups[0]["lr"] = 0.0  # the matrices stand still
        side.optimizer.param_groups[1]["momentum"] = 0.5
    before = [weight for weight in twins.ours.weights() if weight.dim() > 1]
    twins.iterate(2)
    assert_same([weight for weight in twins.ours.weights() if weight.dim() > 1], before, "lr=0")
    twins.check()


@pytest.mark.parametrize("hook", HOOKS)
def test_options_that_are_changed_between_iterations_count(hook):
    run_ranks(options_by_hand, 2, hook)


def state_is_sharded(rank: int, world: int) -> list[int]:
    twins = HookTwins(AdamW, groups=all_params, **DECAY)
    twins.iterate(2)
    assert twins.zero.memory().state < 2 * 8 * 1360 * 0.3
    return [state["exp_avg"].numel() for state in twins.zero.optim.state.values()]


def test_every_rank_holds_its_share_of_the_state_only():
    """1360 elements at 4 ranks: 340 on each."""
    owned = [sum(numels) for numels in run_ranks(state_is_sharded, 4)]
    assert sum(owned) == 1360
    assert max(owned) <= 1.05 * 340


# --- unused parameters --------------------------------------------------------------------------------------------


def unused(rank: int, world: int, hook: str, grad_view: bool) -> None:
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": grad_view}
    for shard, cap in (("element", 25), ("tensor", SMALL_CAP)):
        twins = HookTwins(AdamW, hook=hook, ddp=ddp, zero={"shard": shard, "bucket_cap_mb": cap}, **DECAY)
        before = values_of(twins.ours.ddp.module.layers[4].parameters())
        twins.iterate(2, skip=[4])
        assert_same(values_of(twins.ours.ddp.module.layers[4].parameters()), before, "left untouched")
        assert_same(len(twins.ours_buckets), 2, "iterations")
        assert twins.ours_buckets[-1] >= 5
        twins.iterate(1)
        twins.iterate(1, skip=[4, 0])
        twins.iterate(1, skip=[1] if rank == 1 else [])  # the others' gradient is everybody's
        twins.iterate(1, skip=[] if rank == world - 1 else [1])
        twins.iterate(1, skip=[rank % 5])
        twins.iterate(1)
        twins.check(to=1)


@pytest.mark.parametrize("grad_view", BOTH)
@pytest.mark.parametrize("hook", HOOKS)
def test_a_parameter_without_a_gradient_anywhere_is_left_alone_and_otherwise_stepped_everywhere(hook, grad_view):
    """Unused on all ranks: not even weight decay or momentum moves it. Unused on some: stepped on all."""
    run_ranks(unused, 3, hook, grad_view)


def unused_in_a_static_graph(rank: int, world: int, hook: str) -> None:
    for grad_view in BOTH:
        ddp = {"static_graph": True, "gradient_as_bucket_view": grad_view}
        twins = HookTwins(AdamW, hook=hook, ddp=ddp, **DECAY)
        before = values_of(twins.ours.ddp.module.layers[4].parameters())
        twins.iterate(5, skip=[4])
        assert_same(values_of(twins.ours.ddp.module.layers[4].parameters()), before, "left untouched")
        twins.check()


@pytest.mark.parametrize("hook", HOOKS)
def test_a_parameter_that_a_static_graph_never_uses_is_left_alone(hook):
    run_ranks(unused_in_a_static_graph, 3, hook)


def unused_but_with_a_gradient(rank: int, world: int, hook: str, set_to_none: bool | None) -> None:
    zero_grad = None if set_to_none is None else lambda optimizer: optimizer.zero_grad(set_to_none=set_to_none)
    for grad_view in BOTH:
        ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": grad_view}
        twins = HookTwins(AdamW, hook=hook, ddp=ddp, **DECAY)
        twins.iterate(2, zero_grad=zero_grad)
        twins.iterate(2, zero_grad=zero_grad, skip=[4])
        twins.iterate(2, zero_grad=zero_grad, skip=[4] if rank == 0 else [])
        twins.check()


@pytest.mark.parametrize("set_to_none", [True, False, None], ids=["none", "zeros", "kept"])
@pytest.mark.parametrize("hook", HOOKS)
def test_an_unused_parameter_that_holds_an_old_gradient_is_stepped_with_it_as_in_plain_torch(hook, set_to_none):
    """DDP leaves the ``.grad`` of what no rank used as it is: zeros or the last one. Plain AdamW then decays."""
    run_ranks(unused_but_with_a_gradient, 2, hook, set_to_none)


def used_in_a_micro_batch_only(rank: int, world: int, hook: str) -> None:
    twins = HookTwins(AdamW, hook=hook, ddp={"find_unused_parameters": True}, **DECAY)
    for iteration in range(4):
        for side in (twins.theirs, twins.ours):
            side.optimizer.zero_grad()
            with side.ddp.no_sync():
                side.backward(batch_of(rank, iteration, 1), skip=[] if rank == 1 else [4])
            side.backward(batch_of(rank, iteration), skip=[4] if iteration else [])
            side.optimizer.step()
        twins.check_weights()
    twins.check()


@pytest.mark.parametrize("hook", HOOKS)
def test_a_parameter_used_in_one_micro_batch_of_one_rank_is_stepped(hook):
    run_ranks(used_in_a_micro_batch_only, 3, hook)


# --- who owns what ------------------------------------------------------------------------------------------------


def fewer_parameters_than_ranks(rank: int, world: int, hook: str, transport: str) -> None:
    choose(transport)
    twins = HookTwins(
        AdamW,
        make=lambda: Chain([1, 2, 0]),
        groups=all_params,
        hook=hook,
        zero={"shard": "tensor", "bucket_cap_mb": SMALL_CAP},
        **DECAY,
    )
    assert len(twins.zero.layout.buckets) == 3
    assert bool(list(twins.zero.layout.pieces(rank))) == (rank < 3)
    twins.iterate(5)
    twins.check()


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_rank_that_owns_nothing_gathers_in_the_order_of_the_others(hook, transport):
    """Its order must not be that of the layout where the others follow DDP's: it would take one matrix for another."""
    run_ranks(fewer_parameters_than_ranks, 4, hook, transport, pg_timeout=10)


def everything_of_a_rank_is_frozen(rank: int, world: int, hook: str) -> None:
    twins = HookTwins(
        AdamW,
        make=lambda: Chain(random.Random(1).sample(range(24), 24)),
        groups=all_params,
        hook=hook,
        ddp={"find_unused_parameters": True},
        zero={"shard": "tensor", "bucket_cap_mb": SMALL_CAP},
        **DECAY,
    )
    twins.iterate(2)
    of_the_last = [piece.param for piece in twins.zero.layout.pieces(world - 1)]
    assert 0 < len(of_the_last) < 24 - 4
    for side in (twins.theirs, twins.ours):
        side.optimizer.zero_grad()
        for index in of_the_last:
            side.ddp.module.matrices[index].requires_grad_(False)
    twins.iterate(3)
    twins.check()


@pytest.mark.parametrize("hook", HOOKS)
def test_a_rank_whose_share_was_frozen_keeps_pace_with_the_others(hook):
    """It has nothing to update, but 18 buckets to receive, of which the others let four be under way: no hang."""
    run_ranks(everything_of_a_rank_is_frozen, 4, hook, timeout=40, pg_timeout=10)


def every_way_to_cut(rank: int, world: int, hook: str, transport: str) -> None:
    choose(transport)
    for shard, views, cap in itertools.product(("element", "tensor"), BOTH, (SMALL_CAP, 25)):
        twins = HookTwins(
            AdamW,
            hook=hook,
            ddp={"gradient_as_bucket_view": views},
            zero={"shard": shard, "parameters_as_bucket_view": views, "bucket_cap_mb": cap},
            **DECAY,
        )
        assert (twins.zero.engine.sharded.shares_memory) == (transport == "shared memory")
        twins.iterate(4)
        twins.check()


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
@pytest.mark.parametrize("hook", HOOKS)
def test_cut_or_whole_in_views_or_not_through_shared_memory_or_sockets(hook, transport):
    run_ranks(every_way_to_cut, 3, hook, transport)


# --- no hang ------------------------------------------------------------------------------------------------------


class Hesitant(Tangled):
    """Backward pauses between layers."""

    delays: random.Random | None = None

    def forward(self, batch: torch.Tensor, skip: Any = ()) -> torch.Tensor:
        for position in self.RUNS:
            if position not in skip:
                batch = torch.tanh(self.layers[position](batch)) + batch
                if self.delays is not None:
                    batch.register_hook(lambda _: time.sleep(self.delays.choice([0, 0, 0, 0.002])))
        return batch


def delayed_iterations(rank: int, world: int, hook: str, count: int, find_unused: bool, transport: str) -> None:
    choose(transport)
    delays = random.Random(rank)
    inner = allreduce_hook
    twins = HookTwins(
        AdamW,
        make=Hesitant,
        hook=hook,
        inner=lambda state, bucket: inner(state, bucket),
        ddp={"find_unused_parameters": find_unused},
        zero={"bucket_cap_mb": SMALL_CAP},  # more of ours than may be under way at once
        lr=0.01,
    )
    assert len(twins.zero.layout.buckets) > 4
    ours, late = twins.ours, delayed(delays)
    for iteration in range(count):
        skip = [iteration % 7] if find_unused else []
        inner = allreduce_hook
        twins.theirs.optimizer.zero_grad()
        twins.theirs.backward(batch_of(rank, iteration), skip=skip)
        twins.theirs.optimizer.step()
        inner = late
        ours.ddp.module.delays = delays
        ours.optimizer.zero_grad()
        ours.backward(batch_of(rank, iteration), skip=skip)
        if iteration % 50 == 0 or iteration == count - 1:
            assert_same(ours.weights(), twins.theirs.weights(), f"iteration {iteration}")
    twins.check()


@pytest.mark.extended
@pytest.mark.long
@pytest.mark.parametrize("count", [80, pytest.param(300, marks=pytest.mark.again)])
@pytest.mark.parametrize("hook", ["interleaved", pytest.param("at the end", marks=pytest.mark.again)])
def test_iterations_with_random_delays_on_every_rank_neither_hang_nor_differ(hook, count):
    """Reductions end in another order on every rank, and ranks are up to a whole backward apart."""
    run_ranks(delayed_iterations, 4, hook, count, False, "shared memory", timeout=100, pg_timeout=20)


@pytest.mark.parametrize(("find_unused", "transport"), [(False, "sockets"), (True, "shared memory")])
def test_delays_do_not_matter_through_sockets_or_when_unused_parameters_are_looked_for(find_unused, transport):
    run_ranks(delayed_iterations, 4, "interleaved", 25, find_unused, transport, timeout=60, pg_timeout=20)
