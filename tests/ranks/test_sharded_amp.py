"""Plain ``torch.amp.GradScaler`` with sharded gradients. Oracle: DDP, the plain optimizer and a scaler of its own.

The scaler sees a rank's shards only. If it finds an inf there, every rank must skip, or weights and scales part for
good. Whole runs are compared: which steps were skipped, every scale, every weight, the optimizer's state, the scaler's
state. Runs are in float64, where unscaling by a power of two is exact and only the order of sums differs (``CLOSE``: a
thousand last bits); a run in bfloat16 autocast with float32 weights has its own, wider tolerance.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.surroundings import choose

CLOSE = {"rtol": 1e-12, "atol": 1e-14}
SCALE = 2.0**10


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()  # 66 elements


def batches(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(count)]


def new_scaler() -> GradScaler:
    return GradScaler(device="cpu", init_scale=SCALE, growth_interval=2)


class Spoiler:
    """Puts a value into one element of one parameter's gradient, on this rank, while ``active``."""

    def __init__(self, param: Tensor, element: int, value: float) -> None:
        self.active = False
        self._place = torch.zeros(param.numel(), dtype=param.dtype)
        self._place[element] = value
        param.register_hook(self._spoil)

    def _spoil(self, gradient: Tensor) -> Tensor:
        return gradient + self._place.view(gradient.shape) if self.active else gradient


def element_of(opt: ZeroRedundancyOptimizer, owner: int) -> tuple[int, int]:
    """A parameter (by index) and an element of it that ``owner`` owns: the last of its last piece."""
    piece = list(opt.layout.pieces(owner))[-1]
    return piece.param, piece.stop - 1


class Beside:
    """A sharded run and a DDP run, each with its own scaler, on the same batches."""

    def __init__(self, optimizer_class: Any, make: Any = make_model, ours: Any = None, **options: Any) -> None:
        sharded = {"shard_gradients": True, "bucket_cap_mb": 0.0002} | (ours or {})
        self.where = f"{optimizer_class.__name__} {sharded} {options}"
        self.model = make()
        self.opt = ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class, **sharded, **options)
        self.ddp = DistributedDataParallel(make(), find_unused_parameters=True)
        self.plain = optimizer_class(self.ddp.parameters(), **options)
        self.scaler, self.plain_scaler = new_scaler(), new_scaler()
        self.spoilers: list[Spoiler] = []

    def spoil(self, index: int, element: int, value: float) -> None:
        """From now on one element of one gradient can be spoiled, on this rank and in both runs."""
        for model in (self.model, self.ddp.module):
            self.spoilers.append(Spoiler(list(model.parameters())[index], element, value))

    def backward(self, batch: Tensor, spoiled: bool = False) -> None:
        for spoiler in self.spoilers:
            spoiler.active = spoiled
        for model, scaler in ((self.model, self.scaler), (self.ddp, self.plain_scaler)):
            scaler.scale(model(batch).square().mean()).backward()

    def step(self) -> None:
        for optimizer, scaler in ((self.opt, self.scaler), (self.plain, self.plain_scaler)):
            scaler.step(optimizer)
            scaler.update()

    def zero_grad(self) -> None:
        self.opt.zero_grad()
        self.plain.zero_grad()

    def check(self, number: int) -> float:
        """Same weights, same scale (on every rank); returns the scale."""
        where = f"{self.where}, step {number}"
        scale = self.scaler.get_scale()
        assert scale == self.plain_scaler.get_scale(), f"{where}: scale {scale}, DDP {self.plain_scaler.get_scale()}"
        assert self.scaler.state_dict() == self.plain_scaler.state_dict(), where
        for mine, theirs in zip(self.model.parameters(), self.ddp.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), msg=lambda text: f"{where}: {text}", **CLOSE)
        return scale

    def check_state(self) -> None:
        self.opt.consolidate_state_dict(to=0)
        if self.opt.rank != 0:
            return
        ours, theirs = self.opt.state_dict()["state"], self.plain.state_dict()["state"]
        assert ours.keys() == theirs.keys()
        for index, entries in theirs.items():
            for key, value in entries.items():
                torch.testing.assert_close(ours[index][key], value, **CLOSE)


