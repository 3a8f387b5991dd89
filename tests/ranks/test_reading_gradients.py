"""Looking at a sharded gradient on one rank only is an error that names the ranks that did not look.

No bare time-out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import error_of

PATIENCE = 3  # seconds of the process group, where a test has to wait for it


def trained() -> tuple[torch.nn.Module, ZeroRedundancyOptimizer]:
    torch.manual_seed(1)
    model = torch.nn.Linear(7, 5).double()
    optimizer = ZeroRedundancyOptimizer(list(model.named_parameters()), torch.optim.AdamW, lr=0.1, shard_gradients=True)
    model(torch.ones(3, 7, dtype=torch.float64)).square().sum().backward()
    return model, optimizer


def norm(model: torch.nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    model.weight.grad.norm()


def torch_clip(model: torch.nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clip(model: torch.nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    optimizer.clip_grad_norm_(1.0)


def unscale(model: torch.nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    grads = [param.grad for param in model.parameters()]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.ones(1))


def buffers(model: torch.nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    optimizer.broadcast_buffers(torch.nn.BatchNorm1d(3))


def consolidate(model: torch.nn.Module, optimizer: ZeroRedundancyOptimizer) -> None:
    optimizer.consolidate_state_dict()


READS: dict[Callable, str] = {
    norm: "the norm of the gradient of parameter 0 ('weight')",
    torch_clip: "the norm of the gradient of parameter",
    clip: "clip_grad_norm_",
    unscale: "unscaling the gradients (GradScaler)",
    buffers: "broadcast_buffers",
    consolidate: "consolidate_state_dict",
}


def look(rank: int, world_size: int, read: Callable, alone: list[int]) -> str:
    model, optimizer = trained()
    store = dist.distributed_c10d._get_default_store()
    if rank not in alone:  # busy with something else, an evaluation or a log, until the others were told
        store.wait([f"told/{other}" for other in alone], timedelta(seconds=40))
        return ""
    error = error_of(lambda: read(model, optimizer), "a rank that looks alone")
    store.set(f"told/{rank}", "")
    assert isinstance(error, RuntimeError)
    return str(error)


@pytest.mark.parametrize(
    "read",
    [
        norm,
        clip,
        consolidate,
        *(pytest.param(read, marks=pytest.mark.again) for read in (torch_clip, unscale, buffers)),
    ],
    ids=lambda read: read.__name__,
)
def test_ranks_that_do_not_look_are_named_to_those_that_do(read):
    """Rank 1 looks, and rank 2 with it; rank 0 does not."""
    told = run_ranks(look, 3, read, [1, 2], pg_timeout=PATIENCE)
    for text in told[1:]:
        assert READS[read] in text
        assert "rank 0 did not" in text, text
        assert "rank 1 did not" not in text
        assert "rank 2 did not" not in text


def test_all_absent_ranks_are_named():
    told = run_ranks(look, 3, norm, [0], pg_timeout=PATIENCE)
    assert "ranks 1, 2 did not take part" in told[0]


def look_at_something_else(rank: int, world_size: int) -> str:
    model, optimizer = trained()
    started = time.monotonic()
    error = error_of(lambda: (norm if rank == 0 else clip)(model, optimizer), "two different questions")
    assert time.monotonic() - started < 20, "told at once, not after a time-out"
    return str(error)


def test_ranks_that_ask_for_different_things_are_told_so_and_get_no_mixed_answer():
    """Before, rank 0's norm of one parameter would have been added up with rank 1's norm of everything."""
    for text in run_ranks(look_at_something_else, 3):
        assert "the norm of the gradient of parameter 0 ('weight') on rank 0" in text
        assert "clip_grad_norm_ on ranks 1, 2" in text


def answers(rank: int, world_size: int) -> list[float]:
    model, optimizer = trained()
    found = [model.weight.grad.norm(), model.bias.grad.norm(), torch.linalg.vector_norm(model.weight.grad, 1)]
    found.append(optimizer.clip_grad_norm_(1e9))
    assert all(one.dtype == torch.float64 for one in found)
    return [float(one) for one in found]


@pytest.mark.parametrize("world_size", [1, 3])
def test_answers_are_those_of_the_whole_gradient(world_size):
    """Float64. A norm is a sum over pieces whose cuts depend on the number of ranks: the last bits may differ."""
    torch.manual_seed(1)
    model = torch.nn.Linear(7, 5).double()
    model(torch.ones(3, 7, dtype=torch.float64)).square().sum().backward()
    weight, bias = (param.grad for param in model.parameters())
    expected = [weight.norm(), bias.norm(), weight.abs().sum(), torch.cat([weight.view(-1), bias]).norm()]
    for found in run_ranks(answers, world_size):
        assert found == pytest.approx([float(one) for one in expected], rel=1e-14)
