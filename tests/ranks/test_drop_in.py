"""One changed import: a script with torch's class, with ours and with the plain optimizer ends in the same weights.

DDP reduces the same gradients in the same order in all three, so weights are compared bit by bit.
"""

from __future__ import annotations

import copy
import io
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import assert_same, parameters, train, values_of

OPTIMIZERS = {"adam": (Adam, {}), "adamw": (AdamW, {}), "sgd": (SGD, {"momentum": 0.9})}


def plain(params: Any, optimizer_class: Any, parameters_as_bucket_view: bool = False, **options: Any) -> Optimizer:
    return optimizer_class(params, **options)


CLASSES = {"torch": TorchZero, "ours": ZeroRedundancyOptimizer, "plain": plain}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def script(rank: int, zero: Any, optimizer_class: Any, views: bool, epochs: int, **options: Any) -> tuple[Any, Any]:
    """As one writes it for torch's class: DDP, steps, and a layer frozen and released on the way."""
    model = make_model()
    optimizer = zero(
        model.parameters(), optimizer_class=optimizer_class, parameters_as_bucket_view=views, lr=0.05, **options
    )
    for epoch in range(epochs):
        model[2].weight.requires_grad_(epoch != 1)
        ddp = DistributedDataParallel(model)
        generator = torch.Generator().manual_seed(10 * epoch + rank)
        for batch in torch.randn(2, 4, 5, generator=generator, dtype=torch.float64):
            optimizer.zero_grad()
            loss = ddp(batch).square().mean()
            loss.backward()
            optimizer.step()
    return model, optimizer


def same_weights(rank: int, world: int, name: str) -> None:
    warnings.simplefilter("ignore")  # torch's class warns of every change of requires_grad
    optimizer_class, options = OPTIMIZERS[name]
    for maximize in (False, True):
        oracle = script(rank, plain, optimizer_class, False, 3, maximize=maximize, **options)
        for views in (False, True):
            case = f"{name} maximize={maximize} views={views}"
            trained = {"plain": oracle}
            for kind in ("ours", "torch"):
                trained[kind] = script(rank, CLASSES[kind], optimizer_class, views, 3, maximize=maximize, **options)
            weights = {kind: values_of(model.parameters()) for kind, (model, _) in trained.items()}
            assert_same(weights["ours"], weights["plain"], f"{case}: ours and plain")
            assert_same(weights["ours"], weights["torch"], f"{case}: ours and torch's")
            ours, theirs = trained["ours"][1], trained["torch"][1]
            for optimizer in (ours, theirs):
                optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                assert_same(ours.state_dict(), trained["plain"][1].state_dict(), f"{case}: state, ours and plain")
                assert_same(
                    ours.state_dict()["state"], theirs.state_dict()["state"], f"{case}: state, ours and torch's"
                )


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_script_for_torchs_class_gives_the_same_weights_and_state_with_ours(world, name):
    run_ranks(same_weights, world, name)


# --- state dicts crosswise --------------------------------------------------------------------------------------------


def dict_for_all(optimizer: Any, rank: int) -> dict[str, Any]:
    """What a program saves on rank 0 and every rank loads."""
    if hasattr(optimizer, "consolidate_state_dict"):
        optimizer.consolidate_state_dict(to=0)
    box = io.BytesIO()
    if rank == 0:
        torch.save(optimizer.state_dict(), box)
    content = [box.getvalue()]
    dist.broadcast_object_list(content, src=0)
    return torch.load(io.BytesIO(content[0]), weights_only=True)


def crosswise(rank: int, world: int, name: str) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    straight = parameters()
    train(optimizer_class(straight, lr=0.05, **options), straight, range(4))
    for source in CLASSES:
        for target in CLASSES:
            if source == target == "torch":
                continue
            params = parameters()
            first = CLASSES[source](params, optimizer_class, lr=0.05, **options)
            train(first, params, range(2))
            state_dict = dict_for_all(first, rank)
            kept = copy.deepcopy(state_dict)
            second = CLASSES[target](params, optimizer_class, lr=0.5, **options)
            second.load_state_dict(state_dict)
            train(second, params, range(2, 4))
            assert_same(values_of(params), values_of(straight), f"{name}: {source} -> {target}")
            if target == "ours":
                assert_same(state_dict, kept, "our class leaves the caller's dict alone")


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dicts_load_crosswise_between_torchs_class_ours_and_the_plain_optimizer(world, name):
    run_ranks(crosswise, world, name)


# --- what torch's own tests pin about the partition -------------------------------------------------------------------


def sizes_for(world: int) -> list[int]:
    return [size for size in (9, 7, 5, 3) for _ in range(world)]


def owned(optimizer: Any, trainable: bool = False) -> int:
    pieces = [param for group in optimizer.optim.param_groups for param in group["params"]]
    return sum(piece.numel() for piece in pieces if piece.requires_grad or not trainable)


def equal_sums(rank: int, world: int) -> None:
    for requires_grad in (True, False):
        for shard in ("tensor", "auto"):
            for views in (False, True) if shard == "auto" else (False,):
                params = [torch.rand(size, 1, requires_grad=requires_grad) for size in sizes_for(world)]
                build = partial(ZeroRedundancyOptimizer, params, SGD, parameters_as_bucket_view=views, lr=0.1)
                optimizer = build(shard=shard)
                case = f"shard={shard} requires_grad={requires_grad} views={views}"
                assert owned(optimizer) == sum((9, 7, 5, 3)), case
                if shard == "tensor":
                    theirs = TorchZero(params, SGD, lr=0.1)
                    mine = [id(param) for group in optimizer.optim.param_groups for param in group["params"]]
                    his = [id(param) for group in theirs.optim.param_groups for param in group["params"]]
                    assert sorted(mine) == sorted(his), f"{case}: the same tensors as torch's class"


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sizes_9_7_5_3_per_rank_are_sharded_into_equal_sums_trainable_or_not(world):
    run_ranks(equal_sums, world)


