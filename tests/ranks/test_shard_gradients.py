"""Sharded gradients in programs that ``tests/differential`` has no operation for. Oracle: DDP and the plain optimizer.

Activation checkpointing, losses of gradients, several optimizers, gradients that are set to None, 16-bit and
complex gradients, and what ``no_sync`` does where DDP does something else.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from shardstep import ShardedGradient, ZeroRedundancyOptimizer
from tests.beside import SMALL, Beside, assert_close, batch
from tests.differential.cases import run
from tests.differential.configurations import Configuration
from tests.differential.programs import Backward, Clip, Program, Step, ZeroGrad
from tests.harness import run_ranks
from tests.oracle import assert_same, values_of
from tests.versions import needs_complex_ddp

LIMITS = {"timeout": 60, "pg_timeout": 20}
CLIP = Clip(how="ours")
PROGRAMS: dict[str, Program] = {
    "steps without a backward": (
        *(Step(), ZeroGrad(), Step(), Backward(), Step(), Step()),
        *(Backward(), Step(), ZeroGrad(), Step()),
    ),
    "clipping what is there": (
        *(CLIP, Step(), Backward(), CLIP, Clip(0.005, how="ours"), Backward(), Clip(0.2, math.inf, "ours"), Step()),
        *(CLIP, ZeroGrad(), CLIP, Backward(), ZeroGrad(set_to_none=False), CLIP, Step()),
        *(Backward(), ZeroGrad(by="model"), CLIP, Step()),
    ),
    "other norms": (Backward(), Clip(0.1, 3.0), Clip(0.05, 0.5, "ours"), Step()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_and_a_norm_use_the_gradients_that_are_there_and_no_others(name: str) -> None:
    """None yet, those of the last step once more, the sum with clipped ones, none after any kind of ``zero_grad``."""
    run(Configuration(mode="sharded", ranks=3, cap=SMALL), PROGRAMS[name])


# --- models -------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """``plan``: which layers are applied one after the other. A tuple in it is a segment with activation checkpointing.

    ``reentrant=None`` computes the same without checkpointing.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5)).double()

    def forward(self, x: Tensor, plan: tuple[Any, ...], reentrant: bool | None) -> Tensor:
        for part in plan:
            if isinstance(part, int):
                x = torch.tanh(self.layers[part](x))
            elif reentrant is None:
                x = self.forward(x, part, None)
            else:
                x = checkpoint(self.forward, x, part, reentrant, use_reentrant=reentrant)
        return x


def left_out(rank: int, number: int) -> tuple[Any, ...]:
    """Every layer is a segment, so nothing tells where a backward ends; one rank leaves one of them out."""
    return tuple((layer,) for layer in range(5) if layer != number % 5 or rank != number % 2)


PLANS: dict[str, tuple[Callable[[int, int], tuple[Any, ...]], bool | None]] = {
    "another order on every rank": (lambda rank, n: tuple(random.Random(9 * rank + n).sample(range(5), k=5)), None),
    "shared, not re-entrant": (lambda rank, n: (0, (1, 2), (3,), (1, 2), 0, 4), False),
    "all": (lambda rank, n: ((0,), (1, 2), (3,), (4,)), True),
    "the first only": (lambda rank, n: ((0,), 1, 2, 3, 4), True),
    "shared": (lambda rank, n: (0, (1, 2), (3,), (1, 2), 0, 4), True),
    "all shared": (lambda rank, n: ((0,), (1, 2), (3,), (1, 2), (0,), (4,)), True),
    "nested": (lambda rank, n: (0, ((1,), (2, 3)), 4), True),
    "left out on one rank": (left_out, True),
}


