"""ZeRO-2: gradients of several micro-batches, with ``no_sync`` and with a reduction every time.

Oracles: DDP with its own ``no_sync``; and one process that computes everybody's gradients, for what DDP does not do.
float64; means are summed in another order, which leaves differences below 1e-9 (see test_shard_gradients.py).
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from shardstep import ShardedGradient, ZeroRedundancyOptimizer, shard_ddp_gradients
from shardstep.grads import scheduler
from tests.harness import run_ranks
from tests.oracle import assert_same, values_of
from tests.ranks.test_shard_gradients import (
    KB,
    LIMITS,
    MLP,
    STEPS,
    VARIANTS,
    Checkpointed,
    Stack,
    assert_close,
    batch,
    make_mlp,
    mlp_loss,
    sharded,
    transport,
)

FORGET: dict[str, Callable[[nn.Module, Optimizer], None]] = {
    "opt.zero_grad()": lambda model, optimizer: optimizer.zero_grad(),
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
    "p.grad = None": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()] and None,
    "opt.zero_grad(set_to_none=False)": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad(set_to_none=False)": lambda model, optimizer: model.zero_grad(set_to_none=False),
}

# --- is a micro-batch lost? ---------------------------------------------------------------------------------------


class Digits(nn.Module):
    """Every element of every parameter has the gradient ``amount``: sums of powers of ten can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (5, 300, 1, 40))

    def forward(self, amount: float) -> Tensor:
        return sum(weight.sum() for weight in self.weights) * amount


def digits(rank: int, world: int) -> None:
    """Micro-batch k adds 10**k times 1, 2, 3, ... on ranks 0, 1, 2, ...: the mean is 10**k * (world + 1) / 2."""
    mean = (world + 1) / 2
    for shard, cap, way in VARIANTS:
        with transport(way):
            model = Digits()
            optimizer = sharded(model.parameters(), SGD, shard=shard, bucket_cap_mb=cap, lr=1.0)
        expected_weight = 0.0
        for forget, syncs in zip(itertools.cycle(FORGET), itertools.product((False, True), repeat=3), strict=False):
            FORGET[forget](model, optimizer)
            for position, sync in enumerate((*syncs, True)):
                with nullcontext() if sync else optimizer.no_sync():
                    model(10**position * (rank + 1)).backward()
            claim = f"{shard} {cap} {way}: {forget}, then micro-batches with sync {(*syncs, True)}"
            for weight in model.weights:
                assert isinstance(weight.grad, ShardedGradient), claim
                found = optimizer.full_grad(weight).unique().tolist()
                assert found == [1111 * mean], f"{claim}: {found}, but each micro-batch has the digit {mean}"
            optimizer.step()
            expected_weight -= 1111 * mean
            for weight in model.weights:
                assert weight.detach().unique().tolist() == [expected_weight], claim


@pytest.mark.parametrize("world", [1, 2, 3])
def test_no_micro_batch_is_lost_or_counted_twice_wherever_the_reductions_are(world):
    """The first, the last and those between, in all patterns of no_sync, after every way to forget the last ones."""
    run_ranks(digits, world, **LIMITS)


def no_sync_only(rank: int, world: int) -> None:
    """All micro-batches within no_sync: the step, or who asks for the gradient, reduces what there is."""
    mean = (world + 1) / 2
    for ask in (False, True):
        model = Digits()
        optimizer = sharded(model.parameters(), SGD, lr=1.0)
        for step in range(1, 4):
            optimizer.zero_grad()
            for position in range(3):
                with optimizer.no_sync():
                    model(10**position * (rank + 1)).backward()
            if ask:
                assert optimizer.full_grad(model.weights[0]).unique().tolist() == [111 * mean]
            optimizer.step()
            assert model.weights[1].detach().unique().tolist() == [-111 * mean * step]


def test_a_step_after_nothing_but_no_sync_uses_the_mean_of_all_ranks():
    """DDP would step with local gradients, and replicas would differ. Nobody wants that."""
    run_ranks(no_sync_only, 3, **LIMITS)


