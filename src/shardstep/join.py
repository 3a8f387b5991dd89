"""Uneven inputs (torch's Join): a rank that has run out of batches still owns a share of the optimizer.

It takes part in every step of the others. It has no gradients of its own by then, and stale ones in ``.grad``, so a
rank that is still active lends it the gradients of its pieces, and the options, which a scheduler may have changed.
With ``shard_gradients`` it also takes part in their reductions, with nothing to add.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from shardstep.comm import collectives
from shardstep.comm.codec import decode, dtype_name, dtype_of, encode
from shardstep.comm.process_group import Group, ProcessGroup
from shardstep.comm.rank_groups import RankGroups
from shardstep.comm.streams import SideStreams
from shardstep.engine import Engine
from shardstep.grads.attendance import Activity, Call, JoinEnded, Progress, Roll, expecting_a_step
from shardstep.grads.source import GradientSource, StepGradients
from shardstep.layout.specs import Layout, Piece
from shardstep.params.local_optimizer import options_of
from shardstep.params.sharded_parameters import ShardedParameters


class Uneven(Protocol):
    """The optimizer, as far as this file needs it: torch's Joinable."""

    engine: Engine
    param_groups: list[dict[str, Any]]

    def zero_grad(self, set_to_none: bool = True) -> None: ...


class JoinAttendance:
    """Who takes part in the steps and reductions of one optimizer (see ``grads/attendance.py``)."""

    def __init__(self, optimizer: Any, ranks: RankGroups) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._group = ranks.everyone
        self._streams = SideStreams()  # for comparisons that wait for no computation
        self.divides_by_initial_world_size = True
        self._left: Any = None  # torch's configuration of the context that all ranks have left together

    @property
    def is_uneven(self) -> bool:
        config = self._config
        return config is not None and config.enable

    @property
    def may_be_incomplete(self) -> bool:
        return self.is_uneven and self._config is not self._left

    @property
    def _config(self) -> Any:
        optimizer = self._optimizer()
        return optimizer._join_config if optimizer is not None else None

    @property
    def source(self) -> GradientSource:
        """Where the optimizer's gradients come from now."""
        optimizer = self._optimizer()
        assert optimizer is not None, "it steps"
        return optimizer.engine.source

    def leave(self) -> None:
        """All ranks are out of inputs, so all are here again.

        torch leaves the optimizer enabled, and a context that is entered once more does not say so. Steps therefore go
        on asking who is there, until another context is made.
        """
        self._left = self._config

    def notify(self) -> None:
        """Tell the ranks without inputs that this one goes on. JoinEnded if the context is to end early."""
        optimizer = self._optimizer()
        try:
            work = Join.notify_join_context(optimizer)  # type: ignore[arg-type]
        except RuntimeError as error:
            if not self._config.throw_on_early_termination:
                raise
            raise JoinEnded(str(error)) from error
        if work is not None and optimizer is not None and optimizer.join_device.type != "cpu":
            work.wait()  # in stream order, not on the host: its memory is given back now

    def begin_step(self, source: GradientSource, sharded: ShardedParameters, has_closure: bool) -> StepGradients:
        """The gradients of a step that begins: in a Join context they are lent."""
        if self.is_uneven and has_closure and sharded.builder.moves_first:
            raise RuntimeError(
                "step in a Join context expects an optimizer that calls the closure first, but this one moves the "
                "parameters before, and a rank that has run out of inputs would not follow. Step without a closure."
            )
        in_backward = source.calls_roll and has_closure  # then the closure's backward calls first
        if not in_backward:
            self.notify()
        return LentGradients(sharded, self, notifies=in_backward) if self.is_uneven else source

    def call_roll(self, iteration: int, aborted: bool, progress: Progress) -> Roll:
        """Collective. Before a round of reductions. Called on ranks that have inputs."""
        self.notify()
        if self.is_uneven:
            return self.roll_of(self.meet(Call(Activity.ROUND, iteration, aborted, progress.sent)))
        if not aborted:
            return Roll(self._group.world_size)
        # The computation here may wait for a bucket that another rank sends only when it has heard of this one.
        with self._streams.of(self._group.wire_device).current():
            everyone = [Progress(*row) for row in collectives.all_gather_ints(self._group, progress)]
        most_sent = max(one.sent for one in everyone)
        return Roll(self._group.world_size, most_sent=most_sent, all_alike=len(set(everyone)) == 1)

    def answer_roll(self, sent: int) -> Roll:
        """Collective. Before a round of reductions, on a rank without inputs whose DDP takes part in it."""
        return self.roll_of(self.meet(Call(Activity.JOINED, sent=sent)))

    def roll_of(self, everyone: Sequence[Call]) -> Roll:
        """What the calls of all ranks say about a round."""
        active = sum(call.kind != Activity.JOINED for call in everyone)
        most_sent = max(call.sent for call in everyone) if any(call.aborted for call in everyone) else None
        divisor = self._group.world_size if self.divides_by_initial_world_size else active
        return Roll(divisor, max(call.iteration for call in everyone), most_sent, active < len(everyone))

    def announce_clipping(self, max_norm: float, order: float) -> None:
        """Collective. In a Join context: have the ranks without inputs take part in clipping."""
        self._announce(Activity.CLIP, max_norm, order)

    def announce_unscaling(self, scale: float, index: int) -> None:
        """Collective. In a Join context: have the ranks without inputs take part in unscaling."""
        self._announce(Activity.UNSCALE, scale, index)

    def _announce(self, kind: Activity, first: float, second: float) -> None:
        if self.is_uneven:
            self.notify()
            self.meet(Call.of(kind, first, second))

    def meet(self, call: Call) -> list[Call]:
        """Collective. What everybody does now, by rank."""
        everyone = [Call(*row) for row in collectives.all_gather_ints(self._group, call)]
        if any(one.kind == Activity.JOINED for one in everyone):
            self._left = None
        return everyone


