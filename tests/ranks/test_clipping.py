"""``clip_grad_norm_`` and ``full_grad`` in every mode. Oracle: DDP, torch's ``clip_grad_norm_``, the plain optimizer.

Where gradients are reduced differently (sums in rank order here, a ring in gloo) or a norm is added up in another
order, float64 results may differ by some last bits: ``CLOSE`` allows a thousand of them, which is far from anything
that a lost piece, a wrong divisor or a missing clip would cause. Between ranks everything is compared bit by bit.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from shardstep import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved
from tests.harness import run_ranks
from tests.oracle import error_of, values_of
from tests.surroundings import choose
from tests.versions import needs_complex_ddp

CLOSE = {"rtol": 1e-12, "atol": 1e-14}
ORDERS = [1, 2, 3, math.inf, 2.0, "inf", 0.5]


class Net(nn.Module):
    """93 elements in seven parameters, of which one is used only if asked for and one is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.sometimes = nn.Parameter(torch.randn(23))
        self.never = nn.Parameter(torch.randn(3))
        self.double()

    def forward(self, batch: Tensor, sometimes: bool = False) -> Tensor:
        out = self.second(torch.tanh(self.first(batch))) * self.scale
        return out + self.sometimes.square().mean() if sometimes else out


def batches(rank: int, count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, 5, generator=generator, dtype=torch.float64).to(dtype) * 3 for _ in range(count)]


def backward(model: Any, batch: Tensor, **forward: Any) -> None:
    model(batch, **forward).square().mean().backward()


def assert_close(ours: Tensor | None, expected: Tensor | None, where: str, **close: Any) -> None:
    if expected is None or ours is None:
        assert ours is expected, f"{where}: {ours} is not {expected}"
        return
    torch.testing.assert_close(ours, expected, msg=lambda text: f"{where}: {text}", **(CLOSE | close))


def assert_same_bits_everywhere(value: Tensor, where: str, group: Any = None) -> None:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value.item(), group=group)
    assert len({float(one).hex() for one in everyone}) == 1, f"{where}: {everyone}"


class Beside:
    """A sharded run beside DDP with the plain optimizer, from the same weights on the same batches."""

    def __init__(self, optimizer_class: Any = SGD, group: Any = None, make: Any = Net, **options: Any) -> None:
        ours = {"shard_gradients": True, "bucket_cap_mb": 0.0002}
        extra = ("shard", "bucket_cap_mb", "overlap_backward", "gradient_buckets_in_flight", "reduce_dtype")
        ours |= {key: options.pop(key) for key in extra if key in options}
        self.where = f"{optimizer_class.__name__} {ours} {options}"
        self.model = make()
        self.opt = ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class, group, **ours, **options)
        self.ddp = DistributedDataParallel(make(), process_group=group, find_unused_parameters=True)
        self.plain = optimizer_class(self.ddp.parameters(), **options)

    def backward(self, batch: Tensor, **forward: Any) -> None:
        backward(self.model, batch, **forward)
        backward(self.ddp, batch, **forward)

    def zero_grad(self, **how: Any) -> None:
        self.opt.zero_grad(**how)
        self.plain.zero_grad(**how)

    def clip(self, max_norm: float, norm_type: Any = 2.0, group: Any = None) -> Tensor:
        """Both runs clip; both say the same norm; ours says the same bits on all ranks."""
        norm = self.opt.clip_grad_norm_(max_norm, norm_type)
        expected = clip_grad_norm_(self.ddp.parameters(), max_norm, norm_type)
        assert norm.dim() == 0
        assert_close(norm.double(), expected.double(), f"{self.where}: norm of order {norm_type}")
        assert_same_bits_everywhere(norm, f"{self.where}: norm of order {norm_type}", group)
        return norm

    def step(self) -> None:
        self.opt.step()
        self.plain.step()

    def check_gradients(self, **close: Any) -> None:
        for (name, mine), theirs in zip(self.model.named_parameters(), self.ddp.parameters(), strict=True):
            assert_close(self.opt.full_grad(mine), theirs.grad, f"{self.where}: full_grad of {name}", **close)

    def check_weights(self) -> None:
        for (name, mine), theirs in zip(self.model.named_parameters(), self.ddp.parameters(), strict=True):
            assert_close(mine.detach(), theirs.detach(), f"{self.where}: {name}")


# --- gradients sharded --------------------------------------------------------------------------------------------