def exception_in_no_sync(rank: int, world: int) -> None:
    model = Digits()
    optimizer = sharded(model.parameters(), SGD, lr=1.0)
    with pytest.raises(KeyError), optimizer.no_sync(), optimizer.no_sync():
        raise KeyError
    model(rank + 1).backward()
    assert optimizer.full_grad(model.weights[0]).unique().tolist() == [(world + 1) / 2]
    with optimizer.no_sync():
        with optimizer.no_sync():
            model(10 * (rank + 1)).backward()
        model(100 * (rank + 1)).backward()  # still within the outer one
        assert torch.equal(sum_of_arrived(model, optimizer), torch.tensor(110.0 * (rank + 1)).double())
    model(1000 * (rank + 1)).backward()
    assert optimizer.full_grad(model.weights[0]).unique().tolist() == [1111 * (world + 1) / 2]


def sum_of_arrived(model: Digits, optimizer: Any) -> Tensor:
    """What a rank holds of its own, not reduced: the bytes are those of full gradients and of the share."""
    full = sum(weight.nbytes for weight in model.weights)
    assert full <= optimizer.memory().gradients <= full + full // 2 + 64
    return optimizer.engine.source._reducer.iteration.arrived[0].unique().squeeze()


def test_no_sync_nests_and_ends_with_an_exception():
    run_ranks(exception_in_no_sync, 3, **LIMITS)


# --- as DDP does it -----------------------------------------------------------------------------------------------

PATTERNS = {
    "no_sync, then sync": [False, False, True],
    "sync every time": [True, True, True],
    "no_sync in between": [True, False, True],
    "sync in between": [False, True, False, True],
}


def accumulate(
    model: Any,
    syncs: Sequence[bool],
    no_sync: Callable,
    optimizer: Any,
    rank: int,
    loss: Callable = mlp_loss,
    steps: int = 6,
) -> list[list[Tensor]]:
    weights = []
    for step in range(steps):
        optimizer.zero_grad()
        for position, sync in enumerate(syncs):
            with nullcontext() if sync else no_sync():
                (loss(model, rank, 10 * step + position) / len(syncs)).backward()
        optimizer.step()
        weights.append(values_of(model.parameters()))
    return weights


def as_ddp(rank: int, world: int) -> None:
    for (pattern, syncs), (_, cap, way) in zip(PATTERNS.items(), VARIANTS, strict=True):
        model = make_mlp()
        ddp = DistributedDataParallel(model)
        plain = AdamW(MLP.groups(model), lr=0.01)
        theirs = accumulate(ddp, syncs, ddp.no_sync, plain, rank, steps=STEPS)
        for granularity in ("element", "tensor"):
            model = make_mlp()
            with transport(way):
                optimizer = sharded(MLP.groups(model), AdamW, shard=granularity, bucket_cap_mb=cap, lr=0.01)
            ours = accumulate(model, syncs, optimizer.no_sync, optimizer, rank, steps=STEPS)
            assert_close(ours, theirs, f"{pattern}, {granularity} {cap} {way}", 1e-9)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_twenty_steps_of_accumulated_gradients_equal_ddp(world):
    run_ranks(as_ddp, world, **LIMITS)


def reentrant(rank: int, world: int) -> None:
    """Accumulation when no hook runs outside of a re-entrant segment, and when parameters come in parts."""
    patterns = list(PATTERNS.items())
    for segments, (pattern, syncs) in zip(("all", "shared", "all shared", "all"), patterns, strict=True):

        def loss(model: Any, rank: int, step: int, reentrant: bool | None, segments: str = segments) -> Tensor:
            return model(batch(rank, step, 3, 8).requires_grad_(), segments, reentrant).square().sum()

        model = Checkpointed()
        ddp = DistributedDataParallel(model)
        plain = AdamW(model.parameters(), lr=0.01)
        theirs = accumulate(ddp, syncs, ddp.no_sync, plain, rank, lambda *args: loss(*args, None))
        for cap in (KB, 25):
            model = Checkpointed()
            optimizer = sharded(model.parameters(), AdamW, bucket_cap_mb=cap, lr=0.01)
            ours = accumulate(model, syncs, optimizer.no_sync, optimizer, rank, lambda *args: loss(*args, True))
            assert_close(ours, theirs, f"{segments}, {pattern}, {cap}", 1e-9)


def test_accumulated_gradients_of_reentrant_segments_equal_ddp():
    run_ranks(reentrant, 3, **LIMITS)


class Segments(Stack):
    """Every layer a re-entrant segment of its own."""

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        x.requires_grad_()
        for position in order:
            x = checkpoint(nn.Sequential(self.layers[position], nn.Tanh()), x, use_reentrant=True)
        return x


