"""A rank raises in its forward or backward, the batch is skipped on all ranks, training goes on.

Oracle: DDP with the plain optimizer that never saw the skipped batches. ``Raise`` of tests/differential is one failure
after a good step, in two places, and waits five seconds as it is built in; here ranks wait shorter, and fail in a row,
at several places, while gradients accumulate, and before parameters change.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardstep.grads import scheduler
from tests.beside import SMALL, WAYS, Beside, Side, batch
from tests.differential.models import Expected, Fault
from tests.harness import run_ranks
from tests.surroundings import choose

LIMITS = {"timeout": 90, "pg_timeout": 15}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"shard": "element", "bucket_cap_mb": SMALL},
    {"shard": "tensor", "bucket_cap_mb": SMALL, "gradient_buckets_in_flight": 1},
    {"bucket_cap_mb": 25},
    {"bucket_cap_mb": SMALL, "overlap_backward": False},
)


class Net(nn.Module):
    """``place``: forward, or backward before, between (in a re-entrant segment) or after the layers. See ``Fault``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5)).double()

    def forward(self, x: Tensor, place: str, what: str) -> Tensor:
        def fault(value: Tensor, here: str) -> Tensor:
            return Fault.apply(value, ("forward" if here == "forward" else what) if here == place else "")

        def middle(value: Tensor) -> Tensor:
            return torch.tanh(self.layers[3](fault(torch.tanh(self.layers[2](value)), "middle")))

        x = fault(x.clone().requires_grad_(), "input")
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        x = checkpoint(middle, x, use_reentrant=True)
        return fault(self.layers[4](fault(x, "forward")), "loss")


def backward(side: Side, number: int, place: str = "", what: str = "backward") -> bool:
    """Whether it went well."""
    try:
        side.called(batch(number, 4, 6), place, what).square().mean().backward()
    except Expected:
        return False
    assert place in ("", "after") or what == "late", f"{place} was not reached: this shows nothing"
    return place != "after"


def went_well(ok: bool) -> bool:
    """What a careful program does: a collective of its own, on the same group."""
    flag = torch.tensor([int(ok)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


# For each step its micro-batches, and for each of these who fails where. A failure gives up the whole step.
STEPS: tuple[tuple[dict[int, str], ...], ...] = (
    ({1: "forward"},),
    ({1: "loss"},),
    ({0: "middle"},),
    ({},),
    ({2: "input"},),
    ({0: "forward", 1: "middle"},),
    ({},),
    ({0: "loss", 1: "input", 2: "middle"},),
    ({0: "forward", 1: "forward", 2: "forward"},),
    ({0: "after", 1: "after", 2: "after"},),
    ({},),
    ({}, {1: "middle"}, {}),
    ({}, {}),
    ({}, {}, {0: "loss"}),
    ({2: "input"}, {}),
    ({}, {}, {}),
    ({},),
)
FREEZES, UNFREEZES = 5, 8  # after these, of which nothing was kept


def train(rank: int, world: int, transport: str, flow: str) -> None:
    choose(transport)
    scheduler.PATIENCE = 0.12
    for settings, sync in zip(SETTINGS, (True, False, True, False), strict=True):
        both, held = Beside(Net, ours=settings, lr=0.3, momentum=0.9), set()
        ours, theirs = both
        for number, micro_batches in enumerate(STEPS):
            good = True
            for micro, failures in enumerate(micro_batches):
                with nullcontext() if sync or micro == len(micro_batches) - 1 else ours.no_sync():
                    ok = backward(ours, 10 * number + micro, failures.get(rank, ""))
                good = went_well(ok) if flow == "ranks tell each other" else not failures
                if not good:
                    break
            if good:
                theirs.optimizer.zero_grad()
                for micro in range(len(micro_batches)):
                    backward(theirs, 10 * number + micro)
                for side in both:
                    side.optimizer.step()
                held.add((ours.optimizer.memory().gradients, ours.model.layers[4].weight.requires_grad))
            ours.optimizer.zero_grad()
            assert all(param.grad is None for param in ours.params)
            if number % 2 and not good:  # without gradients: nothing that was given up may be waited for
                assert ours.optimizer.clip_grad_norm_(1.0).item() == 0
                ours.optimizer.step()
            if number in (FREEZES, UNFREEZES):
                for side in both:
                    side.model.layers[4].requires_grad_(number == UNFREEZES)
                theirs.called = DistributedDataParallel(theirs.model)
            both.check(f"{settings}, step {number}")
        assert len(held) == 2, f"what was given up leaves memory behind: {held}"
        ours.optimizer.check_replicas()


@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
@pytest.mark.parametrize("flow", ["ranks tell each other", "zero_grad at once"])
def test_batches_that_fail_on_some_ranks_are_as_if_they_had_not_been(flow: str, transport: str) -> None:
    """In a row and in the first iteration; a bucket of a skipped batch must reach no sum."""
    run_ranks(train, 3, transport, flow, **LIMITS)


def be_late(rank: int, world: int, transport: str, way: str) -> None:
    """The others leave their backward before all is reduced; the next micro-batch must not go along in that round."""
    choose(transport)
    scheduler.PATIENCE = 0.01  # a fault sleeps for 0.05 s
    for settings in SETTINGS if way == "shard_gradients" else SETTINGS[:1]:
        both = Beside(Net, ours=settings, way=way, lr=0.3)
        for number, place in enumerate(("loss", "middle", "input")):
            for side in both:
                side.optimizer.zero_grad()
                backward(side, number, place if rank == number % world and side is both.ours else "", "late")
                with side.no_sync() if side is both.ours and number % 2 else nullcontext():
                    backward(side, 10 + number)
                side.optimizer.step()
            both.check(f"{settings}, late at {place}")
        both.ours.optimizer.check_replicas()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transport", ["shared memory", "sockets"])
def test_a_rank_that_is_late_is_waited_for_by_the_step(transport: str, way: str) -> None:
    run_ranks(be_late, 2, transport, way, **LIMITS)
