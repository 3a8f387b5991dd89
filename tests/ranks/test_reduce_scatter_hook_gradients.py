"""What ``param.grad`` is under DDP with sharded gradients, and what can be done with it.

Oracle: what DDP leaves in ``param.grad``, float64, with the tolerance of ``tests/sharded_ddp_twins.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardstep import ShardedGradient, ZeroRedundancyOptimizer, shard_ddp_gradients
from shardstep.comm.checked_gather import CheckedGather
from shardstep.grads import scheduler
from tests.harness import run_ranks
from tests.hook_twins import BOTH, Tangled, all_params, batch_of
from tests.oracle import error_of
from tests.sharded_ddp_twins import CLOSE, ShardedTwins, sharded
from tests.twins import assert_same as assert_close


def made(as_view: bool, **zero: Any) -> ShardedTwins:
    ddp = {"gradient_as_bucket_view": as_view}
    return ShardedTwins.make(torch.optim.SGD, groups=all_params, ddp=ddp, zero=zero, lr=0.1)


def twice(twins: ShardedTwins) -> None:
    """DDP copies param.grad into its bucket: what came in since, not the sum that is kept."""
    twins.backward(0)
    twins.backward(1)


def twice_after_no_sync(twins: ShardedTwins) -> None:
    """Whole local gradients are on the parameters when the first reduction begins."""
    twins.backward(0, sync=False)
    twins.backward(1)
    twins.backward(2)


def no_sync_after_a_reduction(twins: ShardedTwins) -> None:
    twins.backward(0)
    twins.backward(1, sync=False)
    twins.backward(2, sync=False)
    twins.backward(3)


def forward_before_zero_grad(twins: ShardedTwins) -> None:
    """DDP rebuilds its buckets in the second forward, and with gradient_as_bucket_view moves param.grad there."""
    twins.backward(0)
    losses = twins.each(lambda side: side.ddp(twins.batch(1)).square().mean())
    assert all(isinstance(param.grad, ShardedGradient) for param in twins.ours.ddp.parameters())
    twins.zero_grad()
    for loss in losses:
        loss.backward()


def forward_that_adds(twins: ShardedTwins) -> None:
    twins.backward(0)
    for loss in twins.each(lambda side: side.ddp(twins.batch(1)).square().mean()):
        loss.backward()


def forward_between_backward_and_step(twins: ShardedTwins) -> None:
    """A validation, with gradients on the parameters, is when DDP rebuilds its buckets."""
    twins.backward(0)
    twins.each(lambda side: side.ddp(twins.batch(1)))


def module_zero_grad(twins: ShardedTwins) -> None:
    twins.backward(0)
    twins.each(lambda side: side.ddp.zero_grad())
    twins.backward(1)


def module_zeros(twins: ShardedTwins) -> None:
    twins.backward(0)
    twins.each(lambda side: side.ddp.zero_grad(set_to_none=False))
    twins.backward(1)


def optimizer_zeros(twins: ShardedTwins) -> None:
    twins.backward(0)
    twins.each(lambda side: side.optimizer.zero_grad(set_to_none=False))
    twins.backward(1)


def zeros_after_no_sync(twins: ShardedTwins) -> None:
    """What autograd has added to a sharded gradient is set to zero with it."""
    twins.backward(0)
    twins.backward(1, sync=False)
    twins.each(lambda side: side.ddp.zero_grad(set_to_none=False))
    twins.backward(2)


def dropped_after_no_sync(twins: ShardedTwins) -> None:
    twins.backward(0)
    twins.backward(1, sync=False)
    twins.each(lambda side: side.ddp.zero_grad())
    twins.backward(2)
    twins.backward(3)


def one_is_none(twins: ShardedTwins) -> None:
    """A gradient that somebody took off its parameter is forgotten; the others are added up."""
    twins.backward(0)
    for side in (twins.theirs, twins.ours):
        side.ddp.module.layers[1].weight.grad = None
    twins.backward(1)


def scaled(twins: ShardedTwins) -> None:
    twins.backward(0)
    for side in (twins.theirs, twins.ours):
        for param in side.ddp.parameters():
            param.grad.mul_(0.5)
    twins.backward(1)


def scaled_after_no_sync(twins: ShardedTwins) -> None:
    """What is not reduced yet is scaled, too."""
    twins.backward(0)
    twins.backward(1, sync=False)
    for side in (twins.theirs, twins.ours):
        for param in side.ddp.parameters():
            param.grad.mul_(0.5)
    twins.backward(2)


ROUTES = [
    twice,
    twice_after_no_sync,
    no_sync_after_a_reduction,
    forward_before_zero_grad,
    forward_that_adds,
    forward_between_backward_and_step,
    module_zero_grad,
    module_zeros,
    optimizer_zeros,
    zeros_after_no_sync,
    dropped_after_no_sync,
    one_is_none,
    scaled,
    scaled_after_no_sync,
]


def routes(rank: int, world: int, as_view: bool, later: bool) -> None:
    """``later``: after an iteration in which DDP has rebuilt its buckets."""
    for route in ROUTES:
        twins = made(as_view)
        twins.name = f"{route.__name__}, gradient_as_bucket_view={as_view}, later={later}"
        for _ in range(2 if later else 0):
            twins.zero_grad()
            twins.backward()
            twins.step()
        twins.zero_grad()
        route(twins)
        twins.check_gradients()
        twins.step()
        twins.check_weights()
        twins.zero_grad()
        twins.backward()
        twins.step()
        twins.check_weights()


@pytest.mark.parametrize("later", BOTH)
@pytest.mark.parametrize("as_view", BOTH)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_are_ddps_whatever_was_done_before_the_reduction(world, as_view, later):
    run_ranks(routes, world, as_view, later)


LOUD: dict[str, Callable[[torch.Tensor], Any]] = {
    "adding": lambda gradient: gradient + 1,
    "aten.sum": lambda gradient: gradient.sum(),
    "aten.copy_": lambda gradient: torch.zeros_like(gradient, device="cpu").copy_(gradient),
    "aten.clone": lambda gradient: gradient.clone(),
    "tolist": lambda gradient: gradient.tolist(),
    "aten._local_scalar_dense": lambda gradient: float(gradient[0, 0]),
}


def raw(rank: int, world: int) -> list[str]:
    side = sharded(Tangled(), torch.optim.SGD, lr=0.1)
    side.backward(batch_of(rank, 0))
    gradient = side.ddp.module.layers[0].weight.grad
    target = torch.zeros(gradient.shape, dtype=gradient.dtype)
    found = [error_of(lambda: target.copy_(gradient), "copying")]
    found += [error_of(lambda read=read: read(gradient), name) for name, read in LOUD.items()]
    side.optimizer.step()
    assert all("full_grad" in str(error) for error in found), found
    return [type(error).__name__ for error in found]


def test_reading_a_raw_gradient_raises_and_names_full_grad():
    for kinds in run_ranks(raw, 2):
        assert set(kinds) == {"RuntimeError"}


class Counted:
    """How often a function was called, of which the results are its own."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name, self._function, self.calls = owner, name, getattr(owner, name), 0

    def __exit__(self, *error: object) -> None:
        setattr(self._owner, self._name, self._function)

    def __enter__(self) -> Counted:
        def counted(*args: Any) -> Any:
            self.calls += 1
            return self._function(*args)

        setattr(self._owner, self._name, counted)
        return self


