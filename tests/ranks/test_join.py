"""Uneven inputs. Oracle: DDP in its own Join with the plain optimizer, float64.

Both runs reduce the same gradients in the same order, so weights and states are compared bit by bit.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import assert_same, error_of, values_of


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()  # 66 elements


def batches(rank: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(count)]


def fit(
    ddp: Any, optimizer: Any, joinables: list, inputs: list, scheduler: Any = None, closure: bool = False, **join: Any
) -> None:
    with Join(joinables, **join):
        for batch in inputs:

            def evaluate(batch: torch.Tensor = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = ddp(batch).square().mean()
                loss.backward()
                return loss

            if closure:
                optimizer.step(evaluate)
            else:
                evaluate()
                optimizer.step()
            if scheduler is not None:
                scheduler.step()


def decay(epoch: int) -> float:
    return 0.5**epoch


def compare(
    rank: int,
    counts: list[int],
    optimizer_class: Any,
    options: dict[str, Any],
    *,
    zero: dict[str, Any] | None = None,
    scheduled: bool = False,
    group: Any = None,
    join: dict[str, Any] | None = None,
    closure: bool = False,
) -> None:
    """Train one model with the plain optimizer and one with ours, in a Join; then compare weights and state."""
    join = join or {}
    oracle_ddp = DistributedDataParallel(make_model(), process_group=group)
    oracle = optimizer_class(oracle_ddp.parameters(), **copy.deepcopy(options))  # a tensor lr is not shared
    ddp = DistributedDataParallel(make_model(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class, group, **(zero or {}), **options)
    schedulers = (LambdaLR(oracle, decay), LambdaLR(optimizer, decay)) if scheduled else (None, None)
    inputs = batches(rank, counts[rank])
    last = max(range(len(counts)), key=counts.__getitem__)  # the rank whose plain optimizer saw every step
    fit(oracle_ddp, oracle, [oracle_ddp], inputs, schedulers[0], closure, **join)
    fit(ddp, optimizer, [ddp, optimizer], inputs, schedulers[1], closure, **join)
    assert_same(values_of(ddp.parameters()), values_of(oracle_ddp.parameters()), f"{counts} {options} {zero}")
    optimizer.check_replicas()
    optimizer.consolidate_state_dict(to=last)
    if rank == last:
        assert_same(optimizer.state_dict()["state"], oracle.state_dict()["state"], f"state, {counts} {options} {zero}")


UNEVEN = {1: [3], 2: [2, 5], 3: [4, 0, 6], 4: [5, 8, 6, 7]}


def uneven_inputs(rank: int, world: int) -> None:
    for shard in ("auto", "tensor"):
        compare(rank, UNEVEN[world], Adam, {"lr": 0.1}, zero={"shard": shard})
    compare(rank, UNEVEN[world], SGD, {"lr": 0.1, "momentum": 0.9}, zero={"parameters_as_bucket_view": True})


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_uneven_inputs_end_in_the_weights_and_state_of_ddps_join_with_the_plain_optimizer(world):
    """4 ranks with 5, 8, 6 and 7 batches; 3 ranks of which one has none at all."""
    run_ranks(uneven_inputs, world)


def uneven_with_small_buckets_and_views(rank: int, world: int) -> None:
    for views in (False, True):
        zero = {"bucket_cap_mb": 0.0001, "parameters_as_bucket_view": views}
        compare(rank, UNEVEN[world], AdamW, {"lr": 0.1, "amsgrad": True}, zero=zero)


def test_uneven_inputs_with_several_buckets_with_and_without_views():
    run_ranks(uneven_with_small_buckets_and_views, 3)


def first_rank_has_nothing(rank: int, world: int) -> None:
    compare(rank, [0, 0, 3], Adam, {"lr": 0.1})


def test_ranks_without_any_batch_still_own_and_step_their_share():
    run_ranks(first_rank_has_nothing, 3)


def scheduled(rank: int, world: int) -> None:
    """The scheduler of a rank that has joined stands still: it must take the options of the active ones."""
    compare(rank, UNEVEN[world], Adam, {"lr": 0.1}, scheduled=True)
    compare(rank, UNEVEN[world], Adam, {"lr": torch.tensor(0.1), "foreach": False}, scheduled=True)


@pytest.mark.parametrize("world", [3, 4])
def test_a_joined_rank_follows_the_learning_rate_of_the_active_ones(world):
    run_ranks(scheduled, world)


def even_or_disabled(rank: int, world: int) -> None:
    compare(rank, [4] * world, Adam, {"lr": 0.1})
    compare(rank, [4] * world, Adam, {"lr": 0.1}, join={"enable": False})


def test_even_inputs_and_a_disabled_join_change_nothing():
    run_ranks(even_or_disabled, 3)


def test_a_second_join_after_the_first_starts_from_equal_replicas_and_state():
    """Here the oracle cannot be the plain optimizer, whose state differs between ranks after the first epoch.

    Oracle: the plain optimizer of the rank with most batches, given to all ranks between the epochs.
    """
    run_ranks(two_epochs_with_shared_state, 3)


def two_epochs_with_shared_state(rank: int, world: int) -> None:
    counts, last = [4, 1, 3], 0
    oracle_ddp = DistributedDataParallel(make_model())
    ddp = DistributedDataParallel(make_model())
    oracle = Adam(oracle_ddp.parameters(), lr=0.1)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), Adam, lr=0.1)
    inputs = batches(rank, counts[rank])
    for _ in range(2):
        fit(oracle_ddp, oracle, [oracle_ddp], inputs)
        fit(ddp, optimizer, [ddp, optimizer], inputs)
        box = [oracle.state_dict()]
        dist.broadcast_object_list(box, src=last)
        oracle.load_state_dict(box[0])
    # After the context, ordinary training goes on.
    for batch in batches(rank, 2):
        for model, stepper in ((oracle_ddp, oracle), (ddp, optimizer)):
            stepper.zero_grad()
            model(batch).square().mean().backward()
            stepper.step()
    assert_same(values_of(ddp.parameters()), values_of(oracle_ddp.parameters()))
    optimizer.consolidate_state_dict(to=last)
    if rank == last:
        assert_same(optimizer.state_dict()["state"], oracle.state_dict()["state"])


def early_termination(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), Adam, lr=0.1)
    inputs = batches(rank, UNEVEN[world][rank])
    error = error_of(
        lambda: fit(ddp, optimizer, [ddp, optimizer], inputs, throw_on_early_termination=True), "inputs are uneven"
    )
    assert isinstance(error, RuntimeError)
    assert "exhausted" in str(error)
    oracle_ddp = DistributedDataParallel(make_model())
    oracle = Adam(oracle_ddp.parameters(), lr=0.1)
    error_of(lambda: fit(oracle_ddp, oracle, [oracle_ddp], inputs, throw_on_early_termination=True), "oracle")
    assert_same(values_of(ddp.parameters()), values_of(oracle_ddp.parameters()), "the steps before")


def test_throw_on_early_termination_raises_on_every_rank():
    run_ranks(early_termination, 3)


def join_in_a_subgroup(rank: int, world: int) -> None:
    members = [1, 2, 3]
    group = dist.new_group(members)
    if rank in members:
        compare(group.rank(), [3, 5, 2], Adam, {"lr": 0.1}, group=group)
        compare(group.rank(), [3, 5, 2], Adam, {"lr": 0.1}, group=group, zero={"shard": "tensor"})


def test_uneven_inputs_in_a_subgroup():
    run_ranks(join_in_a_subgroup, 4)


def closures(rank: int, world: int) -> None:
    compare(rank, [2] * world, Adam, {"lr": 0.1}, closure=True)
    compare(rank, [2, 4, 3], Adam, {"lr": 0.1}, closure=True)


def test_closures_work_in_a_join_context():
    """torch's class runs the closure first, so that DDP's collectives in it come before the optimizer's."""
    run_ranks(closures, 3, timeout=30, pg_timeout=10)


