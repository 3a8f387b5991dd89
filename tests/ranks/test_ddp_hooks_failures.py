"""The DDP hooks when something is wrong: bad input is told, and a rank that fails makes the others raise, soon."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from shardstep import ZeroRedundancyOptimizer
from tests.harness import run_ranks
from tests.hook_twins import HOOKS, SMALL_CAP, HookTwins, Tangled, batch_of
from tests.oracle import assert_same, error_of, values_of

# --- bad input ----------------------------------------------------------------------------------------------------


def without_overlap(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(Tangled())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW)
    for make in HOOKS.values():
        with pytest.raises(ValueError, match="overlap_with_ddp=True"):
            make(allreduce_hook, ddp, optimizer)
    with pytest.raises(ValueError, match=r"(?s)shard_gradients.*overlap_with_ddp.*Drop one"):
        ZeroRedundancyOptimizer(Tangled().parameters(), AdamW, shard_gradients=True, overlap_with_ddp=True)


def test_an_optimizer_without_overlap_with_ddp_is_refused():
    run_ranks(without_overlap, 2)


def never_registered(rank: int, world: int, hook: str) -> None:
    weights = []
    for sharded in (False, True):
        ddp = DistributedDataParallel(Tangled())
        if sharded:
            optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, overlap_with_ddp=True, lr=0.1)
            HOOKS[hook](allreduce_hook, ddp, optimizer)
        else:
            optimizer = AdamW(ddp.parameters(), lr=0.1)
        for iteration in range(3):
            optimizer.zero_grad()
            ddp(batch_of(rank, iteration)).square().mean().backward()
            optimizer.step()
        weights.append(values_of(ddp.parameters()))
    assert_same(weights[1], weights[0], "a hook that was not registered")


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_is_made_but_never_registered_does_not_stop_the_training(hook):
    """Else step() would do nothing, and nobody would know."""
    run_ranks(never_registered, 2, hook)


def stray_parameter(rank: int, world: int, hook: str, cap: float) -> str:
    """Only after the reductions is it known that one is missing: on every rank, so that nobody waits."""
    ddp = DistributedDataParallel(Tangled(), bucket_cap_mb=SMALL_CAP)
    stray = nn.Parameter(torch.ones(5, dtype=torch.float64))
    named = [*ddp.module.named_parameters(), ("stray", stray)]
    optimizer = ZeroRedundancyOptimizer(named, AdamW, overlap_with_ddp=True, bucket_cap_mb=cap)
    ddp.register_comm_hook(None, HOOKS[hook](allreduce_hook, ddp, optimizer))
    with pytest.raises(RuntimeError, match=r"(?s)stray.*DDP") as caught:
        ddp(batch_of(rank, 0)).square().mean().backward()
    return str(caught.value)


@pytest.mark.parametrize("cap", [SMALL_CAP, 25])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_parameter_that_ddp_does_not_reduce_is_named_on_every_rank(hook, cap):
    """Without the error it would never be trained, and without a word."""
    start = time.monotonic()
    run_ranks(stray_parameter, 3, hook, cap, timeout=90, pg_timeout=60)
    assert time.monotonic() - start < 45, "found out by a timeout only"


def clipping_too_late(rank: int, world: int) -> None:
    for hook in HOOKS:
        twins = HookTwins(SGD, hook=hook, lr=0.1)
        twins.iterate(1)
        with pytest.raises(RuntimeError, match=r"(?s)clip_grad_norm_.*overlap_with_ddp"):
            twins.zero.clip_grad_norm_(0.01)
        twins.check_gradients()  # not scaled
        twins.iterate(1)


def test_clip_grad_norm_is_refused_because_the_step_is_made_by_then():
    run_ranks(clipping_too_late, 2)


def no_hook_registered(rank: int, world: int) -> None:
    """``overlap_with_ddp=True`` and then an ordinary loop: nothing steps in backward, so ``step()`` has to."""
    ddp, oracle_ddp = DistributedDataParallel(Tangled()), DistributedDataParallel(Tangled())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, overlap_with_ddp=True, lr=0.05)
    oracle = AdamW(oracle_ddp.parameters(), lr=0.05)
    for iteration in range(3):
        for model, stepper in ((oracle_ddp, oracle), (ddp, optimizer)):
            stepper.zero_grad()
            model(batch_of(rank, iteration)).square().mean().backward()
            stepper.step()
        assert_same(values_of(ddp.parameters()), values_of(oracle_ddp.parameters()), f"iteration {iteration}")


def test_without_a_hook_step_steps():
    run_ranks(no_hook_registered, 2)


def skipped_batches(rank: int, world: int, hook: str) -> None:
    """All ranks raise in a forward and skip the batch: the next iteration is a clean one."""
    twins = HookTwins(AdamW, hook=hook, ddp={"find_unused_parameters": True}, lr=0.05, weight_decay=0.3)
    for _ in range(2):
        twins.iterate(2)
        for side in (twins.theirs, twins.ours):
            side.optimizer.zero_grad()
            error_of(lambda side=side: side.backward(torch.ones(4, 3)), "a batch of the wrong width")
    twins.iterate(2, skip=[4])
    twins.check()


@pytest.mark.parametrize("hook", HOOKS)
def test_a_batch_that_fails_in_forward_on_all_ranks_can_be_skipped(hook):
    run_ranks(skipped_batches, 2, hook)


# --- a rank fails -------------------------------------------------------------------------------------------------

FAILS_AT = 3  # iterations before it do well, DDP has rebuilt its buckets by then


class Fragile(SGD):
    """Its step raises on a rank that is armed."""

    armed = False

    def step(self, closure=None):
        if Fragile.armed:
            raise ZeroDivisionError("broken on purpose")
        return super().step(closure)


def meet_at_the_end(who: str) -> None:
    """Nobody leaves before all have raised: closed connections would tell the others, not what is tested here."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"raised/{who}", "yes")
    store.wait([f"raised/{rank}" for rank in range(dist.get_world_size())])


