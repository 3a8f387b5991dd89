"""The DDP hooks with all kinds of optimizers, models, inner hooks and groups of ranks.

Oracle: see test_ddp_hooks.py.
"""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.hook_twins import (
    BOTH,
    DECAY,
    HOOKS,
    OPTIMIZERS,
    SMALL_CAP,
    WIDTH,
    Chain,
    HookTwins,
    Side,
    Tangled,
    all_params,
    batch_of,
    delayed,
)
from tests.oracle import assert_same, values_of
from tests.versions import Muon

# --- optimizers and models of all kinds ---------------------------------------------------------------------------


def not_split(rank: int, world: int, hook: str) -> None:
    """Steps once over everything: schedule-free keeps counters on the group. Muon needs whole matrices."""
    from schedulefree import AdamWScheduleFree

    twins = HookTwins(AdamWScheduleFree, hook=hook, zero={"bucket_cap_mb": SMALL_CAP}, lr=0.05, warmup_steps=3)
    assert not twins.zero.engine.sharded.builder.splittable
    for side in (twins.theirs, twins.ours):
        side.optimizer.train()
    twins.iterate(3)
    for side in (twins.theirs, twins.ours):
        side.optimizer.eval()
    twins.check_weights()
    twins.check_state()  # (the gradients it changes in place, each rank its share)
    for side in (twins.theirs, twins.ours):
        side.optimizer.train()
    twins.iterate(2)
    twins.check_weights()
    if Muon is not None:
        twins = HookTwins(Muon, make=lambda: Chain([2, 0, 3, 1]), groups=all_params, hook=hook, lr=0.02)
        twins.iterate(4)
        twins.check()


@pytest.mark.parametrize("hook", HOOKS)
def test_optimizers_that_cannot_be_split_or_cut(hook):
    run_ranks(not_split, 3, hook)


def convolution() -> nn.Module:
    torch.manual_seed(7)
    layers = [nn.Unflatten(1, (4, 2, 2)), nn.Conv2d(4, 6, 2, padding=1), nn.Tanh(), nn.Conv2d(6, 8, 2)]
    return nn.Sequential(*layers).double().to(memory_format=torch.channels_last)


