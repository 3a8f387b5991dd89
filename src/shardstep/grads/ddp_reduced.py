"""Gradients that we reduce inside DDP's hook, and of which a rank keeps its share (``reduce_scatter_hook``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from shardstep.comm.consensus import RankConsensus
from shardstep.grads import loss_scale
from shardstep.grads.attendance import Attendance, step_is_missing
from shardstep.grads.ddp_scheduler import DdpScheduler
from shardstep.grads.hook_state import HookState, SteppedByHook
from shardstep.grads.reduced_gradients import ReducedGradients
from shardstep.grads.settings import ReduceSettings
from shardstep.params.sharded_parameters import ShardedParameters


class Feed(Protocol):
    """Who hands over DDP's buckets (``ddp_feed.py``)."""

    def check_params(self, params: Sequence[Tensor]) -> None:
        """ValueError if these are no parameters of the DDP module, or another optimizer has them."""

    def forget_buckets(self) -> None:
        """Parameters were added."""

    def tensors(self) -> list[Tensor]:
        """The memory of DDP's buckets."""


class DdpReducedGradients(SteppedByHook, ReducedGradients):
    """Sharded gradients under DDP. The step is made by ``step``, or with a stepping hook in backward."""

    reduces_in_ddp = True
    _scheduler: DdpScheduler  # type: ignore[assignment]

    def __init__(
        self, sharded: ShardedParameters, consensus: RankConsensus, attendance: Attendance, find_unused: bool
    ) -> None:
        """Collective. ``find_unused``: whether parameters may be unused in a backward."""
        settings = ReduceSettings(find_unused=find_unused)
        super().__init__(sharded, consensus, settings, attendance, broadcasts=False)
        self.feed: Feed | None = None
        self._awaits_step = False  # in a Join context: since a forward of DDP

    def _make_scheduler(self) -> DdpScheduler:
        return DdpScheduler(*self._parts)

    # --- for DDP's hook -------------------------------------------------------------------------------------------

    def begin(self, has_inputs: bool) -> None:
        """Collective. DDP hands over its first bucket; ``has_inputs``: of a backward of this rank."""
        self.follow()
        if not self._sharded.lies_as_placed():
            raise RuntimeError(
                "reduce_scatter_hook expects parameters that lie in memory as they did when DDP was built, but a "
                "memory format was changed. Build DDP and the optimizer again."
            )
        if has_inputs:
            self._scheduler.begin()
        else:
            with self._consensus.reporting("reduce_scatter_hook"):
                self._scheduler.begin_without_inputs()

    def take(self, gradients: Iterable[tuple[int, Tensor]], has_inputs: bool) -> None:
        """Collective. DDP has the gradients of these parameters, of this rank alone."""
        if has_inputs:
            self._scheduler.take(gradients)
        else:
            self._scheduler.take_zeros(gradients)

    def take_last(self) -> None:
        """Collective. That was DDP's last bucket."""
        self._scheduler.take_last()

    def begin_turn(self, reduces: bool) -> None:
        """DDP's forward begins; ``reduces``: not in its ``no_sync``. In a Join context that is a turn for all ranks.

        RuntimeError if a rank without inputs would wait in it for a step in vain.
        """
        if self._hook is not HookState.NONE or not self._attendance.may_be_incomplete:
            return
        if not reduces:
            raise step_is_missing("this one is in no_sync")
        if self._awaits_step and self._scheduler.someone_has_joined:
            raise step_is_missing("there was no step since the last one")
        self._awaits_step = True

    def stepped(self) -> None:
        super().stepped()
        self._awaits_step = False

    def leave_join(self) -> None:
        super().leave_join()
        self._awaits_step = False

    def begin_forward(self) -> None:
        """DDP has rebuilt its buckets, if it wanted to: what it has put on the parameters is of no use."""
        self._shards.restore_displaced()

    def end_backward(self) -> None:
        """DDP is done with the gradients on the parameters."""
        self._scheduler.end_backward()

    @property
    def divisor(self) -> int:
        """By which sums of this round are divided."""
        return self._scheduler.divisor or self._sharded.ranks.everyone.world_size

    # --- for a step in backward -----------------------------------------------------------------------------------

    def made(self) -> None:
        super().made()
        self._scheduler.steps_in_backward = True

    def reduced(self) -> Sequence[int]:
        """The buckets that were reduced in this backward, in order. The same on every rank."""
        return self._scheduler.reduced()

    def join(self) -> None:
        """On an accelerator: the current stream goes on when all reductions are over."""
        self._reducer.join()

    def bind_reduced(self, positions: Iterable[int]) -> None:
        """Give the pieces of buckets that were reduced their gradients, while others are under way.

        On an accelerator the current stream waits for these buckets, and for no others.
        """
        for position in positions:
            self._reducer.wait_for(position)
            self._shards.bind(position)

    def check_complete(self) -> None:
        """RuntimeError if DDP has not handed over a gradient. (It raises when the last bucket comes.)"""

    def unscale(self, like: Tensor, found_inf: Tensor, inverse_scale: Tensor) -> None:
        if self.steps_in_backward:
            raise loss_scale.stepped_already()
        super().unscale(like, found_inf, inverse_scale)

    # --- for the user ---------------------------------------------------------------------------------------------

    def extend(self) -> None:
        super().extend()
        if self.feed is not None:
            self.feed.forget_buckets()

    def no_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        raise RuntimeError("no_sync expects an optimizer with shard_gradients=True. Under DDP use no_sync of DDP.")

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *(self.feed.tensors() if self.feed is not None else [])]

    def check_params(self, params: Iterable[Any]) -> None:
        if self.feed is not None:
            self.feed.check_params(list(params))
