"""Optimizers with habits of their own, of other packages or made for the purpose: each trains as its plain self."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import assert_same, parameters, values, values_of
from tests.twins import Twins

STEPS = 5
SHAPES = [(7, 5), (5,), (3, 2, 2), (11, 3), (1,)]
MATRICES_FIRST = [(6, 5), (7, 4), (5,), (13,)]


def granularities(twins: Twins) -> list[str]:
    return [spec.granularity for spec in twins.opt.layout.specs]


# --- of other packages (make test-optimizers goes over all classes) -------------------------------------------------


def cut_and_whole(rank: int, world_size: int) -> None:
    import pytorch_optimizer

    for name, kind in (("Lion", "element"), ("Lamb", "tensor")):
        twins = Twins(partial(parameters, SHAPES), getattr(pytorch_optimizer, name), weight_decay=0.1)
        assert granularities(twins) == [kind] * len(SHAPES)
        twins.step(STEPS)
        twins.check()
    twins = Twins(
        partial(parameters, MATRICES_FIRST, torch.float32),
        pytorch_optimizer.Muon,
        lambda p: [{"params": p[:2], "use_muon": True}, {"params": p[2:], "use_muon": False}],
    )
    assert granularities(twins) == ["tensor", "tensor", "element", "element"]
    twins.step(STEPS)
    twins.check()


def test_lion_is_cut_lamb_stays_whole_a_muon_with_adamw_groups_is_cut_where_it_may_be():
    run_ranks(cut_and_whole, 3)


# --- granularity ----------------------------------------------------------------------------------------------------


def granularity_per_group(rank: int, world_size: int) -> None:
    twins = Twins(
        partial(parameters, SHAPES),
        torch.optim.Adam,
        lambda p: [{"params": p[:2], "shard": "tensor"}, {"params": p[2:4], "shard": "element"}, {"params": p[4:]}],
    )
    assert granularities(twins) == ["tensor", "tensor", "element", "element", "element"]
    assert all("shard" not in group for group in twins.opt.param_groups)
    twins.step(STEPS)
    twins.check()


def test_a_group_chooses_its_granularity():
    run_ranks(granularity_per_group, 3)


def sparse_adam(rank: int, world_size: int) -> None:
    twins = Twins(partial(parameters, [(9, 4), (5, 3)]), torch.optim.SparseAdam, sharded={"shard": "tensor"}, lr=0.1)
    for step in range(3):
        for position, pair in enumerate(zip(twins.ours, twins.theirs, strict=True)):
            for param in pair:
                rows = torch.tensor([[0, 2 + step % 3]])
                param.grad = torch.sparse_coo_tensor(rows, values((2, param.shape[1]), step + position), param.shape)
        twins.opt.step()
        twins.plain.step()
    twins.check()


def test_sparse_adam_in_whole_tensors_is_exact_for_who_vouches_for_it():
    run_ranks(sparse_adam, 3)


# --- habits ---------------------------------------------------------------------------------------------------------


class Habit(torch.optim.Optimizer):
    """Momentum, and what the subclasses add."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                param.sub_(moment.mul_(0.9).add_(param.grad), alpha=self.rate(group))

    def rate(self, group: dict) -> float:
        return group["lr"]


class LooksAhead(Habit):
    """Moves the weights, asks the closure there, and moves on from where it was. (Schedule-free closures do so.)"""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        before = [param.clone() for param in params]
        for param in params:
            if "moment" in self.state[param]:
                param.data.sub_(self.state[param]["moment"], alpha=0.5)
        with torch.enable_grad():
            loss = closure()
        for param, value in zip(params, before, strict=True):
            param.data.copy_(value)
        super().step()
        return loss


def closures(rank: int, world_size: int, shapes: list[tuple[int, ...]], views: bool) -> None:
    ours, theirs = parameters(shapes), parameters(shapes)
    sharded = ZeroRedundancyOptimizer(ours, LooksAhead, parameters_as_bucket_view=views)
    plain = LooksAhead(theirs)
    for _ in range(4):
        losses = []
        for params, optimizer in ((ours, sharded), (theirs, plain)):

            def closure(params: list = params, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = torch.stack([param.sum() for param in params]).sum().square()  # every gradient needs all weights
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        assert_same(*losses, "losses")
    assert_same(values_of(ours), values_of(theirs), "weights")


@pytest.mark.parametrize("shapes", [[(7, 5), (3,), (4, 4)], [(3, 2)]], ids=["several", "one: ranks that own nothing"])
@pytest.mark.parametrize("views", [False, True])
def test_a_closure_that_is_asked_about_moved_weights_sees_those_of_all_ranks(views, shapes):
    run_ranks(closures, 3, shapes, views)


class Wants(Habit):
    """A step with an argument that it needs."""

    def step(self, closure: Any = None, *, factor: float) -> Any:  # type: ignore[override]
        self.factor = factor
        return super().step(closure)

    def rate(self, group: dict) -> float:
        return group["lr"] * self.factor


def wants_an_argument(rank: int, world_size: int) -> None:
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]
    logging.getLogger("shardstep").addHandler(handler)
    twins = Twins(partial(parameters, SHAPES), Wants, lambda p: [{"params": p[:2]}, {"params": p[2:], "lr": 0.05}])
    logging.getLogger("shardstep").removeHandler(handler)
    told = [line.getMessage() for line in lines]
    assert len(told) == (rank == 0), told  # once, not for every group and rank
    assert all("wants an argument (factor)" in text and "kept whole" in text for text in told), told
    assert not twins.opt.layout.cut_params
    for step in range(STEPS):
        twins.set_gradients()
        twins.opt.step(factor=1.0 + step)
        twins.plain.step(factor=1.0 + step)
    twins.check()


def test_an_optimizer_whose_step_wants_an_argument_is_kept_whole_and_gets_it():
    run_ranks(wants_an_argument, 3)