def one_collective(rank: int, world: int) -> None:
    twins = made(as_view=False, bucket_cap_mb=0.002)
    twins.backward()
    with Counted(CheckedGather, "gather_rows") as counted:
        twins.clip(0.3)
        assert counted.calls == 1, "ten parameters, one exchange of norms"
        twins.clip(0.2)  # scaled since: they have other norms
        assert counted.calls == 2
        norms = twins.each(lambda side: [torch.linalg.vector_norm(param.grad, 1) for param in side.ddp.parameters()])
        assert_close(norms[1], norms[0], "norms of order 1", CLOSE)
        assert counted.calls == 3, "another order"
        twins.each(lambda side: [param.grad.norm(1) for param in side.ddp.parameters()])
        assert counted.calls == 3, "the same once more"
        twins.backward(1)
        twins.clip(0.3)
        assert counted.calls == 4, "reduced anew"
        twins.zero_grad()
        twins.backward(2)
        twins.clip(0.3, norm_type=float("inf"))
        assert counted.calls == 5


def test_torchs_clipping_costs_one_collective_until_the_gradients_change():
    run_ranks(one_collective, 3)


def norm_after_no_sync(rank: int, world: int, later: bool) -> None:
    """The same batch on every rank: then what DDP adds up in no_sync, on each rank alone, is its mean as well."""
    twins = made(as_view=later)
    twins.rank = 0
    if later:
        twins.train(2)
    twins.zero_grad()
    twins.backward(0)
    for sync in (True, False, False, True):
        gradients = twins.each(lambda side: [param.grad for param in side.ddp.parameters()])
        norms = [nn.utils.get_total_norm(one) for one in gradients]
        assert_close(norms[1], norms[0], f"norm, {sync=}", CLOSE)
        twins.backward(1, sync=sync)
    twins.check_gradients()
    twins.step()
    twins.check_weights()


