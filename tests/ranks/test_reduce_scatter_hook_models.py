"""DDP with sharded gradients around the optimizer's other features, and models that are not all the optimizer's.

Oracle: DDP with plain optimizers, float64, with the tolerance of ``tests/sharded_ddp_twins.py`` unless bits are named.
"""

from __future__ import annotations

import copy
import gc
import pickle
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from shardstep import ZeroRedundancyOptimizer, checkpoint, shard_ddp_gradients
from shardstep.comm import collectives
from shardstep.grads import scheduler
from tests.harness import run_ranks
from tests.hook_twins import BOTH, SMALL_CAP, WIDTH, Chain, Side, Tangled, all_params, batch_of
from tests.oracle import assert_same, error_of, values_of
from tests.sharded_ddp_twins import CLOSE, ShardedTwins, plain, sharded
from tests.surroundings import choose
from tests.twins import assert_same as assert_close

Build = Callable[[nn.Module, bool], list[Any]]


class Several:
    """A DDP model with several optimizers, plain and ours side by side."""

    def __init__(self, make: Callable[[], nn.Module], build: Build, ddp: dict[str, Any]) -> None:
        self.ddps = [DistributedDataParallel(make(), **ddp) for _ in range(2)]
        self.optimizers = [build(wrapped.module, ours) for wrapped, ours in zip(self.ddps, BOTH, strict=True)]
        mine = [one for one in self.optimizers[1] if isinstance(one, ZeroRedundancyOptimizer)]
        shard_ddp_gradients(self.ddps[1], *mine)

    def train(self, rank: int, count: int) -> None:
        for iteration in range(count):
            for wrapped, optimizers in zip(self.ddps, self.optimizers, strict=True):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                wrapped(batch_of(rank, iteration)).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
            weights = [[param.detach() for param in wrapped.parameters()] for wrapped in self.ddps]
            assert_close(weights[1], weights[0], f"iteration {iteration}", CLOSE)


def partly_frozen() -> nn.Module:
    module = Tangled()
    module.layers[3].requires_grad_(False)
    return module


def half_of_it(module: nn.Module, ours: bool) -> list[Any]:
    """Ours has a layer and a half. The others, one of them frozen, have a plain optimizer on every rank."""
    first = [*module.layers[1].parameters(), module.layers[4].weight]
    others = [param for param in module.parameters() if all(param is not one for one in first)]
    mine = ZeroRedundancyOptimizer(first, AdamW, lr=0.05) if ours else AdamW(first, lr=0.05)
    return [mine, SGD(others, lr=0.1)]


def foreign(rank: int, world: int) -> None:
    for as_view in BOTH:
        # DDP's buckets: everything in one; a layer in each, so that some are not ours at all, and some in part.
        for cap in (25, SMALL_CAP):
            both = Several(partly_frozen, half_of_it, {"bucket_cap_mb": cap, "gradient_as_bucket_view": as_view})
            both.train(rank, 4)
            theirs, mine = (wrapped.module.layers[0].weight.grad for wrapped in both.ddps)
            assert type(mine) is Tensor
            assert_close(mine, theirs, f"{cap} {as_view}: a gradient that is not ours", CLOSE)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_parameters_that_no_optimizer_of_ours_has_are_all_reduced_as_usual(world):
    run_ranks(foreign, world)


class Late(nn.Module):
    """A module that takes its time, another one on every rank and in every forward and backward."""

    def __init__(self, module: nn.Module, delays: random.Random) -> None:
        super().__init__()
        self.module, self.delays = module, delays

    @property
    def layers(self) -> nn.ModuleList:
        return self.module.layers

    def forward(self, batch: Tensor) -> Tensor:
        def wait(gradient: Tensor) -> None:
            time.sleep(self.delays.choice([0, 0, 0.003]))

        output = self.module(batch)
        output.register_hook(wait)
        return output


def matrices_and_vectors(module: nn.Module, ours: bool) -> list[Any]:
    matrices = [param for param in module.parameters() if param.dim() == 2]
    vectors = [param for param in module.parameters() if param.dim() == 1]
    if not ours:
        return [torch.optim.Muon(matrices, lr=0.05), AdamW(vectors, lr=0.05)]
    small = {"bucket_cap_mb": SMALL_CAP / 4}
    return [
        ZeroRedundancyOptimizer(matrices, torch.optim.Muon, lr=0.05, **small),
        ZeroRedundancyOptimizer(vectors, AdamW, lr=0.05, **small),
    ]