def unused_segments(rank: int, world: int, micro_batches: int) -> None:
    """Every layer is a re-entrant segment and one rests, on one rank. Oracle: DDP without checkpointing."""

    def loss(model: Any, rank: int, step: int) -> Tensor:
        resting = step % 5 if rank == step % 2 else 5
        order = tuple(position for position in range(5) if position != resting)
        return (model(batch(rank, step, 3, 8), order) - 0.5).square().sum()

    syncs = [True] * micro_batches
    model = Stack()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    theirs = accumulate(ddp, syncs, ddp.no_sync, AdamW(model.parameters(), lr=0.01), rank, loss)
    for cap in (KB, 25):
        model = Segments()
        optimizer = sharded(model.parameters(), AdamW, bucket_cap_mb=cap, lr=0.01)
        ours = accumulate(model, syncs, optimizer.no_sync, optimizer, rank, loss)
        assert_close(ours, theirs, f"cap {cap}", 1e-9)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_reentrant_segments_that_one_rank_does_not_use_equal_ddp(micro_batches):
    """No hook runs outside of a segment, so nothing tells where one backward ends and the next one starts."""
    run_ranks(unused_segments, 2, micro_batches, timeout=60, pg_timeout=10)


# --- any program --------------------------------------------------------------------------------------------------


class Everyone:
    """The oracle: one process that plays all ranks. Keeps reduced and not yet reduced gradients apart, as DDP does."""

    def __init__(self, world: int, make: Callable[[], nn.Module], make_optimizer: Callable) -> None:
        self.world, self.model = world, make()
        self.params = list(self.model.parameters())
        self.optimizer = make_optimizer(self.params)
        self.forget(to_zeros=False)

    def forget(self, to_zeros: bool, only: Sequence[int] | None = None) -> None:
        for position, param in enumerate(self.params):
            if only is None or position in only:
                param.grad = torch.zeros_like(param) if to_zeros and param.grad is not None else None
        if only is None:
            self.local: list[dict[int, Tensor]] = [{} for _ in range(self.world)]
        else:
            for local in self.local:
                for position in only:
                    local.pop(position, None)

    def backward(self, losses: Sequence[Tensor], sync: bool) -> None:
        for local, loss in zip(self.local, losses, strict=True):
            for position, gradient in enumerate(torch.autograd.grad(loss, self.params, allow_unused=True)):
                if gradient is not None:
                    local[position] = local[position] + gradient if position in local else gradient
        if sync:
            self.reduce()

    def reduce(self) -> None:
        for position, param in enumerate(self.params):
            used = [local.pop(position) for local in self.local if position in local]
            if used:
                mean = sum(used) / self.world
                param.grad = mean if param.grad is None else param.grad + mean


def layers_of(rank: int, seed: int) -> tuple[int, ...]:
    """Which layers a rank uses in a micro-batch: at least one, in any order."""
    chance = random.Random(1000 * seed + rank)
    return tuple(chance.sample(range(5), k=chance.randint(1, 5)))