def one_rank_raises(rank: int, world: int, hook: str, where: str) -> tuple[str, str, float]:
    twins = HookTwins(Fragile, hook=hook, zero={"bucket_cap_mb": SMALL_CAP}, lr=0.1)
    ours = twins.ours
    twins.iterate(FAILS_AT)
    if rank == 1 and where == "step":
        Fragile.armed = True
    batch = torch.ones(4, 3) if rank == 1 and where == "forward" else batch_of(rank, 9)
    start = time.monotonic()
    error = error_of(lambda: ours.backward(batch), f"rank {rank}")
    meet_at_the_end(str(rank))
    return type(error).__name__, str(error), time.monotonic() - start


@pytest.mark.parametrize(
    ("hook", "where"),
    [
        ("at the end", "forward"),
        pytest.param("interleaved", "forward", marks=pytest.mark.again),  # these wait for the same time-out
        ("interleaved", "step"),
        pytest.param("at the end", "step", marks=pytest.mark.again),
    ],
)
def test_a_rank_that_raises_makes_the_others_raise_within_the_timeout(hook, where):
    """The rank that failed stays alive, as one in a debugger or an exception handler does."""
    told = run_ranks(one_rank_raises, 3, hook, where, timeout=40, pg_timeout=5)
    if where == "step":
        assert "broken on purpose" in told[1][1]
    for rank in (0, 2):
        assert told[rank][0] in ("RuntimeError", "GatherFailed", "DistBackendError"), told[rank]
        assert told[rank][2] < 20


def one_rank_freezes(rank: int, world: int, hook: str) -> str:
    twins = HookTwins(SGD, hook=hook, ddp={"find_unused_parameters": True}, lr=0.1)
    twins.iterate(FAILS_AT)
    twins.zero.zero_grad()
    if rank == 1:
        twins.ours.ddp.module.layers[1].requires_grad_(False)
    error = error_of(lambda: twins.ours.backward(batch_of(rank, 9)), f"rank {rank}")
    meet_at_the_end(str(rank))
    return f"{type(error).__name__}: {error}"


def test_a_parameter_that_is_frozen_on_one_rank_only_is_an_error_on_every_rank():
    told = run_ranks(one_rank_freezes, 3, "interleaved", timeout=40, pg_timeout=5)
    assert "requires_grad of parameter" in told[1]


def one_rank_leaves(rank: int, world: int, hook: str, folder: str, how: str) -> None:
    calls = [0]

    def inner(state, bucket):
        calls[0] += 1
        if rank == 1 and how == "killed between two buckets" and len(counts) == FAILS_AT and bucket.index() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return allreduce_hook(state, bucket)

    counts: list[int] = []
    twins = HookTwins(SGD, hook=hook, inner=inner, zero={"bucket_cap_mb": SMALL_CAP}, lr=0.1)
    for _ in range(FAILS_AT):
        twins.iterate(1)
        counts.append(calls[0])
    if rank == 1 and how == "exits after an exception":
        raise ZeroDivisionError("broken on purpose")
    start = time.monotonic()
    error = error_of(lambda: twins.ours.backward(batch_of(rank, 9)), f"rank {rank}")
    Path(folder, str(rank)).write_text(f"{time.monotonic() - start} {type(error).__name__} {error}")


@pytest.mark.parametrize("how", ["killed between two buckets", "exits after an exception"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_rank_that_is_gone_makes_the_others_raise_at_once(hook, how, tmp_path):
    with pytest.raises(AssertionError, match="broken on purpose" if "exits" in how else "died with exit code -9"):
        run_ranks(one_rank_leaves, 4, hook, str(tmp_path), how, timeout=90, pg_timeout=60, fresh=True)
    survivors = {path.name: path.read_text().split(maxsplit=2) for path in tmp_path.iterdir()}
    assert survivors.keys() == {"0", "2", "3"}
    for seconds, kind, text in survivors.values():
        assert float(seconds) < 45, "found out by a timeout only"
        assert kind in ("RuntimeError", "GatherFailed", "DistBackendError"), text
