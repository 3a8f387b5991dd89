"""step(): closures, keyword arguments, missing and strided gradients, errors, autograd's notice."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardstep import ZeroRedundancyOptimizer, hook_with_zero_step
from tests.harness import run_ranks
from tests.twins import Twins, assert_same, parameters, values

SHAPES = [(7, 5), (5,), (3, 2, 2), (11, 3), (1,)]
MODES = [(shard, views) for shard in ("tensor", "element") for views in (False, True)]


def _sharded(shard: str, views: bool) -> dict:
    # a cap of 200 bytes: several buckets, so that the step is split
    return {"shard": shard, "parameters_as_bucket_view": views, "bucket_cap_mb": 200 / 2**20}


def _closures(rank, world_size):
    for shard, views in MODES:
        for optimizer_class in (torch.optim.SGD, torch.optim.AdamW):
            twins = Twins(
                lambda: parameters(SHAPES), optimizer_class, sharded=_sharded(shard, views), lr=0.1, weight_decay=0.1
            )
            twins.name = f"{optimizer_class.__name__} {shard} {views=}"
            for step in range(4):

                def closure(params, optimizer, step=step):
                    def run():
                        optimizer.zero_grad()
                        loss = sum((p * p * values(p.shape, step)).sum() for p in params)
                        loss.backward()
                        return loss

                    return run

                ours = twins.opt.step(closure(twins.ours, twins.opt))
                expected = twins.plain.step(closure(twins.theirs, twins.plain))
                assert_same(ours.detach(), expected.detach(), "the loss that step returns")
            twins.check()
            assert twins.opt.step() is None
            twins.plain.step()
            twins.check()  # closures and plain steps mix


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_step_with_a_closure_equals_the_plain_optimizer_and_returns_its_loss(world_size):
    run_ranks(_closures, world_size)


class RecordingSGD(torch.optim.SGD):
    """Shows what its step was called with."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def step(self, closure=None, **kwargs):
        self.seen.append((closure, kwargs))
        super().step(closure if callable(closure) else None)
        return "outcome"


class ClosurelessSGD(torch.optim.SGD):
    def step(self):  # type: ignore[override]
        return super().step()


