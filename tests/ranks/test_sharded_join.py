"""Uneven inputs with sharded gradients, and BatchNorm's buffers. Oracle: DDP in its own Join with the plain optimizer.

A rank that has run out of inputs must reduce zeros, count or not count in the divisor, keep its share of the gradients
and step it. All in float64. DDP divides before it sums and sums in a ring, we sum in rank order and divide once, so
last bits differ; over at most eight steps they stay far below ``CLOSE``, and every mistake in who counts is far above.

[Note: where DDP is no oracle]
In a Join with ``find_unused_parameters=True`` a joined DDP rank sends its last map of used parameters again and again
(and uninitialised memory if it never had a batch), so unused parameters count as used. And if backward reduces every
micro-batch, DDP reduces the earlier ones' sum again, to which a joined rank adds zeros: it shrinks. In these two cases
the oracle is one process that sees everybody's batches (``AllRanks``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.oracle import assert_same, error_of
from tests.surroundings import choose

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
UNEVEN = {1: [3], 2: [2, 5], 3: [4, 0, 6], 4: [5, 8, 6, 7]}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"shard": "element", "bucket_cap_mb": 0.0002},  # several buckets
    {"shard": "tensor", "parameters_as_bucket_view": True, "gradient_buckets_in_flight": 1, "bucket_cap_mb": 0.0002},
    {"overlap_backward": False},
)


class Net(nn.Module):
    """66 elements; 89 with a parameter that is used only if asked for."""

    def __init__(self, more: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.sometimes = nn.Parameter(torch.randn(23)) if more else None
        self.double()

    def forward(self, batch: Tensor, sometimes: bool = False) -> Tensor:
        out = self.second(torch.tanh(self.first(batch)))
        return out + self.sometimes.square().mean() if sometimes and self.sometimes is not None else out


class AllRanks:
    """One process that trains on everybody's inputs, as the ranks together should: the sum over who is active."""

    def __init__(self, model: nn.Module, optimizer: Any, counts: list[int], divides: bool) -> None:
        self.model, self.optimizer = model, optimizer
        self._divides = divides
        self._inputs = [batches(rank, count) for rank, count in enumerate(counts)]

    def add_gradients(self, number: int, uses: Callable[[int], bool]) -> None:
        """The gradients of everybody's batch of this number, as far as they have one."""
        active = [rank for rank, inputs in enumerate(self._inputs) if number < len(inputs)]
        divisor = len(self._inputs) if self._divides else len(active)
        for rank in active:
            (self.model(self._inputs[rank][number], uses(rank)).square().mean() / divisor).backward()


def batches(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(count)]


def train(model: Any, optimizer: Any, inputs: list[Tensor], **_: Any) -> None:
    for batch in inputs:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


Trainer = Callable[..., None]


class Beside:
    """A run of ours and a run of DDP with the plain optimizer, from the same weights on the same inputs."""

    def __init__(
        self,
        optimizer_class: Any,
        ours: dict[str, Any] | None = None,
        group: Any = None,
        make: Any = Net,
        **options: Any,
    ) -> None:
        self.where = f"{optimizer_class.__name__} {ours} {options}"
        self.model = make()
        self.opt = ZeroRedundancyOptimizer(
            self.model.parameters(), optimizer_class, group, shard_gradients=True, **(ours or {}), **options
        )
        self.ddp = DistributedDataParallel(make(), process_group=group)
        self.plain = optimizer_class(self.ddp.parameters(), **options)

    def fit(self, trainer: Trainer, inputs: list[Tensor], join: dict[str, Any] | None = None, **more: Any) -> None:
        with Join([self.ddp], **(join or {})):
            trainer(self.ddp, self.plain, inputs, no_sync=self.ddp.no_sync, **more)
        with Join([self.opt], **(join or {})):
            trainer(self.model, self.opt, inputs, no_sync=self.opt.no_sync, **more)

    def check(self, last: int, state: bool = True) -> None:
        """Weights everywhere; the state of the rank whose plain optimizer saw every step."""
        for (name, mine), theirs in zip(self.model.named_parameters(), self.ddp.parameters(), strict=True):
            torch.testing.assert_close(
                mine.detach(), theirs.detach(), msg=lambda text, name=name: f"{self.where}: {name}: {text}", **CLOSE
            )
        self.opt.check_replicas()
        if not state:
            return
        self.opt.consolidate_state_dict(to=last)
        if self.opt.rank == last:
            ours, theirs = self.opt.state_dict()["state"], self.plain.state_dict()["state"]
            assert ours.keys() == theirs.keys(), f"{self.where}: state of {list(ours)}, plain of {list(theirs)}"
            for index, entries in theirs.items():
                for key, value in entries.items():
                    torch.testing.assert_close(ours[index][key], value, **CLOSE)