def train_by_plan(rank: int, world: int, name: str) -> None:
    plan, reentrant = PLANS[name]
    for syncs in ([True], [False, True], [True, True]):
        for cap in (SMALL, 25):
            both = Beside(
                Layers, AdamW, {"bucket_cap_mb": cap}, ddp={"find_unused_parameters": name.startswith("left")}, lr=0.01
            )
            for step in range(4):
                for side in both:
                    side.optimizer.zero_grad()
                    for micro, sync in enumerate(syncs):
                        number = 10 * step + micro
                        with nullcontext() if sync else side.no_sync():
                            x = batch(number, 3, 8).requires_grad_()  # or a re-entrant first segment has no backward
                            way = reentrant if side is both.ours else None
                            (side.called(x, plan(rank, number), way) - 0.5).square().sum().backward()
                    side.optimizer.step()
                both.check(f"{name}, {syncs}, cap {cap}, step {step}", rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", PLANS)
def test_checkpointed_segments_and_layers_in_any_order_train_as_in_ddp(name: str) -> None:
    """With micro-batches that are reduced or not. (DDP computes without checkpointing.)"""
    run_ranks(train_by_plan, 3, name, **LIMITS)


class Penalized(nn.Module):
    """A loss of a gradient; and a hook of the user's, which changes the local gradient, and how it lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1, bias=False)).double()
        self.net[0].weight.register_hook(lambda gradient: 3 * gradient.t().contiguous().t())

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square() + self.net(x).square().flatten()


class Turning(nn.Module):
    """Complex parameters beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.wide = nn.Parameter(torch.randn(5, 7, dtype=torch.float64))
        self.spectrum = nn.Parameter(torch.randn(7, 4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.tanh(x @ self.wide).to(torch.complex128) @ self.spectrum)


def train_and_clip(rank: int, world: int, make: Callable[[], nn.Module], shard: str) -> None:
    both = Beside(make, ours={"shard": shard})
    for number in range(4):
        for side in both:
            side.optimizer.zero_grad()
            side.backward(number)
        norms = both.ours.optimizer.clip_grad_norm_(0.1), clip_grad_norm_(both.theirs.params, 0.1)
        assert norms[1] > 0.1
        assert_close(norms[0], norms[1], "the norm")
        for side in both:
            side.optimizer.step()
        both.check(number)


@pytest.mark.parametrize("shard", ["element", "tensor"])
@pytest.mark.parametrize("make", [Penalized, pytest.param(Turning, marks=needs_complex_ddp)])
def test_losses_of_gradients_and_complex_parameters_train_and_are_clipped(make: Any, shard: str) -> None:
    run_ranks(train_and_clip, 3, make, shard, **LIMITS)


def start_apart(rank: int, world: int) -> None:
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = ZeroRedundancyOptimizer(model[0].parameters(), SGD, shard_gradients=True, lr=0.1)
    optimizer.add_param_group({"params": model[1].parameters()})
    assert_same(values_of(model.parameters()), values_of(expected.parameters()), "parameters of rank 0")
    torch.manual_seed(rank)
    model = nn.Linear(5, 7)
    before = values_of(model.parameters())
    ZeroRedundancyOptimizer(model.parameters(), SGD, shard_gradients=True, broadcast_parameters=False, lr=0.1)
    assert_same(values_of(model.parameters()), before, "broadcast_parameters=False")


def test_parameters_and_added_ones_become_those_of_rank_0_unless_told_not_to() -> None:
    run_ranks(start_apart, 2, **LIMITS)


# --- several optimizers -------------------------------------------------------------------------------------------


def two_optimizers(rank: int, world: int) -> None:
    """Every second layer is the other one's. Ranks run at different speeds, and the optimizers step in turns."""
    ours, theirs = Layers(), Layers()
    ddp = DistributedDataParallel(theirs)
    late = random.Random(rank)
    for param in ours.parameters():
        param.register_hook(lambda gradient: time.sleep(late.choice([0, 0.001, 0.003])))
    halves = [[p for layer in m.layers[at::2] for p in layer.parameters()] for m in (ours, theirs) for at in (0, 1)]
    zero: dict[str, Any] = {"shard_gradients": True, "bucket_cap_mb": SMALL}
    sharded = [
        ZeroRedundancyOptimizer(halves[0], SGD, lr=0.1, momentum=0.9, **zero),
        ZeroRedundancyOptimizer(halves[1], AdamW, lr=0.01, shard="tensor", **zero),
    ]
    plain = [SGD(halves[2], lr=0.1, momentum=0.9), AdamW(halves[3], lr=0.01)]
    for step in range(6):
        for called, optimizers in ((ours, sharded), (ddp, plain)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            called(batch(step, 3, 8), (0, 1, 2, 3, 4), None).square().mean().backward()
            for position, optimizer in enumerate(optimizers):
                if step % 3 != position:
                    optimizer.step()
        assert_close(list(ours.parameters()), list(theirs.parameters()), f"step {step}")


def test_two_optimizers_share_one_backward() -> None:
    run_ranks(two_optimizers, 3, **LIMITS)


# --- gradients that are set to None, and no_sync ------------------------------------------------------------------


def forgotten(rank: int, world: int, cap: float) -> None:
    """The bucket of a gradient that was set to None still holds its sum; here, an infinite one."""
    both = Beside(ours={"bucket_cap_mb": cap}, lr=0.1, weight_decay=0.1)
    for step in range(3):
        for side in both:
            side.optimizer.zero_grad()
            handle = side.model[0].weight.register_hook(lambda gradient: gradient * math.inf)
            side.backward(step)
            handle.remove()
            side.model[0].weight.grad = side.model[2].bias.grad = None
        norms = both.ours.optimizer.clip_grad_norm_(0.1), clip_grad_norm_(both.theirs.params, 0.1)
        assert_close(norms[0], norms[1], "the norm")
        both.check_gradients(step)
        for side in both:
            side.optimizer.step()
        both.check(step)


@pytest.mark.parametrize("cap", [SMALL, 25])
def test_a_gradient_that_is_set_to_none_is_in_no_norm_and_not_stepped(cap: float) -> None:
    run_ranks(forgotten, 2, cap, **LIMITS)


def no_sync_only(rank: int, world: int) -> None:
    both = Beside()
    ours, theirs = both
    for step in range(3):
        ours.optimizer.zero_grad()
        theirs.optimizer.zero_grad()
        with ours.no_sync():
            with ours.no_sync():
                ours.backward(2 * step)
            ours.backward(2 * step + 1)  # still within the outer one
            held = ours.optimizer.memory().gradients
            assert held == sum(param.nbytes for param in ours.params), "whole gradients are held, nothing was reduced"
        with theirs.no_sync():
            theirs.backward(2 * step)
        theirs.backward(2 * step + 1)
        if step == 1:
            both.check_gradients()  # who asks for a gradient reduces what there is
        for side in both:
            side.optimizer.step()
        both.check(step)
    with pytest.raises(KeyError), ours.no_sync(), ours.no_sync():
        raise KeyError  # which ends both
    ours.optimizer.zero_grad()
    ours.backward(9)
    assert all(isinstance(param.grad, ShardedGradient) for param in ours.params)


def test_a_step_after_nothing_but_no_sync_uses_the_mean_of_all_ranks() -> None:
    """DDP would step with local gradients, and replicas would differ. And no_sync nests, and ends with an exception."""
    run_ranks(no_sync_only, 3, **LIMITS)


# --- 16 bits ------------------------------------------------------------------------------------------------------


def small_after_large(rank: int, world: int, shard: str) -> None:
    """1, then eight times 2**-9, or ranks with 1 and 2**-9: in bfloat16 the small ones are lost."""
    model = nn.Linear(31, 9, bias=False).bfloat16()
    options: dict[str, Any] = {"shard_gradients": True, "shard": shard, "reduce_dtype": torch.float32}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1.0, **options)
    large_first = [1.0] + [2.0**-9] * 8
    for order in (large_first, large_first[::-1]):
        for period in (1, 3, 9):  # reduced every time, now and then, at the end
            optimizer.zero_grad()
            for position, amount in enumerate(order, start=1):
                with nullcontext() if position % period == 0 else optimizer.no_sync():
                    (model.weight.sum() * amount).backward()
            whole = optimizer.full_grad(model.weight)
            assert whole.dtype == torch.float32
            assert whole.unique().tolist() == [1 + 2.0**-6], f"{period=}: {whole.unique()}"
            assert model.weight.grad.dtype == torch.bfloat16
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.weight, before - torch.tensor(1 + 2.0**-6).bfloat16())
    optimizer.zero_grad()
    (model.weight.sum() * (1.0 if rank == 0 else 2.0**-9)).backward()
    mean = torch.tensor((1 + (world - 1) * 2.0**-9) / world).item()
    assert optimizer.full_grad(model.weight).unique().tolist() == [mean]


@pytest.mark.parametrize("shard", ["element", "tensor"])
def test_with_a_reduce_dtype_bfloat16_gradients_are_added_up_in_float32(shard: str) -> None:
    run_ranks(small_after_large, 4, shard, **LIMITS)


def half_precision(rank: int, world: int, dtype: torch.dtype) -> None:
    """Oracle: the norm of the very gradients (full_grad), in float64."""
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(6))).to(dtype)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=1e-3, shard_gradients=True, bucket_cap_mb=0.005)
    # In float16 the squares of these gradients are beyond its range; their norm is not.
    (model(batch(0, 8, 40).to(dtype)).square().mean() * 3000).backward()

    def whole() -> Tensor:
        return torch.cat([optimizer.full_grad(param).flatten().double() for param in model.parameters()])

    before = whole()
    for order in (1, 2, 3, math.inf):
        norm = optimizer.clip_grad_norm_(1e9, order)
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, norm.item())
        assert len(set(everyone)) == 1, f"ranks have different norms: {everyone}"
        # float32 has 24 bits; sums over 9600 elements lose a few. bfloat16 partials would be wrong by 1e-3.
        assert norm.dtype == torch.float32
        assert_close(norm.double(), torch.linalg.vector_norm(before, order), f"order {order}", rtol=1e-5, atol=0)
    norm = optimizer.clip_grad_norm_(0.5)
    # The factor and each clipped element are rounded to the dtype, each by at most 2^-8 of itself in bfloat16.
    assert_close(whole(), before * (0.5 / norm.double()), "clipped", rtol=2**-7, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms_of_16_bit_gradients_are_added_up_in_float32_and_equal_on_all_ranks(dtype: torch.dtype) -> None:
    run_ranks(half_precision, 3, dtype, **LIMITS)


# --- an inf that one rank sees ------------------------------------------------------------------------------------


class TwoKinds(nn.Module):
    """float64 and float32: the scaler asks for each dtype apart, and a rank may own nothing of one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(5, 7).double(), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)).float()).double()


def spoiled(rank: int, world: int, shard: str) -> None:
    """In two of three steps one element of one gradient is infinite: whoever owns it, all have to skip."""
    both = Beside(TwoKinds, AdamW, {"shard": shard}, lr=0.01)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in both]
    for step in range(12):
        before = values_of(both.ours.params)
        for side, scaler in zip(both, scalers, strict=True):
            side.optimizer.zero_grad()
            with side.no_sync():
                scaler.scale(side.loss(100 + step)).backward()
            place = torch.zeros_like(side.params[step % 4])
            place.view(-1)[-(step % 2)] = math.inf if step % 3 and rank == step % world else 0.0
            handle = side.params[step % 4].register_hook(place.add)
            scaler.scale(side.loss(step)).backward()
            handle.remove()
            scaler.step(side.optimizer)
            scaler.update()
        skipped = all(map(torch.equal, before, both.ours.params))
        assert skipped == bool(step % 3), f"step {step}"
        assert scalers[0].state_dict() == scalers[1].state_dict(), f"step {step}"
        both.check(step, rtol=1e-5, atol=1e-6)  # float32 sums in another order: some last bits
    both.ours.optimizer.check_replicas()


@pytest.mark.parametrize("shard", ["element", "tensor"])
def test_an_inf_that_only_one_ranks_share_has_makes_every_rank_skip_and_halve_the_scale(shard: str) -> None:
    """If only the owner of the element skipped: different scales, weights gathered half, or a hang in the step."""
    run_ranks(spoiled, 3, shard, **LIMITS)
