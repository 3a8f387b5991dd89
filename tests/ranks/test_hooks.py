"""The stepping hooks and ``shard_ddp_gradients``: what no program of ``tests/differential`` says.

``trained`` trains a model in DDP with the optimizers and the hook it is given: ours, and plain ones as the oracle.
All is float64. With the same reduction on both sides weights have the same bits. Gloo's all-reduce adds in another
order than we do: a rounding of 2e-16 for each gradient, which a few steps enlarge to less than 1e-15 (seen); ``CLOSE``
leaves a factor of a thousand.
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

import shardstep
from shardstep import ZeroRedundancyOptimizer, reduce_scatter_hook, shard_ddp_gradients
from tests.harness import run_ranks
from tests.meshes import mesh_of
from tests.oracle import assert_same, error_of, values_of
from tests.surroundings import choose
from tests.versions import needs_complex_ddp

HOOKS = {"at the end": shardstep.hook_with_zero_step, "interleaved": shardstep.hook_with_zero_step_interleaved}
CLOSE = (0.0, 1e-12)  # rtol, atol
WIDTH = 16
CAP = 0.002  # MiB: one layer
DECAY = {"lr": 0.05, "weight_decay": 0.3}  # moves also what has a gradient of zero
BOTH = (False, True)
Hook = Callable[[Any, Any], Any]  # of DDP (which accepts no annotations that are strings, as all are here)


class Residual(nn.Module):
    """Layers that run in another order than they are registered in, so DDP rebuilds its buckets. One is recomputed.

    ``late``: backward pauses between layers now and then, on each rank elsewhere.
    """

    def __init__(self, order: Sequence[int] = (3, 0, 4, 1, 2), late: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.order, self.delays = order, random.Random(dist.get_rank()) if late else None
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in order)

    def forward(self, batch: Tensor) -> Tensor:
        for position in self.order:
            layer = self.layers[position]
            change = checkpoint(layer, batch, use_reentrant=False) if position == 0 else layer(batch)
            batch = torch.tanh(change) + batch
            if self.delays is not None and batch.requires_grad:
                batch.register_hook(lambda _: time.sleep(self.delays.choice([0, 0, 0, 0.002])))
        return batch


def loss_of(ddp: nn.Module, rank: int, iteration: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * iteration + rank)
    return ddp(torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)).square().mean()


def trained(
    rank: int,
    connect: Callable[[DDP], list[Any]],
    make: Callable[[], nn.Module] = Residual,
    count: int = 4,
    clip: float | None = None,
    join: bool = False,
    **options: Any,
) -> list[Tensor]:
    """The weights after ``count`` iterations. ``join``: in a Join context, in which each rank has its own ``count``."""
    ddp = DDP(make(), **({"bucket_cap_mb": CAP} | options))
    optimizers = connect(ddp)
    sharded = [one for one in optimizers if isinstance(one, ZeroRedundancyOptimizer)]
    with Join([ddp, *sharded], divide_by_initial_world_size=False) if join else nullcontext():
        for iteration in range(count):
            for one in (ddp, *optimizers):
                one.zero_grad()
            loss_of(ddp, rank, iteration).backward()
            if clip is not None:
                clip_grad_norm_(ddp.parameters(), clip)
            for optimizer in optimizers:
                optimizer.step()
    return values_of(ddp.parameters())


# Ways to connect a DDP module: they register a hook and return the optimizers.


def plain(ddp: DDP, hook: Hook | None = None, state: Any = None) -> list[Any]:
    """The oracle: DDP with the hook that reduces, and the plain optimizer."""
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    return [AdamW(ddp.parameters(), **DECAY)]


def stepping(ddp: DDP, hook: str, inner: Hook, state: Any = None, **options: Any) -> list[Any]:
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, overlap_with_ddp=True, **DECAY, **options)
    ddp.register_comm_hook(state, HOOKS[hook](inner, ddp, optimizer, True))  # (torch's shard_buckets: no effect)
    return [optimizer]


def under_ddp(ddp: DDP, **options: Any) -> list[Any]:
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, **DECAY, **options)
    shard_ddp_gradients(ddp, optimizer)
    return [optimizer]


# --- any hook that reduces may be inside ----------------------------------------------------------------------------


def out_of_place(group, bucket):
    """Gives a tensor of its own, in larger memory, and leaves DDP's buffer alone."""
    copied = torch.empty(bucket.buffer().numel() + 7, dtype=bucket.buffer().dtype)[:-7]
    copied.copy_(bucket.buffer()).div_(dist.get_world_size())
    return dist.all_reduce(copied, async_op=True).get_future().then(lambda _: copied)