# --- an inf that one share sees -----------------------------------------------------------------------------------

# Two in a row, one alone, one at the end: halved, halved, grown, ...
SKIPPED = (1, 2, 5, 9)
STEPS = 10


def one_share_sees_it(rank: int, world: int, transport: str) -> None:
    choose(transport)
    last = world - 1
    for source, owner, value, shard in (
        (0, 1, math.inf, "element"),
        (1, 1, -math.inf, "tensor"),
        (1, 0, math.nan, "element"),
        (0, last, math.inf, "tensor"),
    ):
        both = Beside(AdamW, ours={"shard": shard}, lr=0.01, weight_decay=0.1)
        index, element = element_of(both.opt, owner)
        if rank == source:  # the gradient of one rank is spoiled, where another (or the same) owns it
            both.spoil(index, element, value)
        scales = []
        for number, batch in enumerate(batches(rank, STEPS)):
            both.zero_grad()
            before = [param.detach().clone() for param in both.model.parameters()]
            both.backward(batch, spoiled=number in SKIPPED)
            both.step()
            scales.append(both.check(number))
            same = [torch.equal(old, new) for old, new in zip(before, both.model.parameters(), strict=True)]
            assert all(same) if number in SKIPPED else not any(same), f"step {number}: {same}"
        both.opt.check_replicas()
        both.check_state()
        halved = [now / before for before, now in zip([SCALE, *scales], scales, strict=False)]
        assert [number for number, factor in enumerate(halved) if factor == 0.5] == list(SKIPPED)
        assert 2.0 in halved, "the scale never grew: this test shows less than it says"
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, scales)
        assert everyone == [scales] * world, f"{both.where}: the ranks' scales differ: {everyone}"


@pytest.mark.parametrize(("world", "transport"), [(2, "shared memory"), (3, "sockets")])
def test_an_inf_in_one_ranks_share_makes_every_rank_skip_halve_the_scale_and_go_on(world, transport):
    """If only the owner of the element skipped: different scales, weights gathered half, or a hang in the step."""
    run_ranks(one_share_sees_it, world, transport, timeout=60, pg_timeout=20)


def unscales_then_clips(rank: int, world: int) -> None:
    for ours, torchs_clip in (({}, False), ({"shard": "tensor"}, True), ({"overlap_backward": False}, False)):
        both = Beside(SGD, ours=ours, lr=0.05, momentum=0.9)
        if rank == 0:
            both.spoil(*element_of(both.opt, 1), math.inf)
        for number, batch in enumerate(batches(rank, 8)):
            both.zero_grad()
            both.backward(batch, spoiled=number in (0, 3, 4))
            both.scaler.unscale_(both.opt)
            both.plain_scaler.unscale_(both.plain)
            if torchs_clip:
                norm = clip_grad_norm_(both.model.parameters(), 0.3)
            else:
                norm = both.opt.clip_grad_norm_(0.3)
            expected = clip_grad_norm_(both.ddp.parameters(), 0.3)
            torch.testing.assert_close(norm, expected, equal_nan=True, **CLOSE)
            # Unscaled: 1024 times smaller than what backward left.
            assert not expected.isfinite() or 0.3 < expected < 30
            both.step()
            both.check(number)
        both.opt.check_replicas()


def test_unscaling_before_clipping_equals_ddp():
    """``unscale_`` must reach every shard once: twice or never is off by the scale."""
    run_ranks(unscales_then_clips, 2, timeout=60, pg_timeout=20)


def accumulates_and_schedules(rank: int, world: int) -> None:
    for sync in (True, False):
        both = Beside(AdamW, ours={"gradient_buckets_in_flight": 1}, lr=0.01)
        schedulers = [LambdaLR(optimizer, lambda epoch: 0.8**epoch) for optimizer in (both.opt, both.plain)]
        if rank == 1:
            both.spoil(*element_of(both.opt, 0), math.inf)
        for number in range(6):
            both.zero_grad()
            first, second = batches(10 * number + rank, 2)
            if sync:
                both.backward(first, spoiled=number == 2)  # an inf of the first micro-batch stays in the sum
            else:
                with both.opt.no_sync(), both.ddp.no_sync():
                    both.backward(first, spoiled=number == 2)
            both.backward(second, spoiled=number == 4)
            both.step()
            both.check(number)
            for scheduler in schedulers:
                scheduler.step()
        both.check_state()


