"""What programs do with ``param.grad`` when it is sharded: it works as with DDP, or the error names what does."""

from __future__ import annotations

import copy
import gc
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from shardstep import ZeroRedundancyOptimizer
from tests.beside import WAYS, Beside, assert_close, batch, mlp
from tests.harness import run_ranks
from tests.oracle import error_of

LIMITS = {"timeout": 60, "pg_timeout": 10}


def move_to_where_it_is(param: Any) -> None:
    """As Lightning does when it is done: ``module.cpu()`` sets ``.data`` of every gradient."""
    module = nn.Module()
    module.param = param
    module.cpu().to(torch.float64)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "clamp_": lambda param: param.grad.data.clamp_(-0.01, 0.02),
    "clamp_min_": lambda param: param.grad.detach().clamp_min_(-0.005).clamp_max_(0.01),
    "mul_": lambda param: setattr(param, "grad", param.grad.mul_(0.5).div_(torch.tensor(4.0))),
    "nan_to_num_": lambda param: param.grad.nan_to_num_(nan=0.25, posinf=1e5),
    "nan_to_num": lambda param: torch.nan_to_num(param.grad, nan=0.25, out=param.grad),
    "zero_": lambda param: param.grad.zero_() if param.dim() == 1 else None,
    "cpu": move_to_where_it_is,
}


def change(rank: int, world: int, way: str) -> None:
    both = Beside(way=way)
    for number, (name, changed) in enumerate(CHANGES.items()):
        for side in both:
            side.optimizer.zero_grad()
            poison = math.nan if name.startswith("nan") and rank == 1 else 1.0
            handle = side.model[0].weight.register_hook(lambda gradient, poison=poison: gradient * poison)
            side.backward(number)
            handle.remove()
            for param in side.params:
                changed(param)
        both.check_gradients(name)
        for side in both:
            nn.utils.clip_grad_value_(side.params, 0.01, foreach=True)
            side.optimizer.step()
        both.check(name)
    if way == "shard_ddp_gradients":  # the clamped mean is not the mean of what was clamped
        with both.ours.no_sync():
            both.ours.backward(9)
        with pytest.raises(RuntimeError, match="expects a reduced gradient"):
            nn.utils.clip_grad_value_(both.ours.params, 0.1)


@pytest.mark.parametrize("way", WAYS)
def test_changing_every_element_by_itself_gives_the_weights_of_ddp(way: str) -> None:
    run_ranks(change, 3, way, **LIMITS)


def norms_of(model: nn.Module) -> list[Tensor]:
    """As programs log them, and for a part of the model."""
    grads = [param.grad for param in model.parameters()]
    by_param = [grad.data.norm(2.0) for grad in grads]
    others = [torch.linalg.vector_norm(grad, order) for grad in grads for order in (1, 3, math.inf)]
    total = nn.utils.get_total_norm(grads, 3.0)
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.3, total)
    part = nn.utils.clip_grad_norm_(model[0].parameters(), 0.1, foreach=False)
    return [*by_param, torch.norm(torch.stack(by_param), 2), *others, total, part]


def norms(rank: int, world: int, way: str) -> None:
    both = Beside(way=way)
    for number in range(2):
        found = []
        for side in both:
            side.optimizer.zero_grad()
            side.backward(number)
            found.append(norms_of(side.model))
        assert_close(*found, f"step {number}")
        both.check_gradients(number)
        for side in both:
            side.optimizer.step()
        both.check(number)


@pytest.mark.parametrize("way", WAYS)
def test_norms_that_programs_log_and_clip_by_are_those_of_ddp(way: str) -> None:
    run_ranks(norms, 3, way, **LIMITS)


def look(rank: int, world: int) -> None:
    """On one rank, where most programs look. Nothing of this may make it wait for the others."""
    both = Beside()
    for side in both:
        side.backward(0)
    mine, theirs = (side.model[0].weight.grad for side in both)
    if rank == 0:
        for asked in ("shape", "dtype", "device", "ndim", "is_sparse", "requires_grad"):
            assert getattr(mine, asked) == getattr(theirs, asked), asked
        assert "full_grad" in f"{mine} {mine!r}"
        for call in (lambda: mine + 1, mine.clone, mine.sum, mine.tolist):
            assert "full_grad" in str(error_of(call))
        file = io.BytesIO()
        torch.save(both.ours.model, file)
        file.seek(0)
        for copied in (copy.deepcopy(both.ours.model), torch.load(file, weights_only=False)):
            assert copied[0].weight.grad is None
            copied(batch(1)).sum().backward()  # sends nothing, adds to nobody's gradients
            assert type(copied[0].weight.grad) is Tensor
    both.ours.optimizer.full_grad(both.ours.model[0].weight).fill_(math.nan)  # a copy
    both.check_gradients()
    for side in both:
        side.optimizer.step()
    both.check()


def test_one_rank_may_look_at_shapes_print_and_copy_the_model() -> None:
    run_ranks(look, 2, **LIMITS)


# --- whose gradient it is -----------------------------------------------------------------------------------------


def sharded(model: nn.Module, kind: Any = SGD) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), kind, shard_gradients=True, lr=0.1)


def replace(rank: int, world: int) -> None:
    """DDP, then an optimizer, then another one that takes its name, and a third while the second is alive."""
    both = Beside()
    model = mlp()
    wrapped = DistributedDataParallel(model)
    wrapped(batch(9)).sum().backward()
    model.zero_grad()
    del wrapped
    optimizer = sharded(model, AdamW)
    optimizer = sharded(model, AdamW)
    model(batch(9)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    newer = sharded(model)
    error = error_of(lambda: model(batch(9)).sum().backward(), "two that reduce")
    assert "another one that is still alive: a ZeroRedundancyOptimizer of AdamW over 4 parameters" in str(error)
    assert "Delete the older optimizer" in str(error)
    del optimizer, error
    gc.collect()
    both.ours.model = both.ours.called = model
    both.ours.optimizer = newer
    both.theirs.model.load_state_dict(model.state_dict())
    for number in range(2):
        for side in both:
            side.optimizer.zero_grad()
            side.backward(number)
            side.optimizer.step()
        both.check(number)
    dist.barrier()


def test_an_optimizer_takes_the_place_of_ddp_or_of_another_one_when_that_is_gone() -> None:
    run_ranks(replace, 2, **LIMITS)