def clips_in_training(rank: int, world: int, transport: str) -> None:
    choose(transport)
    inputs = batches(rank, len(ORDERS))
    for options in (
        {"shard": "element"},
        {"shard": "tensor", "bucket_cap_mb": 25},
        {"shard": "tensor", "overlap_backward": False, "gradient_buckets_in_flight": 1},
    ):
        both = Beside(SGD, **options, lr=0.05, momentum=0.9, weight_decay=0.01)
        unclipped = Beside(SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
        clipped = []
        for number, (batch, order) in enumerate(zip(inputs, ORDERS, strict=True)):
            both.zero_grad()
            both.backward(batch, sometimes=number % 2 == 0)
            # Every third limit is above the norm, where nothing must change.
            norm = both.clip(1e9 if number % 3 == 2 else 0.3, order)
            clipped.append(norm > 0.3 and number % 3 != 2)
            both.check_gradients()
            both.step()
            both.check_weights()
            unclipped.zero_grad()
            unclipped.backward(batch, sometimes=number % 2 == 0)
            unclipped.step()
        assert sum(clipped) >= 4, "the limits do not clip: this test shows nothing"
        unclipped.check_weights()
        away = (unclipped.model.first.weight - both.model.first.weight).abs().max()
        assert away > 1e-3, f"clipping changed no update ({away})"


@pytest.mark.parametrize(
    ("world", "transport"), [(1, "shared memory"), (2, "sockets"), (3, "shared memory"), (4, "sockets")]
)
def test_norm_gradients_and_updates_equal_those_of_ddp_and_torchs_clipping(world, transport):
    """Norms 1, 2, 3, inf; a partial norm that is lost, a rank's missing factor or a clip without effect shows."""
    run_ranks(clips_in_training, world, transport, timeout=60, pg_timeout=20)


def clips_what_there_is(rank: int, world: int) -> None:
    both = Beside(SGD, lr=0.05)
    (first, second, third) = batches(rank, 3)
    # Nothing yet: torch says 0.
    assert both.clip(0.1).item() == 0
    both.step()
    both.check_weights()
    # Clipping again finds the clipped norm.
    both.backward(first, sometimes=True)
    before = both.clip(0.3)
    after = both.clip(0.2)
    assert before > 0.3 > after > 0.29
    # A later backward adds to clipped gradients; the sum is clipped again.
    both.backward(second)
    both.clip(0.25, math.inf)
    both.check_gradients()
    both.step()
    both.check_weights()
    # A step does not forget gradients; zero_grad does, in all its forms.
    both.clip(0.1)
    both.zero_grad()
    assert both.clip(0.1).item() == 0
    both.backward(third)
    both.zero_grad(set_to_none=False)
    assert both.clip(0.1).item() == 0
    both.check_gradients()
    both.step()
    both.check_weights()
    both.backward(third)
    both.model.zero_grad()
    both.ddp.zero_grad()
    assert both.clip(0.1).item() == 0, "model.zero_grad() forgets the gradients, and they still count"
    both.step()
    both.check_weights()


def test_clipping_counts_the_gradients_that_are_there_and_no_others():
    """Before the first backward, twice, on a sum, after every kind of forgetting: stale shards would count."""
    run_ranks(clips_what_there_is, 3, timeout=60, pg_timeout=20)


def forgotten_gradients_do_not_count(rank: int, world: int) -> None:
    for shard in ("element", "tensor"):
        for cap in (0.0002, 25):
            both = Beside(SGD, shard=shard, bucket_cap_mb=cap, lr=0.05)
            for batch in batches(rank, 2):
                both.zero_grad()
                both.backward(batch, sometimes=True)
                for model in (both.model, both.ddp.module):
                    model.sometimes.grad = model.first.bias.grad = None
                both.clip(0.3, 2)
                both.check_gradients()
                both.step()
                both.check_weights()


def test_a_gradient_that_the_user_has_set_to_none_counts_in_no_norm():
    """``p.grad = None`` forgets a gradient. Its bucket still holds the sum, which must be left out."""
    run_ranks(forgotten_gradients_do_not_count, 2, timeout=60, pg_timeout=20)


def accumulates_then_clips(rank: int, world: int) -> None:
    for options in ({}, {"overlap_backward": False}):
        both = Beside(AdamW, **options, lr=0.01, weight_decay=0.1)
        inputs = batches(rank, 6)
        for cycle in range(2):
            both.zero_grad()
            micro = inputs[3 * cycle : 3 * cycle + 3]
            if cycle == 0:
                with both.opt.no_sync(), both.ddp.no_sync():
                    both.backward(micro[0])
                    both.backward(micro[1])
                both.backward(micro[2])
            else:
                for batch in micro:
                    both.backward(batch)
            both.clip(0.3, 3)
            both.check_gradients()
            both.step()
            both.check_weights()


def test_the_norm_of_accumulated_gradients_is_that_of_their_sum():
    run_ranks(accumulates_then_clips, 3, timeout=60, pg_timeout=20)


class OneLayer(nn.Module):
    """Two parameters, one of a single element: with four ranks some own nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.Linear(5, 1).double()

    def forward(self, batch: Tensor) -> Tensor:
        return self.layer(batch)


class OneNumber(OneLayer):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Parameter(torch.tensor([1.5], dtype=torch.float64))

    def forward(self, batch: Tensor) -> Tensor:
        return batch * self.layer


def empty_shares(rank: int, world: int, transport: str) -> int:
    choose(transport)
    empty = 0
    for make in (OneLayer, OneNumber):
        for shard in ("element", "tensor"):
            both = Beside(SGD, make=make, shard=shard, lr=0.05, momentum=0.9)
            empty += not list(both.opt.layout.pieces(rank))
            for batch, order in zip(batches(rank, 4), (1, 2, 3, math.inf), strict=True):
                both.zero_grad()
                both.backward(batch)
                both.clip(0.3, order)
                both.check_gradients()
                both.step()
                both.check_weights()
    return empty


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
def test_a_rank_with_an_empty_share_knows_the_norm_and_clips_along(transport):
    assert sum(run_ranks(empty_shares, 4, transport, timeout=60, pg_timeout=20)) >= 8


def half_precision(rank: int, world: int) -> None:
    """Oracle: the norm of the very gradients (full_grad), in float64."""
    for dtype in (torch.bfloat16, torch.float16):
        for reduce_dtype in (None, torch.float32):
            torch.manual_seed(7)
            layers = [nn.Linear(40, 40, bias=False) for _ in range(6)]
            model = nn.Sequential(*layers).to(dtype)
            opt = ZeroRedundancyOptimizer(
                model.parameters(),
                SGD,
                lr=1e-3,
                shard_gradients=True,
                bucket_cap_mb=0.005,
                reduce_dtype=reduce_dtype,
            )
            batch = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank)).to(dtype)
            # In float16 the squares of these gradients are beyond its range; their norm is not.
            (model(batch).square().mean() * 3000).backward()
            whole = [opt.full_grad(param) for param in model.parameters()]
            assert {gradient.dtype for gradient in whole} == {reduce_dtype or dtype}
            flat = torch.cat([gradient.reshape(-1).double() for gradient in whole])
            where = f"{dtype} reduced in {reduce_dtype}"
            for order in (1, 2, 3, math.inf):
                norm = opt.clip_grad_norm_(1e9, order)
                exact = torch.linalg.vector_norm(flat, order)
                # float32 has 24 bits; sums over 9600 elements lose a few. bfloat16 partials would be wrong by 1e-3.
                assert norm.dtype == torch.float32, f"{where}: the norm is {norm.dtype}"
                assert_close(norm.double(), exact, f"{where}, order {order}", rtol=1e-5, atol=0)
                assert_same_bits_everywhere(norm, where)
            in_half = torch.linalg.vector_norm(
                torch.stack([torch.linalg.vector_norm(gradient.to(dtype)) for gradient in whole])
            )
            off = abs(in_half.double() / torch.linalg.vector_norm(flat) - 1)
            assert dtype == torch.float16 or off > 1e-4, f"{where}: partials in half precision would do, too"
            norm = opt.clip_grad_norm_(0.5)
            clipped = torch.cat([opt.full_grad(param).reshape(-1).double() for param in model.parameters()])
            # The factor and each clipped element are rounded to the dtype, each by at most 2^-8 of itself in bfloat16.
            close = {"rtol": 2**-7 if reduce_dtype is None else 1e-6, "atol": 1e-7}
            assert_close(clipped, flat * (0.5 / norm.double()), f"{where}: clipped", **close)


def test_partial_norms_of_half_precision_gradients_are_added_up_in_float32():
    """A bfloat16 partial has 8 bits: the norm would be off by up to 1/256, and differ with the number of ranks."""
    run_ranks(half_precision, 3, timeout=60, pg_timeout=20)


class Mixed(nn.Module):
    """float64, float32, bfloat16 and complex parameters side by side."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.wide = nn.Parameter(torch.randn(5, 7, dtype=torch.float64))
        self.single = nn.Parameter(torch.randn(7, 9))
        self.spectrum = nn.Parameter(torch.randn(9, 4, dtype=torch.complex64))

    def forward(self, batch: Tensor) -> Tensor:
        hidden = torch.tanh(batch @ self.wide).float() @ self.single
        return torch.view_as_real(hidden.to(torch.complex64) @ self.spectrum)


def mixed_dtypes(rank: int, world: int) -> None:
    for shard in ("element", "tensor"):
        both = Beside(SGD, make=Mixed, shard=shard, lr=0.01)
        for batch, order in zip(batches(rank, 4), (1, 2, 3, math.inf), strict=True):
            both.zero_grad()
            both.backward(batch)
            norm = both.opt.clip_grad_norm_(2.5, order)
            # torch adds mixed norms up in a mixture of dtypes; the oracle here is float64 throughout.
            whole = [param.grad for param in both.ddp.parameters()]
            exact = torch.linalg.vector_norm(
                torch.cat([gradient.to(torch.complex128).abs().view(-1) for gradient in whole]), order
            )
            where = f"{both.where}, order {order}"
            assert_close(norm.double(), exact, where, rtol=1e-6, atol=0)
            assert_same_bits_everywhere(norm, where)
            factor = min(2.5 / (exact.item() + 1e-6), 1)
            assert factor < 0.9, "nothing is clipped"
            for gradient in whole:
                gradient.mul_(factor)
            for mine, theirs in zip(both.model.parameters(), both.ddp.parameters(), strict=True):
                ours = both.opt.full_grad(mine)
                assert_close(ours, theirs.grad, where, rtol=1e-5, atol=1e-6)  # float32 gradients, another order
            both.step()
            for mine, theirs in zip(both.model.parameters(), both.ddp.parameters(), strict=True):
                assert_close(mine.detach(), theirs.detach(), where, rtol=1e-5, atol=1e-6)
                theirs.data.copy_(mine.data)


@needs_complex_ddp
def test_mixed_dtypes_and_complex_gradients_are_clipped_by_one_norm():
    run_ranks(mixed_dtypes, 2, timeout=60, pg_timeout=20)


def not_finite(rank: int, world: int) -> None:
    both = Beside(SGD, lr=0.05, momentum=0.9)
    for number, batch in enumerate(batches(rank, 6)):
        both.zero_grad()
        bad = torch.tensor([0, 0, (math.nan, math.inf)[number % 2]])
        handles = []
        if number in (1, 2, 4) and rank == number % world:  # one rank's one element spoils the norm of all
            for model in (both.model, both.ddp.module):
                handles.append(model.second.bias.register_hook(bad.add))
        both.backward(batch)
        for handle in handles:
            handle.remove()
        if number in (1, 2):
            with pytest.raises(RuntimeError, match="finite"):
                both.opt.clip_grad_norm_(0.3, 2 if number == 1 else math.inf, error_if_nonfinite=True)
            both.check_gradients(equal_nan=True)
            continue
        norm = both.opt.clip_grad_norm_(0.3)
        expected = clip_grad_norm_(both.ddp.parameters(), 0.3)
        if number == 4:  # torch scales by a norm that is not finite if it may; so do we
            assert not norm.isfinite()
            torch.testing.assert_close(norm, expected, equal_nan=True)
            both.check_gradients(equal_nan=True)
            continue
        assert_close(norm, expected, "after a norm that was not finite")
        both.step()
        both.check_weights()


def test_a_norm_that_is_not_finite_raises_on_every_rank_or_on_none():
    """One bad element of one rank's share: if only its owner raised, the others would hang in the step.

    An error leaves the gradients as they were, as in torch, and the next batch trains on.
    """
    run_ranks(not_finite, 3, timeout=60, pg_timeout=20)


def torchs_own_function(rank: int, world: int, transport: str) -> None:
    choose(transport)
    both = Beside(SGD, lr=0.05, momentum=0.9)
    for batch, order in zip(batches(rank, 5), (1, 2, 3, math.inf, 2), strict=True):
        both.zero_grad()
        both.backward(batch)
        foreach = False if order == 3 else None
        for part in ("first", "second") if order == 1 else ("",):  # all of them, or by layer
            mine, theirs = (model.get_submodule(part) for model in (both.model, both.ddp.module))
            norm = clip_grad_norm_(mine.parameters(), 0.3, order, foreach=foreach)
            expected = clip_grad_norm_(theirs.parameters(), 0.3, order)
            assert_close(norm, expected, f"order {order} of {part!r}")
            assert_same_bits_everywhere(norm, f"order {order}")
        both.check_gradients()
        assert_close(both.model.first.weight.grad.norm(), both.ddp.module.first.weight.grad.norm(), "grad.norm()")
        total = nn.utils.get_total_norm([p.grad for p in both.model.parameters() if p.grad is not None], order)
        nn.utils.clip_grads_with_norm_(both.model.parameters(), 0.1, total)
        clip_grad_norm_(both.ddp.parameters(), 0.1, order)
        both.check_gradients()
        both.step()
        both.check_weights()


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
def test_torchs_own_clip_grad_norm_gives_the_same_norm_on_sharded_gradients(transport):
    """Frameworks call it whatever the optimizer; also on a part of the model."""
    run_ranks(torchs_own_function, 3, transport, timeout=60, pg_timeout=20)


def clip_in_a_subgroup(rank: int, world: int) -> None:
    members = [1, 3]
    group = dist.new_group(members)
    if rank not in members:
        return
    both = Beside(SGD, group, lr=0.05)
    for batch, order in zip(batches(rank, 4), (1, 2, 3, math.inf), strict=True):
        both.zero_grad()
        both.backward(batch)
        both.clip(0.3, order, group)
        both.check_gradients()
        both.step()
        both.check_weights()


def test_clipping_and_full_grad_in_a_subgroup():
    """Group ranks are not global ranks: full_grad would ask the wrong owner."""
    run_ranks(clip_in_a_subgroup, 4, timeout=60, pg_timeout=20)


# --- gradients whole ----------------------------------------------------------------------------------------------


def clips_whole_gradients(rank: int, world: int) -> None:
    """Default mode: DDP reduces, the optimizer is sharded. Gradients have the same bits in both runs."""
    for views in (False, True):
        ddps = [
            DistributedDataParallel(Net(), find_unused_parameters=True, gradient_as_bucket_view=views) for _ in "ab"
        ]
        opt = ZeroRedundancyOptimizer(
            ddps[0].parameters(), SGD, parameters_as_bucket_view=views, bucket_cap_mb=0.0002, lr=0.05, momentum=0.9
        )
        plain = SGD(ddps[1].parameters(), lr=0.05, momentum=0.9)
        for batch, order in zip(batches(rank, 4), (1, 2, 3, math.inf), strict=True):
            for ddp, optimizer in zip(ddps, (opt, plain), strict=True):
                optimizer.zero_grad()
                backward(ddp, batch)
            norm = opt.clip_grad_norm_(0.3, order)
            expected = clip_grad_norm_(ddps[1].parameters(), 0.3, order)
            assert expected > 0.3
            assert_close(norm, expected, f"order {order}")
            assert_same_bits_everywhere(norm, f"order {order}")
            for mine, theirs in zip(ddps[0].parameters(), ddps[1].parameters(), strict=True):
                assert opt.full_grad(mine) is mine.grad  # every rank has it
                assert_close(mine.grad, theirs.grad, "clipped gradient")
            opt.step()
            plain.step()
            for mine, theirs in zip(values_of(ddps[0].parameters()), values_of(ddps[1].parameters()), strict=True):
                assert_close(mine, theirs, "weights")
        opt.check_replicas()
        assert opt.clip_grad_norm_(1e9).item() > 0
        opt.zero_grad()
        assert opt.clip_grad_norm_(1.0).item() == 0
        backward(ddps[0], batches(rank, 1)[0] * math.inf)
        with pytest.raises(RuntimeError, match="finite"):
            opt.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_clipping_works_when_ddp_reduces_the_gradients():
    run_ranks(clips_whole_gradients, 3, timeout=60, pg_timeout=20)


def clip_with_hooks(rank: int, world: int) -> None:
    for make_hook in (hook_with_zero_step, hook_with_zero_step_interleaved):
        ddp = DistributedDataParallel(OneLayer())
        opt = ZeroRedundancyOptimizer(ddp.parameters(), SGD, overlap_with_ddp=True, lr=0.05)
        ddp.register_comm_hook(None, make_hook(allreduce_hook, ddp, opt))
        backward(ddp, batches(rank, 1)[0])
        before = values_of(ddp.parameters())
        with pytest.raises(RuntimeError, match="overlap_with_ddp"):
            opt.clip_grad_norm_(1e-3)
        assert all(torch.equal(a, b) for a, b in zip(before, values_of(ddp.parameters()), strict=True))


def test_clipping_after_a_hook_has_stepped_is_refused_by_name():
    """The gradients were used during backward: a norm would be returned and nothing clipped."""
    run_ranks(clip_with_hooks, 2, timeout=60, pg_timeout=20)


# --- full_grad ----------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A channels_last convolution, a parameter without elements, a scalar, a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.conv = nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(6, 5, dtype=torch.float64).t())
        self.nothing = nn.Parameter(torch.empty(0, 4, dtype=torch.float64))
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, batch: Tensor) -> Tensor:
        images = (batch @ self.turned).reshape(-1, 1).expand(-1, 75).reshape(-1, 3, 5, 5) * torch.arange(5)
        return self.conv(images) * self.scale + self.nothing.sum()