class Turned(nn.Module):
    """A matrix that lies column by column, and one whose rows are apart in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.columns = nn.Parameter(torch.randn(2 * WIDTH, WIDTH, dtype=torch.float64).t())
        self.apart = nn.Parameter(torch.randn(2 * WIDTH, 2 * WIDTH, dtype=torch.float64)[:, :WIDTH])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.tanh(batch @ self.columns) @ self.apart / 8


def other_memory_formats(rank: int, world: int, hook: str) -> None:
    for make, grad_view, shard in itertools.product((convolution, Turned), BOTH, ("element", "tensor")):
        ddp, zero = {"gradient_as_bucket_view": grad_view}, {"shard": shard}
        twins = HookTwins(AdamW, make=make, hook=hook, ddp=ddp, zero=zero, **DECAY)
        twins.iterate(4)
        twins.check_state()


@pytest.mark.parametrize("hook", HOOKS)
def test_parameters_in_other_memory_formats(hook):
    """DDP lays a gradient out in its bucket like the parameter if that is dense, and else row by row."""
    run_ranks(other_memory_formats, 2, hook)


def format_changed_after_ddp(rank: int, world: int, hook: str, change: str) -> None:
    """DDP fills its first buckets in the old format and, with a hook, reads them in the new one: do so, or refuse."""
    weights = []
    for kind in ("plain", "zero"):
        module = convolution().to(memory_format=torch.contiguous_format if change == "before" else torch.channels_last)
        ddp = DistributedDataParallel(module)
        if change == "before":
            module.to(memory_format=torch.channels_last)
        if kind == "plain":
            optimizer: Any = AdamW(ddp.parameters(), **DECAY)
            ddp.register_comm_hook(None, allreduce_hook)
        else:
            views = change == "by bucket views"
            zero = {"parameters_as_bucket_view": views, "overlap_with_ddp": True, **DECAY}
            optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, **zero)
            ddp.register_comm_hook(None, HOOKS[hook](allreduce_hook, ddp, optimizer))
        if change == "after":
            module.to(memory_format=torch.contiguous_format)
        for iteration in range(4):
            optimizer.zero_grad()
            Side(ddp, optimizer).backward(batch_of(rank, iteration))
            optimizer.step()
        weights.append(values_of(ddp.parameters()))
    assert_same(weights[1], weights[0])


@pytest.mark.parametrize("change", ["before", "by bucket views", "after"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_memory_format_that_changes_after_ddp_was_built_is_followed_or_refused(hook, change):
    """Before the optimizer is built, by the optimizer, after it: never silently wrong."""
    try:
        run_ranks(format_changed_after_ddp, 2, hook, change)
    except AssertionError as error:
        assert "memory format" in str(error) or "memory_format" in str(error), error  # noqa: PT017


def fused_and_narrow(rank: int, world: int, hook: str) -> None:
    """Whole parameters are bit-equal under any kernel and in any dtype (docs/design.md, "Exactness")."""
    for options in ({"fused": True}, {"foreach": True}):
        twins = HookTwins(AdamW, hook=hook, zero={"shard": "tensor"}, **DECAY, **options)
        twins.iterate(3)
        twins.check()
    for dtype in (torch.float32, torch.bfloat16):

        class Narrow(Tangled):
            def forward(self, batch: torch.Tensor, skip: Any = (), dtype: torch.dtype = dtype) -> torch.Tensor:
                return super().forward(batch.to(dtype), skip)

        def make(made: type = Narrow, dtype: torch.dtype = dtype) -> nn.Module:
            return made().to(dtype)

        twins = HookTwins(SGD, make=make, hook=hook, zero={"shard": "tensor"}, lr=0.1, momentum=0.9)
        twins.iterate(3)
        twins.check()


@pytest.mark.parametrize("hook", HOOKS)
def test_fused_kernels_and_narrow_dtypes(hook):
    run_ranks(fused_and_narrow, 2, hook)


class Odd(nn.Module):
    """Two dtypes, one matrix used twice, one layer recomputed in backward, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.empty = nn.Parameter(torch.empty(0, WIDTH, dtype=torch.float64))
        self.single = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 4)
        self.recomputed = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = torch.tanh(batch @ self.tied)
        batch = batch + checkpoint(lambda given: torch.tanh(self.recomputed(given)), batch, use_reentrant=False)
        batch = batch + self.single(batch.float()).double()
        return torch.tanh(batch @ self.tied.T) * self.scale + self.empty.sum()


def odd_models(rank: int, world: int, hook: str) -> None:
    for views, cap in itertools.product(BOTH, (SMALL_CAP, 25)):
        twins = HookTwins(
            AdamW, make=Odd, hook=hook, zero={"parameters_as_bucket_view": views, "bucket_cap_mb": cap}, **DECAY
        )
        twins.iterate(4)
        twins.check()


@pytest.mark.parametrize("hook", HOOKS)
def test_mixed_dtypes_tied_weights_checkpointing_scalars_and_nothing(hook):
    run_ranks(odd_models, 3, hook)


def two_models_in_turns(rank: int, world: int, hook: str) -> None:
    """Each optimizer steps in the backward of its own model only, as in a GAN."""
    first = HookTwins(AdamW, hook=hook, make=lambda: Tangled(1), **DECAY)
    second = HookTwins(SGD, hook=hook, make=lambda: Tangled(2), **OPTIMIZERS["SGD"][1])
    for count in (1, 2, 1):
        first.iterate(count)
        second.iterate(1)
    for sides in ((first.theirs, second.theirs), (first.ours, second.ours)):  # both in one graph
        for side in sides:
            side.optimizer.zero_grad()
        sides[1].ddp(sides[0].ddp(batch_of(rank, 50))).square().mean().backward()
        for side in sides:
            side.optimizer.step()
    first.check()
    second.check()