@pytest.mark.parametrize("later", BOTH)
def test_a_norm_counts_what_came_in_no_sync_since_the_last_one(later):
    run_ranks(norm_after_no_sync, 3, later)


def strange_orders(rank: int, world: int) -> None:
    twins = made(as_view=False)
    twins.backward()
    params = list(twins.ours.ddp.parameters())
    for order in (0, -1, float("-inf"), float("nan")):
        for ask in (lambda: params[0].grad.norm(order), lambda: nn.utils.clip_grad_norm_(params, 1.0, order)):  # noqa: B023
            error = error_of(ask, f"order {order}")
            assert isinstance(error, ValueError)
            assert "sharded gradient's norm expects a number above 0, or inf, but got" in str(error)
    twins.step()
    twins.check_weights()


def test_norms_of_order_0_and_below_are_refused():
    """Each piece would count by itself: the smallest of all is not what the pieces' norms tell."""
    run_ranks(strange_orders, 2)


def two_optimizers(module: nn.Module, sharded: bool) -> tuple[DistributedDataParallel, list[Any]]:
    """The first layers to one optimizer, the next to another; the last one has a plain gradient."""
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.003)
    parts = [[*module.layers[0].parameters(), *module.layers[1].parameters()], list(module.layers[2].parameters())]
    if not sharded:
        return ddp, [torch.optim.SGD(part, lr=0.1) for part in parts]
    optimizers = [ZeroRedundancyOptimizer(part, torch.optim.SGD, lr=0.1) for part in parts]
    shard_ddp_gradients(ddp, *optimizers)
    return ddp, optimizers


def mixed_lists(rank: int, world: int) -> None:
    theirs, ours = (two_optimizers(Tangled(), sharded) for sharded in (False, True))
    for step in range(3):
        for foreach in (None, False, True):
            norms = []
            for ddp, optimizers in (theirs, ours):
                ddp.zero_grad()
                ddp(batch_of(rank, step)).square().mean().backward()
                with Counted(CheckedGather, "gather_rows") as counted:
                    norms.append(nn.utils.clip_grad_norm_(ddp.parameters(), 0.3, foreach=foreach))
                for optimizer in optimizers:
                    optimizer.step()
            assert counted.calls == 2, "one exchange for each of two optimizers"
            assert_close(norms[1], norms[0], f"norm, foreach={foreach}", CLOSE)
            weights = [[param.detach() for param in ddp.parameters()] for ddp, _ in (theirs, ours)]
            assert_close(weights[1], weights[0], f"weights, foreach={foreach}", CLOSE)
    assert {type(param.grad) for param in ours[0].parameters()} == {torch.Tensor, ShardedGradient}