def in_rank_order(group, bucket):
    """Adds up as docs/guide.md promises that we do, rank by rank; has reduced when it returns."""
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, bucket.buffer())
    for part in parts[1:]:
        parts[0].add_(part)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(parts[0].div_(len(parts)))
    return future


def inner_hooks(rank: int, world: int, hook: str) -> None:
    for inner in (fp16_compress_hook, out_of_place, in_rank_order):
        for as_view in BOTH:
            ways = partial(stepping, hook=hook, inner=inner), partial(plain, hook=inner)
            ours, theirs = (trained(rank, way, gradient_as_bucket_view=as_view) for way in ways)
            assert_same(ours, theirs, f"{inner.__name__} {as_view=}")
    # Two iterations are reduced in full, the others are compressed. One bucket: PowerSGD's callbacks know no order.
    first, second = (power_sgd.PowerSGDState(None, 2, start_powerSGD_iter=2) for _ in BOTH)
    power = power_sgd.powerSGD_hook
    ways = partial(stepping, hook=hook, inner=power, state=first), partial(plain, hook=power, state=second)
    ours, theirs = (trained(rank, way, count=5, bucket_cap_mb=25) for way in ways)
    assert_same(ours, theirs, "PowerSGD")


@pytest.mark.parametrize("hook", HOOKS)
def test_any_hook_that_reduces_may_be_inside_a_stepping_hook(hook):
    """What compression loses is lost alike."""
    run_ranks(inner_hooks, 2, hook)


# --- late ranks ----------------------------------------------------------------------------------------------------


def delayed() -> Hook:
    """An all-reduce of which each rank knows the results in another order."""
    delays = random.Random(dist.get_rank())

    def hook(group, bucket):
        def result(future):
            time.sleep(delays.choice([0, 0, 0.001, 0.004]))
            return future.value()

        return allreduce_hook(group, bucket).then(result)

    return hook


LATE: dict[str, tuple[Callable[..., list[Any]], Hook]] = {  # and the hook that the oracle reduces with
    "under DDP": (under_ddp, in_rank_order),
    "hook": (partial(stepping, hook="at the end"), allreduce_hook),
    "interleaved": (partial(stepping, hook="interleaved"), allreduce_hook),
    "interleaved scattering": (partial(stepping, hook="interleaved", inner=reduce_scatter_hook), in_rank_order),
}


def late(rank: int, world: int, way: str, layers: int, transport: str) -> None:
    choose(transport)
    order = random.Random(1).sample(range(layers), layers)
    connect, reducing = LATE[way]
    inner = {"inner": delayed()} if reducing is allreduce_hook else {}
    for shard, mine, ddps in (("tensor", CAP, CAP), ("element", 25, CAP / 4), ("element", CAP / 4, 25)):
        ours = partial(connect, shard=shard, bucket_cap_mb=mine, **inner)
        weights = trained(rank, ours, lambda: Residual(order, late=True), 8, bucket_cap_mb=ddps)
        cap = ddps if reducing is allreduce_hook else 1.0  # the order of our own sums does not depend on buckets
        theirs = trained(rank, partial(plain, hook=reducing), lambda: Residual(order), 8, bucket_cap_mb=cap)
        assert_same(weights, theirs, f"{shard} {mine} {ddps}")