def test_accumulation_and_schedulers_go_with_a_scaler():
    run_ranks(accumulates_and_schedules, 2, timeout=60, pg_timeout=20)


class FewParameters(nn.Module):
    """Two float64 parameters and a float32 one: with four ranks some own nothing, and none owns both dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
        self.single = nn.Parameter(torch.tensor([1.5]))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, batch: Tensor) -> Tensor:
        return batch @ self.weight * self.single.double()


def few_parameters(rank: int, world: int, transport: str) -> int:
    choose(transport)
    for index in (0, 1):  # the float64 parameter, the float32 one
        both = Beside(SGD, make=FewParameters, ours={"shard": "tensor"}, lr=0.05, momentum=0.9)
        if rank == 2:
            both.spoil(index, 0, math.inf)
        for number, batch in enumerate(batches(rank, 6)):
            both.zero_grad()
            both.backward(batch, spoiled=number in (1, 2))
            both.step()
            assert both.scaler.state_dict() == both.plain_scaler.state_dict(), f"step {number}"
            for mine, theirs in zip(both.model.parameters(), both.ddp.parameters(), strict=True):
                # float32 sums in another order: some last bits
                torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
        both.opt.check_replicas()
    return len(list(both.opt.layout.pieces(rank)))


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
def test_ranks_with_empty_shares_and_several_dtypes_skip_together(transport):
    """A rank that owns nothing of a dtype sees no inf of it and must be told; and must not be waited for in vain."""
    pieces = run_ranks(few_parameters, 4, transport, timeout=60, pg_timeout=20)
    assert 0 in pieces


def forgotten_inf(rank: int, world: int) -> None:
    both = Beside(SGD, lr=0.05)
    if rank == 0:
        both.spoil(0, 3, math.inf)
    for number, batch in enumerate(batches(rank, 4)):
        both.zero_grad()
        both.backward(batch, spoiled=number in (1, 3))
        for model in (both.model, both.ddp.module):
            if number != 3:
                model[0].weight.grad = None  # where the inf is
        both.step()
        assert both.check(number) == (SCALE, SCALE * 2, SCALE * 2, SCALE)[number]


def test_an_inf_in_a_gradient_that_the_user_has_set_to_none_is_not_found():
    run_ranks(forgotten_inf, 2, timeout=60, pg_timeout=20)


class UsedOnOneRank(nn.Module):
    """On some ranks a batch uses one half of the parameters, on the others the other half; or none at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.halves = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)]).double()

    def forward(self, batch: Tensor) -> Tensor:
        return self.halves[dist.get_rank() % 2](batch)


def other_halves(rank: int, world: int) -> None:
    both = Beside(SGD, make=UsedOnOneRank, lr=0.05)
    if rank == 1:
        both.spoil(2, 0, math.inf)
    for number, batch in enumerate(batches(rank, 5)):
        both.zero_grad()
        both.backward(batch, spoiled=number in (1, 2))
        both.step()
        both.check(number)


def test_gradients_that_only_other_ranks_have_used_are_unscaled_too():
    run_ranks(other_halves, 3, timeout=60, pg_timeout=20)


# --- as people use it ---------------------------------------------------------------------------------------------