@pytest.mark.parametrize("hook", HOOKS)
def test_two_models_each_with_its_own_hook(hook):
    run_ranks(two_models_in_turns, 2, hook)


def forgotten(rank: int, world: int, hook: str) -> None:
    """``step()`` need not be called, so nobody but the hook need hold the optimizer."""
    ddp = DistributedDataParallel(Tangled(), bucket_cap_mb=SMALL_CAP)

    def register() -> None:
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), SGD, overlap_with_ddp=True, lr=0.1)
        ddp.register_comm_hook(None, HOOKS[hook](allreduce_hook, ddp, optimizer))

    register()
    gc.collect()
    oracle_ddp = DistributedDataParallel(Tangled(), bucket_cap_mb=SMALL_CAP)
    oracle_ddp.register_comm_hook(None, allreduce_hook)
    oracle = Side(oracle_ddp, SGD(oracle_ddp.parameters(), lr=0.1))
    for iteration in range(3):
        ddp.zero_grad()
        ddp(batch_of(rank, iteration)).square().mean().backward()
        oracle.optimizer.zero_grad()
        oracle.backward(batch_of(rank, iteration))
        oracle.optimizer.step()
        assert_same(values_of(ddp.parameters()), oracle.weights(), f"iteration {iteration}")


@pytest.mark.parametrize("hook", HOOKS)
def test_training_goes_on_if_only_the_hook_knows_the_optimizer(hook):
    run_ranks(forgotten, 2, hook)


def released(rank: int, world: int) -> None:
    """The parameters outlive DDP and optimizer; the state must not stay with them."""
    module = Tangled()
    for make in HOOKS.values():
        ddp = DistributedDataParallel(module, find_unused_parameters=True)
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, overlap_with_ddp=True)
        ddp.register_comm_hook(None, make(allreduce_hook, ddp, optimizer))
        ddp(batch_of(rank, 0)).square().mean().backward()
        state = weakref.ref(next(iter(optimizer.optim.state.values()))["exp_avg"])
        assert state() is not None
        del ddp, optimizer
        gc.collect()
        assert state() is None


def test_the_state_goes_when_ddp_and_optimizer_go():
    run_ranks(released, 2)


# --- what reduces -------------------------------------------------------------------------------------------------


def out_of_place(group, bucket):
    """Gives a tensor of its own, larger than the bucket, and leaves DDP's buffer alone."""
    group = group or dist.group.WORLD
    copy = torch.empty(bucket.buffer().numel() + 7, dtype=bucket.buffer().dtype)[:-7]
    copy.copy_(bucket.buffer()).div_(group.size())
    return dist.all_reduce(copy, group=group, async_op=True).get_future().then(lambda _: copy)


def at_once(group, bucket):
    """Reduces before it returns."""
    dist.all_reduce(bucket.buffer().div_((group or dist.group.WORLD).size()), group=group)
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def bf16(group, bucket):
    """DDP refuses bf16_compress_hook by its name unless the backend is NCCL; gloo can do it all the same."""
    return bf16_compress_hook(group, bucket)


INNER = {
    "allreduce": allreduce_hook,
    "fp16": fp16_compress_hook,
    "bf16": bf16,
    "fp16 wrapper": fp16_compress_wrapper(allreduce_hook),
    "out of place": out_of_place,
    "at once": at_once,
}