def full_gradients(rank: int, world: int) -> None:
    for shard in ("element", "tensor"):
        both = Beside(SGD, make=Odd, shard=shard, lr=1e-3, momentum=0.9)
        for number, batch in enumerate(batches(rank, 4)):
            both.backward(batch)
            both.check_gradients()
            for mine in both.model.parameters():
                whole = both.opt.full_grad(mine)
                if whole is None:
                    continue
                assert (whole.shape, whole.dtype, type(whole)) == (mine.shape, mine.dtype, Tensor)
                # A copy: what is done to it changes nothing.
                whole.fill_(math.nan)
            if number % 2:
                both.clip(0.3)
                both.check_gradients()
                both.step()
                both.check_gradients()
                both.check_weights()
                both.zero_grad()
                assert all(both.opt.full_grad(mine) is None for mine in both.model.parameters())


def test_full_grad_is_ddps_gradient_on_every_rank():
    """Sums over two backwards, after clipping, after the step; any memory format; None if there is none."""
    run_ranks(full_gradients, 3, timeout=60, pg_timeout=20)


def wrong_full_grads(rank: int, world: int) -> None:
    both = Beside(SGD, lr=0.05)
    both.backward(batches(rank, 1)[0])
    stranger = error_of(lambda: both.opt.full_grad(torch.zeros(3)), "a tensor that is no parameter")
    assert isinstance(stranger, (ValueError, KeyError, RuntimeError))
    assert "full_grad" in str(stranger)
    params = list(both.model.parameters())
    differs = error_of(lambda: both.opt.full_grad(params[rank]), "another parameter on every rank")
    assert "full_grad" in str(differs)
    # Told apart in time: the run goes on.
    both.check_gradients()
    both.step()
    both.check_weights()