def last_of(counts: list[int]) -> int:
    return max(range(len(counts)), key=counts.__getitem__)


# --- who counts ---------------------------------------------------------------------------------------------------


def uneven_inputs(rank: int, world: int, transport: str) -> None:
    choose(transport)
    counts = UNEVEN[world]
    for number, ours in enumerate(SETTINGS):
        for divides in (True, False):
            optimizer = (AdamW, {"lr": 0.05}) if number % 2 else (SGD, {"lr": 0.3, "momentum": 0.9})
            both = Beside(optimizer[0], ours, **optimizer[1])
            join = {"divide_by_initial_world_size": divides}
            both.fit(train, batches(rank, counts[rank]), join)
            both.check(last_of(counts))


@pytest.mark.parametrize(
    ("world", "transport"), [(1, "shared memory"), (2, "sockets"), (3, "shared memory"), (4, "sockets")]
)
def test_uneven_inputs_end_in_the_weights_and_state_of_ddps_join(world, transport):
    """Both divisors. SGD shows a wrong divisor, AdamW's state a lost or doubled step."""
    run_ranks(uneven_inputs, world, transport, timeout=60, pg_timeout=20)


def divisor_of_a_joined_rank(rank: int, world: int) -> None:
    """One step with one input on rank 0 only; SGD: the update is the gradient, over 3 or over 1."""
    for divides in (True, False):
        both = Beside(SGD, lr=1.0)
        before = both.model.first.weight.detach().clone()
        inputs = batches(0, 1) if rank == 0 else []
        alone = Net()
        alone(batches(0, 1)[0]).square().mean().backward()
        with Join([both.opt], divide_by_initial_world_size=divides):
            train(both.model, both.opt, inputs)
        update = before - both.model.first.weight.detach()
        torch.testing.assert_close(update, alone.first.weight.grad / (world if divides else 1), **CLOSE)
        # Outside the context everybody counts again.
        both.opt.zero_grad()
        before = both.model.first.weight.detach().clone()
        alone.load_state_dict(both.model.state_dict())
        alone.zero_grad()
        for member in range(world):
            (alone(batches(member, 1)[0]).square().mean() / world).backward()
        train(both.model, both.opt, batches(rank, 1))
        torch.testing.assert_close(before - both.model.first.weight.detach(), alone.first.weight.grad, **CLOSE)


def test_the_divisor_is_all_ranks_or_those_with_inputs_and_all_again_after_the_context():
    run_ranks(divisor_of_a_joined_rank, 3, timeout=60, pg_timeout=20)


def nothing_anywhere(rank: int, world: int) -> None:
    for counts in ([0, 0, 3], [0, 0, 0], [2, 2, 2]):
        for enable in (True, False):
            if not enable and len(set(counts)) > 1:
                continue
            both = Beside(AdamW, lr=0.05)
            both.fit(train, batches(rank, counts[rank]), {"enable": enable})
            both.check(last_of(counts), state=any(counts))


def test_ranks_without_a_single_batch_even_inputs_and_a_disabled_context():
    run_ranks(nothing_anywhere, 3, timeout=60, pg_timeout=20)


def in_a_subgroup(rank: int, world: int) -> None:
    members = [1, 2, 3]
    group = dist.new_group(members)
    if rank in members:
        counts = [3, 5, 2]
        for divides in (True, False):
            both = Beside(AdamW, SETTINGS[0], group, lr=0.05)
            both.fit(train, batches(rank, counts[group.rank()]), {"divide_by_initial_world_size": divides})
            both.check(last_of(counts))


def test_uneven_inputs_in_a_subgroup():
    run_ranks(in_a_subgroup, 4, timeout=60, pg_timeout=20)