def inner_hooks(rank: int, world: int, hook: str) -> None:
    for (name, inner), grad_view in itertools.product(INNER.items(), BOTH):
        twins = HookTwins(AdamW, hook=hook, inner=inner, ddp={"gradient_as_bucket_view": grad_view}, name=name, **DECAY)
        twins.iterate(4)
        twins.check()
    # Iterations 1 and 2 reduce in full, 3 and later send two thin matrices per bucket. (With several buckets under way
    # PowerSGD's own callbacks would run in any order: one bucket.)
    twins = HookTwins(
        AdamW,
        hook=hook,
        inner=power_sgd.powerSGD_hook,
        inner_state=lambda: power_sgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2),
        ddp={"bucket_cap_mb": 25},
        name="PowerSGD",
        **DECAY,
    )
    twins.iterate(5)
    twins.check()


@pytest.mark.parametrize("hook", HOOKS)
def test_any_ddp_hook_that_reduces_may_be_inside(hook):
    """Compared with DDP under the same inner hook: also what compression loses is lost alike."""
    run_ranks(inner_hooks, 2, hook)


def two_optimizers_on_one_model(rank: int, world: int, inside: str, outside: str, find_unused: bool) -> None:
    """DDP takes one hook only, so that of the second optimizer reduces with that of the first."""
    first = Muon or SGD
    delays, weights = random.Random(rank), []
    for kind in ("plain", "zero"):
        ddp = DistributedDataParallel(
            Chain(list(range(24))), bucket_cap_mb=4 * SMALL_CAP, find_unused_parameters=find_unused
        )
        even, odd = list(ddp.parameters())[::2], list(ddp.parameters())[1::2]
        if kind == "plain":
            optimizers: list[Any] = [first(even, lr=0.01), AdamW(odd, lr=0.01)]
            ddp.register_comm_hook(None, allreduce_hook)
        else:
            zero = {"overlap_with_ddp": True, "bucket_cap_mb": SMALL_CAP, "lr": 0.01}
            optimizers = [
                ZeroRedundancyOptimizer(even, first, **zero),
                ZeroRedundancyOptimizer(odd, AdamW, **zero),
            ]
            inner = HOOKS[inside](delayed(delays), ddp, optimizers[0])
            if outside == "interleaved":
                with pytest.raises(ValueError, match="hook_with_zero_step around it"):
                    HOOKS[outside](inner, ddp, optimizers[1])
                return
            ddp.register_comm_hook(None, HOOKS[outside](inner, ddp, optimizers[1]))
        for iteration in range(40):
            ddp.zero_grad()
            Side(ddp, None).backward(batch_of(rank, iteration))
            for optimizer in optimizers:
                optimizer.step()
        weights.append(values_of(ddp.parameters()))
    assert_same(weights[1], weights[0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        pytest.param("at the end", "at the end", marks=pytest.mark.again),
        ("at the end", "interleaved"),
        pytest.param("interleaved", "at the end", marks=pytest.mark.extended),
        pytest.param("interleaved", "interleaved", marks=pytest.mark.extended),
    ],
)
def test_two_optimizers_on_one_model_with_one_hook_inside_the_other(inside, outside):
    """Ranks that find a reduction done in the first hook must not wait for ranks that find it done in the second.

    So an interleaved hook around one that steps is refused.
    """
    for find_unused in BOTH:
        run_ranks(two_optimizers_on_one_model, 3, inside, outside, find_unused, timeout=40, pg_timeout=10)


# --- sub-groups ---------------------------------------------------------------------------------------------------


def in_a_subgroup(rank: int, world: int, hook: str, way: str) -> None:
    members = [1, 3]
    if way == "all ranks make the group":
        group = dist.new_group(members)
    elif rank in members:
        group = dist.new_group(members, use_local_synchronization=True)
    others = []  # kept alive
    if way == "rank 1 is in more groups":
        if rank in (0, 2):  # new_group itself hangs unless its members are in equally many groups
            others.append(dist.new_group([0, 2], use_local_synchronization=True))
        if rank in (1, 2):
            others += [dist.new_group([1, 2], use_local_synchronization=True) for _ in range(2)]
        if rank == 1:
            others += [dist.new_group([1], use_local_synchronization=True) for _ in range(2)]
        dist.barrier()  # a rank that is done must not leave while others still connect to it
    if rank not in members:
        return
    for static, find_unused, cap in ((False, False, SMALL_CAP), (True, False, 25), (False, True, SMALL_CAP)):
        twins = HookTwins(
            AdamW,
            hook=hook,
            group=group,
            ddp={"static_graph": static, "find_unused_parameters": find_unused},
            zero={"bucket_cap_mb": cap},
            **DECAY,
        )
        assert (twins.zero.rank, twins.zero.global_rank) == (members.index(rank), rank)
        twins.iterate(2)
        twins.iterate(3, skip=[4] if find_unused else [])
        twins.check(to=1)


