"""step(): what autograd notices, memory that somebody replaced, replicas that differ, what a step lets go of."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from shardstep import ZeroRedundancyOptimizer
from tests.differential.cases import run
from tests.differential.configurations import Configuration
from tests.differential.programs import Backward, Step
from tests.harness import run_ranks
from tests.oracle import error_of, parameters, values
from tests.twins import Twins

SHAPES = [(7, 5), (5,), (3, 2, 2), (11, 3), (1,)]
SMALL = 200 / 2**20  # several buckets, so that the step is split
MODES: list[dict[str, Any]] = [
    {"shard": shard, "parameters_as_bucket_view": views, "bucket_cap_mb": SMALL}
    for shard in ("tensor", "element")
    for views in (False, True)
]


def is_refused(loss: torch.Tensor, param: torch.Tensor) -> bool:
    try:
        torch.autograd.grad(loss, param)
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return False


def stale_graphs(rank: int, world: int) -> None:
    for mode in MODES:
        for rebound in (False, True):
            # (The third is above the size from which a parameter is sent from where it lies.)
            params = parameters([(7, 5), (5,), (131, 129), (1,)])
            opt = ZeroRedundancyOptimizer(params, AdamW, lr=0.1, **mode)
            for _ in range(2):
                for param in params:
                    param.grad = torch.ones_like(param)
                losses = [(param * param).sum() for param in params]
                opt.step()
                found = [is_refused(loss, param) for loss, param in zip(losses, params, strict=True)]
                assert found == [True] * 4, f"{mode} {rebound=} on rank {rank}"
                for param in params if rebound else ():
                    param.data = param.data.clone()


@pytest.mark.parametrize("world", [1, 3])
def test_autograd_notices_on_every_rank_that_a_step_changed_all_parameters(world):
    run_ranks(stale_graphs, world)


@pytest.mark.parametrize("mode", ["default", "sharded", "under DDP"])
def test_gradients_that_the_optimizer_takes_away_are_gone_on_every_rank(mode):
    """heavyball's do, so programs do not call zero_grad."""
    run(Configuration(mode=mode, optimizer="Peculiar", ranks=3), (Backward(), Step()) * 3)


def freed(rank: int, world: int) -> None:
    model = nn.Linear(8, 8)
    opt = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    opt.step()
    opt.consolidate_state_dict(to=0)
    state = opt.state_dict()["state"]
    held = [weakref.ref(value) for entry in state.values() for value in entry.values()]
    assert bool(held) == (rank == 0)
    del state
    opt.step()
    gc.collect()
    assert not any(reference() is not None for reference in held)


def test_a_step_frees_the_state_that_was_consolidated():
    run_ranks(freed, 2)


# --- other memory -----------------------------------------------------------------------------------------------------


def conv_net() -> nn.Sequential:
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(4, 3))
    for position, param in enumerate(net.parameters()):
        param.data = values(param.shape, position)
    return net


def transpose(net: nn.Module) -> None:
    net[-1].weight.data = net[-1].weight.data.t().contiguous().t()


def set_others(net: nn.Module) -> None:
    for position, param in enumerate(net.parameters()):
        param.data = values(param.shape, 50 + position)


CHANGES: dict[str, Any] = {
    "channels_last": lambda net: net.to(memory_format=torch.channels_last),
    "one of them": lambda net: setattr(net[2].weight, "data", net[2].weight.data.clone()),
    "transposed": transpose,
    "other values": set_others,
    "another dtype and back": lambda net: net.float().double(),
}
OTHER_VALUES = ("other values", "another dtype and back")  # on one rank alone they would be no replicas


def other_memory(rank: int, world: int, views: bool) -> None:
    cases = [(shard, what, True) for shard in ("tensor", "element") for what in CHANGES]
    cases += [(shard, what, False) for shard, what, _ in cases if what not in OTHER_VALUES]
    for shard, what, everywhere in cases:
        nets = [conv_net(), conv_net()]
        params = iter([list(net.parameters()) for net in nets])
        sharded = {"shard": shard, "parameters_as_bucket_view": views}
        twins = Twins(lambda params=params: next(params), AdamW, sharded=sharded, lr=0.1)
        twins.name = f"{what} {shard} {views=} {everywhere=}"
        twins.step(2)
        if everywhere or rank == 1:
            CHANGES[what](nets[0])
        CHANGES[what](nets[1])
        twins.step(3)
        twins.check()
        twins.opt.check_replicas()
        storages = {param.untyped_storage().data_ptr() for param in twins.ours}
        assert (len(storages) == 1) == views, f"{twins.name}: views of one buffer, again"


@pytest.mark.parametrize("views", [False, True])
def test_parameters_with_other_memory_are_bound_again_and_train_exactly(views):
    run_ranks(other_memory, 3, views, pg_timeout=10)


def differing(rank: int, world: int) -> None:
    twins = Twins(lambda: parameters(SHAPES), SGD, lambda p: [(f"w{i}", one) for i, one in enumerate(p)], lr=0.1)
    twins.step()
    value = twins.theirs[2].detach()
    lowest_bits = torch.nextafter(value, torch.full_like(value, 9.0))
    zeros = torch.zeros_like(value)
    for elsewhere, here in ((value, lowest_bits), (zeros, -zeros), (value, value.flip(0))):
        twins.ours[2].data.copy_(here if rank == 1 else elsewhere)
        text = str(error_of(twins.opt.check_replicas))
        assert "'w2'" in text
        assert "ranks [0, 2] and ranks [1]" in text
    twins.ours[2].data.copy_(value)
    if rank == 1:
        twins.ours[0].data = twins.ours[0].data + 1
    twins.step()  # every owner sends what it has, so replicas are equal again
    twins.opt.check_replicas()


def test_check_replicas_sees_the_lowest_bit_and_the_next_step_makes_replicas_equal_again():
    run_ranks(differing, 3)