def muon_and_adamw(rank: int, world: int) -> None:
    delays = random.Random(rank)
    for cap in (SMALL_CAP, 25):
        both = Several(lambda: Late(Tangled(), delays), matrices_and_vectors, {"bucket_cap_mb": cap})
        both.train(rank, 6)


@pytest.mark.parametrize("world", [2, 3])
def test_muon_for_matrices_and_adamw_for_the_rest(world):
    """Each has its reductions on a process group of its own, and ranks are late at random."""
    run_ranks(muon_and_adamw, world)


class Normed(nn.Module):
    """With buffers that DDP broadcasts. (No bias before the norm: its gradient would be nothing but rounding.)"""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.last = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, batch: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(batch))))


def batch_norm(rank: int, world: int) -> None:
    twins = ShardedTwins.make(AdamW, make=Normed, groups=all_params, lr=0.05)
    twins.train(4)
    buffers = twins.each(lambda side: [buffer.clone() for buffer in side.ddp.buffers()])
    assert_close(buffers[1], buffers[0], "running statistics", CLOSE)


def test_buffers_of_batch_norm_are_ddps():
    run_ranks(batch_norm, 3)


def closures(rank: int, world: int) -> None:
    for shard in ("element", "tensor"):
        twins = ShardedTwins.make(AdamW, groups=all_params, zero={"shard": shard}, lr=0.05)
        for _ in range(3):
            losses, inputs = [], twins.batch()
            for side in (twins.theirs, twins.ours):

                def evaluate(side: Side = side, batch: Tensor = inputs) -> Tensor:
                    side.optimizer.zero_grad()
                    return side.backward(batch)

                losses.append(side.optimizer.step(evaluate))
            assert_close(losses[1].detach(), losses[0].detach(), "loss", CLOSE)
            twins.iteration += 1
            twins.check_weights()
            twins.check_gradients()


def test_a_closure_may_compute_the_gradients():
    run_ranks(closures, 3)


def lazily(rank: int, world: int) -> None:
    for views in BOTH:
        twins = ShardedTwins.make(AdamW, zero={"lazy_gather": True, "parameters_as_bucket_view": views}, lr=0.05)
        twins.train(4)
        twins.ours.optimizer.wait_for_parameters()
        twins.check_weights()
        twins.check_state()


def test_lazy_gathers_and_bucket_views():
    run_ranks(lazily, 3)


def own_clipping(rank: int, world: int) -> None:
    twins = ShardedTwins.make(AdamW, lr=0.05)
    for order in (2.0, 1.0, float("inf")):
        twins.zero_grad()
        twins.backward()
        expected = nn.utils.clip_grad_norm_(twins.theirs.ddp.parameters(), 0.2, order)
        assert_close(twins.ours.optimizer.clip_grad_norm_(0.2, order), expected, f"order {order}", CLOSE)
        twins.check_gradients()
        twins.step()
        twins.check_weights()


def test_the_optimizers_own_clipping():
    run_ranks(own_clipping, 3)


def resumed(rank: int, world: int, folder: str) -> None:
    """Three iterations, a checkpoint, three more; and the three more in a model that starts from the checkpoint."""

    def train(side: Side, iterations: range) -> None:
        for iteration in iterations:
            side.optimizer.zero_grad()
            side.backward(batch_of(rank, iteration))
            side.optimizer.step()

    side = sharded(Tangled(), AdamW, lr=0.05)
    train(side, range(3))
    checkpoint.save(folder, side.optimizer, side.ddp.module)
    train(side, range(3, 6))
    other = sharded(Tangled(seed=9), AdamW, lr=0.05)
    checkpoint.load(folder, other.optimizer, other.ddp.module)
    train(other, range(3, 6))
    assert_same(other.weights(), side.weights(), "resumed")


def test_training_resumes_from_a_checkpoint_with_the_same_bits(tmp_path: Path):
    run_ranks(resumed, 3, str(tmp_path / "checkpoint"))