def random_program(rank: int, world: int, seeds: Sequence[int]) -> None:
    """Micro-batches with and without sync, unused layers everywhere, gradients dropped, steps left out or doubled."""
    for seed in seeds:
        chance = random.Random(seed)
        shard, cap, way = chance.choice(VARIANTS)
        zero = {"overlap_backward": chance.random() < 0.7, "gradient_buckets_in_flight": chance.choice([1, 2, 4])}
        history = [f"seed {seed}, {shard}, cap {cap}, {way}, {zero}"]

        def make_optimizer(params: list, make: Callable = AdamW, **zero: Any) -> Any:
            return make(params, lr=0.01, weight_decay=0.1, **zero)

        everyone = Everyone(world, Stack, make_optimizer)
        model = Stack()
        with transport(way):
            optimizer = make_optimizer(
                list(model.parameters()),
                lambda *a, **k: sharded(a[0], AdamW, **k),
                shard=shard,
                bucket_cap_mb=cap,
                **zero,
            )
        for iteration in range(12):
            forget = chance.choice([*FORGET, "nothing"])
            history.append(f"iteration {iteration}: {forget}")
            if forget != "nothing":
                FORGET[forget](model, optimizer)
                everyone.forget(to_zeros="False" in forget)
            for micro in range(count := chance.randint(1, 3)):
                sync = micro == count - 1 or chance.random() < 0.5
                number = 100 * iteration + micro
                orders = [layers_of(one, 10000 * seed + number) for one in range(world)]
                history.append(f"backward {sync=} of layers {orders}")
                losses = [
                    (everyone.model(batch(one, number, 3, 8), orders[one]) - 0.5).square().sum() for one in range(world)
                ]
                everyone.backward(losses, sync)
                with nullcontext() if sync else optimizer.no_sync():
                    (model(batch(rank, number, 3, 8), orders[rank]) - 0.5).square().sum().backward()
                if sync and chance.random() < 0.2:
                    dropped = chance.sample(range(10), k=3)
                    history.append(f"p.grad = None for parameters {dropped}")
                    everyone.forget(to_zeros=False, only=dropped)
                    for position in dropped:
                        list(model.parameters())[position].grad = None
            for position, (mine, theirs) in enumerate(zip(model.parameters(), everyone.params, strict=True)):
                assert (mine.grad is None) == (theirs.grad is None), f"parameter {position}: {history}"
            if chance.random() < 0.2:
                gradient = optimizer.full_grad(next(model.parameters()))
                expected = everyone.params[0].grad
                assert (gradient is None) == (expected is None), history
                if expected is not None:
                    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-9, msg=str(history))
            for _ in range(steps := chance.choice([0, 1, 1, 1, 1, 2])):
                optimizer.step()
                everyone.optimizer.step()
            history.append(f"{steps} steps")
            assert_close([values_of(model.parameters())], [values_of(everyone.params)], "\n".join(history), 1e-9)
        optimizer.check_replicas()


@pytest.mark.extended
@pytest.mark.parametrize("world", [2, 3])
def test_any_program_of_micro_batches_steps_as_one_process_that_plays_all_ranks(world):
    run_ranks(random_program, world, range(10 * world, 10 * world + 10), **LIMITS)


def unused_as_ddp(rank: int, world: int) -> None:
    """A layer that only some micro-batches of some ranks use. DDP(find_unused_parameters=True) decides."""
    patterns = {
        # per micro-batch: sync, and the layers of rank 0 and of the others
        "on all ranks only in the first": [(False, (0, 1, 2), (0, 1, 2)), (True, (0, 2), (0, 2))],
        "on all ranks only in the last": [(False, (0, 2), (0, 2)), (True, (0, 1, 2), (0, 1, 2))],
        "on rank 0 only in the last": [(False, (0, 2), (0, 2)), (True, (0, 1, 2), (0, 2))],
        "on rank 0 in the first, on the others in the last": [(False, (0, 1, 2), (0, 2)), (True, (0, 2), (0, 1, 2))],
        "on all ranks in the first of two reductions": [(True, (0, 1, 2), (0, 1, 2)), (True, (0, 2), (0, 2))],
        "on rank 0 in the second of two reductions": [(True, (0, 2), (0, 2)), (True, (0, 1, 2), (0, 2))],
    }

    def train(model: Any, no_sync: Callable, optimizer: Any, pattern: list) -> list[list[Tensor]]:
        weights = []
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 3 != 2)
            for micro, (sync, first, others) in enumerate(pattern):
                with nullcontext() if sync else no_sync():
                    model(
                        batch(rank, 10 * step + micro, 3, 8), first if rank == 0 else others
                    ).square().sum().backward()
            optimizer.step()
            weights.append(values_of(model.parameters()))
        return weights

    for name, pattern in patterns.items():
        model = Stack()
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        theirs = train(ddp, ddp.no_sync, SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1), pattern)
        for cap in (KB, 25):
            model = Stack()
            options = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}
            optimizer = sharded(model.parameters(), SGD, bucket_cap_mb=cap, **options)
            assert_close(train(model, optimizer.no_sync, optimizer, pattern), theirs, f"{name}, cap {cap}", 1e-9)


@pytest.mark.parametrize("world", [2, 3])
def test_a_layer_that_some_micro_batches_do_not_use_is_stepped_as_by_ddp(world):
    run_ranks(unused_as_ddp, world, **LIMITS)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.trunk, self.one, self.two = (nn.Linear(8, 8).double() for _ in range(3))


