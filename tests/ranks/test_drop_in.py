"""One changed import: a program for torch's ZeroRedundancyOptimizer runs with ours and ends in the same bits."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import assert_same, parameters, train, values_of
from tests.twins import Twins

OPTIMIZERS = {"Adam": (Adam, {}), "AdamW": (AdamW, {"maximize": True}), "SGD": (SGD, {"momentum": 0.9})}


def plain(params: Any, optimizer_class: Any, parameters_as_bucket_view: bool = False, **options: Any) -> Optimizer:
    return optimizer_class(params, **options)


def script(rank: int, zero: Any, kind: Any, views: bool, **options: Any) -> tuple[Any, Any]:
    """As one writes it for torch's class: DDP, steps, and a layer frozen and released on the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    optimizer = zero(model.parameters(), optimizer_class=kind, parameters_as_bucket_view=views, lr=0.05, **options)
    for epoch in range(3):
        model[2].weight.requires_grad_(epoch != 1)
        ddp = DistributedDataParallel(model)
        generator = torch.Generator().manual_seed(10 * epoch + rank)
        for batch in torch.randn(2, 4, 5, generator=generator, dtype=torch.float64):
            optimizer.zero_grad()
            ddp(batch).square().mean().backward()
            optimizer.step()
    return model, optimizer


def same_weights(rank: int, world: int) -> None:
    warnings.simplefilter("ignore")  # torch's class warns of every change of requires_grad
    for name, (kind, options) in OPTIMIZERS.items():
        expected, oracle = script(rank, plain, kind, False, **options)
        for views in (False, True):
            for zero in (ZeroRedundancyOptimizer, TorchZero):
                model, optimizer = script(rank, zero, kind, views, **options)
                case = f"{zero.__module__} {name} {views=}"
                assert_same(values_of(model.parameters()), values_of(expected.parameters()), case)
                optimizer.consolidate_state_dict(to=0)
                if rank == 0:
                    assert_same(optimizer.state_dict()["state"], oracle.state_dict()["state"], case)


def test_a_script_for_torchs_class_gives_the_same_weights_and_state_with_ours():
    """DDP reduces the same gradients in the same order in all three: bits."""
    run_ranks(same_weights, 3)


def crosswise(rank: int, world: int) -> None:
    for name, (kind, options) in OPTIMIZERS.items():
        straight = parameters()
        train(kind(straight, lr=0.05, **options), straight, range(4))
        for source, target in ((TorchZero, ZeroRedundancyOptimizer), (ZeroRedundancyOptimizer, TorchZero)):
            params = parameters()
            first = source(params, kind, lr=0.05, **options)
            train(first, params, range(2))
            first.consolidate_state_dict(to=0)
            box = [first.state_dict() if rank == 0 else None]  # which a program saves there and every rank loads
            dist.broadcast_object_list(box, src=0)
            kept = copy.deepcopy(box[0])
            second = target(params, kind, lr=0.5, **options)
            second.load_state_dict(box[0])
            train(second, params, range(2, 4))
            assert_same(values_of(params), values_of(straight), f"{name}: {source.__module__} to {target.__module__}")
            if target is ZeroRedundancyOptimizer:
                assert_same(box[0], kept, "our class leaves the caller's dict alone")


def test_state_dicts_load_crosswise_between_torchs_class_and_ours():
    run_ranks(crosswise, 3)


# --- the partition, as torch's own tests pin it -----------------------------------------------------------------------


def owned(optimizer: Any) -> list[torch.Tensor]:
    return [param for group in optimizer.optim.param_groups for param in group["params"]]


def elements(optimizer: Any) -> int:
    return sum(piece.numel() for piece in owned(optimizer))