def added_groups(rank: int, world: int) -> None:
    """The last layer is DDP's from the start, and all-reduced until the optimizer gets it."""
    first = lambda module: [param for layer in module.layers[:4] for param in layer.parameters()]  # noqa: E731
    twins = ShardedTwins.make(AdamW, groups=first, lr=0.05)
    for iteration in range(4):
        if iteration == 2:
            for side in (twins.theirs, twins.ours):
                side.optimizer.add_param_group({"params": list(side.ddp.module.layers[4].parameters()), "lr": 0.1})
        twins.each(lambda side: side.ddp.zero_grad())
        twins.zero_grad()
        twins.backward()
        twins.check_gradients()
        twins.step()
        twins.check_weights()
    stranger = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    error = error_of(lambda: twins.ours.optimizer.add_param_group({"params": [stranger]}), "a stranger")
    assert isinstance(error, ValueError)
    assert "parameters of the DDP module" in str(error)
    twins.zero_grad()
    twins.backward()
    twins.step()
    twins.check_weights()


def test_groups_can_be_added_if_ddp_has_their_parameters():
    run_ranks(added_groups, 3)


def wrapped_anew(rank: int, world: int) -> None:
    """As after unfreezing: DDP looks at requires_grad only once."""
    modules = [Tangled(), Tangled()]
    for module in modules:
        module.layers[0].requires_grad_(False)
    theirs, ours = plain(modules[0], AdamW, lr=0.05), sharded(modules[1], AdamW, lr=0.05)
    twins = ShardedTwins(theirs, ours, name="frozen")
    twins.train(2)
    optimizers = [theirs.optimizer, ours.optimizer]
    del theirs, ours, twins
    gc.collect()
    sides = []
    for module, optimizer in zip(modules, optimizers, strict=True):
        module.layers[0].requires_grad_(True)
        sides.append(Side(DistributedDataParallel(module, bucket_cap_mb=SMALL_CAP), optimizer))
    shard_ddp_gradients(sides[1].ddp, sides[1].optimizer)
    twins = ShardedTwins(*sides, name="unfrozen")
    for _ in range(3):
        twins.zero_grad()
        twins.backward()
        twins.check_gradients()
        twins.step()
        twins.check_weights()


def test_a_model_that_is_wrapped_anew_goes_on():
    run_ranks(wrapped_anew, 3)


def held(rank: int, world: int) -> None:
    module = Chain(list(range(4)))
    side = sharded(module, AdamW, all_params, lr=0.05)
    side.backward(batch_of(rank, 0))
    whole = sum(param.nbytes for param in module.parameters())
    gradients = side.optimizer.memory().gradients
    assert gradients == whole + whole // world, "DDP's buckets, and this rank's share of the sums"
    for copied in (copy.deepcopy, pickle.dumps):
        error = error_of(lambda copied=copied: copied(side.optimizer), "a copy")
        assert "Copy its state dict instead" in str(error)
    assert "no_sync of DDP" in str(error_of(side.optimizer.no_sync().__enter__, "no_sync"))


def test_memory_tells_of_ddps_buckets_and_copies_are_refused():
    run_ranks(held, 2)


def models_as_they_were(rank: int, world: int) -> None:
    """An average of the weights is a copy of the module; a program may save the module whole."""
    for as_view in BOTH:
        side = sharded(Tangled(), AdamW, ddp={"gradient_as_bucket_view": as_view}, lr=0.05)
        side.optimizer.zero_grad()
        copies = [copy.deepcopy(side.ddp.module), pickle.loads(pickle.dumps(side.ddp.module))]
        side.backward(batch_of(rank, 0))
        side.optimizer.step()
        for copied in copies:
            assert_same(values_of(copied.parameters()), values_of(Tangled().parameters()), f"{as_view}")
            copied(batch_of(rank, 0)).sum().backward()
            assert {type(param.grad) for param in copied.parameters()} == {Tensor}


def test_the_module_can_still_be_copied_and_saved_whole():
    run_ranks(models_as_they_were, 2)