def added_groups(rank: int, world: int) -> None:
    """The cases of torch's tests: all trainable, or a large frozen one first; one frozen tensor is added."""
    for shard in ("auto", "tensor"):
        params = [torch.rand(size, 1, requires_grad=True) for size in sizes_for(world)[:-1]]
        optimizer = ZeroRedundancyOptimizer(params, SGD, lr=0.1, shard=shard)
        assert sum(everyones(owned(optimizer), world)) == 24 * world - 3
        before = {id(param) for group in optimizer.optim.param_groups for param in group["params"]}
        optimizer.add_param_group({"params": [torch.rand(3, 1)]})
        assert owned(optimizer) == 24, f"{shard}: the frozen tensor fills the gap, on whichever ranks it is"
        after = {id(param) for group in optimizer.optim.param_groups for param in group["params"]}
        assert before <= after, "what was placed stays"
        assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 2

        sizes = [100, 3, 5, 2, 6, 4]
        params = [torch.rand(size, 1, requires_grad=size != 100) for size in sizes]
        optimizer = ZeroRedundancyOptimizer(params, SGD, lr=0.1, shard=shard)
        trainable = everyones(owned(optimizer, trainable=True), world)
        assert sum(trainable) == 20
        # Whole: largest first to the emptiest. Cut: as even as can be.
        if shard == "tensor":
            assert trainable == {2: [11, 9], 3: [6, 7, 7], 4: [6, 5, 4, 5]}[world]
        else:
            assert max(trainable) - min(trainable) <= 1
        optimizer.add_param_group({"params": [torch.rand(3, 1)]})
        assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 2
        assert sum(everyones(owned(optimizer), world)) == 123

    # A frozen tensor lands on the emptiest rank.
    params = [torch.rand(size, 1, requires_grad=True) for size in (7, 5, 4, 3)[:world]]
    optimizer = ZeroRedundancyOptimizer(params, SGD, lr=0.1, shard="tensor")
    assert owned(optimizer) == (7, 5, 4, 3)[rank]
    optimizer.add_param_group({"params": [torch.rand(2, 1)]})
    assert owned(optimizer) == (7, 5, 4, 3)[rank] + (2 if rank == world - 1 else 0)


def everyones(value: int, world: int) -> list[int]:
    boxes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(boxes, torch.tensor([value]))
    return [int(box) for box in boxes]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_added_groups_keep_the_balance_and_a_frozen_tensor_lands_on_the_emptiest_rank(world):
    run_ranks(added_groups, world)


def groups_up_front_or_added(rank: int, world: int) -> None:
    """Several groups given up front, added one by one, and the plain optimizer: the same weights."""
    for views in (False, True):
        settings = ({"lr": 0.1}, {"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.2, "betas": (0.5, 0.7)})

        def split(params: list) -> list[dict[str, Any]]:
            parts = params[:1], params[1:3], params[3:]
            return [{"params": part, **options} for part, options in zip(parts, settings, strict=True)]  # noqa: B023

        up_front, added, theirs, other = parameters(), parameters(), parameters(), parameters()
        first = ZeroRedundancyOptimizer(split(up_front), Adam, parameters_as_bucket_view=views)
        first_group, *later_groups = split(added)
        second = ZeroRedundancyOptimizer([first_group], Adam, parameters_as_bucket_view=views)
        torchs = TorchZero(split(theirs), Adam, parameters_as_bucket_view=views)
        oracle = Adam(split(other))
        for group in later_groups:
            second.add_param_group(group)
        for params, optimizer in ((up_front, first), (added, second), (theirs, torchs), (other, oracle)):
            train(optimizer, params, range(3))
        for params in (up_front, added, theirs):
            assert_same(values_of(params), values_of(other), f"views={views}")
        for optimizer in (first, second):
            optimizer.consolidate_state_dict(to=world - 1)
            if rank == world - 1:
                assert_same(optimizer.state_dict(), oracle.state_dict())


@pytest.mark.parametrize("world", [2, 3])
def test_groups_up_front_added_later_and_plain_give_the_same_weights(world):
    run_ranks(groups_up_front_or_added, world)


def attributes(rank: int, world: int) -> None:
    params = parameters()
    ours, theirs = (zero(params, Adam, lr=0.1) for zero in (ZeroRedundancyOptimizer, TorchZero))
    for name in ("rank", "world_size", "global_rank", "initialized", "parameters_as_bucket_view", "process_group"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.process_group is dist.group.WORLD
    assert type(ours.optim) is type(theirs.optim) is Adam
    assert all(mine is his for mine, his in zip(ours._all_params, theirs._all_params, strict=True))
    assert ours.join_device == theirs.join_device
    assert ours.join_process_group == theirs.join_process_group
    ours.anything = 1  # torch's join test sets an attribute of its own
    positional = ZeroRedundancyOptimizer(params, Adam, None, True, False, lr=0.1)
    assert positional.parameters_as_bucket_view is True


def test_the_attributes_that_users_of_torchs_class_read_are_there():
    run_ranks(attributes, 3)