def autocast_run(rank: int, world: int) -> None:
    for options in ({}, {"fused": True}):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        torch.manual_seed(3)
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)))
        opt = ZeroRedundancyOptimizer(model.parameters(), AdamW, shard_gradients=True, lr=1e-3, eps=1e-3, **options)
        plain = AdamW(ddp.parameters(), lr=1e-3, eps=1e-3, **options)
        scalers = [GradScaler(device="cpu", init_scale=2.0**126, growth_interval=3) for _ in "ab"]
        start = model[0].weight.detach().clone()
        scales = []
        generator = torch.Generator().manual_seed(rank)
        for number in range(12):
            batch = torch.randn(8, 16, generator=generator)
            for net, optimizer, scaler in ((model, opt, scalers[0]), (ddp, plain, scalers[1])):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    # Only the last rank's loss is large enough to overflow.
                    loss = net(batch).float().square().mean() * (1000.0 if rank == world - 1 else 1e-3)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            assert scalers[0].state_dict() == scalers[1].state_dict(), f"step {number}"
            scales.append(scalers[0].get_scale())
            for mine, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
                # float32 gradients, summed in another order; Adam with a large eps does not blow last bits up, bfloat16
                # activations may flip a last bit of theirs (2^-8) that then counts in one of 12 steps of 1e-3.
                torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-5)
        assert scales[0] < 2.0**126, "no step was skipped"
        assert any(now > before for before, now in pairwise(scales)), "none went through"
        assert (model[0].weight - start).abs().max() > 1e-3, "nothing was trained"
        opt.check_replicas()


def test_a_run_in_autocast_whose_scale_starts_too_high_equals_ddp():
    """The overflow is real here, not put in: several steps are skipped until the scale fits, later it grows again."""
    run_ranks(autocast_run, 2, timeout=60, pg_timeout=20)


def saved_and_disabled(rank: int, world: int) -> None:
    """A scaler that is switched off is a plain step; one that is loaded goes on where it was."""
    both = Beside(SGD, lr=0.05, momentum=0.9)
    inputs = batches(rank, 4)
    both.scaler, both.plain_scaler = (GradScaler(device="cpu", enabled=False) for _ in "ab")
    both.backward(inputs[0])
    both.step()
    both.check(0)
    both.scaler, both.plain_scaler = new_scaler(), new_scaler()
    both.scaler.load_state_dict(both.plain_scaler.state_dict() | {"scale": 64.0, "_growth_tracker": 1})
    both.plain_scaler.load_state_dict(both.scaler.state_dict())
    for number, batch in enumerate(inputs[1:]):
        both.zero_grad()
        both.backward(batch)
        both.step()
        both.check(1 + number)


def test_a_disabled_and_a_loaded_scaler():
    run_ranks(saved_and_disabled, 2, timeout=60, pg_timeout=20)


def two_optimizers(rank: int, world: int) -> None:
    """One scaler, two optimizers over different layers: an inf in one skips that one only, as in torch."""
    models = [make_model(), DistributedDataParallel(make_model())]
    layers = [(net[0], net[2]) for net in (models[0], models[1].module)]
    ours = [
        ZeroRedundancyOptimizer(layer.parameters(), SGD, shard_gradients=True, lr=0.05, momentum=0.9)
        for layer in layers[0]
    ]
    plain = [SGD(layer.parameters(), lr=0.05, momentum=0.9) for layer in layers[1]]
    scalers = [new_scaler(), new_scaler()]
    spoilers = [Spoiler(pair[1].bias, 0, math.inf) for pair in layers] if rank == 1 else []
    for number, batch in enumerate(batches(rank, 6)):
        for spoiler in spoilers:
            spoiler.active = number in (1, 3)
        for net, optimizers, scaler in ((models[0], ours, scalers[0]), (models[1], plain, scalers[1])):
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(net(batch).square().mean()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        assert scalers[0].state_dict() == scalers[1].state_dict(), f"step {number}"
        for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), **CLOSE)


def test_one_scaler_for_two_optimizers_skips_only_the_one_with_the_inf():
    run_ranks(two_optimizers, 2, timeout=60, pg_timeout=20)


def whole_gradients(rank: int, world: int) -> None:
    """The default mode: DDP reduces, every rank sees every gradient."""
    both = Beside(SGD, lr=0.05)
    ddp = DistributedDataParallel(make_model())
    both.model, both.opt = ddp, ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.05)  # type: ignore[assignment]
    if rank == 1:
        both.spoilers = [Spoiler(next(model.parameters()), 3, math.inf) for model in (ddp.module, both.ddp.module)]
    for number, batch in enumerate(batches(rank, 5)):
        both.zero_grad()
        both.backward(batch, spoiled=number in (1, 2))
        both.step()
        both.check(number)


def test_a_scaler_when_ddp_reduces_the_gradients():
    run_ranks(whole_gradients, 2, timeout=60, pg_timeout=20)