def ends_early(rank: int, world: int) -> None:
    counts = [4, 2, 3]
    both = Beside(AdamW, lr=0.05)
    inputs = batches(rank, counts[rank])
    for model, optimizer, joinable in ((both.ddp, both.plain, both.ddp), (both.model, both.opt, both.opt)):

        def run(model: Any = model, optimizer: Any = optimizer, joinable: Any = joinable) -> None:
            with Join([joinable], throw_on_early_termination=True):
                train(model, optimizer, inputs)

        error = error_of(run, "inputs are uneven")
        assert isinstance(error, RuntimeError)
        assert "exhausted" in str(error)
    both.check(0, state=False)
    # Everybody knows. What was begun is given up, and training goes on.
    both.plain.zero_grad()
    both.opt.zero_grad()
    for model, optimizer in ((both.ddp, both.plain), (both.model, both.opt)):
        train(model, optimizer, batches(50 + rank, 2))
    both.check(0)


def test_throw_on_early_termination_raises_on_every_rank_and_training_goes_on():
    """The ranks with inputs are told in the middle of a backward here, at its first bucket."""
    run_ranks(ends_early, 3, timeout=60, pg_timeout=20)


# --- what is done in the context ----------------------------------------------------------------------------------


def train_with_schedule(model: Any, optimizer: Any, inputs: list[Tensor], **_: Any) -> None:
    scheduler = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    for batch in inputs:
        train(model, optimizer, [batch])
        scheduler.step()


def scheduled(rank: int, world: int) -> None:
    for ours in SETTINGS[:2]:
        both = Beside(AdamW, ours, lr=0.2)
        both.fit(train_with_schedule, batches(rank, UNEVEN[world][rank]))
        both.check(last_of(UNEVEN[world]))


def test_a_joined_rank_follows_the_schedule_of_the_active_ones():
    """The scheduler of a joined rank stands still; its share must be stepped with the others' learning rate."""
    run_ranks(scheduled, 3, timeout=60, pg_timeout=20)


def accumulate(
    model: Any, optimizer: Any, inputs: list[Tensor], no_sync: Any, syncs_always: bool, period: int = 2, **_: Any
) -> None:
    optimizer.zero_grad()
    for number, batch in enumerate(inputs):
        ends = number % period == period - 1
        with contextlib.nullcontext() if ends or syncs_always else no_sync():
            model(batch).square().mean().backward()
        if ends:
            optimizer.step()
            optimizer.zero_grad()


def accumulation(rank: int, world: int, reduce_dtype: torch.dtype | None) -> None:
    # Ranks run out at the end of a cycle, in the middle of one, and at once; period 2 and 3.
    for period, counts in ((2, [4, 3, 8]), (2, [7, 8, 1]), (3, [5, 9, 4]), (3, [0, 7, 6])):
        for syncs_always in (True, False):
            ours = SETTINGS[0] | {"reduce_dtype": reduce_dtype}
            both = Beside(SGD, ours, lr=0.3, momentum=0.9)
            both.where += f", {counts}, period {period}, {syncs_always=}"
            # See the note: with reductions every time DDP is an oracle if joined ranks do not count.
            for divides in (False,) if syncs_always else (True, False):
                join = {"divide_by_initial_world_size": divides}
                inputs = batches(rank, counts[rank])
                both.fit(accumulate, inputs, join, syncs_always=syncs_always, period=period)
                both.opt.zero_grad()
                both.plain.zero_grad()
                both.check(last_of(counts), state=False)
                spread_state(both, last_of(counts))


def spread_state(both: Beside, last: int) -> None:
    """After a Join the plain optimizers differ between ranks; all go on with the one that saw every step."""
    box = [both.plain.state_dict()]
    dist.broadcast_object_list(box, src=last)
    both.plain.load_state_dict(box[0])


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
def test_accumulation_in_a_join_when_ranks_run_out_within_a_cycle(reduce_dtype):
    """A joined rank keeps what was already reduced into its share, and its own unreduced gradients count no more.

    Both as in DDP, where a joined rank adds zeros. (A reduce_dtype moves unreduced gradients elsewhere.)
    """
    run_ranks(accumulation, 3, reduce_dtype, timeout=90, pg_timeout=20)