class Shadow(JoinHook):
    """Takes part, on a rank that has run out of inputs, in what the others do."""

    def __init__(self, optimizer: Uneven, attendance: JoinAttendance) -> None:
        self._optimizer, self._attendance = optimizer, attendance

    def main_hook(self) -> None:
        source = self._optimizer.engine.source
        if source.steps_in_backward:  # DDP's shadow calls the hook
            return
        everyone, call = self._meet(source)
        while call.kind not in (Activity.JOINED, Activity.STEP):
            source.take_part(call, self._attendance.roll_of(everyone), self._params)
            if not source.reduces_in_ddp:  # then everything the others do has a turn of its own
                return
            everyone, call = self._meet(source)
        self._step(everyone)

    def _meet(self, source: GradientSource) -> tuple[list[Call], Call]:
        """What everybody does now, and what the ranks with inputs do."""
        with expecting_a_step(under_ddp=source.reduces_in_ddp or not source.calls_roll):
            everyone = self._attendance.meet(Call(Activity.JOINED, sent=source.sent))
        return everyone, next((call for call in everyone if call.kind != Activity.JOINED), Call(Activity.JOINED))

    def post_hook(self, is_last_joiner: bool) -> None:
        self._optimizer.engine.source.leave_join()
        self._attendance.leave()

    @property
    def _params(self) -> list[Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    def _step(self, everyone: list[Call]) -> None:
        engine = self._optimizer.engine
        borrowed = LentGradients(engine.sharded, self._attendance, everyone=everyone)
        engine.step(self._optimizer.param_groups, source=borrowed)
        if engine.sharded.builder.consumes:
            self._optimizer.zero_grad()


class UnevenInputs(Joinable):
    """The part of ``ZeroRedundancyOptimizer`` that torch's Join sees."""

    engine: Engine
    _attendance: JoinAttendance

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that shadows this rank's part once it has run out of inputs. List DDP before the optimizer.

        With ``shard_gradients`` there is no DDP, and ``divide_by_initial_world_size`` is taken as DDP takes it.
        """
        self._attendance.divides_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return Shadow(cast(Uneven, self), self._attendance)

    @property
    def attendance(self) -> JoinAttendance:
        """Who takes part in steps and reductions. For the DDP hooks, no part of the API."""
        return self._attendance

    @property
    def in_join_context(self) -> bool:
        """Whether ranks may have run out of inputs: in a Join context, until all ranks have left it."""
        return self._attendance.may_be_incomplete

    @property
    def join_device(self) -> torch.device:
        """On which device torch's Join counts the ranks that still have inputs."""
        return next((param.device for param in self.engine.sharded.params.values()), torch.device("cpu"))

    @property
    def join_process_group(self) -> ProcessGroup:
        """Among which ranks torch's Join counts: those that share the state; of a mesh all."""
        group = self.engine.sharded.ranks.everyone.process_group
        if group is None:
            raise RuntimeError(
                "Join expects a process group, whose ranks it counts, but the optimizer was built without one. Call "
                "torch.distributed.init_process_group first, or leave Join out: one process has no uneven inputs."
            )
        return group


class LentGradients(StepGradients):
    """The gradients of one step in a Join context: ranks that have inputs lend theirs to ranks that have not."""

    may_be_lazy = False  # a rank without inputs does not know whether the others have a closure, and gather at once

    def __init__(
        self,
        sharded: ShardedParameters,
        attendance: JoinAttendance,
        *,
        everyone: list[Call] | None = None,
        notifies: bool = False,
    ) -> None:
        """``everyone``: on a rank without inputs, what the ranks do. ``notifies``: ranks without inputs do not know."""
        self._sharded, self._attendance = sharded, attendance
        self._everyone, self._notifies = everyone, notifies
        self._is_prepared = False
        self._borrowed: dict[int, Tensor] | None = None
        self._own: dict[int, Tensor | None] = {}

    def prepare(self, param_groups: Sequence[dict[str, Any]]) -> None:
        if self._is_prepared:  # a closure may be evaluated several times
            return
        self._is_prepared = True
        if self._notifies:
            self._attendance.notify()
        everyone = self._everyone or self._attendance.meet(Call(Activity.STEP))
        # Every rank has the reduced gradients of its pieces itself, if we reduce them.
        params = {} if self._attendance.source.calls_roll else self._sharded.params
        borrowed = _lend(self._sharded.ranks, everyone, self._sharded.layout, params, param_groups)
        self._borrowed = borrowed if params else None

    def bind(self, positions: Iterable[int]) -> None:
        if self._borrowed is None:
            self._attendance.source.bind(positions)
            return
        pieces = self._sharded.pieces
        for index in pieces.tensors:
            self._own[index] = pieces.gradient(index)
            pieces.set_gradient(index, self._borrowed.get(index))

    def release(self) -> None:
        if self._borrowed is None:
            self._attendance.source.release()
        for index, gradient in self._own.items():
            self._sharded.pieces.set_gradient(index, gradient)

    def stepped(self) -> None:
        self._attendance.source.stepped()


def _pairs(everyone: Sequence[Call]) -> Iterator[tuple[int, int]]:
    """(lender, borrower): who gives gradients to whom. None while nobody has joined."""
    lenders = [rank for rank, call in enumerate(everyone) if call.kind != Activity.JOINED]
    borrowers = [rank for rank, call in enumerate(everyone) if call.kind == Activity.JOINED]
    return ((lenders[i % len(lenders)], borrower) for i, borrower in enumerate(borrowers) if lenders)


def _lend(
    ranks: RankGroups,
    everyone: Sequence[Call],
    layout: Layout,
    params: Mapping[int, Tensor],
    param_groups: Sequence[dict[str, Any]],
) -> dict[int, Tensor] | None:
    """Collective. Give or take gradients of ``params`` and options. What this rank borrowed, by parameter; or None.

    Borrowed options are written into ``param_groups``.
    """
    borrowed, group = None, ranks.everyone
    for lender, borrower in _pairs(everyone):
        pieces = list(layout.pieces(ranks.shard_ranks[borrower])) if params else []  # of the borrower
        if group.rank == lender:
            _give(group, borrower, pieces, params, param_groups)
        elif group.rank == borrower:
            borrowed = _take(group, lender, pieces, params, param_groups)
    return borrowed


def _give(
    group: Group,
    borrower: int,
    pieces: Sequence[Piece],
    params: Mapping[int, Tensor],
    param_groups: Sequence[dict[str, Any]],
) -> None:
    has_gradient = [params[piece.param].grad is not None for piece in pieces]
    tensors: list[Tensor] = []

    def lift(tensor: Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    options = [encode(_sendable(param_group), lift) for param_group in param_groups]
    values = [[dtype_name(tensor.dtype), tensor.tolist()] for tensor in tensors]
    message = {"has_gradient": has_gradient, "options": options, "values": values}
    collectives.move_json(group, message, group.rank, borrower)
    gradients = ((piece, params[piece.param].grad) for piece in pieces)
    lent = [grad.detach().reshape(-1)[piece.start : piece.stop] for piece, grad in gradients if grad is not None]
    collectives.copy_together(group, lent, group.rank, borrower)


def _take(
    group: Group,
    lender: int,
    pieces: Sequence[Piece],
    params: Mapping[int, Tensor],
    param_groups: Sequence[dict[str, Any]],
) -> dict[int, Tensor]:
    message = collectives.move_json(group, None, lender, group.rank)
    values = [torch.tensor(value, dtype=dtype_of(dtype)) for dtype, value in message["values"]]
    for own, options in zip(param_groups, message["options"], strict=True):
        _adopt(own, decode(options, values))
    present = [piece for piece, is_there in zip(pieces, message["has_gradient"], strict=True) if is_there]
    likes = [params[piece.param] for piece in present]
    spans = [
        torch.empty(piece.numel, dtype=like.dtype, device=like.device)
        for piece, like in zip(present, likes, strict=True)
    ]
    collectives.copy_together(group, spans, lender, group.rank)
    return {
        piece.param: span.view(like.shape) if piece.whole else span
        for piece, like, span in zip(present, likes, spans, strict=True)
    }


def _sendable(group: dict[str, Any]) -> dict[str, Any]:
    """The options that can differ from step to step: numbers, texts, tensors and lists of them."""
    plain = (bool, int, float, str, Tensor, list, tuple)
    return {key: value for key, value in options_of(group).items() if isinstance(value, plain)}


def _adopt(group: dict[str, Any], options: dict[str, Any]) -> None:
    for key, value in options.items():
        own = group.get(key)
        if isinstance(own, Tensor) and isinstance(value, Tensor):
            own.copy_(value)  # the tensor may be shared with a scheduler or a captured graph
        else:
            group[key] = value
