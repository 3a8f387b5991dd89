"""With ``shard_gradients`` programs look at ``param.grad`` as they always did: it works, or the error names what does.

Answers and weights are those of plain DDP, in float64.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from shardstep import ShardedGradient, ZeroRedundancyOptimizer, shard_ddp_gradients
from tests.harness import run_ranks
from tests.oracle import error_of

pytestmark = pytest.mark.extended  # ``make test-frameworks`` runs these, too
STEPS = 3
WAYS = ("shard_gradients", "shard_ddp_gradients")


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def sharded(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(list(model.named_parameters()), SGD, shard_gradients=True, lr=0.1, **options)


class Beside:
    """A model with sharded gradients, and the same under plain DDP."""

    def __init__(self, rank: int, way: str) -> None:
        self.rank, self.model, self.theirs = rank, make_model(), DistributedDataParallel(make_model())
        self.trained: nn.Module = self.model
        if way == "shard_gradients":
            self.optimizer = sharded(self.model)
        else:
            self.trained = ddp = DistributedDataParallel(self.model)
            self.optimizer = ZeroRedundancyOptimizer(self.model.parameters(), SGD, lr=0.1)
            shard_ddp_gradients(ddp, self.optimizer)
        self.plain = SGD(self.theirs.parameters(), lr=0.1)

    def backward(self, step: int) -> None:
        for model, optimizer in ((self.trained, self.optimizer), (self.theirs, self.plain)):
            optimizer.zero_grad()
            model(batch(self.rank, step)).square().mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.plain.step()

    def assert_equal(self) -> None:
        for mine, theirs in zip(self.model.parameters(), self.theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-12, atol=1e-14)  # last bits of sums


# --- what changes gradients ---------------------------------------------------------------------------------------


def torchs_clip(params: list[Tensor]) -> None:
    nn.utils.clip_grad_value_(params, 0.01)


def foreach_clip(params: list[Tensor]) -> None:
    nn.utils.clip_grad_value_(params, 0.01, foreach=True)


def clamp(params: list[Tensor]) -> None:
    for param in params:
        param.grad.data.clamp_(-0.01, 0.02)


def clamp_one_side(params: list[Tensor]) -> None:
    for param in params:
        param.grad.detach().clamp_min_(-0.01).clamp_max_(0.01)


def detached(params: list[Tensor]) -> None:
    for param in params:
        param.grad = param.grad.detach().mul_(0.5)


def without_nans(params: list[Tensor]) -> None:
    for param in params:
        torch.nan_to_num(param.grad, nan=0.0, posinf=1e5, neginf=-1e5, out=param.grad)
        param.grad.nan_to_num_()


def moved_to_where_they_are(params: list[Tensor]) -> None:
    """As Lightning does when it is done: ``module.cpu()`` sets ``.data`` of every gradient."""
    for param in params:
        module = nn.Module()
        module.param = param
        module.cpu().to(torch.float64)


CHANGES = (torchs_clip, foreach_clip, clamp, clamp_one_side, detached, without_nans, moved_to_where_they_are)


def changed(rank: int, world: int, way: str, change: Callable) -> None:
    both = Beside(rank, way)
    for step in range(STEPS):
        both.backward(step)
        before = [param.grad for param in both.model.parameters()]
        change(list(both.model.parameters()))
        change(list(both.theirs.parameters()))
        assert all(param.grad is grad for param, grad in zip(both.model.parameters(), before, strict=True))
        both.step()
    both.assert_equal()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("world", [2, 3])
def test_changing_every_element_by_itself_gives_the_weights_of_plain_ddp(world, change, way):
    run_ranks(changed, world, way, change, timeout=60, pg_timeout=10)


def with_nans(rank: int, world: int) -> None:
    model = make_model()
    optimizer = sharded(model)
    batches = batch(rank, 0)
    batches[0, 0] = math.nan if rank == world - 1 else 1.0
    model(batches).square().mean().backward()
    assert all(bool(torch.isnan(optimizer.full_grad(param)).any()) for param in model.parameters())
    for param in model.parameters():
        param.grad.nan_to_num_(nan=0.25)
    for param in model.parameters():
        whole = optimizer.full_grad(param)
        assert bool(torch.isfinite(whole).all())
        assert bool((whole == 0.25).any())


def test_nans_are_replaced_on_every_rank_that_has_some():
    run_ranks(with_nans, 3)


def clamped_in_no_sync(rank: int, world: int) -> str:
    model = make_model()
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(list(model.named_parameters()), SGD, lr=0.1)
    shard_ddp_gradients(ddp, optimizer)
    ddp(batch(rank, 0)).square().mean().backward()
    with ddp.no_sync():
        ddp(batch(rank, 1)).square().mean().backward()
    return str(error_of(lambda: nn.utils.clip_grad_value_(model.parameters(), 0.1), "not reduced yet"))


def test_clamping_what_is_not_reduced_yet_is_refused():
    """The clamped mean is not the mean of what was clamped."""
    for told in run_ranks(clamped_in_no_sync, 2):
        assert "expects a reduced gradient" in told
        assert "after a backward outside of no_sync" in told


# --- what is logged -----------------------------------------------------------------------------------------------


def lightnings(model: nn.Module) -> list[Tensor]:
    """As lightning.pytorch.utilities.grad_norm asks."""
    norms = [param.grad.data.norm(2.0) for param in model.parameters() if param.grad is not None]
    return [*norms, torch.tensor(norms).norm(2.0)]


def stacked(model: nn.Module) -> list[Tensor]:
    return [torch.norm(torch.stack([param.grad.detach().norm(2) for param in model.parameters()]), 2)]


def items(model: nn.Module) -> list[float]:
    return [sum(param.grad.data.norm(2).item() ** 2 for param in model.parameters()) ** 0.5]


def total_norm(model: nn.Module) -> list[Tensor]:
    return [nn.utils.clip_grad_norm_(model.parameters(), math.inf)]


def other_orders(model: nn.Module) -> list[Tensor]:
    orders = (1, 3, math.inf)
    return [torch.linalg.vector_norm(param.grad, order) for param in model.parameters() for order in orders]


LOGS = (lightnings, stacked, items, total_norm, other_orders)


def logged(rank: int, world: int, way: str) -> None:
    both = Beside(rank, way)
    for step in range(STEPS):
        both.backward(step)
        for log in LOGS:
            mine, theirs = (list(map(float, log(model))) for model in (both.model, both.theirs.module))
            assert mine == pytest.approx(theirs, rel=1e-12), log.__name__  # sums over pieces: last bits
        both.step()
    both.assert_equal()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [2, 3])
def test_norms_that_programs_log_are_those_of_plain_ddp_and_change_nothing(world, way):
    run_ranks(logged, world, way, timeout=60, pg_timeout=10)


@pytest.mark.frameworks
def test_lightnings_own_grad_norm_is_that_of_plain_ddp():
    pytest.importorskip("lightning", reason="in the environment of make test-frameworks")
    run_ranks(lightnings_own, 3, fresh=True)


def lightnings_own(rank: int, world: int) -> None:
    from lightning.pytorch.utilities import grad_norm

    both = Beside(rank, "shard_gradients")
    both.backward(0)
    mine, theirs = (grad_norm(model, 2) for model in (both.model, both.theirs.module))
    assert mine.keys() == theirs.keys()
    assert {key: float(value) for key, value in mine.items()} == pytest.approx(
        {key: float(value) for key, value in theirs.items()}, rel=1e-6
    )  # torch.tensor(list of norms) is float32 there


INSTEAD: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    'torch.isfinite(param.grad.norm(float("inf")))': (
        lambda grad: torch.isfinite(grad).all(),
        lambda grad: torch.isfinite(grad.norm(float("inf"))),
    ),
    'param.grad.norm(float("inf")) for the largest absolute value': (
        lambda grad: grad.detach().abs().max(),
        lambda grad: grad.norm(float("inf")),
    ),
    "param.grad.norm(1) for their sum": (lambda grad: grad.data.abs().sum(), lambda grad: grad.norm(1)),
    "param.grad.norm() for the root of the sum of squares": (
        lambda grad: grad.pow(2).sum().sqrt(),
        lambda grad: grad.norm(),
    ),
    "torch.linalg.vector_norm(param.grad, dtype=...)": (
        lambda grad: grad.float().norm(),
        lambda grad: torch.linalg.vector_norm(grad, dtype=torch.float32),
    ),
}


def named(rank: int, world: int, poisoned: bool) -> None:
    both = Beside(rank, "shard_gradients")
    both.backward(0)
    if poisoned:
        for model, optimizer in ((both.model, both.optimizer), (both.theirs, both.plain)):
            optimizer.zero_grad()
            inputs = batch(rank, 0)
            inputs[0, 0] = math.inf if rank == world - 1 else 1.0
            model(inputs).square().mean().backward()
    for mine, theirs in zip(both.model.parameters(), both.theirs.parameters(), strict=True):
        for words, (asked, instead) in INSTEAD.items():
            error = error_of(lambda asked=asked, mine=mine: asked(mine.grad), words)
            assert isinstance(error, RuntimeError)
            assert words in str(error), error
            assert "on every rank" in str(error)
            assert float(instead(mine.grad)) == pytest.approx(float(asked(theirs.grad)), rel=1e-6, nan_ok=True), words


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_the_call_that_an_error_names_answers_what_was_asked(world, poisoned):
    run_ranks(named, world, poisoned)


# --- on one rank only ---------------------------------------------------------------------------------------------


def rank_0_logs(rank: int, world: int) -> str:
    model = make_model()
    optimizer = sharded(model)
    model(batch(rank, 0)).square().mean().backward()

    def go_on() -> None:
        if rank == 0:
            model[0].weight.grad.norm()
        optimizer.step()

    return str(error_of(go_on, "rank 0 logs"))


@pytest.mark.parametrize("world", [2, 3])
def test_a_norm_that_only_rank_0_logs_is_an_error_on_every_rank_that_says_so(world):
    """The others go on to step, as programs with ``if rank == 0:`` do. All wait as long as the group's time-out."""
    told = run_ranks(rank_0_logs, world, timeout=60, pg_timeout=4, fresh=True)
    assert "the norm of the gradient of parameter 0 ('0.weight') expects a call on every rank" in told[0]
    assert f"Call it on all {world} ranks" in told[0]
    others = "rank 1" if world == 2 else "ranks 1, 2"
    assert f"{others} did not take part" in told[0]
    for text in told[1:]:
        assert "rank 0" in text, text