def run_beside_all_ranks(
    ours: dict[str, Any], counts: list[int], uses: Callable[[int, int], bool], divides: bool, period: int, keeps: bool
) -> None:
    """Our run in a Join and one process with all inputs. ``uses(number, rank)``: whether a batch uses ``sometimes``."""
    rank = dist.get_rank()
    options = {"lr": 0.05, "weight_decay": 0.3}
    model = Net(more=True)
    opt = ZeroRedundancyOptimizer(model.parameters(), AdamW, shard_gradients=True, **ours, **options)
    with Join([opt], divide_by_initial_world_size=divides):
        for number, batch in enumerate(batches(rank, counts[rank])):
            if number % period == 0:
                opt.zero_grad(set_to_none=not keeps)
            model(batch, uses(number, rank)).square().mean().backward()
            if number % period == period - 1:
                opt.step()
    reference = Net(more=True)
    alone = AllRanks(reference, AdamW(reference.parameters(), **options), counts, divides)
    for number in range(max(counts)):
        if number % period == 0:
            alone.optimizer.zero_grad(set_to_none=not keeps)
        alone.add_gradients(number, lambda member, number=number: uses(number, member))
        if number % period == period - 1:
            alone.optimizer.step()
    where = f"{ours} {counts} {divides=} {period=} {keeps=}"
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(
            mine.detach(), theirs.detach(), msg=lambda text, name=name: f"{where}: {name}: {text}", **CLOSE
        )
    opt.check_replicas()
    opt.consolidate_state_dict(to=0)
    if rank == 0:
        assert opt.state_dict()["state"].keys() == alone.optimizer.state_dict()["state"].keys(), where


def unevenly_used(rank: int, world: int, keeps: bool) -> None:
    for number, ours in enumerate(SETTINGS):
        for counts in ([4, 0, 7], [5, 2, 4]):
            run_beside_all_ranks(ours, counts, lambda number, rank: number in (0, 2, 5), number == 0, 1, keeps)


def test_parameters_unused_in_some_steps_are_left_alone_on_joined_ranks_too():
    """Weight decay and momentum show whether an owner that has joined stepped what nobody had used."""
    run_ranks(unevenly_used, 3, False, timeout=60, pg_timeout=20)


def test_zero_grad_with_zeros_in_a_join():
    """``set_to_none=False``: an unused parameter has a gradient of zeros, and is stepped with it, by every owner."""
    run_ranks(unevenly_used, 3, True, timeout=60, pg_timeout=20)


def used_on_one_rank(rank: int, world: int, keeps: bool) -> None:
    for ours in SETTINGS:  # rank 1 runs out first, and with it the parameter
        run_beside_all_ranks(ours, [5, 2, 4], lambda number, rank: rank == 1, keeps, 1, keeps)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_parameter_that_only_the_first_to_join_has_used(keeps):
    run_ranks(used_on_one_rank, 3, keeps, timeout=60, pg_timeout=20)


def reduces_every_micro_batch(rank: int, world: int, keeps: bool) -> None:
    for divides in (True, False):
        for period, counts in ((2, [4, 3, 8]), (3, [5, 9, 1]), (3, [0, 7, 6])):
            # The parameter is used in one micro-batch of a cycle only, by a rank that may have run out in the next.
            ours = SETTINGS[divides]
            run_beside_all_ranks(ours, counts, lambda number, rank: number % 3 == rank, divides, period, keeps)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_joined_rank_keeps_its_share_of_the_micro_batches_that_were_reduced(keeps):
    """The shares of earlier micro-batches must neither be forgotten nor be counted again; either divisor."""
    run_ranks(reduces_every_micro_batch, 3, keeps, timeout=60, pg_timeout=20)


def train_with_closure(model: Any, optimizer: Any, inputs: list[Tensor], **_: Any) -> None:
    for batch in inputs:

        def evaluate(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        optimizer.step(evaluate)


def closures(rank: int, world: int) -> None:
    for counts in ([2, 2, 2], [2, 4, 3]):
        both = Beside(AdamW, lr=0.05)
        both.fit(train_with_closure, batches(rank, counts[rank]))
        both.check(last_of(counts))


def test_closures_in_a_join():
    """The reductions of the closure come after the step has been announced."""
    run_ranks(closures, 3, timeout=60, pg_timeout=10)


def train_and_clip(model: Any, optimizer: Any, inputs: list[Tensor], torchs: bool = False, **_: Any) -> None:
    for batch in inputs:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if torchs or not isinstance(optimizer, ZeroRedundancyOptimizer):
            clip_grad_norm_(model.parameters(), 0.2)
        else:
            optimizer.clip_grad_norm_(0.2)
        optimizer.step()


def clipping(rank: int, world: int, torchs: bool) -> str:
    counts = [2, 4, 3]
    both = Beside(SGD, lr=0.3)
    try:
        both.fit(train_and_clip, batches(rank, counts[rank]), torchs=torchs)
    except RuntimeError as error:
        return str(error)
    both.check(last_of(counts), state=False)
    return ""


def test_clipping_in_a_join():
    """Clipping asks all ranks for their norms, also those that have run out of inputs. DDP's ranks need not ask."""
    assert run_ranks(clipping, 3, False, timeout=60, pg_timeout=10) == [""] * 3


def test_torchs_own_clipping_in_a_join_equals_ddp_or_is_refused_by_name():
    """It asks for the norm of one parameter after the other. A hang is no answer."""
    told = run_ranks(clipping, 3, True, timeout=60, pg_timeout=10)
    assert told == [""] * 3 or all("Join" in text and "clip_grad_norm_" in text for text in told), told


def train_with_scaler(model: Any, optimizer: Any, inputs: list[Tensor], spoiled: Any = None, **_: Any) -> None:
    scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0)
    for number, batch in enumerate(inputs):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        scaler.scale(loss * math.inf if number == spoiled else loss).backward()
        scaler.step(optimizer)
        scaler.update()