def two_losses(rank: int, world: int) -> None:
    """Two backwards of one forward: the heads come once, the trunk twice. Oracle: the mean of what one backward has."""
    for cap, retained in ((KB, True), (25, True), (25, False)):
        model, expected = TwoHeads(), TwoHeads()
        optimizer = sharded(model.parameters(), AdamW, bucket_cap_mb=cap, lr=0.01)
        plain = AdamW(expected.parameters(), lr=0.01)
        for step in range(6):
            optimizer.zero_grad()
            features = torch.tanh(model.trunk(batch(rank, step, 3, 8)))
            losses = model.one(features).square().sum(), model.two(features).cos().sum()
            if retained:
                losses[0].backward(retain_graph=True)
                losses[1].backward()
            else:
                torch.autograd.backward(losses)
            optimizer.step()
            plain.zero_grad()
            for one in range(world):
                features = torch.tanh(expected.trunk(batch(one, step, 3, 8)))
                ((expected.one(features).square().sum() + expected.two(features).cos().sum()) / world).backward()
            plain.step()
            claim = f"step {step}, cap {cap}, {retained=}"
            assert_close([values_of(model.parameters())], [values_of(expected.parameters())], claim, 1e-9)


def test_two_losses_of_one_forward_add_up():
    run_ranks(two_losses, 3, **LIMITS)


def steps_without_backward(rank: int, world: int) -> None:
    """A step uses the gradients that are there: none, or those of the last step once more."""
    model, expected = make_mlp(), make_mlp()
    ddp = DistributedDataParallel(expected)
    optimizer = sharded(model.parameters(), AdamW, lr=0.01)
    plain = AdamW(expected.parameters(), lr=0.01)
    for opt, wrapped in ((optimizer, model), (plain, ddp)):
        opt.step()
        opt.zero_grad()
        opt.step()
        mlp_loss(wrapped, rank, 0).backward()
        opt.step()
        opt.step()
        mlp_loss(wrapped, rank, 1).backward()  # on top of the first
        opt.step()
        opt.zero_grad()
        opt.step()
    assert_close([values_of(model.parameters())], [values_of(expected.parameters())], "", 1e-9)


def test_a_step_uses_the_gradients_that_are_there():
    run_ranks(steps_without_backward, 3, **LIMITS)


# --- bf16 parameters, float32 shards ------------------------------------------------------------------------------


def small_after_large(rank: int, world: int) -> None:
    """1, then eight times 2**-9. In bf16 each of the small ones is less than half a unit of 1 and is lost."""
    amounts = [1.0] + [2.0**-9] * 8
    total = 1 + 2.0**-6  # has a bf16 of its own
    for pattern in ("no_sync", "sync every time", "mixed"):
        for way in ("shared memory", "sockets"):
            for shard in ("element", "tensor"):
                with transport(way):
                    model = Digits().bfloat16()
                    optimizer = sharded(model.parameters(), SGD, shard=shard, reduce_dtype=torch.float32, lr=1.0)
                for order in (amounts, amounts[::-1]):
                    optimizer.zero_grad()
                    for position, amount in enumerate(order):
                        last = position == len(order) - 1
                        sync = last or pattern == "sync every time" or (pattern == "mixed" and position % 3 == 0)
                        with nullcontext() if sync else optimizer.no_sync():
                            model(amount).backward()
                    claim = f"{pattern}, {way}, {shard}"
                    for weight in model.weights:
                        gradient = optimizer.full_grad(weight)
                        assert gradient.dtype == torch.float32, claim
                        assert gradient.unique().tolist() == [total], f"{claim}: {gradient.unique().tolist()}"
                        assert weight.grad.dtype == torch.bfloat16  # what torch demands of it
                    before = values_of(model.parameters())
                    optimizer.step()
                    for weight, value in zip(model.weights, before, strict=True):
                        assert weight.dtype == torch.bfloat16
                        assert_same(weight.detach(), value - torch.tensor(total).bfloat16(), claim)


def small_on_other_ranks(rank: int, world: int) -> None:
    """Between ranks: rank 0 has 1, each of the others 2**-9. Any sum in bf16 would lose them."""
    model = Digits().bfloat16()
    optimizer = sharded(model.parameters(), SGD, reduce_dtype=torch.float32)
    for _ in range(2):
        optimizer.zero_grad()
        model(1.0 if rank == 0 else 2.0**-9).backward()
        expected = (1 + (world - 1) * 2.0**-9) / world
        assert optimizer.full_grad(model.weights[1]).unique().tolist() == [torch.tensor(expected).item()]