@pytest.mark.parametrize(("layers", "transport"), [(3, "sockets"), (24, "shared memory")])
@pytest.mark.parametrize("way", LATE)
def test_late_ranks_neither_hang_nor_change_a_bit_whatever_the_buckets(way, layers, transport):
    """Of three layers the fourth rank owns none; of 24, each a bucket, more are ready than may be under way."""
    run_ranks(late, 4, way, layers, transport, timeout=60, pg_timeout=15)


# --- several optimizers, several models -----------------------------------------------------------------------------


def several(ddp: DDP, ours: bool, bare: bool = False, rest: bool = True) -> list[Any]:
    """One for two parameters, whole, another for two more, and (``rest``) a plain one for the others."""
    params = [*ddp.parameters()]
    others = [SGD(params[4:], lr=0.1)] if rest else []
    if not ours:
        return [AdamW(params[:2], **DECAY), AdamW(params[2:4], **DECAY), *others]
    optimizers = [
        ZeroRedundancyOptimizer(some, AdamW, shard=shard, bucket_cap_mb=CAP / 4, **DECAY)
        for some, shard in ((params[:2], "tensor"), (params[2:4], "element"))
    ]
    if bare:
        ddp.register_comm_hook(optimizers, reduce_scatter_hook)
    else:
        shard_ddp_gradients(ddp, *optimizers)
    return [*optimizers, *others]


def several_optimizers(rank: int, world: int, bare: bool) -> None:
    def make() -> nn.Module:
        module = Residual(late=True)
        module.layers[3].requires_grad_(False)
        return module

    for as_view in BOTH:
        for cap in (25, CAP):  # everything in one bucket of DDP's; some that are not ours at all
            options: dict[str, Any] = {"clip": 0.3, "bucket_cap_mb": cap, "gradient_as_bucket_view": as_view}
            ways = partial(several, ours=True, bare=bare), partial(several, ours=False)
            ours, theirs = (trained(rank, way, make, **options) for way in ways)
            assert_same(ours, theirs, f"{as_view=} {cap=}", CLOSE)


@pytest.mark.parametrize("bare", BOTH)
def test_several_optimizers_and_a_plain_one_share_a_ddp_module_and_are_clipped_as_one(bare):
    """What none of ours has is all-reduced as usual. Each of ours reduces on a process group of its own."""
    run_ranks(several_optimizers, 3, bare)


def several_in_join(rank: int, world: int) -> None:
    ways = (partial(several, ours=ours, rest=False) for ours in (True, False))
    ours, theirs = (trained(rank, way, count=(4, 0, 6)[rank], join=True) for way in ways)
    assert_same(ours, theirs, "uneven inputs", CLOSE)


def test_several_optimizers_take_part_in_one_join_context():
    run_ranks(several_in_join, 3, timeout=40, pg_timeout=10)


def nested(rank: int, world: int, hook: str, scattering: bool) -> None:
    def connect(ddp: DDP) -> list[Any]:
        halves = [*ddp.parameters()][::2], [*ddp.parameters()][1::2]
        options: dict[str, Any] = {"overlap_with_ddp": True, "bucket_cap_mb": CAP, **DECAY}
        first, second = (ZeroRedundancyOptimizer(half, AdamW, **options) for half in halves)
        inner = HOOKS[hook](reduce_scatter_hook if scattering else delayed(), ddp, first)
        ddp.register_comm_hook(None, HOOKS["at the end"](inner, ddp, second))
        return [first, second]

    for unused in BOTH:
        options: dict[str, Any] = {"count": 10, "bucket_cap_mb": 4 * CAP, "find_unused_parameters": unused}
        ways = connect, partial(plain, hook=allreduce_hook)
        ours, theirs = (trained(rank, way, lambda: Residual(range(12)), **options) for way in ways)
        assert_same(ours, theirs, f"{unused=}", CLOSE if scattering else None)