def scaling(rank: int, world: int) -> None:
    counts = [2, 5, 3]
    both = Beside(SGD, lr=0.3, momentum=0.9)
    both.fit(train_with_scaler, batches(rank, counts[rank]), spoiled=3 if rank == 1 else None)
    both.check(last_of(counts))


def test_a_scaler_in_a_join():
    """A step that is skipped after some ranks have joined: their share must stand still, too."""
    run_ranks(scaling, 3, timeout=60, pg_timeout=10)


class TwoKinds(nn.Module):
    """float64 and float32 parameters: the scaler asks for each dtype apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(5, 7).double(), nn.Linear(7, 3)

    def forward(self, batch: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(batch)).float()).double()


def train_carefully(model: Any, optimizer: Any, inputs: list[Tensor], spoiled: Any = None, **_: Any) -> None:
    """Unscale, clip by one norm after the other, skip what is not finite."""
    scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0)
    ours = isinstance(optimizer, ZeroRedundancyOptimizer)
    for number, batch in enumerate(inputs):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        scaler.scale(loss * math.nan if number == spoiled else loss).backward()
        scaler.unscale_(optimizer)
        order = (1, 2, 3, math.inf)[number % 4]
        try:
            if ours:
                optimizer.clip_grad_norm_(0.2, order, error_if_nonfinite=number >= 3)
            else:
                clip_grad_norm_(model.parameters(), 0.2, order, error_if_nonfinite=number >= 3)
        except RuntimeError:
            assert spoiled is None or number == spoiled
            scaler.update()
            continue
        scaler.step(optimizer)
        scaler.update()


def careful(rank: int, world: int) -> None:
    for spoiled in (1, 4):  # skipped by the scaler; refused by clip_grad_norm_
        counts = [2, 6, 3]
        both = Beside(SGD, make=TwoKinds, lr=0.3, momentum=0.9)
        both.fit(train_carefully, batches(rank, counts[rank]), spoiled=spoiled if rank == 1 else None)
        for mine, theirs in zip(both.model.parameters(), both.ddp.parameters(), strict=True):
            # float32 parameters, sums in another order: some last bits
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-6)
        both.opt.check_replicas()


def test_unscaling_and_clipping_by_every_norm_in_a_join():
    """Joined ranks must follow the order of the norm, both dtypes, and a clip that raises on the active ones."""
    run_ranks(careful, 3, timeout=60, pg_timeout=10)


def train_and_give_up(model: Any, optimizer: Any, inputs: list[Tensor], **_: Any) -> None:
    for number, batch in enumerate(inputs):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if number % 3 != 1:  # a batch whose loss looked wrong, say: everybody leaves it out
            optimizer.step()


def giving_up(rank: int, world: int) -> None:
    counts = [2, 6, 3]
    for ours in SETTINGS:
        both = Beside(SGD, ours, lr=0.3, momentum=0.9)
        both.fit(train_and_give_up, batches(rank, counts[rank]))
        both.check(last_of(counts))


def test_batches_that_everybody_leaves_out_in_a_join():
    """Reduced, then forgotten without a step: a joined rank must forget its share of them, or add it to the next."""
    run_ranks(giving_up, 3, timeout=60, pg_timeout=20)


def two_optimizers(rank: int, world: int, names: tuple[str, str]) -> None:
    counts = [2, 4, 3]
    model, ddp = Net(), DistributedDataParallel(Net())
    ours = [
        ZeroRedundancyOptimizer(model.get_submodule(name).parameters(), SGD, shard_gradients=True, lr=0.3)
        for name in names
    ]
    plain = [SGD(ddp.module.get_submodule(name).parameters(), lr=0.3) for name in names]
    for net, optimizers, joinables in ((ddp, plain, [ddp]), (model, ours, ours)):
        with Join(joinables):
            for batch in batches(rank, counts[rank]):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                net(batch).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
    for mine, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), **CLOSE)


def test_two_optimizers_of_one_model_in_a_join():
    """As with Muon for some parameters and AdamW for others; listed in the order in which they communicate.

    Backward reaches the second layer first. (Join calls the hooks of a joined rank in the order of the list.)
    """
    run_ranks(two_optimizers, 3, ("second", "first"), timeout=60, pg_timeout=10)


def two_epochs(rank: int, world: int) -> None:
    """A second Join, other ranks ahead; ordinary steps between and after."""
    both = Beside(AdamW, SETTINGS[0], lr=0.05)
    for counts in ([4, 1, 3], [2, 3, 5]):
        both.fit(train, batches(rank, counts[rank]))
        spread_state(both, last_of(counts))
        for model, optimizer in ((both.ddp, both.plain), (both.model, both.opt)):
            train(model, optimizer, batches(50 + rank, 2))
        both.check(0)


def test_training_goes_on_after_a_join_and_in_a_second_one():
    run_ranks(two_epochs, 3, timeout=60, pg_timeout=20)


# --- buffers ------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """BatchNorm (float64 statistics, an int64 counter), and buffers of flags, not saved, shared, empty, transposed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.second = nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)
        self.double()
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.float32), persistent=False)
        self.second.register_buffer("shared", self.steps)
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("turned", torch.zeros(2, 3).t())

    def forward(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            self.steps += 1 + dist.get_rank()
            self.turned += torch.arange(6.0).view(3, 2) * (1 + dist.get_rank())
            self.seen += 1 + dist.get_rank()
            self.flags.logical_xor_(torch.tensor(dist.get_rank() > 0))
        return self.second(torch.tanh(self.norm(self.first(batch))))


def assert_same_buffers(model: nn.Module, ddp: Any, where: str) -> None:
    for (name, mine), theirs in zip(model.named_buffers(), ddp.module.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=lambda text, name=name: f"{where}: {name}: {text}", **CLOSE)


def buffers(rank: int, world: int, transport: str) -> None:
    choose(transport)
    both = Beside(SGD, make=Normed, lr=0.3)
    pointers = [buffer.data_ptr() for buffer in both.model.buffers()]
    for number, batch in enumerate(batches(rank, 4)):
        both.opt.broadcast_buffers(both.model)
        for model, optimizer in ((both.ddp, both.plain), (both.model, both.opt)):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        assert_same_buffers(both.model, both.ddp, f"step {number}")
    both.check(0)
    assert pointers == [buffer.data_ptr() for buffer in both.model.buffers()], "buffers were replaced"
    assert rank == 0 or not torch.equal(both.model.steps, torch.tensor(4.0)), "this test shows nothing"
    both.opt.broadcast_buffers(both.model)
    assert both.model.steps.item() == 4  # rank 0's
    both.opt.broadcast_buffers(nn.Linear(2, 2))  # without any buffers


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
def test_broadcast_buffers_before_each_forward_equals_ddp(transport):
    """Every buffer of every dtype on every rank, and the weights, which BatchNorm's statistics do not change."""
    run_ranks(buffers, 3, transport, timeout=60, pg_timeout=20)


def buffers_in_a_subgroup(rank: int, world: int) -> None:
    group = dist.new_group([1, 2])
    if rank in (1, 2):
        both = Beside(SGD, None, group, make=Normed, lr=0.3)
        both.model(batches(rank, 1)[0])
        both.opt.broadcast_buffers(both.model)
        assert both.model.steps.item() == 2  # of rank 1, which is rank 0 of the group


def test_broadcast_buffers_in_a_subgroup():
    run_ranks(buffers_in_a_subgroup, 3, timeout=60, pg_timeout=20)


def train_with_buffers(model: Any, optimizer: Any, inputs: list[Tensor], **_: Any) -> None:
    for batch in inputs:
        optimizer.zero_grad()
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.broadcast_buffers(model)
        model(batch).square().mean().backward()
        optimizer.step()


def buffers_in_a_join(rank: int, world: int) -> str:
    counts = [2, 4, 3]
    both = Beside(SGD, make=Normed, lr=0.3)
    try:
        both.fit(train_with_buffers, batches(rank, counts[rank]))
    except RuntimeError as error:
        return str(error)
    both.check(last_of(counts), state=False)
    assert_same_buffers(both.model, both.ddp, "after the Join")
    return ""


def test_broadcast_buffers_in_a_join_equals_ddp_or_is_refused_by_name():
    """Ranks that have run out take part in DDP's broadcast, from the highest rank with inputs. A hang is no answer."""
    told = run_ranks(buffers_in_a_join, 3, timeout=60, pg_timeout=10)
    assert told == [""] * 3 or all("broadcast_buffers" in text and "Join" in text for text in told), told


def norms_without_broadcasts(rank: int, world: int) -> None:
    """Without the call the statistics are each rank's own, as with DDP(broadcast_buffers=False); weights are equal."""
    model, ddp = Normed(), DistributedDataParallel(Normed(), broadcast_buffers=False)
    opt = ZeroRedundancyOptimizer(model.parameters(), SGD, shard_gradients=True, lr=0.3)
    plain = SGD(ddp.parameters(), lr=0.3)
    counts = [2, 4, 3]
    with Join([ddp]):
        train(ddp, plain, batches(rank, counts[rank]))
    with Join([opt]):
        train(model, opt, batches(rank, counts[rank]))
    for mine, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), **CLOSE)
    assert_same_buffers(model, ddp, f"own statistics of rank {rank}")


