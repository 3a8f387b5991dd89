"""``shardstep.add_no_sync``: a loop that was written for DDP says ``with model.no_sync():`` and trains as under DDP."""

from __future__ import annotations

import copy
import io
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim import SGD

from shardstep import ShardedGradient, ZeroRedundancyOptimizer, add_no_sync
from tests.beside import Beside, assert_close, batch, mlp
from tests.harness import run_ranks
from tests.surroundings import as_under_torchrun

LIMITS = {"timeout": 60, "pg_timeout": 10}


def sharded(module: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(module.parameters(), SGD, shard_gradients=True, lr=0.1)


def accumulate(rank: int, world: int) -> None:
    theirs = Beside().theirs
    model = mlp()
    optimizers = [sharded(model[0]), sharded(model[2])]
    add_no_sync(model, *optimizers)
    add_no_sync(model, *optimizers)  # again is no mistake
    for called, steppers in ((model, optimizers), (theirs.called, [theirs.optimizer])):
        for number in range(9):
            last = number % 3 == 2
            with nullcontext() if last else called.no_sync():
                called(batch(number)).square().mean().backward()
            assert called is not model or isinstance(model[0].weight.grad, ShardedGradient) == last
            for stepper in steppers if last else ():
                stepper.step()
                stepper.zero_grad()
    assert_close(list(model.parameters()), theirs.params, "weights")
    file = io.BytesIO()
    torch.save(model, file)
    assert b"shardstep" not in file.getvalue()
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with other.no_sync():  # which does nothing to the optimizers
            model(batch(0)).sum().backward()
        assert isinstance(model[0].weight.grad, ShardedGradient)


def test_a_loop_written_for_ddp_accumulates_as_under_ddp_and_copies_of_the_model_have_nothing_of_ours() -> None:
    run_ranks(accumulate, 2, **LIMITS)


def accelerates_accumulate(rank: int, world: int) -> None:
    from accelerate import Accelerator

    as_under_torchrun(rank, world)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    theirs = Beside().theirs
    model = accelerator.prepare_model(mlp(), evaluation_mode=True)
    optimizer = accelerator.prepare(sharded(model))
    add_no_sync(model, optimizer)
    for step in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch(step)).square().mean())
            assert isinstance(model[0].weight.grad, ShardedGradient) == bool(step % 2)
            optimizer.step()
            optimizer.zero_grad()
        (theirs.loss(step) / 2).backward()
        if step % 2:
            theirs.optimizer.step()
            theirs.optimizer.zero_grad()
    assert_close(list(model.parameters()), theirs.params, "weights")


def test_accelerates_accumulate_finds_it_on_the_model_and_sends_nothing_in_between() -> None:
    pytest.importorskip("accelerate")
    run_ranks(accelerates_accumulate, 2, fresh=True, **LIMITS)