@pytest.mark.parametrize(
    "way", ["all ranks make the group", "only the members do anything", "rank 1 is in more groups"]
)
@pytest.mark.parametrize("hook", HOOKS)
def test_ddp_and_optimizer_on_ranks_1_and_3_of_4(hook, way):
    """Group and global ranks must not be mixed up, and the ranks that are no members must not be waited for."""
    run_ranks(in_a_subgroup, 4, hook, way, pg_timeout=20)


def sharded_within_pairs(rank: int, world: int, hook: str) -> None:
    """DDP over all ranks, the optimizer sharded within {0, 1} and within {2, 3}: gradients are equal everywhere."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    weights = []
    for kind in ("plain", "zero"):
        ddp = DistributedDataParallel(Tangled(), find_unused_parameters=True, bucket_cap_mb=SMALL_CAP)
        if kind == "plain":
            optimizer: Any = AdamW(ddp.parameters(), **DECAY)
            ddp.register_comm_hook(None, allreduce_hook)
        else:
            optimizer = ZeroRedundancyOptimizer(
                ddp.parameters(), AdamW, pairs[rank // 2], overlap_with_ddp=True, **DECAY
            )
            ddp.register_comm_hook(None, HOOKS[hook](allreduce_hook, ddp, optimizer))
        for iteration in range(4):
            optimizer.zero_grad()
            only_on_3 = [] if rank == 3 or iteration == 0 else [1]
            Side(ddp, optimizer).backward(batch_of(rank, iteration), skip=only_on_3)
            optimizer.step()
        weights.append(values_of(ddp.parameters()))
    assert_same(weights[1], weights[0])


@pytest.mark.parametrize("hook", HOOKS)
def test_an_optimizer_that_is_sharded_over_a_part_of_ddps_ranks(hook):
    """What counts as unused is a matter of DDP's ranks, not of the optimizer's."""
    run_ranks(sharded_within_pairs, 4, hook, pg_timeout=20)


# --- uneven inputs ------------------------------------------------------------------------------------------------


def uneven_inputs(rank: int, world: int, hook: str, joined: str) -> None:
    twins = HookTwins(SGD, hook=hook, **OPTIMIZERS["SGD"][1])
    count = [2, 5, 3][rank]
    for side in (twins.theirs, twins.ours):
        both = side is twins.ours and joined == "ddp and zero"
        with Join([side.ddp, side.optimizer] if both else [side.ddp]):
            for iteration in range(count):
                side.optimizer.zero_grad()
                side.backward(batch_of(rank, iteration))
                side.optimizer.step()
    twins.check_weights()
    twins.zero.check_replicas()
    twins.zero.consolidate_state_dict(to=1)
    if rank == 1:  # whose plain optimizer saw every step
        assert_same(twins.zero.state_dict()["state"], twins.plain.state_dict()["state"], "state")


@pytest.mark.parametrize("joined", ["ddp and zero", "ddp"])
@pytest.mark.parametrize("hook", HOOKS)
def test_uneven_inputs_end_in_the_weights_of_ddps_join(hook, joined):
    """A rank that has run out of inputs is called by DDP with empty buckets, and steps its share with the others'."""
    run_ranks(uneven_inputs, 3, hook, joined, timeout=30, pg_timeout=8)