def test_without_broadcast_buffers_statistics_stay_each_ranks_own():
    run_ranks(norms_without_broadcasts, 3, timeout=60, pg_timeout=20)


def after_the_context(rank: int, world: int, shard_gradients: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).double()
    wrapped = model if shard_gradients else DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1, shard_gradients=shard_gradients)

    def fit(count: int) -> None:
        for _ in range(count):
            wrapped(torch.randn(3, 4).double()).sum().backward()
            optimizer.step()

    for _ in range(2):
        with Join([optimizer] if shard_gradients else [wrapped, optimizer]):
            assert "before or after" in str(error_of(lambda: optimizer.broadcast_buffers(model), "in the context"))
            fit(rank + 1)
        for _ in range(2):  # directly after it, and after further steps
            optimizer.broadcast_buffers(model)
            if shard_gradients:
                model(torch.ones(3, 4).double()).sum().backward()
                assert model[0].weight.grad.norm() >= 0
                optimizer.zero_grad()
            fit(1)
    optimizer.check_replicas()


@pytest.mark.parametrize("shard_gradients", [False, True])
def test_when_the_context_is_over_what_needs_all_ranks_is_possible_again(shard_gradients):
    run_ranks(after_the_context, 3, shard_gradients)


def contexts_again(rank: int, world: int, shard_gradients: bool) -> None:
    """Two epochs, with other ranks running out first, in contexts of their own, in one twice, and in a nested one."""
    weights = []
    for way in ("new", "again", "nested"):
        torch.manual_seed(3)
        model = torch.nn.Linear(4, 3).double()
        wrapped = model if shard_gradients else DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1, shard_gradients=shard_gradients)
        joined = [optimizer] if shard_gradients else [wrapped, optimizer]
        kept = Join(joined)
        for epoch, count in enumerate((rank + 1, world - rank)):
            outer = Join(joined) if way == "nested" else contextlib.nullcontext()
            with outer, Join(joined) if way != "again" else kept:
                for batch in batches(rank + 10 * epoch, count):
                    optimizer.zero_grad()
                    wrapped(batch[:, :4]).square().mean().backward()
                    optimizer.step()
        optimizer.check_replicas()
        weights.append([param.detach().clone() for param in model.parameters()])
    assert_same(weights[1], weights[0], "a context that is entered twice")
    assert_same(weights[2], weights[0], "a context inside another")


@pytest.mark.parametrize("shard_gradients", [False, True])
def test_a_context_may_be_entered_twice_or_inside_another(shard_gradients):
    """torch makes its configuration when the context is made, not when it is entered."""
    run_ranks(contexts_again, 3, shard_gradients, pg_timeout=20)