def test_full_grad_of_a_stranger_or_of_different_parameters_is_told_on_every_rank():
    run_ranks(wrong_full_grads, 2, timeout=60, pg_timeout=20)


def wrong_norms(rank: int, world: int) -> None:
    both = Beside(SGD, lr=0.05)
    both.backward(batches(rank, 1)[0])
    for order in (0, -1, -math.inf, math.nan):
        error = error_of(lambda order=order: both.opt.clip_grad_norm_(1.0, order), f"norm_type={order}")
        assert isinstance(error, ValueError)
        assert "norm_type" in str(error)
    for max_norm in ("much", None):
        assert isinstance(error_of(lambda limit=max_norm: both.opt.clip_grad_norm_(limit)), (ValueError, TypeError))
    both.check_gradients()


def test_norms_that_are_none_are_refused_before_anything_is_sent():
    run_ranks(wrong_norms, 2, timeout=60, pg_timeout=20)


def listed_twice(rank: int, world: int) -> None:
    param = nn.Parameter(torch.tensor([3.0, 4.0]))
    with pytest.warns(UserWarning, match="duplicate"):
        opt = ZeroRedundancyOptimizer([param, param], SGD, lr=0.1)
    param.grad = torch.tensor([3.0, 4.0])
    assert opt.clip_grad_norm_(1.0).item() == 5
    torch.testing.assert_close(param.grad, torch.tensor([0.6, 0.8]))


def test_a_parameter_that_is_listed_twice_counts_and_is_scaled_once():
    run_ranks(listed_twice, 1)