@pytest.mark.parametrize("work", [small_after_large, small_on_other_ranks], ids=lambda work: work.__name__)
def test_bf16_gradients_are_added_up_in_float32(work):
    run_ranks(work, 4, **LIMITS)


def bf16_training(rank: int, world: int) -> None:
    """Oracle: everybody's bf16 gradients of all micro-batches, added in float32, rounded to bf16 once, plain AdamW."""
    for syncs in PATTERNS.values():
        for shard in ("element", "tensor"):
            model, expected = make_mlp(torch.bfloat16), make_mlp(torch.bfloat16)
            optimizer = sharded(model.parameters(), AdamW, shard=shard, reduce_dtype=torch.float32, lr=0.01)
            plain = AdamW(expected.parameters(), lr=0.01)
            for step in range(5):
                optimizer.zero_grad()
                for micro, sync in enumerate(syncs):
                    with nullcontext() if sync else optimizer.no_sync():
                        mlp_loss(model, rank, 10 * step + micro).backward()
                totals = [torch.zeros_like(param, dtype=torch.float64) for param in expected.parameters()]
                for one, micro in itertools.product(range(world), range(len(syncs))):
                    loss = mlp_loss(expected, one, 10 * step + micro)
                    for total, gradient in zip(
                        totals, torch.autograd.grad(loss, list(expected.parameters())), strict=True
                    ):
                        total += gradient.double()
                for param, mine, total in zip(expected.parameters(), model.parameters(), totals, strict=True):
                    wide = optimizer.full_grad(mine)
                    # float32 sums of at most 16 numbers: 16 * 2**-24 of the largest sum on the way
                    torch.testing.assert_close(wide.double(), total / world, rtol=2e-6, atol=2e-6)
                    param.grad = wide.bfloat16()
                optimizer.step()
                plain.step()
                assert_same(values_of(model.parameters()), values_of(expected.parameters()), f"{syncs} {shard} {step}")


def test_bf16_parameters_with_float32_shards_train_as_the_plain_optimizer_on_the_exact_sum():
    run_ranks(bf16_training, 3, **LIMITS)


def bf16_as_ddp(rank: int, world: int) -> None:
    """Without reduce_dtype, with two ranks: DDP's bits. (Halving is exact, and a sum of two is rounded once.)"""
    for syncs in ([True], [False, False, True]):
        model = make_mlp(torch.bfloat16)
        ddp = DistributedDataParallel(model)
        theirs = accumulate(ddp, syncs, ddp.no_sync, AdamW(model.parameters(), lr=0.01), rank)
        model = make_mlp(torch.bfloat16)
        optimizer = sharded(model.parameters(), AdamW, lr=0.01)
        ours = accumulate(model, syncs, optimizer.no_sync, optimizer, rank)
        assert_close(ours, theirs, f"{syncs}", 0)


def test_bf16_parameters_of_two_ranks_have_the_bits_of_ddp():
    run_ranks(bf16_as_ddp, 2, **LIMITS)


def no_sync_after_a_late_rank(rank: int, world: int, under_ddp: bool) -> None:
    """Rank 0 leaves its backward before all is reduced; the next micro-batch must not go along in that round."""
    scheduler.PATIENCE = 0.2
    model = Digits()
    ddp = DistributedDataParallel(model) if under_ddp else None
    if ddp is None:
        optimizer = sharded(model.parameters(), SGD, bucket_cap_mb=KB, lr=1.0)
    else:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, bucket_cap_mb=KB, lr=1.0)
        shard_ddp_gradients(ddp, optimizer)
    forward, no_sync = ddp or model, (ddp or optimizer).no_sync
    for _ in range(2):
        loss = forward(rank + 1.0)
        if rank == world - 1:
            time.sleep(0.6)
        loss.backward()
        with no_sync():
            forward(10.0 * (rank + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = -2 * 11 * (world + 1) / 2
    assert all(torch.equal(weight, torch.full_like(weight, expected)) for weight in model.weights)


@pytest.mark.parametrize("under_ddp", [False, True])
def test_no_sync_after_a_backward_that_a_rank_was_late_in_loses_nothing(under_ddp):
    run_ranks(no_sync_after_a_late_rank, 2, under_ddp, pg_timeout=10)