class KeyAddingSGD(torch.optim.SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        self.param_groups[0]["new_key"] = 0.1
        self.param_groups[-1]["seen_lr"] = self.param_groups[-1]["lr"]
        return loss


class CountingSGD(torch.optim.SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return loss


def _what_arrives(rank, world_size):
    for shard, views in MODES:
        opt = ZeroRedundancyOptimizer(parameters(SHAPES), RecordingSGD, lr=0.1, **_sharded(shard, views))
        assert opt.step(0) == "outcome"
        assert opt.step(closure=0) == "outcome"
        assert opt.optim.seen == [(0, {}), (0, {})], "a closure of 0 is not None"
        opt.optim.seen.clear()
        bag: list[int] = []
        assert opt.step(kwarg=bag) == "outcome"
        assert opt.optim.seen == [(None, {"kwarg": bag})]
        assert opt.optim.seen[0][1]["kwarg"] is bag
        opt.optim.seen.clear()
        calls: list[int] = []
        opt.step(lambda calls=calls: calls.append(1), kwarg=3)
        assert opt.optim.seen[0][1] == {"kwarg": 3}
        assert calls == [1]


@pytest.mark.parametrize("world_size", [1, 3])
def test_closures_of_zero_and_extra_keywords_reach_the_local_step(world_size):
    run_ranks(_what_arrives, world_size)


def _closureless(rank, world_size):
    for shard, views in MODES:
        twins = Twins(lambda: parameters(SHAPES), ClosurelessSGD, sharded=_sharded(shard, views), lr=0.1, momentum=0.9)
        twins.step(3)
        twins.check()


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_local_step_without_a_closure_argument_works(world_size):
    run_ranks(_closureless, world_size)


def _added_keys(rank, world_size):
    for optimizer_class in (KeyAddingSGD, CountingSGD):
        for shapes in (SHAPES, [(7, 5)]):
            for shard, views in MODES:
                twins = Twins(
                    lambda shapes=shapes: parameters(shapes), optimizer_class, sharded=_sharded(shard, views), lr=0.1
                )
                twins.name = f"{optimizer_class.__name__}, {len(shapes)} parameters, {shard}, {views=}"
                twins.step(2)
                for group, plain in zip(twins.opt.param_groups, twins.plain.param_groups, strict=True):
                    assert group.keys() == plain.keys(), f"{twins.name} on rank {rank}"
                    options = {key: value for key, value in group.items() if key != "params"}
                    assert options == {key: plain[key] for key in options}, f"{twins.name} on rank {rank}"
                twins.check(to=world_size - 1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_keys_that_the_local_step_adds_to_its_groups_appear_on_every_rank(world_size):
    """Also on a rank that owns nothing."""
    run_ranks(_added_keys, world_size)


def _options_flow_in(rank, world_size):
    for shard, views in MODES:
        twins = Twins(
            lambda: parameters(SHAPES),
            torch.optim.AdamW,
            lambda p: [{"params": p[:2]}, {"params": p[2:]}],
            sharded=_sharded(shard, views),
        )
        for step in range(3):
            for optimizer in (twins.opt, twins.plain):
                optimizer.param_groups[1]["lr"] = 0.1 * (step + 1)
                optimizer.param_groups[0]["betas"] = (0.5, 0.6 + 0.1 * step)
                optimizer.param_groups[0]["mine"] = step
            twins.step()
        twins.check()
        tensor_lr = Twins(
            lambda: parameters(SHAPES), torch.optim.Adam, sharded=_sharded(shard, views), lr=torch.tensor(0.1)
        )
        for step in range(3):
            for optimizer in (tensor_lr.opt, tensor_lr.plain):
                optimizer.param_groups[0]["lr"].fill_(0.1 / (step + 1))
            tensor_lr.step()
        tensor_lr.check_weights()


def test_options_that_change_between_steps_take_effect_tensor_lr_too():
    run_ranks(_options_flow_in, 3)


def _hooks(rank, world_size):
    opt = ZeroRedundancyOptimizer(parameters(SHAPES), torch.optim.AdamW, **_sharded("element", False))
    assert len(opt.layout.buckets) > 1
    seen = []
    opt.register_step_pre_hook(lambda o, args, kwargs: seen.append(("pre", o is opt)))
    opt.register_step_post_hook(lambda o, args, kwargs: seen.append(("post", o is opt)))
    handles = [
        register_optimizer_step_pre_hook(lambda o, a, k: seen.append(("all pre", o is opt))),
        register_optimizer_step_post_hook(lambda o, a, k: seen.append(("all post", o is opt))),
    ]
    for param in opt._all_params:
        param.grad = torch.ones_like(param)
    opt.step()
    opt.step()
    assert sorted(seen) == sorted([("pre", True), ("post", True), ("all pre", True), ("all post", True)] * 2)
    for handle in handles:
        handle.remove()


def test_step_hooks_fire_once_a_step_however_many_buckets():
    run_ranks(_hooks, 2)


def _missing_gradients(rank, world_size):
    for shard, views in MODES:
        twins = Twins(
            lambda: parameters(SHAPES), torch.optim.AdamW, sharded=_sharded(shard, views), weight_decay=0.1, lr=0.1
        )
        twins.name = f"{shard} {views=}"
        twins.step(2, skip=[0, 3])
        twins.check()
        for position in (0, 3):
            assert dict(twins.opt.state[twins.ours[position]]) == {}, "no gradient yet on any rank, so no state"
            assert twins.opt.full_state(twins.ours[position]) == {}
        twins.step(2, skip=[1])
        twins.step(1, skip=range(len(SHAPES)))
        twins.step(1)
        twins.check(to=world_size - 1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parameters_without_gradients_are_left_alone_and_get_no_state(world_size):
    run_ranks(_missing_gradients, world_size)


def _strided_gradients(rank, world_size):
    for optimizer_class, options in (
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"foreach": True}),
    ):
        for shard, views in MODES:
            twins = Twins(
                lambda: parameters([(7, 5), (4, 3, 2)]),
                optimizer_class,
                sharded=_sharded(shard, views),
                lr=0.1,
                **options,
            )
            twins.name = f"{optimizer_class.__name__} {options} {shard} {views=}"
            for step in range(3):
                for params in (twins.ours, twins.theirs):
                    params[0].grad = values((5, 7), step).t()
                    params[1].grad = values((8, 3, 2), step)[::2]
                    assert not any(p.grad.is_contiguous() for p in params)
                twins.opt.step()
                twins.plain.step()
                assert not any(p.grad.is_contiguous() for p in twins.ours), "the gradients belong to the user"
            twins.check()
            expanded = Twins(lambda: parameters([(7, 5)]), optimizer_class, sharded=_sharded(shard, views), **options)
            for params in (expanded.ours, expanded.theirs):
                params[0].grad = torch.tensor(0.5, dtype=torch.float64).expand(7, 5)
            expanded.opt.step()
            expanded.plain.step()
            expanded.check()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_that_are_not_contiguous_give_the_same_weights_and_state(world_size):
    run_ranks(_strided_gradients, world_size)


def _gradients_freed(rank, world_size):
    opt = ZeroRedundancyOptimizer(parameters(SHAPES), torch.optim.SGD, lr=0.1, shard="element")
    for param in opt._all_params:
        param.grad = torch.ones_like(param)
    opt.step()
    opt.zero_grad()
    assert all(p.grad is None for p in opt._all_params)
    pieces = [p for group in opt.optim.param_groups for p in group["params"]]
    assert pieces
    assert all(p.grad is None for p in pieces)
    for param in opt._all_params:
        param.grad = torch.ones_like(param)
    opt.zero_grad(set_to_none=False)
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in opt._all_params)


def test_zero_grad_covers_the_parameters_of_all_ranks_and_no_piece_keeps_a_gradient():
    run_ranks(_gradients_freed, 3)


# --- errors -------------------------------------------------------------------------------------------------------


class FailingSGD(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            raise ArithmeticError("the local step gave up")
        return super().step(closure)


def _fails_on_one_rank(rank, world_size, shard, where):
    opt = ZeroRedundancyOptimizer(parameters(SHAPES), FailingSGD, lr=0.1, **_sharded(shard, False))
    for param in opt._all_params:
        param.grad = torch.ones_like(param)
    opt.step()
    culprit = rank == 1

    def closure():
        if culprit:
            raise ArithmeticError("the local step gave up")

    opt.optim.fails = culprit and where == "step"
    start = time.monotonic()
    with pytest.raises(ArithmeticError if culprit else RuntimeError) as caught:
        opt.step(closure) if where == "closure" else opt.step()
    assert time.monotonic() - start < 20, "longer than the timeout of the process group"
    if not culprit:
        for told in ("rank 1", "ArithmeticError", "the local step gave up"):
            assert told in str(caught.value)


@pytest.mark.parametrize("where", ["step", "closure"])
@pytest.mark.parametrize("shard", ["tensor", "element"])
def test_an_error_in_the_local_step_of_one_rank_is_an_error_on_all_that_names_it(shard, where):
    run_ranks(_fails_on_one_rank, 3, shard, where, pg_timeout=3)


def _fails_everywhere(rank, world_size):
    twins = Twins(lambda: parameters(SHAPES), FailingSGD, sharded=_sharded("element", False), lr=0.1, momentum=0.9)
    twins.step()
    before = [p.detach().clone() for p in twins.ours]
    twins.opt.optim.fails = True
    with pytest.raises(ArithmeticError):
        twins.opt.step()
    for param, value in zip(twins.ours, before, strict=True):
        assert torch.equal(param, value)
    twins.opt.optim.fails = False
    twins.step(2)
    twins.check()
    extra = parameters([(4, 2)])
    twins.opt.add_param_group({"params": extra})  # the ranks still meet in the right place


def test_after_an_error_in_the_local_step_of_all_ranks_training_goes_on():
    run_ranks(_fails_everywhere, 3, pg_timeout=10)


# --- autograd -----------------------------------------------------------------------------------------------------


def _graph_errors(params, step) -> list[bool]:
    """For each parameter: does autograd refuse a graph over it that is older than the step?"""
    for param in params:
        param.grad = torch.ones_like(param)
    losses = [(param * param).sum() for param in params]
    step()
    return [_is_refused(loss, param) for param, loss in zip(params, losses, strict=True)]


def _is_refused(loss, param) -> bool:
    try:
        torch.autograd.grad(loss, param)
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


def _stale_graph(rank, world_size):
    shapes = [(7, 5), (5,), (131, 129), (1,)]  # the third is above the size that is sent without packing
    for optimizer_class in (torch.optim.SGD, torch.optim.AdamW):
        for shard, views in MODES:
            for rebound in (False, True):
                twins = Twins(lambda: parameters(shapes), optimizer_class, sharded=_sharded(shard, views), lr=0.1)
                if rebound:
                    for param in twins.ours:
                        param.data = param.data.clone()
                    twins.step()
                expected = _graph_errors(twins.theirs, twins.plain.step)
                assert expected == [True] * len(shapes)
                ours = _graph_errors(twins.ours, twins.opt.step)
                assert ours == expected, f"{optimizer_class.__name__} {shard} {views=} {rebound=} on rank {rank}"
    model = torch.nn.Linear(3, 2).double()
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    loss = model(model(torch.ones(4, 3).double()) @ torch.ones(2, 3).double()).sum()
    loss.backward(retain_graph=True)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_autograd_notices_that_the_step_changed_the_parameters(world_size):
    run_ranks(_stale_graph, world_size)


# --- optimizers that take the gradients away --------------------------------------------------------------------------


class Consuming(torch.optim.AdamW):
    """As heavyball's do: a step leaves no gradients behind, so programs do not call zero_grad."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None
        return loss


def _consume(rank, world_size, mode):
    ours, theirs = _net(), _net()
    options = {"ddp": {}, "hook": {"overlap_with_ddp": True}, "zero2": {"shard_gradients": True}}[mode]
    opt = ZeroRedundancyOptimizer(ours.parameters(), Consuming, lr=0.05, **options)
    plain = Consuming(theirs.parameters(), lr=0.05)
    net = ours if mode == "zero2" else DistributedDataParallel(ours)
    if mode == "hook":
        net.register_comm_hook(None, hook_with_zero_step(allreduce_hook, net, opt))
    oracle = DistributedDataParallel(theirs)
    for step in range(4):
        for each, optimizer in ((net, opt), (oracle, plain)):
            for _ in range(2 if mode != "hook" and step == 2 else 1):  # accumulated before a step, never after it
                each(values((4, 6), 10 * step + rank)).square().mean().backward()
            optimizer.step()
        assert all(param.grad is None for param in ours.parameters())
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        # float64; with shard_gradients sums of three ranks have another order than DDP's: the last bits
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def _net():
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 5)).double()


@pytest.mark.parametrize("mode", ["ddp", "hook", "zero2"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_that_the_optimizer_takes_away_are_gone_on_every_rank(mode, world_size):
    """Before, they were gone for the owned parameters only, and went on adding up for all others."""
    run_ranks(_consume, world_size, mode)