def gradients_stay(rank: int, world: int) -> None:
    """A joined rank's ``.grad`` are its own again after a shadow step, and frozen parameters get no state."""
    counts = [4, 1, 2]
    ddp_model = make_model()
    ddp_model[0].weight.requires_grad_(False)
    ddp = DistributedDataParallel(ddp_model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), Adam, lr=0.1)
    oracle_model = make_model()
    oracle_model[0].weight.requires_grad_(False)
    oracle_ddp = DistributedDataParallel(oracle_model)
    oracle = Adam(oracle_ddp.parameters(), lr=0.1)
    inputs = batches(rank, counts[rank])
    fit(oracle_ddp, oracle, [oracle_ddp], inputs)
    fit(ddp, optimizer, [ddp, optimizer], inputs)
    assert_same(values_of(ddp.parameters()), values_of(oracle_ddp.parameters()))
    assert_same([p.grad for p in ddp.parameters()][1:], [p.grad for p in oracle_ddp.parameters()][1:], "own gradients")
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        assert_same(optimizer.state_dict()["state"], oracle.state_dict()["state"])
        assert 0 not in optimizer.state_dict()["state"]


def test_borrowed_gradients_are_given_back_and_frozen_parameters_stay():
    run_ranks(gradients_stay, 3)


def optimizer_alone(rank: int, world: int) -> None:
    """Without DDP the optimizer is the first joinable and announces the steps itself."""
    counts = [2, 5, 3]
    model, oracle_model = make_model(), make_model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.1)
    oracle = Adam(oracle_model.parameters(), lr=0.1)
    everyone = batches(7, 5)  # the same data on every rank: gradients need no reduction
    with Join([optimizer]):
        for batch in everyone[: counts[rank]]:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    for batch in everyone:
        oracle.zero_grad()
        oracle_model(batch).square().mean().backward()
        oracle.step()
    assert_same(values_of(model.parameters()), values_of(oracle_model.parameters()))


def test_the_optimizer_alone_in_a_join_context():
    run_ranks(optimizer_alone, 3)
