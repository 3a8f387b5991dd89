"""One step over a placement: *update* this rank's pieces, *gather* the parameters, bucket by bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from shardstep.comm.consensus import Board
from shardstep.comm.shared_memory import MAX_IN_FLIGHT
from shardstep.params.all_gather import Exchange, Flight
from shardstep.params.local_optimizer import fire_post_hooks, fire_pre_hooks, unhooked_step
from shardstep.params.sharded_parameters import Placement


class GatherFailed(RuntimeError):
    """The parameters could not be gathered. What the ranks have sent each other since is unknown: nothing goes on."""


Closure = Callable[[], Any] | None


class Gathers:
    """The exchanges of one step: started one after the other, finished in the same order, few in the air at once."""

    def __init__(self, placement: Placement, board: Board, on_failure: Callable[[GatherFailed], None]) -> None:
        self._placement = placement
        self._board = board
        self._on_failure = on_failure  # told of every failure, also of those that another error hides
        self._in_flight: deque[tuple[int, Exchange, Flight]] = deque()

    @property
    def in_flight(self) -> list[int]:
        """The buckets under way, in the order in which they were started."""
        return [position for position, _, _ in self._in_flight]

    def start(self, position: int) -> None:
        """Start the exchange of a bucket. All ranks start them in the same order."""
        exchange = self._placement.exchanges[position]
        if exchange is None:
            return
        while len(self._in_flight) >= MAX_IN_FLIGHT or exchange.must_wait:
            self.finish_oldest()
        with record_function("shardstep::gather"):
            self._placement.started += 1
            try:
                self._in_flight.append((position, exchange, exchange.start()))
            except RuntimeError as error:
                raise self._failed(error) from error

    def finish(self) -> None:
        """Bring all ranks' parameters up to date with what was started."""
        while self._in_flight:
            self.finish_oldest()

    def land(self) -> None:
        """After an error: bring down what is in the air, so that nothing is written into memory that others have later.

        If all ranks failed at the same place, their parameters agree afterwards.
        """
        while self._in_flight:
            try:
                self.finish_oldest()
            except RuntimeError:  # the error that brought us here is the one to tell
                self._in_flight.clear()

    def finish_oldest(self) -> None:
        """Wait for the bucket that was started first, and put it where it belongs."""
        _, exchange, flight = self._in_flight.popleft()
        with record_function("shardstep::gather"):
            try:
                flight.handle.wait()
                exchange.finish(flight)
            except RuntimeError as error:
                raise self._failed(error) from error

    def _failed(self, error: RuntimeError) -> GatherFailed:
        failure = _explained(error, self._board)
        self._on_failure(failure)
        return failure


def update_and_gather(
    placement: Placement,
    optimizer: Optimizer,
    gathers: Gathers,
    board: Board,
    closure: Closure,
    kwargs: dict[str, Any],
    lazily: bool = False,
) -> Any:
    """Step the local optimizer and bring all ranks' parameters up to date. Return what the optimizer returned.

    A bucket travels while the next one is updated. With a closure or arguments, or if the optimizer may not be split,
    everything is updated first. ``lazily``: start with the buckets that the next forward needs first, and leave the
    last ones under way, in ``gathers``.
    """
    loss = None
    with failing_together(placement, board, gathers):
        kwargs = fire_pre_hooks(optimizer, kwargs)
        split = placement.splits and closure is None and not kwargs
        if not split:
            loss = update_all(optimizer, closure, kwargs)
        for position in reversed(placement.active_buckets) if lazily else placement.active_buckets:
            if split:
                update_bucket(placement, optimizer, position)
            gathers.start(position)
        if not lazily:
            gathers.finish()
        fire_post_hooks(optimizer, kwargs)
    return loss


@contextmanager
def failing_together(placement: Placement, board: Board, gathers: Gathers) -> Iterator[None]:
    """If a step fails in this context, the other ranks are told and what is in the air is brought down."""
    try:
        yield
    except Exception as error:
        clearer = placement.kind_error()
        board.fail("step", clearer or error)
        gathers.land()
        if clearer is not None:
            raise clearer from error
        raise


def gather(placement: Placement, gathers: Gathers) -> None:
    """Bring all ranks' parameters up to date with their owners'."""
    for position in placement.active_buckets:
        gathers.start(position)
    gathers.finish()


def update_bucket(placement: Placement, optimizer: Optimizer, position: int) -> None:
    """Step this rank's pieces of one bucket."""
    with record_function("shardstep::update"):
        placement.update_bucket(optimizer, position)


def update_all(optimizer: Optimizer, closure: Closure, kwargs: dict[str, Any]) -> Any:
    """One step of the local optimizer over everything. Its step need not know closures unless there is one."""
    step = unhooked_step(optimizer)
    with record_function("shardstep::update"):
        return step(**kwargs) if closure is None else step(closure=closure, **kwargs)


def _explained(error: RuntimeError, board: Board) -> GatherFailed:
    try:
        where = board.explain()
    except RuntimeError:  # the store is gone with its host; the first error is all there is to tell
        where = ""
    told = f" Meanwhile {where}. Call it on every rank, in the same order." if where else ""
    return GatherFailed(f"step: the parameters could not be gathered: {str(error).rstrip('.')}.{told}")
