"""Ranks that fail or leave: all are told who and how, soon, and nothing goes on as if it had not been.

A rank whose local optimizer raises leaves the step. What of it the others have updated, it has not; so parameters and
states do not fit together any more, and nobody may train, compare or collect them as if they did.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from shardstep import ZeroRedundancyOptimizer, checkpoint
from tests.differential.sides import rounded
from tests.harness import run_ranks
from tests.oracle import error_of, parameters, train

LONG = 60  # seconds: the time-out of the process group
SOON = 15
AGAIN = "Start the processes again, from a checkpoint"
BROKEN = "ArithmeticError: broken on purpose"
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "sharded, masters": {"shard_gradients": True, "master_weights": torch.float32},
    "remainders": {"master_weights": "remainder"},
    "views": {"parameters_as_bucket_view": True},
    "lazy": {"lazy_gather": True},
}


class Fragile(torch.optim.AdamW):
    """Raises at one of its calls, of which there is one per bucket: before it has updated that, or after."""

    calls, fails_at, fails_late = 0, 0, False

    def step(self, closure: Any = None) -> None:
        Fragile.calls += 1
        if self.calls == self.fails_at and not self.fails_late:
            raise ArithmeticError("broken on purpose")
        super().step(closure)
        if self.calls == self.fails_at:
            raise ArithmeticError("broken on purpose")

    def train(self) -> None:
        """As schedule-free optimizers have it."""

    def eval(self) -> None:
        pass


class Program:
    """Six buckets, of which every rank owns a part. Gradients are the same on all ranks: nobody has to average them."""

    def __init__(self, mode: str) -> None:
        self.params = [Parameter(torch.full((24, 24), 1.0 + n / 8, dtype=torch.bfloat16)) for n in range(6)]
        self.opt = ZeroRedundancyOptimizer(self.params, Fragile, bucket_cap_mb=1200 / 2**20, lr=0.1, **MODES[mode])

    def iterate(self) -> None:
        self.opt.zero_grad()
        sum(param.float().square().sum() for param in self.params).backward()
        self.opt.step()
        self.opt.wait_for_parameters()

    def break_at(self, bucket: int, late: bool = False) -> None:
        Fragile.fails_at, Fragile.fails_late = Fragile.calls + bucket if bucket else 0, late


def outcome(call: Callable[[], Any]) -> str:
    """What it ends with: its error, or nothing."""
    try:
        call()
    except (ArithmeticError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def differently(rank: int, world: int, mode: str, places: tuple[int, ...], late: bool) -> tuple[list[str], float]:
    """``places``: the bucket at which the optimizer of each rank raises; 0: at none."""
    program = Program(mode)
    opt, saved = program.opt, program.opt.state_dict()
    program.iterate()
    program.iterate()
    program.break_at(places[rank], late)
    start = time.monotonic()
    calls = (
        program.iterate,
        opt.check_replicas,
        lambda: opt.full_state(program.params[0]),
        opt.consolidate_state_dict,
        lambda: opt.load_state_dict(saved),
        program.iterate,
    )
    return [outcome(call) for call in calls], time.monotonic() - start


@pytest.mark.parametrize(
    ("mode", "places", "late"),
    [
        ("default", (4, 0, 2), True),
        ("sharded, masters", (2, 5), False),
        *(pytest.param(mode, (2, 5, 0), False, marks=pytest.mark.long) for mode in ("remainders", "views", "lazy")),
    ],
)
def test_ranks_that_raise_at_different_buckets_are_all_told_and_nothing_goes_on(mode, places, late):
    first = min(range(len(places)), key=lambda rank: places[rank] or 100)
    for told, seconds in run_ranks(differently, len(places), mode, places, late, pg_timeout=LONG, fresh=True):
        assert seconds < SOON, told
        assert BROKEN in told[0], told
        for text in told[1:]:
            assert AGAIN in text, told
            assert f"rank {first} failed before, in step: {BROKEN}" in text, told


def alike(rank: int, world: int) -> None:
    """All ranks raise at the same bucket: the next step goes on, and ends with the same parameters everywhere."""
    for mode in MODES:
        for late in (False, True):
            program = Program(mode)
            opt, param = program.opt, program.params[0]
            program.iterate()
            program.break_at(3, late)
            assert BROKEN in outcome(program.iterate), mode
            if not late:  # else the bucket was updated by its owners, and not sent
                opt.check_replicas()
            steps = opt.full_state(param)["step"]
            program.iterate()
            opt.check_replicas()
            assert opt.full_state(param)["step"] == steps + 1
            for one in program.params if MODES[mode].get("master_weights") else ():
                assert torch.equal(one.detach(), rounded(opt.full_state(one)["master_weight"], torch.bfloat16)), mode


def test_after_ranks_raised_at_the_same_bucket_training_goes_on_in_every_mode():
    run_ranks(alike, 3, pg_timeout=20)


def switched(rank: int, world: int, folder: Path) -> None:
    program = Program("default")
    program.iterate()
    program.break_at(3)
    error_of(program.iterate)
    program.opt.eval()
    text = str(error_of(lambda: checkpoint.save(folder / "c", program.opt)))
    assert "expects an optimizer whose last step was completed" in text
    program.opt.train()
    program.iterate()
    checkpoint.save(folder / "c", program.opt)


def test_train_and_eval_complete_no_step_that_failed_before(tmp_path):
    run_ranks(switched, 2, tmp_path)


def leaves(rank: int, world: int) -> float:
    params = parameters()
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=0.1)
    train(optimizer, params, range(2))
    dist.barrier()
    if rank == 1:
        return 0.0
    start = time.monotonic()
    assert "the parameters could not be gathered" in str(error_of(lambda: train(optimizer, params, range(1))))
    return time.monotonic() - start


def test_a_rank_that_leaves_without_a_word_makes_the_others_raise_at_once():
    assert max(run_ranks(leaves, 3, pg_timeout=LONG, fresh=True)) < SOON
