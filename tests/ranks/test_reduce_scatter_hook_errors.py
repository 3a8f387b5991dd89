"""Wrong use of sharded gradients under DDP: told by ``shard_ddp_gradients`` at once, by the bare hook at the first
backward, on every rank, before anything is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from shardstep import ShardedGradient, ZeroRedundancyOptimizer, reduce_scatter_hook, shard_ddp_gradients
from shardstep.grads.reducer import GradientReducer
from tests.harness import run_ranks
from tests.hook_twins import SMALL_CAP, Tangled, batch_of
from tests.oracle import error_of
from tests.sharded_ddp_twins import sharded

Case = tuple[DistributedDataParallel, tuple[Any, ...]]  # the module, and what it is called with


def zero(params: Any, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, SGD, lr=0.1, **options)


def wrapped(module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module or Tangled(), bucket_cap_mb=SMALL_CAP, **options)


def a_plain_optimizer() -> Case:
    ddp = wrapped()
    return ddp, (SGD(ddp.parameters(), lr=0.1),)


def nothing() -> Case:
    return wrapped(), ()


def another_process_group() -> Case:
    ddp = wrapped()
    group = dist.new_group([0])
    alone = [dist.new_group([rank]) for rank in range(1, dist.get_world_size())]
    mine = [group, *alone][dist.get_rank()]
    return ddp, (zero(ddp.parameters(), process_group=mine),)


def overlapping() -> Case:
    ddp = wrapped()
    return ddp, (zero(ddp.parameters(), overlap_with_ddp=True),)


def sharding_by_itself() -> Case:
    """Over a model of its own: the wrap of its own one would be refused (test_wrapped_later.py)."""
    return wrapped(), (zero(Tangled().parameters(), shard_gradients=True),)


def wrapped_twice() -> Case:
    module = Tangled()
    inner = wrapped(module)
    return wrapped(inner), (zero(module.parameters()),)


def in_two_modules() -> Case:
    module = Tangled()
    ddp = wrapped(module)
    ddp.other = [wrapped(module)]  # (in a list: not a part of it)
    return ddp, (zero(module.parameters()),)


def in_two_optimizers() -> Case:
    ddp = wrapped()
    return ddp, (zero(ddp.parameters()), zero(list(ddp.parameters())[:1]))


def parameters_of_another_model() -> Case:
    ddp, other = wrapped(), nn.Linear(3, 3)
    return ddp, (zero([*ddp.parameters(), *other.parameters()]),)


def a_parameter_that_ddp_ignores() -> Case:
    module = Tangled()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["layers.1.bias"])
    ddp = wrapped(module)
    return ddp, (zero(module.named_parameters()),)


CASES: dict[Callable[[], Case], tuple[type[Exception], str]] = {
    a_plain_optimizer: (TypeError, "of class shardstep.ZeroRedundancyOptimizer but got SGD"),
    nothing: (TypeError, "but got none"),
    another_process_group: (ValueError, "Pass the same process_group to both"),
    overlapping: (ValueError, "register hook_with_zero_step(reduce_scatter_hook, ddp, optimizer)"),
    sharding_by_itself: (ValueError, "Drop shard_gradients"),
    wrapped_twice: (ValueError, "wrapped in DistributedDataParallel once"),
    in_two_modules: (ValueError, "wrapped in DistributedDataParallel once"),
    in_two_optimizers: (ValueError, "parameter 0 is in two of them"),
    parameters_of_another_model: (ValueError, "expects an optimizer over parameters of the DDP module"),
    a_parameter_that_ddp_ignores: (ValueError, "('layers.1.bias') is one that DDP was told to ignore"),
}


def told_at_once(rank: int, world: int, case: Callable[[], Case]) -> None:
    kind, text = CASES[case]
    ddp, optimizers = case()
    error = error_of(lambda: shard_ddp_gradients(ddp, *optimizers), case.__name__)
    assert type(error) is kind, repr(error)
    assert "shard_ddp_gradients expects" in str(error)
    assert text in str(error), str(error)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_shard_ddp_gradients_tells_wrong_use_at_once(case):
    run_ranks(told_at_once, 2, case)


def told_by_the_hook(rank: int, world: int, case: Callable[[], Case]) -> None:
    sent = []
    send = GradientReducer.send
    GradientReducer.send = lambda *args: (sent.append(args), send(*args))[1]
    try:
        kind, text = CASES[case]
        ddp, optimizers = case()
        ddp.register_comm_hook(optimizers[0] if len(optimizers) == 1 else optimizers, reduce_scatter_hook)
        error = error_of(lambda: ddp(batch_of(rank, 0)).square().mean().backward(), case.__name__)
    finally:
        GradientReducer.send = send
    assert type(error) is kind, repr(error)
    assert "reduce_scatter_hook expects" in str(error)
    assert text in str(error), str(error)
    assert not sent


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_bare_hook_tells_wrong_use_on_every_rank_at_the_first_backward(case):
    run_ranks(told_by_the_hook, 2, case)


def on_one_rank(rank: int, world: int, bare: bool) -> str:
    """Rank 1 has it wrong; the others are told at once, and what."""
    ddp = wrapped()
    optimizers = [zero(ddp.parameters())]
    if rank == 1:
        other = wrapped(ddp.module)  # (DDP's constructor sends, so all ranks wrap)
    else:
        other = wrapped(Tangled())
    started = time.monotonic()
    if bare:
        ddp.register_comm_hook(optimizers[0], reduce_scatter_hook)
        error = error_of(lambda: ddp(batch_of(rank, 0)).square().mean().backward(), "one rank has it wrong")
    else:
        error = error_of(lambda: shard_ddp_gradients(ddp, *optimizers), "one rank has it wrong")
    assert time.monotonic() - started < 20, "not after a time-out"
    assert other is not None
    return str(error)


@pytest.mark.parametrize("bare", [False, True])
def test_all_ranks_are_told_what_one_has_wrong(bare):
    told = run_ranks(on_one_rank, 3, bare)
    assert all("wrapped in DistributedDataParallel once" in text for text in told)
    assert all("failed on rank 1" in text for text in (told[0], told[2]))


def no_optimizer_on_one_rank(rank: int, world: int, bare: bool) -> str:
    """Rank 1 gives a plain optimizer, which cannot compare anything with the others."""
    ddp = wrapped()
    mine = zero(ddp.parameters())
    given = SGD(ddp.parameters(), lr=0.1) if rank == 1 else mine
    started = time.monotonic()
    if bare:
        ddp.register_comm_hook(given, reduce_scatter_hook)
        error = error_of(lambda: ddp(batch_of(rank, 0)).square().mean().backward(), "one rank has none of ours")
    else:
        error = error_of(lambda: shard_ddp_gradients(ddp, given), "one rank has none of ours")
    assert time.monotonic() - started < 20, "not after a time-out"
    assert mine is not None
    return str(error)


@pytest.mark.parametrize("bare", [False, True])
def test_all_ranks_are_told_that_one_gave_no_optimizer_of_ours(bare):
    told = run_ranks(no_optimizer_on_one_rank, 3, bare)
    assert all("of class shardstep.ZeroRedundancyOptimizer but got SGD" in text for text in told), told
    assert all("failed on rank 1" in text for text in (told[0], told[2])), told


def no_module(rank: int, world: int) -> None:
    module = Tangled()
    error = error_of(lambda: shard_ddp_gradients(module, zero(module.parameters())), "a plain module")
    assert isinstance(error, TypeError)
    assert "expects a DistributedDataParallel module but got a Tangled" in str(error)
    parts = torch.nn.ModuleList([wrapped(), wrapped()])
    error = error_of(lambda: shard_ddp_gradients(parts, zero(parts[0].parameters())), "two of them")
    assert "but got a ModuleList, with 2 of them in or around it" in str(error)


def found_by_frameworks_modules(rank: int, world: int) -> None:
    """The module inside, which the Trainer of transformers hands out, and one around it, which Fabric does."""
    for outer in (False, True):
        ddp = wrapped()
        given = torch.nn.Sequential(ddp) if outer else ddp.module
        optimizer = zero(ddp.parameters())
        shard_ddp_gradients(given, optimizer)
        ddp(batch_of(rank, 0)).square().mean().backward()
        assert all(isinstance(param.grad, ShardedGradient) for param in ddp.parameters() if param.grad is not None)
        optimizer.step()
        shard_ddp_gradients(given, optimizer)  # a framework that begins to train again
        ddp(batch_of(rank, 0)).square().mean().backward()
        optimizer.step()
        optimizer.check_replicas()


def test_the_ddp_module_is_found_from_the_module_inside_and_from_one_around_it():
    run_ranks(found_by_frameworks_modules, 2)


def called_twice(rank: int, world: int) -> None:
    ddp = wrapped()
    first, second = list(ddp.parameters())[:2], list(ddp.parameters())[2:]
    optimizer, another = zero(first), zero(second)
    shard_ddp_gradients(ddp, optimizer)
    error = error_of(lambda: shard_ddp_gradients(ddp, optimizer, another), "called twice, with another optimizer")
    assert "sharded already" in str(error)
    other = wrapped()
    other.register_comm_hook(None, allreduce_hook)
    error = error_of(lambda: shard_ddp_gradients(other, zero(other.parameters())), "a module with a hook")
    assert "can only be called once" in str(error)  # DDP's own words


def different_settings(rank: int, world: int) -> None:
    ddp = wrapped(gradient_as_bucket_view=rank == 0)
    error = error_of(lambda: shard_ddp_gradients(ddp, zero(ddp.parameters())), "ranks that differ")
    assert "gradient_as_bucket_view is True on rank 0 but False on rank 1" in str(error)


@pytest.mark.parametrize("mistake", [no_module, called_twice, different_settings], ids=lambda one: one.__name__)
def test_other_mistakes_are_told(mistake):
    run_ranks(mistake, 2)


def unfrozen(rank: int, world: int) -> None:
    """DDP does not know a parameter that was unfrozen after the model was wrapped: nobody would reduce it."""
    module = Tangled()
    module.layers[1].bias.requires_grad_(False)
    side = sharded(module, SGD, groups=lambda module: list(module.named_parameters()), lr=0.1)
    side.backward(batch_of(rank, 0))
    side.optimizer.step()
    module.layers[1].bias.requires_grad_(True)
    side.optimizer.zero_grad()
    error = error_of(lambda: side.backward(batch_of(rank, 1)), "unfrozen")
    dist.barrier()  # who ends first must not be missed in the buckets that the others still reduce
    assert "('layers.1.bias') expects its gradient from DDP" in str(error), str(error)
    assert "wrap the model after unfreezing" in str(error)


def test_a_parameter_that_ddp_does_not_know_is_named():
    run_ranks(unfrozen, 2)


def sparse(rank: int, world: int) -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4, sparse=True)

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            return self.table(indices)

    ddp = DistributedDataParallel(Lookup())
    shard_ddp_gradients(ddp, zero(ddp.parameters()))
    error = error_of(lambda: ddp(torch.tensor([1, 2])).sum().backward(), "a sparse gradient")
    assert "expects dense gradients" in str(error)


def test_sparse_gradients_are_refused():
    run_ranks(sparse, 2)


def opened(rank: int, world: int) -> None:
    from accelerate import Accelerator

    ddp = wrapped()
    optimizer = Accelerator(cpu=True).prepare(zero(ddp.parameters()))
    ddp.register_comm_hook(optimizer, reduce_scatter_hook)
    ddp(batch_of(rank, 0)).square().mean().backward()
    optimizer.step()
    assert type(next(ddp.parameters()).grad).__name__ == "ShardedGradient"


def test_frameworks_wrappers_are_opened():
    run_ranks(opened, 2)
