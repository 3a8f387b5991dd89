"""A rank raises in its forward or backward, the batch is skipped on all ranks, training goes on.

Oracle: DDP with the plain optimizer that never saw the skipped batches, float64; ``CLOSE`` allows for sums in another
order, a thousand last bits, while a stale bucket, or one that is summed with another batch's, is wrong in the first
digits. The ranks that did not fail wait for the other in their backward until their patience ends: five seconds, which
most of these tests shorten.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from shardstep import ZeroRedundancyOptimizer
from shardstep.grads import scheduler
from tests.harness import run_ranks
from tests.surroundings import choose

CLOSE = {"rtol": 1e-12, "atol": 1e-14}
WIDTH = 6
LAYERS = 5
SETTINGS: tuple[dict[str, Any], ...] = (
    {"shard": "element", "bucket_cap_mb": 0.0003},  # a bucket per layer, about
    {"shard": "tensor", "bucket_cap_mb": 0.0003, "gradient_buckets_in_flight": 1},
    {"bucket_cap_mb": 0.0003, "gradient_buckets_in_flight": 4, "parameters_as_bucket_view": True},
    {"bucket_cap_mb": 25},  # one bucket
    {"bucket_cap_mb": 0.0003, "overlap_backward": False},
)


class Boom(Exception):
    """What goes wrong on one rank."""


class _Fault(torch.autograd.Function):
    """Does nothing, or raises in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, model: Net, place: str) -> Tensor:  # type: ignore[override]
        ctx.model, ctx.place = model, place
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.model.reach(ctx.place)
        return gradient, None, None


class Net(nn.Module):
    """Layers, with a fault in forward, and in backward before the first, between, and after the last of them."""

    PLACES = ("forward", "loss", "middle", "input", "after")

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)).double()
        self.fails_at: str | None = None
        self.sleeps: dict[str, float] = {}
        self._checkpointed = checkpointed

    def reach(self, place: str) -> None:
        time.sleep(self.sleeps.get(place, 0))
        if self.fails_at == place:
            raise Boom(place)

    def forward(self, batch: Tensor) -> Tensor:
        value = _Fault.apply(batch.clone().requires_grad_(), self, "input")
        for layer in self.layers[:2]:
            value = torch.tanh(layer(value))
        if self._checkpointed:
            value = checkpoint(self._middle, value, use_reentrant=True)
        else:
            value = self._middle(value)
        self.reach("forward")
        return _Fault.apply(self.layers[4](value), self, "loss")

    def _middle(self, value: Tensor) -> Tensor:
        value = torch.tanh(self.layers[2](value))
        return torch.tanh(self.layers[3](_Fault.apply(value, self, "middle")))


def batches(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(4, WIDTH, generator=generator, dtype=torch.float64) for _ in range(count)]


def backward(model: Any, batch: Tensor) -> None:
    model(batch).square().mean().backward()