# --- an older optimizer -------------------------------------------------------------------------------------------


def rebuilt(rank: int, world: int, trained: bool) -> None:
    model = make_model()
    older = ZeroRedundancyOptimizer(list(model.named_parameters()), AdamW, shard_gradients=True, lr=0.1)
    if trained:
        model(batch(rank, 0)).square().mean().backward()
        older.step()
        older.zero_grad()
    newer = sharded(model)
    error = error_of(lambda: model(batch(rank, 0)).square().mean().backward(), "two that reduce")
    assert isinstance(error, RuntimeError)
    for words in (
        "another one that is still alive: a ZeroRedundancyOptimizer of AdamW over 4 parameters, built before this one",
        "(a ZeroRedundancyOptimizer of SGD over 4 parameters)",
        "Delete the older optimizer",
    ):
        assert words in str(error), error
    gone = weakref.ref(older)
    del older
    gc.collect()
    assert gone() is None
    # What the message says is enough: from here on it trains as plain DDP does.
    theirs = DistributedDataParallel(make_model())
    theirs.module.load_state_dict(model.state_dict())
    plain = SGD(theirs.parameters(), lr=0.1)
    for step in range(STEPS):
        for one, optimizer in ((model, newer), (theirs, plain)):
            optimizer.zero_grad()
            one(batch(rank, step)).square().mean().backward()
            optimizer.step()
    for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-12, atol=1e-14)
    dist.barrier()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_an_older_optimizer_that_is_still_alive_is_named_and_deleting_it_is_enough(world, trained):
    run_ranks(rebuilt, world, trained, timeout=60, pg_timeout=10)


