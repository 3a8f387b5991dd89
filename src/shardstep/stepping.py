"""One step over a placement: *update* this rank's pieces, *gather* the parameters, bucket by bucket."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch.autograd.profiler import record_function
from torch.optim import Optimizer

from shardstep.agreement import Board
from shardstep.buckets import Exchange, Flight
from shardstep.hostmemory import MAX_IN_FLIGHT
from shardstep.local import fire_post_hooks, fire_pre_hooks, unhooked_step
from shardstep.placement import Placement


class GatherFailed(RuntimeError):
    """The parameters could not be gathered. What the ranks have sent each other since is unknown: nothing goes on."""


Closure = Callable[[], Any] | None


def update_and_gather(
    placement: Placement, optimizer: Optimizer, board: Board, closure: Closure, kwargs: dict[str, Any]
) -> Any:
    """Step the local optimizer and bring all ranks' parameters up to date. Return what the optimizer returned.

    A bucket travels while the next one is updated. With a closure or arguments, or if the optimizer may not be split,
    everything is updated first.
    """
    loss = None
    in_flight: deque[tuple[Exchange, Flight]] = deque()
    try:
        kwargs = fire_pre_hooks(optimizer, kwargs)
        split = placement.splits and closure is None and not kwargs
        if not split:
            with record_function("shardstep::update"):
                loss = _update_all(optimizer, closure, kwargs)
        for position in placement.active_buckets:
            if split:
                with record_function("shardstep::update"):
                    placement.update_bucket(optimizer, position)
            exchange = placement.exchanges[position]
            if exchange is not None:
                if len(in_flight) == MAX_IN_FLIGHT:
                    _finish(*in_flight.popleft(), board)
                in_flight.append((exchange, _start(exchange, placement, board)))
        while in_flight:
            _finish(*in_flight.popleft(), board)
        fire_post_hooks(optimizer, kwargs)
    except Exception as error:
        clearer = placement.kind_error()
        board.fail("step", clearer or error)
        _land(in_flight)
        if clearer is not None:
            raise clearer from error
        raise
    return loss


def gather(placement: Placement, board: Board) -> None:
    """Bring all ranks' parameters up to date with their owners'."""
    for position in placement.active_buckets:
        exchange = placement.exchanges[position]
        if exchange is not None:
            _finish(exchange, _start(exchange, placement, board), board)


def _update_all(optimizer: Optimizer, closure: Closure, kwargs: dict[str, Any]) -> Any:
    """One step of the local optimizer over everything. Its step need not know closures unless there is one."""
    step = unhooked_step(optimizer)
    return step(**kwargs) if closure is None else step(closure=closure, **kwargs)


def _start(exchange: Exchange, placement: Placement, board: Board) -> Flight:
    with record_function("shardstep::gather"):
        placement.started += 1
        try:
            return exchange.start()
        except RuntimeError as error:
            raise _explained(error, board) from error


def _finish(exchange: Exchange, flight: Flight, board: Board) -> None:
    with record_function("shardstep::gather"):
        try:
            flight.handle.wait()
        except RuntimeError as error:
            raise _explained(error, board) from error
        exchange.finish(flight)


def _explained(error: RuntimeError, board: Board) -> GatherFailed:
    try:
        where = board.explain()
    except RuntimeError:  # the store is gone with its host; the first error is all there is to tell
        where = ""
    told = f" Meanwhile {where}. Call it on every rank, in the same order." if where else ""
    return GatherFailed(f"step: the parameters could not be gathered: {error}.{told}")


def _land(in_flight: deque[tuple[Exchange, Flight]]) -> None:
    """After an error: bring down what is in the air, so that nothing is written into memory that others have by then.

    If all ranks failed at the same place, their parameters agree afterwards.
    """
    for exchange, flight in in_flight:
        try:
            flight.handle.wait()
            exchange.finish(flight)
        except RuntimeError:  # the error that brought us here is the one to tell
            return