def everybody_ok(ok: bool) -> bool:
    """What a careful program does: a collective of its own, on the same group."""
    flag = torch.tensor([int(ok)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


class Beside:
    """Our run, with failures, and DDP's, without the batches in which there were any."""

    def __init__(self, ours: Mapping[str, Any], optimizer_class: Any = SGD, checkpointed: bool = False) -> None:
        options = {"lr": 0.3, "momentum": 0.9} if optimizer_class is SGD else {"lr": 0.01, "weight_decay": 0.1}
        self.where = f"{dict(ours)}"
        self.model = Net(checkpointed)
        self.opt = ZeroRedundancyOptimizer(
            self.model.parameters(), optimizer_class, shard_gradients=True, **ours, **options
        )
        self.ddp = DistributedDataParallel(Net())
        self.plain = optimizer_class(self.ddp.parameters(), **options)

    def try_backward(self, batch: Tensor, fails_at: str | None) -> bool:
        """Forward and backward of our run; whether it went well."""
        self.model.fails_at = fails_at
        try:
            backward(self.model, batch)
            self.model.reach("after")
        except Boom:
            return False
        finally:
            self.model.fails_at = None
        assert fails_at is None, f"{fails_at} was not reached: this test shows nothing"
        return True

    def zero_grad(self) -> None:
        self.opt.zero_grad()
        left = [name for name, param in self.model.named_parameters() if param.grad is not None]
        assert not left, f"{self.where}: zero_grad left gradients on {left}"

    def plain_step(self, *micro: Tensor) -> None:
        self.plain.zero_grad()
        for batch in micro:
            backward(self.ddp, batch)
        self.plain.step()

    def check(self, where: str) -> None:
        for (name, mine), theirs in zip(self.model.named_parameters(), self.ddp.parameters(), strict=True):
            told = f"{self.where}, {where}: {name}"
            torch.testing.assert_close(
                mine.detach(), theirs.detach(), msg=lambda text, told=told: f"{told}: {text}", **CLOSE
            )


Failures = Mapping[int, Mapping[int, str]]  # by number of the batch: which rank fails, and where


def prepare(transport: str, patience: float = 0.12) -> None:
    choose(transport)
    scheduler.PATIENCE = patience


def train(both: Beside, rank: int, count: int, failures: Failures, flow: str, zero: str) -> None:
    """The loop of a program that skips what fails.

    ``flow``: "flag": the ranks first tell each other with an all_reduce of their own whether all went well; "direct":
    everybody knows which batches are bad and calls zero_grad at once. ``zero``: where it calls zero_grad: "top" of each
    iteration only; "end" of each, after the step or instead of it; or both.
    """
    for number, batch in enumerate(batches(rank, count)):
        bad = failures.get(number, {})
        before = [param.detach().clone() for param in both.model.parameters()]
        if zero != "end":
            both.zero_grad()
        ok = both.try_backward(batch, bad.get(rank))
        if everybody_ok(ok) if flow == "flag" else not bad:
            both.opt.step()
            both.plain_step(batch)
        else:
            same = [torch.equal(old, new) for old, new in zip(before, both.model.parameters(), strict=True)]
            assert all(same), "a batch that was given up changed parameters"
        if zero != "top":
            both.zero_grad()
        both.check(f"{flow}, zero_grad at the {zero}, batch {number}")
    both.opt.check_replicas()


# --- where and when -----------------------------------------------------------------------------------------------

ALTERNATING: Failures = {
    1: {1: "middle"},
    3: {0: "forward"},
    5: {2: "loss"},
    7: {1: "input"},
    9: {0: "after"},
    11: {2: "middle"},
}


def fails_now_and_then(rank: int, world: int, transport: str, flow: str) -> None:
    prepare(transport)
    for ours, zero in zip(SETTINGS, ("top", "end", "both", "end", "top"), strict=True):
        train(Beside(ours), rank, 13, ALTERNATING, flow, zero)


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
@pytest.mark.parametrize("flow", ["flag", pytest.param("direct", marks=pytest.mark.extended)])
def test_a_batch_that_fails_on_one_rank_is_as_if_it_had_not_been(flow, transport):
    """Before the first bucket, between buckets, after the last; a bucket of the skipped batch must reach no sum."""
    run_ranks(fails_now_and_then, 3, transport, flow, timeout=90, pg_timeout=15)


IN_A_ROW: Failures = {
    0: {1: "forward"},
    1: {1: "loss"},
    2: {0: "middle"},
    4: {2: "input"},
    5: {2: "middle"},
    6: {0: "forward"},
    7: {1: "after"},
}


def fails_again_and_again(rank: int, world: int, transport: str, flow: str) -> None:
    prepare(transport)
    for ours, zero in zip(SETTINGS[:3], ("end", "top", "both"), strict=True):
        train(Beside(ours, AdamW), rank, 9, IN_A_ROW, flow, zero)


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
@pytest.mark.parametrize("flow", ["flag", pytest.param("direct", marks=pytest.mark.extended)])
def test_failures_in_a_row_and_in_the_very_first_iteration(flow, transport):
    """A rank that is ready to compare where everybody is must not wait for one that has failed again meanwhile."""
    run_ranks(fails_again_and_again, 3, transport, flow, timeout=90, pg_timeout=15)


@pytest.mark.parametrize("place", Net.PLACES)
def test_a_failure_of_the_first_iteration_at_any_place(place):
    """Nothing was agreed yet; with a zero_grad before it, without, and in both flows."""
    run_ranks(fails_first, 2, place, timeout=60, pg_timeout=10)


def fails_first(rank: int, world: int, place: str) -> None:
    prepare("shared memory")
    for flow in ("flag", "direct"):
        for zero in ("top", "end"):
            train(Beside(SETTINGS[0]), rank, 3, {0: {1: place}}, flow, zero)


SEVERAL: Failures = {
    1: {0: "forward", 1: "middle"},
    2: {0: "loss", 1: "input", 2: "middle"},
    4: {0: "forward", 1: "forward", 2: "forward"},
    6: {0: "after", 1: "after", 2: "after"},
    7: {1: "loss", 2: "after"},
}


def several_fail(rank: int, world: int, transport: str) -> None:
    prepare(transport)
    for ours, flow in zip((SETTINGS[0], SETTINGS[1]), ("flag", "direct"), strict=True):
        train(Beside(ours), rank, 9, SEVERAL, flow, "end")


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
def test_several_ranks_fail_at_different_places(transport):
    """Everybody has sent another number of buckets; or nobody any; or all have sent all."""
    run_ranks(several_fail, 3, transport, timeout=90, pg_timeout=15)


def fails_in_checkpoint(rank: int, world: int) -> None:
    prepare("shared memory")
    failures = {1: {1: "middle"}, 2: {0: "loss"}, 4: {1: "input"}}
    for flow in ("flag", "direct"):
        train(Beside(SETTINGS[0], checkpointed=True), rank, 6, failures, flow, "end")


def test_a_failure_inside_reentrant_checkpointing():
    """The backward inside the backward raises: what was asked for at the end of either must not come later."""
    run_ranks(fails_in_checkpoint, 2, timeout=60, pg_timeout=15)


def with_its_own_patience(rank: int, world: int) -> float:
    both = Beside(SETTINGS[0])
    start = time.monotonic()
    train(both, rank, 3, {1: {1: "middle"}}, "flag", "end")
    return time.monotonic() - start


def test_the_ranks_that_wait_come_back_long_before_the_timeout_of_the_group():
    """Patience as it is built in. The other tests shorten it."""
    assert max(run_ranks(with_its_own_patience, 2, timeout=90, pg_timeout=60)) < 30


def a_single_rank(rank: int, world: int) -> None:
    prepare("shared memory")
    train(Beside(SETTINGS[0]), rank, 12, {n: {0: Net.PLACES[n % 5]} for n in (0, 2, 3, 6, 9)}, "direct", "end")


def test_a_single_rank_skips_its_batches():
    run_ranks(a_single_rank, 1, timeout=60, pg_timeout=15)


# --- in the course of other things --------------------------------------------------------------------------------


def train_cycles(both: Beside, rank: int, failures: Mapping[tuple[int, int], tuple[int, str]], flow: str, sync: bool):
    """Three micro-batches per step. A failure gives up the whole cycle."""
    inputs = batches(rank, 3 * 6)
    for cycle in range(6):
        micro = inputs[3 * cycle : 3 * cycle + 3]
        good = True
        for number, batch in enumerate(micro):
            failing, place = failures.get((cycle, number), (-1, ""))
            with contextlib.nullcontext() if sync or number == 2 else both.opt.no_sync():
                ok = both.try_backward(batch, place if failing == rank else None)
            good = everybody_ok(ok) if flow == "flag" else failing < 0
            if not good:
                break
        if good:
            both.opt.step()
            both.plain_step(*micro)
        both.zero_grad()
        both.check(f"{flow}, {sync=}, cycle {cycle}")


def fails_while_accumulating(rank: int, world: int, transport: str, flow: str) -> None:
    prepare(transport)
    failures = {
        (0, 1): (1, "middle"),  # the first micro-batch was reduced, or waits to be
        (2, 2): (0, "loss"),
        (3, 0): (1, "input"),
        (4, 2): (1, "middle"),
    }
    for sync in (True, False):
        for ours in (SETTINGS[0], SETTINGS[1] | {"reduce_dtype": torch.float64}):
            both = Beside(ours)
            train_cycles(both, rank, failures, flow, sync)
            both.opt.check_replicas()


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
@pytest.mark.parametrize("flow", ["flag", "direct"])
def test_a_failure_while_accumulating_gives_up_the_whole_cycle(flow, transport):
    """What earlier micro-batches have left in the shards, or not reduced yet, is forgotten with it."""
    run_ranks(fails_while_accumulating, 2, transport, flow, timeout=90, pg_timeout=15)


def uses_nothing_meanwhile(rank: int, world: int) -> None:
    """After zero_grad, before the next backward: a step, a norm, a look at a gradient, all without any gradients."""
    prepare("shared memory")
    for place in ("middle", "forward", "input"):
        both = Beside(SETTINGS[0])
        for number, batch in enumerate(batches(rank, 5)):
            both.try_backward(batch, place if number == 2 and rank == 1 else None)
            if number != 2:
                both.opt.step()
                both.plain_step(batch)
                both.zero_grad()
                continue
            both.zero_grad()
            assert both.opt.clip_grad_norm_(1.0).item() == 0
            assert both.opt.full_grad(both.model.layers[0].weight) is None
            both.opt.step()  # a program that accumulates steps whenever a cycle ends
            both.opt.consolidate_state_dict(to=0)
            both.opt.check_replicas()
            both.check(f"a step without gradients after {place}")
        both.check(f"after {place}")


def test_a_step_without_gradients_after_a_batch_that_was_given_up():
    """Plain torch does nothing in it. Here it must not wait for buckets that nobody will send."""
    run_ranks(uses_nothing_meanwhile, 2, timeout=60, pg_timeout=10)


def changes_meanwhile(rank: int, world: int, transport: str, change: str) -> None:
    """Ranks make their buckets equal in the next round, which is not the same as the last any more."""
    prepare(transport)
    both = Beside(SETTINGS[0])
    extra = [nn.Parameter(torch.ones(WIDTH, dtype=torch.float64)) for _ in "ab"]
    models = (both.model, both.ddp.module)
    if change == "unfreeze":
        for model in models:
            model.layers[1].requires_grad_(False)
        both.ddp = DistributedDataParallel(both.ddp.module)
    for number, batch in enumerate(batches(rank, 6)):
        both.try_backward(batch, ("middle", "loss")[number // 3] if number in (2, 4) and rank == 1 else None)
        if number in (2, 4):
            both.zero_grad()
        else:
            both.opt.step()
            both.plain_step(batch)
            both.zero_grad()
        both.check(f"{change}, batch {number}")
        if number == 2:
            for model in models:
                if change in ("freeze", "unfreeze"):
                    model.layers[4 if change == "freeze" else 1].requires_grad_(change == "unfreeze")
            if change == "add":
                for param, optimizer in zip(extra, (both.opt, both.plain), strict=True):
                    optimizer.add_param_group({"params": [param], "lr": 0.1})
                for param, model in zip(extra, models, strict=True):
                    model.register_parameter("extra", param)
                    model.register_forward_pre_hook(lambda module, args: (args[0] * module.extra,))
            both.ddp = DistributedDataParallel(both.ddp.module)


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
@pytest.mark.parametrize("change", ["freeze", "unfreeze", "add"])
def test_parameters_that_change_after_a_batch_that_was_given_up(change, transport):
    """Frozen, unfrozen, added: what the ranks send to catch up is what the others sent before, not what is due now."""
    run_ranks(changes_meanwhile, 2, transport, change, timeout=60, pg_timeout=10)


def one_rank_zeroes_more_often(rank: int, world: int, when: str) -> str:
    prepare("shared memory", patience=1.0)
    both = Beside(SETTINGS[0])
    for number, batch in enumerate(batches(rank, 5)):
        if when == "before" and rank == 0:
            both.zero_grad()
        try:
            both.try_backward(batch, None)
            both.opt.step()
        except RuntimeError as error:
            return str(error)
        both.plain_step(batch)
        both.zero_grad()
        if when == "after" and rank == 0 and number in (1, 2):  # it alone has looked at a validation loss, say
            both.zero_grad()
            both.zero_grad()
        both.check(f"batch {number}")
    return ""


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_more_zero_grad_on_one_rank_changes_nothing_or_is_told(when):
    """Harmless with DDP. To an optimizer that counts iterations by zero_grad it looks like a forward that has failed.

    Weights as with DDP, or an error on every rank that names zero_grad: no hang, no batches mixed up.
    """
    told = run_ranks(one_rank_zeroes_more_often, 2, when, timeout=60, pg_timeout=10)
    assert told == ["", ""] or all("zero_grad" in text for text in told), told


def is_late(rank: int, world: int, transport: str) -> None:
    """A rank that is slower than the others' patience has not failed."""
    prepare(transport, patience=0.05)
    for ours in SETTINGS:
        both = Beside(ours)
        for number, batch in enumerate(batches(rank, 4)):
            late = rank == number % world
            both.model.sleeps = {("forward", "loss", "middle", "input")[number]: 0.3} if late else {}
            both.try_backward(batch, None)
            if number == 2:  # twice, and the sum is stepped with
                both.try_backward(batch, None)
                both.plain_step(batch, batch)
            else:
                both.plain_step(batch)
            both.opt.step()
            both.zero_grad()
            both.check(f"late in batch {number}")
        both.opt.check_replicas()


@pytest.mark.parametrize("transport", ["shared memory", pytest.param("sockets", marks=pytest.mark.extended)])
def test_a_rank_that_is_late_is_waited_for_by_the_step(transport):
    """Backward returns when patience ends; the step sends what was kept and waits for as long as the group does."""
    run_ranks(is_late, 2, transport, timeout=60, pg_timeout=15)


def fails_in_a_subgroup(rank: int, world: int) -> None:
    prepare("shared memory")
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    model, reference = Net(), DistributedDataParallel(Net(), process_group=group)
    opt = ZeroRedundancyOptimizer(model.parameters(), SGD, group, shard_gradients=True, lr=0.3, **SETTINGS[0])
    plain = SGD(reference.parameters(), lr=0.3)
    for number, batch in enumerate(batches(rank, 5)):
        model.fails_at = "middle" if rank == 2 and number in (1, 2) else None
        with contextlib.suppress(Boom):
            backward(model, batch)
        if number not in (1, 2):
            opt.step()
            plain.zero_grad()
            backward(reference, batch)
            plain.step()
        opt.zero_grad()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), **CLOSE)


def test_a_failure_in_a_subgroup():
    run_ranks(fails_in_a_subgroup, 3, timeout=60, pg_timeout=15)


def memory_is_given_back(rank: int, world: int) -> list[int]:
    """Gradient bytes after each skipped batch and, once training goes on, as after any other."""
    prepare("shared memory")
    both = Beside(SETTINGS[3])
    sizes = []
    for number, batch in enumerate(batches(rank, 8)):
        both.try_backward(batch, "loss" if rank == 1 and number in (1, 2, 3, 4, 5) else None)
        if number not in (1, 2, 3, 4, 5):
            both.opt.step()
            sizes.append(both.opt.memory().gradients)
        both.zero_grad()
    return sizes


def test_batches_that_were_given_up_leave_no_memory_behind():
    for sizes in run_ranks(memory_is_given_back, 2, timeout=60, pg_timeout=15):
        assert sizes[0] > 0
        assert set(sizes) == {sizes[0]}