def rebound(rank: int, world: int) -> None:
    """``optimizer = ...`` twice: the first one is alive while the second is built, and gone afterwards."""
    model = make_model()
    optimizer = sharded(model)
    optimizer = sharded(model)
    model(batch(rank, 0)).square().mean().backward()
    optimizer.step()


def test_an_optimizer_that_takes_the_name_of_an_older_one_is_no_error():
    run_ranks(rebound, 2)


def used_by_others(rank: int, world: int) -> None:
    """A plain optimizer, or ours without shard_gradients, meets gradients of one that is still alive."""
    for make in (lambda params: SGD(params, lr=0.1), lambda params: ZeroRedundancyOptimizer(params, SGD, lr=0.1)):
        model = make_model()
        older = ZeroRedundancyOptimizer(list(model.named_parameters()), AdamW, shard_gradients=True, lr=0.1)
        newer = make(list(model.parameters()))
        model(batch(rank, 0)).square().mean().backward()
        error = error_of(newer.step, "sharded gradients of another one")
        assert "is sharded over the ranks by a ZeroRedundancyOptimizer of AdamW over 4 parameters" in str(error), error
        del older


def test_an_optimizer_that_meets_gradients_of_another_one_is_told_whose():
    run_ranks(used_by_others, 2, timeout=60, pg_timeout=10)


def left_behind(rank: int, world: int) -> None:
    model = make_model()
    optimizer = sharded(model)
    model(batch(rank, 0)).square().mean().backward()
    grad = model[0].weight.grad
    assert isinstance(grad, ShardedGradient)
    del optimizer
    gc.collect()
    for look in (grad.norm, lambda: model(batch(rank, 0)).sum().backward()):
        error = error_of(look, "a gradient of nobody")
        assert isinstance(error, RuntimeError)
        assert "a ZeroRedundancyOptimizer of SGD over 4 parameters is gone" in str(error)
        assert "zero_grad" in str(error)


def test_a_gradient_whose_optimizer_is_gone_says_so():
    run_ranks(left_behind, 2)


# --- uneven inputs ------------------------------------------------------------------------------------------------


def in_a_join_context(rank: int, world: int) -> None:
    """Rank 0 has run out of inputs, and nobody would tell it to change its pieces."""
    model = make_model()
    optimizer = sharded(model)
    changes: tuple[Callable[[Tensor], Any], ...] = (
        lambda grad: grad.mul_(0.5),
        lambda grad: grad.clamp_(-1, 1),
        lambda grad: grad.norm(),
    )
    with Join([optimizer]):
        for step in range(min(rank, 1) + 1):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            for change in changes:
                error = error_of(lambda change=change: change(model[0].weight.grad), "in a Join context")
                assert isinstance(error, RuntimeError)
                assert "not available in a Join context" in str(error)
                assert "optimizer.clip_grad_norm_" in str(error)
            optimizer.step()
    optimizer.check_replicas()


def test_a_sharded_gradient_is_not_changed_in_place_while_ranks_may_be_without_inputs():
    run_ranks(in_a_join_context, 3, timeout=60, pg_timeout=10)
