"""What happens between backward and step under DDP's hooks, as no operation of ``tests/differential`` has it.

Gradients that are changed by hand, freezing without wrapping anew, and Join contexts. A trial of the differential
harness has both sides: ours, and DDP with the plain optimizer. It compares to the tolerance that it argues for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.algorithms.join import Join
from torch.optim.lr_scheduler import ExponentialLR

from tests.differential.configurations import Configuration
from tests.differential.programs import AddGroup, Backward, Operation, Step, Uneven, ZeroGrad
from tests.differential.sides import Side
from tests.differential.trial import Trial
from tests.harness import run_ranks
from tests.oracle import error_of

BOTH = (False, True)


def trial(world: int, mode: str, **axes: Any) -> Trial:
    return Trial(Configuration(mode=mode, ranks=world, ddp_cap=0.0005, **axes), Path("unused"))


def do(t: Trial, *operations: Operation | Callable[[Trial], None]) -> None:
    """The harness compares after each of its own operations."""
    for operation in operations:
        t._do(operation) if isinstance(operation, Operation) else operation(t)


# --- gradients ------------------------------------------------------------------------------------------------------


def forward(t: Trial) -> None:
    """In the second one DDP rebuilds its buckets, and with gradient_as_bucket_view moves ``param.grad`` there."""
    t.losses = [side.loss(Backward(), t.number) for side in t.sides]  # type: ignore[attr-defined]


def backward_of_it(t: Trial) -> None:
    for loss in t.losses:  # type: ignore[attr-defined]
        loss.backward()


def drop_one(t: Trial) -> None:
    for side in t.sides:
        side.model.before.weight.grad = None


def halve(t: Trial) -> None:
    for side in t.sides:
        for _, param in side.params():
            param.grad.mul_(0.5)


BACKWARD, IN_NO_SYNC = Backward(), Backward(sync=False)
ITERATION = (ZeroGrad(), BACKWARD, Step())
ROUTES = {
    "a forward before zero_grad": (BACKWARD, forward, ZeroGrad(), backward_of_it),
    "a forward that adds": (BACKWARD, forward, backward_of_it),
    "a validation before the step": (BACKWARD, forward),
    "zeros after no_sync": (BACKWARD, IN_NO_SYNC, ZeroGrad(set_to_none=False, by="model"), BACKWARD),
    "cleared after no_sync": (BACKWARD, IN_NO_SYNC, ZeroGrad(by="model"), BACKWARD, BACKWARD),
    "one is dropped": (BACKWARD, drop_one, BACKWARD),
    "halved": (BACKWARD, halve, BACKWARD),
    "halved after no_sync": (BACKWARD, IN_NO_SYNC, halve, BACKWARD),  # what is not reduced yet is halved, too
}


def routes(rank: int, world: int, as_view: bool) -> None:
    for name, route in ROUTES.items():
        t = trial(world, "under DDP", gradient_views=as_view)
        t.exact = False
        try:
            do(t, *(ITERATION * 2 if forward not in route else ()), ZeroGrad(), *route)
            t._compare_gradients()
            do(t, Step(), *ITERATION)
        except Exception as error:
            error.add_note(name)
            raise


@pytest.mark.parametrize("as_view", BOTH)
def test_gradients_are_ddps_whatever_was_done_before_the_reduction(as_view):
    run_ranks(routes, 3, as_view)


def far_behind(rank: int, world: int) -> None:
    t = trial(world, "under DDP", gradient_views=True, cap=0.0003)  # more buckets than may be under way
    do(t, AddGroup(), *ITERATION, *ITERATION, ZeroGrad())  # (what no optimizer has, DDP itself waits for)
    for number in range(2):
        losses = [side.loss(BACKWARD, 10 + number) for side in t.sides]
        losses[0].backward()
        time.sleep(6 if rank == 1 and number == 0 else 0)
        losses[1].backward()
    t.exact = False
    t._compare_gradients()
    do(t, Step())


@pytest.mark.long
def test_gradients_that_a_rank_could_not_send_before_the_next_backward_are_not_lost():
    """A backward waits five seconds for a rank that is late. Then DDP fills its buffers anew in the next one."""
    run_ranks(far_behind, 2)


# --- frozen without wrapping anew -----------------------------------------------------------------------------------


def freeze(t: Trial, *names: str) -> None:
    """Only these; DDP stays as it is."""
    for side in t.sides:
        for name, param in side.model.named_parameters():
            param.requires_grad_(not name.startswith(names))


def step(t: Trial) -> None:
    """As ``Step``, but what is frozen and holds a gradient may be written to."""
    if not t.config.steps_in_backward:
        t.plain.step()
    t.ours.step()
    t._compare_weights()


def frozen_in_place(rank: int, world: int, mode: str, as_view: bool) -> None:
    options: dict[str, Any] = {"shard": "tensor", "cap": 0.0003, "find_unused": True, "gradient_views": as_view}
    t = trial(world, mode, **options)
    t.exact = False
    some = Backward(skip=(1,), only=0)
    do(t, *ITERATION)
    freeze(t, "branches.0", "after.bias")
    do(t, BACKWARD, BACKWARD, step)  # they hold their last gradients
    do(t, ZeroGrad(set_to_none=False), BACKWARD, step, ZeroGrad(), some, Step())
    freeze(t, "branches", "before", "after")  # one number is left: two ranks have nothing to update
    do(t, *ITERATION, ZeroGrad(), Uneven((1, 2)))
    freeze(t, "branches.2")
    do(t, ZeroGrad(), some, Step(), *ITERATION)


@pytest.mark.parametrize(
    ("mode", "as_view"),
    [
        ("hook", False),
        ("interleaved", True),
        ("under DDP", False),
        ("under DDP", True),
        ("hook scattering", True),
        ("interleaved scattering", False),
    ],
)
def test_parameters_that_are_frozen_while_ddp_goes_on_knowing_them_hold_up_nothing(mode, as_view):
    """With find_unused_parameters DDP hands them over. What holds a gradient is stepped, as in torch."""
    run_ranks(frozen_in_place, 3, mode, as_view, timeout=40, pg_timeout=10)


# --- Join -----------------------------------------------------------------------------------------------------------


def plainly(side: Side, number: int) -> None:
    side.zero_grad()
    side.backward(BACKWARD, number)
    side.step()


def clipped(side: Side, number: int) -> None:
    side.zero_grad()
    side.backward(BACKWARD, number)
    side.clip_in_join(0.1)
    side.step()


def scaled(side: Side, number: int) -> None:
    side.zero_grad()
    side.backward(Backward(scaled=True), number)
    side.scaler.unscale_(side.optimizer)
    side.scaler.step(side.optimizer)
    side.scaler.update()


def joined(rank: int, world: int, mode: str, loop: Callable[[Side, int], None], with_ours: bool) -> None:
    for by_initial in BOTH:
        t = trial(world, mode)
        t.exact = False
        for side in t.sides:
            # (A stepping hook steps with the options of its own rank, as around every other hook.)
            scheduler = ExponentialLR(side.optimizer, 1.0 if t.config.steps_in_backward else 0.8)
            joinables = side.joinables() if with_ours else [side.wrapped]
            with Join(joinables, divide_by_initial_world_size=by_initial):
                for number in range((2, 0, 5)[rank]):
                    loop(side, number)
                    scheduler.step()
        t._spread_plain(2)
        t._compare_weights()
        t.ours.optimizer.check_replicas()


@pytest.mark.parametrize(
    ("mode", "loop", "with_ours"),
    [
        ("under DDP", clipped, True),
        ("under DDP", scaled, True),
        ("hook", plainly, True),
        ("interleaved", plainly, False),  # the optimizer need not be in the context
        ("interleaved scattering", plainly, True),
    ],
)
def test_uneven_inputs_end_in_the_weights_of_ddps_join(mode, loop, with_ours):
    """Divided by all ranks, or by those that have inputs; a scheduler, which only these step."""
    run_ranks(joined, 3, mode, loop, with_ours, timeout=40, pg_timeout=10)


def without_the_optimizer(rank: int, world: int) -> str:
    t = trial(world, "under DDP")

    def train() -> None:
        with Join([t.ours.wrapped]):
            for number in range(1 + rank):
                plainly(t.ours, number)

    return str(error_of(train, "DDP alone in a Join context"))


def test_an_optimizer_that_is_not_in_the_join_context_is_missed():
    assert "Use Join([ddp, optimizer])" in run_ranks(without_the_optimizer, 2, pg_timeout=3, fresh=True)[0]