@pytest.mark.parametrize(("hook", "scattering"), [("at the end", False), ("interleaved", False), ("interleaved", True)])
def test_a_stepping_hook_may_be_inside_that_of_another_optimizer(hook, scattering):
    """Ranks that find a reduction done in the inner one must not wait for ranks that find it done in the outer one."""
    run_ranks(nested, 3, hook, scattering, timeout=40, pg_timeout=10)


def two_models(rank: int, world: int) -> None:
    weights = []
    ways = (partial(stepping, hook=hook, inner=allreduce_hook) for hook in HOOKS)
    for connect in (*ways, partial(plain, hook=allreduce_hook)):
        first, second = (DDP(Residual(order), bucket_cap_mb=CAP) for order in ((1, 0), (0, 2, 1)))
        optimizers = [*connect(first), *connect(second)]
        for iteration in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(nn.Sequential(first, second) if iteration % 2 else first, rank, iteration).backward()
            for optimizer in optimizers:
                optimizer.step()
        weights.append(values_of([*first.parameters(), *second.parameters()]))
    assert_same(weights[:2], [weights[2]] * 2)


def test_two_models_with_a_stepping_hook_each_train_in_turns_and_in_one_graph():
    run_ranks(two_models, 2)


# --- other ways to connect, other models ----------------------------------------------------------------------------


def not_registered(ddp: DDP, inner: Hook | None) -> list[Any]:
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, overlap_with_ddp=True, **DECAY)
    if inner is not None:
        HOOKS["at the end"](inner, ddp, optimizer)
    return [optimizer]


def forgotten(ddp: DDP, hook: str) -> list[Any]:
    """``step`` need not be called, so nobody but the hook need hold the optimizer."""
    stepping(ddp, hook, allreduce_hook)
    gc.collect()
    return []


def connected(rank: int, world: int) -> None:
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    expected = trained(rank, plain)
    for inner in (None, allreduce_hook, reduce_scatter_hook):
        assert_same(trained(rank, partial(not_registered, inner=inner)), expected, f"step() has to step: {inner}")
    expected = trained(rank, partial(plain, hook=allreduce_hook))
    for hook in HOOKS:
        assert_same(trained(rank, partial(forgotten, hook=hook)), expected, f"{hook}: only the hook knows it")
        for options in ({"process_group": group}, {"parameters_as_bucket_view": True}):
            ours = partial(stepping, hook=hook, inner=allreduce_hook, **options)
            assert_same(trained(rank, ours), expected, f"{hook}: {options}")
    for lazy, views in ((True, False), (False, True), (True, True)):
        ours = partial(under_ddp, lazy_gather=lazy, parameters_as_bucket_view=views)
        assert_same(trained(rank, ours), expected, f"under DDP: {lazy=} {views=}", CLOSE)


def test_hooks_train_as_ddp_however_they_are_connected():
    run_ranks(connected, 4)