def volume(rank: int, world: int) -> dict[str, int]:
    """Bytes that this rank sends to others in one iteration, over sockets, by where they are sent."""
    choose("sockets")
    module = Chain(list(range(6)))
    side = sharded(module, AdamW, all_params, lr=0.05)
    sent = {"reduced": 0, "gathered": 0, "all-reduced": 0}
    swap, gather, reduce = collectives.swap, collectives.gather_shards, dist.all_reduce

    def swapping(group: Any, outgoing: Any, *args: Any) -> Any:
        sent["reduced"] += sum(part.nbytes for part in outgoing.values())
        return swap(group, outgoing, *args)

    def gathering(group: Any, shards: Any) -> Any:
        sent["gathered"] += (world - 1) * sum(part.nbytes for part in shards[rank])
        return gather(group, shards)

    def reducing(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent["all-reduced"] += tensor.nbytes
        return reduce(tensor, *args, **kwargs)

    side.backward(batch_of(rank, 0))
    side.optimizer.step()  # the second iteration counts: DDP compares a few numbers in the first
    collectives.swap, collectives.gather_shards, dist.all_reduce = swapping, gathering, reducing
    try:
        side.optimizer.zero_grad()
        side.backward(batch_of(rank, 1))
        side.optimizer.step()
    finally:
        collectives.swap, collectives.gather_shards, dist.all_reduce = swap, gather, reduce
    return {**sent, "whole": sum(param.nbytes for param in module.parameters())}


def test_the_volume_is_ddps_own():
    """A ring all-reduce sends 2 (N-1)/N of the gradients per rank; reduce-scatter and all-gather half of that each."""
    per_rank = run_ranks(volume, 3)
    whole = per_rank[0]["whole"]
    for kind in ("reduced", "gathered"):
        assert sum(sent[kind] for sent in per_rank) == 2 * whole, (kind, per_rank)  # N (N-1)/N
    assert sum(sent["all-reduced"] for sent in per_rank) == 0


# --- exceptions -------------------------------------------------------------------------------------------------------


class Failing(Tangled):
    fails = False

    def forward(self, batch: Tensor, skip: Any = ()) -> Tensor:
        if self.fails:
            raise ValueError("a bad batch")
        return super().forward(batch, skip)


def skipped(rank: int, world: int, bad: list[int], first: bool) -> None:
    """Batch 2 fails in the forward of the ranks ``bad``; all skip it. ``first``: batch 0 does."""
    scheduler.PATIENCE = 0.3
    twins = ShardedTwins.make(AdamW, make=Failing, groups=all_params, lr=0.05)
    for number in range(5):
        fails = number == (0 if first else 2)
        twins.zero_grad()
        twins.ours.ddp.module.fails = fails and rank in bad
        if fails:
            try:
                twins.ours.backward(twins.batch())
                assert rank not in bad
            except ValueError:
                assert rank in bad
            twins.iteration += 1
            continue
        twins.backward()
        twins.clip(0.3)
        twins.step()
        twins.check_weights()
    twins.check_state()


@pytest.mark.parametrize("first", BOTH)
def test_a_batch_that_fails_in_forward_on_all_ranks_is_skipped(first):
    run_ranks(skipped, 3, [0, 1, 2], first)


def test_a_batch_that_fails_in_forward_on_one_rank_is_skipped_on_all():
    """The others come back from their backward after a moment. (Plain DDP would wait for good.)"""
    run_ranks(skipped, 3, [1], False)


# --- other backends, other groups -------------------------------------------------------------------------------------


def as_on_an_accelerator(rank: int, world: int, hook: str) -> None:
    """The reductions and gathers of other backends than gloo, run on gloo. There nothing is told with a bucket."""
    collectives.sends_pairwise = lambda group, device: False
    for unused in BOTH:
        ddp = {"find_unused_parameters": unused}
        twins = ShardedTwins.make(AdamW, ddp=ddp, hook=hook, lr=0.05, weight_decay=0.3)
        for iteration in range(4):
            twins.zero_grad()
            twins.backward(**({"skip": [2, iteration % 2] if rank == 0 else [2]} if unused else {}))
            if not hook:  # until somebody asks, or steps, it is not known there what nobody has used
                twins.ours.optimizer.clip_grad_norm_(float("inf"))
            twins.check_gradients()
            twins.step()
            twins.check_weights()


@pytest.mark.parametrize("hook", ["", "interleaved"])
@pytest.mark.parametrize("world", [2, 3])
def test_native_reductions_equal_ddp(world, hook):
    run_ranks(as_on_an_accelerator, world, hook)


def in_a_subgroup(rank: int, world: int) -> None:
    group = dist.new_group([0, 2])
    if rank != 1:
        for hook in ("", "interleaved"):
            twins = ShardedTwins.make(AdamW, group=group, hook=hook, lr=0.05)
            twins.train(3)
            twins.check_state()


def test_a_process_group_of_some_ranks():
    run_ranks(in_a_subgroup, 3)