def test_lists_that_mix_plain_and_sharded_gradients_are_clipped_as_one():
    run_ranks(mixed_lists, 3)


def scaler(rank: int, world: int) -> None:
    """Rank 1 has an inf in the third iteration. The scale doubles in all others."""
    twins = made(as_view=True)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) for _ in range(2)]
    for step in range(5):
        scales = []
        for side, grad_scaler in zip((twins.theirs, twins.ours), scalers, strict=True):
            side.optimizer.zero_grad()
            loss = side.ddp(batch_of(rank, step)).square().mean()
            if step == 2 and rank == 1:
                loss = loss * float("inf")
            grad_scaler.scale(loss).backward()
            grad_scaler.unscale_(side.optimizer)
            nn.utils.clip_grad_norm_(side.ddp.parameters(), 0.5)
            grad_scaler.step(side.optimizer)
            grad_scaler.update()
            scales.append(grad_scaler.get_scale())
        assert scales[0] == scales[1]
        twins.check_weights()


def test_the_plain_grad_scaler_skips_a_step_on_all_ranks_if_one_has_an_inf():
    run_ranks(scaler, 3)


def mixed_unscaling(rank: int, world: int) -> None:
    """As a framework does that unscales a list of gradients: plain ones, and sharded ones of two optimizers."""
    ddp, optimizers = two_optimizers(Tangled(), sharded=True)
    plain, _ = two_optimizers(Tangled(), sharded=False)
    for module in (plain, ddp):
        module(batch_of(rank, 0)).square().mean().backward()
    found = [torch.zeros(1) for _ in range(2)]
    for module, found_inf in zip((plain, ddp), found, strict=True):
        gradients = [param.grad for param in module.parameters()]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, torch.tensor(0.25))
    assert [one.item() for one in found] == [0.0, 0.0]
    owner = {param: one for one in optimizers for group in one.param_groups for param in group["params"]}
    for mine, other in zip(ddp.parameters(), plain.parameters(), strict=True):
        whole = owner[mine].full_grad(mine) if mine in owner else mine.grad
        assert_close(whole, other.grad, "unscaled", CLOSE)


def test_a_list_that_mixes_plain_and_sharded_gradients_is_unscaled_once():
    run_ranks(mixed_unscaling, 2)


def slow(rank: int, world: int, as_view: bool, unused: bool) -> None:
    """In turn each rank is far behind in its backward. The others come back from theirs with what they cannot send."""
    scheduler.PATIENCE = 0.02
    ddp = {"gradient_as_bucket_view": as_view, "find_unused_parameters": unused}
    twins = ShardedTwins.make(torch.optim.AdamW, ddp=ddp, lr=0.05, weight_decay=0.3)
    for iteration in range(4):
        forward = {"skip": [2, iteration % 2] if rank == 0 else [2]} if unused else {}
        twins.zero_grad()
        for micro in range(2):
            twins.theirs.backward(twins.batch(micro), **forward)
            loss = twins.ours.ddp(twins.batch(micro), **forward).square().mean()
            time.sleep(0.3 if rank == iteration % world else 0)
            loss.backward()
        twins.check_gradients()
        twins.step()
        twins.check_weights()


@pytest.mark.parametrize("unused", BOTH)
@pytest.mark.parametrize("as_view", BOTH)
def test_gradients_are_ddps_if_a_rank_is_far_behind(as_view, unused):
    """(DDP fills its buffers anew in the second backward: what was not sent yet must not be lost.)"""
    run_ranks(slow, 3, as_view, unused)