class Spectral(nn.Module):
    """Complex parameters in one bucket of DDP: dense in two orders, with gaps, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def made(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.complex128, generator=generator) / 4

        shapes = (made(), made(WIDTH, 5), made(7, 5).t(), made(7, 3), made(3, 3).t(), made(6, 3)[::2])
        self.factors = nn.ParameterList(map(nn.Parameter, shapes))

    def forward(self, batch: Tensor) -> Tensor:
        value = batch.to(torch.complex128)
        for factor in self.factors[1:]:
            value = value @ factor
        return torch.view_as_real(value * (1 + self.factors[0]))


def complex_parameters(rank: int, world: int) -> None:
    for as_view in BOTH:
        options: dict[str, Any] = {"make": Spectral, "gradient_as_bucket_view": as_view, "bucket_cap_mb": 25}
        expected = trained(rank, partial(plain, hook=allreduce_hook), **options)
        for inner in (allreduce_hook, reduce_scatter_hook):
            ours = trained(rank, partial(stepping, hook="interleaved", inner=inner), **options)
            assert_same(ours, expected, f"{inner.__name__} {as_view=}", CLOSE)
        ways = (partial(several, ours=ours) for ours in (True, False))
        ours, theirs = (trained(rank, way, clip=0.3, **options) for way in ways)
        assert_same(ours, theirs, f"some are all-reduced, {as_view=}", CLOSE)


@needs_complex_ddp
def test_complex_parameters_which_ddp_hands_over_as_real_pairs_train_as_in_ddp():
    run_ranks(complex_parameters, 3)


# --- what is told ---------------------------------------------------------------------------------------------------


def over_one_dimension(rank: int, world: int) -> None:
    mesh = mesh_of((2, 2))
    ddp = DDP(Residual(), process_group=mesh.get_group("shard"))
    with pytest.raises(ValueError, match="expects DDP to reduce over all ranks of the optimizer's mesh"):
        under_ddp(ddp, process_group=mesh)


def test_ddp_over_one_dimension_of_the_optimizers_mesh_is_refused():
    run_ranks(over_one_dimension, 4)


def turned(rank: int, world: int) -> None:
    """DDP reads buckets in the new format that it has filled in the old one."""
    for connect in (partial(stepping, hook="interleaved", inner=allreduce_hook), under_ddp):
        layers = nn.Unflatten(1, (4, 2, 2)), nn.Conv2d(4, 6, 2, padding=1)
        ddp = DDP(nn.Sequential(*layers).double().to(memory_format=torch.channels_last))
        optimizers = connect(ddp)
        ddp.module.to(memory_format=torch.contiguous_format)
        error = error_of(loss_of(ddp, rank, 0).backward, str(optimizers))
        assert "a memory format was changed" in str(error)


def test_a_memory_format_that_is_changed_after_all_was_built_is_told():
    run_ranks(turned, 2)


def reported(rank: int, world: int) -> None:
    ddp = DDP(Residual())
    (optimizer,) = stepping(ddp, "interleaved", allreduce_hook)
    optimizer.consolidate_state_dict()
    loss_of(ddp, rank, 0).backward()  # has stepped, though nobody called step()
    assert "consolidate_state_dict" in str(error_of(lambda: pickle.dumps(optimizer.state_dict()), "stale"))
    ddp = DDP(Residual(range(4)))
    (optimizer,) = under_ddp(ddp)
    loss_of(ddp, rank, 0).backward()
    whole = sum(param.nbytes for param in ddp.parameters())
    assert optimizer.memory().gradients == whole + whole // world  # DDP's buckets, and this rank's share


def test_a_step_in_backward_makes_a_state_dict_stale_and_memory_counts_ddps_buckets():
    run_ranks(reported, 2)


def killed(rank: int, world: int, folder: str) -> None:
    """Rank 1, in iteration 3, when DDP has rebuilt its buckets. The others write down after how many seconds."""
    iteration = 0

    def inner(group, bucket):
        if rank == 1 and iteration == 3 and bucket.index() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return allreduce_hook(group, bucket)

    ddp = DDP(Residual(), bucket_cap_mb=CAP)
    stepping(ddp, "interleaved", inner, bucket_cap_mb=CAP)
    for iteration in range(3):
        loss_of(ddp, rank, iteration).backward()
    iteration, started = 3, time.monotonic()
    error_of(loss_of(ddp, rank, 3).backward, f"rank {rank}")
    Path(folder, str(rank)).write_text(str(time.monotonic() - started))


def test_if_a_rank_is_killed_between_two_buckets_the_others_raise_at_once(tmp_path):
    with pytest.raises(AssertionError, match="died with exit code -9"):
        run_ranks(killed, 4, str(tmp_path), timeout=90, pg_timeout=60, fresh=True)
    seconds = {path.name: float(path.read_text()) for path in tmp_path.iterdir()}
    assert seconds.keys() == {"0", "2", "3"}
    assert max(seconds.values()) < 45, "found out by a time-out only"
