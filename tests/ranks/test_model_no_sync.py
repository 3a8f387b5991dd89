"""``shardstep.add_no_sync``: a loop that was written for DDP says ``with model.no_sync():`` and trains as under DDP."""

from __future__ import annotations

import copy
import gc
import io
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from shardstep import ShardedGradient, ZeroRedundancyOptimizer, add_no_sync
from tests.harness import run_ranks
from tests.oracle import error_of
from tests.surroundings import as_under_torchrun

MICRO, STEPS = 3, 3


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def sharded(params: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, SGD, shard_gradients=True, lr=0.1)


def loop(rank: int, model: Any, *optimizers: torch.optim.Optimizer) -> None:
    """As written for DDP: it knows nothing of shardstep."""
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(MICRO):
            with model.no_sync() if micro < MICRO - 1 else nullcontext():
                model(batch(rank, MICRO * step + micro)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def accumulate(rank: int, world: int, count: int) -> None:
    theirs = DistributedDataParallel(make_model())
    loop(rank, theirs, SGD(theirs.parameters(), lr=0.1))
    model = make_model()
    parts = [model] if count == 1 else [model[0], model[2]]
    optimizers = [sharded(part.parameters()) for part in parts]
    add_no_sync(model, *optimizers)
    loop(rank, model, *optimizers)
    for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-12, atol=1e-14)  # last bits of sums
    # It is ours: nothing is reduced within it, so gradients stay whole and local, and afterwards they do not.
    for optimizer in optimizers:
        optimizer.zero_grad()
    with model.no_sync():
        model(batch(rank, 0)).sum().backward()
        assert not any(isinstance(param.grad, ShardedGradient) for param in model.parameters())
    model(batch(rank, 0)).sum().backward()
    assert all(isinstance(param.grad, ShardedGradient) for param in model.parameters())


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
def test_a_loop_written_for_ddp_accumulates_as_under_ddp(world, count):
    """One optimizer, and two over disjoint parameters."""
    run_ranks(accumulate, world, count, timeout=60, pg_timeout=10)


def accelerates_accumulate(rank: int, world: int) -> None:
    from accelerate import Accelerator

    as_under_torchrun(rank, world)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare_model(make_model(), evaluation_mode=True)
    optimizer = accelerator.prepare(sharded(model.parameters()))
    add_no_sync(model, optimizer)
    kinds = []
    for step in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch(rank, step)).square().mean())
            kinds.append(isinstance(model[0].weight.grad, ShardedGradient))
            optimizer.step()
            optimizer.zero_grad()
    assert kinds == [False, True, False, True]
    theirs = DistributedDataParallel(make_model())
    plain = SGD(theirs.parameters(), lr=0.1)
    for step in range(4):
        with theirs.no_sync() if step % 2 == 0 else nullcontext():
            (theirs(batch(rank, step)).square().mean() / 2).backward()
        if step % 2:
            plain.step()
            plain.zero_grad()
    for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=1e-12, atol=1e-14)


def test_accelerates_accumulate_finds_it_on_the_model_and_sends_nothing_in_between():
    pytest.importorskip("accelerate")
    run_ranks(accelerates_accumulate, 2, timeout=60, pg_timeout=10, fresh=True)


def copies(rank: int, world: int) -> None:
    model = make_model()
    optimizer = sharded(model.parameters())
    keys = list(model.state_dict())
    add_no_sync(model, optimizer)
    add_no_sync(model, optimizer)  # again is no mistake
    assert list(model.state_dict()) == keys
    file = io.BytesIO()
    torch.save(model, file)
    assert b"shardstep" not in file.getvalue()
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with other.no_sync():
            other(batch(rank, 0)).sum().backward()
        second = sharded(other.parameters())
        add_no_sync(other, second)
        second.zero_grad()
        with other.no_sync():
            other(batch(rank, 0)).sum().backward()
            assert not isinstance(other[0].weight.grad, ShardedGradient)
    del optimizer
    gc.collect()  # the model does not keep it alive
    error = error_of(model.no_sync().__enter__, "whose optimizer is gone")
    assert isinstance(error, RuntimeError)
    assert "add_no_sync" in str(error)


def test_copies_of_the_model_have_none_that_acts_on_the_optimizer_and_files_have_nothing_of_ours():
    run_ranks(copies, 2)


def mistakes(rank: int, world: int) -> None:
    model, other = make_model(), make_model()
    optimizer = sharded(model.parameters())
    ddp = DistributedDataParallel(other)
    default = ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1)
    cases: list[tuple[Any, tuple[Any, ...], type, str]] = [
        (ddp, (default,), ValueError, "DistributedDataParallel has one"),
        (other, (default,), ValueError, "leaves that to DDP"),
        (make_model(), (optimizer,), ValueError, "it has none of them"),
        (model, (), TypeError, "got none"),
        (model, (SGD(model.parameters(), lr=0.1),), TypeError, "got a SGD"),
        ([model], (optimizer,), TypeError, "got a list"),
    ]
    for wrong, optimizers, kind, words in cases:
        error = error_of(lambda wrong=wrong, optimizers=optimizers: add_no_sync(wrong, *optimizers), words)
        assert isinstance(error, kind)
        assert words in str(error), error
    assert not hasattr(model, "no_sync")


def test_mistakes_are_told_and_leave_the_model_as_it_was():
    run_ranks(mistakes, 2)