def partition(rank: int, world: int) -> None:
    sizes = [size for size in (9, 7, 5, 3) for _ in range(world)]
    for shard in ("tensor", "auto"):
        for requires_grad in (True, False):
            params = [torch.rand(size, 1, requires_grad=requires_grad) for size in sizes]
            optimizer = ZeroRedundancyOptimizer(params, SGD, lr=0.1, shard=shard)
            assert elements(optimizer) == 24, f"{shard} {requires_grad=}"
            if shard == "tensor":
                theirs = owned(TorchZero(params, SGD, lr=0.1))
                assert {id(param) for param in owned(optimizer)} == {id(param) for param in theirs}
        # One frozen tensor that is added fills the gap, and what was placed stays where it is.
        optimizer = ZeroRedundancyOptimizer(
            [torch.rand(n, 1, requires_grad=True) for n in sizes[:-1]], SGD, shard=shard
        )
        before = {id(param) for param in owned(optimizer)}
        optimizer.add_param_group({"params": [torch.rand(3, 1)]})
        assert elements(optimizer) == 24, shard
        assert before <= {id(param) for param in owned(optimizer)}
        assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 2


def test_sizes_9_7_5_3_per_rank_are_sharded_into_equal_sums_and_added_groups_keep_the_balance():
    run_ranks(partition, 3)


# --- what users and torch's tests touch -------------------------------------------------------------------------------


def attributes(rank: int, world: int) -> None:
    params, group = parameters(), dist.new_group([2, 0])
    ours, theirs = (zero(params, AdamW, lr=0.5) for zero in (ZeroRedundancyOptimizer, TorchZero))
    names = ("rank", "world_size", "global_rank", "initialized", "parameters_as_bucket_view", "process_group")
    for name in (*names, "join_device", "join_process_group"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert isinstance(ours, Optimizer)
    assert isinstance(ours, Joinable)
    assert type(ours.optim) is AdamW
    assert all(mine is given for mine, given in zip(ours._all_params, params, strict=True))
    ours.anything = 1  # torch's join test sets an attribute of its own
    with pytest.raises(AttributeError, match="no_such_thing"):
        ours.no_such_thing  # noqa: B018
    positional = ZeroRedundancyOptimizer(params, SGD, None, True, False, lr=0.25)
    assert positional.parameters_as_bucket_view is True
    assert positional.param_groups[0]["lr"] == 0.25
    if rank != 1:
        some = ZeroRedundancyOptimizer(params, SGD, group, lr=0.1)
        assert (some.rank, some.global_rank, some.world_size) == (dist.get_rank(group), rank, 2)
        assert some.process_group is group


def test_the_attributes_and_positional_arguments_of_torchs_class_are_there():
    run_ranks(attributes, 3)


class RecordingSGD(SGD):
    """Keeps what its step was called with, and adds an option to its groups."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[Any] = []

    def step(self, closure: Any = None, **options: Any) -> Any:
        self.seen.append((closure, options))
        super().step(closure if callable(closure) else None)
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return "outcome"


class ClosurelessSGD(SGD):
    def step(self) -> Any:  # type: ignore[override]
        return super().step()


def handed_through(rank: int, world: int) -> None:
    bag: list[int] = []
    for shard in ("tensor", "element"):
        for shapes in ([(7, 5), (5,), (11, 3)], [(1,)]):  # of the latter most ranks own nothing
            params = parameters(shapes)
            opt = ZeroRedundancyOptimizer(params, RecordingSGD, lr=0.1, shard=shard, bucket_cap_mb=200 / 2**20)
            assert opt.step(0) == opt.step(kwarg=bag) == "outcome"
            assert opt.optim.seen == [(0, {}), (None, {"kwarg": bag})], "a closure of 0 is not None"
            opt.step(lambda: bag.append(1))
            assert opt.param_groups[0]["count"] == 3, "on every rank"
    assert bag == [1] * 4
    twins = Twins(parameters, ClosurelessSGD, lr=0.1, momentum=0.9)
    twins.step(3)
    twins.check()


def test_arguments_of_step_reach_the_local_step_and_what_it_writes_into_groups_is_seen_on_every_rank():
    run_ranks(handed_through, 3)
